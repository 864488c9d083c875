//! The families of the cloud's controllers. The work queues' are the client's.
//!
//! In: what a controller has done. Out: upstream's names and labels.
//! Upstream: `metrics.go` of `cloud-provider/controllers/{node,service,route}`,
//! `component-base/metrics/prometheus/controllers`.

use base::metrics::{Buckets, Family};

const NODE_SECONDS: Buckets = Buckets::Exponential(1.0, 4.0, 6);
const BALANCER_SECONDS: Buckets = Buckets::Exponential(1.0, 2.0, 15);

static RUNNING: Family = Family::gauge(
    "running_managed_controllers",
    "[BETA] Indicates where instances of a controller are currently running",
    &["manager", "name"],
);
pub static TAINT_REMOVAL: Family = Family::histogram(
    "node_controller_cloud_provider_taint_removal_delay_seconds",
    "[ALPHA] Number of seconds after node creation when NodeController removed the cloud-provider taint of a single node.",
    &[],
    NODE_SECONDS,
);
pub static INITIAL_SYNC: Family = Family::histogram(
    "node_controller_initial_node_sync_delay_seconds",
    "[ALPHA] Number of seconds after node creation when NodeController finished the initial synchronization of a single node.",
    &[],
    NODE_SECONDS,
);
pub static ROUTE_SYNCS: Family = Family::counter(
    "route_controller_route_sync_total",
    "[ALPHA] A metric counting the amount of times routes have been synced with the cloud provider.",
    &[],
);
pub static BALANCER_SYNCS: Family = Family::counter(
    "service_controller_loadbalancer_sync_total",
    "[ALPHA] A metric counting the amount of times any load balancer has been configured, as an effect of service/node changes on the cluster",
    &[],
);
pub static NODE_SYNC_ERRORS: Family = Family::counter(
    "service_controller_nodesync_error_total",
    "[ALPHA] A metric counting the amount of times any load balancer has been configured and errored, as an effect of node changes on the cluster",
    &[],
);
pub static NODE_SYNC_SECONDS: Family = Family::histogram(
    "service_controller_nodesync_latency_seconds",
    "[ALPHA] A metric measuring the latency for nodesync which updates loadbalancer hosts on cluster node updates.",
    &[],
    BALANCER_SECONDS,
);
pub static UPDATE_SECONDS: Family = Family::histogram(
    "service_controller_update_loadbalancer_host_latency_seconds",
    "[ALPHA] A metric measuring the latency for updating each load balancer hosts.",
    &[],
    BALANCER_SECONDS,
);

/// All families, in the order of their names.
const FAMILIES: &[&Family] = &[
    &TAINT_REMOVAL,
    &INITIAL_SYNC,
    &ROUTE_SYNCS,
    &RUNNING,
    &BALANCER_SYNCS,
    &NODE_SYNC_ERRORS,
    &NODE_SYNC_SECONDS,
    &UPDATE_SECONDS,
];

/// Writes the families.
pub fn encode(out: &mut String) {
    base::metrics::encode(FAMILIES, out);
}

/// A controller has started; `name` is its old short name, as upstream has it in this metric.
pub fn runs(name: &str) {
    RUNNING.set(&["cloud-controller-manager", name], 1.0);
}

/// All controllers have stopped.
pub fn stopped() {
    RUNNING.forget(|_| true);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_sorted() {
        assert!(FAMILIES.is_sorted_by_key(|family| family.name));
    }
}
