//! The visible state: the live values, the revision, the floor, and a ring of recent events.
//!
//! In: committed batches from the committer, its only writer. Out: reads, of the current and of past
//! revisions; recent events for watches that catch up.
//!
//! Memory per key: the value once (packed, and shared with events and the watch cache), the key once, and
//! 100 to 170 bytes of overhead, less for keys that existed at opening. Key and value are an exact copy
//! in one buffer, so that no request buffer is pinned, and the set of these buffers is the only
//! structure. Code that keeps a key longer than its value must copy it, as leases do.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use super::record::Address;
use crate::{
    Error, Event, EventKind, KeyRange, KeyValue, LeaseId, RangeRequest, RangeResponse, Result,
    Revision, Value,
};

/// A live key and its value. Compares by the key alone, so that a set of them acts as a map.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// The key, followed by the value in in-memory form.
    bytes: Bytes,
    /// The length of the key; the highest bit says whether the value is packed.
    key_len: u32,
    // The address of the change, as separate fields: its index fits beside the key's length.
    index: u32,
    revision: u64,
    pub create: Revision,
    pub version: u64,
    pub lease: LeaseId,
}

/// Keys are far below 2 GiB: the value limit bounds their request.
const PACKED: u32 = 1 << 31;

/// The facts of a value besides its bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    pub create: Revision,
    pub modified: Address,
    pub version: u64,
    pub lease: LeaseId,
}

impl Stored {
    /// Keeps the value as given, packed or not.
    pub fn new(key: &[u8], value: &[u8], is_packed: bool, facts: Facts) -> Self {
        let mut bytes = Vec::with_capacity(key.len() + value.len());
        bytes.extend_from_slice(key);
        bytes.extend_from_slice(value);
        Self {
            bytes: bytes.into(),
            key_len: key.len() as u32 | if is_packed { PACKED } else { 0 },
            index: 0,
            revision: 0,
            create: Revision(0),
            version: 0,
            lease: 0,
        }
        .with(facts)
    }

    /// The same key and value with other facts.
    pub fn with(self, facts: Facts) -> Self {
        Self {
            index: facts.modified.index,
            revision: facts.modified.revision,
            create: facts.create,
            version: facts.version,
            lease: facts.lease,
            ..self
        }
    }

    fn behind_key(&self) -> usize {
        (self.key_len & !PACKED) as usize
    }

    pub fn key(&self) -> &[u8] {
        &self.bytes[..self.behind_key()]
    }

    /// The key; it shares, and so keeps, the buffer with the value.
    pub fn shared_key(&self) -> Bytes {
        self.bytes.slice(..self.behind_key())
    }

    pub fn value(&self) -> Value {
        Value::kept(self.bytes.slice(self.behind_key()..), self.key_len & PACKED != 0)
    }

    pub fn modified(&self) -> Address {
        Address { revision: self.revision, index: self.index }
    }

    pub fn key_value(&self) -> KeyValue {
        KeyValue {
            key: self.shared_key(),
            value: self.value(),
            create_revision: self.create,
            mod_revision: Revision(self.revision),
            version: self.version,
            lease: self.lease,
        }
    }
}

impl Borrow<[u8]> for Stored {
    fn borrow(&self) -> &[u8] {
        self.key()
    }
}

impl Ord for Stored {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(other.key())
    }
}

impl PartialOrd for Stored {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Stored {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Stored {}

/// Differences to the live values: `None` if a key does not exist.
pub(super) type Overlay = BTreeMap<Bytes, Option<Stored>>;

pub(super) struct State {
    pub live: BTreeSet<Stored>,
    pub revision: Revision,
    pub floor: Revision,
    pub ring: Ring,
}

impl State {
    /// The empty store, at revision 1 as in etcd.
    pub fn new(ring_bytes: usize) -> Self {
        Self {
            live: BTreeSet::new(),
            revision: Revision(1),
            floor: Revision(1),
            ring: Ring { groups: VecDeque::new(), bytes: 0, limit: ring_bytes, start: Revision(2) },
        }
    }

    /// Applies one change from the log.
    pub fn apply(&mut self, key: &[u8], change: Option<Stored>) {
        match change {
            Some(stored) => drop(self.live.replace(stored)),
            None => drop(self.live.remove(key)),
        }
    }

    pub fn check_readable(&self, requested: Revision) -> Result<()> {
        if requested > self.revision {
            return Err(Error::Future { requested, current: self.revision });
        }
        if requested < self.floor {
            return Err(Error::Compacted { requested, floor: self.floor });
        }
        Ok(())
    }

    /// The current range, or the one changed by `overlay`.
    pub fn range(&self, request: &RangeRequest, overlay: &Overlay) -> RangeResponse {
        let limit = match (request.count_only, request.limit) {
            (true, _) => 0,
            (false, 0) => usize::MAX,
            (false, limit) => limit,
        };
        let mut kvs = vec![];
        let mut count = 0;
        for stored in merge(&self.live, overlay, &request.range) {
            if count < limit {
                kvs.push(stored.key_value());
            }
            count += 1;
        }
        let more = !request.count_only && count > kvs.len();
        RangeResponse { kvs, count, more, revision: self.revision }
    }

    pub fn raise_floor(&mut self, floor: Revision) {
        self.floor = self.floor.max(floor);
        self.ring.forget_below(self.floor);
    }
}

/// The keys of a range in order; the overlay overrides the live map.
pub(super) fn merge<'a>(
    live: &'a BTreeSet<Stored>,
    overlay: &'a Overlay,
    range: &KeyRange,
) -> impl Iterator<Item = &'a Stored> {
    let mut live = live.range::<[u8], _>(range.bounds()).peekable();
    let mut overlay = overlay.range::<[u8], _>(range.bounds()).peekable();
    std::iter::from_fn(move || {
        loop {
            let from_overlay = match (live.peek(), overlay.peek()) {
                (_, None) => return live.next(),
                (None, Some(_)) => overlay.next(),
                (Some(a), Some((b, _))) if a.key() < &b[..] => return live.next(),
                (Some(a), Some((b, _))) => {
                    if a.key() == &b[..] {
                        live.next();
                    }
                    overlay.next()
                }
            };
            // Skips keys that do not exist in the overlay.
            if let Some((_, Some(stored))) = from_overlay {
                return Some(stored);
            }
        }
    })
}

/// The newest events, without gap from `start` on, limited in bytes.
pub(super) struct Ring {
    groups: VecDeque<Group>,
    bytes: usize,
    limit: usize,
    /// The oldest revision that is certainly in the ring, or the next one.
    pub start: Revision,
}

/// All events of one revision.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub revision: Revision,
    pub events: Arc<[Event]>,
}

impl Group {
    /// The part in `range`; shared if it is everything.
    pub fn select(&self, range: &KeyRange) -> Option<Arc<[Event]>> {
        let inside = self.events.iter().filter(|e| range.contains(&e.kv.key)).count();
        if inside == self.events.len() {
            return Some(self.events.clone());
        }
        let part = || self.events.iter().filter(|e| range.contains(&e.kv.key)).cloned().collect();
        (inside > 0).then(part)
    }

    /// Its approximate memory, as if it shared nothing.
    fn cost(&self) -> usize {
        let one = |e: &Event| {
            let previous = e.previous.as_ref().map_or(0, |kv| kv.value.size());
            size_of::<Event>() + e.kv.key.len() + e.kv.value.size() + previous
        };
        size_of::<Self>() + self.events.iter().map(one).sum::<usize>()
    }
}

impl Ring {
    pub fn push(&mut self, group: Group) {
        self.bytes += group.cost();
        self.groups.push_back(group);
        while self.bytes > self.limit {
            let Some(oldest) = self.groups.pop_front() else { break };
            self.bytes -= oldest.cost();
            self.start = Revision(oldest.revision.0 + 1);
        }
    }

    fn forget_below(&mut self, floor: Revision) {
        while self.groups.front().is_some_and(|group| group.revision < floor) {
            let oldest = self.groups.pop_front().expect("just seen");
            self.bytes -= oldest.cost();
            self.start = Revision(oldest.revision.0 + 1);
        }
    }

    /// Restarts after events that are not in the ring.
    pub fn restart(&mut self, start: Revision) {
        self.groups.clear();
        self.bytes = 0;
        self.start = start;
    }

    /// The groups from `from` on; `from` must not be below `start`.
    pub fn since(&self, from: Revision) -> impl Iterator<Item = &Group> {
        let skip = self.groups.partition_point(|group| group.revision < from);
        self.groups.range(skip..)
    }
}

/// Undoes changes: the state of a range's keys before the changes after a revision.
pub(super) struct Undo {
    pub overlay: Overlay,
    /// The first revision not yet undone.
    pub next: Revision,
}

impl Undo {
    /// For a read at `at`.
    pub fn to(at: Revision) -> Self {
        Self { overlay: Overlay::new(), next: Revision(at.0 + 1) }
    }

    /// Undoes events; they must come in order, and the first change of a key counts.
    pub fn add<'a>(&mut self, events: impl IntoIterator<Item = &'a Event>) {
        for Event { kind: _, kv, previous } in events {
            if self.overlay.contains_key(&kv.key) {
                continue;
            }
            let before = previous.as_ref().map(|kv| {
                let modified = Address { revision: kv.mod_revision.0, index: 0 };
                let (create, version, lease) = (kv.create_revision, kv.version, kv.lease);
                let (value, is_packed) = kv.value.parts();
                let facts = Facts { create, modified, version, lease };
                Stored::new(&kv.key, value, is_packed, facts)
            });
            self.overlay.insert(kv.key.clone(), before);
        }
    }

    /// Undoes the ring's events; true if that is complete, else the first part is on disk.
    pub fn add_ring(&mut self, state: &State, range: &KeyRange) -> bool {
        if self.next < state.ring.start && self.next <= state.revision {
            return false;
        }
        for group in state.ring.since(self.next) {
            self.add(group.events.iter().filter(|e| range.contains(&e.kv.key)));
        }
        self.next = Revision(state.revision.0 + 1);
        true
    }
}

/// The event in its public form.
pub(super) fn event(
    key: &Bytes,
    after: &Option<Stored>,
    at: Address,
    previous: Option<KeyValue>,
) -> Event {
    match after {
        Some(stored) => Event { kind: EventKind::Put, kv: stored.key_value(), previous },
        None => {
            let kv = KeyValue {
                key: key.clone(),
                value: Value::default(),
                create_revision: Revision(0),
                mod_revision: Revision(at.revision),
                version: 0,
                lease: 0,
            };
            Event { kind: EventKind::Delete, kv, previous }
        }
    }
}
