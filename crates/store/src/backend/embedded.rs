//! The default backend: one process, one file, all live values in memory.
//!
//! ```text
//!  txn, leases, compact ─► queue ─► committer ─► durable (redb: the log)
//!                                      │ after the sync
//!                                      ├─► state: live values, ring of recent events ─► range
//!                                      └─► hub of watches ──► synced watchers
//!                                           a task per watch ─► catches up from ring or disk
//! ```
//!
//! In: the [`Store`] calls, from any runtime. Out: shared bytes. Reads do not touch the disk, except
//! reads of a revision older than the ring.
//!
//! Invariants: one writer (the committer's thread); nothing is visible before it is durable; state
//! is updated before watches get events, and both before the caller gets its answer; after drop or close
//! the file is closed.
//!
//! Locks, in the order in which they may be taken: `state`, `hub`, `durable`; none across an await.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use base::task::Tasks;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use self::committer::{Answer, Committer, Request, Work};
use self::durable::{Chunk, Durable};
use self::pending::Prepared;
use self::reserve::{Reserve, Room, Shown};
use self::retention::Limits;
use self::state::{Overlay, State, Stored, Undo};
use self::watch::{Follower, Hub};
use super::check_sizes;
use crate::snapshot::Image;
use crate::{
    Error, Histogram, KeyRange, Lease, LeaseId, NO_SPACE, RangeRequest, RangeResponse, Result,
    Revision, Snapshot, Space, Status, Store, Txn, TxnResponse, Watch, WatchRequest,
};

mod committer;
mod disk;
mod durable;
mod gathering;
mod leases;
mod loading;
mod pending;
mod record;
mod reserve;
mod restore;
mod retention;
mod state;
mod sums;
mod watch;

#[cfg(test)]
mod tests;

pub use durable::{Verified, verify};
pub use restore::{MARK, restore};

/// Requests that may wait for the committer; further callers wait.
const QUEUE: usize = 4096;
/// How long watches get to receive the end.
const SHUTDOWN: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct Options {
    /// History is kept for at least this long…
    pub history_age: Duration,
    /// …unless it has more bytes than this: a burst must not fill the disk;
    pub history_bytes: u64,
    /// and at least this many revisions of it, always.
    pub history_revisions: u64,
    /// Recent events in memory, for watches that catch up; older ones come from disk.
    pub ring_bytes: usize,
    /// Items that may wait in a watch before it counts as slow.
    pub watch_queue: usize,
    /// The file is rewritten when it exceeds twice its used bytes by this much.
    pub slack_bytes: u64,
    /// At most this much of the disk is held back, so that deletes work when it is full; 0 for nothing.
    pub reserve_bytes: u64,
    /// Disable it only if a power loss may lose the data (a crash of the process never does).
    pub sync: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            history_age: Duration::from_secs(300),
            history_bytes: 1 << 30,
            history_revisions: 10_000,
            ring_bytes: 4 << 20,
            watch_queue: 1024,
            slack_bytes: 32 << 20,
            reserve_bytes: 16 << 20,
            sync: true,
        }
    }
}

impl Options {
    fn limits(&self) -> Limits {
        Limits {
            revisions: self.history_revisions,
            age: self.history_age,
            bytes: self.history_bytes,
        }
    }
}

/// The state shared by the committer, the watches and the readers.
struct Shared {
    durable: Durable,
    /// Only the committer writes it, while it applies a batch.
    state: RwLock<State>,
    hub: Mutex<Hub>,
    /// For metrics; locked to add a number.
    commits: Mutex<Histogram>,
    space: Shown,
    closed: AtomicBool,
    /// `None` when the store is closed. Locked for a push that never waits: `places` limits the queue.
    queue: Mutex<Option<SyncSender<Request>>>,
    places: Arc<Semaphore>,
}

impl Shared {
    fn enqueue(&self, work: Work, place: Option<OwnedSemaphorePermit>) -> Result<()> {
        let queue = self.queue.lock().expect("no panic while it is held");
        let request = Request { work, _place: place };
        queue.as_ref().ok_or_else(closed)?.try_send(request).map_err(|_| closed())
    }

    /// Requests without an answer yet.
    fn in_flight(&self) -> usize {
        QUEUE.saturating_sub(self.places.available_permits())
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().expect("no panic while the state is held")
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().expect("no panic while the state is held")
    }

    fn hub(&self) -> MutexGuard<'_, Hub> {
        self.hub.lock().expect("no panic while the hub is held")
    }

    fn commits(&self) -> MutexGuard<'_, Histogram> {
        self.commits.lock().expect("no panic while it is held")
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(closed()) } else { Ok(()) }
    }

    /// No more writes come: ends the watches and closes the file.
    fn end(&self) {
        self.closed.store(true, Ordering::Release);
        // A poisoned lock means that its panic is unwinding now.
        if let Ok(mut hub) = self.hub.lock() {
            hub.close();
        }
        self.durable.close();
    }

    /// Reads history on a thread that may block.
    async fn history(
        self: &Arc<Self>,
        from: Revision,
        upto: Revision,
        range: &KeyRange,
    ) -> Result<Chunk> {
        let (shared, range) = (self.clone(), range.clone());
        tokio::task::spawn_blocking(move || shared.durable.history(from, upto, &range))
            .await
            .unwrap_or_else(|error| Err(Error::unavailable(error)))
    }
}

pub struct Embedded {
    shared: Arc<Shared>,
    committer: Mutex<Option<JoinHandle<()>>>,
    watches: Tasks,
    watch_queue: usize,
}

impl Embedded {
    /// Opens the store in `dir`, which is created if missing. Blocks while it reads.
    pub fn open(dir: &Path, options: Options) -> Result<Arc<dyn Store>> {
        Ok(Self::start(Durable::open(dir, options.sync)?, &options)?)
    }

    fn start(durable: Durable, options: &Options) -> Result<Arc<Self>> {
        let dir = durable.dir().map(Path::to_owned);
        Self::start_with(durable, options, dir.as_deref(), reserve::room())
    }

    /// Starts with a reserve in `dir`, on a disk of which `room` tells the free space.
    fn start_with(
        durable: Durable,
        options: &Options,
        dir: Option<&Path>,
        room: Room,
    ) -> Result<Arc<Self>> {
        let reserve = Reserve::new(dir, options.reserve_bytes, options.sync, room);
        let (state, loaded) = loading::load(&durable, options.ring_bytes)?;
        let hub = Mutex::new(Hub::new(state.revision));
        let state = RwLock::new(state);
        // One more than there are permits, for the end of a rewrite.
        let (queue, requests) = sync_channel(QUEUE + 1);
        let shared = Arc::new(Shared {
            durable,
            state,
            hub,
            commits: Mutex::default(),
            space: Shown::default(),
            closed: AtomicBool::new(false),
            queue: Mutex::new(Some(queue)),
            places: Arc::new(Semaphore::new(QUEUE)),
        });
        let committer = Committer::new(shared.clone(), requests, loaded, options, reserve);
        let thread = std::thread::Builder::new()
            .name("store".into())
            .spawn(move || committer.run())
            .map_err(|e| Error::unusable(format!("cannot start the store's thread: {e}")))?;
        Ok(Arc::new(Self {
            shared,
            committer: Mutex::new(Some(thread)),
            watches: Tasks::new("store watches"),
            watch_queue: options.watch_queue.max(1),
        }))
    }

    /// Queues work for the committer and waits for its answer.
    async fn commit<T>(&self, work: impl FnOnce(Answer<T>) -> Work) -> Result<T> {
        let place = self.shared.places.clone().acquire_owned().await.map_err(|_| closed())?;
        let (answer, answered) = oneshot::channel();
        self.shared.enqueue(work(answer), Some(place))?;
        answered.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Lets the committer finish the queue; returns its thread at the first call.
    fn stop(&self) -> Option<JoinHandle<()>> {
        self.shared.closed.store(true, Ordering::Release);
        self.shared.queue.lock().expect("no panic while it is held").take();
        self.watches.stop();
        self.committer.lock().expect("no panic while it is held").take()
    }
}

/// Waits for the committer, so that the directory is free for the next open.
impl Drop for Embedded {
    fn drop(&mut self) {
        if let Some(thread) = self.stop() {
            join(thread);
        }
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("the store's thread panicked");
    }
}

fn closed() -> Error {
    Error::Closed
}

#[async_trait]
impl Store for Embedded {
    async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.shared.check_open()?;
        let Some(at) = request.revision.filter(|at| at.0 != 0) else {
            return Ok(self.shared.state().range(&request, &Overlay::new()));
        };
        let mut undo = Undo::to(at);
        loop {
            let (from, upto) = {
                let state = self.shared.state();
                state.check_readable(at)?;
                if undo.add_ring(&state, &request.range) {
                    return Ok(state.range(&request, &undo.overlay));
                }
                (undo.next, Revision(state.ring.start.0 - 1))
            };
            let chunk = self.shared.history(from, upto, &request.range).await?;
            undo.add(chunk.events.iter().flat_map(|(_, events)| events));
            undo.next = chunk.next;
        }
    }

    async fn txn(&self, txn: Txn) -> Result<TxnResponse> {
        check_sizes(&txn)?;
        let txn = Prepared::new(txn);
        self.commit(|answer| Work::Txn(txn, answer)).await
    }

    async fn watch(&self, request: WatchRequest) -> Result<Watch> {
        self.shared.check_open()?;
        let (sender, items) = mpsc::channel(self.watch_queue);
        let (progress, asked) = mpsc::channel(1);
        let start = request.start.filter(|start| start.0 != 0);
        let follower = Follower::register(self.shared.clone(), request.range, start, sender, asked)
            .ok_or_else(closed)?;
        self.watches.spawn("store watch", follower.run());
        Ok(Watch { items, progress })
    }

    async fn revision(&self) -> Result<Revision> {
        self.shared.check_open()?;
        Ok(self.shared.state().revision)
    }

    async fn compact(&self, revision: Revision) -> Result<()> {
        self.commit(|answer| Work::Compact(revision, answer)).await
    }

    async fn lease_grant(&self, ttl_seconds: i64) -> Result<LeaseId> {
        self.commit(|answer| Work::Grant(None, ttl_seconds, answer)).await
    }

    async fn lease_grant_as(&self, lease: LeaseId, ttl_seconds: i64) -> Result<()> {
        self.commit(|answer| Work::Grant(Some(lease), ttl_seconds, answer)).await.map(|_| ())
    }

    async fn leases(&self) -> Result<Vec<Lease>> {
        self.commit(Work::Leases).await
    }

    async fn lease_revoke(&self, lease: LeaseId) -> Result<()> {
        self.commit(|answer| Work::Revoke(lease, answer)).await
    }

    async fn lease_keep_alive(&self, lease: LeaseId) -> Result<i64> {
        self.commit(|answer| Work::KeepAlive(lease, answer)).await
    }

    async fn check_readable(&self, at: Revision) -> Result<()> {
        self.shared.check_open()?;
        self.shared.state().check_readable(at)
    }

    async fn status(&self) -> Result<Status> {
        self.shared.check_open()?;
        let (disk_bytes, used_bytes) = self.shared.durable.sizes();
        let (revision, floor, keys) = {
            let state = self.shared.state();
            (state.revision, Some(state.floor), state.live.len())
        };
        let is_low = self.shared.space.is_low.load(Ordering::Relaxed);
        Ok(Status {
            backend: "embedded".into(),
            revision,
            floor,
            keys,
            disk_bytes,
            used_bytes,
            commits: self.shared.commits().clone(),
            alarms: if is_low { vec![NO_SPACE.to_owned()] } else { vec![] },
        })
    }

    async fn space(&self) -> Result<Space> {
        self.shared.check_open()?;
        let space = &self.shared.space;
        Ok(Space {
            disk_bytes: self.shared.durable.sizes().0,
            reserve_bytes: Some(space.held.load(Ordering::Relaxed)),
            is_low: space.is_low.load(Ordering::Relaxed),
        })
    }

    /// Lists leases before and after the values, so that every value's lease is in a list.
    async fn snapshot(&self) -> Result<Snapshot> {
        let mut leases = self.leases().await?;
        let (revision, kvs) = {
            let state = self.shared.state();
            let kvs = state.live.iter().map(Stored::key_value).collect();
            (state.revision, kvs)
        };
        leases.extend(self.leases().await?);
        let leases: BTreeMap<_, _> = leases.iter().map(|l| (l.id, l.ttl_seconds)).collect();
        Ok(Image::new(revision, kvs, leases.into_iter().collect()).stream())
    }

    async fn revision_at(&self, millis: u64) -> Result<Revision> {
        self.shared.check_open()?;
        let (floor, current) = {
            let state = self.shared.state();
            (state.floor, state.revision)
        };
        let shared = self.shared.clone();
        let search = move || shared.durable.revision_at(millis, floor, current);
        tokio::task::spawn_blocking(search).await.unwrap_or_else(|e| Err(Error::unavailable(e)))
    }

    async fn close(&self) {
        if let Some(thread) = self.stop()
            && let Err(error) = tokio::task::spawn_blocking(move || join(thread)).await
        {
            tracing::error!(%error, "failed to wait for the store's thread");
        }
        self.watches.shutdown(SHUTDOWN).await;
    }
}
