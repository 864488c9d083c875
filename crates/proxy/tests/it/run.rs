//! The whole component: an API on one side, the kernel on the other.

use std::net::SocketAddr;
use std::time::Duration;

use base::task::Tasks;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use net::{netns, nft};
use proxy::{Config, model, run};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;

use crate::api::Api;
use crate::fixtures::{facts, service, slice};
use crate::lab::{Lab, ask, skipped};
use crate::traffic::udp_server;

/// Repeats until the answer is the expected one.
async fn eventually(lab: &Lab, to: &str, expected: &str) {
    let what = format!("{expected} of {to}");
    testkit::wait::found(&what, async || {
        // Without rules a connection may hang: the next attempt uses a new one.
        let answer = tokio::time::timeout(Duration::from_secs(5), ask(&lab.node.path, to)).await;
        let is_right = match answer.ok()? {
            Ok(text) => text == expected,
            Err(error) => error.contains(expected),
        };
        is_right.then_some(())
    })
    .await;
}

async fn get(lab: &Lab, port: u16, path: &str) -> String {
    let to = SocketAddr::from(([127, 0, 0, 1], port));
    let mut stream = netns::connect(&lab.node.path, to).await.expect("connect");
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("write");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("read");
    text
}

fn config(lab: &Lab) -> Config {
    let facts = facts();
    Config {
        node_name: facts.node,
        cluster_cidrs: facts.cluster_cidrs,
        service_cidrs: facts.service_cidrs,
        netns: Some(lab.node.path.clone()),
        ..Config::default()
    }
}

#[tokio::test]
async fn services_follow_the_api_and_outlive_the_process() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (_a, _b) = (lab.pod(2).await, lab.pod(3).await);
    let api = Api::default();
    let port = json!([{"name": "http", "port": 80, "nodePort": 30080}]);
    let web = service("web", json!({"type": "NodePort", "clusterIP": "10.43.0.50", "ports": port}));
    let at = |pods: &[&str]| slice("web", ("http", "TCP", 8080), pods);
    api.put("services", &web);
    api.put("endpointslices", &at(&["10.42.0.2"]));

    let tasks = Tasks::new("test");
    let (proxy, stop) = (run(api.client(), config(&lab), tasks.stop_signal()), tasks.clone());
    let story = async {
        eventually(&lab, "10.43.0.50:80", "10.42.0.2").await;
        // Node ports answer after the node is known.
        api.put(
            "nodes",
            &json!({
                "metadata": {"name": "here"},
                "spec": {"podCIDRs": ["10.42.0.0/24"]},
                "status": {"addresses": [{"type": "InternalIP", "address": "192.168.50.1"}]},
            }),
        );
        eventually(&lab, "192.168.50.1:30080", "10.42.0.2").await;
        api.put("endpointslices", &at(&["!10.42.0.2", "10.42.0.3"]));
        eventually(&lab, "10.43.0.50:80", "10.42.0.3").await;
        api.put("endpointslices", &at(&["!10.42.0.2", "!10.42.0.3"]));
        eventually(&lab, "10.43.0.50:80", "refused").await;
        api.put("endpointslices", &at(&["10.42.0.2"]));
        eventually(&lab, "10.43.0.50:80", "10.42.0.2").await;

        // Another program flushes all rules: they are restored without an API event.
        let none: (&[Service], &[EndpointSlice]) = (&[], &[]);
        let rules = model::ruleset(none.0, none.1, &facts());
        let flush = nft::diff(&rules, &nft::Ruleset::default());
        let mut other = nft::Nft::open_in(&lab.node.path).expect("a socket");
        other.apply(&flush).expect("flushed");
        eventually(&lab, "10.43.0.50:80", "10.42.0.2").await;
        eventually(&lab, "192.168.50.1:30080", "10.42.0.2").await;

        let health = get(&lab, 10256, "/healthz").await;
        assert!(health.starts_with("HTTP/1.1 200") && health.contains("\"nodeEligible\":true"));
        assert!(health.contains("\"IPv4\":{\"healthy\":true,"), "{health}");
        assert!(get(&lab, 10249, "/proxyMode").await.ends_with("nftables"));
        let metrics = get(&lab, 10249, "/metrics").await;
        // A failure would be a series of its family.
        assert!(metrics.contains("nftables_sync_failures_total counter"), "{metrics}");
        assert!(!metrics.contains("nftables_sync_failures_total{"), "{metrics}");
        stop.stop();
    };
    // Each step of `story` has its own time limit.
    let (outcome, ()) = tokio::join!(proxy, story);
    outcome.expect("a clean end");
    // The process has ended; the rules stay.
    eventually(&lab, "10.43.0.50:80", "10.42.0.2").await;
    let lists = api.queries();
    assert!(lists.iter().any(|q| q.contains("endpointslices") && q.contains("service-proxy-name")));
    assert!(lists.iter().any(|q| q.contains("nodes") && q.contains("metadata.name")));
    lab.tasks.stop();
}

#[tokio::test]
async fn a_load_balancer_learns_which_node_has_endpoints() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let api = Api::default();
    let web = |port: i32| {
        let ports = json!([{"name": "http", "port": 80, "nodePort": 30080}]);
        service(
            "web",
            json!({"type": "LoadBalancer", "clusterIP": "10.43.0.50", "ports": ports,
            "externalTrafficPolicy": "Local", "healthCheckNodePort": port}),
        )
    };
    let at = |pods: &[&str]| slice("web", ("http", "TCP", 8080), pods);
    api.put("services", &web(32001));
    api.put("endpointslices", &at(&["10.42.0.2", "10.42.0.3", "10.42.9.9@there"]));
    api.put(
        "nodes",
        &json!({
            "metadata": {"name": "here"},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.168.50.1"}]},
        }),
    );
    let tasks = Tasks::new("test");
    let (proxy, stop) = (run(api.client(), config(&lab), tasks.stop_signal()), tasks.clone());
    let answers = async |port: u16, parts: &[&str]| {
        let what = format!("port {port} says {parts:?}");
        testkit::wait::found(&what, async || {
            let to = SocketAddr::from(([192, 168, 50, 1], port));
            let mut stream = netns::connect(&lab.outside.path, to).await.ok()?;
            let request = b"GET /any HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
            stream.write_all(request).await.ok()?;
            let mut text = String::new();
            stream.read_to_string(&mut text).await.ok()?;
            parts.iter().all(|part| text.contains(part)).then_some(())
        })
        .await;
    };
    let story = async {
        let two = ["200 OK", "x-load-balancing-endpoint-weight: 2", "\"localEndpoints\": 2"];
        answers(32001, &two).await;
        let tracking = netns::run(&lab.node.path, || {
            std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait")
        });
        assert_eq!(tracking.expect("enter").expect("a switch").trim(), "3600");
        answers(32001, &["\"namespace\": \"ns\"", "\"serviceProxyHealthy\": true"]).await;
        // The remaining endpoints terminate, or are on another node.
        api.put("endpointslices", &at(&["!10.42.0.2", "10.42.9.9@there"]));
        answers(32001, &["503 Service Unavailable", "\"localEndpoints\": 0"]).await;
        api.put("services", &web(32002));
        api.put("endpointslices", &at(&["10.42.0.2"]));
        answers(32002, &["200 OK", "\"localEndpoints\": 1"]).await;
        let old = SocketAddr::from(([192, 168, 50, 1], 32001));
        let closed = netns::connect(&lab.outside.path, old).await;
        assert!(closed.is_err(), "the former port is closed");
        stop.stop();
    };
    let (outcome, ()) = tokio::join!(proxy, story);
    outcome.expect("a clean end");
    lab.tasks.stop();
}

#[tokio::test]
async fn a_udp_client_follows_its_service() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (a, b, client) = (lab.pod(2).await, lab.pod(3).await, lab.pod(4).await);
    udp_server(&lab, &a.netns.path, "a").await;
    udp_server(&lab, &b.netns.path, "b").await;
    let api = Api::default();
    let port = json!([{"port": 53, "protocol": "UDP"}]);
    api.put("services", &service("dns", json!({"clusterIP": "10.43.0.53", "ports": port})));
    let at = |pod: &str| slice("dns", ("", "UDP", 5353), &[pod]);
    api.put("endpointslices", &at("10.42.0.2"));
    let tasks = Tasks::new("test");
    let (proxy, stop) = (run(api.client(), config(&lab), tasks.stop_signal()), tasks.clone());
    let story = async {
        let to = SocketAddr::from(([10, 43, 0, 53], 53));
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let socket = netns::udp(&client.netns.path, any).await.expect("bind");
        // One socket, like a resolver's; used even before there are rules.
        udp_until(&socket, to, "a").await;
        api.put("endpointslices", &at("10.42.0.3"));
        udp_until(&socket, to, "b").await;
        stop.stop();
    };
    let (outcome, ()) = tokio::join!(proxy, story);
    outcome.expect("a clean end");
    lab.tasks.stop();
}

/// Asks repeatedly until this server answers.
async fn udp_until(socket: &UdpSocket, to: SocketAddr, expected: &str) {
    let mut buffer = [0; 64];
    testkit::wait::found(expected, async || {
        // Refused or lost: asks again.
        let _ = socket.send_to(b"who", to).await;
        let answer = tokio::time::timeout(Duration::from_millis(50), socket.recv_from(&mut buffer));
        let (size, _) = answer.await.ok()?.ok()?;
        (&buffer[..size] == expected.as_bytes()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_port_in_use_is_a_clear_error() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let taken = SocketAddr::from(([0, 0, 0, 0], 10256));
    let _held = netns::listen(&lab.node.path, taken).await.expect("listen");
    let tasks = Tasks::new("test");
    let error = run(Api::default().client(), config(&lab), tasks.stop_signal()).await;
    let text = error.expect_err("taken").to_string();
    assert!(text.contains("0.0.0.0:10256") && text.contains("in use"), "{text}");
}
