//! Leader election by Lease.
//!
//! Upstream: `client-go/tools/leaderelection`: 15 s lease, 10 s to renew, a try every 2 s; the
//! observed renewal is timed by the local clock, so clocks may differ; `leaseTransitions` counts
//! changes of holder.
//!
//! Invariant: the work of a leader has ended before another candidate may hold the lease. A signal ends
//! it, because its tasks would survive a dropped future. A candidate that lost the lease tries again
//! only after that, and after a pause ([`Election::stand`]).

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::backoff::Backoff;
use base::task::{Stop, Tasks};
use futures::StreamExt;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::api::{WatchEvent, WatchParams};
use machinery::{MicroTime, ObjectMeta};
use tokio::time::Instant;

use crate::client::{Client, ErrorExt};
use crate::{Api, PostParams};

/// The jitter of the time between tries, as a share of it.
const JITTER: f64 = 1.2;
/// The pause before a candidate whose work ended tries again. Upstream's process ends, and a supervisor
/// starts it again.
const AGAIN_FIRST: Duration = Duration::from_secs(1);
const AGAIN_CEILING: Duration = Duration::from_secs(60);
/// A leader that lasted this long resets the pause.
const WELL: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub lease: Duration,
    pub renew_deadline: Duration,
    pub retry: Duration,
}

impl Timing {
    /// The timeout of one request about the lease. It leaves time for a retry before the renew deadline.
    /// Upstream: half of that deadline.
    fn request(&self) -> Duration {
        self.renew_deadline / 2
    }
}

impl Default for Timing {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { lease: seconds(15), renew_deadline: seconds(10), retry: seconds(2) }
    }
}

/// One candidate.
pub struct Election {
    pub client: Client,
    pub namespace: String,
    pub name: String,
    /// Unique among candidates: upstream's is `<host>_<uuid>`.
    pub identity: String,
    pub timing: Timing,
    /// False where no second candidate can exist (an embedded store): the lease is taken once and
    /// not renewed, which saves a durable write every two seconds.
    pub renews: bool,
    /// The state for the rest of the process.
    pub leadership: Leadership,
}

/// Reports whether a candidate leads, for health checks and metrics. Clones share the state.
/// Upstream: `leaderelection.HealthzAdaptor`.
#[derive(Clone, Debug, Default)]
pub struct Leadership(Arc<Mutex<Option<Instant>>>);

impl Leadership {
    pub fn leads(&self) -> bool {
        self.renewed().is_some()
    }

    /// An error if the leader has neither renewed its lease nor ended `patience` after the lease
    /// expired: it hangs and should be killed.
    pub fn check(&self, lease: &str, timing: Timing, patience: Duration) -> Result<(), String> {
        match self.renewed() {
            Some(renewed) if renewed.elapsed() > timing.lease + patience => {
                Err(format!("failed election to renew leadership on lease {lease}"))
            }
            _ => Ok(()),
        }
    }

    fn renewed(&self) -> Option<Instant> {
        *self.0.lock().expect("no panic while held")
    }

    fn set(&self, renewed: Option<Instant>) {
        *self.0.lock().expect("no panic while held") = renewed;
    }
}

/// The reason why [`Election::run`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Stopped,
    /// The lease could not be renewed in time; the work was dropped.
    Lost,
    /// The work ended by itself.
    Finished,
}

/// The reason of a failed try for the lease.
enum Trouble {
    Api(crate::Error),
    /// The outcome of the request is unknown.
    Slow,
}

impl Trouble {
    fn text(&self) -> String {
        match self {
            Self::Api(error) => error.text(),
            Self::Slow => "no answer in time".into(),
        }
    }
}

/// The observed lease, and the time of the observation.
struct Observed {
    lease: Lease,
    at: Instant,
}

impl Observed {
    /// The time starts again when the spec changes.
    fn update(&mut self, lease: Lease) {
        if self.lease.spec != lease.spec {
            self.at = Instant::now();
        }
        self.lease = lease;
    }

    /// The remaining time of the holder's lease, if there is a holder.
    fn left(&self) -> Option<Duration> {
        let spec = self.lease.spec.as_ref()?;
        spec.holder_identity.as_deref().filter(|holder| !holder.is_empty())?;
        length(spec).checked_sub(self.at.elapsed()).filter(|left| !left.is_zero())
    }
}

impl Election {
    pub fn new(client: Client, namespace: &str, name: &str, host: &str) -> Self {
        Self {
            client,
            namespace: namespace.into(),
            name: name.into(),
            identity: format!("{host}_{}", base::rng::uuid()),
            timing: Timing::default(),
            renews: true,
            leadership: Leadership::default(),
        }
    }

    /// Waits for the lease, runs `work` while it is held, and releases the lease at the end. A signal
    /// tells the work to end. Its last writes reach the API server.
    pub async fn run<F: Future<Output = ()>>(
        &self,
        stop: Stop,
        work: impl FnOnce(Stop) -> F,
    ) -> Ended {
        let mut observed = None;
        if stop.or(self.acquire(&mut observed)).await.is_none() {
            return Ended::Stopped;
        }
        tracing::info!(lease = self.name, identity = self.identity, "became leader");
        self.leadership.set(Some(Instant::now()));
        let leading = Tasks::new("leader");
        let mut working = pin!(work(leading.stop_signal()));
        let ended = tokio::select! {
            biased;
            () = stop.wait() => Ended::Stopped,
            () = self.keep(&mut observed), if self.renews => Ended::Lost,
            () = working.as_mut() => Ended::Finished,
        };
        if ended != Ended::Finished {
            leading.stop();
            let limit = self.timing.lease.saturating_sub(self.timing.renew_deadline);
            if tokio::time::timeout(limit, working).await.is_err() {
                tracing::warn!(lease = self.name, "the leader's work did not end in time");
            }
        }
        self.leadership.set(None);
        if ended == Ended::Lost {
            tracing::error!(lease = self.name, "leadership lost");
        } else {
            self.release(&mut observed).await;
        }
        ended
    }

    /// Leads whenever possible until `stop`. After a lost lease, or work that ended by itself, the
    /// candidate tries again.
    pub async fn stand<F: Future<Output = ()>>(&self, stop: Stop, work: impl Fn(Stop) -> F) {
        let mut pause = Backoff::new(AGAIN_FIRST, AGAIN_CEILING).with_jitter(0.5);
        loop {
            let begun = Instant::now();
            let ended = self.run(stop.clone(), &work).await;
            if ended == Ended::Stopped {
                return;
            }
            if begun.elapsed() > WELL {
                pause.reset();
            }
            let pause = pause.step();
            tracing::warn!(lease = self.name, ?ended, ?pause, "trying for the lease again");
            if stop.or(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    async fn acquire(&self, observed: &mut Option<Observed>) {
        loop {
            match self.attempt(observed).await {
                Ok(true) => return,
                Ok(false) => {
                    if self.follow(observed).await {
                        continue;
                    }
                }
                // Another candidate was first. Its lease is observed at once, because its time counts from now.
                Err(Trouble::Api(error)) if error.is_conflict() || error.is_already_exists() => {
                    continue;
                }
                Err(trouble) => {
                    let error = trouble.text();
                    tracing::warn!(lease = self.name, error, "failed to take the lease")
                }
            }
            // Jitter keeps candidates apart.
            let jitter = 1.0 + JITTER * base::rng::unit();
            tokio::time::sleep(self.timing.retry.mul_f64(jitter)).await;
        }
    }

    /// Watches another candidate's lease. True as soon as it may be free: released, deleted, or not
    /// renewed within its duration. False if the watch fails.
    /// Deviation: upstream polls every 2 to 4.4 s, and learns of the last renewal and of the end that
    /// much later. A watch learns at once and costs less.
    async fn follow(&self, observed: &mut Option<Observed>) -> bool {
        let Some(seen) = observed else {
            return false;
        };
        let api: Api<Lease> = self.client.api(Some(&self.namespace));
        let wanted = WatchParams::default().fields(&format!("metadata.name={}", self.name));
        let version = seen.lease.metadata.resource_version.clone().unwrap_or_default();
        let Ok(events) = api.watch(&wanted, &version).await else {
            return false;
        };
        let mut events = pin!(events);
        while let Some(left) = seen.left() {
            match tokio::time::timeout(left, events.next()).await {
                Ok(Some(Ok(WatchEvent::Added(lease) | WatchEvent::Modified(lease)))) => {
                    seen.update(lease);
                }
                Ok(Some(Ok(WatchEvent::Bookmark(_)))) => {}
                Ok(Some(Ok(WatchEvent::Deleted(_)))) | Err(_) => return true,
                Ok(Some(Ok(WatchEvent::Error(_)) | Err(_)) | None) => return false,
            }
        }
        true
    }

    /// Returns when the lease was not renewed within the deadline.
    async fn keep(&self, observed: &mut Option<Observed>) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(self.timing.retry).await;
            let deadline = renewed + self.timing.renew_deadline;
            match tokio::time::timeout_at(deadline, self.renew(observed)).await {
                Ok(Ok(true)) => {
                    renewed = Instant::now();
                    self.leadership.set(Some(renewed));
                }
                Ok(Ok(false)) => {
                    // Another candidate holds it. There is nothing to wait for.
                    return;
                }
                Ok(Err(trouble)) => {
                    let error = trouble.text();
                    tracing::warn!(lease = self.name, error, "failed to renew the lease");
                }
                Err(_) => return,
            }
            if renewed.elapsed() >= self.timing.renew_deadline {
                return;
            }
        }
    }

    /// Writes over the lease as last observed. After a conflict, reads it first.
    /// Upstream: the fast path of `tryAcquireOrRenew`.
    async fn renew(&self, observed: &mut Option<Observed>) -> Result<bool, Trouble> {
        let seen = observed.as_ref().map(|observed| observed.lease.clone());
        let is_own = |spec: &LeaseSpec| spec.holder_identity.as_deref() == Some(&self.identity);
        if let Some(lease) = seen.filter(|lease| lease.spec.as_ref().is_some_and(is_own)) {
            let now = MicroTime(base::clock::now());
            let spec = self.holding(lease.spec.clone().unwrap_or_default(), now);
            match self.replace(Lease { spec: Some(spec), ..lease }, observed).await {
                Err(Trouble::Api(error)) if error.is_conflict() || error.is_not_found() => {}
                outcome => return outcome.map(|()| true),
            }
        }
        self.attempt(observed).await
    }

    async fn replace(&self, lease: Lease, observed: &mut Option<Observed>) -> Result<(), Trouble> {
        let api: Api<Lease> = self.client.api(Some(&self.namespace));
        let write = async { api.replace(&self.name, &PostParams::default(), &lease).await };
        let lease = self.bounded(write).await?;
        *observed = Some(Observed { lease, at: Instant::now() });
        Ok(())
    }

    async fn bounded<T>(
        &self,
        request: impl Future<Output = crate::Result<T>>,
    ) -> Result<T, Trouble> {
        match tokio::time::timeout(self.timing.request(), request).await {
            Ok(outcome) => outcome.map_err(Trouble::Api),
            Err(_) => Err(Trouble::Slow),
        }
    }

    /// Takes or renews the lease. False if another candidate holds it.
    async fn attempt(&self, observed: &mut Option<Observed>) -> Result<bool, Trouble> {
        let api: Api<Lease> = self.client.api(Some(&self.namespace));
        let now = MicroTime(base::clock::now());
        let Some(lease) = self.bounded(api.get_opt(&self.name)).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(self.name.clone()),
                    namespace: Some(self.namespace.clone()),
                    ..Default::default()
                },
                spec: Some(self.holding(LeaseSpec::default(), now)),
            };
            let create = async { api.create(&PostParams::default(), &lease).await };
            let lease = self.bounded(create).await?;
            *observed = Some(Observed { lease, at: Instant::now() });
            return Ok(true);
        };
        let seen =
            observed.get_or_insert_with(|| Observed { lease: lease.clone(), at: Instant::now() });
        seen.update(lease.clone());
        let unchanged = seen.at.elapsed();
        let Some(spec) = take(lease.spec.unwrap_or_default(), &self.identity, unchanged) else {
            return Ok(false);
        };
        let lease = Lease { spec: Some(self.holding(spec, now)), ..lease };
        self.replace(lease, observed).await?;
        Ok(true)
    }

    fn holding(&self, spec: LeaseSpec, now: MicroTime) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(self.timing.lease.as_secs() as i32),
            acquire_time: Some(spec.acquire_time.unwrap_or_else(|| now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(spec.lease_transitions.unwrap_or(0)),
            ..spec
        }
    }

    /// Upstream: `ReleaseOnCancel`: an empty holder and a lease of one second.
    async fn release(&self, observed: &mut Option<Observed>) {
        let Some(Observed { lease, .. }) = observed.take() else {
            return;
        };
        let spec = lease.spec.unwrap_or_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            return;
        }
        let now = MicroTime(base::clock::now());
        let lease = Lease {
            spec: Some(LeaseSpec {
                holder_identity: Some(String::new()),
                lease_duration_seconds: Some(1),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
                ..spec
            }),
            ..lease
        };
        let api: Api<Lease> = self.client.api(Some(&self.namespace));
        let write = async { api.replace(&self.name, &PostParams::default(), &lease).await };
        match tokio::time::timeout(self.timing.retry, write).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::debug!(
                    lease = self.name,
                    error = error.text(),
                    "failed to release the lease"
                )
            }
            Err(_) => tracing::debug!(lease = self.name, "failed to release the lease in time"),
        }
    }
}

/// The spec to continue from if `identity` may hold the lease; `None` if another candidate's is valid.
/// Pure. `unchanged` is the time since the last observed renewal, by the local clock.
fn take(spec: LeaseSpec, identity: &str, unchanged: Duration) -> Option<LeaseSpec> {
    let holder = spec.holder_identity.as_deref().unwrap_or_default();
    if holder == identity {
        return Some(spec);
    }
    if !holder.is_empty() && unchanged < length(&spec) {
        return None;
    }
    let transitions = spec.lease_transitions.unwrap_or(0) + 1;
    Some(LeaseSpec { acquire_time: None, lease_transitions: Some(transitions), ..spec })
}

fn length(spec: &LeaseSpec) -> Duration {
    let seconds = spec.lease_duration_seconds.unwrap_or(0);
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use bytes::Bytes;
    use http::{Method, Request, Response};
    use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::sync::mpsc;

    use super::*;

    #[test]
    fn a_lease_is_taken_when_free_or_expired() {
        let held = |holder: &str| LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(15),
            lease_transitions: Some(3),
            ..Default::default()
        };
        let check = |holder: &str, seconds: u64, expected: Option<i32>| {
            let taken = take(held(holder), "me", Duration::from_secs(seconds));
            assert_eq!(
                taken.map(|spec| spec.lease_transitions.unwrap()),
                expected,
                "{holder} {seconds}"
            );
        };
        check("me", 0, Some(3));
        check("other", 14, None);
        check("other", 15, Some(4));
        check("", 0, Some(4));
    }

    /// Upstream: `leaderelection.HealthzAdaptor`: only a hanging leader is unhealthy.
    #[tokio::test(start_paused = true)]
    async fn a_leader_that_neither_renews_nor_ends_is_ill() {
        let leadership = Leadership::default();
        let check = |expected: bool| {
            let outcome = leadership.check("it", Timing::default(), Duration::from_secs(20));
            assert_eq!(outcome.is_ok(), expected, "{outcome:?}");
        };
        assert!(!leadership.leads());
        check(true);
        leadership.set(Some(Instant::now()));
        tokio::time::advance(Duration::from_secs(35)).await;
        assert!(leadership.leads());
        check(true);
        tokio::time::advance(Duration::from_millis(1)).await;
        check(false);
        leadership.set(None);
        check(true);
    }

    type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

    fn lease(holder: &str, version: u64) -> Value {
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "it", "namespace": "default", "resourceVersion": version.to_string()},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15,
                "renewTime": format!("2026-01-01T00:00:{version:02}.000000Z")},
        })
    }

    /// Another Lease: its last writer holds it.
    struct Server {
        lease: Value,
        watch: Option<mpsc::Sender<Value>>,
    }

    fn client(server: &Arc<Mutex<Server>>) -> Client {
        let server = server.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move { Ok::<Answer, Infallible>(answer(&request, &server)) }
        });
        Client::new(service, "test")
    }

    fn answer(request: &Request<Body>, server: &Mutex<Server>) -> Answer {
        let mut server = server.lock().unwrap();
        if !request.uri().query().is_some_and(|query| query.contains("watch=true")) {
            if request.method() == Method::PUT {
                server.lease = lease("me", 3);
            }
            let body = Bytes::from(server.lease.to_string());
            return Response::new(Full::new(body).boxed_unsync());
        }
        let (sender, events) = mpsc::channel(1);
        server.watch = Some(sender);
        let lines = futures::stream::unfold(events, |mut events| async move {
            let lease = events.recv().await?;
            let line = json!({"type": "MODIFIED", "object": lease}).to_string() + "\n";
            Some((Ok(http_body::Frame::data(Bytes::from(line))), events))
        });
        Response::new(StreamBody::new(lines).boxed_unsync())
    }

    /// A task that is not stopped would run on after the work was dropped.
    #[tokio::test(start_paused = true)]
    async fn the_work_is_told_to_end_and_waited_for() {
        let server = Arc::new(Mutex::new(Server { lease: lease("", 1), watch: None }));
        let election = Election {
            identity: "me".into(),
            ..Election::new(client(&server), "default", "it", "host")
        };
        let (tasks, begun) = (Tasks::new("test"), tokio::sync::Notify::new());
        let own = Tasks::new("of the work");
        let told = own.stop_signal();
        let work = async |stop: Stop| {
            own.spawn("part", std::future::pending());
            begun.notify_one();
            stop.wait().await;
            own.shutdown(Duration::from_secs(1)).await;
        };
        let stopping = async {
            begun.notified().await;
            tasks.stop();
        };
        let (ended, ()) = tokio::join!(election.run(tasks.stop_signal(), work), stopping);
        assert_eq!(ended, Ended::Stopped);
        assert!(told.is_raised(), "its task goes on");
    }

    /// Answers nothing to the writes of these numbers, counted from the first.
    fn deaf_client(
        server: &Arc<Mutex<Server>>,
        deaf: std::ops::Range<usize>,
    ) -> (Client, Arc<Mutex<usize>>) {
        let (server, count) = (server.clone(), Arc::new(Mutex::new(0)));
        let writes = count.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (server, deaf, writes) = (server.clone(), deaf.clone(), writes.clone());
            async move {
                let number = *writes.lock().unwrap();
                if request.method() == Method::PUT {
                    *writes.lock().unwrap() += 1;
                    if deaf.contains(&number) {
                        std::future::pending::<()>().await;
                    }
                }
                Ok::<Answer, Infallible>(answer(&request, &server))
            }
        });
        (Client::new(service, "test"), count)
    }

    /// One renewal that is not answered costs half of the deadline, not all of it.
    #[tokio::test(start_paused = true)]
    async fn an_unanswered_renewal_is_tried_again() {
        let server = Arc::new(Mutex::new(Server { lease: lease("", 1), watch: None }));
        let (client, writes) = deaf_client(&server, 1..2);
        let election =
            Election { identity: "me".into(), ..Election::new(client, "default", "it", "host") };
        let tasks = Tasks::new("test");
        let work = async |stop: Stop| stop.wait().await;
        let stopping = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            tasks.stop();
        };
        let (ended, ()) = tokio::join!(election.run(tasks.stop_signal(), work), stopping);
        assert_eq!(ended, Ended::Stopped);
        assert!(*writes.lock().unwrap() > 20);
    }

    /// The lease is lost, the work ends, and later the candidate leads again: one life at a time.
    #[tokio::test(start_paused = true)]
    async fn a_lost_lease_ends_the_work_and_the_candidate_stands_again() {
        let server = Arc::new(Mutex::new(Server { lease: lease("", 1), watch: None }));
        let (client, _) = deaf_client(&server, 1..4);
        let election =
            Election { identity: "me".into(), ..Election::new(client, "default", "it", "host") };
        let (tasks, lives) = (Tasks::new("test"), Mutex::new(vec![]));
        let work = async |stop: Stop| {
            let begun = Instant::now();
            stop.wait().await;
            lives.lock().unwrap().push((begun, Instant::now()));
        };
        let stopping = async {
            tokio::time::sleep(Duration::from_secs(120)).await;
            tasks.stop();
        };
        tokio::join!(election.stand(tasks.stop_signal(), work), stopping);
        let lives = lives.into_inner().unwrap();
        assert_eq!(lives.len(), 2, "{lives:?}");
        assert!(lives[1].0 >= lives[0].1 + AGAIN_FIRST, "{lives:?}");
        assert!(lives[0].1 - lives[0].0 <= Timing::default().lease, "{lives:?}");
    }

    /// Between two looks of upstream's rhythm the leader renews once more and dies.
    #[tokio::test(start_paused = true)]
    async fn a_silent_leader_is_followed_when_its_lease_ends() {
        let server = Arc::new(Mutex::new(Server { lease: lease("other", 1), watch: None }));
        let election = Election {
            identity: "me".into(),
            ..Election::new(client(&server), "default", "it", "host")
        };
        let began = Instant::now();
        let leader = async {
            tokio::time::sleep(Duration::from_millis(2500)).await;
            let mut server = server.lock().unwrap();
            server.lease = lease("other", 2);
            let watch = server.watch.as_ref().expect("the lease is watched");
            watch.try_send(server.lease.clone()).unwrap();
        };
        let mut observed = None;
        let ((), ()) = tokio::join!(leader, election.acquire(&mut observed));
        let waited = began.elapsed().as_millis();
        assert!((17_500..17_600).contains(&waited), "{waited} ms");
    }
}
