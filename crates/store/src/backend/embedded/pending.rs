//! Transactions on their way to the disk: evaluated one after the other on top of the visible
//! state; they see each other, but are not visible yet.
//!
//! A failed transaction changes nothing here; if the commit fails, all of this is dropped.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use super::leases::Leases;
use super::record::{Address, Record};
use super::state::{Facts, Group, Overlay, State, Stored, event, merge};
use crate::value::keep;
use crate::{
    Compare, Error, Event, EventKind, KeyRange, KeyValue, LeaseId, Op, OpResult, Result, Revision,
    Txn, TxnResponse,
};

/// A transaction with values in in-memory form. The caller packs them, to relieve the committer, which
/// serves all callers.
pub(super) struct Prepared {
    compare: Vec<Compare>,
    success: Vec<Step>,
    failure: Vec<Step>,
}

enum Step {
    /// The value for the log, and the in-memory form without its facts.
    Put {
        value: Bytes,
        kept: Stored,
        lease: LeaseId,
    },
    DeleteRange(KeyRange),
    Get(KeyRange),
}

impl Prepared {
    pub fn new(txn: Txn) -> Self {
        let steps = |ops: Vec<Op>| ops.into_iter().map(Step::new).collect();
        let (success, failure) = (steps(txn.success), steps(txn.failure));
        Self { compare: txn.compare, success, failure }
    }

    /// The approximate bytes that it writes.
    pub fn size(&self) -> usize {
        let one = |step: &Step| match step {
            Step::Put { value, kept, .. } => kept.key().len() + value.len(),
            Step::DeleteRange(_) | Step::Get(_) => 0,
        };
        self.success.iter().map(one).sum()
    }
}

impl Step {
    fn new(op: Op) -> Self {
        match op {
            Op::Put { key, value, lease } => {
                let kept = keep(&value, |value, is_packed| {
                    Stored::new(&key, value, is_packed, Facts::default())
                });
                Self::Put { value, kept, lease }
            }
            Op::DeleteRange { range } => Self::DeleteRange(range),
            Op::Get { range } => Self::Get(range),
        }
    }
}

pub(super) struct Pending<'a> {
    state: &'a State,
    leases: &'a Leases,
    at: u64,
    /// How much an update may add to a value while the store is low on space.
    growth: Option<usize>,
    overlay: Overlay,
    granted: BTreeMap<LeaseId, i64>,
    revoked: BTreeSet<LeaseId>,
    changes: Changes,
}

/// The changes that a commit writes and then makes visible.
#[derive(Default)]
pub(super) struct Changes {
    pub records: Vec<(Address, Record)>,
    /// One group per revision, in order; the events match the records.
    pub groups: Vec<Group>,
    /// The keys' new state, for the records in order.
    pub after: Vec<(Bytes, Option<Stored>)>,
    pub granted: Vec<(LeaseId, i64)>,
    pub revoked: Vec<LeaseId>,
}

impl Changes {
    /// The bytes of its records.
    pub fn bytes(&self) -> usize {
        self.records.iter().map(|(_, record)| record.size()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.records.is_empty() && self.granted.is_empty() && self.revoked.is_empty()
    }
}

impl<'a> Pending<'a> {
    /// `at` is the time of the commit, in milliseconds; `growth` as in `Reserve::growth`.
    pub fn new(state: &'a State, leases: &'a Leases, at: u64, growth: Option<usize>) -> Self {
        Self {
            state,
            leases,
            at,
            growth,
            overlay: Overlay::new(),
            granted: BTreeMap::new(),
            revoked: BTreeSet::new(),
            changes: Changes::default(),
        }
    }

    pub fn finish(self) -> Changes {
        // A lease that is granted and revoked in one batch never existed.
        let granted = self.granted.iter().filter(|(id, _)| !self.revoked.contains(id));
        let granted = granted.map(|(id, ttl)| (*id, *ttl)).collect();
        let revoked = self.revoked.iter().filter(|id| self.leases.contains(**id));
        let revoked = revoked.copied().collect();
        Changes { granted, revoked, ..self.changes }
    }

    pub fn revision(&self) -> Revision {
        self.changes.groups.last().map_or(self.state.revision, |group| group.revision)
    }

    pub fn txn(&mut self, txn: Prepared) -> Result<TxnResponse> {
        let succeeded = txn.compare.iter().all(|compare| self.holds(compare));
        let steps = if succeeded { txn.success } else { txn.failure };
        for step in &steps {
            if let Step::Put { value, kept, lease } = step {
                self.check_lease(*lease)?;
                self.check_space(kept.key(), value.len())?;
            }
        }
        let mut running = Running::new(self);
        let results = steps.into_iter().map(|step| running.run(step)).collect();
        running.finish();
        Ok(TxnResponse { succeeded, revision: self.revision(), results })
    }

    pub fn grant(&mut self, id: LeaseId, ttl_seconds: i64) {
        self.granted.insert(id, ttl_seconds);
    }

    pub fn has_lease(&self, id: LeaseId) -> bool {
        let known = self.leases.contains(id) || self.granted.contains_key(&id);
        known && !self.revoked.contains(&id)
    }

    pub fn is_low(&self) -> bool {
        self.growth.is_some()
    }

    /// Refuses what the store does not take while it is low on space.
    fn check_space(&self, key: &[u8], len: usize) -> Result<()> {
        let Some(growth) = self.growth else { return Ok(()) };
        let is_small = |stored: &Stored| len <= stored.value().len() + growth;
        if self.current(key).is_some_and(is_small) { Ok(()) } else { Err(no_space()) }
    }

    fn check_lease(&self, id: LeaseId) -> Result<()> {
        if id == 0 || self.has_lease(id) { Ok(()) } else { Err(Error::LeaseNotFound(id)) }
    }

    /// Ends the lease and deletes its keys, in key order and at one revision.
    pub fn revoke(&mut self, id: LeaseId) -> Result<()> {
        if !self.has_lease(id) {
            return Err(Error::LeaseNotFound(id));
        }
        // Keys from before the batch and of the batch; the current lease of each key counts.
        let mut keys: BTreeSet<Bytes> = self.leases.keys(id).cloned().collect();
        keys.extend(self.overlay.keys().cloned());
        keys.retain(|key| self.current(key).is_some_and(|stored| stored.lease == id));
        let mut running = Running::new(self);
        for key in keys {
            running.delete(&key);
        }
        running.finish();
        self.revoked.insert(id);
        Ok(())
    }

    fn current(&self, key: &[u8]) -> Option<&Stored> {
        match self.overlay.get(key) {
            Some(changed) => changed.as_ref(),
            None => self.state.live.get(key),
        }
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::ModRevision(key, revision) => {
                self.current(key).map_or(0, |stored| stored.modified().revision) == revision.0
            }
            Compare::Version(key, version) => {
                self.current(key).map_or(0, |stored| stored.version) == *version
            }
            Compare::Every { range, relation, field } => field.every(*relation, &self.scan(range)),
        }
    }

    fn scan(&self, range: &KeyRange) -> Vec<KeyValue> {
        merge(&self.state.live, &self.overlay, range).map(Stored::key_value).collect()
    }
}

/// The answer to a write that needs space while the store is low on it.
pub(super) fn no_space() -> Error {
    Error::NoSpace(
        "the disk is full; until there is room, only deletes, and updates that hardly enlarge an object, \
         are accepted"
            .into(),
    )
}

/// One transaction being applied. All its changes have the same revision.
struct Running<'p, 'a> {
    pending: &'p mut Pending<'a>,
    revision: Revision,
    events: Vec<Event>,
}

impl<'p, 'a> Running<'p, 'a> {
    fn new(pending: &'p mut Pending<'a>) -> Self {
        let revision = Revision(pending.revision().0 + 1);
        Self { pending, revision, events: vec![] }
    }

    fn run(&mut self, step: Step) -> OpResult {
        match step {
            Step::Put { value, kept, lease } => {
                OpResult::Put { previous: self.put(value, kept, lease) }
            }
            Step::DeleteRange(range) => {
                let keys: Vec<Bytes> =
                    merge(&self.pending.state.live, &self.pending.overlay, &range)
                        .map(Stored::shared_key)
                        .collect();
                OpResult::Deleted {
                    previous: keys.iter().filter_map(|key| self.delete(key)).collect(),
                }
            }
            Step::Get(range) => OpResult::Got { kvs: self.pending.scan(&range) },
        }
    }

    fn put(&mut self, value: Bytes, kept: Stored, lease: LeaseId) -> Option<KeyValue> {
        let before = self.pending.current(kept.key()).cloned();
        let facts = Facts {
            create: before.as_ref().map_or(self.revision, |before| before.create),
            modified: self.address(),
            version: before.as_ref().map_or(1, |before| before.version + 1),
            lease,
        };
        let after = kept.with(facts);
        self.change(after.shared_key(), before, Some(after), value)
    }

    fn delete(&mut self, key: &[u8]) -> Option<KeyValue> {
        let before = self.pending.current(key).cloned()?;
        self.change(before.shared_key(), Some(before), None, Bytes::new())
    }

    fn address(&self) -> Address {
        // A transaction has far fewer than 2^32 changes, because they are all in memory.
        Address { revision: self.revision.0, index: self.events.len() as u32 }
    }

    fn change(
        &mut self,
        key: Bytes,
        before: Option<Stored>,
        after: Option<Stored>,
        value: Bytes,
    ) -> Option<KeyValue> {
        let at = self.address();
        let previous = before.as_ref().map(Stored::key_value);
        let record = Record {
            kind: if after.is_some() { EventKind::Put } else { EventKind::Delete },
            at: self.pending.at,
            create: after.as_ref().map_or(0, |stored| stored.create.0),
            version: after.as_ref().map_or(0, |stored| stored.version),
            lease: after.as_ref().map_or(0, |stored| stored.lease),
            previous: before.as_ref().map(Stored::modified),
            key: key.clone(),
            value,
        };
        self.events.push(event(&key, &after, at, previous.clone()));
        self.pending.changes.records.push((at, record));
        self.pending.changes.after.push((key.clone(), after.clone()));
        self.pending.overlay.insert(key, after);
        previous
    }

    fn finish(self) {
        if !self.events.is_empty() {
            let group = Group { revision: self.revision, events: self.events.into() };
            self.pending.changes.groups.push(group);
        }
    }
}
