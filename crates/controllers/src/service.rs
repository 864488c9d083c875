//! The pods that Services select, for both forms of endpoints. Pure.

use client::{ObjectKey, Projection};
use k8s_openapi::api::core::v1::{Pod, PodSpec, Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::selector::Selector;

use crate::pod;

/// How a pod is reached: what endpoints are made of. Pods without an address and finished ones have none.
#[derive(Clone, Debug)]
pub struct Reach {
    pub key: ObjectKey,
    pub uid: Box<str>,
    /// Empty until the pod is bound.
    pub node: Box<str>,
    pub ips: Box<[Box<str>]>,
    pub ready: bool,
    pub deleting: bool,
    /// Those that have a name.
    ports: Box<[Port]>,
    hostname: Option<Box<str>>,
    subdomain: Option<Box<str>>,
}

#[derive(Clone, Debug)]
struct Port {
    name: Box<str>,
    protocol: Box<str>,
    number: i32,
}

impl Projection<Pod> for Reach {
    fn of(pod: &Pod) -> Self {
        let spec = pod.spec.as_ref();
        let text = |text: Option<&String>| text.map(|text| text.as_str().into());
        Self {
            key: ObjectKey::of(&pod.metadata),
            uid: pod.metadata.uid.as_deref().unwrap_or_default().into(),
            node: pod::node_name(pod).into(),
            ips: pod_ips(pod).into_iter().map(Into::into).collect(),
            ready: pod::is_ready(pod),
            deleting: pod::is_deleting(pod),
            ports: spec.map(named_ports).unwrap_or_default(),
            hostname: text(spec.and_then(|spec| spec.hostname.as_ref())),
            subdomain: text(spec.and_then(|spec| spec.subdomain.as_ref())),
        }
    }

    fn concerns(pod: &Pod) -> bool {
        !pod::is_finished(pod) && !pod_ips(pod).is_empty()
    }
}

/// Sidecars (restartable init containers) serve ports, too.
fn named_ports(spec: &PodSpec) -> Box<[Port]> {
    let sidecars = spec.init_containers.iter().flatten();
    let sidecars = sidecars.filter(|one| one.restart_policy.as_deref() == Some("Always"));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|one| one.ports.iter().flatten());
    let named = ports.filter_map(|port| {
        Some(Port {
            name: port.name.as_deref()?.into(),
            protocol: port.protocol.as_deref().unwrap_or("TCP").into(),
            number: port.container_port,
        })
    });
    named.collect()
}

/// Whether the control plane finds the service's endpoints.
pub fn is_selecting(service: &Service) -> bool {
    let spec = service.spec.as_ref();
    let selector = spec.and_then(|spec| spec.selector.as_ref());
    let external = spec.is_some_and(|spec| spec.type_.as_deref() == Some("ExternalName"));
    selector.is_some_and(|selector| !selector.is_empty()) && !external
}

pub fn selector(service: &Service) -> Selector {
    let map = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    map.filter(|map| !map.is_empty()).map_or_else(Selector::nothing, Selector::from_map)
}

pub fn is_headless(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.cluster_ip.as_deref()) == Some("None")
}

/// The number behind a service port in this pod; `None` if the pod has no port of that name.
pub fn target_port(pod: &Reach, port: &ServicePort) -> Option<i32> {
    match port.target_port.as_ref() {
        None => Some(port.port),
        Some(IntOrString::Int(0)) => Some(port.port),
        Some(IntOrString::Int(number)) => Some(*number),
        Some(IntOrString::String(name)) => {
            let protocol = port.protocol.as_deref().unwrap_or("TCP");
            let named = |one: &&Port| *one.name == **name && &*one.protocol == protocol;
            pod.ports.iter().find(named).map(|port| port.number)
        }
    }
}

/// The pod's name in its domain, if it asks for one under this service.
pub fn hostname(pod: &Reach, service: &Service) -> Option<String> {
    let domain = pod.subdomain.as_deref()?;
    let in_domain = service.metadata.name.as_deref() == Some(domain);
    let hostname = pod.hostname.as_deref().filter(|name| !name.is_empty() && in_domain);
    hostname.map(ToOwned::to_owned)
}

pub fn publishes_not_ready(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.publish_not_ready_addresses).unwrap_or(false)
}

/// All addresses of a pod.
fn pod_ips(pod: &Pod) -> Vec<String> {
    let Some(status) = &pod.status else {
        return vec![];
    };
    let all: Vec<_> = status.pod_ips.iter().flatten().map(|one| one.ip.clone()).collect();
    if all.is_empty() {
        status.pod_ip.clone().filter(|ip| !ip.is_empty()).into_iter().collect()
    } else {
        all
    }
}
