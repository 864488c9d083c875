//! exec, attach and port-forward as a client of a container runtime's streaming server.
//!
//! In: a URL from the runtime, for one command or one sandbox. Out: streams, a session that keeps
//! them alive, and a future that drives the connection.
//!
//! Why SPDY and not WebSocket: every runtime supports it (upstream's kubelet translates to it from
//! any client protocol), and it can close stdin alone, which WebSocket cannot before v5.

use std::future::Future;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, header};
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use crate::channels::{Streams, TerminalSize};
use crate::client::{ClientError, HttpClient};
use crate::spdy::{self, PROTOCOL_HEADER, Session, Stream};
use crate::upgrade::{Upgrade, UpgradedIo};

/// The only protocol with exit codes; older ones are obsolete.
const COMMAND_PROTOCOL: &str = "v4.channel.k8s.io";
const FORWARD_PROTOCOL: &str = "portforward.k8s.io";
/// How much of a refusal's body an error repeats.
const REFUSAL: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Spdy(#[from] spdy::Error),
    /// The server's status and its message.
    #[error("unable to upgrade connection: {0}")]
    Refused(String),
    #[error("unable to negotiate protocol: the server chose {0:?}")]
    Protocol(String),
}

/// The requested streams of a command.
pub struct Command {
    /// Shutting it down ends the command's input.
    pub stdin: Option<Stream>,
    pub stdout: Option<Stream>,
    pub stderr: Option<Stream>,
    /// Takes terminal sizes; see [`send_sizes`].
    pub resize: Option<Stream>,
    /// Yields one JSON `Status` when the command has ended.
    pub error: Stream,
}

/// Connects to the URL of an exec or attach. Poll the future while using the rest.
pub async fn connect_command(
    http: &HttpClient,
    url: &str,
) -> Result<(Session, impl Future<Output = Result<(), spdy::Error>> + Send + use<>), Error> {
    let io = upgrade(http, url, COMMAND_PROTOCOL).await?;
    Ok(spdy::session(io, spdy::Role::Client))
}

/// Connects to the URL of a port-forward; [`crate::remote::open_forward`] opens its connections.
pub async fn connect_forward(
    http: &HttpClient,
    url: &str,
) -> Result<(Session, impl Future<Output = Result<(), spdy::Error>> + Send + use<>), Error> {
    let io = upgrade(http, url, FORWARD_PROTOCOL).await?;
    Ok(spdy::session(io, spdy::Role::Client))
}

async fn upgrade(
    http: &HttpClient,
    url: &str,
    protocol: &'static str,
) -> Result<UpgradedIo, Error> {
    let request = Request::post(url)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, spdy::UPGRADE)
        .header(PROTOCOL_HEADER, protocol)
        .body(crate::empty())
        .map_err(ClientError::from)?;
    match http.upgrade(request).await? {
        Upgrade::Switched(parts, io) => check(&parts.headers, protocol).map(|()| io),
        Upgrade::Refused(response) => Err(Error::Refused(refusal(&response))),
    }
}

/// Upstream's servers always name the protocol. A server that names none accepted the only one offered.
fn check(headers: &HeaderMap, offered: &str) -> Result<(), Error> {
    let chosen = headers.get(PROTOCOL_HEADER).and_then(|value| value.to_str().ok());
    match chosen {
        Some(chosen) if chosen != offered => Err(Error::Protocol(chosen.to_owned())),
        _ => Ok(()),
    }
}

fn refusal(response: &Response<Bytes>) -> String {
    let body = response.body();
    let text = String::from_utf8_lossy(&body[..body.len().min(REFUSAL)]).trim().to_owned();
    if text.is_empty() { response.status().to_string() } else { text }
}

/// Opens a command's streams, in upstream's order.
pub async fn open_command(session: &Session, streams: Streams) -> Result<Command, spdy::Error> {
    let open = async |kind: &str, wanted: bool| match wanted {
        false => Ok(None),
        true => session.open(vec![("streamtype".to_owned(), kind.to_owned())]).await.map(Some),
    };
    let error = open("error", true).await?.ok_or(spdy::Error::Closed)?;
    Ok(Command {
        error,
        stdin: open("stdin", streams.stdin).await?,
        stdout: open("stdout", streams.stdout).await?,
        stderr: open("stderr", streams.stderr && !streams.tty).await?,
        resize: open("resize", streams.tty).await?,
    })
}

/// Passes terminal sizes on until one side ends.
pub async fn send_sizes(mut stream: Stream, mut sizes: mpsc::Receiver<TerminalSize>) {
    while let Some(size) = sizes.recv().await {
        let mut json = serde_json::to_vec(&size).expect("two numbers are JSON");
        json.push(b'\n');
        if stream.write_all(&json).await.is_err() {
            return;
        }
    }
}
