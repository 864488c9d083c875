//! Routes to the pods of other nodes.
//!
//! In: all nodes, from an informer. Out: one VXLAN device with a route, a neighbour and a
//! forwarding entry per other node; or, if all nodes are in one network and the user says so, a route per node
//! and no device ([`Kind::HostGateway`]). VXLAN works in any network. A single node has no device.
//!
//! ```text
//!  Node n2: podCIDR 10.42.1.0/24, InternalIP 192.168.0.2
//!     └► 10.42.1.0/24 via 10.42.1.0 dev decapod.1 onlink ─► UDP 8472 to 192.168.0.2
//! ```
//!
//! Invariants: a hostile machine may write its Node, so a node gets packets only for a part of the
//! cluster's own pod network (see [`plan`]). A peer that the kernel refuses does not delay the
//! routes to others. Nothing is removed at exit, so traffic continues while the process is down.
//! Routes are changed only after the informer has synced. A route without a node is removed, even
//! one of an earlier process. Objects that another program removes are restored.
//! Why here: the proxy runs on every node beside the Services' rules, with an identity that may
//! read all nodes (a kubelet's may not).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::{Stop, Tasks};
use client::{Client, Informers, Projection, View};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, NodeSpec, NodeStatus};
use machinery::ObjectMeta;
use net::Links;
use net::links::Via;
use net::monitor::{Change, Monitor};
use net::vxlan::{DEVICE, Peer, Vxlan};
use net::watch::Watch;
use tokio::sync::Notify;

use crate::{Error, RETRY, RETRY_CEILING, node_facts};

#[derive(Clone, Debug, Default)]
pub struct RoutesConfig {
    pub node_name: String,
    /// The CIDRs of all pods: only these are routed to nodes.
    pub cluster_cidrs: Vec<IpNet>,
    /// The CIDRs of Services, which belong to no node.
    pub service_cidrs: Vec<IpNet>,
    pub kind: Kind,
    /// The node's network namespace; none: the process's own.
    pub netns: Option<PathBuf>,
}

/// How packets reach another node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    #[default]
    Vxlan,
    /// Through the other node's address: the nodes are in one network.
    HostGateway,
}

/// Removes the routes and the device of earlier processes.
pub async fn remove(netns: Option<&Path>) -> Result<(), Error> {
    let links = match netns {
        Some(path) => Links::open_in(path).await?,
        None => Links::open()?,
    };
    clear(&links).await
}

async fn clear(links: &Links) -> Result<(), Error> {
    links.remove(DEVICE).await?;
    for route in links.routes_by_nodes().await? {
        links.remove_route(route).await?;
    }
    Ok(())
}

/// Runs until `stop`. The routes stay.
pub async fn follow_nodes(client: Client, config: RoutesConfig, stop: Stop) -> Result<(), Error> {
    let tasks = Tasks::new("routes");
    let _bound = tasks.bound();
    let links = match &config.netns {
        Some(path) => Links::open_in(path).await?,
        None => Links::open()?,
    };
    let mut watch = Watch::new(Monitor::of_links(config.netns.as_deref())?);
    let nodes = Informers::new(client, tasks.clone()).of::<Node>();
    let places: View<Place> = nodes.view();
    let changed = Arc::new(Notify::new());
    let tell = changed.clone();
    nodes.subscribe(move |event| {
        // Kubelets update their nodes' status often; only the addresses matter.
        let before = event.old().filter(|_| !event.is_deleted());
        if before.is_none_or(|before| node_facts(&before) != node_facts(event.object())) {
            tell.notify_one();
        }
    });
    let work = async {
        nodes.synced().await;
        let mut roads = Roads::new(links, config.kind);
        let mut retry = Backoff::new(RETRY, RETRY_CEILING);
        loop {
            let all =
                places.all().into_iter().map(|(_, place)| place.0.clone()).collect::<Vec<_>>();
            match roads.build(plan(&config, &all)).await {
                Ok(all_done) => {
                    let rest = async {
                        match all_done {
                            true => std::future::pending().await,
                            false => tokio::time::sleep(retry.step()).await,
                        }
                    };
                    tokio::select! {
                        () = rest => continue,
                        () = changed.notified() => {}
                        told = watch.changed(|change| roads.is_own(change)) => {
                            told?;
                            // Another program changed them, or this one removed a peer: checking
                            // again costs little.
                            tracing::info!("restoring the routes to other nodes after a change");
                            roads.forget();
                        }
                    }
                    retry.reset();
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to update the routes to other nodes, will try again");
                    tokio::time::sleep(retry.step()).await;
                }
            }
        }
    };
    let outcome = stop.or(work).await.unwrap_or(Ok(()));
    tasks.shutdown(Duration::from_secs(3)).await;
    outcome
}

/// The fields of a Node that the routes depend on.
struct Place(Arc<Node>);

impl Projection<Node> for Place {
    fn of(node: &Node) -> Self {
        let metadata = ObjectMeta {
            name: node.metadata.name.clone(),
            labels: node.metadata.labels.clone(),
            creation_timestamp: node.metadata.creation_timestamp.clone(),
            deletion_timestamp: node.metadata.deletion_timestamp.clone(),
            ..ObjectMeta::default()
        };
        let spec = node.spec.as_ref().map(|spec| NodeSpec {
            pod_cidr: spec.pod_cidr.clone(),
            pod_cidrs: spec.pod_cidrs.clone(),
            ..NodeSpec::default()
        });
        let status = node.status.as_ref().map(|status| NodeStatus {
            addresses: status.addresses.clone(),
            ..NodeStatus::default()
        });
        Self(Arc::new(Node { metadata, spec, status }))
    }
}

/// The settings of this node's end of the overlay, and its peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Plan {
    /// This node's address and pod network; none until the API has both.
    own: Option<(IpAddr, IpNet)>,
    /// By pod network.
    peers: BTreeMap<IpNet, IpAddr>,
    /// Nodes whose pod network is refused, and the reason.
    refused: BTreeMap<String, Refusal>,
}

/// Why a Node's pod network gets no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Refusal {
    #[error("its podCIDR {0} is outside of the cluster CIDR")]
    Outside(IpNet),
    #[error("its podCIDR {0} has another size than this node's")]
    Size(IpNet),
    #[error("its podCIDR {0} overlaps with that of this node or of an older one")]
    Taken(IpNet),
    #[error("its InternalIP {0} is not an address of another machine")]
    Address(IpAddr),
}

/// Pure. Older Nodes come first, so that a new Node cannot take an existing one's network.
fn plan(config: &RoutesConfig, nodes: &[Arc<Node>]) -> Plan {
    let mut alive: Vec<_> =
        nodes.iter().filter(|node| node.metadata.deletion_timestamp.is_none()).collect();
    let age = |node: &Node| node.metadata.creation_timestamp.as_ref().map(|time| time.0);
    alive.sort_by_cached_key(|node| (age(node), node.metadata.name.clone()));
    let is_own = |node: &Node| node.metadata.name.as_deref() == Some(config.node_name.as_str());
    let own = alive.iter().find(|node| is_own(node)).and_then(|node| pairs(node).next());
    let mut plan = Plan { own, ..Plan::default() };
    let mut taken = Shares::default();
    taken.extend(own.map(|(_, cidr)| cidr));
    for node in alive.iter().filter(|node| !is_own(node)) {
        for (address, cidr) in pairs(node) {
            // The overlay supports one family.
            if own.is_some_and(|(_, own)| own.addr().is_ipv4() != cidr.addr().is_ipv4()) {
                continue;
            }
            match refusal(config, own, address, cidr, &taken) {
                None => {
                    taken.extend([cidr]);
                    plan.peers.insert(cidr, address);
                }
                Some(why) => {
                    let name = node.metadata.name.clone().unwrap_or_default();
                    plan.refused.entry(name).or_insert(why);
                }
            }
        }
    }
    plan
}

/// A Node's pod CIDRs, each with its address of the same family.
fn pairs(node: &Node) -> impl Iterator<Item = (IpAddr, IpNet)> {
    let facts = node_facts(node);
    facts.pod_cidrs.into_iter().filter_map(move |cidr| {
        let is_fit = |address: &&IpAddr| address.is_ipv4() == cidr.addr().is_ipv4();
        Some((*facts.addresses.iter().find(is_fit)?, cidr.trunc()))
    })
}

fn refusal(
    config: &RoutesConfig,
    own: Option<(IpAddr, IpNet)>,
    address: IpAddr,
    cidr: IpNet,
    taken: &Shares,
) -> Option<Refusal> {
    let is_in = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
    if !config.cluster_cidrs.iter().any(|range| range.contains(&cidr)) {
        return Some(Refusal::Outside(cidr));
    }
    if own.is_some_and(|(_, own)| own.prefix_len() != cidr.prefix_len()) {
        return Some(Refusal::Size(cidr));
    }
    if taken.overlap(cidr) {
        return Some(Refusal::Taken(cidr));
    }
    let is_ours = own.is_some_and(|(own, _)| own == address);
    let is_elsewhere = is_host(address) && !is_ours;
    if !is_elsewhere || is_in(&config.cluster_cidrs) || is_in(&config.service_cidrs) {
        return Some(Refusal::Address(address));
    }
    None
}

/// Whether the address can belong to one machine.
fn is_host(address: IpAddr) -> bool {
    let is_special = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast() || v4.octets()[0] == 0,
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
    };
    !(is_special || address.is_loopback() || address.is_unspecified() || address.is_multicast())
}

/// Networks without overlap, by their first address.
#[derive(Default)]
struct Shares(BTreeMap<IpAddr, IpNet>);

impl Shares {
    fn extend(&mut self, cidrs: impl IntoIterator<Item = IpNet>) {
        self.0.extend(cidrs.into_iter().map(|cidr| (cidr.network(), cidr)));
    }

    // Only the last network that begins before the end of `cidr` can overlap it.
    fn overlap(&self, cidr: IpNet) -> bool {
        let before = self.0.range(..=cidr.broadcast()).next_back();
        before.is_some_and(|(_, one)| one.broadcast() >= cidr.network())
    }
}

/// The kernel state that this process created.
struct Roads {
    links: Links,
    kind: Kind,
    way: Option<Way>,
    /// The interface of the routes: the VXLAN device, or the one of the node's address.
    index: Option<u32>,
    peers: BTreeMap<IpNet, IpAddr>,
    /// Refused nodes that are already logged, and the reason.
    refused: BTreeMap<String, Refusal>,
    /// Peers that the kernel refused and that are already logged.
    failed: BTreeSet<IpNet>,
    /// True until the routes of an earlier process were checked.
    is_fresh: bool,
    /// True during a repair: reachable nodes are not logged again.
    is_repair: bool,
}

impl Roads {
    fn new(links: Links, kind: Kind) -> Self {
        Self {
            links,
            kind,
            way: None,
            index: None,
            peers: BTreeMap::new(),
            refused: BTreeMap::new(),
            failed: BTreeSet::new(),
            is_fresh: true,
            is_repair: false,
        }
    }

    fn is_own(&self, change: Change<'_>) -> bool {
        let is_of = |index| self.way.is_some() && self.index == Some(index);
        match change {
            Change::Link(index) => is_of(index),
            // The nodes' own network resolves its neighbours itself.
            Change::Neighbour(index) => self.kind == Kind::Vxlan && is_of(index),
            Change::Rules { .. } => false,
        }
    }

    /// Call this after another program changed the routes: the next round sets all of them again.
    fn forget(&mut self) {
        (self.way, self.peers) = (None, BTreeMap::new());
        (self.is_fresh, self.is_repair) = (true, true);
    }

    /// Returns whether all succeeded: a failed peer is retried and does not delay others.
    async fn build(&mut self, plan: Plan) -> Result<bool, Error> {
        self.name_refused(plan.refused);
        let Some((local, pod_cidr)) = plan.own.filter(|_| !plan.peers.is_empty()) else {
            // A single node, or one that the API does not know: existing routes lead nowhere.
            let is_alone = plan.peers.is_empty();
            if is_alone && (self.is_fresh || self.way.is_some()) {
                clear(&self.links).await?;
                (self.way, self.peers, self.is_fresh) = (None, BTreeMap::new(), false);
            }
            return Ok(true);
        };
        let way = self.ensure_way(local, pod_cidr).await?;
        let mut failed = BTreeSet::new();
        let gone = self.peers.keys().filter(|cidr| !plan.peers.contains_key(cidr)).copied();
        for pod_cidr in gone.collect::<Vec<_>>() {
            if !self.remove_peer(&way, pod_cidr).await {
                failed.insert(pod_cidr);
            }
        }
        for (pod_cidr, node) in plan.peers {
            if self.peers.get(&pod_cidr) != Some(&node)
                && !self.add_peer(&way, Peer { node, pod_cidr }).await
            {
                failed.insert(pod_cidr);
            }
        }
        self.failed = failed;
        if self.is_fresh {
            self.remove_strangers().await?;
            (self.is_fresh, self.is_repair) = (false, false);
        }
        Ok(self.failed.is_empty())
    }

    /// Logs each refused Node once per reason.
    fn name_refused(&mut self, refused: BTreeMap<String, Refusal>) {
        for (node, why) in &refused {
            if self.refused.get(node) != Some(why) {
                tracing::warn!(node, %why, "refused the routes to a node's pods");
            }
        }
        self.refused = refused;
    }

    /// Returns whether the peer is gone.
    async fn remove_peer(&mut self, way: &Way, pod_cidr: IpNet) -> bool {
        let Some(&node) = self.peers.get(&pod_cidr) else { return true };
        match way.remove_peer(&self.links, &Peer { node, pod_cidr }).await {
            Ok(()) => {
                self.peers.remove(&pod_cidr);
                tracing::info!(%node, %pod_cidr, "removed the route to a node's pods");
                true
            }
            Err(error) => {
                if !self.failed.contains(&pod_cidr) {
                    let text = "failed to remove the route to a node's pods, will try again";
                    tracing::warn!(%error, %node, %pod_cidr, "{text}");
                }
                false
            }
        }
    }

    /// Returns whether the peer is reachable.
    async fn add_peer(&mut self, way: &Way, peer: Peer) -> bool {
        let Peer { node, pod_cidr } = peer;
        match way.ensure_peer(&self.links, &peer).await {
            Ok(()) => {
                if !self.is_repair {
                    tracing::info!(%node, %pod_cidr, "added the route to a node's pods");
                }
                self.peers.insert(pod_cidr, node);
                true
            }
            Err(error) => {
                if !self.failed.contains(&pod_cidr) {
                    let text = "failed to add the route to a node's pods, will try again";
                    tracing::warn!(%error, %node, %pod_cidr, "{text}");
                }
                false
            }
        }
    }

    async fn ensure_way(&mut self, local: IpAddr, pod_cidr: IpNet) -> Result<Way, Error> {
        if let Some(way) = &self.way
            && way.is_of(local, pod_cidr)
        {
            return Ok(way.clone());
        }
        let outer = match self.links.link_of(local).await? {
            Some(link) => link.name,
            // The node's address is a translated one: uses the default route's interface.
            None => self.links.uplink().await?.ok_or(Error::NoUplink(local))?.interface,
        };
        if self.way.take().is_some() || self.kind == Kind::HostGateway {
            // The settings differ, and the device's address cannot be changed: recreates the device.
            self.links.remove(DEVICE).await?;
            self.peers.clear();
        }
        let way = match self.kind {
            Kind::HostGateway => {
                self.index = Some(self.links.link(&outer).await?.index);
                Way::HostGateway(local)
            }
            Kind::Vxlan => {
                let device = Vxlan::new(DEVICE, local, &outer, pod_cidr);
                self.index = Some(device.ensure(&self.links).await?.index);
                Way::Vxlan(device)
            }
        };
        self.way = Some(way.clone());
        Ok(way)
    }

    /// Removes routes that an earlier process made for deleted nodes, or in another way.
    async fn remove_strangers(&self) -> Result<(), Error> {
        let mut ours = self.links.routes_by_nodes().await?;
        if let Some(Way::Vxlan(device)) = &self.way {
            let device = self.links.link(&device.name).await?;
            ours.extend(self.links.routes_by(device.index).await?);
        }
        for route in ours.iter().filter(|route| !self.peers.contains_key(route)) {
            self.links.remove_route(*route).await?;
        }
        Ok(())
    }
}

/// This node's end of the routes to peers.
#[derive(Clone, Debug)]
enum Way {
    Vxlan(Vxlan),
    /// The node's own address.
    HostGateway(IpAddr),
}

impl Way {
    fn is_of(&self, local: IpAddr, pod_cidr: IpNet) -> bool {
        match self {
            Self::Vxlan(device) => (device.local, device.pod_cidr) == (local, pod_cidr),
            Self::HostGateway(address) => *address == local,
        }
    }

    async fn ensure_peer(&self, links: &Links, peer: &Peer) -> Result<(), net::Error> {
        match self {
            Self::Vxlan(device) => device.ensure_peer(links, peer).await,
            Self::HostGateway(_) => links.ensure_route(peer.pod_cidr, &Via::Node(peer.node)).await,
        }
    }

    async fn remove_peer(&self, links: &Links, peer: &Peer) -> Result<(), net::Error> {
        match self {
            Self::Vxlan(device) => device.remove_peer(links, peer).await,
            Self::HostGateway(_) => links.remove_route(peer.pod_cidr).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, cidr: &str, address: &str) -> Arc<Node> {
        aged(name, cidr, address, "2026-01-01T00:00:00Z")
    }

    fn aged(name: &str, cidr: &str, address: &str, created: &str) -> Arc<Node> {
        let addresses = match address {
            "" => serde_json::json!([]),
            address => serde_json::json!([{"type": "Hostname", "address": name},
                {"type": "InternalIP", "address": address}]),
        };
        let metadata = serde_json::json!({"name": name, "creationTimestamp": created});
        let node = serde_json::json!({"metadata": metadata,
            "spec": {"podCIDR": cidr, "podCIDRs": [cidr]}, "status": {"addresses": addresses}});
        Arc::new(serde_json::from_value(node).expect("a node"))
    }

    fn config() -> RoutesConfig {
        let nets = |all: &[&str]| all.iter().map(|net| net.parse().expect("a net")).collect();
        RoutesConfig {
            node_name: "a".into(),
            cluster_cidrs: nets(&["10.42.0.0/16", "fd42::/48"]),
            service_cidrs: nets(&["10.43.0.0/16"]),
            kind: Kind::Vxlan,
            netns: None,
        }
    }

    fn check(nodes: &[Arc<Node>], own: Option<&str>, peers: &[(&str, &str)], refused: &[&str]) {
        let plan = plan(&config(), nodes);
        let expected = peers
            .iter()
            .map(|(cidr, node)| (cidr.parse().expect("a net"), node.parse().expect("an IP")))
            .collect::<BTreeMap<IpNet, IpAddr>>();
        assert_eq!(plan.own.map(|(_, cidr)| cidr.to_string()).as_deref(), own);
        assert_eq!(plan.peers, expected);
        let told: Vec<String> =
            plan.refused.iter().map(|(node, why)| format!("{node}: {why}")).collect();
        assert_eq!(told, refused);
    }

    #[test]
    fn every_other_node_is_a_peer() {
        let (a, b) = (node("a", "10.42.0.0/24", "10.0.0.1"), node("b", "10.42.1.0/24", "10.0.0.2"));
        check(&[], None, &[], &[]);
        check(std::slice::from_ref(&a), Some("10.42.0.0/24"), &[], &[]);
        let both = [a.clone(), b.clone()];
        check(&both, Some("10.42.0.0/24"), &[("10.42.1.0/24", "10.0.0.2")], &[]);
        check(std::slice::from_ref(&b), None, &[("10.42.1.0/24", "10.0.0.2")], &[]);
        let (silent, v6) = (node("c", "10.42.2.0/24", ""), node("d", "fd00::/64", "fd01::1"));
        check(&[a, silent, v6], Some("10.42.0.0/24"), &[], &[]);
    }

    /// A node that claims others' addresses gets no routes; the routes to others are created.
    #[test]
    fn a_hostile_node_gets_no_routes() {
        let (a, b) = (node("a", "10.42.0.0/24", "10.0.0.1"), node("b", "10.42.1.0/24", "10.0.0.2"));
        let check = |cidr: &str, address: &str, why: &str| {
            let evil = aged("evil", cidr, address, "2026-01-02T00:00:00Z");
            let why = format!("evil: {why}");
            let peers = [("10.42.1.0/24", "10.0.0.2")];
            let all = [evil, a.clone(), b.clone()];
            super::tests::check(&all, Some("10.42.0.0/24"), &peers, &[&why]);
        };
        let outside = |cidr: &str| format!("its podCIDR {cidr} is outside of the cluster CIDR");
        for cidr in ["1.0.0.0/8", "0.0.0.0/0", "10.0.0.0/24", "10.43.0.0/24", "10.0.0.0/8"] {
            check(cidr, "10.0.0.9", &outside(cidr));
        }
        for cidr in ["10.42.0.0/16", "10.42.128.0/17", "10.42.3.7/32"] {
            let why = format!("its podCIDR {cidr} has another size than this node's");
            check(cidr, "10.0.0.9", &why);
        }
        for cidr in ["10.42.0.0/24", "10.42.1.0/24"] {
            let why = "overlaps with that of this node or of an older one";
            check(cidr, "10.0.0.9", &format!("its podCIDR {cidr} {why}"));
        }
        for address in [
            "127.0.0.1",
            "0.0.0.0",
            "169.254.1.1",
            "224.0.0.1",
            "255.255.255.255",
            "10.0.0.1",
            "10.42.1.5",
            "10.43.0.1",
        ] {
            let why = format!("its InternalIP {address} is not an address of another machine");
            check("10.42.9.0/24", address, &why);
        }
    }

    #[test]
    fn shares_overlap_whatever_their_sizes() {
        let net = |text: &str| text.parse::<IpNet>().expect("a net");
        let mut shares = Shares::default();
        shares.extend([net("10.42.1.0/24"), net("10.42.8.0/22")]);
        for (cidr, expected) in [
            ("10.42.0.0/24", false),
            ("10.42.1.0/24", true),
            ("10.42.1.128/25", true),
            ("10.42.0.0/16", true),
            ("10.42.11.0/24", true),
            ("10.42.12.0/24", false),
            ("fd00::/64", false),
        ] {
            assert_eq!(shares.overlap(net(cidr)), expected, "{cidr}");
        }
    }
}
