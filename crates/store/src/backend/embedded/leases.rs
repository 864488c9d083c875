//! Leases: their deadlines and keys. Only the committer uses them.
//!
//! Deadlines are only in memory: a keep-alive writes nothing, and a restart gives each lease its full
//! time again. Upstream: etcd does the same when its leader changes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::durable::exact;
use crate::{Error, LeaseId, Result};

struct Lease {
    ttl: Duration,
    deadline: Instant,
    keys: BTreeSet<Bytes>,
}

#[derive(Default)]
pub(super) struct Leases {
    leases: BTreeMap<LeaseId, Lease>,
    /// One entry per lease, the earliest deadline first.
    deadlines: BTreeSet<(Instant, LeaseId)>,
}

impl Leases {
    pub fn contains(&self, id: LeaseId) -> bool {
        self.leases.contains_key(&id)
    }

    pub fn ids(&self) -> impl Iterator<Item = LeaseId> {
        self.leases.keys().copied()
    }

    pub fn insert(&mut self, id: LeaseId, ttl_seconds: i64, now: Instant) {
        let ttl = Duration::from_secs(ttl_seconds.max(1).unsigned_abs());
        let deadline = now + ttl;
        self.remove(id);
        self.leases.insert(id, Lease { ttl, deadline, keys: BTreeSet::new() });
        self.deadlines.insert((deadline, id));
    }

    pub fn remove(&mut self, id: LeaseId) {
        if let Some(lease) = self.leases.remove(&id) {
            self.deadlines.remove(&(lease.deadline, id));
        }
    }

    /// Returns its full time, in seconds.
    pub fn keep_alive(&mut self, id: LeaseId, now: Instant) -> Result<i64> {
        let lease = self.leases.get_mut(&id).ok_or(Error::LeaseNotFound(id))?;
        self.deadlines.remove(&(lease.deadline, id));
        lease.deadline = now + lease.ttl;
        self.deadlines.insert((lease.deadline, id));
        Ok(lease.ttl.as_secs() as i64)
    }

    /// Moves a key from one lease to another; 0 means none. It copies the key, so that no value is pinned.
    pub fn attach(&mut self, key: &[u8], from: LeaseId, to: LeaseId) {
        if from == to {
            return;
        }
        if let Some(lease) = self.leases.get_mut(&from) {
            lease.keys.remove(key);
        }
        if let Some(lease) = self.leases.get_mut(&to) {
            lease.keys.insert(exact(key));
        }
    }

    pub fn keys(&self, id: LeaseId) -> impl Iterator<Item = &Bytes> {
        self.leases.get(&id).into_iter().flat_map(|lease| &lease.keys)
    }

    /// The expired leases.
    pub fn due(&self, now: Instant) -> Vec<LeaseId> {
        self.deadlines.iter().take_while(|(at, _)| *at <= now).map(|(_, id)| *id).collect()
    }

    /// All leases with their remaining time.
    pub fn list(&self, now: Instant) -> Vec<crate::Lease> {
        let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        let lease = |(id, lease): (&LeaseId, &Lease)| crate::Lease {
            id: *id,
            ttl_seconds: seconds(lease.ttl),
            left_seconds: seconds(lease.deadline.saturating_duration_since(now)),
            keys: lease.keys.iter().cloned().collect(),
        };
        self.leases.iter().map(lease).collect()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }
}
