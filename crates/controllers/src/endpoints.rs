//! Endpoints: the older form of EndpointSlices, one object per service.
//!
//! In: services and pods. Out: Endpoints objects.
//! Upstream: `pkg/controller/endpoint`.
//!
//! Cost: a change of a pod goes through the pods of the Services that select it, by small facts, and decodes
//! these Services and their Endpoints.

use std::collections::BTreeMap;
use std::sync::Arc;

use client::{
    Api, DeleteParams, ErrorExt, Lister, Members, ObjectKey, Outcome, PostParams, Result, View,
};
use k8s_openapi::api::core::v1::{
    EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Pod, Service,
};
use machinery::ObjectMeta;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, own, selected_by};
use crate::endpointslice::{HEADLESS, target};
use crate::service::{self, Reach};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "endpoints-controller",
    account: "endpoint-controller",
    component: "endpoint-controller",
    queue: "endpoint",
    workers: 5,
    new: |setup| {
        let (services, pods) = (setup.informer(), setup.informer());
        Some(Controller {
            context: setup.context.clone(),
            reach: pods.view(),
            members: Members::of(&services, service::selector, &pods),
            services: services.lister(),
            endpoints: setup.lister(),
        })
    },
    watches: &[
        &own::<Service>(),
        &own::<Endpoints>(),
        &selected_by::<Pod, _>(|this: &Controller| this.members.selectors()),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const MAX_ADDRESSES: usize = 1000;
const OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";
const MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
const MANAGER: &str = "endpoint-controller";

struct Controller {
    context: Context,
    services: Lister<Service>,
    /// The pods that Services select.
    members: Members<Pod>,
    reach: View<Reach>,
    endpoints: Lister<Endpoints>,
}

impl Controller {
    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let api: Api<Endpoints> = self.context.client.api(Some(&key.namespace));
        let current = self.endpoints.get_key(key);
        let Some(service) = self.services.get_key(key) else {
            // The service is gone. Those of people, without our mark, are left alone.
            if current.is_some_and(|current| is_ours(&current)) {
                match api.delete(&key.name, &DeleteParams::default()).await {
                    Err(error) if !error.is_not_found() => return Err(error),
                    _ => {}
                }
            }
            return Ok(Outcome::Done);
        };
        if !service::is_selecting(&service) {
            return Ok(Outcome::Done);
        }
        let members = self.members.get(key);
        let pods: Vec<Arc<Reach>> =
            members.iter().filter_map(|pod| self.reach.get(&pod.header.key)).collect();
        let Some(wanted) = plan(&service, &pods, current.as_deref()) else {
            return Ok(Outcome::Done);
        };
        let written = if current.is_some() {
            api.replace(&key.name, &PostParams::default(), &wanted).await
        } else {
            api.create(&PostParams::default(), &wanted).await
        };
        match written {
            Err(error) if error.is_namespace_terminating() => Ok(Outcome::Done),
            done => done.map(|_| Outcome::Done),
        }
    }
}

fn is_ours(endpoints: &Endpoints) -> bool {
    let labels = endpoints.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(MANAGED_BY)).is_some_and(|manager| manager == MANAGER)
}

/// The object to write; `None` if the existing one is correct. Pure.
fn plan(service: &Service, pods: &[Arc<Reach>], current: Option<&Endpoints>) -> Option<Endpoints> {
    let mut subsets = subsets(service, pods);
    let truncated = truncate(&mut subsets);
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.remove(HEADLESS);
    if service::is_headless(service) {
        labels.insert(HEADLESS.into(), String::new());
    }
    labels.insert(MANAGED_BY.into(), MANAGER.into());
    let mut wanted = current.cloned().unwrap_or_default();
    wanted.metadata = ObjectMeta {
        name: service.metadata.name.clone(),
        namespace: service.metadata.namespace.clone(),
        labels: Some(labels),
        ..wanted.metadata
    };
    if truncated {
        wanted
            .metadata
            .annotations
            .get_or_insert_default()
            .insert(OVER_CAPACITY.into(), "truncated".into());
    } else if let Some(annotations) = &mut wanted.metadata.annotations {
        annotations.remove(OVER_CAPACITY);
    }
    wanted.subsets = (!subsets.is_empty()).then_some(subsets);
    let is_empty = |one: &Endpoints| one.subsets.as_ref().is_none_or(Vec::is_empty);
    let same = current.is_some_and(|current| {
        let subsets = current.subsets == wanted.subsets || (is_empty(current) && is_empty(&wanted));
        subsets && current.metadata.labels == wanted.metadata.labels
    });
    (!same).then_some(wanted)
}

/// Addresses with the same ports share a subset, in a fixed order.
fn subsets(service: &Service, pods: &[Arc<Reach>]) -> Vec<EndpointSubset> {
    type Ports = Vec<(Option<String>, i32, String, Option<String>)>;
    let mut groups: BTreeMap<Ports, EndpointSubset> = BTreeMap::new();
    let publish = service::publishes_not_ready(service);
    let family = service.spec.as_ref().and_then(|spec| spec.ip_families.as_ref()?.first().cloned());
    let v6 = family.as_deref() == Some("IPv6");
    let specs: Vec<_> = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten()).collect();
    for pod in pods {
        let ip = pod.ips.iter().find(|ip| ip.contains(':') == v6);
        let Some(ip) = ip.filter(|_| publish || !pod.deleting) else { continue };
        let ports = specs.iter().filter_map(|port| {
            let number = service::target_port(pod, port)?;
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".into());
            Some((
                port.name.clone().filter(|name| !name.is_empty()),
                number,
                protocol,
                port.app_protocol.clone(),
            ))
        });
        let mut ports: Ports = ports.collect();
        ports.sort_unstable();
        if ports.is_empty() && !specs.is_empty() {
            continue; // no port of the service is served here
        }
        let address = EndpointAddress {
            ip: ip.to_string(),
            hostname: service::hostname(pod, service),
            node_name: Some(pod.node.to_string()).filter(|name| !name.is_empty()),
            target_ref: Some(target(pod)),
        };
        let subset = groups.entry(ports).or_default();
        let ready = publish || pod.ready;
        let list = if ready { &mut subset.addresses } else { &mut subset.not_ready_addresses };
        list.get_or_insert_default().push(address);
    }
    groups.into_iter().map(|(ports, subset)| with_ports(ports, subset)).collect()
}

fn with_ports(
    ports: Vec<(Option<String>, i32, String, Option<String>)>,
    mut subset: EndpointSubset,
) -> EndpointSubset {
    let ports = ports.into_iter().map(|(name, port, protocol, app_protocol)| EndpointPort {
        name,
        port,
        protocol: Some(protocol),
        app_protocol,
    });
    let ports: Vec<_> = ports.collect();
    subset.ports = (!ports.is_empty()).then_some(ports);
    for list in [&mut subset.addresses, &mut subset.not_ready_addresses] {
        let uid =
            |one: &EndpointAddress| one.target_ref.as_ref().and_then(|target| target.uid.clone());
        list.iter_mut().for_each(|list| {
            list.sort_by(|a, b| a.ip.cmp(&b.ip).then_with(|| uid(a).cmp(&uid(b))))
        });
    }
    subset
}

/// At most 1000 addresses, ready ones first. True if some are left out.
fn truncate(subsets: &mut Vec<EndpointSubset>) -> bool {
    let count = |list: &Option<Vec<EndpointAddress>>| list.as_ref().map_or(0, Vec::len);
    let total: usize =
        subsets.iter().map(|one| count(&one.addresses) + count(&one.not_ready_addresses)).sum();
    if total <= MAX_ADDRESSES {
        return false;
    }
    let mut left = MAX_ADDRESSES;
    let mut cut = |list: &mut Option<Vec<EndpointAddress>>| {
        if let Some(all) = list {
            all.truncate(left);
            left -= all.len();
        }
        if list.as_ref().is_some_and(Vec::is_empty) {
            *list = None;
        }
    };
    subsets.iter_mut().for_each(|one| cut(&mut one.addresses));
    subsets.iter_mut().for_each(|one| cut(&mut one.not_ready_addresses));
    subsets.retain(|one| one.addresses.is_some() || one.not_ready_addresses.is_some());
    true
}
