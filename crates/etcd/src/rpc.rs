//! The gRPC calls, by name.
//!
//! Invariants: every call ends within its [`Patience`](crate::members::Patience). A write is processed once: it
//! goes to another member only if the first cannot have received it, or says that it has not processed it. A read also goes to another member
//! if the first is silent, and the first answer is used.
//!
//! Upstream: etcd's own client repeats the same calls in the same cases, but never asks two members.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use prost::Message;
use store::{Error, Revision};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::client::Grpc;
use tonic::transport::Channel;
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::members::{Health, Member, Members, Patience};
use crate::{Options, convert, messages as wire};

/// The number of rounds over all members, and the pauses between them: about 1.5 s in all, the duration of
/// an election.
const ROUNDS: usize = 8;
const AGAIN_FIRST: Duration = Duration::from_millis(25);
const AGAIN_CEILING: Duration = Duration::from_millis(500);
/// Lists take longer and cost more: the factor of the time until another member is asked.
const LIST_FACTOR: u32 = 5;
const RANGE: &str = "/etcdserverpb.KV/Range";
/// Calls that may be repeated.
const READS: &[&str] = &[
    RANGE,
    "/etcdserverpb.Lease/LeaseLeases",
    "/etcdserverpb.Lease/LeaseTimeToLive",
    "/etcdserverpb.Maintenance/Status",
    "/etcdserverpb.Cluster/MemberList",
];

/// One connection to each member. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Rpc {
    members: Arc<Members>,
    /// The newest revision in etcd's answers.
    heard: Arc<AtomicU64>,
}

/// A call without an answer.
struct Failed {
    status: Status,
    /// The member cannot have received it, or says that it has not processed it.
    is_unsent: bool,
}

/// Whether a message was sent, decided once: by the sender, or by the caller that gives up.
#[derive(Clone, Default)]
struct Fate(Arc<AtomicU8>);

impl Fate {
    const OPEN: u8 = 0;
    const SENT: u8 = 1;
    const GIVEN_UP: u8 = 2;

    fn decide(&self, fate: u8) -> bool {
        let outcome =
            self.0.compare_exchange(Self::OPEN, fate, Ordering::AcqRel, Ordering::Acquire);
        outcome.is_ok()
    }

    /// True if it was not sent and never will be.
    fn give_up(&self) -> bool {
        self.decide(Self::GIVEN_UP) || self.0.load(Ordering::Acquire) == Self::GIVEN_UP
    }

    /// The one message, unless it was given up before the connection took it.
    fn message<Q: Send + 'static>(&self, message: Q) -> impl futures::Stream<Item = Q> + use<Q> {
        let fate = self.clone();
        futures::stream::once(async move {
            if !fate.decide(Self::SENT) {
                std::future::pending::<()>().await;
            }
            message
        })
    }
}

/// A stream, and the member it comes from.
pub(crate) struct Opened<A> {
    pub answers: Streaming<A>,
    pub source: Source,
}

/// The member that a stream comes from.
pub(crate) struct Source {
    members: Arc<Members>,
    member: Arc<Member>,
    silences: watch::Receiver<u64>,
}

impl Source {
    /// Resolves when the member does not answer calls.
    pub async fn is_silent(&mut self) -> Status {
        // The member holds the sender, and it is alive here.
        let _ = self.silences.changed().await;
        self.silence()
    }

    /// The stream should have sent something.
    pub fn fell_silent(&self) -> Status {
        self.members.set_aside(&self.member, Health::Silent, "a watch gets no events or progress");
        self.silence()
    }

    fn silence(&self) -> Status {
        Status::unavailable(format!("{} is silent", self.member.url))
    }
}

impl Rpc {
    pub fn new(options: &Options, tasks: &Tasks) -> Result<Self, Error> {
        Ok(Self { members: Members::new(options, tasks)?, heard: Arc::default() })
    }

    pub fn patience(&self) -> Patience {
        self.members.patience
    }

    /// Replaces the endpoints.
    pub fn follow(&self, urls: &[String]) {
        self.members.follow(urls);
    }

    /// Records the revision of an answer.
    pub fn hear(&self, revision: Revision) -> Revision {
        self.heard.fetch_max(revision.0, Ordering::AcqRel);
        revision
    }

    pub fn heard(&self) -> Revision {
        Revision(self.heard.load(Ordering::Acquire))
    }

    /// The newest revision, by a linearizable read.
    pub async fn present(&self) -> Result<Revision, Status> {
        let key = bytes::Bytes::from_static(b"\0");
        let nothing = wire::RangeRequest { key, count_only: true, ..Default::default() };
        let answer: wire::RangeResponse = self.call("/etcdserverpb.KV/Range", nothing).await?;
        Ok(self.hear(convert::at(answer.header.as_ref())))
    }

    /// Whether this etcd may send progress before the events that it includes.
    pub async fn answers_overtake_events(&self) -> Result<bool, Status> {
        let path = "/etcdserverpb.Maintenance/Status";
        let status: wire::StatusResponse = self.call(path, wire::Empty {}).await?;
        Ok(overtakes(&status.version))
    }

    /// A unary call such as `/etcdserverpb.KV/Range`.
    pub async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        if READS.contains(&path) {
            let Patience { call, silence, .. } = self.patience();
            self.read(path, request, call, silence).await
        } else {
            self.write(path, request).await
        }
    }

    /// A read whose answer may be large.
    pub async fn list(&self, request: wire::RangeRequest) -> Result<wire::RangeResponse, Status> {
        let Patience { list, silence, .. } = self.patience();
        self.read(RANGE, request, list, silence * LIST_FACTOR).await
    }

    /// Tries the members in turn until one may have received the request.
    async fn write<Q, A>(&self, path: &'static str, request: Q) -> Result<A, Status>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let deadline = Instant::now() + self.patience().call;
        let mut rounds = Rounds::new();
        loop {
            let Some(member) = self.members.choose(&rounds.tried) else {
                rounds.again().await;
                continue;
            };
            rounds.tried.push(member.clone());
            match self.attempt(member, path, request.clone(), deadline).await {
                Ok(answer) => return Ok(answer),
                Err(failed) => {
                    let is_last = rounds.is_last && rounds.tried.len() == self.members.count();
                    if !failed.is_unsent || is_last || Instant::now() >= deadline {
                        return Err(failed.status);
                    }
                }
            }
        }
    }

    /// Calls one member, and another one if that fails, or is silent for too long.
    async fn read<Q, A>(
        &self,
        path: &'static str,
        request: Q,
        limit: Duration,
        silence: Duration,
    ) -> Result<A, Status>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let deadline = Instant::now() + limit;
        let (mut rounds, mut asked) = (Rounds::new(), FuturesUnordered::new());
        let mut last = Status::deadline_exceeded(format!("no answer within {limit:?}"));
        loop {
            let next = self.members.choose(&rounds.tried);
            let until = match next {
                Some(_) => deadline.min(Instant::now() + silence),
                None => deadline,
            };
            if let Some(member) = next {
                rounds.tried.push(member.clone());
                asked.push(self.attempt(member, path, request.clone(), deadline));
            }
            match tokio::time::timeout_at(until, asked.next()).await {
                Ok(Some(Ok(answer))) => {
                    self.leave_the_silent(&rounds.tried, silence);
                    return Ok(answer);
                }
                Ok(Some(Err(failed))) if !failed.is_passing() => return Err(failed.status),
                Ok(Some(Err(failed))) => last = failed.status,
                Ok(None) if rounds.is_last || Instant::now() >= deadline => return Err(last),
                Ok(None) => rounds.again().await,
                Err(_) if Instant::now() >= deadline => return Err(last),
                // Ask another member, too.
                Err(_) => {}
            }
        }
    }

    /// Sets members aside that did not answer while others did.
    fn leave_the_silent(&self, asked: &[Arc<Member>], silence: Duration) {
        for member in asked.iter().filter(|member| member.is_silent(silence)) {
            self.members.set_aside(member, Health::Silent, "it did not answer, others did");
        }
    }

    /// One call of one member.
    async fn attempt<Q, A>(
        &self,
        member: Arc<Member>,
        path: &'static str,
        request: Q,
        deadline: Instant,
    ) -> Result<A, Failed>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (fate, pending) = (Fate::default(), member.begin());
        let mut asked = Box::pin(unary(member.grpc.clone(), path, fate.message(request)));
        let connected = deadline.min(Instant::now() + self.patience().connect);
        let mut standing = Health::Unwilling;
        let outcome = match tokio::time::timeout_at(connected, &mut asked).await {
            Ok(outcome) => outcome,
            Err(_) if fate.give_up() => Err(Status::unavailable(format!(
                "{} did not accept a connection in time",
                member.url
            ))),
            Err(_) => tokio::time::timeout_at(deadline, asked).await.unwrap_or_else(|_| {
                standing = Health::Silent;
                Err(Status::deadline_exceeded(format!("{} did not answer in time", member.url)))
            }),
        };
        match outcome {
            Ok(answer) => {
                pending.answered();
                Ok(answer)
            }
            Err(status) => {
                let is_unsent = fate.give_up() || is_excluded(&status);
                let failed = Failed { is_unsent, status };
                if failed.is_passing() {
                    let why = text(&failed.status);
                    self.members.set_aside(&member, standing, &why);
                } else {
                    pending.answered();
                }
                Err(failed)
            }
        }
    }

    /// A read whose answer is a stream. Tries the members in turn until one begins to answer.
    pub async fn download<Q, A>(
        &self,
        path: &'static str,
        request: Q,
    ) -> Result<Streaming<A>, Status>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut left = self.members.count();
        loop {
            left -= 1;
            let request = request.clone();
            let opened = self.open(path, Request::new(futures::stream::once(async { request })));
            match opened.await {
                // The member is set aside now, so the next choice is another one.
                Err(status) if left > 0 && is_passing(&status) => {}
                outcome => return Ok(outcome?.answers),
            }
        }
    }

    /// A call with a stream in both directions.
    pub async fn stream<Q, A>(
        &self,
        path: &'static str,
        requests: impl futures::Stream<Item = Q> + Send + 'static,
    ) -> Result<Opened<A>, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut request = Request::new(requests);
        // With this, a member without a leader ends the stream instead of staying silent.
        request
            .metadata_mut()
            .insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
        self.open(path, request).await
    }

    async fn open<Q, A>(
        &self,
        path: &'static str,
        request: Request<impl futures::Stream<Item = Q> + Send + 'static>,
    ) -> Result<Opened<A>, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let member = self.members.choose(&[]).expect("there is a member");
        let (silences, _pending) = (member.silences(), member.begin());
        let mut grpc = member.grpc.clone();
        let opening = async {
            ready(&mut grpc).await?;
            let path = http::uri::PathAndQuery::from_static(path);
            grpc.streaming(request, path, ProstCodec::default()).await
        };
        let source = Source { members: self.members.clone(), member, silences };
        match tokio::time::timeout(self.patience().open(), opening).await {
            Ok(Ok(answers)) => Ok(Opened { answers: answers.into_inner(), source }),
            Ok(Err(status)) => {
                if is_passing(&status) {
                    self.members.set_aside(&source.member, Health::Unwilling, &text(&status));
                }
                Err(status)
            }
            Err(_) => Err(source.fell_silent()),
        }
    }
}

/// Chooses each member once, and again after a pause.
struct Rounds {
    tried: Vec<Arc<Member>>,
    left: usize,
    is_last: bool,
    pauses: Backoff,
}

impl Rounds {
    fn new() -> Self {
        let pauses = Backoff::new(AGAIN_FIRST, AGAIN_CEILING).with_jitter(0.5);
        Self { tried: vec![], left: ROUNDS - 1, is_last: false, pauses }
    }

    async fn again(&mut self) {
        self.tried.clear();
        self.left -= 1;
        self.is_last = self.left == 0;
        tokio::time::sleep(self.pauses.step()).await;
    }
}

impl Failed {
    /// Whether a retry, at this or another member, may succeed.
    fn is_passing(&self) -> bool {
        self.is_unsent || is_passing(&self.status)
    }
}

/// Whether the member says that it has not processed the call: it stops, and its GOAWAY names a stream before the
/// call's, or it has refused the stream. Upstream: gRPC repeats such calls by itself.
fn is_excluded(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<h2::Error>() {
            let reason = error.reason();
            let stops = error.is_go_away() && reason == Some(h2::Reason::NO_ERROR);
            return error.is_remote() && (stops || reason == Some(h2::Reason::REFUSED_STREAM));
        }
        cause = error.source();
    }
    false
}

/// The member cannot serve, or the connection broke: etcd did not answer the request.
fn is_passing(status: &Status) -> bool {
    let is_local = std::error::Error::source(status).is_some();
    is_local || matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded)
}

/// Whether a member serves: this read needs the leader.
pub(crate) async fn probe(member: &Member) -> Result<(), Status> {
    let key = bytes::Bytes::from_static(b"\0");
    let nothing = wire::RangeRequest { key, count_only: true, ..Default::default() };
    let message = futures::stream::once(async { nothing });
    let _: wire::RangeResponse = unary(member.grpc.clone(), RANGE, message).await?;
    Ok(())
}

async fn unary<Q, A>(
    mut grpc: Grpc<Channel>,
    path: &'static str,
    message: impl futures::Stream<Item = Q> + Send + 'static,
) -> Result<A, Status>
where
    Q: Message + Send + Sync + 'static,
    A: Message + Default + Send + Sync + 'static,
{
    ready(&mut grpc).await?;
    let path = http::uri::PathAndQuery::from_static(path);
    let answer = grpc.client_streaming(Request::new(message), path, ProstCodec::default()).await?;
    Ok(answer.into_inner())
}

async fn ready(grpc: &mut Grpc<Channel>) -> Result<(), Status> {
    grpc.ready().await.map_err(|error| Status::unavailable(deepest(&error)))
}

/// The error of calls after this side has closed the connection.
pub(crate) fn closed() -> Status {
    let mut status = Status::unavailable("the connection is closed");
    status.set_source(Arc::new(Error::Closed));
    status
}

/// Errors that the store's callers handle; all others leave a write's outcome unknown.
pub(crate) fn unavailable(status: &Status) -> Error {
    let own = std::error::Error::source(status).and_then(|cause| cause.downcast_ref::<Error>());
    if let Some(own) = own {
        return own.clone();
    }
    let what = match status.code() {
        Code::Unknown | Code::Unavailable => String::new(),
        code => format!("{code:?}: "),
    };
    Error::Unavailable(format!("etcd: {what}{}", text(status)).into())
}

pub(crate) fn text(status: &Status) -> String {
    match std::error::Error::source(status) {
        Some(cause) => deepest(cause),
        None => status.message().to_owned(),
    }
}

/// The innermost cause: "connection refused" says more than "transport error".
fn deepest(error: &(dyn std::error::Error + 'static)) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Upstream: its servers request progress only from etcds of these versions on.
fn overtakes(version: &str) -> bool {
    let numbers = version.split(['.', '-', '+']).map(|part| part.parse::<u32>().ok());
    match numbers.take(3).collect::<Option<Vec<_>>>().as_deref() {
        Some([3, 4, patch]) => *patch < 31,
        Some([3, 5, patch]) => *patch < 13,
        Some([major, minor, _]) => (*major, *minor) < (3, 4),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_etcds_are_recognized_by_version() {
        let check = |version, expected| assert_eq!(overtakes(version), expected, "{version}");
        check("3.3.27", true);
        check("3.4.23", true);
        check("3.4.31", false);
        check("3.5.0-rc.1", true);
        check("3.5.12", true);
        check("3.5.13", false);
        check("3.6.0", false);
        check("4.0.0-alpha", false);
        check("a fork", false);
    }
}
