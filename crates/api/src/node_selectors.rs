//! Node selectors, for the scheduler, the kubelet and the controllers. Pure.
//!
//! Upstream: `component-helpers/scheduling/corev1/nodeaffinity`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod,
};

type Labels = BTreeMap<String, String>;

/// Reports whether the pod's node selector and required node affinity match the node.
pub fn pod_selects(pod: &Pod, node: &Node) -> bool {
    let Some(spec) = &pod.spec else { return true };
    let empty = Labels::new();
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity
        .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.as_ref());
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let labels = node.metadata.labels.as_ref().unwrap_or(&empty);
    selects(spec.node_selector.as_ref().unwrap_or(&empty), required, name, labels)
}

/// Labels of a plain node selector, and node affinity: what a pod demands of its node.
pub fn selects(
    plain: &Labels,
    affinity: Option<&NodeSelector>,
    name: &str,
    labels: &Labels,
) -> bool {
    plain.iter().all(|(key, value)| labels.get(key) == Some(value))
        && affinity.is_none_or(|one| matches(one, name, labels))
}

/// Any term.
pub fn matches(selector: &NodeSelector, name: &str, labels: &Labels) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, name, labels))
}

/// All requirements; an empty term matches nothing.
pub fn term_matches(term: &NodeSelectorTerm, name: &str, labels: &Labels) -> bool {
    let by_label = term.match_expressions.iter().flatten();
    let by_field = term.match_fields.iter().flatten();
    if by_label.clone().next().is_none() && by_field.clone().next().is_none() {
        return false;
    }
    by_label
        .into_iter()
        .all(|one| requirement_matches(one, labels.get(&one.key).map(String::as_str)))
        && by_field
            .into_iter()
            .all(|one| requirement_matches(one, (one.key == "metadata.name").then_some(name)))
}

fn requirement_matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let listed = value.is_some_and(|value| values.iter().any(|one| one == value));
    let compared = || {
        let limit = values.first()?.parse::<i64>().ok()?;
        Some((value?.parse::<i64>().ok()?, limit))
    };
    match requirement.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared().is_some_and(|(value, limit)| value > limit),
        "Lt" => compared().is_some_and(|(value, limit)| value < limit),
        _ => false,
    }
}
