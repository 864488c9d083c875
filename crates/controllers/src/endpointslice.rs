//! EndpointSlices: where a service's pods are.
//!
//! In: services, pods, nodes (for zones), slices. Out: slices of at most 100 endpoints.
//! Upstream: `pkg/controller/endpointslice` and `k8s.io/endpointslice`. Slices are changed as little
//! as possible, because every node watches them.
//!
//! Cost: a change of a pod goes through the pods of the Services that select it, by small facts, and decodes
//! these Services and their slices. A node that comes or goes wakes the Services of its pods. A node whose CPUs
//! or zone change is compared with the Services that have hints of `topology-mode: Auto`.
//!
//! Invariant: no pass is made on a cache that does not yet show the last pass's writes; it would
//! create slices twice.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use client::{
    Api, DeleteParams, ErrorExt, Event, EventType, Lister, Members, ObjectKey, Outcome, PostParams,
    Projection, RawEvent, Result, View, WorkQueue,
};
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use machinery::ObjectMeta;
use tokio::time::Instant;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, on, on_metadata, own, selected_by};
use crate::metrics::{self, ServiceSlices};
use crate::service::Reach;
use crate::topology::{self, Capacity, Disabled, Ratios, Zones};
use crate::{hints, owner, pod, service};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "endpointslice-controller",
    account: "endpointslice-controller",
    component: "endpoint-slice-controller",
    queue: "endpoint_slice",
    workers: 5,
    new: Controller::new,
    watches: &[
        &own::<Service>(),
        &on_metadata::<EndpointSlice, _, _>(|this: &Controller, _, event| this.slice_event(event)),
        &selected_by::<Pod, _>(|this: &Controller| this.members.selectors()),
        &on_metadata::<Node, _, _>(|this: &Controller, _, event| this.node_event(event)),
        &on::<Node, _, _>(|this: &Controller, _, event| this.capacity_event(event)),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const MAX_ENDPOINTS: usize = 100;
/// A write whose event does not come is forgotten.
const LOST: Duration = Duration::from_secs(5);
const SERVICE_NAME: &str = "kubernetes.io/service-name";
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
const MANAGER: &str = "endpointslice-controller.k8s.io";
pub const HEADLESS: &str = "service.kubernetes.io/headless";
/// Slices of ours by their Service.
const BY_SERVICE: &str = "service";
const ZONE: &str = "topology.kubernetes.io/zone";

/// Per service: slices' names with the generation written, and when.
type Unseen = HashMap<ObjectKey, BTreeMap<String, (i64, Instant)>>;

/// The zone that a node is in, if it says so.
struct Zone(Option<String>);

impl Projection<Node> for Zone {
    fn of(node: &Node) -> Self {
        Self(node.metadata.labels.as_ref().and_then(|labels| labels.get(ZONE)).cloned())
    }
}

struct Controller {
    context: Context,
    services: Lister<Service>,
    /// The pods that Services select.
    members: Members<Pod>,
    pods: Lister<Pod>,
    reach: View<Reach>,
    zones: View<Zone>,
    slices: Lister<EndpointSlice>,
    queue: WorkQueue<ObjectKey>,
    /// Guards what was written and not yet seen.
    unseen: Mutex<Unseen>,
    /// Guards the zones' shares and the Services that are hinted by them; held for a decision.
    topology: Mutex<Topology>,
}

/// For `topology-mode: Auto`.
#[derive(Default)]
struct Topology {
    capacity: Capacity,
    ratios: Option<Ratios>,
    hinted: HashMap<ObjectKey, Hinted>,
}

/// A Service's hints.
#[derive(Default)]
struct Hinted {
    /// Whether the last family that was looked at has hints: what events tell.
    is_populated: bool,
    by_family: BTreeMap<String, Zones>,
}

/// The writes that make the slices right.
#[derive(Debug, Default)]
struct Plan {
    create: Vec<EndpointSlice>,
    update: Vec<EndpointSlice>,
    delete: Vec<String>,
    /// By family, if the Service has the annotation.
    hints: Vec<(String, std::result::Result<Zones, Disabled>)>,
}

/// A set of ports with one address family: what all endpoints of a slice have in common.
type Group = (String, Ports);
/// Name, number, protocol, application protocol; sorted.
type Ports = Vec<(Option<String>, Option<i32>, Option<String>, Option<String>)>;

/// Pure. `wanted` are the endpoints by group, `ratios` the zones' shares.
fn plan(
    service: &Service,
    mut wanted: BTreeMap<Group, Vec<Endpoint>>,
    existing: &[Arc<EndpointSlice>],
    ratios: Option<&Ratios>,
) -> Plan {
    let mut plan = Plan::default();
    let families = families(service);
    for family in &families {
        if !wanted.keys().any(|(of, _)| of == family) {
            wanted.insert((family.clone(), vec![]), vec![]);
        }
    }
    let mut kept: Vec<(EndpointSlice, bool)> = vec![];
    for slice in existing {
        let group = group_of(slice);
        let Some(endpoints) = wanted.get_mut(&group) else {
            plan.delete.push(slice.metadata.name.clone().unwrap_or_default());
            continue;
        };
        let mut updated = (**slice).clone();
        let old = updated.endpoints.take().unwrap_or_default();
        let mut now = vec![];
        for one in &old {
            if let Some(at) = endpoints.iter().position(|other| same_target(one, other)) {
                now.push(endpoints.swap_remove(at));
            }
        }
        updated.endpoints = Some(now);
        kept.push((updated, false));
    }
    for (group, mut left) in wanted {
        // Fill existing slices first, the fullest first, then create new ones.
        let mut open: Vec<_> =
            kept.iter_mut().filter(|(slice, _)| group_of(slice) == group).collect();
        open.sort_by_key(|(slice, _)| std::cmp::Reverse(size(slice)));
        for (slice, _) in open {
            let endpoints = slice.endpoints.get_or_insert_default();
            let room = MAX_ENDPOINTS.saturating_sub(endpoints.len()).min(left.len());
            endpoints.extend(left.drain(left.len() - room..));
        }
        for chunk in left.chunks(MAX_ENDPOINTS) {
            plan.create.push(new_slice(service, &group, chunk.to_vec()));
        }
    }
    keep_one_per_family(service, &families, &mut kept, &mut plan);
    if hints::is_automatic(service) {
        for family in families {
            hint_by_zones(family, ratios, &mut kept, existing, &mut plan);
        }
    }
    for (mut slice, drop) in kept {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let before = existing.iter().find(|one| one.metadata.name.as_ref() == Some(&name));
        slice.metadata.labels = Some(labels(service));
        if drop {
            plan.delete.push(name);
        } else if before.is_none_or(|before| !same_slice(before, &slice)) {
            plan.update.push(slice);
        }
    }
    recycle(&mut plan, existing);
    plan
}

/// What the metrics say of a Service's endpoints; how many slices there are is not known yet.
fn desired(service: &Service, wanted: &BTreeMap<Group, Vec<Endpoint>>) -> ServiceSlices {
    let spec = service.spec.as_ref();
    let slices: usize = wanted.values().map(|all| all.len().div_ceil(MAX_ENDPOINTS)).sum();
    ServiceSlices {
        endpoints: wanted.values().map(Vec::len).sum(),
        slices: 0,
        // There is always one, to tell that there are no endpoints.
        desired_slices: slices.max(1),
        distribution: spec.and_then(|spec| spec.traffic_distribution.clone()),
    }
}

/// How many endpoints the plan adds, and how many it removes.
fn changed_endpoints(plan: &Plan, existing: &[Arc<EndpointSlice>]) -> (usize, usize) {
    let addresses = |slice: &EndpointSlice| {
        let all = slice.endpoints.iter().flatten().flat_map(|one| one.addresses.clone());
        all.collect::<BTreeSet<String>>()
    };
    let (mut before, mut after) = (BTreeSet::new(), BTreeSet::new());
    let is_touched = |name: &Option<String>| {
        plan.delete.iter().any(|gone| Some(gone) == name.as_ref())
            || plan.update.iter().any(|one| one.metadata.name == *name)
    };
    for slice in existing.iter().filter(|slice| is_touched(&slice.metadata.name)) {
        before.extend(addresses(slice));
    }
    for slice in plan.create.iter().chain(&plan.update) {
        after.extend(addresses(slice));
    }
    (after.difference(&before).count(), before.difference(&after).count())
}

/// One slice per family stays even without endpoints, to tell that there are none; other empty ones
/// are marked to be dropped.
fn keep_one_per_family(
    service: &Service,
    families: &[String],
    kept: &mut [(EndpointSlice, bool)],
    plan: &mut Plan,
) {
    for family in families {
        let of_family = |slice: &EndpointSlice| &slice.address_type == family;
        let full = kept.iter().any(|(slice, _)| of_family(slice) && size(slice) > 0)
            || plan.create.iter().any(of_family);
        let mut spare = !full;
        for (slice, drop) in
            kept.iter_mut().filter(|(slice, _)| of_family(slice) && size(slice) == 0)
        {
            *drop = !std::mem::take(&mut spare);
            if !*drop {
                slice.endpoints = Some(vec![]);
            }
        }
        if spare {
            let group = (family.clone(), vec![]);
            plan.create.push(new_slice(service, &group, vec![]));
        }
    }
}

/// Sets the hints of a family's slices, for `topology-mode: Auto`.
fn hint_by_zones(
    family: String,
    ratios: Option<&Ratios>,
    kept: &mut [(EndpointSlice, bool)],
    existing: &[Arc<EndpointSlice>],
    plan: &mut Plan,
) {
    let mut slices: Vec<(&mut EndpointSlice, bool)> = vec![];
    for (slice, drop) in kept.iter_mut().filter(|(slice, _)| slice.address_type == family) {
        if *drop {
            continue;
        }
        let before = existing.iter().find(|one| one.metadata.name == slice.metadata.name);
        // Hints are no change of an endpoint.
        let is_unchanged = before.is_some_and(|before| {
            let mut bare = (**before).clone();
            bare.endpoints.iter_mut().flatten().for_each(|endpoint| endpoint.hints = None);
            sorted(&bare) == sorted(slice)
        });
        if let Some(before) = before.filter(|_| is_unchanged) {
            slice.endpoints = before.endpoints.clone();
        }
        slices.push((slice, is_unchanged));
    }
    let new = plan.create.iter_mut().filter(|slice| slice.address_type == family);
    slices.extend(new.map(|slice| (slice, false)));
    let outcome = topology::spread(&mut slices, ratios);
    plan.hints.push((family, outcome));
}

/// A slice to delete becomes one to create: watchers see one change and never a gap.
fn recycle(plan: &mut Plan, existing: &[Arc<EndpointSlice>]) {
    plan.delete.retain(|name| {
        let Some(old) = existing.iter().find(|one| one.metadata.name.as_ref() == Some(name)) else {
            return true;
        };
        let heir = plan.create.iter().position(|new| new.address_type == old.address_type);
        let Some(at) = heir else {
            return true;
        };
        let mut heir = plan.create.remove(at);
        heir.metadata = ObjectMeta { labels: heir.metadata.labels, ..old.metadata.clone() };
        plan.update.push(heir);
        false
    });
}

fn size(slice: &EndpointSlice) -> usize {
    slice.endpoints.as_ref().map_or(0, Vec::len)
}

fn sorted(slice: &EndpointSlice) -> Vec<Endpoint> {
    let mut all = slice.endpoints.clone().unwrap_or_default();
    all.sort_by(|a, b| a.addresses.cmp(&b.addresses));
    all
}

fn same_slice(a: &EndpointSlice, b: &EndpointSlice) -> bool {
    a.metadata.labels == b.metadata.labels && sorted(a) == sorted(b)
}

fn same_target(a: &Endpoint, b: &Endpoint) -> bool {
    let uid = |one: &Endpoint| one.target_ref.as_ref().and_then(|target| target.uid.clone());
    a.addresses == b.addresses && uid(a) == uid(b)
}

fn group_of(slice: &EndpointSlice) -> Group {
    let ports = slice.ports.iter().flatten();
    let mut ports: Vec<_> = ports
        .map(|port| {
            (port.name.clone(), port.port, port.protocol.clone(), port.app_protocol.clone())
        })
        .collect();
    ports.sort_unstable();
    (slice.address_type.clone(), ports)
}

/// The service's labels and ours.
fn labels(service: &Service) -> BTreeMap<String, String> {
    let mut all = service.metadata.labels.clone().unwrap_or_default();
    all.remove(HEADLESS);
    if service::is_headless(service) {
        all.insert(HEADLESS.into(), String::new());
    }
    all.insert(SERVICE_NAME.into(), service.metadata.name.clone().unwrap_or_default());
    all.insert(MANAGED_BY.into(), MANAGER.into());
    all
}

fn new_slice(service: &Service, group: &Group, endpoints: Vec<Endpoint>) -> EndpointSlice {
    let ports = group.1.iter().cloned().map(|(name, port, protocol, app_protocol)| EndpointPort {
        name,
        port,
        protocol,
        app_protocol,
    });
    let ports: Vec<_> = ports.collect();
    EndpointSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!(
                "{}-",
                service.metadata.name.as_deref().unwrap_or_default()
            )),
            namespace: service.metadata.namespace.clone(),
            labels: Some(labels(service)),
            owner_references: Some(vec![owner::reference(service)]),
            ..Default::default()
        },
        address_type: group.0.clone(),
        endpoints: Some(endpoints),
        ports: (!ports.is_empty()).then_some(ports),
    }
}

/// `IPv4`, `IPv6`: as slices name them.
fn families(service: &Service) -> Vec<String> {
    let families =
        service.spec.as_ref().and_then(|spec| spec.ip_families.clone()).unwrap_or_default();
    if families.is_empty() { vec!["IPv4".into()] } else { families }
}

/// The endpoints of a service's pods, by group. Pure but for the zone of a node.
fn endpoints_of(
    service: &Service,
    pods: &[Arc<Reach>],
    zone_of: impl Fn(&str) -> Option<String>,
) -> BTreeMap<Group, Vec<Endpoint>> {
    let mut groups: BTreeMap<Group, Vec<Endpoint>> = BTreeMap::new();
    for family in families(service) {
        for pod in pods {
            let mut ips = pod.ips.iter().map(|ip| &**ip);
            let in_family = |ip: &&str| ip.contains(':') == (family == "IPv6");
            let Some(ip) = ips.find(in_family) else { continue };
            let group = (family.clone(), ports_of(service, pod));
            let endpoint = endpoint(service, pod, ip.to_string(), &zone_of);
            groups.entry(group).or_default().push(endpoint);
        }
    }
    groups
}

fn ports_of(service: &Service, pod: &Reach) -> Ports {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten());
    let mut ports: Vec<_> = ports
        .filter_map(|port| {
            let number = service::target_port(pod, port)?;
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".into());
            let name = port.name.clone().unwrap_or_default();
            Some((Some(name), Some(number), Some(protocol), port.app_protocol.clone()))
        })
        .collect();
    ports.sort_unstable();
    ports
}

fn endpoint(
    service: &Service,
    pod: &Reach,
    ip: String,
    zone_of: impl Fn(&str) -> Option<String>,
) -> Endpoint {
    let (serving, terminating) = (pod.ready, pod.deleting);
    let ready = service::publishes_not_ready(service) || (serving && !terminating);
    let node = Some(pod.node.to_string()).filter(|name| !name.is_empty());
    let mut endpoint = Endpoint {
        addresses: vec![ip],
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        hostname: service::hostname(pod, service),
        zone: node.as_deref().and_then(zone_of),
        node_name: node,
        target_ref: Some(target(pod)),
        ..Default::default()
    };
    endpoint.hints = hints::of(service, &endpoint);
    endpoint
}

/// A reference to a pod, as endpoints have it.
pub fn target(pod: &Reach) -> ObjectReference {
    ObjectReference {
        kind: Some("Pod".into()),
        namespace: Some(pod.key.namespace.to_string()),
        name: Some(pod.key.name.to_string()),
        uid: Some(pod.uid.to_string()),
        ..Default::default()
    }
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let (services, pods) = (setup.informer(), setup.informer::<Pod>());
        let slices = setup.informer::<EndpointSlice>();
        pods.index("node", |pod| vec![pod::node_name(pod).to_owned()]);
        slices.index_headers(BY_SERVICE, |header| {
            let ours = header.labels.get(MANAGED_BY).is_some_and(|manager| manager == MANAGER);
            let service = header.labels.get(SERVICE_NAME).filter(|_| ours);
            let key =
                service.map(|service| ObjectKey::new(&header.key.namespace, service).to_string());
            key.into_iter().collect()
        });
        Some(Self {
            context: setup.context.clone(),
            members: Members::of(&services, service::selector, &pods),
            services: services.lister(),
            reach: pods.view(),
            pods: pods.lister(),
            zones: setup.view::<Node, _>(),
            slices: slices.lister(),
            queue: setup.queue.clone(),
            unseen: Mutex::default(),
            topology: Mutex::default(),
        })
    }

    fn slice_event(&self, event: &RawEvent) {
        let header = &event.entry().header;
        let Some(service) = header.labels.get(SERVICE_NAME) else {
            return;
        };
        if header.labels.get(MANAGED_BY).is_none_or(|manager| manager != MANAGER) {
            return;
        }
        let key = ObjectKey::new(&header.key.namespace, service);
        if let Some(slices) = self.unseen().get_mut(&key) {
            let name = &*header.key.name;
            let gone = matches!(event, RawEvent::Deleted(_));
            if slices
                .get(name)
                .is_some_and(|(generation, _)| gone || header.generation >= *generation)
            {
                slices.remove(name);
            }
        }
        self.queue.add(key);
    }

    fn unseen(&self) -> std::sync::MutexGuard<'_, Unseen> {
        self.unseen.lock().expect("no panic while held")
    }

    /// Nodes come late and go: their pods' services have other endpoints then.
    fn node_event(&self, event: &RawEvent) {
        if matches!(event, RawEvent::Applied { old: Some(_), .. }) {
            return;
        }
        for pod in self.pods.entries_by_index("node", &event.entry().header.key.name) {
            let header = &pod.header;
            for key in self.members.selectors().matching(&header.key.namespace, &[&header.labels]) {
                self.queue.add(key);
            }
        }
    }

    /// Upstream: `checkNodeTopologyDistribution`.
    fn capacity_event(&self, event: &Event<Node>) {
        let node = (!event.is_deleted()).then(|| &**event.object());
        let mut topology = self.topology();
        if !topology.capacity.set(&event.key().name, node) {
            return;
        }
        topology.ratios = topology.capacity.ratios();
        let ratios = topology.ratios.as_ref();
        for (key, hinted) in &topology.hinted {
            if hinted.by_family.values().any(|zones| topology::is_overloaded(zones, ratios)) {
                self.queue.add(key.clone());
            }
        }
    }

    fn topology(&self) -> std::sync::MutexGuard<'_, Topology> {
        self.topology.lock().expect("no panic while held")
    }

    /// Notes a Service's hints, and tells in events when they come and go.
    fn note_hints(&self, key: &ObjectKey, service: &Service, plan: &mut Plan) {
        let mut said = vec![];
        let mut topology = self.topology();
        if !hints::is_automatic(service) {
            let populated = topology.hinted.remove(key).is_some_and(|hinted| hinted.is_populated);
            let text = "Topology Aware Hints has been disabled".to_owned();
            let first = families(service).into_iter().next().filter(|_| populated);
            said.extend(first.map(|family| (EventType::Warning, text, family)));
        }
        for (family, outcome) in std::mem::take(&mut plan.hints) {
            let hinted = topology.hinted.entry(key.clone()).or_default();
            match outcome {
                Ok(zones) => {
                    if !std::mem::replace(&mut hinted.is_populated, true) {
                        let text = "Topology Aware Hints has been enabled".to_owned();
                        said.push((EventType::Normal, text, family.clone()));
                    }
                    hinted.by_family.insert(family, zones);
                }
                Err(why) => {
                    hinted.is_populated = false;
                    hinted.by_family.remove(&family);
                    said.push((EventType::Warning, why.to_string(), family));
                }
            }
        }
        drop(topology);
        for (kind, text, family) in said {
            let reason = match kind {
                EventType::Normal => "TopologyAwareHintsEnabled",
                EventType::Warning => "TopologyAwareHintsDisabled",
            };
            let text = format!("{text}, addressType: {family}");
            self.context.events.event(service, kind, reason, text);
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(service) = self.services.get_key(key).filter(|one| service::is_selecting(one))
        else {
            self.unseen().remove(key);
            self.topology().hinted.remove(key);
            metrics::slices_synced(key, None);
            return Ok(Outcome::Done);
        };
        if service.metadata.deletion_timestamp.is_some() {
            return Ok(Outcome::Done);
        }
        if self.awaits_events(key) {
            // The event of our own write wakes the key; the delay is for when it was lost.
            return Ok(Outcome::After(LOST));
        }
        let members = self.members.get(key);
        let mut pods: Vec<Arc<Reach>> =
            members.iter().filter_map(|pod| self.reach.get(&pod.header.key)).collect();
        // A pod of a node that is not there (yet, or any more) cannot be reached.
        if !service::publishes_not_ready(&service) {
            pods.retain(|pod| pod.node.is_empty() || self.zone(&pod.node).is_some());
        }
        let zone_of = |node: &str| self.zone(node)?.0.clone();
        let wanted = endpoints_of(&service, &pods, zone_of);
        let mut existing = self.slices.by_index(BY_SERVICE, &key.to_string());
        existing.retain(|slice| slice.metadata.deletion_timestamp.is_none());
        let mut totals = desired(&service, &wanted);
        let ratios = self.topology().ratios.clone();
        let mut plan = plan(&service, wanted, &existing, ratios.as_ref());
        self.note_hints(key, &service, &mut plan);
        totals.slices = (existing.len() + plan.create.len()).saturating_sub(plan.delete.len());
        metrics::slices_synced(key, Some(totals));
        let (added, removed) = changed_endpoints(&plan, &existing);
        metrics::endpoints_changed(added, removed);
        match self.carry_out(key, plan).await {
            Err(error) if error.is_namespace_terminating() => Ok(Outcome::Done),
            Err(error) => {
                let message =
                    format!("Error updating Endpoint Slices for Service {key}: {}", error.text());
                if !error.is_conflict() && !error.is_not_found() {
                    self.context.events.event(
                        &*service,
                        EventType::Warning,
                        "FailedToUpdateEndpointSlices",
                        message,
                    );
                }
                Err(error)
            }
            Ok(()) => Ok(Outcome::Done),
        }
    }

    /// `None` if there is no such node.
    fn zone(&self, node: &str) -> Option<Arc<Zone>> {
        self.zones.get(&ObjectKey::new("", node))
    }

    fn awaits_events(&self, key: &ObjectKey) -> bool {
        let mut unseen = self.unseen();
        let Some(slices) = unseen.get_mut(key) else {
            return false;
        };
        slices.retain(|_, (_, since)| since.elapsed() < LOST);
        !slices.is_empty()
    }

    async fn carry_out(&self, key: &ObjectKey, plan: Plan) -> Result<()> {
        let api: Api<EndpointSlice> = self.context.client.api(Some(&key.namespace));
        for slice in plan.create {
            let made = api.create(&PostParams::default(), &slice).await?;
            self.note(key, &made);
        }
        for slice in plan.update {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            let made = api.replace(name, &PostParams::default(), &slice).await?;
            self.note(key, &made);
        }
        for name in plan.delete {
            match api.delete(&name, &DeleteParams::default()).await {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits for the cache to show a write, unless it does already.
    fn note(&self, key: &ObjectKey, slice: &EndpointSlice) {
        let generation = slice.metadata.generation.unwrap_or(0);
        let name = slice.metadata.name.clone().unwrap_or_default();
        let mut unseen = self.unseen();
        let shown = self.slices.get(&key.namespace, &name);
        if shown.is_none_or(|shown| shown.metadata.generation.unwrap_or(0) < generation) {
            unseen.entry(key.clone()).or_default().insert(name, (generation, Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn pod(name: &str, ready: bool) -> Arc<Reach> {
        let status = if ready { "True" } else { "False" };
        let value = json!({
            "metadata": {"name": name, "namespace": "default", "uid": name},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}]},
            "status": {"phase": "Running", "podIP": format!("10.0.0.{}", name.len()),
                "conditions": [{"type": "Ready", "status": status}]},
        });
        let pod: Pod = from_value(value).unwrap();
        Arc::new(Reach::of(&pod))
    }

    fn service() -> Service {
        let value = json!({
            "metadata": {"name": "web", "namespace": "default", "uid": "s", "labels": {"a": "b"}},
            "spec": {"clusterIP": "10.96.0.9", "ipFamilies": ["IPv4"], "selector": {"app": "web"},
                "ports": [{"port": 80, "targetPort": "http"}]},
        });
        from_value(value).unwrap()
    }

    fn named(mut slice: EndpointSlice, name: &str) -> Arc<EndpointSlice> {
        slice.metadata.name = Some(name.into());
        Arc::new(slice)
    }

    #[test]
    fn slices_follow_pods() {
        let zone = |_: &str| Some("z".to_owned());
        let service = service();
        let empty = plan(&service, endpoints_of(&service, &[], zone), &[], None);
        assert_eq!(empty.create.len(), 1, "a placeholder");
        assert_eq!(empty.create[0].ports, None);
        let placeholder = named(empty.create[0].clone(), "web-1");
        let again = plan(
            &service,
            endpoints_of(&service, &[], zone),
            std::slice::from_ref(&placeholder),
            None,
        );
        assert!(again.create.is_empty() && again.update.is_empty(), "nothing to do: {again:?}");

        let pods = [pod("a", true), pod("bb", false)];
        let filled = plan(&service, endpoints_of(&service, &pods, zone), &[placeholder], None);
        assert!(filled.create.is_empty() && filled.delete.is_empty());
        let slice = filled.update[0].clone();
        assert_eq!(slice.metadata.name.as_deref(), Some("web-1"), "recycled");
        let ports = slice.ports.clone().unwrap();
        assert_eq!((ports[0].name.as_deref(), ports[0].port), (Some(""), Some(8080)));
        let ready: Vec<_> = slice
            .endpoints
            .iter()
            .flatten()
            .map(|one| one.conditions.clone().unwrap().ready)
            .collect();
        assert_eq!(ready, [Some(true), Some(false)]);
        assert_eq!(slice.metadata.labels.clone().unwrap()[SERVICE_NAME], "web");

        let slice = named(slice, "web-2");
        let same =
            plan(&service, endpoints_of(&service, &pods, zone), std::slice::from_ref(&slice), None);
        assert!(same.create.is_empty() && same.update.is_empty() && same.delete.is_empty());
        let fewer = plan(
            &service,
            endpoints_of(&service, &pods[..1], zone),
            std::slice::from_ref(&slice),
            None,
        );
        assert_eq!(fewer.update[0].endpoints.as_ref().unwrap().len(), 1);
        let none = plan(&service, endpoints_of(&service, &[], zone), &[slice], None);
        assert_eq!((none.update.len(), none.delete.len()), (1, 0), "{none:?}");
        assert_eq!(size(&none.update[0]), 0);
    }

    #[test]
    fn a_slice_holds_a_hundred() {
        let service = service();
        let pods: Vec<_> = (1..=150).map(|n| pod(&"x".repeat(n), true)).collect();
        let made = plan(&service, endpoints_of(&service, &pods, |_| None), &[], None);
        let sizes: Vec<_> = made.create.iter().map(size).collect();
        assert_eq!(sizes, [100, 50]);
    }

    #[test]
    fn hints_of_zones_change_only_the_slices_that_need_it() {
        let mut service = service();
        let mode = ("service.kubernetes.io/topology-mode".to_owned(), "Auto".to_owned());
        service.metadata.annotations = Some([mode].into());
        let ratios = Ratios::from([("a".into(), 0.5), ("b".into(), 0.5)]);
        let zone = |_: &str| Some("a".to_owned());
        let pods = [pod("a", true), pod("bb", true)];
        let made = plan(&service, endpoints_of(&service, &pods, zone), &[], Some(&ratios));
        let zones = |slice: &EndpointSlice| -> BTreeMap<String, usize> {
            let all = slice.endpoints.iter().flatten().filter_map(|one| one.hints.clone());
            let mut zones = BTreeMap::new();
            for hints in all {
                *zones.entry(hints.for_zones.expect("zones")[0].name.clone()).or_default() += 1;
            }
            zones
        };
        let both = BTreeMap::from([("a".to_owned(), 1), ("b".to_owned(), 1)]);
        assert_eq!(zones(&made.create[0]), both);
        assert_eq!(made.hints, [("IPv4".to_owned(), Ok(both))]);
        let slice = [named(made.create[0].clone(), "web-1")];
        let again = plan(&service, endpoints_of(&service, &pods, zone), &slice, Some(&ratios));
        assert!(again.create.is_empty() && again.update.is_empty(), "{again:?}");
        // The shares are not known any more: all hints go.
        let without = plan(&service, endpoints_of(&service, &pods, zone), &slice, None);
        assert_eq!(zones(&without.update[0]), BTreeMap::new());
        assert_eq!(without.hints, [("IPv4".to_owned(), Err(Disabled::NodeInfo))]);
    }
}
