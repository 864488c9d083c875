//! Random clusters in a small space, so that most policies concern something.

use std::collections::BTreeMap;
use std::net::IpAddr;

use base::rng::below;
use client::ObjectKey;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use policy::model::Model;
use policy::objects::{PodFacts, PolicyFacts};
use serde_json::{Value, json};

pub const NODE: &str = "here";
pub const NAMES: [&str; 3] = ["x", "y", "z"];
pub const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];
pub const OUTSIDE: [&str; 5] = ["192.0.2.1", "192.0.2.200", "10.0.9.9", "2001:db8::1", "fd00:9::9"];

#[derive(Clone, Default)]
pub struct World {
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
    pub pods: BTreeMap<ObjectKey, Pod>,
    pub policies: BTreeMap<ObjectKey, NetworkPolicy>,
}

pub fn pick<'a>(from: &[&'a str]) -> &'a str {
    from[below(from.len() as u64) as usize]
}

fn chance(of: u64) -> bool {
    below(of) == 0
}

fn labels() -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    for key in ["app", "tier"] {
        if !chance(3) {
            labels.insert(key.to_owned(), pick(&["a", "b", "c"]).to_owned());
        }
    }
    labels
}

fn selector() -> Value {
    match below(5) {
        0 => json!({}),
        1 => json!({"matchExpressions": [{"key": "tier", "operator": "Exists"}]}),
        2 => json!({"matchExpressions": [
            {"key": "app", "operator": pick(&["In", "NotIn"]), "values": ["a", "b"]},
        ]}),
        3 => json!({"matchLabels": {"app": pick(&["a", "b"]), "tier": pick(&["a", "b"])}}),
        _ => json!({"matchLabels": {"app": pick(&["a", "b", "c"])}}),
    }
}

fn block() -> Value {
    let (cidr, except): (&str, &[&str]) = match below(6) {
        0 => ("0.0.0.0/0", &["10.0.0.0/8"]),
        1 => ("10.0.0.0/16", &["10.0.1.0/24", "10.0.0.0/30"]),
        2 => ("192.0.2.0/24", &["192.0.2.128/25"]),
        3 => ("::/0", &["fd00::/9"]),
        4 => ("10.0.0.0/24", &[]),
        _ => ("fd00::/112", &[]),
    };
    match chance(2) {
        true => json!({"cidr": cidr}),
        false => json!({"cidr": cidr, "except": except}),
    }
}

fn peers() -> Vec<Value> {
    let peer = || match below(4) {
        0 => json!({"podSelector": selector()}),
        1 => json!({"namespaceSelector": selector()}),
        2 => json!({"namespaceSelector": selector(), "podSelector": selector()}),
        _ => json!({"ipBlock": block()}),
    };
    // Now and then more than have a set each.
    let count = if chance(12) { 12 } else { below(4) };
    (0..count).map(|_| peer()).collect()
}

fn ports() -> Vec<Value> {
    let port = || {
        let protocol = pick(&PROTOCOLS);
        match below(5) {
            0 => json!({"protocol": protocol}),
            1 => json!({"protocol": protocol, "port": pick(&["web", "dns"])}),
            2 => json!({"protocol": protocol, "port": 79 + below(3), "endPort": 82 + below(4)}),
            _ => json!({"protocol": protocol, "port": 79 + below(6)}),
        }
    };
    (0..below(4)).map(|_| port()).collect()
}

fn policy(namespace: &str, name: &str) -> NetworkPolicy {
    let rules = |peers_are: &str| {
        let rule = || json!({peers_are: peers(), "ports": ports()});
        (0..below(3)).map(|_| rule()).collect::<Vec<_>>()
    };
    let types = match below(4) {
        0 => json!(["Ingress"]),
        1 => json!(["Egress"]),
        2 => json!(["Ingress", "Egress"]),
        _ => json!([]),
    };
    let policy = json!({
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "podSelector": selector(),
            "policyTypes": types,
            "ingress": rules("from"),
            "egress": rules("to"),
        },
    });
    serde_json::from_value(with_type("networking.k8s.io/v1", "NetworkPolicy", policy))
        .expect("a policy")
}

pub fn with_type(version: &str, kind: &str, mut object: Value) -> Value {
    object["apiVersion"] = version.into();
    object["kind"] = kind.into();
    object
}

fn pod(namespace: &str, number: usize) -> Pod {
    let phase = if chance(8) { "Succeeded" } else { "Running" };
    let ips =
        [json!({"ip": format!("10.0.0.{number}")}), json!({"ip": format!("fd00::{number:x}")})];
    let port = |name: &str, protocol: &str, number: u64| json!({"name": name, "protocol": protocol, "containerPort": number});
    let listed = [
        port("web", pick(&PROTOCOLS), 79 + below(6)),
        port("dns", pick(&PROTOCOLS), 79 + below(6)),
    ];
    let pod = json!({
        "metadata": {
            "namespace": namespace, "name": format!("p{number}"),
            "uid": format!("{number}"), "labels": labels(),
        },
        "spec": {
            "nodeName": pick(&[NODE, "there"]),
            "hostNetwork": chance(12),
            "containers": [{"name": "c", "ports": listed}],
        },
        "status": {"phase": phase, "podIPs": ips},
    });
    serde_json::from_value(with_type("v1", "Pod", pod)).expect("a pod")
}

impl World {
    /// A random change of one object; returns what to tell a model.
    pub fn change(&mut self) -> Change {
        let namespace = pick(&NAMES).to_owned();
        match below(10) {
            0 => {
                let labels = (!chance(4)).then(labels);
                match labels.clone() {
                    Some(labels) => self.namespaces.insert(namespace.clone(), labels),
                    None => self.namespaces.remove(&namespace),
                };
                Change::Namespace(namespace)
            }
            1..4 => {
                let name = format!("policy{}", below(4));
                let key = ObjectKey::new(&namespace, &name);
                match chance(4) {
                    true => self.policies.remove(&key),
                    false => self.policies.insert(key.clone(), policy(&namespace, &name)),
                };
                Change::Policy(key)
            }
            _ => {
                // A number belongs to one namespace, so that no two pods have the same address.
                let number = 1 + below(24) as usize;
                let namespace = NAMES[number % NAMES.len()];
                let key = ObjectKey::new(namespace, &format!("p{number}"));
                match chance(5) {
                    true => self.pods.remove(&key),
                    false => self.pods.insert(key.clone(), pod(namespace, number)),
                };
                Change::Pod(key)
            }
        }
    }

    pub fn tell(&self, model: &mut Model, change: &Change) {
        match change {
            Change::Namespace(name) => {
                let labels = self.namespaces.get(name).map(|labels| labels.iter().collect());
                model.put_namespace(name, labels);
            }
            Change::Pod(key) => {
                let pod = self.pods.get(key).and_then(|pod| PodFacts::of(pod, NODE));
                model.put_pod(key, pod);
            }
            Change::Policy(key) => {
                model.put_policy(key, self.policies.get(key).map(PolicyFacts::of))
            }
        }
    }

    /// A model that was told everything at once, policies first.
    pub fn fresh(&self) -> Model {
        let mut model = Model::default();
        self.policies.keys().for_each(|key| self.tell(&mut model, &Change::Policy(key.clone())));
        self.pods.keys().for_each(|key| self.tell(&mut model, &Change::Pod(key.clone())));
        let names = self.namespaces.keys();
        names.for_each(|name| self.tell(&mut model, &Change::Namespace(name.clone())));
        model
    }

    /// Addresses worth a packet: pods', and others.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let pods = self.pods.values().filter_map(|pod| PodFacts::of(pod, NODE));
        let outside = OUTSIDE.iter().map(|text| text.parse().expect("an address"));
        pods.flat_map(|pod| pod.addresses).chain(outside).collect()
    }
}

pub enum Change {
    Namespace(String),
    Pod(ObjectKey),
    Policy(ObjectKey),
}
