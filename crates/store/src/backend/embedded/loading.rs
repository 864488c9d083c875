//! From the log on disk to the state in memory: all of it when the store is opened, the tail of it
//! when the disk works again.

use std::time::Duration;

use tokio::time::Instant;

use super::durable::{Durable, Meta, exact};
use super::leases::Leases;
use super::pending::Changes;
use super::record::{Address, View};
use super::retention::Retention;
use super::state::{Group, State, Stored};
use super::{Options, Shared};
use crate::{Event, EventKind, KeyRange, Result, Revision};

/// What the committer starts from.
pub(super) struct Loaded {
    pub leases: Leases,
    pub trimmed: Revision,
    written: Vec<Written>,
}

/// Some revisions that were written at about the same time, in milliseconds of wall time.
struct Written {
    at: u64,
    last: Revision,
    bytes: u64,
}

/// Written times closer together than this are one.
const THIN: u64 = 1000;

impl Loaded {
    /// Ages count on from when the records were written.
    pub fn retention(&self, options: &Options, now_millis: u64) -> Retention {
        let mut retention = Retention::new(options.limits());
        let now = Instant::now();
        for Written { at, last, bytes } in &self.written {
            // No older than the machine's uptime, if the clock cannot say: that keeps it longer.
            let age = Duration::from_millis(now_millis.saturating_sub(*at));
            retention.note(now.checked_sub(age).unwrap_or(now), *last, *bytes);
        }
        retention
    }
}

/// Reads everything.
pub(super) fn load(durable: &Durable, ring_bytes: usize) -> Result<(State, Loaded)> {
    let mut state = State::new(ring_bytes);
    let mut written: Vec<Written> = vec![];
    let meta = durable.load(Revision(0), &mut |at, view| {
        replay(&mut state, at, &view);
        let bytes = (view.key.len() + view.value.len()) as u64;
        let last = Revision(at.revision);
        match written.last_mut() {
            Some(group) if view.at < group.at + THIN => {
                *group = Written { at: group.at, last, bytes: group.bytes + bytes };
            }
            _ => written.push(Written { at: view.at, last, bytes }),
        }
    })?;
    state.floor = meta.floor;
    state.ring.restart(Revision(state.revision.0 + 1));
    let mut leases = Leases::default();
    let now = Instant::now();
    for (id, ttl) in &meta.leases {
        leases.insert(*id, *ttl, now);
    }
    for (key, stored) in state.live.iter().filter(|(_, stored)| stored.lease != 0) {
        leases.attach(key, 0, stored.lease);
    }
    Ok((state, Loaded { leases, trimmed: meta.trimmed, written }))
}

fn replay(state: &mut State, at: Address, view: &View<'_>) {
    state.revision = Revision(at.revision);
    match view.kind {
        EventKind::Put => {
            let key = state.live.get_key_value(view.key).map(|(key, _)| key.clone());
            state.apply(&key.unwrap_or_else(|| exact(view.key)), Some(stored(at, view)));
        }
        EventKind::Delete => drop(state.live.remove(view.key)),
    }
}

fn stored(at: Address, view: &View<'_>) -> Stored {
    Stored {
        value: exact(view.value),
        create: Revision(view.create),
        modified: at,
        version: view.version,
        lease: view.lease,
    }
}

/// What is durable from `from` on, as changes yet to be shown.
pub(super) fn missed(shared: &Shared, from: Revision) -> Result<(Changes, Meta)> {
    let mut changes = Changes::default();
    let mut last = from;
    let meta = shared.durable.load(from, &mut |at, view| {
        last = Revision(at.revision);
        let after = (view.kind == EventKind::Put).then(|| stored(at, &view));
        changes.after.push((exact(view.key), after));
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
