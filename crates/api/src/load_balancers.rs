//! Which nodes take the traffic of load balancers that need no cloud. Pure.
//!
//! In: Nodes. Out: whether a node is chosen, and its address. The controller announces nodes' addresses by these
//! rules, and the nodes themselves announce pools' addresses by the same ones.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::discovery::v1::EndpointSlice;

/// With `true` on any node, only such nodes are chosen.
const ENABLE: &str = "decapod.io/enable-lb";
/// Upstream's label of nodes that load balancers leave out.
const EXCLUDE: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

/// The fields of a Node that decide whether its addresses are announced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    is_usable: bool,
    is_enabled: bool,
    /// ExternalIPs and InternalIPs.
    external: Vec<IpAddr>,
    internal: Vec<IpAddr>,
}

impl Member {
    pub fn of(node: &Node) -> Self {
        let label = |name: &str| node.metadata.labels.as_ref().and_then(|all| all.get(name));
        let status = node.status.as_ref();
        let is_ready = is_ready(node);
        let addresses = status.and_then(|status| status.addresses.as_deref()).unwrap_or_default();
        let of_type = |kind: &str| -> Vec<IpAddr> {
            let typed = addresses.iter().filter(|one| one.type_ == kind);
            typed.filter_map(|one| one.address.parse().ok()).collect()
        };
        Self {
            is_usable: is_ready
                && label(EXCLUDE).is_none()
                && node.metadata.deletion_timestamp.is_none(),
            is_enabled: label(ENABLE).is_some_and(|value| value == "true"),
            external: of_type("ExternalIP"),
            internal: of_type("InternalIP"),
        }
    }

    pub fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    /// Whether load balancers use the node. `only_enabled`: some node has the label.
    pub fn is_chosen(&self, only_enabled: bool) -> bool {
        self.is_usable && (self.is_enabled || !only_enabled)
    }

    /// The address of a family: the first ExternalIP, else the first InternalIP.
    pub fn address(&self, is_ipv4: bool) -> Option<IpAddr> {
        let of_family = |all: &[IpAddr]| all.iter().find(|one| one.is_ipv4() == is_ipv4).copied();
        of_family(&self.external).or_else(|| of_family(&self.internal))
    }
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_deref());
    let mut conditions = conditions.unwrap_or_default().iter();
    conditions.any(|one| one.type_ == "Ready" && one.status == "True")
}

/// The nodes with ready endpoints of a slice: those that take traffic of the policy Local.
pub fn ready_nodes(slice: &EndpointSlice) -> BTreeSet<Box<str>> {
    let ready = slice.endpoints.iter().flatten().filter(|endpoint| {
        endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
    });
    ready.filter_map(|endpoint| endpoint.node_name.as_deref().map(Into::into)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn nodes_are_chosen_by_state_and_labels() {
        let check = |labels: Value, ready: &str, only_enabled: bool, expected: bool| {
            let node = json!({"metadata": {"name": "n", "labels": labels},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}});
            let member = Member::of(&from_value(node).expect("a Node"));
            assert_eq!(member.is_chosen(only_enabled), expected, "{labels} {ready}");
        };
        check(json!({}), "True", false, true);
        check(json!({}), "True", true, false);
        check(json!({}), "Unknown", false, false);
        check(json!({EXCLUDE: ""}), "True", false, false);
        check(json!({ENABLE: "true"}), "True", true, true);
        check(json!({ENABLE: "false"}), "True", true, false);
    }

    #[test]
    fn an_external_address_comes_first() {
        let node = json!({"metadata": {"name": "n"}, "status": {"addresses": [
            {"type": "InternalIP", "address": "10.0.0.1"}, {"type": "InternalIP", "address": "fd00::1"},
            {"type": "ExternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": "n"}]}});
        let member = Member::of(&from_value(node).expect("a Node"));
        let text = |is_ipv4| member.address(is_ipv4).map(|address| address.to_string());
        assert_eq!(text(true).as_deref(), Some("192.0.2.1"));
        assert_eq!(text(false).as_deref(), Some("fd00::1"));
    }
}
