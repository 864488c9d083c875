//! The cost of one change for all controllers together, in decoded objects.
//!
//! Invariant: it does not grow with the number of objects. There are more of them than informers keep decoded, so
//! that a list of a kind or of a namespace shows up as that many decodes.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::context::LoadBalancer;
use crate::testing::Live;

/// More than an informer keeps decoded.
const SIZE: usize = 600;
/// Until everything that a change leads to is done; longer than the batches and pauses of controllers.
const CALM: Duration = Duration::from_secs(20);
/// Handlers, the reconciled object, its owner, and those that a change wakes.
const ALLOWED: u64 = 12;

const PODS: &str = "/api/v1/pods";
const NODES: &str = "/api/v1/nodes";
const CLAIMS: &str = "/api/v1/persistentvolumeclaims";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const SERVICES: &str = "/api/v1/services";

fn meta(namespace: &str, name: &str, uid: &str, labels: Value) -> Value {
    let mut meta = json!({"name": name, "uid": uid, "labels": labels,
        "creationTimestamp": "2026-01-01T00:00:00Z"});
    if !namespace.is_empty() {
        meta["namespace"] = namespace.into();
    }
    meta
}

fn node(index: usize, heartbeat: usize) -> Value {
    let name = format!("n{index}");
    json!({"apiVersion": "v1", "kind": "Node", "metadata": meta("", &name, &name, json!({"zone": "a"})),
        "spec": {"podCIDR": format!("10.{}.{}.0/24", index / 256, index % 256)},
        "status": {"nodeInfo": {"bootID": heartbeat.to_string()}, "conditions": [
            {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}})
}

/// Of a DaemonSet; selected by a Service and a budget, counted by a quota; mounts a claim.
fn pod(index: usize, restarts: usize) -> Value {
    let name = format!("p{index}");
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": meta("ns", &name, &name, json!({"app": "web"})),
        "spec": {"nodeName": format!("n{index}"),
            "containers": [{"name": "c", "resources": {"requests": {"cpu": "10m"}}}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": format!("c{index}")}}]},
        "status": {"phase": "Running", "podIP": format!("10.{}.{}.2", index / 256, index % 256),
            "containerStatuses": [{"name": "c", "restartCount": restarts, "image": "", "imageID": "",
                "ready": true}],
            "conditions": [{"type": "Ready", "status": "True"}]}});
    pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "DaemonSet",
        "name": "ds", "uid": "ds", "controller": true}]);
    pod
}

fn claim(index: usize, bound: bool) -> Value {
    let name = format!("{}{index}", if bound { "c" } else { "waiting" });
    let volume = if bound { json!(format!("v{index}")) } else { json!(null) };
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": meta("ns", &name, &name, json!({})),
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": volume, "storageClassName": "slow",
            "resources": {"requests": {"storage": "1Gi"}}},
        "status": {"phase": if bound { "Bound" } else { "Pending" }}})
}

fn volume(index: usize, bound: bool) -> Value {
    let name = format!("{}{index}", if bound { "v" } else { "free" });
    let reference =
        json!({"namespace": "ns", "name": format!("c{index}"), "uid": format!("c{index}")});
    json!({"apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": meta("", &name, &name, json!({})),
        "spec": {"accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Mi"},
            "storageClassName": "slow", "claimRef": if bound { reference } else { json!(null) }},
        "status": {"phase": if bound { "Bound" } else { "Available" }}})
}

fn service(index: usize, port: usize) -> Value {
    let name = format!("s{index}");
    let app = if index == 0 { "web" } else { "nothing" };
    json!({"apiVersion": "v1", "kind": "Service", "metadata": meta("ns", &name, &name, json!({})),
        "spec": {"selector": {"app": app}, "clusterIP": "10.96.0.1", "ports": [{"port": port}]}})
}

fn cluster(live: &Live) {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": meta("", "ns", "ns", json!({})), "status": {"phase": "Active"}});
    live.put("/api/v1/namespaces", namespace);
    live.put("/api/v1/resourcequotas", json!({"apiVersion": "v1", "kind": "ResourceQuota",
        "metadata": meta("ns", "q", "q", json!({})), "spec": {"hard": {"pods": "9999", "cpu": "99"}}}));
    let selector = json!({"matchLabels": {"app": "web"}});
    live.put(
        "/apis/policy/v1/poddisruptionbudgets",
        json!({"apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget", "metadata": meta("ns", "b", "b", json!({})),
        "spec": {"minAvailable": 1, "selector": selector}}),
    );
    live.put(
        "/apis/apps/v1/daemonsets",
        json!({"apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": meta("ns", "ds", "ds", json!({})), "spec": {"selector": selector, "template": {
            "metadata": {"labels": {"app": "web"}}, "spec": {"containers": []}}}}),
    );
    for index in 0..SIZE {
        live.put(NODES, node(index, 0));
        live.put(PODS, pod(index, 0));
        live.put(SERVICES, service(index, 80));
        for bound in [true, false] {
            live.put(CLAIMS, claim(index, bound));
            live.put(VOLUMES, volume(index, bound));
        }
    }
}

/// The changes whose cost is looked at: a name, a collection and the changed object.
fn changes() -> [(&'static str, &'static str, Value); 6] {
    [
        ("a pod restarts", PODS, pod(5, 1)),
        ("a node tells that it lives", NODES, node(5, 1)),
        ("a claim waits", CLAIMS, claim(5, false)),
        ("a bound claim changes", CLAIMS, claim(5, true)),
        ("a volume changes", VOLUMES, volume(5, true)),
        ("a Service changes", SERVICES, service(5, 81)),
    ]
}

async fn decodes() -> BTreeMap<&'static str, BTreeMap<String, u64>> {
    let live = Live::default();
    cluster(&live);
    let tasks = Tasks::new("test");
    let load_balancer = Some(LoadBalancer::default());
    let options = Options { load_balancer, ..Options::default() };
    let informers = start(|_| live.client(), &[], options, &tasks);
    let counts = || -> BTreeMap<String, u64> {
        let all = informers.decoded().into_iter();
        all.map(|(gvr, count)| (gvr.to_string(), count)).collect()
    };
    tokio::time::sleep(CALM * 3).await;
    let mut costs = BTreeMap::new();
    for (name, path, object) in changes() {
        let before = counts();
        live.put(path, object);
        tokio::time::sleep(CALM).await;
        let grown = counts().into_iter().map(|(kind, count)| {
            let before = before.get(&kind).copied().unwrap_or_default();
            (kind, count - before)
        });
        costs.insert(name, grown.filter(|(_, count)| *count > 0).collect());
    }
    tasks.shutdown(Duration::from_secs(5)).await;
    costs
}

#[tokio::test(start_paused = true)]
async fn a_change_of_one_object_decodes_no_others() {
    for (name, costs) in decodes().await {
        let total: u64 = costs.values().sum();
        assert!((1..=ALLOWED).contains(&total), "{name}: {costs:?} among {SIZE} objects of a kind");
    }
}
