//! A client's connection to an API server: HTTP/2 over TLS, opened again when it has ended.
//!
//! In: the places where servers answer, each with the network to call from. Out: answers, and failures of two
//! kinds: a request that no server has processed, which a client repeats, and one whose fate is unknown.
//! Upstream: Go's client repeats a request after a GOAWAY that excludes it, after REFUSED_STREAM, and on a
//! connection that ended before the request was sent.

use std::error::Error as _;
use std::fs::File;
use std::net::{SocketAddr, TcpStream as Blocking};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::task::Tasks;
use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::{Mutex, oneshot};
use tokio_rustls::TlsConnector;

use crate::host::enter_network;
use crate::http::ApiClient;

const DIAL: Duration = Duration::from_secs(2);
/// A connection without answers to pings ends after both.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_LIMIT: Duration = Duration::from_secs(3);

type Sender = SendRequest<Full<Bytes>>;

/// An address, and the network from which it is called.
pub struct Place {
    pub network: Arc<File>,
    pub address: SocketAddr,
}

pub struct Link {
    /// Tried in turn, from the one that answered last.
    places: Vec<Place>,
    current: AtomicUsize,
    connector: TlsConnector,
    /// Guards the connection, which all requests share.
    open: Mutex<Option<Sender>>,
    tasks: Tasks,
}

pub struct Answer {
    pub status: u16,
    /// The server says that it has not processed the request.
    pub may_repeat: bool,
    pub body: Bytes,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    /// No server has processed it.
    Unsent(String),
    /// It may have been processed, or still be.
    Unknown(String),
}

/// One request.
#[derive(Clone)]
pub struct Ask {
    pub method: Method,
    pub path: String,
    pub body: Bytes,
    pub limit: Duration,
}

impl Ask {
    pub fn new(method: Method, path: String, body: impl Into<Bytes>, limit: Duration) -> Self {
        Self { method, path, body: body.into(), limit }
    }

    pub fn get(path: &str, limit: Duration) -> Self {
        Self::new(Method::GET, path.to_owned(), Bytes::new(), limit)
    }
}

impl Link {
    pub fn new(client: &ApiClient, places: Vec<Place>, tasks: &Tasks) -> Arc<Self> {
        let (_, mut config) = client.tls();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let connector = TlsConnector::from(Arc::new(config));
        let (current, open) = (AtomicUsize::new(0), Mutex::default());
        Arc::new(Self { places, current, connector, open, tasks: tasks.clone() })
    }

    pub async fn ask(&self, ask: Ask) -> Result<Answer, Failure> {
        let limit = ask.limit;
        let whole = async {
            let answer = self.send(ask).await?;
            let status = answer.status().as_u16();
            let may_repeat = answer.headers().contains_key(header::RETRY_AFTER);
            let body = answer.into_body().collect().await;
            let body = body.map_err(|error| Failure::Unknown(error.to_string()))?.to_bytes();
            Ok(Answer { status, may_repeat, body })
        };
        let late = || Failure::Unknown(format!("no answer within {limit:?}"));
        tokio::time::timeout(limit, whole).await.unwrap_or_else(|_| Err(late()))
    }

    /// The body of a stream.
    pub async fn stream(&self, path: &str) -> Result<Incoming, String> {
        let ask = Ask::get(path, Duration::ZERO);
        let answer = self.send(ask).await.map_err(|failure| format!("{failure:?}"))?;
        match answer.status().as_u16() {
            200 => Ok(answer.into_body()),
            status => Err(format!("status {status}")),
        }
    }

    async fn send(&self, ask: Ask) -> Result<http::Response<Incoming>, Failure> {
        let mut sender =
            self.sender().await.map_err(|error| Failure::Unsent(format!("{error:#}")))?;
        let at = self.places[self.current.load(Ordering::Relaxed)].address;
        let request = Request::builder()
            .method(ask.method)
            .uri(format!("https://{at}{}", ask.path))
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(ask.body))
            .map_err(|error| Failure::Unsent(error.to_string()))?;
        sender.ready().await.map_err(|error| Failure::Unsent(error.to_string()))?;
        sender.send_request(request).await.map_err(failure)
    }

    async fn sender(&self) -> Result<Sender> {
        let mut open = self.open.lock().await;
        if let Some(sender) = &*open
            && !sender.is_closed()
        {
            return Ok(sender.clone());
        }
        *open = None;
        let first = self.current.load(Ordering::Relaxed);
        let mut last = None;
        for step in 0..self.places.len() {
            let at = (first + step) % self.places.len();
            match tokio::time::timeout(DIAL, self.dial(&self.places[at])).await {
                Ok(Ok(sender)) => {
                    self.current.store(at, Ordering::Relaxed);
                    *open = Some(sender.clone());
                    return Ok(sender);
                }
                Ok(Err(error)) => last = Some(error),
                Err(_) => last = Some(anyhow::anyhow!("no connection within {DIAL:?}")),
            }
        }
        Err(last.context("a link has a place")?)
    }

    async fn dial(&self, place: &Place) -> Result<Sender> {
        let socket = connect(place).await?;
        socket.set_nodelay(true)?;
        let name = ServerName::IpAddress(place.address.ip().into());
        let stream = TokioIo::new(self.connector.connect(name, socket).await?);
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PING_LIMIT)
            .handshake(stream)
            .await?;
        // Its requests have the error, too.
        self.tasks.spawn("connection", async { drop(connection.await) });
        Ok(sender)
    }
}

/// Connects from inside the place's network, on a thread of its own, which stays in that network.
async fn connect(place: &Place) -> Result<TcpStream> {
    let (tell, told) = oneshot::channel();
    let (network, address) = (place.network.clone(), place.address);
    std::thread::spawn(move || {
        let connected = enter_network(&network)
            .and_then(|()| Blocking::connect_timeout(&address, DIAL))
            .and_then(|stream| stream.set_nonblocking(true).map(|()| stream));
        // The caller may have given up.
        let _ = tell.send(connected);
    });
    let Ok(connected) = told.await else { bail!("the connecting thread has ended") };
    Ok(TcpStream::from_std(connected.with_context(|| address.to_string())?)?)
}

fn failure(error: hyper::Error) -> Failure {
    let inner = error.source().and_then(|source| source.downcast_ref::<h2::Error>());
    let is_excluded = inner.is_some_and(|inner| {
        let reason = inner.reason();
        inner.is_remote()
            && (reason == Some(h2::Reason::REFUSED_STREAM)
                || inner.is_go_away() && reason == Some(h2::Reason::NO_ERROR))
    });
    let text = match inner {
        Some(inner) => format!("{error}: {inner}"),
        None => error.to_string(),
    };
    if error.is_canceled() || is_excluded { Failure::Unsent(text) } else { Failure::Unknown(text) }
}
