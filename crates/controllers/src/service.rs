//! What services select, for both forms of endpoints. Pure but for [`wake_selecting`].

use client::{ObjectKey, RawEvent, Selectors, WorkQueue};
use k8s_openapi::api::core::v1::{ContainerPort, Pod, Service, ServicePort};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::selector::Selector;

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

/// Enqueues the owners of selectors that select a pod, or did before it changed.
pub fn wake_selecting(selectors: &Selectors, queue: &WorkQueue<ObjectKey>, event: &RawEvent) {
    let header = &event.entry().header;
    let mut labels = vec![&header.labels];
    if let RawEvent::Applied { old: Some(old), .. } = event {
        labels.push(&old.header.labels);
    }
    for key in selectors.matching(&header.key.namespace, &labels) {
        queue.add(key);
    }
}

/// The number behind a service port in this pod; `None` if the pod has no port of that name.
pub fn target_port(pod: &Pod, port: &ServicePort) -> Option<i32> {
    match port.target_port.as_ref() {
        None => Some(port.port),
        Some(IntOrString::Int(0)) => Some(port.port),
        Some(IntOrString::Int(number)) => Some(*number),
        Some(IntOrString::String(name)) => {
            let protocol = port.protocol.as_deref().unwrap_or("TCP");
            let named = |one: &&ContainerPort| {
                one.name.as_ref() == Some(name)
                    && one.protocol.as_deref().unwrap_or("TCP") == protocol
            };
            let spec = pod.spec.as_ref()?;
            // Sidecars (restartable init containers) serve ports too.
            let sidecars = spec.init_containers.iter().flatten();
            let sidecars = sidecars.filter(|one| one.restart_policy.as_deref() == Some("Always"));
            let mut ports =
                spec.containers.iter().chain(sidecars).flat_map(|one| one.ports.iter().flatten());
            ports.find(named).map(|port| port.container_port)
        }
    }
}

/// The pod's name in its domain, if it asks for one under this service.
pub fn hostname(pod: &Pod, service: &Service) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let in_domain = spec.subdomain.is_some() && spec.subdomain == service.metadata.name;
    spec.hostname.clone().filter(|name| !name.is_empty() && in_domain)
}

pub fn publishes_not_ready(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.publish_not_ready_addresses).unwrap_or(false)
}

/// All addresses of a pod.
pub fn pod_ips(pod: &Pod) -> Vec<String> {
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
