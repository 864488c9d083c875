//! Which pod to try next.
//!
//! ```text
//!          add ──► active ── pop ──► (in flight) ── bound ──► (gone)
//!                    ▲ ▲                 │ failed
//!       backoff over │ └── event ───┐    ▼
//!                 backoff ◄─────── unschedulable
//! ```
//!
//! A rejected pod waits until an event that its rejecting plugins say may help, at most five
//! minutes. Backoff is for busy times: while nothing else is active, a pod that an event woke is
//! tried at once; only one whose attempt broke waits it out. Upstream: `pkg/scheduler/backend/queue`,
//! `SchedulerPopFromBackoffQ`.
//!
//! Invariants: a pod is in one place; an event during a pod's attempt is not lost to it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::families;
use crate::framework::{ClusterEvent, Framework};
use crate::pod::PodInfo;

const LONGEST_WAIT: Duration = Duration::from_secs(300);

#[derive(Clone, Debug, PartialEq)]
enum Place {
    Active,
    Backoff(Instant),
    /// The attempt broke: no event tells when the next one will not.
    ErrorBackoff(Instant),
    Unschedulable {
        since: Instant,
    },
    /// Held back by a PreEnqueue plugin.
    Gated,
    InFlight,
}

struct Waiting {
    pod: Arc<PodInfo>,
    place: Place,
    attempts: u32,
    /// QueueSort's rank, then the order of arrival.
    order: (i64, u64),
    /// The plugins that rejected it last.
    plugins: BTreeSet<&'static str>,
    /// Events during the attempt, until it is settled.
    missed: Vec<ClusterEvent>,
    /// The plugins that the metrics count it for.
    blamed: Vec<&'static str>,
    /// When it could be tried first; gates do not count.
    first: Option<Instant>,
    /// When it was tried last.
    started: Option<Instant>,
}

impl Place {
    /// The metrics' name of the queue.
    fn queue(&self) -> Option<&'static str> {
        match self {
            Self::Active => Some("active"),
            Self::Backoff(_) | Self::ErrorBackoff(_) => Some("backoff"),
            Self::Unschedulable { .. } | Self::Gated => Some("unschedulable"),
            Self::InFlight => None,
        }
    }
}

/// No reason to count a pod again.
const SAME: &str = "";

impl Waiting {
    /// Counts a rejected pod for the plugins that rejected it.
    fn blame(&mut self) {
        self.exculpate();
        if matches!(self.place, Place::Unschedulable { .. } | Place::Gated) {
            self.blamed = self.plugins.iter().copied().collect();
            for plugin in &self.blamed {
                families::unschedulable(plugin, &self.pod.scheduler, 1.0);
            }
        }
    }

    fn exculpate(&mut self) {
        for plugin in self.blamed.drain(..) {
            families::unschedulable(plugin, &self.pod.scheduler, -1.0);
        }
    }
}

/// How often a pod was tried, and since when.
#[derive(Clone, Copy, Debug)]
pub struct Tried {
    pub attempts: u32,
    pub first: Instant,
    pub started: Instant,
}

/// How many pods wait, by why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    pub active: usize,
    pub backoff: usize,
    pub unschedulable: usize,
    pub gated: usize,
}

impl std::ops::Add for Pending {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            active: self.active + other.active,
            backoff: self.backoff + other.backoff,
            unschedulable: self.unschedulable + other.unschedulable,
            gated: self.gated + other.gated,
        }
    }
}

/// The framework of a pod's profile.
pub trait Frameworks {
    fn of(&self, pod: &PodInfo) -> Option<&Framework>;
}

impl Frameworks for Framework {
    fn of(&self, _: &PodInfo) -> Option<&Framework> {
        Some(self)
    }
}

fn is_worth_requeuing(
    frameworks: &dyn Frameworks,
    plugins: &BTreeSet<&'static str>,
    pod: &PodInfo,
    event: &ClusterEvent,
) -> bool {
    frameworks.of(pod).is_some_and(|framework| framework.is_worth_requeuing(plugins, pod, event))
}

/// May the pod be tried? If not, who says so.
fn gate(framework: &Framework, pod: &PodInfo) -> (Place, BTreeSet<&'static str>) {
    match framework.pre_enqueue(pod) {
        Ok(()) => (Place::Active, BTreeSet::new()),
        Err((plugin, _)) => (Place::Gated, [plugin].into()),
    }
}

pub struct Queue {
    first_backoff: Duration,
    last_backoff: Duration,
    pods: HashMap<String, Waiting>,
    /// The active pods, in the order in which they are popped.
    active: BTreeMap<(i64, u64), String>,
    /// Pods in backoff that may be popped while no pod is active, in the same order.
    spare: BTreeMap<(i64, u64), String>,
    sequence: u64,
}

impl Default for Queue {
    fn default() -> Self {
        Self::new(Duration::from_secs(1), Duration::from_secs(10))
    }
}

impl Queue {
    pub fn new(first_backoff: Duration, last_backoff: Duration) -> Self {
        Self {
            first_backoff,
            last_backoff,
            pods: HashMap::new(),
            active: BTreeMap::new(),
            spare: BTreeMap::new(),
            sequence: 0,
        }
    }

    /// From the first, doubling, to the last.
    fn backoff(&self, attempts: u32, since: Instant) -> Instant {
        let doubled = self.first_backoff.saturating_mul(1 << attempts.saturating_sub(1).min(10));
        since + doubled.min(self.last_backoff)
    }

    /// A new pod, or one that changed.
    pub fn put(&mut self, frameworks: &dyn Frameworks, pod: Arc<PodInfo>) {
        let Some(framework) = frameworks.of(&pod) else { return };
        let uid = pod.uid.clone();
        let Some(known) = self.pods.get_mut(&uid) else {
            self.sequence += 1;
            let (place, plugins) = gate(framework, &pod);
            let waiting = Waiting {
                order: (framework.rank(&pod), self.sequence),
                pod,
                place: Place::Gated,
                attempts: 0,
                plugins,
                missed: vec![],
                blamed: vec![],
                first: None,
                started: None,
            };
            self.pods.insert(uid.clone(), waiting);
            return self.move_to(&uid, place, "UnschedulablePodAdd");
        };
        let changed = known.pod.differs_in_spec(&pod);
        let attempts = known.attempts;
        let until = self.backoff(attempts, Instant::now());
        self.take_out(&uid);
        let known = self.pods.get_mut(&uid).expect("known above");
        known.order.0 = framework.rank(&pod);
        known.pod = pod.clone();
        let place = match known.place.clone() {
            Place::Gated => {
                let place;
                (place, known.plugins) = gate(framework, &pod);
                place
            }
            Place::Unschedulable { .. }
                if changed
                    && framework.is_worth_requeuing(
                        &known.plugins,
                        &pod,
                        &ClusterEvent::PodUpdated,
                    ) =>
            {
                Place::Backoff(until)
            }
            Place::InFlight => {
                if changed {
                    known.missed.push(ClusterEvent::PodUpdated);
                }
                Place::InFlight
            }
            place => place,
        };
        self.move_to(&uid, place, if changed { "UnschedulablePodUpdate" } else { SAME });
    }

    pub fn remove(&mut self, uid: &str) {
        self.take_out(uid);
        if let Some(mut gone) = self.pods.remove(uid) {
            gone.exculpate();
        }
    }

    /// The next pod to try, now in flight. The caller owes [`settle`](Self::settle) or
    /// [`remove`](Self::remove).
    pub fn pop(&mut self) -> Option<Arc<PodInfo>> {
        let (_, uid) = match self.active.pop_first() {
            Some(first) => first,
            None => {
                let first = self.spare.pop_first()?;
                families::incoming("active", "PopFromBackoffQ");
                first
            }
        };
        let waiting = self.pods.get_mut(&uid).expect("active pods are known");
        waiting.place = Place::InFlight;
        waiting.attempts += 1;
        waiting.started = Some(Instant::now());
        waiting.missed.clear();
        waiting.exculpate();
        Some(waiting.pod.clone())
    }

    /// How often a pod was tried.
    pub fn tried(&self, uid: &str) -> Option<Tried> {
        let waiting = self.pods.get(uid)?;
        Some(Tried { attempts: waiting.attempts, first: waiting.first?, started: waiting.started? })
    }

    pub fn pending(&self) -> Pending {
        let mut pending = Pending::default();
        for waiting in self.pods.values() {
            match waiting.place {
                Place::Active => pending.active += 1,
                Place::Backoff(_) | Place::ErrorBackoff(_) => pending.backoff += 1,
                Place::Unschedulable { .. } => pending.unschedulable += 1,
                Place::Gated => pending.gated += 1,
                Place::InFlight => {}
            }
        }
        pending
    }

    /// The attempt failed because of `plugins`; empty for an error that time may mend.
    pub fn settle(
        &mut self,
        frameworks: &dyn Frameworks,
        uid: &str,
        plugins: BTreeSet<&'static str>,
    ) {
        let now = Instant::now();
        let Some(waiting) = self.pods.get_mut(uid) else {
            return;
        };
        let missed = std::mem::take(&mut waiting.missed);
        let pod = waiting.pod.clone();
        let attempts = waiting.attempts;
        let helped =
            missed.iter().any(|event| is_worth_requeuing(frameworks, &plugins, &pod, event));
        let until = self.backoff(attempts, now);
        let place = if plugins.is_empty() {
            Place::ErrorBackoff(until)
        } else if helped {
            Place::Backoff(until)
        } else {
            Place::Unschedulable { since: now }
        };
        if let Some(waiting) = self.pods.get_mut(uid) {
            waiting.plugins = plugins;
        }
        self.move_to(uid, place, "ScheduleAttemptFailure");
    }

    /// Something happened: pods that it may help are tried again.
    pub fn wake(&mut self, frameworks: &dyn Frameworks, event: &ClusterEvent) {
        let now = Instant::now();
        let (mut moves, mut opened) = (vec![], vec![]);
        for (uid, waiting) in &mut self.pods {
            match waiting.place {
                Place::InFlight => waiting.missed.push(event.clone()),
                Place::Unschedulable { since }
                    if is_worth_requeuing(frameworks, &waiting.plugins, &waiting.pod, event) =>
                {
                    moves.push((uid.clone(), waiting.attempts, since));
                }
                Place::Gated
                    if is_worth_requeuing(frameworks, &waiting.plugins, &waiting.pod, event) =>
                {
                    opened.push((uid.clone(), waiting.pod.clone()));
                }
                _ => {}
            }
        }
        for (uid, pod) in opened {
            let Some(framework) = frameworks.of(&pod) else { continue };
            let (place, plugins) = gate(framework, &pod);
            if let Some(waiting) = self.pods.get_mut(&uid) {
                waiting.plugins = plugins;
            }
            self.move_to(&uid, place, event.label());
        }
        for (uid, attempts, since) in moves {
            let until = self.backoff(attempts, since);
            let place = if until <= now { Place::Active } else { Place::Backoff(until) };
            self.move_to(&uid, place, event.label());
        }
    }

    /// Moves what has waited enough; returns when to look again.
    pub fn ripen(&mut self, now: Instant) -> Option<Instant> {
        let mut ripe = vec![];
        let mut next: Option<Instant> = None;
        for (uid, waiting) in &self.pods {
            let until = match waiting.place {
                Place::Backoff(until) | Place::ErrorBackoff(until) => until,
                Place::Unschedulable { since } => since + LONGEST_WAIT,
                _ => continue,
            };
            if until <= now {
                let is_backoff = !matches!(waiting.place, Place::Unschedulable { .. });
                let event = if is_backoff { "BackoffComplete" } else { "UnschedulableTimeout" };
                ripe.push((uid.clone(), event));
            } else {
                next = Some(next.map_or(until, |known| known.min(until)));
            }
        }
        for (uid, event) in ripe {
            self.move_to(&uid, Place::Active, event);
        }
        next
    }

    fn take_out(&mut self, uid: &str) {
        if let Some(waiting) = self.pods.get(uid) {
            self.active.remove(&waiting.order);
            self.spare.remove(&waiting.order);
        }
    }

    /// `event` is the metrics' name of the reason.
    fn move_to(&mut self, uid: &str, place: Place, event: &str) {
        let Some(waiting) = self.pods.get_mut(uid) else {
            return;
        };
        if waiting.place != place && event != SAME {
            place.queue().into_iter().for_each(|queue| families::incoming(queue, event));
        }
        waiting.place = place;
        waiting.blame();
        if waiting.place == Place::Active {
            waiting.first.get_or_insert_with(Instant::now);
        }
        self.spare.remove(&waiting.order);
        match waiting.place {
            Place::Active => self.active.insert(waiting.order, uid.to_owned()),
            Place::Backoff(_) => self.spare.insert(waiting.order, uid.to_owned()),
            _ => None,
        };
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::framework::{ExtensionPoints, PreEnqueue, QueueSort, Rejection, Row};

    struct Gates;
    impl PreEnqueue for Gates {
        fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), Rejection> {
            if pod.gates.is_empty() { Ok(()) } else { Err(Rejection::new("gated")) }
        }
    }
    impl QueueSort for Gates {
        fn rank(&self, pod: &PodInfo) -> i64 {
            -i64::from(pod.priority)
        }
    }

    impl crate::framework::Bind for Gates {
        fn bind<'a>(
            &'a self,
            _: &'a PodInfo,
            _: &'a str,
        ) -> futures::future::BoxFuture<'a, Result<(), crate::error::BindError>> {
            Box::pin(std::future::ready(Ok(())))
        }
    }

    static TABLE: &[Row] = &[Row {
        name: "Test",
        weight: 0,
        build: |_| ExtensionPoints {
            pre_enqueue: Some(Arc::new(Gates)),
            queue_sort: Some(Arc::new(Gates)),
            bind: Some(Arc::new(Gates)),
            ..Default::default()
        },
        hint: |_, event| matches!(event, ClusterEvent::NodeAdded(_)),
    }];

    fn framework() -> Framework {
        let service = tower::service_fn(async |_: http::Request<kube::client::Body>| {
            let body = http_body_util::Full::<bytes::Bytes>::default();
            Ok::<_, std::convert::Infallible>(http::Response::new(body))
        });
        let handle = crate::framework::Handle {
            client: client::Client::new(service, "test"),
            volumes: None,
            objects: None,
            args: crate::config::Args::default(),
        };
        let head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n";
        let only = "profiles: [{plugins: {multiPoint: {disabled: [{name: '*'}], enabled: [{name: Test}]}}}]\n";
        let config = crate::Config::parse(&format!("{head}{only}")).expect("a profile");
        Framework::new(TABLE, &config.profiles[0], &handle).expect("a framework")
    }

    fn pod(name: &str, priority: i32, gates: &[&str]) -> Arc<PodInfo> {
        let gates: Vec<_> = gates.iter().map(|name| json!({"name": name})).collect();
        let value = json!({"metadata": {"name": name, "uid": name},
            "spec": {"containers": [], "priority": priority, "schedulingGates": gates}});
        Arc::new(PodInfo::new(&from_value(value).unwrap()))
    }

    fn popped(queue: &mut Queue) -> Option<String> {
        queue.pop().map(|pod| pod.uid.clone())
    }

    #[tokio::test(start_paused = true)]
    async fn the_important_go_first_and_the_gated_wait() {
        let (framework, mut queue) = (framework(), Queue::default());
        for one in [pod("a", 0, &[]), pod("b", 5, &[]), pod("c", 0, &[]), pod("g", 9, &["x"])] {
            queue.put(&framework, one);
        }
        assert_eq!(popped(&mut queue).as_deref(), Some("b"));
        assert_eq!(popped(&mut queue).as_deref(), Some("a"));
        assert_eq!(popped(&mut queue).as_deref(), Some("c"));
        assert_eq!(popped(&mut queue), None);
        queue.put(&framework, pod("g", 9, &[]));
        assert_eq!(popped(&mut queue).as_deref(), Some("g"));
    }

    #[tokio::test(start_paused = true)]
    async fn the_rejected_wait_for_what_helps() {
        let (framework, mut queue) = (framework(), Queue::default());
        let added = ClusterEvent::NodeAdded(Arc::default());
        let test = || BTreeSet::from(["Test"]);
        queue.put(&framework, pod("a", 0, &[]));
        queue.pop();
        queue.settle(&framework, "a", test());
        queue.wake(&framework, &ClusterEvent::NodeRemoved);
        assert_eq!(queue.ripen(Instant::now()), Some(Instant::now() + LONGEST_WAIT));
        queue.wake(&framework, &added);
        // Another pod is first, though it came later: pods in backoff yield to pods that were not tried.
        queue.put(&framework, pod("b", 0, &[]));
        assert_eq!(queue.ripen(Instant::now()), Some(Instant::now() + Duration::from_secs(1)));
        assert_eq!(popped(&mut queue).as_deref(), Some("b"));
        // If no other pod waits, the event counts at once: a node that turns Ready after the first
        // attempt must not cost a second.
        assert_eq!(popped(&mut queue).as_deref(), Some("a"));

        // Events during the attempt count.
        queue.wake(&framework, &added);
        queue.settle(&framework, "a", test());
        let until = queue.ripen(Instant::now()).expect("backoff");
        assert_eq!(until - Instant::now(), Duration::from_secs(2));
        assert_eq!(popped(&mut queue).as_deref(), Some("a"));

        // An attempt that broke waits, whatever happens.
        queue.settle(&framework, "a", BTreeSet::new());
        queue.wake(&framework, &added);
        assert_eq!(popped(&mut queue), None);
        let until = queue.ripen(Instant::now()).expect("backoff");
        assert_eq!(until - Instant::now(), Duration::from_secs(4));
        tokio::time::sleep_until(until).await;
        queue.ripen(Instant::now());
        assert_eq!(popped(&mut queue).as_deref(), Some("a"));
        assert!(queue.active.is_empty() && queue.spare.is_empty());
    }
}
