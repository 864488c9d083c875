//! The changes that a controller has requested and not yet seen in its cache.
//!
//! A cache lags behind our own writes: counting pods right after creating some would create them
//! again. Upstream: `ControllerExpectations` and `UIDTrackingControllerExpectations`.
//!
//! Invariant: unmet expectations end after five minutes, in case the event was lost.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;
use std::time::Duration;

use client::{ObjectKey, RawEvent};
use tokio::time::Instant;

const TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Default)]
pub struct Expectations(
    /// Guards the table; held for a lookup.
    Mutex<HashMap<ObjectKey, Expected>>,
);

struct Expected {
    creations: usize,
    /// Names: a deleted pod may be seen to go (deletionTimestamp) and again to be gone.
    deletions: BTreeSet<ObjectKey>,
    since: Instant,
}

impl Expectations {
    /// Whether the cache shows all that was asked for.
    pub fn satisfied(&self, owner: &ObjectKey) -> bool {
        let all = self.table();
        all.get(owner).is_none_or(|expected| {
            (expected.creations == 0 && expected.deletions.is_empty())
                || expected.since.elapsed() > TIMEOUT
        })
    }

    pub fn expect_creations(&self, owner: &ObjectKey, creations: usize) {
        let expected = Expected { creations, deletions: BTreeSet::new(), since: Instant::now() };
        self.table().insert(owner.clone(), expected);
    }

    pub fn expect_deletions(
        &self,
        owner: &ObjectKey,
        deletions: impl IntoIterator<Item = ObjectKey>,
    ) {
        let deletions = deletions.into_iter().collect();
        let expected = Expected { creations: 0, deletions, since: Instant::now() };
        self.table().insert(owner.clone(), expected);
    }

    pub fn expect_both(
        &self,
        owner: &ObjectKey,
        creations: usize,
        deletions: impl IntoIterator<Item = ObjectKey>,
    ) {
        let deletions = deletions.into_iter().collect();
        let expected = Expected { creations, deletions, since: Instant::now() };
        self.table().insert(owner.clone(), expected);
    }

    /// Takes off what an event of an object of `owner` shows.
    pub fn seen(&self, owner: &ObjectKey, event: &RawEvent) {
        let header = &event.entry().header;
        if matches!(event, RawEvent::Applied { old: None, .. }) {
            self.created(owner);
        }
        if header.deleting || matches!(event, RawEvent::Deleted(_)) {
            self.deleted(owner, &header.key);
        }
    }

    /// Seen, or known never to come.
    pub fn created(&self, owner: &ObjectKey) {
        if let Some(expected) = self.table().get_mut(owner) {
            expected.creations = expected.creations.saturating_sub(1);
        }
    }

    pub fn deleted(&self, owner: &ObjectKey, gone: &ObjectKey) {
        if let Some(expected) = self.table().get_mut(owner) {
            expected.deletions.remove(gone);
        }
    }

    pub fn forget(&self, owner: &ObjectKey) {
        self.table().remove(owner);
    }

    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<ObjectKey, Expected>> {
        self.0.lock().expect("no panic while held")
    }
}
