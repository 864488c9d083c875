//! Dynamic resource allocation on the node: drivers prepare claims before a pod starts; containers get
//! the devices; drivers unprepare claims after the pod has ended.
//!
//! ```text
//!  plugins_registry/*.sock ─► drivers ─► NodePrepareResources ─► CDI names, recorded on disk
//!                                │                                  │
//!  pod worker: sandbox ──────────┘     containers: those of their requests (by claim, or by the
//!  pod worker: all stopped ─► NodeUnprepareResources                mappings of extended resources)
//! ```
//!
//! In: sockets, claims, pods. Out: CDI devices for the runtime; `dra_manager_state`.
//! Invariants: a claim is on record before a driver prepares it, and until the driver has unprepared it.
//! A claim is unprepared when its last pod on this node has ended; that pod is not over before that.
//! Upstream: `pkg/kubelet/cm/dra`.

mod driver;
mod error;
mod messages;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use client::{Api, Client};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::config::Config;
use crate::names;
use driver::Driver;
pub use driver::{Registered, keep_slices};
pub use error::DraError;
use messages::{Claim, Prepared};
use record::{Device, Record, Table};

const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

/// Whether a resource of this name may be backed by devices. Upstream: `IsDRAExtendedResourceName`.
fn is_extended(name: &str) -> bool {
    name.contains('/')
        && (!name.contains("kubernetes.io/")
            || name.starts_with("deviceclass.resource.kubernetes.io/"))
}

pub struct Devices {
    client: Client,
    node_name: String,
    /// Plugins by driver name, the newest last. Held for look-ups, never across await.
    drivers: Mutex<BTreeMap<String, Vec<Arc<Driver>>>>,
    /// The prepared claims. Held for look-ups and while the file is written, never across await.
    table: Mutex<Table>,
}

/// A pod's reference to a claim.
struct Named {
    /// The entry in the pod's list; `None`: the claim is for extended resources.
    entry: Option<String>,
    claim: String,
    /// The claim was made for the pod from a template.
    is_made: bool,
}

/// The pod's claims; those that are not needed are left out.
fn claims_of(pod: &Pod) -> Result<Vec<Named>, DraError> {
    let status = pod.status.as_ref();
    let mut all = vec![];
    for entry in pod.spec.iter().flat_map(|spec| spec.resource_claims.iter().flatten()) {
        let name = Some(entry.name.clone());
        if let Some(claim) = &entry.resource_claim_name {
            all.push(Named { entry: name, claim: claim.clone(), is_made: false });
            continue;
        }
        let mut known = status.iter().flat_map(|one| one.resource_claim_statuses.iter().flatten());
        let known = known.find(|one| one.name == entry.name).ok_or_else(|| {
            DraError::NotCreated(format!("{}/{}", names::namespace(pod), names::name(pod)))
        })?;
        if let Some(claim) = &known.resource_claim_name {
            all.push(Named { entry: name, claim: claim.clone(), is_made: true });
        }
    }
    if let Some(extended) = status.and_then(|one| one.extended_resource_claim_status.as_ref()) {
        let claim = extended.resource_claim_name.clone();
        all.push(Named { entry: None, claim, is_made: false });
    }
    Ok(all)
}

/// The container's (claim, request) pairs; an empty request means all requests.
fn requests_of(pod: &Pod, container: &Container) -> Result<Vec<(String, String)>, DraError> {
    let resources = container.resources.clone().unwrap_or_default();
    let named = claims_of(pod)?;
    let mut all = vec![];
    for asked in resources.claims.iter().flatten() {
        let found = named.iter().find(|one| one.entry.as_ref() == Some(&asked.name));
        let request = asked.request.clone().unwrap_or_default();
        all.extend(found.map(|one| (one.claim.clone(), request)));
    }
    let status = pod.status.as_ref();
    if let Some(extended) = status.and_then(|one| one.extended_resource_claim_status.as_ref()) {
        let asks = |name: &str| {
            let amount = resources.requests.as_ref().and_then(|all| all.get(name));
            is_extended(name) && amount.is_some_and(|amount| crate::resources::units(amount) > 0)
        };
        let own = extended
            .request_mappings
            .iter()
            .filter(|one| one.container_name == container.name && asks(&one.resource_name));
        let claim = &extended.resource_claim_name;
        all.extend(own.map(|one| (claim.clone(), one.request_name.clone())));
    }
    Ok(all)
}

/// Checks that the pod may use the claim, and returns the drivers of its devices.
fn usable(pod: &Pod, named: &Named, claim: &ResourceClaim) -> Result<BTreeSet<String>, DraError> {
    let (name, uid) = (names::name(pod), names::uid(pod));
    let mut owners = claim.metadata.owner_references.iter().flatten();
    let is_own = owners.any(|owner| owner.controller == Some(true) && owner.uid == uid);
    if named.is_made && !is_own {
        let namespace = names::namespace(pod).to_owned();
        return Err(DraError::NotOwner { namespace, claim: named.claim.clone(), pod: name.into() });
    }
    let status = claim.status.clone().unwrap_or_default();
    if !status.reserved_for.iter().flatten().any(|user| user.uid == uid) {
        return Err(DraError::NotReserved {
            pod: name.to_owned(),
            uid: uid.to_owned(),
            claim: named.claim.clone(),
            claim_uid: claim.metadata.uid.clone().unwrap_or_default(),
        });
    }
    let Some(allocation) = status.allocation else {
        return Err(DraError::NotAllocated(named.claim.clone()));
    };
    let devices = allocation.devices.unwrap_or_default();
    Ok(devices.results.into_iter().flatten().map(|result| result.driver).collect())
}

impl Devices {
    pub fn new(client: &Client, config: &Config) -> Self {
        Self {
            client: client.clone(),
            node_name: config.node_name.clone(),
            drivers: Mutex::default(),
            table: Mutex::new(Table::read(&config.root_dir)),
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no panic while held")
    }

    fn drivers(&self) -> MutexGuard<'_, BTreeMap<String, Vec<Arc<Driver>>>> {
        self.drivers.lock().expect("no panic while held")
    }

    /// The newest of a driver's plugins.
    fn driver(&self, name: &str) -> Result<Arc<Driver>, DraError> {
        let drivers = self.drivers();
        let found = drivers.get(name).and_then(|all| all.last()).cloned();
        found.ok_or_else(|| DraError::NotRegistered(name.to_owned()))
    }

    /// Has the drivers prepare all claims of a pod that are not prepared.
    pub async fn prepare(&self, pod: &Pod) -> Result<(), DraError> {
        let done = self.try_prepare(pod).await;
        done.map_err(|why| DraError::Prepare(Box::new(why)))
    }

    async fn try_prepare(&self, pod: &Pod) -> Result<(), DraError> {
        // All checks come before the first record, so that a failed check leaves nothing to undo.
        let mut wanted = vec![];
        for named in claims_of(pod)? {
            let api: Api<ResourceClaim> = self.client.api(Some(names::namespace(pod)));
            let claim = api.get(&named.claim).await;
            let claim = claim.map_err(|error| DraError::Fetch {
                claim: named.claim.clone(),
                error: Box::new(error),
            })?;
            let drivers = usable(pod, &named, &claim)?;
            for name in &drivers {
                self.driver(name)?;
            }
            wanted.push((claim, drivers));
        }
        let mut batches: BTreeMap<String, Vec<Claim>> = BTreeMap::new();
        for (claim, drivers) in wanted {
            if let Some(asked) = self.table().note(&claim, &drivers, names::uid(pod))? {
                for name in drivers {
                    batches.entry(name).or_default().push(asked.clone());
                }
            }
        }
        let asked: BTreeSet<String> =
            batches.values().flatten().map(|claim| claim.uid.clone()).collect();
        for (name, claims) in batches {
            let driver = self.driver(&name)?;
            let answer = driver.prepare(&claims).await;
            let answer = answer.map_err(|error| DraError::Call { call: PREPARE, error })?;
            self.note_devices(&name, &claims, answer)?;
        }
        self.table().prepared(&asked)
    }

    fn note_devices(
        &self,
        driver: &str,
        claims: &[Claim],
        answer: BTreeMap<String, Prepared>,
    ) -> Result<(), DraError> {
        let missing = claims.len().saturating_sub(answer.len());
        for (uid, prepared) in answer {
            let claim = claims.iter().find(|claim| claim.uid == uid);
            let claim = claim.ok_or(DraError::UnknownClaim(uid))?;
            if !prepared.error.is_empty() {
                let (claim, why) = (claim.name.clone(), prepared.error);
                return Err(DraError::Failed { call: PREPARE, claim, why });
            }
            let devices = prepared.devices.into_iter().map(Device::from).collect();
            self.table().devices(claim, driver, devices);
        }
        if missing > 0 {
            return Err(DraError::Skipped { call: PREPARE, count: missing });
        }
        Ok(())
    }

    /// The CDI devices of a container, without duplicates.
    pub fn of(&self, pod: &Pod, container: &Container) -> Result<Vec<String>, DraError> {
        let mut all: Vec<String> = vec![];
        for (claim, request) in requests_of(pod, container)? {
            let namespace = names::namespace(pod);
            let table = self.table();
            let record = table.get(namespace, &claim);
            let record = record
                .ok_or_else(|| DraError::NoRecord { claim, namespace: namespace.to_owned() })?;
            for name in record.cdi_devices(&request) {
                if !all.iter().any(|known| known == name) {
                    all.push(name.to_owned());
                }
            }
        }
        Ok(all)
    }

    /// The container's claims as drivers prepared them; empty if one of them is unknown.
    pub fn records_of(&self, pod: &Pod, container: &Container) -> Vec<Record> {
        let mut names: Vec<String> = vec![];
        for (claim, _) in requests_of(pod, container).unwrap_or_default() {
            if !names.contains(&claim) {
                names.push(claim);
            }
        }
        let table = self.table();
        let record = |name: &String| table.get(names::namespace(pod), name).cloned();
        names.iter().map(record).collect::<Option<_>>().unwrap_or_default()
    }

    /// Has the drivers unprepare the claims that no other pod of this node uses.
    pub async fn give_back(&self, pod_uid: &str) -> Result<(), DraError> {
        if !self.pods().contains(pod_uid) {
            return Ok(());
        }
        let last = self.table().leave(pod_uid);
        let mut batches: BTreeMap<&str, Vec<Claim>> = BTreeMap::new();
        for record in &last {
            for name in record.drivers.keys() {
                batches.entry(name).or_default().push(record.claim());
            }
        }
        for (name, claims) in batches {
            let answer = self.driver(name)?.unprepare(&claims).await;
            let answer = answer.map_err(|error| DraError::Call { call: UNPREPARE, error })?;
            for claim in &claims {
                let Some(done) = answer.get(&claim.uid) else {
                    return Err(DraError::Skipped { call: UNPREPARE, count: 1 });
                };
                if !done.error.is_empty() {
                    let (claim, why) = (claim.name.clone(), done.error.clone());
                    return Err(DraError::Failed { call: UNPREPARE, claim, why });
                }
            }
        }
        self.table().forget(&last)
    }

    /// The pods that have claims on record.
    pub fn pods(&self) -> BTreeSet<String> {
        self.table().records().flat_map(|record| record.pods.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn check(claims: Value, requests: Value, expected: &[(&str, &str)]) {
        let pod: Pod = from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"resourceClaims": [{"name": "own", "resourceClaimName": "shared"},
                {"name": "made", "resourceClaimTemplateName": "t"},
                {"name": "none", "resourceClaimTemplateName": "t"}],
                "containers": [{"name": "c", "resources": {"claims": claims, "requests": requests}}]},
            "status": {"resourceClaimStatuses": [{"name": "made", "resourceClaimName": "p-made-x"},
                {"name": "none"}],
                "extendedResourceClaimStatus": {"resourceClaimName": "p-extended",
                    "requestMappings": [
                        {"containerName": "c", "resourceName": "example.com/gpu", "requestName": "r1"},
                        {"containerName": "c", "resourceName": "example.com/gpu", "requestName": "r2"},
                        {"containerName": "d", "resourceName": "example.com/gpu", "requestName": "r3"}]}}}))
        .unwrap();
        let container = pod.spec.as_ref().unwrap().containers[0].clone();
        let found = requests_of(&pod, &container).unwrap();
        let found: Vec<_> = found.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn containers_have_the_requested_devices() {
        check(json!([]), json!({"cpu": "1"}), &[]);
        check(
            json!([{"name": "own"}, {"name": "made", "request": "r"}, {"name": "none"}]),
            json!({}),
            &[("shared", ""), ("p-made-x", "r")],
        );
        check(
            json!([]),
            json!({"example.com/gpu": "3"}),
            &[("p-extended", "r1"), ("p-extended", "r2")],
        );
        check(json!([]), json!({"example.com/gpu": "0"}), &[]);
    }

    #[test]
    fn claims_must_be_reserved_for_the_pod() {
        let pod: Pod =
            from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}})).unwrap();
        let check = |is_made: bool, status: Value, expected: Result<&[&str], &str>| {
            let claim: ResourceClaim = from_value(json!({"metadata": {"name": "c", "uid": "cu"},
                "spec": {}, "status": status}))
            .unwrap();
            let named = Named { entry: None, claim: "c".into(), is_made };
            let found = usable(&pod, &named, &claim).map_err(|why| why.to_string());
            let expected = expected
                .map(|all| all.iter().map(|name| name.to_string()).collect())
                .map_err(str::to_owned);
            assert_eq!(found, expected);
        };
        let reserved = json!([{"resource": "pods", "name": "p", "uid": "u"}]);
        let results = json!([{"request": "r", "driver": "b", "pool": "p", "device": "d"},
            {"request": "r", "driver": "a", "pool": "p", "device": "d"}]);
        check(
            false,
            json!({"reservedFor": reserved, "allocation": {"devices": {"results": results}}}),
            Ok(&["a", "b"]),
        );
        let refused = "pod p (u) is not allowed to use ResourceClaim c (cu)";
        check(false, json!({"allocation": {}}), Err(refused));
        check(false, json!({"reservedFor": reserved}), Err("ResourceClaim c: not allocated"));
        let foreign = "ResourceClaim ns/c was not created for Pod ns/p (Pod is not owner)";
        check(true, json!({"reservedFor": reserved}), Err(foreign));
    }
}
