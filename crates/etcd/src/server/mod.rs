//! Serves a store as an etcd: the v3 API over gRPC, and the HTTP pages.
//!
//! ```text
//! listener ─► Service ─► gRPC ─► kv · watch · lease · maintenance · cluster ─► store
//!                    └─► /health /version /metrics
//! ```
//!
//! In: a store and the member's name. Out: a tower service for `transport::serve`. `decapod etcd` uses
//! this service, and so does the server's own socket for the commands `snapshot` and `store`.
//!
//! Invariants: the only state here are alarms; errors have etcd's codes and texts, because its clients
//! match them; requests that one member cannot serve get an error that recommends etcd itself.

mod kv;
mod lease;
mod maintenance;
pub(crate) mod messages;
mod pages;
mod watch;

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use base::task::Tasks;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use prost::Message;
use store::{Error, Revision, Store};
use tonic::server::{Grpc, ServerStreamingService, StreamingService, UnaryService};
use tonic::{Code, Status, Streaming};
use tonic_prost::ProstCodec;

use self::messages::ResponseHeader;
use crate::convert;

/// The version of etcd that this API corresponds to.
pub const VERSION: &str = "3.6.5";
/// The error of requests for further members.
pub const ONE_MEMBER: &str = "this is a cluster of one member; use etcd itself for more than one";
const CLUSTER_VERSION: &str = "3.6.0";
/// There are no elections: the first term never ends.
const TERM: u64 = 1;
/// Our own method, not etcd's: the revision at a time.
pub(crate) const REVISION_AT: &str = "/decapod.v1.History/RevisionAt";
/// Like etcd, 512 KiB of a message are allowed besides the values.
const MESSAGE_LIMIT: usize = store::VALUE_LIMIT + (512 << 10);

type Body =
    http_body_util::combinators::UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;
type Answer<T> = std::result::Result<T, Status>;

#[derive(Clone, Debug)]
pub struct Options {
    pub name: String,
    pub client_urls: Vec<String>,
    pub peer_urls: Vec<String>,
    /// When the records reach this size in bytes, only deletes are accepted.
    pub quota_bytes: Option<u64>,
    /// Require a client certificate.
    pub needs_certificate: bool,
    /// Serve only health and metrics.
    pub pages_only: bool,
    /// The maximum size of a request, in bytes.
    pub request_limit: usize,
    pub max_ops: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "default".into(),
            client_urls: vec![],
            peer_urls: vec![],
            quota_bytes: None,
            needs_certificate: false,
            pages_only: false,
            request_limit: store::VALUE_LIMIT,
            max_ops: 128,
        }
    }
}

/// The limits of connections: each watch is a stream of its client's connection, without a limit.
/// Upstream: `--max-concurrent-streams` is unlimited by default.
pub fn limits() -> transport::Limits {
    transport::Limits { streams: u32::MAX, ..Default::default() }
}

struct Shared {
    store: Arc<dyn Store>,
    options: Options,
    member_id: u64,
    cluster_id: u64,
    /// The alarm NOSPACE: only deletes are accepted until it is disarmed.
    no_space: Arc<AtomicBool>,
    tasks: Tasks,
}

impl Shared {
    /// The header of every answer.
    fn header(&self, revision: Revision) -> Option<ResponseHeader> {
        Some(ResponseHeader {
            cluster_id: self.cluster_id,
            member_id: self.member_id,
            revision: convert::number(revision),
            raft_term: TERM,
        })
    }

    async fn present(&self) -> Answer<Option<ResponseHeader>> {
        let revision = self.store.revision().await.map_err(status)?;
        Ok(self.header(revision))
    }

    /// Runs before every write that takes space. Upstream: the alarm stays after space was freed.
    async fn check_space(&self) -> Answer<()> {
        let Some(quota) = self.options.quota_bytes else { return Ok(()) };
        if !self.no_space.load(Ordering::Relaxed) {
            if self.store.status().await.map_err(status)?.used_bytes <= quota {
                return Ok(());
            }
            tracing::warn!(quota, "the quota is exceeded: only deletes are accepted from now on");
            self.no_space.store(true, Ordering::Relaxed);
        }
        Err(Status::resource_exhausted("etcdserver: mvcc: database space exceeded"))
    }
}

/// The service of a member. Clones share its state.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

impl Server {
    pub fn new(store: Arc<dyn Store>, options: Options, tasks: Tasks) -> Self {
        let shared = Shared {
            store,
            member_id: id_of(&options.name),
            cluster_id: id_of(&format!("cluster of {}", options.name)),
            options,
            no_space: Arc::default(),
            tasks,
        };
        Self(Arc::new(shared))
    }

    /// The same member, for a listener that serves health and metrics without authentication.
    pub fn pages_only(&self) -> Self {
        let shared = &self.0;
        let options =
            Options { pages_only: true, needs_certificate: false, ..shared.options.clone() };
        Self(Arc::new(Shared {
            store: shared.store.clone(),
            options,
            no_space: shared.no_space.clone(),
            tasks: shared.tasks.clone(),
            member_id: shared.member_id,
            cluster_id: shared.cluster_id,
        }))
    }
}

/// A hash of the text that is never 0.
fn id_of(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step) | 1
}

impl<B> tower_service::Service<Request<B>> for Server
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let request = request.map(|body| body.map_err(Into::into).boxed_unsync());
        let shared = self.0.clone();
        Box::pin(async move { Ok(answer(shared, request).await) })
    }
}

async fn answer(shared: Arc<Shared>, request: Request<Body>) -> Response<Body> {
    let is_grpc = request
        .headers()
        .get(http::header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    let info = request.extensions().get::<transport::ConnectionInfo>();
    let is_known = info.is_some_and(|info| info.peer_certificates.is_some());
    let is_denied = shared.options.needs_certificate && !is_known;
    let path = request.uri().path().to_owned();
    match (is_grpc && !shared.options.pages_only, is_denied) {
        (true, true) => {
            let why = "etcdserver: a client certificate is needed";
            boxed(Status::unauthenticated(why).into_http())
        }
        (false, true) => pages::denied(),
        (false, false) => {
            // The body is not read; drop it before the await.
            drop(request);
            pages::serve(&shared, &path).await
        }
        (true, false) => call(shared, request).await,
    }
}

/// Dispatches the methods by path.
async fn call(shared: Arc<Shared>, request: Request<Body>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let (service, method) = path.trim_start_matches('/').split_once('/').unwrap_or_default();
    match (service, method) {
        ("etcdserverpb.KV", "Range") => unary(shared, request, kv::range).await,
        ("etcdserverpb.KV", "Put") => unary(shared, request, kv::put).await,
        ("etcdserverpb.KV", "DeleteRange") => unary(shared, request, kv::delete_range).await,
        ("etcdserverpb.KV", "Txn") => unary(shared, request, kv::txn).await,
        ("etcdserverpb.KV", "Compact") => unary(shared, request, kv::compact).await,
        ("etcdserverpb.Watch", "Watch") => both_ways(shared, request, watch::watch).await,
        ("etcdserverpb.Lease", "LeaseGrant") => unary(shared, request, lease::grant).await,
        ("etcdserverpb.Lease", "LeaseRevoke") => unary(shared, request, lease::revoke).await,
        ("etcdserverpb.Lease", "LeaseKeepAlive") => {
            both_ways(shared, request, lease::keep_alive).await
        }
        ("etcdserverpb.Lease", "LeaseTimeToLive") => {
            unary(shared, request, lease::time_to_live).await
        }
        ("etcdserverpb.Lease", "LeaseLeases") => unary(shared, request, lease::list).await,
        ("etcdserverpb.Maintenance", "Alarm") => unary(shared, request, maintenance::alarm).await,
        ("etcdserverpb.Maintenance", "Status") => {
            unary(shared, request, maintenance::status_of).await
        }
        ("etcdserverpb.Maintenance", "Defragment") => {
            unary(shared, request, maintenance::defragment).await
        }
        ("etcdserverpb.Maintenance", "Hash") => unary(shared, request, maintenance::hash).await,
        ("etcdserverpb.Maintenance", "HashKV") => {
            unary(shared, request, maintenance::hash_kv).await
        }
        ("etcdserverpb.Maintenance", "Snapshot") => {
            download(shared, request, maintenance::snapshot).await
        }
        ("etcdserverpb.Cluster", "MemberList") => {
            unary(shared, request, maintenance::members).await
        }
        ("etcdserverpb.Cluster", _) | ("etcdserverpb.Maintenance", "MoveLeader") => {
            unary(shared, request, maintenance::one_member).await
        }
        ("etcdserverpb.Auth", "AuthStatus") => {
            unary(shared, request, maintenance::auth_status).await
        }
        ("grpc.health.v1.Health", "Check") => unary(shared, request, maintenance::health).await,
        ("decapod.v1.History", "RevisionAt") => {
            unary(shared, request, maintenance::revision_at).await
        }
        _ => {
            let unknown = Status::unimplemented(format!("unknown method {method} of {service}"));
            boxed(unknown.into_http())
        }
    }
}

fn boxed(response: Response<tonic::body::Body>) -> Response<Body> {
    response.map(|body| body.map_err(Into::into).boxed_unsync())
}

fn grpc<A, Q>() -> Grpc<ProstCodec<A, Q>>
where
    A: Message + 'static,
    Q: Message + Default + 'static,
{
    Grpc::new(ProstCodec::default()).max_decoding_message_size(MESSAGE_LIMIT.max(16 << 20))
}

/// Adapts a unary handler to tonic.
struct Handler<F>(Arc<Shared>, F);

type Boxed<T> = Pin<Box<dyn Future<Output = Answer<tonic::Response<T>>> + Send>>;

impl<Q, A, F, W> UnaryService<Q> for Handler<F>
where
    F: Fn(Arc<Shared>, Q) -> W,
    W: Future<Output = Answer<A>> + Send + 'static,
{
    type Response = A;
    type Future = Boxed<A>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let work = (self.1)(self.0.clone(), request.into_inner());
        Box::pin(async move { work.await.map(tonic::Response::new) })
    }
}

async fn unary<Q, A, F, W>(shared: Arc<Shared>, request: Request<Body>, run: F) -> Response<Body>
where
    Q: Message + Default + Send + 'static,
    A: Message + Send + 'static,
    F: Fn(Arc<Shared>, Q) -> W + Send + 'static,
    W: Future<Output = Answer<A>> + Send + 'static,
{
    boxed(grpc::<A, Q>().unary(Handler(shared, run), request).await)
}

type Answers<A> = tokio_stream::wrappers::ReceiverStream<Answer<A>>;

/// Adapts a handler whose answer is a stream.
struct Streamer<F>(Arc<Shared>, F);

impl<Q, A, F, W> ServerStreamingService<Q> for Streamer<F>
where
    A: Send + 'static,
    F: Fn(Arc<Shared>, Q) -> W,
    W: Future<Output = Answer<Answers<A>>> + Send + 'static,
{
    type Response = A;
    type ResponseStream = Answers<A>;
    type Future = Boxed<Answers<A>>;

    fn call(&mut self, request: tonic::Request<Q>) -> Self::Future {
        let work = (self.1)(self.0.clone(), request.into_inner());
        Box::pin(async move { work.await.map(tonic::Response::new) })
    }
}

async fn download<Q, A, F, W>(shared: Arc<Shared>, request: Request<Body>, run: F) -> Response<Body>
where
    Q: Message + Default + Send + 'static,
    A: Message + Send + 'static,
    F: Fn(Arc<Shared>, Q) -> W + Send + 'static,
    W: Future<Output = Answer<Answers<A>>> + Send + 'static,
{
    boxed(grpc::<A, Q>().server_streaming(Streamer(shared, run), request).await)
}

/// Adapts a handler with streams in both directions.
struct Talker<F>(Arc<Shared>, F);

impl<Q, A, F, W> StreamingService<Q> for Talker<F>
where
    A: Send + 'static,
    F: Fn(Arc<Shared>, Streaming<Q>) -> W,
    W: Future<Output = Answer<Answers<A>>> + Send + 'static,
{
    type Response = A;
    type ResponseStream = Answers<A>;
    type Future = Boxed<Answers<A>>;

    fn call(&mut self, request: tonic::Request<Streaming<Q>>) -> Self::Future {
        let work = (self.1)(self.0.clone(), request.into_inner());
        Box::pin(async move { work.await.map(tonic::Response::new) })
    }
}

async fn both_ways<Q, A, F, W>(
    shared: Arc<Shared>,
    request: Request<Body>,
    run: F,
) -> Response<Body>
where
    Q: Message + Default + Send + 'static,
    A: Message + Send + 'static,
    F: Fn(Arc<Shared>, Streaming<Q>) -> W + Send + 'static,
    W: Future<Output = Answer<Answers<A>>> + Send + 'static,
{
    boxed(grpc::<A, Q>().streaming(Talker(shared, run), request).await)
}

/// The store's errors with etcd's codes and texts.
fn status(error: Error) -> Status {
    let (code, text) = match &error {
        Error::Compacted { .. } => {
            (Code::OutOfRange, "etcdserver: mvcc: required revision has been compacted".into())
        }
        Error::Future { .. } => {
            (Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision".into())
        }
        Error::LeaseNotFound(_) => (Code::NotFound, "etcdserver: requested lease not found".into()),
        Error::LeaseExists(_) => {
            (Code::FailedPrecondition, "etcdserver: lease already exists".into())
        }
        Error::TooLarge { .. } => {
            (Code::InvalidArgument, "etcdserver: request is too large".to_owned())
        }
        Error::Closed => (Code::Unavailable, "etcdserver: server stopped".into()),
        Error::NoSpace(_) => {
            (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded".to_owned())
        }
        Error::Unavailable(why) => (Code::Unavailable, format!("etcdserver: {why}")),
        Error::Unsupported(why) => (Code::Unimplemented, format!("etcdserver: {why}")),
        Error::Unusable(why) => (Code::Internal, format!("etcdserver: {why}")),
    };
    Status::new(code, text)
}

fn invalid(what: &str) -> Status {
    Status::invalid_argument(format!("etcdserver: {what}"))
}

#[cfg(test)]
mod tests;
