//! One etcd stream for many watches: all watches of parts of its range read from it.
//!
//! ```text
//! etcd ═ one stream ═► Hub ─┬─► feed of /registry/pods/    ─► Reader ─► its watch
//!          requests         ├─► feed of /registry/secrets/ ─► Reader ─► its watch
//!          progress         └─► ring: the last events, for readers that join or were too slow
//! ```
//!
//! In: a range, and etcd. Out: feeds, each with the events of its own range. An API server has a
//! watch per resource; one stream costs etcd one watcher and one comparison per change, and one answer
//! reports the progress of all watches.
//!
//! Invariants: a reader that joins at a revision gets every later event of its range once, in order, or
//! its feed ends: a slow reader is dropped, never waited for, and joins again at its position, or reads
//! history from its own stream until the ring has what it lacks. A reader gets progress only after etcd
//! reported that everything up to it was sent, and at least the revision known when it asked: a member
//! that lags behind the leader answers too early. A quiet stream also requests progress periodically, so
//! that compaction does not pass the revision where it would resume after a break.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use bytes::Bytes;
use futures::StreamExt;
use store::{Event, KeyRange, Revision, WatchItem};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;
use tonic::Status;

use crate::rpc::{self, Rpc};
use crate::watch::{ASK_AGAIN, Link, Opened, RECONNECT_CEILING, RECONNECT_FIRST, Said, open};

/// The ring's limits; a reader that lacks more asks etcd.
const RING_ITEMS: usize = 4096;
const RING_BYTES: usize = 8 << 20;
/// Items that may wait for a reader before it is dropped.
const FEED: usize = 64;

/// All changes of one revision.
type Change = (Revision, Arc<[Event]>);

pub(crate) struct Hub {
    inner: Arc<Inner>,
    /// Dropped with the last reader: then the stream ends.
    _alive: oneshot::Sender<()>,
}

struct Inner {
    rpc: Rpc,
    range: KeyRange,
    /// Held for a few map operations, never across an await.
    state: Mutex<State>,
    /// Wakes the stream: a reader wants its progress.
    asked: Notify,
    /// The maximum time without an answer before it requests progress.
    quiet: Duration,
    begun: watch::Sender<Begun>,
    /// This etcd's progress answers may overtake events. Then all keys are watched, and the events give each
    /// revision.
    is_old: AtomicBool,
}

enum Begun {
    NotYet,
    Yes,
    Failed(Status),
}

/// The result of joining.
pub(crate) struct Joined {
    /// The events that the reader lacked.
    pub missed: Vec<Change>,
    pub feed: Feed,
}

/// A reader's feed; dropping it leaves the hub.
pub(crate) struct Feed {
    pub items: mpsc::Receiver<WatchItem>,
    inner: Arc<Inner>,
    id: u64,
}

impl Feed {
    /// Requests a `Progress` of at least `target`.
    pub fn want(&self, target: Revision) {
        self.inner.state().want(self.id, target);
        self.inner.asked.notify_one();
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.inner.state().remove(self.id);
    }
}

impl Hub {
    pub fn start(rpc: Rpc, range: KeyRange, quiet: Duration, tasks: &Tasks) -> Arc<Self> {
        let inner = Arc::new(Inner {
            rpc,
            range,
            state: Mutex::default(),
            asked: Notify::new(),
            quiet,
            begun: watch::Sender::new(Begun::NotYet),
            is_old: AtomicBool::new(false),
        });
        let (alive, gone) = oneshot::channel();
        let streaming = inner.clone();
        tasks.spawn("etcd watch stream", async move {
            tokio::select! {
                _ = gone => {}
                () = streaming.run() => {}
            }
        });
        Arc::new(Self { inner, _alive: alive })
    }

    /// Waits until there is a stream: it will contain all later writes.
    pub async fn begun(&self) -> Result<(), Status> {
        let mut begun = self.inner.begun.subscribe();
        let known = begun.wait_for(|begun| !matches!(begun, Begun::NotYet)).await;
        match &*known.map_err(|_| rpc::closed())? {
            Begun::Failed(status) => Err(status.clone()),
            Begun::Yes | Begun::NotYet => Ok(()),
        }
    }

    /// Joins at `next`, with a `Progress` of at least `owes`; `None` if the ring no longer has `next`.
    pub fn join(&self, range: &KeyRange, next: Revision, owes: Option<Revision>) -> Option<Joined> {
        let (missed, id, items) = self.inner.state().join(range, next)?;
        let feed = Feed { items, inner: self.inner.clone(), id };
        if let Some(target) = owes {
            feed.want(target);
        }
        Some(Joined { missed, feed })
    }

    /// Whether a reader at `next` could join.
    pub fn covers(&self, next: Revision) -> bool {
        self.inner.state().covers(next)
    }

    pub fn is_old(&self) -> bool {
        self.inner.is_old.load(Ordering::Relaxed)
    }

    /// The newest known revision.
    pub fn heard(&self) -> Revision {
        self.inner.rpc.heard()
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Keeps a stream open; never returns.
    async fn run(&self) {
        let mut backoff = Backoff::new(RECONNECT_FIRST, RECONNECT_CEILING).with_jitter(0.5);
        loop {
            let status = match self.connect().await {
                Ok(link) => {
                    backoff.reset();
                    self.begun.send_replace(Begun::Yes);
                    self.follow(*link).await
                }
                Err(status) => {
                    self.begun.send_if_modified(|begun| {
                        let is_first = !matches!(begun, Begun::Yes);
                        if is_first {
                            *begun = Begun::Failed(status.clone());
                        }
                        is_first
                    });
                    status
                }
            };
            let delay = backoff.step();
            tracing::debug!(%status, ?delay, "the etcd watch stream broke; reconnecting");
            tokio::time::sleep(delay).await;
        }
    }

    /// Opens the stream at the last revision seen, because etcd sends no progress to a watch of a future
    /// revision.
    async fn connect(&self) -> Result<Box<Link>, Status> {
        let is_old = self.rpc.answers_overtake_events().await?;
        self.is_old.store(is_old, Ordering::Relaxed);
        let (known, is_behind) = {
            let state = self.state();
            (state.at, state.is_seen_gone)
        };
        let at = match known {
            Some(at) => at,
            None => self.rpc.present().await?,
        };
        let start = if is_behind { Revision(at.0 + 1) } else { at };
        match open(&self.rpc, &seen_range(&self.range, is_old), start).await? {
            Opened::Yes(link) => {
                self.state().begin(at);
                Ok(link)
            }
            Opened::Compacted(floor) => Err(self.compacted(floor)),
        }
    }

    /// The stream cannot resume because of a compaction. etcd says so instead of opening it, or later on the
    /// open stream.
    fn compacted(&self, floor: Revision) -> Status {
        self.state().compacted(floor);
        Status::out_of_range(format!("compacted at {floor}"))
    }

    /// Passes the stream's events on, until it breaks.
    async fn follow(&self, mut link: Link) -> Status {
        let is_old = self.is_old.load(Ordering::Relaxed);
        let mut is_due = self.state().wants();
        // Since when a progress answer is pending and nothing has arrived.
        let mut asked_at = None;
        loop {
            let wants = !is_old && self.state().wants();
            if is_due && !is_old {
                link.ask();
                let begun = *asked_at.get_or_insert_with(Instant::now);
                if begun.elapsed() >= self.rpc.patience().connect {
                    return link.source.fell_silent();
                }
            }
            is_due = false;
            let pause = if wants { ASK_AGAIN } else { self.quiet };
            let answer = tokio::select! {
                biased;
                answer = link.answers.next() => answer,
                status = link.source.is_silent() => return status,
                () = self.asked.notified() => {
                    is_due = self.state().wants();
                    continue;
                }
                () = tokio::time::sleep(pause) => {
                    is_due = true;
                    continue;
                }
            };
            asked_at = None;
            match Said::of(answer) {
                Ok(Said::Events(changes)) => self.state().events(&self.range, changes),
                Ok(Said::Reached(revision)) if !is_old => self.state().reached(revision),
                Ok(Said::Reached(_)) => {}
                Ok(Said::Compacted(floor)) => return self.compacted(floor),
                Err(status) => return status,
            }
        }
    }
}

/// The range that must be watched to know the progress.
pub(crate) fn seen_range(range: &KeyRange, is_old: bool) -> KeyRange {
    if is_old { KeyRange::prefix(Bytes::new()) } else { range.clone() }
}

/// Whether all keys of one range are in the other.
pub(crate) fn within(inner: &KeyRange, outer: &KeyRange) -> bool {
    let ends = match (&inner.end[..], &outer.end[..]) {
        (_, b"\0") => true,
        (b"\0", _) => false,
        (b"", _) => outer.contains(&inner.start),
        (inner, outer) => inner <= outer,
    };
    inner.start >= outer.start && ends
}

#[derive(Default)]
struct State {
    /// Everything up to here was passed on; `None` while no stream resumes from there.
    at: Option<Revision>,
    /// etcd has compacted that revision itself: the next stream begins after it.
    is_seen_gone: bool,
    /// The ring has all events after this revision.
    floor: Revision,
    ring: VecDeque<Change>,
    ring_bytes: usize,
    readers: HashMap<u64, Subscriber>,
    /// Readers of exactly one path, e.g. `/registry/pods/`.
    paths: HashMap<Bytes, Vec<u64>>,
    /// Readers of ranges of another shape.
    others: Vec<u64>,
    next_id: u64,
    /// Readers that wait for a `Progress`, with its minimum.
    owing: HashMap<u64, Revision>,
}

struct Subscriber {
    range: KeyRange,
    feed: mpsc::Sender<WatchItem>,
}

impl State {
    fn begin(&mut self, at: Revision) {
        if self.at.is_none() {
            self.at = Some(at);
            self.floor = at;
        }
    }

    fn compacted(&mut self, floor: Revision) {
        match self.at {
            // The last seen revision is compacted, but all later ones exist.
            Some(at) if floor.0 <= at.0 + 1 && !self.is_seen_gone => self.is_seen_gone = true,
            // Each reader finds out by itself whether that affects it.
            _ => self.lose(),
        }
    }

    /// There is a gap, so no reader can continue. Readers learn their progress.
    fn lose(&mut self) {
        let next_id = self.next_id;
        if let Some(at) = self.at {
            for reader in self.readers.values() {
                // An error means that the reader is slow; it knows its position by its events.
                let _ = reader.feed.try_send(WatchItem::Progress(at));
            }
        }
        *self = Self { next_id, ..Self::default() };
    }

    fn covers(&self, next: Revision) -> bool {
        self.at.is_some() && next > self.floor
    }

    fn wants(&self) -> bool {
        !self.owing.is_empty()
    }

    fn join(
        &mut self,
        range: &KeyRange,
        next: Revision,
    ) -> Option<(Vec<Change>, u64, mpsc::Receiver<WatchItem>)> {
        if !self.covers(next) {
            return None;
        }
        let missed = self.ring.iter().filter(|(revision, _)| *revision >= next);
        let missed = missed.filter_map(|(revision, events)| {
            let part: Vec<_> =
                (0..events.len()).filter(|i| range.contains(&events[*i].kv.key)).collect();
            (!part.is_empty()).then(|| (*revision, pick(events, &part)))
        });
        let missed = missed.collect();
        let (feed, items) = mpsc::channel(FEED);
        let id = self.next_id;
        self.next_id += 1;
        match path(range) {
            Some(path) => self.paths.entry(path).or_default().push(id),
            None => self.others.push(id),
        }
        self.readers.insert(id, Subscriber { range: range.clone(), feed });
        Some((missed, id, items))
    }

    fn remove(&mut self, id: u64) {
        self.owing.remove(&id);
        let Some(Subscriber { range, .. }) = self.readers.remove(&id) else { return };
        let Some(path) = path(&range) else { return self.others.retain(|other| *other != id) };
        if let Some(ids) = self.paths.get_mut(&path) {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.paths.remove(&path);
            }
        }
    }

    fn want(&mut self, id: u64, target: Revision) {
        if self.readers.contains_key(&id) {
            self.owing.insert(id, target);
            self.tell();
        }
    }

    fn reached(&mut self, revision: Revision) {
        self.is_seen_gone &= self.at >= Some(revision);
        self.at = self.at.max(Some(revision));
        self.tell();
    }

    fn events(&mut self, range: &KeyRange, changes: Vec<(Revision, Vec<Event>)>) {
        for (revision, mut events) in changes {
            if self.at.is_none_or(|at| revision <= at) {
                continue;
            }
            self.is_seen_gone = false;
            self.at = Some(revision);
            events.retain(|event| range.contains(&event.kv.key));
            if events.is_empty() {
                continue;
            }
            let events: Arc<[Event]> = events.into();
            self.pass(revision, &events);
            self.remember(revision, events);
        }
        self.tell();
    }

    /// Passes events to the readers of their keys.
    fn pass(&mut self, revision: Revision, events: &Arc<[Event]>) {
        let mut parts: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (at, event) in events.iter().enumerate() {
            for id in self.concerned(&event.kv.key) {
                parts.entry(id).or_default().push(at);
            }
        }
        for (id, part) in parts {
            self.send(id, WatchItem::Events(revision, pick(events, &part)));
        }
    }

    /// The key `/registry/pods/default/web` concerns readers of `/registry/pods/default/`,
    /// `/registry/pods/`, `/registry/`, `/`.
    fn concerned<'a>(&'a self, key: &'a [u8]) -> impl Iterator<Item = u64> + 'a {
        let ends = key.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let paths = ends.filter_map(|(at, _)| self.paths.get(&key[..=at])).flatten().copied();
        let holds = |id: &u64| self.readers.get(id).is_some_and(|one| one.range.contains(key));
        paths.chain(self.others.iter().copied().filter(holds))
    }

    fn remember(&mut self, revision: Revision, events: Arc<[Event]>) {
        self.ring_bytes += size(&events);
        self.ring.push_back((revision, events));
        while self.ring.len() > RING_ITEMS || self.ring_bytes > RING_BYTES {
            let Some((revision, events)) = self.ring.pop_front() else { return };
            self.ring_bytes -= size(&events);
            self.floor = revision;
        }
    }

    /// Sends progress to the readers whose minimum is reached.
    fn tell(&mut self) {
        let Some(at) = self.at else { return };
        if self.owing.is_empty() {
            return;
        }
        let due = self.owing.iter().filter(|(_, target)| **target <= at).map(|(id, _)| *id);
        for id in due.collect::<Vec<_>>() {
            self.owing.remove(&id);
            self.send(id, WatchItem::Progress(at));
        }
    }

    /// Drops a reader that does not take the item.
    fn send(&mut self, id: u64, item: WatchItem) {
        let Some(reader) = self.readers.get(&id) else { return };
        if reader.feed.try_send(item).is_err() {
            self.remove(id);
        }
    }
}

/// The prefix, if the range contains exactly the keys below a path.
fn path(range: &KeyRange) -> Option<Bytes> {
    let is_path = range.start.ends_with(b"/") && range.end == store::prefix_end(&range.start);
    is_path.then(|| range.start.clone())
}

/// A part of the events; shared if it is all of them.
fn pick(events: &Arc<[Event]>, part: &[usize]) -> Arc<[Event]> {
    if part.len() == events.len() {
        return events.clone();
    }
    part.iter().map(|at| events[*at].clone()).collect()
}

fn size(events: &[Event]) -> usize {
    let one = |event: &Event| {
        let before = event.previous.as_ref().map_or(0, |kv| kv.value.len());
        event.kv.key.len() + event.kv.value.len() + before
    };
    events.iter().map(one).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use store::{EventKind, KeyValue};

    fn event(key: &str, revision: u64, size: usize) -> Event {
        let kv = KeyValue {
            key: Bytes::copy_from_slice(key.as_bytes()),
            value: vec![b'x'; size].into(),
            create_revision: Revision(revision),
            mod_revision: Revision(revision),
            version: 1,
            lease: 0,
        };
        Event { kind: EventKind::Put, kv, previous: None }
    }

    fn prefix(text: &'static str) -> KeyRange {
        KeyRange::prefix(text.as_bytes())
    }

    fn begun(at: u64) -> State {
        let mut state = State::default();
        state.begin(Revision(at));
        state
    }

    fn write(state: &mut State, revision: u64, keys: &[&str]) {
        let events = keys.iter().map(|key| event(key, revision, 1)).collect();
        state.events(&prefix("/registry/"), vec![(Revision(revision), events)]);
    }

    /// After an outage, the last revision passed on may be compacted, later ones may not.
    #[test]
    fn a_stream_resumes_after_a_compacted_revision_or_not_at_all() {
        let check = |floors: &[u64], expected: (Option<Revision>, bool)| {
            let mut state = begun(10);
            floors.iter().for_each(|floor| state.compacted(Revision(*floor)));
            assert_eq!((state.at, state.is_seen_gone), expected, "{floors:?}");
        };
        check(&[], (Some(Revision(10)), false));
        check(&[11], (Some(Revision(10)), true));
        check(&[12], (None, false));
        check(&[11, 12], (None, false));
        let mut state = begun(10);
        state.compacted(Revision(11));
        state.reached(Revision(10));
        assert!(state.is_seen_gone);
        write(&mut state, 12, &["/registry/pods/a"]);
        assert_eq!((state.at, state.is_seen_gone), (Some(Revision(12)), false));
    }

    fn text(item: &WatchItem) -> String {
        let key = |event: &Event| String::from_utf8_lossy(&event.kv.key).into_owned();
        match item {
            WatchItem::Events(revision, events) => {
                format!("{revision} {}", events.iter().map(key).collect::<Vec<_>>().join(" "))
            }
            WatchItem::Progress(revision) => format!("at {revision}"),
            WatchItem::Compacted(floor) => format!("compacted {floor}"),
        }
    }

    fn received(items: &mut mpsc::Receiver<WatchItem>) -> Vec<String> {
        std::iter::from_fn(|| items.try_recv().ok()).map(|item| text(&item)).collect()
    }

    #[test]
    fn each_reader_gets_only_its_events() {
        let check = |range: KeyRange, expected: &[&str]| {
            let mut state = begun(1);
            let (_, _, mut items) = state.join(&range, Revision(2)).expect("the current revision");
            write(&mut state, 2, &["/registry/pods/a/x"]);
            write(&mut state, 3, &["/registry/pods/b/x", "/registry/podsets/a/x"]);
            write(&mut state, 4, &["/registry/pods", "/elsewhere"]);
            assert_eq!(received(&mut items), expected, "{range:?}");
        };
        check(prefix("/registry/pods/"), &["2 /registry/pods/a/x", "3 /registry/pods/b/x"]);
        check(prefix("/registry/pods/b/"), &["3 /registry/pods/b/x"]);
        check(prefix("/registry/nodes/"), &[]);
        let one = KeyRange::one(&b"/registry/pods"[..]);
        check(one, &["4 /registry/pods"]);
        let all = &[
            "2 /registry/pods/a/x",
            "3 /registry/pods/b/x /registry/podsets/a/x",
            "4 /registry/pods",
        ];
        check(prefix("/registry/"), all);
        check(prefix("/reg"), all);
    }

    #[test]
    fn a_late_reader_gets_the_missed_events() {
        let check = |next: u64, expected: Option<&[&str]>| {
            let mut state = begun(5);
            for revision in 5..9 {
                write(&mut state, revision, &["/registry/pods/x", "/registry/nodes/x"]);
            }
            let joined = state.join(&prefix("/registry/pods/"), Revision(next));
            let missed = joined.map(|(missed, ..)| missed);
            let missed = missed.map(|changes| {
                let show = |(revision, events): &Change| {
                    text(&WatchItem::Events(*revision, events.clone()))
                };
                changes.iter().map(show).collect::<Vec<_>>()
            });
            assert_eq!(missed, expected.map(|all| all.iter().map(|s| (*s).to_owned()).collect()));
        };
        check(5, None);
        check(8, Some(&["8 /registry/pods/x"]));
        check(9, Some(&[]));
        check(100, Some(&[]));
    }

    #[test]
    fn only_a_slow_reader_is_dropped() {
        let mut state = begun(1);
        let range = prefix("/registry/");
        let (_, slow, mut slow_items) = state.join(&range, Revision(2)).expect("the present");
        let (_, quick, mut items) = state.join(&range, Revision(2)).expect("the present");
        let mut seen = 0;
        for revision in 2..200 {
            write(&mut state, revision, &["/registry/pods/x"]);
            seen += received(&mut items).len();
        }
        assert_eq!(seen, 198);
        assert!(!state.readers.contains_key(&slow) && state.readers.contains_key(&quick));
        assert_eq!(received(&mut slow_items).len(), FEED, "the queued items, and then the end");
        assert!(slow_items.is_closed());
        let at = Revision(2 + FEED as u64);
        let (missed, ..) = state.join(&range, at).expect("the ring has it");
        assert_eq!(missed.len(), 198 - FEED);
    }

    #[test]
    fn the_ring_is_bounded() {
        let mut state = begun(1);
        for revision in 2..12 {
            let events = vec![event("/registry/big/x", revision, RING_BYTES / 4)];
            state.events(&prefix("/registry/"), vec![(Revision(revision), events)]);
        }
        assert!(state.ring_bytes <= RING_BYTES && state.ring.len() == 3, "{}", state.ring.len());
        assert!(!state.covers(Revision(8)) && state.covers(Revision(9)));
    }

    #[test]
    fn progress_waits_for_the_newest_known_revision() {
        let mut state = begun(1);
        let range = prefix("/registry/pods/");
        let (_, id, mut items) = state.join(&range, Revision(2)).expect("the present");
        state.want(id, Revision(1));
        assert_eq!(received(&mut items), ["at 1"]);
        state.want(id, Revision(4));
        state.reached(Revision(3));
        assert_eq!(received(&mut items), [""; 0], "a member that lags behind");
        assert!(state.wants());
        write(&mut state, 4, &["/registry/nodes/x"]);
        assert_eq!(received(&mut items), ["at 4"], "an event of another reader counts, too");
        assert!(!state.wants());
        state.reached(Revision(9));
        state.lose();
        assert_eq!(received(&mut items), ["at 9"], "later progress continues");
        assert!(items.is_closed() && !state.covers(Revision(5)));
    }

    #[test]
    fn ranges_within_others() {
        let check = |inner: KeyRange, outer: KeyRange, expected: bool| {
            assert_eq!(within(&inner, &outer), expected, "{inner:?} in {outer:?}");
        };
        check(prefix("/registry/pods/"), prefix("/registry/"), true);
        check(prefix("/registry/"), prefix("/registry/"), true);
        check(prefix("/"), prefix("/registry/"), false);
        check(prefix("/registrz/"), prefix("/registry/"), false);
        check(KeyRange::one(&b"/registry/a"[..]), prefix("/registry/"), true);
        check(KeyRange::one(&b"/registrz"[..]), prefix("/registry/"), false);
        check(prefix(""), prefix("/registry/"), false);
        check(prefix("a"), prefix(""), true);
        check(prefix(""), prefix(""), true);
    }
}
