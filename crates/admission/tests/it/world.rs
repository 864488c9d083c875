//! A registry with some rows and a whole admission chain, and webhooks that answer from a table.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use apiserver::admission::Chain;
use apiserver::authz::{self, Authorizer, Decision};
use apiserver::registry::{DeleteOptions, Intent, Written};
use apiserver::request::{Key, RequestContext, UserInfo};
use apiserver::resource::{
    Behaviour, Body, Connect, Resource, ResourceTable, Settings, Subresource, SubresourceKind,
};
use apiserver::{Registry, StatusError};
use base::task::Tasks;
use base64::Engine;
use bytes::Bytes;
use decapod_admission as admission;
use http::{Request, Response};
use http_body_util::BodyExt;
use k8s_openapi::Metadata;
use machinery::ObjectMeta;
use pki::{Authority, Profile};
use serde_json::{Value, json};
use transport::tls::{ClientCerts, Identity, server_tls};
use transport::{Incoming, Limits, Listener};

struct NoStream;

#[async_trait::async_trait]
impl Connect for NoStream {
    async fn connect(
        &self,
        _: &Registry,
        _: &RequestContext,
        _: &Key,
        _: Request<Body>,
    ) -> Result<Response<Body>, StatusError> {
        Err(StatusError::internal("no stream in this test"))
    }
}

pub fn row<T: Metadata<Ty = ObjectMeta> + 'static>() -> Resource {
    let attach = Subresource {
        name: "attach",
        kind: Some(SubresourceKind { group: "", version: "v1", kind: "PodAttachOptions" }),
        verbs: &["create", "get"],
        behaviour: Behaviour::Connect(Arc::new(NoStream)),
    };
    let codec = api::kinds::codec(T::API_VERSION, T::KIND).expect("a known kind");
    Resource {
        settings: Settings { name_errors: |_| vec![], ..Settings::DEFAULT },
        subresources: if T::KIND == "Pod" { vec![attach] } else { vec![] },
        ..Resource::of::<T>(codec)
    }
}

struct Nobody;

#[async_trait::async_trait]
impl Authorizer for Nobody {
    async fn authorize(&self, _: &authz::Attributes) -> Decision {
        Decision::NoOpinion { reason: String::new() }
    }
}

/// The plugins that are on by default, and these.
pub fn chain(enable: &[&str]) -> Chain {
    let enable = enable.iter().map(|name| (*name).to_owned()).collect();
    let authorizer = Some(Arc::new(Nobody) as Arc<dyn Authorizer>);
    let options = admission::Options { enable, authorizer, ..admission::Options::default() };
    admission::chain(&options).expect("known plugins")
}

pub struct World {
    pub registry: Registry,
    pub tasks: Tasks,
    pub user: UserInfo,
}

impl World {
    pub fn start(rows: Vec<Resource>, enable: &[&str]) -> Self {
        let tasks = Tasks::new("test");
        let table = ResourceTable::new(rows);
        let registry = Registry::new(store::Sim::open(), table, chain(enable), tasks.clone());
        Self { registry, tasks, user: UserInfo::new("jane", &["dev"]) }
    }

    pub fn context(&self, api_version: &str, kind: &str) -> RequestContext {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        let table = self.registry.resources();
        let row = table.by_kind(group, version, kind).expect("the row is there");
        RequestContext::new(self.user.clone(), row.clone(), "")
    }

    pub async fn write_in(&self, ctx: &RequestContext, tree: Value) -> Result<Value, StatusError> {
        let object = ctx.resource.codec.decode_value(tree).expect("decodes").object;
        let key = Key::new(object.namespace(), object.name());
        let there = self.registry.get(&ctx.resource, &key, None).await.is_ok();
        let intent = if there { Intent::Update { object } } else { Intent::Create { object } };
        self.registry.write(ctx, &key, intent).await.map(value)
    }

    /// Creates the object, or replaces it.
    pub async fn write(&self, tree: Value) -> Result<Value, StatusError> {
        let text = |key: &str| tree[key].as_str().expect("apiVersion and kind").to_owned();
        let ctx = self.context(&text("apiVersion"), &text("kind"));
        self.write_in(&ctx, tree).await
    }

    pub async fn delete(
        &self,
        ctx: &RequestContext,
        namespace: &str,
        name: &str,
    ) -> Result<Value, StatusError> {
        let intent = Intent::Delete { options: DeleteOptions::default() };
        self.registry.write(ctx, &Key::new(namespace, name), intent).await.map(value)
    }

    pub async fn namespace(&self, name: &str, labels: Value) {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "labels": labels}});
        self.write(namespace).await.expect("is written");
    }

    pub async fn shutdown(self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

fn value(written: Written) -> Value {
    written.object.object().expect("decodes").to_value()
}

/// Answers a request of a review by path.
pub type Answer = fn(&Value) -> Value;

/// An HTTPS server of webhooks, one per path; remembers what it was asked.
pub struct Webhooks {
    pub authority: Authority,
    pub address: SocketAddr,
    pub asked: Arc<Mutex<Vec<Value>>>,
    pub connections: Arc<Mutex<std::collections::BTreeSet<SocketAddr>>>,
    tasks: Tasks,
}

impl Webhooks {
    pub async fn start(answers: &[(&'static str, Answer)]) -> Self {
        let authority = Authority::generate("webhook-ca").expect("keys can be made");
        let profile = Profile::server("hook", vec![]).with_sans(["127.0.0.1", "hook.web.svc"]);
        let issued = authority.issue(&profile).expect("signs");
        let identity = Identity::from_pem(&issued.cert_pem, &issued.key_pem).expect("parses");
        let tls = server_tls(&identity, &ClientCerts::Ignore).expect("settings");
        let local = "127.0.0.1:0".parse().expect("an address");
        let listener = Listener::tcp(local).await.expect("binds");
        let address = listener.local_addr().expect("has one");
        let tasks = Tasks::new("webhooks");
        let answers: Arc<HashMap<&'static str, Answer>> =
            Arc::new(answers.iter().copied().collect());
        let asked: Arc<Mutex<Vec<Value>>> = Arc::default();
        let connections: Arc<Mutex<std::collections::BTreeSet<SocketAddr>>> = Arc::default();
        let (seen, peers) = (asked.clone(), connections.clone());
        let service = tower::service_fn(move |request: Request<Incoming>| {
            let (answers, seen, peers) = (answers.clone(), seen.clone(), peers.clone());
            async move {
                let info = request.extensions().get::<transport::ConnectionInfo>();
                if let Some(peer) = info.and_then(|info| info.remote) {
                    peers.lock().expect("the test's").insert(peer);
                }
                Ok::<_, std::convert::Infallible>(answer(&answers, &seen, request).await)
            }
        });
        let stop = tasks.stop_signal();
        let served = transport::serve(listener, Some(tls), service, Limits::default(), stop);
        tasks.spawn_graceful("serve", served);
        Self { authority, address, asked, connections, tasks }
    }

    pub fn ca_bundle(&self) -> String {
        base64::engine::general_purpose::STANDARD.encode(self.authority.cert_pem())
    }

    pub fn by_url(&self, path: &str) -> Value {
        json!({"url": format!("https://{}{path}", self.address), "caBundle": self.ca_bundle()})
    }

    pub fn asked(&self) -> Vec<Value> {
        std::mem::take(&mut *self.asked.lock().expect("the test's"))
    }

    pub async fn shutdown(self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

async fn answer(
    answers: &HashMap<&'static str, Answer>,
    seen: &Mutex<Vec<Value>>,
    request: Request<Incoming>,
) -> Response<transport::Body> {
    let (parts, body) = request.into_parts();
    let body: Bytes = body.collect().await.expect("arrives").to_bytes();
    let review: Value = serde_json::from_slice(&body).expect("a review");
    let Some(answer) = answers.get(parts.uri.path()) else {
        let missing = Response::builder().status(404).body(transport::full("no such hook"));
        return missing.expect("a response");
    };
    if parts.uri.path() == "/slow" {
        std::future::pending::<()>().await;
    }
    let mut response = answer(&review["request"]);
    response["uid"] = review["request"]["uid"].clone();
    if let Some(patch) = response.get("patch").cloned() {
        let text = base64::engine::general_purpose::STANDARD.encode(patch.to_string());
        response["patch"] = text.into();
        response["patchType"] = "JSONPatch".into();
    }
    seen.lock().expect("the test's").push(review["request"].clone());
    let body = json!({"kind": "AdmissionReview", "apiVersion": review["apiVersion"], "response": response});
    Response::new(transport::full(body.to_string()))
}
