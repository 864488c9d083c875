//! Tests of the lifecycle controller against a fake cloud.

use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::manager::Options;
use crate::provider::Metadata;
use crate::testing::{Fake, NODES, Server, World};

fn node(name: &str, ready: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": name},
        "spec": {"taints": [{"key": "other", "effect": "NoSchedule"}]},
        "status": {"conditions": [{"type": "Ready", "status": ready}]}})
}

fn world(machines: &[&str]) -> World {
    let cloud = Arc::new(Fake::default());
    for name in machines {
        cloud.state().machines.insert((*name).to_owned(), Metadata::default());
    }
    World::start(Server::default(), cloud, Options::default(), start)
}

fn taints(world: &World, name: &str) -> String {
    let node = world.api.get(NODES, &format!("/{name}")).unwrap_or_default();
    node["spec"]["taints"].to_string()
}

#[tokio::test(start_paused = true)]
async fn a_node_without_a_machine_is_deleted() {
    let world = world(&["b"]);
    for (name, ready) in [("a", "Unknown"), ("b", "False"), ("c", "True")] {
        world.api.put(NODES, node(name, ready));
    }
    world.until("deleted", |world| world.api.get(NODES, "/a").is_none()).await;
    world.until("the event", |world| !world.api.events().is_empty()).await;
    let message = "DeletingNode: Deleting node a because it does not exist in the cloud provider";
    assert_eq!(world.api.events(), [message]);
    world.rest().await;
    assert!(world.api.get(NODES, "/b").is_some(), "its machine exists");
    assert!(world.api.get(NODES, "/c").is_some(), "it is Ready");
    assert_eq!(world.calls("exists c"), 0, "Ready nodes cost nothing");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_cloud_deletes_nothing() {
    let world = world(&[]);
    world.cloud.state().fails.insert("exists");
    world.api.put(NODES, node("a", "Unknown"));
    world.until("several looks", |world| world.calls("exists a") > 3).await;
    assert!(world.api.get(NODES, "/a").is_some());
    assert!(world.api.events().is_empty());
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_shutdown_taint_comes_and_goes() {
    let world = world(&["a"]);
    world.cloud.state().off.insert("a".into());
    world.api.put(NODES, node("a", "True"));
    world.rest().await;
    assert!(!taints(&world, "a").contains(SHUTDOWN));
    world.api.put(NODES, node("a", "Unknown"));
    world.until("tainted", |world| taints(world, "a").contains(SHUTDOWN)).await;
    assert!(taints(&world, "a").contains("other"), "other taints stay");
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(world.api.writes().len(), 1, "one write");
    world.cloud.state().off.clear();
    world.api.change(
        NODES,
        "/a",
        &json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
    );
    world.until("free", |world| !taints(world, "a").contains(SHUTDOWN)).await;
    assert!(taints(&world, "a").contains("other"));
    world.end().await;
}
