//! The descheduler: evicts pods that the scheduler would place elsewhere today.
//!
//! ```text
//!  policy file ─► profiles ─► for each cycle: Snapshot ─► deschedule plugins ─► balance plugins
//!                                                              └── Cycle::evict ─► Eviction API
//! ```
//!
//! In: a policy (`descheduler/v1alpha2`), a client. Out: evictions, and an event on each evicted pod. The
//! API server keeps PodDisruptionBudgets; nothing is deleted without it.
//!
//! Cost: each cycle lists nodes and pods once, and budgets, claims and namespaces if a policy needs them.
//! Between cycles it holds nothing. A plugin looks at each pod once, and at all nodes for each pod that it
//! might evict.
//!
//! Upstream: `sigs.k8s.io/descheduler`.

mod cycle;
mod evictor;
mod fit;
mod plugins;
mod policy;
mod snapshot;

use std::sync::Arc;
use std::time::Duration;

use base::metrics::{self, Family};
use base::task::{Stop, Tasks};
use client::{Client, ErrorExt, EventRecorder};

use cycle::{Cycle, Evictions};
use plugins::Point;
pub use policy::{Policy, PolicyError};
use snapshot::Snapshot;

/// The descheduler has this name in events.
const NAME: &str = "sigs.k8s.io/descheduler";

static EVICTED: Family = Family::counter(
    "descheduler_pods_evicted_total",
    "[ALPHA] Number of total evicted pods, by the result, by the strategy, by the namespace, by the node name. 'error' result means a pod could not be evicted",
    &["result", "strategy", "profile", "namespace", "node"],
);

/// The descheduler's metrics, in Prometheus' text format.
pub fn encode_metrics(out: &mut String) {
    metrics::encode(&[&EVICTED], out);
}

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Time between the starts of two cycles; zero: one cycle, then the end.
    pub interval: Duration,
    /// Report the pods, and evict none.
    pub is_dry_run: bool,
}

/// Runs cycles until `stop`, or one cycle without an interval.
///
/// # Errors
/// The policy names a PriorityClass that does not exist; without an interval also what made the only
/// cycle fail.
pub async fn run(
    client: Client,
    policy: Policy,
    settings: Settings,
    stop: Stop,
) -> Result<(), Error> {
    let tasks = Tasks::new("descheduler");
    let events = EventRecorder::new(client.clone(), &tasks, NAME, None);
    let descheduler = Descheduler { client, policy, settings, events };
    let ended = descheduler.cycles(&stop).await;
    tasks.shutdown(Duration::from_secs(3)).await;
    ended
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot list {what}: {why}")]
    List { what: &'static str, why: String },
    #[error("priority class {0:?} of the policy does not exist")]
    NoPriorityClass(String),
}

struct Descheduler {
    client: Client,
    policy: Policy,
    settings: Settings,
    events: EventRecorder,
}

impl Descheduler {
    async fn cycles(&self, stop: &Stop) -> Result<(), Error> {
        if self.settings.interval.is_zero() {
            return stop.or(self.cycle()).await.unwrap_or(Ok(()));
        }
        let mut ticks = tokio::time::interval(self.settings.interval);
        while stop.or(ticks.tick()).await.is_some() {
            match stop.or(self.cycle()).await {
                Some(Err(Error::NoPriorityClass(name))) => {
                    return Err(Error::NoPriorityClass(name));
                }
                Some(Err(error)) => tracing::warn!(%error, "the descheduling cycle failed"),
                Some(Ok(())) => {}
                None => break,
            }
        }
        Ok(())
    }

    async fn cycle(&self) -> Result<(), Error> {
        let snapshot = Snapshot::take(&self.client, &self.policy).await?;
        if snapshot.nodes.len() < 2 {
            let found = snapshot.nodes.len();
            tracing::info!(found, "skipping the descheduling cycle: it needs two ready nodes");
            return Ok(());
        }
        let evictions = Evictions::new(&self.client, &self.policy, &self.settings, &self.events);
        let snapshot = Arc::new(snapshot);
        // All balance plugins run after all deschedule plugins.
        for point in [Point::Deschedule, Point::Balance] {
            for profile in &self.policy.profiles {
                let cycle = Cycle::new(snapshot.clone(), &evictions, profile);
                for (name, plugin) in profile.plugins(point) {
                    let before = evictions.total();
                    plugin.run(&cycle.of(name)).await;
                    let evicted = evictions.total() - before;
                    tracing::debug!(profile = profile.name, plugin = name, evicted, "ran a plugin");
                }
            }
        }
        tracing::info!(evicted = evictions.total(), "descheduling cycle ended");
        Ok(())
    }
}

/// The API server's answer to a list, or the error with its kind.
fn listed<T>(what: &'static str, answer: client::Result<T>) -> Result<T, Error> {
    answer.map_err(|error| Error::List { what, why: error.text() })
}

#[cfg(test)]
mod tests;
