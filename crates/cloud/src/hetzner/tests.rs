//! Tests of the provider `hetzner` against a fake of its API with state, on loopback. Its answers have the shape that
//! the API's documentation shows.

use std::collections::BTreeMap;
use std::sync::Mutex as Lock;

use base::task::Tasks;
use k8s_openapi::api::core::v1::Service;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::provider::{Route, ingress};
use crate::target::Target;

#[derive(Default)]
struct Fake {
    servers: Vec<Value>,
    balancers: BTreeMap<u64, Value>,
    routes: Vec<Value>,
    /// Answered instead of everything else.
    refusal: Option<(u16, Value)>,
    next: u64,
    /// Method and path of every request, with the body of writes.
    log: Vec<String>,
}

impl Fake {
    fn action(&mut self, command: &str) -> Value {
        self.next += 1;
        json!({"id": self.next, "command": command, "status": "running", "progress": 0,
            "started": "2026-01-30T23:55:00Z", "finished": null, "resources": [], "error": null})
    }

    fn answer(&mut self, method: &str, target: &str, body: &Value) -> (u16, Value) {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        self.log.push(if method == "GET" {
            format!("GET {path}")
        } else {
            format!("{method} {path} {body}")
        });
        if let Some(refusal) = &self.refusal {
            return refusal.clone();
        }
        let parts: Vec<&str> = path.trim_start_matches("/v1/").split('/').collect();
        match (method, &parts[..]) {
            ("GET", ["servers"]) => (200, self.page(query)),
            ("GET", ["actions", id]) => {
                let action = json!({"id": id.parse::<u64>().expect("a number"), "command": "x",
                    "status": "success", "progress": 100, "error": null});
                (200, json!({"action": action}))
            }
            ("GET", ["networks"]) => (200, json!({"networks": [self.network()]})),
            ("GET", ["networks", "4711"]) => (200, json!({"network": self.network()})),
            ("POST", ["networks", "4711", "actions", "add_route"]) => {
                self.routes.push(body.clone());
                (201, json!({"action": self.action("add_route")}))
            }
            ("POST", ["networks", "4711", "actions", "delete_route"]) => {
                self.routes.retain(|route| route != body);
                (201, json!({"action": self.action("delete_route")}))
            }
            ("GET", ["load_balancers"]) => {
                let all: Vec<&Value> = self
                    .balancers
                    .values()
                    .filter(|one| {
                        let uid =
                            one["labels"]["hcloud-ccm/service-uid"].as_str().unwrap_or_default();
                        query.contains(&format!("service-uid%3D%3D{uid}&"))
                    })
                    .collect();
                (200, json!({"load_balancers": all, "meta": {"pagination": {"next_page": null}}}))
            }
            ("POST", ["load_balancers"]) => self.create(body),
            ("DELETE", ["load_balancers", id]) => {
                match self.balancers.remove(&id.parse().expect("a number")) {
                    Some(_) => (204, Value::Null),
                    None => (404, json!({"error": {"code": "not_found", "message": "not found"}})),
                }
            }
            ("POST", ["load_balancers", id, "actions", action]) => {
                self.act(id.parse().expect("a number"), action, body);
                (201, json!({"action": self.action(action)}))
            }
            _ => (
                404,
                json!({"error": {"code": "not_found", "message": format!("no {method} {path}")}}),
            ),
        }
    }

    /// One server on a page, so that pages matter.
    fn page(&self, query: &str) -> Value {
        let page = query.split('&').find_map(|pair| pair.strip_prefix("page="));
        let page: usize = page.and_then(|page| page.parse().ok()).unwrap_or(1);
        let next = (page < self.servers.len()).then_some(page + 1);
        json!({"servers": self.servers.get(page - 1).into_iter().collect::<Vec<_>>(),
            "meta": {"pagination": {"page": page, "per_page": 1, "previous_page": null,
                "next_page": next, "last_page": 1, "total_entries": self.servers.len()}}})
    }

    fn network(&self) -> Value {
        json!({"id": 4711, "name": "mynet", "ip_range": "10.0.0.0/8", "subnets": [],
            "routes": self.routes, "servers": [42], "labels": {}})
    }

    fn create(&mut self, body: &Value) -> (u16, Value) {
        self.next += 1;
        let id = self.next;
        let private: Vec<Value> = body["network"]
            .as_u64()
            .map(|id| json!({"network": id, "ip": "10.0.0.9"}))
            .into_iter()
            .collect();
        let balancer = json!({"id": id, "name": body["name"], "labels": body["labels"],
            "public_net": {"enabled": true, "ipv4": {"ip": "203.0.113.7", "dns_ptr": "lb.example.com"},
                "ipv6": {"ip": "2001:db8::7", "dns_ptr": null}},
            "private_net": private, "location": {"id": 1, "name": "fsn1"},
            "load_balancer_type": {"id": 1, "name": body["load_balancer_type"]},
            "algorithm": body["algorithm"], "protection": {"delete": false},
            "services": [], "targets": [], "created": "2026-01-30T23:50:00Z"});
        self.balancers.insert(id, balancer.clone());
        (201, json!({"load_balancer": balancer, "action": self.action("create_load_balancer")}))
    }

    fn act(&mut self, id: u64, action: &str, body: &Value) {
        let balancer = self.balancers.get_mut(&id).expect("it exists");
        let list = |balancer: &mut Value, name: &str| {
            balancer[name].as_array().cloned().unwrap_or_default()
        };
        let mut services = list(balancer, "services");
        let mut targets = list(balancer, "targets");
        match action {
            "delete_service" | "update_service" => {
                services.retain(|one| one["listen_port"] != body["listen_port"]);
            }
            "remove_target" => targets.retain(|one| one["server"]["id"] != body["server"]["id"]),
            "change_algorithm" => balancer["algorithm"] = body.clone(),
            "change_type" => {
                balancer["load_balancer_type"]["name"] = body["load_balancer_type"].clone()
            }
            "attach_to_network" => {
                balancer["private_net"] = json!([{"network": body["network"], "ip": "10.0.0.9"}]);
            }
            _ => {}
        }
        match action {
            "add_service" | "update_service" => services.push(body.clone()),
            "add_target" => targets.push(body.clone()),
            _ => {}
        }
        (balancer["services"], balancer["targets"]) = (json!(services), json!(targets));
    }
}

fn server(id: u64, name: &str, status: &str, private: &str) -> Value {
    json!({"id": id, "name": name, "status": status, "created": "2026-01-30T23:50:00Z",
        "public_net": {"ipv4": {"ip": format!("203.0.113.{id}"), "blocked": false, "dns_ptr": "x"},
            "ipv6": {"ip": "2001:db8:0:1::/64", "blocked": false, "dns_ptr": []}, "floating_ips": []},
        "private_net": [{"network": 4711, "ip": private, "alias_ips": [], "mac_address": "86:00:ff:2a:7d:e1"}],
        "server_type": {"id": 1, "name": "cx22", "cores": 2},
        "datacenter": {"id": 1, "name": "fsn1-dc14", "location": {"id": 1, "name": "fsn1", "network_zone": "eu-central"}},
        "labels": {}, "volumes": []})
}

/// The fake, and the provider that talks with it.
struct World {
    fake: Arc<Lock<Fake>>,
    hetzner: Hetzner,
    tasks: Tasks,
    _directory: tempfile::TempDir,
}

impl World {
    async fn new(more: &str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let servers =
            vec![server(42, "a", "running", "10.0.0.2"), server(43, "b", "off", "10.0.0.3")];
        let fake = Arc::new(Lock::new(Fake { servers, next: 1000, ..Fake::default() }));
        let tasks = Tasks::new("test");
        let (state, group) = (fake.clone(), tasks.clone());
        tasks.spawn("fake", async move {
            while let Ok((stream, _)) = listener.accept().await {
                group.spawn_contained("connection", serve(stream, state.clone()));
            }
        });
        let directory = tempfile::TempDir::new().expect("a directory");
        let path = directory.path().join("config.yaml");
        let text = format!("token: secret\nendpoint: http://{address}/v1\n{more}");
        std::fs::write(&path, text).expect("written");
        let hetzner = Hetzner::open(Some(&path)).expect("a valid file");
        Self { fake, hetzner, tasks, _directory: directory }
    }

    fn fake(&self) -> std::sync::MutexGuard<'_, Fake> {
        self.fake.lock().expect("no panic while held")
    }

    /// The writes since the last look: method, path, body.
    fn writes(&self) -> Vec<String> {
        let log = std::mem::take(&mut self.fake().log);
        log.into_iter().filter(|line| !line.starts_with("GET")).collect()
    }

    async fn end(self) {
        self.tasks.shutdown(Duration::from_secs(5)).await;
    }
}

/// One request on one connection.
async fn serve(mut stream: TcpStream, fake: Arc<Lock<Fake>>) {
    let mut bytes = vec![];
    let (head, mut body) = loop {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, rest)) = text.split_once("\r\n\r\n") {
            break (head.to_ascii_lowercase(), rest.as_bytes().to_vec());
        }
    };
    let field = |name: &str| {
        let line = head.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().to_owned()).unwrap_or_default()
    };
    let length: usize = field("content-length:").parse().unwrap_or(0);
    while body.len() < length && stream.read_buf(&mut body).await.unwrap_or(0) > 0 {}
    let first = String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default().to_owned();
    let mut words = first.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let (status, answer) = match field("authorization:").as_str() {
        "bearer secret" => fake.lock().expect("no panic while held").answer(method, target, &body),
        _ => (401, json!({"error": {"code": "unauthorized", "message": "the token is wrong"}})),
    };
    let answer = if answer.is_null() { String::new() } else { answer.to_string() };
    let text = format!(
        "HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{answer}",
        answer.len()
    );
    let _ = stream.write_all(text.as_bytes()).await;
}

fn node(name: &str, id: &str) -> Node {
    let node = json!({"metadata": {"name": name}, "spec": {"providerID": id}});
    serde_json::from_value(node).expect("a Node")
}

fn service(annotations: Value, spec: Value) -> Service {
    let mut service = json!({"metadata": {"name": "web", "namespace": "ns",
        "uid": "0d2f6a9e-5b1c-4c3a-9d6e-7f8a9b0c1d2e", "annotations": annotations},
        "spec": {"type": "LoadBalancer", "ports": [{"port": 80, "nodePort": 30080, "protocol": "TCP"}]}});
    crate::testing::merge(&mut service["spec"], &spec);
    serde_json::from_value(service).expect("a Service")
}

fn targets(ids: &[u64]) -> Vec<Arc<Target>> {
    let target = |id: &u64| Target {
        name: format!("n{id}"),
        provider_id: format!("{PREFIX}{id}"),
        addresses: vec![],
    };
    ids.iter().map(|id| Arc::new(target(id))).collect()
}

const CONFIG: &str = "network: mynet\nloadBalancer: {location: fsn1}\n";

#[tokio::test]
async fn servers_are_instances() {
    let world = World::new(CONFIG).await;
    let hetzner = &world.hetzner;
    assert!(hetzner.exists(&node("a", "")).await.expect("known"));
    assert!(hetzner.exists(&node("x", "hcloud://43")).await.expect("known"));
    assert!(!hetzner.exists(&node("x", "")).await.expect("known"));
    assert!(!hetzner.exists(&node("a", "hcloud://44")).await.expect("known"));
    assert!(!hetzner.is_shut_down(&node("a", "")).await.expect("known"));
    assert!(hetzner.is_shut_down(&node("b", "hcloud://43")).await.expect("known"));
    let error = hetzner.exists(&node("a", "metal://a")).await.expect_err("another provider's");
    assert!(matches!(error, Error::Foreign { .. }), "{error}");
    let found = hetzner.metadata(&node("a", "")).await.expect("known").expect("some");
    assert_eq!(found.provider_id, "hcloud://42");
    assert_eq!((found.zone.as_str(), found.region.as_str()), ("fsn1-dc14", "fsn1"));
    assert_eq!(found.instance_type, "cx22");
    let found: Vec<_> =
        found.addresses.iter().map(|one| (one.type_.as_str(), one.address.as_str())).collect();
    assert_eq!(
        found,
        [("Hostname", "a"), ("ExternalIP", "203.0.113.42"), ("InternalIP", "10.0.0.2")]
    );
    let lists = world.fake().log.iter().filter(|line| *line == "GET /v1/servers").count();
    assert_eq!(lists, 2, "one list of two pages answers everything");
    world.end().await;
}

#[tokio::test]
async fn an_error_is_no_answer() {
    let world = World::new("").await;
    let refuse = |status, code: &str| {
        world.fake().refusal = Some((status, json!({"error": {"code": code, "message": "no"}})));
    };
    refuse(503, "unavailable");
    let error = world.hetzner.exists(&node("a", "")).await.expect_err("an error").to_string();
    assert!(error.contains("no (unavailable, status 503"), "{error}");
    refuse(429, "rate_limit_exceeded");
    let error = world.hetzner.exists(&node("a", "")).await.expect_err("an error");
    assert!(matches!(error, Error::RetryAfter { after, .. } if after.as_secs() == 60), "{error}");
    assert!(world.hetzner.routes().is_none(), "no network, no routes");
    world.end().await;
}

#[tokio::test]
async fn a_load_balancer_is_made_once_and_changed() {
    let world = World::new(CONFIG).await;
    let hetzner = &world.hetzner;
    let plain = service(json!({}), json!({}));
    assert_eq!(hetzner.get("c", &plain).await.expect("known"), None);
    let found = hetzner.ensure("c", &plain, &targets(&[42, 43])).await.expect("made");
    assert_eq!(found, [ingress("203.0.113.7"), ingress("2001:db8::7")]);
    let made = world.fake().balancers.values().next().cloned().expect("one");
    assert_eq!(made["name"], "a0d2f6a9e5b1c4c3a9d6e7f8a9b0c1d2");
    assert_eq!(made["services"][0]["destination_port"], 30080);
    assert_eq!(made["services"][0]["health_check"]["protocol"], "tcp");
    assert_eq!(made["targets"].as_array().map(Vec::len), Some(2));
    let writes = world.writes();
    assert_eq!(writes.len(), 4, "{writes:#?}");
    assert!(writes[0].contains("\"location\":\"fsn1\""), "{}", writes[0]);

    hetzner.ensure("c", &plain, &targets(&[42, 43])).await.expect("the same");
    assert_eq!(world.writes(), [""; 0], "nothing differs");

    let changed = service(
        json!({"load-balancer.hetzner.cloud/algorithm-type": "least_connections",
            "load-balancer.hetzner.cloud/use-private-ip": "true",
            "load-balancer.hetzner.cloud/hostname": "web.example.com"}),
        json!({"ports": [{"port": 443, "nodePort": 30443}], "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 31000}),
    );
    let found = hetzner.ensure("c", &changed, &targets(&[42])).await.expect("changed");
    assert_eq!(found, [ingress("web.example.com")]);
    let made = world.fake().balancers.values().next().cloned().expect("still one");
    assert_eq!(made["algorithm"]["type"], "least_connections");
    assert_eq!(made["private_net"][0]["network"], 4711);
    assert_eq!(made["services"].as_array().map(Vec::len), Some(1));
    assert_eq!(made["services"][0]["listen_port"], 443);
    assert_eq!(made["services"][0]["health_check"]["http"]["path"], "/healthz");
    assert_eq!(made["services"][0]["health_check"]["port"], 31000);
    assert_eq!(
        made["targets"],
        json!([{"type": "server", "server": {"id": 42}, "use_private_ip": true}])
    );

    let balancers = hetzner.load_balancers().expect("it has them");
    balancers.update("c", &changed, &targets(&[43])).await.expect("updated");
    let made = world.fake().balancers.values().next().cloned().expect("still one");
    assert_eq!(made["targets"][0]["server"]["id"], 43);
    balancers.delete("c", &changed).await.expect("deleted");
    balancers.delete("c", &changed).await.expect("deleted already");
    assert!(world.fake().balancers.is_empty());
    world.end().await;
}

#[tokio::test]
async fn impossible_load_balancers_are_named() {
    let world = World::new("").await;
    let check = async |annotations: Value, spec: Value, expected: &str| {
        let service = service(annotations, spec);
        let error = world.hetzner.ensure("c", &service, &[]).await.expect_err("impossible");
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(json!({}), json!({}), "a load balancer needs a location").await;
    let udp = json!({"ports": [{"port": 53, "nodePort": 30053, "protocol": "UDP"}]});
    check(json!({}), udp, "port 53 has protocol UDP, load balancers have TCP only").await;
    check(json!({}), json!({"ports": [{"port": 80}]}), "port 80 has no node port").await;
    let private = "load-balancer.hetzner.cloud/use-private-ip";
    check(json!({(private): "yes"}), json!({}), "\"yes\" is neither true nor false").await;
    check(json!({(private): "true"}), json!({}), "private addresses need a network").await;
    assert!(world.fake().balancers.is_empty());
    world.end().await;
}

#[tokio::test]
async fn routes_are_the_networks() {
    let world = World::new(CONFIG).await;
    let routes = world.hetzner.routes().expect("a network");
    world.fake().routes = vec![
        json!({"destination": "10.42.9.0/24", "gateway": "10.0.0.99"}),
        json!({"destination": "10.42.2.0/24", "gateway": "10.0.0.2"}),
    ];
    let found = routes.list("c").await.expect("known");
    assert_eq!((found[0].node.as_str(), found[0].is_blackhole), ("", true));
    assert_eq!((found[1].node.as_str(), found[1].is_blackhole), ("a", false));
    let wanted = |node: &str, destination: &str| Route {
        node: node.into(),
        destination: destination.into(),
        ..Route::default()
    };
    routes.create("c", "hint", &wanted("a", "10.42.1.0/24")).await.expect("made");
    routes.create("c", "hint", &wanted("a", "10.42.1.0/24")).await.expect("made already");
    routes.create("c", "hint", &wanted("b", "10.42.2.0/24")).await.expect("moved");
    routes.delete("c", &found[0]).await.expect("deleted");
    routes.delete("c", &found[0]).await.expect("deleted already");
    let now = world.fake().routes.clone();
    assert_eq!(
        now,
        [
            json!({"destination": "10.42.1.0/24", "gateway": "10.0.0.2"}),
            json!({"destination": "10.42.2.0/24", "gateway": "10.0.0.3"}),
        ]
    );
    let error =
        routes.create("c", "hint", &wanted("x", "10.42.3.0/24")).await.expect_err("no server");
    assert!(matches!(error, Error::InstanceNotFound), "{error}");
    world.end().await;
}

#[test]
fn a_token_is_needed() {
    let directory = tempfile::TempDir::new().expect("a directory");
    let path = directory.path().join("config.yaml");
    let check = |text: &str, expected: &str| {
        std::fs::write(&path, text).expect("written");
        let error = Config::read(Some(&path)).expect_err("a mistake").to_string();
        assert!(error.contains(expected), "{error}");
    };
    if std::env::var_os("HCLOUD_TOKEN").is_none() {
        check("network: x", "no token: set it in --cloud-config");
    }
    check("tokens: x", "tokens");
    check("token: x\naddressFamily: ipv5", "ipv5");
    std::fs::write(&path, "token: x\nnetwork: '7'\naddressFamily: dualstack").expect("written");
    let config = Config::read(Some(&path)).expect("valid");
    assert_eq!(config.address_family, Family::DualStack);
    assert_eq!(config.endpoint, "https://api.hetzner.cloud/v1");
}
