//! Namespaces, bridge, pods, routes, overlay.

use std::net::SocketAddr;
use std::path::Path;

use net::links::Via;
use net::pods::{Bridge, adopt_pod, attach_pod, detach_pod};
use net::vxlan::{Peer, Vxlan};
use net::{Links, netns};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::lab::{Netns, Node, attachment, ip, net, plug, skipped};

/// Checks that a client in `from` reaches a server in `to` at `at`.
async fn reaches(from: &Path, to: &Path, at: &str) {
    let at: SocketAddr = at.parse().expect("an address");
    let listener = netns::listen(to, at).await.expect("listen");
    let serve = async {
        let (mut stream, peer) = listener.accept().await.expect("accept");
        stream.write_all(peer.ip().to_string().as_bytes()).await.expect("write");
    };
    let ask = async {
        let mut stream = netns::connect(from, at).await.expect("connect");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("read");
        text
    };
    let both = async { tokio::join!(serve, ask).1 };
    let seen = testkit::wait::soon("an answer", both).await;
    assert!(!seen.is_empty());
}

#[tokio::test]
async fn a_namespace_is_pinned_once_and_removed_twice() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    assert!(netns::is_pinned(&space.path));
    let again = netns::create(&space.path).expect_err("pinned already");
    assert_eq!(again.errno(), Some(libc::EEXIST));
    let here = std::fs::read_link("/proc/thread-self/ns/net").expect("own namespace");
    let there = netns::enter(&space.path, || std::fs::read_link("/proc/thread-self/ns/net"))
        .await
        .expect("enter")
        .expect("its namespace");
    assert_ne!(here, there);
    let blocking =
        netns::run(&space.path, || std::fs::read_link("/proc/thread-self/ns/net")).expect("run");
    assert_eq!(blocking.expect("its namespace"), there);
    netns::remove(&space.path).expect("removed");
    netns::remove(&space.path).expect("removed again");
    assert!(!space.path.exists());
}

#[tokio::test]
async fn pods_reach_each_other_the_node_and_themselves() {
    if skipped() {
        return;
    }
    let node = Node::new(&["10.42.0.1/24", "fd42::1/64"]).await;
    let gateways = ["10.42.0.1", "fd42::1"];
    let (a, link) = node.pod("vetha", &["10.42.0.2", "fd42::2"], &gateways).await;
    let (b, _) = node.pod("vethb", &["10.42.0.3", "fd42::3"], &gateways).await;
    assert_eq!(link.mac, "0a:58:0a:2a:00:02");
    reaches(&a.path, &b.path, "10.42.0.3:80").await;
    reaches(&a.path, &b.path, "[fd42::3]:80").await;
    reaches(&node.netns.path, &b.path, "10.42.0.3:81").await;
    reaches(&a.path, &node.netns.path, "10.42.0.1:82").await;
    reaches(&a.path, &a.path, "127.0.0.1:83").await;

    // Another pod gets the same address at once: the neighbour entries are still right.
    detach_pod(&node.links, "vetha").await.expect("detach");
    detach_pod(&node.links, "vetha").await.expect("detach again");
    let (c, _) = node.pod("vethc", &["10.42.0.2"], &gateways[..1]).await;
    reaches(&node.netns.path, &c.path, "10.42.0.2:80").await;
    reaches(&b.path, &c.path, "10.42.0.2:81").await;
}

#[tokio::test]
async fn bridged_pods_are_converted_and_keep_their_connections() {
    if skipped() {
        return;
    }
    let node = Node::new(&["10.42.0.1/24", "fd42::1/64"]).await;
    let gateways = ["10.42.0.1", "fd42::1"];
    let (a, b) = (Netns::new(), Netns::new());
    for (pod, port, n) in [(&a, "vetha", 2), (&b, "vethb", 3)] {
        let nets = [format!("10.42.0.{n}/24"), format!("fd42::{n}/64")];
        plug(&node.links, "pods", port, &pod.path, &[&nets[0], &nets[1]]).await;
        let inside = Links::open_in(&pod.path).await.expect("netlink");
        inside.ensure_route(net("0.0.0.0/0"), &Via::Gateway(ip("10.42.0.1"))).await.expect("v4");
        inside.ensure_route(net("::/0"), &Via::Gateway(ip("fd42::1"))).await.expect("v6");
    }
    let at: SocketAddr = "10.42.0.3:90".parse().expect("an address");
    let listener = netns::listen(&b.path, at).await.expect("listen");
    let mut client = netns::connect(&a.path, at).await.expect("connect");
    let (mut server, _) = listener.accept().await.expect("accept");

    let pods = [
        attachment(&a.path, "vetha", &["10.42.0.2", "fd42::2"], &gateways),
        attachment(&b.path, "vethb", &["10.42.0.3", "fd42::3"], &gateways),
    ];
    for _ in 0..2 {
        for pod in &pods {
            assert!(adopt_pod(&node.links, pod).await.expect("adopted"));
        }
    }
    let exchange = async {
        client.write_all(b"still").await.expect("write");
        let mut text = [0; 5];
        server.read_exact(&mut text).await.expect("read");
        text
    };
    assert_eq!(&testkit::wait::soon("the old connection", exchange).await, b"still");
    reaches(&a.path, &b.path, "10.42.0.3:80").await;
    reaches(&b.path, &a.path, "[fd42::2]:80").await;
    reaches(&node.netns.path, &a.path, "10.42.0.2:81").await;
    reaches(&b.path, &node.netns.path, "10.42.0.1:82").await;
    let ports = node.links.list().await.expect("links");
    assert!(ports.iter().all(|link| link.controller.is_none()), "{ports:?}");
    let inside = Links::open_in(&a.path).await.expect("netlink");
    let held = inside.addresses().await.expect("addresses");
    assert!(held.iter().all(|held| held.net != net("10.42.0.2/24")), "{held:?}");
    let gone = attachment(&a.path, "vethz", &["10.42.0.9"], &gateways);
    assert!(!adopt_pod(&node.links, &gone).await.expect("no pair"));
}

#[tokio::test]
async fn attaching_replaces_a_leftover_and_leaves_nothing_on_failure() {
    if skipped() {
        return;
    }
    let node = Node::new(&["10.42.0.1/24"]).await;
    let (_old, _) = node.pod("veth1", &["10.42.0.2"], &["10.42.0.1"]).await;
    let (pod, _) = node.pod("veth1", &["10.42.0.2"], &["10.42.0.1"]).await;
    reaches(&node.netns.path, &pod.path, "10.42.0.2:80").await;
    let taken = attachment(&pod.path, "veth2", &["10.42.0.3"], &["10.42.0.1"]);
    attach_pod(&node.links, &taken).await.expect_err("the pod has an eth0");
    assert_eq!(node.links.find("veth2").await.expect("look up"), None);
    let other = Netns::new();
    let nowhere = attachment(&other.path, "veth2", &["10.42.0.3"], &["0.0.0.0"]);
    attach_pod(&node.links, &nowhere).await.expect_err("no gateway has that address");
    assert_eq!(node.links.find("veth2").await.expect("look up"), None);
    let bridge = Bridge::ensure(&node.links, "pods", &[net("10.42.0.1/24")], 1400).await;
    assert_eq!(bridge.expect("changed").mtu, 1400);
}

#[tokio::test]
async fn routes_and_local_addresses_come_and_go() {
    if skipped() {
        return;
    }
    let node = Node::new(&["10.42.0.1/24"]).await;
    let links = &node.links;
    assert!(links.ensure_service_route(net("10.43.0.0/16"), "pods").await.expect("route"));
    assert!(links.ensure_service_route(net("10.43.0.0/16"), "pods").await.expect("route again"));
    links.ensure_local_address(ip("10.43.0.10")).await.expect("dns address");
    links.ensure_local_address(ip("10.43.0.10")).await.expect("dns address again");
    let (pod, _) = node.pod("vetha", &["10.42.0.2"], &["10.42.0.1"]).await;
    reaches(&pod.path, &node.netns.path, "10.43.0.10:53").await;
    reaches(&node.netns.path, &node.netns.path, "10.43.0.10:54").await;
    links.remove_local_address(ip("10.43.0.10")).await.expect("gone");
    links.remove_local_address(ip("10.43.0.10")).await.expect("gone twice");
    let held = links.addresses().await.expect("addresses");
    assert!(held.iter().all(|a| a.net.addr() != ip("10.43.0.10")));

    // Without a default route the first global address counts, then the default route's.
    let uplink = links.uplink().await.expect("uplink").expect("one");
    assert_eq!((uplink.interface.as_str(), uplink.address), ("pods", ip("10.42.0.1")));
    let other = Via::Gateway(ip("10.42.0.2"));
    links.ensure_route(net("10.44.0.0/16"), &other).await.expect("route");
    links.ensure_route(net("10.44.0.0/16"), &other).await.expect("route again");
    links.remove_route(net("10.44.0.0/16")).await.expect("no route");
    links.remove_route(net("10.44.0.0/16")).await.expect("no route twice");
    links.ensure_route(net("0.0.0.0/0"), &other).await.expect("default route");
    assert!(!links.ensure_service_route(net("10.45.0.0/16"), "pods").await.expect("not needed"));
}

#[tokio::test]
async fn two_nodes_meet_over_vxlan() {
    if skipped() {
        return;
    }
    let wire = Netns::new();
    let switch = Links::open_in(&wire.path).await.expect("netlink");
    Bridge::ensure(&switch, "wire", &[net("192.168.50.254/24")], 1500).await.expect("switch");
    let mut nodes = Vec::new();
    for n in [1u8, 2] {
        let node = Node::new(&[&format!("10.42.{n}.1/24")]).await;
        let (port, address) = (format!("node{n}"), format!("192.168.50.{n}/24"));
        plug(&switch, "wire", &port, &node.netns.path, &[&address]).await;
        nodes.push(node);
    }
    for (n, other) in [(1u8, 2u8), (2, 1)] {
        let links = &nodes[usize::from(n) - 1].links;
        let cidr = net(&format!("10.42.{n}.0/24"));
        let local = ip(&format!("192.168.50.{n}"));
        let vxlan = Vxlan::new("overlay", local, "eth0", cidr);
        vxlan.ensure(links).await.expect("device");
        assert_eq!(vxlan.ensure(links).await.expect("again").mtu, 1450);
        let peer = Peer {
            node: ip(&format!("192.168.50.{other}")),
            pod_cidr: net(&format!("10.42.{other}.0/24")),
        };
        vxlan.ensure_peer(links, &peer).await.expect("peer");
        vxlan.remove_peer(links, &peer).await.expect("peer gone");
        vxlan.remove_peer(links, &peer).await.expect("peer gone twice");
        let device = links.link("overlay").await.expect("device").index;
        assert_eq!(links.routes_by(device).await.expect("routes"), []);
        vxlan.ensure_peer(links, &peer).await.expect("peer");
        vxlan.ensure_peer(links, &peer).await.expect("peer again");
        assert_eq!(links.routes_by(device).await.expect("routes"), [peer.pod_cidr]);
        let uplink = links.link_of(local).await.expect("links").expect("one has it");
        assert_eq!(uplink.name, "eth0");
    }
    let (a, _) = nodes[0].pod("vetha", &["10.42.1.2"], &["10.42.1.1"]).await;
    let (b, _) = nodes[1].pod("vethb", &["10.42.2.2"], &["10.42.2.1"]).await;
    reaches(&a.path, &b.path, "10.42.2.2:80").await;
    reaches(&b.path, &a.path, "10.42.1.2:80").await;
    reaches(&nodes[0].netns.path, &b.path, "10.42.2.2:81").await;
}

#[tokio::test]
async fn udp_sockets_stay_in_their_namespace() {
    if skipped() {
        return;
    }
    let space = Netns::new();
    let links = Links::open_in(&space.path).await.expect("netlink");
    links.set_loopback_up().await.expect("lo up");
    let at: SocketAddr = "127.0.0.1:5353".parse().expect("an address");
    let server = netns::udp(&space.path, at).await.expect("bind");
    let client = netns::udp(&space.path, "127.0.0.1:0".parse().expect("any")).await.expect("bind");
    client.send_to(b"ping", at).await.expect("send");
    let mut buffer = [0; 16];
    let received = testkit::wait::soon("a datagram", server.recv_from(&mut buffer)).await;
    let (size, _) = received.expect("receive");
    assert_eq!(&buffer[..size], b"ping");
    // The same port is free outside.
    drop(TcpListener::bind("127.0.0.1:0").await.expect("bind outside"));
}
