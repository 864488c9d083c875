//! Real connections through the rules.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use net::netns;
use net::nft::{Nft, Ruleset, diff};
use proxy::model::ruleset;
use serde_json::{Value, json};
use tokio::net::UdpSocket;

use crate::fixtures::{facts, service, slice};
use crate::lab::{Lab, Pod, ask, skipped};

struct Rules {
    nft: Nft,
    now: Ruleset,
}

impl Rules {
    fn new(lab: &Lab) -> Self {
        Self { nft: Nft::open_in(&lab.node.path).expect("socket"), now: Ruleset::default() }
    }

    fn apply(&mut self, services: &[Service], slices: &[EndpointSlice]) {
        let next = ruleset(services, slices, &facts());
        self.nft.apply(&diff(&self.now, &next)).expect("rules");
        self.now = next;
    }
}

fn web(extra: Value) -> Service {
    let mut spec = json!({
        "clusterIP": "10.43.0.50",
        "ports": [{"name": "http", "port": 80, "nodePort": 30080}],
    });
    for (key, value) in extra.as_object().expect("fields") {
        spec[key] = value.clone();
    }
    service("web", spec)
}

fn web_slice(addresses: &[&str]) -> EndpointSlice {
    slice("web", ("http", "TCP", 8080), addresses)
}

/// The set of servers that answer over some attempts.
async fn answers(from: &Path, to: &str) -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    for _ in 0..24 {
        seen.insert(ask(from, to).await.expect("an answer"));
    }
    seen
}

fn names(of: &[&str]) -> BTreeSet<String> {
    of.iter().map(|name| (*name).to_owned()).collect()
}

fn last_peer(pod: &Pod) -> IpAddr {
    *pod.peers.lock().expect("no panic").last().expect("somebody came")
}

#[tokio::test]
async fn cluster_ip_reaches_ready_endpoints_from_everywhere() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (a, b, client) = (lab.pod(2).await, lab.pod(3).await, lab.pod(4).await);
    let mut rules = Rules::new(&lab);
    rules.apply(&[web(json!({}))], &[web_slice(&["10.42.0.2", "10.42.0.3", "!10.42.0.4"])]);

    let both = names(&["10.42.0.2", "10.42.0.3"]);
    assert_eq!(answers(&client.netns.path, "10.43.0.50:80").await, both);
    assert_eq!(last_peer(&a), client.address, "pods keep their address");
    assert_eq!(answers(&lab.node.path, "10.43.0.50:80").await, both);

    // A pod behind the Service reaches itself, with another source address.
    assert_eq!(answers(&a.netns.path, "10.43.0.50:80").await, both);
    rules.apply(&[web(json!({}))], &[web_slice(&["10.42.0.2"])]);
    assert_eq!(answers(&a.netns.path, "10.43.0.50:80").await, names(&["10.42.0.2"]));
    assert_eq!(last_peer(&a), IpAddr::from([10, 42, 0, 1]));
    assert_ne!(last_peer(&b), b.address, "b met itself only under the node's address");
    lab.tasks.stop();
}

#[tokio::test]
async fn node_ports_and_external_addresses_answer_outside() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (a, _b) = (lab.pod(2).await, lab.pod(3).await);
    let mut rules = Rules::new(&lab);
    let both = names(&["10.42.0.2", "10.42.0.3"]);
    let slices = [web_slice(&["10.42.0.2", "10.42.0.3"])];
    let external = json!({"externalIPs": ["192.0.2.10"]});
    rules.apply(&[web(external)], &slices);
    assert_eq!(answers(&lab.outside.path, "192.168.50.1:30080").await, both);
    assert_eq!(last_peer(&a), IpAddr::from([10, 42, 0, 1]), "masqueraded on its way to the pod");
    assert_eq!(answers(&lab.outside.path, "192.0.2.10:80").await, both);
    assert_eq!(answers(&lab.node.path, "192.168.50.1:30080").await, both);
    assert_eq!(answers(&a.netns.path, "192.168.50.1:30080").await, both);

    // Local: the client's address is kept, and only this node's pods answer.
    let local = json!({"externalTrafficPolicy": "Local"});
    let far = [web_slice(&["10.42.0.2", "10.42.9.9@there"])];
    rules.apply(&[web(local.clone())], &far);
    let near = answers(&lab.outside.path, "192.168.50.1:30080").await;
    assert_eq!(near, names(&["10.42.0.2"]));
    assert_eq!(last_peer(&a), IpAddr::from([192, 168, 50, 9]));
    lab.tasks.stop();
}

/// A load balancer at this address, without node ports.
fn balanced(address: &str, extra: Value) -> Service {
    let mut spec = json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false,
        "ports": [{"name": "http", "port": 80}]});
    for (key, value) in extra.as_object().expect("fields") {
        spec[key] = value.clone();
    }
    let mut service = json!(web(spec));
    service["status"] = json!({"loadBalancer": {"ingress": [{"ip": address, "ipMode": "VIP"}]}});
    serde_json::from_value(service).expect("a Service")
}

#[tokio::test]
async fn a_load_balancer_answers_on_the_nodes_own_address() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (a, _b) = (lab.pod(2).await, lab.pod(3).await);
    let mut rules = Rules::new(&lab);
    let (both, near) = (names(&["10.42.0.2", "10.42.0.3"]), names(&["10.42.0.2"]));
    let slices = [web_slice(&["10.42.0.2", "10.42.0.3"])];
    let (ours, theirs) = ("192.168.50.1", "192.168.50.2");
    let at = format!("{ours}:80");
    rules.apply(&[balanced(ours, json!({}))], &slices);
    assert_eq!(answers(&lab.outside.path, &at).await, both);
    assert_eq!(last_peer(&a), IpAddr::from([10, 42, 0, 1]), "masqueraded on its way to the pod");
    assert_eq!(answers(&lab.node.path, &at).await, both);
    assert_eq!(answers(&a.netns.path, &at).await, both);
    let refused = ask(&lab.outside.path, "192.168.50.1:81").await.expect_err("another port");
    assert!(refused.contains("refused"), "{refused}");

    // The address of another node leads to the endpoints without the way to that node.
    rules.apply(&[balanced(theirs, json!({}))], &slices);
    assert_eq!(answers(&a.netns.path, &format!("{theirs}:80")).await, both);
    assert_eq!(answers(&lab.node.path, &format!("{theirs}:80")).await, both);

    // Local: the client's address is kept, and only this node's pods answer.
    let local = json!({"externalTrafficPolicy": "Local"});
    let far = [web_slice(&["10.42.0.2", "10.42.9.9@there"])];
    rules.apply(&[balanced(ours, local)], &far);
    assert_eq!(answers(&lab.outside.path, &at).await, near);
    assert_eq!(last_peer(&a), IpAddr::from([192, 168, 50, 9]));

    // Source ranges let some clients in and drop others.
    let from = |range: &str| json!({"loadBalancerSourceRanges": [range]});
    rules.apply(&[balanced(ours, from("192.168.50.9/32"))], &slices);
    assert_eq!(answers(&lab.outside.path, &at).await, both);
    rules.apply(&[balanced(ours, from("192.168.50.128/25"))], &slices);
    let brief = std::time::Duration::from_millis(500);
    let dropped = tokio::time::timeout(brief, ask(&lab.outside.path, &at)).await;
    assert!(dropped.is_err(), "{dropped:?}");

    // Without endpoints it refuses at once.
    rules.apply(&[balanced(ours, json!({}))], &[web_slice(&["!10.42.0.2"])]);
    let refused = ask(&lab.outside.path, &at).await.expect_err("nobody is there");
    assert!(refused.contains("refused"), "{refused}");
    lab.tasks.stop();
}

#[tokio::test]
async fn services_without_endpoints_refuse_at_once() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let pod = lab.pod(2).await;
    let mut rules = Rules::new(&lab);
    rules.apply(&[web(json!({"externalIPs": ["192.0.2.10"]}))], &[web_slice(&["!10.42.0.2"])]);
    let refused = async |from: &Path, to: &str| {
        let error = ask(from, to).await.expect_err("nobody is there");
        assert!(error.contains("refused"), "{} {to}: {error}", from.display());
    };
    refused(&pod.netns.path, "10.43.0.50:80").await;
    refused(&lab.node.path, "10.43.0.50:80").await;
    refused(&lab.outside.path, "192.168.50.1:30080").await;
    refused(&lab.outside.path, "192.0.2.10:80").await;
    // A port that the Service does not have.
    refused(&pod.netns.path, "10.43.0.50:81").await;
    refused(&lab.node.path, "10.43.0.50:81").await;

    // The cluster DNS address is the node's own and belongs to no Service of ours.
    lab.links.ensure_local_address("10.43.0.10".parse().expect("ip")).await.expect("address");
    lab.serve(&lab.node.path, 53, "dns", Default::default()).await;
    assert_eq!(ask(&pod.netns.path, "10.43.0.10:53").await.as_deref(), Ok("dns"));
    assert_eq!(ask(&lab.node.path, "10.43.0.10:53").await.as_deref(), Ok("dns"));
    lab.tasks.stop();
}

#[tokio::test]
async fn an_invalid_object_does_not_affect_others() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (_pod, client) = (lab.pod(2).await, lab.pod(3).await);
    let long = "x".repeat(300);
    let ports = json!([{"name": "http", "port": 80}, {"name": "zero", "port": 0},
        {"name": "low", "port": -1}, {"name": "high", "port": 70000, "nodePort": 70000},
        {"name": "what", "port": 81, "protocol": "../x"}]);
    let odd = |name: &str, ip: &str| {
        let ingress = json!([{"ip": "::1"}, {"ip": "x"}, {"hostname": "y"}]);
        let spec = json!({"clusterIP": ip, "type": "LoadBalancer", "ports": ports.clone(),
            "externalIPs": ["0x7f.1", "", "::", "10.43.0.300"],
            "loadBalancerSourceRanges": ["10.0.0.5/8", "0.0.0.0/0", "1.2.3.4/33", "::/0"],
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": -7}}});
        let mut service = json!(service(name, spec));
        service["status"] = json!({"loadBalancer": {"ingress": ingress}});
        serde_json::from_value::<Service>(service).expect("a service")
    };
    let services = [
        odd("odd", "10.43.0.60"),
        odd(&long, "10.43.0.61"),
        odd("text", "nothing"),
        odd("mapped", "::ffff:10.43.0.62"),
        web(json!({})),
    ];
    let wrong = |service: &str, family: &str, port: i64, addresses: Value| {
        let object = json!({
            "metadata": {"name": service, "namespace": "ns",
                "labels": {"kubernetes.io/service-name": service}},
            "addressType": family,
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
            "endpoints": [{"addresses": addresses}, {"addresses": []}],
        });
        serde_json::from_value::<EndpointSlice>(object).expect("a slice")
    };
    let slices = [
        wrong("odd", "IPv4", 8080, json!(["fd42::9"])),
        wrong("odd", "IPv6", 8080, json!(["10.42.0.9"])),
        wrong("odd", "IPv4", 0, json!(["10.42.0.9"])),
        wrong("odd", "IPv4", 8080, json!(["0.0.0.0"])),
        wrong("odd", "FQDN", 8080, json!(["a.example"])),
        wrong(&long, "IPv4", 99999, json!(["10.42.0.9"])),
        wrong(&long, "IPv4", 8080, json!(["10.42.0.2"])),
        web_slice(&["10.42.0.2"]),
    ];
    let mut rules = Rules::new(&lab);
    rules.apply(&services, &slices);
    assert_eq!(ask(&client.netns.path, "10.43.0.50:80").await.as_deref(), Ok("10.42.0.2"));
    // And the objects can be removed again.
    rules.apply(&[web(json!({}))], &[web_slice(&["10.42.0.2"])]);
    assert_eq!(ask(&client.netns.path, "10.43.0.50:80").await.as_deref(), Ok("10.42.0.2"));
    lab.tasks.stop();
}

#[tokio::test]
async fn ipv6_services_work_the_same() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (a, client) = (lab.pod(2).await, lab.pod(3).await);
    let web = service("web", json!({"clusterIP": "fd43::50", "ports": [{"port": 80}]}));
    let mut rules = Rules::new(&lab);
    let slices = [slice("web", ("", "TCP", 8080), &["fd42::2"])];
    rules.apply(std::slice::from_ref(&web), &slices);
    let answer = ask(&client.netns.path, "[fd43::50]:80").await;
    assert_eq!(answer.as_deref(), Ok("10.42.0.2"), "the server has one name");
    let own = ask(&a.netns.path, "[fd43::50]:80").await;
    assert_eq!(own.as_deref(), Ok("10.42.0.2"), "hairpin");
    assert_eq!(ask(&lab.node.path, "[fd43::50]:80").await.as_deref(), Ok("10.42.0.2"));
    rules.apply(&[web], &[]);
    let refused = ask(&client.netns.path, "[fd43::50]:80").await.expect_err("no endpoints");
    assert!(refused.contains("refused"), "{refused}");
    lab.tasks.stop();
}

#[tokio::test]
async fn a_client_stays_with_its_endpoint() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (_a, _b, _c) = (lab.pod(2).await, lab.pod(3).await, lab.pod(4).await);
    let client = lab.pod(5).await;
    let mut rules = Rules::new(&lab);
    let sticky = web(json!({"sessionAffinity": "ClientIP"}));
    let all = ["10.42.0.2", "10.42.0.3", "10.42.0.4"];
    rules.apply(std::slice::from_ref(&sticky), &[web_slice(&all)]);
    let first = answers(&client.netns.path, "10.43.0.50:80").await;
    assert_eq!(first.len(), 1, "{first:?}");
    // After the loss of its endpoint the client gets another one and keeps it.
    let rest: Vec<&str> = all.into_iter().filter(|name| !first.contains(*name)).collect();
    rules.apply(std::slice::from_ref(&sticky), &[web_slice(&rest)]);
    let second = answers(&client.netns.path, "10.43.0.50:80").await;
    assert_eq!(second.len(), 1, "{second:?}");
    assert!(second.is_disjoint(&first));
    // New endpoints do not move the client.
    rules.apply(&[sticky], &[web_slice(&all)]);
    assert_eq!(answers(&client.netns.path, "10.43.0.50:80").await, second);
    lab.tasks.stop();
}

#[tokio::test]
async fn pods_are_masqueraded_outside_of_the_cluster() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let pod = lab.pod(2).await;
    let peers = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    lab.serve(&lab.outside.path, 80, "world", peers.clone()).await;
    Rules::new(&lab).apply(&[], &[]);
    assert_eq!(ask(&pod.netns.path, "192.168.50.9:80").await.as_deref(), Ok("world"));
    assert_eq!(*peers.lock().expect("no panic"), [IpAddr::from([192, 168, 50, 1])]);
    lab.tasks.stop();
}

#[tokio::test]
async fn a_new_process_takes_over_without_a_gap() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (_a, client) = (lab.pod(2).await, lab.pod(3).await);
    let (services, slices) = ([web(json!({}))], [web_slice(&["10.42.0.2"])]);
    Rules::new(&lab).apply(&services, &slices);
    // Each round is a new process without knowledge of the previous one.
    let node = lab.node.path.clone();
    let takeover = tokio::task::spawn_blocking(move || {
        for _ in 0..50 {
            let mut nft = Nft::open_in(&node).expect("socket");
            let rules = ruleset(&services, &slices, &facts());
            nft.apply(&diff(&Ruleset::default(), &rules)).expect("rules");
        }
    });
    let mut asked = 0;
    while !takeover.is_finished() || asked < 50 {
        let answer = ask(&client.netns.path, "10.43.0.50:80").await;
        assert_eq!(answer.as_deref(), Ok("10.42.0.2"), "request {asked}");
        asked += 1;
    }
    takeover.await.expect("no panic");
    lab.tasks.stop();
}

#[tokio::test]
async fn endpoints_come_and_go_under_load() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (_a, _b, client) = (lab.pod(2).await, lab.pod(3).await, lab.pod(4).await);
    let mut rules = Rules::new(&lab);
    rules.apply(&[web(json!({}))], &[web_slice(&["10.42.0.2"])]);
    let changes = tokio::task::spawn_blocking(move || {
        for _ in 0..100 {
            for pods in [&["10.42.0.2", "10.42.0.3"][..], &["10.42.0.3"], &["10.42.0.2"]] {
                rules.apply(&[web(json!({}))], &[web_slice(pods)]);
            }
        }
    });
    while !changes.is_finished() {
        for (from, to) in [
            (&client.netns.path, "10.43.0.50:80"),
            (&lab.node.path, "10.43.0.50:80"),
            (&lab.outside.path, "192.168.50.1:30080"),
        ] {
            let answer = ask(from, to).await;
            assert!(answer.is_ok(), "{to}: {answer:?}");
        }
    }
    changes.await.expect("no panic");
    lab.tasks.stop();
}

#[tokio::test]
async fn a_change_costs_the_same_among_a_thousand_services() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let mut rules = Rules::new(&lab);
    let (mut services, mut slices) = (Vec::new(), Vec::new());
    for n in 0..1000 {
        let (name, ip) = (format!("svc-{n}"), format!("10.43.{}.{}", n / 250 + 1, n % 250 + 1));
        let ports = json!([{"name": "http", "port": 80, "nodePort": 30000 + n}]);
        services.push(service(&name, json!({"clusterIP": ip, "ports": ports})));
        let pods: Vec<String> =
            (0..3).map(|i| format!("10.42.{}.{}", n / 50 + 1, n % 50 * 3 + i)).collect();
        let pods: Vec<&str> = pods.iter().map(String::as_str).collect();
        slices.push(slice(&name, ("http", "TCP", 8080), &pods));
    }
    let clock = tokio::time::Instant::now();
    rules.apply(&services, &slices);
    let first = clock.elapsed();
    slices[500] = slice("svc-500", ("http", "TCP", 8080), &["10.42.77.1"]);
    let next = ruleset(&services, &slices, &facts());
    let batch = diff(&rules.now, &next);
    assert!(batch.len() < 30, "{:#?}", batch.describe());
    let clock = tokio::time::Instant::now();
    rules.apply(&services, &slices);
    println!("1000 services loaded in {first:?}, one changed in {:?}", clock.elapsed());
    lab.tasks.stop();
}

/// Answers every datagram with the server's name.
pub async fn udp_server(lab: &Lab, at: &Path, name: &'static str) {
    let any = SocketAddr::from(([0, 0, 0, 0], 5353));
    let socket = netns::udp(at, any).await.expect("bind");
    lab.tasks.spawn("udp", async move {
        let mut buffer = [0; 64];
        while let Ok((_, peer)) = socket.recv_from(&mut buffer).await {
            // The client may be gone.
            let _ = socket.send_to(name.as_bytes(), peer).await;
        }
    });
}

async fn udp_ask(socket: &UdpSocket, to: SocketAddr) -> String {
    socket.send_to(b"who", to).await.expect("send");
    let mut buffer = [0; 64];
    let answer = testkit::wait::soon("an answer", socket.recv_from(&mut buffer)).await;
    let (size, from) = answer.expect("receive");
    assert_eq!(from, to, "answers come from the service");
    String::from_utf8_lossy(&buffer[..size]).into_owned()
}

#[tokio::test]
async fn udp_flows_are_listed_and_deleted() {
    if skipped() {
        return;
    }
    let lab = Lab::new().await;
    let (a, b, client) = (lab.pod(2).await, lab.pod(3).await, lab.pod(4).await);
    udp_server(&lab, &a.netns.path, "a").await;
    udp_server(&lab, &b.netns.path, "b").await;
    let dns = json!({"clusterIP": "10.43.0.53", "ports": [{"port": 53, "protocol": "UDP"}]});
    let dns = service("dns", dns);
    let at = |pod: &str| slice("dns", ("", "UDP", 5353), &[pod]);
    let mut rules = Rules::new(&lab);
    rules.apply(std::slice::from_ref(&dns), &[at("10.42.0.2")]);
    let to: SocketAddr = "10.43.0.53:53".parse().expect("an address");
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let socket = netns::udp(&client.netns.path, any).await.expect("bind");
    assert_eq!(udp_ask(&socket, to).await, "a");

    // New rules alone do not move an existing flow.
    rules.apply(&[dns], &[at("10.42.0.3")]);
    assert_eq!(udp_ask(&socket, to).await, "a");
    let mut table = net::conntrack::Conntrack::open_in(&lab.node.path).expect("socket");
    let flows = table.udp_flows(net::nft::Ip::V4).expect("flows");
    let flow = flows.iter().find(|flow| flow.to == to).expect("the flow");
    assert_eq!(flow.answered_by, "10.42.0.2:5353".parse().expect("an address"));
    table.delete(flow).expect("forget");
    table.delete(flow).expect("forget twice");
    assert_eq!(udp_ask(&socket, to).await, "b");
    lab.tasks.stop();
}
