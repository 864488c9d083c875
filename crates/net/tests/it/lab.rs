//! A node made of a fresh network namespace, removed again when dropped.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use net::pods::{Bridge, PodAttachment, PodLink, attach_pod};
use net::{Links, netns, sysctl};

/// True when the test cannot run here; says why.
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
    /// A namespace with a bridge `pods` that has these gateway addresses.
    pub async fn new(gateways: &[&str]) -> Self {
        let netns = Netns::new();
        sysctl::prepare_node(Some(&netns.path)).await.expect("sysctls");
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
        let attachment = PodAttachment {
            netns: netns.to_owned(),
            bridge: "pods".into(),
            host_veth: veth.into(),
            addresses: addresses.iter().map(|a| net(a)).collect(),
            gateways: gateways.iter().map(|g| ip(g)).collect(),
        };
        attach_pod(&self.links, &attachment).await.expect("attach")
    }
}

pub fn net(text: &str) -> IpNet {
    text.parse().expect("a network")
}

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}
