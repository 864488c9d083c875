//! Real packets of pods on one node, and of a host beside it.

use std::net::SocketAddr;
use std::path::Path;

use std::time::Duration;

use base::task::Tasks;
use client::ObjectKey;
use ipnet::IpNet;
use k8s_openapi::api::networking::v1::NetworkPolicy;

use net::nft::{Nft, Proto};
use net::pods::{Bridge, PodAttachment, attach_pod};
use net::{Links, netns, sysctl};
use policy::model::Model;
use policy::objects::{PodFacts, PolicyFacts};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::kernel::{Netns, skipped};
use crate::world::with_type;

/// A connection that is not refused in this time counts as dropped.
const SILENCE: Duration = Duration::from_millis(700);
const PORTS: [u16; 2] = [80, 81];

struct Lab {
    node: Netns,
    links: Links,
    nft: Nft,
    model: Model,
    tasks: Tasks,
}

struct Pod {
    netns: Netns,
    addresses: [String; 2],
}

impl Lab {
    async fn new() -> Self {
        let node = Netns::new();
        sysctl::prepare_node(Some(&node.path)).await.expect("sysctls");
        let links = Links::open_in(&node.path).await.expect("netlink");
        links.set_loopback_up().await.expect("lo up");
        let gateways = [net("10.42.0.1/24"), net("fd42::1/64")];
        Bridge::ensure(&links, "pods", &gateways, 1500).await.expect("a bridge");
        let nft = Nft::open_in(&node.path).expect("a socket");
        let (model, tasks) = (Model::default(), Tasks::new("lab"));
        let lab = Self { node, links, nft, model, tasks };
        lab.serve(&lab.node.path, 90).await;
        lab
    }

    /// A pod whose servers answer on some ports. It is not known to the model.
    async fn pod(&self, number: u8) -> Pod {
        let netns = Netns::new();
        let addresses = [format!("10.42.0.{number}"), format!("fd42::{number}")];
        let ip = |text: &str| text.parse().expect("an address");
        let attachment = PodAttachment {
            netns: netns.path.clone(),
            host_veth: format!("veth{number}"),
            addresses: addresses.iter().map(|text| ip(text)).collect(),
            gateways: vec![ip("10.42.0.1"), ip("fd42::1")],
            mtu: 1500,
            from_loopback: false,
        };
        attach_pod(&self.links, &attachment).await.expect("attached");
        for port in PORTS {
            self.serve(&netns.path, port).await;
        }
        Pod { netns, addresses }
    }

    async fn serve(&self, at: &Path, port: u16) {
        let any = SocketAddr::from(([0u16; 8], port));
        let listener = netns::listen(at, any).await.expect("listening");
        let clients = self.tasks.clone();
        self.tasks.spawn("server", async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                // Answers each byte with itself, until the client leaves.
                clients.spawn("client", async move {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).await.is_ok() {
                        if stream.write_all(&byte).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
    }

    fn know(&mut self, pod: &Pod, namespace: &str, app: &str) {
        let facts = PodFacts {
            uid: app.into(),
            labels: [("app", app)].into_iter().collect(),
            addresses: pod.addresses.iter().map(|text| text.parse().expect("one")).collect(),
            ports: vec![("web".into(), Proto::Tcp, 80)],
            is_local: true,
            has_ended: false,
        };
        self.model.put_pod(&ObjectKey::new(namespace, app), Some(facts));
    }

    fn policy(&mut self, name: &str, spec: Option<Value>) {
        let policy = spec.map(|spec| {
            let policy = json!({"metadata": {"namespace": "default", "name": name}, "spec": spec});
            let policy = with_type("networking.k8s.io/v1", "NetworkPolicy", policy);
            PolicyFacts::of(&serde_json::from_value::<NetworkPolicy>(policy).expect("a policy"))
        });
        self.model.put_policy(&ObjectKey::new("default", name), policy);
    }

    fn apply(&mut self) {
        self.nft.apply(&self.model.live().take()).expect("rules");
    }
}

fn net(text: &str) -> IpNet {
    text.parse().expect("a network")
}

async fn reaches(from: &Path, address: &str, port: u16) -> bool {
    let to = SocketAddr::new(address.parse().expect("an address"), port);
    let exchange = async {
        let mut stream = netns::connect(from, to).await.ok()?;
        stream.write_all(b"x").await.ok()?;
        stream.read_u8().await.ok()
    };
    matches!(tokio::time::timeout(SILENCE, exchange).await, Ok(Some(_)))
}

/// Both families give the same answer.
async fn check(from: &Path, to: &Pod, port: u16, expected: bool, why: &str) {
    for address in &to.addresses {
        assert_eq!(reaches(from, address, port).await, expected, "{why}: {address} {port}");
    }
}

#[tokio::test]
async fn packets_meet_policies() {
    if skipped() {
        return;
    }
    let mut lab = Lab::new().await;
    let (server, client, other) = (lab.pod(2).await, lab.pod(3).await, lab.pod(4).await);
    lab.know(&server, "default", "server");
    lab.know(&client, "default", "client");
    lab.model.put_cidrs(&[net("10.42.0.0/24"), net("fd42::/64")]);
    lab.policy("open", Some(json!({"podSelector": {"matchLabels": {"app": "none"}}})));
    lab.nft.apply(&lab.model.live().take_all()).expect("rules");
    check(&client.netns.path, &server, 80, true, "nothing is isolated").await;
    check(&other.netns.path, &server, 80, false, "a pod that is not known yet").await;
    check(&lab.node.path, &other, 80, true, "the node's own traffic").await;
    lab.know(&other, "default", "other");
    lab.apply();
    check(&other.netns.path, &server, 80, true, "now it is known").await;

    let selected = json!({"matchLabels": {"app": "server"}});
    lab.policy("deny", Some(json!({"podSelector": selected, "policyTypes": ["Ingress"]})));
    lab.apply();
    check(&client.netns.path, &server, 80, false, "default deny").await;
    check(&server.netns.path, &client, 80, true, "egress and its answers").await;
    check(&server.netns.path, &server, 80, true, "a pod to itself").await;
    check(&lab.node.path, &server, 80, true, "the node's probes").await;

    lab.policy(
        "allow",
        Some(json!({
            "podSelector": selected,
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"app": "client"}}}], "ports": [{"port": "web"}]},
                {"from": [{"ipBlock": {"cidr": "10.42.0.4/32"}}, {"ipBlock": {"cidr": "fd42::4/128"}}],
                 "ports": [{"port": 81, "endPort": 89}]},
            ],
        })),
    );
    lab.apply();
    check(&client.netns.path, &server, 80, true, "a selected pod, a named port").await;
    check(&client.netns.path, &server, 81, false, "another port").await;
    check(&other.netns.path, &server, 80, false, "another pod").await;
    check(&other.netns.path, &server, 81, true, "a block, a range of ports").await;

    let sends = json!({"matchLabels": {"app": "client"}});
    lab.policy("silence", Some(json!({"podSelector": sends, "policyTypes": ["Egress"]})));
    lab.apply();
    check(&client.netns.path, &server, 80, false, "no egress").await;
    assert!(!reaches(&client.netns.path, "10.42.0.1", 90).await, "no egress to the node");
    assert!(reaches(&other.netns.path, "10.42.0.1", 90).await, "others reach the node");
    lab.policy("silence", None);
    lab.policy("deny", None);
    lab.policy("allow", None);
    lab.apply();
    check(&client.netns.path, &server, 80, true, "without policies").await;
    lab.tasks.shutdown(Duration::from_secs(1)).await;
}

#[tokio::test]
async fn a_policy_ends_connections_that_it_forbids() {
    if skipped() {
        return;
    }
    let mut lab = Lab::new().await;
    let (server, client) = (lab.pod(2).await, lab.pod(3).await);
    lab.know(&server, "default", "server");
    lab.know(&client, "default", "client");
    lab.nft.apply(&lab.model.live().take_all()).expect("rules");
    let to = SocketAddr::new(server.addresses[0].parse().expect("an address"), 80);
    let mut stream = netns::connect(&client.netns.path, to).await.expect("connected");
    let mut exchange = async |within: Duration| {
        stream.write_all(b"x").await.expect("written");
        tokio::time::timeout(within, stream.read_u8()).await.is_ok_and(|read| read.is_ok())
    };
    assert!(exchange(testkit::wait::LONG).await, "open");
    // A policy that allows the connection does not disturb it.
    let selected = json!({"matchLabels": {"app": "server"}});
    lab.policy(
        "deny",
        Some(json!({"podSelector": selected, "ingress": [{"ports": [{"port": 80}]}]})),
    );
    lab.apply();
    assert!(exchange(testkit::wait::LONG).await, "still allowed");
    lab.policy("deny", Some(json!({"podSelector": selected})));
    lab.apply();
    assert!(!exchange(SILENCE).await, "forbidden now");
    // TCP sends again what was lost.
    lab.policy("deny", None);
    lab.apply();
    assert!(exchange(testkit::wait::LONG).await, "open again");
    lab.tasks.shutdown(Duration::from_secs(1)).await;
}
