//! Containers that did not start: why, and when they are tried again.
//!
//! Invariant: a container that failed is not tried before its time, even if its pod wakes.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use crate::reason::Reason;

/// Why a container did not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct NotStarted {
    pub why: Reason,
    /// The maximum time until the next try. Zero: the pod is stopping, which is no error.
    pub retry_in: Option<Duration>,
}

impl NotStarted {
    pub fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self::until(reason, message, Some(Duration::from_secs(10)))
    }

    pub fn until(
        reason: &'static str,
        message: impl Into<String>,
        retry_in: Option<Duration>,
    ) -> Self {
        Self { why: Reason::new(reason, message), retry_in }
    }

    /// The container was created and has exited: after a second, in which the reason is visible, the
    /// back-off decides when it is retried.
    pub fn after_creation(reason: &'static str, message: impl Into<String>) -> Self {
        Self::until(reason, message, Some(Duration::from_secs(1)))
    }

    pub fn stopping() -> Self {
        Self::until("ContainerCreating", "", Some(Duration::ZERO))
    }

    pub fn is_stopping(&self) -> bool {
        self.retry_in == Some(Duration::ZERO)
    }
}

/// The failures of one pod's containers, by name.
#[derive(Default)]
pub struct Holds {
    /// Shown in the status.
    pub waiting: BTreeMap<String, Reason>,
    held: BTreeMap<String, (NotStarted, Timestamp)>,
    /// The pod's generation at those failures.
    generation: Option<i64>,
}

impl Holds {
    /// The last failure, if the container must not be retried yet.
    pub fn get(&self, name: &str) -> Option<NotStarted> {
        let (error, until) = self.held.get(name)?;
        let left = Duration::try_from(until.duration_since(base::clock::now())).ok()?;
        let retry_in = Some(left).filter(|left| !left.is_zero())?;
        Some(NotStarted { retry_in: Some(retry_in), ..error.clone() })
    }

    pub fn hold(&mut self, name: &str, error: NotStarted, retry: Duration) {
        self.waiting.insert(name.to_owned(), error.why.clone());
        self.held.insert(name.to_owned(), (error, base::clock::now() + retry));
    }

    /// All containers may be tried at once.
    pub fn release(&mut self) {
        self.held.clear();
    }

    /// A changed pod is tried at once.
    pub fn follow(&mut self, generation: Option<i64>) {
        if self.generation != generation {
            self.generation = generation;
            self.release();
        }
    }
}
