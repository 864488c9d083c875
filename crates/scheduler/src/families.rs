//! The families of the framework and the queue, for all schedulers of this process; `metrics.rs` has those of
//! attempts. Upstream: `pkg/scheduler/metrics`.
//!
//! Cost: about ten observations per attempt, of 100 ns each; times of single plugins are taken in one of ten
//! attempts, as upstream.

use std::sync::atomic::{AtomicU64, Ordering};

use base::metrics::{Buckets, Family, Timer};

pub(crate) static EXTENSION_POINTS: Family = Family::histogram(
    "scheduler_framework_extension_point_duration_seconds",
    "[STABLE] Latency for running all plugins of a specific extension point.",
    &["extension_point", "profile", "status"],
    Buckets::Exponential(0.0001, 2.0, 12),
);
static GOROUTINES: Family = Family::gauge(
    "scheduler_goroutines",
    "[BETA] Number of running goroutines split by the work they do such as binding.",
    &["operation"],
);
static PERMIT_WAITS: Family = Family::histogram(
    "scheduler_permit_wait_duration_seconds",
    "[BETA] Duration of waiting on permit.",
    &["result"],
    Buckets::Exponential(0.001, 2.0, 15),
);
static EVALUATIONS: Family = Family::counter(
    "scheduler_plugin_evaluation_total",
    "[BETA] Number of attempts to schedule pods by each plugin and the extension point (available only in PreFilter, Filter, PreScore, and Score).",
    &["extension_point", "plugin", "profile"],
);
static PLUGINS: Family = Family::histogram(
    "scheduler_plugin_execution_duration_seconds",
    "[ALPHA] Duration for running a plugin at a specific extension point.",
    &["extension_point", "plugin", "status"],
    Buckets::Exponential(0.00001, 1.5, 20),
);
static INCOMING: Family = Family::counter(
    "scheduler_queue_incoming_pods_total",
    "[STABLE] Number of pods added to scheduling queues by event and queue type.",
    &["event", "queue"],
);
static ALGORITHM: Family = Family::histogram(
    "scheduler_scheduling_algorithm_duration_seconds",
    "[ALPHA] Scheduling algorithm latency in seconds",
    &[],
    Buckets::Exponential(0.001, 2.0, 15),
);
static UNSCHEDULABLE: Family = Family::gauge(
    "scheduler_unschedulable_pods",
    "[BETA] The number of unschedulable pods broken down by plugin name. A pod will increment the gauge for all plugins that caused it to not schedule and so this metric have meaning only when broken down by plugin.",
    &["plugin", "profile"],
);

pub(crate) fn encode(out: &mut String) {
    let families = [
        &EXTENSION_POINTS,
        &GOROUTINES,
        &PERMIT_WAITS,
        &EVALUATIONS,
        &PLUGINS,
        &INCOMING,
        &ALGORITHM,
        &UNSCHEDULABLE,
    ];
    base::metrics::encode(&families, out);
}

pub(crate) const SUCCESS: &str = "Success";
pub(crate) const SKIP: &str = "Skip";
pub(crate) const UNSCHEDULABLE_STATUS: &str = "Unschedulable";
pub(crate) const ERROR: &str = "Error";

/// The statuses of an outcome.
pub(crate) fn status<T, E>(outcome: &Result<T, E>, otherwise: &'static str) -> &'static str {
    if outcome.is_ok() { SUCCESS } else { otherwise }
}

/// All plugins of an extension point have run.
pub(crate) fn point(point: &str, profile: &str, status: &str, timer: Timer) {
    EXTENSION_POINTS.took(&[point, profile, status], timer.elapsed());
}

pub(crate) fn evaluated(point: &str, plugin: &str, profile: &str, times: usize) {
    if times > 0 {
        EVALUATIONS.add(&[point, plugin, profile], times as f64);
    }
}

/// Whether an attempt takes the times of its plugins: every tenth does.
pub(crate) fn is_sampled() -> bool {
    static ATTEMPTS: AtomicU64 = AtomicU64::new(0);
    ATTEMPTS.fetch_add(1, Ordering::Relaxed).is_multiple_of(10)
}

pub(crate) fn plugin(point: &str, plugin: &str, status: &str, timer: Timer) {
    PLUGINS.took(&[point, plugin, status], timer.elapsed());
}

pub(crate) fn permitted(is_allowed: bool, timer: Timer) {
    let result = if is_allowed { SUCCESS } else { UNSCHEDULABLE_STATUS };
    PERMIT_WAITS.took(&[result], timer.elapsed());
}

pub(crate) fn decided(timer: Timer) {
    ALGORITHM.took(&[], timer.elapsed());
}

pub(crate) fn incoming(queue: &str, event: &str) {
    INCOMING.count(&[event, queue]);
}

/// A pod waits, or waits no more, because of a plugin.
pub(crate) fn unschedulable(plugin: &str, profile: &str, by: f64) {
    UNSCHEDULABLE.add(&[plugin, profile], by);
}

/// Counts work while it lives.
pub(crate) struct Running(&'static str);

impl Running {
    pub fn new(operation: &'static str) -> Self {
        GOROUTINES.add(&[operation], 1.0);
        Self(operation)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        GOROUTINES.add(&[self.0], -1.0);
    }
}
