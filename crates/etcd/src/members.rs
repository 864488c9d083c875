//! The members of an etcd cluster: chooses the next one to call, and avoids failed ones for a while.
//!
//! In: endpoints, and changes of them. Out: a connection to each, and the choice among them.
//!
//! ```text
//! chosen by: not silent, not set aside, few calls pending ─► called
//!    ▲                                                        │ no connection, no answer in time,
//!    └── a probe is answered ◄── set aside, probed ◄──────────┘ or an answer that it cannot serve
//! ```
//!
//! Invariants: a member that is set aside is still called after all others have failed; a probe is a
//! linearizable read, so that a member without contact to the leader does not pass.
//! Upstream: gRPC's round robin calls each member in turn, until keep-alive detects a failed one after
//! 40 s.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use store::Error;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::Options;

/// The same as upstream's API server.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(30);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// The flow control windows. The default of 64 KiB for a whole connection would pause the transfer after
/// every sixty objects of a list, and pause all watches together.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Lists have no limit of size; upstream's client sets none either.
const ANSWER_LIMIT: usize = i32::MAX as usize;
/// The probe intervals of a member that is set aside.
const PROBE_FIRST: Duration = Duration::from_millis(100);
const PROBE_CEILING: Duration = Duration::from_secs(2);

/// Timeouts.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For connecting.
    pub connect: Duration,
    /// For an answer. etcd itself cancels a request after 7 s and returns an error.
    pub call: Duration,
    /// For the answer to a read without a limit. Upstream: the timeout of a request.
    pub list: Duration,
    /// For an answer to a read before another member is asked, too. A member without any answer for this
    /// long is not the first choice.
    pub silence: Duration,
}

impl Patience {
    /// For the first answer of a stream.
    pub fn open(&self) -> Duration {
        self.call / 2
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            call: Duration::from_secs(10),
            list: Duration::from_secs(60),
            silence: Duration::from_secs(1),
        }
    }
}

pub(crate) struct Members {
    /// Replaced as a whole, so that a call sees one list.
    all: RwLock<Arc<[Arc<Member>]>>,
    options: Options,
    /// Where the next search begins, so that equal members take turns.
    turn: AtomicUsize,
    pub patience: Patience,
    tasks: Tasks,
}

pub(crate) struct Member {
    pub url: String,
    pub grpc: Grpc<Channel>,
    /// Held for a few assignments, never across an await.
    state: Mutex<State>,
    /// How often it fell silent; then users of its streams switch to other members.
    silences: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    pending: usize,
    /// Since when calls are pending without any answer.
    quiet_since: Option<Instant>,
    standing: Health,
}

/// The state of a member; lower is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Health {
    #[default]
    Well,
    /// It refuses connections, or answers that it cannot serve: set aside.
    Unwilling,
    /// It does not answer calls: set aside, and the last choice.
    Silent,
}

/// A pending call; dropping it gives the call up.
pub(crate) struct Pending(Arc<Member>);

impl Pending {
    pub fn answered(self) {
        self.0.state().quiet_since = Some(Instant::now());
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.pending -= 1;
        if state.pending == 0 {
            state.quiet_since = None;
        }
    }
}

impl Member {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    pub fn begin(self: &Arc<Self>) -> Pending {
        let mut state = self.state();
        state.pending += 1;
        state.quiet_since.get_or_insert_with(Instant::now);
        Pending(self.clone())
    }

    /// Whether calls were pending without any answer for this long.
    pub fn is_silent(&self, patience: Duration) -> bool {
        self.state().quiet_since.is_some_and(|since| since.elapsed() >= patience)
    }

    /// Changes when the member falls silent.
    pub fn silences(&self) -> watch::Receiver<u64> {
        self.silences.subscribe()
    }

    /// Lower is better.
    fn rank(&self, silence: Duration) -> (Health, usize) {
        let now = if self.is_silent(silence) { Health::Silent } else { Health::Well };
        let state = self.state();
        (state.standing.max(now), state.pending)
    }
}

impl Members {
    pub fn new(options: &Options, tasks: &Tasks) -> Result<Arc<Self>, Error> {
        if options.endpoints.is_empty() {
            return Err(Error::Unusable("no etcd endpoint is given".into()));
        }
        let all: Vec<Arc<Member>> =
            options.endpoints.iter().map(|url| member(url, options)).collect::<Result<_, _>>()?;
        let turn = AtomicUsize::new(base::rng::below(all.len() as u64) as usize);
        let patience = options.patience.unwrap_or_default();
        let all = RwLock::new(all.into());
        let options = options.clone();
        Ok(Arc::new(Self { all, options, turn, patience, tasks: tasks.clone() }))
    }

    fn all(&self) -> Arc<[Arc<Member>]> {
        self.all.read().expect("no panic under the lock").clone()
    }

    pub fn count(&self) -> usize {
        self.all().len()
    }

    /// Replaces the endpoints. Members that stay keep their connections. Streams leave a member that goes.
    pub fn follow(&self, urls: &[String]) {
        let before = self.all();
        let is_same =
            urls.len() == before.len() && before.iter().all(|member| urls.contains(&member.url));
        if urls.is_empty() || is_same {
            return;
        }
        let known = |url: &String| before.iter().find(|member| member.url == *url).cloned();
        let found: Result<Vec<Arc<Member>>, Error> = urls
            .iter()
            .map(|url| known(url).map_or_else(|| member(url, &self.options), Ok))
            .collect();
        match found {
            Ok(all) => {
                tracing::info!(members = urls.join(","), "etcd's members have changed");
                *self.all.write().expect("no panic under the lock") = all.into();
            }
            Err(error) => return tracing::warn!(%error, "failed to use etcd's list of members"),
        }
        for gone in before.iter().filter(|member| !urls.contains(&member.url)) {
            gone.silences.send_modify(|count| *count += 1);
        }
    }

    /// The best member that was not tried yet; `None` if all were.
    pub fn choose(&self, tried: &[Arc<Member>]) -> Option<Arc<Member>> {
        let all = self.all();
        let from = self.turn.fetch_add(1, Ordering::Relaxed) % all.len();
        let (before, after) = all.split_at(from);
        let untried = |member: &&Arc<Member>| tried.iter().all(|other| !Arc::ptr_eq(other, member));
        let ranked = after.iter().chain(before).filter(untried);
        ranked.min_by_key(|member| member.rank(self.patience.silence)).cloned()
    }

    /// Prefers other members until a probe succeeds. The streams of a silent member are dropped, too.
    pub fn set_aside(self: &Arc<Self>, member: &Arc<Member>, standing: Health, why: &str) {
        if self.count() == 1 {
            return;
        }
        if standing == Health::Silent {
            member.silences.send_modify(|count| *count += 1);
        }
        let before = {
            let mut state = member.state();
            let before = state.standing;
            state.standing = before.max(standing);
            before
        };
        if before != Health::Well {
            return;
        }
        tracing::warn!(member = member.url, why, "setting an etcd member aside");
        let (members, member) = (self.clone(), member.clone());
        self.tasks.spawn("etcd probe", async move { members.probe(&member).await });
    }

    async fn probe(&self, member: &Arc<Member>) {
        let mut backoff = Backoff::new(PROBE_FIRST, PROBE_CEILING).with_jitter(0.5);
        loop {
            tokio::time::sleep(backoff.step()).await;
            if !self.all().iter().any(|other| Arc::ptr_eq(other, member)) {
                return;
            }
            let probing = crate::rpc::probe(member);
            let limit = self.patience.connect;
            if matches!(tokio::time::timeout(limit, probing).await, Ok(Ok(()))) {
                member.state().standing = Health::Well;
                tracing::info!(member = member.url, "an etcd member serves again");
                return;
            }
        }
    }
}

fn member(url: &str, options: &Options) -> Result<Arc<Member>, Error> {
    let channel = channel(url, options, options.patience.unwrap_or_default()).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        let cause = cause.unwrap_or_else(|| error.to_string());
        Error::Unusable(format!("etcd endpoint {url:?}: {cause}").into())
    })?;
    Ok(Arc::new(Member {
        url: url.to_owned(),
        grpc: Grpc::new(channel).max_decoding_message_size(ANSWER_LIMIT),
        state: Mutex::default(),
        silences: watch::Sender::new(0),
    }))
}

fn channel(
    url: &str,
    options: &Options,
    patience: Patience,
) -> Result<Channel, tonic::transport::Error> {
    let mut endpoint = Endpoint::from_shared(url.to_owned())?
        .connect_timeout(patience.connect)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(KEEP_ALIVE_EVERY)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    if url.starts_with("https://") {
        endpoint = endpoint.tls_config(tls(options))?;
    }
    Ok(endpoint.connect_lazy())
}

fn tls(options: &Options) -> ClientTlsConfig {
    let mut tls = ClientTlsConfig::new();
    if let Some(pem) = &options.ca_pem {
        tls = tls.ca_certificate(Certificate::from_pem(pem));
    }
    if let Some((certificate, key)) = &options.identity_pem {
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    tls
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(count: usize) -> (Arc<Members>, Tasks) {
        let endpoints = (0..count).map(|at| format!("http://192.0.2.{at}:2379")).collect();
        let options = Options { endpoints, ..Options::default() };
        let tasks = Tasks::new("test");
        (Members::new(&options, &tasks).expect("endpoints"), tasks)
    }

    /// The member's number in its address.
    fn number(member: &Arc<Member>) -> usize {
        let number = member.url.trim_start_matches("http://192.0.2.").split(':').next();
        number.and_then(|text| text.parse().ok()).expect("an address of these tests")
    }

    fn chosen(members: &Members, tried: &[Arc<Member>]) -> Option<usize> {
        members.choose(tried).as_ref().map(number)
    }

    #[tokio::test(start_paused = true)]
    async fn equal_members_take_turns_and_busy_ones_wait() {
        let (members, _tasks) = members(3);
        let first: Vec<usize> = (0..3).filter_map(|_| chosen(&members, &[])).collect();
        assert!((0..3).all(|at| first.contains(&at)), "{first:?}");
        let (busy, idle) = (members.all()[0].clone(), members.all()[2].clone());
        let calls = [busy.begin(), busy.begin(), members.all()[1].begin()];
        for _ in 0..3 {
            assert_eq!(chosen(&members, &[]), Some(2));
            assert_eq!(chosen(&members, std::slice::from_ref(&idle)), Some(1));
        }
        assert!(members.choose(&members.all()).is_none());
        drop(calls);
        assert!(members.all().iter().all(|member| member.state().pending == 0));
    }

    /// A member that answers some of its calls is not silent; one that answers none is the last choice.
    #[tokio::test(start_paused = true)]
    async fn silence_counts_more_than_pending_calls() {
        let (members, _tasks) = members(2);
        let (slow, frozen) = (members.all()[0].clone(), members.all()[1].clone());
        let busy: Vec<Pending> = (0..9).map(|_| slow.begin()).collect();
        let _waits = frozen.begin();
        tokio::time::advance(Duration::from_millis(999)).await;
        slow.begin().answered();
        assert_eq!(chosen(&members, &[]), Some(1), "it has fewer pending calls");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(frozen.is_silent(members.patience.silence));
        assert_eq!(chosen(&members, &[]), Some(0));
        drop(busy);
        assert!(!slow.is_silent(Duration::ZERO), "it has no pending calls");
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_set_aside_is_the_last_choice() {
        let (members, tasks) = members(2);
        let (well, aside) = (members.all()[0].clone(), members.all()[1].clone());
        let silences = aside.silences();
        members.set_aside(&aside, Health::Unwilling, "it says so");
        assert!(!silences.has_changed().expect("the member is here"));
        members.set_aside(&aside, Health::Silent, "it says nothing");
        assert!(silences.has_changed().expect("the member is here"));
        let _busy = [well.begin(), well.begin()];
        for _ in 0..4 {
            assert_eq!(chosen(&members, &[]), Some(0));
        }
        members.set_aside(&well, Health::Unwilling, "it has lost its leader");
        assert_eq!(chosen(&members, &[]), Some(0), "it answers at least");
        assert_eq!(chosen(&members, &[well]), Some(1), "there is no other");
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn members_come_and_go() {
        let (members, _tasks) = members(2);
        let (stays, goes) = (members.all()[0].clone(), members.all()[1].clone());
        let (staying, going) = (stays.silences(), goes.silences());
        let url = |number: usize| format!("http://192.0.2.{number}:2379");
        members.follow(&[url(0), url(7)]);
        assert!(Arc::ptr_eq(&members.all()[0], &stays), "it keeps its connection");
        assert_eq!(chosen(&members, &[stays]), Some(7));
        assert!(going.has_changed().expect("the member is here"), "its streams leave it");
        assert!(!staying.has_changed().expect("the member is here"));
        members.follow(&[]);
        members.follow(&["not a URL".to_owned()]);
        assert_eq!(members.count(), 2, "a list that cannot be used changes nothing");
    }
}
