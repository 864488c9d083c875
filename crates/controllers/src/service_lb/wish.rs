//! The fields of Services and EndpointSlices that decide on load balancers. Pure.

use std::collections::BTreeSet;
use std::net::IpAddr;

use api::load_balancers;
use client::{ObjectKey, Projection};
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Service, ServiceSpec};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use machinery::ObjectMeta;

/// The class of Services that get the addresses of nodes.
pub const NODE_CLASS: &str = "decapod.io/node";
/// The class of Services that get an address of a pool.
pub const POOL_CLASS: &str = "decapod.io/pool";
pub const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";
/// Asks for addresses of a pool, one per family, separated by commas.
const REQUESTED: &str = "decapod.io/load-balancer-ips";
/// Services with the same value may have the same address, if their ports differ.
const SHARE: &str = "decapod.io/load-balancer-share";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// A port of a load balancer: the protocol and the number.
pub type Port = (String, u16);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Nodes,
    Pools,
}

/// What a Service wants of its load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    pub source: Source,
    pub ports: BTreeSet<Port>,
    /// Whether IPv4, for each family of the Service, in its order.
    pub families: Vec<bool>,
    /// Whether each family needs an address.
    pub needs_all_families: bool,
    /// Only nodes with ready endpoints take its traffic.
    pub is_local: bool,
    /// When the Service was created, in seconds: older Services come first.
    pub created: i64,
    pub requested: BTreeSet<IpAddr>,
    pub share: Option<String>,
    /// The selector, as text: local Services share an address only if they have the same pods.
    pub selector: String,
    /// The addresses in the Service's status.
    pub has: BTreeSet<IpAddr>,
}

impl Wish {
    /// `None` if the Service wants no load balancer, or that of another controller.
    pub fn of(service: &Service, has_pools: bool) -> Option<Self> {
        let spec = service.spec.as_ref()?;
        if service.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let source = source(spec, has_pools)?;
        let port = |port: &k8s_openapi::api::core::v1::ServicePort| {
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".into());
            Some((protocol, u16::try_from(port.port).ok()?))
        };
        let families: Vec<bool> =
            spec.ip_families.iter().flatten().map(|family| family == "IPv4").collect();
        let created = service.metadata.creation_timestamp.as_ref();
        Some(Self {
            source,
            ports: spec.ports.iter().flatten().filter_map(port).collect(),
            families: if families.is_empty() { vec![true] } else { families },
            needs_all_families: spec.ip_family_policy.as_deref() == Some("RequireDualStack"),
            is_local: spec.external_traffic_policy.as_deref() == Some("Local"),
            created: created.map_or(0, |time| time.0.as_second()),
            requested: requested(&service.metadata, spec),
            share: annotation(&service.metadata, SHARE).map(ToOwned::to_owned),
            selector: format!("{:?}", spec.selector),
            has: addresses(service).collect(),
        })
    }

    /// Whether both may have one address.
    pub fn shares_with(&self, other: &Self) -> bool {
        let has_key = self.share.is_some() && self.share == other.share;
        let same_pods = !self.is_local && !other.is_local
            || self.is_local == other.is_local && self.selector == other.selector;
        has_key && same_pods && self.ports.is_disjoint(&other.ports)
    }
}

/// Where the addresses come from; `None` if another controller serves the Service.
fn source(spec: &ServiceSpec, has_pools: bool) -> Option<Source> {
    if spec.type_.as_deref() != Some("LoadBalancer") {
        return None;
    }
    match spec.load_balancer_class.as_deref() {
        None | Some("") if has_pools => Some(Source::Pools),
        None | Some("" | NODE_CLASS) => Some(Source::Nodes),
        Some(POOL_CLASS) => Some(Source::Pools),
        Some(_) => None,
    }
}

/// Whether a load balancer of ours may be left: the Service has the finalizer and wants no load balancer.
pub fn needs_cleanup(service: &Service) -> bool {
    let finalizers = service.metadata.finalizers.as_ref();
    if !finalizers.is_some_and(|all| all.iter().any(|one| one == FINALIZER)) {
        return false;
    }
    let Some(spec) = &service.spec else { return true };
    spec.type_.as_deref() != Some("LoadBalancer")
        || service.metadata.deletion_timestamp.is_some() && source(spec, false).is_some()
}

/// The field is for one address; the annotation wins.
fn requested(metadata: &ObjectMeta, spec: &ServiceSpec) -> BTreeSet<IpAddr> {
    let text = annotation(metadata, REQUESTED).or(spec.load_balancer_ip.as_deref());
    text.into_iter()
        .flat_map(|text| text.split(','))
        .filter_map(|one| one.trim().parse().ok())
        .collect()
}

fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    let text = metadata.annotations.as_ref()?.get(name)?.trim();
    (!text.is_empty()).then_some(text)
}

pub fn ingress(service: &Service) -> &[LoadBalancerIngress] {
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    balancer.and_then(|balancer| balancer.ingress.as_deref()).unwrap_or_default()
}

fn addresses(service: &Service) -> impl Iterator<Item = IpAddr> {
    ingress(service).iter().filter_map(|entry| entry.ip.as_ref()?.parse().ok())
}

/// The nodes with ready endpoints of a slice.
#[derive(Debug)]
pub struct Places {
    pub nodes: BTreeSet<Box<str>>,
}

impl Projection<EndpointSlice> for Places {
    fn of(slice: &EndpointSlice) -> Self {
        Self { nodes: load_balancers::ready_nodes(slice) }
    }

    fn concerns(slice: &EndpointSlice) -> bool {
        slice.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(SERVICE_NAME))
    }
}

/// The key of the Service that a slice's labels name.
pub fn service_of(header: &client::Header) -> Option<ObjectKey> {
    let service = header.labels.get(SERVICE_NAME)?;
    Some(ObjectKey::new(&header.key.namespace, service))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn service(spec: Value, finalizers: &[&str], is_deleting: bool) -> Service {
        let deleted = is_deleting.then_some("2026-01-01T00:00:00Z");
        let object = json!({"metadata": {"name": "s", "namespace": "ns",
            "finalizers": finalizers, "deletionTimestamp": deleted}, "spec": spec});
        from_value(object).expect("a Service")
    }

    #[test]
    fn the_class_names_the_source() {
        let check = |class: Value, has_pools: bool, expected: Option<Source>| {
            let spec = json!({"type": "LoadBalancer", "loadBalancerClass": class});
            let wish = Wish::of(&service(spec, &[], false), has_pools);
            assert_eq!(wish.map(|wish| wish.source), expected, "{class} {has_pools}");
        };
        check(json!(null), false, Some(Source::Nodes));
        check(json!(null), true, Some(Source::Pools));
        check(json!("decapod.io/node"), true, Some(Source::Nodes));
        check(json!("decapod.io/pool"), false, Some(Source::Pools));
        check(json!("metallb.io/x"), true, None);
        let other = service(json!({"type": "NodePort"}), &[], false);
        assert_eq!(Wish::of(&other, true), None);
    }

    #[test]
    fn only_our_leftovers_are_cleaned() {
        let check = |spec: Value, finalizers: &[&str], is_deleting: bool, expected: bool| {
            let service = service(spec.clone(), finalizers, is_deleting);
            assert_eq!(needs_cleanup(&service), expected, "{spec} {is_deleting}");
        };
        let balanced = json!({"type": "LoadBalancer"});
        let foreign = json!({"type": "LoadBalancer", "loadBalancerClass": "x/y"});
        check(balanced.clone(), &[FINALIZER], false, false);
        check(balanced.clone(), &[FINALIZER], true, true);
        check(balanced, &["other"], true, false);
        check(foreign, &[FINALIZER], true, false);
        check(json!({"type": "ClusterIP"}), &[FINALIZER], false, true);
        check(json!({"type": "ClusterIP"}), &[], false, false);
    }

    #[test]
    fn sharing_needs_a_key_other_ports_and_the_same_nodes() {
        let wish = |port: u16, key: Option<&str>, policy: &str, app: &str| {
            let object = json!({"metadata": {"name": "s", "annotations": {(SHARE): key.unwrap_or("")}},
                "spec": {"type": "LoadBalancer", "ports": [{"port": port}], "selector": {"app": app},
                    "externalTrafficPolicy": policy}});
            Wish::of(&from_value(object).expect("a Service"), true).expect("it wants one")
        };
        let first = wish(80, Some("k"), "Cluster", "a");
        assert!(first.shares_with(&wish(81, Some("k"), "Cluster", "b")));
        assert!(!first.shares_with(&wish(80, Some("k"), "Cluster", "b")), "the same port");
        assert!(!first.shares_with(&wish(81, Some("x"), "Cluster", "b")), "another key");
        assert!(!first.shares_with(&wish(81, None, "Cluster", "b")), "no key");
        assert!(!first.shares_with(&wish(81, Some("k"), "Local", "a")), "other nodes");
        let local = wish(80, Some("k"), "Local", "a");
        assert!(local.shares_with(&wish(81, Some("k"), "Local", "a")));
        assert!(!local.shares_with(&wish(81, Some("k"), "Local", "b")), "other pods");
    }
}
