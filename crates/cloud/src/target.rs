//! The nodes behind load balancers: which nodes take traffic, and the fields that providers need of them.
//!
//! Invariant: a view of targets has exactly the nodes that may take traffic of load balancers.
//! Upstream: the predicates of `cloud-provider/controllers/service`.

use client::Projection;
use k8s_openapi::api::core::v1::{Node, NodeAddress};

/// Nodes with this label take no traffic, unless its value is false.
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// The cluster autoscaler is about to delete the node.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";

/// A node that may take traffic.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub name: String,
    pub provider_id: String,
    pub addresses: Vec<NodeAddress>,
}

impl Projection<Node> for Target {
    fn of(node: &Node) -> Self {
        let addresses = node.status.as_ref().and_then(|status| status.addresses.clone());
        Self {
            name: node.metadata.name.clone().unwrap_or_default(),
            provider_id: provider_id(node).to_owned(),
            addresses: addresses.unwrap_or_default(),
        }
    }

    fn concerns(node: &Node) -> bool {
        node.metadata.deletion_timestamp.is_none() && is_included(node) && !is_leaving(node)
    }
}

pub fn provider_id(node: &Node) -> &str {
    node.spec.as_ref().and_then(|spec| spec.provider_id.as_deref()).unwrap_or_default()
}

/// Whether the labels allow traffic. As upstream, a value that is no boolean excludes the node.
pub fn is_included(node: &Node) -> bool {
    let label = node.metadata.labels.as_ref().and_then(|labels| labels.get(EXCLUDED));
    match label.map(String::as_str) {
        None | Some("0" | "f" | "F" | "false" | "FALSE" | "False") => true,
        Some(_) => false,
    }
}

fn is_leaving(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints.is_some_and(|taints| taints.iter().any(|taint| taint.key == TO_BE_DELETED))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn predicates_choose_nodes() {
        let check = |node: Value, expected: bool| {
            let node: Node = serde_json::from_value(node).expect("a Node");
            assert_eq!(Target::concerns(&node), expected, "{node:?}");
        };
        let labelled = |value: &str| json!({"metadata": {"labels": {(EXCLUDED): value}}});
        check(json!({"metadata": {}}), true);
        check(labelled(""), false);
        check(labelled("true"), false);
        check(labelled("false"), true);
        check(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), false);
        let taint = |key: &str| json!({"metadata": {}, "spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
        check(taint(TO_BE_DELETED), false);
        check(taint("other"), true);
    }
}
