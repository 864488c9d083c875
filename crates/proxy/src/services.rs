//! The fields of a Service that the proxy needs, one record per port and address family.
//!
//! As upstream, the proxy ignores Services of another proxy (label
//! `service.kubernetes.io/service-proxy-name`), headless Services and ExternalName Services.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Service, ServiceSpec};
use net::nft::{Ip, Proto};
use release::features::{self, Feature};

pub const PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";
const SOURCE_RANGES_ANNOTATION: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
const DEFAULT_AFFINITY_SECONDS: i32 = 10_800;

/// A Service's port. Includes the protocol, because two ports may have the same number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortName {
    pub namespace: String,
    pub service: String,
    /// Empty for the unnamed port.
    pub port: String,
    pub proto: Proto,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    pub name: PortName,
    pub cluster_ip: IpAddr,
    pub port: u16,
    pub node_port: Option<u16>,
    pub external_ips: Vec<IpAddr>,
    pub load_balancer_ips: Vec<IpAddr>,
    /// The clients that may use the load balancer addresses; empty: all.
    pub source_ranges: Vec<IpNet>,
    /// How long a client keeps its endpoint.
    pub affinity: Option<Duration>,
    pub internal_local: bool,
    pub external_local: bool,
}

impl ServicePort {
    /// The ports of a Service in one family; none without an address in it, or if another proxy serves it.
    pub fn of(service: &Service, ip: Ip) -> Vec<Self> {
        let Some(spec) = service.spec.as_ref().filter(|_| !is_foreign(service)) else {
            return Vec::new();
        };
        let Some(cluster_ip) = cluster_ip(spec, ip) else { return Vec::new() };
        let in_family = |texts: &[String]| addresses(texts.iter().map(String::as_str), ip);
        let allowed = features::enabled(Feature::AllowServiceExternalIPs);
        let external_ips = spec.external_ips.as_deref().filter(|_| allowed).unwrap_or_default();
        let external_ips = in_family(external_ips);
        let load_balancer_ips = load_balancer_ips(service, ip);
        let source_ranges = source_ranges(service, spec, ip);
        let affinity = affinity(spec);
        let port_of = |port: &k8s_openapi::api::core::v1::ServicePort| {
            Some(Self {
                name: PortName {
                    namespace: service.metadata.namespace.clone().unwrap_or_default(),
                    service: service.metadata.name.clone().unwrap_or_default(),
                    port: port.name.clone().unwrap_or_default(),
                    proto: protocol(port.protocol.as_deref())?,
                },
                cluster_ip,
                port: u16::try_from(port.port).ok().filter(|n| *n > 0)?,
                node_port: port.node_port.and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0),
                external_ips: external_ips.clone(),
                load_balancer_ips: load_balancer_ips.clone(),
                source_ranges: source_ranges.clone(),
                affinity,
                internal_local: spec.internal_traffic_policy.as_deref() == Some("Local"),
                external_local: spec.external_traffic_policy.as_deref() == Some("Local"),
            })
        };
        spec.ports.iter().flatten().filter_map(port_of).collect()
    }

    /// Whether the port is reachable by more than the cluster IP.
    pub fn is_external(&self) -> bool {
        self.node_port.is_some()
            || !self.external_ips.is_empty()
            || !self.load_balancer_ips.is_empty()
    }

    /// Also true for an external policy of Local: traffic from the cluster's own pods and nodes to
    /// an external address uses all endpoints.
    pub fn uses_cluster_endpoints(&self) -> bool {
        !self.internal_local || self.is_external()
    }

    pub fn uses_local_endpoints(&self) -> bool {
        self.internal_local || (self.external_local && self.is_external())
    }
}

/// TCP by default; none for an unknown protocol.
pub fn protocol(name: Option<&str>) -> Option<Proto> {
    match name.unwrap_or("TCP") {
        "TCP" => Some(Proto::Tcp),
        "UDP" => Some(Proto::Udp),
        "SCTP" => Some(Proto::Sctp),
        _ => None,
    }
}

fn is_foreign(service: &Service) -> bool {
    service.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(PROXY_NAME_LABEL))
}

fn cluster_ip(spec: &ServiceSpec, ip: Ip) -> Option<IpAddr> {
    if spec.type_.as_deref() == Some("ExternalName") {
        return None;
    }
    // Headless Services have "None", which is not an address.
    let many = spec.cluster_ips.iter().flatten();
    let texts = many.chain(&spec.cluster_ip).map(String::as_str);
    addresses(texts, ip).first().copied()
}

fn addresses<'a>(texts: impl Iterator<Item = &'a str>, ip: Ip) -> Vec<IpAddr> {
    let parsed = texts.filter_map(|text| text.parse::<IpAddr>().ok());
    parsed.filter(|address| Ip::of(address) == ip).collect()
}

/// Leaves out addresses of mode Proxy: their load balancer translates by itself.
fn load_balancer_ips(service: &Service, ip: Ip) -> Vec<IpAddr> {
    let ingress = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref())
        .and_then(|balancer| balancer.ingress.as_deref())
        .unwrap_or_default();
    let ours = ingress.iter().filter(|entry| entry.ip_mode.as_deref() != Some("Proxy"));
    addresses(ours.filter_map(|entry| entry.ip.as_deref()), ip)
}

fn source_ranges(service: &Service, spec: &ServiceSpec, ip: Ip) -> Vec<IpNet> {
    let annotation = service
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(SOURCE_RANGES_ANNOTATION));
    let texts: Vec<&str> = match (&spec.load_balancer_source_ranges, annotation) {
        (Some(ranges), _) if !ranges.is_empty() => ranges.iter().map(String::as_str).collect(),
        (_, Some(list)) => list.split(',').collect(),
        _ => Vec::new(),
    };
    let nets = texts.iter().filter_map(|text| text.trim().parse::<IpNet>().ok());
    let nets: BTreeSet<IpNet> = nets.filter(|net| Ip::of(&net.addr()) == ip).collect();
    nets.into_iter().collect()
}

fn affinity(spec: &ServiceSpec) -> Option<Duration> {
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return None;
    }
    let configured = spec
        .session_affinity_config
        .as_ref()
        .and_then(|config| config.client_ip.as_ref())
        .and_then(|client_ip| client_ip.timeout_seconds);
    Some(Duration::from_secs(configured.unwrap_or(DEFAULT_AFFINITY_SECONDS).max(1) as u64))
}
