//! Tests of the service controller against a fake cloud.

use serde_json::{Value, json};

use super::*;
use crate::manager::Options;
use crate::testing::{Fake, NODES, SERVICES, Server, World};

fn service(name: &str, kind: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": "ns", "uid": format!("u-{name}")},
        "spec": {"type": kind, "ports": [{"port": 80, "nodePort": 30080}]}})
}

fn node(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": name},
        "spec": {"providerID": format!("fake://{name}")}})
}

fn world(nodes: &[&str]) -> World {
    let api = Server::default();
    nodes.iter().for_each(|name| api.put(NODES, node(name)));
    let cloud = Arc::new(Fake::default());
    cloud.state().address = "203.0.113.10".into();
    World::start(api, cloud, Options::default(), start)
}

fn ingress(world: &World, name: &str) -> Value {
    let service = world.api.get(SERVICES, &format!("ns/{name}")).unwrap_or_default();
    service["status"]["loadBalancer"]["ingress"].clone()
}

fn hosts(world: &World, name: &str) -> Vec<String> {
    world.cloud.state().balancers.get(&format!("u-{name}")).cloned().unwrap_or_default()
}

async fn made(world: &World, name: &str) {
    world.until("an address", |world| !ingress(world, name).is_null()).await;
    let ensured = |world: &World| world.api.reasons().contains(&"EnsuredLoadBalancer".to_owned());
    world.until("the events", ensured).await;
}

#[tokio::test(start_paused = true)]
async fn a_load_balancer_lives_with_its_service() {
    let world = world(&["a", "b"]);
    world.api.put(SERVICES, service("web", "LoadBalancer"));
    made(&world, "web").await;
    assert_eq!(ingress(&world, "web"), json!([{"ip": "203.0.113.10", "ipMode": "VIP"}]));
    assert_eq!(hosts(&world, "web"), ["a", "b"]);
    let object = world.api.get(SERVICES, "ns/web").expect("it is there");
    assert_eq!(object["metadata"]["finalizers"], json!([FINALIZER]));
    world.rest().await;
    assert_eq!(world.calls("ensure"), 1, "its own writes wake nothing");
    assert_eq!(
        world.api.events(),
        [
            "EnsuringLoadBalancer: Ensuring load balancer",
            "EnsuredLoadBalancer: Ensured load balancer"
        ]
    );
    world.api.change(
        SERVICES,
        "ns/web",
        &json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
    );
    world.until("gone", |world| world.api.get(SERVICES, "ns/web").is_none()).await;
    assert!(world.cloud.state().balancers.is_empty());
    world.until("all events", |world| world.api.events().len() == 4).await;
    assert_eq!(world.api.reasons()[2..], ["DeletingLoadBalancer", "DeletedLoadBalancer"]);
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn another_type_removes_the_load_balancer() {
    let world = world(&["a"]);
    world.api.put(SERVICES, service("web", "LoadBalancer"));
    made(&world, "web").await;
    world.api.change(SERVICES, "ns/web", &json!({"spec": {"type": "ClusterIP"}}));
    world.until("no address", |world| ingress(world, "web").is_null()).await;
    let object = world.api.get(SERVICES, "ns/web").expect("it is there");
    assert_eq!(object["metadata"]["finalizers"], json!([]));
    assert!(world.cloud.state().balancers.is_empty());
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn other_services_are_left_alone() {
    let world = world(&["a"]);
    let mut other = service("other", "LoadBalancer");
    other["spec"]["loadBalancerClass"] = "example.com/own".into();
    world.api.put(SERVICES, other);
    world.api.put(SERVICES, service("plain", "ClusterIP"));
    world.rest().await;
    assert!(world.cloud.state().calls.is_empty());
    assert!(world.api.writes().is_empty() && world.api.events().is_empty());
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_backs_off_and_is_an_event() {
    let world = world(&["a"]);
    world.cloud.state().fails.insert("ensure");
    let start = tokio::time::Instant::now();
    world.api.put(SERVICES, service("web", "LoadBalancer"));
    world.until("three tries", |world| world.calls("ensure") == 3).await;
    // 5 s, then 10 s.
    let waited = start.elapsed();
    assert!(waited >= Duration::from_secs(15) && waited < Duration::from_secs(17), "{waited:?}");
    let failed = "SyncLoadBalancerFailed: Error syncing load balancer: failed to ensure load balancer: ensure does not work";
    assert!(world.api.events().contains(&failed.to_owned()), "{:?}", world.api.events());
    world.cloud.state().fails.clear();
    made(&world, "web").await;
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn load_balancers_follow_nodes() {
    let world = world(&["a", "b"]);
    world.api.put(SERVICES, service("web", "LoadBalancer"));
    made(&world, "web").await;
    world.api.put(NODES, node("c"));
    world.until("c is there", |world| hosts(world, "web") == ["a", "b", "c"]).await;
    world
        .until("the event", |world| world.api.reasons().contains(&"UpdatedLoadBalancer".to_owned()))
        .await;
    let excluded = json!({"metadata": {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": "true"}}});
    world.api.change(NODES, "/a", &excluded);
    world.until("a is excluded", |world| hosts(world, "web") == ["b", "c"]).await;
    let updates = world.calls("update");
    let status = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    world.api.change(NODES, "/b", &status);
    world.api.change(NODES, "/a", &json!({"metadata": {"labels": {"x": "y"}}}));
    world.rest().await;
    assert_eq!(world.calls("update"), updates, "neither is a change of the nodes");
    world.cloud.state().fails.insert("update");
    world.api.remove(NODES, "/c");
    // The Service's own queue repeats what the update could not do.
    world.until("c is gone", |world| hosts(world, "web") == ["b"]).await;
    world
        .until("the event", |world| {
            world.api.reasons().contains(&"UpdateLoadBalancerFailed".to_owned())
        })
        .await;
    let line = "UpdateLoadBalancerFailed: Error updating load balancer with new hosts [b] [node names limited, total number of nodes: 1], error: update does not work";
    assert!(world.api.events().contains(&line.to_owned()), "{:?}", world.api.events());
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn no_nodes_are_a_warning() {
    let world = world(&[]);
    world.api.put(SERVICES, service("web", "LoadBalancer"));
    made(&world, "web").await;
    let line = "UnAvailableLoadBalancer: There are no available nodes for LoadBalancer";
    assert!(world.api.events().contains(&line.to_owned()), "{:?}", world.api.events());
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_service_of_the_same_name_gets_its_own() {
    let world = world(&["a"]);
    world.api.put(SERVICES, service("web", "LoadBalancer"));
    made(&world, "web").await;
    let mut other = service("web", "LoadBalancer");
    other["metadata"]["uid"] = "other".into();
    world.api.put(SERVICES, other);
    world.until("its own", |world| world.cloud.state().balancers.contains_key("other")).await;
    assert!(!world.cloud.state().balancers.contains_key("u-web"), "the old one is deleted");
    world.end().await;
}

#[test]
fn names_in_events_are_limited() {
    let target = |number: usize| {
        Arc::new(Target {
            name: format!("n{number:02}"),
            provider_id: String::new(),
            addresses: vec![],
        })
    };
    let all: Vec<_> = (0..23).map(target).collect();
    let names = loggable(&all);
    assert_eq!((names.len(), names[20].as_str()), (21, "<3 more>"));
    assert_eq!(loggable(&all[..2]), ["n00", "n01"]);
}
