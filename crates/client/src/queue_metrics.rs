//! What the work queues of this process count, in Prometheus' text format.
//! Upstream: `component-base/metrics/prometheus/workqueue`.

use std::fmt::Write;
use std::sync::{Mutex, Weak};
use std::time::Duration;

use crate::queue::Counts;

/// How long things took, by powers of ten.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    buckets: [u64; LIMITS.len()],
    sum: f64,
    count: u64,
}

/// In seconds. Upstream: `ExponentialBuckets(10e-9, 10, 12)`.
const LIMITS: [f64; 12] =
    [1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0];

impl Timing {
    pub fn observe(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        if let Some(index) = LIMITS.iter().position(|limit| seconds <= *limit) {
            self.buckets[index] += 1;
        }
        self.sum += seconds;
        self.count += 1;
    }
}

/// A queue, whatever its keys are.
pub(crate) trait Counted: Send + Sync {
    fn name(&self) -> &'static str;
    fn counts(&self) -> Counts;
}

/// The queues that there are. Held for pushes and scrapes only.
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

/// Writes the families of all queues; those of one name are summed up.
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
    all.sort_by_key(|(name, _)| *name);
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
        let mut below = 0;
        for (limit, count) in LIMITS.iter().zip(timing.buckets) {
            below += count;
            let _ = writeln!(out, "{family}_bucket{{name=\"{name}\",le=\"{limit}\"}} {below}");
        }
        let _ = writeln!(out, "{family}_bucket{{name=\"{name}\",le=\"+Inf\"}} {}", timing.count);
        let _ = writeln!(out, "{family}_sum{{name=\"{name}\"}} {}", timing.sum);
        let _ = writeln!(out, "{family}_count{{name=\"{name}\"}} {}", timing.count);
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
        for (mine, theirs) in [(&mut self.waited, &other.waited), (&mut self.worked, &other.worked)]
        {
            mine.sum += theirs.sum;
            mine.count += theirs.count;
            for (bucket, more) in mine.buckets.iter_mut().zip(theirs.buckets) {
                *bucket += more;
            }
        }
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
