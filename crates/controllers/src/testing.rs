//! API servers for tests.
//!
//! [`client`]: a function from requests to answers. In: what the test says about a request; `None` is 404. Out: a
//! client. Watches tell nothing, ever.
//!
//! [`Live`]: collections that the test changes, with lists and watches. What clients write is answered and forgotten.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use client::Client;
use futures::stream;
use http::{Method, Request, Response, header};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// The parts of a request that a test sees.
pub struct Asked {
    pub method: Method,
    pub uri: http::Uri,
    pub accept: String,
}

impl Asked {
    pub fn path(&self) -> &str {
        self.uri.path()
    }

    /// The value of a query parameter.
    pub fn query(&self, name: &str) -> Option<&str> {
        let pairs = self.uri.query().unwrap_or_default().split('&');
        pairs
            .filter_map(|pair| pair.split_once('='))
            .find(|(key, _)| *key == name)
            .map(|pair| pair.1)
    }
}

pub fn client(answer: impl Fn(&Asked) -> Option<Value> + Send + Sync + 'static) -> Client {
    let answer = Arc::new(answer);
    let service = tower::service_fn(move |request: Request<_>| {
        let answer = answer.clone();
        async move { Ok::<_, Infallible>(respond(request, &*answer)) }
    });
    Client::new(service, "test")
}

/// Cheap to clone; clones are the same server.
#[derive(Clone, Default)]
pub struct Live(Arc<Mutex<Collections>>);

#[derive(Default)]
struct Collections {
    revision: u64,
    /// By path, then by name.
    objects: BTreeMap<String, BTreeMap<String, Value>>,
    watches: Vec<(String, mpsc::Sender<Bytes>)>,
}

impl Live {
    pub fn client(&self) -> Client {
        let live = self.clone();
        let service = tower::service_fn(move |request: Request<_>| {
            let live = live.clone();
            async move { Ok::<_, Infallible>(live.answer(request).await) }
        });
        Client::new(service, "test")
    }

    /// Puts an object into the collection of this path, in place of the one of its name.
    pub fn put(&self, path: &str, mut object: Value) {
        let mut all = self.0.lock().expect("no panic while held");
        all.revision += 1;
        object["metadata"]["resourceVersion"] = all.revision.to_string().into();
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let line = json!({"type": "MODIFIED", "object": object});
        all.objects.entry(path.to_owned()).or_default().insert(name, object);
        let line = Bytes::from(format!("{line}\n"));
        all.watches.retain(|(of, watch)| of != path || watch.try_send(line.clone()).is_ok());
    }

    async fn answer<B>(&self, request: Request<B>) -> Response<UnsyncBoxBody<Bytes, Infallible>>
    where
        B: http_body::Body,
    {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        if matches!(parts.method, Method::POST | Method::PUT) {
            let body = body.collect().await.map_or_else(|_| Bytes::new(), |body| body.to_bytes());
            return Response::new(Full::new(body).boxed_unsync());
        }
        let is_watch = parts.uri.query().is_some_and(|query| query.contains("watch=true"));
        let mut all = self.0.lock().expect("no panic while held");
        if parts.method != Method::GET || !is_collection(&path) {
            return not_found();
        }
        if is_watch {
            let (sender, receiver) = mpsc::channel(1024);
            all.watches.push((path, sender));
            let frames = stream::unfold(receiver, async |mut receiver| {
                let line = receiver.recv().await?;
                Some((Ok(Frame::data(line)), receiver))
            });
            return Response::new(StreamBody::new(frames).boxed_unsync());
        }
        let items: Vec<&Value> =
            all.objects.get(&path).into_iter().flat_map(|all| all.values()).collect();
        let version = all.revision.to_string();
        let list = json!({"metadata": {"resourceVersion": version}, "items": items});
        Response::new(Full::new(Bytes::from(list.to_string())).boxed_unsync())
    }
}

/// `/api/v1/pods`, `/apis/apps/v1/daemonsets`: of all namespaces.
fn is_collection(path: &str) -> bool {
    let parts = path.trim_start_matches('/').split('/').count();
    (path.starts_with("/api/") && parts == 3) || (path.starts_with("/apis/") && parts == 4)
}

fn not_found() -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let status = json!({"kind": "Status", "code": 404, "reason": "NotFound", "message": "none"});
    let body = Full::new(Bytes::from(status.to_string())).boxed_unsync();
    Response::builder().status(404).body(body).expect("a response")
}

fn respond<B>(
    request: Request<B>,
    answer: &impl Fn(&Asked) -> Option<Value>,
) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let (parts, _) = request.into_parts();
    let accept = parts.headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let accept = accept.unwrap_or_default().to_owned();
    let asked = Asked { method: parts.method, uri: parts.uri, accept };
    if asked.query("watch").is_some() {
        let nothing = stream::pending::<Result<Frame<Bytes>, Infallible>>();
        return Response::new(StreamBody::new(nothing).boxed_unsync());
    }
    let Some(value) = answer(&asked) else { return not_found() };
    Response::new(Full::new(Bytes::from(value.to_string())).boxed_unsync())
}
