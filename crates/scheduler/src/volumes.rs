//! Claims, volumes and classes, as plugins see them.
//!
//! Upstream: the listers and the `SchedulerVolumeBinder` that VolumeBinding is made with.

use std::sync::Arc;

use client::{Event, Informer, Informers, ObjectKey, Projection, View, Whole};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSIDriver, CSIStorageCapacity, StorageClass};
use tokio::sync::watch;

use crate::capacity::{grew, is_told};

/// Volumes by the claim that they are for.
const BY_CLAIM: &str = "claim";

#[derive(Clone)]
pub struct Volumes {
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    drivers: Informer<CSIDriver>,
    capacities: Informer<CSIStorageCapacity>,
    all_capacities: View<Whole<CSIStorageCapacity>>,
    /// The volumes that are not bound.
    free: View<Free>,
    /// Counts changes, for those that wait for one.
    changes: Arc<watch::Sender<u64>>,
}

/// A volume that a claim may get: bound ones are looked up by name.
struct Free(Arc<PersistentVolume>);

impl Projection<PersistentVolume> for Free {
    fn of(volume: &PersistentVolume) -> Self {
        Self(Arc::new(volume.clone()))
    }

    fn concerns(volume: &PersistentVolume) -> bool {
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref());
        phase != Some("Bound")
    }
}

impl Volumes {
    pub fn new(informers: &Informers) -> Self {
        let volumes: Informer<PersistentVolume> = informers.of();
        volumes.index(BY_CLAIM, |volume| {
            let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            let key = reference.map(|one| {
                let text = |text: &Option<String>| text.clone().unwrap_or_default();
                ObjectKey::new(&text(&one.namespace), &text(&one.name)).to_string()
            });
            key.into_iter().collect()
        });
        let capacities: Informer<CSIStorageCapacity> = informers.of();
        Self {
            claims: informers.of(),
            free: volumes.view(),
            volumes,
            classes: informers.of(),
            drivers: informers.of(),
            all_capacities: capacities.view(),
            capacities,
            changes: Arc::new(watch::channel(0).0),
        }
    }

    /// `wake` hears which claim it was; `None`: it was none.
    pub fn subscribe(&self, wake: impl Fn(Option<ObjectKey>) + Send + Sync + Clone + 'static) {
        let changes = self.changes.clone();
        let changed = move |claim| {
            changes.send_modify(|count| *count += 1);
            wake(claim);
        };
        let (first, second) = (changed.clone(), changed.clone());
        self.claims.subscribe_raw(move |event| first(Some(event.entry().header.key.clone())));
        self.volumes.subscribe_raw(move |_| second(None));
        self.classes.subscribe_raw(move |_| changed(None));
    }

    /// Hears that a driver has, or may have, more room than before.
    pub fn subscribe_room(&self, wake: impl Fn() + Send + Sync + Clone + 'static) {
        let woken = wake.clone();
        self.capacities.subscribe(move |event| {
            if !event.is_deleted() && grew(event.old().as_deref(), event.object()) {
                woken();
            }
        });
        self.drivers.subscribe(move |event: &Event<CSIDriver>| {
            let was_told = is_told(event.old().as_deref());
            if was_told && (event.is_deleted() || !is_told(Some(event.object()))) {
                wake();
            }
        });
    }

    pub async fn synced(&self) {
        self.claims.synced().await;
        self.volumes.synced().await;
        self.classes.synced().await;
        self.drivers.synced().await;
        self.capacities.synced().await;
    }

    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub fn claim(&self, namespace: &str, name: &str) -> Option<Arc<PersistentVolumeClaim>> {
        self.claims.lister().get(namespace, name)
    }

    pub fn volume(&self, name: &str) -> Option<Arc<PersistentVolume>> {
        self.volumes.lister().get("", name)
    }

    /// The candidates of these claims: unbound volumes, and volumes that are already theirs.
    pub fn free_for(&self, claims: &[ObjectKey]) -> Vec<Arc<PersistentVolume>> {
        let mut free: Vec<_> =
            self.free.all().into_iter().map(|(_, free)| free.0.clone()).collect();
        for claim in claims {
            let own = self.volumes.lister().by_index(BY_CLAIM, &claim.to_string());
            free.extend(own.into_iter().filter(|volume| !Free::concerns(volume)));
        }
        free
    }

    pub fn class(&self, name: &str) -> Option<Arc<StorageClass>> {
        self.classes.lister().get("", name)
    }

    pub fn driver(&self, name: &str) -> Option<Arc<CSIDriver>> {
        self.drivers.lister().get("", name)
    }

    pub fn capacities(&self) -> Vec<Arc<CSIStorageCapacity>> {
        self.all_capacities.objects(None)
    }
}
