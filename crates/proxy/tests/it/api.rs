//! An API server with three collections: lists, and watches that deliver new objects.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use client::Client;
use http::{Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

type Body = UnsyncBoxBody<Bytes, Infallible>;

#[derive(Clone, Default)]
pub struct Api(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    revision: u64,
    /// By collection and name.
    objects: BTreeMap<(&'static str, String), Value>,
    watches: Vec<(&'static str, mpsc::Sender<Bytes>)>,
    queries: Vec<String>,
}

const COLLECTIONS: [&str; 3] = ["services", "endpointslices", "nodes"];

impl Api {
    pub fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<_>| {
            let response = api.answer(&request);
            async move { Ok::<_, Infallible>(response) }
        });
        Client::new(service, "kube-proxy")
    }

    pub fn put(&self, collection: &'static str, object: &impl Serialize) {
        let mut object = serde_json::to_value(object).expect("JSON");
        let mut state = self.0.lock().expect("no panic");
        state.revision += 1;
        object["metadata"]["resourceVersion"] = json!(state.revision.to_string());
        object["metadata"]["uid"] = object["metadata"]["name"].clone();
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        let known = state.objects.insert((collection, name), object.clone()).is_some();
        let kind = if known { "MODIFIED" } else { "ADDED" };
        let line = format!("{}\n", json!({"type": kind, "object": object}));
        state.watches.retain(|(of, watch)| {
            *of != collection || watch.try_send(Bytes::from(line.clone())).is_ok()
        });
    }

    pub fn remove(&self, collection: &'static str, name: &str) {
        let mut state = self.0.lock().expect("no panic");
        state.revision += 1;
        let gone = state.objects.remove(&(collection, name.to_owned()));
        let mut object = gone.expect("it was put");
        object["metadata"]["resourceVersion"] = json!(state.revision.to_string());
        let line = format!("{}\n", json!({"type": "DELETED", "object": object}));
        state.watches.retain(|(of, watch)| {
            *of != collection || watch.try_send(Bytes::from(line.clone())).is_ok()
        });
    }

    pub fn queries(&self) -> Vec<String> {
        self.0.lock().expect("no panic").queries.clone()
    }

    fn answer<B>(&self, request: &Request<B>) -> Response<Body> {
        let mut state = self.0.lock().expect("no panic");
        let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
        state.queries.push(format!("{path}?{query}"));
        let Some(collection) = COLLECTIONS.into_iter().find(|name| path.ends_with(name)) else {
            return Response::builder().status(404).body(whole("{}")).expect("a response");
        };
        if !query.contains("watch=") {
            let objects = state.objects.iter().filter(|((of, _), _)| *of == collection);
            let items: Vec<&Value> = objects.map(|(_, object)| object).collect();
            let metadata = json!({"resourceVersion": state.revision.to_string()});
            let list =
                json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items});
            return Response::new(whole(&list.to_string()));
        }
        let (sender, receiver) = mpsc::channel(100);
        state.watches.push((collection, sender));
        let frames = futures::stream::unfold(receiver, async |mut receiver| {
            let bytes = receiver.recv().await?;
            Some((Ok(Frame::data(bytes)), receiver))
        });
        Response::new(StreamBody::new(frames).boxed_unsync())
    }
}

fn whole(text: &str) -> Body {
    Full::new(Bytes::from(text.to_owned())).boxed_unsync()
}
