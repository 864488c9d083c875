//! Webhooks over HTTPS: their requests, their answers, and their failures.

use apiserver::StatusError;
use apiserver::resource::Resource;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingAdmissionPolicy, MutatingWebhookConfiguration, ValidatingAdmissionPolicy,
    ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, ResourceQuota, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use machinery::Object;
use machinery::object::Unstructured;
use serde_json::{Value, json};

use crate::world::{Answer, Webhooks, World, row};

fn rows() -> Vec<Resource> {
    vec![
        row::<MutatingAdmissionPolicy>(),
        row::<ValidatingAdmissionPolicy>(),
        row::<MutatingWebhookConfiguration>(),
        row::<ValidatingWebhookConfiguration>(),
        row::<ConfigMap>(),
        row::<ResourceQuota>(),
        row::<Namespace>(),
        row::<Pod>(),
        row::<Service>(),
        row::<EndpointSlice>(),
    ]
}

const ALLOW: Answer = |_| json!({"allowed": true, "warnings": ["mind the gap"]});
const DENY: Answer = |_| json!({"allowed": false, "status": {"message": "no such luck", "reason": "Tuesday", "code": 418}});
const DENY_SILENTLY: Answer = |_| json!({"allowed": false});
const ADD_A: Answer =
    |_| json!({"allowed": true, "patch": [{"op": "add", "path": "/data/a", "value": "1"}]});
/// Adds `b` if `a` exists.
const ADD_B: Answer = |request| match request["object"]["data"].get("a") {
    Some(_) => {
        json!({"allowed": true, "patch": [{"op": "add", "path": "/data/b", "value": "2"}]})
    }
    None => json!({"allowed": true}),
};
const TYPELESS: Answer = |_| json!({"allowed": true, "uid": "not-yours"});

fn webhook(name: &str, client: Value, more: Value) -> Value {
    let mut hook = json!({
        "name": name, "clientConfig": client, "sideEffects": "None",
        "admissionReviewVersions": ["v1"], "timeoutSeconds": 30,
        "rules": [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"],
            "resources": ["configmaps", "pods/attach"]}],
    });
    for (key, value) in more.as_object().expect("fields") {
        hook[key] = value.clone();
    }
    hook
}

fn configuration(kind: &str, hooks: Vec<Value>) -> Value {
    json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
        "metadata": {"name": "hooks"}, "webhooks": hooks})
}

fn config_map(name: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "web", "labels": {"app": name}}, "data": data})
}

fn message(outcome: Result<Value, StatusError>) -> String {
    outcome.err().map(|error| error.message.clone()).unwrap_or_default()
}

#[tokio::test]
async fn a_validating_webhook_refuses_allows_and_warns() {
    let world = World::start(rows(), &[]);
    world.namespace("web", json!({})).await;
    let server =
        Webhooks::start(&[("/allow", ALLOW), ("/deny", DENY), ("/silent", DENY_SILENTLY)]).await;
    let set = async |path: &str, more: Value| {
        let hook = webhook("v.example.com", server.by_url(path), more);
        let config = configuration("ValidatingWebhookConfiguration", vec![hook]);
        world.write(config).await.expect("is written");
    };
    set("/deny", json!({})).await;
    // In effect for the very next request.
    let refused = world.write(config_map("x", json!({}))).await.expect_err("is refused");
    let status = refused.to_json();
    assert_eq!(
        status["message"],
        "admission webhook \"v.example.com\" denied the request: no such luck"
    );
    assert_eq!((&status["reason"], &status["code"]), (&json!("Tuesday"), &json!(418)));
    set("/silent", json!({})).await;
    let refused = world.write(config_map("x", json!({}))).await.expect_err("is refused");
    let silent = "admission webhook \"v.example.com\" denied the request without explanation";
    assert_eq!((refused.message.as_str(), refused.code), (silent, 400));
    // Selectors exclude objects that they do not select.
    set("/deny", json!({"objectSelector": {"matchLabels": {"app": "y"}}})).await;
    world.write(config_map("x", json!({}))).await.expect("the webhook is not called");
    set("/deny", json!({"namespaceSelector": {"matchLabels": {"guarded": "yes"}}})).await;
    world.write(config_map("x", json!({"k": "v"}))).await.expect("the webhook is not called");
    world.namespace("web", json!({"guarded": "yes"})).await;
    assert!(message(world.write(config_map("x", json!({}))).await).contains("no such luck"));

    server.asked();
    set("/allow", json!({})).await;
    let ctx = world.context("v1", "ConfigMap");
    world.write_in(&ctx, config_map("x", json!({"k": "w"}))).await.expect("is allowed");
    assert_eq!(ctx.take_warnings(), ["mind the gap"]);
    world.delete(&ctx, "web", "x").await.expect("is allowed");
    let asked = server.asked();
    assert_eq!(asked.len(), 2);
    let update = &asked[0];
    assert_eq!(update["operation"], "UPDATE");
    assert_eq!(update["kind"], json!({"group": "", "version": "v1", "kind": "ConfigMap"}));
    assert_eq!(update["name"], "x");
    assert_eq!(update["namespace"], "web");
    assert_eq!(update["userInfo"], json!({"username": "jane", "groups": ["dev"]}));
    assert_eq!(update["object"]["data"]["k"], "w");
    assert_eq!(update["oldObject"]["data"]["k"], "v");
    assert_eq!(update["options"]["kind"], "UpdateOptions");
    assert_eq!(asked[1]["operation"], "DELETE");
    assert_eq!(asked[1]["object"], Value::Null);
    assert_eq!(asked[1]["oldObject"]["data"]["k"], "w");
    // All calls used one connection.
    assert_eq!(server.connections.lock().expect("the test's").len(), 1);
    server.shutdown().await;
    world.shutdown().await;
}

#[tokio::test]
async fn mutating_webhooks_see_earlier_changes() {
    let world = World::start(rows(), &[]);
    world.namespace("web", json!({})).await;
    let server = Webhooks::start(&[("/a", ADD_A), ("/b", ADD_B)]).await;
    let check = async |name: &str, hooks: Vec<Value>, expected: Value| {
        let config = configuration("MutatingWebhookConfiguration", hooks);
        world.write(config).await.expect("is written");
        let written = world.write(config_map(name, json!({"k": "v"}))).await.expect("is written");
        assert_eq!(written["data"], expected, "{name}");
    };
    let hook = |name: &str, policy: &str| {
        let more = json!({"reinvocationPolicy": policy});
        webhook(&format!("{name}.example.com"), server.by_url(&format!("/{name}")), more)
    };
    let both = json!({"k": "v", "a": "1", "b": "2"});
    check("in-order", vec![hook("a", "Never"), hook("b", "Never")], both.clone()).await;
    let first = json!({"k": "v", "a": "1"});
    check("too-early", vec![hook("b", "Never"), hook("a", "Never")], first).await;
    check("again", vec![hook("b", "IfNeeded"), hook("a", "Never")], both).await;
    server.shutdown().await;
    world.shutdown().await;
}

#[tokio::test]
async fn the_failure_policy_decides_about_failures() {
    let world = World::start(rows(), &[]);
    world.namespace("web", json!({})).await;
    let server = Webhooks::start(&[("/slow", ALLOW), ("/typeless", TYPELESS)]).await;
    let check = async |client: Value, more: Value, expected: &str| {
        let mut count = 0;
        for policy in ["Fail", "Ignore"] {
            let mut more = more.clone();
            more["failurePolicy"] = policy.into();
            let hook = webhook("v.example.com", client.clone(), more);
            let config = configuration("ValidatingWebhookConfiguration", vec![hook]);
            world.write(config).await.expect("is written");
            count += 1;
            let got = message(world.write(config_map("x", json!({"n": count.to_string()}))).await);
            match policy {
                "Fail" => assert!(
                    got.starts_with(&format!(
                        "Internal error occurred: failed calling webhook \"v.example.com\": {expected}"
                    )),
                    "{got}\nexpected {expected}"
                ),
                _ => assert_eq!(got, ""),
            }
        }
    };
    let url = |rest: &str| format!("https://{}{rest}", server.address);
    check(
        server.by_url("/slow"),
        json!({"timeoutSeconds": 1}),
        &format!(
            "failed to call webhook: Post \"{}?timeout=1s\": context deadline exceeded",
            url("/slow")
        ),
    )
    .await;
    check(
        json!({"url": url("/typeless")}),
        json!({}),
        &format!(
            "failed to call webhook: Post \"{}?timeout=30s\": tls: failed to verify certificate: x509: certificate signed by unknown authority",
            url("/typeless")
        ),
    )
    .await;
    check(
        server.by_url("/nowhere"),
        json!({}),
        "failed to call webhook: the server could not find the requested resource",
    )
    .await;
    check(
        json!({"url": "https://127.0.0.1:1/x", "caBundle": server.ca_bundle()}),
        json!({}),
        "failed to call webhook: Post \"https://127.0.0.1:1/x?timeout=30s\": dial tcp 127.0.0.1:1: connect: connection refused",
    )
    .await;
    check(
        json!({"service": {"namespace": "web", "name": "none"}, "caBundle": server.ca_bundle()}),
        json!({}),
        "failed to call webhook: Post \"https://none.web.svc:443/?timeout=30s\": service \"none\" not found",
    )
    .await;
    server.shutdown().await;
    world.shutdown().await;
}

#[tokio::test]
async fn a_service_resolves_to_a_ready_endpoint() {
    let world = World::start(rows(), &[]);
    world.namespace("web", json!({})).await;
    let server = Webhooks::start(&[("/deny", DENY)]).await;
    let client = json!({"service": {"namespace": "web", "name": "hook", "path": "/deny"},
        "caBundle": server.ca_bundle()});
    let hook = webhook("v.example.com", client, json!({}));
    let service = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "hook", "namespace": "web"},
        "spec": {"ports": [{"name": "https", "port": 443}]}});
    world.write(service).await.expect("is written");
    let config = configuration("ValidatingWebhookConfiguration", vec![hook]);
    world.write(config).await.expect("is written");
    let got = message(world.write(config_map("x", json!({}))).await);
    assert!(got.ends_with("no endpoints available for service \"hook\""), "{got}");
    let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
    "metadata": {"name": "hook-1", "namespace": "web",
        "labels": {"kubernetes.io/service-name": "hook"}},
    "addressType": "IPv4", "ports": [{"name": "https", "port": server.address.port()}],
    "endpoints": [
        {"addresses": ["127.0.0.2"], "conditions": {"ready": false}},
        {"addresses": ["127.0.0.1"], "conditions": {"ready": true}},
    ]});
    world.write(slice).await.expect("is written");
    let got = message(world.write(config_map("x", json!({}))).await);
    assert_eq!(got, "admission webhook \"v.example.com\" denied the request: no such luck");
    server.shutdown().await;
    world.shutdown().await;
}

#[tokio::test]
async fn webhooks_see_connections_and_dry_runs() {
    let world = World::start(rows(), &[]);
    world.namespace("web", json!({})).await;
    let server = Webhooks::start(&[("/deny", DENY)]).await;
    let hook = webhook("v.example.com", server.by_url("/deny"), json!({"sideEffects": "Some"}));
    let config = configuration("ValidatingWebhookConfiguration", vec![hook]);
    world.write(config.clone()).await.expect("is written");
    let mut ctx = world.context("v1", "ConfigMap");
    ctx.dry_run = true;
    let got = message(world.write_in(&ctx, config_map("x", json!({}))).await);
    assert_eq!(got, "admission webhook \"v.example.com\" does not support dry run");

    let pod = world.context("v1", "Pod");
    let attach =
        apiserver::request::RequestContext::new(world.user.clone(), pod.resource, "attach");
    let options = json!({"apiVersion": "v1", "kind": "PodAttachOptions", "stdin": true});
    let options: Box<dyn Object> = Box::new(Unstructured::from_value(options).expect("an object"));
    let key = apiserver::request::Key::new("web", "p");
    let got = world.registry.admit_connect(&attach, &key, options).await;
    assert!(got.is_err());
    let asked = server.asked();
    let request = &asked[0];
    assert_eq!(request["operation"], "CONNECT");
    assert_eq!(request["subResource"], "attach");
    assert_eq!(request["kind"]["kind"], "PodAttachOptions");
    assert_eq!(request["resource"]["resource"], "pods");
    assert_eq!(request["object"]["stdin"], true);
    // Webhooks are never called for webhooks.
    world.write(configuration("ValidatingWebhookConfiguration", vec![])).await.expect("is written");
    server.shutdown().await;
    world.shutdown().await;
}
