//! Claims for devices, and what drivers offer, as plugins see them; allocations on their way.
//!
//! In: informers, and allocations that were decided but not written yet. Out: the [`World`] that
//! devices are chosen from, and events for pods that wait. Upstream: `DefaultDRAManager`.
//!
//! Cost: a change decodes one object. After a change of a claim, a class or a slice the next pod with claims
//! goes through all allocations, which are kept decoded; pods without claims do not.
//!
//! Invariant: a device that was decided on counts as taken from that moment until the API's word for
//! it is known here, or it is given back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use client::{Event, Informer, Informers, ObjectKey, Projection, View, Whole};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use tokio::sync::watch;

use crate::devices::{Taken, World};
use crate::event::ClusterEvent;
use crate::extended::CLASS_PREFIX;

/// The finalizer of an allocated claim.
pub const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// Says of a claim that it is for extended resources.
pub const EXTENDED: &str = "resource.kubernetes.io/extended-resource-claim";

#[derive(Clone)]
pub struct Claims {
    claims: Informer<ResourceClaim>,
    classes: Informer<DeviceClass>,
    slices: Informer<ResourceSlice>,
    nodes: Informer<Node>,
    allocated: View<Allocated>,
    all_classes: View<Whole<DeviceClass>>,
    all_slices: View<Whole<ResourceSlice>>,
    /// Counts changes, for those that wait for one.
    changes: Arc<watch::Sender<u64>>,
    /// Guards what decisions add and events take away; held for a lookup.
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// By the claim's uid.
    decided: HashMap<String, Decided>,
    /// The last view of all objects, and the number of changes before it.
    world: Option<(u64, Arc<World>)>,
}

struct Decided {
    /// The pod whose claim led to it.
    pod: String,
    allocation: AllocationResult,
    /// The version of the claim that has it, once it is written.
    written: Option<u64>,
}

fn uid(claim: &ResourceClaim) -> &str {
    claim.metadata.uid.as_deref().unwrap_or_default()
}

fn version(claim: &ResourceClaim) -> u64 {
    let version = claim.metadata.resource_version.as_deref();
    version.and_then(|version| version.parse().ok()).unwrap_or_default()
}

pub fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

/// The devices of a claim; the view leaves out claims without devices.
struct Allocated(AllocationResult);

impl Projection<ResourceClaim> for Allocated {
    fn of(claim: &ResourceClaim) -> Self {
        Self(allocation(claim).cloned().unwrap_or_default())
    }

    fn concerns(claim: &ResourceClaim) -> bool {
        allocation(claim).is_some()
    }
}

impl Claims {
    pub fn new(informers: &Informers) -> Self {
        let claims: Informer<ResourceClaim> = informers.of();
        let classes: Informer<DeviceClass> = informers.of();
        let slices: Informer<ResourceSlice> = informers.of();
        Self {
            allocated: claims.view(),
            all_classes: classes.view(),
            all_slices: slices.view(),
            claims,
            classes,
            slices,
            nodes: informers.of(),
            changes: Arc::new(watch::channel(0).0),
            state: Arc::default(),
        }
    }

    pub async fn synced(&self) {
        self.claims.synced().await;
        self.classes.synced().await;
        self.slices.synced().await;
        self.nodes.synced().await;
    }

    pub fn subscribe(&self, wake: impl Fn(&ClusterEvent) + Send + Sync + Clone + 'static) {
        let (this, woken) = (self.clone(), wake.clone());
        self.claims.subscribe(move |event| {
            this.hear(event);
            this.changed();
            woken(&told(event));
        });
        let (this, woken) = (self.clone(), wake.clone());
        self.classes.subscribe(move |event| {
            this.changed();
            if !event.is_deleted() {
                woken(&class_changed(event));
            }
        });
        let this = self.clone();
        self.slices.subscribe_raw(move |_| {
            this.changed();
            wake(&ClusterEvent::DevicesChanged);
        });
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("lookups do not panic")
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The API's word replaces ours.
    fn hear(&self, event: &Event<ResourceClaim>) {
        let claim = event.object();
        let is_known = |decided: &Decided| {
            let is_later = decided.written.is_some_and(|written| version(claim) >= written);
            event.is_deleted() || is_later || allocation(claim).is_some()
        };
        let mut state = self.state();
        if state.decided.get(uid(claim)).is_some_and(is_known) {
            state.decided.remove(uid(claim));
        }
    }

    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<ResourceClaim>> {
        self.claims.lister().get(namespace, name)
    }

    pub fn class(&self, name: &str) -> Option<Arc<DeviceClass>> {
        self.classes.lister().get("", name)
    }

    /// The DeviceClass of an extended resource: the newest that names it; among those of
    /// one age the first by name.
    pub fn class_for(&self, resource: &str) -> Option<Arc<DeviceClass>> {
        if let Some(name) = resource.strip_prefix(CLASS_PREFIX) {
            return self.class(name);
        }
        let all = self.all_classes.objects(None).into_iter();
        let fitting =
            all.filter(|class| class.spec.extended_resource_name.as_deref() == Some(resource));
        fitting.max_by(|a, b| {
            let age = |class: &DeviceClass| class.metadata.creation_timestamp.clone();
            age(a).cmp(&age(b)).then_with(|| b.metadata.name.cmp(&a.metadata.name))
        })
    }

    /// The claim that was made for a pod's extended resources.
    pub fn extended(&self, pod: &str) -> Option<Arc<ResourceClaim>> {
        self.claims.lister().by_owner(pod).into_iter().find(|claim| {
            let annotations = claim.metadata.annotations.as_ref();
            let mut owners = claim.metadata.owner_references.iter().flatten();
            annotations.and_then(|all| all.get(EXTENDED)).is_some_and(|value| value == "true")
                && owners.any(|owner| owner.controller == Some(true) && owner.uid == pod)
        })
    }

    pub fn node(&self, name: &str) -> Option<Arc<Node>> {
        self.nodes.lister().get("", name)
    }

    /// The devices that can be allocated now.
    pub fn world(&self) -> Arc<World> {
        // Before anything is read: what changes meanwhile makes the next one.
        let now = *self.changes.borrow();
        if let Some((then, world)) = &self.state().world
            && *then == now
        {
            return world.clone();
        }
        let mut taken = Taken::default();
        self.allocated.all().iter().for_each(|(_, one)| taken.add(&one.0));
        let classes = self.all_classes.objects(None).into_iter();
        let named = |class: Arc<DeviceClass>| Some((class.metadata.name.clone()?, class));
        let mut state = self.state();
        state.decided.values().for_each(|one| taken.add(&one.allocation));
        let world = Arc::new(World {
            slices: self.all_slices.objects(None),
            classes: classes.filter_map(named).collect(),
            taken,
        });
        state.world = Some((now, world.clone()));
        world
    }

    /// The allocation that was decided for a claim and is not yet in the API.
    pub fn decided(&self, claim: &ResourceClaim) -> Option<AllocationResult> {
        self.state().decided.get(uid(claim)).map(|one| one.allocation.clone())
    }

    pub fn decide(&self, pod: &str, claim: &ResourceClaim, allocation: AllocationResult) {
        let decided = Decided { pod: pod.to_owned(), allocation, written: None };
        self.state().decided.insert(uid(claim).to_owned(), decided);
        self.changed();
    }

    /// A claim that was decided on before it was there is there now.
    pub fn created(&self, promised: &ResourceClaim, created: &ResourceClaim) {
        let mut state = self.state();
        if let Some(decided) = state.decided.remove(uid(promised)) {
            state.decided.insert(uid(created).to_owned(), decided);
        }
    }

    /// The API has it; this is the claim that it gave back.
    pub fn written(&self, claim: &ResourceClaim) {
        let known = self.get(
            claim.metadata.namespace.as_deref().unwrap_or_default(),
            claim.metadata.name.as_deref().unwrap_or_default(),
        );
        let is_known = known.is_some_and(|known| version(&known) >= version(claim));
        let mut state = self.state();
        if is_known {
            state.decided.remove(uid(claim));
        } else if let Some(decided) = state.decided.get_mut(uid(claim)) {
            decided.written = Some(version(claim));
        }
    }

    /// Gives back what was decided for a pod and not written.
    pub fn give_back(&self, pod: &str) {
        self.state().decided.retain(|_, one| one.pod != pod || one.written.is_some());
        self.changed();
    }
}

pub fn name_of(claim: &ResourceClaim) -> &str {
    claim.metadata.name.as_deref().unwrap_or_default()
}

fn class_changed(event: &Event<DeviceClass>) -> ClusterEvent {
    let (old, new) = (event.old(), event.object());
    let resource = |class: &DeviceClass| class.spec.extended_resource_name.clone();
    let is_other = old.as_ref().is_none_or(|old| resource(old) != resource(new));
    ClusterEvent::ClassChanged {
        name: new.metadata.name.clone().unwrap_or_default(),
        is_new: old.is_none(),
        resource: resource(new).filter(|_| is_other),
    }
}

/// The event of a changed claim for waiting pods.
fn told(event: &Event<ResourceClaim>) -> ClusterEvent {
    let (old, new) = (event.old(), event.object());
    let had = old.as_ref().is_some_and(|old| allocation(old).is_some());
    ClusterEvent::ClaimChanged {
        claim: ObjectKey::of(&new.metadata),
        freed: had && (event.is_deleted() || allocation(new).is_none()),
        changed: event.is_deleted() || old.is_none_or(|old| old.status != new.status),
    }
}
