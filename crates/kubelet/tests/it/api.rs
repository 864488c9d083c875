//! An in-memory API server with the features that a kubelet needs: any collection, watches with field
//! selectors, status patches, two-phase deletion of pods.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use client::Client;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

type Body = UnsyncBoxBody<Bytes, Infallible>;

#[derive(Clone)]
pub struct Api(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    /// The revision, for waiters.
    changed: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    revision: u64,
    uids: u64,
    /// By path.
    objects: BTreeMap<String, Value>,
    watches: Vec<Watch>,
    /// Every request answers 503.
    is_down: bool,
    /// The number of status patches that are still to fail with a conflict.
    lost_races: usize,
}

struct Watch {
    collection: String,
    selector: String,
    sender: mpsc::Sender<Bytes>,
}

/// `/api/v1/namespaces/ns/pods/a` → (`/api/v1/pods`, whether it is in a namespace)
fn kind_of(collection: &str) -> String {
    let mut parts: Vec<&str> = collection.split('/').collect();
    if let Some(at) = parts.iter().position(|part| *part == "namespaces")
        && parts.len() > at + 2
    {
        parts.drain(at..at + 2);
    }
    parts.join("/")
}

fn selected(object: &Value, selector: &str) -> bool {
    selector.split(',').filter(|term| !term.is_empty()).all(|term| {
        let Some((path, wanted)) = term.split_once('=') else { return true };
        let mut value = object;
        for part in path.split('.') {
            value = &value[part];
        }
        value.as_str().unwrap_or_default() == wanted
    })
}

/// Strategic merge patch, as far as statuses need it.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in fields {
        let by = match key.as_str() {
            "conditions" => Some("type"),
            "podIPs" | "hostIPs" => Some("ip"),
            _ => None,
        };
        match (by, value) {
            (_, Value::Null) => {
                target.as_object_mut().expect("an object").remove(key);
            }
            (Some(by), Value::Array(items)) => merge_list(&mut target[key], items, by),
            (None, Value::Object(_)) => merge(&mut target[key], value),
            _ => target[key] = value.clone(),
        }
    }
}

fn merge_list(target: &mut Value, items: &[Value], by: &str) {
    let mut all = target.as_array().cloned().unwrap_or_default();
    for item in items {
        if item["$patch"] == "delete" {
            all.retain(|known| known[by] != item[by]);
            continue;
        }
        match all.iter_mut().find(|known| known[by] == item[by]) {
            Some(known) => merge(known, item),
            None => all.push(item.clone()),
        }
    }
    *target = Value::Array(all);
}

impl Api {
    pub fn new() -> Self {
        let (changed, _) = watch::channel(0);
        Self(Arc::new(Inner { state: Mutex::default(), changed }))
    }

    pub fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<_>| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.answer(request).await) }
        });
        Client::new(service, "kubelet")
    }

    pub fn set_down(&self, is_down: bool) {
        let mut state = self.state();
        state.is_down = is_down;
        if is_down {
            state.watches.clear();
        }
    }

    /// Answers the next status patches with 409, although the object is the right one.
    pub fn lose_races(&self, times: usize) {
        self.state().lost_races = times;
    }

    /// The number of these patches that are left.
    pub fn races_to_lose(&self) -> usize {
        self.state().lost_races
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().expect("no panic")
    }

    pub fn get(&self, path: &str) -> Option<Value> {
        self.state().objects.get(path).cloned()
    }

    pub fn pod(&self, name: &str) -> Value {
        self.get(&format!("/api/v1/namespaces/ns/pods/{name}")).unwrap_or(Value::Null)
    }

    /// (reason, message) of all events, in order.
    pub fn events(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let state = self.state();
        let all = state.objects.iter().filter(|(path, _)| path.contains("/events/"));
        all.map(|(_, event)| (text(&event["reason"]), text(&event["message"]))).collect()
    }

    /// All objects whose path contains that part.
    pub fn objects(&self, part: &str) -> Vec<Value> {
        let state = self.state();
        let all = state.objects.iter().filter(|(path, _)| path.contains(part));
        all.map(|(_, object)| object.clone()).collect()
    }

    /// Creates or replaces; returns what is stored.
    pub fn put(&self, path: &str, mut object: Value) -> Value {
        let mut state = self.state();
        state.revision += 1;
        let old = state.objects.get(path).cloned();
        let meta = &mut object["metadata"];
        meta["resourceVersion"] = json!(state.revision.to_string());
        if meta["uid"].is_null() {
            state.uids += 1;
            let known = old.as_ref().map(|old| old["metadata"]["uid"].clone());
            meta["uid"] = known.unwrap_or_else(|| json!(format!("uid-{}", state.uids)));
        }
        if meta["creationTimestamp"].is_null() {
            meta["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        state.objects.insert(path.into(), object.clone());
        let kind = if old.is_some() { "MODIFIED" } else { "ADDED" };
        state.tell(path, kind, &object);
        let revision = state.revision;
        drop(state);
        self.0.changed.send_replace(revision);
        object
    }

    /// Merges fields into an object, like a patch.
    pub fn change(&self, path: &str, patch: &Value) {
        let mut known = self.get(path).expect("an object");
        merge(&mut known, patch);
        self.put(path, known);
    }

    pub fn put_pod(&self, name: &str, spec: Value) -> Value {
        let mut spec = spec;
        spec["nodeName"] = json!("n1");
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "ns"}, "spec": spec,
            "status": {"phase": "Pending"}});
        self.put(&format!("/api/v1/namespaces/ns/pods/{name}"), pod)
    }

    /// Marks a pod as deleted: the first phase of a deletion.
    pub fn mark_deleted(&self, name: &str, grace: i64) {
        let mut pod = self.pod(name);
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:30Z");
        pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        self.put(&format!("/api/v1/namespaces/ns/pods/{name}"), pod);
    }

    pub fn remove(&self, path: &str) -> Option<Value> {
        let mut state = self.state();
        let mut gone = state.objects.remove(path)?;
        state.revision += 1;
        gone["metadata"]["resourceVersion"] = json!(state.revision.to_string());
        state.tell(path, "DELETED", &gone);
        let revision = state.revision;
        drop(state);
        self.0.changed.send_replace(revision);
        Some(gone)
    }

    /// Waits until `is_true`, checking after every change.
    pub async fn until(&self, what: &str, mut is_true: impl FnMut(&Self) -> bool) {
        let mut changed = self.0.changed.subscribe();
        let waiting = async {
            while !is_true(self) {
                // The runtime's changes send no notification here: check periodically.
                let _ = tokio::time::timeout(Duration::from_millis(20), changed.changed()).await;
            }
        };
        if tokio::time::timeout(testkit::wait::LONG, waiting).await.is_err() {
            let state = self.state();
            let pods: Vec<String> = state
                .objects
                .iter()
                .filter(|(path, _)| path.contains("/pods/") || path.contains("/events/"))
                .map(|(path, o)| {
                    format!("{path}: {} {} {}", o["status"], o["reason"], o["message"])
                })
                .collect();
            panic!("{what}: not in time\n{}", pods.join("\n"));
        }
    }

    async fn answer<B>(&self, request: Request<B>) -> Response<Body>
    where
        B: http_body::Body<Data = Bytes>,
        B::Error: std::fmt::Debug,
    {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.expect("a body").to_bytes();
        let tree: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        if self.state().is_down {
            return status(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
        }
        let path = parts.uri.path().to_string();
        let query = parts.uri.query().unwrap_or_default().to_string();
        match parts.method {
            Method::GET => self.read(&path, &query),
            Method::POST => self.create(&path, tree),
            Method::PUT => answer(&self.put(&path, tree)),
            Method::PATCH => self.patch(&path, &tree),
            Method::DELETE => self.delete(&path, &tree),
            _ => status(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
        }
    }

    fn read(&self, path: &str, query: &str) -> Response<Body> {
        let mut state = self.state();
        if let Some(object) = state.objects.get(path) {
            return answer(object);
        }
        let decoded = query.replace("%3D", "=").replace("%2C", ",");
        let selector = decoded
            .split('&')
            .find_map(|pair| pair.strip_prefix("fieldSelector="))
            .unwrap_or_default()
            .to_string();
        let is_collection = path.ends_with('s') && !state.objects.contains_key(path);
        if !is_collection || path.contains("/leases/") || path.starts_with("/api/v1/nodes/") {
            return status(StatusCode::NOT_FOUND, "NotFound");
        }
        if query.contains("watch=") {
            let (sender, receiver) = mpsc::channel(1000);
            state.watches.push(Watch { collection: path.into(), selector, sender });
            let frames = futures::stream::unfold(receiver, async |mut receiver| {
                let bytes = receiver.recv().await?;
                Some((Ok(Frame::data(bytes)), receiver))
            });
            return Response::new(StreamBody::new(frames).boxed_unsync());
        }
        let fits = |(own, object): &(&String, &Value)| {
            let parent = own.rsplit_once('/').map_or("", |p| p.0);
            (parent == path || kind_of(parent) == path) && selected(object, &selector)
        };
        let items: Vec<Value> = state.objects.iter().filter(fits).map(|(_, o)| o.clone()).collect();
        answer(&json!({"kind": "List", "apiVersion": "v1", "items": items,
            "metadata": {"resourceVersion": state.revision.to_string()}}))
    }

    fn create(&self, path: &str, object: Value) -> Response<Body> {
        if path.ends_with("/token") {
            return answer(&json!({"status": {"token": "a-token",
                "expirationTimestamp": "2126-01-01T00:00:00Z"}}));
        }
        let name = object["metadata"]["name"].as_str().unwrap_or("x").to_string();
        let full = format!("{path}/{name}");
        if self.state().objects.contains_key(&full) {
            return status(StatusCode::CONFLICT, "AlreadyExists");
        }
        answer(&self.put(&full, object))
    }

    fn patch(&self, path: &str, patch: &Value) -> Response<Body> {
        let object = path.strip_suffix("/status").unwrap_or(path);
        if object != path && object.contains("/pods/") {
            let mut state = self.state();
            if state.lost_races > 0 {
                state.lost_races -= 1;
                return status(StatusCode::CONFLICT, "Conflict");
            }
        }
        let Some(mut known) = self.get(object) else {
            return status(StatusCode::NOT_FOUND, "NotFound");
        };
        let uid = &patch["metadata"]["uid"];
        if !uid.is_null() && *uid != known["metadata"]["uid"] {
            return status(StatusCode::CONFLICT, "Conflict");
        }
        merge(&mut known, patch);
        answer(&self.put(object, known))
    }

    fn delete(&self, path: &str, options: &Value) -> Response<Body> {
        let Some(known) = self.get(path) else {
            return status(StatusCode::NOT_FOUND, "NotFound");
        };
        let uid = &options["preconditions"]["uid"];
        if !uid.is_null() && *uid != known["metadata"]["uid"] {
            return status(StatusCode::CONFLICT, "Conflict");
        }
        self.remove(path);
        answer(&known)
    }
}

impl State {
    fn tell(&mut self, path: &str, kind: &str, object: &Value) {
        let parent = path.rsplit_once('/').map_or("", |p| p.0);
        let line = Bytes::from(format!("{}\n", json!({"type": kind, "object": object})));
        self.watches.retain(|watch| {
            let fits = (watch.collection == parent || kind_of(parent) == watch.collection)
                && selected(object, &watch.selector);
            !fits || watch.sender.try_send(line.clone()).is_ok()
        });
    }
}

fn answer(tree: &Value) -> Response<Body> {
    Response::new(Full::new(Bytes::from(tree.to_string())).boxed_unsync())
}

fn status(code: StatusCode, reason: &str) -> Response<Body> {
    let tree = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {},
        "reason": reason, "message": reason, "code": code.as_u16()});
    let mut response = answer(&tree);
    *response.status_mut() = code;
    response
}
