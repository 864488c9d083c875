//! May this pod run here? The kubelet's own check, after the scheduler's.
//!
//! In: the pod, the pods already admitted, the node. Out: admitted, or reason and message of the
//! pod's failure. Pure.
//! Upstream: `pkg/kubelet/lifecycle/predicate.go`; a refused pod fails with
//! `Pod was rejected: <message>`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm, Pod};

use crate::resources::{self, pod_requests};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    pub reason: String,
    pub message: String,
}

/// Checks `pod` against the node and the pods that run there already (without it).
pub fn admit<'a>(
    pod: &Pod,
    others: impl Iterator<Item = &'a Pod>,
    node: &Node,
) -> Result<(), Rejection> {
    let reject = |reason: &str, message: String| Rejection { reason: reason.into(), message };
    if pod.spec.as_ref().and_then(|s| s.os.as_ref()).is_some_and(|os| os.name != "linux") {
        let message = "Failed to admit pod as the OS field doesn't match node OS";
        return Err(reject("PodOSNotSupported", message.into()));
    }
    if !matches_node(pod, node) {
        return Err(reject(
            "NodeAffinity",
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"
                .into(),
        ));
    }
    let allocatable = node.status.as_ref().and_then(|s| s.allocatable.clone()).unwrap_or_default();
    let mut used: BTreeMap<String, i64> = BTreeMap::new();
    let mut count = 0;
    for other in others {
        count += 1;
        for (name, amount) in other.spec.iter().flat_map(pod_requests) {
            *used.entry(name).or_default() += amount;
        }
    }
    let capacity = |name: &str| allocatable.get(name).map_or(0, resources::milli);
    if count + 1 > capacity("pods") / 1000 {
        let (used, capacity) = (count, capacity("pods") / 1000);
        return Err(reject("OutOfpods", out_of("pods", 1, used, capacity)));
    }
    for (name, requested) in pod.spec.iter().flat_map(pod_requests) {
        let known = matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage");
        if requested == 0 || !(known || allocatable.contains_key(&name)) {
            continue;
        }
        let (used, capacity) = (used.get(&name).copied().unwrap_or(0), capacity(&name));
        if requested + used > capacity {
            // cpu is told in thousandths, everything else in units
            let by = if name == "cpu" { 1 } else { 1000 };
            let message = out_of(&name, requested / by, used / by, capacity / by);
            return Err(reject(&format!("OutOf{name}"), message));
        }
    }
    Ok(())
}

fn out_of(name: &str, requested: i64, used: i64, capacity: i64) -> String {
    format!(
        "Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"
    )
}

/// nodeSelector and required node affinity.
pub fn matches_node(pod: &Pod, node: &Node) -> bool {
    let Some(spec) = &pod.spec else { return true };
    let empty = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&empty);
    let selected =
        spec.node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let affinity = spec.affinity.as_ref().and_then(|a| a.node_affinity.as_ref());
    let required =
        affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    let name = node.metadata.name.as_deref().unwrap_or_default();
    selected
        && required.is_none_or(|selector| {
            selector.node_selector_terms.iter().any(|term| term_matches(term, labels, name))
        })
}

fn term_matches(term: &NodeSelectorTerm, labels: &BTreeMap<String, String>, name: &str) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    expressions.iter().all(|r| requirement_matches(r, labels.get(&r.key).map(String::as_str)))
        && fields.iter().all(|r| requirement_matches(r, (r.key == "metadata.name").then_some(name)))
}

fn requirement_matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = value.is_some_and(|value| values.iter().any(|v| v == value));
    let compared = || {
        let bound: i64 = values.first()?.parse().ok()?;
        let value: i64 = value?.parse().ok()?;
        Some(value.cmp(&bound))
    };
    match requirement.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared() == Some(std::cmp::Ordering::Greater),
        "Lt" => compared() == Some(std::cmp::Ordering::Less),
        _ => false,
    }
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
        let expected = expected.map_err(|(reason, message)| Rejection {
            reason: reason.into(),
            message: message.into(),
        });
        assert_eq!(got, expected);
    }

    fn asking(cpu: &str) -> Value {
        json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": cpu}}}]})
    }

    #[test]
    fn resources_run_out() {
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
