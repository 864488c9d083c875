//! Backends of the audit log, and whether requests wait for them.
//!
//! In: events as bytes. Out: lines or posts, at once or in batches.
//!
//! Invariants: a queue is bounded; an event that finds it full is dropped and counted. In the blocking
//! modes, a request continues only when its event is written (or, unless strict, could not be written).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::log_limit::LogLimit;
use base::task::{Stop, Tasks};
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::log::Log;
use super::webhook::Webhook;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Batch,
    Blocking,
    /// Refuses a request if its first event cannot be written.
    BlockingStrict,
}

/// Upstream's `--audit-*-batch-*`.
#[derive(Clone, Debug)]
pub struct Batching {
    pub buffer: usize,
    pub max_size: usize,
    pub max_wait: Duration,
    /// Batches per second, and burst; `None` for no limit.
    pub throttle: Option<(f32, u32)>,
}

/// Upstream's `--audit-*-truncate-*`, in bytes of JSON.
#[derive(Clone, Copy, Debug)]
pub struct Truncation {
    /// A larger event loses its objects, or is dropped.
    pub max_event: usize,
    /// Larger batches are split. Deviation: upstream checks events one by one before it batches them, so its
    /// flag has no effect.
    pub max_batch: usize,
}

/// The writer of a backend.
pub enum Writer {
    Log(Arc<Log>),
    Webhook(Webhook),
}

impl Writer {
    fn name(&self) -> &'static str {
        match self {
            Self::Log(_) => "log",
            Self::Webhook(_) => "webhook",
        }
    }

    async fn write(&self, events: &[Bytes]) -> Result<(), String> {
        match self {
            Self::Log(log) => {
                let mut lines = Vec::with_capacity(events.iter().map(|one| one.len() + 1).sum());
                for event in events {
                    lines.extend_from_slice(event);
                    lines.push(b'\n');
                }
                let log = log.clone();
                let written = tokio::task::spawn_blocking(move || append(&log, &lines)).await;
                written.unwrap_or_else(|_| Err("a thread died".into()))
            }
            Self::Webhook(webhook) => webhook.send(events).await,
        }
    }
}

fn append(log: &Log, lines: &[u8]) -> Result<(), String> {
    let is_full = log.write(lines).map_err(|error| error.to_string())?;
    // A failure with old files must not count the new events as lost.
    if let Some(error) = is_full.then(|| log.tidy()).and_then(Result::err) {
        tracing::warn!(%error, "failed to remove or compress old audit logs");
    }
    Ok(())
}

/// The number of events that were not written.
#[derive(Default)]
pub(super) struct Lost {
    count: AtomicU64,
    said: LogLimit<()>,
}

impl Lost {
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    pub fn note(&self, count: u64, plugin: &str, error: &str) {
        let lost = self.count.fetch_add(count, Ordering::Relaxed) + count;
        if self.said.ask(()).is_some() {
            tracing::error!(plugin, error, lost, "audit events are lost");
        }
    }
}

pub struct Backend {
    writer: Arc<Writer>,
    mode: Mode,
    /// Whether events are in the legacy text format.
    pub is_legacy: bool,
    truncation: Option<Truncation>,
    queue: Option<mpsc::Sender<Bytes>>,
    lost: Arc<Lost>,
}

impl Backend {
    pub fn new(
        writer: Writer,
        mode: Mode,
        batching: Batching,
        is_legacy: bool,
        truncation: Option<Truncation>,
        tasks: &Tasks,
    ) -> Self {
        let (writer, lost) = (Arc::new(writer), Arc::<Lost>::default());
        let queue = (mode == Mode::Batch).then(|| {
            let (queue, events) = mpsc::channel(batching.buffer.max(1));
            let limit = truncation.map_or(usize::MAX, |truncation| truncation.max_batch);
            let sender = Sender { writer: writer.clone(), lost: lost.clone(), limit };
            tasks
                .spawn_graceful("audit batches", sender.run(events, batching, tasks.stop_signal()));
            queue
        });
        Self { writer, mode, is_legacy, truncation, queue, lost }
    }

    /// Whether an event is too large, as JSON with its newline.
    pub fn refuses(&self, json: &[u8]) -> bool {
        self.truncation.is_some_and(|truncation| json.len() + 1 > truncation.max_event)
    }

    pub fn truncates(&self) -> bool {
        self.truncation.is_some()
    }

    pub fn name(&self) -> &'static str {
        self.writer.name()
    }

    /// The number of events that were not written.
    pub fn lost(&self) -> u64 {
        self.lost.count()
    }

    /// False only if the request must not continue.
    pub async fn take(&self, event: Bytes) -> bool {
        match &self.queue {
            Some(queue) => {
                if queue.try_send(event).is_err() {
                    self.lost.note(1, self.writer.name(), "audit buffer is full");
                }
                true
            }
            None => match self.writer.write(&[event]).await {
                Ok(()) => true,
                Err(error) => {
                    self.lost.note(1, self.writer.name(), &error);
                    self.mode != Mode::BlockingStrict
                }
            },
        }
    }
}

/// The receiving end of a queue.
struct Sender {
    writer: Arc<Writer>,
    lost: Arc<Lost>,
    /// Maximum bytes of a batch.
    limit: usize,
}

impl Sender {
    /// Batches and sends until the group stops, and then sends the rest.
    async fn run(self, mut events: mpsc::Receiver<Bytes>, batching: Batching, stop: Stop) {
        let mut throttle = Throttle::new(batching.throttle);
        loop {
            let mut batch = gather(&mut events, &batching, &stop).await;
            if batch.is_empty() {
                return;
            }
            while !batch.is_empty() {
                let rest = batch.split_off(fitting(&batch, self.limit));
                throttle.wait(&stop).await;
                match stop.or(self.writer.write(&batch)).await {
                    Some(outcome) => self.note(outcome, batch.len()),
                    None => {
                        batch.extend(rest);
                        return self.last(drain(&mut events, batch)).await;
                    }
                }
                batch = rest;
            }
        }
    }

    /// Sends the rest once, as long as the group waits.
    async fn last(&self, mut left: Vec<Bytes>) {
        while !left.is_empty() {
            let rest = left.split_off(fitting(&left, self.limit));
            self.note(self.writer.write(&left).await, left.len());
            left = rest;
        }
    }

    fn note(&self, outcome: Result<(), String>, count: usize) {
        if let Err(error) = outcome {
            self.lost.note(count as u64, self.writer.name(), &error);
        }
    }
}

/// How many of the first events fit into the limit together; at least one.
fn fitting(batch: &[Bytes], limit: usize) -> usize {
    let mut size = 0;
    let is_within = |event: &&Bytes| {
        size += event.len() + 1;
        size <= limit
    };
    batch.iter().take_while(is_within).count().max(1).min(batch.len())
}

fn drain(events: &mut mpsc::Receiver<Bytes>, mut batch: Vec<Bytes>) -> Vec<Bytes> {
    while let Ok(event) = events.try_recv() {
        batch.push(event);
    }
    batch
}

/// As many events as fit into a batch, or arrive within its time after the first; empty at the end.
async fn gather(
    events: &mut mpsc::Receiver<Bytes>,
    batching: &Batching,
    stop: &Stop,
) -> Vec<Bytes> {
    let mut batch = vec![];
    match stop.or(events.recv()).await {
        Some(Some(event)) => batch.push(event),
        Some(None) => return batch,
        None => return drain(events, batch),
    }
    let deadline = Instant::now() + batching.max_wait;
    while batch.len() < batching.max_size {
        match stop.or(tokio::time::timeout_at(deadline, events.recv())).await {
            Some(Ok(Some(event))) => batch.push(event),
            Some(_) => break,
            None => return drain(events, batch),
        }
    }
    batch
}

/// A token bucket.
struct Throttle {
    rate: Option<(f32, u32)>,
    tokens: f32,
    at: Instant,
}

impl Throttle {
    fn new(rate: Option<(f32, u32)>) -> Self {
        let tokens = rate.map_or(0.0, |(_, burst)| burst as f32);
        Self { rate, tokens, at: Instant::now() }
    }

    async fn wait(&mut self, stop: &Stop) {
        let Some((rate, burst)) = self.rate else { return };
        let now = Instant::now();
        let earned = now.duration_since(self.at).as_secs_f32() * rate;
        self.tokens = (self.tokens + earned).min(burst as f32);
        self.at = now;
        if self.tokens < 1.0 {
            let pause = Duration::from_secs_f32((1.0 - self.tokens) / rate);
            let _ = stop.or(tokio::time::sleep(pause)).await;
            self.at = Instant::now();
            self.tokens = 1.0;
        }
        self.tokens -= 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batching(max_size: usize) -> Batching {
        Batching { buffer: 3, max_size, max_wait: Duration::from_secs(30), throttle: None }
    }

    fn events(count: usize) -> (mpsc::Sender<Bytes>, mpsc::Receiver<Bytes>) {
        let (sender, receiver) = mpsc::channel(16);
        for index in 0..count {
            sender.try_send(Bytes::from(index.to_string())).expect("there is room");
        }
        (sender, receiver)
    }

    #[tokio::test(start_paused = true)]
    async fn batches_end_by_size_and_by_time() {
        let tasks = Tasks::new("test");
        let (_sender, mut receiver) = events(5);
        let stop = tasks.stop_signal();
        assert_eq!(gather(&mut receiver, &batching(4), &stop).await.len(), 4);
        let begun = Instant::now();
        assert_eq!(gather(&mut receiver, &batching(4), &stop).await.len(), 1);
        assert_eq!(begun.elapsed(), Duration::from_secs(30));
        tasks.stop();
        assert!(gather(&mut receiver, &batching(4), &stop).await.is_empty());
    }

    #[test]
    fn batches_are_split_by_size() {
        let check = |sizes: &[usize], limit: usize, expected: usize| {
            let batch: Vec<Bytes> = sizes.iter().map(|size| vec![b'x'; *size].into()).collect();
            assert_eq!(fitting(&batch, limit), expected, "{sizes:?} {limit}");
        };
        check(&[9, 9, 9], 30, 3);
        check(&[9, 9, 9], 29, 2);
        check(&[99, 9], 10, 1);
        check(&[9], usize::MAX, 1);
        check(&[], 10, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn batches_are_throttled() {
        let tasks = Tasks::new("test");
        let stop = tasks.stop_signal();
        let mut throttle = Throttle::new(Some((10.0, 15)));
        let begun = Instant::now();
        for _ in 0..15 {
            throttle.wait(&stop).await;
        }
        assert!(begun.elapsed().is_zero(), "a burst passes");
        for _ in 0..10 {
            throttle.wait(&stop).await;
        }
        let took = begun.elapsed().as_secs_f32();
        assert!((0.9..1.2).contains(&took), "{took}");
    }
}
