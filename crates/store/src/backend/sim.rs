//! A store in memory for simulations; also the oracle of the model test.
//!
//! Naive on purpose: one map, one list of all events above the floor; past states are replayed. No threads
//! and no disk; tasks run on the caller's runtime, so that runs on a seeded current-thread runtime are
//! reproducible.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use base::task::Tasks;
use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::check_sizes;
use crate::snapshot::Image;
use crate::{
    Compare, Error, Event, EventKind, KeyRange, KeyValue, Lease, LeaseId, Op, OpResult,
    RangeRequest, RangeResponse, Result, Revision, Snapshot, Status, Store, Txn, TxnResponse,
    Value, Watch, WatchItem, WatchRequest,
};

/// Items that may wait in a watch; its task waits for the reader.
const WATCH_QUEUE: usize = 64;

pub struct Sim {
    inner: Arc<Inner>,
    tasks: Tasks,
}

struct Inner {
    /// Never held across an await.
    model: Mutex<Model>,
    /// Wakes watches and the lease task after a change.
    changed: watch::Sender<()>,
}

type Map = BTreeMap<Bytes, KeyValue>;

struct Model {
    /// The state before the first event in `log`.
    base: Map,
    log: Vec<(Revision, Arc<[Event]>)>,
    /// The time of each revision in the log, in milliseconds since 1970.
    times: Vec<(u64, Revision)>,
    live: Map,
    revision: Revision,
    floor: Revision,
    leases: BTreeMap<LeaseId, (Duration, Instant)>,
    /// Whether the task that ends leases runs.
    expires: bool,
    closed: bool,
}

impl Sim {
    pub fn open() -> Arc<dyn Store> {
        let model = Model {
            base: Map::new(),
            log: vec![],
            times: vec![],
            live: Map::new(),
            revision: Revision(1),
            floor: Revision(1),
            leases: BTreeMap::new(),
            expires: false,
            closed: false,
        };
        let inner = Inner { model: Mutex::new(model), changed: watch::Sender::new(()) };
        Arc::new(Self { inner: Arc::new(inner), tasks: Tasks::new("simulated store") })
    }

    /// Starts the task that ends leases, once.
    fn end_leases(&self) {
        if !std::mem::replace(&mut self.inner.model().expires, true) {
            self.tasks.spawn("simulated leases", expire(self.inner.clone()));
        }
    }

    /// Changes the model, unless it is closed, and wakes the waiters.
    fn with<T>(&self, act: impl FnOnce(&mut Model) -> Result<T>) -> Result<T> {
        let result = act(&mut *self.inner.open_model()?);
        self.inner.changed.send_replace(());
        result
    }
}

impl Inner {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().expect("no panic while the model is held")
    }

    fn open_model(&self) -> Result<MutexGuard<'_, Model>> {
        let model = self.model();
        if model.closed { Err(Error::Closed) } else { Ok(model) }
    }
}

/// Ends leases when their time is over.
async fn expire(inner: Arc<Inner>) {
    let mut changed = inner.changed.subscribe();
    loop {
        changed.mark_unchanged();
        let next = {
            let mut model = inner.model();
            let now = Instant::now();
            let due =
                |(id, (_, end)): (&LeaseId, &(Duration, Instant))| (*end <= now).then_some(*id);
            let due: Vec<LeaseId> = model.leases.iter().filter_map(due).collect();
            for id in &due {
                model.revoke(*id).expect("it was there a moment ago");
            }
            if !due.is_empty() {
                inner.changed.send_replace(());
            }
            model.leases.values().map(|(_, end)| *end).min()
        };
        let timer = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = timer => {}
            result = changed.changed() => if result.is_err() {
                return;
            },
        }
    }
}

impl Model {
    fn at(&self, revision: Revision) -> Map {
        let mut map = self.base.clone();
        for (_, events) in self.log.iter().take_while(|(at, _)| *at <= revision) {
            replay(&mut map, events);
        }
        map
    }

    fn range(&self, request: &RangeRequest) -> Result<RangeResponse> {
        let past;
        let map = match request.revision.filter(|at| at.0 != 0) {
            None => &self.live,
            Some(requested) if requested > self.revision => {
                return Err(Error::Future { requested, current: self.revision });
            }
            Some(requested) if requested < self.floor => {
                return Err(Error::Compacted { requested, floor: self.floor });
            }
            Some(requested) => {
                past = self.at(requested);
                &past
            }
        };
        let all = map.values().filter(|kv| request.range.contains(&kv.key));
        let count = all.clone().count();
        let limit = if request.limit == 0 { usize::MAX } else { request.limit };
        let kvs: Vec<KeyValue> = all.take(limit).cloned().collect();
        let more = kvs.len() < count && !request.count_only;
        let kvs = if request.count_only { vec![] } else { kvs };
        Ok(RangeResponse { kvs, count, more, revision: self.revision })
    }

    fn holds(&self, compare: &Compare) -> bool {
        match compare {
            Compare::ModRevision(key, revision) => {
                self.live.get(key).map_or(Revision(0), |kv| kv.mod_revision) == *revision
            }
            Compare::Version(key, version) => {
                self.live.get(key).map_or(0, |kv| kv.version) == *version
            }
            Compare::Every { range, relation, field } => {
                let inside = self.live.values().filter(|kv| range.contains(&kv.key));
                field.every(*relation, &inside.cloned().collect::<Vec<_>>())
            }
        }
    }

    fn txn(&mut self, txn: Txn) -> Result<TxnResponse> {
        check_sizes(&txn)?;
        let succeeded = txn.compare.iter().all(|compare| self.holds(compare));
        let ops = if succeeded { txn.success } else { txn.failure };
        for op in &ops {
            if let Op::Put { lease, .. } = op
                && *lease != 0
                && !self.leases.contains_key(lease)
            {
                return Err(Error::LeaseNotFound(*lease));
            }
        }
        let mut events = vec![];
        let results = ops.into_iter().map(|op| self.run(op, &mut events)).collect();
        self.record(events);
        Ok(TxnResponse { succeeded, revision: self.revision, results })
    }

    fn run(&mut self, op: Op, events: &mut Vec<Event>) -> OpResult {
        let keys = |live: &Map, range: &KeyRange| -> Vec<KeyValue> {
            live.values().filter(|kv| range.contains(&kv.key)).cloned().collect()
        };
        match op {
            Op::Put { key, value, lease } => {
                OpResult::Put { previous: self.put(key, value, lease, events) }
            }
            Op::DeleteRange { range } => {
                let previous = keys(&self.live, &range);
                previous.iter().for_each(|kv| self.delete(kv, events));
                OpResult::Deleted { previous }
            }
            Op::Get { range } => OpResult::Got { kvs: keys(&self.live, &range) },
        }
    }

    fn put(
        &mut self,
        key: Bytes,
        value: Bytes,
        lease: LeaseId,
        events: &mut Vec<Event>,
    ) -> Option<KeyValue> {
        let now = Revision(self.revision.0 + 1);
        let previous = self.live.get(&key).cloned();
        let kv = KeyValue {
            key: key.clone(),
            value: value.into(),
            create_revision: previous.as_ref().map_or(now, |kv| kv.create_revision),
            mod_revision: now,
            version: previous.as_ref().map_or(0, |kv| kv.version) + 1,
            lease,
        };
        self.live.insert(key, kv.clone());
        events.push(Event { kind: EventKind::Put, kv, previous: previous.clone() });
        previous
    }

    fn delete(&mut self, kv: &KeyValue, events: &mut Vec<Event>) {
        self.live.remove(&kv.key);
        let gone = KeyValue {
            key: kv.key.clone(),
            value: Value::default(),
            create_revision: Revision(0),
            mod_revision: Revision(self.revision.0 + 1),
            version: 0,
            lease: 0,
        };
        events.push(Event { kind: EventKind::Delete, kv: gone, previous: Some(kv.clone()) });
    }

    fn record(&mut self, events: Vec<Event>) {
        if !events.is_empty() {
            self.revision = Revision(self.revision.0 + 1);
            self.log.push((self.revision, events.into()));
            let now = base::clock::now().as_millisecond();
            self.times.push((u64::try_from(now).unwrap_or_default(), self.revision));
        }
    }

    fn revoke(&mut self, id: LeaseId) -> Result<()> {
        self.leases.remove(&id).ok_or(Error::LeaseNotFound(id))?;
        let attached: Vec<KeyValue> =
            self.live.values().filter(|kv| kv.lease == id).cloned().collect();
        let mut events = vec![];
        attached.iter().for_each(|kv| self.delete(kv, &mut events));
        self.record(events);
        Ok(())
    }

    fn compact(&mut self, requested: Revision) -> Result<()> {
        if requested > self.revision {
            return Err(Error::Future { requested, current: self.revision });
        }
        if requested <= self.floor {
            return Err(Error::Compacted { requested, floor: self.floor });
        }
        self.floor = requested;
        let gone = self.log.partition_point(|(at, _)| *at < requested);
        for (_, events) in self.log.drain(..gone) {
            replay(&mut self.base, &events);
        }
        self.times.drain(..gone);
        Ok(())
    }

    fn grant(&mut self, id: LeaseId, ttl_seconds: i64) {
        let ttl = Duration::from_secs(ttl_seconds.max(1).unsigned_abs());
        self.leases.insert(id, (ttl, Instant::now() + ttl));
    }

    fn leases(&self) -> Vec<Lease> {
        let now = Instant::now();
        let keys = |id: LeaseId| self.live.values().filter(move |kv| kv.lease == id);
        let lease = |(id, (ttl, end)): (&LeaseId, &(Duration, Instant))| Lease {
            id: *id,
            ttl_seconds: ttl.as_secs() as i64,
            left_seconds: end.saturating_duration_since(now).as_secs() as i64,
            keys: keys(*id).map(|kv| kv.key.clone()).collect(),
        };
        self.leases.iter().map(lease).collect()
    }

    fn revision_at(&self, millis: u64) -> Result<Revision> {
        match self.times.iter().rev().find(|(at, _)| *at <= millis) {
            Some((_, revision)) => Ok(*revision),
            None if self.floor == Revision(1) => Ok(self.floor),
            None => Err(Error::Compacted { requested: Revision(0), floor: self.floor }),
        }
    }
}

fn replay(map: &mut Map, events: &[Event]) {
    for event in events {
        match event.kind {
            EventKind::Put => drop(map.insert(event.kv.key.clone(), event.kv.clone())),
            EventKind::Delete => drop(map.remove(&event.kv.key)),
        }
    }
}

/// One watch: a cursor over the log.
struct Cursor {
    inner: Arc<Inner>,
    range: KeyRange,
    next: Revision,
    sender: mpsc::Sender<WatchItem>,
    asked: mpsc::Receiver<()>,
    /// It must send a `Progress` once it has caught up.
    owes: bool,
}

impl Cursor {
    async fn run(mut self) {
        let mut changed = self.inner.changed.subscribe();
        let mut asks = true;
        loop {
            changed.mark_unchanged();
            while let Some(item) = self.step() {
                let over = matches!(item, WatchItem::Compacted(_));
                if self.sender.send(item).await.is_err() || over {
                    return;
                }
            }
            tokio::select! {
                biased;
                () = self.sender.closed() => return,
                result = changed.changed() => if result.is_err() {
                    return;
                },
                asked = self.asked.recv(), if asks => match asked {
                    Some(()) => self.owes = true,
                    None => asks = false,
                },
            }
        }
    }

    /// The next item, if there is one now.
    fn step(&mut self) -> Option<WatchItem> {
        let model = self.inner.model();
        if self.next < model.floor {
            return Some(WatchItem::Compacted(model.floor));
        }
        let seen = model.log.partition_point(|(at, _)| *at < self.next);
        for (revision, events) in &model.log[seen..] {
            self.next = Revision(revision.0 + 1);
            let inside = |event: &&Event| self.range.contains(&event.kv.key);
            let events: Vec<Event> = events.iter().filter(inside).cloned().collect();
            if !events.is_empty() {
                return Some(WatchItem::Events(*revision, events.into()));
            }
        }
        // A cursor that does not wait for a future start has passed everything now.
        self.next = self.next.max(Revision(model.revision.0 + 1));
        std::mem::take(&mut self.owes).then_some(WatchItem::Progress(model.revision))
    }
}

#[async_trait]
impl Store for Sim {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.inner.open_model()?.range(&request)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        self.with(|model| model.txn(txn))
    }

    async fn watch(&self, request: WatchRequest) -> Result<Watch> {
        let (sender, items) = mpsc::channel(WATCH_QUEUE);
        let (progress, asked) = mpsc::channel(1);
        let present = Revision(self.inner.open_model()?.revision.0 + 1);
        let start = request.start.filter(|start| start.0 != 0);
        let cursor = Cursor {
            inner: self.inner.clone(),
            range: request.range,
            next: start.unwrap_or(present),
            sender,
            asked,
            owes: start.is_some_and(|start| start <= present),
        };
        self.tasks.spawn("simulated watch", cursor.run());
        Ok(Watch { items, progress })
    }

    async fn revision(&self) -> Result<Revision> {
        Ok(self.inner.open_model()?.revision)
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.with(|model| model.compact(revision))
    }

    async fn lease_grant(&self, ttl_seconds: i64) -> Result<LeaseId> {
        let id = self.with(|model| {
            let id = loop {
                let id = base::rng::below(i64::MAX as u64) as i64;
                if id != 0 && !model.leases.contains_key(&id) {
                    break id;
                }
            };
            model.grant(id, ttl_seconds);
            Ok(id)
        })?;
        self.end_leases();
        Ok(id)
    }

    async fn lease_grant_as(&self, lease: LeaseId, ttl_seconds: i64) -> Result<()> {
        self.with(|model| {
            if model.leases.contains_key(&lease) {
                return Err(Error::LeaseExists(lease));
            }
            model.grant(lease, ttl_seconds);
            Ok(())
        })?;
        self.end_leases();
        Ok(())
    }

    async fn leases(&self) -> Result<Vec<Lease>> {
        Ok(self.inner.open_model()?.leases())
    }

    async fn status(&self) -> Result<Status> {
        let model = self.inner.open_model()?;
        Ok(Status {
            backend: "simulated".into(),
            revision: model.revision,
            floor: Some(model.floor),
            keys: model.live.len(),
            ..Status::default()
        })
    }

    async fn snapshot(&self) -> Result<Snapshot> {
        let image = {
            let model = self.inner.open_model()?;
            let leases = model.leases().iter().map(|lease| (lease.id, lease.ttl_seconds)).collect();
            Image::new(model.revision, model.live.values().cloned().collect(), leases)
        };
        Ok(image.stream())
    }

    async fn revision_at(&self, millis: u64) -> Result<Revision> {
        self.inner.open_model()?.revision_at(millis)
    }

    async fn lease_revoke(&self, lease: LeaseId) -> Result<()> {
        self.with(|model| model.revoke(lease))
    }

    async fn lease_keep_alive(&self, lease: LeaseId) -> Result<i64> {
        self.with(|model| {
            let (ttl, end) = model.leases.get_mut(&lease).ok_or(Error::LeaseNotFound(lease))?;
            *end = Instant::now() + *ttl;
            Ok(ttl.as_secs() as i64)
        })
    }

    async fn close(&self) {
        self.inner.model().closed = true;
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}
