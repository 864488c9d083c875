//! The watch cache of one resource: what the store holds, as bytes with small headers, and the
//! latest events.
//!
//! In: the store's events, and nothing else. Out: lists at the newest revision, and watches.
//!
//! Invariants:
//! - a watcher sees every event of its scope above its start revision, in revision order, once;
//! - events are shared, a watcher is a cursor: a slow one costs the others nothing. One that falls off
//!   the ring goes on with the store's history, and ends with `Expired` where that is compacted. States that
//!   are still the newest are not read again there, and readers of this process get no others;
//! - the state at `revision` is complete: every store event up to it has been applied;
//! - whatever ends the store's watch, the cache lists and watches again until the store is closed.

use std::any::Any;
use std::borrow::Borrow;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;

use bytes::Bytes;
use machinery::selector::Selector;
use machinery::status::Reason;
use machinery::{Pairs, StatusError};
use serde::Deserialize;
use store::{
    EventKind, KeyRange, KeyValue, RangeRequest, Revision, Store, Value, WatchItem, WatchRequest,
};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::metrics::families::EVENTS_RECEIVED;
use crate::request::Key;
use crate::resource::{FieldValues, Resource};
use crate::stored::Stored;

mod pages;

/// Events kept in memory for watchers that come back; older ones are read from the store.
const RING_EVENTS: usize = 1024;
/// And no more of their bytes than this.
const RING_BYTES: usize = 4 << 20;
/// The newest events are kept with their plain bytes, too, up to so many of those.
const FRESH_BYTES: usize = 256 << 10;
/// How long a read waits for the cache to have its first list, and then to reach a revision.
/// Upstream: 3 s for the second. Its caches are filled before anybody asks, so that it waits for the
/// first not at all; ours are made by the first question.
const FRESHNESS_LIMIT: Duration = Duration::from_secs(3);
/// A watch of the store that lasted this long was in order: what ends it is a new trouble.
const LASTING: Duration = Duration::from_secs(10);
/// How long clients stay away from a cache that is not there, at most. Upstream: 30 s, too.
const LONGEST_RETRY_SECONDS: f64 = 30.0;

/// One object at one revision: its stored bytes and what selectors look at.
pub struct Entry {
    pub key: Key,
    pub revision: Revision,
    /// JSON of the stored version, without resourceVersion; packed, and shared with the store.
    pub value: Value,
    labels: Pairs,
    fields: Pairs,
    row: Arc<Resource>,
    /// What readers of this process derive from the entry, once for all of them.
    note: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// An entry in its place among the others.
struct Placed(Arc<Entry>);

impl Borrow<Key> for Placed {
    fn borrow(&self) -> &Key {
        &self.0.key
    }
}

impl Ord for Placed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.key.cmp(&other.0.key)
    }
}

impl PartialOrd for Placed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Placed {
    fn eq(&self, other: &Self) -> bool {
        self.0.key == other.0.key
    }
}

impl Eq for Placed {}

impl Entry {
    /// Reads the header from the bytes, which are `value`'s. The kind's own fields cost a decode, so
    /// only kinds that have selectable fields pay it, and those that can find them in the bytes do not.
    pub(crate) fn parse(
        row: &Arc<Resource>,
        key: Key,
        value: Value,
        plain: &Bytes,
        revision: Revision,
    ) -> Result<Self, StatusError> {
        #[derive(Deserialize)]
        struct Head {
            metadata: Labels,
        }
        #[derive(Deserialize)]
        struct Labels {
            #[serde(default)]
            labels: Pairs,
        }
        let head: Head = serde_json::from_slice(plain).map_err(StatusError::internal)?;
        let names = &row.fields.names;
        let fields = match &row.fields.values {
            _ if names.is_empty() => Pairs::default(),
            FieldValues::OfJson(read) => {
                names.iter().zip(read(plain).map_err(StatusError::internal)?).collect()
            }
            FieldValues::OfObject(read) => {
                let object = if row.custom {
                    Stored::new(row.clone(), plain.clone(), revision).object()?
                } else {
                    row.stored_codec().decode_stored(plain).map_err(StatusError::internal)?
                };
                names.iter().zip(read(&*object)).collect()
            }
        };
        let (labels, row) = (head.metadata.labels, row.clone());
        Ok(Self { key, revision, value, labels, fields, row, note: OnceLock::new() })
    }

    /// The row in whose version the value is.
    pub fn row(&self) -> &Arc<Resource> {
        &self.row
    }

    pub fn note(&self) -> &OnceLock<Arc<dyn Any + Send + Sync>> {
        &self.note
    }

    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name)
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        match name {
            "metadata.name" => Some(&self.key.name),
            "metadata.namespace" => Some(&self.key.namespace),
            _ => self.fields.get(name),
        }
    }
}

/// What a list or watch is about.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// Empty for all.
    pub namespace: String,
    pub labels: Selector,
    pub fields: Selector,
}

impl Scope {
    pub fn matches(&self, entry: &Entry) -> bool {
        (self.namespace.is_empty() || entry.key.namespace == self.namespace)
            && self.labels.matches_pairs(&entry.labels)
            && self.fields.matches_with(|name| entry.field(name).or(Some("")))
    }

    /// Does it select an object that is not stored, of which only the metadata can be asked for?
    pub fn selects(&self, object: &dyn machinery::Object) -> bool {
        let labels = object.meta().labels.as_ref();
        let label = |name: &str| labels.and_then(|labels| labels.get(name)).map(String::as_str);
        (self.namespace.is_empty() || object.namespace() == self.namespace)
            && self.labels.matches_with(label)
            && self.fields.matches_with(|field| match field {
                "metadata.name" => Some(object.name()),
                "metadata.namespace" => Some(object.namespace()),
                _ => Some(""),
            })
    }

    pub fn selects_all(&self) -> bool {
        self.labels.is_everything() && self.fields.is_everything()
    }
}

/// A change of one object. Clones share all of it.
#[derive(Clone)]
pub struct CacheEvent {
    pub revision: Revision,
    /// The state after; `None` for a delete.
    pub entry: Option<Arc<Entry>>,
    /// The state before; `None` for a create.
    pub previous: Option<Arc<Entry>>,
    /// The bytes of the state after, of a delete those of the state before, while the event is fresh:
    /// all watchers want them then, and one has unpacked them.
    plain: Option<Bytes>,
}

impl CacheEvent {
    /// The value of one of the two states.
    pub fn value(&self, of: &Arc<Entry>) -> Value {
        let shown = self.entry.as_ref().or(self.previous.as_ref());
        match &self.plain {
            Some(plain) if shown.is_some_and(|shown| Arc::ptr_eq(shown, of)) => {
                plain.clone().into()
            }
            _ => of.value.clone(),
        }
    }

    fn size(&self) -> usize {
        let size =
            |entry: &Option<Arc<Entry>>| entry.as_ref().map_or(0, |entry| entry.value.size());
        size(&self.entry) + size(&self.previous)
    }

    fn plain_size(&self) -> usize {
        self.plain.as_ref().map_or(0, Bytes::len)
    }
}

struct State {
    /// By key.
    entries: BTreeSet<Placed>,
    /// Of all entries' values, as they are when they are not packed.
    bytes: usize,
    ring: VecDeque<CacheEvent>,
    ring_bytes: usize,
    /// How many of the newest events are fresh, and their plain bytes.
    fresh: usize,
    fresh_bytes: usize,
    /// All events above this revision (up to `revision`) are in the ring.
    floor: Revision,
    revision: Revision,
    /// Of the latest event, which `revision` may be ahead of.
    changed: Revision,
}

/// An event of the store, read.
struct Parsed {
    key: Key,
    /// The state after; `None` for a delete.
    entry: Option<Arc<Entry>>,
    /// What watchers want to see, and of which revision it is.
    plain: Option<Bytes>,
    revision: Revision,
}

/// See the module.
pub struct Cacher {
    row: Arc<Resource>,
    prefix: String,
    store: Arc<dyn Store>,
    /// Written by the feeding task alone, under short locks; read by lists and watchers.
    state: RwLock<State>,
    /// The revision that `state` has reached; tells waiters and watchers that there is news.
    reached: watch::Sender<Revision>,
    /// Asks the running store watch for its progress; replaced when the watch is.
    progress: Mutex<Option<mpsc::Sender<()>>>,
    /// The latest write of this process, which readers of [`Cacher::settled`] want to see.
    written: AtomicU64,
    /// Since when there is nothing to read, until there is.
    begun: Instant,
    /// True once the rows that it serves are gone or replaced: the feed and all watches end.
    retired: watch::Sender<bool>,
}

/// Where a resource's objects are kept.
pub fn storage_prefix(storage: &str) -> String {
    format!("/registry/{storage}/")
}

impl Cacher {
    pub fn new(row: Arc<Resource>, store: Arc<dyn Store>) -> Arc<Self> {
        let storage = row.prefix().expect("only stored resources have a cacher");
        let state = State {
            entries: BTreeSet::new(),
            bytes: 0,
            ring: VecDeque::new(),
            ring_bytes: 0,
            fresh: 0,
            fresh_bytes: 0,
            floor: Revision(0),
            revision: Revision(0),
            changed: Revision(0),
        };
        Arc::new(Self {
            prefix: storage_prefix(storage),
            row,
            store,
            state: RwLock::new(state),
            reached: watch::Sender::new(Revision(0)),
            progress: Mutex::default(),
            written: AtomicU64::new(0),
            begun: Instant::now(),
            retired: watch::Sender::new(false),
        })
    }

    pub fn row(&self) -> &Arc<Resource> {
        &self.row
    }

    /// Ends the feed. Watches end when they have read all cached events.
    pub fn retire(&self) {
        self.retired.send_replace(true);
        self.reached.send_modify(|_| {});
    }

    pub fn is_retired(&self) -> bool {
        *self.retired.borrow()
    }

    /// Feeds the cache until the store is closed. Runs as one task.
    pub async fn feed(self: Arc<Self>) {
        let mut backoff =
            base::backoff::Backoff::new(Duration::from_millis(50), Duration::from_secs(5));
        let mut retired = self.retired.subscribe();
        loop {
            let begun = Instant::now();
            let followed = tokio::select! {
                followed = self.follow() => followed,
                _ = retired.wait_for(|is_retired| *is_retired) => return,
            };
            match followed {
                Ok(()) => {}
                Err(store::Error::Closed) => return,
                Err(error) => {
                    tracing::warn!(prefix = self.prefix, %error, "watch cache lost the store")
                }
            }
            if begun.elapsed() > LASTING {
                backoff.reset();
            }
            tokio::time::sleep(backoff.step()).await;
        }
    }

    /// Lists once, then applies events until the watch ends: the store says why in its own log, and
    /// when it is listed again whether it is closed.
    async fn follow(&self) -> store::Result<()> {
        let range = KeyRange::prefix(self.prefix.clone());
        let listed = self.store.range(RangeRequest::new(range.clone())).await?;
        let start = Some(Revision(listed.revision.0 + 1));
        if self.is_filled() {
            tracing::warn!(
                prefix = self.prefix,
                "the store ended a cache's watch; it is read anew"
            );
        }
        self.replace(listed.kvs, listed.revision);
        let mut running = self.store.watch(WatchRequest { range, start }).await?;
        self.may_ask(running.progress.clone());
        while let Some(item) = running.items.recv().await {
            match item {
                WatchItem::Events(revision, events) => {
                    let labels = [self.row.group.as_str(), &self.row.plural];
                    EVENTS_RECEIVED.add(&labels, events.len() as f64);
                    self.apply(revision, &events);
                }
                WatchItem::Progress(revision) => self.advance(revision),
                WatchItem::Compacted(_) => break,
            }
        }
        Ok(())
    }

    fn replace(&self, kvs: Vec<KeyValue>, revision: Revision) {
        let entries: BTreeSet<Placed> = kvs
            .into_iter()
            .filter_map(|kv| self.kept(kv))
            .map(|(entry, _)| Placed(entry))
            .collect();
        let bytes = entries.iter().map(|Placed(entry)| entry.value.len()).sum();
        let mut state = self.state.write().expect("no panic under the lock");
        *state = State {
            entries,
            bytes,
            ring: VecDeque::new(),
            ring_bytes: 0,
            fresh: 0,
            fresh_bytes: 0,
            floor: revision,
            revision,
            changed: revision,
        };
        drop(state);
        self.reached.send_replace(revision);
    }

    /// To be kept: packed here where the store has it plain, as etcd's client and an encrypted one do.
    fn kept(&self, kv: KeyValue) -> Option<(Arc<Entry>, Bytes)> {
        let plain = kv.value.bytes();
        let kv = KeyValue { value: kv.value.packed(), ..kv };
        self.entry(&kv, &plain).map(|entry| (entry, plain))
    }

    fn entry(&self, kv: &KeyValue, plain: &Bytes) -> Option<Arc<Entry>> {
        let key = parse_key(&self.prefix, self.row.namespaced, &kv.key)?;
        match Entry::parse(&self.row, key, kv.value.clone(), plain, kv.mod_revision) {
            Ok(entry) => Some(Arc::new(entry)),
            Err(error) => {
                tracing::error!(key = %String::from_utf8_lossy(&kv.key), %error, "unreadable object in the store");
                None
            }
        }
    }

    fn apply(&self, revision: Revision, events: &[store::Event]) {
        // Unpack and decode outside the lock.
        let parsed: Vec<Parsed> = events.iter().filter_map(|event| self.parsed(event)).collect();
        let mut state = self.state.write().expect("no panic under the lock");
        for Parsed { key, entry, plain, revision: of_plain } in parsed {
            let previous = match &entry {
                Some(entry) => state.entries.replace(Placed(entry.clone())),
                None => state.entries.take(&key),
            };
            let previous = previous.map(|Placed(entry)| entry);
            let size = |entry: &Option<Arc<Entry>>| entry.as_ref().map_or(0, |one| one.value.len());
            state.bytes = state.bytes + size(&entry) - size(&previous);
            if let Some(shown) = entry.as_ref().or(previous.as_ref()) {
                let plain = plain.filter(|_| shown.revision == of_plain);
                state.remember(CacheEvent { revision, entry, previous, plain });
            }
        }
        state.revision = revision;
        state.changed = revision;
        drop(state);
        self.reached.send_replace(revision);
    }

    fn parsed(&self, event: &store::Event) -> Option<Parsed> {
        if event.kind == EventKind::Put {
            let (entry, plain) = self.kept(event.kv.clone())?;
            let (key, revision) = (entry.key.clone(), entry.revision);
            return Some(Parsed { key, entry: Some(entry), plain: Some(plain), revision });
        }
        let key = parse_key(&self.prefix, self.row.namespaced, &event.kv.key)?;
        let revision = event.previous.as_ref().map_or(Revision(0), |kv| kv.mod_revision);
        let plain = event.previous.as_ref().map(|kv| kv.value.bytes());
        Some(Parsed { key, entry: None, plain, revision })
    }

    fn advance(&self, revision: Revision) {
        let mut state = self.state.write().expect("no panic under the lock");
        if revision > state.revision {
            state.revision = revision;
        }
        drop(state);
        self.reached.send_replace(revision);
    }

    /// The revision the cache has reached.
    pub fn revision(&self) -> Revision {
        self.state.read().expect("no panic under the lock").revision
    }

    /// How many objects there are, and the bytes of their values.
    pub fn size(&self) -> (usize, usize) {
        let state = self.state.read().expect("no panic under the lock");
        (state.entries.len(), state.bytes)
    }

    fn is_filled(&self) -> bool {
        self.reached.borrow().0 > 0
    }

    /// Waits until the cache has its first list, however long: for the server's own parts, which can
    /// do nothing without.
    pub async fn filled(&self) {
        let mut reached = self.reached.subscribe();
        let _ = reached.wait_for(|revision| revision.0 > 0).await;
    }

    /// Waits for the first list as long as a client may be kept: a watch has no other time limit, and
    /// holds its seat. Upstream: `ResilientWatchCacheInitialization`.
    pub async fn ready(&self) -> Result<(), StatusError> {
        if self.is_filled() || tokio::time::timeout(FRESHNESS_LIMIT, self.filled()).await.is_ok() {
            return Ok(());
        }
        let seconds = (0.06 * self.begun.elapsed().as_secs_f64()).exp();
        let seconds = seconds.clamp(1.0, LONGEST_RETRY_SECONDS) as u32;
        Err(StatusError::too_many_requests("storage is (re)initializing", seconds))
    }

    /// Waits until the cache has reached `revision`; an error as upstream's when it does not come.
    pub async fn wait_for(&self, revision: Revision) -> Result<(), StatusError> {
        self.ready().await?;
        if self.revision() >= revision {
            return Ok(());
        }
        // First: a watch that begins now asks for those who are there.
        let mut reached = self.reached.subscribe();
        self.ask_progress();
        let wait = reached.wait_for(|at| *at >= revision);
        if tokio::time::timeout(FRESHNESS_LIMIT, wait).await.is_ok() {
            return Ok(());
        }
        Err(too_new(revision, self.revision()))
    }

    pub(crate) fn note_written(&self, revision: Revision) {
        self.written.fetch_max(revision.0, Ordering::AcqRel);
    }

    /// Waits until the cache has what this process wrote; the revision of the latest change.
    pub(crate) async fn settled(&self) -> Result<Revision, StatusError> {
        self.filled().await;
        self.wait_for(Revision(self.written.load(Ordering::Acquire))).await?;
        Ok(self.state.read().expect("no panic under the lock").changed)
    }

    /// The store's watch runs. Requests that began to wait for a revision before it could not ask for
    /// progress: at a fresh start each of them would wait until its time is over.
    fn may_ask(&self, progress: mpsc::Sender<()>) {
        *self.progress.lock().expect("short locks") = Some(progress);
        if self.reached.receiver_count() > 0 {
            self.ask_progress();
        }
    }

    /// Has the store watch report where it is, so that quiet resources advance too.
    pub fn ask_progress(&self) {
        if let Some(progress) = &*self.progress.lock().expect("short locks") {
            // A full channel has a question in it already.
            let _ = progress.try_send(());
        }
    }

    pub fn get(&self, key: &Key) -> Option<Arc<Entry>> {
        self.state
            .read()
            .expect("no panic under the lock")
            .entries
            .get(key)
            .map(|Placed(entry)| entry.clone())
    }

    /// The state that a key has now.
    fn present(&self, kv: &KeyValue) -> Option<Arc<Entry>> {
        self.get(&parse_key(&self.prefix, self.row.namespaced, &kv.key)?)
    }

    /// What matches, in key order, at most `limit` (0: all), with the revision; and how many of the scope's
    /// objects are left, when the list was cut. With selectors nobody wants their number: 1 stands for any.
    pub fn list(&self, scope: &Scope, limit: usize) -> (Vec<Arc<Entry>>, Revision, usize) {
        let state = self.state.read().expect("no panic under the lock");
        let start = Bound::Included(Key::new(scope.namespace.clone(), ""));
        let in_scope = |Placed(entry): &&Placed| {
            scope.namespace.is_empty() || entry.key.namespace == scope.namespace
        };
        let all = state.entries.range((start, Bound::Unbounded)).take_while(in_scope);
        let mut matching = all.filter(|Placed(entry)| scope.matches(entry));
        let most = if limit > 0 { limit } else { usize::MAX };
        let found: Vec<_> = matching.by_ref().take(most).map(|Placed(one)| one.clone()).collect();
        let left = match scope.selects_all() {
            true if scope.namespace.is_empty() => state.entries.len() - found.len(),
            true => matching.count(),
            false => usize::from(matching.next().is_some()),
        };
        (found, state.revision, left)
    }

    /// A cursor that yields the events above `after`.
    pub fn cursor(self: &Arc<Self>, after: Revision) -> Cursor {
        Cursor {
            cacher: self.clone(),
            at: after,
            reached: self.reached.subscribe(),
            history: None,
            told_in_part: Revision(0),
        }
    }

    pub(crate) fn stored(&self, entry: &Entry) -> Stored {
        Stored::new(self.row.clone(), entry.value.clone(), entry.revision)
    }
}

impl State {
    fn remember(&mut self, event: CacheEvent) {
        self.ring_bytes += event.size();
        self.fresh += 1;
        self.fresh_bytes += event.plain_size();
        self.ring.push_back(event);
        while self.fresh > 1 && self.fresh_bytes > FRESH_BYTES {
            let oldest = self.ring.len() - self.fresh;
            self.fresh_bytes -= self.ring[oldest].plain_size();
            self.ring[oldest].plain = None;
            self.fresh -= 1;
        }
        while self.ring.len() > RING_EVENTS || self.ring_bytes > RING_BYTES {
            let Some(oldest) = self.forget() else { break };
            // Events of one transaction share their revision: the floor may cut between them only
            // when all of them are gone.
            self.floor = oldest;
            while self.ring.front().is_some_and(|next| next.revision == oldest) {
                self.forget();
            }
        }
    }

    /// Takes the oldest event out of the ring; returns its revision.
    fn forget(&mut self) -> Option<Revision> {
        let oldest = self.ring.pop_front()?;
        self.ring_bytes -= oldest.size();
        self.fresh_bytes -= oldest.plain_size();
        self.fresh = self.fresh.min(self.ring.len());
        Some(oldest.revision)
    }
}

/// A watcher's place in the stream of events.
pub struct Cursor {
    cacher: Arc<Cacher>,
    at: Revision,
    reached: watch::Receiver<Revision>,
    /// The store's own watch, for a cursor that is older than the ring.
    history: Option<store::Watch>,
    /// States of events up to this revision may have been left out.
    told_in_part: Revision,
}

/// Which states of an object a cursor tells of history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum States {
    All,
    Newest,
}

impl Cursor {
    /// The revision up to which everything was delivered.
    pub fn revision(&self) -> Revision {
        self.at
    }

    /// The next events, at least one (or none, when only the revision advanced). Cancel-safe.
    pub async fn next(&mut self) -> Result<Vec<CacheEvent>, StatusError> {
        self.next_of(States::All).await
    }

    /// As [`next`](Self::next), for those whom an object's newest state is enough: of history, a state that was
    /// followed by another is left out, for the other is to come. The state before is then not told, either.
    pub async fn next_newest(&mut self) -> Result<Vec<CacheEvent>, StatusError> {
        self.next_of(States::Newest).await
    }

    /// Whether states before this event may have been left out, so that its state before is not the one that
    /// was told last.
    pub fn is_told_in_part(&self, event: &CacheEvent) -> bool {
        event.revision <= self.told_in_part
    }

    async fn next_of(&mut self, states: States) -> Result<Vec<CacheEvent>, StatusError> {
        loop {
            if self.history.is_some() {
                return self.next_of_history(states).await;
            }
            self.reached.borrow_and_update();
            match self.read_ring() {
                Some(events) if !events.is_empty() => return Ok(events),
                Some(_) if self.cacher.is_retired() => {
                    return Err(StatusError::expired("the resource is no longer served as it was"));
                }
                Some(_) => {}
                None => {
                    self.open_history().await?;
                    continue;
                }
            }
            if self.reached.changed().await.is_err() {
                return Err(StatusError::internal("the watch cache is closed"));
            }
        }
    }

    /// `None`: the ring no longer has what this cursor needs.
    fn read_ring(&mut self) -> Option<Vec<CacheEvent>> {
        let state = self.cacher.state.read().expect("no panic under the lock");
        if self.at < state.floor {
            return None;
        }
        let first = state.ring.partition_point(|event| event.revision <= self.at);
        let events: Vec<_> = state.ring.range(first..).cloned().collect();
        if self.at < state.revision {
            self.at = state.revision;
        }
        Some(events)
    }

    async fn open_history(&mut self) -> Result<(), StatusError> {
        let range = KeyRange::prefix(self.cacher.prefix.clone());
        let start = Some(Revision(self.at.0 + 1));
        match self.cacher.store.watch(WatchRequest { range, start }).await {
            Ok(watch) => {
                self.history = Some(watch);
                Ok(())
            }
            Err(store::Error::Compacted { requested, floor }) => {
                Err(too_old(Revision(requested.0 - 1), floor))
            }
            Err(error) => Err(StatusError::internal(error)),
        }
    }

    async fn next_of_history(&mut self, states: States) -> Result<Vec<CacheEvent>, StatusError> {
        let history = self.history.as_mut().expect("checked by the caller");
        match history.items.recv().await {
            Some(WatchItem::Events(revision, events)) => {
                self.at = revision;
                let read = |event| self.event_of(revision, event, states);
                let events = events.iter().filter_map(read).collect();
                if states == States::Newest {
                    // What was left out is followed by something up to here.
                    self.told_in_part = self.cacher.revision();
                }
                Ok(events)
            }
            Some(WatchItem::Progress(revision)) => {
                self.at = revision;
                // Caught up: back to the shared events, unless the ring is past us again.
                if self.cacher.state.read().expect("no panic under the lock").floor <= self.at {
                    self.history = None;
                }
                Ok(vec![])
            }
            Some(WatchItem::Compacted(floor)) => Err(too_old(self.at, floor)),
            None => Err(StatusError::internal("the store closed the watch")),
        }
    }

    fn event_of(
        &self,
        revision: Revision,
        event: &store::Event,
        states: States,
    ) -> Option<CacheEvent> {
        let read = |kv: &KeyValue| self.cacher.entry(kv, &kv.value.bytes());
        let newest = self.cacher.present(&event.kv);
        if states == States::Newest && event.kind == EventKind::Put {
            // Without a newest state there is a deletion to come.
            let entry = newest.filter(|entry| entry.revision == event.kv.mod_revision)?;
            let previous = Some(entry.clone());
            return Some(CacheEvent { revision, entry: Some(entry), previous, plain: None });
        }
        let known = newest.filter(|entry| entry.revision == event.kv.mod_revision);
        let entry = match event.kind {
            EventKind::Put => Some(known.or_else(|| read(&event.kv))?),
            EventKind::Delete => None,
        };
        let previous = event.previous.as_ref().and_then(read);
        let is_seen = entry.is_some() || previous.is_some();
        is_seen.then_some(CacheEvent { revision, entry, previous, plain: None })
    }
}

/// For a state that is not there yet, as upstream tells it.
pub(crate) fn too_new(requested: Revision, current: Revision) -> StatusError {
    let message = format!("Timeout: Too large resource version: {requested}, current: {current}");
    StatusError::new(Reason::Timeout, message)
        .cause("ResourceVersionTooLarge", "", "Too large resource version")
        .retry_after(1)
}

/// 410 as upstream words it.
pub fn too_old(requested: Revision, floor: Revision) -> StatusError {
    StatusError::expired(format!("too old resource version: {requested} ({floor})"))
}

/// `/registry/pods/default/web` → default, web.
pub fn parse_key(prefix: &str, namespaced: bool, key: &[u8]) -> Option<Key> {
    let rest = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
    match rest.split_once('/') {
        Some((namespace, name)) if namespaced && !name.contains('/') => {
            Some(Key::new(namespace, name))
        }
        None if !namespaced => Some(Key::new("", rest)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    use base::task::Tasks;
    use k8s_openapi::api::core::v1::ConfigMap;
    use store::{Compare, Error, LeaseId, Op, Sim, Transform, Transformed, Txn};

    use super::*;
    use crate::Registry;
    use crate::admission::Chain;
    use crate::registry::ListOptions;
    use crate::resource::ResourceTable;

    const PREFIX: &str = "/registry/configmaps/";
    const NO_LEASE: LeaseId = 0;

    /// Values as they are; some cannot be read, or not yet.
    #[derive(Default)]
    struct Faulty {
        failures_left: AtomicUsize,
        hangs: AtomicBool,
    }

    #[async_trait::async_trait]
    impl Transform for Faulty {
        fn seal(&self, _: &[u8], value: Bytes) -> store::Result<Bytes> {
            Ok(value)
        }

        fn open(&self, _: &[u8], value: Bytes) -> store::Result<Bytes> {
            let less = |left: usize| left.checked_sub(1);
            match self.failures_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
                Ok(_) => Err(Error::Unavailable("it cannot be read".into())),
                Err(_) => Ok(value),
            }
        }

        fn must_fetch(&self, _: &[u8], _: &[u8]) -> bool {
            self.hangs.load(Ordering::Relaxed)
        }

        async fn fetch(&self, _: &[u8], _: &[u8]) -> store::Result<()> {
            std::future::pending().await
        }
    }

    fn faulty() -> (Arc<Faulty>, Arc<dyn Store>) {
        let faulty = Arc::<Faulty>::default();
        let store = Transformed::over(Sim::open(), faulty.clone());
        (faulty, store)
    }

    async fn put(store: &dyn Store, name: &str) -> Revision {
        put_with(store, name, "").await
    }

    fn value(name: &str, text: &str) -> String {
        format!(
            r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"namespace":"ns","name":"{name}"}},"data":{{"text":"{text}"}}}}"#
        )
    }

    async fn put_with(store: &dyn Store, name: &str, text: &str) -> Revision {
        let key = Bytes::from(format!("{PREFIX}ns/{name}"));
        let value = value(name, text);
        let txn = Txn {
            compare: vec![Compare::ModRevision(key.clone(), Revision(0))],
            success: vec![Op::Put { key, value: value.into(), lease: NO_LEASE }],
            failure: vec![],
        };
        let answer = store.txn(txn).await.expect("it is written");
        assert!(answer.succeeded, "{name}");
        answer.revision
    }

    #[tokio::test(start_paused = true)]
    async fn a_cache_outlives_the_watches_of_its_store() {
        let (faulty, store) = faulty();
        let row = Arc::new(crate::testing::row::<ConfigMap>("configmaps", &[], true));
        let cacher = Cacher::new(row, store.clone());
        let life = async {
            cacher.filled().await;
            for name in ["a", "b", "c"] {
                let mut cursor = cacher.cursor(cacher.revision());
                // The store cannot read it for its watch, and ends that.
                faulty.failures_left.store(1, Ordering::Relaxed);
                let revision = put(&*store, name).await;
                cacher.wait_for(revision).await.expect("the cache goes on");
                assert!(cacher.get(&Key::new("ns", name)).is_some());
                assert_eq!(faulty.failures_left.load(Ordering::Relaxed), 0);
                let mut seen = vec![];
                while seen.is_empty() {
                    seen = cursor.next().await.expect("nothing is missed");
                }
                let names = seen.iter().map(|event| event.entry.as_ref().map(|e| &*e.key.name));
                assert_eq!(names.collect::<Vec<_>>(), [Some(name)]);
            }
            store.close().await;
        };
        // That the feed ends, too, says that it knows a closed store.
        let both = async { tokio::join!(cacher.clone().feed(), life) };
        tokio::time::timeout(Duration::from_secs(600), both).await.expect("it ends");
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_before_the_watch_runs_is_answered_when_it_does() {
        let row = Arc::new(crate::testing::row::<ConfigMap>("configmaps", &[], true));
        let cacher = Cacher::new(row, Sim::open());
        cacher.replace(vec![], Revision(1));
        let (progress, mut asked) = mpsc::channel(1);
        let waiting = async {
            let begun = Instant::now();
            cacher.wait_for(Revision(230)).await.expect("the store is there already");
            assert!(begun.elapsed() < FRESHNESS_LIMIT);
        };
        let watch = async {
            // The other future has looked and found no waiter.
            tokio::task::yield_now().await;
            cacher.may_ask(progress);
            asked.recv().await.expect("it is asked again");
            cacher.advance(Revision(230));
        };
        tokio::join!(waiting, watch);
    }

    #[tokio::test(start_paused = true)]
    async fn entries_are_packed_and_fresh_events_are_not() {
        let store = Sim::open();
        let row = Arc::new(crate::testing::row::<ConfigMap>("configmaps", &[], true));
        let cacher = Cacher::new(row, store.clone());
        let text = "x".repeat(10_000);
        let fresh = FRESH_BYTES / value("m10", &text).len();
        let names: Vec<String> = (0..2 * fresh).map(|n| format!("m{n}")).collect();
        let life = async {
            cacher.filled().await;
            let mut cursor = cacher.cursor(cacher.revision());
            let mut last = Revision(0);
            for name in &names {
                last = put_with(&*store, name, &text).await;
            }
            let gone = store::Op::DeleteRange { range: KeyRange::one(format!("{PREFIX}ns/m0")) };
            let deleted = store.txn(Txn { success: vec![gone], ..Txn::default() }).await;
            let deleted = deleted.expect("it is deleted").revision;
            assert!(deleted > last);
            cacher.wait_for(deleted).await.expect("it comes");
            let mut seen = vec![];
            while cursor.revision() < deleted {
                seen.extend(cursor.next().await.expect("nothing is missed"));
            }
            let is_packed = seen.iter().zip(&names).map(|(event, name)| {
                let shown = event.value(event.entry.as_ref().expect("a put"));
                assert_eq!(shown, *value(name, &text));
                shown.is_packed()
            });
            let is_packed: Vec<bool> = is_packed.collect();
            // The delete is the newest of the fresh ones.
            let old = names.len() + 1 - fresh;
            assert!(is_packed[..old].iter().all(|packed| *packed), "{is_packed:?}");
            assert!(is_packed[old..].iter().all(|packed| !*packed), "{is_packed:?}");
            let delete = seen.last().expect("the delete");
            let shown = delete.value(delete.previous.as_ref().expect("what was there"));
            assert!(!shown.is_packed() && shown == *value("m0", &text));
            let (entries, ..) = cacher.list(&Scope::default(), 0);
            assert!(entries.iter().all(|entry| entry.value.is_packed()));
            assert_eq!(
                cacher.size().1,
                entries.iter().map(|entry| entry.value.len()).sum::<usize>()
            );
            store.close().await;
        };
        let both = async { tokio::join!(cacher.clone().feed(), life) };
        tokio::time::timeout(Duration::from_secs(600), both).await.expect("it ends");
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_ever_for_a_cache_that_cannot_be_filled() {
        let (faulty, store) = faulty();
        put(&*store, "a").await;
        faulty.hangs.store(true, Ordering::Relaxed);
        let row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        let tasks = Tasks::new("test");
        let registry =
            Registry::new(store, ResourceTable::new([row]), Chain::default(), tasks.clone());
        let row = registry.row_of::<ConfigMap>();
        let check = async |version: Option<&str>, retry_after: u32| {
            let resource_version = version.map(ToOwned::to_owned);
            let options = ListOptions { resource_version, ..ListOptions::default() };
            let watched = registry.watch(&row, "", &options).await.err();
            let listed = registry.list(&row, "", &options).await.err();
            for refused in [watched, listed] {
                let refused = refused.expect("there is nothing to be seen");
                assert_eq!((refused.reason, refused.code), (Reason::TooManyRequests, 429));
                assert_eq!(refused.message, "storage is (re)initializing");
                assert_eq!(refused.retry_after_seconds, Some(retry_after), "{version:?}");
            }
        };
        check(None, 1).await;
        tokio::time::sleep(Duration::from_secs(120)).await;
        check(Some("0"), 30).await;
        check(Some("2"), 30).await;
        faulty.hangs.store(false, Ordering::Relaxed);
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
