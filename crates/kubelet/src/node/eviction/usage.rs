//! What the eviction loop observes: the node's free resources, and each pod's usage.
//!
//! In: /proc, file systems, the pods' cgroup, the runtime's figures. Out: observations; usage by pod, only
//! when a pod has to be chosen.
//! Cost: observations read a few files. Memory and processes are one call of the runtime; disk and inodes
//! walk the directories of all pods.
//! Upstream: `pkg/kubelet/server/stats`, `eviction/helpers.go` makeSignalObservations.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::rank::{Usage, Used};
use super::state::{Observation, Observations};
use super::threshold::Signal;
use crate::names;
use crate::node::local_storage;
use crate::node::machine::{Disk, available_memory, processes};
use crate::node::upkeep::Upkeep;
use crate::pod::worker::View;

/// The file systems of the node; that of the images only if it is another one.
pub struct Places {
    pub node: PathBuf,
    pub images: Option<PathBuf>,
}

impl Places {
    /// Asks the runtime for the place of its images.
    pub async fn find(own: &Upkeep) -> Self {
        use std::os::unix::fs::MetadataExt;
        let node = own.node.config.root_dir.clone();
        let told = own.runtime.image_fs_info().await.ok();
        let first = told.and_then(|told| told.image_filesystems.into_iter().next());
        let place = first.and_then(|one| one.fs_id).map(|id| PathBuf::from(id.mountpoint));
        let device = |path: &PathBuf| std::fs::metadata(path).ok().map(|meta| meta.dev());
        let images = place.filter(|place| {
            let (images, own) = (device(place), device(&node));
            images.is_some() && images != own
        });
        Self { node, images }
    }
}

/// The node's resources now.
pub fn observe(own: &Upkeep, places: &Places) -> Observations {
    let mut out = Observations::new();
    let (available, capacity) = (available_memory(), own.node.machine.memory.max(0) as u64);
    out.insert(Signal::Memory, Observation { available, capacity });
    if let Some((available, capacity)) = own.cgroups.memory_of_pods() {
        out.insert(Signal::AllocatableMemory, Observation { available, capacity });
    }
    let mut note = |place: &PathBuf, bytes: Signal, inodes: Signal| {
        let Some(disk) = Disk::of(place).filter(|disk| disk.bytes > 0) else { return };
        let seen = Observation { available: disk.free_bytes, capacity: disk.bytes };
        out.insert(bytes, seen);
        // Some file systems have no table of inodes.
        if disk.inodes > 0 {
            let seen = Observation { available: disk.free_inodes, capacity: disk.inodes };
            out.insert(inodes, seen);
        }
    };
    note(&places.node, Signal::NodeFs, Signal::NodeFsInodes);
    let images = places.images.as_ref().unwrap_or(&places.node);
    note(images, Signal::ImageFs, Signal::ImageFsInodes);
    let (used, capacity) = processes();
    let available = capacity.saturating_sub(used);
    out.insert(Signal::Pids, Observation { available, capacity });
    out
}

pub fn living(views: &[View]) -> impl Iterator<Item = (&View, &Arc<Pod>)> {
    views.iter().filter_map(|view| Some((view, view.pod.as_ref()?)))
}

/// Each pod's usage of the signal's resource.
pub async fn of_pods(own: &Upkeep, views: &[View], signal: Signal) -> Usage {
    match signal {
        Signal::Memory | Signal::AllocatableMemory => memory(own, views).await,
        Signal::Pids => pids(own, views),
        Signal::NodeFs | Signal::ImageFs => storage(own, views).await,
        Signal::NodeFsInodes | Signal::ImageFsInodes => inodes(own, views).await,
    }
}

async fn memory(own: &Upkeep, views: &[View]) -> Usage {
    let all = own.runtime.list_container_stats(None).await.unwrap_or_default();
    let one = |stats: cri::ContainerStats| {
        let id = stats.attributes?.id;
        let bytes = stats.memory?.working_set_bytes?.value;
        Some((id, bytes as i64))
    };
    let by_id: HashMap<String, i64> = all.into_iter().filter_map(one).collect();
    let of = |view: &View| {
        let running = view.observed.running();
        let containers: BTreeMap<String, i64> =
            running.filter_map(|c| Some((c.name.clone(), *by_id.get(&c.id)?))).collect();
        Used { total: containers.values().sum(), containers }
    };
    living(views).map(|(view, pod)| (names::uid(pod).to_string(), of(view))).collect()
}

fn pids(own: &Upkeep, views: &[View]) -> Usage {
    let of = |pod: &Pod| Used { total: own.cgroups.processes_of(pod), ..Used::default() };
    living(views).map(|(_, pod)| (names::uid(pod).to_string(), of(pod))).collect()
}

async fn storage(own: &Upkeep, views: &[View]) -> Usage {
    let mut out = Usage::new();
    for (view, pod) in living(views) {
        let usage = local_storage::measure(own, view, pod.clone()).await;
        let total = usage.containers.values().chain(usage.volumes.values()).sum();
        out.insert(names::uid(pod).to_string(), Used { containers: usage.containers, total });
    }
    out
}

/// Inodes of volumes, logs and writable layers.
async fn inodes(own: &Upkeep, views: &[View]) -> Usage {
    let all = own.runtime.list_container_stats(None).await.unwrap_or_default();
    let written = |stats: cri::ContainerStats| {
        Some((stats.attributes?.id, stats.writable_layer?.inodes_used?.value as i64))
    };
    let written: HashMap<String, i64> = all.into_iter().filter_map(written).collect();
    let mut out = Usage::new();
    for (view, pod) in living(views) {
        let layers: i64 = view.observed.running().filter_map(|one| written.get(&one.id)).sum();
        let total = layers + local_storage::inodes(own, pod.clone()).await;
        out.insert(names::uid(pod).to_string(), Used { total, ..Used::default() });
    }
    out
}
