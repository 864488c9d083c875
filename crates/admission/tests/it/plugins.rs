//! Plugins that read other objects: quotas, limit ranges, classes, namespaces.

use apiserver::StatusError;
use apiserver::request::{RequestContext, UserInfo};
use apiserver::resource::Resource;
use k8s_openapi::api::core::v1::{
    ConfigMap, LimitRange, Namespace, Node, PersistentVolumeClaim, Pod, ResourceQuota,
    ServiceAccount,
};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::api::storage::v1::StorageClass;
use serde_json::{Value, json};

use crate::world::{World, row};

fn rows() -> Vec<Resource> {
    vec![
        row::<ConfigMap>(),
        row::<LimitRange>(),
        row::<Namespace>(),
        row::<Node>(),
        row::<PersistentVolumeClaim>(),
        row::<Pod>(),
        row::<PriorityClass>(),
        row::<ResourceQuota>(),
        row::<RuntimeClass>(),
        row::<ServiceAccount>(),
        row::<StorageClass>(),
        row::<k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicy>(),
        row::<k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy>(),
        row::<k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration>(),
        row::<k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration>(),
    ]
}

async fn world(enable: &[&str]) -> World {
    let world = World::start(rows(), enable);
    world.namespace("web", json!({})).await;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": "web"}});
    world.write(account).await.expect("is written");
    world
}

fn pod(name: &str, spec: Value) -> Value {
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "web"},
        "spec": {"containers": [{"name": "a"}]}});
    for (key, value) in spec.as_object().expect("fields") {
        pod["spec"][key] = value.clone();
    }
    pod
}

fn message(outcome: &Result<Value, StatusError>) -> String {
    outcome.as_ref().err().map(|error| error.message.clone()).unwrap_or_default()
}

#[tokio::test]
async fn quotas_are_charged_and_not_exceeded() {
    let world = world(&[]).await;
    let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota",
        "metadata": {"name": "q", "namespace": "web"},
        "spec": {"hard": {"pods": "2", "requests.cpu": "1", "count/configmaps": "1"}},
        "status": {"hard": {"pods": "2", "requests.cpu": "1", "count/configmaps": "1"},
            "used": {"pods": "0", "requests.cpu": "0", "count/configmaps": "0"}}});
    world.write(quota).await.expect("is written");
    let asking =
        |cpu: &str| json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": cpu}}}]});
    let first = world.write(pod("a", asking("600m"))).await;
    assert_eq!(message(&first), "");
    let second = world.write(pod("b", asking("500m"))).await.expect_err("is too much");
    assert_eq!(
        (second.message.as_str(), second.code),
        (
            "pods \"b\" is forbidden: exceeded quota: q, requested: requests.cpu=500m, used: requests.cpu=600m, limited: requests.cpu=1",
            403
        )
    );
    let silent = world.write(pod("b", json!({}))).await;
    assert_eq!(
        message(&silent),
        "pods \"b\" is forbidden: failed quota: q: must specify requests.cpu for: a"
    );
    let map = |name: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": "web"}})
    };
    // Of many concurrent writes, one fits.
    let all: Vec<Value> = (0..8).map(|n| map(&format!("m{n}"))).collect();
    let written = futures::future::join_all(all.into_iter().map(|one| world.write(one))).await;
    assert_eq!(written.iter().filter(|one| one.is_ok()).count(), 1);
    let quotas = world.registry.cached::<ResourceQuota>("web").await.expect("a list");
    let used = quotas[0].status.clone().and_then(|status| status.used).expect("usage");
    let used: Vec<String> = used.iter().map(|(name, one)| format!("{name}={}", one.0)).collect();
    assert_eq!(used, ["count/configmaps=1", "pods=1", "requests.cpu=600m"]);
    world.shutdown().await;
}

#[tokio::test]
async fn limit_ranges_set_defaults_and_limits() {
    let world = world(&[]).await;
    let range = json!({"apiVersion": "v1", "kind": "LimitRange",
    "metadata": {"name": "r", "namespace": "web"},
    "spec": {"limits": [
        {"type": "Container", "default": {"cpu": "1"}, "max": {"cpu": "2"}},
        {"type": "PersistentVolumeClaim", "min": {"storage": "1Gi"}},
    ]}});
    world.write(range).await.expect("is written");
    let written = world.write(pod("a", json!({}))).await.expect("is written");
    assert_eq!(written["spec"]["containers"][0]["resources"], json!({"limits": {"cpu": "1"}}));
    let big = json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "3"}}}]});
    assert_eq!(
        message(&world.write(pod("b", big)).await),
        "pods \"b\" is forbidden: maximum cpu usage per Container is 2, but limit is 3"
    );
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "c", "namespace": "web"},
        "spec": {"resources": {"requests": {"storage": "10Mi"}}}});
    assert_eq!(
        message(&world.write(claim).await),
        "persistentvolumeclaims \"c\" is forbidden: minimum storage usage per PersistentVolumeClaim is 1Gi, but request is 10Mi"
    );
    world.shutdown().await;
}

#[tokio::test]
async fn default_classes_are_set() {
    let world = world(&[]).await;
    let class = |name: &str, default: &str| {
        json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "provisioner": "x",
            "metadata": {"name": name,
                "annotations": {"storageclass.kubernetes.io/is-default-class": default}}})
    };
    world.write(class("slow", "false")).await.expect("is written");
    world.write(class("fast", "true")).await.expect("is written");
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "c", "namespace": "web"}, "spec": {}});
    let written = world.write(claim).await.expect("is written");
    assert_eq!(written["spec"]["storageClassName"], "fast");
    assert_eq!(written["metadata"]["finalizers"], json!(["kubernetes.io/pvc-protection"]));

    let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "h",
        "metadata": {"name": "heavy"}, "overhead": {"podFixed": {"cpu": "10m"}},
        "scheduling": {"nodeSelector": {"a": "b"}, "tolerations": [{"key": "k"}]}});
    world.write(class).await.expect("is written");
    let heavy = json!({"runtimeClassName": "heavy"});
    let written = world.write(pod("a", heavy)).await.expect("is written");
    assert_eq!(written["spec"]["overhead"], json!({"cpu": "10m"}));
    assert_eq!(written["spec"]["nodeSelector"], json!({"a": "b"}));
    let conflict = json!({"runtimeClassName": "heavy", "nodeSelector": {"a": "c"}});
    assert_eq!(
        message(&world.write(pod("b", conflict)).await),
        "pods \"b\" is forbidden: conflict: runtimeClass.scheduling.nodeSelector[a] = b; pod.spec.nodeSelector[a] = c"
    );
    assert_eq!(
        message(&world.write(pod("b", json!({"overhead": {"cpu": "1"}}))).await),
        "pods \"b\" is forbidden: pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead"
    );
    world.shutdown().await;
}

#[tokio::test]
async fn namespaces_set_the_security_level_of_their_pods() {
    let world = world(&[]).await;
    world.write(pod("early", json!({"hostNetwork": true}))).await.expect("is written");
    let ctx = world.context("v1", "Namespace");
    let labels = json!({"pod-security.kubernetes.io/enforce": "baseline"});
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": "web", "labels": labels}});
    world.write_in(&ctx, namespace.clone()).await.expect("is written");
    assert_eq!(
        ctx.take_warnings(),
        [
            "existing pods in namespace \"web\" violate the new PodSecurity enforce level \"baseline:latest\"",
            "early: host namespaces"
        ]
    );
    assert_eq!(
        message(&world.write(pod("a", json!({"hostNetwork": true}))).await),
        "pods \"a\" is forbidden: violates PodSecurity \"baseline:latest\": host namespaces (hostNetwork=true)"
    );
    world.write(pod("b", json!({}))).await.expect("is allowed");
    let mut bogus = namespace;
    bogus["metadata"]["labels"]["pod-security.kubernetes.io/warn-version"] = "v9".into();
    assert_eq!(
        message(&world.write(bogus).await),
        "Namespace \"web\" is invalid: metadata.labels[pod-security.kubernetes.io/warn-version]: Invalid value: \"v9\": must be \"latest\" or \"v1.x\""
    );
    world.shutdown().await;
}

#[tokio::test]
async fn a_node_changes_only_itself() {
    let world = world(&[]).await;
    let node = |name: &str, labels: Value| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}});
    world.write(node("other", json!({}))).await.expect("is written");
    let user = UserInfo::new("system:node:n", &["system:nodes"]);
    let ctx = RequestContext::new(user, world.context("v1", "Node").resource, "");
    let check = async |object: Value, expected: &str| {
        assert_eq!(message(&world.write_in(&ctx, object).await), expected);
    };
    check(node("n", json!({"kubernetes.io/hostname": "n", "mine": "x"})), "").await;
    check(
        node("other", json!({"mine": "x"})),
        "nodes \"other\" is forbidden: node \"n\" is not allowed to modify node \"other\"",
    )
    .await;
    let mut labelled = node("n", json!({"node-role.kubernetes.io/control-plane": ""}));
    labelled["spec"] =
        json!({"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]});
    check(
        labelled,
        "nodes \"n\" is forbidden: is not allowed to modify labels: node-role.kubernetes.io/control-plane",
    )
    .await;
    // The server's annotations stay when the node replaces its Node, and cannot be changed.
    let again = || {
        let mut again = node("n", json!({"mine": "y"}));
        let taint = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
        again["spec"] = json!({"taints": [taint]});
        again
    };
    check(again(), "").await;
    let kept = world.registry.find::<Node>("", "n").await.expect("reads").expect("is there");
    let noted = kept.metadata.annotations.unwrap_or_default();
    assert_eq!(noted.get("decapod.io/registered-by").map(String::as_str), Some(""));
    let with = |key: &str, part: Value| {
        let mut changed = again();
        match key {
            "podCIDR" => changed["spec"][key] = part,
            key => changed["metadata"]["annotations"] = json!({ key: part }),
        }
        changed
    };
    for key in ["decapod.io/registered-by", "decapod.io/serving-addresses"] {
        let why = "is not allowed to set the annotation";
        let expected = format!("nodes \"n\" is forbidden: node \"n\" {why} {key}");
        check(with(key, json!("10.0.0.1")), &expected).await;
    }
    let why = "nodes \"n\" is forbidden: node \"n\" is not allowed to set podCIDR or podCIDRs";
    check(with("podCIDR", json!("1.0.0.0/8")), why).await;
    world.shutdown().await;
}
