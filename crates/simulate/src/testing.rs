//! An API server for tests: Nodes, Leases and Pods in memory, with lists, watches and patches.
//!
//! In: requests of a client, changes that a test makes. Out: answers, events. It knows no rules but those
//! that a hollow kubelet relies on: conditions merge by type, other lists are replaced.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use client::Client;
use http::{Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::mpsc;

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

#[derive(Clone, Default)]
pub struct Fake(Arc<Mutex<Objects>>);

#[derive(Default)]
struct Objects {
    revision: u64,
    /// By path.
    all: BTreeMap<String, Value>,
    watches: Vec<(String, mpsc::Sender<Bytes>)>,
    /// Method and path of each that changed something.
    writes: Vec<String>,
    /// While it is set, nothing is answered.
    is_away: bool,
    /// The next so many writes of pods are answered with a conflict.
    conflicts: usize,
}

impl Fake {
    pub fn client(&self) -> Client {
        let fake = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let fake = fake.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                if fake.0.lock().expect("no panic").is_away {
                    return Err("connection refused");
                }
                Ok(fake.answer(&head.method, &head.uri, &body))
            }
        });
        Client::new(service, "test")
    }

    pub fn get(&self, path: &str) -> Option<Value> {
        self.0.lock().expect("no panic").all.get(path).cloned()
    }

    /// Changes an object, like a client or controller.
    pub fn merge(&self, path: &str, patch: &Value) {
        let mut objects = self.0.lock().expect("no panic");
        let mut object = objects.all.get(path).cloned().unwrap_or_else(|| json!({}));
        merge(&mut object, patch);
        objects.put(path, object);
    }

    pub fn remove(&self, path: &str) {
        self.0.lock().expect("no panic").remove(path);
    }

    /// Writes so far whose method and path contain this.
    pub fn writes(&self, containing: &str) -> usize {
        let objects = self.0.lock().expect("no panic");
        objects.writes.iter().filter(|write| write.contains(containing)).count()
    }

    /// Stops answering and cuts all watches, or answers again.
    pub fn set_away(&self, is_away: bool) {
        let mut objects = self.0.lock().expect("no panic");
        objects.is_away = is_away;
        objects.watches.clear();
    }

    /// The next write of a pod meets another one.
    pub fn conflict_once(&self) {
        self.0.lock().expect("no panic").conflicts = 1;
    }

    fn answer(&self, method: &Method, uri: &http::Uri, body: &[u8]) -> Answer {
        let mut objects = self.0.lock().expect("no panic");
        let path = uri.path().trim_end_matches("/status").to_owned();
        let sent: Value = serde_json::from_slice(body).unwrap_or_default();
        let query = uri.query().unwrap_or_default();
        if *method == Method::GET {
            return match objects.all.get(&path) {
                Some(object) => whole(StatusCode::OK, object),
                None if is_collection(&path) => objects.collection(&path, query),
                None => failure(404, "NotFound"),
            };
        }
        objects.writes.push(format!("{method} {}", uri.path()));
        if path.contains("/pods/") && objects.conflicts > 0 {
            objects.conflicts -= 1;
            return failure(409, "Conflict");
        }
        if *method == Method::POST {
            let name = sent["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let path = format!("{path}/{name}");
            if objects.all.contains_key(&path) {
                return failure(409, "AlreadyExists");
            }
            return whole(StatusCode::CREATED, &objects.put(&path, sent));
        }
        let Some(mut object) = objects.all.get(&path).cloned() else {
            return failure(404, "NotFound");
        };
        if *method == Method::DELETE {
            objects.remove(&path);
            return whole(StatusCode::OK, &object);
        }
        let of = |value: &Value, field: &str| value["metadata"][field].clone();
        for field in ["uid", "resourceVersion"] {
            if !of(&sent, field).is_null() && of(&sent, field) != of(&object, field) {
                return failure(409, "Conflict");
            }
        }
        merge(&mut object, &sent);
        whole(StatusCode::OK, &objects.put(&path, object))
    }
}

impl Objects {
    fn put(&mut self, path: &str, mut object: Value) -> Value {
        self.revision += 1;
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = format!("uid-{}", self.revision).into();
        }
        object["metadata"]["resourceVersion"] = self.revision.to_string().into();
        let is_new = self.all.insert(path.to_owned(), object.clone()).is_none();
        self.tell(path, if is_new { "ADDED" } else { "MODIFIED" }, &object);
        object
    }

    fn remove(&mut self, path: &str) {
        self.revision += 1;
        if let Some(mut object) = self.all.remove(path) {
            object["metadata"]["resourceVersion"] = self.revision.to_string().into();
            self.tell(path, "DELETED", &object);
        }
    }

    fn tell(&mut self, path: &str, kind: &str, object: &Value) {
        let line = Bytes::from(format!("{}\n", json!({"type": kind, "object": object})));
        self.watches.retain(|(collection, sender)| {
            !is_of(path, collection) || sender.try_send(line.clone()).is_ok()
        });
    }

    /// A list or a watch.
    fn collection(&mut self, path: &str, query: &str) -> Answer {
        if query.contains("watch=true") {
            let (sender, receiver) = mpsc::channel(100_000);
            let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
            let from: u64 = from.and_then(|text| text.parse().ok()).unwrap_or(0);
            // Changes before the start of the watch; nothing is deleted meanwhile.
            for object in self.all.iter().filter(|(one, _)| is_of(one, path)).map(|(_, one)| one) {
                let revision = object["metadata"]["resourceVersion"].as_str();
                if revision.and_then(|text| text.parse().ok()).unwrap_or(0) > from {
                    let line = format!("{}\n", json!({"type": "MODIFIED", "object": object}));
                    sender.try_send(Bytes::from(line)).expect("there is room");
                }
            }
            self.watches.push((path.to_owned(), sender));
            let frames = futures::stream::unfold(receiver, async |mut receiver| {
                Some((Ok(Frame::data(receiver.recv().await?)), receiver))
            });
            return Response::new(StreamBody::new(frames).boxed_unsync());
        }
        let items: Vec<&Value> =
            self.all.iter().filter(|(one, _)| is_of(one, path)).map(|(_, object)| object).collect();
        let list = json!({"kind": "List", "apiVersion": "v1", "items": items,
            "metadata": {"resourceVersion": self.revision.to_string()}});
        whole(StatusCode::OK, &list)
    }
}

fn is_collection(path: &str) -> bool {
    matches!(path, "/api/v1/nodes" | "/api/v1/pods")
}

/// `/api/v1/namespaces/d/pods/a` is of `/api/v1/pods`.
fn is_of(path: &str, collection: &str) -> bool {
    let kind = collection.rsplit('/').next().unwrap_or_default();
    path.rsplit('/').nth(1) == Some(kind)
}

fn whole(status: StatusCode, value: &Value) -> Answer {
    let body = Full::new(Bytes::from(value.to_string())).boxed_unsync();
    Response::builder().status(status).body(body).expect("a valid response")
}

fn failure(code: u16, reason: &str) -> Answer {
    let status = json!({"kind": "Status", "code": code, "reason": reason, "message": reason});
    whole(StatusCode::from_u16(code).expect("a code"), &status)
}

/// The part of strategic merge that these tests need.
pub fn merge(object: &mut Value, patch: &Value) {
    let (Some(object), Some(patch)) = (object.as_object_mut(), patch.as_object()) else { return };
    for (name, value) in patch {
        let target = object.entry(name.clone()).or_insert(Value::Null);
        match value {
            Value::Null => {
                object.remove(name);
            }
            Value::Object(_) if !target.is_null() => merge(target, value),
            Value::Array(all) if name == "conditions" && target.is_array() => {
                let known = target.as_array_mut().expect("an array");
                for one in all {
                    match known.iter_mut().find(|known| known["type"] == one["type"]) {
                        Some(known) => merge(known, one),
                        None => known.push(one.clone()),
                    }
                }
            }
            _ => *target = value.clone(),
        }
    }
}
