//! The one writer: a thread that turns queued requests into commits.
//!
//! ```text
//! queue ─► drain ─► expire leases ─► evaluate in order ─► one durable commit ─► state ─► watches ─► answers
//! ```
//!
//! While one batch is synced, the next one collects in the queue; it waits for more requests only if
//! several writers are active, and briefly (`gathering.rs`). It has its own thread, because a sync blocks.
//!
//! It sleeps until a request, a lease's end, or history that is due for removal; an idle store uses no
//! processor time.
//!
//! After a failed commit nothing of it becomes visible, its callers get `Unavailable`, and before
//! the next write the file is reopened: the part that turns out to be durable becomes visible, the
//! rest never existed.
//!
//! If the failure was a full disk, a part of the reserve is freed and the batch is committed again; until
//! there is room, only deletes and small updates are accepted (`reserve.rs`).
//!
//! When the log has been cleared of compacted records, and the file takes more than twice the bytes in
//! use, it is rewritten concurrently with writes (`durable/rewrite.rs`).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::durable::{Batch, Copy, Trim};
use super::gathering::Gathering;
use super::leases::Leases;
use super::pending::{Changes, Pending, Prepared};
use super::reserve::{Found, Reserve};
use super::retention::Retention;
use super::{Options, Shared, loading, pending};
use crate::{Error, Lease, LeaseId, Result, Revision, TxnResponse};

/// The limits of a commit: requests, and roughly the bytes of values.
const BATCH_REQUESTS: usize = 1024;
const BATCH_BYTES: usize = 8 << 20;
/// The minimum number of records to check for trimming, per commit with writes, and without.
const TRIM_WITH_WRITES: usize = 128;
const TRIM_ALONE: usize = 1024;
/// The minimum interval between retries of a broken disk.
const RETRY: Duration = Duration::from_secs(1);
/// The minimum interval between rewrites after a failed one.
const COPY_AGAIN: Duration = Duration::from_secs(60);

pub(super) struct Request {
    pub work: Work,
    /// Its permit of the queue, released when it is answered. `None` for requests without a caller.
    pub _place: Option<OwnedSemaphorePermit>,
}

pub(super) enum Work {
    Txn(Prepared, Answer<TxnResponse>),
    /// With a given id, or with one of the store's choice.
    Grant(Option<LeaseId>, i64, Answer<LeaseId>),
    Revoke(LeaseId, Answer<()>),
    KeepAlive(LeaseId, Answer<i64>),
    Compact(Revision, Answer<()>),
    Leases(Answer<Vec<Lease>>),
    /// The thread that copies the log has ended.
    Copied,
}

pub(super) type Answer<T> = oneshot::Sender<Result<T>>;

/// An answer that waits for the disk. Its receiver may have gone meanwhile.
enum Reply {
    Txn(Answer<TxnResponse>, Result<TxnResponse>),
    /// A lease's id, or its seconds.
    Number(Answer<i64>, Result<i64>),
    Leases(Answer<Vec<Lease>>, Vec<Lease>),
    Done(Answer<()>, Result<()>),
}

impl Reply {
    fn send(self, commit: &Result<()>) {
        match self {
            Self::Txn(to, result) => drop(to.send(commit.clone().and(result))),
            Self::Number(to, number) => drop(to.send(commit.clone().and(number))),
            Self::Leases(to, leases) => drop(to.send(commit.clone().map(|()| leases))),
            Self::Done(to, result) => drop(to.send(commit.clone().and(result))),
        }
    }
}

pub(super) struct Committer {
    shared: Arc<Shared>,
    queue: Receiver<Request>,
    leases: Leases,
    retention: Retention,
    /// Up to here, the log is cleared of compacted records.
    trimmed: Revision,
    /// Set while the disk is broken: the time of the next try.
    retry: Option<Instant>,
    gathering: Gathering,
    rewriting: Rewriting,
    reserve: Reserve,
    /// While the store is low on space: the newest revision at the last look, which becomes the floor.
    forgets: Option<Revision>,
}

/// The rewrite of the file.
struct Rewriting {
    slack_bytes: u64,
    /// While it runs, nothing is trimmed.
    thread: Option<JoinHandle<Result<Copy>>>,
    /// A write of unknown outcome happened meanwhile: the copy must not be used.
    is_void: bool,
    /// The ratio of a new file's size to the bytes in use. If records fill their pages badly it is large,
    /// and another rewrite would not help.
    growth: f64,
    not_before: Option<Instant>,
}

impl Rewriting {
    fn new(slack_bytes: u64) -> Self {
        Self { slack_bytes, thread: None, is_void: false, growth: 1.0, not_before: None }
    }

    fn is_due(&self, now: Instant, taken: u64, used: u64) -> bool {
        let most = used as f64 * (1.5 * self.growth).max(2.0) + self.slack_bytes as f64;
        self.thread.is_none() && self.not_before.is_none_or(|at| now >= at) && taken as f64 > most
    }
}

impl Committer {
    pub fn new(
        shared: Arc<Shared>,
        queue: Receiver<Request>,
        loaded: loading::Loaded,
        options: &Options,
        reserve: Reserve,
    ) -> Self {
        let retention = loaded.retention(options, now_millis());
        Self {
            shared,
            queue,
            leases: loaded.leases,
            retention,
            trimmed: loaded.trimmed,
            retry: None,
            gathering: Gathering::default(),
            rewriting: Rewriting::new(options.slack_bytes),
            reserve,
            forgets: None,
        }
    }

    /// Runs until the queue is closed and empty.
    pub fn run(mut self) {
        while let Some(requests) = self.next_batch() {
            self.process(requests);
        }
    }

    /// Waits for work. `None`: no more work will come; empty: only time has passed.
    fn next_batch(&mut self) -> Option<Vec<Request>> {
        let mut requests = vec![];
        match self.wake_at() {
            None => requests.push(self.queue.recv().ok()?),
            Some(at) => {
                let wait = at.saturating_duration_since(Instant::now());
                match self.queue.recv_timeout(wait) {
                    Ok(request) => requests.push(request),
                    Err(RecvTimeoutError::Timeout) => return Some(requests),
                    Err(RecvTimeoutError::Disconnected) => return None,
                }
            }
        }
        let begun = Instant::now();
        let mut bytes = size(&requests[0].work);
        while requests.len() < BATCH_REQUESTS && bytes < BATCH_BYTES {
            let Some(request) = self.another(requests.len(), begun) else { break };
            bytes += size(&request.work);
            requests.push(request);
        }
        Some(requests)
    }

    /// One more request for a batch begun at `begun`, if one is queued or likely to come soon.
    fn another(&self, gathered: usize, begun: Instant) -> Option<Request> {
        match self.queue.try_recv() {
            Ok(request) => Some(request),
            Err(TryRecvError::Disconnected) => None,
            Err(TryRecvError::Empty) => {
                let patience = self.gathering.patience(gathered)?;
                self.queue.recv_timeout(patience.checked_sub(begun.elapsed())?).ok()
            }
        }
    }

    /// The time of the next work without a request.
    fn wake_at(&self) -> Option<Instant> {
        let (current, floor) = {
            let state = self.shared.state();
            (state.revision, state.floor)
        };
        let trim = if self.may_trim(floor) {
            Some(Instant::now())
        } else {
            self.retention.next_look(current, floor)
        };
        let work = [trim, self.leases.next_deadline()].into_iter().flatten().min();
        let work = work.map(|at| self.retry.map_or(at, |retry| at.max(retry)));
        [work, self.reserve.next_look()].into_iter().flatten().min()
    }

    fn process(&mut self, requests: Vec<Request>) {
        let now = Instant::now();
        if requests.iter().any(|request| matches!(request.work, Work::Copied)) {
            self.end_rewriting(now);
        }
        self.look_for_room(now);
        if let Err(error) = self.mend(now) {
            let refused = Err(error);
            let answer = |request: Request| answer_now(request.work, &refused);
            requests.into_iter().for_each(answer);
            return;
        }
        let mut places = vec![];
        let mut replies = vec![];
        let shared = self.shared.clone();
        let at = now_millis();
        let changes = {
            let state = shared.state();
            let mut pending = Pending::new(&state, &self.leases, at, self.reserve.growth());
            for lease in self.leases.due(now) {
                pending.revoke(lease).expect("it was there a moment ago");
            }
            let mut later = vec![];
            for request in requests {
                places.push(request._place);
                match request.work {
                    Work::KeepAlive(..) | Work::Compact(..) | Work::Leases(..) => {
                        later.push(request.work);
                    }
                    Work::Copied => {}
                    work => replies.push(evaluate(&mut pending, work)),
                }
            }
            let changes = pending.finish();
            drop(state);
            for work in later {
                replies.push(self.administer(work, &changes, now));
            }
            changes
        };
        self.raise_floor(now);
        let committed = self.commit_and_show(changes, now);
        self.gathering.note(self.shared.in_flight(), now.elapsed());
        for reply in replies {
            reply.send(&committed);
        }
    }

    /// Work that changes no values: it takes effect after the batch's transactions.
    fn administer(&mut self, work: Work, changes: &Changes, now: Instant) -> Reply {
        match work {
            Work::KeepAlive(id, to)
                if changes.granted.iter().any(|(granted, _)| *granted == id) =>
            {
                let granted = changes.granted.iter().find(|(granted, _)| *granted == id);
                Reply::Number(to, Ok(granted.map_or(0, |(_, ttl)| *ttl)))
            }
            Work::KeepAlive(id, to) if changes.revoked.contains(&id) => {
                Reply::Number(to, Err(Error::LeaseNotFound(id)))
            }
            Work::KeepAlive(id, to) => Reply::Number(to, self.leases.keep_alive(id, now)),
            Work::Compact(revision, to) => {
                let mut state = self.shared.state_mut();
                let result = if revision <= state.floor {
                    Err(Error::Compacted { requested: revision, floor: state.floor })
                } else if revision > state.revision {
                    Err(Error::Future { requested: revision, current: state.revision })
                } else {
                    state.raise_floor(revision);
                    Ok(())
                };
                Reply::Done(to, result)
            }
            Work::Leases(to) => Reply::Leases(to, self.leases.list(now)),
            Work::Txn(..) | Work::Grant(..) | Work::Revoke(..) | Work::Copied => {
                unreachable!("these are evaluated as transactions, or no request")
            }
        }
    }

    /// The floor rises before records below it are removed, so that a reader that finds a gap on disk
    /// sees the reason.
    fn raise_floor(&mut self, now: Instant) {
        let (current, floor) = {
            let state = self.shared.state();
            (state.revision, state.floor)
        };
        if let Some(floor) = self.retention.due(now, current, floor) {
            self.shared.state_mut().raise_floor(floor);
        }
    }

    /// Commits the batch and makes it visible. On a full disk it is committed again with space of the
    /// reserve: nothing else has changed the state meanwhile.
    fn commit_and_show(&mut self, changes: Changes, now: Instant) -> Result<()> {
        loop {
            let before = self.shared.state().revision;
            match self.commit(&changes) {
                Ok(()) => {
                    self.show(changes, now);
                    return Ok(());
                }
                Err(error @ Error::NoSpace(_)) => {
                    let used = self.shared.durable.sizes().1;
                    let released = self.reserve.release(Instant::now(), used);
                    self.reserve.show(&self.shared.space);
                    if !released {
                        return Err(error);
                    }
                    if !self.mend_with_reserve(now) {
                        return Err(error);
                    }
                    if self.shared.state().revision != before {
                        // It is durable after all, and visible.
                        return Ok(());
                    }
                    if !self.reserve.holds(changes.bytes()) {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Completes the reserve when there is room. While there is none, history is forgotten: deletes free
    /// no space before that.
    fn look_for_room(&mut self, now: Instant) {
        if self.reserve.next_look().is_none_or(|at| now < at) {
            return;
        }
        let used = self.shared.durable.sizes().1;
        if self.reserve.look(now, used) == Found::Room {
            tracing::info!("there is room on the disk: the store accepts all writes again");
        }
        self.reserve.show(&self.shared.space);
        let current = self.shared.state().revision;
        let forgets = self.reserve.is_low().then_some(current);
        if let (Some(floor), Some(_)) = (std::mem::replace(&mut self.forgets, forgets), forgets) {
            self.shared.state_mut().raise_floor(floor);
        }
    }

    fn commit(&mut self, changes: &Changes) -> Result<()> {
        let floor = self.shared.state().floor;
        // Twice the number of new records, so that trimming keeps up with any load.
        let with_writes = TRIM_WITH_WRITES.max(2 * changes.records.len());
        let limit = if changes.is_empty() { TRIM_ALONE } else { with_writes };
        let trim = Trim { from: self.trimmed, floor, limit };
        let trim = self.may_trim(floor).then_some(trim);
        if changes.is_empty() && trim.is_none() {
            return Ok(());
        }
        let batch = Batch {
            records: &changes.records,
            granted: &changes.granted,
            revoked: &changes.revoked,
            trim,
        };
        let begun = Instant::now();
        let committed = self.shared.durable.commit(&batch);
        self.shared.commits().note(begun.elapsed());
        match committed {
            Ok(trimmed) => {
                self.trimmed = trimmed.unwrap_or(self.trimmed);
                if trimmed == Some(floor) {
                    self.rewrite_if_due(begun);
                }
                Ok(())
            }
            Err(error) => {
                tracing::error!(%error, "the store failed to write");
                self.retry = Some(Instant::now() + RETRY);
                self.rewriting.is_void = true;
                Err(error)
            }
        }
    }

    fn may_trim(&self, floor: Revision) -> bool {
        self.trimmed < floor && self.rewriting.thread.is_none()
    }

    /// Starts a rewrite if much was removed and the file is still large.
    fn rewrite_if_due(&mut self, now: Instant) {
        let (taken, used) = self.shared.durable.sizes();
        if !self.shared.durable.can_be_copied() || !self.rewriting.is_due(now, taken, used) {
            return;
        }
        tracing::debug!(taken, used, "rewriting the store's file");
        let shared = self.shared.clone();
        // Above this limit, writes are faster than copying.
        let limit = 2 * used + self.rewriting.slack_bytes;
        let copying = std::thread::Builder::new().name("store copy".into()).spawn(move || {
            let copied = copy(&shared, limit);
            // Closed: then the copy is dropped with the thread.
            let _ = shared.enqueue(Work::Copied, None);
            copied
        });
        self.rewriting.not_before = Some(now + COPY_AGAIN);
        self.rewriting.is_void = false;
        match copying {
            Ok(thread) => self.rewriting.thread = Some(thread),
            Err(error) => tracing::warn!(%error, "failed to start rewriting the store's file"),
        }
    }

    /// Replaces the file by the copy, if it is usable.
    fn end_rewriting(&mut self, now: Instant) {
        let Some(thread) = self.rewriting.thread.take() else { return };
        let copied = thread.join().unwrap_or_else(|_| Err(Error::unavailable("it panicked")));
        if self.rewriting.is_void {
            return;
        }
        match copied.and_then(|copy| self.shared.durable.install(copy)) {
            Ok(()) => {
                let (taken, used) = self.shared.durable.sizes();
                self.rewriting.growth = taken as f64 / used.max(1) as f64;
                self.rewriting.not_before = None;
                tracing::debug!(taken, used, "rewrote the store's file");
            }
            Err(error) => {
                tracing::warn!(%error, "failed to rewrite the store's file");
                if !self.shared.durable.is_open() {
                    self.retry = Some(now);
                }
            }
        }
    }

    /// Makes a durable batch visible: first to reads, then to watches.
    fn show(&mut self, changes: Changes, now: Instant) {
        for (id, ttl) in &changes.granted {
            self.leases.insert(*id, *ttl, now);
        }
        for event in changes.groups.iter().flat_map(|group| group.events.iter()) {
            let from = event.previous.as_ref().map_or(0, |kv| kv.lease);
            self.leases.attach(&event.kv.key, from, event.kv.lease);
        }
        for id in &changes.revoked {
            self.leases.remove(*id);
        }
        let Some(last) = changes.groups.last().map(|group| group.revision) else { return };
        let bytes = changes.bytes();
        let mut state = self.shared.state_mut();
        for (key, after) in changes.after {
            state.apply(&key, after);
        }
        state.revision = last;
        for group in &changes.groups {
            state.ring.push(group.clone());
        }
        drop(state);
        self.retention.note(now, last, bytes as u64);
        self.shared.hub().publish(&changes.groups);
    }

    /// Mends on a full disk: each failure frees a part of the reserve, as long as there is one.
    fn mend_with_reserve(&mut self, now: Instant) -> bool {
        loop {
            let held = self.reserve.held();
            self.retry = Some(now);
            if self.mend(now).is_ok() {
                return true;
            }
            if self.reserve.held() == held {
                return false;
            }
        }
    }

    /// After a failure: reopens the file, and applies writes that became durable after all.
    fn mend(&mut self, now: Instant) -> Result<()> {
        let Some(retry) = self.retry else { return Ok(()) };
        if now < retry {
            return Err(Error::unavailable("the last write failed, the disk will be retried"));
        }
        self.retry = Some(now + RETRY);
        let mended = self.shared.durable.reopen().and_then(|()| self.catch_up(now));
        if let Err(error) = mended {
            tracing::error!(%error, "failed to reopen the store");
            if self.reserve.is_low() {
                // Opening may need space, too.
                self.reserve.release(now, self.shared.durable.sizes().1);
            }
            return Err(Error::unavailable(error));
        }
        self.retry = None;
        if !self.reserve.is_low() {
            tracing::info!("the store accepts writes again");
        }
        Ok(())
    }

    fn catch_up(&mut self, now: Instant) -> Result<()> {
        let from = Revision(self.shared.state().revision.0 + 1);
        let (changes, meta) = loading::missed(&self.shared, from)?;
        self.trimmed = meta.trimmed;
        let known: Vec<LeaseId> = self.leases.ids().collect();
        let granted = meta.leases.iter().filter(|(id, _)| !known.contains(id)).copied().collect();
        let gone = known.into_iter().filter(|id| !meta.leases.iter().any(|(there, _)| there == id));
        self.show(Changes { granted, revoked: gone.collect(), ..changes }, now);
        Ok(())
    }
}

/// Runs also after a panic: watches must not wait for events that will never come.
impl Drop for Committer {
    fn drop(&mut self) {
        self.shared.end();
        // The copying thread checks every few megabytes whether the store is closed; its copy is discarded.
        drop(self.rewriting.thread.take().map(JoinHandle::join));
    }
}

/// Copies the log until the copy has caught up.
fn copy(shared: &Shared, limit: u64) -> Result<Copy> {
    let mut copy = shared.durable.begin_copy()?;
    while shared.durable.go_on_copying(&mut copy)? {
        shared.check_open()?;
        if copy.bytes() > limit {
            return Err(Error::unavailable("writes are faster than the copy"));
        }
    }
    Ok(copy)
}

fn evaluate(pending: &mut Pending<'_>, work: Work) -> Reply {
    match work {
        Work::Txn(txn, to) => Reply::Txn(to, pending.txn(txn)),
        Work::Grant(Some(id), _, to) if pending.has_lease(id) => {
            Reply::Number(to, Err(Error::LeaseExists(id)))
        }
        Work::Grant(_, _, to) if pending.is_low() => Reply::Number(to, Err(pending::no_space())),
        Work::Grant(id, ttl, to) => {
            let id = id.unwrap_or_else(|| {
                loop {
                    let id = base::rng::below(i64::MAX as u64) as i64;
                    if id != 0 && !pending.has_lease(id) {
                        break id;
                    }
                }
            });
            pending.grant(id, ttl);
            Reply::Number(to, Ok(id))
        }
        Work::Revoke(id, to) => Reply::Done(to, pending.revoke(id)),
        Work::KeepAlive(..) | Work::Compact(..) | Work::Leases(..) | Work::Copied => {
            unreachable!("these are no transactions")
        }
    }
}

fn answer_now(work: Work, refused: &Result<()>) {
    let reply = match work {
        Work::Txn(_, to) => Reply::Txn(to, Err(Error::unavailable("never sent"))),
        Work::Grant(_, _, to) => Reply::Number(to, Ok(0)),
        Work::Leases(to) => Reply::Leases(to, vec![]),
        Work::KeepAlive(_, to) => Reply::Number(to, Ok(0)),
        Work::Revoke(_, to) | Work::Compact(_, to) => Reply::Done(to, Ok(())),
        Work::Copied => return,
    };
    reply.send(refused);
}

fn size(work: &Work) -> usize {
    let Work::Txn(txn, _) = work else { return 0 };
    txn.size()
}

fn now_millis() -> u64 {
    u64::try_from(base::clock::now().as_millisecond()).unwrap_or(0)
}
