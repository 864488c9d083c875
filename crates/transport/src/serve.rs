//! The serve loop: accepts, shakes hands, drives HTTP/1.1 and HTTP/2, drains at the end.
//!
//! In: a listener, TLS settings that may change at any time, a tower service, a stop signal. Out:
//! requests that carry a [`ConnectionInfo`]. The returned future owns every connection: when it
//! ends, all of them have ended (upgraded ones belong to whoever took them over).
//!
//! ```text
//! accept ─► (TLS, at most `handshake`) ─► h2 or http/1.1 by ALPN ─► service
//!    ▲ waits for a permit (`connections`)      │ stop: finish what runs, at most `drain`
//!    └── few are left: idle ones go after `crowded`, not after `idle`
//! ```
//!
//! An answer to HEAD has no body, whatever the service gives: on HTTP/2 nobody else takes it away. What
//! a service leaves unread of a request is read after the answer: `unread.rs`.
//!
//! At the stop every client is told: HTTP/2 by GOAWAY, HTTP/1.1 by `Connection: close` in the next answer,
//! which an idle connection may still have for `farewell`, and TLS by close_notify at the end.
//!
//! Invariant: whoever is cut off or turned away for what it did is logged, by address and cause, and
//! at most once a minute.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base::backoff::Backoff;
use base::seldom::Seldom;
use base::task::Stop;
use bytes::Bytes;
use futures::future::Either;
use http::header::{CONNECTION, CONTENT_LENGTH};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{Service, ServiceExt};

use crate::BoxError;
use crate::authority::Renamed;
use crate::gather::{Outlet, gather};
use crate::tls::ServerTls;
use crate::unread::{Incoming, Leftover, Lingering};

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
    /// A request's headers arrive within this time after their first byte. Upstream: 32 s.
    pub header_read: Duration,
    /// A connection without a request, running or new, ends after this time. Upstream: 90 s.
    pub idle: Duration,
    /// The same, and the time for a handshake, while few connections are left: who holds thousands
    /// open keeps nobody out.
    pub crowded: Duration,
    /// Upstream: 1 MiB, Go's default.
    pub header_bytes: usize,
    /// Requests at one time on one HTTP/2 connection, watches among them. Deviation: upstream says
    /// 100; Go clients then open a second connection, others stall behind their own watches.
    pub streams: u32,
    /// At stop, what runs may finish within this time.
    pub drain: Duration,
    /// At stop, a connection of HTTP/1.1 may bring one more request within this time: its client may have
    /// sent it already. Upstream: such a client reads the end of the connection instead of an answer.
    pub farewell: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 10_000,
            handshake: Duration::from_secs(10),
            header_read: Duration::from_secs(32),
            idle: Duration::from_secs(90),
            crowded: Duration::from_secs(1),
            header_bytes: 1 << 20,
            streams: 1000,
            drain: Duration::from_secs(10),
            farewell: Duration::from_millis(500),
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
    /// Requests may show `u` in place of the authority that the client sent: see `authority.rs`.
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
                Ok((Box::new(Renamed::new(stream)), ConnectionInfo::default()))
            }
        }
    }
}

/// One type of byte stream for TCP, Unix and TLS, so that HTTP is compiled once per service.
pub(crate) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}
pub(crate) type BoxIo = Box<dyn Io>;

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
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let permits = Arc::new(Semaphore::new(limits.connections));
    let door = Arc::new(Door::new(limits, stop.clone()));
    let mut connections = JoinSet::new();
    // The process is out of files or memory: wait for connections to end.
    let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_secs(1));
    loop {
        door.look(permits.available_permits());
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
                door.refused(None, "cannot accept connections", &error);
                door.look(0);
                stop.or(tokio::time::sleep(backoff.step())).await;
                continue;
            }
        };
        backoff.reset();
        let (tls, service, door) = (tls.clone(), service.clone(), door.clone());
        connections.spawn(async move {
            let _permit = permit;
            connection(io, info, tls, service, &door).await;
        });
    }
    drop(listener);
    while let Some(ended) = connections.join_next().await {
        report(ended);
    }
}

/// What all connections of a listener share.
struct Door {
    limits: Limits,
    stop: Stop,
    /// Few connections are left.
    crowded: watch::Sender<bool>,
    /// Who was turned away, and why.
    refusals: Seldom<(Option<IpAddr>, &'static str)>,
}

impl Door {
    fn new(limits: Limits, stop: Stop) -> Self {
        Self { limits, stop, crowded: watch::Sender::new(false), refusals: Seldom::default() }
    }

    /// Crowded from the last eighth on until a quarter is free again.
    fn look(&self, left: usize) {
        let all = self.limits.connections;
        let is_crowded = *self.crowded.borrow();
        if !is_crowded && left <= all / 8 {
            self.crowded.send_replace(true);
            let why = format!("{left} of {all} connections are left");
            self.refused(None, "idle connections are cut early", &why);
        } else if is_crowded && left > all / 4 {
            self.crowded.send_replace(false);
        }
    }

    /// Resolves after the time for what is usual, or for a crowd while there is one.
    async fn patience(&self, usual: Duration) {
        let begun = Instant::now();
        let mut crowded = self.crowded.subscribe();
        loop {
            let is_crowded = *crowded.borrow_and_update();
            let limit = if is_crowded { usual.min(self.limits.crowded) } else { usual };
            let deadline = tokio::time::sleep_until(begun + limit);
            // The sender is here: it cannot be gone.
            tokio::select! {
                () = deadline => return,
                _ = crowded.changed() => {}
            }
        }
    }

    /// Resolves when a connection is to end because the listener does. One of HTTP/2 is told at once, one of
    /// HTTP/1.1 in its next answer.
    async fn leave(&self, activity: &Activity, is_h2: bool) {
        self.stop.wait().await;
        if !is_h2 {
            // An error: it is idle, and nothing came.
            let _ = tokio::time::timeout(self.limits.farewell, activity.requested()).await;
        }
    }

    fn refused(&self, remote: Option<SocketAddr>, cause: &'static str, why: &dyn Display) {
        let Some(unsaid) = self.refusals.ask((remote.map(|remote| remote.ip()), cause)) else {
            return tracing::debug!(?remote, %why, "{cause}");
        };
        let remote = remote.map(tracing::field::display);
        tracing::warn!(remote, %why, unsaid, "{cause}");
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
    door: &Door,
) where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let Some(tls) = tls else {
        return http(io, info, false, service, door).await;
    };
    let (acceptor, nothing) =
        (tokio_rustls::TlsAcceptor::from(tls.load_full()), Activity::default());
    let accepted = tokio::select! {
        biased;
        () = door.leave(&nothing, false) => return,
        accepted = acceptor.accept(io) => accepted,
        () = door.patience(door.limits.handshake) => {
            return door.refused(info.remote, HANDSHAKE, &"it did not end in time");
        }
    };
    let io = match accepted {
        Ok(io) => io,
        // Somebody looked whether the port is open.
        Err(error) if is_gone(&error) => return,
        // Upstream logs the same at the same place: it is how people find wrong authorities.
        Err(error) => return door.refused(info.remote, HANDSHAKE, &error),
    };
    let session = io.get_ref().1;
    let is_h2 = session.alpn_protocol() == Some(b"h2");
    info.is_tls = true;
    info.peer_certificates = session
        .peer_certificates()
        .map(|chain| chain.iter().map(|c| c.clone().into_owned()).collect());
    http(Box::new(io), info, is_h2, service, door).await;
}

const HANDSHAKE: &str = "TLS handshake error";

fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

async fn http<S, B>(io: BoxIo, info: ConnectionInfo, is_h2: bool, service: S, door: &Door)
where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    let (remote, is_tls) = (info.remote, info.is_tls);
    let activity = Activity::default();
    let lingering = Arc::new(Lingering::default());
    let service = service_fn({
        let (activity, lingering) = (activity.clone(), lingering.clone());
        let stop = door.stop.clone();
        move |mut request: Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(info.clone());
            let is_h2 = request.version() == Version::HTTP_2;
            let is_head = is_h2 && request.method() == Method::HEAD;
            let has_body = is_h2 && !http_body::Body::is_end_stream(request.body());
            let leftover = has_body.then(|| Leftover::new(lingering.clone()));
            let running = activity.begin(leftover.clone());
            let request = request.map(|body| Incoming::new(body, leftover));
            let (answer, stop) = (service.clone().oneshot(request), stop.clone());
            async move {
                let mut response = answer.await?;
                say_farewell(&mut response, !is_h2 && stop.is_raised());
                let response = if is_head { headed(response) } else { response.map(Some) };
                // The request runs until its answer is sent, or dropped: the body owns it.
                Ok::<_, S::Error>(response.map(|body| Answer::new(body, running)))
            }
        }
    });
    let (io, outlet) = if is_h2 { gathered(io) } else { (io, None) };
    let io = TokioIo::new(Heard { io, activity: activity.clone() });
    let builder = builder(is_h2, is_tls, &door.limits);
    let connection = builder.serve_connection_with_upgrades(io, service);
    let mut connection = std::pin::pin!(connection);
    let mut rests = std::pin::pin!(lingering.read_on());
    let ended = tokio::select! {
        outcome = driven(connection.as_mut(), outlet.as_ref()) => Some(outcome),
        () = rests.as_mut() => None,
        () = door.leave(&activity, is_h2) => None,
        () = activity.idle(door) => None,
        // On HTTP/2 there are bytes without requests: pings are answered.
        () = activity.stalled(door.limits.header_read), if !is_h2 => {
            return door.refused(remote, "a request's headers did not come in time", &"connection cut");
        }
        () = activity.is_abused() => {
            return door.refused(remote, "HTTP/2 rapid reset", &"connection cut");
        }
    };
    let outcome = match ended {
        Some(outcome) => outcome,
        None => {
            connection.as_mut().graceful_shutdown();
            let ends = driven(connection.as_mut(), outlet.as_ref());
            let Some(outcome) = within(door.limits.drain, ends, rests).await else {
                return tracing::debug!(?remote, "requests did not end in time, connection cut");
            };
            outcome
        }
    };
    if let Some(outlet) = &outlet {
        outlet.finish().await;
    }
    if let Err(error) = outcome {
        log_end(&*error, remote, door);
    }
}

/// Errors of clients are warnings; a connection that broke is everyday.
fn log_end(error: &(dyn std::error::Error + 'static), remote: Option<SocketAddr>, door: &Door) {
    if is_the_clients(error) {
        door.refused(remote, "HTTP error", &chain_of(error));
    } else {
        tracing::trace!(?remote, %error, "connection ended");
    }
}

/// What the future yields, if it ends in time; the other one runs beside it.
async fn within<T>(
    limit: Duration,
    ends: impl Future<Output = T>,
    beside: impl Future<Output = ()> + Unpin,
) -> Option<T> {
    let ends = std::pin::pin!(tokio::time::timeout(limit, ends));
    match futures::future::select(ends, beside).await {
        Either::Left((ended, _)) => ended.ok(),
        Either::Right(_) => None,
    }
}

/// An answer to HEAD: it says how long the body would be.
fn headed<B: http_body::Body>(response: Response<B>) -> Response<Option<B>> {
    let (mut parts, body) = response.into_parts();
    if let Some(length) = body.size_hint().exact() {
        parts.headers.entry(CONTENT_LENGTH).or_insert_with(|| HeaderValue::from(length));
    }
    Response::from_parts(parts, None)
}

/// The last answer on a connection says that it is the last, unless the connection becomes another
/// protocol's.
fn say_farewell<B>(response: &mut Response<B>, is_last: bool) {
    if is_last && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Not of HTTP/1.1: who takes over such a connection writes to it himself.
fn gathered(io: BoxIo) -> (BoxIo, Option<Outlet>) {
    let (io, outlet) = gather(io);
    (Box::new(io), Some(outlet))
}

async fn driven<C, E>(mut connection: Pin<&mut C>, outlet: Option<&Outlet>) -> Result<(), E>
where
    C: Future<Output = Result<(), E>>,
    E: From<io::Error>,
{
    match outlet {
        Some(outlet) => outlet.drive(connection).await,
        None => connection.as_mut().await,
    }
}

/// Whether the client broke the protocol or a limit; that it went away is no fault.
fn is_the_clients(error: &(dyn std::error::Error + 'static)) -> bool {
    let is_io = std::iter::successors(Some(error), |error| error.source())
        .any(|error| error.downcast_ref::<io::Error>().is_some_and(is_gone));
    let Some(error) = error.downcast_ref::<hyper::Error>() else { return false };
    !is_io
        && !error.is_closed()
        && !error.is_canceled()
        && !error.is_incomplete_message()
        && !error.is_user()
}

fn chain_of(error: &(dyn std::error::Error + 'static)) -> String {
    let all = std::iter::successors(Some(error), |error| error.source());
    all.map(ToString::to_string).collect::<Vec<_>>().join(": ")
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
        // Its clock runs on idle connections too; see `Activity::stalled`.
        .header_read_timeout(None)
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

/// The requests of one connection.
#[derive(Clone, Default)]
struct Activity(Arc<watch::Sender<Requests>>);

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Requests {
    running: usize,
    all: u64,
    /// Bytes came, and no request was made of them yet.
    is_heard: bool,
    /// Requests taken back within a second, and when it began.
    resets: u32,
    since: Option<Instant>,
}

/// A client that takes back this many requests within a second, before a byte of their answers was
/// sent, is after the work that they make.
const RESETS: u32 = 200;
const RESETS_TIME: Duration = Duration::from_secs(1);

/// A request that runs.
struct Running {
    activity: Activity,
    leftover: Option<Arc<Leftover>>,
    /// Its answer began to be sent.
    is_answered: bool,
}

/// An answer that is being sent; without a body for HEAD.
struct Answer<B> {
    body: Option<B>,
    running: Running,
}

impl<B: http_body::Body> Answer<B> {
    fn new(body: Option<B>, mut running: Running) -> Self {
        // Nothing to send is soon sent.
        running.is_answered = body.as_ref().is_none_or(B::is_end_stream);
        Self { body, running }
    }
}

impl<B: http_body::Body<Data = Bytes> + Unpin> http_body::Body for Answer<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, B::Error>>> {
        self.running.is_answered = true;
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(B::is_end_stream)
    }

    fn size_hint(&self) -> http_body::SizeHint {
        // For HEAD nobody knows: hyper would say that the body is of length 0.
        self.body.as_ref().map_or_else(http_body::SizeHint::default, B::size_hint)
    }
}

/// Those who wait are told of what they wait for only: each call wakes the connection's own task, of
/// whose many requests most begin and end beside others.
impl Activity {
    fn begin(&self, leftover: Option<Arc<Leftover>>) -> Running {
        self.0.send_if_modified(|now| {
            let is_news = now.running == 0 || now.is_heard;
            (now.running, now.all, now.is_heard) = (now.running + 1, now.all + 1, false);
            is_news
        });
        Running { activity: self.clone(), leftover, is_answered: false }
    }

    /// A request was taken back.
    fn reset(&self) {
        let now = Instant::now();
        self.0.send_if_modified(|state| {
            let is_new = state.since.is_none_or(|since| now.duration_since(since) > RESETS_TIME);
            if is_new {
                (state.since, state.resets) = (Some(now), 0);
            }
            state.resets += 1;
            state.resets > RESETS
        });
    }

    /// Resolves when too many were.
    async fn is_abused(&self) {
        // The sender is here: it cannot be gone.
        let _ = self.0.subscribe().wait_for(|now| now.resets > RESETS).await;
    }

    fn heard(&self) {
        let is_first = |now: &Requests| now.running == 0 && !now.is_heard;
        if is_first(&self.0.borrow()) {
            self.0.send_if_modified(|now| {
                let is_first = is_first(now);
                now.is_heard |= is_first;
                is_first
            });
        }
    }

    /// Resolves when a request runs, or one came after this was asked.
    async fn requested(&self) {
        let mut seen = self.0.subscribe();
        let all = seen.borrow().all;
        // The sender is here: it cannot be gone.
        let _ = seen.wait_for(|now| now.running > 0 || now.all != all).await;
    }

    /// Resolves when nothing ran and nothing came for as long as the door allows.
    async fn idle(&self, door: &Door) {
        let mut seen = self.0.subscribe();
        loop {
            // The sender is here: it cannot be gone.
            let Ok(all) = seen.wait_for(|now| now.running == 0).await.map(|now| now.all) else {
                return;
            };
            tokio::select! {
                _ = seen.wait_for(|now| now.all != all) => {}
                () = door.patience(door.limits.idle) => return,
            }
        }
    }

    /// Resolves when a request was begun and did not become one in time.
    async fn stalled(&self, limit: Duration) {
        let mut seen = self.0.subscribe();
        while seen.wait_for(|now| now.is_heard).await.is_ok() {
            let begun = seen.wait_for(|now| !now.is_heard);
            if tokio::time::timeout(limit, begun).await.is_err() {
                return;
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let state = &self.activity.0;
        state.send_if_modified(|now| {
            let is_news = now.running == 1 || now.is_heard;
            (now.running, now.is_heard) = (now.running - 1, false);
            is_news
        });
        if !self.is_answered {
            self.activity.reset();
        }
        if let Some(leftover) = &self.leftover {
            leftover.answered();
        }
    }
}

/// A stream that tells when bytes come.
struct Heard {
    io: BoxIo,
    activity: Activity,
}

impl AsyncRead for Heard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.io).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.activity.heard();
        }
        outcome
    }
}

impl AsyncWrite for Heard {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
