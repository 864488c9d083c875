//! Where events go, and whether requests wait for it.
//!
//! In: events as bytes. Out: lines or posts, at once or in batches.
//!
//! Invariants: a queue is bounded, and what finds it full is counted and dropped; in the modes that
//! block, a request goes on only when its event is written (or, unless strict, could not be).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

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
    /// A request whose first event cannot be written is refused.
    BlockingStrict,
}

/// Upstream's `--audit-*-batch-*`.
#[derive(Clone, Debug)]
pub struct Batching {
    pub buffer: usize,
    pub max_size: usize,
    pub max_wait: Duration,
    /// Batches per second, and how many may come at once; `None` for no limit.
    pub throttle: Option<(f32, u32)>,
}

/// What writes.
pub enum Writer {
    Log(Log),
    /// One event in upstream's older format per line.
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
                log.write(&lines).map_err(|error| error.to_string())
            }
            Self::Webhook(webhook) => webhook.send(events).await,
        }
    }
}

pub struct Backend {
    writer: Arc<Writer>,
    mode: Mode,
    /// Whether events come in the format for people.
    pub is_legacy: bool,
    queue: Option<mpsc::Sender<Bytes>>,
    lost: Arc<AtomicU64>,
}

impl Backend {
    pub fn new(
        writer: Writer,
        mode: Mode,
        batching: Batching,
        is_legacy: bool,
        tasks: &Tasks,
    ) -> Self {
        let (writer, lost) = (Arc::new(writer), Arc::new(AtomicU64::new(0)));
        let queue = (mode == Mode::Batch).then(|| {
            let (queue, events) = mpsc::channel(batching.buffer.max(1));
            let work = run(writer.clone(), events, batching, lost.clone(), tasks.stop_signal());
            tasks.spawn_graceful("audit batches", work);
            queue
        });
        Self { writer, mode, is_legacy, queue, lost }
    }

    pub fn name(&self) -> &'static str {
        self.writer.name()
    }

    /// Events that were not written.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// False only where a request must not go on.
    pub async fn take(&self, event: Bytes) -> bool {
        match &self.queue {
            Some(queue) => {
                if queue.try_send(event).is_err() {
                    note_lost(&self.lost, 1, self.writer.name(), "audit buffer is full");
                }
                true
            }
            None => match self.writer.write(&[event]).await {
                Ok(()) => true,
                Err(error) => {
                    note_lost(&self.lost, 1, self.writer.name(), &error);
                    self.mode != Mode::BlockingStrict
                }
            },
        }
    }
}

fn note_lost(lost: &AtomicU64, count: u64, plugin: &str, error: &str) {
    // One line for the first of many: the counter tells the rest.
    let before = lost.fetch_add(count, Ordering::Relaxed);
    if before == 0 {
        tracing::error!(plugin, error, "audit events are lost");
    } else {
        tracing::debug!(plugin, error, count, "audit events are lost");
    }
}

/// Gathers and sends until the group stops, and then sends what is left.
async fn run(
    writer: Arc<Writer>,
    mut events: mpsc::Receiver<Bytes>,
    batching: Batching,
    lost: Arc<AtomicU64>,
    stop: Stop,
) {
    let mut throttle = Throttle::new(batching.throttle);
    loop {
        let batch = gather(&mut events, &batching, &stop).await;
        if batch.is_empty() {
            return;
        }
        throttle.wait(&stop).await;
        let count = batch.len() as u64;
        match stop.or(writer.write(&batch)).await {
            Some(Ok(())) => {}
            Some(Err(error)) => note_lost(&lost, count, writer.name(), &error),
            // The last word: one try, as long as the group waits.
            None => {
                let left = drain(&mut events, batch);
                if let Err(error) = writer.write(&left).await {
                    note_lost(&lost, left.len() as u64, writer.name(), &error);
                }
                return;
            }
        }
    }
}

fn drain(events: &mut mpsc::Receiver<Bytes>, mut batch: Vec<Bytes>) -> Vec<Bytes> {
    while let Ok(event) = events.try_recv() {
        batch.push(event);
    }
    batch
}

/// As many events as a batch takes, or as come within its time after the first; nothing at the end.
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
