//! Host ports lead into pods, for the node's own processes, for other pods and for the pod itself.

use std::net::SocketAddr;
use std::path::Path;

use net::Links;
use net::host_ports::{HostPort, none, ruleset};
use net::links::Via;
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

/// Checks that a client in `from` reaches `at`, where the server in `pod` listens at `to`.
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
async fn host_ports_lead_into_pods() {
    if skipped() {
        return;
    }
    let node = Node::new(&["10.42.0.1/24"]).await;
    let own = node.netns.path.clone();
    let (a, _) = node.pod("vetha", &["10.42.0.2"], &["10.42.0.1"]).await;
    let (b, _) = node.pod("vethb", &["10.42.0.3"], &["10.42.0.1"]).await;
    let ports = [
        port(Some("127.0.0.1"), 8000, "10.42.0.2:80"),
        port(Some("10.42.0.1"), 8000, "10.42.0.3:80"),
        port(None, 8001, "10.42.0.2:81"),
    ];
    let wanted = ruleset("ports", &ports);
    let load = |batch: net::nft::Batch| {
        netns::run(&own, move || {
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
    // The rules of a former process are replaced, and can be removed.
    load(diff(&Ruleset::default(), &wanted));
    load(diff(&none("ports"), &Ruleset::default()));
    let at: SocketAddr = "10.42.0.1:8001".parse().expect("an address");
    assert!(netns::connect(&own, at).await.is_err(), "nothing listens on the node itself");
}

#[tokio::test]
async fn a_pod_does_not_reach_the_nodes_loopback() {
    if skipped() {
        return;
    }
    let node = Node::new(&["10.42.0.1/24"]).await;
    let (pod, _) = node.pod("vetha", &["10.42.0.2"], &["10.42.0.1"]).await;
    // The pod has no loopback, and a route for 127.0.0.1 to the node.
    let inside = Links::open_in(&pod.path).await.expect("netlink");
    let eth0 = inside.link("eth0").await.expect("there").index;
    inside.remove_address(1, net("127.0.0.1/8")).await.expect("no loopback");
    let via = Via::OnLink { gateway: ip("10.42.0.1"), link: eth0 };
    inside.ensure_route(net("127.0.0.1/32"), &via).await.expect("a route");
    let switch = ("net/ipv4/conf/eth0/route_localnet".to_owned(), "1".to_owned());
    inside.sysctls(vec![switch]).await.expect("a sysctl");

    let at: SocketAddr = "127.0.0.1:8000".parse().expect("an address");
    let _listener = netns::listen(&node.netns.path, at).await.expect("listen");
    let tried = async || {
        let connect = netns::connect(&pod.path, at);
        tokio::time::timeout(std::time::Duration::from_millis(300), connect).await
    };
    assert!(matches!(tried().await, Ok(Ok(_))), "the link takes such packets");
    let rules = ruleset("ports", &[port(None, 8001, "10.42.0.2:81")]);
    let mut nft = Nft::open_in(&node.netns.path).expect("a socket");
    nft.apply(&diff(&Ruleset::default(), &rules)).expect("loaded");
    assert!(tried().await.is_err(), "the rules drop them");
}
