//! `decapod cloud-controller-manager`: the cloud's controllers alone, with upstream's flags.
//!
//! In: flags, a kubeconfig, the provider's configuration. Out: controllers that run while this process holds the
//! Lease `cloud-controller-manager`, and health, metrics and configz on the secure port. With
//! `--use-service-account-credentials` each controller has the rights of its own account.
//! Upstream: `cloud-provider/app`, `cloud-provider/options`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use base::task::Tasks;
use client::election::Leadership;
use serde_json::{Value, json};

use crate::components::{Figures, LeaderElection, lead, until_signal};
use crate::controller_manager::clients;
use crate::secure_port::{Page, SecurePort};

const NAME: &str = "cloud-controller-manager";
const PORT: u16 = 10258;

#[derive(clap::Args, Clone, Debug)]
pub struct CloudControllerManager {
    /// metal (machines from a file) or hetzner
    #[arg(long, value_name = "NAME")]
    cloud_provider: Option<String>,
    /// The provider's configuration: for metal the inventory
    #[arg(long, value_name = "FILE")]
    cloud_config: Option<PathBuf>,
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// Address of the API server; it overrides the kubeconfig's
    #[arg(long, value_name = "URL")]
    master: Option<String>,
    /// `*` for all, `NAME` for one, `-NAME` for all except one
    #[arg(long, value_delimiter = ',', default_value = "*", allow_hyphen_values = true)]
    controllers: Vec<String>,
    #[command(flatten)]
    election: LeaderElection,
    /// Use each controller's own service account in kube-system
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, action = clap::ArgAction::Set)]
    use_service_account_credentials: bool,
    /// Name of the cluster in the cloud
    #[arg(long, default_value = "kubernetes", value_name = "NAME")]
    cluster_name: String,
    /// Ranges of pods' addresses: only routes within are managed
    #[arg(long, value_name = "CIDR,...")]
    cluster_cidr: Option<String>,
    /// Pod CIDRs are assigned to nodes (by kube-controller-manager); needs --cluster-cidr
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, action = clap::ArgAction::Set)]
    allocate_node_cidrs: bool,
    /// Make the cloud's routes to the pods of nodes
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = true, action = clap::ArgAction::Set)]
    configure_cloud_routes: bool,
    #[command(flatten)]
    periods: Periods,
    /// Services whose load balancers are worked on at once
    #[arg(long, default_value_t = 1, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_service_syncs: i32,
    /// Nodes that are initialized at once
    #[arg(long, default_value_t = 1, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_node_syncs: i32,
    /// Nodes whose addresses are compared at once; 0: as --concurrent-node-syncs
    #[arg(long, default_value_t = 0, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_node_status_updates: i32,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
    #[command(flatten)]
    serving: SecurePort,
}

/// How often the cloud is asked.
#[derive(clap::Args, Clone, Debug)]
struct Periods {
    /// How often the cloud is asked about nodes that are not Ready
    #[arg(long, default_value = "5s", value_parser = base::duration::parse, value_name = "DURATION")]
    node_monitor_period: Duration,
    /// How often the addresses of all nodes are compared with the cloud's
    #[arg(long, default_value = "5m", value_parser = base::duration::parse, value_name = "DURATION")]
    node_status_update_frequency: Duration,
    /// How often the routes are compared with the nodes
    #[arg(long, default_value = "10s", value_parser = base::duration::parse, value_name = "DURATION")]
    route_reconciliation_period: Duration,
}

impl Periods {
    /// A period of zero would never rest.
    fn check(&self) -> anyhow::Result<()> {
        let all = [
            ("node-monitor-period", self.node_monitor_period),
            ("node-status-update-frequency", self.node_status_update_frequency),
            ("route-reconciliation-period", self.route_reconciliation_period),
        ];
        let zero = all.iter().find(|(_, period)| period.is_zero());
        ensure!(
            zero.is_none(),
            "--{}: must be greater than 0",
            zero.map(|(name, _)| *name).unwrap_or_default()
        );
        Ok(())
    }
}

impl CloudControllerManager {
    fn options(&self) -> anyhow::Result<cloud::Options> {
        self.periods.check()?;
        let cidrs = self.cluster_cidr.as_deref().unwrap_or_default();
        let cluster_cidrs = cloud::Options::parse_cidrs(cidrs).context("--cluster-cidr")?;
        ensure!(
            !self.allocate_node_cidrs || !cluster_cidrs.is_empty(),
            "--cluster-cidr must be set when --allocate-node-cidrs is true"
        );
        let node_syncs = usize::try_from(self.concurrent_node_syncs).unwrap_or_default();
        ensure!(node_syncs > 0, "concurrent-node-syncs must be a positive number");
        let updates = usize::try_from(self.concurrent_node_status_updates);
        let updates =
            updates.ok().context("concurrent-node-status-updates cannot be a negative number")?;
        let service_syncs = usize::try_from(self.concurrent_service_syncs).unwrap_or_default();
        ensure!(
            service_syncs > 0,
            "concurrent-service-syncs must be greater than 0, but got {}",
            self.concurrent_service_syncs
        );
        Ok(cloud::Options {
            cluster: self.cluster_name.clone(),
            cluster_cidrs,
            configure_routes: self.configure_cloud_routes,
            node_monitor_period: self.periods.node_monitor_period,
            node_status_update_frequency: self.periods.node_status_update_frequency,
            route_reconciliation_period: self.periods.route_reconciliation_period,
            service_syncs,
            node_syncs,
            node_status_updates: if updates > 0 { updates } else { node_syncs },
        })
    }

    /// Upstream's `CloudControllerManagerConfiguration`, limited to fields with flags.
    fn configz(&self) -> Value {
        let text = |time: Duration| {
            base::duration::text(i64::try_from(time.as_nanos()).unwrap_or(i64::MAX))
        };
        let address = self.serving.address(PORT);
        json!({"cloudcontrollermanager.config.k8s.io": {
            "apiVersion": "cloudcontrollermanager.config.k8s.io/v1alpha1",
            "kind": "CloudControllerManagerConfiguration",
            "Generic": {
                "Address": address.map_or_else(String::new, |address| address.ip().to_string()),
                "Port": address.map_or(0, |address| address.port()),
                "ClientConnection": {"kubeconfig": self.kubeconfig},
                "Controllers": self.controllers,
                "LeaderElection": self.election.configz(NAME),
            },
            "KubeCloudShared": {
                "CloudProvider": {
                    "Name": self.cloud_provider,
                    "CloudConfigFile": self.cloud_config.clone().unwrap_or_default(),
                },
                "UseServiceAccountCredentials": self.use_service_account_credentials,
                "RouteReconciliationPeriod": text(self.periods.route_reconciliation_period),
                "NodeMonitorPeriod": text(self.periods.node_monitor_period),
                "ClusterName": self.cluster_name,
                "ClusterCIDR": self.cluster_cidr.clone().unwrap_or_default(),
                "AllocateNodeCIDRs": self.allocate_node_cidrs,
                "ConfigureCloudRoutes": self.configure_cloud_routes,
            },
            "NodeController": {"ConcurrentNodeSyncs": self.concurrent_node_syncs},
            "ServiceController": {"ConcurrentServiceSyncs": self.concurrent_service_syncs},
            "NodeStatusUpdateFrequency": text(self.periods.node_status_update_frequency),
        }})
    }
}

pub async fn run(flags: CloudControllerManager) -> anyhow::Result<()> {
    let provider = flags.cloud_provider.as_deref().unwrap_or_default();
    ensure!(!provider.is_empty(), "--cloud-provider cannot be empty");
    cloud::known(&flags.controllers).context("--controllers")?;
    let provider = cloud::open(provider, flags.cloud_config.as_deref())
        .context("Cloud provider could not be initialized")?;
    let kubeconfig = flags.kubeconfig.clone().context("--kubeconfig is missing")?;
    flags.serving.install_tls()?;
    let (configz, options) = (flags.configz(), flags.options()?);
    let has_own = flags.use_service_account_credentials;
    let client_for = clients(NAME, &kubeconfig, flags.master.as_deref(), has_own)?;
    let own = client_for(NAME);
    until_signal(NAME, async move |tasks: &Tasks| {
        let leadership = Leadership::default();
        let figures =
            [client::encode_queues as Figures, client::encode_requests, cloud::encode_metrics];
        let page = Page::new(NAME, flags.election.elects(), &leadership, configz, &figures);
        flags.serving.serve(PORT, &page, tasks).await?;
        let work = |stop| {
            for name in cloud::able(&flags.controllers, &*provider, &options) {
                page.healthz().add(name, || Ok(()));
            }
            cloud::run(client_for, &flags.controllers, provider, options, stop)
        };
        lead(own, NAME, &flags.election, leadership, tasks.stop_signal(), work).await
    })
    .await
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: CloudControllerManager,
    }

    fn flags(words: &[&str]) -> CloudControllerManager {
        Line::try_parse_from(["x"].iter().chain(words)).expect("flags").flags
    }

    #[tokio::test]
    async fn a_provider_is_needed() {
        let check = async |words: &[&str], expected: &str| {
            let error = run(flags(words)).await.expect_err("no provider");
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        };
        check(&[], "--cloud-provider cannot be empty").await;
        check(
            &["--cloud-provider=aws"],
            "Cloud provider could not be initialized: unknown cloud provider \"aws\"",
        )
        .await;
        check(&["--cloud-provider=metal"], "the cloud provider metal needs --cloud-config").await;
        check(
            &["--cloud-provider=metal", "--controllers=nodes"],
            "\"nodes\" is not in the list of known controllers",
        )
        .await;
    }

    #[test]
    fn options_are_the_flags() {
        let options = flags(&[
            "--cluster-cidr=10.0.0.0/16,fd00::/48",
            "--concurrent-node-syncs=3",
            "--route-reconciliation-period=30s",
            "--configure-cloud-routes=false",
        ]);
        let options = options.options().expect("valid");
        assert_eq!(options.cluster_cidrs.len(), 2);
        assert_eq!((options.node_syncs, options.node_status_updates), (3, 3));
        assert_eq!(options.route_reconciliation_period, Duration::from_secs(30));
        assert!(!options.configure_routes);
        let check = |word: &str, expected: &str| {
            let error = flags(&[word]).options().expect_err("wrong").to_string();
            assert!(error.contains(expected), "{error}");
        };
        check("--concurrent-service-syncs=0", "concurrent-service-syncs must be greater than 0");
        check("--concurrent-node-syncs=0", "concurrent-node-syncs must be a positive number");
        check("--allocate-node-cidrs", "--cluster-cidr must be set");
        check("--node-monitor-period=0s", "--node-monitor-period: must be greater than 0");
    }
}
