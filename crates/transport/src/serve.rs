//! The serve loop: accepts connections, does the TLS handshake, drives HTTP/1.1 and HTTP/2, drains
//! at the end.
//!
//! In: a listener, TLS settings that may change at any time, a tower service, a stop signal. Out:
//! requests with a [`ConnectionInfo`]. The returned future owns every connection: when it ends, all
//! of them have ended (an upgraded connection belongs to the code that took it over).
//!
//! ```text
//! accept ─► (TLS, at most `handshake`) ─► h2 or http/1.1 by ALPN ─► service
//!    ▲ waits for a permit (`connections`)      │ stop: finish what runs, at most `drain`
//!    └── few are left: idle ones go after `crowded`, not after `idle`
//! ```
//!
//! An answer to HEAD has no body, whatever the service returns: on HTTP/2 no other layer removes
//! it. The unread rest of a request is read after the answer: `unread.rs`.
//!
//! An answer on HTTP/2 with `Connection: close` is followed by a GOAWAY; requests that run go on.
//!
//! At the stop every client is notified: HTTP/2 by GOAWAY; HTTP/1.1 by `Connection: close` in the
//! next answer, for which an idle connection has `farewell`; TLS by close_notify at the end.
//!
//! Invariant: a client that is cut off or refused because of its behaviour is logged, by address
//! and cause, at most once a minute.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use base::backoff::Backoff;
use base::log_limit::LogLimit;
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
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{Service, ServiceExt};

use crate::BoxError;
use crate::authority::Renamed;
use crate::gather::{Outlet, gather};
use crate::tls::ServerTls;
use crate::unread::{Incoming, Leftover, Lingering};

/// Facts about a request's connection, an extension of each request.
#[derive(Clone, Debug, Default)]
pub struct ConnectionInfo {
    /// `None` on Unix sockets.
    pub remote: Option<SocketAddr>,
    pub local: Option<SocketAddr>,
    pub is_tls: bool,
    /// The client's chain, leaf first. Possession of the key is proven, the chain is not (see
    /// [`crate::tls`]).
    pub peer_certificates: Option<Arc<[CertificateDer<'static>]>>,
}

#[derive(Clone, Debug)]
pub struct Limits {
    /// The limit on concurrent connections; more wait in the kernel's queue.
    pub connections: usize,
    /// The timeout of a TLS handshake.
    pub handshake: Duration,
    /// The timeout of a request's headers after their first byte. Upstream: 32 s.
    pub header_read: Duration,
    /// The timeout of a connection without requests. Upstream: 90 s.
    pub idle: Duration,
    /// Replaces `idle` and `handshake` while few connections are left, so that thousands of open
    /// connections cannot keep other clients out.
    pub crowded: Duration,
    /// Upstream: 1 MiB, Go's default.
    pub header_bytes: usize,
    /// The limit on concurrent requests of one HTTP/2 connection, including watches. Deviation: upstream
    /// allows 100; Go clients then open a second connection, other clients stall behind their own watches.
    pub streams: u32,
    /// At stop: how long running requests may take.
    pub drain: Duration,
    /// At stop: how long an HTTP/1.1 connection may bring one more request, which its client may have sent
    /// already. Upstream: such a client sees the end of the connection instead of an answer.
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

    /// A socket file that only its owner may use. Replaces the file of a dead process. Requests may
    /// have the authority `u` instead of the client's: see `authority.rs`.
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

    /// The address of a TCP listener (with the real port, even if 0 was requested).
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
    // For a process without free file descriptors or memory: waits for connections to end.
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

/// The state that all connections of a listener share.
struct Door {
    limits: Limits,
    stop: Stop,
    /// True when few connections are left.
    crowded: watch::Sender<bool>,
    /// Recently logged refusals: address and cause.
    refusals: LogLimit<(Option<IpAddr>, &'static str)>,
}

impl Door {
    fn new(limits: Limits, stop: Stop) -> Self {
        Self { limits, stop, crowded: watch::Sender::new(false), refusals: LogLimit::default() }
    }

    /// Crowded when an eighth of the connections is left, until a quarter is free again.
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

    /// Resolves after the time `usual`, or after `crowded` while few connections are left.
    async fn patience(&self, usual: Duration) {
        let begun = Instant::now();
        let mut crowded = self.crowded.subscribe();
        loop {
            let is_crowded = *crowded.borrow_and_update();
            let limit = if is_crowded { usual.min(self.limits.crowded) } else { usual };
            let deadline = tokio::time::sleep_until(begun + limit);
            // `self` holds the sender, so waiting cannot fail.
            tokio::select! {
                () = deadline => return,
                _ = crowded.changed() => {}
            }
        }
    }

    /// Resolves when a connection must end because the listener stops. HTTP/2 is notified at once,
    /// HTTP/1.1 in its next answer.
    async fn leave(&self, activity: &Activity, is_h2: bool) {
        self.stop.wait().await;
        if !is_h2 {
            // A timeout means that the connection is idle and no request came.
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

/// Handles one connection from its first byte to its last.
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
        // A port scan or a health check.
        Err(error) if is_gone(&error) => return,
        // Upstream logs the same here: people use it to find wrong certificate authorities.
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
const STALLED: &str = "a request's headers did not come in time";
const ABUSED: &str = "HTTP/2 rapid reset";

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
    let (activity, farewell) = (Activity::default(), Arc::new(Notify::new()));
    let lingering = Arc::new(Lingering::default());
    let service = service_fn({
        let (activity, lingering) = (activity.clone(), lingering.clone());
        let (farewell, stop) = (farewell.clone(), door.stop.clone());
        move |mut request: Request<hyper::body::Incoming>| {
            request.extensions_mut().insert(info.clone());
            let is_h2 = request.version() == Version::HTTP_2;
            let is_head = is_h2 && request.method() == Method::HEAD;
            let has_body = is_h2 && !http_body::Body::is_end_stream(request.body());
            let leftover = has_body.then(|| Leftover::new(lingering.clone()));
            let running = activity.begin(leftover.clone());
            let request = request.map(|body| Incoming::new(body, leftover));
            let (answer, stop) = (service.clone().oneshot(request), stop.clone());
            let last = is_h2.then(|| farewell.clone());
            async move {
                let response = answer.await?;
                let is_last = !is_h2 && stop.is_raised();
                Ok::<_, S::Error>(finished(response, is_head, is_last, last, running))
            }
        }
    });
    let (io, outlet) = if is_h2 { gathered(io) } else { (io, None) };
    let io = TokioIo::new(Heard { io, activity: activity.clone() });
    let builder = builder(is_h2, is_tls, &door.limits);
    let connection = builder.serve_connection_with_upgrades(io, service);
    let mut connection = std::pin::pin!(connection);
    let mut rests = std::pin::pin!(lingering.read_on());
    let ended = loop {
        tokio::select! {
            () = farewell.notified() => connection.as_mut().graceful_shutdown(),
            outcome = driven(connection.as_mut(), outlet.as_ref()) => break Some(outcome),
            () = rests.as_mut() => break None,
            () = door.leave(&activity, is_h2) => break None,
            () = activity.idle(door) => break None,
            // On HTTP/2 bytes without requests are normal, for example pings.
            () = activity.stalled(door.limits.header_read), if !is_h2 => {
                return door.refused(remote, STALLED, &"connection cut");
            }
            () = activity.is_abused() => return door.refused(remote, ABUSED, &"connection cut"),
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

/// Logs a client's mistake as a warning; a broken connection is normal.
fn log_end(error: &(dyn std::error::Error + 'static), remote: Option<SocketAddr>, door: &Door) {
    if is_the_clients(error) {
        door.refused(remote, "HTTP error", &chain_of(error));
    } else {
        tracing::trace!(?remote, %error, "connection ended");
    }
}

/// The future's output if it ends within the limit, while the other future is polled.
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

/// The answer as it is sent. On HTTP/2, `Connection: close` means a GOAWAY, which `farewell` causes.
fn finished<B: http_body::Body>(
    mut response: Response<B>,
    is_head: bool,
    is_last: bool,
    farewell: Option<Arc<Notify>>,
    running: Running,
) -> Response<Answer<B>> {
    say_farewell(&mut response, is_last);
    if let Some(farewell) = farewell
        && response.headers_mut().remove(CONNECTION).is_some()
    {
        farewell.notify_one();
    }
    let response = if is_head { headed(response) } else { response.map(Some) };
    // The body owns `running`: the request runs until its answer is sent or dropped.
    response.map(|body| Answer::new(body, running))
}

/// Turns an answer to HEAD into one without a body but with the body's length.
fn headed<B: http_body::Body>(response: Response<B>) -> Response<Option<B>> {
    let (mut parts, body) = response.into_parts();
    if let Some(length) = body.size_hint().exact() {
        parts.headers.entry(CONTENT_LENGTH).or_insert_with(|| HeaderValue::from(length));
    }
    Response::from_parts(parts, None)
}

/// Marks the last answer on a connection as such, unless the connection switches to another protocol.
fn say_farewell<B>(response: &mut Response<B>, is_last: bool) {
    if is_last && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
}

/// Collects writes; HTTP/2 only, because upgraded HTTP/1.1 connections are written to directly.
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

/// Whether the client broke the protocol or a limit. A disconnect is not a mistake.
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

/// The HTTP server for the negotiated protocol, with the limits.
fn builder(is_h2: bool, is_tls: bool, limits: &Limits) -> auto::Builder<TokioExecutor> {
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut builder = match (is_h2, is_tls) {
        (true, _) => builder.http2_only(),
        (false, true) => builder.http1_only(),
        // Not negotiated: the first bytes decide (gRPC over plain connections is HTTP/2).
        (false, false) => builder,
    };
    builder
        .http1()
        .timer(TokioTimer::new())
        // hyper's timer also runs on idle connections; see `Activity::stalled`.
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
    /// Bytes came that are not a complete request yet.
    is_heard: bool,
    /// How many requests were cancelled within a second, and when that second began.
    resets: u32,
    since: Option<Instant>,
}

/// A client that cancels this many requests within a second, each before the first byte of its
/// answer, is attacking with the work that they cause.
const RESETS: u32 = 200;
const RESETS_TIME: Duration = Duration::from_secs(1);

/// A running request.
struct Running {
    activity: Activity,
    leftover: Option<Arc<Leftover>>,
    /// The first byte of its answer was sent.
    is_answered: bool,
}

/// An answer that is being sent; for HEAD without a body.
struct Answer<B> {
    body: Option<B>,
    running: Running,
}

impl<B: http_body::Body> Answer<B> {
    fn new(body: Option<B>, mut running: Running) -> Self {
        // An answer without a body counts as sent.
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
        // Unknown for HEAD: hyper would otherwise send the length 0.
        self.body.as_ref().map_or_else(http_body::SizeHint::default, B::size_hint)
    }
}

/// Waiters are notified only of relevant changes: each notification wakes the connection's task,
/// and most of its many requests begin and end while others run.
impl Activity {
    fn begin(&self, leftover: Option<Arc<Leftover>>) -> Running {
        self.0.send_if_modified(|now| {
            let is_news = now.running == 0 || now.is_heard;
            (now.running, now.all, now.is_heard) = (now.running + 1, now.all + 1, false);
            is_news
        });
        Running { activity: self.clone(), leftover, is_answered: false }
    }

    /// Counts a cancelled request.
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

    /// Resolves when too many requests were cancelled.
    async fn is_abused(&self) {
        // `self` holds the sender, so waiting cannot fail.
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

    /// Resolves when a request runs, or when one came after this call.
    async fn requested(&self) {
        let mut seen = self.0.subscribe();
        let all = seen.borrow().all;
        // `self` holds the sender, so waiting cannot fail.
        let _ = seen.wait_for(|now| now.running > 0 || now.all != all).await;
    }

    /// Resolves after the connection was idle for as long as the limits allow.
    async fn idle(&self, door: &Door) {
        let mut seen = self.0.subscribe();
        loop {
            // `self` holds the sender, so waiting cannot fail.
            let Ok(all) = seen.wait_for(|now| now.running == 0).await.map(|now| now.all) else {
                return;
            };
            tokio::select! {
                _ = seen.wait_for(|now| now.all != all) => {}
                () = door.patience(door.limits.idle) => return,
            }
        }
    }

    /// Resolves when a request was begun but its headers were not complete in time.
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

/// A stream that reports incoming bytes.
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
