//! The context of controllers: clients, caches and settings.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use client::{Client, EventRecorder, Informers};
use ipnet::IpNet;
use machinery::ObjectMeta;
use machinery::address_range::AddressRange;
use pki::San;

/// Signs tokens that live in Secrets, which never expire.
pub trait TokenSigner: std::fmt::Debug + Send + Sync {
    /// `account` is a ServiceAccount's metadata, `secret` the name of the Secret beside it.
    fn sign(&self, account: &ObjectMeta, secret: &str) -> Result<String, SignError>;
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SignError(pub Box<dyn std::error::Error + Send + Sync>);

/// Flags `--horizontal-pod-autoscaler-*`.
#[derive(Clone, Copy, Debug)]
pub struct Autoscaling {
    pub sync_period: Duration,
    pub downscale_stabilization: Duration,
    pub tolerance: f64,
    pub cpu_initialization: Duration,
    pub initial_readiness: Duration,
}

impl Default for Autoscaling {
    fn default() -> Self {
        Self {
            sync_period: Duration::from_secs(15),
            downscale_stabilization: Duration::from_secs(300),
            tolerance: 0.1,
            cpu_initialization: Duration::from_secs(300),
            initial_readiness: Duration::from_secs(30),
        }
    }
}

/// How fast the pods of failed nodes are evicted.
#[derive(Clone, Copy, Debug)]
pub struct Evictions {
    /// `--node-eviction-rate`, nodes of a zone in a second; zero: none.
    pub rate: f64,
    /// `--secondary-node-eviction-rate`: in a large zone that is partly down.
    pub secondary_rate: f64,
    /// `--large-cluster-size-threshold`
    pub large_zone: usize,
    /// `--unhealthy-zone-threshold`: a zone is partly down with this share of its nodes, and more than two.
    pub unhealthy_share: f64,
}

impl Default for Evictions {
    fn default() -> Self {
        Self { rate: 0.1, secondary_rate: 0.01, large_zone: 50, unhealthy_share: 0.55 }
    }
}

/// Flags of kube-controller-manager that controllers read.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--cluster-cidr`; no pod CIDRs are handed out without it.
    pub cluster_cidr: Option<String>,
    /// `--service-cluster-ip-range`: no node gets an address of it.
    pub service_cidr: Option<String>,
    /// `--allocate-node-cidrs`
    pub allocate_node_cidrs: bool,
    /// `--node-cidr-mask-size`
    pub node_cidr_mask_size: u8,
    /// `--root-ca-file`, as PEM: published in every namespace.
    pub root_ca: Option<String>,
    /// Made of `--service-account-private-key-file`; without it Secrets get no tokens.
    pub token_signer: Option<Arc<dyn TokenSigner>>,
    /// `--cluster-signing-cert-file` and `-key-file`, as PEM.
    pub signing_cert: Option<String>,
    pub signing_key: Option<String>,
    /// `--cluster-signing-SIGNER-cert-file` and `-key-file`, as PEM, by the signer's name. With any of
    /// them, only these signers sign.
    pub signing_by_signer: BTreeMap<String, (String, String)>,
    /// `--cluster-signing-duration`
    pub signing_duration: Duration,
    /// `--legacy-service-account-token-clean-up-period`: unused generated tokens stay valid this long.
    pub legacy_token_clean_up_period: Duration,
    /// `--node-monitor-grace-period`
    pub node_monitor_grace_period: Duration,
    /// `--node-monitor-period`
    pub node_monitor_period: Duration,
    /// `--node-startup-grace-period`
    pub node_startup_grace_period: Duration,
    /// `--terminated-pod-gc-threshold`
    pub terminated_pod_gc_threshold: usize,
    pub evictions: Evictions,
    pub autoscaling: Autoscaling,
    /// `--concurrent-*-syncs`, by the controller's name.
    pub workers: BTreeMap<&'static str, usize>,
    /// Where the built-in storage class keeps volumes on each node; without it there is none.
    pub local_path_directory: Option<PathBuf>,
    /// The node that this process runs on, if it is one: its directories can be removed.
    pub local_node: Option<String>,
    /// Names and addresses that no kubelet's serving certificate may have. Without them, none is approved automatically.
    pub reserved: Option<Reserved>,
    /// Settings of load balancers; `None`: a cloud has them, or nobody.
    pub load_balancer: Option<LoadBalancer>,
}

/// Load balancers without a cloud.
#[derive(Clone, Debug, Default)]
pub struct LoadBalancer {
    /// `--load-balancer-pool`
    pub pools: Vec<AddressRange>,
    /// Ports of nodes that no Service gets: those of the nodes' own programs, and those of NodePort Services.
    pub reserved_ports: Vec<RangeInclusive<u16>>,
}

/// Names and addresses that belong to others than nodes.
#[derive(Clone, Debug)]
pub struct Reserved {
    /// The names of the API server's own certificate.
    pub names: Vec<San>,
    /// The networks of Services and pods.
    pub ranges: Vec<IpNet>,
    /// Above the names of Services.
    pub domain: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cluster_cidr: None,
            service_cidr: None,
            allocate_node_cidrs: false,
            node_cidr_mask_size: 24,
            root_ca: None,
            token_signer: None,
            signing_cert: None,
            signing_key: None,
            signing_by_signer: BTreeMap::new(),
            signing_duration: Duration::from_secs(365 * 24 * 3600),
            legacy_token_clean_up_period: Duration::from_secs(365 * 24 * 3600),
            node_monitor_grace_period: Duration::from_secs(50),
            node_monitor_period: Duration::from_secs(5),
            node_startup_grace_period: Duration::from_secs(60),
            terminated_pod_gc_threshold: 12500,
            evictions: Evictions::default(),
            autoscaling: Autoscaling::default(),
            workers: BTreeMap::new(),
            local_path_directory: None,
            local_node: None,
            reserved: None,
            load_balancer: None,
        }
    }
}

/// The context of a controller.
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
