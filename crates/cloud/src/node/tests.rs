//! Tests of the node controller against a fake cloud.

use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::manager::Options;
use crate::testing::{Fake, NODES, Server, World};

fn node(name: &str, taints: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"kubernetes.io/hostname": name}},
        "spec": {"taints": taints},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"},
            {"type": "Hostname", "address": name}]}})
}

fn uninitialized() -> Value {
    json!([{"key": UNINITIALIZED, "value": "true", "effect": "NoSchedule"},
        {"key": "other", "effect": "NoExecute"}])
}

fn metadata(name: &str) -> Metadata {
    let address = |kind: &str, address: &str| k8s_openapi::api::core::v1::NodeAddress {
        type_: kind.into(),
        address: address.into(),
    };
    Metadata {
        provider_id: format!("fake://{name}"),
        instance_type: "big".into(),
        addresses: vec![address("InternalIP", "10.0.0.1"), address("ExternalIP", "203.0.113.1")],
        zone: "z1".into(),
        region: "r".into(),
        labels: Default::default(),
    }
}

fn world(names: &[&str]) -> World {
    let cloud = Arc::new(Fake::default());
    for name in names {
        cloud.state().machines.insert((*name).to_owned(), metadata(name));
    }
    World::start(Server::default(), cloud, Options::default(), start)
}

fn is_initialized(world: &World, name: &str) -> bool {
    let node = world.api.get(NODES, &format!("/{name}")).unwrap_or_default();
    let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
    !taints.iter().any(|taint| taint["key"] == UNINITIALIZED)
}

#[tokio::test(start_paused = true)]
async fn a_tainted_node_gets_everything_at_once() {
    let world = world(&["a"]);
    world.api.put(NODES, node("a", uninitialized()));
    world.until("initialized", |world| is_initialized(world, "a")).await;
    world.until("the event", |world| !world.api.events().is_empty()).await;
    let node = world.api.get(NODES, "/a").expect("it is there");
    assert_eq!(node["spec"]["providerID"], "fake://a");
    assert_eq!(node["spec"]["taints"], json!([{"key": "other", "effect": "NoExecute"}]));
    let labels = &node["metadata"]["labels"];
    for (key, value) in [
        ("topology.kubernetes.io/zone", "z1"),
        ("failure-domain.beta.kubernetes.io/zone", "z1"),
        ("topology.kubernetes.io/region", "r"),
        ("failure-domain.beta.kubernetes.io/region", "r"),
        ("node.kubernetes.io/instance-type", "big"),
        ("beta.kubernetes.io/instance-type", "big"),
        ("kubernetes.io/hostname", "a"),
    ] {
        assert_eq!(labels[key], value, "{key}");
    }
    let addresses = json!([{"type": "InternalIP", "address": "10.0.0.1"},
        {"type": "ExternalIP", "address": "203.0.113.1"}, {"type": "Hostname", "address": "a"}]);
    assert_eq!(node["status"]["addresses"], addresses);
    assert_eq!(world.api.events(), ["Synced: Node synced successfully"]);
    assert_eq!(world.api.writes(), ["PATCH /api/v1/nodes/a", "PATCH /api/v1/nodes/a/status"]);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_node_waits_for_its_machine() {
    let world = world(&[]);
    world.api.put(NODES, node("a", uninitialized()));
    world.until("several tries", |world| world.calls("metadata a") > 3).await;
    assert!(!is_initialized(&world, "a"));
    world.cloud.state().machines.insert("a".into(), metadata("a"));
    world.until("initialized", |world| is_initialized(world, "a")).await;
    world.end().await;
}

/// Without it, the node would wait for its backoff, which has grown to minutes.
#[tokio::test(start_paused = true)]
async fn a_change_of_the_cloud_ends_the_backoff() {
    let world = world(&[]);
    world.api.put(NODES, node("a", uninitialized()));
    world.until("many tries", |world| world.calls("metadata a") > 16).await;
    world.cloud.state().machines.insert("a".into(), metadata("a"));
    world.cloud.changed.notify_one();
    let before = tokio::time::Instant::now();
    world.until("initialized", |world| is_initialized(world, "a")).await;
    assert!(before.elapsed() < Duration::from_secs(1));
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_wrong_node_ip_keeps_the_taint() {
    let world = world(&["a"]);
    let mut object = node("a", uninitialized());
    object["metadata"]["annotations"] = json!({"alpha.kubernetes.io/provided-node-ip": "10.9.9.9"});
    world.api.put(NODES, object);
    world.until("several tries", |world| world.calls("metadata a") > 3).await;
    assert!(!is_initialized(&world, "a"));
    let fixed = json!({"metadata": {"annotations": {"alpha.kubernetes.io/provided-node-ip": "203.0.113.1"}}});
    world.api.change(NODES, "/a", &fixed);
    world.until("initialized", |world| is_initialized(world, "a")).await;
    world.rest().await;
    let first = world.api.get(NODES, "/a").expect("it is there")["status"]["addresses"][0].clone();
    assert_eq!(first, json!({"type": "ExternalIP", "address": "203.0.113.1"}));
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn labels_are_repaired_and_heartbeats_ask_no_cloud() {
    let world = world(&["a"]);
    let mut object = node("a", json!([]));
    object["metadata"]["labels"]["failure-domain.beta.kubernetes.io/zone"] = "z9".into();
    world.api.put(NODES, object);
    let repaired = |world: &World| {
        let node = world.api.get(NODES, "/a").unwrap_or_default();
        node["metadata"]["labels"]["topology.kubernetes.io/zone"] == "z9"
    };
    world.until("repaired", repaired).await;
    world.rest().await;
    let asked = world.calls("metadata");
    for count in 0..20 {
        world.api.change(
            NODES,
            "/a",
            &json!({"status": {"nodeInfo": {"bootID": count.to_string()}}}),
        );
    }
    world.rest().await;
    assert_eq!(world.calls("metadata"), asked);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn addresses_follow_the_cloud() {
    let world = world(&["a"]);
    world.api.put(NODES, node("a", json!([])));
    let has = |address: &'static str| {
        move |world: &World| {
            let node = world.api.get(NODES, "/a").unwrap_or_default();
            node["status"]["addresses"].to_string().contains(address)
        }
    };
    world.until("the first look", has("203.0.113.1")).await;
    if let Some(machine) = world.cloud.state().machines.get_mut("a") {
        machine.addresses[1].address = "203.0.113.2".into();
    }
    let before = tokio::time::Instant::now();
    world.until("a later look", has("203.0.113.2")).await;
    assert!(before.elapsed() <= Duration::from_secs(301));
    assert!(has("\"a\"")(&world), "the kubelet's host name stays");
    world.end().await;
}
