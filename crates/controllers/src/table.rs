//! The table of controllers, and the one place that starts them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{Client, EventRecorder, Informers};

use crate::context::{Context, Options};
use crate::descriptor::Row;
use crate::{
    autoscaler, bootstrap_tokens, certificates, cluster_role_aggregation, cronjob, csr_cleaner,
    daemonset, deployment, disruption, endpoints, endpointslice, endpointslice_mirroring, garbage,
    job, legacy_token_cleaner, metrics, namespace, node_ipam, node_lifecycle, node_ttl,
    pod_certificate_cleaner, pod_gc, pod_group_protection, policy_status, replicaset, replication,
    resource_claim, resource_quota, root_ca, service_account_tokens, service_cidr, service_lb,
    serviceaccount, statefulset, storage_version_gc, storage_version_migrator, taint_eviction,
    trust_bundle_publisher, ttl_after_finished, volume,
};

/// Less than the time between a lost lease and another's: see [`client::election`].
const ENDING: Duration = Duration::from_secs(4);

/// All controllers. Order does not matter.
pub const CONTROLLERS: &[&dyn Row] = &[
    deployment::DESCRIPTOR,
    replicaset::DESCRIPTOR,
    replication::DESCRIPTOR,
    job::DESCRIPTOR,
    cronjob::DESCRIPTOR,
    ttl_after_finished::DESCRIPTOR,
    daemonset::DESCRIPTOR,
    statefulset::DESCRIPTOR,
    endpointslice::DESCRIPTOR,
    endpoints::DESCRIPTOR,
    serviceaccount::DESCRIPTOR,
    service_account_tokens::DESCRIPTOR,
    root_ca::DESCRIPTOR,
    namespace::DESCRIPTOR,
    node_ipam::DESCRIPTOR,
    node_lifecycle::DESCRIPTOR,
    taint_eviction::DESCRIPTOR,
    pod_gc::DESCRIPTOR,
    policy_status::DESCRIPTOR,
    certificates::APPROVER,
    certificates::SIGNER,
    csr_cleaner::DESCRIPTOR,
    bootstrap_tokens::CLEANER,
    bootstrap_tokens::SIGNER,
    node_ttl::DESCRIPTOR,
    service_cidr::DESCRIPTOR,
    service_lb::DESCRIPTOR,
    garbage::DESCRIPTOR,
    volume::DESCRIPTOR,
    volume::protection::CLAIMS,
    volume::protection::VOLUMES,
    volume::protection::CLASSES,
    volume::ephemeral::DESCRIPTOR,
    volume::expand::DESCRIPTOR,
    volume::attach::DESCRIPTOR,
    disruption::DESCRIPTOR,
    autoscaler::DESCRIPTOR,
    resource_quota::DESCRIPTOR,
    resource_claim::DESCRIPTOR,
    cluster_role_aggregation::DESCRIPTOR,
    endpointslice_mirroring::DESCRIPTOR,
    storage_version_migrator::DESCRIPTOR,
    storage_version_gc::DESCRIPTOR,
    legacy_token_cleaner::DESCRIPTOR,
    pod_certificate_cleaner::DESCRIPTOR,
    pod_group_protection::DESCRIPTOR,
    trust_bundle_publisher::DESCRIPTOR,
];

/// Whether `--controllers` selects `name`: `*` for all, `-name` to leave one out. Empty means all.
fn is_enabled(selection: &[String], name: &str) -> bool {
    let named = |wanted: &str| selection.iter().any(|one| one == wanted);
    if named(name) {
        return true;
    }
    !named(&format!("-{name}")) && (selection.is_empty() || named("*"))
}

/// The names of those that `--controllers` selects.
pub fn selected(selection: &[String]) -> impl Iterator<Item = &'static str> {
    CONTROLLERS.iter().map(|row| row.name()).filter(|name| is_enabled(selection, name))
}

/// Runs the selected controllers until `stop`. `client_for` gives a client for an identity:
/// `kube-controller-manager` for the shared caches and events, then each controller's account
/// (upstream's `--use-service-account-credentials`); one client for all is fine.
pub async fn run(
    client_for: impl Fn(&str) -> Client,
    selection: &[String],
    options: Options,
    stop: Stop,
) {
    let tasks = Tasks::new("kube-controller-manager");
    let _bound = tasks.bound();
    start(client_for, selection, options, &tasks);
    let group = tasks.stop_signal();
    tokio::select! {
        () = stop.wait() => {}
        () = group.wait() => tracing::error!("controllers stopped: a task panicked"),
    }
    tasks.shutdown(ENDING).await;
    metrics::stopped();
}

/// Starts them as tasks of `tasks`; the informers that they share.
fn start(
    client_for: impl Fn(&str) -> Client,
    selection: &[String],
    options: Options,
    tasks: &Tasks,
) -> Informers {
    let client = client_for("kube-controller-manager");
    let informers = Informers::new(client.clone(), tasks.clone());
    let events = EventRecorder::new(client, tasks, "kube-controller-manager", None);
    let options = Arc::new(options);
    let mut started = BTreeSet::new();
    for row in CONTROLLERS.iter().filter(|row| is_enabled(selection, row.name())) {
        assert!(started.insert(row.name()), "a controller has one row");
        metrics::runs(row.name(), true);
        row.start(Context {
            client: client_for(row.account()),
            informers: informers.clone(),
            events: events.for_component(row.component()),
            tasks: tasks.clone(),
            options: options.clone(),
        });
    }
    tracing::info!(controllers = started.len(), "controllers started");
    informers
}

#[cfg(test)]
mod cost;
#[cfg(test)]
mod memory;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_selects_controllers() {
        let check = |selection: &[&str], name: &str, expected: bool| {
            let selection: Vec<_> = selection.iter().map(|one| one.to_string()).collect();
            assert_eq!(is_enabled(&selection, name), expected, "{selection:?} {name}");
        };
        check(&[], "a", true);
        check(&["*"], "a", true);
        check(&["*", "-a"], "a", false);
        check(&["b"], "a", false);
        check(&["a"], "a", true);
    }
}
