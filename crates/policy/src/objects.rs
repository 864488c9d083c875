//! What network policies need of the API's objects.
//!
//! In: Pods, Namespaces and NetworkPolicies. Out: small typed values. Everything that a namespaced user can
//! write is parsed here; nothing else of an object is kept.
//!
//! Invariant: an unreadable part of a policy allows nothing.

use std::net::IpAddr;

use client::ObjectKey;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{ContainerPort, Pod};
use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::Pairs;
use machinery::selector::Selector;
use net::nft::Proto;

/// A pod of the pod network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    pub uid: String,
    pub labels: Pairs,
    /// Empty until the pod has addresses, and after it ended: its addresses may be another pod's then.
    pub addresses: Vec<IpAddr>,
    /// The named ports of its containers.
    pub ports: Vec<(String, Proto, u16)>,
    /// On this node.
    pub is_local: bool,
    /// Its containers have ended for good.
    pub has_ended: bool,
}

/// The traffic directions of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    Ingress,
    Egress,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyFacts {
    pub pods: Selector,
    /// `None`: the policy does not isolate in this direction.
    pub ingress: Option<Vec<RuleFacts>>,
    pub egress: Option<Vec<RuleFacts>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleFacts {
    /// `None`: everybody.
    pub peers: Option<Vec<Peer>>,
    /// `None`: every port and protocol.
    pub ports: Option<Vec<PortFacts>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    Pods(PodPeer),
    Block(Block),
}

/// The pods of some namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPeer {
    pub namespaces: Namespaces,
    pub pods: Selector,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Namespaces {
    /// The policy's own.
    Named(String),
    Matching(Selector),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block {
    pub cidr: IpNet,
    pub except: Vec<IpNet>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFacts {
    pub proto: Proto,
    pub which: Ports,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ports {
    /// From the first to the last.
    Range(u16, u16),
    /// The ports of this name in the containers of the destination.
    Named(String),
}

impl PodFacts {
    /// `None`: the pod is not on the pod network, so that no policy applies to it. To others it is the node.
    pub fn of(pod: &Pod, node: &str) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        if spec.host_network == Some(true) {
            return None;
        }
        let status = pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or_default();
        let has_ended = matches!(phase, "Succeeded" | "Failed");
        let listed = status.and_then(|status| status.pod_ips.as_deref()).unwrap_or_default();
        let first =
            status.and_then(|status| status.pod_ip.as_deref()).filter(|_| listed.is_empty());
        let texts = listed.iter().map(|one| one.ip.as_str()).chain(first);
        let addresses = match has_ended {
            true => vec![],
            false => texts.filter_map(|text| text.parse().ok()).collect(),
        };
        let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        let ports = containers.flat_map(|container| container.ports.iter().flatten());
        Some(Self {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            labels: pod.metadata.labels.iter().flatten().collect(),
            addresses,
            ports: ports.filter_map(named_port).collect(),
            is_local: spec.node_name.as_deref() == Some(node),
            has_ended,
        })
    }

    /// The numbers of a named port.
    pub fn numbers(&self, proto: Proto, name: &str) -> impl Iterator<Item = u16> {
        let found = self.ports.iter().filter(move |(one, of, _)| one == name && *of == proto);
        found.map(|(.., number)| *number)
    }
}

fn named_port(port: &ContainerPort) -> Option<(String, Proto, u16)> {
    let name = port.name.clone().filter(|name| !name.is_empty())?;
    Some((name, proto(port.protocol.as_deref())?, u16::try_from(port.container_port).ok()?))
}

/// Upstream: a missing protocol is TCP.
fn proto(text: Option<&str>) -> Option<Proto> {
    match text.unwrap_or("TCP") {
        "TCP" => Some(Proto::Tcp),
        "UDP" => Some(Proto::Udp),
        "SCTP" => Some(Proto::Sctp),
        _ => None,
    }
}

impl PolicyFacts {
    pub fn of(policy: &NetworkPolicy) -> Self {
        let namespace = policy.metadata.namespace.as_deref().unwrap_or_default();
        let empty = Default::default();
        let spec = policy.spec.as_ref().unwrap_or(&empty);
        let types = spec.policy_types.as_deref().unwrap_or_default();
        let has = |name: &str| types.iter().any(|one| one == name);
        let rules = spec.egress.as_deref().unwrap_or_default();
        // Without types, as from before they were defaulted: ingress always, egress if there are rules.
        let is_egress = has("Egress") || types.is_empty() && !rules.is_empty();
        let is_ingress = has("Ingress") || types.is_empty();
        let egress = rules.iter().map(|rule| RuleFacts {
            peers: peers(rule.to.as_deref(), namespace),
            ports: ports(rule.ports.as_deref()),
        });
        let rules = spec.ingress.as_deref().unwrap_or_default();
        let ingress = rules.iter().map(|rule| RuleFacts {
            peers: peers(rule.from.as_deref(), namespace),
            ports: ports(rule.ports.as_deref()),
        });
        Self {
            // Absent selects all, like an empty one.
            pods: spec.pod_selector.as_ref().map_or_else(Selector::everything, selector),
            ingress: is_ingress.then(|| ingress.collect()),
            egress: is_egress.then(|| egress.collect()),
        }
    }

    pub fn rules(&self, direction: Direction) -> Option<&[RuleFacts]> {
        match direction {
            Direction::Ingress => self.ingress.as_deref(),
            Direction::Egress => self.egress.as_deref(),
        }
    }
}

fn selector(selector: &LabelSelector) -> Selector {
    Selector::from_api(Some(selector)).unwrap_or_else(|_| Selector::nothing())
}

/// Upstream: no peers means everybody.
fn peers(listed: Option<&[NetworkPolicyPeer]>, namespace: &str) -> Option<Vec<Peer>> {
    let listed = listed.filter(|listed| !listed.is_empty())?;
    Some(listed.iter().filter_map(|one| peer(one, namespace)).collect())
}

fn peer(peer: &NetworkPolicyPeer, namespace: &str) -> Option<Peer> {
    if let Some(block) = &peer.ip_block {
        return self::block(block).map(Peer::Block);
    }
    let (in_namespaces, pods) = (peer.namespace_selector.as_ref(), peer.pod_selector.as_ref());
    if in_namespaces.is_none() && pods.is_none() {
        return None;
    }
    Some(Peer::Pods(PodPeer {
        namespaces: match in_namespaces {
            Some(given) => Namespaces::Matching(selector(given)),
            None => Namespaces::Named(namespace.to_owned()),
        },
        pods: pods.map_or_else(Selector::everything, selector),
    }))
}

/// An exception that cannot be read excludes everything.
fn block(block: &IPBlock) -> Option<Block> {
    let cidr: IpNet = block.cidr.parse().ok()?;
    let except = block.except.iter().flatten().map(|text| text.parse::<IpNet>());
    let except: Vec<IpNet> = except.collect::<Result<_, _>>().ok()?;
    Some(Block { cidr: cidr.trunc(), except: except.iter().map(IpNet::trunc).collect() })
}

/// Upstream: no ports means all ports of all protocols.
fn ports(listed: Option<&[NetworkPolicyPort]>) -> Option<Vec<PortFacts>> {
    let listed = listed.filter(|listed| !listed.is_empty())?;
    Some(listed.iter().filter_map(port).collect())
}

fn port(port: &NetworkPolicyPort) -> Option<PortFacts> {
    let which = match &port.port {
        None => Ports::Range(0, u16::MAX),
        Some(IntOrString::String(name)) => Ports::Named(name.clone()),
        Some(IntOrString::Int(first)) => {
            let last = port.end_port.unwrap_or(*first);
            Ports::Range(u16::try_from(*first).ok()?, u16::try_from(last).ok()?)
        }
    };
    Some(PortFacts { proto: proto(port.protocol.as_deref())?, which })
}

impl PodPeer {
    /// A text that is equal for equal peers only.
    pub fn canonical(&self) -> String {
        let text = |selector: &Selector| match selector == &Selector::nothing() {
            true => "nothing()".to_owned(),
            false => selector.to_string(),
        };
        match &self.namespaces {
            Namespaces::Named(name) => format!("namespace {name}: pods {}", text(&self.pods)),
            Namespaces::Matching(selector) => {
                format!("namespaces [{}]: pods {}", text(selector), text(&self.pods))
            }
        }
    }

    pub fn selects(&self, key: &ObjectKey, namespace: &Pairs, labels: &Pairs) -> bool {
        self.takes_namespace(&key.namespace, namespace) && self.pods.matches_pairs(labels)
    }

    pub fn takes_namespace(&self, name: &str, labels: &Pairs) -> bool {
        match &self.namespaces {
            Namespaces::Named(own) => own == name,
            Namespaces::Matching(selector) => selector.matches_pairs(labels),
        }
    }
}
