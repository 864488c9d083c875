//! Claims, volumes and classes, as plugins see them.
//!
//! Upstream: the listers and the `SchedulerVolumeBinder` that VolumeBinding is made with.

use std::sync::Arc;

use client::{Event, Informer, Informers, ObjectKey};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PodSpec};
use k8s_openapi::api::storage::v1::{CSIDriver, CSIStorageCapacity, StorageClass};
use machinery::selector::Selector;
use tokio::sync::watch;

use crate::capacity::{grew, is_told};
use crate::pod::Disk;

#[derive(Clone)]
pub struct Volumes {
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    drivers: Informer<CSIDriver>,
    capacities: Informer<CSIStorageCapacity>,
    /// Counts changes, for those that wait for one.
    changes: Arc<watch::Sender<u64>>,
}

impl Volumes {
    pub fn new(informers: &Informers) -> Self {
        Self {
            claims: informers.of(),
            volumes: informers.of(),
            classes: informers.of(),
            drivers: informers.of(),
            capacities: informers.of(),
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

    pub fn volumes(&self) -> Vec<Arc<PersistentVolume>> {
        self.volumes.lister().list(None, &Selector::everything())
    }

    pub fn class(&self, name: &str) -> Option<Arc<StorageClass>> {
        self.classes.lister().get("", name)
    }

    pub fn driver(&self, name: &str) -> Option<Arc<CSIDriver>> {
        self.drivers.lister().get("", name)
    }

    pub fn capacities(&self) -> Vec<Arc<CSIStorageCapacity>> {
        self.capacities.lister().list(None, &Selector::everything())
    }
}

/// Names of the claims that a pod mounts, its ephemeral ones among them.
pub fn claims_of(pod: &str, spec: &PodSpec) -> Vec<String> {
    let volumes = spec.volumes.iter().flatten();
    volumes
        .filter_map(|volume| {
            let named = volume.persistent_volume_claim.as_ref().map(|one| one.claim_name.clone());
            let own = || format!("{pod}-{}", volume.name);
            named.or_else(|| volume.ephemeral.as_ref().map(|_| own()))
        })
        .collect()
}

/// The disks that a pod names itself. Upstream: `isVolumeConflict`.
pub fn disks_of(spec: &PodSpec) -> Vec<Disk> {
    let volumes = spec.volumes.iter().flatten();
    volumes
        .filter_map(|volume| {
            if let Some(one) = &volume.gce_persistent_disk {
                let read_only = one.read_only.unwrap_or_default();
                return Some(Disk { id: format!("gce {}", one.pd_name), read_only });
            }
            if let Some(one) = &volume.aws_elastic_block_store {
                return Some(Disk { id: format!("aws {}", one.volume_id), read_only: false });
            }
            if let Some(one) = &volume.iscsi {
                let read_only = one.read_only.unwrap_or_default();
                return Some(Disk { id: format!("iscsi {}", one.iqn), read_only });
            }
            let one = volume.rbd.as_ref()?;
            let pool = one.pool.as_deref().unwrap_or("rbd");
            let read_only = one.read_only.unwrap_or_default();
            Some(Disk { id: format!("rbd {pool}/{}", one.image), read_only })
        })
        .collect()
}
