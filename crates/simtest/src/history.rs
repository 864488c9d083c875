//! Everything that the store held, write by write, and who wrote it.
//!
//! In: transactions on their way to the simulated store. Out: the state after each, a hash of all of them, the
//! first law that one of them violated, the trace for people.
//!
//! Invariant: a write is noted in the same poll that made it, so that the order here is the store's. Cost: a
//! write is parsed once, and looked at by each law.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::Value;
use sha2::{Digest, Sha256};
use store::{
    Lease, LeaseId, Op, OpResult, RangeRequest, RangeResponse, Revision, Snapshot, Status, Store,
    Txn, TxnResponse, Watch, WatchRequest,
};
use tokio::time::Instant;

use crate::laws::{Law, View};

/// Kinds whose content no law reads.
const OPAQUE: &[&str] =
    &["events", "leases", "masterleases", "clusterroles", "clusterrolebindings"];

/// The sender of a request.
#[derive(Debug, Default)]
pub struct Actor {
    pub part: String,
    /// The last word of the user: `replicaset-controller`.
    pub account: String,
    /// Method and path.
    pub request: String,
    /// The resourceVersion that a replacement is conditional on.
    pub version: Option<u64>,
}

tokio::task_local! {
    /// The request that the server works on; its own work has none.
    pub static ACTOR: Arc<Actor>;
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The place below `/registry`, mostly the plural: `pods`, `minions`, `services/specs`.
    pub resource: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    pub name: String,
}

impl Key {
    pub fn new(resource: &str, namespace: &str, name: &str) -> Self {
        Self { resource: resource.into(), namespace: namespace.into(), name: name.into() }
    }

    fn parse(key: &[u8]) -> Self {
        let text = String::from_utf8_lossy(key);
        let rest = text.strip_prefix("/registry/").unwrap_or(&text);
        let (place, rest) = match rest.strip_prefix("services/") {
            Some(rest) => {
                let (kind, rest) = rest.split_once('/').unwrap_or((rest, ""));
                (format!("services/{kind}"), rest)
            }
            None => {
                let (place, rest) = rest.split_once('/').unwrap_or((rest, ""));
                (place.to_owned(), rest)
            }
        };
        let (namespace, name) = rest.split_once('/').unwrap_or(("", rest));
        Self { resource: place, namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slash = if self.namespace.is_empty() { "" } else { "/" };
        write!(f, "{} {}{slash}{}", self.resource, self.namespace, self.name)
    }
}

/// One change of one object.
#[derive(Clone, Debug)]
pub struct Event {
    pub revision: u64,
    pub at: Duration,
    pub key: Key,
    pub before: Option<Arc<Value>>,
    pub after: Option<Arc<Value>>,
    /// The revision of the state before.
    pub was: u64,
    pub actor: Arc<Actor>,
}

/// The objects of a moment.
#[derive(Clone, Default)]
pub struct State(BTreeMap<Key, Held>);

/// An object, and the revision that wrote it.
#[derive(Clone)]
struct Held {
    value: Arc<Value>,
    revision: u64,
}

impl State {
    pub fn all<'a>(&'a self, resource: &'a str) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let from = Key::new(resource, "", "");
        let range = (Bound::Included(from), Bound::Unbounded);
        let held = self.0.range(range).take_while(move |(key, _)| key.resource == resource);
        held.map(|(key, held)| (key, &held.value))
    }

    /// Of one namespace.
    pub fn within<'a>(
        &'a self,
        resource: &'a str,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Arc<Value>)> {
        let range = (Bound::Included(Key::new(resource, namespace, "")), Bound::Unbounded);
        let here = move |key: &Key| key.resource == resource && key.namespace == namespace;
        self.0
            .range(range)
            .take_while(move |(key, _)| here(key))
            .map(|(key, held)| (key, &held.value))
    }

    pub fn get(&self, resource: &str, namespace: &str, name: &str) -> Option<&Arc<Value>> {
        self.0.get(&Key::new(resource, namespace, name)).map(|held| &held.value)
    }

    /// The revisions of all objects of a resource.
    pub fn revisions(&self, resource: &str) -> BTreeMap<Key, u64> {
        let own = self.0.iter().filter(|(key, _)| key.resource == resource);
        own.map(|(key, held)| (key.clone(), held.revision)).collect()
    }

    pub fn every(&self) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        self.0.iter().map(|(key, held)| (key, &held.value))
    }
}

/// A law that did not hold.
#[derive(Clone, Debug)]
pub struct Violation {
    pub law: &'static str,
    pub text: String,
}

enum Entry {
    Event(Event),
    Remark(Duration, String),
}

/// What laws excuse: the outcome of a write that its writer never learnt.
#[derive(Clone, Debug)]
pub struct Lost {
    pub at: Duration,
    pub request: String,
}

/// See the module. Clones share.
#[derive(Clone)]
pub struct History(Arc<Mutex<Inner>>);

struct Inner {
    begun: Instant,
    state: State,
    log: Vec<Entry>,
    hash: Sha256,
    laws: Vec<Box<dyn Law>>,
    violation: Option<Violation>,
    lost: Vec<Lost>,
    /// Parts that were killed, cut off or made to give up leading, and when.
    upsets: Vec<(Duration, String)>,
    writes: u64,
    /// The last write that is not a sign of life.
    last_change: Duration,
}

impl History {
    pub fn new(laws: Vec<Box<dyn Law>>) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            begun: Instant::now(),
            state: State::default(),
            log: vec![],
            hash: Sha256::new(),
            laws,
            violation: None,
            lost: vec![],
            upsets: vec![],
            writes: 0,
            last_change: Duration::ZERO,
        })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("no law panics")
    }

    pub fn state(&self) -> State {
        self.inner().state.clone()
    }

    pub fn violation(&self) -> Option<Violation> {
        self.inner().violation.clone()
    }

    /// The first one counts.
    pub fn violate(&self, law: &'static str, text: String) {
        self.inner().violation.get_or_insert(Violation { law, text });
    }

    /// From a panic's hook. A panic of a law, which holds the lock, ends the round by itself.
    pub fn violate_by_panic(&self, text: String) {
        if let Ok(mut inner) = self.0.try_lock() {
            inner.violation.get_or_insert(Violation { law: "nothing panics", text });
        }
    }

    pub fn remark(&self, text: impl Into<String>) {
        let mut inner = self.inner();
        let at = inner.begun.elapsed();
        inner.log.push(Entry::Remark(at, text.into()));
    }

    pub fn lose(&self, part: &str, request: &str) {
        let mut inner = self.inner();
        let at = inner.begun.elapsed();
        inner.lost.push(Lost { at, request: request.into() });
        inner.log.push(Entry::Remark(at, format!("lost answer to {part}: {request}")));
    }

    pub fn upset(&self, part: &str, what: &str) {
        let mut inner = self.inner();
        let at = inner.begun.elapsed();
        inner.upsets.push((at, part.into()));
        inner.log.push(Entry::Remark(at, format!("{what}: {part}")));
    }

    pub fn hash(&self) -> String {
        let hash = self.inner().hash.clone().finalize();
        hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    pub fn writes(&self) -> u64 {
        self.inner().writes
    }

    /// How long there was no write but signs of life.
    pub fn quiet(&self) -> Duration {
        let inner = self.inner();
        inner.begun.elapsed().saturating_sub(inner.last_change)
    }

    pub fn elapsed(&self) -> Duration {
        self.inner().begun.elapsed()
    }

    /// The last changes, signs of life left out.
    pub fn tail(&self, lines: usize) -> String {
        let inner = self.inner();
        let mut shown: Vec<String> = inner.log.iter().rev().filter_map(line).take(lines).collect();
        shown.reverse();
        shown.join("\n")
    }
}

impl Inner {
    fn note(&mut self, event: Event, bytes: &[u8]) {
        self.hash.update(event.revision.to_le_bytes());
        self.hash.update(event.key.to_string());
        self.hash.update([u8::from(event.after.is_some())]);
        self.hash.update(bytes);
        self.writes += 1;
        if !is_sign_of_life(&event) {
            self.last_change = event.at;
        }
        match &event.after {
            Some(now) => {
                let held = Held { value: now.clone(), revision: event.revision };
                self.state.0.insert(event.key.clone(), held);
            }
            None => drop(self.state.0.remove(&event.key)),
        }
        let view =
            View { state: &self.state, now: event.at, lost: &self.lost, upsets: &self.upsets };
        for law in &mut self.laws {
            if let Err(text) = law.see(&view, &event)
                && self.violation.is_none()
            {
                self.log.push(Entry::Remark(event.at, format!("VIOLATION of {}", law.name())));
                self.violation = Some(Violation { law: law.name(), text });
            }
        }
        self.log.push(Entry::Event(event));
    }
}

/// Leases and nodes' reports never end.
fn is_sign_of_life(event: &Event) -> bool {
    let of_node =
        || event.actor.request.ends_with("/status") && event.actor.request.contains("/nodes/");
    matches!(event.key.resource.as_str(), "leases" | "masterleases")
        || (event.key.resource == "minions"
            && event.actor.part.starts_with("kubelets")
            && of_node())
}

fn line(entry: &Entry) -> Option<String> {
    match entry {
        Entry::Remark(at, text) => Some(format!("{:>9.3} -------- {text}", at.as_secs_f64())),
        Entry::Event(event) if is_sign_of_life(event) => None,
        Entry::Event(event) => {
            let sign = match (&event.before, &event.after) {
                (None, _) => '+',
                (_, None) => '-',
                _ => '~',
            };
            let shown = event.after.as_ref().or(event.before.as_ref());
            let text = shown.map(|shown| summary(&event.key, shown)).unwrap_or_default();
            let Actor { part, account, request, .. } = &*event.actor;
            Some(format!(
                "{:>9.3} {:>6} {sign}{} {text} | {part} {account} {request}",
                event.at.as_secs_f64(),
                event.revision,
                event.key
            ))
        }
    }
}

/// The fields that tell what happens to an object.
fn summary(key: &Key, value: &Value) -> String {
    let mut out = String::new();
    let mut field = |name: &str, pointer: &str| {
        if let Some(value) = value.pointer(pointer).filter(|value| !value.is_null()) {
            let _ = write!(out, "{name}={} ", value.to_string().trim_matches('"'));
        }
    };
    field("deleted", "/metadata/deletionTimestamp");
    field("finalizers", "/metadata/finalizers");
    field("generation", "/metadata/generation");
    field("owner", "/metadata/ownerReferences/0/name");
    match key.resource.as_str() {
        "pods" => {
            field("uid", "/metadata/uid");
            field("phase", "/status/phase");
            field("node", "/spec/nodeName");
            let ready = crate::laws::condition(value, "Ready");
            let _ = write!(out, "ready={}", ready.unwrap_or_default());
        }
        "events" => {}
        _ => {
            field("replicas", "/spec/replicas");
            field("status", "/status");
            field("phase", "/status/phase");
        }
    }
    out.truncate(out.char_indices().nth(400).map_or(out.len(), |(at, _)| at));
    out
}

/// The store, with all writes noted.
pub struct Recorded {
    pub inner: Arc<dyn Store>,
    pub history: History,
}

impl Recorded {
    fn record(&self, ops: &[Op], response: &TxnResponse) {
        let actor = ACTOR.try_with(Arc::clone).unwrap_or_default();
        let mut inner = self.history.inner();
        let at = inner.begun.elapsed();
        let parsed = |key: &Key, bytes: &Bytes| match OPAQUE.contains(&key.resource.as_str()) {
            true => Arc::new(Value::Null),
            false => Arc::new(serde_json::from_slice(bytes).unwrap_or_default()),
        };
        let revision = response.revision.0;
        for (op, result) in ops.iter().zip(&response.results) {
            match (op, result) {
                (Op::Put { key, value, .. }, OpResult::Put { previous }) => {
                    let key = Key::parse(key);
                    let after = Some(parsed(&key, value));
                    let before = inner.state.0.get(&key).map(|held| held.value.clone());
                    let was = previous.as_ref().map_or(0, |kv| kv.mod_revision.0);
                    let actor = actor.clone();
                    let event = Event { revision, at, key, before, after, was, actor };
                    inner.note(event, value);
                }
                (_, OpResult::Deleted { previous }) => {
                    for kv in previous {
                        let key = Key::parse(&kv.key);
                        let before = inner.state.0.get(&key).map(|held| held.value.clone());
                        let was = kv.mod_revision.0;
                        let actor = actor.clone();
                        let event = Event { revision, at, key, before, after: None, was, actor };
                        inner.note(event, b"");
                    }
                }
                _ => {}
            }
        }
    }
}

#[async_trait]
impl Store for Recorded {
    async fn range(&self, request: RangeRequest) -> store::Result<RangeResponse> {
        self.inner.range(request).await
    }

    async fn txn(&self, txn: Txn) -> store::Result<TxnResponse> {
        let (success, failure) = (txn.success.clone(), txn.failure.clone());
        let response = self.inner.txn(txn).await?;
        self.record(if response.succeeded { &success } else { &failure }, &response);
        Ok(response)
    }

    async fn watch(&self, request: WatchRequest) -> store::Result<Watch> {
        self.inner.watch(request).await
    }

    async fn revision(&self) -> store::Result<Revision> {
        self.inner.revision().await
    }

    async fn compact(&self, revision: Revision) -> store::Result<()> {
        self.inner.compact(revision).await
    }

    async fn lease_grant(&self, ttl_seconds: i64) -> store::Result<LeaseId> {
        self.inner.lease_grant(ttl_seconds).await
    }

    async fn lease_grant_as(&self, lease: LeaseId, ttl_seconds: i64) -> store::Result<()> {
        self.inner.lease_grant_as(lease, ttl_seconds).await
    }

    async fn lease_revoke(&self, lease: LeaseId) -> store::Result<()> {
        self.inner.lease_revoke(lease).await
    }

    async fn leases(&self) -> store::Result<Vec<Lease>> {
        self.inner.leases().await
    }

    async fn lease_keep_alive(&self, lease: LeaseId) -> store::Result<i64> {
        self.inner.lease_keep_alive(lease).await
    }

    async fn status(&self) -> store::Result<Status> {
        self.inner.status().await
    }

    async fn snapshot(&self) -> store::Result<Snapshot> {
        self.inner.snapshot().await
    }

    async fn revision_at(&self, millis: u64) -> store::Result<Revision> {
        self.inner.revision_at(millis).await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
