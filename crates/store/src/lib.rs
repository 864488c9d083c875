//! The state store: bytes under keys, with etcd's semantics.
//!
//! There is one global revision, which only grows. Every transaction that changes something takes the
//! next revision, which all its changes get. Nothing is visible (to reads, watches or the caller) before
//! it is durable. The store knows no kinds: keys look like `/registry/pods/default/web`, values
//! are opaque.
//!
//! Invariants:
//! - only the store creates revisions, and an acknowledged write survives `kill -9` and power loss;
//! - a watch delivers every change of its range from its start revision on, in revision order,
//!   once; a slow watcher delays no other (it reads history from disk, or ends with `Compacted`);
//! - a read below the compaction floor fails with `Compacted`, above the current revision with
//!   `Future`.

#[cfg(test)]
extern crate self as store;

pub mod backend;
pub mod snapshot;
pub mod transform;
mod value;

use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

pub use backend::embedded::{Embedded, Options};
pub use backend::sim::Sim;
pub use snapshot::Snapshot;
pub use transform::{Transform, Transformed};
pub use value::Value;

/// The maximum size of a value in bytes: etcd's default limit of a request.
pub const VALUE_LIMIT: usize = 3 * 512 * 1024;

/// A point in the store's history. 0 is "before everything"; the first write has revision 2, as in
/// etcd, whose revision 1 is the empty store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The id of a lease; 0 is no lease.
pub type LeaseId = i64;

/// One key at one revision. Clones share the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyValue {
    pub key: Bytes,
    pub value: Value,
    pub create_revision: Revision,
    pub mod_revision: Revision,
    /// The number of writes since the key was created: 1 for the first.
    pub version: u64,
    pub lease: LeaseId,
}

/// The keys `start ≤ key < end`; an empty `end` means the one key `start`, `end == b"\0"` all keys
/// from `start` on (as in etcd).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRange {
    pub start: Bytes,
    pub end: Bytes,
}

impl KeyRange {
    pub fn one(key: impl Into<Bytes>) -> Self {
        Self { start: key.into(), end: Bytes::new() }
    }

    /// All keys that begin with `prefix`.
    pub fn prefix(prefix: impl Into<Bytes>) -> Self {
        let start = prefix.into();
        let end = prefix_end(&start);
        Self { start, end }
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        if self.end.is_empty() {
            return key == &self.start[..];
        }
        key >= &self.start[..] && (&self.end[..] == b"\0" || key < &self.end[..])
    }

    /// The same range for ordered maps; never one on which they would panic.
    pub fn bounds(&self) -> (Bound<&[u8]>, Bound<&[u8]>) {
        let start = &self.start[..];
        match &self.end[..] {
            b"" => (Bound::Included(start), Bound::Included(start)),
            b"\0" => (Bound::Included(start), Bound::Unbounded),
            end => (Bound::Included(start), Bound::Excluded(end.max(start))),
        }
    }
}

/// The first key after all keys with this prefix.
pub fn prefix_end(prefix: &[u8]) -> Bytes {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end.into();
        }
    }
    Bytes::from_static(b"\0")
}

#[derive(Clone, Debug)]
pub struct RangeRequest {
    pub range: KeyRange,
    /// 0 for no limit.
    pub limit: usize,
    /// Read at this revision; `None` (or 0, as in etcd) for the newest.
    pub revision: Option<Revision>,
    /// Count only: `kvs` stays empty.
    pub count_only: bool,
}

impl RangeRequest {
    pub fn new(range: KeyRange) -> Self {
        Self { range, limit: 0, revision: None, count_only: false }
    }
}

#[derive(Clone, Debug)]
pub struct RangeResponse {
    /// In key order.
    pub kvs: Vec<KeyValue>,
    /// The number of keys in the range, regardless of the limit.
    pub count: usize,
    pub more: bool,
    /// The store's revision at the read: not the newest key's, and not the requested one.
    pub revision: Revision,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The key's mod revision equals; `Revision(0)` means that the key does not exist.
    ModRevision(Bytes, Revision),
    /// The key's version equals; 0 means that the key does not exist.
    Version(Bytes, u64),
    /// The comparison holds for every key in the range; if there is none, for a missing key (whose numbers
    /// are 0 and whose value compares to nothing). For etcd's clients.
    Every { range: KeyRange, relation: Relation, field: Field },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    Equal,
    Greater,
    Less,
    NotEqual,
}

/// A field of a key, with the value that it is compared to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Field {
    Version(u64),
    CreateRevision(Revision),
    ModRevision(Revision),
    Lease(LeaseId),
    Value(Bytes),
}

impl Field {
    /// Whether the comparison holds for all of `kvs`, in the sense of [`Compare::Every`].
    pub fn every(&self, relation: Relation, kvs: &[KeyValue]) -> bool {
        if kvs.is_empty() {
            return self.order(None).is_some_and(|order| relation.admits(order));
        }
        let holds = |kv| self.order(Some(kv)).is_some_and(|order| relation.admits(order));
        kvs.iter().all(holds)
    }

    fn order(&self, kv: Option<&KeyValue>) -> Option<std::cmp::Ordering> {
        Some(match self {
            Self::Version(to) => kv.map_or(0, |kv| kv.version).cmp(to),
            Self::CreateRevision(to) => kv.map_or(Revision(0), |kv| kv.create_revision).cmp(to),
            Self::ModRevision(to) => kv.map_or(Revision(0), |kv| kv.mod_revision).cmp(to),
            Self::Lease(to) => kv.map_or(0, |kv| kv.lease).cmp(to),
            Self::Value(to) => kv?.value.bytes().cmp(to),
        })
    }
}

impl Relation {
    fn admits(self, order: std::cmp::Ordering) -> bool {
        match self {
            Self::Equal => order.is_eq(),
            Self::Greater => order.is_gt(),
            Self::Less => order.is_lt(),
            Self::NotEqual => order.is_ne(),
        }
    }
}

/// A lease and its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    pub id: LeaseId,
    /// The granted time.
    pub ttl_seconds: i64,
    /// The remaining time.
    pub left_seconds: i64,
    /// The keys attached to it.
    pub keys: Vec<Bytes>,
}

/// The store's status, for users and monitoring.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// The backend, e.g. `embedded` or `etcd 3.6.5`.
    pub backend: String,
    pub revision: Revision,
    /// The oldest readable revision, if the backend reports it.
    pub floor: Option<Revision>,
    pub keys: usize,
    /// The size of the files on disk, and the bytes in use.
    pub disk_bytes: u64,
    pub used_bytes: u64,
    /// How long it took to make commits durable.
    pub commits: Histogram,
    /// Alarms, with etcd's names.
    pub alarms: Vec<String>,
}

/// The disk of a store, for monitoring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    pub disk_bytes: u64,
    /// Bytes that the backend holds back for deletes, if it does so.
    pub reserve_bytes: Option<u64>,
    /// The disk is full: only deletes and small updates are accepted.
    pub is_low: bool,
}

/// etcd's name of the alarm that the disk is full: only deletes and small updates are accepted.
pub const NO_SPACE: &str = "NOSPACE";

/// Durations by powers of two: the first bound is a millisecond, as in etcd's own metric.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// The number of durations of at most `1 ms << index` that exceed the previous bound; the last
    /// counts all longer ones.
    pub counts: [u64; 15],
    pub sum_seconds: f64,
}

impl Histogram {
    pub fn note(&mut self, took: std::time::Duration) {
        let within = |bound: &usize| took <= std::time::Duration::from_millis(1 << bound);
        let at = (0..self.counts.len() - 1).find(within).unwrap_or(self.counts.len() - 1);
        self.counts[at] += 1;
        self.sum_seconds += took.as_secs_f64();
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Put { key: Bytes, value: Bytes, lease: LeaseId },
    DeleteRange { range: KeyRange },
    Get { range: KeyRange },
}

/// Runs `success` if all comparisons hold, else `failure`; atomically, at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Txn {
    pub compare: Vec<Compare>,
    pub success: Vec<Op>,
    pub failure: Vec<Op>,
}

#[derive(Clone, Debug)]
pub struct TxnResponse {
    pub succeeded: bool,
    /// The store's revision after the transaction; that of its changes, if it made any.
    pub revision: Revision,
    /// One per op of the branch that ran.
    pub results: Vec<OpResult>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpResult {
    /// The previous state of the key.
    Put {
        previous: Option<KeyValue>,
    },
    Deleted {
        previous: Vec<KeyValue>,
    },
    Got {
        kvs: Vec<KeyValue>,
    },
}

#[derive(Clone, Debug)]
pub struct WatchRequest {
    pub range: KeyRange,
    /// The first revision to deliver; `None` (or 0, as in etcd): everything after the current revision.
    pub start: Option<Revision>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    Put,
    /// The event's `kv` has only the key and, as mod revision, the deleting revision.
    Delete,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: EventKind,
    pub kv: KeyValue,
    /// The key's state before this change, if it had one.
    pub previous: Option<KeyValue>,
}

/// An item of a watch: all events of one revision together, so that a reader never sees a part of a
/// transaction.
#[derive(Clone, Debug)]
pub enum WatchItem {
    Events(Revision, Arc<[Event]>),
    /// Everything up to this revision has been delivered. Sent once a watch with a start has caught
    /// up with the current revision (at once if it already has), each time a slow watcher has caught up
    /// again, and on request by [`Watch::request_progress`].
    Progress(Revision),
    /// The watch has ended: its next revision is compacted, this one is the oldest available.
    Compacted(Revision),
}

/// A running watch; dropping it ends it.
pub struct Watch {
    pub items: mpsc::Receiver<WatchItem>,
    /// Requests a [`WatchItem::Progress`] with the current revision at that time.
    pub progress: mpsc::Sender<()>,
}

impl Watch {
    /// Requests a [`WatchItem::Progress`]; a pending request covers this one too.
    pub fn request_progress(&self) {
        // Full: a request is pending. Closed: the watch has ended, and its end says so.
        let _ = self.progress.try_send(());
    }
}

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    #[error("required revision {requested} has been compacted; the oldest kept is {floor}")]
    Compacted { requested: Revision, floor: Revision },
    #[error("revision {requested} is in the future; the store is at {current}")]
    Future { requested: Revision, current: Revision },
    #[error("lease {0} not found")]
    LeaseNotFound(LeaseId),
    #[error("lease {0} already exists")]
    LeaseExists(LeaseId),
    /// The backend does not support this at all.
    #[error("{0}")]
    Unsupported(&'static str),
    #[error("the value under {key} has {size} bytes, the limit is {limit}")]
    TooLarge { key: String, size: usize, limit: usize },
    /// The disk is full: the write was refused.
    #[error("the store is unavailable: {0}")]
    NoSpace(Arc<str>),
    /// I/O error, lost connection: the write was refused or its outcome is unknown.
    #[error("the store is unavailable: {0}")]
    Unavailable(Arc<str>),
    /// The store was closed for good. The outcome of a concurrent write is unknown.
    #[error("the store is closed")]
    Closed,
    /// The files are damaged, or of a version that this program cannot read.
    #[error("{0}")]
    Unusable(Arc<str>),
}

impl Error {
    pub(crate) fn unavailable(why: impl fmt::Display) -> Self {
        Self::Unavailable(why.to_string().into())
    }

    pub(crate) fn unusable(why: impl fmt::Display) -> Self {
        Self::Unusable(why.to_string().into())
    }
}

pub type Result<T> = std::result::Result<T, Error>;

/// The store's interface. Object-safe; every backend passes the contract suite.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse>;
    async fn txn(&self, txn: Txn) -> Result<TxnResponse>;
    async fn watch(&self, request: WatchRequest) -> Result<Watch>;
    /// Whether writing the same value again would change its bytes at rest. If so, an update that changes
    /// nothing is still written: that is how values are re-encrypted with another key.
    async fn is_stale(&self, _key: &Bytes) -> Result<bool> {
        Ok(false)
    }
    /// The newest revision, linearizably.
    async fn revision(&self) -> Result<Revision>;
    /// Compacts history below `revision` (which stays readable, and watches may start there).
    async fn compact(&self, revision: Revision) -> Result<()>;
    /// A lease of `ttl_seconds` (at least one); its keys are deleted when it expires.
    async fn lease_grant(&self, ttl_seconds: i64) -> Result<LeaseId>;
    /// The same with an id of the caller's choice.
    async fn lease_grant_as(&self, lease: LeaseId, ttl_seconds: i64) -> Result<()>;
    async fn lease_revoke(&self, lease: LeaseId) -> Result<()>;
    /// All leases, by id.
    async fn leases(&self) -> Result<Vec<Lease>>;
    /// Gives the lease its full time again; returns that time in seconds.
    async fn lease_keep_alive(&self, lease: LeaseId) -> Result<i64>;
    /// Fails if the state at a revision cannot be read: it is compacted, or still to come.
    async fn check_readable(&self, at: Revision) -> Result<()> {
        let key = KeyRange::one(Bytes::from_static(b"/"));
        let request =
            RangeRequest { revision: Some(at), count_only: true, ..RangeRequest::new(key) };
        self.range(request).await.map(drop)
    }
    async fn status(&self) -> Result<Status>;
    /// A part of the status that costs less than all of it.
    async fn space(&self) -> Result<Space> {
        let status = self.status().await?;
        let is_low = status.alarms.iter().any(|alarm| alarm.contains(NO_SPACE));
        Ok(Space { disk_bytes: status.disk_bytes, reserve_bytes: None, is_low })
    }
    /// The live data as one file (see [`snapshot`]); other calls go on meanwhile.
    async fn snapshot(&self) -> Result<Snapshot>;
    /// The store's revision at a time, in milliseconds since 1970; `Compacted` if that is no longer
    /// available.
    async fn revision_at(&self, millis: u64) -> Result<Revision>;
    /// Commits the queued writes and closes; later calls fail with `Closed`.
    async fn close(&self);
}
