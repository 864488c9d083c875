//! The Node and its Lease, as a kubelet writes them. Pure.
//!
//! In: the group that a node is of, its number, its mode. Out: bodies of requests.
//! Invariant: `lastTransitionTime` moves exactly when a condition's status does.
//! Upstream: `kubelet_node_status.go`, `nodestatus/setters.go`, `component-helpers/lease`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeCondition};
use serde_json::{Value, json};

use crate::config::NodeGroup;
use crate::settings::{ANNOTATION, Mode};

/// Its value is the fleet's name: a process runs the Nodes that have its own.
pub const LABEL: &str = "decapod.io/fleet";
/// The versions that the nodes report.
const VERSION: &str = release::KUBERNETES.tag;
/// Upstream: nodeLeaseDurationSeconds.
const LEASE_SECONDS: i64 = 40;

/// Type, status, reason and message of a condition.
type Condition = (&'static str, bool, &'static str, &'static str);

const NO_PRESSURE: [Condition; 3] = [
    (
        "MemoryPressure",
        false,
        "KubeletHasSufficientMemory",
        "kubelet has sufficient memory available",
    ),
    ("DiskPressure", false, "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", false, "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
];

fn told(mode: Mode) -> impl Iterator<Item = Condition> {
    let ready = match mode {
        Mode::NotReady => ("Ready", false, "KubeletNotReady", "the simulation has the node fail"),
        _ => ("Ready", true, "KubeletReady", "kubelet is posting ready status"),
    };
    NO_PRESSURE.into_iter().chain([ready])
}

/// The Node that registers; `index` is its number in the group.
pub fn registered(group: &NodeGroup, index: usize, fleet: &str, ip: &str, now: Timestamp) -> Value {
    let name = group.node_name(index);
    let mut labels = BTreeMap::from([
        ("kubernetes.io/hostname".to_owned(), name.clone()),
        ("kubernetes.io/os".to_owned(), "linux".to_owned()),
        ("kubernetes.io/arch".to_owned(), "amd64".to_owned()),
        ("beta.kubernetes.io/os".to_owned(), "linux".to_owned()),
        ("beta.kubernetes.io/arch".to_owned(), "amd64".to_owned()),
    ]);
    if !group.zones.is_empty() {
        let zone = &group.zones[index % group.zones.len()];
        labels.insert("topology.kubernetes.io/zone".into(), zone.clone());
    }
    for (label, value) in [
        ("topology.kubernetes.io/region", &group.region),
        ("node.kubernetes.io/instance-type", &group.instance_type),
    ] {
        labels.extend(value.clone().map(|value| (label.to_owned(), value)));
    }
    labels.extend(group.labels.clone());
    labels.insert(LABEL.to_owned(), fleet.to_owned());
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": group.annotations},
        "spec": {"taints": group.taints, "providerID": format!("simulated://{fleet}/{name}")},
        "status": status(group, &name, ip, now),
    })
}

/// All that a kubelet says of its machine.
fn status(group: &NodeGroup, name: &str, ip: &str, now: Timestamp) -> Value {
    let now = seconds(now);
    let conditions: Vec<Value> = told(Mode::Well)
        .map(|(kind, is, reason, message)| {
            json!({"type": kind, "status": word(is), "reason": reason, "message": message,
                "lastHeartbeatTime": now, "lastTransitionTime": now})
        })
        .collect();
    json!({
        "capacity": group.capacity, "allocatable": group.allocatable, "conditions": conditions,
        "addresses": [{"type": "InternalIP", "address": ip}, {"type": "Hostname", "address": name}],
        "nodeInfo": {
            "architecture": "amd64", "operatingSystem": "linux", "osImage": "simulated",
            "kernelVersion": "simulated", "containerRuntimeVersion": "simulated://",
            "kubeletVersion": VERSION, "kubeProxyVersion": "", "machineID": name, "systemUUID": name,
            "bootID": name,
        },
    })
}

/// The status patch for a Node that another client created, such as an autoscaler: the missing fields.
pub fn completion(node: &Node, group: &NodeGroup, ip: &str, now: Timestamp) -> Value {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let mut status = status(group, name, ip, now);
    let has = node.status.as_ref();
    if has.and_then(|status| status.capacity.as_ref()).is_some_and(|all| !all.is_empty()) {
        status["capacity"].take();
        status["allocatable"].take();
        let map = status.as_object_mut().expect("made as a map above");
        map.retain(|_, value| !value.is_null());
        let lacks = has.is_none_or(|status| status.allocatable.is_none());
        if lacks {
            map.insert("allocatable".into(), json!(has.and_then(|status| status.capacity.clone())));
        }
    }
    json!({"status": status})
}

/// Whether a kubelet has written its status.
pub fn is_complete(node: &Node) -> bool {
    let status = node.status.as_ref();
    let info = status.and_then(|status| status.node_info.as_ref());
    info.is_some_and(|info| !info.kubelet_version.is_empty()) && address(node).is_some()
}

/// The first internal address.
pub fn address(node: &Node) -> Option<&str> {
    let all = node.status.as_ref()?.addresses.as_ref()?;
    all.iter().find(|one| one.type_ == "InternalIP").map(|one| &*one.address)
}

/// The patch that reports the conditions.
pub fn heartbeat(node: &Node, mode: Mode, now: Timestamp) -> Value {
    let now = seconds(now);
    let conditions: Vec<Value> = told(mode)
        .map(|(kind, is, reason, message)| {
            let mut one = json!({"type": kind, "status": word(is), "reason": reason,
                "message": message, "lastHeartbeatTime": now});
            if condition(node, kind).is_none_or(|known| known.status != word(is)) {
                one["lastTransitionTime"] = now.clone().into();
            }
            one
        })
        .collect();
    json!({"status": {"conditions": conditions}})
}

/// Whether the Node says what the kubelet would say: the node lifecycle controller writes Unknown over it.
pub fn says(node: &Node, mode: Mode) -> bool {
    told(mode)
        .all(|(kind, is, ..)| condition(node, kind).is_some_and(|known| known.status == word(is)))
}

fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a NodeCondition> {
    node.status.as_ref()?.conditions.as_ref()?.iter().find(|one| one.type_ == kind)
}

/// The mode in a Node's annotation.
pub fn annotation(node: &Node) -> Option<&str> {
    node.metadata.annotations.as_ref()?.get(ANNOTATION).map(String::as_str)
}

/// The Lease of a node; `version` is the resource version that is replaced.
pub fn lease(name: &str, uid: &str, version: Option<&str>, now: Timestamp) -> Value {
    let mut metadata = json!({
        "name": name, "namespace": LEASES,
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}],
    });
    if let Some(version) = version {
        metadata["resourceVersion"] = version.into();
    }
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata,
        "spec": {"holderIdentity": name, "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()},
    })
}

/// The namespace of nodes' Leases.
pub const LEASES: &str = "kube-node-lease";

fn word(is: bool) -> &'static str {
    if is { "True" } else { "False" }
}

fn seconds(now: Timestamp) -> String {
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Flags};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).expect("in range")
    }

    fn group() -> NodeGroup {
        let file =
            "nodes: [{name: w, count: 4, zones: [a, b], labels: {pool: x}, instanceType: m}]";
        Config::new(Some(file), &Flags::default()).expect("valid").nodes.remove(0)
    }

    fn node(value: &Value) -> Node {
        serde_json::from_value(value.clone()).expect("a node")
    }

    #[test]
    fn a_node_registers_as_a_kubelet_does() {
        let value = registered(&group(), 3, "f", "198.18.0.5", at(0));
        let labels = &value["metadata"]["labels"];
        assert_eq!(labels["topology.kubernetes.io/zone"], "b");
        assert_eq!(labels["node.kubernetes.io/instance-type"], "m");
        assert_eq!((&labels["pool"], &labels[LABEL]), (&json!("x"), &json!("f")));
        let node = node(&value);
        assert_eq!(address(&node), Some("198.18.0.5"));
        assert!(is_complete(&node) && says(&node, Mode::Well) && !says(&node, Mode::NotReady));
    }

    #[test]
    fn conditions_change_their_time_with_their_status_alone() {
        let mut value = registered(&group(), 0, "f", "198.18.0.5", at(0));
        let patch = heartbeat(&node(&value), Mode::NotReady, at(9));
        crate::testing::merge(&mut value, &patch);
        let conditions = value["status"]["conditions"].as_array().expect("conditions");
        let time = |kind: &str| {
            let one = conditions.iter().find(|one| one["type"] == kind).expect(kind);
            (one["lastTransitionTime"].clone(), one["lastHeartbeatTime"].clone())
        };
        let text = |second| json!(at(second).to_string());
        assert_eq!(time("Ready"), (text(9), text(9)));
        assert_eq!(time("DiskPressure"), (text(0), text(9)));
        assert!(says(&node(&value), Mode::NotReady));
    }

    #[test]
    fn a_node_of_others_is_completed_and_keeps_what_it_has() {
        let mut value = json!({"metadata": {"name": "theirs"},
            "status": {"capacity": {"cpu": "4", "pods": "9"}}});
        let before = node(&value);
        assert!(!is_complete(&before));
        crate::testing::merge(&mut value, &completion(&before, &group(), "198.18.0.9", at(0)));
        assert_eq!(value["status"]["capacity"], json!({"cpu": "4", "pods": "9"}));
        assert_eq!(value["status"]["allocatable"], json!({"cpu": "4", "pods": "9"}));
        assert!(is_complete(&node(&value)) && says(&node(&value), Mode::Well));
    }

    #[test]
    fn a_lease_is_the_nodes() {
        let value = lease("w-00000", "uid", Some("7"), at(0));
        assert_eq!(value["metadata"]["ownerReferences"][0]["uid"], "uid");
        assert_eq!(value["metadata"]["resourceVersion"], "7");
        assert_eq!(value["spec"]["renewTime"], "2027-01-15T08:00:00.000000Z");
    }
}
