//! Watches. The committer serves synced ones; slow ones have their own task.
//!
//! ```text
//!             registered ──► catching up ──────────────► synced
//!                             task: ring or disk,         committer: try_send of each
//!                             waits for the reader        published revision
//!                                 ▲                            │
//!                                 └──── queue full ────────────┘
//!             any ──► over: reader gone · `Compacted` · store closed
//! ```
//!
//! Invariants: the committer never waits for a watch. Only one of the two sides sends at a time,
//! decided under the hub's lock, and `next` is handed over with it: so there are no gaps or repeats.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{Notify, mpsc};

use super::Shared;
use super::state::Group;
use crate::{KeyRange, Revision, WatchItem};

/// How many of the ring's groups one step of catching up reads under the state's lock.
const RING_STEP: usize = 1024;

/// The watchers for the committer.
pub(super) struct Hub {
    /// All revisions up to here were offered to the synced watchers.
    published: Revision,
    watchers: BTreeMap<u64, Watcher>,
    next_id: u64,
    closed: bool,
}

struct Watcher {
    range: KeyRange,
    sender: mpsc::Sender<WatchItem>,
    /// Revisions below are delivered.
    next: Revision,
    synced: bool,
    /// Notifies the watch's task that it must catch up.
    lagging: Arc<Notify>,
}

impl Hub {
    pub fn new(published: Revision) -> Self {
        Self { published, watchers: BTreeMap::new(), next_id: 0, closed: false }
    }

    /// Offers committed revisions to every synced watcher; one whose queue is full falls behind.
    pub fn publish(&mut self, groups: &[Group]) {
        for watcher in self.watchers.values_mut().filter(|watcher| watcher.synced) {
            watcher.offer(groups);
        }
        if let Some(last) = groups.last() {
            self.published = last.revision;
        }
    }

    /// Ends all watches.
    pub fn close(&mut self) {
        self.closed = true;
        self.watchers.clear();
    }
}

impl Watcher {
    fn offer(&mut self, groups: &[Group]) {
        for group in groups.iter().filter(|group| group.revision >= self.next) {
            let Some(events) = group.select(&self.range) else { continue };
            // Full: it must catch up. Closed: its task sees that too, and removes it.
            if self.sender.try_send(WatchItem::Events(group.revision, events)).is_err() {
                self.synced = false;
                self.next = group.revision;
                self.lagging.notify_one();
                return;
            }
        }
    }
}

/// The task's side of a watch. Drop removes the watch from the hub.
pub(super) struct Follower {
    shared: Arc<Shared>,
    id: u64,
    range: KeyRange,
    sender: mpsc::Sender<WatchItem>,
    progress: mpsc::Receiver<()>,
    lagging: Arc<Notify>,
    next: Revision,
    /// The highest revision of a sent `Progress`: they never decrease.
    told: Revision,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.shared.hub().watchers.remove(&self.id);
    }
}

enum Step {
    Send(WatchItem),
    /// Nothing in range up to `next`.
    Skip,
    Disk {
        upto: Revision,
    },
    CaughtUp,
    Over(WatchItem),
}

impl Follower {
    /// Registers a watch; `None` if the store is closed.
    pub fn register(
        shared: Arc<Shared>,
        range: KeyRange,
        start: Option<Revision>,
        sender: mpsc::Sender<WatchItem>,
        progress: mpsc::Receiver<()>,
    ) -> Option<Self> {
        let lagging = Arc::new(Notify::new());
        let mut hub = shared.hub();
        if hub.closed {
            return None;
        }
        let present = Revision(hub.published.0 + 1);
        let next = start.unwrap_or(present);
        // A watch with a future start waits for the committer, and has nothing to report until then.
        let synced = start.is_none() || next > present;
        let id = hub.next_id;
        hub.next_id += 1;
        let watcher = Watcher {
            range: range.clone(),
            sender: sender.clone(),
            next,
            synced,
            lagging: lagging.clone(),
        };
        hub.watchers.insert(id, watcher);
        drop(hub);
        if !synced {
            lagging.notify_one();
        }
        Some(Self { shared, id, range, sender, progress, lagging, next, told: Revision(0) })
    }

    /// Runs until the watch ends.
    pub async fn run(mut self) {
        let mut asks = true;
        loop {
            let lagging = self.lagging.clone();
            let reader = self.sender.clone();
            tokio::select! {
                () = lagging.notified() => {
                    if self.catch_up().await.is_none() {
                        return;
                    }
                }
                asked = self.progress.recv(), if asks => match asked {
                    Some(()) => if self.report().await.is_none() {
                        return;
                    },
                    // It cannot request progress again, but it still reads.
                    None => asks = false,
                },
                () = reader.closed() => return,
            }
        }
    }

    /// Sends history until the committer can take over. `None` if the watch has ended.
    async fn catch_up(&mut self) -> Option<()> {
        self.next = self.shared.hub().watchers.get(&self.id)?.next;
        loop {
            let sender = self.sender.clone();
            let permit = sender.reserve().await.ok()?;
            match self.step() {
                Step::Send(item) => permit.send(item),
                Step::Skip => {}
                Step::Over(item) => {
                    permit.send(item);
                    return None;
                }
                Step::CaughtUp => {
                    let mut hub = self.shared.hub();
                    if self.next <= hub.published {
                        continue;
                    }
                    let watcher = hub.watchers.get_mut(&self.id)?;
                    watcher.synced = true;
                    watcher.next = self.next;
                    self.told = Revision(self.next.0 - 1).max(self.told);
                    permit.send(WatchItem::Progress(self.told));
                    return Some(());
                }
                Step::Disk { upto } => {
                    drop(permit);
                    self.send_from_disk(upto).await?;
                }
            }
        }
    }

    fn step(&mut self) -> Step {
        let state = self.shared.state();
        if self.next < state.floor {
            return Step::Over(WatchItem::Compacted(state.floor));
        }
        if self.next > state.revision {
            return Step::CaughtUp;
        }
        if self.next < state.ring.start {
            return Step::Disk { upto: Revision(state.ring.start.0 - 1) };
        }
        for group in state.ring.since(self.next).take(RING_STEP) {
            self.next = Revision(group.revision.0 + 1);
            if let Some(events) = group.select(&self.range) {
                return Step::Send(WatchItem::Events(group.revision, events));
            }
        }
        Step::Skip
    }

    async fn send_from_disk(&mut self, upto: Revision) -> Option<()> {
        let chunk = match self.shared.history(self.next, upto, &self.range).await {
            Ok(chunk) => chunk,
            Err(error) => {
                // The reader sees the end and starts again where it stopped.
                tracing::warn!(%error, "failed to read a watch's history; the watch ends");
                return None;
            }
        };
        if self.next < self.shared.state().floor {
            // Trimmed during the read; the next step reports that.
            return Some(());
        }
        for (revision, events) in chunk.events {
            self.sender.send(WatchItem::Events(revision, events.into())).await.ok()?;
            self.next = Revision(revision.0 + 1);
        }
        self.next = chunk.next;
        Some(())
    }

    /// Answers a request for progress, after all events that it includes.
    async fn report(&mut self) -> Option<()> {
        let sender = self.sender.clone();
        let permit = sender.reserve().await.ok()?;
        let hub = self.shared.hub();
        // A watch that has fallen behind reports when it has caught up.
        if hub.watchers.get(&self.id)?.synced {
            self.told = hub.published.max(self.told);
            permit.send(WatchItem::Progress(self.told));
        }
        Some(())
    }
}
