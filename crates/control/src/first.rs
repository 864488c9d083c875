//! A server's first writes, and the work that begins with them.
//!
//! In: a registry that answers. Out: the objects that every cluster has, and tasks that keep them right.
//! Invariant: a store that takes no writes keeps no server from starting, for reads must be answered: a
//! start waits a moment, and the work goes on in the background. A start waits for a slow store, because
//! the API server refuses components whose roles do not exist.

use std::sync::Arc;
use std::time::Duration;

use apiserver::Registry;
use apiserver::fairness::Fairness;
use base::task::Tasks;
use machinery::StatusError;
use machinery::status::Reason;
use store::Revision;
use tokio::sync::oneshot;

use crate::bootstrap::{self, Cluster};
use crate::endpoints::Reconciler;
use crate::identity::Identity;
use crate::{addresses, fairness, upkeep};

/// Before a store that did not answer is written to again.
const WRITE_AGAIN: Duration = Duration::from_secs(1);
/// A start waits this long for a store that takes no writes.
const PATIENCE: Duration = Duration::from_secs(5);
/// Each group of first writes may take this many times [`PATIENCE`] while the store takes writes.
const ROUNDS: usize = 12;

/// Writes the objects that every cluster has, and starts what keeps them right. Without `served`,
/// priority and fairness is off, and only its objects are kept.
pub async fn start(
    registry: &Registry,
    served: Option<&Fairness>,
    cluster: Cluster,
    tasks: &Tasks,
) -> Presence {
    let presence = Presence {
        endpoints: Reconciler::new(registry, cluster.own.clone()),
        identity: Identity::new(registry, &cluster.host, cluster.own.is_shared),
    };
    let (objects, known, endpoints) =
        (registry.clone(), cluster.clone(), presence.endpoints.clone());
    let revision = async || registry.revision().await.ok();
    in_time(tasks, &revision, async move {
        tokio::join!(
            written("the first objects", || bootstrap::ensure(&objects, &known, &endpoints)),
            written("the first objects of fairness", || fairness::ensure(&objects)),
        );
    })
    .await;
    fairness::start(registry, served, tasks);
    addresses::start(registry, tasks);
    upkeep::start(registry, cluster, presence.endpoints.clone(), tasks);
    presence.endpoints.start(tasks);
    presence.identity.start(tasks);
    let roles = registry.clone();
    in_time(tasks, &revision, async move {
        written("the bootstrap roles", || auth::rbac::bootstrap::reconcile(&roles)).await;
    })
    .await;
    presence
}

/// This server among the others.
#[derive(Clone)]
pub struct Presence {
    endpoints: Arc<Reconciler>,
    identity: Arc<Identity>,
}

impl Presence {
    /// Tells clients and the other servers that this one stops: it leaves the endpoints at once.
    pub async fn leave(&self) {
        tokio::join!(self.endpoints.leave(), self.identity.leave());
    }
}

/// Waits for the work of a start as long as the store's revision grows, up to a limit. Then the work goes
/// on in the background: a full disk takes no writes, and the server must answer reads.
async fn in_time(
    tasks: &Tasks,
    revision: impl AsyncFn() -> Option<Revision>,
    work: impl Future<Output = ()> + Send + 'static,
) {
    let (tell, mut is_done) = oneshot::channel();
    tasks.spawn("first writes", async move {
        work.await;
        let _ = tell.send(());
    });
    let look = async || tokio::time::timeout(PATIENCE, revision()).await.unwrap_or_default();
    let mut before = look().await;
    for _ in 0..ROUNDS {
        if tokio::time::timeout(PATIENCE, &mut is_done).await.is_ok() {
            return;
        }
        let now = look().await;
        if now.is_none() || now == before {
            tracing::warn!("the store takes no writes; the server starts and goes on trying");
            return;
        }
        before = now;
    }
    tracing::warn!("the store is slow; the server starts before its first writes are done");
}

/// Writes objects that every cluster has, again while the store does not answer. An object that is
/// refused for another reason stays missing, and the log says so.
async fn written<F: Future<Output = Result<(), StatusError>>>(what: &str, write: impl Fn() -> F) {
    while let Err(error) = write().await {
        tracing::warn!(what, %error, "failed to write objects that every cluster has");
        if !error.is(Reason::ServiceUnavailable) {
            return;
        }
        tokio::time::sleep(WRITE_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::time::{Instant, sleep};

    use super::*;

    /// How long a start waits for work of this length, where the revision grows by this much a look.
    async fn waited(work: Duration, growth: u64) -> Duration {
        let revision = Cell::new(0);
        let grow = async || {
            revision.set(revision.get() + growth);
            Some(Revision(revision.get()))
        };
        let started = Instant::now();
        in_time(&Tasks::new("start"), grow, sleep(work)).await;
        started.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_waits_for_a_slow_store_and_not_for_a_full_one() {
        let [short, long, endless] = [2, 23, 3600].map(Duration::from_secs);
        assert_eq!(waited(short, 0).await.as_secs(), 2);
        assert_eq!(waited(long, 1).await.as_secs(), 23);
        assert_eq!(waited(long, 0).await.as_secs(), 5);
        assert_eq!(waited(endless, 1).await.as_secs(), 60);
    }
}
