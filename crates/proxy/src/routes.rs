//! Roads to the pods of other nodes.
//!
//! In: all nodes, from an informer. Out: one VXLAN device with a route, a neighbour and a forwarding
//! entry per other node. VXLAN works whether nodes share a network or not, so there is no second
//! mechanism to choose; a node that is alone has no device.
//!
//! ```text
//!  Node n2: podCIDR 10.42.1.0/24, InternalIP 192.168.0.2
//!     └► 10.42.1.0/24 via 10.42.1.0 dev decapod.1 onlink ─► UDP 8472 to 192.168.0.2
//! ```
//!
//! Invariants: nothing is removed at exit, so traffic goes on while the process is down; routes are
//! touched only after the informer has the whole picture; a route that no node stands for is removed,
//! also one of an earlier process; what somebody else takes away is made again.
//! Why here: it runs on every node beside the Services' rules, with the same identity, which is the
//! one that may read all nodes (a kubelet's may not).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::task::{Stop, Tasks};
use client::{Client, Informers};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use machinery::selector::Selector;
use net::Links;
use net::monitor::{Change, Monitor};
use net::vxlan::{DEVICE, Peer, Vxlan};
use tokio::sync::Notify;

use crate::kernel::Watch;
use crate::{Error, RETRY, RETRY_CEILING, node_facts};

#[derive(Clone, Debug, Default)]
pub struct RoutesConfig {
    pub node_name: String,
    /// The node's network namespace; none: the process's own.
    pub netns: Option<PathBuf>,
}

/// Runs until `stop`. The routes stay.
pub async fn follow_nodes(client: Client, config: RoutesConfig, stop: Stop) -> Result<(), Error> {
    let tasks = Tasks::new("routes");
    let links = match &config.netns {
        Some(path) => Links::open_in(path).await?,
        None => Links::open()?,
    };
    let mut watch = Watch::new(Monitor::of_links(config.netns.as_deref())?);
    let nodes = Informers::new(client, tasks.clone()).of::<Node>();
    let changed = Arc::new(Notify::new());
    let tell = changed.clone();
    nodes.subscribe(move |event| {
        // Kubelets write their nodes' status all the time; only the addresses count.
        let before = event.old().filter(|_| !event.is_deleted());
        if before.is_none_or(|before| node_facts(&before) != node_facts(event.object())) {
            tell.notify_one();
        }
    });
    let work = async {
        nodes.synced().await;
        let mut roads = Roads::new(links);
        let mut retry = Backoff::new(RETRY, RETRY_CEILING);
        loop {
            let all = nodes.lister().list(None, &Selector::everything());
            match roads.build(plan(&config.node_name, &all)).await {
                Ok(()) => {
                    retry.reset();
                    tokio::select! {
                        () = changed.notified() => {}
                        told = watch.changed(|change| roads.is_own(change)) => {
                            told?;
                            // By somebody else, or a peer that was removed here: it costs little.
                            tracing::info!("the routes to other nodes are looked at again");
                            roads.forget();
                        }
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot set the routes to other nodes, will try again");
                    tokio::time::sleep(retry.step()).await;
                }
            }
        }
    };
    let outcome = stop.or(work).await.unwrap_or(Ok(()));
    tasks.shutdown(Duration::from_secs(5)).await;
    outcome
}

/// How this node's end of the overlay looks, and who else there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Plan {
    /// Own address and pod network; none while the API has not told them.
    own: Option<(IpAddr, IpNet)>,
    /// By pod network.
    peers: BTreeMap<IpNet, IpAddr>,
}

fn plan(own_name: &str, nodes: &[Arc<Node>]) -> Plan {
    let mut plan = Plan::default();
    for node in nodes.iter().filter(|node| node.metadata.deletion_timestamp.is_none()) {
        let facts = node_facts(node);
        let pairs = facts.pod_cidrs.iter().filter_map(|cidr| {
            let is_fit = |address: &&IpAddr| address.is_ipv4() == cidr.addr().is_ipv4();
            Some((cidr.trunc(), *facts.addresses.iter().find(is_fit)?))
        });
        if node.metadata.name.as_deref() == Some(own_name) {
            plan.own = pairs.map(|(cidr, address)| (address, cidr)).next();
        } else {
            plan.peers.extend(pairs);
        }
    }
    if let Some((_, cidr)) = plan.own {
        // An overlay has one family, and one's own pods are on the bridge.
        plan.peers.retain(|of, _| of.addr().is_ipv4() == cidr.addr().is_ipv4() && *of != cidr);
    }
    plan
}

/// What the kernel has, as far as this process made it.
struct Roads {
    links: Links,
    device: Option<Vxlan>,
    /// The device's number in the kernel.
    index: Option<u32>,
    peers: BTreeMap<IpNet, IpAddr>,
    /// Until what an earlier process left was looked at.
    is_fresh: bool,
    /// The log has said already who is reachable.
    is_repair: bool,
}

impl Roads {
    fn new(links: Links) -> Self {
        let peers = BTreeMap::new();
        Self { links, device: None, index: None, peers, is_fresh: true, is_repair: false }
    }

    fn is_own(&self, change: Change<'_>) -> bool {
        self.device.is_some() && matches!(change, Change::Link(index) if self.index == Some(index))
    }

    /// Somebody else changed them: the next round takes nothing for granted.
    fn forget(&mut self) {
        (self.device, self.peers) = (None, BTreeMap::new());
        (self.is_fresh, self.is_repair) = (true, true);
    }

    async fn build(&mut self, plan: Plan) -> Result<(), Error> {
        let Some((local, pod_cidr)) = plan.own.filter(|_| !plan.peers.is_empty()) else {
            // Alone, or not known to the API: what is there leads nowhere.
            let is_alone = plan.peers.is_empty();
            if is_alone && (self.is_fresh || self.device.is_some()) {
                self.links.remove(DEVICE).await?;
                (self.device, self.peers, self.is_fresh) = (None, BTreeMap::new(), false);
            }
            return Ok(());
        };
        let device = self.ensure_device(local, pod_cidr).await?;
        let gone: Vec<_> =
            self.peers.iter().filter(|(cidr, _)| !plan.peers.contains_key(cidr)).collect();
        for (&pod_cidr, &node) in gone {
            device.remove_peer(&self.links, &Peer { node, pod_cidr }).await?;
            tracing::info!(%node, %pod_cidr, "the route to a node's pods is removed");
        }
        self.peers.retain(|cidr, _| plan.peers.contains_key(cidr));
        for (pod_cidr, node) in plan.peers {
            if self.peers.get(&pod_cidr) != Some(&node) {
                device.ensure_peer(&self.links, &Peer { node, pod_cidr }).await?;
                if !self.is_repair {
                    tracing::info!(%node, %pod_cidr, "the pods of a node are reachable");
                }
                self.peers.insert(pod_cidr, node);
            }
        }
        if self.is_fresh {
            self.remove_strangers().await?;
            (self.is_fresh, self.is_repair) = (false, false);
        }
        Ok(())
    }

    async fn ensure_device(&mut self, local: IpAddr, pod_cidr: IpNet) -> Result<Vxlan, Error> {
        if let Some(device) = &self.device
            && (device.local, device.pod_cidr) == (local, pod_cidr)
        {
            return Ok(device.clone());
        }
        let outer = match self.links.link_of(local).await? {
            Some(link) => link.name,
            // The address is a translated one: packets leave where all leave.
            None => self.links.uplink().await?.ok_or(Error::NoUplink(local))?.interface,
        };
        if self.device.take().is_some() {
            // Other settings: the device cannot change its own address.
            self.links.remove(DEVICE).await?;
            self.peers.clear();
        }
        let device = Vxlan::new(DEVICE, local, &outer, pod_cidr);
        self.index = Some(device.ensure(&self.links).await?.index);
        self.device = Some(device.clone());
        Ok(device)
    }

    /// Routes over the device that an earlier process made for nodes that are gone.
    async fn remove_strangers(&self) -> Result<(), Error> {
        let device = self.links.link(DEVICE).await?;
        for route in self.links.routes_by(device.index).await? {
            if !self.peers.contains_key(&route) {
                self.links.remove_route(route).await?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, cidr: &str, address: &str) -> Arc<Node> {
        let addresses = match address {
            "" => serde_json::json!([]),
            address => serde_json::json!([{"type": "Hostname", "address": name},
                {"type": "InternalIP", "address": address}]),
        };
        let node = serde_json::json!({"metadata": {"name": name},
            "spec": {"podCIDR": cidr, "podCIDRs": [cidr]}, "status": {"addresses": addresses}});
        Arc::new(serde_json::from_value(node).expect("a node"))
    }

    #[test]
    fn every_other_node_is_a_peer() {
        let check = |nodes: &[Arc<Node>], own: Option<&str>, peers: &[(&str, &str)]| {
            let plan = plan("a", nodes);
            let expected = peers
                .iter()
                .map(|(cidr, node)| (cidr.parse().expect("a net"), node.parse().expect("an IP")))
                .collect::<BTreeMap<IpNet, IpAddr>>();
            assert_eq!(plan.own.map(|(_, cidr)| cidr.to_string()).as_deref(), own);
            assert_eq!(plan.peers, expected);
        };
        let (a, b) = (node("a", "10.42.0.0/24", "10.0.0.1"), node("b", "10.42.1.0/24", "10.0.0.2"));
        check(&[], None, &[]);
        check(std::slice::from_ref(&a), Some("10.42.0.0/24"), &[]);
        check(&[a.clone(), b.clone()], Some("10.42.0.0/24"), &[("10.42.1.0/24", "10.0.0.2")]);
        check(std::slice::from_ref(&b), None, &[("10.42.1.0/24", "10.0.0.2")]);
        let (silent, v6) = (node("c", "10.42.2.0/24", ""), node("d", "fd00::/64", "fd01::1"));
        check(&[a.clone(), silent, v6], Some("10.42.0.0/24"), &[]);
        // One's own network is never a peer's.
        check(&[a, node("e", "10.42.0.0/24", "10.0.0.9")], Some("10.42.0.0/24"), &[]);
    }
}
