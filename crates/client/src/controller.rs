//! Runs reconcilers over a queue.
//!
//! Invariants: an error is logged here, once, and becomes backoff; a panic is a bug that is logged
//! and backed off like an error, so that one bad object does not end a component.

use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use futures::FutureExt;
use futures::future::BoxFuture;

use crate::client::ErrorExt;
use crate::queue::WorkQueue;

/// The result of a successful reconcile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// Look again after this long.
    After(Duration),
    /// Look again with the key's backoff, without calling it an error.
    Backoff,
}

/// Runs `workers` workers that feed keys of `queue` to `reconcile`, until `tasks` stops; a reconcile
/// that runs then is dropped at its next await.
pub fn spawn_workers<K, R, F, E>(tasks: &Tasks, queue: &WorkQueue<K>, workers: usize, reconcile: R)
where
    K: Clone + Eq + Hash + fmt::Debug + Send + Sync + 'static,
    R: Fn(K) -> F + Send + Sync + 'static,
    F: Future<Output = Result<Outcome, E>> + Send + 'static,
    E: Trouble + 'static,
{
    let reconcile: Reconcile<K, E> = Arc::new(move |key| reconcile(key).boxed());
    for _ in 0..workers {
        tasks.spawn(queue.name(), work(queue.clone(), reconcile.clone()));
    }
}

/// A worker that waits holds no reconcile's state: that is some 20 to 100 KiB, and most wait.
type Reconcile<K, E> = Arc<dyn Fn(K) -> BoxFuture<'static, Result<Outcome, E>> + Send + Sync>;

async fn work<K, E>(queue: WorkQueue<K>, reconcile: Reconcile<K, E>)
where
    K: Clone + Eq + Hash + fmt::Debug + Send + Sync + 'static,
    E: Trouble,
{
    while let Some(key) = queue.next().await {
        let result = AssertUnwindSafe(async { reconcile(key.clone()).await }).catch_unwind().await;
        settle(&queue, key, result.ok());
    }
}

/// An error of a reconcile.
pub trait Trouble: fmt::Display + Send {
    /// Ordinary races (a stale cache) are retried without a word.
    fn is_ordinary(&self) -> bool {
        false
    }
}

impl Trouble for crate::Error {
    fn is_ordinary(&self) -> bool {
        self.is_conflict()
            || self.is_not_found()
            || self.is_already_exists()
            || self.is_namespace_terminating()
    }
}

impl Trouble for String {}

fn settle<K, E>(queue: &WorkQueue<K>, key: K, result: Option<Result<Outcome, E>>)
where
    K: Clone + Eq + Hash + fmt::Debug + Send + 'static,
    E: Trouble,
{
    queue.done(&key);
    match result {
        Some(Ok(Outcome::Done)) => queue.forget(&key),
        Some(Ok(Outcome::After(delay))) => {
            queue.forget(&key);
            queue.add_after(key, delay);
        }
        Some(Ok(Outcome::Backoff)) => queue.add_rate_limited(key),
        Some(Err(error)) => {
            if error.is_ordinary() {
                tracing::debug!(controller = queue.name(), ?key, %error, "trying again");
            } else {
                tracing::warn!(controller = queue.name(), ?key, %error, "reconcile failed, trying again");
            }
            queue.add_rate_limited(key);
        }
        None => {
            tracing::error!(controller = queue.name(), ?key, "reconcile panicked");
            queue.add_rate_limited(key);
        }
    }
}
