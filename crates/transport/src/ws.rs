//! WebSocket (RFC 6455) on upgraded connections: both handshakes, with subprotocols, and byte
//! streams inside messages.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use crate::client::{ClientError, HttpClient};
use crate::upgrade::{Upgrade, UpgradedIo};

use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
pub use tokio_tungstenite::tungstenite::{Error, Message};

/// A WebSocket over any byte stream: a `Stream` and `Sink` of [`Message`]s.
pub type WebSocket<S = UpgradedIo> = WebSocketStream<S>;

/// The limit on a message: messages are chunks of a stream, never whole documents.
const MESSAGE_BYTES: usize = 4 << 20;
/// The limit on one message of a tunnel.
const TUNNEL_BYTES: usize = 32 << 10;
/// How long the closing handshake may take.
pub(crate) const GOODBYE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    #[error("the request does not ask for a WebSocket")]
    NotAsked,
    #[error("the WebSocket handshake has no key, or not version 13")]
    Malformed,
    #[error("the WebSocket handshake offers several subprotocols where one at most is known")]
    Several,
    /// Upstream's text.
    #[error("requested protocol(s) are not supported: {0:?}; supports {1:?}")]
    Protocol(Vec<String>, Vec<String>),
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The server's answer, with its body.
    #[error("the server refused the WebSocket: {}", .0.status())]
    Refused(Box<Response<Bytes>>),
    #[error("the server's handshake is wrong: {0}")]
    Server(&'static str),
}

/// Whether a request asks for `protocol` by `Connection: Upgrade` and `Upgrade: protocol`.
pub fn is_upgrade(headers: &HeaderMap, protocol: &str) -> bool {
    has_token(headers, header::CONNECTION, "upgrade")
        && has_token(headers, header::UPGRADE, protocol)
}

/// Whether a request asks for a WebSocket.
pub fn is_websocket(headers: &HeaderMap) -> bool {
    is_upgrade(headers, "websocket")
}

fn has_token(headers: &HeaderMap, name: header::HeaderName, token: &str) -> bool {
    tokens(headers, name).any(|found| found.eq_ignore_ascii_case(token))
}

fn tokens(headers: &HeaderMap, name: header::HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// The subprotocols a client offers, in its order of preference.
pub fn offered(headers: &HeaderMap) -> Vec<&str> {
    tokens(headers, header::SEC_WEBSOCKET_PROTOCOL).collect()
}

/// Answers a handshake: the 101 response, and the first of the client's subprotocols that is in
/// `supported`. A client that offers none gets the empty name if `supported` has it.
pub fn accept<'s>(
    headers: &HeaderMap,
    supported: &[&'s str],
) -> Result<(Response<()>, &'s str), HandshakeError> {
    if !is_websocket(headers) {
        return Err(HandshakeError::NotAsked);
    }
    let key = headers.get(header::SEC_WEBSOCKET_KEY).ok_or(HandshakeError::Malformed)?;
    if headers.get(header::SEC_WEBSOCKET_VERSION).is_none_or(|version| version != "13") {
        return Err(HandshakeError::Malformed);
    }
    let wanted = offered(headers);
    let find = |name: &&str| supported.iter().copied().find(|known| known == name);
    let chosen = if wanted.is_empty() { find(&"") } else { wanted.iter().find_map(find) };
    let chosen = chosen.ok_or_else(|| {
        let own = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        HandshakeError::Protocol(own(&wanted), own(supported))
    })?;
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    let proof = derive_accept_key(key.as_bytes());
    let proof = HeaderValue::from_str(&proof).expect("base64 is a header value");
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, proof);
    if !chosen.is_empty() {
        let chosen = HeaderValue::from_str(chosen).map_err(|_| HandshakeError::Malformed)?;
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, chosen);
    }
    Ok((response, chosen))
}

/// Answers a handshake for a service without subprotocols: accepts a single offered one. Upstream:
/// a handler of `golang.org/x/net/websocket`.
pub fn accept_sole(headers: &HeaderMap) -> Result<Response<()>, HandshakeError> {
    let wanted = offered(headers);
    match wanted[..] {
        [] => accept(headers, &[""]),
        [sole] => accept(headers, &[sole]),
        _ => return Err(HandshakeError::Several),
    }
    .map(|(response, _)| response)
}

/// The server's end, after the upgrade.
pub async fn server<S: AsyncRead + AsyncWrite + Unpin>(io: S) -> WebSocket<S> {
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config())).await
}

/// The client's end, after the upgrade.
pub async fn client<S: AsyncRead + AsyncWrite + Unpin>(io: S) -> WebSocket<S> {
    WebSocketStream::from_raw_socket(io, Role::Client, Some(config())).await
}

/// Opens a WebSocket: `path` is a path with query (or a whole URI), `protocols` in order of
/// preference. Returns the subprotocol that the server chose, empty for none.
pub async fn connect(
    http: &HttpClient,
    path: &str,
    protocols: &[&str],
) -> Result<(WebSocket, String), HandshakeError> {
    let key = generate_key();
    let mut request = Request::get(path)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, &key);
    if !protocols.is_empty() {
        request = request.header(header::SEC_WEBSOCKET_PROTOCOL, protocols.join(", "));
    }
    let request = request.body(crate::empty()).map_err(ClientError::from)?;
    let (parts, io) = match http.upgrade(request).await? {
        Upgrade::Switched(parts, io) => (parts, io),
        Upgrade::Refused(response) => return Err(HandshakeError::Refused(Box::new(response))),
    };
    let proof = parts.headers.get(header::SEC_WEBSOCKET_ACCEPT);
    if proof.is_none_or(|proof| proof.as_bytes() != derive_accept_key(key.as_bytes()).as_bytes()) {
        return Err(HandshakeError::Server("the accept key does not match"));
    }
    let chosen = parts.headers.get(header::SEC_WEBSOCKET_PROTOCOL);
    let chosen = chosen.and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !chosen.is_empty() && !protocols.contains(&chosen) {
        return Err(HandshakeError::Server("it chose a protocol that was not offered"));
    }
    Ok((client(io).await, chosen.to_owned()))
}

/// The normal Close message. A peer treats a Close without a code as a failure.
pub fn farewell() -> Message {
    Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: "".into() }))
}

/// Sends messages until they end or the client is gone; ignores the client's messages.
pub async fn send_all<S, M>(socket: WebSocket<S>, messages: M)
where
    S: AsyncRead + AsyncWrite + Unpin,
    M: futures::Stream<Item = Message>,
{
    let (mut sink, mut source) = socket.split();
    let mut messages = std::pin::pin!(messages);
    let sent = async {
        while let Some(message) = messages.next().await {
            sink.send(message).await?;
        }
        Ok::<_, Error>(())
    };
    // The client may leave at any time: that is how it ends a watch.
    let gone = async { while source.next().await.is_some_and(|read| !is_end(&read)) {} };
    let is_there = tokio::select! {
        sent = sent => sent.is_ok(),
        () = gone => false,
    };
    if is_there {
        // Waits for the client's Close: closing with unread input would lose ours.
        let goodbye = async { while source.next().await.is_some_and(|read| !is_end(&read)) {} };
        let farewell = async { tokio::join!(sink.send(farewell()), goodbye) };
        let _ = tokio::time::timeout(GOODBYE, farewell).await;
    }
}

fn is_end(read: &Result<Message, Error>) -> bool {
    matches!(read, Ok(Message::Close(_)) | Err(_))
}

/// A byte stream in a WebSocket's binary messages, which carries SPDY. Message borders have no
/// meaning; a Close is the end.
pub struct Tunnel<S = UpgradedIo> {
    socket: WebSocket<S>,
    /// The rest of the current message.
    unread: Bytes,
    has_said_farewell: bool,
}

impl<S> Tunnel<S> {
    pub fn new(socket: WebSocket<S>) -> Self {
        Self { socket, unread: Bytes::new(), has_said_farewell: false }
    }
}

fn io_error(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        Error::ConnectionClosed | Error::AlreadyClosed => io::ErrorKind::BrokenPipe.into(),
        other => io::Error::other(other),
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Tunnel<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.unread.is_empty() {
            match std::task::ready!(self.socket.poll_next_unpin(cx)) {
                Some(Ok(Message::Binary(data))) => self.unread = data,
                Some(Ok(Message::Close(_)) | Err(Error::ConnectionClosed)) | None => {
                    return Poll::Ready(Ok(()));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(io_error(error))),
            }
        }
        let count = self.unread.len().min(buffer.remaining());
        buffer.put_slice(&self.unread.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Tunnel<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        std::task::ready!(self.socket.poll_ready_unpin(cx)).map_err(io_error)?;
        let count = bytes.len().min(TUNNEL_BYTES);
        let message = Message::Binary(Bytes::copy_from_slice(&bytes[..count]));
        self.socket.start_send_unpin(message).map_err(io_error)?;
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.poll_flush_unpin(cx).map_err(io_error)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = |result| match result {
            Ok(()) | Err(Error::ConnectionClosed | Error::AlreadyClosed) => Ok(()),
            Err(error) => Err(io_error(error)),
        };
        if !self.has_said_farewell {
            let ready = std::task::ready!(self.socket.poll_ready_unpin(cx));
            if ready.is_err() {
                return Poll::Ready(ended(ready));
            }
            self.has_said_farewell = true;
            let sent = self.socket.start_send_unpin(farewell());
            if sent.is_err() {
                return Poll::Ready(ended(sent));
            }
        }
        self.socket.poll_flush_unpin(cx).map(ended)
    }
}

fn config() -> WebSocketConfig {
    WebSocketConfig::default()
        .read_buffer_size(32 << 10)
        .write_buffer_size(0)
        .max_message_size(Some(MESSAGE_BYTES))
        .max_frame_size(Some(MESSAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let parse = |&(name, value): &(&str, &str)| {
            (
                header::HeaderName::from_bytes(name.as_bytes()).expect("a name"),
                HeaderValue::from_str(value).expect("a value"),
            )
        };
        pairs.iter().map(parse).collect()
    }

    #[test]
    fn the_clients_first_known_protocol_wins() {
        let check = |offer: Option<&str>, supported: &[&str], expected: Option<&str>| {
            // The key and its answer are the example of RFC 6455.
            let mut pairs = vec![
                ("connection", "keep-alive, Upgrade"),
                ("upgrade", "websocket"),
                ("sec-websocket-version", "13"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ];
            pairs.extend(offer.map(|offer| ("sec-websocket-protocol", offer)));
            let got = accept(&headers(&pairs), supported);
            if let Ok((response, _)) = &got {
                assert_eq!(
                    response.headers()["sec-websocket-accept"],
                    "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
                );
            }
            assert_eq!(got.ok().map(|(_, chosen)| chosen), expected);
        };
        check(Some("v5, v4"), &["v4", "v5"], Some("v5"));
        check(Some("v9,v4"), &["v4", "v5"], Some("v4"));
        check(Some("v9"), &["v4"], None);
        check(None, &["v4"], None);
        check(None, &["v4", ""], Some(""));
        let sole = |offer: Option<&str>| {
            let mut pairs = vec![
                ("connection", "Upgrade"),
                ("upgrade", "websocket"),
                ("sec-websocket-version", "13"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ];
            pairs.extend(offer.map(|offer| ("sec-websocket-protocol", offer)));
            let response = accept_sole(&headers(&pairs)).ok()?;
            let chosen = response.headers().get("sec-websocket-protocol").cloned();
            Some(chosen.map(|chosen| chosen.to_str().expect("text").to_owned()))
        };
        assert_eq!(sole(None), Some(None));
        assert_eq!(sole(Some("any")), Some(Some("any".to_owned())));
        assert_eq!(sole(Some("one, two")), None);
        assert!(matches!(accept(&HeaderMap::new(), &[""]), Err(HandshakeError::NotAsked)));
    }
}
