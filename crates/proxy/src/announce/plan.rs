//! Which addresses this node may announce, and its place in the order of each. Pure.
//!
//! In: Services with addresses, chosen nodes, the nodes with endpoints of local Services. Out: the node's rank by
//! address. Every node computes the same order, from a hash of the address and the node's name, so that
//! addresses spread over the nodes and none but those of a lost node move.
//!
//! Cost: a Service's change costs its addresses times the nodes, in hashes of a few nanoseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use api::load_balancers::Member;
use client::{ObjectKey, Projection};
use k8s_openapi::api::core::v1::Service;
use machinery::address_range::AddressRange;

/// The fields of a Service that matter for its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balanced {
    pub uid: String,
    pub addresses: Vec<IpAddr>,
    pub is_local: bool,
}

impl Projection<Service> for Balanced {
    fn of(service: &Service) -> Self {
        let spec = service.spec.as_ref();
        let policy = spec.and_then(|spec| spec.external_traffic_policy.as_deref());
        Self {
            uid: service.metadata.uid.clone().unwrap_or_default(),
            addresses: addresses(service),
            is_local: policy == Some("Local"),
        }
    }

    fn concerns(service: &Service) -> bool {
        let kind = service.spec.as_ref().and_then(|spec| spec.type_.as_deref());
        kind == Some("LoadBalancer") && !addresses(service).is_empty()
    }
}

fn addresses(service: &Service) -> Vec<IpAddr> {
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = balancer.and_then(|balancer| balancer.ingress.as_deref()).unwrap_or_default();
    let ours = ingress.iter().filter(|entry| entry.ip_mode.as_deref() != Some("Proxy"));
    ours.filter_map(|entry| entry.ip.as_ref()?.parse().ok()).collect()
}

/// The Services of an address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    pub services: BTreeSet<ObjectKey>,
    /// Those whose traffic only nodes with endpoints take.
    pub local: BTreeSet<ObjectKey>,
}

/// The pools' addresses that Services have. Addresses outside of the pools are never announced: a status must not
/// make a node claim a stranger's address.
pub fn users<'a>(
    services: impl Iterator<Item = (&'a ObjectKey, &'a Balanced)>,
    pools: &[AddressRange],
) -> BTreeMap<IpAddr, Users> {
    let mut all: BTreeMap<IpAddr, Users> = BTreeMap::new();
    for (key, service) in services {
        let is_ours = |address: &&IpAddr| pools.iter().any(|pool| pool.contains(**address));
        for address in service.addresses.iter().filter(is_ours) {
            let users = all.entry(*address).or_default();
            users.services.insert(key.clone());
            if service.is_local {
                users.local.insert(key.clone());
            }
        }
    }
    all
}

/// The node's place in the order of an address; `None` if it may not announce it.
pub fn rank(
    address: IpAddr,
    own: &str,
    chosen: &[&str],
    has_endpoints: impl Fn(&str) -> bool,
) -> Option<usize> {
    let fits = |name: &&&str| has_endpoints(name);
    chosen.iter().find(|name| **name == own).filter(fits)?;
    let mine = (weight(address, own), own);
    let before = chosen.iter().filter(|name| (weight(address, name), **name) < mine);
    Some(before.filter(fits).count())
}

/// The names of the nodes that take load balancers' traffic.
pub fn chosen<'a>(members: impl Iterator<Item = (&'a str, &'a Member)> + Clone) -> Vec<&'a str> {
    let only_enabled = members.clone().any(|(_, member)| member.is_enabled());
    members.filter(|(_, one)| one.is_chosen(only_enabled)).map(|(name, _)| name).collect()
}

/// FNV-1a with a last mix, so that names that differ in the last letter are far apart.
fn weight(address: IpAddr, node: &str) -> u64 {
    let octets = match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let hash = octets.iter().chain(node.as_bytes()).fold(0xcbf2_9ce4_8422_2325, step);
    let mixed = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed ^ (mixed >> 33)
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn every_node_has_its_own_rank() {
        let nodes = ["n1", "n2", "n3", "n4"];
        let mut firsts = BTreeMap::new();
        for last in 0..200 {
            let address = IpAddr::from([192, 168, 1, last]);
            let ranks: BTreeMap<usize, &str> = nodes
                .iter()
                .map(|node| (rank(address, node, &nodes, |_| true).expect("chosen"), *node))
                .collect();
            assert_eq!(ranks.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
            *firsts.entry(ranks[&0]).or_insert(0) += 1;
            // Without the first one the others move up.
            let left: Vec<&str> = nodes.into_iter().filter(|node| *node != ranks[&0]).collect();
            assert_eq!(rank(address, ranks[&1], &left, |_| true), Some(0));
            assert_eq!(rank(address, ranks[&0], &left, |_| true), None);
            let only_last = rank(address, ranks[&3], &nodes, |name| name == ranks[&3]);
            assert_eq!(only_last, Some(0), "the others have no endpoints");
        }
        assert!(firsts.values().all(|count| *count > 25), "{firsts:?}");
    }

    #[test]
    fn only_addresses_of_pools_count() {
        let service = json!({"metadata": {"name": "s", "uid": "u"},
            "spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"},
            "status": {"loadBalancer": {"ingress": [{"ip": "10.0.0.1"}, {"ip": "10.0.9.9"},
                {"ip": "10.0.0.2", "ipMode": "Proxy"}, {"hostname": "x"}]}}});
        let service: Service = from_value(service).expect("a Service");
        assert!(Balanced::concerns(&service));
        let (key, balanced) = (ObjectKey::new("ns", "s"), Balanced::of(&service));
        let pools = ["10.0.0.0-10.0.0.9".parse().expect("a range")];
        let found = users([(&key, &balanced)].into_iter(), &pools);
        let all: Vec<_> = found.keys().copied().collect();
        assert_eq!(all, [address("10.0.0.1")]);
        assert_eq!(found[&all[0]].local.len(), 1);
    }
}
