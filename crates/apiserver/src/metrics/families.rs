//! The server's families that count for the whole process.
//! Upstream: `admission/metrics`, `endpoints/metrics`, `storage/cacher/metrics`.

use base::metrics::{Buckets, Family};

use crate::resource::Resource;

const ADMISSION_SECONDS: Buckets = Buckets::Listed(&[0.005, 0.025, 0.1, 0.5, 1.0, 2.5]);
const WEBHOOK_SECONDS: Buckets = Buckets::Listed(&[0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 25.0]);
const WATCH_LIST_SECONDS: Buckets = Buckets::Listed(&[
    0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0,
]);

pub(crate) static ADMISSION_PLUGIN: Family = Family::histogram(
    "apiserver_admission_controller_admission_duration_seconds",
    "[STABLE] Admission controller latency histogram in seconds, identified by name and broken out for each operation and API resource and type (validate or admit).",
    &["name", "operation", "rejected", "type"],
    ADMISSION_SECONDS,
);
pub(crate) static ADMISSION_STEP: Family = Family::histogram(
    "apiserver_admission_step_admission_duration_seconds",
    "[STABLE] Admission sub-step latency histogram in seconds, broken out for each operation and API resource and step type (validate or admit).",
    &["operation", "rejected", "type"],
    ADMISSION_SECONDS,
);
/// Observed by the webhooks' plugins.
pub static ADMISSION_WEBHOOK: Family = Family::histogram(
    "apiserver_admission_webhook_admission_duration_seconds",
    "[STABLE] Admission webhook latency histogram in seconds, identified by name and broken out for each operation and API resource and type (validate or admit).",
    &["name", "operation", "rejected", "type"],
    WEBHOOK_SECONDS,
);
static DEPRECATED_APIS: Family = Family::gauge(
    "apiserver_requested_deprecated_apis",
    "[STABLE] Gauge of deprecated APIs that have been requested, broken out by API group, version, resource, subresource, and removed_release.",
    &["group", "removed_release", "resource", "subresource", "version"],
);
pub(crate) static EVENTS_RECEIVED: Family = Family::counter(
    "apiserver_storage_events_received_total",
    "[BETA] Number of etcd events received split by kind.",
    &["group", "resource"],
);
pub(crate) static WATCH_LIST: Family = Family::histogram(
    "apiserver_watch_list_duration_seconds",
    "[BETA] Response latency distribution in seconds for watch list requests broken by group, version, resource and scope.",
    &["group", "resource", "scope", "version"],
    WATCH_LIST_SECONDS,
);
/// Validation here is written once, so there is nothing that could differ from it.
static DECLARATIVE_MISMATCHES: Family = Family::counter(
    "apiserver_validation_declarative_validation_mismatch_total",
    "[BETA] Number of times declarative validation results differed from handwritten validation results for core types.",
    &[],
);
static DECLARATIVE_PANICS: Family = Family::counter(
    "apiserver_validation_declarative_validation_panic_total",
    "[BETA] Number of times declarative validation has panicked during validation.",
    &[],
);
/// A request for a deprecated version of a resource, with the text of its warning.
pub(crate) fn requested_deprecated(row: &Resource, subresource: &str, warning: &str) {
    // Of the form: "policy/v1beta1 X is deprecated in v1.21+, unavailable in v1.25+; use …".
    let removed = warning
        .split_once("unavailable in v")
        .map_or("", |(_, after)| after.split_once('+').map_or("", |(release, _)| release));
    DEPRECATED_APIS.set(&[&row.group, removed, &row.plural, subresource, &row.version], 1.0);
}

pub(crate) fn encode(out: &mut String) {
    base::metrics::encode(
        &[
            &ADMISSION_PLUGIN,
            &ADMISSION_STEP,
            &ADMISSION_WEBHOOK,
            &DEPRECATED_APIS,
            &EVENTS_RECEIVED,
            &WATCH_LIST,
            &DECLARATIVE_MISMATCHES,
            &DECLARATIVE_PANICS,
        ],
        out,
    );
}
