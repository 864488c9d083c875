//! Whole cycles against an API server that holds nodes and pods and notes evictions.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use client::Client;
use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;

#[derive(Clone, Default)]
struct Server {
    nodes: Arc<Vec<Value>>,
    pods: Arc<Vec<Value>>,
    /// Names of evicted pods, in order.
    evicted: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn new(nodes: Vec<Value>, pods: Vec<Value>) -> Self {
        Self { nodes: Arc::new(nodes), pods: Arc::new(pods), evicted: Arc::default() }
    }

    fn answer(&self, request: &Request<Body>) -> Response<Body> {
        let path = request.uri().path();
        let list = |kind: &str, items: &[Value]| json!({"apiVersion": "v1", "kind": format!("{kind}List"), "metadata": {}, "items": items});
        let body = match (request.method(), path) {
            (&Method::GET, "/api/v1/nodes") => list("Node", &self.nodes),
            (&Method::GET, "/api/v1/pods") => list("Pod", &self.pods),
            (&Method::POST, path) if path.ends_with("/eviction") => {
                let name = path.rsplit('/').nth(1).unwrap_or_default();
                self.evicted.lock().expect("no panic").push(name.to_owned());
                json!({"kind": "Status", "apiVersion": "v1", "status": "Success"})
            }
            _ => json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}),
        };
        Response::new(Body::from(body.to_string().into_bytes()))
    }

    /// The pods that one cycle of the policy evicts, in order of names.
    async fn evicts(&self, policy: &str, is_dry_run: bool) -> Vec<String> {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move { Ok::<_, Infallible>(server.answer(&request)) }
        });
        let policy = Policy::parse(policy).unwrap_or_else(|error| panic!("{error}"));
        let settings = Settings { interval: Duration::ZERO, is_dry_run };
        let tasks = Tasks::new("test");
        let client = Client::new(service, "test");
        run(client, policy, settings, tasks.stop_signal()).await.expect("a cycle");
        let mut evicted = std::mem::take(&mut *self.evicted.lock().expect("no panic"));
        evicted.sort();
        evicted
    }
}

fn node(name: &str, extra: Value) -> Value {
    let mut node = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "zone": name}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    });
    merge(&mut node, extra);
    node
}

/// A pod of a ReplicaSet `set` that requests a tenth of a node's processors.
fn pod(name: &str, node: &str, extra: Value) -> Value {
    let mut pod = json!({
        "metadata": {
            "name": name, "namespace": "default", "uid": name, "labels": {"app": "a"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "set", "uid": "set"},
            ],
        },
        "spec": {"nodeName": node, "containers": [
            {"name": "c", "image": "i", "resources": {"requests": {"cpu": "400m", "memory": "64Mi"}}},
        ]},
        "status": {"phase": "Running"},
    });
    merge(&mut pod, extra);
    pod
}

fn merge(into: &mut Value, extra: Value) {
    match (into, extra) {
        (Value::Object(into), Value::Object(extra)) => {
            for (key, value) in extra {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, extra) => *into = extra,
    }
}

fn policy(plugin: &str, point: &str, args: &Value, evictor: &Value) -> String {
    json!({
        "apiVersion": "descheduler/v1alpha2", "kind": "DeschedulerPolicy",
        "profiles": [{
            "name": "p",
            "pluginConfig": [
                {"name": "DefaultEvictor", "args": evictor},
                {"name": plugin, "args": args},
            ],
            "plugins": {point: {"enabled": [plugin]}},
        }],
    })
    .to_string()
}

fn two_nodes() -> Vec<Value> {
    vec![node("n1", json!({})), node("n2", json!({}))]
}

async fn check(pods: Vec<Value>, plugin: &str, point: &str, args: Value, expected: &[&str]) {
    let server = Server::new(two_nodes(), pods);
    let policy = policy(plugin, point, &args, &json!({}));
    assert_eq!(server.evicts(&policy, false).await, expected, "{plugin} {args}");
}

#[tokio::test]
async fn old_pods_go() {
    let young = json!({"metadata": {"creationTimestamp": "2999-01-01T00:00:00Z"}});
    let pods = vec![pod("old", "n1", json!({})), pod("young", "n2", young)];
    let args = json!({"maxPodLifeTimeSeconds": 86400});
    check(pods.clone(), "PodLifeTime", "deschedule", args, &["old"]).await;
    let args = json!({"states": ["CrashLoopBackOff"]});
    check(pods, "PodLifeTime", "deschedule", args, &[]).await;
}

#[tokio::test]
async fn failed_and_restarting_pods_go() {
    let failed = json!({"status": {"phase": "Failed", "reason": "Evicted"}});
    let restarting = json!({"status": {"containerStatuses": [
        {"name": "c", "image": "i", "imageID": "", "ready": true, "restartCount": 120},
    ]}});
    let pods = vec![pod("failed", "n1", failed), pod("loops", "n2", restarting)];
    let run = "deschedule";
    check(pods.clone(), "RemoveFailedPods", run, json!({}), &["failed"]).await;
    check(pods.clone(), "RemoveFailedPods", run, json!({"reasons": ["OOMKilled"]}), &[]).await;
    let args = json!({"podRestartThreshold": 100});
    check(pods, "RemovePodsHavingTooManyRestarts", run, args, &["loops"]).await;
}

#[tokio::test]
async fn taints_and_node_affinity_are_kept() {
    let taint = json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}});
    let tolerating = json!({"spec": {"tolerations": [{"key": "k", "operator": "Exists"}]}});
    let server = Server::new(
        vec![node("n1", taint), node("n2", json!({}))],
        vec![pod("a", "n1", json!({})), pod("b", "n1", tolerating)],
    );
    let by = |args: Value| policy("RemovePodsViolatingNodeTaints", "deschedule", &args, &json!({}));
    assert_eq!(server.evicts(&by(json!({})), false).await, ["a"]);
    assert!(server.evicts(&by(json!({"excludedTaints": ["k"]})), false).await.is_empty());

    let wants = |zone: &str| {
        json!({"spec": {"affinity": {"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]},
            ]},
        }}}})
    };
    let args = json!({"nodeAffinityType": ["requiredDuringSchedulingIgnoredDuringExecution"]});
    let pods = vec![
        pod("wrong", "n1", wants("n2")),
        pod("right", "n1", wants("n1")),
        pod("nowhere", "n1", wants("n3")),
    ];
    check(pods, "RemovePodsViolatingNodeAffinity", "deschedule", args, &["wrong"]).await;
}

#[tokio::test]
async fn anti_affinity_costs_one_of_two() {
    let repels = json!({"spec": {"affinity": {"podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "a"}}},
        ],
    }}}});
    let pods = vec![pod("a", "n1", repels.clone()), pod("b", "n1", repels)];
    let plugin = "RemovePodsViolatingInterPodAntiAffinity";
    check(pods, plugin, "deschedule", json!({}), &["a"]).await;
}

#[tokio::test]
async fn duplicates_are_spread() {
    let pods = ["a", "b", "c", "d"].map(|name| pod(name, "n1", json!({}))).to_vec();
    check(pods.clone(), "RemoveDuplicates", "balance", json!({}), &["c", "d"]).await;
    let args = json!({"excludeOwnerKinds": ["ReplicaSet"]});
    check(pods, "RemoveDuplicates", "balance", args, &[]).await;
}

#[tokio::test]
async fn full_nodes_give_to_empty_ones() {
    // Eight pods take 80 % of the processors of n1.
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let pods = names.map(|name| pod(name, "n1", json!({}))).to_vec();
    let args = json!({"thresholds": {"cpu": 20}, "targetThresholds": {"cpu": 50}});
    // From 3,200 to 2,000 thousandths: three pods.
    check(pods.clone(), "LowNodeUtilization", "balance", args, &["a", "b", "c"]).await;
    let args = json!({"thresholds": {"cpu": 20}, "targetThresholds": {"cpu": 90}});
    check(pods, "LowNodeUtilization", "balance", args, &[]).await;
}

#[tokio::test]
async fn little_used_nodes_are_emptied() {
    let pods = vec![
        pod("a", "n1", json!({})),
        pod("b", "n2", json!({})),
        pod("c", "n2", json!({})),
        pod("d", "n2", json!({})),
    ];
    let args = json!({"thresholds": {"cpu": 20}});
    check(pods, "HighNodeUtilization", "balance", args, &["a"]).await;
}

#[tokio::test]
async fn topology_spread_evens_domains_out() {
    let spread = json!({"spec": {"topologySpreadConstraints": [{
        "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "a"}},
    }]}});
    let pods = ["a", "b", "c", "d"].map(|name| pod(name, "n1", spread.clone())).to_vec();
    let plugin = "RemovePodsViolatingTopologySpreadConstraint";
    let server = Server::new(two_nodes(), pods);
    let policy = policy(plugin, "balance", &json!({}), &json!({}));
    assert_eq!(server.evicts(&policy, false).await.len(), 2);
}

#[tokio::test]
async fn some_pods_are_protected() {
    let args = json!({"maxPodLifeTimeSeconds": 1});
    for (extra, evictor, goes) in [
        (json!({}), json!({}), true),
        (json!({"metadata": {"ownerReferences": null}}), json!({}), false),
        (json!({"spec": {"priority": 2_000_000_000}}), json!({}), false),
        (
            json!({"spec": {"priority": 2_000_000_000}}),
            json!({"evictSystemCriticalPods": true}),
            true,
        ),
        (json!({"spec": {"priority": 5}}), json!({"priorityThreshold": {"value": 5}}), false),
        (json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}), json!({}), false),
        (
            json!({"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}),
            json!({"podProtections": {"defaultDisabled": ["PodsWithLocalStorage"]}}),
            true,
        ),
        (
            json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}}),
            json!({}),
            false,
        ),
        (json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), json!({}), false),
        (
            json!({
                "metadata": {"annotations": {"descheduler.alpha.kubernetes.io/evict": ""}},
                "spec": {"priority": 2_000_000_000},
            }),
            json!({}),
            true,
        ),
        (json!({}), json!({"labelSelector": {"matchLabels": {"app": "b"}}}), false),
        (json!({}), json!({"minReplicas": 2}), false),
        (json!({"spec": {"nodeSelector": {"zone": "n1"}}}), json!({"nodeFit": true}), false),
        (json!({}), json!({"nodeFit": true}), true),
    ] {
        let server = Server::new(two_nodes(), vec![pod("p", "n1", extra.clone())]);
        let policy = policy("PodLifeTime", "deschedule", &args, &evictor);
        let evicted = server.evicts(&policy, false).await;
        assert_eq!(!evicted.is_empty(), goes, "{extra} {evictor}");
    }
}

#[tokio::test]
async fn limits_and_dry_runs_are_kept() {
    let pods = ["a", "b", "c"].map(|name| pod(name, "n1", json!({}))).to_vec();
    let server = Server::new(two_nodes(), pods);
    let args = json!({"maxPodLifeTimeSeconds": 1});
    let plain = policy("PodLifeTime", "deschedule", &args, &json!({}));
    assert!(server.evicts(&plain, true).await.is_empty());
    for limit in ["Total", "PerNode", "PerNamespace"] {
        let mut limited: Value = serde_json::from_str(&plain).expect("JSON");
        limited[format!("maxNoOfPodsToEvict{limit}")] = 2.into();
        assert_eq!(server.evicts(&limited.to_string(), false).await.len(), 2, "{limit}");
    }
}
