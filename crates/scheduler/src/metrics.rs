//! The metrics of the schedulers of this process, in Prometheus' text format.
//!
//! In: attempts and what came of them. Out: upstream's families. Upstream: `pkg/scheduler/metrics`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use crate::queue::{Pending, Tried};

/// The result of an attempt, as in the metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Scheduled,
    Unschedulable,
    Error,
}

impl Outcome {
    const fn label(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Unschedulable => "unschedulable",
            Self::Error => "error",
        }
    }
}

/// Buckets that double: the first limit, and how many there are.
#[derive(Clone, Copy)]
struct Doubling(f64, i32);

const ATTEMPT: Doubling = Doubling(0.001, 15);
const WAIT: Doubling = Doubling(0.01, 20);
const ATTEMPTS: Doubling = Doubling(1.0, 5);
const VICTIMS: Doubling = Doubling(1.0, 7);

#[derive(Clone, Debug, Default)]
struct Histogram {
    /// How many were at most as much as each limit.
    below: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Doubling {
    fn limits(self) -> impl Iterator<Item = f64> {
        (0..self.1).map(move |power| self.0 * 2f64.powi(power))
    }
}

impl Histogram {
    fn observe(&mut self, buckets: Doubling, value: f64) {
        self.below.resize(usize::try_from(buckets.1).unwrap_or_default(), 0);
        for (limit, below) in buckets.limits().zip(&mut self.below) {
            *below += u64::from(value <= limit);
        }
        self.sum += value;
        self.count += 1;
    }

    fn write(&self, out: &mut String, family: &str, labels: &str, buckets: Doubling) {
        let comma = if labels.is_empty() { "" } else { "," };
        // Nothing was observed yet: nothing is below anything.
        let below = self.below.iter().copied().chain(std::iter::repeat(0));
        for (limit, below) in buckets.limits().zip(below) {
            let _ = writeln!(out, "{family}_bucket{{{labels}{comma}le=\"{limit}\"}} {below}");
        }
        let _ = writeln!(out, "{family}_bucket{{{labels}{comma}le=\"+Inf\"}} {}", self.count);
        let braces = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let _ = writeln!(out, "{family}_sum{braces} {}", self.sum);
        let _ = writeln!(out, "{family}_count{braces} {}", self.count);
    }
}

/// The queues, which know the waiting pods.
pub trait Waits: Send + Sync {
    fn pending(&self) -> Pending;

    /// All pods that the scheduler knows, with and without a node.
    fn pods(&self) -> Vec<Arc<Pod>>;
}

struct Figures {
    /// By profile and outcome.
    attempts: BTreeMap<(String, Outcome), Histogram>,
    /// By how many attempts there were.
    waits: BTreeMap<u32, Histogram>,
    tries: Histogram,
    victims: Histogram,
    preemptions: u64,
    /// Claims for extended resources: those that were made, and those that could not be.
    claims: [u64; 2],
    queues: Vec<Weak<dyn Waits>>,
}

impl Figures {
    const fn new() -> Self {
        Self {
            attempts: BTreeMap::new(),
            waits: BTreeMap::new(),
            tries: Histogram { below: vec![], sum: 0.0, count: 0 },
            victims: Histogram { below: vec![], sum: 0.0, count: 0 },
            preemptions: 0,
            claims: [0; 2],
            queues: vec![],
        }
    }

    fn attempted(&mut self, profile: &str, outcome: Outcome, tried: Tried) {
        let now = Instant::now();
        let took = (now - tried.started).as_secs_f64();
        let key = (profile.to_owned(), outcome);
        self.attempts.entry(key).or_default().observe(ATTEMPT, took);
        if outcome == Outcome::Scheduled {
            let waited = (now - tried.first).as_secs_f64();
            self.tries.observe(ATTEMPTS, f64::from(tried.attempts));
            // Upstream: from sixteen on they are one.
            self.waits.entry(tried.attempts.min(16)).or_default().observe(WAIT, waited);
        }
    }

    fn preempted(&mut self, victims: usize) {
        self.preemptions += 1;
        if victims > 0 {
            self.victims.observe(VICTIMS, victims as f64);
        }
    }
}

/// The figures of the process. Held for an observation or a scrape.
static FIGURES: Mutex<Figures> = Mutex::new(Figures::new());

fn figures() -> MutexGuard<'static, Figures> {
    FIGURES.lock().expect("no panic while held")
}

pub fn add(queue: Weak<dyn Waits>) {
    let mut figures = figures();
    figures.queues.retain(|queue| queue.strong_count() > 0);
    figures.queues.push(queue);
}

/// The pods of the cluster, from the cache of one scheduler of this process.
pub fn pods() -> Vec<Arc<Pod>> {
    let first = figures().queues.iter().find_map(Weak::upgrade);
    first.map(|scheduler| scheduler.pods()).unwrap_or_default()
}

/// An attempt is over.
pub fn attempted(profile: &str, outcome: Outcome, tried: Option<Tried>) {
    if let Some(tried) = tried {
        figures().attempted(profile, outcome, tried);
    }
}

/// Room was looked for, and so many have to go for it.
pub fn preempted(victims: usize) {
    figures().preempted(victims);
}

/// A claim for extended resources was to be created.
pub fn claim_created(is_there: bool) {
    figures().claims[usize::from(!is_there)] += 1;
}

fn head(out: &mut String, family: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {family} {help}\n# TYPE {family} {kind}");
}

/// Writes all families, if there is a scheduler.
pub fn encode(out: &mut String) {
    let queues: Vec<_> = figures().queues.iter().filter_map(Weak::upgrade).collect();
    if queues.is_empty() {
        return;
    }
    // Read without the lock, because the scheduling cycle takes its own lock first.
    let pending = queues.iter().fold(Pending::default(), |sum, one| sum + one.pending());
    write(out, &figures(), &pending);
    crate::families::encode(out);
}

fn write(out: &mut String, figures: &Figures, pending: &Pending) {
    head(
        out,
        "scheduler_pending_pods",
        "gauge",
        "[STABLE] Number of pending pods, by the queue type. 'active' means number of pods in activeQ; 'backoff' means number of pods in backoffQ; 'unschedulable' means number of pods in unschedulablePods that the scheduler attempted to schedule and failed; 'gated' is the number of unschedulable pods that the scheduler never attempted to schedule because they are gated.",
    );
    for (queue, count) in [
        ("active", pending.active),
        ("backoff", pending.backoff),
        ("gated", pending.gated),
        ("unschedulable", pending.unschedulable),
    ] {
        let _ = writeln!(out, "scheduler_pending_pods{{queue=\"{queue}\"}} {count}");
    }
    attempts(out, figures);
    let family = "scheduler_pod_scheduling_attempts";
    head(out, family, "histogram", "[STABLE] Number of attempts to successfully schedule a pod.");
    figures.tries.write(out, family, "", ATTEMPTS);
    let family = "scheduler_pod_scheduling_sli_duration_seconds";
    head(
        out,
        family,
        "histogram",
        "[BETA] E2e latency for a pod being scheduled, from the time the pod enters the scheduling queue and might involve multiple scheduling attempts.",
    );
    for (attempts, one) in &figures.waits {
        let plus = if *attempts == 16 { "+" } else { "" };
        one.write(out, family, &format!("attempts=\"{attempts}{plus}\""), WAIT);
    }
    let family = "scheduler_preemption_attempts_total";
    head(out, family, "counter", "[STABLE] Total preemption attempts in the cluster till now");
    let _ = writeln!(out, "{family} {}", figures.preemptions);
    let family = "scheduler_preemption_victims";
    head(out, family, "histogram", "[STABLE] Number of selected preemption victims");
    figures.victims.write(out, family, "", VICTIMS);
    let family = "scheduler_resourceclaim_creates_total";
    let help = "[ALPHA] Number of ResourceClaims creation requests within scheduler";
    head(out, family, "counter", help);
    for (status, count) in ["success", "failure"].iter().zip(figures.claims) {
        if count > 0 {
            let _ = writeln!(out, "{family}{{status=\"{status}\"}} {count}");
        }
    }
}

fn attempts(out: &mut String, figures: &Figures) {
    let labels = |(profile, outcome): &(String, Outcome)| {
        format!("profile=\"{profile}\",result=\"{}\"", outcome.label())
    };
    let family = "scheduler_schedule_attempts_total";
    head(
        out,
        family,
        "counter",
        "[STABLE] Number of attempts to schedule pods, by the result. 'unschedulable' means a pod could not be scheduled, while 'error' means an internal scheduler problem.",
    );
    for (key, one) in &figures.attempts {
        let _ = writeln!(out, "{family}{{{}}} {}", labels(key), one.count);
    }
    let family = "scheduler_scheduling_attempt_duration_seconds";
    head(
        out,
        family,
        "histogram",
        "[STABLE] Scheduling attempt latency in seconds (scheduling algorithm + binding)",
    );
    for (key, one) in &figures.attempts {
        one.write(out, family, &labels(key), ATTEMPT);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Two;

    impl Waits for Two {
        fn pending(&self) -> Pending {
            Pending { active: 2, ..Pending::default() }
        }

        fn pods(&self) -> Vec<Arc<Pod>> {
            vec![]
        }
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_are_counted_by_what_came_of_them() {
        // Not those of the process, to which other tests add.
        let mut figures = Figures::new();
        let first = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        let started = Instant::now();
        tokio::time::advance(Duration::from_millis(3)).await;
        let tried = Tried { attempts: 3, first, started };
        figures.attempted("metrics-test", Outcome::Scheduled, tried);
        figures.attempted("metrics-test", Outcome::Unschedulable, tried);
        figures.preempted(2);
        let mut page = String::new();
        write(&mut page, &figures, &Pending { active: 2, ..Pending::default() });
        for line in [
            "scheduler_pending_pods{queue=\"active\"} 2",
            "scheduler_schedule_attempts_total{profile=\"metrics-test\",result=\"scheduled\"} 1",
            "scheduler_schedule_attempts_total{profile=\"metrics-test\",result=\"unschedulable\"} 1",
            "scheduler_scheduling_attempt_duration_seconds_bucket{profile=\"metrics-test\",result=\"scheduled\",le=\"0.002\"} 0",
            "scheduler_scheduling_attempt_duration_seconds_bucket{profile=\"metrics-test\",result=\"scheduled\",le=\"0.004\"} 1",
            "scheduler_pod_scheduling_sli_duration_seconds_count{attempts=\"3\"} 1",
            "scheduler_pod_scheduling_attempts_bucket{le=\"2\"} 0",
            "scheduler_pod_scheduling_attempts_bucket{le=\"4\"} 1",
            "scheduler_preemption_attempts_total 1",
            "scheduler_preemption_victims_sum 2",
        ] {
            assert!(page.lines().any(|one| one == line), "{line}\n{page}");
        }
    }

    /// The process has the page while it runs a scheduler, with profiles by name.
    #[tokio::test(start_paused = true)]
    async fn the_process_has_one_page() {
        let queue = Arc::new(Two);
        let known: Arc<dyn Waits> = queue.clone();
        add(Arc::downgrade(&known));
        let now = Instant::now();
        let tried = Tried { attempts: 1, first: now, started: now };
        attempted("page-test", Outcome::Unschedulable, Some(tried));
        attempted("page-test", Outcome::Error, None);
        let mut page = String::new();
        encode(&mut page);
        let counted = "scheduler_schedule_attempts_total{profile=\"page-test\",result=";
        assert!(page.contains(&format!("{counted}\"unschedulable\"}} 1\n")), "{page}");
        assert!(!page.contains(&format!("{counted}\"error\"}}")), "{page}");
        assert!(page.contains("scheduler_pending_pods{queue=\"active\"} "));
    }
}
