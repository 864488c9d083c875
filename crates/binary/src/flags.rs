//! The command line of `decapod server` and `decapod agent`, close to k3s'.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::telemetry::LogFormat;
use ipnet::IpNet;
use machinery::address_range::AddressRange;

/// Flags of every command.
#[derive(clap::Args, Clone, Debug)]
pub struct Common {
    /// Directory of all persistent data
    #[arg(short = 'd', long, default_value = "/var/lib/decapod", global = true)]
    pub data_dir: PathBuf,
    /// Format of the log: text or json
    #[arg(long, default_value = "text", value_parser = log_format, global = true)]
    pub log_format: LogFormat,
}

fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("expected text or json".into()),
    }
}

/// Upstream's feature gates; `--help` lists those with an effect below the flags.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct FeatureGates {
    /// Turn feature gates on and off, for example A=true,B=false; may be repeated
    #[arg(long, value_name = "GATE=BOOL,...")]
    feature_gates: Vec<String>,
}

impl FeatureGates {
    /// Sets the gates of the whole process, before any code reads them. Warns about gates without effect.
    pub fn install(&self) -> anyhow::Result<()> {
        let mut said = release::features::Said::default();
        for text in &self.feature_gates {
            // Upstream's control plane takes gates of several components: `kube:GATE=true`.
            let of_kube = text.split(',').map(|gate| gate.strip_prefix("kube:").unwrap_or(gate));
            let text = of_kube.collect::<Vec<_>>().join(",");
            said.add(&text).map_err(anyhow::Error::msg)?;
        }
        let gates = said.resolve().map_err(anyhow::Error::msg)?;
        release::features::install(gates);
        for notice in said.notices(&gates) {
            tracing::warn!("{notice}");
        }
        Ok(())
    }
}

#[derive(clap::Args, Clone, Debug)]
pub struct Server {
    /// Address to listen on
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    pub bind_address: IpAddr,
    /// Port of the API; 0 picks free ports for everything and prints them
    #[arg(long, default_value_t = 6443)]
    pub https_listen_port: u16,
    /// Address at which nodes and pods reach the API [default: the node's address]
    #[arg(long)]
    pub advertise_address: Option<IpAddr>,
    /// Additional names or addresses in the API's certificate
    #[arg(long, value_delimiter = ',')]
    pub tls_san: Vec<String>,
    /// Path of the administrator's kubeconfig [default: <data-dir>/kubeconfig]
    #[arg(short = 'o', long)]
    pub write_kubeconfig: Option<PathBuf>,
    /// Mode of that file, in octal
    #[arg(long, default_value = "600", value_parser = octal)]
    pub write_kubeconfig_mode: u32,
    #[command(flatten)]
    pub cluster: crate::cluster::ClusterFlags,
    /// Secret with which nodes join [default: created at the first start]; with --server, the content of
    /// <data-dir>/server-token of that server
    #[arg(long)]
    pub token: Option<String>,
    /// Run no kubelet, proxy and DNS in this process
    #[arg(long)]
    pub disable_agent: bool,
    /// Keep ordinary pods off this node: the taint node-role.kubernetes.io/control-plane, when the Node is new
    #[arg(long)]
    pub taint_control_plane: bool,
    /// What not to run: kube-scheduler, kube-controller-manager, kube-proxy, dns, pod-routes (routes
    /// to other nodes' pods, if a network plugin creates its own), network-policy (if a plugin enforces them),
    /// service-lb (if another controller serves Services of type LoadBalancer); or the add-on local-path (the
    /// default StorageClass)
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub disable: Vec<String>,
    /// How nodes reach each other's pods: vxlan, host-gw (routes, if all nodes are in one network), or none: a CNI
    /// plugin does, and nodes wait for its configuration [default: vxlan, until there is a CNI configuration]
    #[arg(long, alias = "flannel-backend", value_name = "NAME", value_parser = Backend::parse)]
    pub backend: Option<Backend>,
    /// Range of pods' addresses
    #[arg(long, value_delimiter = ',', default_value = "10.42.0.0/16")]
    pub cluster_cidr: Vec<IpNet>,
    /// Prefix length of a node's pod CIDR; 24 is enough for 253 pods
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u8).range(1..=30))]
    pub node_cidr_mask_size: u8,
    /// Assign pod CIDRs to nodes; `false` if a network plugin assigns them
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    pub allocate_node_cidrs: bool,
    /// Allow privileged containers; `false` makes pods with one invalid, for all users
    #[arg(long, default_value_t = true, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    pub allow_privileged: bool,
    /// Accepted issuers of service account tokens; the first one signs
    /// [default: https://kubernetes.default.svc]
    #[arg(long, value_delimiter = ',', value_name = "URL")]
    pub service_account_issuer: Vec<String>,
    /// Range of Services' addresses
    #[arg(long, value_delimiter = ',', default_value = "10.43.0.0/16")]
    pub service_cidr: Vec<IpNet>,
    /// Address of the cluster's DNS, in the Service range [default: the tenth address, 10.43.0.10]
    #[arg(long, value_delimiter = ',')]
    pub cluster_dns: Vec<IpAddr>,
    #[arg(long, default_value = "cluster.local")]
    pub cluster_domain: String,
    /// Addresses for Services of type LoadBalancer, as FIRST-LAST or CIDR; one node announces each by ARP or NDP.
    /// Without a pool these Services get the addresses of nodes
    #[arg(long, value_delimiter = ',', value_name = "RANGE")]
    pub load_balancer_pool: Vec<AddressRange>,
    /// Port range of NodePort Services
    #[arg(long, default_value = "30000-32767", value_parser = port_range)]
    pub service_node_port_range: RangeInclusive<u16>,
    #[command(flatten)]
    pub datastore: crate::datastore::Datastore,
    #[command(flatten)]
    pub snapshots: crate::snapshots::Flags,
    #[command(flatten)]
    pub serving: Serving,
    #[command(flatten)]
    pub encryption: crate::encryption::EncryptionFlags,
    #[command(flatten)]
    pub audit: crate::audit::AuditFlags,
    /// Admission plugins to enable in addition to the default ones
    #[arg(long, value_delimiter = ',')]
    pub enable_admission_plugins: Vec<String>,
    /// Admission plugins to disable
    #[arg(long, value_delimiter = ',')]
    pub disable_admission_plugins: Vec<String>,
    /// File with an AdmissionConfiguration for the plugins
    #[arg(long, value_name = "FILE")]
    pub admission_control_config_file: Option<PathBuf>,
    /// File with a KubeSchedulerConfiguration
    #[arg(long, value_name = "FILE")]
    pub scheduler_config: Option<PathBuf>,
    #[command(flatten)]
    pub access: crate::access::Access,
    #[command(flatten)]
    pub component_args: crate::component_args::ServerArgs,
    /// Of kube-apiserver's command line, or of `component_args`.
    #[arg(skip)]
    pub settings: crate::api_settings::Settings,
    #[arg(skip)]
    pub controllers: crate::component_args::ControllerSettings,
    #[command(flatten)]
    pub simulated: crate::simulate::OfServer,
    /// Flags from a YAML file and from FILE.d/*.yaml; those on the command line win [default:
    /// /etc/decapod/config.yaml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub feature_gates: FeatureGates,
    #[command(flatten)]
    pub node: Node,
}

/// How nodes reach each other's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Vxlan,
    HostGateway,
    /// A CNI plugin's work: nodes have no pod network of their own.
    None,
}

impl Backend {
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "vxlan" => Ok(Self::Vxlan),
            "host-gw" => Ok(Self::HostGateway),
            "none" => Ok(Self::None),
            "wireguard" | "wireguard-native" | "ipsec" => Err(format!(
                "{text} is not supported: traffic between nodes is not encrypted; use a CNI plugin that encrypts it, \
                 with --backend=none"
            )),
            _ => Err("expected vxlan, host-gw or none".into()),
        }
    }
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Vxlan => "vxlan",
            Self::HostGateway => "host-gw",
            Self::None => "none",
        })
    }
}

impl Server {
    /// Whether this cluster itself serves Services of type LoadBalancer: no cloud and no other controller does.
    /// With pools it serves them beside a cloud: the cloud may have machines only.
    pub fn serves_load_balancers(&self) -> bool {
        let cloud = self.node.cloud_provider.as_deref().filter(|name| !name.is_empty());
        let has_own = cloud.is_none() || !self.load_balancer_pool.is_empty();
        has_own && !self.disable.iter().any(|name| name == "service-lb")
    }

    /// The pools whose addresses the nodes announce.
    pub fn announced_pools(&self) -> &[AddressRange] {
        if self.serves_load_balancers() { &self.load_balancer_pool } else { &[] }
    }

    /// The secret with which nodes join, if one is given. With --server, the file has that server's token.
    pub fn secret(&self) -> anyhow::Result<Option<String>> {
        use anyhow::Context;
        match (&self.token, &self.cluster.token_file) {
            (Some(text), _) => Ok(Some(text.clone())),
            (None, Some(path)) if self.cluster.server.is_empty() => std::fs::read_to_string(path)
                .with_context(|| format!("cannot read --token-file {}", path.display()))
                .map(|text| Some(text.trim().to_owned())),
            (None, _) => Ok(None),
        }
    }

    /// Issuers of service account tokens.
    pub fn issuers(&self) -> Vec<String> {
        match self.service_account_issuer.as_slice() {
            [] => vec![crate::access::ISSUER.to_owned()],
            given => given.to_vec(),
        }
    }
}

#[derive(clap::Args, Clone, Debug)]
pub struct Agent {
    /// URLs of servers to join, for example https://192.168.0.1:6443; also a name or an address that leads
    /// to several. The agent learns the others [env: DECAPOD_URL or DECAPOD_SERVER]
    #[arg(short = 's', long, value_delimiter = ',', required = true, value_name = "URL")]
    pub server: Vec<String>,
    /// Port of the loopback address behind which the node reaches the servers
    #[arg(long, default_value_t = 6444, value_name = "PORT")]
    pub lb_server_port: u16,
    /// Output of `decapod token create` on the server, or content of its <data-dir>/token; not needed after
    /// the node has joined
    #[arg(short = 't', long)]
    pub token: Option<String>,
    /// A file with the token
    #[arg(long, value_name = "FILE", conflicts_with = "token")]
    pub token_file: Option<PathBuf>,
    /// Flags from a YAML file and from FILE.d/*.yaml; those on the command line win [default:
    /// /etc/decapod/config.yaml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub feature_gates: FeatureGates,
    #[command(flatten)]
    pub node: Node,
}

impl Agent {
    pub fn join_token(&self) -> anyhow::Result<Option<pki::JoinToken>> {
        use anyhow::Context;
        let text = match (&self.token, &self.token_file) {
            (Some(text), _) => text.clone(),
            (None, Some(path)) => std::fs::read_to_string(path)
                .with_context(|| format!("cannot read --token-file {}", path.display()))?,
            (None, None) => return Ok(None),
        };
        pki::JoinToken::parse(&text).context("the token cannot be used").map(Some)
    }
}

/// The APIs that the server serves, and its limits on requests.
#[derive(clap::Args, Clone, Debug)]
pub struct Serving {
    /// Maximum number of reads in flight; see --enable-priority-and-fairness
    #[arg(long, default_value_t = 400)]
    pub max_requests_inflight: u32,
    /// Maximum number of writes in flight
    #[arg(long, default_value_t = 200)]
    pub max_mutating_requests_inflight: u32,
    /// Share the sum of both limits by FlowSchemas and PriorityLevelConfigurations
    #[arg(
        long,
        default_value_t = true,
        action = clap::ArgAction::Set,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true"
    )]
    pub enable_priority_and_fairness: bool,
    /// Maximum duration of a request that is not long-running
    #[arg(long, default_value = "1m", value_parser = duration)]
    pub request_timeout: Duration,
    /// Seconds after which a watch without a timeout may end
    #[arg(long, default_value_t = 1800)]
    min_request_timeout: u64,
    /// KEY=true|false: api/all, api/ga, api/beta, api/alpha, GROUP/VERSION[/RESOURCE]
    #[arg(long, value_delimiter = ',')]
    runtime_config: Vec<String>,
    #[command(flatten)]
    pub presence: crate::presence::PresenceFlags,
}

impl Serving {
    pub fn min_request_timeout(&self) -> Duration {
        Duration::from_secs(self.min_request_timeout)
    }

    pub fn runtime_config(&self) -> apiserver::runtime_config::RuntimeConfig {
        apiserver::runtime_config::RuntimeConfig::parse(&self.runtime_config)
    }

    pub fn check(&self) -> anyhow::Result<()> {
        let (reads, writes) = (self.max_requests_inflight, self.max_mutating_requests_inflight);
        if self.enable_priority_and_fairness && reads == 0 && writes == 0 {
            anyhow::bail!(
                "invalid configuration: MaxRequestsInFlight={reads} and MaxMutatingRequestsInFlight={writes}; they must add up to something positive"
            );
        }
        Ok(())
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let time = base::duration::parse(text)?;
    Some(time).filter(|time| !time.is_zero()).ok_or_else(|| "must be greater than zero".into())
}

/// Flags of the node in this process.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Node {
    /// Name of this node [default: the host name]
    #[arg(long)]
    pub node_name: Option<String>,
    /// Addresses of this node [default: that of the default route]
    #[arg(long, value_delimiter = ',')]
    pub node_ip: Vec<IpAddr>,
    /// Labels of the Node, KEY=VALUE
    #[arg(long, value_delimiter = ',')]
    pub node_label: Vec<String>,
    /// Taints of the Node, KEY=VALUE:EFFECT
    #[arg(long, value_delimiter = ',')]
    pub node_taint: Vec<String>,
    /// Directory of manifests of static pods
    #[arg(long)]
    pub pod_manifest_path: Option<PathBuf>,
    /// Disk usage in percent above which unused images are removed [default: 85]
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub image_gc_high_threshold: Option<u8>,
    /// Disk usage in percent down to which they are removed [default: 80]
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub image_gc_low_threshold: Option<u8>,
    /// Maximum number of pods of the node [default: 110]
    #[arg(long)]
    pub max_pods: Option<u32>,
    /// Unsafe sysctls that pods may set, for example kernel.msg*,net.core.somaxconn
    #[arg(long, value_delimiter = ',', value_name = "SYSCTL")]
    pub allowed_unsafe_sysctls: Vec<String>,
    /// The kubelet's directory, where storage drivers find its sockets [default: /var/lib/kubelet, as drivers'
    /// manifests expect; <data-dir>/kubelet with another --data-dir, or if another kubelet has that one]
    #[arg(long, value_name = "DIRECTORY")]
    pub kubelet_dir: Option<PathBuf>,
    /// How long a machine shutdown that logind announces waits for pods to end; 0s: it does not wait
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    pub shutdown_grace_period: Option<Duration>,
    /// The last part of that time, reserved for critical pods
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    pub shutdown_grace_period_critical_pods: Option<Duration>,
    /// external: a cloud controller manager describes nodes and serves load balancers; until then the node is
    /// tainted
    #[arg(long, value_name = "NAME", value_parser = ["", "external"])]
    pub cloud_provider: Option<String>,
    /// The node's resolv.conf: servers for names outside of the cluster, and for pods that do not use the
    /// cluster's DNS [default: /etc/resolv.conf]
    #[arg(long, value_name = "FILE")]
    pub resolv_conf: Option<PathBuf>,
    /// Where the cluster's DNS serves /metrics, /ready and /health [default: its own address, port 9153]
    #[arg(long, value_delimiter = ',', value_name = "ADDRESS:PORT")]
    pub dns_metrics_address: Vec<SocketAddr>,
    #[command(flatten)]
    pub runtime: ContainerRuntime,
    #[command(flatten)]
    pub component_args: crate::component_args::NodeArgs,
    /// Of the kubelet's command line, or of `component_args`.
    #[arg(skip)]
    pub settings: crate::kubelet_command::Settings,
    #[arg(skip)]
    pub proxy: crate::component_args::ProxySettings,
}

/// The container runtime of the node, with upstream's flags.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct ContainerRuntime {
    /// Socket of a CRI runtime, for example unix:///run/containerd/containerd.sock [default: the embedded
    /// runtime]
    #[arg(long, value_name = "ENDPOINT")]
    pub container_runtime_endpoint: Option<String>,
    /// Socket of its image service [default: the same socket]
    #[arg(long, value_name = "ENDPOINT", requires = "container_runtime_endpoint")]
    pub image_service_endpoint: Option<String>,
    /// Limit of a call to the runtime; pulls have no limit
    #[arg(long, default_value = "2m", value_parser = request_timeout, value_name = "DURATION")]
    pub runtime_request_timeout: Duration,
    /// Socket at which the embedded runtime serves CRI, for crictl; "" serves none [default:
    /// /run/decapod/cri.sock; with another --data-dir, a directory of its own below /run/decapod]
    #[arg(long, value_name = "PATH")]
    pub cri_socket: Option<PathBuf>,
    /// Directory of CNI configuration files, for the embedded runtime: the first one by name sets up pods' networks.
    /// Empty: never [default: /etc/cni/net.d]
    #[arg(long, value_name = "DIRECTORY")]
    pub cni_conf_dir: Option<PathBuf>,
    /// Directories of the CNI plugins' programs [default: /opt/cni/bin,/usr/lib/cni]
    #[arg(long, value_delimiter = ',', value_name = "DIRECTORY")]
    pub cni_bin_dir: Vec<PathBuf>,
    /// MTU of pods [default: that of the node's link, minus the overlay's headers]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1280..=65535))]
    pub pod_mtu: Option<u32>,
    /// cgroupfs or systemd, for a runtime that does not report its driver
    #[arg(long, default_value = "cgroupfs", value_parser = ["cgroupfs", "systemd"])]
    pub cgroup_driver: String,
}

impl ContainerRuntime {
    /// `None`: no socket is wanted.
    pub fn cri_socket(&self, data_dir: &Path) -> Option<PathBuf> {
        match &self.cri_socket {
            Some(path) => Some(path.clone()).filter(|path| !path.as_os_str().is_empty()),
            None => Some(runtime::layout::cri_socket(data_dir)),
        }
    }

    /// `is_required`: the node has no network of its own.
    pub fn cni(&self, is_required: bool) -> runtime::CniConfig {
        let mut config = runtime::CniConfig { is_required, ..runtime::CniConfig::usual() };
        if let Some(directory) = &self.cni_conf_dir {
            config.conf_dir = Some(directory.clone()).filter(|path| !path.as_os_str().is_empty());
        }
        if !self.cni_bin_dir.is_empty() {
            config.bin_dirs.clone_from(&self.cni_bin_dir);
        }
        config
    }

    /// `None` for the embedded runtime.
    pub fn endpoints(&self) -> Option<runtime::backend::remote::Endpoints> {
        let named = |text: &&str| !matches!(*text, "" | "embedded");
        let runtime = self.container_runtime_endpoint.as_deref().filter(named)?;
        Some(runtime::backend::remote::Endpoints {
            runtime: runtime.to_owned(),
            images: self.image_service_endpoint.clone().filter(|text| !text.is_empty()),
            timeout: self.runtime_request_timeout,
        })
    }
}

fn request_timeout(text: &str) -> Result<Duration, String> {
    match cli::duration::parse(text)? {
        Duration::ZERO => Err("must be greater than zero".into()),
        time => Ok(time),
    }
}

fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .map_err(|_| "expected an octal mode, for example 600 or 0644".into())
}

fn port_range(text: &str) -> Result<RangeInclusive<u16>, String> {
    let parse = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
    let (low, high) = text.split_once('-').ok_or("expected LOW-HIGH")?;
    match (parse(low), parse(high)) {
        (Some(low), Some(high)) if low <= high => Ok(low..=high),
        _ => Err("expected LOW-HIGH, two ports in order".into()),
    }
}

/// A key and a value of a configuration file as words of a command line: lists and maps of strings are repeated
/// flags.
pub fn push_setting(
    extra: &mut Vec<String>,
    key: &str,
    value: serde_json::Value,
) -> anyhow::Result<()> {
    use serde_json::Value;
    match value {
        Value::Null | Value::Bool(false) => {}
        Value::Bool(true) => extra.push(format!("--{key}")),
        Value::String(text) => extra.push(format!("--{key}={text}")),
        Value::Number(number) => extra.push(format!("--{key}={number}")),
        Value::Array(list) => {
            for one in list {
                push_setting(extra, key, one)?;
            }
        }
        Value::Object(map) => {
            for (name, value) in map {
                let text = match value {
                    Value::String(text) => text,
                    Value::Bool(_) | Value::Number(_) => value.to_string(),
                    _ => anyhow::bail!(
                        "{name}: a value in a map of a flag cannot be a list or a map"
                    ),
                };
                extra.push(format!("--{key}={name}={text}"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_become_flags() {
        let mut extra = vec![];
        for (key, value) in [
            ("tls-san", serde_json::json!(["a", "b"])),
            ("disable-agent", serde_json::json!(true)),
            ("https-listen-port", serde_json::json!(7443)),
            ("feature-gates", serde_json::json!({"EnvFiles": false})),
        ] {
            push_setting(&mut extra, key, value).expect("a flag");
        }
        assert_eq!(
            extra,
            [
                "--tls-san=a",
                "--tls-san=b",
                "--disable-agent",
                "--https-listen-port=7443",
                "--feature-gates=EnvFiles=false"
            ]
        );
        assert!(push_setting(&mut extra, "x", serde_json::json!({"a": []})).is_err());
    }

    #[test]
    fn port_ranges_are_checked() {
        assert_eq!(port_range("30000-32767"), Ok(30000..=32767));
        for bad in ["1", "5-1", "0-10", "a-b"] {
            assert!(port_range(bad).is_err(), "{bad}");
        }
    }
}
