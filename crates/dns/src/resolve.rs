//! Answers from other servers: from the cache, else by asking, once for equal questions.
//!
//! ```text
//! question ─► cache ─┬─ fresh ──────────────────────────► answer (and asked again soon if it is popular)
//!                    ├─ stale ─► servers, at most 1.8 s ─┬► answer
//!                    │                                   └► the stale answer, TTL 0
//!                    └─ missing ─► servers ─────────────► answer, or none
//! ```
//!
//! Invariants: a question is under way once, and all who ask it wait for the same answer; it ends even if they
//! all leave. The number of questions under way is bounded, in total and by zone, so that slow servers of one
//! zone do not stop another one. The time for a stale answer is RFC 8767's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::Tasks;
use tokio::sync::{Semaphore, watch};

use crate::cache::{Cache, Found, Key, Limits};
use crate::forward::Forward;
use crate::metrics::Metrics;
use crate::wire::{Answer, Asked};

/// The limits on questions under way, in total and for one zone.
const UNDER_WAY: usize = 1024;
const OF_ONE_ZONE: usize = 512;
const BEFORE_STALE: Duration = Duration::from_millis(1800);

/// The servers of one zone, and how their answers are cached.
pub struct Source {
    pub forward: Forward,
    pub limits: Limits,
    /// Equal for sources with equal settings, so that a reload keeps the cache.
    scope: u64,
    under_way: Arc<Semaphore>,
}

impl Source {
    pub fn new(forward: Forward, limits: Limits) -> Self {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (forward.settings(), limits).hash(&mut hasher);
        let most = match forward.settings().max_concurrent {
            0 => OF_ONE_ZONE,
            most => most.min(OF_ONE_ZONE),
        };
        let under_way = Arc::new(Semaphore::new(most));
        Self { forward, limits, scope: hasher.finish(), under_way }
    }

    pub fn key(&self, asked: Asked) -> Key {
        Key { scope: self.scope, asked }
    }
}

/// An answer and the TTL of its records.
pub type Resolved = (Arc<Answer>, u32);

pub enum Quick {
    Fresh(Resolved),
    /// Servers must be asked; [`Resolver::resolve`] does so.
    Later(Option<Arc<Answer>>),
}

pub struct Resolver {
    cache: Cache,
    metrics: Arc<Metrics>,
    tasks: Tasks,
    under_way: Arc<Semaphore>,
    /// Guards the questions under way; held for one look or change.
    flights: Mutex<HashMap<Key, watch::Receiver<Landed>>>,
}

/// `None` while the servers are asked.
type Landed = Option<Option<Resolved>>;

impl Resolver {
    pub fn new(metrics: Arc<Metrics>, tasks: Tasks) -> Arc<Self> {
        Arc::new(Self {
            cache: Cache::new(),
            metrics,
            tasks,
            under_way: Arc::new(Semaphore::new(UNDER_WAY)),
            flights: Mutex::default(),
        })
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// What the cache has; never waits.
    pub fn look(self: &Arc<Self>, source: &Arc<Source>, key: &Key) -> Quick {
        match self.cache.find(key) {
            Found::Fresh { answer, ttl, refresh } => {
                if refresh && self.fly(source, key).is_some() {
                    self.metrics.prefetched();
                }
                Quick::Fresh((answer, ttl))
            }
            Found::Stale { answer, ask: false } => {
                self.metrics.served_stale();
                Quick::Fresh((answer, 0))
            }
            Found::Stale { answer, ask: true } => Quick::Later(Some(answer)),
            Found::Missing => Quick::Later(None),
        }
    }

    /// `None`: no server answered, or too many questions are under way.
    pub async fn resolve(
        self: &Arc<Self>,
        source: &Arc<Source>,
        key: &Key,
        stale: Option<Arc<Answer>>,
    ) -> Option<Resolved> {
        let flight = self.fly(source, key);
        let landed = async {
            let mut flight = flight?;
            let landed = flight.wait_for(Option::is_some).await.ok()?;
            landed.clone().flatten()
        };
        let Some(stale) = stale else { return landed.await };
        match tokio::time::timeout(BEFORE_STALE, landed).await {
            Ok(Some(fresh)) if fresh.0.is_useful() => Some(fresh),
            _ => {
                self.metrics.served_stale();
                Some((stale, 0))
            }
        }
    }

    /// Joins the question's flight, or starts it. `None`: too many are under way.
    fn fly(self: &Arc<Self>, source: &Arc<Source>, key: &Key) -> Option<watch::Receiver<Landed>> {
        let mut flights = self.flights.lock().expect("no panic while held");
        if let Some(flight) = flights.get(key) {
            return Some(flight.clone());
        }
        let permits = (
            self.under_way.clone().try_acquire_owned().ok(),
            source.under_way.clone().try_acquire_owned().ok(),
        );
        let (Some(total), Some(own)) = permits else {
            self.metrics.rejected();
            return None;
        };
        let (sender, receiver) = watch::channel(None);
        flights.insert(key.clone(), receiver.clone());
        drop(flights);
        let ended = Ended { resolver: self.clone(), key: key.clone() };
        let source = source.clone();
        self.tasks.spawn_contained("dns-forward", async move {
            let (_total, _own) = (total, own);
            let Ended { resolver, key } = &ended;
            let answer = source.forward.ask(&key.asked, &resolver.metrics).await;
            let resolved = match answer.map(Arc::new) {
                Some(answer) => {
                    let ttl = resolver.cache.put(key, &answer, source.limits);
                    Some((answer, ttl))
                }
                None => {
                    resolver.cache.failed(key);
                    None
                }
            };
            // The next query finds the cache, not this flight.
            drop(ended);
            sender.send_replace(Some(resolved));
        });
        Some(receiver)
    }
}

/// Removes a flight when it ends, also by a panic or at a shutdown.
struct Ended {
    resolver: Arc<Resolver>,
    key: Key,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.resolver.flights.lock().expect("no panic while held").remove(&self.key);
    }
}
