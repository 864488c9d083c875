//! The node's system logs at `/logs/`: a directory listing, or a file.
//!
//! In: a path below `/var/log`. Out: a list of names, or a file's bytes.
//! Invariants: the kernel resolves the path and never leaves the directory; only regular files and
//! directories are opened for reading, no FIFOs or devices.
//! Upstream: `kubelet.go` ServeLogs, Go's `http.FileServer`.
//! Deviation: links that lead out of the directory are not followed. Otherwise a writer of the directory
//! (a pod with a hostPath volume) could expose every file of the node to all readers of logs.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use base::percent;
use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::StreamBody;
use hyper::body::Frame;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use transport::Body;

use super::{Answer, text};

pub const DIRECTORY: &str = "/var/log";
const CHUNK: usize = 64 << 10;
/// Buffered chunks: a slow reader keeps the file open, but not in memory.
const AHEAD: usize = 4;

/// The target of a path.
enum Found {
    Names(Vec<String>),
    File { file: File, length: u64 },
}

/// Serves `path` (raw, with the leading `/logs`) from below `directory`.
pub async fn serve(directory: &'static str, path: &str) -> Answer {
    let wanted = path.strip_prefix("/logs").unwrap_or(path);
    if wanted.is_empty() {
        return Ok(moved("logs/"));
    }
    let below = percent::decode(wanted);
    let relative = below.trim_matches('/').to_owned();
    let place = relative.clone();
    let look = move || find(Path::new(directory), &place);
    let found = tokio::task::spawn_blocking(look).await;
    let found = found.unwrap_or_else(|error| Err(io::Error::other(error)));
    match found {
        Ok(Found::Names(names)) if wanted.ends_with('/') => Ok(listing(&names)),
        Ok(Found::Names(_)) => Ok(moved(&format!("{}/", last(&relative)))),
        Ok(Found::File { .. }) if wanted.ends_with('/') => {
            Ok(moved(&format!("../{}", last(&relative))))
        }
        Ok(Found::File { file, length }) => Ok(content(file, length)),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err((StatusCode::FORBIDDEN, "403 Forbidden\n".into()))
        }
        Err(_) => Err((StatusCode::NOT_FOUND, "404 page not found\n".into())),
    }
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

fn find(directory: &Path, relative: &str) -> io::Result<Found> {
    let root = File::open(directory)?;
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC | OFlag::O_NOCTTY)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let relative = if relative.is_empty() { "." } else { relative };
    let opened: OwnedFd = openat2(&root, relative, how)?;
    let file = File::from(opened);
    let facts = file.metadata()?;
    if facts.is_file() {
        return Ok(Found::File { file, length: facts.len() });
    }
    if !facts.is_dir() {
        return Err(io::ErrorKind::NotFound.into());
    }
    // List the opened directory, even if its path has changed meanwhile.
    names(&file).map(Found::Names)
}

fn names(directory: &File) -> io::Result<Vec<String>> {
    use std::os::fd::AsRawFd;
    let place = format!("/proc/self/fd/{}", directory.as_raw_fd());
    let mut out = vec![];
    for entry in std::fs::read_dir(place)? {
        let entry = entry?;
        let mut name = entry.file_name().to_string_lossy().into_owned();
        match entry.file_type()? {
            kind if kind.is_dir() => name.push('/'),
            kind if kind.is_fifo() || kind.is_socket() => continue,
            _ => {}
        }
        out.push(name);
    }
    out.sort();
    Ok(out)
}

fn moved(to: &str) -> Response<Body> {
    let mut response = text(StatusCode::MOVED_PERMANENTLY, "");
    // A name that is no valid header value gets no Location.
    if let Ok(place) = escaped(to).parse() {
        response.headers_mut().insert(header::LOCATION, place);
    }
    response
}

fn escaped(path: &str) -> String {
    path.split('/').map(percent::encode).collect::<Vec<_>>().join("/")
}

fn listing(names: &[String]) -> Response<Body> {
    let mut page = String::from("<!doctype html>\n<pre>\n");
    for name in names {
        let shown = name
            .replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;")
            .replace('"', "&#34;");
        // With `./`, a name with a colon is not taken for a URL with a scheme.
        page.push_str(&format!("<a href=\"./{}\">{shown}</a>\n", escaped(name)));
    }
    page.push_str("</pre>\n");
    let mut response = text(StatusCode::OK, &page);
    let html = header::HeaderValue::from_static("text/html; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, html);
    response
}

/// Sends the file at its current length; later bytes are not sent.
fn content(file: File, length: u64) -> Response<Body> {
    let (out, chunks) = mpsc::channel::<Bytes>(AHEAD);
    tokio::task::spawn_blocking(move || {
        let mut left = file.take(length);
        let mut buffer = vec![0; CHUNK];
        while let Ok(count @ 1..) = left.read(&mut buffer) {
            if out.blocking_send(Bytes::copy_from_slice(&buffer[..count])).is_err() {
                return;
            }
        }
    });
    let frames = ReceiverStream::new(chunks).map(|chunk| Ok::<_, Infallible>(Frame::data(chunk)));
    let mut response = Response::new(transport::boxed(StreamBody::new(frames)));
    let plain = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_directory_is_listed_and_never_left() {
        let root = tempfile::tempdir().expect("a directory");
        let place = root.path().join("log");
        std::fs::create_dir_all(place.join("a dir")).expect("a directory");
        std::fs::write(root.path().join("secret"), "no").expect("a file");
        std::fs::write(place.join("sys.log"), "one\n").expect("a file");
        std::fs::write(place.join("a dir/<b>"), "two").expect("a file");
        std::os::unix::fs::symlink("sys.log", place.join("link")).expect("a link");
        std::os::unix::fs::symlink("../secret", place.join("up")).expect("a link");
        std::os::unix::fs::symlink("/", place.join("root")).expect("a link");
        nix::unistd::mkfifo(&place.join("fifo"), nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        let directory: &'static str = Box::leak(place.display().to_string().into_boxed_str());
        let check = async |path: &str, expected: (u16, &str)| {
            let answer = serve(directory, path).await;
            let (status, body) = match answer {
                Ok(response) if response.status() == StatusCode::MOVED_PERMANENTLY => {
                    let to = response.headers()[header::LOCATION].to_str().expect("text");
                    (301, to.to_owned())
                }
                Ok(response) => {
                    let status = response.status().as_u16();
                    let body = response.into_body().collect().await.expect("a body").to_bytes();
                    (status, String::from_utf8_lossy(&body).into_owned())
                }
                Err((status, text)) => (status.as_u16(), text),
            };
            assert_eq!((status, body.as_str()), expected, "{path}");
        };
        let page = "<!doctype html>\n<pre>\n<a href=\"./a%20dir/\">a dir/</a>\n\
                    <a href=\"./link\">link</a>\n<a href=\"./root\">root</a>\n\
                    <a href=\"./sys.log\">sys.log</a>\n<a href=\"./up\">up</a>\n</pre>\n";
        let gone = (404, "404 page not found\n");
        check("/logs/", (200, page)).await;
        check("/logs", (301, "logs/")).await;
        check("/logs/sys.log", (200, "one\n")).await;
        check("/logs/sys.log/", (301, "../sys.log")).await;
        check("/logs/link", (200, "one\n")).await;
        check("/logs/a%20dir", (301, "a%20dir/")).await;
        let inner = "<!doctype html>\n<pre>\n<a href=\"./%3Cb%3E\">&lt;b&gt;</a>\n</pre>\n";
        check("/logs/a%20dir/", (200, inner)).await;
        check("/logs/a%20dir/%3Cb%3E", (200, "two")).await;
        check("/logs/a%20dir/..%2Fsys.log", (200, "one\n")).await;
        for path in
            ["up", "root", "root/etc/passwd", "..%2Fsecret", "../secret", "fifo", "none", "%00"]
        {
            check(&format!("/logs/{path}"), gone).await;
        }
    }
}
