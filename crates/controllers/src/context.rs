//! The table of controllers and what each is given.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{Client, EventRecorder, Informers};

/// Flags of kube-controller-manager that controllers read.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--cluster-cidr`; no pod CIDRs are handed out without it.
    pub cluster_cidr: Option<String>,
    /// `--allocate-node-cidrs`
    pub allocate_node_cidrs: bool,
    /// `--node-cidr-mask-size`
    pub node_cidr_mask_size: u8,
    /// `--root-ca-file`, as PEM: published in every namespace.
    pub root_ca: Option<String>,
    /// `--cluster-signing-cert-file` and `-key-file`, as PEM.
    pub signing_cert: Option<String>,
    pub signing_key: Option<String>,
    /// `--cluster-signing-duration`
    pub signing_duration: Duration,
    /// `--node-monitor-grace-period`
    pub node_monitor_grace_period: Duration,
    /// `--node-monitor-period`
    pub node_monitor_period: Duration,
    /// `--node-startup-grace-period`
    pub node_startup_grace_period: Duration,
    /// `--terminated-pod-gc-threshold`
    pub terminated_pod_gc_threshold: usize,
    /// Where the built-in storage class keeps volumes on each node; without it there is none.
    pub local_path_directory: Option<PathBuf>,
    /// The node that this process runs on, if it is one: its directories can be removed.
    pub local_node: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cluster_cidr: None,
            allocate_node_cidrs: false,
            node_cidr_mask_size: 24,
            root_ca: None,
            signing_cert: None,
            signing_key: None,
            signing_duration: Duration::from_secs(365 * 24 * 3600),
            node_monitor_grace_period: Duration::from_secs(50),
            node_monitor_period: Duration::from_secs(5),
            node_startup_grace_period: Duration::from_secs(60),
            terminated_pod_gc_threshold: 12500,
            local_path_directory: None,
            local_node: None,
        }
    }
}

/// What a controller is given.
#[derive(Clone)]
pub struct Context {
    /// With the controller's own identity.
    pub client: Client,
    /// Shared by all controllers.
    pub informers: Informers,
    /// With the controller's name as source.
    pub events: EventRecorder,
    /// The controller's tasks.
    pub tasks: Tasks,
    pub options: Arc<Options>,
}

/// A row of the table.
pub struct Descriptor {
    /// Upstream's name, as in `--controllers`.
    pub name: &'static str,
    /// The service account in kube-system whose rights it needs, where each has its own.
    pub account: &'static str,
    /// The source of its events.
    pub component: &'static str,
    /// Subscribes and spawns; returns at once.
    pub start: fn(Context),
}

/// All controllers. Order does not matter.
pub const CONTROLLERS: &[Descriptor] = &[
    crate::deployment::DESCRIPTOR,
    crate::replicaset::DESCRIPTOR,
    crate::replication::DESCRIPTOR,
    crate::job::DESCRIPTOR,
    crate::cronjob::DESCRIPTOR,
    crate::ttl_after_finished::DESCRIPTOR,
    crate::daemonset::DESCRIPTOR,
    crate::statefulset::DESCRIPTOR,
    crate::endpointslice::DESCRIPTOR,
    crate::endpoints::DESCRIPTOR,
    crate::serviceaccount::DESCRIPTOR,
    crate::root_ca::DESCRIPTOR,
    crate::namespace::DESCRIPTOR,
    crate::node_ipam::DESCRIPTOR,
    crate::node_lifecycle::DESCRIPTOR,
    crate::taint_eviction::DESCRIPTOR,
    crate::pod_gc::DESCRIPTOR,
    crate::policy_status::DESCRIPTOR,
    crate::certificates::APPROVER,
    crate::certificates::SIGNER,
    crate::csr_cleaner::DESCRIPTOR,
    crate::bootstrap_tokens::CLEANER,
    crate::bootstrap_tokens::SIGNER,
    crate::node_ttl::DESCRIPTOR,
    crate::service_cidr::DESCRIPTOR,
    crate::garbage::DESCRIPTOR,
    crate::volume::DESCRIPTOR,
    crate::volume::CLAIM_PROTECTION,
    crate::volume::VOLUME_PROTECTION,
    crate::volume::CLASS_PROTECTION,
    crate::volume::EPHEMERAL,
    crate::volume::EXPAND,
    crate::volume::ATTACH,
    crate::disruption::DESCRIPTOR,
    crate::autoscaler::DESCRIPTOR,
    crate::resource_quota::DESCRIPTOR,
    crate::resource_claim::DESCRIPTOR,
    crate::cluster_role_aggregation::DESCRIPTOR,
    crate::endpointslice_mirroring::DESCRIPTOR,
    crate::storage_version_migrator::DESCRIPTOR,
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
    CONTROLLERS.iter().map(|row| row.name).filter(|name| is_enabled(selection, name))
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
    let client = client_for("kube-controller-manager");
    let informers = Informers::new(client.clone(), tasks.clone());
    let events = EventRecorder::new(client, &tasks, "kube-controller-manager", None);
    let options = Arc::new(options);
    let mut started = BTreeSet::new();
    for row in CONTROLLERS.iter().filter(|row| is_enabled(selection, row.name)) {
        assert!(started.insert(row.name), "a controller has one row");
        (row.start)(Context {
            client: client_for(row.account),
            informers: informers.clone(),
            events: events.for_component(row.component),
            tasks: tasks.clone(),
            options: options.clone(),
        });
    }
    tracing::info!(controllers = started.len(), "controllers started");
    let group = tasks.stop_signal();
    tokio::select! {
        () = stop.wait() => {}
        () = group.wait() => tracing::error!("controllers stopped: a task panicked"),
    }
    tasks.shutdown(Duration::from_secs(5)).await;
}

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
