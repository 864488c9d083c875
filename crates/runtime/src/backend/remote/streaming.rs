//! exec, attach and port-forward: the runtime returns a URL, and the streams use SPDY there.
//!
//! ```text
//!  Exec ─► URL ─► connect ─► streams ─► caller
//!                    └ driver ── task, ends with the command, or when all streams are dropped
//! ```

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use base::task::Tasks;
use cri::{AttachStreams, Error, ExecStreams, Io, Result, TerminalSize};
use futures::FutureExt;
use futures::future::FusedFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, oneshot};
use transport::channels::Streams;
use transport::spdy::{Session, Stream};
use transport::streaming::{self, Command};
use transport::{ClientOptions, HttpClient};

/// How many terminal sizes may be queued.
const SIZES: usize = 4;
/// How long remaining data may take after both sides have ended.
const FAREWELL: Duration = Duration::from_secs(10);
/// The limit on the Status' length.
const STATUS_BYTES: u64 = 64 << 10;

#[derive(Clone)]
pub(super) struct Streamer {
    http: Arc<OnceLock<HttpClient>>,
    tasks: Tasks,
}

impl Streamer {
    pub fn new(tasks: Tasks) -> Self {
        Self { http: Arc::default(), tasks }
    }

    /// Created at the first use: most nodes never run an exec.
    fn http(&self) -> Result<&HttpClient> {
        if self.http.get().is_none() {
            let client = HttpClient::new(&ClientOptions::default()).map_err(internal)?;
            // A concurrent call may have set it already; both clients are equal.
            let _ = self.http.set(client);
        }
        self.http.get().ok_or_else(|| Error::Internal("no HTTP client".into()))
    }

    pub async fn exec(&self, url: &str, streams: Streams) -> Result<ExecStreams> {
        let http = self.http()?;
        let (session, driver) = streaming::connect_command(http, url).await.map_err(internal)?;
        let mut driver = Box::pin(driver.fuse());
        let opening = streaming::open_command(&session, streams);
        let Command { stdin, stdout, stderr, resize, error } = driven(&mut driver, opening).await?;
        let resize = resize.map(|stream| self.sizes(stream));
        // Our side of the output streams stays open until the Status arrives. The runtime closes
        // the connection after it; a frame from us would reset the connection and lose the Status.
        let mut open = vec![];
        let mut output = |stream: Stream| {
            let (reader, writer) = stream.into_inner();
            open.push(writer);
            Box::new(reader) as cri::Output
        };
        let (stdout, stderr) = (stdout.map(&mut output), stderr.map(&mut output));
        let (mut told, exit) = oneshot::channel();
        self.tasks.spawn("exec", async move {
            let ending = async {
                let code = exit_code(error).await;
                drop((session, open));
                code
            };
            let both = async {
                tokio::pin!(ending);
                tokio::select! {
                    code = &mut ending => code,
                    // The connection ended first; the Status may still be buffered.
                    _ = &mut driver => ending.await,
                }
            };
            let code = tokio::select! {
                code = both => code,
                () = told.closed() => return,
            };
            // The caller may be gone.
            let _ = told.send(code);
            if !driver.is_terminated() {
                let _ = tokio::time::timeout(FAREWELL, driver).await;
            }
        });
        Ok(ExecStreams {
            stdin: stdin.map(|stream| Box::new(stream) as cri::Input),
            stdout,
            stderr,
            resize,
            exit,
        })
    }

    pub async fn attach(&self, url: &str, streams: Streams) -> Result<AttachStreams> {
        let http = self.http()?;
        let (session, driver) = streaming::connect_command(http, url).await.map_err(internal)?;
        let mut driver = Box::pin(driver);
        let opening = streaming::open_command(&session, streams);
        let Command { stdin, stdout, stderr, resize, error } = driven(&mut driver, opening).await?;
        let (held, gone) = mpsc::channel(1);
        let guard = |stream: Stream| Guarded::new(stream, held.clone(), None);
        let attached = AttachStreams {
            stdin: stdin.map(|stream| Box::new(guard(stream)) as cri::Input),
            stdout: stdout.map(|stream| Box::new(guard(stream)) as cri::Output),
            stderr: stderr.map(|stream| Box::new(guard(stream)) as cri::Output),
            resize: resize.map(|stream| self.sizes(stream)),
        };
        drop(held);
        // The Status of an attach adds nothing to the end of the outputs.
        self.tasks.spawn("attach", keep(session, driver, gone, error));
        Ok(attached)
    }

    pub async fn forward(&self, url: &str, port: u16) -> Result<Io> {
        let http = self.http()?;
        let (session, driver) = streaming::connect_forward(http, url).await.map_err(internal)?;
        let mut driver = Box::pin(driver);
        let opening = transport::remote::open_forward(&session, port, 0);
        let (data, error) = driven(&mut driver, opening).await?;
        let (held, gone) = mpsc::channel(1);
        let io = Guarded::new(data, held, Some(Box::pin(text(error))));
        self.tasks.spawn("port forward", keep(session, driver, gone, ()));
        Ok(Box::new(io))
    }

    fn sizes(&self, stream: Stream) -> mpsc::Sender<TerminalSize> {
        let (sender, mut sizes) = mpsc::channel::<TerminalSize>(SIZES);
        let (forward, receiver) = mpsc::channel(SIZES);
        self.tasks.spawn("terminal size", async move {
            let translate = async move {
                while let Some(TerminalSize { width, height }) = sizes.recv().await {
                    let size = transport::channels::TerminalSize { width, height };
                    if forward.send(size).await.is_err() {
                        return;
                    }
                }
            };
            tokio::join!(translate, streaming::send_sizes(stream, receiver));
        });
        sender
    }
}

/// Drives the connection while another future waits for its data.
async fn driven<T, E: std::fmt::Display, F: Future<Output = std::result::Result<(), E>> + Unpin>(
    driver: &mut F,
    work: impl Future<Output = std::result::Result<T, E>>,
) -> Result<T> {
    tokio::select! {
        done = work => done.map_err(internal),
        ended = driver => Err(match ended {
            Err(error) => internal(error),
            Ok(()) => Error::Unavailable("the runtime closed the connection".into()),
        }),
    }
}

/// Drives the connection until it ends, or until all of its streams are dropped.
async fn keep<T>(session: Session, driver: impl Future, mut gone: mpsc::Receiver<()>, streams: T) {
    let mut driver = std::pin::pin!(driver);
    tokio::select! {
        _ = &mut driver => return,
        // No message is ever sent: the last sender was dropped.
        _ = gone.recv() => {}
    }
    drop((session, streams));
    let _ = tokio::time::timeout(FAREWELL, driver).await;
}

/// Reads the whole text of a stream.
async fn text(stream: impl AsyncRead + Unpin) -> String {
    let mut bytes = vec![];
    // An error counts as the end: the connection is gone.
    let _ = stream.take(STATUS_BYTES).read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads the exit code from the Status that ends a command.
async fn exit_code(stream: impl AsyncRead + Unpin) -> Result<i32> {
    exit_code_of(&text(stream).await)
}

fn exit_code_of(status: &str) -> Result<i32> {
    if status.is_empty() {
        return Err(Error::Unavailable("the runtime closed the connection".into()));
    }
    let status: serde_json::Value = serde_json::from_str(status).map_err(|_| {
        Error::Internal(format!("error stream protocol error: unknown error {status:?}"))
    })?;
    if status["status"] == "Success" {
        return Ok(0);
    }
    let message = status["message"].as_str().unwrap_or("the command failed").to_owned();
    if status["reason"] != "NonZeroExitCode" {
        return Err(Error::Internal(message));
    }
    let causes = status["details"]["causes"].as_array().into_iter().flatten();
    let code = causes
        .filter(|cause| cause["reason"] == "ExitCode")
        .find_map(|cause| cause["message"].as_str().and_then(|text| text.parse().ok()));
    code.ok_or(Error::Internal(message))
}

fn internal(error: impl std::fmt::Display) -> Error {
    Error::Internal(error.to_string())
}

type Text = Pin<Box<dyn Future<Output = String> + Send>>;

/// A stream that keeps the connection alive. Its end-of-file may become an error, read from an error stream.
struct Guarded {
    stream: Stream,
    _held: mpsc::Sender<()>,
    failure: Option<Text>,
}

impl Guarded {
    fn new(stream: Stream, held: mpsc::Sender<()>, failure: Option<Text>) -> Self {
        Self { stream, _held: held, failure }
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        if buffer.filled().len() > before || buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let Some(failure) = &mut self.failure else { return Poll::Ready(Ok(())) };
        let text = ready!(failure.as_mut().poll(context));
        self.failure = None;
        Poll::Ready(if text.is_empty() { Ok(()) } else { Err(io::Error::other(text)) })
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_read_from_statuses() {
        let check = |status: &str, expected: std::result::Result<i32, &str>| {
            let got = exit_code_of(status).map_err(|error| error.to_string());
            assert_eq!(got, expected.map_err(str::to_owned), "{status}");
        };
        check(r#"{"metadata":{},"status":"Success"}"#, Ok(0));
        check(
            r#"{"status":"Failure","message":"m","reason":"NonZeroExitCode",
                "details":{"causes":[{"reason":"ExitCode","message":"7"}]}}"#,
            Ok(7),
        );
        check(
            r#"{"status":"Failure","message":"no such file","reason":"InternalError"}"#,
            Err("no such file"),
        );
        check("", Err("the runtime closed the connection"));
        check("gibberish", Err("error stream protocol error: unknown error \"gibberish\""));
    }
}
