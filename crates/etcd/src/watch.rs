//! One watch: a reader of a [`Hub`](crate::hub::Hub), or, while it lacks more than the hub has, of its own
//! stream.
//!
//! ```text
//! joined ──too slow, or the hub has a gap ──────► behind
//!    ▲                                              │ own stream from the next revision on
//!    └─────────the hub has the missing events───────┘ (compacted: the watch ends)
//! ```
//!
//! Invariants: items come in revision order, all events of one revision in one item (etcd splits a
//! revision only on request); `Progress(r)` is sent only after etcd reported that everything up to `r`
//! was sent. A broken stream is reopened at the same position.

use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use futures::StreamExt;
use store::{Event, KeyRange, Revision, WatchItem};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::convert;
use crate::hub::{Hub, Joined, seen_range};
use crate::messages as wire;
use crate::rpc::{self, Rpc, Source};

/// etcd does not answer a progress request while the watch lags: repeat it after this time. Upstream:
/// 100 ms.
pub(crate) const ASK_AGAIN: Duration = Duration::from_millis(100);
pub(crate) const RECONNECT_FIRST: Duration = Duration::from_millis(50);
pub(crate) const RECONNECT_CEILING: Duration = Duration::from_secs(2);

/// An open stream.
pub(crate) struct Link {
    /// Holds the create request and at most one progress request.
    requests: mpsc::Sender<wire::WatchRequest>,
    pub answers: Streaming<wire::WatchResponse>,
    pub source: Source,
}

impl Link {
    /// Requests progress.
    pub fn ask(&self) {
        let call = wire::WatchCall::Progress(wire::WatchProgressRequest {});
        // Full: a request is already queued. Closed: the stream is about to report that.
        let _ = self.requests.try_send(wire::WatchRequest { call: Some(call) });
    }
}

pub(crate) enum Opened {
    Yes(Box<Link>),
    /// The start is below this floor.
    Compacted(Revision),
}

/// An answer of a stream.
pub(crate) enum Said {
    /// By revision.
    Events(Vec<(Revision, Vec<Event>)>),
    /// Everything up to here was sent.
    Reached(Revision),
    Compacted(Revision),
}

impl Said {
    pub fn of(answer: Option<Result<wire::WatchResponse, Status>>) -> Result<Self, Status> {
        let ended = || Err(Status::unavailable("the watch stream ended"));
        let answer = answer.unwrap_or_else(ended)?;
        if answer.compact_revision > 0 {
            return Ok(Self::Compacted(convert::revision(answer.compact_revision)));
        }
        if answer.canceled {
            return Err(Status::unavailable(answer.cancel_reason));
        }
        if answer.events.is_empty() && !answer.created {
            return Ok(Self::Reached(convert::at(answer.header.as_ref())));
        }
        let mut changes: Vec<(Revision, Vec<Event>)> = vec![];
        for event in answer.events.into_iter().map(convert::event) {
            match changes.last_mut() {
                Some((revision, events)) if *revision == event.kv.mod_revision => {
                    events.push(event);
                }
                _ => changes.push((event.kv.mod_revision, vec![event])),
            }
        }
        Ok(Self::Events(changes))
    }
}

/// Why a reader stops its current work.
enum End {
    /// The watch was dropped, or its end was reported.
    Over,
    Broken(Status),
}

pub(crate) struct Reader {
    pub hub: Arc<Hub>,
    /// For its own streams. It uses another connection than the hub, because a slowly read stream delays the
    /// others of its connection.
    pub history: Rpc,
    pub range: KeyRange,
    /// The first revision that is still to be delivered, or the future one at which the watch begins.
    pub next: Revision,
    /// Everything up to here has been delivered, which may be more than the hub has.
    pub delivered: Revision,
    /// The minimum of a `Progress` that it must send.
    pub owes: Option<Revision>,
    pub items: mpsc::Sender<WatchItem>,
    pub asked: mpsc::Receiver<()>,
}

impl Reader {
    pub async fn run(mut self) {
        let mut backoff = Backoff::new(RECONNECT_FIRST, RECONNECT_CEILING).with_jitter(0.5);
        loop {
            let ended = match self.hub.join(&self.range, self.next, self.owes) {
                Some(joined) => self.follow(joined).await,
                None => self.catch_up().await,
            };
            match ended {
                Ok(()) => backoff.reset(),
                Err(End::Over) => return,
                Err(End::Broken(status)) => {
                    let delay = backoff.step();
                    tracing::debug!(%status, ?delay, "an etcd watch broke; reconnecting");
                    tokio::select! {
                        () = self.items.closed() => return,
                        () = tokio::time::sleep(delay) => {}
                    }
                }
            }
        }
    }

    /// Delivers the hub's items, until the hub drops this reader.
    async fn follow(&mut self, joined: Joined) -> Result<(), End> {
        let Joined { missed, mut feed } = joined;
        for (revision, events) in missed {
            self.events(revision, events).await?;
        }
        let mut asks = true;
        loop {
            tokio::select! {
                biased;
                () = self.items.closed() => return Err(End::Over),
                item = feed.items.recv() => match item {
                    Some(WatchItem::Events(revision, events)) => {
                        self.events(revision, events).await?;
                    }
                    Some(WatchItem::Progress(revision)) => self.progress(revision).await?,
                    Some(WatchItem::Compacted(_)) | None => {
                        // A watch that has caught up again sends progress.
                        self.owes = Some(self.hub.heard());
                        return Ok(());
                    }
                },
                asked = self.asked.recv(), if asks => match asked {
                    Some(()) => {
                        let target = self.hub.heard();
                        self.owes = Some(target);
                        feed.want(target);
                    }
                    None => asks = false,
                },
            }
        }
    }

    /// Reads history from its own stream, until the hub has the missing events.
    async fn catch_up(&mut self) -> Result<(), End> {
        let is_old = self.hub.is_old();
        let range = seen_range(&self.range, is_old);
        let mut link = match open(&self.history, &range, self.next).await {
            Ok(Opened::Yes(link)) => link,
            Ok(Opened::Compacted(floor)) => return self.say(WatchItem::Compacted(floor)).await,
            Err(status) => return Err(End::Broken(status)),
        };
        let mut asks = true;
        while !self.hub.covers(self.next) {
            if !is_old {
                link.ask();
            }
            tokio::select! {
                biased;
                () = self.items.closed() => return Err(End::Over),
                answer = link.answers.next() => match Said::of(answer).map_err(End::Broken)? {
                    Said::Events(changes) => self.changes(changes).await?,
                    Said::Reached(revision) if !is_old => self.progress(revision).await?,
                    Said::Reached(_) => {}
                    Said::Compacted(floor) => return self.say(WatchItem::Compacted(floor)).await,
                },
                asked = self.asked.recv(), if asks => match asked {
                    Some(()) => self.owes = Some(self.hub.heard()),
                    None => asks = false,
                },
                status = link.source.is_silent() => return Err(End::Broken(status)),
                () = tokio::time::sleep(ASK_AGAIN) => {}
            }
        }
        Ok(())
    }

    /// Handles changes of a stream whose range may be larger than the watch's.
    async fn changes(&mut self, changes: Vec<(Revision, Vec<Event>)>) -> Result<(), End> {
        for (revision, mut events) in changes {
            events.retain(|event| self.range.contains(&event.kv.key));
            if events.is_empty() {
                self.pass(revision);
            } else {
                self.events(revision, events.into()).await?;
            }
        }
        Ok(())
    }

    async fn events(&mut self, revision: Revision, events: Arc<[Event]>) -> Result<(), End> {
        if revision < self.next {
            return Ok(());
        }
        self.pass(revision);
        self.say(WatchItem::Events(revision, events)).await
    }

    fn pass(&mut self, revision: Revision) {
        self.delivered = self.delivered.max(revision);
        self.next = self.next.max(Revision(revision.0 + 1));
    }

    async fn progress(&mut self, revision: Revision) -> Result<(), End> {
        self.pass(revision);
        if self.owes.is_none_or(|target| target > self.delivered) {
            return Ok(());
        }
        self.owes = None;
        self.say(WatchItem::Progress(self.delivered)).await
    }

    async fn say(&self, item: WatchItem) -> Result<(), End> {
        let over = matches!(item, WatchItem::Compacted(_));
        match self.items.send(item).await {
            Ok(()) if !over => Ok(()),
            _ => Err(End::Over),
        }
    }
}

pub(crate) async fn open(rpc: &Rpc, range: &KeyRange, start: Revision) -> Result<Opened, Status> {
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
    let rpc::Opened { mut answers, source } =
        rpc.stream::<_, wire::WatchResponse>("/etcdserverpb.Watch/Watch", stream).await?;
    let ended = || Err(Status::unavailable("the watch stream ended"));
    let first = tokio::time::timeout(rpc.patience().open(), answers.next()).await;
    let first = first.map_err(|_| source.fell_silent())?.unwrap_or_else(ended)?;
    if first.compact_revision > 0 {
        return Ok(Opened::Compacted(convert::revision(first.compact_revision)));
    }
    if first.canceled || !first.created {
        return Err(Status::unavailable(first.cancel_reason));
    }
    Ok(Opened::Yes(Box::new(Link { requests, answers, source })))
}

/// The oldest revision that etcd keeps. etcd reports it only to watches, so this opens a watch from
/// revision 1.
pub(crate) async fn floor(rpc: &Rpc) -> Result<Revision, Status> {
    const FIRST: Revision = Revision(1);
    let key = bytes::Bytes::from_static(b"\0");
    let first = wire::RangeRequest { key: key.clone(), revision: 1, ..Default::default() };
    let found: Result<wire::RangeResponse, _> = rpc.call("/etcdserverpb.KV/Range", first).await;
    match found {
        Ok(_) => return Ok(FIRST),
        Err(status) if !convert::says_compacted(&status) => return Err(status),
        Err(_) => {}
    }
    let mut link = match open(rpc, &KeyRange::one(key), FIRST).await? {
        Opened::Compacted(floor) => return Ok(floor),
        Opened::Yes(link) => link,
    };
    let told = async {
        loop {
            if let Said::Compacted(floor) = Said::of(link.answers.next().await)? {
                return Ok(floor);
            }
        }
    };
    tokio::time::timeout(rpc.patience().open(), told).await.unwrap_or_else(|_| {
        Err(Status::deadline_exceeded("etcd did not report its oldest revision"))
    })
}
