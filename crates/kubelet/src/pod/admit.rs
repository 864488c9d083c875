//! The kubelet's own admission check of a pod, after the scheduler's.
//!
//! In: the pod, the pods already admitted, the node. Out: admitted, or the reason and message with
//! which the pod fails. Pure.
//! Upstream: `pkg/kubelet/lifecycle/predicate.go`; a refused pod fails with
//! `Pod was rejected: <message>`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use api::node_selectors::pod_selects;
use api::taints::tolerates;
use k8s_openapi::api::core::v1::{ContainerPort, Node, Pod};

use crate::names;
use crate::reason::Reason;
use crate::resources::{self, pod_requests};

/// Checks `pod` against the node and the `others` that run there already.
pub fn admit<'a>(
    pod: &Pod,
    others: impl Iterator<Item = &'a Pod>,
    node: &Node,
) -> Result<(), Reason> {
    if pod.spec.as_ref().and_then(|s| s.os.as_ref()).is_some_and(|os| os.name != "linux") {
        let message = "Failed to admit pod as the OS field doesn't match node OS";
        return Err(reject("PodOSNotSupported", message.into()));
    }
    let declared = api::declared::declared().unwrap_or_default();
    let needs = pod.spec.as_ref().map(api::declared::needs).unwrap_or_default();
    let missing: Vec<&str> =
        needs.into_iter().filter(|need| !declared.iter().any(|one| one == need)).collect();
    if !missing.is_empty() {
        let message =
            format!("Pod requires node features that are not available: {}", missing.join(", "));
        return Err(reject("PodFeatureUnsupported", message));
    }
    if !pod_selects(pod, node) {
        let why = "node(s) didn't match Pod's node affinity/selector";
        return Err(predicate("NodeAffinity", why));
    }
    let others: Vec<&Pod> = others.collect();
    has_room(pod, &others, node)?;
    let taken: Vec<HostPort> = others.iter().flat_map(|other| host_ports(other)).collect();
    if host_ports(pod).iter().any(|port| taken.iter().any(|other| port.clashes(other))) {
        let why = "node(s) didn't have free ports for the requested pod ports";
        return Err(predicate("NodePorts", why));
    }
    if !names::is_static(pod) && !stands_taints(pod, node) {
        return Err(predicate(
            "TaintToleration",
            "node(s) had taints that the pod didn't tolerate",
        ));
    }
    Ok(())
}

fn reject(reason: impl Into<Cow<'static, str>>, message: String) -> Reason {
    Reason::new(reason, message)
}

fn predicate(name: &'static str, why: &str) -> Reason {
    reject(name, format!("Predicate {name} failed: {why}"))
}

fn has_room(pod: &Pod, others: &[&Pod], node: &Node) -> Result<(), Reason> {
    let allocatable = node.status.as_ref().and_then(|s| s.allocatable.clone()).unwrap_or_default();
    let mut used: BTreeMap<String, i64> = BTreeMap::new();
    for (name, amount) in others.iter().flat_map(|o| o.spec.iter().flat_map(pod_requests)) {
        *used.entry(name).or_default() += amount;
    }
    let capacity = |name: &str| allocatable.get(name).map_or(0, resources::milli);
    let count = others.len() as i64;
    if count + 1 > capacity("pods") / 1000 {
        let (used, capacity) = (count, capacity("pods") / 1000);
        return Err(reject("OutOfpods", out_of("pods", 1, used, capacity)));
    }
    for (name, requested) in pod.spec.iter().flat_map(pod_requests) {
        let known = matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage");
        let is_unknown = !(known || allocatable.contains_key(&name));
        if requested == 0 || is_unknown || is_device(pod, &name) {
            continue;
        }
        let (used, capacity) = (used.get(&name).copied().unwrap_or(0), capacity(&name));
        if requested + used > capacity {
            // cpu counts in thousandths, every other resource in units
            let by = if name == "cpu" { 1 } else { 1000 };
            let message = out_of(&name, requested / by, used / by, capacity / by);
            return Err(reject(format!("OutOf{name}"), message));
        }
    }
    Ok(())
}

/// Whether a resource claim of the pod provides this resource, so that the node need not have it.
fn is_device(pod: &Pod, resource: &str) -> bool {
    let status = pod.status.as_ref().and_then(|one| one.extended_resource_claim_status.as_ref());
    status.is_some_and(|one| one.request_mappings.iter().any(|map| map.resource_name == resource))
}

/// NoExecute taints reject the pod. NoSchedule taints concern only the scheduler: a pod that is bound
/// nevertheless may run, as those of DaemonSets once were.
fn stands_taints(pod: &Pod, node: &Node) -> bool {
    let tolerations = pod.spec.as_ref().and_then(|s| s.tolerations.as_deref()).unwrap_or_default();
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints
        .filter(|taint| taint.effect == "NoExecute")
        .all(|taint| tolerations.iter().any(|toleration| tolerates(toleration, taint)))
}

/// A port of the node that a pod uses.
struct HostPort {
    /// `None`: all addresses.
    ip: Option<String>,
    protocol: String,
    port: i32,
}

impl HostPort {
    fn clashes(&self, other: &Self) -> bool {
        let same_ip = self.ip.is_none() || other.ip.is_none() || self.ip == other.ip;
        same_ip && self.port == other.port && self.protocol == other.protocol
    }
}

fn host_ports(pod: &Pod) -> Vec<HostPort> {
    let Some(spec) = &pod.spec else { return vec![] };
    let sidecars = spec.init_containers.iter().flatten().filter(|c| resources::is_sidecar(c));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|c| c.ports.iter().flatten());
    let one = |port: &ContainerPort| {
        let everywhere = |ip: &String| ip.is_empty() || ip == "0.0.0.0";
        Some(HostPort {
            ip: port.host_ip.clone().filter(|ip| !everywhere(ip)),
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
            port: port.host_port.filter(|port| *port > 0)?,
        })
    };
    ports.filter_map(one).collect()
}

fn out_of(name: &str, requested: i64, used: i64, capacity: i64) -> String {
    format!(
        "Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node() -> Node {
        serde_json::from_value(
            json!({"metadata": {"name": "n1", "labels": {"disk": "ssd", "gen": "3"}},
            "status": {"allocatable": {"cpu": "2", "memory": "1Gi", "pods": "2"}}}),
        )
        .expect("a node")
    }

    fn pod(spec: Value) -> Pod {
        let mut spec = spec;
        if spec.get("containers").is_none() {
            spec["containers"] = json!([]);
        }
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod")
    }

    fn check(spec: Value, others: &[Pod], expected: Result<(), (&str, &str)>) {
        let got = admit(&pod(spec), others.iter(), &node());
        let reason = |(reason, message): (&str, &str)| Reason::new(reason.to_string(), message);
        let expected = expected.map_err(reason);
        assert_eq!(got, expected);
    }

    fn asking(cpu: &str) -> Value {
        json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": cpu}}}]})
    }

    #[test]
    fn missing_node_features_reject() {
        use release::features::{Feature, Gates, scoped};
        let rule = json!({"action": "RestartAllContainers", "exitCodes": {"operator": "In"}});
        let spec = || {
            json!({"containers": [{"name": "a", "restartPolicy": "Never",
                "restartPolicyRules": [rule.clone()]}]})
        };
        check(spec(), &[], Ok(()));
        let gates = Gates::DEFAULT.with(Feature::RestartAllContainersOnContainerExits, false);
        let why = "Pod requires node features that are not available: \
                   RestartAllContainersOnContainerExits";
        scoped(gates, || check(spec(), &[], Err(("PodFeatureUnsupported", why))));
    }

    #[test]
    fn lack_of_a_resource_rejects() {
        check(asking("2"), &[], Ok(()));
        check(
            asking("3"),
            &[],
            Err((
                "OutOfcpu",
                "Node didn't have enough resource: cpu, requested: 3000, used: 0, capacity: 2000",
            )),
        );
        check(
            asking("1500m"),
            &[pod(asking("1"))],
            Err((
                "OutOfcpu",
                "Node didn't have enough resource: cpu, requested: 1500, used: 1000, capacity: 2000",
            )),
        );
        check(
            json!({"containers": [{"name": "a", "resources": {"requests": {"memory": "2Gi"}}}]}),
            &[],
            Err((
                "OutOfmemory",
                "Node didn't have enough resource: memory, requested: 2147483648, used: 0, capacity: 1073741824",
            )),
        );
        check(
            json!({}),
            &[pod(json!({})), pod(json!({}))],
            Err((
                "OutOfpods",
                "Node didn't have enough resource: pods, requested: 1, used: 2, capacity: 2",
            )),
        );
    }

    #[test]
    fn host_ports_are_used_once() {
        let pods = |ports: Value| json!({"containers": [{"name": "a", "ports": ports}]});
        let one = |port: u16, ip: &str, protocol: &str| json!([{"containerPort": 80, "hostPort": port, "hostIP": ip, "protocol": protocol}]);
        let refused = Err((
            "NodePorts",
            "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports",
        ));
        let other = pod(pods(one(8080, "10.0.0.1", "TCP")));
        let ask =
            |ports: Value, expected| check(pods(ports), std::slice::from_ref(&other), expected);
        ask(one(8080, "10.0.0.1", "TCP"), refused);
        ask(one(8080, "", "TCP"), refused);
        ask(one(8080, "0.0.0.0", "TCP"), refused);
        ask(one(8080, "10.0.0.2", "TCP"), Ok(()));
        ask(one(8080, "10.0.0.1", "UDP"), Ok(()));
        ask(one(8081, "10.0.0.1", "TCP"), Ok(()));
        ask(json!([{"containerPort": 8080}]), Ok(()));
    }

    #[test]
    fn taints_that_evict_reject() {
        let mut node = node();
        let taint = |effect: &str| {
            serde_json::from_value(
                json!({"taints": [{"key": "k", "value": "v", "effect": effect}]}),
            )
        };
        let refused = Err((
            "TaintToleration",
            "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate",
        ));
        let mut check = |effect: &str, tolerations: Value, expected: Result<(), (&str, &str)>| {
            node.spec = taint(effect).ok();
            let got = admit(&pod(json!({"tolerations": tolerations})), std::iter::empty(), &node);
            let got = got.as_ref().map_err(|r| (&*r.reason, r.message.as_str())).copied();
            assert_eq!(got, expected, "{effect} {tolerations}");
        };
        check("NoExecute", json!([]), refused);
        check("NoSchedule", json!([]), Ok(()));
        check("NoExecute", json!([{"operator": "Exists"}]), Ok(()));
        check("NoExecute", json!([{"key": "k", "value": "v", "effect": "NoExecute"}]), Ok(()));
        check("NoExecute", json!([{"key": "k", "value": "w"}]), refused);
        check(
            "NoExecute",
            json!([{"key": "k", "operator": "Exists", "effect": "NoSchedule"}]),
            refused,
        );
    }

    #[test]
    fn selectors() {
        let no = Err((
            "NodeAffinity",
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ));
        check(json!({"nodeSelector": {"disk": "ssd"}}), &[], Ok(()));
        check(json!({"nodeSelector": {"disk": "hdd"}}), &[], no);
        let term = |key: &str, operator: &str, values: Value| {
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
                {"nodeSelectorTerms": [{"matchExpressions":
                    [{"key": key, "operator": operator, "values": values}]}]}}}})
        };
        check(term("gen", "Gt", json!(["2"])), &[], Ok(()));
        check(term("gen", "Lt", json!(["2"])), &[], no);
        check(term("none", "NotIn", json!(["x"])), &[], Ok(()));
        check(term("none", "Exists", json!([])), &[], no);
    }
}
