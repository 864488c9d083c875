//! An API server for tests: one collection of ConfigMaps in memory, with list, watch and faults.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::StreamExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::Client;

#[derive(Clone, Default)]
pub(crate) struct Fake(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    revision: u64,
    objects: Vec<Value>,
    watches: Vec<mpsc::Sender<Bytes>>,
    /// Watches from before this revision are answered with 410.
    compacted: u64,
    requests: Vec<String>,
}

impl Fake {
    pub(crate) fn client(&self) -> Client {
        let fake = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let fake = fake.clone();
            async move { Ok::<_, Infallible>(fake.answer(&request)) }
        });
        Client::new(service, "test")
    }

    pub(crate) fn put(&self, name: &str, data: &str) {
        let mut state = self.0.lock().unwrap();
        state.revision += 1;
        let object = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": "default", "uid": name,
                "resourceVersion": state.revision.to_string(), "labels": {"app": data}},
            "data": {"v": data},
        });
        let known = state.objects.iter().position(|one| one["metadata"]["name"] == name);
        let kind = match known {
            Some(at) => {
                state.objects[at] = object.clone();
                "MODIFIED"
            }
            None => {
                state.objects.push(object.clone());
                "ADDED"
            }
        };
        state.send(kind, &object);
    }

    pub(crate) fn delete(&self, name: &str) {
        let mut state = self.0.lock().unwrap();
        state.revision += 1;
        let at = state.objects.iter().position(|one| one["metadata"]["name"] == name).unwrap();
        let mut object = state.objects.remove(at);
        object["metadata"]["resourceVersion"] = state.revision.to_string().into();
        state.send("DELETED", &object);
    }

    /// Cuts every watch; with `compact`, their places are gone as well.
    pub(crate) fn cut(&self, compact: bool) {
        let mut state = self.0.lock().unwrap();
        state.watches.clear();
        if compact {
            state.revision += 1;
            state.compacted = state.revision;
        }
    }

    pub(crate) fn requests(&self, containing: &str) -> usize {
        self.0.lock().unwrap().requests.iter().filter(|one| one.contains(containing)).count()
    }

    fn answer(&self, request: &Request<Body>) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
        let query = request.uri().query().unwrap_or_default().to_owned();
        let mut state = self.0.lock().unwrap();
        state.requests.push(request.uri().to_string());
        let parameter = |name: &str| {
            let prefix = format!("{name}=");
            query.split('&').find_map(|pair| pair.strip_prefix(&prefix)).map(str::to_owned)
        };
        if parameter("watch").is_none() {
            return state.list(parameter("continue"));
        }
        let from: u64 = parameter("resourceVersion").unwrap().parse().unwrap();
        if from < state.compacted {
            let gone =
                json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
            return Response::builder().status(410).body(whole(&gone)).unwrap();
        }
        let (sender, receiver) = mpsc::channel(100);
        for object in &state.objects {
            let revision: u64 =
                object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
            if revision > from {
                sender.try_send(line("MODIFIED", object)).unwrap();
            }
        }
        state.watches.push(sender);
        let frames = futures::stream::unfold(receiver, async |mut receiver| {
            let bytes = receiver.recv().await?;
            Some((bytes, receiver))
        });
        // Half lines, as networks deliver them.
        let frames = frames.flat_map(|bytes| {
            let (head, tail) = (bytes.slice(..bytes.len() / 2), bytes.slice(bytes.len() / 2..));
            futures::stream::iter([head, tail].map(|part| Ok(http_body::Frame::data(part))))
        });
        Response::new(StreamBody::new(frames).boxed_unsync())
    }
}

impl State {
    fn send(&mut self, kind: &str, object: &Value) {
        let line = line(kind, object);
        self.watches.retain(|watch| watch.try_send(line.clone()).is_ok());
    }

    /// Pages of two.
    fn list(&self, token: Option<String>) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
        let from: usize = token.map_or(0, |token| token.parse().unwrap());
        let items: Vec<_> = self.objects.iter().skip(from).take(2).collect();
        let next =
            if from + 2 < self.objects.len() { (from + 2).to_string() } else { String::new() };
        let list = json!({
            "kind": "ConfigMapList", "apiVersion": "v1",
            "metadata": {"resourceVersion": self.revision.to_string(), "continue": next},
            "items": items,
        });
        Response::new(whole(&list))
    }
}

fn whole(value: &Value) -> UnsyncBoxBody<Bytes, Infallible> {
    Full::new(Bytes::from(value.to_string())).boxed_unsync()
}

fn line(kind: &str, object: &Value) -> Bytes {
    Bytes::from(format!("{}\n", json!({"type": kind, "object": object})))
}
