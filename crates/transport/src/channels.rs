//! Kubernetes' remote command protocol (exec and attach) over WebSocket, both ends.
//!
//! Every message starts with a channel number:
//!
//! ```text
//! 0 stdin    client → server   bytes
//! 1 stdout   server → client   bytes
//! 2 stderr   server → client   bytes (never with a terminal)
//! 3 error    server → client   one Status, JSON: how the command ended
//! 4 resize   client → server   {"Width":80,"Height":24}
//! 255 close  client → server   the channel that ended (v5 only: reports the end of stdin)
//! ```
//!
//! The `base64.` variants use text messages: a digit, then base64.
//!
//! In: an upgraded WebSocket, and the wanted streams. Out: pipes ([`ServerSession`],
//! [`ClientSession`]) and a future that moves bytes between both. The session's owner drives it.
//! The pipes are the flow control: a reader that stops reading stops the peer.
//!
//! Invariant: the Status comes after all output. It ends the session.

use std::io;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::{mpsc, oneshot};

use crate::ws::{GOODBYE, Message, WebSocket};

/// The subprotocols of an exec or attach server, for [`crate::ws::accept`].
pub const PROTOCOLS: &[&str] = &[
    "v5.channel.k8s.io",
    "v4.channel.k8s.io",
    "v4.base64.channel.k8s.io",
    "channel.k8s.io",
    "base64.channel.k8s.io",
    "",
];

/// The subprotocols that a client offers, best first.
pub const CLIENT_PROTOCOLS: &[&str] = &["v5.channel.k8s.io", "v4.channel.k8s.io"];

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
const CLOSE: u8 = 255;

/// How many bytes a pipe holds before its writer waits.
pub(crate) const PIPE: usize = 64 << 10;
const READ: usize = 32 << 10;

/// The streams of a command (the query parameters `stdin`, `stdout`, `stderr`, `tty`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    #[serde(rename = "Width")]
    pub width: u16,
    #[serde(rename = "Height")]
    pub height: u16,
}

/// The server's side of a command, which the kubelet connects to the container.
pub struct ServerSession {
    pub stdin: Option<DuplexStream>,
    /// Drop it at the end of the output: the Status waits for that.
    pub stdout: Option<DuplexStream>,
    pub stderr: Option<DuplexStream>,
    /// Sizes of the client's terminal, in order; ends with the session.
    pub resize: Option<mpsc::Receiver<TerminalSize>>,
    /// The JSON `Status` with the command's result.
    pub status: oneshot::Sender<Vec<u8>>,
}

/// The client's side of a command, which `kubectl exec` connects to the terminal.
pub struct ClientSession {
    /// Drop it (or shut it down) to end the command's input (v5 and later tell the server).
    pub stdin: Option<DuplexStream>,
    pub stdout: Option<DuplexStream>,
    pub stderr: Option<DuplexStream>,
    pub resize: Option<mpsc::Sender<TerminalSize>>,
    /// The JSON `Status`; an error if the connection broke before.
    pub status: oneshot::Receiver<Vec<u8>>,
}

/// The driver's ends of the pipes, the same for every protocol.
pub(crate) struct ServerPipes {
    pub(crate) stdin: Option<DuplexStream>,
    pub(crate) stdout: Option<DuplexStream>,
    pub(crate) stderr: Option<DuplexStream>,
    pub(crate) resize: Option<mpsc::Sender<TerminalSize>>,
    pub(crate) status: oneshot::Receiver<Vec<u8>>,
}

fn pipe(wanted: bool) -> (Option<DuplexStream>, Option<DuplexStream>) {
    if !wanted {
        return (None, None);
    }
    let (ours, theirs) = tokio::io::duplex(PIPE);
    (Some(ours), Some(theirs))
}

pub(crate) fn server_pipes(streams: Streams) -> (ServerSession, ServerPipes) {
    let (stdin, stdin_pump) = pipe(streams.stdin);
    let (stdout, stdout_pump) = pipe(streams.stdout);
    let (stderr, stderr_pump) = pipe(streams.stderr && !streams.tty);
    // Only the latest size matters, but a few may be queued.
    let (resize_pump, resize) = mpsc::channel(16);
    let (status, status_pump) = oneshot::channel();
    let resize = streams.tty.then_some(resize);
    let session = ServerSession { stdin, stdout, stderr, resize, status };
    let pipes = ServerPipes {
        stdin: stdin_pump,
        stdout: stdout_pump,
        stderr: stderr_pump,
        resize: streams.tty.then_some(resize_pump),
        status: status_pump,
    };
    (session, pipes)
}

/// The message format of a subprotocol.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    base64: bool,
    /// Whether the protocol can report the end of a channel.
    has_close: bool,
    /// Before v4 the error channel carries text, not a Status.
    has_status: bool,
}

impl Format {
    pub(crate) fn of(protocol: &str) -> Self {
        Self {
            base64: protocol.contains("base64"),
            has_close: protocol.starts_with("v5."),
            has_status: protocol.starts_with("v4.") || protocol.starts_with("v5."),
        }
    }

    pub(crate) fn encode(self, channel: u8, data: &[u8]) -> Message {
        if self.base64 {
            return Message::text(format!(
                "{}{}",
                char::from(b'0' + channel),
                STANDARD.encode(data)
            ));
        }
        let mut bytes = BytesMut::with_capacity(data.len() + 1);
        bytes.put_u8(channel);
        bytes.put_slice(data);
        Message::Binary(bytes.freeze())
    }

    /// Channel and data; `None` for messages without them (pings, empty or invalid messages).
    pub(crate) fn decode(self, message: Message) -> Option<(u8, Bytes)> {
        let bytes = match message {
            Message::Binary(bytes) => bytes,
            Message::Text(text) => Bytes::from(text),
            _ => return None,
        };
        let channel = *bytes.first()?;
        let rest = bytes.slice(1..);
        if !self.base64 {
            return Some((channel, rest));
        }
        let data = STANDARD.decode(&rest).ok()?;
        Some((channel.wrapping_sub(b'0'), data.into()))
    }
}

type Sink<S> = SplitSink<WebSocket<S>, Message>;
type Source<S> = SplitStream<WebSocket<S>>;

fn broken(error: crate::ws::Error) -> io::Error {
    match error {
        crate::ws::Error::Io(error) => error,
        other => io::Error::other(other),
    }
}

/// The server's side over `socket`: the session, and the future that drives it. It ends after
/// sending the Status, or when the client is gone (then the pipes break).
pub fn server<S>(
    socket: WebSocket<S>,
    protocol: &'static str,
    streams: Streams,
) -> (ServerSession, impl Future<Output = io::Result<()>> + Send + use<S>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let (session, pipes) = server_pipes(streams);
    (session, pump_server(socket, protocol, pipes))
}

pub(crate) async fn pump_server<S>(
    socket: WebSocket<S>,
    protocol: &str,
    pipes: ServerPipes,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let format = Format::of(protocol);
    let ServerPipes { stdin, stdout, stderr, resize, status } = pipes;
    let (mut sink, mut source) = socket.split();
    // Upstream: an empty message on the lowest output tells the client that it is connected.
    let first = match (&stdout, &stderr) {
        (Some(_), _) => STDOUT,
        (None, Some(_)) => STDERR,
        (None, None) => ERROR,
    };
    sink.send(format.encode(first, &[])).await.map_err(broken)?;
    let mut input = ServerInput { format, stdin, resize };
    let outcome = tokio::select! {
        sent = server_output(format, &mut sink, stdout, stderr, status) => Some(sent),
        () = input.run(&mut source) => None,
    };
    drop(input);
    match outcome {
        Some(sent) => sent?,
        None => return Ok(()),
    }
    // Waits for the client's Close: closing with unread input would reset the connection and lose the Status.
    let goodbye = async { while let Some(Ok(_)) = source.next().await {} };
    let farewell = async { tokio::join!(sink.send(crate::ws::farewell()), goodbye) };
    let _ = tokio::time::timeout(GOODBYE, farewell).await;
    Ok(())
}

/// Sends both outputs to their ends, then the Status.
async fn server_output<S>(
    format: Format,
    sink: &mut Sink<S>,
    mut stdout: Option<DuplexStream>,
    mut stderr: Option<DuplexStream>,
    status: oneshot::Receiver<Vec<u8>>,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let mut out = BytesMut::with_capacity(READ);
    let mut err = BytesMut::with_capacity(READ);
    while stdout.is_some() || stderr.is_some() {
        let (channel, chunk) = tokio::select! {
            chunk = read(&mut stdout, &mut out) => (STDOUT, chunk?),
            chunk = read(&mut stderr, &mut err) => (STDERR, chunk?),
        };
        if let Some(chunk) = chunk {
            sink.send(format.encode(channel, &chunk)).await.map_err(broken)?;
        }
    }
    // A command whose owner gave up ends without a Status.
    if let Ok(status) = status.await {
        let text = if format.has_status { status } else { message_of(&status) };
        if format.has_status || !text.is_empty() {
            sink.send(format.encode(ERROR, &text)).await.map_err(broken)?;
        }
    }
    Ok(())
}

/// The next chunk of a pipe. Returns `None` and drops the pipe at its end. Pends without a pipe.
pub(crate) async fn read(
    pipe: &mut Option<DuplexStream>,
    buffer: &mut BytesMut,
) -> io::Result<Option<Bytes>> {
    let Some(stream) = pipe else { return std::future::pending().await };
    buffer.reserve(READ);
    if (&mut *stream).take(READ as u64).read_buf(buffer).await? == 0 {
        *pipe = None;
        return Ok(None);
    }
    Ok(Some(buffer.split().freeze()))
}

/// The `message` of a Status, empty on success: what old protocols send instead.
pub(crate) fn message_of(status: &[u8]) -> Vec<u8> {
    #[derive(Deserialize)]
    struct Status {
        #[serde(default)]
        status: String,
        #[serde(default)]
        message: String,
    }
    match serde_json::from_slice::<Status>(status) {
        Ok(status) if status.status == "Success" => vec![],
        Ok(status) => status.message.into_bytes(),
        Err(_) => status.to_vec(),
    }
}

struct ServerInput {
    format: Format,
    stdin: Option<DuplexStream>,
    resize: Option<mpsc::Sender<TerminalSize>>,
}

impl ServerInput {
    /// Runs until the client is gone.
    async fn run<S>(&mut self, source: &mut Source<S>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        while let Some(Ok(message)) = source.next().await {
            if let Message::Close(_) = message {
                return;
            }
            if let Some((channel, data)) = self.format.decode(message) {
                self.take(channel, data).await;
            }
        }
    }

    async fn take(&mut self, channel: u8, data: Bytes) {
        match channel {
            STDIN => {
                if let Some(stdin) = &mut self.stdin
                    && stdin.write_all(&data).await.is_err()
                {
                    // The command no longer reads: the rest is dropped, as with a closed pipe.
                    self.stdin = None;
                }
            }
            RESIZE => {
                if let (Some(resize), Ok(size)) = (&self.resize, serde_json::from_slice(&data)) {
                    // The queue is full because the reader is slow: this size is dropped.
                    let _ = resize.try_send(size);
                }
            }
            CLOSE if self.format.has_close && data.first() == Some(&STDIN) => self.stdin = None,
            _ => {}
        }
    }
}

/// The client's side over `socket`: the session, and the future that drives it.
pub fn client<S>(
    socket: WebSocket<S>,
    protocol: &str,
    streams: Streams,
) -> (ClientSession, impl Future<Output = io::Result<()>> + Send + use<S>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let format = Format::of(protocol);
    let (stdin, stdin_pump) = pipe(streams.stdin);
    let (stdout, stdout_pump) = pipe(streams.stdout);
    let (stderr, stderr_pump) = pipe(streams.stderr && !streams.tty);
    let (resize, resize_pump) = mpsc::channel(16);
    let (status_pump, status) = oneshot::channel();
    let resize = streams.tty.then_some(resize);
    let session = ClientSession { stdin, stdout, stderr, resize, status };
    let (mut sink, mut source) = socket.split();
    let pump = async move {
        let output = client_input(&mut source, format, stdout_pump, stderr_pump, status_pump);
        let outcome = tokio::select! {
            outcome = output => outcome,
            Err(error) = client_output(format, &mut sink, stdin_pump, resize_pump) => Err(error),
        };
        let _ = tokio::time::timeout(GOODBYE, sink.send(crate::ws::farewell())).await;
        outcome
    };
    (session, pump)
}

/// Sends input and sizes; pends at their end, since the session ends with the output.
async fn client_output<S>(
    format: Format,
    sink: &mut Sink<S>,
    mut stdin: Option<DuplexStream>,
    mut resize: mpsc::Receiver<TerminalSize>,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let mut buffer = BytesMut::new();
    loop {
        let message = tokio::select! {
            chunk = read(&mut stdin, &mut buffer) => match chunk? {
                Some(chunk) => format.encode(STDIN, &chunk),
                None if format.has_close => Message::Binary(Bytes::from_static(&[CLOSE, STDIN])),
                None => continue,
            },
            Some(size) = resize.recv() => {
                let json = serde_json::to_vec(&size).expect("two numbers are JSON");
                format.encode(RESIZE, &json)
            }
            else => return std::future::pending().await,
        };
        sink.send(message).await.map_err(broken)?;
    }
}

/// Passes output on until the server closes. Passes a Status on at once.
async fn client_input<S>(
    source: &mut Source<S>,
    format: Format,
    mut stdout: Option<DuplexStream>,
    mut stderr: Option<DuplexStream>,
    status: oneshot::Sender<Vec<u8>>,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let mut status = Some(status);
    while let Some(message) = source.next().await {
        let message = message.map_err(broken)?;
        if let Message::Close(_) = message {
            return Ok(());
        }
        let Some((channel, data)) = format.decode(message) else { continue };
        match channel {
            STDOUT => write(&mut stdout, &data).await,
            STDERR => write(&mut stderr, &data).await,
            ERROR if !data.is_empty() => {
                if let Some(status) = status.take() {
                    // An error means that the receiver was dropped.
                    let _ = status.send(data.to_vec());
                }
            }
            _ => {}
        }
    }
    Ok(())
}

async fn write(pipe: &mut Option<DuplexStream>, data: &[u8]) {
    if let Some(stream) = pipe
        && stream.write_all(data).await.is_err()
    {
        *pipe = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUCCESS: &[u8] = br#"{"kind":"Status","status":"Success"}"#;

    /// A server that echoes stdin in upper case, writes `err` to stderr, and ends with success at
    /// the end of stdin or after `line`.
    async fn shout(mut session: ServerSession, line: usize) {
        let mut stdin = session.stdin.take().expect("stdin is wanted");
        let mut stdout = session.stdout.take().expect("stdout is wanted");
        if let Some(mut stderr) = session.stderr.take() {
            stderr.write_all(b"err").await.expect("the client reads");
        }
        let mut buffer = vec![0; line];
        let mut total = 0;
        while total < line {
            let count = stdin.read(&mut buffer).await.expect("the client writes");
            if count == 0 {
                break;
            }
            total += count;
            stdout.write_all(&buffer[..count].to_ascii_uppercase()).await.expect("it reads");
        }
        drop(stdout);
        session.status.send(SUCCESS.to_vec()).expect("the pump listens");
    }

    async fn run(protocol: &'static str, streams: Streams) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let (near, far) = tokio::io::duplex(1000);
        let input = b"hello over there".repeat(1000);
        let limit = if protocol.starts_with("v5") { usize::MAX >> 40 } else { input.len() };
        let (server_session, server_pump) = server(crate::ws::server(far).await, protocol, streams);
        let (mut session, client_pump) = client(crate::ws::client(near).await, protocol, streams);
        let mut stdin = session.stdin.take().expect("stdin is wanted");
        let talk = async move {
            if let Some(resize) = &session.resize {
                let size = TerminalSize { width: 80, height: 24 };
                resize.send(size).await.expect("the pump listens");
            }
            let mut stdout = session.stdout.take().expect("stdout is wanted");
            let (mut out, mut err) = (vec![], vec![]);
            let write = async {
                stdin.write_all(&input).await.expect("the server reads");
                drop(stdin);
            };
            let read_err = async {
                if let Some(mut stderr) = session.stderr.take() {
                    stderr.read_to_end(&mut err).await.expect("reads");
                }
            };
            let (_, read, ()) = tokio::join!(write, stdout.read_to_end(&mut out), read_err);
            read.expect("reads");
            (out, err, session.status.await.expect("a status"))
        };
        let (served, connected, (), got) =
            tokio::join!(server_pump, client_pump, shout(server_session, limit), talk);
        served.expect("the server's pump ends well");
        connected.expect("the client's pump ends well");
        got
    }

    #[tokio::test]
    async fn streams_cross_in_every_protocol() {
        let plain = Streams { stdin: true, stdout: true, stderr: true, tty: false };
        let check = async |protocol: &'static str, streams: Streams, err: &[u8]| {
            let got = testkit::wait::soon(protocol, run(protocol, streams));
            let (out, got_err, status) = got.await;
            assert_eq!(out, b"HELLO OVER THERE".repeat(1000), "{protocol}");
            assert_eq!(got_err, err, "{protocol}");
            assert_eq!(status, SUCCESS, "{protocol}");
        };
        check("v5.channel.k8s.io", plain, b"err").await;
        check("v4.channel.k8s.io", plain, b"err").await;
        check("v4.base64.channel.k8s.io", plain, b"err").await;
        check("v5.channel.k8s.io", Streams { tty: true, ..plain }, b"").await;
    }

    #[tokio::test]
    async fn a_vanished_client_breaks_the_pipes() {
        let (near, far) = tokio::io::duplex(1000);
        let streams = Streams { stdin: true, stdout: true, ..Streams::default() };
        let (mut session, pump) =
            server(crate::ws::server(far).await, "v4.channel.k8s.io", streams);
        drop(near);
        let _ = pump.await;
        let mut stdin = session.stdin.take().expect("stdin is wanted");
        assert_eq!(stdin.read(&mut [0; 8]).await.expect("an end, no error"), 0);
    }

    #[test]
    fn terminal_sizes_have_upstreams_format() {
        let size: TerminalSize =
            serde_json::from_str(r#"{"Width":120,"Height":40}"#).expect("JSON");
        assert_eq!(size, TerminalSize { width: 120, height: 40 });
    }
}
