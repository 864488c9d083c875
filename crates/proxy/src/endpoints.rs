//! Collects endpoints by service port from slices, and selects those that a Service's traffic may use.
//!
//! Ready endpoints are used. Without ready ones, endpoints that still serve while they terminate
//! are used: a Service whose last pods are terminating answers to the end. Zone and node hints
//! narrow the cluster-wide choice only when every ready endpoint has a hint and some fit this node.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::discovery::v1 as discovery;
use net::nft::Ip;

use crate::services::{PortName, ServicePort, protocol};

const SERVICE_LABEL: &str = "kubernetes.io/service-name";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: SocketAddr,
    /// On this node.
    pub local: bool,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    zones: Vec<String>,
    nodes: Vec<String>,
}

impl Endpoint {
    fn is_last_resort(&self) -> bool {
        self.serving && self.terminating
    }
}

/// This node's name and zone, for hints.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    pub node: &'a str,
    pub zone: Option<&'a str>,
}

pub type Endpoints = BTreeMap<PortName, Vec<Endpoint>>;

/// All endpoints of one family. An address that is in two slices counts once.
pub fn collect<S>(slices: &[S], ip: Ip, node: &str) -> Endpoints
where
    S: Borrow<discovery::EndpointSlice>,
{
    let mut found: BTreeMap<PortName, BTreeMap<SocketAddr, Endpoint>> = BTreeMap::new();
    for slice in slices.iter().map(Borrow::borrow) {
        if slice.address_type != family_name(ip) {
            continue;
        }
        let Some(service) = service_name(slice) else { continue };
        for port in slice.ports.iter().flatten() {
            let (Some(number), Some(proto)) =
                (port.port.and_then(|n| u16::try_from(n).ok()), protocol(port.protocol.as_deref()))
            else {
                continue;
            };
            let name = PortName {
                namespace: slice.metadata.namespace.clone().unwrap_or_default(),
                service: service.to_owned(),
                port: port.name.clone().unwrap_or_default(),
                proto,
            };
            let group = found.entry(name).or_default();
            let endpoints =
                slice.endpoints.iter().flatten().filter_map(|e| endpoint(e, ip, number, node));
            for endpoint in endpoints {
                group.entry(endpoint.address).or_insert(endpoint);
            }
        }
    }
    found.into_iter().map(|(name, group)| (name, group.into_values().collect())).collect()
}

/// The Service that a slice belongs to.
pub fn service_name(slice: &discovery::EndpointSlice) -> Option<&str> {
    slice.metadata.labels.as_ref()?.get(SERVICE_LABEL).map(String::as_str)
}

fn family_name(ip: Ip) -> &'static str {
    match ip {
        Ip::V4 => "IPv4",
        Ip::V6 => "IPv6",
    }
}

/// `None` unless it is a valid endpoint of this family: an invalid one would make the kernel refuse
/// all rules.
fn endpoint(of: &discovery::Endpoint, ip: Ip, port: u16, node: &str) -> Option<Endpoint> {
    // Upstream: only the first address is used; more are forbidden for new slices.
    let address: IpAddr = of.addresses.first()?.parse().ok()?;
    if Ip::of(&address) != ip || address.is_unspecified() || port == 0 {
        return None;
    }
    let conditions = of.conditions.as_ref();
    let hints = of.hints.as_ref();
    Some(Endpoint {
        address: SocketAddr::new(address, port),
        local: of.node_name.as_deref() == Some(node),
        ready: conditions.and_then(|c| c.ready).unwrap_or(true),
        serving: conditions.and_then(|c| c.serving).unwrap_or(true),
        terminating: conditions.and_then(|c| c.terminating).unwrap_or(false),
        zones: hints
            .and_then(|h| h.for_zones.as_ref())
            .map(|zones| zones.iter().map(|zone| zone.name.clone()).collect())
            .unwrap_or_default(),
        nodes: hints
            .and_then(|h| h.for_nodes.as_ref())
            .map(|nodes| nodes.iter().map(|node| node.name.clone()).collect())
            .unwrap_or_default(),
    })
}

/// The endpoints that one service port may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usable<'a> {
    pub cluster: Vec<&'a Endpoint>,
    pub local: Vec<&'a Endpoint>,
    /// The endpoints of either list: each needs a chain.
    pub reachable: Vec<&'a Endpoint>,
    /// Whether any node has usable endpoints: without them traffic is refused, otherwise silently dropped.
    pub any: bool,
}

impl<'a> Usable<'a> {
    pub fn of(service: &ServicePort, endpoints: &'a [Endpoint], place: Place<'_>) -> Self {
        let mut usable = Self::default();
        if service.uses_cluster_endpoints() {
            let hint = Hint::common(endpoints, place);
            usable.cluster = or_last_resort(endpoints, |e| hint.allows(e, place), |_| true);
            usable.any = !usable.cluster.is_empty();
        }
        if service.uses_local_endpoints() {
            usable.local = or_last_resort(endpoints, |e| e.local, |e| e.local);
            usable.any |= endpoints.iter().any(|e| e.ready || e.is_last_resort());
        }
        let in_use = |e: &&Endpoint| {
            let is = |other: &&Endpoint| other.address == e.address;
            usable.cluster.iter().any(is) || usable.local.iter().any(is)
        };
        usable.reachable = endpoints.iter().filter(in_use).collect();
        usable
    }
}

fn or_last_resort(
    endpoints: &[Endpoint],
    fits: impl Fn(&Endpoint) -> bool,
    fits_last_resort: impl Fn(&Endpoint) -> bool,
) -> Vec<&Endpoint> {
    let ready: Vec<_> = endpoints.iter().filter(|e| e.ready && fits(e)).collect();
    if !ready.is_empty() {
        return ready;
    }
    endpoints.iter().filter(|e| e.is_last_resort() && fits_last_resort(e)).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hint {
    None,
    Zone,
    Node,
}

impl Hint {
    /// The hints to apply: all ready endpoints have one, and at least one fits this place.
    fn common(endpoints: &[Endpoint], place: Place<'_>) -> Self {
        let ready: Vec<&Endpoint> = endpoints.iter().filter(|e| e.ready).collect();
        for hint in [Self::Node, Self::Zone] {
            let hinted = ready.iter().all(|e| !hint.of(e).is_empty());
            if hinted && ready.iter().any(|e| hint.allows(e, place)) {
                return hint;
            }
        }
        Self::None
    }

    fn of(self, endpoint: &Endpoint) -> &[String] {
        match self {
            Self::None => &[],
            Self::Zone => &endpoint.zones,
            Self::Node => &endpoint.nodes,
        }
    }

    fn allows(self, endpoint: &Endpoint, place: Place<'_>) -> bool {
        let wanted = match self {
            Self::None => return true,
            Self::Zone => place.zone,
            Self::Node => Some(place.node),
        };
        wanted.is_some_and(|wanted| self.of(endpoint).iter().any(|name| name == wanted))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(endpoints: Value) -> discovery::EndpointSlice {
        let slice = json!({
            "metadata": {"name": "web-1", "namespace": "ns", "labels": {SERVICE_LABEL: "web"}},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
            "endpoints": endpoints,
        });
        serde_json::from_value(slice).expect("a slice")
    }

    fn service(spec: Value) -> ServicePort {
        let mut service = json!({
            "metadata": {"name": "web", "namespace": "ns"},
            "spec": {"clusterIP": "10.43.0.1", "ports": [{"name": "http", "port": 80}]},
        });
        for (key, value) in spec.as_object().expect("fields") {
            service["spec"][key] = value.clone();
        }
        let service = serde_json::from_value(service).expect("a service");
        ServicePort::of(&service, Ip::V4).remove(0)
    }

    /// Expects the last numbers of the cluster-wide and local addresses, and whether there are any.
    fn check(spec: Value, endpoints: Value, cluster: &[u8], local: &[u8], any: bool) {
        let found = collect(&[slice(endpoints)], Ip::V4, "here");
        let service = service(spec);
        let place = Place { node: "here", zone: Some("a") };
        let usable = Usable::of(&service, &found[&service.name], place);
        let last = |list: &[&Endpoint]| -> Vec<u8> {
            list.iter()
                .map(|e| match e.address.ip() {
                    IpAddr::V4(v4) => v4.octets()[3],
                    IpAddr::V6(_) => 0,
                })
                .collect()
        };
        assert_eq!(
            (last(&usable.cluster), last(&usable.local), usable.any),
            (cluster.to_vec(), local.to_vec(), any)
        );
    }

    fn at(last: u8, node: &str, conditions: Value) -> Value {
        json!({"addresses": [format!("10.42.0.{last}")], "nodeName": node, "conditions": conditions})
    }

    #[test]
    fn ready_endpoints_come_before_serving_ones() {
        let none = json!({});
        let ready = json!({"ready": true});
        let leaving = json!({"ready": false, "serving": true, "terminating": true});
        let broken = json!({"ready": false, "serving": false});
        let two = json!([at(1, "here", ready.clone()), at(2, "there", none.clone())]);
        check(json!({}), two.clone(), &[1, 2], &[], true);
        let mixed = json!([at(1, "here", leaving.clone()), at(2, "there", ready.clone())]);
        check(json!({}), mixed.clone(), &[2], &[], true);
        let last = json!([at(1, "here", leaving.clone()), at(2, "there", broken.clone())]);
        check(json!({}), last, &[1], &[], true);
        check(json!({}), json!([at(1, "here", broken.clone())]), &[], &[], false);
        let local = json!({"internalTrafficPolicy": "Local"});
        check(local.clone(), two, &[], &[1], true);
        check(local.clone(), mixed, &[], &[1], true);
        check(local, json!([at(2, "there", ready)]), &[], &[], true);
    }

    #[test]
    fn hints_narrow_only_when_all_have_them() {
        let hinted = |last: u8, hints: Value| {
            let address = format!("10.42.0.{last}");
            json!({"addresses": [address], "nodeName": "there", "hints": hints})
        };
        let zone = |name: &str| json!({"forZones": [{"name": name}]});
        let node = |name: &str| json!({"forNodes": [{"name": name}], "forZones": [{"name": "a"}]});
        let spec = || json!({});
        check(spec(), json!([hinted(1, zone("a")), hinted(2, zone("b"))]), &[1], &[], true);
        check(spec(), json!([hinted(1, zone("b")), hinted(2, zone("c"))]), &[1, 2], &[], true);
        check(spec(), json!([hinted(1, zone("a")), hinted(2, json!({}))]), &[1, 2], &[], true);
        check(spec(), json!([hinted(1, node("here")), hinted(2, node("x"))]), &[1], &[], true);
    }
}
