//! Samples of nodes' `/metrics/resource`, for as long as clients ask for them.
//!
//! ```text
//! question ─► no recent sample: scrape now, twice if it is the first ─► answer
//!     └─────► keeps the sampler running: every 15 s, until a node was not asked for in 5 minutes
//! ```
//!
//! In: the names of the nodes that a question is about. Out: the [`History`] of each.
//!
//! Cost: one request per 15 s to each node that a question of the last five minutes was about, at most
//! [`AT_ONCE`] at a time; an autoscaler asks for the nodes of its pods, `kubectl top nodes` for all. Memory:
//! 16 samples per node, about 200 bytes per container and sample. Without questions: nothing.
//! Upstream: metrics-server, which always scrapes all nodes, every 15 s (`--metric-resolution`).

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use apiserver::Registry;
use futures::future::BoxFuture;
use futures::{StreamExt, stream};
use machinery::StatusError;
use tokio::time::Instant;

use super::samples::{History, Sample};

/// The sampler's period.
const PERIOD: Duration = Duration::from_secs(15);
/// How long the sampler goes on after a question.
const KEEP: Duration = Duration::from_secs(300);
/// The maximum age of a sample for an answer: the sampler's period, and time for a slow kubelet.
const FRESH_MS: i64 = 20_000;
/// Between the two scrapes of a first question. The counters are exact to the microsecond.
const FIRST_WINDOW: Duration = Duration::from_millis(300);
/// Upstream: `--kubelet-request-timeout`.
const PATIENCE: Duration = Duration::from_secs(10);
const AT_ONCE: usize = 64;

/// Reads a node's `/metrics/resource`.
pub(super) type Scrape =
    Box<dyn Fn(Registry, String) -> BoxFuture<'static, Result<String, StatusError>> + Send + Sync>;

pub(super) struct Collector {
    scrape: Scrape,
    /// Held for look-ups only, never across an await.
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    nodes: HashMap<String, Sampled>,
    /// Whether the sampler's task runs.
    is_sampling: bool,
}

#[derive(Default)]
struct Sampled {
    history: History,
    asked: Option<Instant>,
}

impl Collector {
    pub fn new(scrape: Scrape) -> Arc<Self> {
        Arc::new(Self { scrape, known: Mutex::default() })
    }

    /// Makes sure that the nodes' samples are recent. A node that does not answer keeps its older ones,
    /// until these are too old for an answer.
    pub async fn refresh(self: &Arc<Self>, registry: &Registry, nodes: &BTreeSet<String>) {
        self.keep_sampling(registry, nodes);
        stream::iter(nodes)
            .for_each_concurrent(AT_ONCE, |node| async move {
                if self.of(node, |history| history.is_fresh(now_ms(), FRESH_MS)) {
                    return;
                }
                self.sample(registry, node).await;
                if self.of(node, |history| history.lacks_one()) {
                    tokio::time::sleep(FIRST_WINDOW).await;
                    self.sample(registry, node).await;
                }
            })
            .await;
    }

    pub fn of<R>(&self, node: &str, look: impl FnOnce(&mut History) -> R) -> R {
        let mut known = self.known.lock().expect("no panic under the lock");
        look(&mut known.nodes.entry(node.to_owned()).or_default().history)
    }

    /// Forgets nodes that do not exist any more.
    pub fn keep(&self, nodes: &BTreeSet<String>) {
        let mut known = self.known.lock().expect("no panic under the lock");
        known.nodes.retain(|name, _| nodes.contains(name));
    }

    /// Notes the question, and starts the sampler unless it runs.
    fn keep_sampling(self: &Arc<Self>, registry: &Registry, nodes: &BTreeSet<String>) {
        let mut known = self.known.lock().expect("no panic under the lock");
        let now = Instant::now();
        for node in nodes {
            known.nodes.entry(node.clone()).or_default().asked = Some(now);
        }
        if nodes.is_empty() || std::mem::replace(&mut known.is_sampling, true) {
            return;
        }
        let (collector, registry) = (self.clone(), registry.clone());
        let tasks = registry.tasks().clone();
        tasks.spawn("metrics sampler", async move { collector.go_on(&registry).await });
    }

    /// The sampler: ends when no node was asked for in a while.
    async fn go_on(&self, registry: &Registry) {
        loop {
            tokio::time::sleep(PERIOD).await;
            let nodes = self.wanted();
            if nodes.is_empty() {
                return;
            }
            let sample = |node: String| async move { self.sample(registry, &node).await };
            stream::iter(nodes).for_each_concurrent(AT_ONCE, sample).await;
        }
    }

    /// The nodes of recent questions. Nodes that nobody asks for are forgotten; without any, the sampler
    /// counts as ended.
    fn wanted(&self) -> Vec<String> {
        let mut known = self.known.lock().expect("no panic under the lock");
        known.nodes.retain(|_, node| node.asked.is_some_and(|asked| asked.elapsed() < KEEP));
        known.is_sampling = !known.nodes.is_empty();
        known.nodes.keys().cloned().collect()
    }

    async fn sample(&self, registry: &Registry, node: &str) {
        let text = (self.scrape)(registry.clone(), node.to_owned());
        match tokio::time::timeout(PATIENCE, text).await {
            Ok(Ok(text)) => {
                let sample = Sample::parse(&text, now_ms());
                self.of(node, |history| history.push(sample));
            }
            Ok(Err(error)) => tracing::debug!(node, %error, "failed to read a node's metrics"),
            Err(_) => tracing::debug!(node, "a node did not answer with its metrics in time"),
        }
    }
}

fn now_ms() -> i64 {
    base::clock::now().as_millisecond()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use base::task::Tasks;

    use super::*;

    /// A collector whose scrapes are counted.
    fn counted() -> (Arc<Collector>, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::new(0));
        let counts = count.clone();
        let scrape: Scrape = Box::new(move |_, _| {
            counts.fetch_add(1, Ordering::Relaxed);
            // Half a core; a small number, which is exact.
            let used = (now_ms() % 10_000_000) as f64 / 2e3;
            let text = format!(
                "node_cpu_usage_seconds_total {used} {}\nnode_memory_working_set_bytes 4096\n",
                now_ms()
            );
            Box::pin(async move { Ok(text) })
        });
        (Collector::new(scrape), count)
    }

    #[tokio::test(start_paused = true)]
    async fn samples_are_taken_while_somebody_asks_and_not_longer() {
        let _world = base::sim::enter(1);
        let tasks = Tasks::new("test");
        let registry = crate::testing::registry(&tasks);
        let (collector, count) = counted();
        let nodes = BTreeSet::from(["a".to_owned(), "b".to_owned()]);
        let begun = Instant::now();
        collector.refresh(&registry, &nodes).await;
        assert_eq!((begun.elapsed(), count.load(Ordering::Relaxed)), (FIRST_WINDOW, 4));
        let usage = collector.of("a", |history| history.node()).expect("two samples");
        assert_eq!((usage.cpu_nanos, usage.memory_bytes), (500_000_000, 4096));
        // Later questions find what the sampler has read.
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_secs(29)).await;
            let begun = Instant::now();
            collector.refresh(&registry, &BTreeSet::from(["a".to_owned()])).await;
            assert_eq!(begun.elapsed(), Duration::ZERO);
        }
        // For ten minutes `a`, for five `b`.
        let taken = count.load(Ordering::Relaxed);
        assert!((4 + 38 + 18..=4 + 39 + 21).contains(&taken), "{taken}");
        tokio::time::sleep(KEEP + 2 * PERIOD).await;
        let ended = count.load(Ordering::Relaxed);
        tokio::time::sleep(KEEP).await;
        assert_eq!(count.load(Ordering::Relaxed), ended, "nobody asks any more");
        collector.refresh(&registry, &nodes).await;
        assert_eq!(count.load(Ordering::Relaxed), ended + 4, "as at first");
        tokio::time::sleep(2 * PERIOD).await;
        assert!(count.load(Ordering::Relaxed) > ended + 4, "the sampler runs again");
    }
}
