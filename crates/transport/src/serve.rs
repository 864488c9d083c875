//! The serve loop: accepts, shakes hands, drives HTTP/1.1 and HTTP/2, drains at the end.
//!
//! In: a listener, TLS settings that may change at any time, a tower service, a stop signal. Out:
//! requests that carry a [`ConnectionInfo`]. The returned future owns every connection: when it
//! ends, all of them have ended (upgraded ones belong to whoever took them over).
//!
//! ```text
//! accept ─► (TLS, at most `handshake`) ─► h2 or http/1.1 by ALPN ─► service
//!    ▲ waits for a permit (`connections`)      │ stop: finish what runs, at most `drain`
//! ```

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Stop;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tower::{Service, ServiceExt};

use crate::BoxError;
use crate::tls::ServerTls;

/// What a service may know about the connection that a request came on: an extension of each.
#[derive(Clone, Debug, Default)]
pub struct ConnectionInfo {
    /// `None` on Unix sockets.
    pub remote: Option<SocketAddr>,
    pub local: Option<SocketAddr>,
    pub is_tls: bool,
    /// The client's chain, leaf first: possession is proven, the chain is not (see [`crate::tls`]).
    pub peer_certificates: Option<Arc<[CertificateDer<'static>]>>,
}

#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at one time; more wait in the kernel's queue.
    pub connections: usize,
    /// A TLS handshake takes no longer.
    pub handshake: Duration,
    /// A request's headers arrive within this time, idle connections included. Upstream: 90 s idle.
    pub header_read: Duration,
    /// A connection without a request, running or new, ends after this time: who holds thousands
    /// open keeps nobody out for long. Upstream: 90 s.
    pub idle: Duration,
    /// Upstream: 1 MiB, Go's default.
    pub header_bytes: usize,
    /// Requests at one time on one HTTP/2 connection, watches among them. Deviation: upstream says
    /// 100; Go clients then open a second connection, others stall behind their own watches.
    pub streams: u32,
    /// At stop, what runs may finish within this time.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 10_000,
            handshake: Duration::from_secs(10),
            header_read: Duration::from_secs(90),
            idle: Duration::from_secs(90),
            header_bytes: 1 << 20,
            streams: 1000,
            drain: Duration::from_secs(10),
        }
    }
}

pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub async fn tcp(address: SocketAddr) -> io::Result<Self> {
        TcpListener::bind(address).await.map(Self::Tcp)
    }

    /// A socket file that only its owner may use. One left behind by a dead process is replaced.
    pub fn unix(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::PermissionsExt;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))?;
        Ok(Self::Unix(listener))
    }

    /// Where a TCP listener listens (the port is known now, also if it was 0).
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(_) => None,
        }
    }

    async fn accept(&self) -> io::Result<(BoxIo, ConnectionInfo)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, remote) = listener.accept().await?;
                stream.set_nodelay(true)?;
                let local = stream.local_addr().ok();
                let info =
                    ConnectionInfo { remote: Some(remote), local, ..ConnectionInfo::default() };
                Ok((Box::new(stream), info))
            }
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                Ok((Box::new(stream), ConnectionInfo::default()))
            }
        }
    }
}

/// One type of byte stream for TCP, Unix and TLS, so that HTTP is compiled once per service.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}
type BoxIo = Box<dyn Io>;

/// Serves until `stop`, then drains.
pub async fn serve<S, B>(
    listener: Listener,
    tls: Option<ServerTls>,
    service: S,
    limits: Limits,
    stop: Stop,
) where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let permits = Arc::new(Semaphore::new(limits.connections));
    let mut connections = JoinSet::new();
    // The process is out of files or memory: wait for connections to end.
    let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_secs(1));
    loop {
        let next = async {
            let permit = permits.clone().acquire_owned().await.expect("it is never closed");
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            biased;
            () = stop.wait() => break,
            Some(ended) = connections.join_next(), if !connections.is_empty() => {
                report(ended);
                continue;
            }
            next = next => next,
        };
        let (io, info) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_about_one_connection(&error) => continue,
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
                stop.or(tokio::time::sleep(backoff.step())).await;
                continue;
            }
        };
        backoff.reset();
        let (tls, service, limits, stop) =
            (tls.clone(), service.clone(), limits.clone(), stop.clone());
        connections.spawn(async move {
            let _permit = permit;
            connection(io, info, tls, service, limits, stop).await;
        });
    }
    drop(listener);
    while let Some(ended) = connections.join_next().await {
        report(ended);
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection's task panicked");
    }
}

fn is_about_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, NotConnected};
    matches!(error.kind(), ConnectionAborted | ConnectionReset | NotConnected)
}

/// From the first byte to the last of one connection.
async fn connection<S, B>(
    io: BoxIo,
    mut info: ConnectionInfo,
    tls: Option<ServerTls>,
    service: S,
    limits: Limits,
    stop: Stop,
) where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let Some(tls) = tls else {
        return http(io, info, false, service, limits, stop).await;
    };
    let acceptor = tokio_rustls::TlsAcceptor::from(tls.load_full());
    let handshake = tokio::time::timeout(limits.handshake, acceptor.accept(io));
    let io = match stop.or(handshake).await {
        Some(Ok(Ok(io))) => io,
        Some(Ok(Err(error))) => {
            // Upstream logs the same at the same place: it is how people find wrong authorities.
            tracing::debug!(remote = ?info.remote, %error, "TLS handshake error");
            return;
        }
        Some(Err(_)) | None => return,
    };
    let session = io.get_ref().1;
    let is_h2 = session.alpn_protocol() == Some(b"h2");
    info.is_tls = true;
    info.peer_certificates = session
        .peer_certificates()
        .map(|chain| chain.iter().map(|c| c.clone().into_owned()).collect());
    http(Box::new(io), info, is_h2, service, limits, stop).await;
}

async fn http<S, B>(
    io: BoxIo,
    info: ConnectionInfo,
    is_h2: bool,
    service: S,
    limits: Limits,
    stop: Stop,
) where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let (remote, is_tls) = (info.remote, info.is_tls);
    let activity = Activity::default();
    let service = service_fn({
        let activity = activity.clone();
        move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(info.clone());
            let running = activity.begin();
            let answer = service.clone().oneshot(request);
            async move {
                let response = answer.await?;
                // The request runs until its answer is sent, or dropped: the body owns it.
                Ok::<_, S::Error>(response.map(|body| {
                    body.map_err(move |error| {
                        let _ = &running;
                        error
                    })
                }))
            }
        }
    });
    let builder = builder(is_h2, is_tls, &limits);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(io), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        outcome = connection.as_mut() => Some(outcome),
        () = stop.wait() => None,
        () = activity.idle(limits.idle) => None,
    };
    let outcome = match ended {
        Some(outcome) => outcome,
        None => {
            connection.as_mut().graceful_shutdown();
            match tokio::time::timeout(limits.drain, connection).await {
                Ok(outcome) => outcome,
                Err(_) => {
                    tracing::debug!(?remote, "requests did not end in time, connection cut");
                    return;
                }
            }
        }
    };
    if let Err(error) = outcome {
        tracing::trace!(?remote, %error, "connection ended");
    }
}

/// HTTP as it was agreed on, within the limits.
fn builder(is_h2: bool, is_tls: bool, limits: &Limits) -> auto::Builder<TokioExecutor> {
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut builder = match (is_h2, is_tls) {
        (true, _) => builder.http2_only(),
        (false, true) => builder.http1_only(),
        // Nothing was agreed on: the first bytes tell (gRPC over plain connections is HTTP/2).
        (false, false) => builder,
    };
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_read)
        .max_buf_size(limits.header_bytes);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams)
        .max_header_list_size(u32::try_from(limits.header_bytes).unwrap_or(u32::MAX))
        .initial_stream_window_size(256 << 10)
        .initial_connection_window_size(4 << 20)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(15));
    builder
}

/// The requests of one connection: how many run, and how many there were.
#[derive(Clone, Default)]
struct Activity(Arc<watch::Sender<(usize, u64)>>);

/// A request that runs.
struct Running(Activity);

impl Activity {
    fn begin(&self) -> Running {
        self.0.send_modify(|(running, all)| (*running, *all) = (*running + 1, *all + 1));
        Running(self.clone())
    }

    /// Resolves when nothing ran and nothing came for this long.
    async fn idle(&self, limit: Duration) {
        let mut seen = self.0.subscribe();
        loop {
            // The sender is here: it cannot be gone.
            let Ok((_, all)) = seen.wait_for(|(running, _)| *running == 0).await.map(|now| *now)
            else {
                return;
            };
            let next = seen.wait_for(|(_, now)| *now != all);
            if tokio::time::timeout(limit, next).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.0.send_modify(|(running, _)| *running -= 1);
    }
}
