//! The kubelet's families that count for the whole process; `figures.rs` has those of pods and containers.
//!
//! In: what the kubelet did, and when its certificates expire. Out: Prometheus text, with upstream's names.
//! Upstream: `pkg/kubelet/metrics`, `pkg/kubelet/certificate`, `pkg/volume/util/metrics.go`.

use std::sync::Mutex;
use std::time::Duration;

use base::metrics::{Buckets, DEFAULT_BUCKETS, Family, Timer};
use jiff::Timestamp;

static CGROUP_MANAGER: Family = Family::histogram(
    "kubelet_cgroup_manager_duration_seconds",
    "[ALPHA] Duration in seconds for cgroup manager operations. Broken down by method.",
    &["operation_type"],
    DEFAULT_BUCKETS,
);
static RENEW_ERRORS: Family = Family::counter(
    "kubelet_certificate_manager_client_expiration_renew_errors",
    "[ALPHA] Counter of certificate renewal errors.",
    &[],
);
static CLIENT_TTL: Family = Family::gauge(
    "kubelet_certificate_manager_client_ttl_seconds",
    "[ALPHA] Gauge of the TTL (time-to-live) of the Kubelet's client certificate. The value is in seconds until certificate expiry (negative if already expired). If client certificate is invalid or unused, the value will be +INF.",
    &[],
);
static SERVER_RENEW_ERRORS: Family = Family::counter(
    "kubelet_server_expiration_renew_errors",
    "[ALPHA] Counter of certificate renewal errors.",
    &[],
);
static SERVER_TTL: Family = Family::gauge(
    "kubelet_certificate_manager_server_ttl_seconds",
    "[ALPHA] Gauge of the shortest TTL (time-to-live) of the Kubelet's serving certificate. The value is in seconds until certificate expiry (negative if already expired). If serving certificate is invalid or unused, the value will be +INF.",
    &[],
);
static EVICTIONS: Family = Family::counter(
    "kubelet_evictions",
    "[ALPHA] Cumulative number of pod evictions by eviction signal",
    &["eviction_signal"],
);
static IMAGE_VOLUME_ERRORS: Family = Family::counter(
    "kubelet_image_volume_mounted_errors_total",
    "[BETA] Number of failed image volume mounts.",
    &[],
);
static IMAGE_VOLUMES: Family = Family::counter(
    "kubelet_image_volume_mounted_succeed_total",
    "[BETA] Number of successful image volume mounts.",
    &[],
);
static IMAGE_VOLUME_REQUESTS: Family = Family::counter(
    "kubelet_image_volume_requested_total",
    "[BETA] Number of requested image volumes.",
    &[],
);
static RELISTS: Family = Family::histogram(
    "kubelet_pleg_relist_duration_seconds",
    "[ALPHA] Duration in seconds for relisting pods in PLEG.",
    &[],
    DEFAULT_BUCKETS,
);
static RELIST_INTERVALS: Family = Family::histogram(
    "kubelet_pleg_relist_interval_seconds",
    "[ALPHA] Interval in seconds between relisting in PLEG.",
    &[],
    DEFAULT_BUCKETS,
);
static RELISTED: Family = Family::gauge(
    "kubelet_pleg_last_seen_seconds",
    "[ALPHA] Timestamp in seconds when PLEG was last seen active.",
    &[],
);
static STORAGE: Family = Family::histogram(
    "storage_operation_duration_seconds",
    "[ALPHA] Storage operation duration",
    &["migrated", "operation_name", "status", "volume_plugin"],
    Buckets::Listed(&[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0]),
);

/// When the certificates expire. Locked for a copy.
static EXPIRES: Mutex<[Option<Timestamp>; 2]> = Mutex::new([None; 2]);

/// A certificate of the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Certificate {
    Client,
    Serving,
}

/// The certificate in use expires then.
pub fn certificate_expires(of: Certificate, at: Timestamp) {
    EXPIRES.lock().expect("no panic under the lock")[of as usize] = Some(at);
}

pub fn certificate_not_renewed(of: Certificate) {
    match of {
        Certificate::Client => RENEW_ERRORS.count(&[]),
        Certificate::Serving => SERVER_RENEW_ERRORS.count(&[]),
    }
}

pub fn cgroup_changed(operation: &str, timer: Timer) {
    CGROUP_MANAGER.took(&[operation], timer.elapsed());
}

pub fn evicted(signal: &str) {
    EVICTIONS.count(&[signal]);
}

pub fn image_volume_requested() {
    IMAGE_VOLUME_REQUESTS.count(&[]);
}

pub fn image_volume_mounted(is_done: bool) {
    if is_done { IMAGE_VOLUMES.count(&[]) } else { IMAGE_VOLUME_ERRORS.count(&[]) }
}

pub fn relisted(took: Duration, since_last: Option<Duration>) {
    RELISTS.took(&[], took);
    if let Some(interval) = since_last {
        RELIST_INTERVALS.took(&[], interval);
    }
    RELISTED.set(&[], base::clock::now().as_millisecond() as f64 / 1e3);
}

pub fn volume_mounted(plugin: &str, is_done: bool, timer: Timer) {
    let status = if is_done { "success" } else { "fail-unknown" };
    STORAGE.took(&["false", "volume_mount", status, plugin], timer.elapsed());
}

pub fn encode(out: &mut String) {
    let expires = *EXPIRES.lock().expect("no panic under the lock");
    for (family, at) in [(&CLIENT_TTL, expires[0]), (&SERVER_TTL, expires[1])] {
        let now = base::clock::now();
        family.set(&[], at.map_or(f64::INFINITY, |at| (at.as_second() - now.as_second()) as f64));
    }
    let families = [
        &CGROUP_MANAGER,
        &RENEW_ERRORS,
        &CLIENT_TTL,
        &SERVER_TTL,
        &EVICTIONS,
        &IMAGE_VOLUME_ERRORS,
        &IMAGE_VOLUMES,
        &IMAGE_VOLUME_REQUESTS,
        &RELISTED,
        &RELISTS,
        &RELIST_INTERVALS,
        &SERVER_RENEW_ERRORS,
        &STORAGE,
    ];
    base::metrics::encode(&families, out);
}
