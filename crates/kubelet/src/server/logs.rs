//! Container logs: reads the CRI log format.
//!
//! ```text
//! 2026-01-01T00:00:00.123456789Z stdout F a whole line
//! 2026-01-01T00:00:00.123456789Z stderr P the beginning of a long
//! ```
//!
//! In: a file, options. Out: bytes, as they are written when following; the file may be rotated meanwhile.
//! Upstream: `pkg/kubelet/kuberuntime/logs`.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use base::watch::FileWatch;
use bytes::Bytes;
use jiff::Timestamp;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncSeekExt, BufReader, SeekFrom};
use tokio::sync::mpsc;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    pub follow: bool,
    pub timestamps: bool,
    pub tail: Option<u64>,
    pub since: Option<Timestamp>,
    pub limit_bytes: Option<u64>,
    /// `stdout` or `stderr`; `None` for both.
    pub stream: Option<&'static str>,
    pub previous: bool,
}

/// Upstream: the runtime splits a longer line into partial ones.
const LINE_LIMIT: u64 = 1 << 20;
const BLOCK: u64 = 16 << 10;

/// The output for one raw line; `None` if the options exclude it.
fn render(line: &[u8], options: &Options) -> Option<Vec<u8>> {
    let mut parts = line.splitn(4, |byte| *byte == b' ');
    let (stamp, stream, tags, text) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    if options.stream.is_some_and(|wanted| wanted.as_bytes() != stream) {
        return None;
    }
    if let Some(since) = options.since {
        let at: Timestamp = std::str::from_utf8(stamp).ok()?.parse().ok()?;
        if at < since {
            return None;
        }
    }
    let mut out = vec![];
    if options.timestamps {
        out.extend_from_slice(stamp);
        out.push(b' ');
    }
    out.extend_from_slice(text);
    // A partial line continues in a later one.
    if tags.split(|byte| *byte == b':').next() == Some(b"P") && out.last() == Some(&b'\n') {
        out.pop();
    }
    Some(out)
}

/// The offset at which the last `count` lines begin.
async fn tail_offset(file: &mut tokio::fs::File, count: u64) -> io::Result<u64> {
    let length = file.seek(SeekFrom::End(0)).await?;
    if count == 0 {
        return Ok(length);
    }
    let (mut at, mut seen) = (length, 0);
    let mut block = vec![0; BLOCK as usize];
    while at > 0 {
        let size = at.min(BLOCK);
        at -= size;
        file.seek(SeekFrom::Start(at)).await?;
        let block = &mut block[..size as usize];
        file.read_exact(block).await?;
        for (index, byte) in block.iter().enumerate().rev() {
            let position = at + index as u64;
            // The newline at the end of the file closes the last line.
            if *byte == b'\n' && position + 1 != length {
                seen += 1;
                if seen == count {
                    return Ok(position + 1);
                }
            }
        }
    }
    Ok(0)
}

/// Sends the log to `out` up to its end; when following, until `ended` resolves or `out` is closed.
pub async fn send(
    path: &Path,
    options: &Options,
    out: &mpsc::Sender<Bytes>,
    ended: impl Future<Output = ()>,
) -> io::Result<()> {
    let mut file = tokio::fs::File::open(path).await?;
    if let Some(count) = options.tail {
        let start = tail_offset(&mut file, count).await?;
        file.seek(SeekFrom::Start(start)).await?;
    }
    let mut inode = file.metadata().await?.ino();
    let mut reader = BufReader::new(file);
    let mut left = options.limit_bytes.unwrap_or(u64::MAX);
    let mut line = vec![];
    let directory = path.parent().filter(|_| options.follow);
    let watcher = directory.and_then(|path| FileWatch::directory_and_writes(path).ok());
    let mut ended = std::pin::pin!(ended);
    let mut over = !options.follow;
    loop {
        let read = (&mut reader).take(LINE_LIMIT).read_until(b'\n', &mut line).await?;
        if read > 0 && line.last() == Some(&b'\n') {
            if let Some(mut text) = render(&line, options) {
                text.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                left -= text.len() as u64;
                if out.send(text.into()).await.is_err() || left == 0 {
                    return Ok(());
                }
            }
            line.clear();
            continue;
        }
        if read > 0 && line.len() as u64 >= LINE_LIMIT {
            line.clear();
            continue;
        }
        // The end of the file so far. Has the file been replaced?
        if let Ok(now) = tokio::fs::metadata(path).await
            && now.ino() != inode
        {
            reader = BufReader::new(tokio::fs::File::open(path).await?);
            inode = now.ino();
            line.clear();
            continue;
        }
        if over {
            return Ok(());
        }
        let Some(watcher) = &watcher else { return Ok(()) };
        tokio::select! {
            () = watcher.changed() => {}
            // Output from before the container's end must still be read.
            () = &mut ended => over = true,
            () = out.closed() => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::io::Write;

    const LOG: &str = "2026-01-01T00:00:01Z stdout F one\n2026-01-01T00:00:02Z stderr F two\n\
                       2026-01-01T00:00:03Z stdout P thr\n2026-01-01T00:00:03Z stdout F ee\n";

    async fn read(path: &Path, options: &Options) -> String {
        let (out, mut lines) = mpsc::channel(64);
        send(path, options, &out, std::future::pending()).await.expect("readable");
        drop(out);
        let mut text = vec![];
        while let Some(chunk) = lines.recv().await {
            text.extend_from_slice(&chunk);
        }
        String::from_utf8(text).expect("text")
    }

    #[tokio::test]
    async fn options_choose_lines() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("0.log");
        std::fs::write(&path, LOG).expect("written");
        let none = Options::default();
        assert_eq!(read(&path, &none).await, "one\ntwo\nthree\n");
        assert_eq!(read(&path, &Options { tail: Some(2), ..none.clone() }).await, "three\n");
        assert_eq!(read(&path, &Options { tail: Some(0), ..none.clone() }).await, "");
        assert_eq!(read(&path, &Options { limit_bytes: Some(5), ..none.clone() }).await, "one\nt");
        assert_eq!(read(&path, &Options { stream: Some("stderr"), ..none.clone() }).await, "two\n");
        let since = "2026-01-01T00:00:02Z".parse().ok();
        assert_eq!(read(&path, &Options { since, ..none.clone() }).await, "two\nthree\n");
        let stamped = Options { timestamps: true, tail: Some(4), limit_bytes: Some(25), ..none };
        assert_eq!(read(&path, &stamped).await, "2026-01-01T00:00:01Z one\n");
    }

    #[tokio::test]
    async fn following_survives_rotation_and_ends_with_the_container() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("0.log");
        std::fs::write(&path, "2026-01-01T00:00:01Z stdout F one\n").expect("written");
        let (out, mut lines) = mpsc::channel(64);
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let options = Options { follow: true, ..Options::default() };
        let following = send(&path, &options, &out, async {
            let _ = ended.await;
        });
        let test = async {
            let mut next = async || lines.recv().await.expect("a line");
            assert_eq!(next().await, "one\n");
            let append = |text: &str| {
                let mut file =
                    OpenOptions::new().create(true).append(true).open(&path).expect("open");
                file.write_all(text.as_bytes()).expect("written");
            };
            append("2026-01-01T00:00:02Z stdout F two\n");
            assert_eq!(next().await, "two\n");
            std::fs::rename(&path, dir.path().join("0.log.1")).expect("renamed");
            append("2026-01-01T00:00:03Z stdout F three\n");
            assert_eq!(next().await, "three\n");
            end.send(()).expect("the follower listens");
        };
        let both = async { tokio::join!(following, test) };
        let (done, ()) = testkit::wait::soon("the story ends", both).await;
        done.expect("readable");
    }
}
