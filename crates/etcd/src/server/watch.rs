//! Watches: many on one stream, like etcd.
//!
//! ```text
//! requests ─► create: a store watch, and a task that forwards its items here, in order
//!             cancel, progress
//! items    ─► answers: events (queued ones together) · progress · canceled
//! ```
//!
//! Invariants: all items of a stream pass one queue, so that a progress answer comes after every event
//! that it includes. A slow reader stops only its own stream.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use futures::StreamExt;
use store::{Event, EventKind, Revision, Watch, WatchItem, WatchRequest};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tonic::Streaming;

use super::messages as wire;
use super::{Answer, Answers, Shared, kv, status};
use crate::convert;

/// Answers that may wait for the connection, and batches for the stream.
const QUEUE: usize = 16;
/// The maximum number of queued items that are forwarded together.
const BATCH: usize = 64;
/// An answer gets no more events above this size.
const ANSWER_BYTES: usize = 1 << 20;
/// Upstream: `--watch-progress-notify-interval`.
const NOTIFY: Duration = Duration::from_secs(600);
/// etcd's id for "all watches of this stream".
const ALL: i64 = -1;

pub async fn watch(
    shared: Arc<Shared>,
    requests: Streaming<wire::WatchRequest>,
) -> Answer<Answers<wire::WatchResponse>> {
    let (answers, receiver) = mpsc::channel(QUEUE);
    let (sender, items) = mpsc::channel(QUEUE);
    let tasks = shared.tasks.clone();
    let stream = Stream {
        shared,
        answers,
        sender,
        tasks: Tasks::new("watches of a stream"),
        watches: BTreeMap::new(),
        next_id: 0,
        waiting: None,
    };
    tasks.spawn("watch stream", stream.run(requests, items));
    Ok(receiver.into())
}

struct Stream {
    shared: Arc<Shared>,
    answers: mpsc::Sender<Answer<wire::WatchResponse>>,
    sender: mpsc::Sender<Batch>,
    /// The forwarding tasks; they end with the stream.
    tasks: Tasks,
    watches: BTreeMap<i64, One>,
    next_id: i64,
    /// A pending progress request: the watches that have not answered yet, and the lowest answer.
    waiting: Option<(Vec<i64>, Revision)>,
}

/// Items of a watch; empty: the store ended it.
type Batch = (i64, Vec<WatchItem>);

/// A watch of the stream.
struct One {
    progress: mpsc::Sender<()>,
    task: tokio::task::AbortHandle,
    previous: bool,
    filters: Vec<wire::EventType>,
    notify: bool,
    /// A notification is due at its next progress.
    due: bool,
}

/// The client has disconnected.
struct Gone;

impl Stream {
    async fn run(
        mut self,
        mut requests: Streaming<wire::WatchRequest>,
        mut items: mpsc::Receiver<Batch>,
    ) {
        let mut clock = tokio::time::interval(NOTIFY);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        clock.tick().await;
        let mut asks = true;
        let answers = self.answers.clone();
        loop {
            let done = tokio::select! {
                request = requests.next(), if asks => match request {
                    Some(Ok(request)) => self.ask(request).await,
                    Some(Err(_)) => return,
                    // The client sends no more requests, but may still read.
                    None => {
                        asks = false;
                        Ok(())
                    }
                },
                batch = items.recv() => match batch {
                    Some((id, batch)) => self.batch(id, batch).await,
                    None => return,
                },
                _ = clock.tick() => {
                    self.notify();
                    Ok(())
                }
                () = answers.closed() => return,
            };
            if done.is_err() {
                return;
            }
        }
    }

    async fn ask(&mut self, request: wire::WatchRequest) -> Result<(), Gone> {
        match request.call {
            Some(wire::WatchCall::Create(create)) => self.create(create).await,
            Some(wire::WatchCall::Cancel(cancel)) => {
                let id = cancel.watch_id;
                match self.watches.remove(&id) {
                    Some(one) => {
                        one.task.abort();
                        self.answered(id, Revision(u64::MAX)).await?;
                        self.say_canceled(id, String::new(), 0).await
                    }
                    None => Ok(()),
                }
            }
            Some(wire::WatchCall::Progress(_)) => {
                let ids: Vec<i64> = self.watches.keys().copied().collect();
                if ids.is_empty() {
                    let answer = wire::WatchResponse { watch_id: ALL, ..Default::default() };
                    return self.say_now(answer).await;
                }
                for one in self.watches.values() {
                    // Full: a request is already queued.
                    let _ = one.progress.try_send(());
                }
                self.waiting = Some((ids, Revision(u64::MAX)));
                Ok(())
            }
            None => Ok(()),
        }
    }

    async fn create(&mut self, create: wire::WatchCreateRequest) -> Result<(), Gone> {
        let id = match create.watch_id {
            0 => self.free_id(),
            id => id,
        };
        if self.watches.contains_key(&id) {
            let why = "mvcc: duplicate watch ID provided on the WatchStream".to_owned();
            return self.say_canceled(ALL, why, 0).await;
        }
        let present = match self.shared.store.revision().await {
            Ok(present) => present,
            Err(error) => return self.send(Err(status(error))).await,
        };
        // Starts after the revision in the answer, so that no write in between is missed.
        let start = match u64::try_from(create.start_revision) {
            Ok(0) | Err(_) => Revision(present.0 + 1),
            Ok(start) => Revision(start),
        };
        let filters = create.filters().collect();
        let key = if create.key.is_empty() { bytes::Bytes::from_static(b"\0") } else { create.key };
        let range = kv::key_range(key, create.range_end);
        let watch = match self.shared.store.watch(WatchRequest { range, start: Some(start) }).await
        {
            Ok(watch) => watch,
            Err(error) => return self.send(Err(status(error))).await,
        };
        let Watch { items, progress } = watch;
        let task = self.tasks.spawn("watch", bring(id, items, self.sender.clone()));
        let (previous, notify) = (create.prev_kv, create.progress_notify);
        self.watches.insert(id, One { progress, task, previous, filters, notify, due: false });
        let header = self.shared.header(present);
        let answer =
            wire::WatchResponse { header, watch_id: id, created: true, ..Default::default() };
        self.send(Ok(answer)).await
    }

    fn free_id(&mut self) -> i64 {
        while self.watches.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    async fn batch(&mut self, id: i64, batch: Vec<WatchItem>) -> Result<(), Gone> {
        if batch.is_empty() && self.watches.remove(&id).is_some() {
            return self.say_canceled(id, "etcdserver: watch canceled".into(), 0).await;
        }
        let mut gathered = Gathered::default();
        for item in batch {
            let Some(one) = self.watches.get_mut(&id) else { return Ok(()) };
            match item {
                WatchItem::Events(revision, events) => {
                    gathered.add(one, revision, &events);
                    if gathered.bytes >= ANSWER_BYTES {
                        self.say_events(id, std::mem::take(&mut gathered)).await?;
                    }
                }
                other => {
                    self.say_events(id, std::mem::take(&mut gathered)).await?;
                    self.item(id, other).await?;
                }
            }
        }
        self.say_events(id, gathered).await
    }

    async fn say_events(&self, id: i64, gathered: Gathered) -> Result<(), Gone> {
        let Gathered { revision, events, bytes: _ } = gathered;
        if events.is_empty() {
            return Ok(());
        }
        let header = self.shared.header(revision);
        let answer = wire::WatchResponse { header, watch_id: id, events, ..Default::default() };
        self.send(Ok(answer)).await
    }

    /// Handles an item that is no event.
    async fn item(&mut self, id: i64, item: WatchItem) -> Result<(), Gone> {
        match item {
            WatchItem::Events(..) => Ok(()),
            WatchItem::Progress(revision) => {
                let is_due = |one: &mut One| std::mem::take(&mut one.due);
                if self.watches.get_mut(&id).is_some_and(is_due) {
                    let header = self.shared.header(revision);
                    let answer = wire::WatchResponse { header, watch_id: id, ..Default::default() };
                    self.send(Ok(answer)).await?;
                }
                self.answered(id, revision).await
            }
            WatchItem::Compacted(floor) => {
                self.watches.remove(&id);
                self.answered(id, Revision(u64::MAX)).await?;
                let why = "etcdserver: mvcc: required revision has been compacted";
                self.say_canceled(id, why.into(), convert::number(floor)).await
            }
        }
    }

    /// Records the progress of one watch; after the last one, the stream answers.
    async fn answered(&mut self, id: i64, revision: Revision) -> Result<(), Gone> {
        let Some((ids, least)) = &mut self.waiting else { return Ok(()) };
        ids.retain(|waiting| *waiting != id);
        *least = revision.min(*least);
        if !ids.is_empty() {
            return Ok(());
        }
        let least = *least;
        self.waiting = None;
        let answer = wire::WatchResponse { watch_id: ALL, ..Default::default() };
        if least == Revision(u64::MAX) {
            // All of them have ended.
            return self.say_now(answer).await;
        }
        let header = self.shared.header(least);
        self.send(Ok(wire::WatchResponse { header, ..answer })).await
    }

    fn notify(&mut self) {
        for one in self.watches.values_mut().filter(|one| one.notify) {
            one.due = true;
            // Full: a request is already queued.
            let _ = one.progress.try_send(());
        }
    }

    async fn say_canceled(&self, id: i64, why: String, floor: i64) -> Result<(), Gone> {
        let answer = wire::WatchResponse {
            watch_id: id,
            canceled: true,
            created: id == ALL,
            cancel_reason: why,
            compact_revision: floor,
            ..Default::default()
        };
        self.say_now(answer).await
    }

    /// Adds the current revision.
    async fn say_now(&self, answer: wire::WatchResponse) -> Result<(), Gone> {
        let header = self.shared.present().await;
        self.send(header.map(|header| wire::WatchResponse { header, ..answer })).await
    }

    async fn send(&self, answer: Answer<wire::WatchResponse>) -> Result<(), Gone> {
        let is_last = answer.is_err();
        let sent = self.answers.send(answer).await;
        if is_last || sent.is_err() { Err(Gone) } else { Ok(()) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// Events of a watch, of one or several revisions.
#[derive(Default)]
struct Gathered {
    /// The newest revision.
    revision: Revision,
    events: Vec<wire::Event>,
    bytes: usize,
}

impl Gathered {
    fn add(&mut self, one: &One, revision: Revision, events: &[Event]) {
        self.revision = revision;
        let before = |event: &Event| event.previous.as_ref().map_or(0, |kv| kv.value.len());
        let size =
            |event: &Event| event.kv.value.len() + if one.previous { before(event) } else { 0 };
        self.bytes += events.iter().map(size).sum::<usize>();
        self.events.extend(events.iter().filter_map(|event| one.show(event)));
    }
}

impl One {
    fn show(&self, event: &Event) -> Option<wire::Event> {
        let kind = match event.kind {
            EventKind::Put => wire::EventType::Put,
            EventKind::Delete => wire::EventType::Delete,
        };
        if self.filters.contains(&kind) {
            return None;
        }
        let previous = event.previous.clone().filter(|_| self.previous);
        Some(wire::Event {
            r#type: kind.into(),
            kv: Some(kv::key_value(event.kv.clone(), false)),
            prev_kv: previous.map(|kv| kv::key_value(kv, false)),
        })
    }
}

/// Forwards the items of one watch, and its end, to the stream.
async fn bring(id: i64, mut items: mpsc::Receiver<WatchItem>, to: mpsc::Sender<Batch>) {
    let mut batch = vec![];
    while items.recv_many(&mut batch, BATCH).await > 0 {
        let is_last = matches!(batch.last(), Some(WatchItem::Compacted(_)));
        if to.send((id, std::mem::take(&mut batch))).await.is_err() || is_last {
            return;
        }
    }
    // An error means that the stream has ended first.
    let _ = to.send((id, batch)).await;
}
