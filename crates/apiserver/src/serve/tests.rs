//! The server from a client's view: requests through the whole stack, over a store in memory.

use std::time::Duration;

use async_trait::async_trait;
use base::task::Tasks;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use machinery::StatusError;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::*;
use crate::admission::Chain;
use crate::testing;

mod cbor;
mod local;
mod websocket;

/// The user is in the `User` header; without one the request is anonymous.
struct ByHeader;

#[async_trait]
impl Authenticator for ByHeader {
    async fn authenticate(&self, request: &Parts) -> Result<Option<UserInfo>, StatusError> {
        let Some(name) = request.headers.get("user").and_then(|name| name.to_str().ok()) else {
            return Ok(None);
        };
        match name {
            "garbage" => Err(StatusError::unauthorized()),
            name => Ok(Some(UserInfo::new(name, &[]))),
        }
    }
}

/// The admin may do everything, the reader reads, the patcher changes existing objects.
struct AdminOnly;

#[async_trait]
impl Authorizer for AdminOnly {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        let is_admin = attributes.user.name == "admin";
        let may = |user: &str, verbs: &[&str]| {
            attributes.user.name == user && verbs.contains(&attributes.request.verb.as_str())
        };
        match is_admin || may("reader", &["get"]) || may("patcher", &["patch", "update"]) {
            true => Decision::Allow { reason: String::new() },
            false => Decision::NoOpinion { reason: String::new() },
        }
    }
}

struct Bench {
    server: Server,
    tasks: Tasks,
}

/// An answer.
struct Answer {
    code: u16,
    headers: http::HeaderMap,
    body: bytes::Bytes,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    fn message(&self) -> String {
        self.json()["message"].as_str().unwrap_or_default().to_owned()
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

impl Bench {
    fn new() -> Self {
        let tasks = Tasks::new("test");
        let registry =
            Registry::new(store::Sim::open(), testing::table(), Chain::default(), tasks.clone());
        let options = Options {
            advertised: "192.0.2.1:6443".into(),
            protobuf: Some(testing::descriptors),
            ..Options::default()
        };
        let server =
            Server::new(registry, vec![Box::new(ByHeader)], vec![Box::new(AdminOnly)], options);
        Self { server, tasks }
    }

    /// `POST /path` with headers `Name: value` and a body, as the admin unless a header names another user.
    async fn send(
        &self,
        line: &str,
        headers: &[(&str, &str)],
        body: impl Into<bytes::Bytes>,
    ) -> Response<Body> {
        let (method, uri) = line.split_once(' ').expect("method and path");
        let mut request = Request::builder().method(method).uri(uri);
        if !headers.iter().any(|(name, _)| *name == "user" || *name == "nobody") {
            request = request.header("user", "admin");
        }
        for (name, value) in headers {
            request = request.header(*name, value.as_bytes());
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        self.server.service().oneshot(request).await.expect("infallible")
    }

    async fn ask_with(&self, line: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.ask_bytes(line, headers, body.to_owned()).await
    }

    async fn ask_bytes(
        &self,
        line: &str,
        headers: &[(&str, &str)],
        body: impl Into<bytes::Bytes>,
    ) -> Answer {
        let (parts, body) = self.send(line, headers, body).await.into_parts();
        let body = body.collect().await.expect("no errors").to_bytes();
        Answer { code: parts.status.as_u16(), headers: parts.headers, body }
    }

    async fn ask(&self, line: &str, body: Value) -> Answer {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let content_type = if line.starts_with("PATCH") {
            "application/merge-patch+json"
        } else {
            "application/json"
        };
        self.ask_with(line, &[("content-type", content_type)], &body).await
    }

    async fn create_config_map(&self, name: &str) -> Value {
        let body =
            json!({ "metadata": { "name": name, "labels": { "k": "v" } }, "data": { "a": "b" } });
        let answer = self.ask("POST /api/v1/namespaces/default/configmaps", body).await;
        assert_eq!(answer.code, 201, "{}", answer.message());
        answer.json()
    }

    async fn end(self) {
        self.server.begin_shutdown();
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[tokio::test]
async fn an_object_lives_its_life() {
    let bench = Bench::new();
    let created = bench.create_config_map("x").await;
    assert_eq!((&created["apiVersion"], &created["kind"]), (&json!("v1"), &json!("ConfigMap")));
    assert_eq!(created["metadata"]["namespace"], "default");

    let got = bench.ask(&format!("GET {MAPS}/x"), Value::Null).await;
    assert_eq!((got.code, &got.json()), (200, &created));
    assert_eq!(got.header("cache-control"), "no-cache, private");
    assert_eq!(got.header("audit-id").len(), 36);

    let again = bench.ask(&format!("POST {MAPS}"), json!({ "metadata": { "name": "x" } })).await;
    assert_eq!((again.code, again.message().as_str()), (409, "configmaps \"x\" already exists"));

    let patched = bench.ask(&format!("PATCH {MAPS}/x"), json!({ "data": { "c": "d" } })).await;
    assert_eq!((patched.code, &patched.json()["data"]), (200, &json!({ "a": "b", "c": "d" })));

    let mut changed = patched.json();
    changed["data"] = json!({ "e": "f" });
    let put = bench.ask(&format!("PUT {MAPS}/x"), changed.clone()).await;
    assert_eq!((put.code, &put.json()["data"]), (200, &json!({ "e": "f" })));
    let stale = bench.ask(&format!("PUT {MAPS}/x"), changed).await;
    assert_eq!(stale.code, 409, "{}", stale.message());

    let list = bench.ask(&format!("GET {MAPS}"), Value::Null).await.json();
    assert_eq!(list["kind"], "ConfigMapList");
    assert_eq!(list["items"][0]["metadata"]["name"], "x");
    assert!(list["items"][0].get("kind").is_none(), "items of built-in lists have no kind");

    let deleted = bench.ask(&format!("DELETE {MAPS}/x"), Value::Null).await;
    assert_eq!(deleted.code, 200);
    assert_eq!(deleted.json()["status"], "Success");
    assert_eq!(deleted.json()["details"]["kind"], "configmaps");
    let gone = bench.ask(&format!("GET {MAPS}/x"), Value::Null).await;
    assert_eq!((gone.code, gone.message().as_str()), (404, "configmaps \"x\" not found"));
    bench.end().await;
}

const NO_ROUTE: &str = "the server could not find the requested resource";
const NO_METHOD: &str = "the server does not allow this method on the requested resource";

#[tokio::test]
async fn unknown_routes_are_refused() {
    let bench = Bench::new();
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    for (line, code, message) in [
        ("GET /apis/apps/v1/nope".to_owned(), 404, NO_ROUTE),
        (format!("GET {MAPS}/none/status"), 404, NO_ROUTE),
        (format!("POST {MAPS}/none"), 405, NO_METHOD),
        (format!("PUT {MAPS}"), 405, NO_METHOD),
        ("POST /api/v1/configmaps".into(), 405, NO_METHOD),
        (format!("OPTIONS {MAPS}"), 405, NO_METHOD),
        (format!("POST {deployments}/none/status"), 405, NO_METHOD),
        ("POST /api".into(), 405, NO_METHOD),
    ] {
        let answer = bench.ask(&line, json!({})).await;
        assert_eq!((answer.code, answer.message().as_str()), (code, message), "{line}");
    }
    let text = bench.ask("GET /apis/zz/v1/foos", Value::Null).await;
    assert_eq!((text.code, &text.body[..]), (404, &b"404 page not found\n"[..]));
    bench.end().await;
}

#[tokio::test]
async fn wrong_requests_are_refused_in_upstreams_words() {
    let bench = Bench::new();
    let named = |name: &str| json!({ "metadata": { "name": name } });
    let elsewhere = json!({ "metadata": { "name": "a", "namespace": "b" } });
    let unknown = json!({ "metadata": { "name": "a" }, "zz": 1 });
    #[rustfmt::skip]
    let cases = [
        (format!("PUT {MAPS}/x"), named("y"), 400, "the name of the object (y) does not match the name on the URL (x)"),
        (format!("PUT {MAPS}/x"), json!({}), 400, "the name of the object (x based on URL) was undeterminable: name must be provided"),
        (format!("POST {MAPS}"), elsewhere, 400, "the namespace of the provided object does not match the namespace sent on the request"),
        (format!("POST {MAPS}?dryRun="), named("a"), 422, r#"CreateOptions.meta.k8s.io "" is invalid: dryRun: Unsupported value: [""]: supported values: "All""#),
        (format!("GET {MAPS}?fieldSelector=spec.bogus%3Dx"), Value::Null, 400, r#""spec.bogus" is not a known field selector: only "metadata.name", "metadata.namespace""#),
        (format!("GET {MAPS}/x?export=true"), Value::Null, 400, "the export parameter, deprecated since v1.14, is no longer supported"),
        (format!("POST {MAPS}?fieldValidation=Strict"), unknown, 400, r#"ConfigMap in version "v1" cannot be handled as a ConfigMap: strict decoding error: unknown field "zz""#),
    ];
    for (line, body, code, message) in cases {
        let answer = bench.ask(&line, body).await;
        assert_eq!((answer.code, answer.message().as_str()), (code, message), "{line}");
    }
    let plain = [("content-type", "text/plain")];
    let form = bench.ask_with(&format!("POST {MAPS}"), &plain, "{}").await;
    assert_eq!((form.code, form.json().get("details")), (415, None));
    let patch = bench.ask_with(&format!("PATCH {MAPS}/x"), &plain, "{}").await;
    assert_eq!((patch.code, patch.message().as_str()), (415, "415: Unsupported Media Type"));
    let huge = bench.ask_with(&format!("POST {MAPS}"), &[], &"x".repeat(4 << 20)).await;
    let limit = "Request entity too large: limit is 3145728";
    assert_eq!((huge.code, huge.message().as_str()), (413, limit));
    bench.end().await;
}

#[tokio::test]
async fn dry_runs_leave_no_trace() {
    let bench = Bench::new();
    let body = json!({ "metadata": { "name": "a" } });
    let made = bench.ask(&format!("POST {MAPS}?dryRun=All"), body).await;
    assert_eq!((made.code, made.json()["metadata"].get("resourceVersion")), (201, None));
    assert_eq!(bench.ask(&format!("GET {MAPS}/a"), Value::Null).await.code, 404);
    bench.end().await;
}

/// Upstream's storage checks the version, after everything else that may refuse the object; a dry run does
/// not store it.
#[tokio::test]
async fn new_objects_have_no_version() {
    let bench = Bench::new();
    let create = async |query: &str, version: Value| {
        let body = json!({ "metadata": { "name": "a", "resourceVersion": version } });
        let answer = bench.ask(&format!("POST {MAPS}{query}"), body).await;
        bench.ask(&format!("DELETE {MAPS}/a"), Value::Null).await;
        (answer.code, answer.json()["message"].as_str().unwrap_or_default().to_owned())
    };
    let refused = "resourceVersion should not be set on objects to be created";
    for (query, version, code) in [
        ("", json!("0"), 201),
        ("", json!(""), 201),
        ("", json!("unknown"), 201),
        ("", json!("7"), 500),
        ("?dryRun=All", json!("7"), 201),
    ] {
        let expected = (code, if code == 500 { refused } else { "" }.to_owned());
        assert_eq!(create(query, version.clone()).await, expected, "{query} {version}");
    }
    bench.end().await;
}

/// If there is a body with options, only it counts; otherwise the query does.
#[tokio::test]
async fn delete_options_are_in_the_body_or_in_the_query() {
    let bench = Bench::new();
    let delete = async |query: &str, body: Value| {
        let made = bench.create_config_map("a").await;
        let meta = &made["metadata"];
        let version = meta["resourceVersion"].as_str().unwrap_or_default();
        let filled = query
            .replace("UID", meta["uid"].as_str().unwrap_or_default())
            .replace("VERSION", version);
        let answer = bench.ask(&format!("DELETE {MAPS}/a{filled}"), body).await;
        let left = bench.ask(&format!("GET {MAPS}/a"), Value::Null).await.code == 200;
        bench.ask(&format!("DELETE {MAPS}/a"), Value::Null).await;
        (answer.code, left)
    };
    for (query, body, expected) in [
        ("", Value::Null, (200, false)),
        ("?dryRun=All", Value::Null, (200, true)),
        ("", json!({ "dryRun": ["All"] }), (200, true)),
        ("?dryRun=All", json!({ "gracePeriodSeconds": 0 }), (200, false)),
        ("?dryRun=Some", Value::Null, (422, true)),
        ("", json!({ "dryRun": ["Some"] }), (422, true)),
        ("?uid=UID&resourceVersion=VERSION", Value::Null, (200, false)),
        ("?uid=other", Value::Null, (409, true)),
        ("?resourceVersion=1", Value::Null, (409, true)),
        ("", json!({ "preconditions": { "uid": "other" } }), (409, true)),
        ("", json!({ "preconditions": { "resourceVersion": "1" } }), (409, true)),
        ("?propagationPolicy=Orphan", Value::Null, (200, true)),
        ("", json!({ "orphanDependents": true }), (200, true)),
        ("?orphanDependents=false", Value::Null, (200, false)),
        ("?propagationPolicy=Bogus", Value::Null, (422, true)),
        // All texts but two are true in a query.
        ("?orphanDependents=x", Value::Null, (200, true)),
        ("", json!({ "preconditions": [] }), (400, true)),
        ("", json!({ "gracePeriodSeconds": "1" }), (400, true)),
        ("", json!({ "kind": "ConfigMap", "apiVersion": "v1" }), (400, true)),
        ("", json!({ "kind": "DeleteOptions", "apiVersion": "v1" }), (200, false)),
    ] {
        assert_eq!(delete(query, body.clone()).await, expected, "{query} {body}");
        let free = json!({ "metadata": { "finalizers": null } });
        bench.ask(&format!("PATCH {MAPS}/a"), free).await;
    }
    bench.end().await;
}

/// Each line is what upstream's API server answered to the same request.
#[tokio::test]
async fn odd_requests_are_answered_as_upstream_does() {
    let bench = Bench::new();
    let token = |json: &str| {
        use base64::Engine as _;
        base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(json)
    };
    let no_revision = token(r#"{"v":"meta.k8s.io/v1"}"#);
    let climbing = token(r#"{"v":"meta.k8s.io/v1","rv":1,"start":"../a"}"#);
    let invalid_key = "invalid continue token: continue key is not valid: ";
    for (line, code, message) in [
        ("GET /healthz/".to_owned(), 404, String::new()),
        ("GET /metrics/".to_owned(), 404, String::new()),
        ("GET /openapi/v3/".to_owned(), 404, String::new()),
        ("GET /index.html".to_owned(), 200, String::new()),
        ("POST /apis/nope/v1".to_owned(), 404, String::new()),
        ("DELETE /api/v1".to_owned(), 405, String::new()),
        ("POST /api/v1/watch/configmaps".to_owned(), 405, String::new()),
        (
            format!("GET {MAPS}/none?resourceVersion=-1"),
            500,
            r#"resourceVersion: Invalid value: "-1": strconv.ParseUint: parsing "-1": invalid syntax"#.to_owned(),
        ),
        (
            format!("GET {MAPS}?continue={no_revision}"),
            400,
            format!("{invalid_key}incorrect encoded start resourceVersion (version meta.k8s.io/v1)"),
        ),
        (format!("GET {MAPS}?continue={climbing}"), 400, format!("{invalid_key}../a")),
        (
            format!("PATCH {MAPS}/none?fieldManager=a%00b"),
            422,
            r#"PatchOptions.meta.k8s.io "" is invalid: fieldManager: Invalid value: "a\x00b": invalid character U+0000 (at position 1)"#.to_owned(),
        ),
    ] {
        let answer = bench.ask(&line, Value::Null).await;
        assert_eq!(answer.code, code, "{line}");
        if !message.is_empty() {
            assert_eq!(answer.message(), message, "{line}");
        }
    }
    bench.end().await;
}

/// Owners are shown in the order of upstream's fields, and a version with two slashes is none.
#[tokio::test]
async fn owners_are_checked_and_shown_as_upstream_does() {
    let bench = Bench::new();
    let owner = |name: &str| json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": "u", "controller": true});
    for (owners, expected) in [
        (
            json!([owner("a"), owner("b")]),
            r#"ConfigMap "x" is invalid: metadata.ownerReferences: Invalid value: [{"apiVersion":"v1","kind":"Pod","name":"a","uid":"u","controller":true},{"apiVersion":"v1","kind":"Pod","name":"b","uid":"u","controller":true}]: Only one reference can have Controller set to true. Found "true" in references for Pod/a and Pod/b"#,
        ),
        (
            json!([{"apiVersion": "a/b/c", "kind": "Pod", "name": "a", "uid": "u"}]),
            r#"ConfigMap "x" is invalid: metadata.ownerReferences.apiVersion: Invalid value: "a/b/c": version must not be empty"#,
        ),
    ] {
        let body = json!({ "metadata": { "name": "x", "ownerReferences": owners } });
        let answer = bench.ask(&format!("POST {MAPS}"), body).await;
        assert_eq!((answer.code, &*answer.message()), (422, expected));
    }
    bench.end().await;
}

/// Empty texts count as missing.
#[tokio::test]
async fn an_empty_kind_is_the_kind_of_the_path() {
    let bench = Bench::new();
    for types in [json!({"kind": ""}), json!({"apiVersion": ""})] {
        let mut body = json!({ "metadata": { "generateName": "x-" } });
        body.as_object_mut()
            .expect("an object")
            .append(types.clone().as_object_mut().expect("an object"));
        assert_eq!(bench.ask(&format!("POST {MAPS}"), body).await.code, 201, "{types}");
    }
    bench.end().await;
}

#[tokio::test]
async fn warnings_are_in_headers() {
    let bench = Bench::new();
    let answer =
        bench.ask(&format!("POST {MAPS}"), json!({ "metadata": { "name": "a" }, "zz": 1 })).await;
    assert_eq!((answer.code, answer.header("warning")), (201, r#"299 - "unknown field \"zz\"""#));
    bench.end().await;
}

#[tokio::test]
async fn identities_are_found_impersonated_and_authorized() {
    let bench = Bench::new();
    for (headers, line, code, message) in [
        (
            vec![("nobody", "")],
            "GET /api/v1/namespaces/default/configmaps/a",
            403,
            r#"configmaps "a" is forbidden: User "system:anonymous" cannot get resource "configmaps" in API group "" in the namespace "default""#,
        ),
        (vec![("user", "garbage")], "GET /api/v1/configmaps", 401, "Unauthorized"),
        (
            vec![("user", "reader")],
            "GET /api/v1/namespaces/default/configmaps/a",
            404,
            r#"configmaps "a" not found"#,
        ),
        (
            vec![("user", "reader")],
            "GET /api/v1/configmaps",
            403,
            r#"configmaps is forbidden: User "reader" cannot list resource "configmaps" in API group "" at the cluster scope"#,
        ),
        (
            vec![("user", "admin"), ("impersonate-user", "reader")],
            "DELETE /apis/apps/v1/namespaces/a/deployments",
            403,
            r#"deployments.apps is forbidden: User "reader" cannot deletecollection resource "deployments" in API group "apps" in the namespace "a""#,
        ),
        (
            vec![("user", "admin"), ("impersonate-user", "j\u{fc}rgen")],
            "DELETE /api/v1/namespaces/a/configmaps/a",
            403,
            "configmaps \"a\" is forbidden: User \"j\u{fc}rgen\" cannot delete resource \"configmaps\" in API group \"\" in the namespace \"a\"",
        ),
        (
            vec![("user", "reader"), ("impersonate-user", "root")],
            "GET /api",
            403,
            r#"forbidden: User "reader" cannot impersonate-on:user-info:get path "/api""#,
        ),
        (
            vec![("user", "admin"), ("impersonate-group", "g")],
            "GET /api",
            400,
            r#"requested &user.DefaultInfo{Name:"", UID:"", Groups:[]string{"g"}, Extra:map[string][]string(nil)} without impersonating a user name"#,
        ),
    ] {
        let answer = bench.ask_with(line, &headers, "").await;
        assert_eq!((answer.code, answer.message().as_str()), (code, message), "{line}");
        // As upstream's filters answer, unlike verbs.
        let sniffing = answer.header("x-content-type-options");
        let is_by_filter = code == 403 || message.starts_with("requested &user");
        assert_eq!(sniffing == "nosniff", is_by_filter, "{line}: {sniffing:?}");
    }
    let local = bench.server.local(UserInfo::new("reader", &[]));
    let request = Request::get("/api/v1/namespaces/default/configmaps/a").header("user", "admin");
    let request = request.body(Full::new(bytes::Bytes::new())).expect("a request");
    let answer = local.oneshot(request).await.expect("infallible");
    assert_eq!(answer.status(), StatusCode::NOT_FOUND);
    bench.end().await;
}

#[tokio::test]
async fn missing_objects_are_created_if_the_user_may_create() {
    let bench = Bench::new();
    let line = "PATCH /api/v1/namespaces/default/configmaps/a?fieldManager=test";
    let apply = |user: &'static str, value: &str| {
        let body = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": value}});
        let bench = &bench;
        async move {
            let headers = [("user", user), ("content-type", "application/apply-patch+yaml")];
            bench.ask_with(line, &headers, &body.to_string()).await
        }
    };
    let refused = apply("patcher", "1").await;
    let message = r#"configmaps "a" is forbidden: User "patcher" cannot create resource "configmaps" in API group "" in the namespace "default""#;
    assert_eq!((refused.code, refused.message().as_str()), (403, message));
    assert_eq!(apply("admin", "1").await.code, 201);
    assert_eq!(apply("patcher", "1").await.code, 200);
    bench.end().await;
}

#[tokio::test]
async fn watches_send_every_change() {
    let bench = Bench::new();
    bench.create_config_map("a").await;
    let response = bench.send(&format!("GET {MAPS}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"), &[], "").await;
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    let mut next = async || {
        let frame = testkit::wait::soon("a frame", body.frame()).await;
        let data = frame.expect("a frame").expect("no error").into_data().expect("data");
        assert!(data.ends_with(b"\n"));
        let json: Value = serde_json::from_slice(&data).expect("JSON");
        json
    };
    let first = next().await;
    assert_eq!(
        (&first["type"], &first["object"]["metadata"]["name"]),
        (&json!("ADDED"), &json!("a"))
    );
    let bookmark = next().await;
    assert_eq!(bookmark["type"], "BOOKMARK");
    assert_eq!(bookmark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"], "true");
    assert_eq!(bookmark["object"]["kind"], "ConfigMap");
    bench.ask(&format!("PATCH {MAPS}/a"), json!({ "data": { "z": "1" } })).await;
    let changed = next().await;
    assert_eq!(
        (&changed["type"], &changed["object"]["data"]["z"]),
        (&json!("MODIFIED"), &json!("1"))
    );
    bench.ask(&format!("DELETE {MAPS}/a"), Value::Null).await;
    assert_eq!(next().await["type"], "DELETED");
    bench.server.begin_shutdown();
    let end = testkit::wait::soon("the end", body.frame()).await;
    assert!(end.is_none(), "watches end with the server");
    bench.end().await;
}

#[tokio::test]
async fn forms_are_negotiated() {
    let bench = Bench::new();
    bench.create_config_map("x").await;
    let table = [("accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")];
    let answer = bench.ask_with(&format!("GET {MAPS}"), &table, "").await.json();
    assert_eq!(
        (&answer["kind"], &answer["apiVersion"]),
        (&json!("Table"), &json!("meta.k8s.io/v1"))
    );
    assert_eq!(answer["rows"][0]["cells"][0], "x");
    assert_eq!(answer["rows"][0]["object"]["kind"], "PartialObjectMetadata");
    assert_eq!(answer["columnDefinitions"][0]["name"], "Name");

    let partial = [("accept", "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io")];
    let answer = bench.ask_with(&format!("GET {MAPS}"), &partial, "").await.json();
    assert_eq!(answer["items"][0]["metadata"]["name"], "x");
    assert!(answer["items"][0].get("data").is_none());

    let yaml =
        bench.ask_with(&format!("GET {MAPS}/x"), &[("accept", "application/yaml")], "").await;
    assert_eq!(yaml.header("content-type"), "application/yaml");
    assert!(yaml.body.starts_with(b"apiVersion: v1\n"), "{}", String::from_utf8_lossy(&yaml.body));

    let pretty = bench.ask(&format!("GET {MAPS}/x?pretty=true"), Value::Null).await;
    assert!(
        pretty.body.starts_with(b"{\n  \"apiVersion\": \"v1\""),
        "{}",
        String::from_utf8_lossy(&pretty.body)
    );

    let html = bench.ask_with(&format!("GET {MAPS}/x"), &[("accept", "text/html")], "").await;
    assert_eq!(html.code, 406);
    assert!(html.message().starts_with("406: Not Acceptable\n\nAvailable representations: "));

    let apply = [("content-type", "application/yaml")];
    let created = bench
        .ask_with(
            &format!("POST {MAPS}"),
            &apply,
            "kind: ConfigMap\napiVersion: v1\nmetadata:\n  name: yy\n",
        )
        .await;
    assert_eq!(created.code, 201, "{}", created.message());
    bench.end().await;
}

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

#[tokio::test]
async fn typed_clients_speak_protobuf() {
    let bench = Bench::new();
    let headers = [("content-type", PROTOBUF), ("accept", PROTOBUF)];
    let seal = |tree: Value| testing::descriptors().seal(&tree).expect("a kind of the tests");
    let open = |bytes: &[u8]| Value::Object(testing::descriptors().unseal(bytes).expect("sealed"));
    let sent = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "x" }, "data": { "a": "b" } });
    let created = bench.ask_bytes(&format!("POST {MAPS}"), &headers, seal(sent.clone())).await;
    assert_eq!((created.code, created.header("content-type")), (201, PROTOBUF));
    assert_eq!(open(&created.body)["data"], sent["data"]);

    let got = bench.ask_bytes(&format!("GET {MAPS}/x"), &headers, "").await;
    assert_eq!(got.body, created.body);
    let json = bench.ask(&format!("GET {MAPS}/x"), Value::Null).await.json();
    assert_eq!(open(&got.body)["metadata"]["uid"], json["metadata"]["uid"]);

    let list = open(&bench.ask_bytes(&format!("GET {MAPS}"), &headers, "").await.body);
    assert_eq!(
        (&list["kind"], &list["items"][0]["data"]),
        (&json!("ConfigMapList"), &sent["data"])
    );
    assert!(list["metadata"]["resourceVersion"].is_string());

    let cut = format!("{PROTOBUF};as=PartialObjectMetadata;g=meta.k8s.io;v=v1");
    let cut = bench.ask_bytes(&format!("GET {MAPS}/x"), &[("accept", &cut)], "").await;
    assert_eq!(open(&cut.body)["kind"], "PartialObjectMetadata");
    let table = format!("{PROTOBUF};as=Table;g=meta.k8s.io;v=v1");
    let refused = bench.ask_bytes(&format!("GET {MAPS}/x"), &[("accept", &table)], "").await;
    assert_eq!(refused.code, 406, "{}", refused.message());

    // A kind without a message.
    let refused =
        bench.ask_bytes("GET /apis/apps/v1/namespaces/default/deployments", &headers, "").await;
    assert!(refused.code >= 400, "{}", refused.code);

    let wrong_uid =
        json!({ "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": { "uid": "other" } });
    let refused = bench.ask_bytes(&format!("DELETE {MAPS}/x"), &headers, seal(wrong_uid)).await;
    let status = open(&refused.body);
    assert_eq!(
        (refused.code, &status["kind"], &status["reason"]),
        (409, &json!("Status"), &json!("Conflict"))
    );
    bench.end().await;
}

#[tokio::test]
async fn broken_protobuf_is_refused_in_upstreams_words() {
    let bench = Bench::new();
    let check = async |body: Vec<u8>, expected: &str| {
        let answer =
            bench.ask_bytes(&format!("POST {MAPS}"), &[("content-type", PROTOBUF)], body).await;
        assert_eq!((answer.code, answer.message().as_str()), (400, expected));
    };
    let kind = |kind: &str, raw: &[u8]| {
        let head = format!(
            "k8s\0\n{}\n\x02v1\x12{}{kind}",
            char::from(kind.len() as u8 + 6),
            char::from(kind.len() as u8)
        );
        [head.as_bytes(), &[0x12, raw.len() as u8], raw].concat()
    };
    check(
        vec![],
        "the object provided is unrecognized (must be of type ConfigMap): empty data (<empty>)",
    )
    .await;
    check(b"{}".to_vec(), "the object provided is unrecognized (must be of type ConfigMap): provided data does not appear to be a protobuf message, expected prefix [107 56 115 0] ({})").await;
    check(kind("Zebra", b""), "Zebra in version \"v1\" cannot be handled as a ConfigMap: no kind \"Zebra\" is registered for version \"v1\" in scheme \"pkg/api/legacyscheme/scheme.go:30\"").await;
    check(
        kind("ConfigMap", &[0x0a, 9]),
        "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: unexpected EOF",
    )
    .await;
    bench.end().await;
}

#[tokio::test]
async fn protobuf_watches_have_length_prefixes() {
    let bench = Bench::new();
    let accept = format!("{PROTOBUF};stream=watch");
    bench.create_config_map("x").await;
    let response = bench.send(&format!("GET {MAPS}?watch=1"), &[("accept", &accept)], "").await;
    assert_eq!(response.headers()["content-type"], accept.as_str());
    let mut body = response.into_body();
    let frame = body.frame().await.expect("a frame").expect("no error").into_data().expect("data");
    let length = u32::from_be_bytes(frame[..4].try_into().expect("four bytes"));
    assert_eq!(length as usize, frame.len() - 4);
    assert_eq!(&frame[4..11], b"\n\x05ADDED");
    let at = frame.windows(4).position(|window| window == b"k8s\0").expect("an envelope");
    let tree = testing::descriptors().unseal(&frame[at..]).expect("sealed");
    assert_eq!(tree["metadata"]["name"], "x");
    bench.end().await;
}

#[tokio::test]
async fn long_lists_are_sent_in_pieces_and_compressed() {
    let bench = Bench::new();
    for index in 0..40 {
        let data = "x".repeat(20_000);
        let body = json!({ "metadata": { "name": format!("m{index:02}") }, "data": { "a": data } });
        assert_eq!(bench.ask(&format!("POST {MAPS}"), body).await.code, 201);
    }
    let list = bench.ask(&format!("GET {MAPS}"), Value::Null).await;
    assert_eq!(list.json()["items"].as_array().map(Vec::len), Some(40));
    assert!(list.body.len() > 800_000, "{} {}", list.body.len(), list.header("content-encoding"));
    let packed = bench.ask_with(&format!("GET {MAPS}"), &[("accept-encoding", "gzip")], "").await;
    assert_eq!(packed.header("content-encoding"), "gzip");
    assert!(packed.body.len() < 50_000);
    let page = bench.ask(&format!("GET {MAPS}?limit=15"), Value::Null).await.json();
    assert_eq!(page["metadata"]["remainingItemCount"], 25);
    let token = page["metadata"]["continue"].as_str().expect("a token");
    let page =
        bench.ask(&format!("GET {MAPS}?limit=15&continue={token}"), Value::Null).await.json();
    assert_eq!(page["items"][0]["metadata"]["name"], "m15");
    let page =
        bench.ask(&format!("GET {MAPS}?continue={token}&resourceVersion=1"), Value::Null).await;
    assert_eq!(page.message(), "specifying resource version is not allowed when using continue");
    let exact = format!("GET {MAPS}?resourceVersion=99999&resourceVersionMatch=Exact");
    let early = bench.ask(&exact, Value::Null).await;
    assert_eq!(early.code, 504, "{}", early.message());
    assert!(early.message().starts_with("Timeout: Too large resource version: 99999, current: "));
    bench.end().await;
}

#[tokio::test]
async fn pages_show_one_state_for_some_minutes_only() {
    let bench = Bench::new();
    for name in ["a", "b", "c"] {
        let body = json!({ "metadata": { "name": name } });
        assert_eq!(bench.ask(&format!("POST {MAPS}"), body).await.code, 201);
    }
    let page = bench.ask(&format!("GET {MAPS}?limit=1"), Value::Null).await.json();
    let token = page["metadata"]["continue"].as_str().expect("a token");
    let bytes = URL_SAFE_NO_PAD.decode(token).expect("base64");
    let mut token: Value = serde_json::from_slice(&bytes).expect("JSON");
    let six_minutes_ago = base::clock::now().as_second() - 360;
    token["since"] = six_minutes_ago.into();
    let token = URL_SAFE_NO_PAD.encode(token.to_string());
    let over = bench.ask(&format!("GET {MAPS}?limit=1&continue={token}"), Value::Null).await;
    assert_eq!((over.code, &over.json()["reason"]), (410, &json!("Expired")));
    let body = json!({ "metadata": { "name": "aa" } });
    assert_eq!(bench.ask(&format!("POST {MAPS}"), body).await.code, 201);
    let mut token = over.json()["metadata"]["continue"].clone();
    let mut names = vec![];
    while let Some(next) = token.as_str() {
        let page =
            bench.ask(&format!("GET {MAPS}?limit=1&continue={next}"), Value::Null).await.json();
        names.push(page["items"][0]["metadata"]["name"].clone());
        token = page["metadata"]["continue"].clone();
    }
    assert_eq!(names, ["aa", "b", "c"], "objects created meanwhile are listed");
    bench.end().await;
}

#[tokio::test]
async fn views_read_and_change_their_parent() {
    let bench = Bench::new();
    let base = "/apis/apps/v1/namespaces/default/deployments";
    let spec = json!({ "replicas": 1, "selector": {}, "template": {} });
    let made = bench
        .ask(&format!("POST {base}"), json!({ "metadata": { "name": "d" }, "spec": spec }))
        .await;
    assert_eq!(made.code, 201, "{}", made.message());
    let scale = bench.ask(&format!("GET {base}/d/scale"), Value::Null).await.json();
    assert_eq!((&scale["kind"], &scale["spec"]["replicas"]), (&json!("Scale"), &json!(1)));
    let put = json!({ "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": { "name": "d" }, "spec": { "replicas": 3 } });
    let answer = bench.ask(&format!("PUT {base}/d/scale"), put).await;
    assert_eq!(
        (answer.code, &answer.json()["spec"]["replicas"]),
        (200, &json!(3)),
        "{}",
        answer.message()
    );
    let answer =
        bench.ask(&format!("PATCH {base}/d/scale"), json!({ "spec": { "replicas": 5 } })).await;
    assert_eq!(
        (answer.code, &answer.json()["spec"]["replicas"]),
        (200, &json!(5)),
        "{}",
        answer.message()
    );
    let parent = bench.ask(&format!("GET {base}/d"), Value::Null).await.json();
    assert_eq!(parent["spec"]["replicas"], 5);
    // Ansible sends the parent's kind. A strategic patch is applied to the view's struct; a merge patch is
    // decoded.
    let of_parent = json!({ "kind": "Deployment", "spec": { "replicas": 6 } }).to_string();
    for (format, code) in [("strategic-merge-patch", 200), ("merge-patch", 422)] {
        let content_type = format!("application/{format}+json");
        let headers = [("content-type", content_type.as_str())];
        let line = format!("PATCH {base}/d/scale");
        let answer = bench.ask_with(&line, &headers, &of_parent).await;
        assert_eq!(answer.code, code, "{format}: {}", answer.message());
        if code == 200 {
            let scale = answer.json();
            assert_eq!((&scale["kind"], &scale["spec"]["replicas"]), (&json!("Scale"), &json!(6)));
        } else {
            let why = r#"no kind "Deployment" is registered for version "autoscaling/v1""#;
            assert!(answer.message().contains(why), "{}", answer.message());
        }
    }
    let wrong =
        json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "d" } });
    let answer = bench.ask(&format!("PUT {base}/d/scale"), wrong).await;
    assert_eq!(
        answer.message(),
        r#"Deployment in version "v1" cannot be handled as a Scale: converting (v1.Deployment) to (autoscaling.Scale): unknown conversion"#
    );
    bench.end().await;
}

#[tokio::test]
async fn other_paths_than_resources_answer() {
    let bench = Bench::new();
    let api = bench.ask("GET /api/", Value::Null).await.json();
    assert_eq!(api["versions"], json!(["v1"]));
    assert_eq!(api["serverAddressByClientCIDRs"][0]["serverAddress"], "192.0.2.1:6443");
    let accept = [(
        "accept",
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json",
    )];
    let all = bench.ask_with("GET /apis", &accept, "").await;
    assert_eq!(
        all.header("content-type"),
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    );
    assert_eq!(all.json()["items"][0]["metadata"]["name"], "apps");
    let known = [accept[0], ("if-none-match", all.header("etag"))];
    assert_eq!(bench.ask_with("GET /apis", &known, "").await.code, 304);
    let old =
        [("accept", "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList")];
    assert_eq!(bench.ask_with("GET /api", &old, "").await.code, 406);
    assert_eq!(bench.ask("GET /version", Value::Null).await.json()["minor"], "36");
    let ready = bench.ask("GET /readyz", Value::Null).await;
    assert_eq!((&ready.body[..], ready.header("x-content-type-options")), (&b"ok"[..], "nosniff"));
    let metrics = bench.ask("GET /metrics", Value::Null).await;
    let metrics = String::from_utf8_lossy(&metrics.body).into_owned();
    for wanted in
        ["apiserver_request_total{code=\"200\"", "# TYPE etcd_request_duration_seconds histogram"]
    {
        assert!(metrics.contains(wanted), "{metrics}");
    }
    let missing = bench.ask("GET /nope", Value::Null).await;
    assert_eq!((missing.code, missing.header("x-content-type-options")), (404, "nosniff"));
    let index = bench.ask("GET /openapi/v3", Value::Null).await;
    assert_eq!(index.header("content-type"), "text/plain; charset=utf-8");
    let url = index.json()["paths"]["apis/apps/v1"]["serverRelativeURL"]
        .as_str()
        .expect("a URL")
        .to_owned();
    let document = bench.ask(&format!("GET {url}"), Value::Null).await.json();
    let patch =
        &document["paths"]["/apis/apps/v1/namespaces/{namespace}/deployments/{name}"]["patch"];
    assert_eq!(patch["x-kubernetes-group-version-kind"]["kind"], "Deployment");
    assert!(
        patch["requestBody"]["content"].get("application/strategic-merge-patch+json").is_some()
    );
    bench.end().await;
}

/// One seat for the admin, which is taken.
#[tokio::test]
async fn too_many_requests_are_refused() {
    use crate::fairness::{
        Config, Distinguisher, FlowSchema, Handling, PathRule, PriorityLevel, Rule, Subject, Work,
    };
    let bench = Bench::new();
    let level = |name: &str, shares, borrowing_percent| PriorityLevel {
        name: name.into(),
        uid: format!("uid-{name}"),
        handling: Handling::Reject,
        shares,
        lendable_percent: 0,
        borrowing_percent,
    };
    let everything = PathRule { verbs: vec!["*".into()], paths: vec!["*".into()] };
    let rule = Rule {
        subjects: vec![Subject::User("admin".into())],
        paths: vec![everything],
        ..Rule::default()
    };
    let schema = FlowSchema {
        name: "admin".into(),
        uid: "uid-schema".into(),
        precedence: 10,
        level: "few".into(),
        distinguisher: Distinguisher::None,
        rules: vec![rule],
    };
    let fairness = bench.server.fairness().expect("the default").clone();
    let levels = vec![level("few", 1, Some(0)), level("others", 100_000, None)];
    fairness.configure(Config { schemas: vec![schema], levels });

    let served = bench.ask("GET /version", Value::Null).await;
    assert_eq!(served.code, 200);
    assert_eq!(served.header("x-kubernetes-pf-flowschema-uid"), "uid-schema");
    assert_eq!(served.header("x-kubernetes-pf-prioritylevel-uid"), "uid-few");

    let info = crate::request::RequestInfo { verb: "get".into(), ..Default::default() };
    let admin = UserInfo::new("admin", &[]);
    let class = fairness.classify(&info, &admin);
    let patience = Duration::from_secs(1);
    let place = fairness.enter(&class, &info, &admin, Work::seats(1), patience).await;
    let refused = bench.ask("GET /version", Value::Null).await;
    assert_eq!((refused.code, refused.header("retry-after")), (429, "1"));
    assert_eq!(refused.body, "Too many requests, please try again later.\n");
    assert_eq!(refused.header("content-type"), "text/plain; charset=utf-8");
    assert_eq!(refused.header("x-content-type-options"), "nosniff");
    assert_eq!(refused.header("x-kubernetes-pf-flowschema-uid"), "uid-schema");
    // Other users have their own seats.
    let other = bench.ask_with("GET /version", &[("user", "reader")], "").await;
    assert_eq!(other.header("x-kubernetes-pf-flowschema-uid"), "");
    drop(place);
    assert_eq!(bench.ask("GET /version", Value::Null).await.code, 200);
    bench.end().await;
}

#[tokio::test]
async fn the_timeout_parameter_is_checked() {
    let bench = Bench::new();
    for (query, code) in [("timeout=30s", 200), ("timeout=0s", 200), ("timeout=", 200)] {
        assert_eq!(bench.ask(&format!("GET {MAPS}?{query}"), Value::Null).await.code, code);
    }
    let refused = bench.ask(&format!("GET {MAPS}?timeout=soon"), Value::Null).await;
    assert_eq!(refused.code, 400);
    assert_eq!(
        refused.message(),
        "invalid timeout specified in the request URL - time: invalid duration \"soon\""
    );
    bench.end().await;
}

#[tokio::test]
async fn hidden_rows_are_not_served() {
    let bench = Bench::new();
    let rows = [("apps".to_owned(), "v1".to_owned(), "deployments".to_owned())];
    bench.server.registry().change_resources(|table| table.hide(rows));
    let gone = bench.ask("GET /apis/apps/v1/namespaces/a/deployments", Value::Null).await;
    assert_eq!((gone.code, &gone.body[..]), (404, &b"404 page not found\n"[..]));
    let groups = bench.ask("GET /apis", Value::Null).await.json();
    assert_eq!(groups["groups"], json!([]));
    bench.end().await;
}
