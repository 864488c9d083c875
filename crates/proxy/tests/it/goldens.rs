//! The rules as text. Review changes here like code: these are the rules for packets.

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use net::nft::{Family, Ruleset};
use proxy::model::{Facts, POD_TABLE, TABLE, ruleset};
use serde_json::json;

use crate::fixtures::{facts, service, slice};

/// Compares only the rules that a Service adds to the empty ruleset, of one family.
fn check(name: &str, services: &[Service], slices: &[EndpointSlice], facts: &Facts) {
    let text = added(services, slices, facts, Family::Ip);
    insta::assert_snapshot!(name, text);
}

fn added(services: &[Service], slices: &[EndpointSlice], facts: &Facts, family: Family) -> String {
    let key = (family, TABLE.to_owned());
    let frame = ruleset::<Service, EndpointSlice>(&[], &[], facts).tables.remove(&key);
    let frame = frame.expect("a table");
    let mut table = ruleset(services, slices, facts).tables.remove(&key).expect("a table");
    table.comment = None;
    table.chains.retain(|name, chain| frame.chains.get(name) != Some(chain));
    table.sets.retain(|name, set| frame.sets.get(name) != Some(set));
    let mut only = Ruleset::default();
    only.tables.insert(key, table);
    only.to_string()
}

#[test]
fn without_services() {
    let rules = ruleset::<Service, EndpointSlice>(&[], &[], &facts());
    assert!(rules.tables.contains_key(&(Family::Ip, POD_TABLE.into())));
    insta::assert_snapshot!("without_services", rules.to_string());
}

#[test]
fn cluster_ip_with_ready_and_unready_endpoints() {
    let spec = json!({"clusterIP": "10.43.0.41", "ports": [{"name": "p80", "port": 80}]});
    let endpoints = ["10.42.0.2", "10.42.1.2@there", "!10.42.1.3@there"];
    check(
        "cluster_ip",
        &[service("web", spec)],
        &[slice("web", ("p80", "TCP", 8080), &endpoints)],
        &facts(),
    );
}

#[test]
fn no_endpoints_is_refused() {
    let spec = json!({
        "type": "NodePort", "clusterIP": "10.43.0.42", "externalIPs": ["192.0.2.9"],
        "ports": [{"port": 53, "protocol": "UDP", "nodePort": 30053}],
    });
    check("no_endpoints", &[service("dns", spec)], &[], &facts());
}

#[test]
fn node_port_with_affinity() {
    let spec = json!({
        "type": "NodePort", "clusterIP": "10.43.0.43", "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 90}},
        "ports": [{"name": "http", "port": 80, "nodePort": 30080}],
    });
    let slices = [slice("web", ("http", "TCP", 8080), &["10.42.0.2", "10.42.0.3"])];
    check("node_port_affinity", &[service("web", spec)], &slices, &facts());
}

#[test]
fn load_balancer_with_local_policies_and_source_ranges() {
    let mut balancer = service(
        "web",
        json!({
            "type": "LoadBalancer", "clusterIP": "10.43.0.44",
            "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local",
            "loadBalancerSourceRanges": ["198.51.100.0/24", "203.0.113.7/32", "fd00::/8"],
            "ports": [{"name": "http", "port": 80, "nodePort": 30080}],
        }),
    );
    let status = json!({"loadBalancer": {"ingress": [
        {"ip": "192.0.2.10"}, {"ip": "192.0.2.11", "ipMode": "Proxy"}, {"hostname": "lb.example"},
    ]}});
    balancer.status = Some(serde_json::from_value(status).expect("a status"));
    let services = [balancer];
    let both = [slice("web", ("http", "TCP", 8080), &["10.42.0.2", "10.42.1.2@there"])];
    check("load_balancer_local", &services, &both, &facts());
    let far = [slice("web", ("http", "TCP", 8080), &["10.42.1.2@there"])];
    check("load_balancer_local_without_local_endpoints", &services, &far, &facts());
}

#[test]
fn both_families() {
    let spec = json!({
        "clusterIP": "10.43.0.45", "clusterIPs": ["10.43.0.45", "fd43::45"],
        "ports": [{"port": 80}],
    });
    let services = [service("web", spec)];
    let slices = [
        slice("web", ("", "TCP", 8080), &["10.42.0.2"]),
        slice("web", ("", "TCP", 8080), &["fd42::2"]),
    ];
    insta::assert_snapshot!("ipv6", added(&services, &slices, &facts(), Family::Ip6));
}

#[test]
fn services_of_other_proxies_are_ignored() {
    let mut foreign = service("dns", json!({"clusterIP": "10.43.0.10", "ports": [{"port": 53}]}));
    let label = ("service.kubernetes.io/service-proxy-name".to_owned(), "other".to_owned());
    foreign.metadata.labels = Some([label].into());
    let headless = service("db", json!({"clusterIP": "None", "ports": [{"port": 5432}]}));
    let elsewhere = service("ext", json!({"type": "ExternalName", "externalName": "example.org"}));
    let all = [foreign, headless, elsewhere];
    let none = ruleset::<Service, EndpointSlice>(&[], &[], &facts());
    assert_eq!(ruleset::<_, EndpointSlice>(&all, &[], &facts()), none);
}
