//! Addresses of pools on a wire with two nodes and a client, with real ARP and NDP.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use base::task::Tasks;
use ipnet::IpNet;
use net::Links;
use proxy::announce::{self, AnnounceConfig};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::api::Api;
use crate::lab::{Lab, Netns, ask, net, skipped};

const V4: &str = "192.168.50.240";
const V6: &str = "fd50::140";
/// Until another node answers.
const TAKEOVER: Duration = Duration::from_secs(3);
/// An attempt to connect may end at a machine that is gone.
const ATTEMPT: Duration = Duration::from_millis(100);

/// The two nodes; each answers on port 7000 with its name.
struct Wire {
    lab: Lab,
    there: Netns,
    api: Api,
    /// The announcers, by the node's name.
    running: Vec<(&'static str, Tasks)>,
}

impl Wire {
    async fn new() -> Self {
        let lab = Lab::new().await;
        let there = lab.machine("there", "192.168.50.2/24").await;
        let machines =
            [(&lab.node, "fd50::1/64"), (&there, "fd50::2/64"), (&lab.outside, "fd50::9/64")];
        for (machine, address) in machines {
            let links = Links::open_in(&machine.path).await.expect("netlink");
            let eth0 = links.link("eth0").await.expect("plugged").index;
            links.ensure_address(eth0, net(address)).await.expect("an address");
        }
        lab.serve(&lab.node.path, 7000, "here", Default::default()).await;
        lab.serve(&there.path, 7000, "there", Default::default()).await;
        let api = Api::default();
        let mut wire = Self { lab, there, api, running: vec![] };
        wire.node("here", "True");
        wire.node("there", "True");
        wire.start("here");
        wire.start("there");
        wire
    }

    fn path(&self, name: &str) -> &Path {
        if name == "here" { &self.lab.node.path } else { &self.there.path }
    }

    /// Starts the announcer of a node.
    fn start(&mut self, name: &'static str) {
        let config = AnnounceConfig {
            node_name: name.into(),
            pools: ["192.168.50.240-250", "fd50::100-fd50::1ff"]
                .map(|text| text.parse().expect("a range"))
                .into(),
            netns: Some(self.path(name).to_owned()),
        };
        let tasks = Tasks::new(name);
        let (client, stop) = (self.api.client(), tasks.stop_signal());
        tasks.spawn_graceful("announcer", async move {
            announce::run(client, config, stop).await.expect("a clean end");
        });
        self.running.push((name, tasks));
    }

    async fn stop(&mut self, name: &str) {
        let (stopped, left) = self.running.drain(..).partition(|(one, _)| *one == name);
        self.running = left;
        let stopped: Vec<_> = stopped;
        for (_, tasks) in stopped {
            tasks.shutdown(Duration::from_secs(5)).await;
        }
    }

    fn node(&self, name: &str, ready: &str) {
        let node = json!({"metadata": {"name": name},
            "status": {"conditions": [{"type": "Ready", "status": ready}]}});
        self.api.put("nodes", &node);
    }

    fn service(&self, addresses: &[&str], policy: &str) {
        let ingress: Vec<Value> =
            addresses.iter().map(|ip| json!({"ip": ip, "ipMode": "VIP"})).collect();
        let service = json!({"metadata": {"name": "web", "namespace": "ns"},
            "spec": {"type": "LoadBalancer", "externalTrafficPolicy": policy},
            "status": {"loadBalancer": {"ingress": ingress}}});
        self.api.put("services", &service);
    }

    /// The node that answers the client at an address.
    async fn answers(&self, address: &str) -> Option<String> {
        let to = match address.contains(':') {
            true => format!("[{address}]:7000"),
            false => format!("{address}:7000"),
        };
        tokio::time::timeout(ATTEMPT, ask(&self.lab.outside.path, &to)).await.ok()?.ok()
    }

    /// Waits until a node answers there; how long that took.
    async fn until_answers(&self, address: &str, name: &str) -> Duration {
        let began = Instant::now();
        let what = format!("{name} answers at {address}");
        let is_so = async || (self.answers(address).await.as_deref() == Some(name)).then_some(());
        testkit::wait::found(&what, is_so).await;
        began.elapsed()
    }

    /// Some node that answers there.
    async fn holder(&self, address: &str) -> &'static str {
        let what = format!("an answer at {address}");
        let name = testkit::wait::found(&what, async || self.answers(address).await).await;
        if name == "here" { "here" } else { "there" }
    }

    /// The addresses that a node announces.
    async fn announced(&self, name: &str) -> BTreeSet<IpAddr> {
        let links = Links::open_in(self.path(name)).await.expect("netlink");
        let held = links.addresses().await.expect("addresses").into_iter();
        held.filter(|one| one.announced).map(|one| one.net.addr()).collect()
    }

    async fn until_announces(&self, name: &str, expected: &[&str]) {
        let expected = expected.iter().map(|text| text.parse().expect("an address")).collect();
        let is_so = async || (self.announced(name).await == expected).then_some(());
        testkit::wait::found(&format!("{name} announces {expected:?}"), is_so).await;
    }
}

fn other(name: &str) -> &'static str {
    if name == "here" { "there" } else { "here" }
}

#[tokio::test]
async fn another_node_answers_when_the_announcing_one_is_gone() {
    if skipped() {
        return;
    }
    let mut wire = Wire::new().await;
    // An address outside of the pools belongs to no node, even if a status has it.
    wire.service(&[V4, V6, "192.168.50.77"], "Cluster");
    for address in [V4, V6] {
        let first = wire.holder(address).await;
        let second = other(first);
        // The process ends: its node still answers.
        wire.stop(first).await;
        assert_eq!(wire.holder(address).await, first);
        // The machine is gone.
        let port = if first == "here" { "node" } else { "there" };
        wire.lab.set_connected(port, false).await;
        let took = wire.until_answers(address, second).await;
        assert!(took < TAKEOVER, "{address}: {took:?}");
        println!("{address}: answered again after {took:?}");
        // It is back: it takes its address, and the other one lets go.
        wire.lab.set_connected(port, true).await;
        wire.start(first);
        wire.until_answers(address, first).await;
        let gone: IpAddr = address.parse().expect("an address");
        let lets_go = async || (!wire.announced(second).await.contains(&gone)).then_some(());
        testkit::wait::found("the substitute lets go", lets_go).await;
    }
    let stray: IpAddr = "192.168.50.77".parse().expect("an address");
    for name in ["here", "there"] {
        assert!(!wire.announced(name).await.contains(&stray), "{name}");
        wire.stop(name).await;
        announce::remove(Some(wire.path(name).to_owned())).await.expect("removed");
        assert_eq!(wire.announced(name).await, BTreeSet::new());
    }
    wire.lab.tasks.stop();
}

#[tokio::test]
async fn addresses_follow_services_nodes_and_endpoints() {
    if skipped() {
        return;
    }
    let mut wire = Wire::new().await;
    wire.service(&[V4], "Cluster");
    let first = wire.holder(V4).await;
    let second = other(first);
    wire.until_announces(first, &[V4]).await;
    wire.until_announces(second, &[]).await;
    // The API knows that the node is gone.
    wire.node(first, "Unknown");
    wire.until_answers(V4, second).await;
    wire.until_announces(first, &[]).await;
    wire.node(first, "True");
    wire.until_answers(V4, first).await;
    // Only a node with endpoints announces the address of a local Service.
    let slice = |node: &str| {
        json!({"metadata": {"name": "web-1", "namespace": "ns",
                "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "endpoints": [{"addresses": ["10.42.0.2"], "nodeName": node}]})
    };
    wire.api.put("endpointslices", &slice(second));
    wire.service(&[V4], "Local");
    wire.until_answers(V4, second).await;
    wire.until_announces(first, &[]).await;
    wire.api.put("endpointslices", &slice(first));
    wire.until_answers(V4, first).await;
    // Another program removes the address: it comes back.
    let links = Links::open_in(wire.path(first)).await.expect("netlink");
    let eth0 = links.link("eth0").await.expect("plugged").index;
    let address: IpAddr = V4.parse().expect("an address");
    links.remove_address(eth0, IpNet::from(address)).await.expect("removed");
    wire.until_announces(first, &[V4]).await;
    // A process that starts removes what became stale while none ran.
    wire.stop(first).await;
    wire.api.remove("services", "web");
    wire.until_announces(first, &[V4]).await;
    wire.start(first);
    wire.until_announces(first, &[]).await;
    wire.until_announces(second, &[]).await;
    for name in ["here", "there"] {
        wire.stop(name).await;
    }
    wire.lab.tasks.stop();
}
