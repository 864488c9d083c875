//! The addresses of a node: the cloud's, in the order that the kubelet asked for. Pure.
//!
//! Upstream: `updateNodeAddress` of the node controller, `GetNodeAddressesFromNodeIP` of `cloud-provider/node/helpers`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Node, NodeAddress};

/// The kubelet's `--node-ip`: one address, or one of each family.
const PROVIDED: &str = "alpha.kubernetes.io/provided-node-ip";
const HOSTNAME: &str = "Hostname";

#[derive(Debug, thiserror::Error)]
pub enum WrongNodeIp {
    #[error("failed to parse node IP {0:?}: could not parse {1:?}")]
    Syntax(String, String),
    #[error(
        "failed to parse node IP {0:?}: must contain either a single IP or a dual-stack pair of IPs"
    )]
    Family(String),
    #[error("failed to get node address from cloud provider that matches ip: {0}")]
    Unknown(IpAddr),
}

/// The addresses for the node's status; `None`: they are there already, or the cloud has none.
pub fn wanted(node: &Node, cloud: &[NodeAddress]) -> Result<Option<Vec<NodeAddress>>, WrongNodeIp> {
    if cloud.is_empty() {
        return Ok(None);
    }
    let present = node.status.as_ref().and_then(|status| status.addresses.as_deref());
    let present = present.unwrap_or_default();
    let mut addresses = cloud.to_vec();
    if !cloud.iter().any(|address| address.type_ == HOSTNAME) {
        addresses.extend(present.iter().filter(|address| address.type_ == HOSTNAME).cloned());
    }
    let addresses = with_node_ip(node, &addresses)?;
    Ok(differ(present, &addresses).then_some(addresses))
}

/// With the annotation: its addresses first, and no others of their types.
pub fn with_node_ip(node: &Node, cloud: &[NodeAddress]) -> Result<Vec<NodeAddress>, WrongNodeIp> {
    let annotation = node.metadata.annotations.as_ref().and_then(|all| all.get(PROVIDED));
    let Some(annotation) = annotation else { return Ok(cloud.to_vec()) };
    let mut chosen = vec![];
    for ip in parse(annotation)? {
        let matches = |address: &&NodeAddress| address.address.parse() == Ok(ip);
        let before = chosen.len();
        chosen.extend(cloud.iter().filter(matches).cloned());
        if chosen.len() == before {
            return Err(WrongNodeIp::Unknown(ip));
        }
    }
    let types: BTreeSet<String> = chosen.iter().map(|address| address.type_.clone()).collect();
    chosen.extend(cloud.iter().filter(|address| !types.contains(&address.type_)).cloned());
    Ok(chosen)
}

fn parse(annotation: &str) -> Result<Vec<IpAddr>, WrongNodeIp> {
    let parse = |word: &str| {
        let wrong = || WrongNodeIp::Syntax(annotation.to_owned(), word.to_owned());
        word.parse().map_err(|_| wrong())
    };
    let ips: Vec<IpAddr> =
        annotation.split(',').map(str::trim).map(parse).collect::<Result<_, _>>()?;
    match ips.as_slice() {
        [_] => Ok(ips),
        [one, other] if one.is_ipv4() != other.is_ipv4() => Ok(ips),
        _ => Err(WrongNodeIp::Family(annotation.to_owned())),
    }
}

/// Upstream compares the number, and the last address of each type.
fn differ(old: &[NodeAddress], new: &[NodeAddress]) -> bool {
    let last: BTreeMap<&str, &str> =
        old.iter().map(|one| (one.type_.as_str(), one.address.as_str())).collect();
    let is_known = |one: &NodeAddress| last.get(one.type_.as_str()) == Some(&one.address.as_str());
    old.len() != new.len() || (old != new && !new.iter().all(is_known))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn list(all: &[(&str, &str)]) -> Vec<NodeAddress> {
        let one = |(kind, address): &(&str, &str)| NodeAddress {
            type_: (*kind).to_owned(),
            address: (*address).to_owned(),
        };
        all.iter().map(one).collect()
    }

    fn node(present: &[(&str, &str)], node_ip: Option<&str>) -> Node {
        let annotations = node_ip.map(|ip| json!({(PROVIDED): ip}));
        let node = json!({"metadata": {"name": "n", "annotations": annotations},
            "status": {"addresses": list(present)}});
        serde_json::from_value(node).expect("a Node")
    }

    const CLOUD: &[(&str, &str)] = &[
        ("InternalIP", "10.0.0.1"),
        ("InternalIP", "10.0.1.1"),
        ("ExternalIP", "203.0.113.1"),
        ("InternalIP", "fd00::1"),
    ];

    #[test]
    fn the_provided_node_ip_comes_first() {
        let check = |node_ip: Option<&str>, expected: Result<&[(&str, &str)], &str>| {
            let found = with_node_ip(&node(&[], node_ip), &list(CLOUD));
            let found = found.map_err(|error| error.to_string());
            assert_eq!(found, expected.map(list).map_err(str::to_owned), "{node_ip:?}");
        };
        check(None, Ok(CLOUD));
        check(Some("10.0.1.1"), Ok(&[("InternalIP", "10.0.1.1"), ("ExternalIP", "203.0.113.1")]));
        check(Some("203.0.113.1"), Ok(&[CLOUD[2], CLOUD[0], CLOUD[1], CLOUD[3]]));
        check(
            Some("fd00::1,10.0.0.1"),
            Ok(&[
                ("InternalIP", "fd00::1"),
                ("InternalIP", "10.0.0.1"),
                ("ExternalIP", "203.0.113.1"),
            ]),
        );
        check(
            Some("10.9.9.9"),
            Err("failed to get node address from cloud provider that matches ip: 10.9.9.9"),
        );
        check(Some("x"), Err("failed to parse node IP \"x\": could not parse \"x\""));
    }

    #[test]
    fn the_kubelets_host_name_stays() {
        let present = &[("InternalIP", "10.0.0.1"), ("Hostname", "n")];
        let found = wanted(&node(present, None), &list(&CLOUD[..1])).expect("valid");
        assert_eq!(found, None, "nothing changed");
        let found = wanted(&node(present, None), &list(&[CLOUD[2]])).expect("valid");
        assert_eq!(found, Some(list(&[CLOUD[2], ("Hostname", "n")])));
        assert_eq!(wanted(&node(present, None), &[]).expect("valid"), None, "the cloud has none");
    }
}
