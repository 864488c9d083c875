//! Loads the log into the state in memory: all of it when the store is opened, the new part when the disk
//! works again.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use super::durable::{Durable, Meta, exact, two_newest};
use super::leases::Leases;
use super::pending::Changes;
use super::record::{Address, View};
use super::retention::Retention;
use super::state::{Facts, Group, State, Stored};
use super::{Options, Shared};
use crate::value::keep;
use crate::{Event, EventKind, KeyRange, Result, Revision};

/// The committer's initial state.
pub(super) struct Loaded {
    pub leases: Leases,
    pub trimmed: Revision,
    written: Vec<Written>,
}

/// Revisions that were written at about the same time, in milliseconds of wall time.
struct Written {
    at: u64,
    last: Revision,
    bytes: u64,
}

/// Writes closer together than this share an entry.
const THIN: u64 = 1000;

impl Loaded {
    /// Ages continue from the time of the writes.
    pub fn retention(&self, options: &Options, now_millis: u64) -> Retention {
        let mut retention = Retention::new(options.limits());
        let now = Instant::now();
        for Written { at, last, bytes } in &self.written {
            // At most the machine's uptime, in case the clock is wrong: that keeps history longer.
            let age = Duration::from_millis(now_millis.saturating_sub(*at));
            retention.note(now.checked_sub(age).unwrap_or(now), *last, *bytes);
        }
        retention
    }
}

/// Reads the whole log.
pub(super) fn load(durable: &Durable, ring_bytes: usize) -> Result<(State, Loaded)> {
    let mut parts: Vec<Part> = vec![];
    let meta = durable.load_parts(&mut |part, at, view| {
        if parts.len() <= part {
            parts.resize_with(part + 1, Part::default);
        }
        parts[part].add(at, &view);
    })?;
    let whole = parts.into_iter().reduce(Part::followed_by).unwrap_or_default();
    let mut state = State::new(ring_bytes);
    state.revision = whole.last.unwrap_or(state.revision);
    state.floor = meta.floor;
    state.ring.restart(Revision(state.revision.0 + 1));
    let Part { stored, lost, written, .. } = whole;
    // Records below the floor may have been removed.
    if let Some((at, previous)) = lost.into_iter().find(|(at, _)| at.revision > meta.floor.0) {
        return Err(durable.inconsistent(at, previous));
    }
    state.live = sorted(stored)?;
    let mut leases = Leases::default();
    let now = Instant::now();
    for (id, ttl) in &meta.leases {
        leases.insert(*id, *ttl, now);
    }
    for stored in state.live.iter().filter(|stored| stored.lease != 0) {
        leases.attach(stored.key(), 0, stored.lease);
    }
    Ok((state, Loaded { leases, trimmed: meta.trimmed, written }))
}

/// The set of the live values, which come in the order of the log. Inserting them one by one would look
/// each up three times, and leave nodes half empty.
fn sorted(stored: Vec<Option<Stored>>) -> Result<BTreeSet<Stored>> {
    let live: Vec<Stored> = stored.into_iter().flatten().collect();
    let count = live.len();
    let live: BTreeSet<Stored> = live.into_iter().collect();
    if live.len() < count {
        return Err(two_newest(count - live.len()));
    }
    Ok(live)
}

/// The result of a part of the log. A record has the address of the one it replaces, so no look-up by
/// key is needed, and parts can be read concurrently:
///
/// ```text
///  (2,0) put a "1"   prev –        first part      addresses (2,0) (3,0)   stored –  b "2"
///  (3,0) put b "2"   prev –
///  ─────────────────────────
///  (4,0) put a "3"   prev (2,0)    second part     addresses (4,0) (5,0)   stored a "3"  –
///  (5,0) put c "4"   prev –                        lost (4,0) after (2,0): the first part has it
///  (6,0) del c       prev (5,0)
/// ```
#[derive(Default)]
struct Part {
    /// The address of every put, in order…
    addresses: Vec<Address>,
    /// …and its value, unless it was replaced.
    stored: Vec<Option<Stored>>,
    dead: usize,
    /// Changes whose previous one is in no part yet: (address, previous address).
    lost: Vec<(Address, Address)>,
    last: Option<Revision>,
    written: Vec<Written>,
}

/// How many replaced values may keep their slot.
const DEAD: usize = 4096;

impl Part {
    fn add(&mut self, at: Address, view: &View<'_>) {
        if let Some(previous) = view.previous
            && !self.forget(previous)
        {
            self.lost.push((at, previous));
        }
        if view.kind == EventKind::Put {
            if self.dead > DEAD.max(self.stored.len() / 2) {
                self.close_ranks();
            }
            self.addresses.push(at);
            self.stored.push(Some(stored(at, view)));
        }
        let last = Revision(at.revision);
        self.last = Some(last);
        let bytes = (view.key.len() + view.value_len()) as u64;
        self.note(Written { at: view.at, last, bytes });
    }

    /// False if no value at that address is known.
    fn forget(&mut self, at: Address) -> bool {
        let Ok(found) = self.addresses.binary_search(&at) else { return false };
        let was_live = self.stored[found].take().is_some();
        self.dead += usize::from(was_live);
        was_live
    }

    fn close_ranks(&mut self) {
        let mut stored = self.stored.iter();
        self.addresses.retain(|_| stored.next().is_some_and(Option::is_some));
        self.stored.retain(Option::is_some);
        self.dead = 0;
    }

    fn note(&mut self, new: Written) {
        match self.written.last_mut() {
            Some(group) if new.at < group.at + THIN => {
                *group = Written { at: group.at, last: new.last, bytes: group.bytes + new.bytes };
            }
            _ => self.written.push(new),
        }
    }

    /// Joins this part and the next one.
    fn followed_by(mut self, next: Self) -> Self {
        for (at, previous) in next.lost {
            if !self.forget(previous) {
                self.lost.push((at, previous));
            }
        }
        self.addresses.extend(next.addresses);
        self.stored.extend(next.stored);
        self.dead += next.dead;
        self.last = next.last.or(self.last);
        for written in next.written {
            self.note(written);
        }
        self
    }
}

fn stored(at: Address, view: &View<'_>) -> Stored {
    let (create, version, lease) = (Revision(view.create), view.version, view.lease);
    let facts = Facts { create, modified: at, version, lease };
    Stored::new(view.key, view.value, view.is_packed, facts)
}

/// The durable changes from `from` on, which are not visible yet.
pub(super) fn missed(shared: &Shared, from: Revision) -> Result<(Changes, Meta)> {
    let mut changes = Changes::default();
    let mut last = from;
    let meta = shared.durable.load(from, &mut |at, view| {
        last = Revision(at.revision);
        let key = exact(view.key);
        let is_put = view.kind == EventKind::Put;
        let after = keep(view.value, |value, is_packed| {
            is_put.then(|| stored(at, &View { value, is_packed, ..view }))
        });
        changes.after.push((key, after));
    })?;
    let everything = KeyRange { start: Default::default(), end: b"\0"[..].into() };
    let mut next = from;
    while !changes.after.is_empty() && next <= last {
        let chunk = shared.durable.history(next, last, &everything)?;
        let group =
            |(revision, events): (Revision, Vec<Event>)| Group { revision, events: events.into() };
        changes.groups.extend(chunk.events.into_iter().map(group));
        next = chunk.next;
    }
    Ok((changes, meta))
}
