//! What the API says about one packet, object by object: no index, no sets, no rules.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use crate::world::{NODE, World};

#[derive(Clone, Debug)]
pub struct Packet {
    pub from: IpAddr,
    pub to: IpAddr,
    /// TCP, UDP, SCTP, or another protocol without ports.
    pub proto: &'static str,
    pub port: u16,
}

/// Whether this node lets the first packet of a connection through.
pub fn allows(world: &World, packet: &Packet) -> bool {
    let (from, to) = (owner(world, packet.from), owner(world, packet.to));
    if packet.from == packet.to {
        return true;
    }
    let here = |pod: Option<&&Pod>| {
        pod.and_then(|pod| pod.spec.as_ref()?.node_name.as_deref()) == Some(NODE)
    };
    let may_leave =
        !here(from.as_ref()) || from.is_none_or(|pod| passes(world, pod, packet, false));
    let may_enter = !here(to.as_ref()) || to.is_none_or(|pod| passes(world, pod, packet, true));
    may_leave && may_enter
}

/// The pod of the pod network that has the address now.
fn owner(world: &World, address: IpAddr) -> Option<&Pod> {
    world.pods.values().find(|pod| {
        let spec = pod.spec.as_ref().expect("a spec");
        let status = pod.status.as_ref().expect("a status");
        spec.host_network != Some(true)
            && !matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
            && status.pod_ips.iter().flatten().any(|one| one.ip == address.to_string())
    })
}

fn passes(world: &World, pod: &Pod, packet: &Packet, is_ingress: bool) -> bool {
    let mut is_isolated = false;
    for policy in world.policies.values() {
        let spec = policy.spec.as_ref().expect("a spec");
        let is_selected = policy.metadata.namespace == pod.metadata.namespace
            && selects(spec.pod_selector.as_ref(), pod.metadata.labels.as_ref());
        if !is_selected || !concerns(policy, is_ingress) {
            continue;
        }
        is_isolated = true;
        let destination = owner(world, packet.to);
        let is_allowed = match is_ingress {
            true => spec.ingress.iter().flatten().any(|rule| {
                admits(world, policy, rule.from.as_deref(), packet.from, None)
                    && ports(rule.ports.as_deref(), packet, destination)
            }),
            false => spec.egress.iter().flatten().any(|rule| {
                let named =
                    |port: &NetworkPolicyPort| matches!(port.port, Some(IntOrString::String(_)));
                match rule.ports.as_deref().filter(|ports| !ports.is_empty()) {
                    None => admits(world, policy, rule.to.as_deref(), packet.to, None),
                    Some(listed) => listed.iter().any(|port| {
                        // A name means a port of a pod, which a block does not select.
                        let only_pods = named(port).then_some(());
                        admits(world, policy, rule.to.as_deref(), packet.to, only_pods)
                            && ports(Some(std::slice::from_ref(port)), packet, destination)
                    }),
                }
            }),
        };
        if is_allowed {
            return true;
        }
    }
    !is_isolated
}

fn concerns(policy: &NetworkPolicy, is_ingress: bool) -> bool {
    let spec = policy.spec.as_ref().expect("a spec");
    let types = spec.policy_types.clone().unwrap_or_default();
    match (types.is_empty(), is_ingress) {
        (true, true) => true,
        (true, false) => spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()),
        (false, _) => types.iter().any(|one| one == if is_ingress { "Ingress" } else { "Egress" }),
    }
}

fn admits(
    world: &World,
    policy: &NetworkPolicy,
    peers: Option<&[NetworkPolicyPeer]>,
    address: IpAddr,
    only_pods: Option<()>,
) -> bool {
    let Some(peers) = peers.filter(|peers| !peers.is_empty()) else { return true };
    peers.iter().any(|peer| {
        if let Some(block) = &peer.ip_block {
            let within =
                |text: &String| text.parse::<ipnet::IpNet>().expect("a network").contains(&address);
            return only_pods.is_none()
                && within(&block.cidr)
                && !block.except.iter().flatten().any(within);
        }
        let Some(pod) = owner(world, address) else { return false };
        let own = pod.metadata.namespace.as_ref().expect("a namespace");
        let in_namespace = match &peer.namespace_selector {
            None => policy.metadata.namespace.as_ref() == Some(own),
            Some(selector) => selects(Some(selector), world.namespaces.get(own)),
        };
        let all = LabelSelector::default();
        let selector = peer.pod_selector.as_ref().unwrap_or(&all);
        in_namespace && selects(Some(selector), pod.metadata.labels.as_ref())
    })
}

fn ports(ports: Option<&[NetworkPolicyPort]>, packet: &Packet, destination: Option<&Pod>) -> bool {
    let Some(ports) = ports.filter(|ports| !ports.is_empty()) else { return true };
    ports.iter().any(|port| {
        if port.protocol.as_deref().unwrap_or("TCP") != packet.proto {
            return false;
        }
        match &port.port {
            None => true,
            Some(IntOrString::Int(first)) => {
                (*first..=port.end_port.unwrap_or(*first)).contains(&i32::from(packet.port))
            }
            Some(IntOrString::String(name)) => {
                let spec = destination.and_then(|pod| pod.spec.as_ref());
                let containers = spec.iter().flat_map(|spec| &spec.containers);
                let mut listed = containers.flat_map(|container| container.ports.iter().flatten());
                listed.any(|one| {
                    one.name.as_ref() == Some(name)
                        && one.protocol.as_deref().unwrap_or("TCP") == packet.proto
                        && one.container_port == i32::from(packet.port)
                })
            }
        }
    })
}

fn selects(selector: Option<&LabelSelector>, labels: Option<&BTreeMap<String, String>>) -> bool {
    let all = LabelSelector::default();
    let selector = selector.unwrap_or(&all);
    let value = |key: &str| labels.and_then(|labels| labels.get(key));
    let pairs = selector.match_labels.iter().flatten();
    let mut expressions = selector.match_expressions.iter().flatten();
    pairs.into_iter().all(|(key, wanted)| value(key) == Some(wanted))
        && expressions.all(|one| {
            let among = |value: &String| one.values.iter().flatten().any(|other| other == value);
            match one.operator.as_str() {
                "In" => value(&one.key).is_some_and(among),
                "NotIn" => !value(&one.key).is_some_and(among),
                "Exists" => value(&one.key).is_some(),
                "DoesNotExist" => value(&one.key).is_none(),
                other => panic!("no such operator: {other}"),
            }
        })
}
