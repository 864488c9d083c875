//! Copies Endpoints that people write by hand into EndpointSlices.
//!
//! In: Endpoints, Services without a selector, slices. Out: slices.
//! Upstream: `pkg/controller/endpointslicemirroring`: one slice for each set of ports and address
//! family, at most 1000 addresses of a subset.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use client::{
    Api, DeleteParams, ErrorExt, Event, EventType, Lister, ObjectKey, Outcome, PostParams, Result,
};
use k8s_openapi::api::core::v1::{EndpointAddress, EndpointSubset, Endpoints, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use machinery::ObjectMeta;
use machinery::selector::Selector;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, on, on_metadata, own};
use crate::owner;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "endpointslice-mirroring-controller",
    account: "endpointslicemirroring-controller",
    component: "endpoint-slice-mirroring-controller",
    queue: "endpoint_slice_mirroring",
    workers: 5,
    new: |setup| {
        Some(Controller {
            context: setup.context.clone(),
            endpoints: setup.lister(),
            services: setup.lister(),
            slices: setup.lister(),
        })
    },
    watches: &[
        &own::<Endpoints>(),
        &on(|_: &Controller, queue, event: &Event<Service>| {
            let selects =
                |one: &Service| one.spec.as_ref().is_some_and(|spec| spec.selector.is_some());
            let was = event.old().map(|old| selects(&old));
            if event.is_deleted() || was != Some(selects(event.object())) {
                queue.add(event.key());
            }
        }),
        &on_metadata::<EndpointSlice, _, _>(|_: &Controller, queue, event| {
            let header = &event.entry().header;
            let ours = header.labels.get(MANAGED_BY).is_some_and(|by| by == MANAGER);
            if let Some(service) = header.labels.get(SERVICE).filter(|_| ours) {
                queue.add(ObjectKey::new(&header.key.namespace, service));
            }
        }),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const MANAGER: &str = "endpointslicemirroring-controller.k8s.io";
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
const SERVICE: &str = "kubernetes.io/service-name";
const SKIP: &str = "endpointslice.kubernetes.io/skip-mirror";
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";
const NOT_COPIED: [&str; 2] = [
    "endpoints.kubernetes.io/last-change-trigger-time",
    "kubectl.kubernetes.io/last-applied-configuration",
];
const PER_SUBSET: usize = 1000;

struct Controller {
    context: Context,
    endpoints: Lister<Endpoints>,
    services: Lister<Service>,
    slices: Lister<EndpointSlice>,
}

impl Controller {
    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let selector = Selector::from_map(&BTreeMap::from([
            (SERVICE.to_owned(), key.name.to_string()),
            (MANAGED_BY.to_owned(), MANAGER.to_owned()),
        ]));
        let existing = self.slices.list(Some(&key.namespace), &selector);
        let service = self.services.get_key(key);
        let endpoints = self.endpoints.get_key(key).filter(|one| is_mirrored(one));
        let selects = |one: &Service| one.spec.as_ref().is_some_and(|spec| spec.selector.is_some());
        let endpoints = endpoints.filter(|_| service.is_some_and(|one| !selects(&one)));
        let plan = plan(endpoints.as_deref(), &existing);
        if let (Some(endpoints), Some((reason, message))) = (&endpoints, &plan.warning) {
            let events = &self.context.events;
            events.event(&**endpoints, EventType::Warning, reason, message.clone());
        }
        let api: Api<EndpointSlice> = self.context.client.api(Some(&key.namespace));
        for slice in &plan.create {
            match api.create(&PostParams::default(), slice).await {
                Err(error) if error.is_namespace_terminating() => return Ok(Outcome::Done),
                done => drop(done?),
            }
        }
        for slice in &plan.update {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            api.replace(name, &PostParams::default(), slice).await?;
        }
        for name in &plan.delete {
            match api.delete(name, &DeleteParams::default()).await {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        Ok(Outcome::Done)
    }
}

fn is_mirrored(endpoints: &Endpoints) -> bool {
    let meta = &endpoints.metadata;
    let skips = meta.labels.as_ref().and_then(|labels| labels.get(SKIP));
    let skips = skips.is_some_and(|value| matches!(value.as_str(), "true" | "True" | "1" | "t"));
    let elects = meta.annotations.as_ref().is_some_and(|all| all.contains_key(LEADER));
    !skips && !elects
}

#[derive(Default)]
struct Plan {
    create: Vec<EndpointSlice>,
    update: Vec<EndpointSlice>,
    delete: Vec<String>,
    warning: Option<(&'static str, String)>,
}

/// The address family and the ports as text: they identify a slice.
type Group = (String, String);

fn group_of(family: &str, ports: &[EndpointPort]) -> Group {
    let mut names: Vec<_> = ports.iter().map(|port| format!("{port:?}")).collect();
    names.sort_unstable();
    (family.to_owned(), names.join(" "))
}

/// Pure. No endpoints: nothing is mirrored (any more).
fn plan(endpoints: Option<&Endpoints>, existing: &[Arc<EndpointSlice>]) -> Plan {
    let mut plan = Plan::default();
    let name_of = |slice: &EndpointSlice| slice.metadata.name.clone().unwrap_or_default();
    let Some(endpoints) = endpoints else {
        plan.delete = existing.iter().map(|slice| name_of(slice)).collect();
        return plan;
    };
    let mut wanted = wanted(endpoints, &mut plan);
    let mut left: BTreeMap<Group, Vec<&Arc<EndpointSlice>>> = BTreeMap::new();
    for slice in existing {
        let ports = slice.ports.clone().unwrap_or_default();
        left.entry(group_of(&slice.address_type, &ports)).or_default().push(slice);
    }
    // Slices that serve no group any more are taken for new ones.
    let mut spare: Vec<&Arc<EndpointSlice>> = vec![];
    left.retain(|group, slices| {
        let kept = wanted.contains_key(group);
        spare.extend(slices.drain(usize::from(kept).min(slices.len())..));
        kept
    });
    while let Some((group, (ports, list))) = wanted.pop_first() {
        let mut slice = new_slice(endpoints, &group.0, ports, list);
        match left.get(&group).and_then(|slices| slices.first()) {
            Some(known) if is_same(known, &slice) => {}
            Some(known) => {
                take_place(&mut slice, known);
                plan.update.push(slice);
            }
            None => {
                let at = spare.iter().position(|one| one.address_type == group.0);
                match at.map(|at| spare.remove(at)) {
                    Some(known) => {
                        take_place(&mut slice, known);
                        plan.update.push(slice);
                    }
                    None => plan.create.push(slice),
                }
            }
        }
    }
    plan.delete = spare.into_iter().map(|slice| name_of(slice)).collect();
    plan
}

fn take_place(slice: &mut EndpointSlice, known: &EndpointSlice) {
    slice.metadata.name = known.metadata.name.clone();
    slice.metadata.generate_name = None;
    slice.metadata.resource_version = known.metadata.resource_version.clone();
}

fn is_same(known: &EndpointSlice, wanted: &EndpointSlice) -> bool {
    known.metadata.labels == wanted.metadata.labels
        && known.metadata.annotations.clone().unwrap_or_default()
            == wanted.metadata.annotations.clone().unwrap_or_default()
        && known.endpoints == wanted.endpoints
}

fn wanted(
    endpoints: &Endpoints,
    plan: &mut Plan,
) -> BTreeMap<Group, (Vec<EndpointPort>, Vec<Endpoint>)> {
    let mut wanted: BTreeMap<Group, (Vec<EndpointPort>, Vec<Endpoint>)> = BTreeMap::new();
    let (mut invalid, mut skipped) = (0, 0);
    for subset in endpoints.subsets.iter().flatten() {
        let ports = ports_of(subset);
        let mut added = 0;
        let ready = subset.addresses.iter().flatten().map(|one| (one, true));
        let unready = subset.not_ready_addresses.iter().flatten().map(|one| (one, false));
        for (address, ready) in ready.chain(unready) {
            if added >= PER_SUBSET {
                skipped += 1;
                continue;
            }
            let Some((family, endpoint)) = endpoint_of(address, ready) else {
                invalid += 1;
                continue;
            };
            let group = group_of(family, &ports);
            let list = &mut wanted.entry(group).or_insert_with(|| (ports.clone(), vec![])).1;
            if !list.iter().any(|one| one.addresses == endpoint.addresses) {
                list.push(endpoint);
            }
            added += 1;
        }
    }
    if invalid > 0 {
        let message =
            format!("Skipped {invalid} invalid IP addresses when mirroring to EndpointSlices");
        plan.warning = Some(("InvalidIPAddress", message));
    }
    if skipped > 0 {
        let message = format!(
            "A max of {PER_SUBSET} addresses can be mirrored to EndpointSlices per Endpoints subset. {} addresses were skipped",
            skipped + invalid
        );
        plan.warning = Some(("TooManyAddressesToMirror", message));
    }
    wanted
}

fn ports_of(subset: &EndpointSubset) -> Vec<EndpointPort> {
    let ports = subset.ports.iter().flatten().map(|port| EndpointPort {
        name: Some(port.name.clone().unwrap_or_default()),
        port: Some(port.port),
        protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
        app_protocol: port.app_protocol.clone(),
    });
    ports.collect()
}

fn endpoint_of(address: &EndpointAddress, ready: bool) -> Option<(&'static str, Endpoint)> {
    let ip: IpAddr = address.ip.parse().ok()?;
    let endpoint = Endpoint {
        addresses: vec![ip.to_string()],
        conditions: Some(EndpointConditions { ready: Some(ready), ..Default::default() }),
        target_ref: address.target_ref.clone(),
        node_name: address.node_name.clone(),
        hostname: address.hostname.clone().filter(|name| !name.is_empty()),
        ..Endpoint::default()
    };
    Some((if ip.is_ipv4() { "IPv4" } else { "IPv6" }, endpoint))
}

fn new_slice(
    endpoints: &Endpoints,
    family: &str,
    ports: Vec<EndpointPort>,
    list: Vec<Endpoint>,
) -> EndpointSlice {
    let meta = &endpoints.metadata;
    let name = meta.name.clone().unwrap_or_default();
    let mut labels = meta.labels.clone().unwrap_or_default();
    labels.insert(SERVICE.into(), name.clone());
    labels.insert(MANAGED_BY.into(), MANAGER.into());
    let mut annotations = meta.annotations.clone().unwrap_or_default();
    annotations.retain(|key, _| !NOT_COPIED.contains(&key.as_str()));
    EndpointSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("{name}-")),
            namespace: meta.namespace.clone(),
            labels: Some(labels),
            annotations: (!annotations.is_empty()).then_some(annotations),
            owner_references: Some(vec![owner::reference(endpoints)]),
            ..ObjectMeta::default()
        },
        address_type: family.into(),
        ports: (!ports.is_empty()).then_some(ports),
        endpoints: Some(list),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    fn endpoints(subsets: Value) -> Endpoints {
        from_value(json!({"metadata": {"name": "db", "namespace": "ns", "uid": "e",
            "annotations": {"a": "b", NOT_COPIED[1]: "x"}}, "subsets": subsets}))
        .unwrap()
    }

    #[test]
    fn slices_follow_endpoints() {
        let both = endpoints(json!([{"addresses": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
            "notReadyAddresses": [{"ip": "10.0.0.2"}, {"ip": "nonsense"}],
            "ports": [{"name": "db", "port": 5432}]}]));
        let made = plan(Some(&both), &[]);
        let told: Vec<_> = made
            .create
            .iter()
            .map(|slice| {
                format!("{} {}", slice.address_type, slice.endpoints.as_ref().map_or(0, Vec::len))
            })
            .collect();
        assert_eq!(told, ["IPv4 2", "IPv6 1"]);
        assert_eq!(made.warning.unwrap().0, "InvalidIPAddress");
        assert_eq!(made.create[0].metadata.annotations.as_ref().unwrap().len(), 1);
        let known: Vec<_> = made
            .create
            .into_iter()
            .enumerate()
            .map(|(at, mut slice)| {
                slice.metadata.name = Some(format!("db-{at}"));
                Arc::new(slice)
            })
            .collect();
        let again = plan(Some(&both), &known);
        assert!(again.create.is_empty() && again.update.is_empty() && again.delete.is_empty());
        let less = endpoints(json!([{"addresses": [{"ip": "10.0.0.9"}],
            "ports": [{"name": "db", "port": 5433}]}]));
        let changed = plan(Some(&less), &known);
        assert_eq!(changed.update[0].metadata.name.as_deref(), Some("db-0"));
        assert_eq!(changed.delete, ["db-1"]);
        assert_eq!(plan(None, &known).delete, ["db-0", "db-1"]);
    }
}
