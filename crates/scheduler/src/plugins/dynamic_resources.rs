//! Schedules pods to nodes with the devices of their ResourceClaims.
//!
//! Filter finds devices on a node for all claims that have none; Reserve keeps the devices of the
//! chosen node; PreBind writes the allocations and the pod's reservations. Extended resources that
//! DeviceClasses provide are one more claim (`extended_claim.rs`). Upstream: `dynamicresources`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use client::{Api, Client, ErrorExt, Patch, PatchParams, PostParams, retry_on_conflict};
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceRequest, ResourceClaim, ResourceClaimConsumerReference,
};
use machinery::Time;
use serde_json::json;

use super::device_readiness::{is_overdue, is_ready};
use super::extended_claim::{self, Extended, Promise, Promises};
use crate::claims::{Claims, FINALIZER, allocation, name_of};
use crate::cluster::Cluster;
use crate::devices::{self, Failure, Limit, Place, Selectors, World};
use crate::error::BindError;
use crate::framework::{
    ClusterEvent, CycleState, Diagnosis, ExtensionPoints, Filter, Framework, Next, PostBind,
    PostFilter, PostFiltered, PreBind, PreEnqueue, PreFilter, PreScore, Rejection, Reserve, Row,
    Score, normalize,
};
use crate::node::NodeInfo;
use crate::pod::{ClaimName, PodInfo};
use crate::resources::Resources;
use api::node_selectors;

const NAME: &str = "DynamicResources";
/// Deviation: not as long as [`LONGEST`], unless a file says so: it takes a writer meanwhile, and the
/// pod is tried again after it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Upstream: `DynamicResourcesBindingTimeoutDefault`.
const LONGEST: Duration = Duration::from_secs(600);

pub const ROW: Row = Row {
    name: NAME,
    weight: 2,
    build: |handle| {
        let Some(objects) = handle.objects.clone() else { return ExtensionPoints::default() };
        let plugin = Arc::new(DynamicResources {
            client: handle.client.clone(),
            claims: objects.claims,
            selectors: Selectors::default(),
            promises: Promises::default(),
            limit: handle.args.filter_timeout.map_or_else(Limit::default, Limit::of),
            patience: handle.args.binding_timeout.unwrap_or(PATIENCE),
            longest: handle.args.binding_timeout.unwrap_or(LONGEST),
        });
        ExtensionPoints {
            pre_enqueue: Some(plugin.clone()),
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin.clone()),
            post_filter: Some(plugin.clone()),
            pre_score: Some(plugin.clone()),
            score: Some(plugin.clone()),
            reserve: Some(plugin.clone()),
            pre_bind: Some(plugin.clone()),
            post_bind: Some(plugin),
            ..Default::default()
        }
    },
    hint: |pod, event| match event {
        ClusterEvent::NodeAdded(_)
        | ClusterEvent::PodUpdated
        | ClusterEvent::DevicesChanged
        | ClusterEvent::ClassChanged { .. } => true,
        ClusterEvent::NodeUpdated { old, new } => {
            old.labels != new.labels || old.allocatable != new.allocatable
        }
        ClusterEvent::ClaimChanged { claim, freed, changed } => {
            let is_own = || {
                claim.namespace == pod.key.namespace
                    && pod.device_claims.iter().any(|one| one.name() == Some(&claim.name))
            };
            *freed || (*changed && is_own())
        }
        // Its tentative devices are free again.
        ClusterEvent::PodRemoved(other) => wants_devices(other),
        _ => false,
    },
};

struct DynamicResources {
    client: Client,
    claims: Claims,
    selectors: Selectors,
    promises: Promises,
    /// The timeout of a search on one node.
    limit: Limit,
    /// Devices that are made ready are waited for so long at a time,
    patience: Duration,
    /// and after so long others are looked for.
    longest: Duration,
}

type Allocations = Vec<AllocationResult>;

/// A pod's claims, for one attempt.
struct Found {
    claims: Vec<Arc<ResourceClaim>>,
    /// The claims without an allocation,
    open: Vec<Arc<ResourceClaim>>,
    /// and one more if extended resources are devices here.
    extended: Option<Extended>,
    /// The devices that they could get.
    world: Arc<World>,
    /// What Filter found for them, by node. A mutex, as Filter sees the state of all nodes at once.
    by_node: Mutex<BTreeMap<String, Allocations>>,
}

impl Found {
    /// The special claim for a node with that much, if it needs one there.
    fn promise(
        &self,
        pod: &PodInfo,
        allocatable: &Resources,
    ) -> Result<Option<Promise>, Rejection> {
        self.extended.as_ref().map_or(Ok(None), |extended| extended.on(pod, allocatable))
    }

    /// All that devices are to be found for.
    fn open_with(&self, promise: Option<&Promise>) -> Vec<Arc<ResourceClaim>> {
        self.open.iter().chain(promise.map(|promise| &promise.claim)).cloned().collect()
    }
}

/// Is there anything to do for it at all?
fn wants_devices(pod: &PodInfo) -> bool {
    !pod.device_claims.is_empty() || !pod.extended.is_empty()
}

fn no<T>(why: impl Into<Cow<'static, str>>) -> Result<T, Rejection> {
    Err(Rejection::unresolvable(why))
}

fn is_reserved_for(pod: &PodInfo, claim: &ResourceClaim) -> bool {
    let consumers = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    consumers.into_iter().any(|one| one.uid == pod.uid)
}

impl DynamicResources {
    fn claims_of(&self, pod: &PodInfo) -> Result<Vec<Arc<ResourceClaim>>, Rejection> {
        let mut all = vec![];
        for one in &pod.device_claims {
            let (name, is_made) = match one {
                ClaimName::None => continue,
                ClaimName::Awaited => {
                    return no(format!("pod \"{}\": ResourceClaim not created yet", pod.key));
                }
                ClaimName::Made(name) => (name, true),
                ClaimName::Given(name) => (name, false),
            };
            let namespace = &pod.key.namespace;
            let Some(claim) = self.claims.get(namespace, name) else {
                return no(format!("could not find ResourceClaim \"{namespace}/{name}\""));
            };
            if claim.metadata.deletion_timestamp.is_some() {
                return no(format!("resourceclaim {name:?} is being deleted"));
            }
            let mut owners = claim.metadata.owner_references.iter().flatten();
            let is_own = owners.any(|owner| owner.controller == Some(true) && owner.uid == pod.uid);
            if is_made && !is_own {
                return no(format!(
                    "ResourceClaim {namespace}/{name} was not created for Pod {} (Pod is not owner)",
                    pod.key
                ));
            }
            all.push(claim);
        }
        Ok(all)
    }

    fn find(&self, pod: &PodInfo) -> Result<Found, Rejection> {
        let claims = self.claims_of(pod)?;
        let open: Vec<_> =
            claims.iter().filter(|claim| allocation(claim).is_none()).cloned().collect();
        for claim in &open {
            if self.claims.decided(claim).is_some() {
                let claim = format!("{}/{}", pod.key.namespace, name_of(claim));
                return no(format!("resource claim {claim} is in the process of being allocated"));
            }
            let requests = claim.spec.devices.iter().flat_map(|one| one.requests.iter().flatten());
            for (name, class) in requests.flat_map(classes_of) {
                if !class.is_empty() && self.claims.class(class).is_none() {
                    return no(format!("request {name}: device class {class} does not exist"));
                }
            }
        }
        let extended = Extended::of(&self.claims, pod);
        let world = match open.is_empty() && extended.is_none() {
            true => Arc::default(),
            false => self.claims.world(),
        };
        Ok(Found { claims, open, extended, world, by_node: Mutex::default() })
    }

    fn allocate(
        &self,
        world: &World,
        open: &[Arc<ResourceClaim>],
        place: Place<'_>,
    ) -> Result<Option<Allocations>, Rejection> {
        let node = place.node;
        let all = devices::allocate(world, place, open, &self.selectors);
        all.map_err(|why| match why {
            Failure::InvalidPools => Rejection::unresolvable(why.to_string()),
            Failure::Broken(_) => Rejection::broken(why.to_string()),
            Failure::Exhausted => Rejection::broken(format!("node {node}: {why}")),
        })
    }
}

/// Each request, or alternative, with its class.
fn classes_of(request: &DeviceRequest) -> Vec<(String, &str)> {
    if let Some(exactly) = &request.exactly {
        return vec![(request.name.clone(), &exactly.device_class_name)];
    }
    let subs = request.first_available.iter().flatten();
    subs.map(|sub| (format!("{}/{}", request.name, sub.name), &*sub.device_class_name)).collect()
}

/// Can a claim that has devices be used there?
fn is_usable(claim: &ResourceClaim, node: &NodeInfo, longest: Duration) -> bool {
    let Some(allocation) = allocation(claim) else { return true };
    let nodes = allocation.node_selector.as_ref();
    nodes.is_none_or(|nodes| node_selectors::matches(nodes, &node.name, &node.labels))
        && match is_ready(claim) {
            Ok(ready) => ready || !is_overdue(claim, longest),
            Err(_) => false,
        }
}

impl PreEnqueue for DynamicResources {
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), Rejection> {
        self.claims_of(pod).map(drop)
    }
}

impl PreFilter for DynamicResources {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _: &Cluster,
    ) -> Result<Next, Rejection> {
        if !wants_devices(pod) {
            return Ok(Next::Skip);
        }
        let found = self.find(pod)?;
        if found.claims.is_empty() && found.extended.is_none() {
            return Ok(Next::Skip);
        }
        state.put(NAME, found);
        Ok(Next::Filter)
    }
}

impl Filter for DynamicResources {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(found) = state.get::<Found>(NAME) else { return Ok(()) };
        let open = found.open_with(found.promise(pod, &node.allocatable)?.as_ref());
        if !open.is_empty() {
            let place = Place { node: &node.name, labels: &node.labels, limit: self.limit };
            let Some(all) = self.allocate(&found.world, &open, place)? else {
                return no("cannot allocate all claims");
            };
            let mut by_node = found.by_node.lock().expect("insertions do not panic");
            by_node.insert(node.name.clone(), all);
        }
        match found.claims.iter().all(|claim| is_usable(claim, node, self.longest)) {
            true => Ok(()),
            false => no("resourceclaim not available on the node"),
        }
    }
}

impl PostFilter for DynamicResources {
    /// Deallocates an unused claim if its allocation keeps the pod from all nodes.
    fn post_filter(
        &self,
        _: &Framework,
        pod: &PodInfo,
        cluster: &Cluster,
        _: &Diagnosis,
    ) -> PostFiltered {
        let said = |message: &str| PostFiltered { message: message.into(), ..Default::default() };
        let claims = self.claims_of(pod).unwrap_or_default();
        let extended = Extended::of(&self.claims, pod);
        if claims.is_empty() && extended.is_none() {
            return said("no new claims to deallocate");
        }
        let is_in_the_way = |claim: &&Arc<ResourceClaim>| {
            let users = claim.status.iter().flat_map(|one| one.reserved_for.iter().flatten());
            allocation(claim).is_some()
                && users.into_iter().all(|one| one.uid == pod.uid)
                && cluster.nodes().any(|node| !is_usable(claim, node, self.longest))
        };
        let client = self.client.clone();
        let Some(claim) = claims.iter().find(is_in_the_way) else {
            let Some(Extended::Stale(claim)) = extended else {
                return said("still not schedulable");
            };
            let namespace = pod.key.namespace.clone();
            let work =
                async move { extended_claim::delete(&client, &namespace, name_of(&claim)).await };
            let work = Some(work.boxed());
            return PostFiltered { work, ..said("deletion of ResourceClaim completed") };
        };
        let mut freed = (**claim).clone();
        freed.status = None;
        let work = async move {
            let name = name_of(&freed).to_owned();
            let api: Api<ResourceClaim> = client.api(freed.metadata.namespace.as_deref());
            if let Err(error) = api.replace_status(&name, &PostParams::default(), &freed).await {
                tracing::warn!(
                    claim = name,
                    error = error.text(),
                    "failed to deallocate the ResourceClaim"
                );
            }
        };
        PostFiltered { work: Some(work.boxed()), ..said("deallocation of ResourceClaim completed") }
    }
}

impl PreScore for DynamicResources {
    fn pre_score(&self, state: &mut CycleState, _: &PodInfo, _: &Cluster, _: &[&NodeInfo]) -> Next {
        Next::only_if(state.get::<Found>(NAME).is_some())
    }
}

impl Score for DynamicResources {
    fn score(&self, state: &CycleState, _: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let Some(found) = state.get::<Found>(NAME) else { return 0 };
        let by_node = found.by_node.lock().expect("lookups do not panic");
        let new = by_node.get(&node.name).into_iter().flatten();
        let new: i64 =
            found.open.iter().zip(new).map(|(claim, one)| devices::score(claim, one)).sum();
        let old = found.claims.iter();
        let old = old.filter_map(|claim| Some(devices::score(claim, allocation(claim)?)));
        new + old.sum::<i64>()
    }

    fn normalize(&self, _: &CycleState, _: &PodInfo, scores: &mut [i64]) {
        normalize(scores, false);
    }
}

impl Reserve for DynamicResources {
    fn reserve(&self, _: &mut CycleState, pod: &PodInfo, node: &str) -> Result<(), Rejection> {
        if !wants_devices(pod) {
            return Ok(());
        }
        let found = self.find(pod)?;
        // As Filter found it: the same question has the same answer.
        let known = self.claims.node(node).map(|known| (*known).clone()).unwrap_or_default();
        let allocatable = known.status.and_then(|status| status.allocatable);
        let promise = found.promise(pod, &Resources::from_list(allocatable.as_ref()))?;
        let open = found.open_with(promise.as_ref());
        if open.is_empty() {
            return Ok(());
        }
        let labels = known.metadata.labels.unwrap_or_default();
        let place = Place { node, labels: &labels, limit: self.limit };
        let Some(all) = self.allocate(&found.world, &open, place)? else {
            return no("claim allocation not found for node");
        };
        for (claim, allocation) in open.iter().zip(all) {
            self.claims.decide(&pod.uid, claim, allocation);
        }
        if let Some(promise) = promise {
            self.promises.make(pod, promise);
        }
        Ok(())
    }

    fn unreserve(&self, _: &CycleState, pod: &PodInfo, _: &str) {
        if wants_devices(pod) {
            self.claims.give_back(&pod.uid);
            self.promises.end(pod);
        }
    }
}

impl PreBind for DynamicResources {
    fn pre_bind<'a>(
        &'a self,
        pod: &'a PodInfo,
        _: &'a str,
    ) -> BoxFuture<'a, Result<(), BindError>> {
        Box::pin(async move {
            if !wants_devices(pod) {
                return Ok(());
            }
            let mut claims = self.claims_of(pod).map_err(BindError::Rejected)?;
            for claim in &claims {
                if !is_reserved_for(pod, claim) {
                    self.write(pod, claim).await?;
                }
            }
            if let Some(claim) = self.promises.create(&self.client, &self.claims, pod).await? {
                self.write(pod, &claim).await?;
                self.promises.tell(&self.client, pod, name_of(&claim)).await?;
                claims.push(Arc::new(claim));
            }
            self.devices_are_ready(pod, &claims).await
        })
    }

    /// Other pods may use the claims too; only this pod's reservation is removed.
    fn take_back<'a>(&'a self, pod: &'a PodInfo, _: &'a str) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            if !wants_devices(pod) {
                return;
            }
            self.promises.take_back(&self.client, pod).await;
            for claim in self.claims_of(pod).unwrap_or_default() {
                let api: Api<ResourceClaim> = self.client.api(Some(&pod.key.namespace));
                let patch = json!({"metadata": {"uid": claim.metadata.uid}, "status":
                    {"reservedFor": [{"$patch": "delete", "uid": pod.uid}]}});
                let patch = Patch::Strategic(&patch);
                let done = api.patch_status(name_of(&claim), &PatchParams::default(), &patch).await;
                if let Err(error) = done {
                    tracing::debug!(claim = name_of(&claim), error = error.text(), "unreserve");
                }
            }
        })
    }
}

impl PostBind for DynamicResources {
    fn post_bind(&self, pod: &PodInfo, _: &str) {
        self.promises.end(pod);
    }
}

impl DynamicResources {
    /// Writes the allocation and the pod's reservation.
    async fn write(&self, pod: &PodInfo, claim: &ResourceClaim) -> Result<(), BindError> {
        let allocation = self.claims.decided(claim);
        let api: Api<ResourceClaim> = self.client.api(Some(&pod.key.namespace));
        let name = name_of(claim);
        let first = Mutex::new(Some(claim.clone()));
        let refused = Mutex::new(None);
        let (api, allocation, first, refused) = (&api, &allocation, &first, &refused);
        let written = retry_on_conflict(|| async move {
            // After a conflict, reads the current claim.
            let known = first.lock().expect("taking does not panic").take();
            let claim = match known {
                Some(claim) => claim,
                None => api.get(name).await?,
            };
            let mut claim = match reserved(claim, pod, allocation.as_ref()) {
                Ok(claim) => claim,
                Err(why) => {
                    *refused.lock().expect("storing does not panic") = Some(why);
                    return Ok(None);
                }
            };
            let finalizers = claim.metadata.finalizers.get_or_insert_default();
            if allocation.is_some() && !finalizers.iter().any(|one| one == FINALIZER) {
                finalizers.push(FINALIZER.into());
                let status = claim.status.take();
                claim = api.replace(name, &PostParams::default(), &claim).await?;
                claim.status = status;
            }
            api.replace_status(name, &PostParams::default(), &claim).await.map(Some)
        })
        .await;
        match written {
            Ok(Some(claim)) => {
                self.claims.written(&claim);
                Ok(())
            }
            Ok(None) => Err(refused.lock().expect("as above").take().expect("a refused claim")),
            Err(error) => {
                let what = match allocation {
                    Some(_) => "allocation and reservation",
                    None => "reservation",
                };
                let action = format!("add {what} to claim {}/{name}", pod.key.namespace);
                Err(BindError::Write { action, error: Box::new(error) })
            }
        }
    }

    async fn devices_are_ready(
        &self,
        pod: &PodInfo,
        claims: &[Arc<ResourceClaim>],
    ) -> Result<(), BindError> {
        let mut changes = self.claims.changes();
        let ready = async {
            loop {
                let mut all_ready = true;
                for claim in claims {
                    let now = self.claims.get(&pod.key.namespace, name_of(claim));
                    if let Some(now) = now.filter(|now| allocation(now).is_some()) {
                        all_ready &= is_ready(&now)?;
                    } else if self.claims.decided(claim).is_some_and(|one| waits(&one)) {
                        all_ready = false;
                    }
                }
                if all_ready || changes.changed().await.is_err() {
                    return Ok(());
                }
            }
        };
        let late = |_| Err(BindError::DevicesTimeout);
        tokio::time::timeout(self.patience, ready).await.unwrap_or_else(late)
    }
}

fn waits(allocation: &AllocationResult) -> bool {
    let mut results = allocation.devices.iter().flat_map(|one| one.results.iter().flatten());
    results.any(|one| one.binding_conditions.as_ref().is_some_and(|all| !all.is_empty()))
}

/// Adds the allocation and the reservation to the claim. Pure except for the time.
fn reserved(
    mut claim: ResourceClaim,
    pod: &PodInfo,
    new: Option<&AllocationResult>,
) -> Result<ResourceClaim, BindError> {
    let title = format!("{}/{}", pod.key.namespace, name_of(&claim));
    let changed = |change| Err(BindError::ClaimChanged { claim: title, change });
    if claim.metadata.deletion_timestamp.is_some() {
        return changed("deleted");
    }
    let status = claim.status.get_or_insert_default();
    match (new, &status.allocation) {
        (Some(_), Some(_)) => return changed("allocated elsewhere"),
        (None, None) => return changed("deallocated elsewhere"),
        (Some(new), None) => status.allocation = Some(new.clone()),
        (None, Some(_)) => {}
    }
    if let Some(allocation) = &mut status.allocation {
        let now = || Time(base::clock::now_seconds());
        allocation.allocation_timestamp.get_or_insert_with(now);
    }
    let consumers = status.reserved_for.get_or_insert_default();
    if !consumers.iter().any(|one| one.uid == pod.uid) {
        consumers.push(ResourceClaimConsumerReference {
            api_group: None,
            resource: "pods".into(),
            name: pod.key.name.to_string(),
            uid: pod.uid.clone(),
        });
    }
    Ok(claim)
}
