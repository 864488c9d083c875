//! A store with transformed values at rest: in another encoding, or encrypted.
//!
//! In: a store and a [`Transform`]. Out: a store. Keys, revisions and order are the inner store's;
//! only values are transformed, at writes and reads. Values of deletes are empty and stay so.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::{
    Compare, Error, Event, Field, KeyRange, KeyValue, Lease, LeaseId, Op, OpResult, RangeRequest,
    RangeResponse, Result, Revision, Snapshot, Space, Status, Store, Txn, TxnResponse, Value,
    Watch, WatchItem, WatchRequest,
};

/// Items that may wait between the inner watch and the reader.
const WATCH_QUEUE: usize = 16;

/// The form of values at rest. `open(seal(v)) == v`.
#[async_trait]
pub trait Transform: Send + Sync + 'static {
    fn seal(&self, key: &[u8], value: Bytes) -> Result<Bytes>;
    /// Also accepts values of other writers, as long as their form is recognizable.
    fn open(&self, key: &[u8], value: Bytes) -> Result<Bytes>;

    /// Whether `open` returns this value unchanged. Then it is not unpacked to find that out.
    fn leaves(&self, _key: &[u8], _value: &Value) -> bool {
        false
    }

    /// Whether a write would produce other bytes of the same value (another key, another encoding).
    fn is_stale(&self, _key: &[u8], _value: &Bytes) -> bool {
        false
    }

    /// Whether [`fetch`](Self::fetch) must come before this value is opened.
    fn must_fetch(&self, _key: &[u8], _value: &[u8]) -> bool {
        false
    }

    /// Fetches the key that opening a value needs, e.g. from a key service.
    async fn fetch(&self, _key: &[u8], _value: &[u8]) -> Result<()> {
        Ok(())
    }
}

pub struct Transformed {
    inner: Arc<dyn Store>,
    transform: Arc<dyn Transform>,
    tasks: base::task::Tasks,
}

impl Transformed {
    pub fn over(inner: Arc<dyn Store>, transform: Arc<dyn Transform>) -> Arc<dyn Store> {
        Arc::new(Self { inner, transform, tasks: base::task::Tasks::new("transformed watches") })
    }

    fn seal(&self, op: Op) -> Result<Op> {
        Ok(match op {
            Op::Put { key, value, lease } => {
                Op::Put { value: self.transform.seal(&key, value)?, key, lease }
            }
            other => other,
        })
    }

    fn seal_all(&self, ops: Vec<Op>) -> Result<Vec<Op>> {
        ops.into_iter().map(|op| self.seal(op)).collect()
    }

    async fn open_result(&self, result: OpResult) -> Result<OpResult> {
        let transform = &*self.transform;
        Ok(match result {
            OpResult::Put { previous } => {
                OpResult::Put { previous: open_previous(transform, previous).await? }
            }
            OpResult::Deleted { previous } => {
                OpResult::Deleted { previous: open_all(transform, previous).await? }
            }
            OpResult::Got { kvs } => OpResult::Got { kvs: open_all(transform, kvs).await? },
        })
    }
}

async fn open(transform: &dyn Transform, mut kv: KeyValue) -> Result<KeyValue> {
    if transform.leaves(&kv.key, &kv.value) {
        return Ok(kv);
    }
    let value = kv.value.bytes();
    if transform.must_fetch(&kv.key, &value) {
        transform.fetch(&kv.key, &value).await?;
    }
    kv.value = transform.open(&kv.key, value)?.into();
    Ok(kv)
}

async fn open_all(transform: &dyn Transform, kvs: Vec<KeyValue>) -> Result<Vec<KeyValue>> {
    let mut opened = Vec::with_capacity(kvs.len());
    for kv in kvs {
        opened.push(open(transform, kv).await?);
    }
    Ok(opened)
}

async fn open_previous(
    transform: &dyn Transform,
    previous: Option<KeyValue>,
) -> Result<Option<KeyValue>> {
    match previous {
        Some(kv) => open(transform, kv).await.map(Some),
        None => Ok(None),
    }
}

async fn open_event(transform: &dyn Transform, event: &Event) -> Result<Event> {
    let kv = if event.kv.value.is_empty() {
        event.kv.clone()
    } else {
        open(transform, event.kv.clone()).await?
    };
    let previous = open_previous(transform, event.previous.clone()).await?;
    Ok(Event { kind: event.kind.clone(), kv, previous })
}

/// Opens events. If no value changes, as usual, it returns the same events, which all readers share.
async fn open_events(transform: &dyn Transform, events: Arc<[Event]>) -> Result<Arc<[Event]>> {
    let mut opened: Option<Vec<Event>> = None;
    for (at, event) in events.iter().enumerate() {
        let plain = open_event(transform, event).await?;
        if opened.is_none() && !is_same(&plain, event) {
            opened = Some(events[..at].to_vec());
        }
        if let Some(opened) = &mut opened {
            opened.push(plain);
        }
    }
    Ok(opened.map_or(events, Into::into))
}

/// Whether the values share memory; their bytes are not compared.
fn is_same(one: &Event, other: &Event) -> bool {
    let previous = match (&one.previous, &other.previous) {
        (Some(one), Some(other)) => one.value.is_shared_with(&other.value),
        (one, other) => one.is_none() && other.is_none(),
    };
    previous && one.kv.value.is_shared_with(&other.kv.value)
}

/// Forwards a watch. An unreadable value ends it: the reader then starts again with a range, which
/// returns the error.
async fn pass(
    transform: Arc<dyn Transform>,
    mut from: mpsc::Receiver<WatchItem>,
    to: mpsc::Sender<WatchItem>,
) {
    loop {
        let item = tokio::select! {
            () = to.closed() => return,
            item = from.recv() => item,
        };
        let item = match item {
            None => return,
            Some(WatchItem::Events(revision, events)) => {
                match open_events(&*transform, events).await {
                    Ok(events) => WatchItem::Events(revision, events),
                    Err(error) => {
                        tracing::error!(%error, %revision, "a stored value cannot be read");
                        return;
                    }
                }
            }
            Some(other) => other,
        };
        if to.send(item).await.is_err() {
            return;
        }
    }
}

#[async_trait]
impl Store for Transformed {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        let mut response = self.inner.range(request).await?;
        response.kvs = open_all(&*self.transform, response.kvs).await?;
        Ok(response)
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        let by_value = |c: &Compare| matches!(c, Compare::Every { field: Field::Value(_), .. });
        if txn.compare.iter().any(by_value) {
            return Err(Error::Unsupported(
                "values are transformed at rest: they cannot be compared",
            ));
        }
        let success = self.seal_all(txn.success)?;
        let failure = self.seal_all(txn.failure)?;
        let txn = Txn { compare: txn.compare, success, failure };
        let mut response = self.inner.txn(txn).await?;
        let results = std::mem::take(&mut response.results);
        for result in results {
            response.results.push(self.open_result(result).await?);
        }
        Ok(response)
    }

    async fn watch(&self, request: WatchRequest) -> Result<Watch> {
        let Watch { items: from, progress } = self.inner.watch(request).await?;
        let (to, items) = mpsc::channel(WATCH_QUEUE);
        self.tasks.spawn("transformed watch", pass(self.transform.clone(), from, to));
        Ok(Watch { items, progress })
    }

    async fn is_stale(&self, key: &Bytes) -> Result<bool> {
        let found = self.inner.range(RangeRequest::new(KeyRange::one(key.clone()))).await?;
        let is_stale = |kv: &KeyValue| self.transform.is_stale(&kv.key, &kv.value.bytes());
        Ok(found.kvs.first().is_some_and(is_stale) || self.inner.is_stale(key).await?)
    }

    async fn revision(&self) -> Result<Revision> {
        self.inner.revision().await
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.inner.compact(revision).await
    }

    async fn lease_grant(&self, ttl_seconds: i64) -> Result<LeaseId> {
        self.inner.lease_grant(ttl_seconds).await
    }

    async fn lease_grant_as(&self, lease: LeaseId, ttl_seconds: i64) -> Result<()> {
        self.inner.lease_grant_as(lease, ttl_seconds).await
    }

    async fn lease_revoke(&self, lease: LeaseId) -> Result<()> {
        self.inner.lease_revoke(lease).await
    }

    async fn leases(&self) -> Result<Vec<Lease>> {
        self.inner.leases().await
    }

    async fn lease_keep_alive(&self, lease: LeaseId) -> Result<i64> {
        self.inner.lease_keep_alive(lease).await
    }

    async fn status(&self) -> Result<Status> {
        self.inner.status().await
    }

    async fn space(&self) -> Result<Space> {
        self.inner.space().await
    }

    /// With values at rest: the restored store opens them with the same transformation.
    async fn snapshot(&self) -> Result<Snapshot> {
        self.inner.snapshot().await
    }

    async fn check_readable(&self, at: Revision) -> Result<()> {
        self.inner.check_readable(at).await
    }

    async fn revision_at(&self, millis: u64) -> Result<Revision> {
        self.inner.revision_at(millis).await
    }

    async fn close(&self) {
        self.inner.close().await;
        self.tasks.shutdown(std::time::Duration::from_secs(5)).await;
    }
}
