//! The controllers' own families. The work queues' are the client's.
//!
//! In: what a controller has done. Out: upstream's names and labels.
//! Upstream: `metrics` of `pkg/controller/{job,cronjob,podautoscaler,nodelifecycle}`, `k8s.io/endpointslice`,
//! `component-base/metrics/prometheus/controllers`.
//!
//! Cost: a few look-ups in small lists per reconcile; totals change by differences.

use std::collections::HashMap;
use std::sync::Mutex;

use base::metrics::{Buckets, Family, Timer};
use client::ObjectKey;

const SYNC_SECONDS: Buckets = Buckets::Exponential(0.004, 2.0, 15);
const HPA_SECONDS: Buckets = Buckets::Exponential(0.001, 2.0, 15);
const ENDPOINTS: Buckets = Buckets::Exponential(2.0, 2.0, 15);

static RUNNING: Family = Family::gauge(
    "running_managed_controllers",
    "[BETA] Indicates where instances of a controller are currently running",
    &["manager", "name"],
);

static JOB_SYNC_SECONDS: Family = Family::histogram(
    "job_controller_job_sync_duration_seconds",
    "[STABLE] The time it took to sync a job",
    &["action", "completion_mode", "result"],
    SYNC_SECONDS,
);
static JOB_SYNCS: Family = Family::counter(
    "job_controller_job_syncs_total",
    "[STABLE] The number of job syncs",
    &["action", "completion_mode", "result"],
);
pub static JOBS_FINISHED: Family = Family::counter(
    "job_controller_jobs_finished_total",
    "[STABLE] The number of finished jobs",
    &["completion_mode", "reason", "result"],
);
pub static JOB_PODS_FINISHED: Family = Family::counter(
    "job_controller_job_pods_finished_total",
    "[STABLE] The number of finished Pods that are fully tracked",
    &["completion_mode", "result"],
);
pub static JOB_FAILURE_POLICY: Family = Family::counter(
    "job_controller_pod_failures_handled_by_failure_policy_total",
    "[BETA] The number of failed Pods handled by failure policy with respect to the failure policy action applied based on the matched rule. Possible values of the action label correspond to the possible values for the failure policy rule action, which are: \"FailJob\", \"Ignore\" and \"Count\".",
    &["action"],
);
pub static JOB_FINALIZERS: Family = Family::counter(
    "job_controller_terminated_pods_tracking_finalizer_total",
    "[BETA] The number of terminated pods (phase=Failed|Succeeded) that have the finalizer batch.kubernetes.io/job-tracking. The event label can be \"add\" or \"delete\".",
    &["event"],
);
pub static CRONJOB_SKEW: Family = Family::histogram(
    "cronjob_controller_job_creation_skew_duration_seconds",
    "[STABLE] Time between when a cronjob is scheduled to be run, and when the corresponding job is created",
    &[],
    Buckets::Exponential(1.0, 2.0, 10),
);
pub static NODE_EVICTIONS: Family = Family::counter(
    "node_collector_evictions_total",
    "[STABLE] Number of Node evictions that happened since current instance of NodeController started.",
    &["zone"],
);

static HPA_RECONCILIATIONS: Family = Family::counter(
    "horizontal_pod_autoscaler_controller_reconciliations_total",
    "[BETA] Number of reconciliations of HPA controller. The label 'action' should be either 'scale_down', 'scale_up', or 'none'. Also, the label 'error' should be either 'spec', 'internal', or 'none'. Note that if both spec and internal errors happen during a reconciliation, the first one to occur is reported in `error` label.",
    &["action", "error"],
);
static HPA_RECONCILIATION_SECONDS: Family = Family::histogram(
    "horizontal_pod_autoscaler_controller_reconciliation_duration_seconds",
    "[BETA] The time(seconds) that the HPA controller takes to reconcile once. The label 'action' should be either 'scale_down', 'scale_up', or 'none'. Also, the label 'error' should be either 'spec', 'internal', or 'none'. Note that if both spec and internal errors happen during a reconciliation, the first one to occur is reported in `error` label.",
    &["action", "error"],
    HPA_SECONDS,
);
static HPA_COMPUTATIONS: Family = Family::counter(
    "horizontal_pod_autoscaler_controller_metric_computation_total",
    "[BETA] Number of metric computations. The label 'action' should be either 'scale_down', 'scale_up', or 'none'. Also, the label 'error' should be either 'spec', 'internal', or 'none'. The label 'metric_type' corresponds to HPA.spec.metrics[*].type",
    &["action", "error", "metric_type"],
);
static HPA_COMPUTATION_SECONDS: Family = Family::histogram(
    "horizontal_pod_autoscaler_controller_metric_computation_duration_seconds",
    "[BETA] The time(seconds) that the HPA controller takes to calculate one metric. The label 'action' should be either 'scale_down', 'scale_up', or 'none'. The label 'error' should be either 'spec', 'internal', or 'none'. The label 'metric_type' corresponds to HPA.spec.metrics[*].type",
    &["action", "error", "metric_type"],
    HPA_SECONDS,
);

static ENDPOINTS_ADDED: Family = Family::histogram(
    "endpoint_slice_controller_endpoints_added_per_sync",
    "[BETA] Number of endpoints added on each Service sync",
    &[],
    ENDPOINTS,
);
static ENDPOINTS_REMOVED: Family = Family::histogram(
    "endpoint_slice_controller_endpoints_removed_per_sync",
    "[BETA] Number of endpoints removed on each Service sync",
    &[],
    ENDPOINTS,
);
static ENDPOINTS_DESIRED: Family = Family::gauge(
    "endpoint_slice_controller_endpoints_desired",
    "[BETA] Number of endpoints desired",
    &[],
);
static SLICES: Family = Family::gauge(
    "endpoint_slice_controller_num_endpoint_slices",
    "[BETA] Number of EndpointSlices",
    &[],
);
static SLICES_DESIRED: Family = Family::gauge(
    "endpoint_slice_controller_desired_endpoint_slices",
    "[BETA] Number of EndpointSlices that would exist with perfect endpoint allocation",
    &[],
);
static BY_DISTRIBUTION: Family = Family::gauge(
    "endpoint_slice_controller_services_count_by_traffic_distribution",
    "[BETA] Number of Services using some specific trafficDistribution",
    &["traffic_distribution"],
);

/// All families, in the order of their names.
const FAMILIES: &[&Family] = &[
    &CRONJOB_SKEW,
    &SLICES_DESIRED,
    &ENDPOINTS_ADDED,
    &ENDPOINTS_DESIRED,
    &ENDPOINTS_REMOVED,
    &SLICES,
    &BY_DISTRIBUTION,
    &HPA_COMPUTATION_SECONDS,
    &HPA_COMPUTATIONS,
    &HPA_RECONCILIATION_SECONDS,
    &HPA_RECONCILIATIONS,
    &JOB_PODS_FINISHED,
    &JOB_SYNC_SECONDS,
    &JOB_SYNCS,
    &JOBS_FINISHED,
    &JOB_FAILURE_POLICY,
    &JOB_FINALIZERS,
    &NODE_EVICTIONS,
    &RUNNING,
];

/// Writes the families of all controllers of this process.
pub fn encode(out: &mut String) {
    base::metrics::encode(FAMILIES, out);
}

pub fn runs(name: &str, is_running: bool) {
    RUNNING.set(&["kube-controller-manager", name], f64::from(u8::from(is_running)));
}

pub fn job_synced(action: &str, mode: &str, is_done: bool, timer: Timer) {
    let labels = [action, mode, if is_done { "success" } else { "error" }];
    JOB_SYNC_SECONDS.took(&labels, timer.elapsed());
    JOB_SYNCS.count(&labels);
}

/// The labels of an autoscaler's work: the replicas before and after, or the error.
pub struct Scaled {
    action: &'static str,
    error: &'static str,
}

impl Scaled {
    pub fn between(current: i32, desired: i32) -> Self {
        let action = match desired.cmp(&current) {
            std::cmp::Ordering::Less => "scale_down",
            std::cmp::Ordering::Equal => "none",
            std::cmp::Ordering::Greater => "scale_up",
        };
        Self { action, error: "none" }
    }

    /// `is_spec`: the autoscaler's spec cannot be used.
    pub fn failed(is_spec: bool) -> Self {
        Self { action: "none", error: if is_spec { "spec" } else { "internal" } }
    }

    pub fn reconciled(&self, timer: Timer) {
        let labels = [self.action, self.error];
        HPA_RECONCILIATIONS.count(&labels);
        HPA_RECONCILIATION_SECONDS.took(&labels, timer.elapsed());
    }

    pub fn computed(&self, metric_type: &str, time: std::time::Duration) {
        let labels = [self.action, self.error, metric_type];
        HPA_COMPUTATIONS.count(&labels);
        HPA_COMPUTATION_SECONDS.took(&labels, time);
    }
}

/// What the slices of one Service add to the totals.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceSlices {
    pub endpoints: usize,
    pub slices: usize,
    pub desired_slices: usize,
    pub distribution: Option<String>,
}

/// The last sync of each Service. Locked for the difference of one.
static SERVICES: Mutex<Option<HashMap<ObjectKey, ServiceSlices>>> = Mutex::new(None);

/// A Service was synced, or is gone (`None`).
pub fn slices_synced(key: &ObjectKey, now: Option<ServiceSlices>) {
    let mut services = SERVICES.lock().expect("no panic under the lock");
    let services = services.get_or_insert_default();
    let before = match &now {
        Some(now) => services.insert(key.clone(), now.clone()),
        None => services.remove(key),
    };
    for (one, sign) in [(before, -1.0), (now, 1.0)] {
        let Some(one) = one else { continue };
        ENDPOINTS_DESIRED.add(&[], sign * one.endpoints as f64);
        SLICES.add(&[], sign * one.slices as f64);
        SLICES_DESIRED.add(&[], sign * one.desired_slices as f64);
        if let Some(distribution) = &one.distribution {
            BY_DISTRIBUTION.add(&[distribution], sign);
        }
    }
}

/// The endpoints that a sync of a Service has added and removed.
pub fn endpoints_changed(added: usize, removed: usize) {
    ENDPOINTS_ADDED.observe(&[], added as f64);
    ENDPOINTS_REMOVED.observe(&[], removed as f64);
}

/// The controllers of this process have stopped: others have the totals now.
pub fn stopped() {
    let mut services = SERVICES.lock().expect("no panic under the lock");
    services.take();
    for family in [&ENDPOINTS_DESIRED, &SLICES, &SLICES_DESIRED, &BY_DISTRIBUTION, &RUNNING] {
        family.forget(|_| true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_sorted() {
        assert!(FAMILIES.is_sorted_by_key(|family| family.name));
    }
}
