//! SPDY/3.1: many streams over one connection, with headers. Kubernetes uses it for port-forward
//! (today inside a WebSocket) and, with older clients, for exec and attach.
//!
//! ```text
//!            ┌─ inbound:  frames ─► pipe of the stream ─► reader
//! connection ┤
//!            └─ outbound: frames ◄─ pipe of the stream ◄─ writer
//! ```
//!
//! In: a connection and a role. Out: a [`Session`] that opens and accepts streams, and a future
//! that moves the frames. The session's owner drives it.
//!
//! Invariants: a stream ends for its reader when the peer ended or reset it, or when the connection
//! is gone. Dropping (or shutting down) the writer ends it for the peer. The driver ends when the
//! session was dropped and all streams have ended, or when the peer is gone.
//!
//! Why no flow control windows: neither end of upstream's uses them. As in upstream, a slow reader
//! blocks the connection once its stream's pipe is full.

mod frame;
mod headers;

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, Join};
use tokio::sync::{mpsc, oneshot};

use crate::channels::PIPE;
use crate::ws::GOODBYE;
use frame::{
    CANCEL, Encoder, Frame, INVALID_STREAM, PIECE, PROTOCOL_ERROR, REFUSED_STREAM, Reader,
};
pub use headers::{Headers, find};

/// The name in `Upgrade` headers.
pub const UPGRADE: &str = "SPDY/3.1";
/// The header that negotiates the protocol of the streams.
pub const PROTOCOL_HEADER: &str = "x-stream-protocol-version";
const ACCEPTED_HEADER: &str = "x-accepted-stream-protocol-versions";

/// The limit on concurrent streams. Port-forward uses two per connection.
const STREAMS: usize = 1024;
/// How many frames of our own (replies, resets) may wait.
const REPLIES: usize = 256;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("SPDY: {0}")]
    Protocol(&'static str),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the SPDY session has ended")]
    Closed,
}

/// Both directions of a stream; `into_inner` takes them apart.
pub type Stream = Join<DuplexStream, DuplexStream>;

/// A stream that the peer opened.
pub struct Incoming {
    pub headers: Headers,
    pub stream: Stream,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Client,
    Server,
}

/// Opens and accepts streams.
pub struct Session {
    opens: mpsc::Sender<Open>,
    incoming: mpsc::Receiver<Incoming>,
}

struct Open {
    headers: Headers,
    stream: oneshot::Sender<Stream>,
}

impl Session {
    /// Opens a stream. Does not wait for the peer: if it refuses, the stream ends.
    pub async fn open(&self, headers: Headers) -> Result<Stream, Error> {
        let (stream, opened) = oneshot::channel();
        self.opens.send(Open { headers, stream }).await.map_err(|_| Error::Closed)?;
        opened.await.map_err(|_| Error::Closed)
    }

    /// The peer's next stream; `None` when the connection is gone.
    pub async fn accept(&mut self) -> Option<Incoming> {
        self.incoming.recv().await
    }
}

/// Answers an upgrade to SPDY: the response (101, or 403 without a common protocol), and the first
/// of the client's protocols that is in `supported`. A client that names none gets the empty name.
pub fn accept<'s>(headers: &HeaderMap, supported: &[&'s str]) -> (Response<()>, Option<&'s str>) {
    let offered = headers.get_all(PROTOCOL_HEADER).into_iter().filter_map(|one| one.to_str().ok());
    let offered: Vec<&str> = offered.flat_map(|one| one.split(',')).map(str::trim).collect();
    let mut response = Response::new(());
    let chosen = match offered.as_slice() {
        [] => Some(""),
        offered => {
            offered.iter().find_map(|name| supported.iter().copied().find(|one| one == name))
        }
    };
    let Some(chosen) = chosen else {
        *response.status_mut() = StatusCode::FORBIDDEN;
        for name in supported.iter().filter_map(|name| HeaderValue::from_str(name).ok()) {
            response.headers_mut().append(ACCEPTED_HEADER, name);
        }
        return (response, None);
    };
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(UPGRADE));
    if let Ok(name) = HeaderValue::from_str(chosen)
        && !chosen.is_empty()
    {
        headers.insert(PROTOCOL_HEADER, name);
    }
    (response, Some(chosen))
}

/// What both directions of the connection share.
struct Shared {
    role: Role,
    /// The pipes for the peer's data, by stream. Inbound takes a pipe out while it writes to it.
    pipes: Mutex<HashMap<u32, DuplexStream>>,
}

impl Shared {
    fn take(&self, stream: u32) -> Option<DuplexStream> {
        self.pipes.lock().expect("no panic under the lock").remove(&stream)
    }

    /// `false` if there are too many streams.
    fn put(&self, stream: u32, pipe: DuplexStream) -> bool {
        let mut pipes = self.pipes.lock().expect("no panic under the lock");
        let fits = pipes.len() < STREAMS;
        if fits {
            pipes.insert(stream, pipe);
        }
        fits
    }

    fn is_peers(&self, id: u32) -> bool {
        (id % 2 == 1) == (self.role == Role::Server)
    }
}

/// Messages from inbound to outbound.
enum Reply {
    Frame(Frame),
    /// The peer opened a stream: sends the content of this pipe.
    Attach(u32, DuplexStream),
    /// The peer reset the stream: its writer's data is dropped.
    Forget(u32),
}

/// Starts SPDY on a connection.
pub fn session<S>(
    io: S,
    role: Role,
) -> (Session, impl Future<Output = Result<(), Error>> + Send + use<S>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let (opens, open_requests) = mpsc::channel(16);
    let (accepted, incoming) = mpsc::channel(16);
    let (replies, reply_queue) = mpsc::channel(REPLIES);
    let shared = Arc::new(Shared { role, pipes: Mutex::default() });
    let (reader, writer) = tokio::io::split(io);
    let driver = async move {
        let inbound = Inbound { shared: shared.clone(), accepted, replies, newest: 0 };
        let outbound = Outbound {
            shared: shared.clone(),
            io: writer,
            encoder: Encoder::new(),
            buffer: BytesMut::new(),
            pipes: FuturesUnordered::new(),
            open: HashSet::new(),
            next_id: if role == Role::Client { 1 } else { 2 },
        };
        let mut inbound = std::pin::pin!(inbound.run(Reader::new(reader)));
        let outcome = tokio::select! {
            // The peer is gone: unsent data is lost.
            outcome = inbound.as_mut() => outcome,
            outcome = outbound.run(open_requests, reply_queue) => {
                outcome?;
                // Waits for the peer to close: closing with unread input would reset the connection
                // and lose our last bytes.
                let _ = tokio::time::timeout(GOODBYE, inbound).await;
                Ok(())
            }
        };
        shared.pipes.lock().expect("no panic under the lock").clear();
        outcome
    };
    (Session { opens, incoming }, driver)
}

/// The two pipes of a stream: our ends and the driver's ends.
fn stream_pipes() -> (Stream, DuplexStream, DuplexStream) {
    let (read, read_driver) = tokio::io::duplex(PIPE);
    let (write, write_driver) = tokio::io::duplex(PIPE);
    (tokio::io::join(read, write), read_driver, write_driver)
}

struct Inbound {
    shared: Arc<Shared>,
    accepted: mpsc::Sender<Incoming>,
    replies: mpsc::Sender<Reply>,
    /// The peer's newest stream id: ids only grow.
    newest: u32,
}

impl Inbound {
    async fn run<R: AsyncRead + Unpin>(mut self, mut frames: Reader<R>) -> Result<(), Error> {
        while let Some(frame) = frames.next().await? {
            match frame {
                Frame::SynStream { stream, headers, fin } => {
                    self.opened(stream, headers, fin).await?
                }
                Frame::Data { stream, data, fin } => self.data(stream, &data, fin).await,
                Frame::SynReply { stream, fin: true, .. } => drop(self.shared.take(stream)),
                Frame::RstStream { stream, .. } => {
                    drop(self.shared.take(stream));
                    self.reply(Reply::Forget(stream)).await;
                }
                Frame::Ping { id } if self.shared.is_peers(id) => {
                    self.reply(Reply::Frame(Frame::Ping { id })).await;
                }
                Frame::SynReply { .. }
                | Frame::Ping { .. }
                | Frame::GoAway { .. }
                | Frame::Other => {}
            }
        }
        Ok(())
    }

    async fn opened(&mut self, stream: u32, headers: Headers, fin: bool) -> Result<(), Error> {
        if !self.shared.is_peers(stream) || stream <= self.newest {
            return Err(Error::Protocol("a stream id is out of order"));
        }
        self.newest = stream;
        let (ours, read_driver, write_driver) = stream_pipes();
        let is_open = fin || self.shared.put(stream, read_driver);
        if !is_open || self.accepted.send(Incoming { headers, stream: ours }).await.is_err() {
            drop(self.shared.take(stream));
            self.reset(stream, REFUSED_STREAM).await;
            return Ok(());
        }
        let frame = Frame::SynReply { stream, headers: vec![], fin: false };
        self.reply(Reply::Frame(frame)).await;
        self.reply(Reply::Attach(stream, write_driver)).await;
        Ok(())
    }

    async fn data(&mut self, stream: u32, data: &Bytes, fin: bool) {
        let Some(mut pipe) = self.shared.take(stream) else {
            // Ended or unknown stream. Data that was in flight during our reset needs no reply.
            if self.shared.is_peers(stream) && stream > self.newest {
                self.reset(stream, INVALID_STREAM).await;
            }
            return;
        };
        let written = pipe.write_all(data).await;
        match written {
            Err(_) => self.reset(stream, CANCEL).await,
            Ok(()) if fin => {}
            Ok(()) => {
                let fits = self.shared.put(stream, pipe);
                if !fits {
                    self.reset(stream, PROTOCOL_ERROR).await;
                }
            }
        }
    }

    async fn reset(&self, stream: u32, status: u32) {
        self.reply(Reply::Frame(Frame::RstStream { stream, status })).await;
    }

    async fn reply(&self, reply: Reply) {
        // An error means that outbound has ended, and with it the driver.
        let _ = self.replies.send(reply).await;
    }
}

/// A chunk from a stream's writer: the stream, its pipe, and the data (`None`: the end).
type Said = (u32, DuplexStream, Option<Bytes>);

struct Outbound<W, F> {
    shared: Arc<Shared>,
    io: W,
    encoder: Encoder,
    buffer: BytesMut,
    /// One future per stream that is open for writing.
    pipes: FuturesUnordered<F>,
    /// Streams that are open for writing; one that the peer reset leaves this set first.
    open: HashSet<u32>,
    next_id: u32,
}

type Listening = std::pin::Pin<Box<dyn Future<Output = Said> + Send>>;

fn listen(stream: u32, mut pipe: DuplexStream) -> Listening {
    Box::pin(async move {
        let mut data = BytesMut::with_capacity(PIECE);
        // Reading a pipe fails only at its end.
        let count = (&mut pipe).take(PIECE as u64).read_buf(&mut data).await.unwrap_or(0);
        (stream, pipe, (count > 0).then(|| data.freeze()))
    })
}

impl<W: AsyncWrite + Unpin> Outbound<W, Listening> {
    async fn run(
        mut self,
        mut opens: mpsc::Receiver<Open>,
        mut replies: mpsc::Receiver<Reply>,
    ) -> Result<(), Error> {
        let mut is_held = true;
        while is_held || !self.pipes.is_empty() {
            tokio::select! {
                biased;
                Some(reply) = replies.recv() => match reply {
                    Reply::Frame(frame) => self.encoder.encode(&frame, &mut self.buffer),
                    Reply::Attach(stream, pipe) => self.attach(stream, pipe),
                    Reply::Forget(stream) => {
                        self.open.remove(&stream);
                    }
                },
                open = opens.recv(), if is_held => match open {
                    Some(open) => self.open(open),
                    None => is_held = false,
                },
                Some((stream, pipe, piece)) = self.pipes.next(), if !self.pipes.is_empty() => {
                    self.said(stream, pipe, piece);
                }
            }
            self.io.write_all_buf(&mut self.buffer).await?;
            self.io.flush().await?;
        }
        self.encoder.encode(&Frame::GoAway { last: 0 }, &mut self.buffer);
        self.io.write_all_buf(&mut self.buffer).await?;
        self.io.shutdown().await?;
        Ok(())
    }

    fn open(&mut self, open: Open) {
        let stream = self.next_id;
        self.next_id += 2;
        let (ours, read_driver, write_driver) = stream_pipes();
        // Too many streams: the caller sees the session as closed.
        if self.shared.put(stream, read_driver) && open.stream.send(ours).is_ok() {
            let frame = Frame::SynStream { stream, headers: open.headers, fin: false };
            self.encoder.encode(&frame, &mut self.buffer);
            self.attach(stream, write_driver);
        }
    }

    fn attach(&mut self, stream: u32, pipe: DuplexStream) {
        self.open.insert(stream);
        self.pipes.push(listen(stream, pipe));
    }

    fn said(&mut self, stream: u32, pipe: DuplexStream, piece: Option<Bytes>) {
        if !self.open.contains(&stream) {
            return;
        }
        let fin = piece.is_none();
        let frame = Frame::Data { stream, data: piece.unwrap_or_default(), fin };
        self.encoder.encode(&frame, &mut self.buffer);
        if fin {
            self.open.remove(&stream);
        } else {
            self.pipes.push(listen(stream, pipe));
        }
    }
}

/// Waits for `count` streams, which a server expects.
pub(crate) async fn accept_all(
    session: &mut Session,
    count: usize,
    limit: Duration,
) -> Result<Vec<Incoming>, Error> {
    let collect = async {
        let mut all = Vec::with_capacity(count);
        while all.len() < count {
            all.push(session.accept().await.ok_or(Error::Closed)?);
        }
        Ok(all)
    };
    let late = |_| Error::Protocol("timed out waiting for client to create streams");
    tokio::time::timeout(limit, collect).await.map_err(late)?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> Headers {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[tokio::test]
    async fn streams_carry_bytes_both_ways_and_end_apart() {
        let (near, far) = tokio::io::duplex(1000);
        let (client, client_driver) = session(near, Role::Client);
        let (mut server, server_driver) = session(far, Role::Server);
        let payload = b"all the bytes".repeat(20_000);
        let echo = async {
            // Echoes every stream until its end, then sends its tag.
            for _ in 0..3 {
                let incoming = server.accept().await.expect("a stream");
                let tag = find(&incoming.headers, "tag").expect("a tag").to_owned();
                let (mut reader, mut writer) = incoming.stream.into_inner();
                tokio::io::copy(&mut reader, &mut writer).await.expect("copies");
                writer.write_all(tag.as_bytes()).await.expect("the client reads");
            }
            drop(server);
        };
        let talk = async {
            for tag in ["a", "b", "c"] {
                let stream = client.open(headers(&[("Tag", tag)])).await.expect("opens");
                let (mut reader, mut writer) = stream.into_inner();
                let write = async {
                    writer.write_all(&payload).await.expect("writes");
                    drop(writer);
                };
                let mut got = vec![];
                let ((), read) = tokio::join!(write, reader.read_to_end(&mut got));
                read.expect("reads");
                assert_eq!(got, [&payload[..], tag.as_bytes()].concat());
            }
            drop(client);
        };
        let all = async { tokio::join!(echo, talk, client_driver, server_driver) };
        let (.., one, two) = testkit::wait::soon("all end", all).await;
        assert!(one.is_ok() && two.is_ok(), "{one:?} {two:?}");
    }

    #[tokio::test]
    async fn a_vanished_peer_ends_the_streams() {
        let (near, far) = tokio::io::duplex(1000);
        let (client, driver) = session(near, Role::Client);
        let talk = async {
            let mut stream = client.open(headers(&[])).await.expect("opens");
            drop(far);
            assert_eq!(stream.read(&mut [0; 8]).await.expect("an end"), 0);
        };
        let (driven, ()) = tokio::join!(driver, talk);
        // A pipe may break while it is written to.
        let _ = driven;
        assert!(matches!(client.open(headers(&[])).await, Err(Error::Closed)));
    }

    #[test]
    fn handshakes_agree_on_a_protocol() {
        let check = |offers: &[&str], status: u16, expected: Option<&str>| {
            let mut request = HeaderMap::new();
            for offer in offers {
                request.append(PROTOCOL_HEADER, HeaderValue::from_str(offer).expect("a value"));
            }
            let (response, chosen) = accept(&request, &["v4.channel.k8s.io", "v3.channel.k8s.io"]);
            assert_eq!((response.status().as_u16(), chosen), (status, expected), "{offers:?}");
        };
        check(&["v4.channel.k8s.io", "v3.channel.k8s.io"], 101, Some("v4.channel.k8s.io"));
        check(&["v5.channel.k8s.io,v3.channel.k8s.io"], 101, Some("v3.channel.k8s.io"));
        check(&["v5.channel.k8s.io"], 403, None);
        check(&[], 101, Some(""));
    }
}
