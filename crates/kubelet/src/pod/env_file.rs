//! Files with variables that containers write into an emptyDir for later containers.
//!
//! ```text
//!   # a comment, an empty line
//!   NAME='any text, also of
//!   several lines'   # a comment
//! ```
//!
//! In: a volume's directory, a path in it, a key. Out: the key's value, empty if the file has none.
//! Invariants: only regular files inside the volume are opened; the number of bytes read is limited.
//! Lines after the key are not checked.
//! Upstream: `pkg/kubelet/util/env` ParseEnv.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::Mode;

/// The longest line, without its end. Upstream: `bufio.MaxScanTokenSize`.
const LINE: u64 = 64 * 1024;
/// Deviation: upstream has no limit. The kernel takes no variable longer than 128 KiB, and at most
/// 6 MiB of variables for a program.
const FILE: u64 = 16 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("failed to open environment variable file: {0}")]
    Open(io::Error),
    #[error("not a regular file")]
    NoFile,
    #[error("error reading environment variable file: {0}")]
    Read(#[from] io::Error),
    #[error("the file or a line of it is too long")]
    TooLong,
    #[error("the file is not UTF-8")]
    Encoding,
    #[error("invalid environment variable format at line {line}: {why}")]
    Format { line: usize, why: &'static str },
}

/// The value of `key` in the file at `path` of the volume at `root`.
pub fn read(root: &Path, path: &str, key: &str) -> Result<String, FileError> {
    let found = find(root, path).map_err(FileError::Open)?;
    if !found.metadata()?.is_file() {
        return Err(FileError::NoFile);
    }
    let found = format!("/proc/self/fd/{}", found.as_raw_fd());
    let file = File::open(found).map_err(FileError::Open)?;
    value_of(key, &mut Lines { from: BufReader::new(file).take(FILE + 1), number: 0 })
}

/// Resolves `path` as if `root` were `/`, so that links cannot lead out. It does not open the file: a FIFO
/// would block until it has a writer, and opening a device may have side effects.
fn find(root: &Path, path: &str) -> io::Result<File> {
    let root = nix::fcntl::open(root, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    Ok(File::from(openat2(&root, path, how)?))
}

struct Lines<R> {
    from: io::Take<R>,
    /// The number of the last line that was read, from 1.
    number: usize,
}

impl<R: BufRead> Lines<R> {
    fn next(&mut self) -> Result<Option<String>, FileError> {
        let mut bytes = vec![];
        let read = (&mut self.from).take(LINE + 1).read_until(b'\n', &mut bytes)?;
        if read == 0 {
            return Ok(None);
        }
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
        } else if read as u64 > LINE || self.from.limit() == 0 {
            return Err(FileError::TooLong);
        }
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
        self.number += 1;
        String::from_utf8(bytes).map(Some).map_err(|_| FileError::Encoding)
    }

    fn wrong<T>(&self, why: &'static str) -> Result<T, FileError> {
        Err(FileError::Format { line: self.number, why })
    }
}

const BLANK: [char; 2] = [' ', '\t'];

fn value_of<R: BufRead>(key: &str, lines: &mut Lines<R>) -> Result<String, FileError> {
    while let Some(line) = lines.next()? {
        let line = line.trim_start_matches(BLANK);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let Some((name, value)) = line.split_once('=') else {
            return lines.wrong("missing '='");
        };
        match name.trim_end_matches(BLANK) {
            "" => return lines.wrong("empty variable name"),
            bare if bare != name => return lines.wrong("whitespace before '=' is not allowed"),
            _ => {}
        }
        // To a shell, `A= 'x'` sets A to nothing.
        if value.starts_with(BLANK) {
            match name == key {
                true => return Ok(String::new()),
                false => continue,
            }
        }
        let Some(rest) = value.strip_prefix('\'') else {
            return lines.wrong("value must be enclosed in single quotes");
        };
        let value = quoted(rest, lines)?;
        if name == key {
            return Ok(value);
        }
    }
    Ok(String::new())
}

/// The text before the next quote, which may be on a later line.
fn quoted<R: BufRead>(first: &str, lines: &mut Lines<R>) -> Result<String, FileError> {
    let begun = lines.number;
    let (mut value, mut rest) = (String::new(), first.to_owned());
    loop {
        if let Some((inside, after)) = rest.split_once('\'') {
            value.push_str(inside);
            let after = after.trim_start_matches(BLANK);
            if !after.is_empty() && !after.starts_with('#') {
                return lines.wrong("unexpected content after closing quote");
            }
            return Ok(value);
        }
        value.push_str(&rest);
        value.push('\n');
        rest = match lines.next()? {
            Some(line) => line,
            None => return Err(FileError::Format { line: begun, why: "unclosed single quote" }),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &[u8], key: &str) -> Result<String, String> {
        let mut lines = Lines { from: text.take(FILE + 1), number: 0 };
        value_of(key, &mut lines).map_err(|error| error.to_string())
    }

    #[test]
    fn files_are_parsed_like_upstream() {
        let check = |text: &str, expected: Result<&str, &str>| {
            let got = parsed(text.as_bytes(), "K");
            assert_eq!(got.as_deref().map_err(String::as_str), expected, "{text:?}");
        };
        check("", Ok(""));
        check("A='x'\n", Ok(""));
        check("A='x'\nK='y'", Ok("y"));
        check("K='first'\nK='second'\n", Ok("first"));
        check("# one\n\n \t# two\n \tK='y' # three\n", Ok("y"));
        check("K='y'\t#three", Ok("y"));
        check("K=''\n", Ok(""));
        check("K='a=b=c # $HOME ${X} \\n \"q\"'\n", Ok("a=b=c # $HOME ${X} \\n \"q\""));
        check("K='  y '\r\n", Ok("  y "));
        check("A='x\nK='\nK='1\n2\n\n3'\n", Ok("1\n2\n\n3"));
        check("K= 'y'\n", Ok(""));
        check("A= y\nK='y'\n", Ok("y"));
        check("K='y'\nthis is not judged\n", Ok("y"));
        let at = |line: usize, why: &str| {
            format!("invalid environment variable format at line {line}: {why}")
        };
        let quotes = "value must be enclosed in single quotes";
        check("K\n", Err(&at(1, "missing '='")));
        check("\nexport\nK='y'\n", Err(&at(2, "missing '='")));
        check("='y'\n", Err(&at(1, "empty variable name")));
        check("A ='x'\nK='y'\n", Err(&at(1, "whitespace before '=' is not allowed")));
        check("K=y\n", Err(&at(1, quotes)));
        check("#\nK=\"y\"\n", Err(&at(2, quotes)));
        check("K=\n", Err(&at(1, quotes)));
        check("K='y'z\n", Err(&at(1, "unexpected content after closing quote")));
        check("A='x\n'y\nK='y'\n", Err(&at(2, "unexpected content after closing quote")));
        check("A='x'\nK='y\nz\n", Err(&at(2, "unclosed single quote")));
    }

    #[test]
    fn files_and_lines_have_limits() {
        let check = |text: Vec<u8>, expected: Result<&str, &str>| {
            let got = parsed(&text, "K");
            assert_eq!(got.as_deref().map_err(String::as_str), expected);
        };
        let too_long = Err("the file or a line of it is too long");
        let line = |length: usize| [b"#".repeat(length), b"\nK='y'\n".to_vec()].concat();
        check(line(LINE as usize), Ok("y"));
        check(line(LINE as usize + 1), too_long);
        check(b"#\n".repeat(FILE as usize / 2), Ok(""));
        check(b"#\n".repeat(FILE as usize / 2 + 1), too_long);
        check(b"K='\xff'\n".to_vec(), Err("the file is not UTF-8"));
    }

    #[test]
    fn only_files_of_the_volume_are_opened() {
        let directory = tempfile::tempdir().expect("a directory");
        let place = |name: &str| directory.path().join(name);
        std::fs::create_dir(place("volume")).expect("made");
        std::fs::write(place("outside"), "K='secret'\n").expect("written");
        std::fs::write(place("volume/inside"), "K='y'\n").expect("written");
        std::os::unix::fs::symlink(place("outside"), place("volume/out")).expect("made");
        std::os::unix::fs::symlink("../outside", place("volume/up")).expect("made");
        std::os::unix::fs::symlink("/inside", place("volume/link")).expect("made");
        nix::unistd::mkfifo(&place("volume/fifo"), Mode::S_IRWXU).expect("made");
        let check = |path: &str, expected: Option<&str>| {
            let got = read(&place("volume"), path, "K");
            assert_eq!(got.ok().as_deref(), expected, "{path}");
        };
        check("inside", Some("y"));
        check("/inside", Some("y"));
        check("link", Some("y"));
        for path in ["out", "up", "fifo", ".", "none"] {
            check(path, None);
        }
    }
}
