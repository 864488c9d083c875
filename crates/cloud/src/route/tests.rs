//! Tests of the route controller against a fake cloud.

use serde_json::{Value, json};

use super::*;
use crate::manager::Options;
use crate::testing::{Fake, NODES, Server, World};

fn node(name: &str, cidrs: &[&str]) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": format!("u-{name}")},
        "spec": {"podCIDRs": cidrs}, "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]}})
}

fn route(node: &str, destination: &str) -> Route {
    Route {
        name: "old".into(),
        node: node.into(),
        destination: destination.into(),
        ..Route::default()
    }
}

fn world(routes: Vec<Route>) -> World {
    let cloud = Arc::new(Fake::default());
    cloud.state().routes = routes;
    let cluster_cidrs = Options::parse_cidrs("10.42.0.0/16").expect("a range");
    let options = Options { cluster_cidrs, ..Options::default() };
    World::start(Server::default(), cloud, options, start)
}

fn condition(world: &World, name: &str) -> (String, String) {
    let node = world.api.get(NODES, &format!("/{name}")).unwrap_or_default();
    let one = &node["status"]["conditions"][0];
    let text = |field: &str| one[field].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"))
}

fn destinations(world: &World) -> Vec<(String, String)> {
    let routes = world.cloud.state().routes.clone();
    let mut all: Vec<_> = routes.into_iter().map(|one| (one.node, one.destination)).collect();
    all.sort();
    all
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

#[tokio::test(start_paused = true)]
async fn routes_follow_nodes() {
    let black = Route { is_blackhole: true, ..route("", "10.42.7.0/24") };
    let world = world(vec![
        route("a", "10.42.1.0/24"),
        route("gone", "10.42.9.0/24"),
        route("gone", "192.168.0.0/24"),
        black,
    ]);
    world.api.put(NODES, node("a", &["10.42.1.0/24"]));
    world.api.put(NODES, node("b", &["10.42.2.0/24"]));
    world.api.put(NODES, node("c", &[]));
    let wanted = pairs(&[("a", "10.42.1.0/24"), ("b", "10.42.2.0/24"), ("gone", "192.168.0.0/24")]);
    world.until("the routes", |world| destinations(world) == wanted).await;
    let fine = ("False".to_owned(), "RouteCreated".to_owned());
    world.until("a's condition", |world| condition(world, "a") == fine).await;
    world.until("b's condition", |world| condition(world, "b") == fine).await;
    assert_eq!(condition(&world, "c"), Default::default(), "it has no pod CIDR");
    assert_eq!(world.calls("create"), 1, "a's route stays");
    let writes = world.api.writes();
    world.api.remove(NODES, "/b");
    world.until("b's route is gone", |world| destinations(world).len() == 2).await;
    assert_eq!(world.api.writes(), writes, "right conditions are not written again");
    world.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_route_that_fails_is_a_condition_and_an_event() {
    let world = world(vec![]);
    world.cloud.state().fails.insert("create");
    world.api.put(NODES, node("a", &["10.42.1.0/24"]));
    let bad = ("True".to_owned(), "NoRouteCreated".to_owned());
    world.until("the condition", |world| condition(world, "a") == bad).await;
    world.until("the event", |world| !world.api.events().is_empty()).await;
    let event = world.api.events()[0].clone();
    let start = "FailedToCreateRoute: Could not create route u-a 10.42.1.0/24 for node a after ";
    assert!(event.starts_with(start) && event.ends_with(": create does not work"), "{event}");
    world.cloud.state().fails.clear();
    let fine = ("False".to_owned(), "RouteCreated".to_owned());
    world.until("the next period", |world| condition(world, "a") == fine).await;
    world.end().await;
}

#[test]
fn changed_addresses_replace_the_route() {
    let address =
        |address: &str| NodeAddress { type_: "InternalIP".into(), address: address.into() };
    let facts = Facts {
        name: "a".into(),
        cidrs: vec!["10.42.1.0/24".into()],
        addresses: vec![address("10.0.0.1"), address("fd00::1")],
        ..Facts::default()
    };
    let cluster = Options::parse_cidrs("10.42.0.0/16").expect("a range");
    let check = |addresses: Option<Vec<NodeAddress>>, expected: (usize, usize)| {
        let present = [Route { addresses, ..route("a", "10.42.1.0/24") }];
        let plan = plan(&[Arc::new(facts.clone())], &present, &cluster);
        assert_eq!((plan.delete.len(), plan.create.len()), expected);
    };
    check(None, (0, 0));
    check(Some(vec![address("fd00::1"), address("10.0.0.1")]), (0, 0));
    check(Some(vec![address("10.0.0.2"), address("fd00::1")]), (1, 1));
}
