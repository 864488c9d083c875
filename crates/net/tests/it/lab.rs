//! A node in a new network namespace, which is removed on drop.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use net::links::Pair;
use net::pods::{Bridge, POD_INTERFACE, PodAttachment, PodLink, attach_pod, mac_of};
use net::{Links, netns, sysctl};

/// True when the test cannot run here; prints the reason.
pub fn skipped() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    !root
}

/// A namespace pinned in a temporary directory.
pub struct Netns {
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Netns {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("netns");
        netns::create(&path).expect("a new network namespace");
        Self { path, _directory: directory }
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        netns::remove(&self.path).expect("the namespace goes away");
    }
}

pub struct Node {
    pub netns: Netns,
    pub links: Links,
}

impl Node {
    /// A namespace with a bridge `pods` that has these gateway addresses. As on a machine without
    /// `br_netfilter`, bridged packets pass no rules.
    pub async fn new(gateways: &[&str]) -> Self {
        let netns = Netns::new();
        sysctl::prepare_node(Some(&netns.path)).await.expect("sysctls");
        without_bridge_filter(&netns.path);
        let links = Links::open_in(&netns.path).await.expect("netlink");
        links.set_loopback_up().await.expect("lo up");
        let gateways: Vec<IpNet> = gateways.iter().map(|g| net(g)).collect();
        Bridge::ensure(&links, "pods", &gateways, 1500).await.expect("bridge");
        Self { netns, links }
    }

    pub async fn pod(&self, veth: &str, addresses: &[&str], gateways: &[&str]) -> (Netns, PodLink) {
        let pod = Netns::new();
        let link = self.attach(&pod.path, veth, addresses, gateways).await;
        (pod, link)
    }

    pub async fn attach(
        &self,
        netns: &Path,
        veth: &str,
        addresses: &[&str],
        gateways: &[&str],
    ) -> PodLink {
        let attachment = attachment(netns, veth, addresses, gateways);
        attach_pod(&self.links, &attachment).await.expect("attach")
    }
}

pub fn attachment(
    netns: &Path,
    veth: &str,
    addresses: &[&str],
    gateways: &[&str],
) -> PodAttachment {
    PodAttachment {
        netns: netns.to_owned(),
        host_veth: veth.into(),
        addresses: addresses.iter().map(|a| ip(a)).collect(),
        gateways: gateways.iter().map(|g| ip(g)).collect(),
        mtu: 1500,
        from_loopback: true,
    }
}

pub fn without_bridge_filter(netns: &Path) {
    let switches = ["iptables", "ip6tables"].map(|of| format!("net.bridge.bridge-nf-call-{of}"));
    let off = || switches.iter().try_for_each(|s| sysctl::set_if_present(s, "0").map(drop));
    netns::run(netns, off).expect("enter").expect("sysctls");
}

/// Connects a namespace to a bridge; its `eth0` gets these addresses.
pub async fn plug(links: &Links, bridge: &str, port: &str, netns: &Path, addresses: &[&str]) {
    let mac = mac_of(&net(addresses[0]).addr());
    let mut port_mac = mac;
    port_mac[1] += 1;
    let pair = Pair {
        name: port,
        mac: &port_mac,
        peer: POD_INTERFACE,
        peer_mac: &mac,
        peer_netns: netns,
        mtu: 1500,
    };
    links.create_pair(&pair).await.expect("a pair");
    let (port, bridge) = (links.link(port).await, links.link(bridge).await);
    let (port, bridge) = (port.expect("made").index, bridge.expect("there").index);
    links.set_controller(port, Some(bridge)).await.expect("a port");
    let inside = Links::open_in(netns).await.expect("netlink");
    inside.set_loopback_up().await.expect("lo up");
    let eth0 = inside.link(POD_INTERFACE).await.expect("made").index;
    inside.set_up(eth0).await.expect("up");
    for address in addresses {
        inside.ensure_address(eth0, net(address)).await.expect("an address");
    }
}

pub fn net(text: &str) -> IpNet {
    text.parse().expect("a network")
}

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}
