//! Changes in the cluster that may let a rejected pod fit: the input of queueing hints.

use std::sync::Arc;

use client::ObjectKey;

use crate::node::NodeInfo;
use crate::pod::PodInfo;

/// A change in the cluster that may let a rejected pod fit.
#[derive(Clone, Debug)]
pub enum ClusterEvent {
    /// A node was added; the value does not have its pods.
    NodeAdded(Arc<NodeInfo>),
    NodeUpdated {
        old: Arc<NodeInfo>,
        new: Arc<NodeInfo>,
    },
    NodeRemoved,
    /// A pod was bound or assumed.
    PodAssigned(Arc<PodInfo>),
    /// A pod with a node changed its labels or requests.
    PodChanged {
        old: Arc<PodInfo>,
        new: Arc<PodInfo>,
    },
    PodRemoved(Arc<PodInfo>),
    /// A pod without a node was added.
    PodAdded(Arc<PodInfo>),
    /// The waiting pod itself changed.
    PodUpdated,
    NamespaceChanged,
    /// A claim (its key), or a volume or class (`None`), was added or changed.
    VolumesChanged(Option<ObjectKey>),
    /// A CSINode changed: the storage drivers of a node.
    DriversChanged,
    /// A storage driver has more capacity, or no longer reports it.
    RoomGrew,
    /// A ResourceClaim was added, changed or deleted.
    ClaimChanged {
        claim: ObjectKey,
        /// Its devices are free.
        freed: bool,
        /// Its status changed, or it is new.
        changed: bool,
    },
    /// A ResourceSlice changed.
    DevicesChanged,
    /// A DeviceClass was added or changed.
    ClassChanged {
        name: String,
        is_new: bool,
        /// The new extended resource of the class, if it changed.
        resource: Option<String>,
    },
}

impl ClusterEvent {
    /// Upstream's name of the event, for metrics. One event here may be one of several there.
    pub fn label(&self) -> &'static str {
        match self {
            Self::NodeAdded(_) => "NodeAdd",
            Self::NodeUpdated { .. } => "NodeUpdate",
            Self::NodeRemoved => "NodeDelete",
            Self::PodAssigned(_) => "AssignedPodAdd",
            Self::PodChanged { .. } => "AssignedPodUpdate",
            Self::PodRemoved(_) => "AssignedPodDelete",
            Self::PodAdded(_) => "UnschedulablePodAdd",
            Self::PodUpdated => "UnschedulablePodUpdate",
            Self::NamespaceChanged => "NamespaceUpdate",
            Self::VolumesChanged(Some(_)) => "PersistentVolumeClaimUpdate",
            Self::VolumesChanged(None) => "PersistentVolumeUpdate",
            Self::DriversChanged => "storage.k8s.io/CSINodeUpdate",
            Self::RoomGrew => "storage.k8s.io/CSIStorageCapacityUpdate",
            Self::ClaimChanged { .. } => "resource.k8s.io/ResourceClaimUpdate",
            Self::DevicesChanged => "resource.k8s.io/ResourceSliceUpdate",
            Self::ClassChanged { .. } => "resource.k8s.io/DeviceClassUpdate",
        }
    }
}
