//! The kubelet's settings, with upstream's defaults.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Taint};

use crate::managers;
use crate::node::eviction;
use crate::node::log_links::LogLinks;
use crate::node::reserve::Reservation;
use crate::pod::sysctls::Sysctls;
use crate::resources::Cfs;

/// The node's `kubeletVersion`; clients and skew checks read it.
pub const KUBELET_VERSION: &str = release::KUBERNETES.tag;

/// TLS of the server. The caller builds it, because it owns certificates and their rotation.
pub type ServerTls = transport::tls::ServerTls;

/// Why a pod's policies are not in force yet.
pub type GateError = Box<dyn std::error::Error + Send + Sync>;

/// Decides when a new pod may use the network: the rules of its network policies come first.
#[async_trait::async_trait]
pub trait NetworkGate: Send + Sync {
    /// Resolves when the pod's first packet would meet its policies. An error fails this attempt to start it.
    async fn admit(&self, pod: &Pod, addresses: &[IpAddr]) -> Result<(), GateError>;
}

/// Authentication and authorization of the kubelet's server.
#[derive(Clone, Default)]
pub struct ServerAuth {
    /// PEM of the CA for client certificates; read at each connection, so that it may rotate.
    /// `None` accepts no certificates.
    pub client_ca: Option<Arc<dyn Fn() -> Option<String> + Send + Sync>>,
    /// Authenticate bearer tokens by the API server's TokenReview.
    pub webhook_tokens: bool,
    /// Requests without credentials are `system:anonymous`; otherwise they get 401.
    pub anonymous: bool,
    /// Ask the API server's SubjectAccessReview; otherwise every authenticated user may do everything.
    pub webhook_authorization: bool,
}

/// The swap that containers may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Swap {
    #[default]
    None,
    /// Containers of Burstable pods, in proportion to their memory requests.
    Limited,
}

/// Settings of the cgroups of pods and containers.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelLimits {
    pub cfs: Cfs,
    /// The processes of a pod; `None`: no limit of its own.
    pub pod_pids: Option<i64>,
    pub swap: Swap,
    /// The OOM killer ends one process instead of the whole container. cgroup v2.
    pub kills_single_processes: bool,
    /// Containers without a seccomp profile get the runtime's default.
    pub seccomp_default: bool,
}

/// How many a second, and how many at once. `None`: no limit.
pub type Rate = Option<(f64, f64)>;

/// Static pods that a server lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ManifestUrl {
    pub url: String,
    pub headers: Vec<(String, String)>,
}

#[derive(Clone)]
pub struct Config {
    pub node_name: String,
    /// For the node's `Hostname` address.
    pub hostname: String,
    pub node_ips: Vec<IpAddr>,
    pub labels: BTreeMap<String, String>,
    /// Set only when the node registers for the first time.
    pub taints: Vec<Taint>,
    pub register: bool,
    pub provider_id: Option<String>,
    /// `--cloud-provider=external`: addresses that are in the Node's status stay as they are.
    pub external_cloud: bool,
    /// Whether an administrator chose `node_ips`; a cloud controller manager then prefers them.
    pub node_ip_is_given: bool,
    pub cluster_dns: Vec<IpAddr>,
    pub cluster_domain: String,
    /// The node's resolv.conf, for pods that do not use the cluster's DNS.
    pub resolv_conf: PathBuf,
    /// A directory (or a file) of static pods.
    pub pod_manifest_path: Option<PathBuf>,
    /// Static pods of the kubelet's own process, made by [`crate::own_pod`]. The runtime knows their uids.
    pub own_pods: Vec<Pod>,
    /// The directory of pods' volumes and files.
    pub root_dir: PathBuf,
    /// The directory of pods' logs, one directory per pod.
    pub log_dir: PathBuf,
    /// The links to running containers' logs, for log collectors.
    pub log_links: LogLinks,
    /// Parent of pods' cgroups in every hierarchy; `/` for upstream's `/kubepods`.
    pub cgroup_root: String,
    /// Make pod and QoS cgroups. False where the runtime keeps everything in one place.
    pub cgroups_per_qos: bool,
    /// Must equal the runtime's.
    pub cgroup_driver: cri::CgroupDriver,
    pub max_pods: i64,
    /// At most so many pods for each CPU; 0: no limit.
    pub pods_per_core: i64,
    pub limits: KernelLimits,
    pub managers: managers::Settings,
    /// Do not start with swap, or with cgroup v1.
    pub fails_on_swap: bool,
    pub fails_on_cgroup_v1: bool,
    /// The sysctls that pods may set.
    pub sysctls: Sysctls,
    /// Used until the API gives the node a podCIDR.
    pub pod_cidr: Option<String>,
    pub bind_address: SocketAddr,
    /// `None` starts no server.
    pub server_tls: Option<ServerTls>,
    pub server_auth: ServerAuth,
    pub healthz_address: Option<SocketAddr>,
    /// Serve exec, attach, port-forward, run and logs.
    pub debugging_handlers: bool,
    /// A port without authentication for pods, figures and health.
    pub read_only_address: Option<SocketAddr>,
    pub reserve: Reservation,
    pub status_check: Duration,
    pub status_report: Duration,
    pub lease_duration: Duration,
    /// The number of images in the node's status; `None`: all.
    pub status_images: Option<usize>,
    pub parallel_pulls: usize,
    pub pulls: Rate,
    pub events: Rate,
    /// The longest pause between restarts of a container that crashes.
    pub crash_ceiling: Option<Duration>,
    pub log_max_bytes: u64,
    pub log_max_files: usize,
    /// How many logs are rotated at the same time.
    pub log_workers: usize,
    /// How often logs are looked at.
    pub log_interval: Duration,
    pub manifest_url: Option<ManifestUrl>,
    /// How often that server is asked.
    pub manifest_url_check: Duration,
    pub eviction: eviction::Settings,
    /// How often the kubelet checks whether it must evict a pod.
    pub eviction_interval: Duration,
    /// Percent of disk usage at which image garbage collection starts, and at which it stops.
    pub image_gc_high: u64,
    pub image_gc_low: u64,
    /// The minimum age of an image before it is removed.
    pub image_min_age: Duration,
    /// An image that was not used for so long is removed; zero: never.
    pub image_max_age: Duration,
    /// How long the kubelet delays a shutdown of the machine for its pods; zero: not at all.
    pub shutdown_grace: Duration,
    /// The last part of that time, reserved for critical pods.
    pub shutdown_grace_critical: Duration,
    /// Instead of both: the grace periods of pods with at least these priorities.
    pub shutdown_groups: Vec<(i32, Duration)>,
    /// The D-Bus socket through which logind announces shutdowns.
    pub system_bus: PathBuf,
    /// `None`: nothing on this node enforces network policies together with this kubelet.
    pub network_gate: Option<Arc<dyn NetworkGate>>,
    /// Whether this process may mount (tmpfs volumes, subpaths). False in tests without privileges.
    pub may_mount: bool,
}

impl Config {
    /// A node of that name; everything else has upstream's defaults, below `data_dir`.
    pub fn new(node_name: &str, data_dir: PathBuf) -> Self {
        Self {
            node_name: node_name.into(),
            hostname: node_name.into(),
            node_ips: vec![],
            labels: BTreeMap::new(),
            taints: vec![],
            register: true,
            provider_id: None,
            external_cloud: false,
            node_ip_is_given: false,
            cluster_dns: vec![],
            cluster_domain: "cluster.local".into(),
            resolv_conf: "/etc/resolv.conf".into(),
            pod_manifest_path: None,
            own_pods: vec![],
            root_dir: data_dir.join("kubelet"),
            log_dir: data_dir.join("logs/pods"),
            log_links: LogLinks::new(data_dir.join("logs/containers")),
            cgroup_root: "/".into(),
            cgroups_per_qos: true,
            cgroup_driver: cri::CgroupDriver::Cgroupfs,
            max_pods: 110,
            pods_per_core: 0,
            limits: KernelLimits::default(),
            managers: managers::Settings::default(),
            fails_on_swap: false,
            fails_on_cgroup_v1: false,
            sysctls: Sysctls::default(),
            pod_cidr: None,
            bind_address: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 10250),
            server_tls: None,
            server_auth: ServerAuth::default(),
            healthz_address: Some(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 10248)),
            debugging_handlers: true,
            read_only_address: None,
            reserve: Reservation::default(),
            status_check: Duration::from_secs(10),
            status_report: Duration::from_secs(300),
            lease_duration: Duration::from_secs(40),
            status_images: Some(50),
            parallel_pulls: 5,
            pulls: None,
            events: None,
            crash_ceiling: None,
            log_max_bytes: 10 << 20,
            log_max_files: 5,
            log_workers: 1,
            log_interval: Duration::from_secs(10),
            manifest_url: None,
            manifest_url_check: Duration::from_secs(20),
            eviction: eviction::Settings::default(),
            eviction_interval: Duration::from_secs(10),
            image_gc_high: 85,
            image_gc_low: 80,
            image_min_age: Duration::from_secs(120),
            image_max_age: Duration::ZERO,
            shutdown_grace: Duration::ZERO,
            shutdown_grace_critical: Duration::ZERO,
            shutdown_groups: vec![],
            system_bus: "/run/dbus/system_bus_socket".into(),
            network_gate: None,
            may_mount: nix::unistd::geteuid().is_root(),
        }
    }
}
