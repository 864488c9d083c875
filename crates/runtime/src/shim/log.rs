//! The container's log in CRI's format: `<RFC3339 with nanoseconds> <stream> <F|P> <content>`.
//!
//! A line longer than [`LINE_LIMIT`] becomes several partial entries. Text without a final newline
//! also becomes a partial entry. Upstream: containerd's `redirectLogs`.
//!
//! Invariant: an entry is one `write`, so that entries of two streams never mix.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

const LINE_LIMIT: usize = 16 << 10;

pub(super) struct Log {
    path: PathBuf,
    file: File,
}

/// The unfinished line of one stream.
pub(super) struct Lines {
    stream: &'static str,
    pending: Vec<u8>,
}

impl Log {
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        let file = Self::open_file(&path)?;
        Ok(Self { path, file })
    }

    /// Opens a new file at the path after the old one was renamed.
    pub(super) fn reopen(&mut self) -> io::Result<()> {
        self.file = Self::open_file(&self.path)?;
        Ok(())
    }

    fn open_file(path: &PathBuf) -> io::Result<File> {
        use std::os::unix::fs::OpenOptionsExt;
        OpenOptions::new().append(true).create(true).mode(0o640).open(path)
    }

    fn entry(&mut self, stream: &str, tag: char, content: &[u8]) {
        let now = base::clock::now();
        let mut line = Vec::with_capacity(content.len() + 48);
        // The precision is fixed: readers cut the time at the first blank.
        let _ = write!(line, "{now:.9} {stream} {tag} ");
        line.extend_from_slice(content);
        line.push(b'\n');
        // A full disk must not block the container, so the entry is lost.
        let _ = self.file.write_all(&line);
    }
}

impl Lines {
    pub(super) fn new(stream: &'static str) -> Self {
        Self { stream, pending: Vec::new() }
    }

    pub(super) fn push(&mut self, mut bytes: &[u8], log: Option<&mut Log>) {
        let Some(log) = log else { return };
        while let Some(at) = bytes.iter().position(|byte| *byte == b'\n') {
            self.take(&bytes[..at], log);
            log.entry(self.stream, 'F', &self.pending);
            self.pending.clear();
            bytes = &bytes[at + 1..];
        }
        self.take(bytes, log);
        if self.pending.is_empty() {
            // Frees the memory of a long line.
            self.pending = Vec::new();
        }
    }

    /// Appends to the pending line, and writes partial entries while it is too long.
    fn take(&mut self, mut bytes: &[u8], log: &mut Log) {
        while self.pending.len() + bytes.len() > LINE_LIMIT {
            let (now, later) = bytes.split_at(LINE_LIMIT - self.pending.len());
            self.pending.extend_from_slice(now);
            log.entry(self.stream, 'P', &self.pending);
            self.pending.clear();
            bytes = later;
        }
        self.pending.extend_from_slice(bytes);
    }

    pub(super) fn end(&mut self, log: Option<&mut Log>) {
        if let (false, Some(log)) = (self.pending.is_empty(), log) {
            log.entry(self.stream, 'P', &self.pending);
        }
        self.pending = Vec::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_entries() {
        let long = "x".repeat(LINE_LIMIT + 3);
        let check = |chunks: &[&str], expected: &[(&str, &str)]| {
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("0.log");
            let mut log = Log::open(path.clone()).expect("opened");
            let mut lines = Lines::new("stdout");
            for chunk in chunks {
                lines.push(chunk.as_bytes(), Some(&mut log));
            }
            lines.end(Some(&mut log));
            let text = std::fs::read_to_string(path).expect("read");
            let got: Vec<(&str, &str)> = text
                .lines()
                .map(|line| {
                    let (time, rest) = line.split_once(" stdout ").expect("the stream");
                    assert_eq!(time.len(), "2016-10-06T00:17:09.669794202Z".len(), "{time}");
                    rest.split_once(' ').expect("the tag")
                })
                .collect();
            assert_eq!(got, expected);
        };
        check(&["a\nb", "c\n\n"], &[("F", "a"), ("F", "bc"), ("F", "")]);
        check(&["no end"], &[("P", "no end")]);
        check(&[&long, "\n"], &[("P", &long[..LINE_LIMIT]), ("F", "xxx")]);
    }
}
