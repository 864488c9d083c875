//! The plugins of the default profile, in upstream's order, which decides whose message is seen.

mod allocation;
mod balanced_allocation;
mod default_binder;
mod default_preemption;
mod device_readiness;
mod dynamic_resources;
mod extended_claim;
mod hints;
mod image_locality;
mod inter_pod_affinity;
mod node_affinity;
mod node_declared_features;
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

use crate::framework::Row;

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
    node_declared_features::ROW,
    crate::gang::ROW,
];

#[cfg(test)]
mod lookup_tests;
#[cfg(test)]
mod recount_tests;
#[cfg(test)]
mod tests;
