//! Events that people read with `kubectl describe`.
//!
//! In: (object, type, reason, message) from components, without waiting. Out: core/v1 Events,
//! written by one task. Upstream: `client-go/tools/record`: equal events become a count, similar
//! ones are combined after ten in ten minutes, a source may write 25 about one object and then one
//! per five minutes.
//!
//! Invariants: recording never blocks and never fails its caller; the queue and every table are
//! bounded; an event that cannot be written after twelve tries is dropped with a log line.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use lru::LruCache;
use machinery::{ObjectMeta, Time};
use serde_json::json;
use tokio::sync::mpsc;

use crate::client::{Client, Error, ErrorExt};
use crate::{Kind, Patch, PatchParams, PostParams};

const QUEUED: usize = 1000;
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4096).expect("positive");
const SIMILAR_LIMIT: usize = 10;
const SIMILAR_SECONDS: i64 = 600;
const BURST: f64 = 25.0;
const PER_SECOND: f64 = 1.0 / 300.0;
const TRIES: usize = 12;
const BETWEEN_TRIES: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventType {
    Normal,
    Warning,
}

impl EventType {
    fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// Records events of one component. Cheap to clone.
#[derive(Clone)]
pub struct EventRecorder {
    source: Arc<EventSource>,
    queue: mpsc::Sender<Record>,
}

struct Record {
    source: Arc<EventSource>,
    about: ObjectReference,
    kind: EventType,
    reason: String,
    message: String,
    at: Timestamp,
}

impl EventRecorder {
    /// `component` as upstream names it (`deployment-controller`, `kubelet`); `host` for those that
    /// run per node. The writer runs as a task of `tasks`.
    pub fn new(client: Client, tasks: &Tasks, component: &str, host: Option<&str>) -> Self {
        let (queue, records) = mpsc::channel(QUEUED);
        tasks.spawn("events", write_all(client, records));
        Self { source: source(component, host), queue }
    }

    /// The same writer under another component's name.
    pub fn for_component(&self, component: &str) -> Self {
        Self { source: source(component, self.source.host.as_deref()), queue: self.queue.clone() }
    }

    /// An event about an object.
    pub fn event<T: Kind>(
        &self,
        about: &T,
        kind: EventType,
        reason: &str,
        message: impl Into<String>,
    ) {
        self.event_about(reference(about), kind, reason, message);
    }

    /// An event about the object of a reference. Its `field_path` may name a container.
    pub fn event_about(
        &self,
        about: ObjectReference,
        kind: EventType,
        reason: &str,
        message: impl Into<String>,
    ) {
        let record = Record {
            source: self.source.clone(),
            about,
            kind,
            reason: reason.into(),
            message: message.into(),
            at: base::clock::now_seconds(),
        };
        if self.queue.try_send(record).is_err() {
            tracing::debug!(reason, "dropped an event: the queue is full");
        }
    }
}

fn source(component: &str, host: Option<&str>) -> Arc<EventSource> {
    Arc::new(EventSource { component: Some(component.into()), host: host.map(Into::into) })
}

/// An object reference, as in events, bindings and endpoints.
pub fn reference<T: Kind>(object: &T) -> ObjectReference {
    let meta = object.metadata();
    ObjectReference {
        api_version: Some(T::API_VERSION.into()),
        kind: Some(T::KIND.into()),
        name: meta.name.clone(),
        namespace: meta.namespace.clone(),
        uid: meta.uid.clone(),
        resource_version: meta.resource_version.clone(),
        field_path: None,
    }
}

async fn write_all(client: Client, mut records: mpsc::Receiver<Record>) {
    let mut correlator = Correlator::new();
    while let Some(record) = records.recv().await {
        let Some(write) = correlator.correlate(event_of(&record), base::clock::now()) else {
            continue;
        };
        for attempt in 1.. {
            match send(&client, &write).await {
                Ok(written) => {
                    correlator.written(&write, &written);
                    break;
                }
                // The server refuses the event. Retries are pointless.
                Err(error) if error.code() != 0 && error.code() != 429 && error.code() < 500 => {
                    let reason = write.event.reason.as_deref();
                    tracing::debug!(reason, error = error.text(), "the server refused an event");
                    break;
                }
                Err(error) if attempt >= TRIES => {
                    tracing::warn!(error = error.text(), "dropped an event: failed to write it");
                    break;
                }
                Err(_) => tokio::time::sleep(BETWEEN_TRIES).await,
            }
        }
    }
}

async fn send(client: &Client, write: &Write) -> Result<Event, Error> {
    let event = &write.event;
    let api = client.api::<Event>(event.metadata.namespace.as_deref());
    if write.known {
        let patch = json!({
            "count": event.count, "lastTimestamp": event.last_timestamp, "message": event.message,
        });
        let name = event.metadata.name.as_deref().unwrap_or_default();
        match api.patch(name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
            Err(error) if error.is_not_found() => {} // expired: create it again
            done => return done,
        }
    }
    let fresh = Event {
        metadata: ObjectMeta { resource_version: None, ..event.metadata.clone() },
        ..event.clone()
    };
    api.create(&PostParams::default(), &fresh).await
}

fn event_of(record: &Record) -> Event {
    let about = &record.about;
    let namespace = about.namespace.clone().filter(|namespace| !namespace.is_empty());
    let time = Some(Time(record.at));
    let nanos = base::clock::now().as_nanosecond();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{}.{nanos:x}", about.name.as_deref().unwrap_or_default())),
            namespace: Some(namespace.unwrap_or_else(|| "default".into())),
            ..Default::default()
        },
        involved_object: about.clone(),
        reason: Some(record.reason.clone()),
        message: Some(record.message.clone()),
        first_timestamp: time.clone(),
        last_timestamp: time,
        count: Some(1),
        type_: Some(record.kind.as_str().into()),
        source: Some((*record.source).clone()),
        reporting_component: record.source.component.clone(),
        reporting_instance: Some(record.source.host.clone().unwrap_or_default()),
        ..Default::default()
    }
}

/// The write of an event: a new object, or a higher count of an existing one.
#[derive(Clone, Debug)]
struct Write {
    event: Event,
    known: bool,
    key: String,
}

struct Seen {
    count: i32,
    first: Option<Time>,
    name: String,
}

struct Similar {
    messages: BTreeSet<String>,
    last: Timestamp,
}

struct Bucket {
    tokens: f64,
    last: Timestamp,
}

/// Decides between create, count and drop of an event. Pure except for its memory.
struct Correlator {
    similar: LruCache<String, Similar>,
    seen: LruCache<String, Seen>,
    buckets: LruCache<String, Bucket>,
}

impl Correlator {
    fn new() -> Self {
        Self {
            similar: crate::cache::bounded(REMEMBERED),
            seen: crate::cache::bounded(REMEMBERED),
            buckets: crate::cache::bounded(REMEMBERED),
        }
    }

    fn correlate(&mut self, mut event: Event, now: Timestamp) -> Option<Write> {
        let spam = spam_key(&event);
        let key = self.aggregate(&mut event, now);
        let known = match self.seen.get(&key) {
            Some(seen) => {
                event.count = Some(seen.count + 1);
                event.first_timestamp = seen.first.clone();
                event.metadata.name = Some(seen.name.clone());
                true
            }
            None => false,
        };
        let seen = Seen {
            count: event.count.unwrap_or(1),
            first: event.first_timestamp.clone(),
            name: event.metadata.name.clone().unwrap_or_default(),
        };
        self.seen.put(key.clone(), seen);
        self.allow(spam, now).then_some(Write { event, known, key })
    }

    /// The server may have changed the name or the count.
    fn written(&mut self, write: &Write, event: &Event) {
        if let Some(seen) = self.seen.get_mut(&write.key) {
            seen.name = event.metadata.name.clone().unwrap_or_default();
            seen.count = event.count.unwrap_or(seen.count);
        }
    }

    /// Combines events that differ in the message only, once there are many. Returns the key under
    /// which equal events are counted.
    fn aggregate(&mut self, event: &mut Event, now: Timestamp) -> String {
        let group = group_key(event);
        let message = event.message.clone().unwrap_or_default();
        let similar = self
            .similar
            .get_or_insert_mut(group.clone(), || Similar { messages: BTreeSet::new(), last: now });
        if now.as_second() - similar.last.as_second() > SIMILAR_SECONDS {
            similar.messages.clear();
        }
        similar.last = now;
        similar.messages.insert(message.clone());
        if similar.messages.len() < SIMILAR_LIMIT {
            return format!("{group}\n{message}");
        }
        similar.messages.pop_first();
        event.message = Some(format!("(combined from similar events): {message}"));
        group
    }

    fn allow(&mut self, key: String, now: Timestamp) -> bool {
        let bucket = self.buckets.get_or_insert_mut(key, || Bucket { tokens: BURST, last: now });
        let elapsed = (now.as_millisecond() - bucket.last.as_millisecond()) as f64 / 1000.0;
        bucket.tokens = (bucket.tokens + elapsed * PER_SECOND).min(BURST);
        bucket.last = now;
        let allowed = bucket.tokens >= 1.0;
        if allowed {
            bucket.tokens -= 1.0;
        }
        allowed
    }
}

fn spam_key(event: &Event) -> String {
    let source = event.source.clone().unwrap_or_default();
    let about = &event.involved_object;
    let parts = [
        &source.component,
        &source.host,
        &about.kind,
        &about.namespace,
        &about.name,
        &about.uid,
        &about.api_version,
    ];
    parts.map(|part| part.as_deref().unwrap_or_default()).join("\n")
}

fn group_key(event: &Event) -> String {
    let parts = [&event.involved_object.field_path, &event.type_, &event.reason];
    let rest = parts.map(|part| part.as_deref().unwrap_or_default()).join("\n");
    format!("{}\n{rest}", spam_key(event))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(message: &str, at: i64) -> Event {
        event_of(&Record {
            source: source("test", None),
            about: ObjectReference { name: Some("web".into()), ..Default::default() },
            kind: EventType::Normal,
            reason: "Tested".into(),
            message: message.into(),
            at: Timestamp::from_second(at).unwrap(),
        })
    }

    #[test]
    fn equal_events_are_counted_under_the_first_name() {
        let mut correlator = Correlator::new();
        let now = Timestamp::from_second(1000).unwrap();
        let first = correlator.correlate(event("a", 1000), now).unwrap();
        assert!(!first.known);
        let second = correlator.correlate(event("a", 1001), now).unwrap();
        assert!(second.known);
        assert_eq!(second.event.count, Some(2));
        assert_eq!(second.event.metadata.name, first.event.metadata.name);
        assert_eq!(second.event.first_timestamp, first.event.first_timestamp);
        assert_ne!(second.event.last_timestamp, first.event.last_timestamp);
    }

    #[test]
    fn similar_events_are_combined_and_floods_are_cut() {
        let mut correlator = Correlator::new();
        let now = Timestamp::from_second(1000).unwrap();
        let writes: Vec<_> =
            (0..30).map(|n| correlator.correlate(event(&format!("n{n:02}"), 1000), now)).collect();
        assert!(!writes[8].as_ref().unwrap().known);
        let tenth = writes[9].as_ref().unwrap();
        assert_eq!(tenth.event.message.as_deref(), Some("(combined from similar events): n09"));
        assert!(!tenth.known);
        assert!(writes[10].as_ref().unwrap().known);
        assert!(writes[24].is_some() && writes[25].is_none());
        let later = Timestamp::from_second(1301).unwrap();
        assert!(correlator.correlate(event("late", 1301), later).is_some());
    }
}
