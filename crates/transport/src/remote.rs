//! The server side of exec, attach and port-forward for every client protocol: WebSocket channels,
//! SPDY, or SPDY in a WebSocket.
//!
//! ```text
//! request ─► accept_command ─► 101 response + Accepted ─► command(io, streams) ─► ServerSession + future
//! request ─► accept_forward ─► 101 response + Accepted ─► forwards(io, ports)  ─► Forwards + future
//! ```
//!
//! The futures drive the connection. The caller runs them beside its own work in its own task.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use bytes::BytesMut;
use futures::{SinkExt, StreamExt};
use http::{HeaderMap, Response};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;

use crate::channels::{self, ServerPipes, ServerSession, Streams, TerminalSize};
use crate::spdy::{self, Incoming, Stream};
use crate::upgrade::UpgradedIo;
use crate::ws::{self, HandshakeError, Message, Tunnel};

/// Upstream: how long a client has to open its streams.
const STREAM_CREATION: Duration = Duration::from_secs(30);
/// The limit on port-forward requests with only one of their two streams open.
const HALF_OPEN: usize = 256;

const SPDY_COMMAND: &[&str] =
    &["v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"];
const SPDY_FORWARD: &[&str] = &["portforward.k8s.io"];
const TUNNEL_FORWARD: &str = "SPDY/3.1+portforward.k8s.io";
/// A missing subprotocol also means binary channels.
const WEBSOCKET_FORWARD: &[&str] =
    &[TUNNEL_FORWARD, "v4.channel.k8s.io", "v4.base64.channel.k8s.io", ""];

/// The negotiated protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    WebSocket(&'static str),
    Spdy(&'static str),
}

/// Answers the handshake of exec or attach. `None`: the response is a refusal.
pub fn accept_command(
    headers: &HeaderMap,
) -> Result<(Response<()>, Option<Accepted>), HandshakeError> {
    accept(headers, channels::PROTOCOLS, SPDY_COMMAND)
}

/// Answers the handshake of port-forward.
pub fn accept_forward(
    headers: &HeaderMap,
) -> Result<(Response<()>, Option<Accepted>), HandshakeError> {
    accept(headers, WEBSOCKET_FORWARD, SPDY_FORWARD)
}

fn accept(
    headers: &HeaderMap,
    websocket: &[&'static str],
    spdy: &[&'static str],
) -> Result<(Response<()>, Option<Accepted>), HandshakeError> {
    if ws::is_websocket(headers) {
        let (response, protocol) = ws::accept(headers, websocket)?;
        return Ok((response, Some(Accepted::WebSocket(protocol))));
    }
    if !ws::is_upgrade(headers, spdy::UPGRADE) {
        return Err(HandshakeError::NotAsked);
    }
    let (response, protocol) = spdy::accept(headers, spdy);
    Ok((response, protocol.map(Accepted::Spdy)))
}

/// The server's side of a command. `io` is the future of [`crate::server_io`], which resolves after
/// the 101 response.
pub fn command(
    accepted: Accepted,
    io: impl Future<Output = hyper::Result<UpgradedIo>> + Send,
    streams: Streams,
) -> (ServerSession, impl Future<Output = io::Result<()>> + Send) {
    let (session, pipes) = channels::server_pipes(streams);
    let pump = async move {
        let io = io.await.map_err(io::Error::other)?;
        match accepted {
            Accepted::WebSocket(protocol) => {
                channels::pump_server(ws::server(io).await, protocol, pipes).await
            }
            Accepted::Spdy(protocol) => {
                let (session, driver) = spdy::session(io, spdy::Role::Server);
                let command = spdy_command(session, protocol, streams, pipes);
                let (driven, done) = tokio::join!(driver, command);
                driven.and(done).map_err(io::Error::other)
            }
        }
    };
    (session, pump)
}

/// The streams of a command by their `streamType`.
#[derive(Default)]
struct Named(HashMap<String, Stream>);

impl Named {
    fn take(&mut self, name: &str) -> Option<Stream> {
        self.0.remove(name)
    }
}

async fn spdy_command(
    mut session: spdy::Session,
    protocol: &str,
    streams: Streams,
    pipes: ServerPipes,
) -> Result<(), spdy::Error> {
    // Protocol versions before v3 have no terminal sizes.
    let has_resize = streams.tty && ["v4.channel.k8s.io", "v3.channel.k8s.io"].contains(&protocol);
    let outputs = usize::from(streams.stdout) + usize::from(streams.stderr && !streams.tty);
    let count = 1 + usize::from(streams.stdin) + outputs + usize::from(has_resize);
    let mut named = Named::default();
    for Incoming { headers, stream } in
        spdy::accept_all(&mut session, count, STREAM_CREATION).await?
    {
        let name = spdy::find(&headers, "streamType").unwrap_or_default();
        named.0.insert(name.to_owned(), stream);
    }
    let error = named.take("error").ok_or(spdy::Error::Protocol("no error stream"))?;
    let ServerPipes { stdin, stdout, stderr, resize, status } = pipes;
    let (stdin_stream, sizes) = (named.take("stdin"), named.take("resize"));
    let input = async {
        tokio::join!(copy_in(stdin_stream, stdin), read_sizes(sizes, resize));
        std::future::pending::<()>().await
    };
    let (out, err) = (named.take("stdout"), named.take("stderr"));
    let output = async {
        tokio::join!(copy_out(stdout, out), copy_out(stderr, err));
        status.await
    };
    // The session ends when the client is gone.
    let gone = async { while session.accept().await.is_some() {} };
    let status = tokio::select! {
        status = output => status,
        () = input => return Ok(()),
        () = gone => return Ok(()),
    };
    if let Ok(status) = status {
        let text = match protocol {
            "v4.channel.k8s.io" => status,
            _ => channels::message_of(&status),
        };
        let (_, mut writer) = error.into_inner();
        writer.write_all(&text).await?;
    }
    Ok(())
}

async fn copy_in(stream: Option<Stream>, pipe: Option<DuplexStream>) {
    let (Some(stream), Some(mut pipe)) = (stream, pipe) else { return };
    // The writing half stays open: dropping it would end the stream for the client.
    let (mut reader, _writer) = stream.into_inner();
    // An error on either end counts as the end of input.
    let _ = tokio::io::copy(&mut reader, &mut pipe).await;
}

async fn copy_out(pipe: Option<DuplexStream>, stream: Option<Stream>) {
    let (Some(mut pipe), Some(stream)) = (pipe, stream) else { return };
    let (_reader, mut writer) = stream.into_inner();
    // An error on either end counts as the end of output.
    let _ = tokio::io::copy(&mut pipe, &mut writer).await;
}

/// Reads a sequence of JSON objects, each a terminal size.
async fn read_sizes(stream: Option<Stream>, sizes: Option<mpsc::Sender<TerminalSize>>) {
    let (Some(stream), Some(sizes)) = (stream, sizes) else { return };
    let (mut reader, _writer) = stream.into_inner();
    let mut buffer = BytesMut::new();
    while reader.read_buf(&mut buffer).await.is_ok_and(|count| count > 0) && buffer.len() < 4096 {
        while let Some(end) = buffer.iter().position(|byte| *byte == b'}') {
            let object = buffer.split_to(end + 1);
            if let Ok(size) = serde_json::from_slice(&object) {
                // The queue is full because the reader is slow: this size is dropped.
                let _ = sizes.try_send(size);
            }
        }
    }
}

/// One connection that the client forwards to a port of the pod.
pub struct Forward {
    pub port: u16,
    /// Drop it, or shut it down, when the pod's side has ended.
    pub data: Stream,
    /// Write the reason here if the port is unreachable; dropping it reports success.
    pub error: DuplexStream,
}

/// The forwarded connections in order; ends with the client.
pub type Forwards = mpsc::Receiver<Forward>;

/// The server's side of a port-forward. `ports` come from the query; only old WebSocket clients
/// name them there, one connection for each.
pub fn forwards(
    accepted: Accepted,
    io: impl Future<Output = hyper::Result<UpgradedIo>> + Send,
    ports: Vec<u16>,
) -> (Forwards, impl Future<Output = io::Result<()>> + Send) {
    let (sender, forwards) = mpsc::channel(16);
    let pump = async move {
        let io = io.await.map_err(io::Error::other)?;
        match accepted {
            Accepted::Spdy(_) => {
                let (session, driver) = spdy::session(io, spdy::Role::Server);
                let (driven, ()) = tokio::join!(driver, pair(session, sender));
                driven.map_err(io::Error::other)
            }
            Accepted::WebSocket(TUNNEL_FORWARD) => {
                let tunnel = Tunnel::new(ws::server(io).await);
                let (session, driver) = spdy::session(tunnel, spdy::Role::Server);
                let (driven, ()) = tokio::join!(driver, pair(session, sender));
                driven.map_err(io::Error::other)
            }
            Accepted::WebSocket(protocol) => {
                let format = channels::Format::of(protocol);
                websocket_forwards(ws::server(io).await, format, ports, sender).await
            }
        }
    };
    (forwards, pump)
}

/// Matches the data and error streams of one request.
async fn pair(mut session: spdy::Session, forwards: mpsc::Sender<Forward>) {
    let mut waiting: HashMap<String, (bool, Stream)> = HashMap::new();
    while let Some(Incoming { headers, stream }) = session.accept().await {
        let text = |name: &str| spdy::find(&headers, name).unwrap_or_default();
        let is_data = match text("streamType") {
            "data" => true,
            "error" => false,
            // Dropping the stream refuses it.
            _ => continue,
        };
        let Some(port) = text("port").parse().ok().filter(|port| *port > 0) else { continue };
        // Very old clients send no request id; they use one pair at a time.
        let request = text("requestID").to_owned();
        let (data, error) = match waiting.remove(&request) {
            Some((had_data, first)) if had_data != is_data => {
                if had_data {
                    (first, stream)
                } else {
                    (stream, first)
                }
            }
            _ if waiting.len() < HALF_OPEN => {
                waiting.insert(request, (is_data, stream));
                continue;
            }
            _ => continue,
        };
        let (_, error) = error.into_inner();
        if forwards.send(Forward { port, data, error }).await.is_err() {
            return;
        }
    }
}

/// The old protocol: for port number `i` of the query, channel `2i` carries data and `2i + 1` the
/// error text. The server starts each channel with the port, two bytes, little-endian.
async fn websocket_forwards(
    socket: ws::WebSocket,
    format: channels::Format,
    ports: Vec<u16>,
    forwards: mpsc::Sender<Forward>,
) -> io::Result<()> {
    let (mut sink, mut source) = socket.split();
    let (messages, mut queue) = mpsc::channel::<Message>(16);
    let mut inputs = vec![];
    let mut outputs = vec![];
    for (index, port) in ports.iter().enumerate().take(usize::from(u8::MAX) / 2) {
        let data_channel = (index * 2) as u8;
        for channel in [data_channel, data_channel + 1] {
            sink.send(format.encode(channel, &port.to_le_bytes()))
                .await
                .map_err(io::Error::other)?;
        }
        let (read, input) = tokio::io::duplex(channels::PIPE);
        let (write, output) = tokio::io::duplex(channels::PIPE);
        let (error, error_output) = tokio::io::duplex(channels::PIPE);
        inputs.push(input);
        outputs.push(send_channel(format, data_channel, output, messages.clone()));
        outputs.push(send_channel(format, data_channel + 1, error_output, messages.clone()));
        let forward = Forward { port: *port, data: tokio::io::join(read, write), error };
        if forwards.send(forward).await.is_err() {
            return Ok(());
        }
    }
    drop((messages, forwards));
    let receive = async {
        while let Some(Ok(message)) = source.next().await {
            if let Message::Close(_) = message {
                return;
            }
            let Some((channel, data)) = format.decode(message) else { continue };
            let input = inputs.get_mut(usize::from(channel / 2)).filter(|_| channel % 2 == 0);
            if let Some(input) = input {
                // A pod that no longer reads loses the rest, as with a closed connection.
                let _ = input.write_all(&data).await;
            }
        }
    };
    let send = async {
        while let Some(message) = queue.recv().await {
            sink.send(message).await.map_err(io::Error::other)?;
        }
        Ok::<_, io::Error>(())
    };
    let sent = tokio::select! {
        () = receive => None,
        (_, sent) = async { tokio::join!(futures::future::join_all(outputs), send) } => Some(sent),
    };
    // The client is gone: skips the closing handshake.
    let Some(sent) = sent else { return Ok(()) };
    // Closing with unread input would reset the connection and lose the last bytes.
    let goodbye = async { while let Some(Ok(_)) = source.next().await {} };
    let farewell = async { tokio::join!(sink.send(ws::farewell()), goodbye) };
    let _ = tokio::time::timeout(ws::GOODBYE, farewell).await;
    sent
}

/// Sends the content of a pipe on a channel, to its end.
async fn send_channel(
    format: channels::Format,
    channel: u8,
    pipe: DuplexStream,
    messages: mpsc::Sender<Message>,
) {
    let (mut pipe, mut buffer) = (Some(pipe), BytesMut::new());
    while let Ok(Some(data)) = channels::read(&mut pipe, &mut buffer).await {
        if messages.send(format.encode(channel, &data)).await.is_err() {
            return;
        }
    }
}

/// Opens a forwarded connection as a client: the session is SPDY over a [`Tunnel`] with subprotocol
/// [`FORWARD_PROTOCOL`]. Returns the data stream, and the reader of the error text.
pub async fn open_forward(
    session: &spdy::Session,
    port: u16,
    request: u64,
) -> Result<(Stream, DuplexStream), spdy::Error> {
    let headers = |kind: &str| -> spdy::Headers {
        vec![
            ("streamtype".to_owned(), kind.to_owned()),
            ("port".to_owned(), port.to_string()),
            ("requestid".to_owned(), request.to_string()),
        ]
    };
    let error = session.open(headers("error")).await?;
    // The client never writes to the error stream.
    let (error, _) = error.into_inner();
    let data = session.open(headers("data")).await?;
    Ok((data, error))
}

/// The subprotocol for [`open_forward`].
pub const FORWARD_PROTOCOL: &str = TUNNEL_FORWARD;
