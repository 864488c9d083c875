//! The plugins of the default profile, in upstream's order, which decides whose message is seen.

mod allocation;
mod balanced_allocation;
mod default_binder;
mod default_preemption;
mod device_readiness;
mod dynamic_resources;
mod extended_claim;
mod image_locality;
mod inter_pod_affinity;
mod node_affinity;
mod node_name;
mod node_ports;
mod node_unschedulable;
mod node_volume_limits;
mod pod_topology_spread;
mod priority_sort;
mod resources_fit;
mod scheduling_gates;
mod taint_toleration;
mod volume_binding;
mod volume_restrictions;
mod volume_zone;

use crate::framework::{ClusterEvent, Row};
use crate::pod::PodInfo;

pub static PLUGINS: &[Row] = &[
    scheduling_gates::ROW,
    priority_sort::ROW,
    node_unschedulable::ROW,
    node_name::ROW,
    taint_toleration::ROW,
    node_affinity::ROW,
    node_ports::ROW,
    resources_fit::ROW,
    volume_restrictions::ROW,
    node_volume_limits::ROW,
    volume_binding::ROW,
    volume_zone::ROW,
    pod_topology_spread::ROW,
    inter_pod_affinity::ROW,
    dynamic_resources::ROW,
    default_preemption::ROW,
    balanced_allocation::ROW,
    image_locality::ROW,
    default_binder::ROW,
    crate::gang::ROW,
];

/// The hint of plugins that look at nodes only.
fn node_changes(_: &PodInfo, event: &ClusterEvent) -> bool {
    matches!(
        event,
        ClusterEvent::NodeAdded(_) | ClusterEvent::NodeUpdated(_) | ClusterEvent::PodUpdated
    )
}

/// The hint of plugins that count what pods take.
fn room_appears(_: &PodInfo, event: &ClusterEvent) -> bool {
    matches!(
        event,
        ClusterEvent::NodeAdded(_)
            | ClusterEvent::NodeUpdated(_)
            | ClusterEvent::PodRemoved(_)
            | ClusterEvent::PodUpdated
    )
}

/// The hint of plugins that look at other pods.
fn anything(_: &PodInfo, event: &ClusterEvent) -> bool {
    !matches!(
        event,
        ClusterEvent::VolumesChanged
            | ClusterEvent::PodAdded(_)
            | ClusterEvent::ClaimChanged { .. }
            | ClusterEvent::DevicesChanged
            | ClusterEvent::ClassChanged { .. }
    )
}

fn never(_: &PodInfo, _: &ClusterEvent) -> bool {
    false
}

#[cfg(test)]
mod lookup_tests;
#[cfg(test)]
mod tests;
