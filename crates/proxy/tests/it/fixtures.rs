//! Services and slices in a few words.

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use proxy::model::{Facts, NodePorts};
use serde_json::{Value, json};

/// `ns/name` with these fields in its spec.
pub fn service(name: &str, spec: Value) -> Service {
    let object = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": spec});
    serde_json::from_value(object).expect("a service")
}

/// The slice of `ns/service`. Addresses with `!` in front are not ready; the node follows `@`.
pub fn slice(service: &str, port: (&str, &str, u16), addresses: &[&str]) -> EndpointSlice {
    let v4 = addresses.iter().all(|address| !address.contains("::"));
    let endpoints: Vec<Value> = addresses.iter().map(|text| endpoint(text)).collect();
    let (name, protocol, number) = port;
    let object = json!({
        "metadata": {
            "name": format!("{service}-1"),
            "namespace": "ns",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": if v4 { "IPv4" } else { "IPv6" },
        "ports": [{"name": name, "protocol": protocol, "port": number}],
        "endpoints": endpoints,
    });
    serde_json::from_value(object).expect("a slice")
}

fn endpoint(text: &str) -> Value {
    let ready = !text.starts_with('!');
    let (address, node) = text.trim_start_matches('!').split_once('@').unwrap_or((text, "here"));
    json!({
        "addresses": [address.trim_start_matches('!')],
        "nodeName": node,
        "conditions": {"ready": ready, "serving": ready},
    })
}

pub fn facts() -> Facts {
    let nets = |texts: &[&str]| -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().expect("a network")).collect()
    };
    Facts {
        node: "here".into(),
        pod_cidrs: nets(&["10.42.0.0/24"]),
        cluster_cidrs: nets(&["10.42.0.0/16", "fd42::/56"]),
        service_cidrs: nets(&["10.43.0.0/16", "fd43::/112"]),
        node_ports: NodePorts::Only(vec!["192.168.50.1".parse().expect("an address")]),
        ..Facts::default()
    }
}
