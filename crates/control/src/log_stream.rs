//! The answer to a request for a log: a kubelet's error as a `Status`, the unchanged text, or the
//! text in WebSocket messages for a client that asks for those (browsers do).
//!
//! In: a kubelet's answer, and the client's request. Out: the client's answer. A log that flows
//! into a WebSocket is carried by a task of the server.
//! Upstream: `GenericHttpResponseChecker`, `apimachinery/pkg/util/httpstream/wsstream.Reader`.

use apiserver::resource::Body;
use base::task::Tasks;
use base64::Engine;
use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use machinery::StatusError;
use machinery::status::Reason;
use transport::ws::{self, HandshakeError, Message};

/// The maximum length of an error's text.
const REFUSAL_BYTES: usize = 50_000;
/// One message holds at most this much.
const MESSAGE_BYTES: usize = 2048;

/// No subprotocol at all means binary messages, too.
const PROTOCOLS: &[&str] = &["", BINARY, BASE64];
const BINARY: &str = "binary.k8s.io";
const BASE64: &str = "base64.binary.k8s.io";

/// A kubelet's answer, or what its refusal is to a client.
pub(crate) async fn checked(
    answer: Response<Body>,
    pod: &str,
) -> Result<Response<Body>, StatusError> {
    let code = answer.status();
    if (StatusCode::OK..=StatusCode::PARTIAL_CONTENT).contains(&code) {
        return Ok(answer);
    }
    let text = beginning(answer.into_body()).await;
    Err(match code {
        StatusCode::INTERNAL_SERVER_ERROR => StatusError::internal(text),
        StatusCode::BAD_REQUEST => StatusError::bad_request(text),
        StatusCode::NOT_FOUND => {
            let message = format!("the server could not find the requested resource ( pods {pod})");
            StatusError::new(Reason::NotFound, message).about("", "pods", pod)
        }
        _ => StatusError::internal(text).with_code(code.as_u16()),
    })
}

/// A refusal's text, as much of it as there is.
async fn beginning(mut body: Body) -> String {
    let mut text = vec![];
    while text.len() < REFUSAL_BYTES {
        let Some(Ok(frame)) = body.frame().await else { break };
        text.extend_from_slice(&frame.into_data().unwrap_or_default());
    }
    text.truncate(REFUSAL_BYTES);
    String::from_utf8_lossy(&text).into_owned()
}

/// The handshake of a client that wants messages.
pub(crate) struct Handshake {
    response: Response<()>,
    protocol: &'static str,
}

impl Handshake {
    /// `None` for a client that asks for no WebSocket.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Option<Self>, StatusError> {
        match ws::accept(headers, PROTOCOLS) {
            Ok((response, protocol)) => Ok(Some(Self { response, protocol })),
            Err(HandshakeError::NotAsked) => Ok(None),
            Err(error) => Err(StatusError::bad_request(error.to_string())),
        }
    }

    /// Sends the answer's body as messages over the request's connection.
    pub(crate) fn carry(
        self,
        tasks: &Tasks,
        request: &mut Request<Body>,
        answer: Response<Body>,
    ) -> Response<Body> {
        let io = transport::server_io(request);
        let as_text = self.protocol == BASE64;
        tasks.spawn("a log in messages", async move {
            // The client may leave at any time: that is how following a log ends.
            if let Ok(io) = io.await
                && let Err(error) = send(ws::server(io).await, answer.into_body(), as_text).await
            {
                tracing::debug!(%error, "a log was not sent to its end");
            }
        });
        self.response.map(|()| transport::empty())
    }
}

/// For the client's library: what a plain request would not have.
pub(crate) fn without_handshake(headers: &mut HeaderMap) {
    for name in [
        header::UPGRADE,
        header::CONNECTION,
        header::SEC_WEBSOCKET_KEY,
        header::SEC_WEBSOCKET_VERSION,
        header::SEC_WEBSOCKET_PROTOCOL,
        header::SEC_WEBSOCKET_EXTENSIONS,
    ] {
        headers.remove(name);
    }
}

fn message(chunk: &[u8], as_text: bool) -> Message {
    match as_text {
        true => Message::text(base64::engine::general_purpose::STANDARD.encode(chunk)),
        false => Message::binary(Bytes::copy_from_slice(chunk)),
    }
}

async fn send(
    socket: ws::WebSocket,
    mut body: Body,
    as_text: bool,
) -> Result<(), transport::BoxError> {
    let (mut out, mut back) = socket.split();
    // Upstream: an empty message comes first, so that the client sees that it is connected.
    out.send(message(b"", as_text)).await?;
    let log = async {
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            for chunk in data.chunks(MESSAGE_BYTES) {
                out.send(message(chunk, as_text)).await?;
            }
        }
        out.send(ws::farewell()).await?;
        Ok::<_, transport::BoxError>(())
    };
    // The client's data is ignored; only the end of its connection counts.
    let left = async { while let Some(Ok(_)) = back.next().await {} };
    tokio::select! {
        done = log => done,
        () = left => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn refusals_are_statuses() {
        let check = async |code: u16, expected: (u16, &str, &str)| {
            let answer = Response::builder().status(code).body(transport::full("no run"));
            let refused = checked(answer.expect("an answer"), "p").await.expect_err("a refusal");
            let tree = refused.to_json();
            let text = |name: &str| tree[name].as_str().unwrap_or_default().to_owned();
            let got = (tree["code"].as_u64().unwrap_or(0) as u16, text("reason"), text("message"));
            assert_eq!((got.0, got.1.as_str(), got.2.as_str()), expected);
        };
        check(400, (400, "BadRequest", "no run")).await;
        check(500, (500, "InternalError", "Internal error occurred: no run")).await;
        let missing = "the server could not find the requested resource ( pods p)";
        check(404, (404, "NotFound", missing)).await;
        let fine = Response::new(transport::full("log"));
        assert!(checked(fine, "p").await.is_ok());
    }

    #[test]
    fn subprotocols() {
        let check = |offered: Option<&str>, expected: Option<&str>| {
            let mut headers = HeaderMap::new();
            for (name, value) in [
                ("connection", "Upgrade"),
                ("upgrade", "websocket"),
                ("sec-websocket-version", "13"),
                ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ] {
                headers.insert(name, http::HeaderValue::from_static(value));
            }
            if let Some(offered) = offered {
                let value = offered.parse().expect("a value");
                headers.insert(header::SEC_WEBSOCKET_PROTOCOL, value);
            }
            let got = Handshake::of(&headers).ok().flatten().map(|one| one.protocol);
            assert_eq!(got, expected);
            without_handshake(&mut headers);
            assert!(matches!(Handshake::of(&headers), Ok(None)));
        };
        check(None, Some(""));
        check(Some("binary.k8s.io"), Some("binary.k8s.io"));
        check(Some("base64.binary.k8s.io, binary.k8s.io"), Some("base64.binary.k8s.io"));
        check(Some("v4.channel.k8s.io"), None);
    }

    #[test]
    fn messages() {
        assert_eq!(message(b"hi", false), Message::binary(Bytes::from_static(b"hi")));
        assert_eq!(message(b"hi", true), Message::text("aGk="));
    }
}
