//! `decapod kube-controller-manager`: the controllers alone, with upstream's flags.
//!
//! In: flags, PEM files, a kubeconfig. Out: controllers that run while this process holds the Lease, and
//! health, metrics and configz on the secure port. With `--use-service-account-credentials` each controller
//! has the rights of its own account (`accounts.rs`), otherwise all have the kubeconfig's.
//! Upstream: `cmd/kube-controller-manager/app`.

mod accounts;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{bail, ensure};
use base::task::Tasks;
use client::election::Leadership;
use controllers::{Autoscaling, Evictions};
use serde_json::{Value, json};

use crate::components::{Figures, LeaderElection, lead, read, until_signal};
use crate::secure_port::{Page, SecurePort};

const NAME: &str = "kube-controller-manager";
const PORT: u16 = 10257;

#[derive(clap::Args, Clone, Debug)]
pub struct ControllerManager {
    #[arg(long)]
    kubeconfig: PathBuf,
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
    /// Range of pods' addresses; the first IPv4 range is split among nodes
    #[arg(long)]
    cluster_cidr: Option<String>,
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, action = clap::ArgAction::Set)]
    allocate_node_cidrs: bool,
    #[arg(long, value_name = "BITS")]
    node_cidr_mask_size: Option<u8>,
    #[arg(long, value_name = "BITS", conflicts_with = "node_cidr_mask_size")]
    node_cidr_mask_size_ipv4: Option<u8>,
    /// Range of Services' addresses, which no node gets
    #[arg(long, value_name = "CIDR")]
    service_cluster_ip_range: Option<String>,
    /// PEM; published in every namespace
    #[arg(long)]
    root_ca_file: Option<PathBuf>,
    /// PEM; signs the tokens in Secrets of type kubernetes.io/service-account-token
    #[arg(long)]
    service_account_private_key_file: Option<PathBuf>,
    #[command(flatten)]
    signing: Signing,
    #[command(flatten)]
    nodes: Nodes,
    #[command(flatten)]
    autoscaling: AutoscalingFlags,
    #[command(flatten)]
    workers: Workers,
    /// Number of ended pods above which the oldest are deleted; 0: never
    #[arg(long, default_value_t = 12500, value_name = "NUMBER", allow_hyphen_values = true)]
    terminated_pod_gc_threshold: i32,
    /// Age without use after which a token in a Secret is invalidated, and later deleted
    #[arg(long, default_value = "8760h", value_parser = base::duration::parse, value_name = "DURATION")]
    legacy_service_account_token_clean_up_period: Duration,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
    #[command(flatten)]
    serving: SecurePort,
}

/// Authorities that sign requests for certificates.
#[derive(clap::Args, Clone, Debug)]
struct Signing {
    /// Authority for all signers, PEM
    #[arg(long, value_name = "FILE")]
    cluster_signing_cert_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE")]
    cluster_signing_key_file: Option<PathBuf>,
    /// Longest lifetime of signed certificates
    #[arg(long, default_value = "8760h", value_parser = base::duration::parse, value_name = "DURATION")]
    cluster_signing_duration: Duration,
    /// Authority for kubernetes.io/kubelet-serving
    #[arg(long, value_name = "FILE")]
    cluster_signing_kubelet_serving_cert_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE")]
    cluster_signing_kubelet_serving_key_file: Option<PathBuf>,
    /// Authority for kubernetes.io/kube-apiserver-client-kubelet
    #[arg(long, value_name = "FILE")]
    cluster_signing_kubelet_client_cert_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE")]
    cluster_signing_kubelet_client_key_file: Option<PathBuf>,
    /// Authority for kubernetes.io/kube-apiserver-client
    #[arg(long, value_name = "FILE")]
    cluster_signing_kube_apiserver_client_cert_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE")]
    cluster_signing_kube_apiserver_client_key_file: Option<PathBuf>,
    /// Authority for kubernetes.io/legacy-unknown
    #[arg(long, value_name = "FILE")]
    cluster_signing_legacy_unknown_cert_file: Option<PathBuf>,
    #[arg(long, value_name = "FILE")]
    cluster_signing_legacy_unknown_key_file: Option<PathBuf>,
}

/// When a node counts as failed, and how fast its pods are evicted.
#[derive(clap::Args, Clone, Debug)]
struct Nodes {
    /// How often the state of silent nodes is checked
    #[arg(long, default_value = "5s", value_parser = base::duration::parse, value_name = "DURATION")]
    node_monitor_period: Duration,
    /// After this time without a sign a node is NotReady
    #[arg(long, default_value = "50s", value_parser = base::duration::parse, value_name = "DURATION")]
    node_monitor_grace_period: Duration,
    /// The same for a node that starts
    #[arg(long, default_value = "1m", value_parser = base::duration::parse, value_name = "DURATION")]
    node_startup_grace_period: Duration,
    /// Nodes of a zone in a second whose pods are evicted
    #[arg(long, default_value_t = 0.1, value_name = "RATE")]
    node_eviction_rate: f64,
    /// The same in a large zone that is partly down; in a small one it is 0
    #[arg(long, default_value_t = 0.01, value_name = "RATE")]
    secondary_node_eviction_rate: f64,
    /// Nodes above which a zone is large
    #[arg(long, default_value_t = 50, value_name = "NUMBER")]
    large_cluster_size_threshold: u32,
    /// A zone is partly down with this share of failed nodes, and at least three
    #[arg(long, default_value_t = 0.55, value_name = "SHARE")]
    unhealthy_zone_threshold: f64,
}

#[derive(clap::Args, Clone, Debug)]
struct AutoscalingFlags {
    #[arg(long, default_value = "15s", value_parser = base::duration::parse, value_name = "DURATION")]
    horizontal_pod_autoscaler_sync_period: Duration,
    #[arg(long, default_value = "5m", value_parser = base::duration::parse, value_name = "DURATION")]
    horizontal_pod_autoscaler_downscale_stabilization: Duration,
    #[arg(long, default_value_t = 0.1, value_name = "SHARE")]
    horizontal_pod_autoscaler_tolerance: f64,
    #[arg(long, default_value = "5m", value_parser = base::duration::parse, value_name = "DURATION")]
    horizontal_pod_autoscaler_cpu_initialization_period: Duration,
    #[arg(long, default_value = "30s", value_parser = base::duration::parse, value_name = "DURATION")]
    horizontal_pod_autoscaler_initial_readiness_delay: Duration,
}

/// How many objects a controller works on at once.
#[derive(clap::Args, Clone, Debug)]
struct Workers {
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_cron_job_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_daemonset_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_deployment_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_endpoint_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_gc_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_horizontal_pod_autoscaler_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_job_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_namespace_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_rc_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_replicaset_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_resource_quota_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_resourceclaim_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_service_endpoint_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_statefulset_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_ttl_after_finished_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    concurrent_validating_admission_policy_status_syncs: Option<i32>,
    #[arg(long, value_name = "NUMBER", allow_hyphen_values = true)]
    mirroring_concurrent_service_endpoint_syncs: Option<i32>,
}

impl Workers {
    /// By the controller's name.
    fn by_controller(&self) -> anyhow::Result<BTreeMap<&'static str, usize>> {
        let all = [
            ("concurrent-cron-job-syncs", "cronjob-controller", self.concurrent_cron_job_syncs),
            ("concurrent-daemonset-syncs", "daemonset-controller", self.concurrent_daemonset_syncs),
            (
                "concurrent-deployment-syncs",
                "deployment-controller",
                self.concurrent_deployment_syncs,
            ),
            ("concurrent-endpoint-syncs", "endpoints-controller", self.concurrent_endpoint_syncs),
            ("concurrent-gc-syncs", "garbage-collector-controller", self.concurrent_gc_syncs),
            (
                "concurrent-horizontal-pod-autoscaler-syncs",
                "horizontal-pod-autoscaler-controller",
                self.concurrent_horizontal_pod_autoscaler_syncs,
            ),
            ("concurrent-job-syncs", "job-controller", self.concurrent_job_syncs),
            ("concurrent-namespace-syncs", "namespace-controller", self.concurrent_namespace_syncs),
            ("concurrent-rc-syncs", "replicationcontroller-controller", self.concurrent_rc_syncs),
            (
                "concurrent-replicaset-syncs",
                "replicaset-controller",
                self.concurrent_replicaset_syncs,
            ),
            (
                "concurrent-resource-quota-syncs",
                "resourcequota-controller",
                self.concurrent_resource_quota_syncs,
            ),
            (
                "concurrent-resourceclaim-syncs",
                "resourceclaim-controller",
                self.concurrent_resourceclaim_syncs,
            ),
            (
                "concurrent-service-endpoint-syncs",
                "endpointslice-controller",
                self.concurrent_service_endpoint_syncs,
            ),
            (
                "concurrent-statefulset-syncs",
                "statefulset-controller",
                self.concurrent_statefulset_syncs,
            ),
            (
                "concurrent-ttl-after-finished-syncs",
                "ttl-after-finished-controller",
                self.concurrent_ttl_after_finished_syncs,
            ),
            (
                "concurrent-validating-admission-policy-status-syncs",
                "validatingadmissionpolicy-status-controller",
                self.concurrent_validating_admission_policy_status_syncs,
            ),
            (
                "mirroring-concurrent-service-endpoint-syncs",
                "endpointslice-mirroring-controller",
                self.mirroring_concurrent_service_endpoint_syncs,
            ),
        ];
        let mut by_controller = BTreeMap::new();
        for (flag, controller, given) in all {
            let Some(number) = given else { continue };
            ensure!(number > 0, "{flag} must be greater than 0, but got {number}");
            by_controller.insert(controller, number as usize);
        }
        Ok(by_controller)
    }
}

impl Signing {
    /// The authority of each signer that has its own, PEM.
    fn by_signer(&self) -> anyhow::Result<BTreeMap<String, (String, String)>> {
        let all = [
            (
                "kubelet-serving",
                "kubernetes.io/kubelet-serving",
                &self.cluster_signing_kubelet_serving_cert_file,
                &self.cluster_signing_kubelet_serving_key_file,
            ),
            (
                "kubelet-client",
                "kubernetes.io/kube-apiserver-client-kubelet",
                &self.cluster_signing_kubelet_client_cert_file,
                &self.cluster_signing_kubelet_client_key_file,
            ),
            (
                "kube-apiserver-client",
                "kubernetes.io/kube-apiserver-client",
                &self.cluster_signing_kube_apiserver_client_cert_file,
                &self.cluster_signing_kube_apiserver_client_key_file,
            ),
            (
                "legacy-unknown",
                "kubernetes.io/legacy-unknown",
                &self.cluster_signing_legacy_unknown_cert_file,
                &self.cluster_signing_legacy_unknown_key_file,
            ),
        ];
        let mut by_signer = BTreeMap::new();
        for (flag, signer, cert, key) in all {
            match (read(cert.as_deref())?, read(key.as_deref())?) {
                (Some(cert), Some(key)) => drop(by_signer.insert(signer.to_owned(), (cert, key))),
                (None, None) => {}
                (None, _) => bail!("\"cluster-signing-{flag}\": cannot specify key without cert"),
                (_, None) => bail!("\"cluster-signing-{flag}\": cannot specify cert without key"),
            }
        }
        let has_usual =
            self.cluster_signing_cert_file.is_some() || self.cluster_signing_key_file.is_some();
        ensure!(
            by_signer.is_empty() || !has_usual,
            "cannot specify --cluster-signing-{{cert,key}}-file and other --cluster-signing-*-file flags at the same time"
        );
        Ok(by_signer)
    }
}

impl ControllerManager {
    /// `--controllers`
    pub fn selection(&self) -> Vec<String> {
        self.controllers.clone()
    }

    pub fn options(&self) -> anyhow::Result<controllers::Options> {
        let signing_key = read(self.service_account_private_key_file.as_deref())?;
        ensure!(
            !self.allocate_node_cidrs || self.cluster_cidr.is_some(),
            "--cluster-cidr must be set when --allocate-node-cidrs is true"
        );
        let (nodes, scaling) = (&self.nodes, &self.autoscaling);
        let mask = self.node_cidr_mask_size.or(self.node_cidr_mask_size_ipv4);
        Ok(controllers::Options {
            token_signer: signing_key.as_deref().map(crate::token_signer::of_key).transpose()?,
            cluster_cidr: self.cluster_cidr.clone(),
            service_cidr: self.service_cluster_ip_range.clone(),
            allocate_node_cidrs: self.allocate_node_cidrs,
            node_cidr_mask_size: mask.filter(|bits| *bits > 0).unwrap_or(24),
            root_ca: read(self.root_ca_file.as_deref())?,
            signing_cert: read(self.signing.cluster_signing_cert_file.as_deref())?,
            signing_key: read(self.signing.cluster_signing_key_file.as_deref())?,
            signing_by_signer: self.signing.by_signer()?,
            signing_duration: self.signing.cluster_signing_duration,
            legacy_token_clean_up_period: self.legacy_service_account_token_clean_up_period,
            node_monitor_grace_period: nodes.node_monitor_grace_period,
            node_monitor_period: nodes.node_monitor_period,
            node_startup_grace_period: nodes.node_startup_grace_period,
            evictions: Evictions {
                rate: nodes.node_eviction_rate,
                secondary_rate: nodes.secondary_node_eviction_rate,
                large_zone: nodes.large_cluster_size_threshold as usize,
                unhealthy_share: nodes.unhealthy_zone_threshold,
            },
            autoscaling: Autoscaling {
                sync_period: scaling.horizontal_pod_autoscaler_sync_period,
                downscale_stabilization: scaling.horizontal_pod_autoscaler_downscale_stabilization,
                tolerance: scaling.horizontal_pod_autoscaler_tolerance,
                cpu_initialization: scaling.horizontal_pod_autoscaler_cpu_initialization_period,
                initial_readiness: scaling.horizontal_pod_autoscaler_initial_readiness_delay,
            },
            workers: self.workers.by_controller()?,
            terminated_pod_gc_threshold: match self.terminated_pod_gc_threshold {
                ..=0 => usize::MAX,
                number => number as usize,
            },
            ..controllers::Options::default()
        })
    }

    /// Upstream's `KubeControllerManagerConfiguration`, limited to fields with flags.
    fn configz(&self) -> Value {
        let text = |path: &Option<PathBuf>| {
            path.as_deref().map(|path| path.display().to_string()).unwrap_or_default()
        };
        let address = self.serving.address(PORT);
        let signing = &self.signing;
        json!({"kubecontrollermanager.config.k8s.io": {
            "Generic": {
                "Address": address.map_or_else(String::new, |address| address.ip().to_string()),
                "Port": address.map_or(0, |address| address.port()),
                "ClientConnection": {"kubeconfig": self.kubeconfig},
                "Controllers": self.controllers,
                "LeaderElection": self.election.configz(NAME),
            },
            "KubeCloudShared": {
                "AllocateNodeCIDRs": self.allocate_node_cidrs,
                "ClusterCIDR": self.cluster_cidr.clone().unwrap_or_default(),
                "UseServiceAccountCredentials": self.use_service_account_credentials,
            },
            "CSRSigningController": {
                "ClusterSigningCertFile": text(&signing.cluster_signing_cert_file),
                "ClusterSigningKeyFile": text(&signing.cluster_signing_key_file),
            },
            "NodeIPAMController": {"NodeCIDRMaskSize": self.node_cidr_mask_size.unwrap_or_default()},
            "SAController": {
                "RootCAFile": text(&self.root_ca_file),
                "ServiceAccountKeyFile": text(&self.service_account_private_key_file),
            },
        }})
    }
}

pub async fn run(flags: ControllerManager) -> anyhow::Result<()> {
    flags.serving.install_tls()?;
    let (configz, options) = (flags.configz(), flags.options()?);
    let client_for = clients(
        NAME,
        &flags.kubeconfig,
        flags.master.as_deref(),
        flags.use_service_account_credentials,
    )?;
    let own = client_for(NAME);
    until_signal(NAME, async move |tasks: &Tasks| {
        let leadership = Leadership::default();
        let figures = [
            client::encode_queues as Figures,
            client::encode_requests,
            controllers::encode_metrics,
        ];
        let page = Page::new(NAME, flags.election.elects(), &leadership, configz, &figures);
        flags.serving.serve(PORT, &page, tasks).await?;
        let work = |stop| {
            for name in controllers::selected(&flags.controllers) {
                page.healthz().add(name, || Ok(()));
            }
            controllers::run(client_for, &flags.controllers, options, stop)
        };
        lead(own, NAME, &flags.election, leadership, tasks.stop_signal(), work).await
    })
    .await
}

/// Clients of a controller manager by account: the kubeconfig's identity for all, or each with its own.
pub fn clients(
    name: &'static str,
    kubeconfig: &Path,
    master: Option<&str>,
    has_own: bool,
) -> anyhow::Result<impl Fn(&str) -> client::Client + use<>> {
    let options = crate::kubeconfig::options(kubeconfig, master)?;
    let http = transport::HttpClient::new(&options)?;
    let client = client::Client::over(http, name);
    Ok(move |account: &str| {
        if !has_own || account == name {
            return client.clone();
        }
        accounts::client(name, &options, client.clone(), account).unwrap_or_else(|error| {
            let error = format!("{error:#}");
            tracing::error!(account, error, "failed to make a client for the service account");
            client.clone()
        })
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: ControllerManager,
    }

    fn flags(words: &[&str]) -> ControllerManager {
        let words = ["x", "--kubeconfig=/k"].iter().chain(words);
        Line::try_parse_from(words).expect("flags").flags
    }

    /// Flags of controllers are named after them: a row of another name would never see its flag.
    #[test]
    fn flags_are_of_controllers_that_exist() {
        let given = flags(&["--concurrent-deployment-syncs=7", "--concurrent-rc-syncs=2"]);
        let by_controller = given.workers.by_controller().expect("valid");
        assert_eq!(by_controller["deployment-controller"], 7);
        let names: Vec<_> = controllers::selected(&[]).collect();
        for name in by_controller.keys() {
            assert!(names.contains(name), "{name}");
        }
        let error = flags(&["--concurrent-job-syncs=0"]).options().expect_err("too few");
        assert_eq!(error.to_string(), "concurrent-job-syncs must be greater than 0, but got 0");
    }

    #[test]
    fn options_are_the_flags() {
        let options = flags(&[
            "--allocate-node-cidrs=true",
            "--cluster-cidr=10.244.0.0/16",
            "--service-cluster-ip-range=10.96.0.0/12",
            "--node-cidr-mask-size-ipv4=25",
            "--terminated-pod-gc-threshold=0",
            "--horizontal-pod-autoscaler-sync-period=5s",
            "--node-eviction-rate=0.5",
        ]);
        let options = options.options().expect("valid");
        assert!(options.allocate_node_cidrs);
        assert_eq!(options.node_cidr_mask_size, 25);
        assert_eq!(options.service_cidr.as_deref(), Some("10.96.0.0/12"));
        assert_eq!(options.terminated_pod_gc_threshold, usize::MAX);
        assert_eq!(options.autoscaling.sync_period, Duration::from_secs(5));
        assert!((options.evictions.rate - 0.5).abs() < f64::EPSILON);
        let missing = flags(&["--allocate-node-cidrs=true"]).options().expect_err("no range");
        assert!(missing.to_string().contains("--cluster-cidr must be set"));
    }

    #[test]
    fn a_signer_has_a_certificate_and_a_key() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("f");
        std::fs::write(&file, "PEM").expect("written");
        let flag = |name: &str| format!("--cluster-signing-{name}-file={}", file.display());
        let (cert, key) = (flag("kubelet-client-cert"), flag("kubelet-client-key"));
        let both = flags(&[&cert, &key]).signing.by_signer().expect("valid");
        assert_eq!(both.len(), 1);
        let error = flags(&[&cert]).signing.by_signer().expect_err("no key");
        assert!(error.to_string().contains("cannot specify cert without key"));
        let usual = flag("cert");
        let error = flags(&[&cert, &key, &usual]).signing.by_signer().expect_err("both");
        assert!(error.to_string().contains("at the same time"));
    }
}
