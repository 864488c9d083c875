//! The metrics of this process' work queues, in Prometheus' text format.
//! Upstream: `component-base/metrics/prometheus/workqueue`.

use std::fmt::Write;
use std::sync::{Mutex, Weak};

use crate::histogram::Histogram;
use crate::queue::Counts;

/// Durations in seconds, by powers of ten.
pub type Timing = Histogram<12>;

/// Upstream: `ExponentialBuckets(10e-9, 10, 12)`.
const LIMITS: [f64; 12] =
    [1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0];

impl Default for Timing {
    fn default() -> Self {
        Self::new(&LIMITS)
    }
}

/// A queue with keys of any type.
pub(crate) trait Counted: Send + Sync {
    fn name(&self) -> &'static str;
    fn counts(&self) -> Counts;
}

/// All queues. The lock is held for pushes and scrapes only.
static QUEUES: Mutex<Vec<Weak<dyn Counted>>> = Mutex::new(vec![]);

pub(crate) fn add(queue: Weak<dyn Counted>) {
    let mut queues = QUEUES.lock().expect("no panic while held");
    queues.retain(|queue| queue.strong_count() > 0);
    queues.push(queue);
}

/// A family of single numbers: name, kind, help, and the number.
type Family = (&'static str, &'static str, &'static str, fn(&Counts) -> f64);

const FAMILIES: &[Family] = &[
    (
        "workqueue_adds_total",
        "counter",
        "[BETA] Total number of adds handled by workqueue",
        |counts| counts.adds as f64,
    ),
    ("workqueue_depth", "gauge", "[BETA] Current depth of workqueue", |counts| counts.depth as f64),
    (
        "workqueue_longest_running_processor_seconds",
        "gauge",
        "[ALPHA] How many seconds has the longest running processor for workqueue been running.",
        |counts| counts.longest.as_secs_f64(),
    ),
    (
        "workqueue_retries_total",
        "counter",
        "[BETA] Total number of retries handled by workqueue",
        |counts| counts.retries as f64,
    ),
    (
        "workqueue_unfinished_work_seconds",
        "gauge",
        "[ALPHA] How many seconds of work has done that is in progress and hasn't been observed by work_duration. Large values indicate stuck threads. One can deduce the number of stuck threads by observing the rate at which this increases.",
        |counts| counts.unfinished_time.as_secs_f64(),
    ),
];

/// Writes the families of all queues. Queues of the same name are summed.
pub fn encode(out: &mut String) {
    let queues: Vec<_> = QUEUES.lock().expect("no panic while held").clone();
    let mut all: Vec<(&str, Counts)> = vec![];
    for queue in queues.iter().filter_map(Weak::upgrade) {
        let (name, counts) = (queue.name(), queue.counts());
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => known.add(&counts),
            None => all.push((name, counts)),
        }
    }
    if all.is_empty() {
        return;
    }
    all.sort_unstable_by_key(|(name, _)| *name);
    for (family, kind, help, number) in FAMILIES {
        let _ = writeln!(out, "# HELP {family} {help}\n# TYPE {family} {kind}");
        for (name, counts) in &all {
            let _ = writeln!(out, "{family}{{name=\"{name}\"}} {}", number(counts));
        }
    }
    timings(
        out,
        "workqueue_queue_duration_seconds",
        "[BETA] How long in seconds an item stays in workqueue before being requested.",
        all.iter().map(|(name, counts)| (*name, &counts.waited)),
    );
    timings(
        out,
        "workqueue_work_duration_seconds",
        "[BETA] How long in seconds processing an item from workqueue takes.",
        all.iter().map(|(name, counts)| (*name, &counts.worked)),
    );
}

fn timings<'a>(
    out: &mut String,
    family: &str,
    help: &str,
    all: impl Iterator<Item = (&'a str, &'a Timing)>,
) {
    let _ = writeln!(out, "# HELP {family} {help}\n# TYPE {family} histogram");
    for (name, timing) in all {
        timing.write(out, family, &format!("name=\"{name}\""));
    }
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.adds += other.adds;
        self.retries += other.retries;
        self.depth += other.depth;
        self.unfinished += other.unfinished;
        self.unfinished_time += other.unfinished_time;
        self.longest = self.longest.max(other.longest);
        self.waited.add(&other.waited);
        self.worked.add(&other.worked);
    }
}

#[cfg(test)]
mod tests {
    use crate::queue::WorkQueue;

    #[tokio::test(start_paused = true)]
    async fn queues_are_counted_until_they_are_gone() {
        let queue = WorkQueue::new("metrics-test");
        queue.add("a");
        tokio::time::advance(std::time::Duration::from_secs(5)).await;
        let key = queue.next().await.expect("open");
        tokio::time::advance(std::time::Duration::from_millis(50)).await;
        queue.done(&key);
        queue.add("b");
        let mut page = String::new();
        super::encode(&mut page);
        for line in [
            "workqueue_adds_total{name=\"metrics-test\"} 2",
            "workqueue_depth{name=\"metrics-test\"} 1",
            "workqueue_queue_duration_seconds_bucket{name=\"metrics-test\",le=\"1\"} 0",
            "workqueue_queue_duration_seconds_bucket{name=\"metrics-test\",le=\"10\"} 1",
            "workqueue_work_duration_seconds_sum{name=\"metrics-test\"} 0.05",
        ] {
            assert!(page.contains(line), "{line} in {page}");
        }
        drop(queue);
        let mut page = String::new();
        super::encode(&mut page);
        assert!(!page.contains("metrics-test"));
    }
}
