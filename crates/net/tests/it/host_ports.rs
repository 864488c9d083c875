//! Ports of the node lead into pods, for the node's own processes, for other pods and for itself.

use std::net::SocketAddr;
use std::path::Path;

use net::host_ports::{HostPort, none, prepare, ruleset};
use net::netns;
use net::nft::{Nft, Proto, Ruleset, diff};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::{Node, ip, net, skipped};

fn port(host: Option<&str>, port: u16, to: &str) -> HostPort {
    HostPort {
        protocol: Proto::Tcp,
        host: host.map(ip),
        port,
        to: to.parse().expect("an address"),
        pods: net("10.42.0.0/24"),
    }
}

/// What a client in `from` gets from `at`, where the server in `pod` listens at `to`.
async fn asks(from: &Path, at: &str, pod: &Path, to: &str) {
    let (at, to): (SocketAddr, SocketAddr) =
        (at.parse().expect("an address"), to.parse().expect("an address"));
    let listener = netns::listen(pod, to).await.expect("listen");
    let serve = async {
        let (mut stream, _) = listener.accept().await.expect("accept");
        stream.write_all(b"hi").await.expect("write");
    };
    let ask = async {
        let mut stream = netns::connect(from, at).await.expect("connect");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("read");
        text
    };
    let both = async { tokio::join!(serve, ask).1 };
    let text = testkit::wait::soon(&format!("an answer of {at}"), both).await;
    assert_eq!(text, "hi");
}

#[tokio::test]
async fn ports_of_the_node_lead_into_pods() {
    if skipped() {
        return;
    }
    let node = Node::new(&["10.42.0.1/24"]).await;
    let own = node.netns.path.clone();
    let (a, _) = node.pod("vetha", &["10.42.0.2/24"], &["10.42.0.1"]).await;
    let (b, _) = node.pod("vethb", &["10.42.0.3/24"], &["10.42.0.1"]).await;
    let ports = [
        port(Some("127.0.0.1"), 8000, "10.42.0.2:80"),
        port(Some("10.42.0.1"), 8000, "10.42.0.3:80"),
        port(None, 8001, "10.42.0.2:81"),
    ];
    let wanted = ruleset("ports", &ports);
    let load = |batch: net::nft::Batch| {
        netns::run(&own, move || {
            prepare("pods").expect("a sysctl");
            Nft::open().expect("a socket").apply(&batch).expect("loaded");
        })
        .expect("enter");
    };
    load(diff(&Ruleset::default(), &wanted));
    // One port, two addresses, two pods.
    asks(&own, "127.0.0.1:8000", &a.path, "10.42.0.2:80").await;
    asks(&own, "10.42.0.1:8000", &b.path, "10.42.0.3:80").await;
    asks(&own, "10.42.0.1:8001", &a.path, "10.42.0.2:81").await;
    // Another pod, and the pod itself.
    asks(&b.path, "10.42.0.1:8001", &a.path, "10.42.0.2:81").await;
    asks(&a.path, "10.42.0.1:8001", &a.path, "10.42.0.2:81").await;
    // What a former process left is replaced, and taken away.
    load(diff(&Ruleset::default(), &wanted));
    load(diff(&none("ports"), &Ruleset::default()));
    let at: SocketAddr = "10.42.0.1:8001".parse().expect("an address");
    assert!(netns::connect(&own, at).await.is_err(), "nothing listens on the node itself");
}
