//! One node with pods and a host beside it, each in a network namespace, removed on drop.
//!
//! ```text
//!  outside 192.168.50.9 ── bridge ── node eth0 192.168.50.1, 10.42.0.1 ── pods 10.42.0.N
//! ```
//!
//! As on a machine without `br_netfilter`, bridged packets pass no rules.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base::task::Tasks;
use ipnet::IpNet;
use net::links::{Pair, Via};
use net::pods::{Bridge, POD_INTERFACE, PodAttachment, attach_pod, mac_of};
use net::{Links, netns, sysctl};
use testkit::wait::LONG;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub fn skipped() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("skipped: needs root");
    }
    !root
}

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

pub struct Lab {
    pub node: Netns,
    pub outside: Netns,
    switch: Netns,
    pub links: Links,
    pub tasks: Tasks,
}

/// A pod and the clients that its server saw.
pub struct Pod {
    pub netns: Netns,
    pub address: IpAddr,
    pub peers: Arc<Mutex<Vec<IpAddr>>>,
}

impl Lab {
    pub async fn new() -> Self {
        let (switch, node, outside) = (Netns::new(), Netns::new(), Netns::new());
        let wires = Links::open_in(&switch.path).await.expect("netlink");
        Bridge::ensure(&wires, "wire", &[net("192.168.50.254/24")], 1500).await.expect("switch");
        plug(&wires, "node", &node.path, "192.168.50.1/24").await;
        plug(&wires, "outside", &outside.path, "192.168.50.9/24").await;
        sysctl::prepare_node(Some(&node.path)).await.expect("sysctls");
        without_bridge_filter(&node.path);
        let links = Links::open_in(&node.path).await.expect("netlink");
        links.set_loopback_up().await.expect("lo up");
        let gateways = [net("10.42.0.1/24"), net("fd42::1/64")];
        Bridge::ensure(&links, "pods", &gateways, 1500).await.expect("bridge");
        links.ensure_service_route(net("fd43::/112"), "pods").await.expect("service route");
        links.ensure_service_route(net("10.43.0.0/16"), "pods").await.expect("service route");
        // An untranslated packet to an external address has a route, so the rules can refuse it.
        let onward = Via::Link("eth0".into());
        links.ensure_route(net("192.0.2.0/24"), &onward).await.expect("route");
        // The outside host routes external addresses through the node, and has no route to pods.
        let out = Links::open_in(&outside.path).await.expect("netlink");
        let via = Via::Gateway("192.168.50.1".parse().expect("an address"));
        out.ensure_route(net("192.0.2.0/24"), &via).await.expect("route");
        Self { node, outside, switch, links, tasks: Tasks::new("lab") }
    }

    /// A further machine on the wire; its `eth0` has this address.
    pub async fn machine(&self, port: &str, address: &str) -> Netns {
        let machine = Netns::new();
        let wires = Links::open_in(&self.switch.path).await.expect("netlink");
        plug(&wires, port, &machine.path, address).await;
        machine
    }

    /// Connects a machine's port with the wire, or cuts it off.
    pub async fn set_connected(&self, port: &str, is_connected: bool) {
        let wires = Links::open_in(&self.switch.path).await.expect("netlink");
        let bridge = wires.link("wire").await.expect("there").index;
        let port = wires.link(port).await.expect("made").index;
        wires.set_controller(port, is_connected.then_some(bridge)).await.expect("a port");
    }

    /// A pod whose server on port 8080 answers with the pod's name.
    pub async fn pod(&self, number: u8) -> Pod {
        let netns = Netns::new();
        let address = format!("10.42.0.{number}");
        let ip = |text: &str| text.parse().expect("an address");
        let attachment = PodAttachment {
            netns: netns.path.clone(),
            host_veth: format!("veth{number}"),
            addresses: vec![ip(&address), ip(&format!("fd42::{number}"))],
            gateways: vec![ip("10.42.0.1"), ip("fd42::1")],
            mtu: 1500,
            from_loopback: false,
        };
        attach_pod(&self.links, &attachment).await.expect("attach");
        let peers = Arc::new(Mutex::new(Vec::new()));
        self.serve(&netns.path, 8080, &address, peers.clone()).await;
        Pod { netns, address: address.parse().expect("an address"), peers }
    }

    /// Answers every connection with `name`, and records the client.
    pub async fn serve(&self, at: &Path, port: u16, name: &str, peers: Arc<Mutex<Vec<IpAddr>>>) {
        // Both families; IPv4 clients appear as mapped addresses.
        let any = SocketAddr::from(([0u16; 8], port));
        let listener = netns::listen(at, any).await.expect("listen");
        let name = name.to_owned();
        self.tasks.spawn("server", async move {
            while let Ok((mut stream, peer)) = listener.accept().await {
                peers.lock().expect("no panic").push(peer.ip().to_canonical());
                // The client may be gone.
                let _ = stream.write_all(name.as_bytes()).await;
            }
        });
    }
}

fn without_bridge_filter(netns: &Path) {
    let switches = ["iptables", "ip6tables"].map(|of| format!("net.bridge.bridge-nf-call-{of}"));
    let off = || switches.iter().try_for_each(|s| sysctl::set_if_present(s, "0").map(drop));
    netns::run(netns, off).expect("enter").expect("sysctls");
}

/// Connects a namespace to the bridge; its `eth0` gets this address.
async fn plug(wires: &Links, port: &str, netns: &Path, address: &str) {
    let mac = mac_of(&net(address).addr());
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
    wires.create_pair(&pair).await.expect("a pair");
    let (port, switch) = (wires.link(port).await, wires.link("wire").await);
    let (port, switch) = (port.expect("made").index, switch.expect("there").index);
    wires.set_controller(port, Some(switch)).await.expect("a port");
    let inside = Links::open_in(netns).await.expect("netlink");
    inside.set_loopback_up().await.expect("lo up");
    let eth0 = inside.link(POD_INTERFACE).await.expect("made").index;
    inside.set_up(eth0).await.expect("up");
    inside.ensure_address(eth0, net(address)).await.expect("an address");
}

/// The answer of the server at `to` to a client in `from`.
pub async fn ask(from: &Path, to: &str) -> Result<String, String> {
    let to: SocketAddr = to.parse().expect("an address");
    let exchange = async {
        let mut stream = netns::connect(from, to).await.map_err(|e| e.to_string())?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await.map_err(|e| e.to_string())?;
        Ok(text)
    };
    tokio::time::timeout(LONG, exchange).await.unwrap_or(Err("no answer".into()))
}

pub fn net(text: &str) -> IpNet {
    text.parse().expect("a network")
}
