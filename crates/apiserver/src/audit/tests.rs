//! The audit log from outside: requests through the whole stack, events in a file.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use http::Request;
use http::request::Parts;
use http_body_util::{BodyExt, Full};
use machinery::StatusError;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::log::{Log, Rotation};
use super::*;
use crate::Registry;
use crate::admission::Chain;
use crate::authn::Authenticator;
use crate::authz::{Attributes, Authorizer, Decision};
use crate::request::UserInfo;
use crate::serve::{Options, Server};
use crate::testing;

struct ByHeader;

#[async_trait]
impl Authenticator for ByHeader {
    async fn authenticate(&self, request: &Parts) -> Result<Option<UserInfo>, StatusError> {
        match request.headers.get("user").and_then(|name| name.to_str().ok()) {
            None | Some("garbage") => Err(StatusError::unauthorized()),
            Some(name) => Ok(Some(UserInfo::new(name, &[]))),
        }
    }
}

struct AdminOnly;

#[async_trait]
impl Authorizer for AdminOnly {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        match attributes.user.name.as_str() {
            "admin" => Decision::Allow { reason: "because".into() },
            "buggy" => panic!("on purpose"),
            _ => Decision::NoOpinion { reason: "nobody said yes".into() },
        }
    }
}

struct Bench {
    server: Server,
    path: PathBuf,
    tasks: Tasks,
    audit: Arc<Audit>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Bench {
    fn new(rules: &str) -> Self {
        Self::limited(rules, None)
    }

    fn limited(rules: &str, truncation: Option<Truncation>) -> Self {
        let tasks = Tasks::new("test");
        let path = std::env::temp_dir().join(format!("decapod-audit-{}.log", base::rng::uuid()));
        let rotation =
            Rotation { max_megabytes: 1, max_backups: 0, max_age_days: 0, compress: false };
        let log = Log::open(&path.to_string_lossy(), rotation).expect("a log");
        let batching =
            Batching { buffer: 1, max_size: 1, max_wait: Duration::ZERO, throttle: None };
        let writer = Writer::Log(Arc::new(log));
        let backend = Backend::new(writer, Mode::Blocking, batching, false, truncation, &tasks);
        let policy = Policy::parse(&format!("apiVersion: audit.k8s.io/v1\nkind: Policy\n{rules}"));
        let audit = Audit::new(policy.expect("a policy"), vec![backend], tasks.clone());
        let figures = audit.clone();
        let registry =
            Registry::new(store::Sim::open(), testing::table(), Chain::default(), tasks.clone());
        let options = Options { audit: Some(audit), ..Options::default() };
        let server =
            Server::new(registry, vec![Box::new(ByHeader)], vec![Box::new(AdminOnly)], options);
        Self { server, path, tasks, audit: figures }
    }

    fn figure(&self, name: &str) -> u64 {
        let mut text = String::new();
        self.audit.metrics(&mut text);
        let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a figure");
        line.trim().parse().expect("a number")
    }

    async fn ask(&self, line: &str, user: &str, headers: &[(&str, &str)], body: &str) -> String {
        let (method, uri) = line.split_once(' ').expect("method and path");
        let mut request = Request::builder()
            .method(method)
            .uri(uri)
            .header("user", user)
            .header("user-agent", "test/1")
            .header("x-forwarded-for", "192.0.2.7");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(bytes::Bytes::from(body.to_owned())));
        let request = request.expect("a request");
        let response = self.server.service().oneshot(request).await.expect("infallible");
        let id = response.headers()["audit-id"].to_str().expect("text").to_owned();
        let _ = response.into_body().collect().await;
        id
    }

    fn events(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.path).expect("a log");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// The events so far as `stage code`.
    fn stages(&self) -> Vec<String> {
        let one = |event: &Value| {
            let code = event["responseStatus"]["code"].as_u64().unwrap_or_default();
            format!("{} {code}", event["stage"].as_str().unwrap_or_default())
        };
        self.events().iter().map(one).collect()
    }
}

const CREATE: &str = "POST /api/v1/namespaces/default/configmaps";
const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn config_map() -> String {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "v"}})
        .to_string()
}

#[tokio::test]
async fn a_create_is_recorded_with_both_objects() {
    let bench = Bench::new("rules: [{level: RequestResponse, omitManagedFields: true}]");
    let headers = [JSON[0], ("audit-id", "given-by-the-client")];
    let id = bench.ask(CREATE, "admin", &headers, &config_map()).await;
    assert_eq!(bench.stages(), ["RequestReceived 0", "ResponseComplete 201"]);
    let event = bench.events().pop().expect("two");
    assert_eq!(event["auditID"], id.as_str());
    assert_eq!(event["auditID"], "given-by-the-client");
    assert_eq!(event["verb"], "create");
    assert_eq!(event["user"], json!({"username": "admin", "groups": ["system:authenticated"]}));
    assert_eq!(event["sourceIPs"], json!(["192.0.2.7"]));
    assert_eq!(
        event["objectRef"],
        json!({"resource": "configmaps", "namespace": "default", "name": "a", "apiVersion": "v1"})
    );
    assert_eq!(event["requestObject"]["data"]["k"], "v");
    assert!(event["requestObject"]["metadata"]["uid"].is_null(), "as sent");
    assert!(event["responseObject"]["metadata"]["uid"].is_string(), "as stored");
    assert!(event["responseObject"]["metadata"]["managedFields"].is_null());
    assert_eq!(
        event["annotations"],
        json!({"authorization.k8s.io/decision": "allow", "authorization.k8s.io/reason": "because"})
    );
}

#[tokio::test]
async fn metadata_has_no_objects_and_stages_can_be_omitted() {
    let bench = Bench::new("rules: [{level: Metadata}]\nomitStages: [RequestReceived]");
    bench.ask(CREATE, "admin", JSON, &config_map()).await;
    bench.ask("DELETE /api/v1/namespaces/default/configmaps/a", "admin", &[], "").await;
    let events = bench.events();
    assert_eq!(bench.stages(), ["ResponseComplete 201", "ResponseComplete 200"]);
    for event in &events {
        assert!(event["requestObject"].is_null() && event["responseObject"].is_null());
    }
    // A Status is recorded at any level.
    assert_eq!(events[0]["responseStatus"], json!({"metadata": {}, "code": 201}));
    assert_eq!(events[1]["responseStatus"]["status"], "Success");
    assert_eq!(events[1]["responseStatus"]["details"]["name"], "a");
}

#[tokio::test]
async fn refusals_are_recorded_with_their_reason() {
    let bench = Bench::new("rules: [{level: Metadata}]");
    bench.ask("GET /api/v1/namespaces/default/configmaps/a", "jane", &[], "").await;
    let event = bench.events().pop().expect("two");
    assert_eq!(event["responseStatus"]["code"], 403);
    assert_eq!(event["responseStatus"]["reason"], "Forbidden");
    assert_eq!(event["annotations"]["authorization.k8s.io/decision"], "forbid");
    assert_eq!(event["annotations"]["authorization.k8s.io/reason"], "nobody said yes");
    let headers = [("authorization", "Bearer x")];
    bench.ask("GET /api/v1/namespaces/default/configmaps/a", "garbage", &headers, "").await;
    let event = bench.events().pop().expect("three");
    assert_eq!(event["stage"], "ResponseStarted");
    assert_eq!(event["user"], json!({}));
    assert_eq!(event["responseStatus"]["code"], 401);
    assert_eq!(event["responseStatus"]["message"], "Authentication failed, attempted: bearer");
}

#[tokio::test]
async fn impersonation_is_recorded_with_both_users() {
    let bench = Bench::new("rules: [{level: Metadata}]\nomitStages: [RequestReceived]");
    let headers = [("impersonate-user", "jane"), ("impersonate-group", "dev")];
    bench.ask("GET /api/v1/namespaces/default/configmaps/a", "admin", &headers, "").await;
    let event = bench.events().pop().expect("one");
    assert_eq!(event["user"]["username"], "admin");
    assert_eq!(event["impersonatedUser"]["username"], "jane");
    assert_eq!(event["impersonatedUser"]["groups"][0], "dev");
    let constraint = json!({"impersonationConstraint": "impersonate:user-info"});
    assert_eq!(event["authenticationMetadata"], constraint);
    assert_eq!(event["responseStatus"]["code"], 403);
}

#[tokio::test]
async fn a_watch_has_a_beginning_and_an_end() {
    let bench = Bench::new("rules: [{level: RequestResponse}]");
    let line = "GET /api/v1/namespaces/default/configmaps?watch=1&timeoutSeconds=1";
    bench.ask(line, "admin", &[], "").await;
    bench.tasks.shutdown(testkit::wait::LONG).await;
    assert_eq!(
        bench.stages(),
        ["RequestReceived 0", "ResponseStarted 200", "ResponseComplete 200"]
    );
    assert!(bench.events().iter().all(|event| event["responseObject"].is_null()));
}

#[tokio::test]
async fn a_panic_is_a_stage_of_its_own() {
    let bench = Bench::new("rules: [{level: Metadata}]\nomitStages: [RequestReceived]");
    bench.ask("GET /api/v1/namespaces/default/configmaps/a", "buggy", &[], "").await;
    assert_eq!(bench.stages(), ["Panic 500"]);
    let message = &bench.events()[0]["responseStatus"]["message"];
    assert_eq!(message, "APIServer panic'd: on purpose");
}

#[tokio::test]
async fn omitted_requests_are_not_recorded() {
    let bench = Bench::new(
        "rules:\n- {level: None, nonResourceURLs: [/healthz*]}\n- {level: None, verbs: [get]}\n- {level: Metadata}",
    );
    bench.ask("GET /healthz", "admin", &[], "").await;
    bench.ask("GET /api/v1/namespaces/default/configmaps/a", "admin", &[], "").await;
    assert!(bench.events().is_empty());
    bench.ask("GET /api/v1/namespaces/default/configmaps", "admin", &[], "").await;
    assert_eq!(bench.stages().len(), 2);
}

/// Upstream: truncation removes the objects first, and the event if it is still too large.
#[tokio::test]
async fn large_events_lose_their_objects_and_larger_ones_are_lost() {
    let limit = Truncation { max_event: 2000, max_batch: 10_000 };
    let rules = "rules: [{level: RequestResponse}]\nomitStages: [RequestReceived]";
    let bench = Bench::limited(rules, Some(limit));
    bench.ask(CREATE, "admin", JSON, &config_map()).await;
    let large = config_map()
        .replace("\"a\"", "\"large\"")
        .replace("\"v\"", &format!("{:?}", "x".repeat(2000)));
    bench.ask(CREATE, "admin", JSON, &large).await;
    let events = bench.events();
    assert_eq!(bench.stages(), ["ResponseComplete 201", "ResponseComplete 201"]);
    assert!(events[0]["requestObject"].is_object() && events[0]["responseObject"].is_object());
    assert!(events[0]["annotations"]["audit.k8s.io/truncated"].is_null());
    assert!(events[1]["requestObject"].is_null() && events[1]["responseObject"].is_null());
    assert_eq!(events[1]["annotations"]["audit.k8s.io/truncated"], "true");
    assert_eq!(events[1]["objectRef"]["name"], "large");
    assert_eq!(bench.figure("apiserver_audit_error_total{plugin=\"truncate\"}"), 0);
    // This event has no objects to remove; the request is answered all the same.
    let long = format!("GET /api/v1/namespaces/default/configmaps?x={}", "x".repeat(2000));
    bench.ask(&long, "admin", &[], "").await;
    assert_eq!(bench.events().len(), 2);
    assert_eq!(bench.figure("apiserver_audit_error_total{plugin=\"truncate\"}"), 1);
}
