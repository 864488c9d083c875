//! Whole servers without a connection: the API server with every built-in kind and custom resource
//! definitions, and a member of etcd, each on a simulated store. What is fed goes the way that a client's
//! bytes go: negotiation, decoding, defaults, validation; messages, conversion, transactions.
//!
//! In: bytes, of which the first few choose what is asked. Out: nothing; a panic, and an answer that tells
//! of one, is a finding. Writes to the API are dry runs, so that its state stays.

use std::cell::RefCell;
use std::hint::black_box;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use apiserver::request::UserInfo;
use apiserver::resource::{Body, Connect, CreateHandler, Created, Resource, ResourceTable};
use base::task::Tasks;
use http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tower::Service;

/// After so many calls a member starts anew: what is put into its store stays there.
const CALLS_OF_A_MEMBER: usize = 2_000;
/// An answer that goes on (a watch) is followed no longer.
const PATIENCE: Duration = Duration::from_millis(20);
/// What a caught panic is answered with. Other answers of 500 are upstream's own.
const PANIC: &str = "caused apiserver to panic";
/// Of a request's head: two bytes for the resource, one for what is done with it.
const HEAD: usize = 3;

/// Everybody may do everything: who may not is another's matter.
struct Anybody;

#[async_trait::async_trait]
impl apiserver::authz::Authorizer for Anybody {
    async fn authorize(&self, _: &apiserver::authz::Attributes) -> apiserver::authz::Decision {
        apiserver::authz::Decision::Allow { reason: String::new() }
    }
}

struct NoTokens;

#[async_trait::async_trait]
impl CreateHandler for NoTokens {
    fn codec(&self) -> &dyn machinery::object::Codec {
        static CODEC: machinery::object::Typed<k8s_openapi::api::authentication::v1::TokenRequest> =
            machinery::object::Typed::new();
        &CODEC
    }

    async fn create(
        &self,
        _: &apiserver::Registry,
        _: &apiserver::request::RequestContext,
        _: &apiserver::request::Key,
        _: Box<dyn machinery::Object>,
    ) -> Result<Created, machinery::StatusError> {
        Ok(Created::Success)
    }
}

/// There are no kubelets, and nothing else to pass requests on to.
struct NoNodes;

#[async_trait::async_trait]
impl Connect for NoNodes {
    async fn connect(
        &self,
        _: &apiserver::Registry,
        _: &apiserver::request::RequestContext,
        _: &apiserver::request::Key,
        _: Request<Body>,
    ) -> Result<http::Response<Body>, machinery::StatusError> {
        Err(machinery::StatusError::bad_request("no nodes"))
    }
}

/// All built-in kinds, those that are off by default too, and definitions of others.
fn table() -> ResourceTable {
    let facts: Option<Arc<dyn machinery::patch::Schema>> = Some(Arc::new(api::facts::Facts));
    let mut table = resources::table(resources::Options {
        event_ttl: std::time::Duration::from_secs(3600),
        schema: facts.clone(),
        node_ports: 30000..=32767,
        connections: Box::new(|_| Arc::new(NoNodes)),
        tokens: Arc::new(NoTokens),
        is_on: Box::new(|_| true),
        allow_privileged: true,
    });
    table.insert(Arc::new(extensions::definition::row(facts)));
    table
}

fn collection(row: &Resource) -> String {
    let namespace = if row.namespaced { "namespaces/default/" } else { "" };
    match row.group.as_str() {
        "" => format!("/api/{}/{namespace}{}", row.version, row.plural),
        group => format!("/apis/{group}/{}/{namespace}{}", row.version, row.plural),
    }
}

/// What is done with the resource, by the third byte: method, what follows the collection's path,
/// Content-Type. All bodies may be compressed, all answers asked for in all forms.
const DEEDS: &[(&str, &str, &str)] = &[
    ("POST", "?dryRun=All&fieldValidation=Strict", "application/json"),
    ("POST", "?dryRun=All", "application/vnd.kubernetes.protobuf"),
    ("POST", "?dryRun=All&fieldValidation=Warn", "application/yaml"),
    ("PUT", "/x?dryRun=All", "application/json"),
    ("PUT", "/x?dryRun=All", "application/vnd.kubernetes.protobuf"),
    ("PATCH", "/x?dryRun=All", "application/json-patch+json"),
    ("PATCH", "/x?dryRun=All", "application/merge-patch+json"),
    ("PATCH", "/x?dryRun=All", "application/strategic-merge-patch+json"),
    ("PATCH", "/x?dryRun=All&fieldManager=f&force=true", "application/apply-patch+yaml"),
    ("PATCH", "/x/status?dryRun=All", "application/merge-patch+json"),
    ("PATCH", "/x/scale?dryRun=All", "application/merge-patch+json"),
    ("PUT", "/x/status?dryRun=All", "application/json"),
    ("DELETE", "/x?dryRun=All", "application/json"),
    ("DELETE", "/x?dryRun=All", "application/vnd.kubernetes.protobuf"),
    ("DELETE", "?dryRun=All", "application/json"),
    // The body is the query.
    ("GET", "?", ""),
    ("GET", "/x?", ""),
];

struct Api {
    runtime: Runtime,
    service: apiserver::serve::ServerService,
    rows: Vec<Arc<Resource>>,
}

impl Api {
    fn start() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let entered = runtime.enter();
        let tasks = Tasks::new("fuzz");
        let registry =
            apiserver::Registry::new(store::Sim::open(), table(), Default::default(), tasks);
        let rows: Vec<Arc<Resource>> = registry.resources().iter().cloned().collect();
        let options = apiserver::serve::Options {
            schemas: Some(Arc::new(resources::schemas::BuiltIn)),
            protobuf: Some(api::protobuf::descriptors),
            ..Default::default()
        };
        let server =
            apiserver::serve::Server::new(registry, vec![], vec![Box::new(Anybody)], options);
        drop(entered);
        let service = server.local(UserInfo::new("fuzz", &["system:masters"]));
        let mut api = Self { runtime, service, rows };
        for (path, object) in there() {
            let body = object.to_string().into_bytes();
            let status = api.ask("POST", path, "application/json", body);
            assert_eq!(status, 201, "{path}: {object}");
        }
        api
    }

    fn ask(&mut self, method: &str, path: &str, content_type: &str, body: Vec<u8>) -> u16 {
        let accept =
            ["application/json", "application/vnd.kubernetes.protobuf", "application/yaml"]
                [body.len() % 3];
        let mut request = Request::builder().method(method).uri(path).header("accept", accept);
        if !content_type.is_empty() {
            request = request.header("content-type", content_type);
        }
        if body.starts_with(b"\x1f\x8b") {
            request = request.header("content-encoding", "gzip");
        }
        let Ok(request) = request.body(transport::full(body)) else { return 0 };
        let answer = self.service.call(request);
        self.runtime.block_on(async {
            let Ok(answer) = answer.await;
            let status = answer.status().as_u16();
            let body = tokio::time::timeout(PATIENCE, answer.into_body().collect()).await;
            let text = body.ok().and_then(Result::ok).map(|body| body.to_bytes());
            let text = String::from_utf8_lossy(text.as_deref().unwrap_or_default()).into_owned();
            assert!(!text.contains(PANIC), "{method} {path}: {status} {text}");
            status
        })
    }
}

/// What is there to be changed and read.
fn there() -> Vec<(&'static str, Value)> {
    let pod = json!({ "containers": [{ "name": "c", "image": "i" }] });
    let template = json!({ "metadata": { "labels": { "a": "b" } }, "spec": pod });
    let selector = json!({ "matchLabels": { "a": "b" } });
    let spec = json!({ "selector": selector, "template": template });
    let named = json!({ "name": "x" });
    vec![
        ("/api/v1/namespaces", json!({ "metadata": { "name": "default" } })),
        (
            "/api/v1/namespaces/default/configmaps",
            json!({ "metadata": named, "data": { "a": "b" } }),
        ),
        ("/api/v1/namespaces/default/pods", json!({ "metadata": named, "spec": pod })),
        (
            "/apis/apps/v1/namespaces/default/deployments",
            json!({ "metadata": named, "spec": spec }),
        ),
        (
            "/api/v1/namespaces/default/secrets",
            json!({ "metadata": named, "data": { "a": "AAAA" } }),
        ),
        ("/api/v1/nodes", json!({ "metadata": named })),
        ("/apis/rbac.authorization.k8s.io/v1/clusterroles", json!({ "metadata": named })),
    ]
}

thread_local! {
    static API: RefCell<Option<Api>> = const { RefCell::new(None) };
    static MEMBER: RefCell<Option<Member>> = const { RefCell::new(None) };
}

/// A request to the API server.
pub fn api(data: &[u8]) {
    let Some((head, body)) = data.split_at_checked(HEAD) else { return };
    API.with_borrow_mut(|api| {
        let api = api.get_or_insert_with(Api::start);
        let index = usize::from(u16::from_be_bytes([head[0], head[1]])) % api.rows.len();
        let (method, rest, content_type) = DEEDS[usize::from(head[2]) % DEEDS.len()];
        let mut path = collection(&api.rows[index]) + rest;
        if rest.ends_with('?') {
            path.push_str(&String::from_utf8_lossy(body));
            // Watches go on; they are not what is looked for here.
            path = path.replace("watch", "w");
        }
        api.ask(
            method,
            &path,
            content_type,
            if rest.ends_with('?') { vec![] } else { body.to_vec() },
        );
    });
}

/// Every kind once as JSON and once as protobuf, in full where upstream's fixtures are there; what
/// changes the objects that are there; a few queries.
pub fn requests() -> Vec<Vec<u8>> {
    let table = table();
    let rows: Vec<Arc<Resource>> = table.iter().cloned().collect();
    let fixtures = fixtures();
    let mut seeds = vec![];
    for (index, row) in rows.iter().enumerate() {
        let index = u16::try_from(index).expect("a few hundred").to_be_bytes();
        let mut seed = |deed: u8, body: &[u8]| seeds.push([&index[..], &[deed], body].concat());
        let own = |one: &&Fixture| one.api_version == row.api_version() && one.kind == row.kind;
        let least = json!({ "apiVersion": row.api_version(), "kind": row.kind, "metadata": { "name": "x" } });
        match fixtures.iter().find(own) {
            Some(fixture) => {
                seed(0, &fixture.json);
                seed(1, &fixture.protobuf);
            }
            None => seed(0, least.to_string().as_bytes()),
        }
        if row.group.is_empty() && matches!(row.plural.as_str(), "configmaps" | "pods")
            || row.plural == "deployments"
        {
            seed(3, least.to_string().as_bytes());
            seed(5, br#"[{"op":"test","path":"/metadata/name","value":"x"},{"op":"add","path":"/metadata/labels","value":{"c":"d"}},{"op":"copy","from":"/metadata","path":"/metadata/annotations"}]"#);
            seed(
                6,
                br#"{"metadata":{"labels":{"c":"d"},"finalizers":["a/b"]},"spec":{"replicas":3}}"#,
            );
            seed(7, br#"{"spec":{"template":{"spec":{"containers":[{"name":"c","env":[{"name":"e","value":"f"}]},{"$patch":"delete","name":"d"}],"$setElementOrder/containers":[{"name":"c"}]}}}}"#);
            seed(
                8,
                &least
                    .to_string()
                    .replace(r#""name":"x""#, r#""labels":{"c":"d"},"name":"x""#)
                    .into_bytes(),
            );
            seed(12, br#"{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":0,"propagationPolicy":"Orphan","preconditions":{"uid":"u"}}"#);
            seed(15, b"labelSelector=a%20in%20(b,c),!d&fieldSelector=metadata.name!%3Dx&limit=1&resourceVersion=0&resourceVersionMatch=NotOlderThan");
            seed(15, b"limit=1&continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6Miwic3RhcnQiOiJhIn0&sendInitialEvents=true&timeoutSeconds=1");
        }
    }
    seeds
}

/// Messages of all kinds, in their envelopes.
pub fn messages() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = fixtures().into_iter().map(|fixture| fixture.protobuf).collect();
    seeds.push(
        b"k8s\0\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x0a\x0a\x08\x0a\x01a\x12\x00\x1a\x01b".to_vec(),
    );
    seeds.push(b"k8s\0\x0a\x0f\x0a\x02v1\x12\x09ConfigMap\x12\x0c\x0a\x03\x0a\x01a\x12\x05\x0a\x01k\x12\x00".to_vec());
    seeds
}

struct Fixture {
    api_version: String,
    kind: String,
    json: Vec<u8>,
    protobuf: Vec<u8>,
}

/// Upstream's own objects with every field filled, where they lie beside the repository.
fn fixtures() -> Vec<Fixture> {
    let manifest = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let archive = "shared/spec/roundtrip-fixtures-v1.36.tar.gz";
    let Some(archive) = manifest.ancestors().map(|one| one.join(archive)).find(|one| one.is_file())
    else {
        return vec![];
    };
    let directory = std::env::temp_dir().join(format!("decapod-seeds-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a temporary directory");
    let status = Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(&directory).status();
    assert!(status.expect("tar runs").success(), "the fixtures cannot be unpacked");
    let entries = std::fs::read_dir(&directory).expect("the fixtures");
    let read = |path: std::path::PathBuf| {
        let json = std::fs::read(path.with_extension("json")).ok()?;
        let tree: Value = serde_json::from_slice(&json).ok()?;
        let text = |name: &str| tree[name].as_str().unwrap_or_default().to_owned();
        let protobuf = std::fs::read(&path).ok()?;
        Some(Fixture { api_version: text("apiVersion"), kind: text("kind"), json, protobuf })
    };
    let is_message = |path: &std::path::PathBuf| path.extension().is_some_and(|one| one == "pb");
    let mut paths: Vec<_> = entries.flatten().map(|one| one.path()).filter(is_message).collect();
    paths.sort();
    let all = paths.into_iter().filter_map(read).collect();
    let _ = std::fs::remove_dir_all(&directory);
    all
}

struct Member {
    runtime: Runtime,
    server: etcd::server::Server,
    calls: usize,
}

impl Member {
    fn start() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let entered = runtime.enter();
        let store = store::Sim::open();
        let server = etcd::server::Server::new(store, Default::default(), Tasks::new("fuzz"));
        drop(entered);
        Self { runtime, server, calls: 0 }
    }
}

/// The methods of a member that take a message.
const METHODS: &[&str] = &[
    "etcdserverpb.KV/Range",
    "etcdserverpb.KV/Put",
    "etcdserverpb.KV/DeleteRange",
    "etcdserverpb.KV/Txn",
    "etcdserverpb.KV/Compact",
    "etcdserverpb.Watch/Watch",
    "etcdserverpb.Lease/LeaseGrant",
    "etcdserverpb.Lease/LeaseRevoke",
    "etcdserverpb.Lease/LeaseKeepAlive",
    "etcdserverpb.Lease/LeaseTimeToLive",
    "etcdserverpb.Lease/LeaseLeases",
    "etcdserverpb.Maintenance/Alarm",
    "etcdserverpb.Maintenance/HashKV",
    "etcdserverpb.Maintenance/Snapshot",
    "decapod.v1.History/RevisionAt",
];

/// A call of a member: the first byte is the method, the rest its message.
pub fn etcd(data: &[u8]) {
    let Some((method, message)) = data.split_first() else { return };
    MEMBER.with_borrow_mut(|member| {
        let member = match member {
            Some(present) if present.calls < CALLS_OF_A_MEMBER => present,
            _ => member.insert(Member::start()),
        };
        member.calls += 1;
        let length = u32::try_from(message.len()).expect("inputs are small").to_be_bytes();
        let body = [&[0], &length[..], message].concat();
        let request = Request::post(format!("/{}", METHODS[usize::from(*method) % METHODS.len()]))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(transport::full(body))
            .expect("a request");
        let answer = member.server.call(request);
        member.runtime.block_on(async {
            let Ok(answer) = answer.await;
            let body = tokio::time::timeout(PATIENCE, answer.into_body().collect()).await;
            drop(black_box(body));
        });
    });
}

pub fn calls() -> Vec<Vec<u8>> {
    let one: &[&[u8]] = &[
        b"\0\x0a\x01a\x12\x01\0\x18\x02\x28\x01\x30\x04",
        b"\x01\x0a\x01a\x12\x03xyz\x20\x01",
        b"\x02\x0a\x01a\x12\x01b\x18\x01",
        // If a's version is 0: put, else get; a transaction within one.
        b"\x03\x0a\x07\x08\0\x10\0\x1a\x01a\x12\x09\x12\x07\x0a\x01a\x12\x02zz\x1a\x05\x0a\x03\x0a\x01a",
        b"\x03\x12\x0d\x22\x0b\x12\x09\x12\x07\x0a\x01b\x12\x02zz",
        b"\x04\x08\x02\x10\x01",
        b"\x05\x0a\x0b\x0a\x01a\x12\x01\0\x18\x01\x20\x01\x30\x01",
        b"\x05\x12\x02\x08\x01",
        b"\x06\x08\x0a\x10\x07",
        b"\x07\x08\x07",
        b"\x08\x08\x07",
        b"\x09\x08\x07\x10\x01",
        b"\x0a",
        b"\x0b\x08\x01\x10\0\x18\x01",
        b"\x0c\x08\x02",
        b"\x0d",
        b"\x0e\x08\x01",
    ];
    super::owned(one)
}
