//! One watch: a gRPC stream that is opened again, from the next revision, whenever it breaks.
//!
//! Invariants: items come in revision order, all events of one revision in one item (etcd never
//! splits a revision unless asked to); `Progress(r)` is said only after etcd said that everything up
//! to `r` was sent.

use std::time::Duration;

use base::backoff::Backoff;
use futures::StreamExt;
use store::{KeyRange, Revision, WatchItem, WatchRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::convert;
use crate::messages as wire;
use crate::rpc::Rpc;

/// etcd keeps silent when it is asked for progress while the watch is behind: ask again after this
/// long. Upstream: 100 ms.
const ASK_AGAIN: Duration = Duration::from_millis(100);
const RECONNECT_FIRST: Duration = Duration::from_millis(50);
const RECONNECT_CEILING: Duration = Duration::from_secs(2);

/// An open stream.
struct Link {
    /// Holds the create request and at most one progress request.
    requests: mpsc::Sender<wire::WatchRequest>,
    answers: Streaming<wire::WatchResponse>,
}

impl Link {
    /// Asks how far the stream is.
    fn ask(&self) {
        let call = wire::WatchCall::Progress(wire::WatchProgressRequest {});
        // Full: a request is on its way already. Closed: the stream is about to say so.
        let _ = self.requests.try_send(wire::WatchRequest { call: Some(call) });
    }
}

enum Opened {
    /// With etcd's revision when the watch began.
    Yes(Box<Link>, Revision),
    /// The start is below this floor.
    Compacted(Revision),
}

/// Why a stream came to its end.
enum End {
    /// Nobody listens any more, or the reader was told that it is over.
    Over,
    Broken(Status),
}

pub(crate) struct Running {
    rpc: Rpc,
    range: KeyRange,
    /// Everything below has been delivered.
    next: Revision,
    link: Option<Box<Link>>,
    /// The floor, when the watch was over before it began.
    floor: Option<Revision>,
    items: mpsc::Sender<WatchItem>,
    asked: mpsc::Receiver<()>,
    /// Owes a `Progress` once caught up.
    owes: bool,
    /// A `Progress` that is due at once: there was nothing to catch up with.
    due: Option<Revision>,
}

impl Running {
    /// Opens the stream: what is written after this returns is seen.
    pub async fn start(
        rpc: Rpc,
        request: WatchRequest,
        items: mpsc::Sender<WatchItem>,
        asked: mpsc::Receiver<()>,
    ) -> Result<Self, Status> {
        let start = request.start.unwrap_or_default();
        let mut running = Self {
            rpc,
            range: request.range,
            next: start,
            link: None,
            floor: None,
            items,
            asked,
            owes: false,
            due: None,
        };
        match open(&running.rpc, &running.range, start).await? {
            Opened::Yes(link, present) => {
                let after = Revision(present.0 + 1);
                // etcd does not speak of progress to a watch that starts after its present.
                running.owes = start.0 != 0 && start < after;
                running.due = (start == after).then_some(present);
                running.next = if start.0 == 0 { after } else { start };
                running.link = Some(link);
            }
            Opened::Compacted(floor) => running.floor = Some(floor),
        }
        Ok(running)
    }

    pub async fn run(mut self) {
        if let Some(floor) = self.floor {
            // An error: nobody listens.
            let _ = self.items.send(WatchItem::Compacted(floor)).await;
            return;
        }
        if let Some(revision) = self.due
            && self.say(WatchItem::Progress(revision)).await.is_err()
        {
            return;
        }
        let mut backoff = Backoff::new(RECONNECT_FIRST, RECONNECT_CEILING).with_jitter(0.5);
        loop {
            let ended = match self.link.take() {
                Some(link) => {
                    backoff.reset();
                    self.follow(link).await
                }
                None => self.reopen().await,
            };
            match ended {
                Ok(()) => {}
                Err(End::Over) => return,
                Err(End::Broken(status)) => {
                    let delay = backoff.step();
                    tracing::debug!(%status, ?delay, "an etcd watch broke and is opened again");
                    tokio::select! {
                        () = self.items.closed() => return,
                        () = tokio::time::sleep(delay) => {}
                    }
                }
            }
        }
    }

    async fn reopen(&mut self) -> Result<(), End> {
        match open(&self.rpc, &self.range, self.next).await.map_err(End::Broken)? {
            Opened::Yes(link, _) => {
                self.link = Some(link);
                Ok(())
            }
            Opened::Compacted(floor) => self.say(WatchItem::Compacted(floor)).await,
        }
    }

    /// Delivers what the stream brings until it ends.
    async fn follow(&mut self, mut link: Box<Link>) -> Result<(), End> {
        let mut asks = true;
        loop {
            if self.owes {
                link.ask();
            }
            tokio::select! {
                biased;
                () = self.items.closed() => return Err(End::Over),
                answer = link.answers.next() => {
                    let broken = || Err(Status::unavailable("the watch stream ended"));
                    let answer = answer.unwrap_or_else(broken).map_err(End::Broken)?;
                    self.deliver(answer).await?;
                }
                asked = self.asked.recv(), if asks => match asked {
                    Some(()) => self.owes = true,
                    None => asks = false,
                },
                () = tokio::time::sleep(ASK_AGAIN), if self.owes => {}
            }
        }
    }

    async fn deliver(&mut self, answer: wire::WatchResponse) -> Result<(), End> {
        if answer.compact_revision > 0 {
            self.say(WatchItem::Compacted(convert::revision(answer.compact_revision))).await?;
            return Err(End::Over);
        }
        if answer.canceled {
            return Err(End::Broken(Status::unavailable(answer.cancel_reason)));
        }
        if answer.events.is_empty() && !answer.created {
            return self.progress(convert::at(answer.header.as_ref())).await;
        }
        let events = answer.events.into_iter().map(convert::event).collect::<Vec<_>>();
        for events in events.chunk_by(|a, b| a.kv.mod_revision == b.kv.mod_revision) {
            let revision = events[0].kv.mod_revision;
            if revision >= self.next {
                self.next = Revision(revision.0 + 1);
                self.say(WatchItem::Events(revision, events.into())).await?;
            }
        }
        Ok(())
    }

    async fn progress(&mut self, revision: Revision) -> Result<(), End> {
        self.next = self.next.max(Revision(revision.0 + 1));
        if !std::mem::take(&mut self.owes) {
            return Ok(());
        }
        self.say(WatchItem::Progress(revision)).await
    }

    async fn say(&self, item: WatchItem) -> Result<(), End> {
        let over = matches!(item, WatchItem::Compacted(_));
        match self.items.send(item).await {
            Ok(()) if !over => Ok(()),
            _ => Err(End::Over),
        }
    }
}

async fn open(rpc: &Rpc, range: &KeyRange, start: Revision) -> Result<Opened, Status> {
    let create = wire::WatchCreateRequest {
        key: convert::start(range),
        range_end: convert::end(range),
        start_revision: convert::number(start),
        prev_kv: true,
        ..Default::default()
    };
    let (requests, receiver) = mpsc::channel(2);
    let call = wire::WatchCall::Create(create);
    requests.try_send(wire::WatchRequest { call: Some(call) }).expect("the channel is new");
    let stream = ReceiverStream::new(receiver);
    let mut answers: Streaming<wire::WatchResponse> =
        rpc.stream("/etcdserverpb.Watch/Watch", stream).await?;
    let ended = || Err(Status::unavailable("the watch stream ended"));
    let first = answers.next().await.unwrap_or_else(ended)?;
    if first.compact_revision > 0 {
        return Ok(Opened::Compacted(convert::revision(first.compact_revision)));
    }
    if first.canceled || !first.created {
        return Err(Status::unavailable(first.cancel_reason));
    }
    let present = convert::at(first.header.as_ref());
    Ok(Opened::Yes(Box::new(Link { requests, answers }), present))
}

/// The oldest revision that etcd keeps. It tells watches only, so one of the first revision is begun,
/// and asked how far it is, for the case that nothing was compacted yet.
pub(crate) async fn floor(rpc: &Rpc) -> Result<Revision, Status> {
    const FIRST: Revision = Revision(1);
    let range = KeyRange::one(bytes::Bytes::from_static(b"\0"));
    let mut link = match open(rpc, &range, FIRST).await? {
        Opened::Compacted(floor) => return Ok(floor),
        Opened::Yes(link, _) => link,
    };
    loop {
        link.ask();
        tokio::select! {
            answer = link.answers.next() => {
                let ended = || Err(Status::unavailable("the watch stream ended"));
                let floor = answer.unwrap_or_else(ended)?.compact_revision;
                return Ok(convert::revision(floor).max(FIRST));
            }
            () = tokio::time::sleep(ASK_AGAIN) => {}
        }
    }
}
