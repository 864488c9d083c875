//! An API server and a cloud in memory, for tests of controllers.
//!
//! [`Server`]: collections with lists, watches, reads and patches; Events are kept. [`Fake`]: a cloud whose state the
//! test changes, and which counts its calls. [`World`]: both, with one controller between them.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use base::task::Tasks;
use bytes::Bytes;
use client::{Client, EventRecorder, Informers};
use futures::stream;
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Node, Service};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::manager::{Context, Options};
use crate::provider::{
    Error, Instances, LoadBalancers, Metadata, Provider, Result, Route, Routes, ingress,
};
use crate::target::Target;

pub const NODES: &str = "/api/v1/nodes";
pub const SERVICES: &str = "/api/v1/services";

/// Cheap to clone; clones are the same server.
#[derive(Clone, Default)]
pub struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    revision: u64,
    /// By collection, then by `namespace/name`.
    objects: BTreeMap<String, BTreeMap<String, Value>>,
    watches: Vec<(String, mpsc::Sender<Bytes>)>,
    /// Every change: its revision, its collection, its line. A watch begins behind its list.
    log: Vec<(u64, String, Bytes)>,
    events: Vec<Value>,
    /// `PATCH /api/v1/nodes/n`.
    writes: Vec<String>,
}

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

impl Server {
    pub fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        });
        Client::new(service, "test")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no panic while held")
    }

    /// Creates or replaces an object.
    pub fn put(&self, collection: &str, object: Value) {
        self.state().put(collection, object);
    }

    /// Changes an object by a merge patch.
    pub fn change(&self, collection: &str, key: &str, patch: &Value) {
        let mut state = self.state();
        let mut object = state.objects[collection][key].clone();
        merge(&mut object, patch);
        state.put(collection, object);
    }

    pub fn remove(&self, collection: &str, key: &str) {
        self.state().remove(collection, key);
    }

    /// `key` is `namespace/name`, or `/name`.
    pub fn get(&self, collection: &str, key: &str) -> Option<Value> {
        self.state().objects.get(collection)?.get(key).cloned()
    }

    /// Reasons and messages of all Events.
    pub fn events(&self) -> Vec<String> {
        let text = |event: &Value, name: &str| event[name].as_str().unwrap_or_default().to_owned();
        let line = |event| format!("{}: {}", text(event, "reason"), text(event, "message"));
        self.state().events.iter().map(line).collect()
    }

    pub fn reasons(&self) -> Vec<String> {
        let reason = |line: String| line.split(':').next().unwrap_or_default().to_owned();
        self.events().into_iter().map(reason).collect()
    }

    pub fn writes(&self) -> Vec<String> {
        self.state().writes.clone()
    }

    async fn answer(&self, request: Request<Body>) -> Answer {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.map_or_else(|_| Bytes::new(), |body| body.to_bytes());
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let path = parts.uri.path();
        let query = parts.uri.query().unwrap_or_default();
        let mut state = self.state();
        if path.contains("/events") {
            if parts.method == Method::POST {
                state.events.push(body.clone());
            }
            return whole(StatusCode::OK, &body);
        }
        if parts.method == Method::GET && state.is_collection(path) {
            return match query.contains("watch=true") {
                true => state.watch(path, query),
                false => state.list(path),
            };
        }
        let Some((collection, key)) = place(path) else { return status(404, "NotFound") };
        let Some(object) = state.objects.get(&collection).and_then(|all| all.get(&key)).cloned()
        else {
            return status(404, "NotFound");
        };
        if parts.method != Method::GET {
            state.writes.push(format!("{} {path}", parts.method));
        }
        match parts.method {
            Method::GET => whole(StatusCode::OK, &object),
            Method::DELETE => {
                state.remove(&collection, &key);
                whole(StatusCode::OK, &object)
            }
            Method::PATCH => {
                let version = &body["metadata"]["resourceVersion"];
                if !version.is_null() && *version != object["metadata"]["resourceVersion"] {
                    return status(409, "Conflict");
                }
                let kind = parts.headers.get("content-type").map(|kind| kind.as_bytes());
                let is_strategic =
                    kind.is_some_and(|kind| kind.starts_with(b"application/strategic"));
                let mut new = object;
                match is_strategic {
                    true => strategic(&mut new, body),
                    false => merge(&mut new, &body),
                }
                whole(StatusCode::OK, &state.put(&collection, new))
            }
            _ => status(405, "MethodNotAllowed"),
        }
    }
}

/// Collection and key of an object's path, with or without `/status`.
fn place(path: &str) -> Option<(String, String)> {
    let path = path.strip_suffix("/status").unwrap_or(path);
    match path.trim_start_matches('/').split('/').collect::<Vec<_>>()[..] {
        ["api", "v1", kind, name] => Some((format!("/api/v1/{kind}"), format!("/{name}"))),
        ["api", "v1", "namespaces", namespace, kind, name] => {
            Some((format!("/api/v1/{kind}"), format!("{namespace}/{name}")))
        }
        _ => None,
    }
}

impl State {
    fn is_collection(&self, path: &str) -> bool {
        [NODES, SERVICES].contains(&path)
    }

    fn put(&mut self, collection: &str, mut object: Value) -> Value {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        let metadata = &object["metadata"];
        let text = |name: &str| metadata[name].as_str().unwrap_or_default().to_owned();
        let key = format!("{}/{}", text("namespace"), text("name"));
        let is_over = !metadata["deletionTimestamp"].is_null()
            && metadata["finalizers"].as_array().is_none_or(Vec::is_empty);
        let objects = self.objects.entry(collection.to_owned()).or_default();
        if is_over {
            objects.insert(key.clone(), object.clone());
            self.remove(collection, &key);
            return object;
        }
        objects.insert(key, object.clone());
        self.tell(collection, "MODIFIED", &object);
        object
    }

    fn remove(&mut self, collection: &str, key: &str) {
        let objects = self.objects.entry(collection.to_owned()).or_default();
        let Some(mut object) = objects.remove(key) else { return };
        self.revision += 1;
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        self.tell(collection, "DELETED", &object);
    }

    fn tell(&mut self, collection: &str, kind: &str, object: &Value) {
        let line = Bytes::from(format!("{}\n", json!({"type": kind, "object": object})));
        self.log.push((self.revision, collection.to_owned(), line.clone()));
        self.watches.retain(|(of, watch)| of != collection || watch.try_send(line.clone()).is_ok());
    }

    fn list(&self, path: &str) -> Answer {
        let items: Vec<&Value> =
            self.objects.get(path).into_iter().flat_map(|all| all.values()).collect();
        let version = self.revision.to_string();
        whole(StatusCode::OK, &json!({"metadata": {"resourceVersion": version}, "items": items}))
    }

    fn watch(&mut self, path: &str, query: &str) -> Answer {
        let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
        let from: u64 = from.and_then(|from| from.parse().ok()).unwrap_or(0);
        let (sender, receiver) = mpsc::channel(1024);
        for (_, _, line) in self.log.iter().filter(|(at, of, _)| *at > from && of == path) {
            sender.try_send(line.clone()).expect("a short history");
        }
        self.watches.push((path.to_owned(), sender));
        let frames = stream::unfold(receiver, async |mut receiver| {
            let line = receiver.recv().await?;
            Some((Ok(Frame::data(line)), receiver))
        });
        Response::new(StreamBody::new(frames).boxed_unsync())
    }
}

fn whole(code: StatusCode, value: &Value) -> Answer {
    let body = Full::new(Bytes::from(value.to_string())).boxed_unsync();
    Response::builder().status(code).body(body).expect("a response")
}

fn status(code: u16, reason: &str) -> Answer {
    let status = json!({"kind": "Status", "code": code, "reason": reason, "message": reason});
    whole(StatusCode::from_u16(code).expect("a code"), &status)
}

/// A JSON merge patch.
pub fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (name, value) in fields {
        match value {
            Value::Null => drop(into.as_object_mut().and_then(|into| into.remove(name))),
            _ => merge(&mut into[name.as_str()], value),
        }
    }
}

/// The strategic merge patches that the controllers send.
fn strategic(into: &mut Value, mut patch: Value) {
    let removed = patch["metadata"]["$deleteFromPrimitiveList/finalizers"].take();
    let mut finalizers: BTreeSet<String> =
        serde_json::from_value(into["metadata"]["finalizers"].clone()).unwrap_or_default();
    let more: Vec<String> =
        serde_json::from_value(patch["metadata"]["finalizers"].clone()).unwrap_or_default();
    finalizers.extend(more);
    finalizers
        .retain(|one| !removed.as_array().is_some_and(|all| all.iter().any(|gone| gone == one)));
    let conditions = patch["status"]["conditions"].take();
    let mut all = into["status"]["conditions"].as_array().cloned().unwrap_or_default();
    for condition in conditions.as_array().into_iter().flatten() {
        all.retain(|one| one["type"] != condition["type"]);
        all.push(condition.clone());
    }
    merge(into, &patch);
    into["metadata"]["finalizers"] = json!(finalizers);
    into["status"]["conditions"] = json!(all);
}

/// A cloud.
#[derive(Default)]
pub struct Fake {
    state: Mutex<Cloud>,
    pub changed: tokio::sync::Notify,
}

#[derive(Default)]
pub struct Cloud {
    /// By the Node's name.
    pub machines: BTreeMap<String, Metadata>,
    pub off: BTreeSet<String>,
    /// By the Service's uid: the names of the nodes.
    pub balancers: BTreeMap<String, Vec<String>>,
    pub address: String,
    pub routes: Vec<Route>,
    /// Calls with these names fail.
    pub fails: BTreeSet<&'static str>,
    pub calls: Vec<String>,
}

impl Fake {
    pub fn state(&self) -> MutexGuard<'_, Cloud> {
        self.state.lock().expect("no panic while held")
    }

    fn call(&self, name: &'static str, about: &str) -> Result<MutexGuard<'_, Cloud>> {
        let mut state = self.state();
        state.calls.push(format!("{name} {about}"));
        match state.fails.contains(name) {
            true => Err(Error::Unsupported(format!("{name} does not work"))),
            false => Ok(state),
        }
    }
}

#[async_trait]
impl Provider for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn instances(&self) -> Option<&dyn Instances> {
        Some(self)
    }

    fn load_balancers(&self) -> Option<&dyn LoadBalancers> {
        Some(self)
    }

    fn routes(&self) -> Option<&dyn Routes> {
        Some(self)
    }

    async fn changed(&self) {
        self.changed.notified().await;
    }
}

fn name(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}

fn uid(service: &Service) -> String {
    service.metadata.uid.clone().unwrap_or_default()
}

fn names(nodes: &[Arc<Target>]) -> Vec<String> {
    nodes.iter().map(|node| node.name.clone()).collect()
}

#[async_trait]
impl Instances for Fake {
    async fn exists(&self, node: &Node) -> Result<bool> {
        Ok(self.call("exists", name(node))?.machines.contains_key(name(node)))
    }

    async fn is_shut_down(&self, node: &Node) -> Result<bool> {
        Ok(self.call("power", name(node))?.off.contains(name(node)))
    }

    async fn metadata(&self, node: &Node) -> Result<Option<Metadata>> {
        let state = self.call("metadata", name(node))?;
        state.machines.get(name(node)).cloned().map(Some).ok_or(Error::InstanceNotFound)
    }
}

#[async_trait]
impl LoadBalancers for Fake {
    async fn get(&self, _: &str, service: &Service) -> Result<Option<Vec<LoadBalancerIngress>>> {
        let state = self.call("get", &uid(service))?;
        Ok(state.balancers.get(&uid(service)).map(|_| vec![ingress(&state.address)]))
    }

    async fn ensure(
        &self,
        _: &str,
        service: &Service,
        nodes: &[Arc<Target>],
    ) -> Result<Vec<LoadBalancerIngress>> {
        let mut state = self.call("ensure", &uid(service))?;
        state.balancers.insert(uid(service), names(nodes));
        Ok(vec![ingress(&state.address)])
    }

    async fn update(&self, _: &str, service: &Service, nodes: &[Arc<Target>]) -> Result<()> {
        let mut state = self.call("update", &uid(service))?;
        state.balancers.insert(uid(service), names(nodes));
        Ok(())
    }

    async fn delete(&self, _: &str, service: &Service) -> Result<()> {
        self.call("delete", &uid(service))?.balancers.remove(&uid(service));
        Ok(())
    }
}

#[async_trait]
impl Routes for Fake {
    async fn list(&self, _: &str) -> Result<Vec<Route>> {
        Ok(self.call("list", "")?.routes.clone())
    }

    async fn create(&self, _: &str, hint: &str, route: &Route) -> Result<()> {
        let mut state = self.call("create", &route.destination)?;
        let route = Route { name: hint.to_owned(), addresses: None, ..route.clone() };
        state.routes.push(route);
        Ok(())
    }

    async fn delete(&self, _: &str, route: &Route) -> Result<()> {
        self.call("remove", &route.destination)?.routes.retain(|one| one != route);
        Ok(())
    }
}

/// One controller between an API server and a cloud.
pub struct World {
    pub api: Server,
    pub cloud: Arc<Fake>,
    tasks: Tasks,
}

impl World {
    pub fn start(api: Server, cloud: Arc<Fake>, options: Options, start: fn(Context)) -> Self {
        let tasks = Tasks::new("test");
        let client = api.client();
        let context = Context {
            client: client.clone(),
            informers: Informers::new(client.clone(), tasks.clone()),
            events: EventRecorder::new(client, &tasks, "test", None),
            tasks: tasks.clone(),
            options: Arc::new(options),
            provider: cloud.clone(),
        };
        start(context);
        Self { api, cloud, tasks }
    }

    /// Time is paused and passes only while all tasks wait.
    pub async fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let wait = async {
            while !condition(self) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(900), wait).await;
        let events = self.api.events();
        waited.unwrap_or_else(|_| {
            panic!("{what}: events {events:#?}, calls {:#?}", self.cloud.state().calls)
        });
    }

    /// Nothing is left to do after this time.
    pub async fn rest(&self) {
        tokio::time::sleep(Duration::from_secs(2)).await;
    }

    pub fn calls(&self, prefix: &str) -> usize {
        self.cloud.state().calls.iter().filter(|call| call.starts_with(prefix)).count()
    }

    pub async fn end(self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}
