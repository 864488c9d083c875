//! The zone's view of the cluster, from informers.
//!
//! In: Services and EndpointSlices. Out: look-ups by name and by address. Objects stay encoded;
//! only requested objects are decoded.

use std::net::IpAddr;
use std::sync::Arc;

use client::{Informer, Informers, Lister};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

const BY_IP: &str = "ip";
const BY_SERVICE: &str = "service";
const BY_NAMESPACE: &str = "namespace";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// The zone's view of the cluster.
pub trait Directory: Send + Sync {
    /// True after all objects have been listed once.
    fn is_ready(&self) -> bool;
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>>;
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>>;
    fn services_at(&self, ip: IpAddr) -> Vec<Arc<Service>>;
    fn slices_at(&self, ip: IpAddr) -> Vec<Arc<EndpointSlice>>;
    fn has_namespace(&self, namespace: &str) -> bool;
}

pub struct Cluster {
    services: Lister<Service>,
    slices: Lister<EndpointSlice>,
    informers: (Informer<Service>, Informer<EndpointSlice>),
}

impl Cluster {
    pub fn new(informers: &Informers) -> Self {
        let services = informers.of::<Service>();
        services.index(BY_IP, service_ips);
        services.index(BY_NAMESPACE, |s| s.metadata.namespace.clone().into_iter().collect());
        let slices = informers.of::<EndpointSlice>();
        slices.index(BY_IP, endpoint_ips);
        slices.index(BY_SERVICE, |slice| service_of(slice).into_iter().collect());
        Self { services: services.lister(), slices: slices.lister(), informers: (services, slices) }
    }
}

fn service_ips(service: &Service) -> Vec<String> {
    let Some(spec) = &service.spec else { return vec![] };
    let all = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip);
    let mut ips: Vec<String> = all.filter(|ip| ip.parse::<IpAddr>().is_ok()).cloned().collect();
    ips.sort_unstable();
    ips.dedup();
    ips
}

fn endpoint_ips(slice: &EndpointSlice) -> Vec<String> {
    slice.endpoints.iter().flatten().flat_map(|e| e.addresses.iter().cloned()).collect()
}

/// `namespace/service`
pub fn service_of(slice: &EndpointSlice) -> Option<String> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    Some(format!("{}/{name}", slice.metadata.namespace.as_deref()?))
}

impl Directory for Cluster {
    fn is_ready(&self) -> bool {
        self.informers.0.has_synced() && self.informers.1.has_synced()
    }

    fn service(&self, namespace: &str, name: &str) -> Option<Arc<Service>> {
        self.services.get(namespace, name)
    }

    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<EndpointSlice>> {
        self.slices.by_index(BY_SERVICE, &format!("{namespace}/{service}"))
    }

    fn services_at(&self, ip: IpAddr) -> Vec<Arc<Service>> {
        self.services.by_index(BY_IP, &ip.to_string())
    }

    fn slices_at(&self, ip: IpAddr) -> Vec<Arc<EndpointSlice>> {
        self.slices.by_index(BY_IP, &ip.to_string())
    }

    fn has_namespace(&self, namespace: &str) -> bool {
        !self.services.by_index(BY_NAMESPACE, namespace).is_empty()
    }
}
