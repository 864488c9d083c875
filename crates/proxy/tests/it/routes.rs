//! Routes to other nodes' pods follow the API, in a network namespace.

use base::task::Tasks;
use ipnet::IpNet;
use net::vxlan::DEVICE;
use proxy::routes::{Kind, RoutesConfig, follow_nodes, remove};
use serde_json::{Value, json};

use crate::api::Api;
use crate::lab::{Lab, net, skipped};

fn node(name: &str, cidr: &str, address: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {"podCIDR": cidr, "podCIDRs": [cidr]},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    })
}

/// The destinations that leave through the overlay; none without a device.
async fn routes(lab: &Lab) -> Option<Vec<IpNet>> {
    let device = lab.links.find(DEVICE).await.expect("links")?;
    let mut found = lab.links.routes_by(device.index).await.expect("routes");
    found.sort();
    Some(found)
}

async fn soon(lab: &Lab, expected: Option<&[&str]>) {
    let expected = expected.map(|all| all.iter().map(|one| net(one)).collect::<Vec<_>>());
    let what = format!("routes {expected:?}");
    let is_so = async || (routes(lab).await == expected).then_some(());
    testkit::wait::found(&what, is_so).await;
}

/// Waits until these routes lead through other nodes, without a device.
async fn through_nodes(lab: &Lab, expected: &[&str]) {
    let expected: Vec<_> = expected.iter().map(|text| net(text)).collect();
    let is_so = async || {
        let mut routes = lab.links.routes_by_nodes().await.expect("routes");
        routes.sort();
        let device = lab.links.find(DEVICE).await.expect("links");
        (routes == expected && device.is_none()).then_some(())
    };
    testkit::wait::found(&format!("routes {expected:?} through nodes"), is_so).await;
}

#[tokio::test]
async fn routes_follow_the_nodes() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let api = Api::default();
    let config = RoutesConfig {
        node_name: "here".into(),
        cluster_cidrs: vec![net("10.42.0.0/16")],
        service_cidrs: vec![net("10.43.0.0/16")],
        kind: Kind::Vxlan,
        netns: Some(lab.node.path.clone()),
    };
    api.put("nodes", &node("here", "10.42.0.0/24", "192.168.50.1"));

    let first = Tasks::new("first");
    let running = follow_nodes(api.client(), config.clone(), first.stop_signal());
    let story = async {
        api.put("nodes", &node("there", "10.42.1.0/24", "192.168.50.2"));
        soon(&lab, Some(&["10.42.1.0/24"])).await;
        // Nodes that claim others' addresses get no routes, and do not delay the routes to others.
        api.put("nodes", &node("a-all", "0.0.0.0/0", "192.168.50.8"));
        api.put("nodes", &node("a-net", "1.0.0.0/8", "192.168.50.9"));
        api.put("nodes", &node("yonder", "10.42.2.0/24", "192.168.50.3"));
        soon(&lab, Some(&["10.42.1.0/24", "10.42.2.0/24"])).await;
        api.remove("nodes", "a-all");
        api.remove("nodes", "a-net");
        // Another program removes the device, or a single route: both are restored.
        lab.links.remove(DEVICE).await.expect("removed");
        soon(&lab, Some(&["10.42.1.0/24", "10.42.2.0/24"])).await;
        lab.links.remove_route(net("10.42.1.0/24")).await.expect("removed");
        soon(&lab, Some(&["10.42.1.0/24", "10.42.2.0/24"])).await;
        api.remove("nodes", "there");
        soon(&lab, Some(&["10.42.2.0/24"])).await;
        // After the last other node left, the device is removed.
        api.remove("nodes", "yonder");
        soon(&lab, None).await;
        api.put("nodes", &node("there", "10.42.1.0/24", "192.168.50.2"));
        api.put("nodes", &node("yonder", "10.42.2.0/24", "192.168.50.3"));
        soon(&lab, Some(&["10.42.1.0/24", "10.42.2.0/24"])).await;
        first.stop();
    };
    let both = async { tokio::join!(running, story).0 };
    both.await.expect("a clean end");

    // The routes stay while no process runs; the next process removes the node that left meanwhile.
    soon(&lab, Some(&["10.42.1.0/24", "10.42.2.0/24"])).await;
    api.remove("nodes", "yonder");
    let second = Tasks::new("second");
    let running = follow_nodes(api.client(), config.clone(), second.stop_signal());
    let story = async {
        soon(&lab, Some(&["10.42.1.0/24"])).await;
        second.stop();
    };
    let both = async { tokio::join!(running, story).0 };
    both.await.expect("a clean end");

    // Without a tunnel, a process of the other kind replaces the routes; at last they are removed.
    let third = Tasks::new("third");
    let config = RoutesConfig { kind: Kind::HostGateway, ..config };
    let running = follow_nodes(api.client(), config.clone(), third.stop_signal());
    let story = async {
        through_nodes(&lab, &["10.42.1.0/24"]).await;
        api.put("nodes", &node("yonder", "10.42.2.0/24", "192.168.50.3"));
        through_nodes(&lab, &["10.42.1.0/24", "10.42.2.0/24"]).await;
        lab.links.remove_route(net("10.42.1.0/24")).await.expect("removed");
        through_nodes(&lab, &["10.42.1.0/24", "10.42.2.0/24"]).await;
        api.remove("nodes", "yonder");
        through_nodes(&lab, &["10.42.1.0/24"]).await;
        third.stop();
    };
    let both = async { tokio::join!(running, story).0 };
    both.await.expect("a clean end");
    remove(config.netns.as_deref()).await.expect("removed");
    through_nodes(&lab, &[]).await;
    lab.tasks.stop();
}
