//! The work queue of keys to reconcile.
//!
//! ```text
//!   add ─► waiting ── next() ─► running ── done ─► (gone)
//!             ▲                    │ added meanwhile
//!   later ────┴────────────────────┘
//! ```
//!
//! Invariants: a key waits at most once. A running key is not handed out again until it is done; an
//! add meanwhile makes it wait again then. Upstream: `client-go/util/workqueue`.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::queue_metrics::{self, Counted, Timing};

/// Upstream: `DefaultControllerRateLimiter`, per item.
const FIRST_RETRY: Duration = Duration::from_millis(5);
const LAST_RETRY: Duration = Duration::from_secs(1000);

/// Cheap to clone; clones share the queue.
pub struct WorkQueue<K>(Arc<Shared<K>>);

impl<K> Clone for WorkQueue<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Shared<K> {
    name: &'static str,
    /// Guards everything; held for a few map operations.
    state: Mutex<State<K>>,
    /// One permit per wake-up of one worker.
    wake: Notify,
}

struct State<K> {
    order: VecDeque<K>,
    waiting: HashSet<K>,
    /// The start of work on each running key.
    running: HashMap<K, Instant>,
    /// The time at which each waiting key was added.
    added: HashMap<K, Instant>,
    /// By time, then insertion, so that equal keys and equal times both work.
    delayed: BTreeSet<(Instant, u64)>,
    delayed_keys: HashMap<u64, K>,
    soonest: HashMap<K, (Instant, u64)>,
    sequence: u64,
    failures: HashMap<K, u32>,
    closed: bool,
    counts: Counts,
}

/// For metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    pub adds: u64,
    pub retries: u64,
    pub depth: usize,
    pub unfinished: usize,
    /// The time spent on running keys: the sum, and the longest.
    pub unfinished_time: Duration,
    pub longest: Duration,
    pub waited: Timing,
    pub worked: Timing,
}

impl<K: Clone + Eq + Hash + Send + 'static> WorkQueue<K> {
    pub fn new(name: &'static str) -> Self {
        let state = State {
            order: VecDeque::new(),
            waiting: HashSet::new(),
            running: HashMap::new(),
            added: HashMap::new(),
            delayed: BTreeSet::new(),
            delayed_keys: HashMap::new(),
            soonest: HashMap::new(),
            sequence: 0,
            failures: HashMap::new(),
            closed: false,
            counts: Counts::default(),
        };
        let shared = Arc::new(Shared { name, state: Mutex::new(state), wake: Notify::new() });
        let known: Arc<dyn Counted> = shared.clone();
        queue_metrics::add(Arc::downgrade(&known));
        Self(shared)
    }

    pub fn name(&self) -> &'static str {
        self.0.name
    }

    pub fn add(&self, key: K) {
        if self.state().enqueue(key) {
            self.0.wake.notify_one();
        }
    }

    /// Adds the key after `delay`; an earlier time for the same key wins.
    pub fn add_after(&self, key: K, delay: Duration) {
        if delay.is_zero() {
            return self.add(key);
        }
        self.state().delay(key, Instant::now() + delay);
        self.0.wake.notify_one();
    }

    /// Adds the key after a delay that doubles with each failure since [`forget`](Self::forget).
    pub fn add_rate_limited(&self, key: K) {
        let delay = {
            let mut state = self.state();
            state.counts.retries += 1;
            let failures = state.failures.entry(key.clone()).or_insert(0);
            let delay = FIRST_RETRY.saturating_mul(1u32.checked_shl(*failures).unwrap_or(u32::MAX));
            *failures = (*failures + 1).min(31);
            delay.min(LAST_RETRY)
        };
        self.add_after(key, delay);
    }

    pub fn forget(&self, key: &K) {
        self.state().failures.remove(key);
    }

    /// Failures since the last [`forget`](Self::forget).
    pub fn failures(&self, key: &K) -> u32 {
        self.state().failures.get(key).copied().unwrap_or(0)
    }

    /// The next key to work on; `None` when the queue is closed. The caller must call
    /// [`done`](Self::done).
    pub async fn next(&self) -> Option<K> {
        loop {
            let woken = self.0.wake.notified();
            let deadline = {
                let mut state = self.state();
                if state.closed {
                    self.0.wake.notify_one();
                    return None;
                }
                state.ripen(Instant::now());
                if let Some(key) = state.take() {
                    if !state.order.is_empty() {
                        self.0.wake.notify_one();
                    }
                    return Some(key);
                }
                state.delayed.first().map(|(at, _)| *at)
            };
            match deadline {
                None => woken.await,
                Some(at) => {
                    let _ = tokio::time::timeout_at(at, woken).await;
                }
            }
        }
    }

    /// Ends the work on a key. If it was added meanwhile, it waits again.
    pub fn done(&self, key: &K) {
        let mut state = self.state();
        if let Some(since) = state.running.remove(key) {
            state.counts.worked.observe(since.elapsed().as_secs_f64());
        }
        if state.waiting.contains(key) {
            state.order.push_back(key.clone());
            drop(state);
            self.0.wake.notify_one();
        }
    }

    /// Closes the queue.
    pub fn close(&self) {
        self.state().closed = true;
        self.0.wake.notify_one();
    }

    pub fn counts(&self) -> Counts {
        self.0.counts()
    }

    fn state(&self) -> MutexGuard<'_, State<K>> {
        self.0.state.lock().expect("no panic while held")
    }
}

impl<K: Clone + Eq + Hash + Send> Counted for Shared<K> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn counts(&self) -> Counts {
        let state = self.state.lock().expect("no panic while held");
        let times = || state.running.values().map(Instant::elapsed);
        Counts {
            depth: state.waiting.len(),
            unfinished: state.running.len(),
            unfinished_time: times().sum(),
            longest: times().max().unwrap_or_default(),
            ..state.counts
        }
    }
}

impl<K: Clone + Eq + Hash> State<K> {
    /// Reports whether there is a new key for a worker.
    fn enqueue(&mut self, key: K) -> bool {
        if self.closed || !self.waiting.insert(key.clone()) {
            return false;
        }
        self.counts.adds += 1;
        self.added.insert(key.clone(), Instant::now());
        if self.running.contains_key(&key) {
            return false;
        }
        self.order.push_back(key);
        true
    }

    fn take(&mut self) -> Option<K> {
        let key = self.order.pop_front()?;
        self.waiting.remove(&key);
        if let Some(since) = self.added.remove(&key) {
            self.counts.waited.observe(since.elapsed().as_secs_f64());
        }
        let before = self.running.insert(key.clone(), Instant::now());
        assert!(before.is_none(), "a key never runs twice at once");
        Some(key)
    }

    fn delay(&mut self, key: K, at: Instant) {
        match self.soonest.get(&key) {
            Some((known, _)) if *known <= at => return,
            Some(old) => {
                self.delayed.remove(old);
                self.delayed_keys.remove(&old.1);
            }
            None => {}
        }
        self.sequence += 1;
        let place = (at, self.sequence);
        self.delayed.insert(place);
        self.delayed_keys.insert(place.1, key.clone());
        self.soonest.insert(key, place);
    }

    /// Moves due keys to the waiting ones.
    fn ripen(&mut self, now: Instant) {
        while let Some(place) = self.delayed.first().copied().filter(|(at, _)| *at <= now) {
            self.delayed.remove(&place);
            if let Some(key) = self.delayed_keys.remove(&place.1) {
                self.soonest.remove(&key);
                self.enqueue(key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_key_waits_once_and_runs_once() {
        let queue = WorkQueue::new("test");
        queue.add("a");
        queue.add("a");
        queue.add("b");
        assert_eq!(queue.next().await, Some("a"));
        queue.add("a");
        assert_eq!(queue.next().await, Some("b"));
        let counts = queue.counts();
        assert_eq!((counts.adds, counts.retries), (3, 0));
        assert_eq!((counts.depth, counts.unfinished), (1, 2));
        queue.done(&"a");
        assert_eq!(queue.next().await, Some("a"));
        queue.close();
        assert_eq!(queue.next().await, None);
        assert_eq!(queue.next().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn delays_double_and_the_earliest_wins() {
        let queue = WorkQueue::new("test");
        let start = Instant::now();
        for expected in [5, 10, 20] {
            let before = Instant::now();
            queue.add_rate_limited("a");
            let key = queue.next().await.expect("open");
            queue.done(&key);
            assert_eq!(before.elapsed().as_millis(), expected);
        }
        queue.forget(&"a");
        assert_eq!(queue.failures(&"a"), 0);
        queue.add_after("b", Duration::from_secs(9));
        queue.add_after("b", Duration::from_secs(2));
        assert_eq!(queue.next().await, Some("b"));
        assert_eq!(start.elapsed().as_millis(), 2035 + 1 - 1);
        assert_eq!(queue.counts().depth, 0);
    }
}
