//! Single components under upstream's names, with upstream's main flags. Each one can be replaced by
//! upstream's program, or replace it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use base::task::{Stop, Tasks};
use client::election::{Election, Ended, Leadership, Timing};
use client::{Client, Informers};
use ipnet::IpNet;
use serde_json::{Value, json};

use crate::secure_port::{Page, Pair, SecurePort};

/// How long a component may take to end.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(4);

#[derive(clap::Args, Clone, Debug)]
pub struct ControllerManager {
    #[arg(long)]
    kubeconfig: PathBuf,
    /// `*` for all, `NAME` for one, `-NAME` for all except one
    #[arg(long, value_delimiter = ',', default_value = "*", allow_hyphen_values = true)]
    controllers: Vec<String>,
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    leader_elect: bool,
    #[arg(long)]
    cluster_cidr: Option<String>,
    #[arg(long)]
    allocate_node_cidrs: bool,
    #[arg(long, default_value_t = 24)]
    node_cidr_mask_size: u8,
    /// PEM; published in every namespace
    #[arg(long)]
    root_ca_file: Option<PathBuf>,
    /// PEM; signs the tokens in Secrets of type kubernetes.io/service-account-token
    #[arg(long)]
    service_account_private_key_file: Option<PathBuf>,
    #[arg(long)]
    cluster_signing_cert_file: Option<PathBuf>,
    #[arg(long)]
    cluster_signing_key_file: Option<PathBuf>,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
    #[command(flatten)]
    serving: SecurePort,
}

impl ControllerManager {
    const PORT: u16 = 10257;

    /// Upstream's `KubeControllerManagerConfiguration`, limited to fields with flags.
    fn configz(&self) -> Value {
        let text = |path: &Option<PathBuf>| {
            path.as_deref().map(|path| path.display().to_string()).unwrap_or_default()
        };
        let address = self.serving.address(Self::PORT);
        json!({"kubecontrollermanager.config.k8s.io": {
            "Generic": {
                "Address": address.map_or_else(String::new, |address| address.ip().to_string()),
                "Port": address.map_or(0, |address| address.port()),
                "ClientConnection": {"kubeconfig": self.kubeconfig},
                "Controllers": self.controllers,
                "LeaderElection": election("kube-controller-manager", self.leader_elect),
            },
            "KubeCloudShared": {
                "AllocateNodeCIDRs": self.allocate_node_cidrs,
                "ClusterCIDR": self.cluster_cidr.clone().unwrap_or_default(),
            },
            "CSRSigningController": {
                "ClusterSigningCertFile": text(&self.cluster_signing_cert_file),
                "ClusterSigningKeyFile": text(&self.cluster_signing_key_file),
            },
            "NodeIPAMController": {"NodeCIDRMaskSize": self.node_cidr_mask_size},
            "SAController": {
                "RootCAFile": text(&self.root_ca_file),
                "ServiceAccountKeyFile": text(&self.service_account_private_key_file),
            },
        }})
    }
}

/// Upstream's `LeaderElectionConfiguration`.
fn election(name: &str, elects: bool) -> Value {
    let Timing { lease, renew_deadline, retry } = Timing::default();
    let text = |time: Duration| format!("{}s", time.as_secs());
    json!({
        "leaderElect": elects,
        "leaseDuration": text(lease),
        "renewDeadline": text(renew_deadline),
        "retryPeriod": text(retry),
        "resourceLock": "leases",
        "resourceName": name,
        "resourceNamespace": "kube-system",
    })
}

pub async fn controller_manager(flags: ControllerManager) -> anyhow::Result<()> {
    const NAME: &str = "kube-controller-manager";
    let configz = flags.configz();
    let signing_key = read(flags.service_account_private_key_file.as_deref())?;
    let options = controllers::Options {
        token_signer: signing_key.as_deref().map(crate::token_signer::of_key).transpose()?,
        cluster_cidr: flags.cluster_cidr,
        allocate_node_cidrs: flags.allocate_node_cidrs,
        node_cidr_mask_size: flags.node_cidr_mask_size,
        root_ca: read(flags.root_ca_file.as_deref())?,
        signing_cert: read(flags.cluster_signing_cert_file.as_deref())?,
        signing_key: read(flags.cluster_signing_key_file.as_deref())?,
        ..controllers::Options::default()
    };
    let client = crate::kubeconfig::client(&flags.kubeconfig, NAME)?;
    let own = client.clone();
    until_signal(NAME, async move |tasks: &Tasks| {
        let (elects, leadership) = (flags.leader_elect, Leadership::default());
        let figures = [client::encode_queues as Figures, client::encode_requests];
        let page = Page::new(NAME, elects, &leadership, configz, &figures);
        flags.serving.serve(ControllerManager::PORT, &page, tasks).await?;
        let work = |stop| {
            for name in controllers::selected(&flags.controllers) {
                page.healthz().add(name, || Ok(()));
            }
            controllers::run(|_| client.clone(), &flags.controllers, options, stop)
        };
        lead(own, NAME, elects, leadership, tasks.stop_signal(), work).await
    })
    .await
}

/// Writes metrics.
type Figures = fn(&mut String);

#[derive(clap::Args, Clone, Debug)]
pub struct Scheduler {
    #[arg(long)]
    kubeconfig: PathBuf,
    /// KubeSchedulerConfiguration: profiles, plugins and their arguments, extenders
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    leader_elect: bool,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
    #[command(flatten)]
    serving: SecurePort,
}

impl Scheduler {
    const PORT: u16 = 10259;

    /// Upstream's `KubeSchedulerConfiguration`: the file, with defaults for missing fields.
    fn configz(&self, config: &scheduler::Config) -> anyhow::Result<Value> {
        let mut all = json!({
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": election("kube-scheduler", self.leader_elect),
            "clientConnection": {"kubeconfig": self.kubeconfig},
            "podInitialBackoffSeconds": config.first_backoff.as_secs(),
            "podMaxBackoffSeconds": config.last_backoff.as_secs(),
            "profiles": [{"schedulerName": scheduler::config::DEFAULT_NAME}],
        });
        if let Some(file) = read(self.config.as_deref())? {
            let said: serde_json::Map<String, Value> = serde_saphyr::from_str(&file)?;
            // The flags decide about leaderElection.
            let own = ["leaderElection", "clientConnection"];
            for (key, value) in said.into_iter().filter(|(key, _)| !own.contains(&key.as_str())) {
                all[key] = value;
            }
        }
        Ok(json!({"componentconfig": all}))
    }
}

pub async fn scheduler(flags: Scheduler) -> anyhow::Result<()> {
    const NAME: &str = "kube-scheduler";
    let client = crate::kubeconfig::client(&flags.kubeconfig, NAME)?;
    let config = scheduler_config(flags.config.as_deref(), &client)?;
    let configz = flags.configz(&config)?;
    let own = client.clone();
    until_signal(NAME, async move |tasks: &Tasks| {
        let (elects, leadership) = (flags.leader_elect, Leadership::default());
        let figures =
            [client::encode_queues as Figures, client::encode_requests, scheduler::encode_metrics];
        let page = Page::new(NAME, elects, &leadership, configz, &figures);
        // A scheduler that waits for the lease cannot be behind.
        let behind = Arc::new(AtomicBool::new(false));
        let seen = behind.clone();
        page.readyz().add("sched-handler-sync", move || match seen.load(Ordering::Acquire) {
            true => Err("handlers are not fully synchronized".into()),
            false => Ok(()),
        });
        flags.serving.serve(Scheduler::PORT, &page, tasks).await?;
        let work = async |stop| {
            behind.store(true, Ordering::Release);
            let informers = Informers::new(client.clone(), tasks.clone());
            let working = scheduler::run_with(informers.clone(), client, config, stop);
            let following = async {
                informers.synced().await;
                behind.store(false, Ordering::Release);
            };
            // Polled in this order: the first starts the informers that the second waits for.
            tokio::join!(biased; working, following);
        };
        lead(own, NAME, elects, leadership, tasks.stop_signal(), work).await
    })
    .await
}

/// The scheduler's configuration, checked before anything runs.
pub fn scheduler_config(
    file: Option<&Path>,
    client: &client::Client,
) -> anyhow::Result<scheduler::Config> {
    let Some(file) = file else { return Ok(scheduler::Config::default()) };
    let name = file.display();
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    let config = scheduler::Config::parse(&text).with_context(|| format!("{name}"))?;
    scheduler::check(client, &config).map_err(|why| anyhow::anyhow!("{name}: {why}"))?;
    Ok(config)
}

#[derive(clap::Args, Clone, Debug)]
pub struct Proxy {
    #[arg(long)]
    kubeconfig: PathBuf,
    /// The node's name [default: the host name]
    #[arg(long)]
    hostname_override: Option<String>,
    #[arg(long, value_delimiter = ',')]
    cluster_cidr: Vec<IpNet>,
    /// nftables; iptables and ipvs are accepted, but nftables is used
    #[arg(long, default_value = "nftables")]
    proxy_mode: String,
    #[arg(long, default_value = "0.0.0.0:10256")]
    healthz_bind_address: SocketAddr,
    #[arg(long, default_value = "127.0.0.1:10249")]
    metrics_bind_address: SocketAddr,
    #[arg(long)]
    masquerade_all: bool,
    /// KubeProxyConfiguration; flags win
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
}

pub async fn proxy(flags: Proxy) -> anyhow::Result<()> {
    match flags.proxy_mode.as_str() {
        "nftables" => {}
        "iptables" | "ipvs" => tracing::warn!(
            mode = flags.proxy_mode,
            "this proxy mode is not supported, using nftables"
        ),
        other => anyhow::bail!("--proxy-mode {other}: expected nftables, iptables or ipvs"),
    }
    let named =
        crate::flags::Node { node_name: flags.hostname_override, ..crate::flags::Node::default() };
    let config = proxy::Config {
        node_name: crate::node::name(&named)?,
        cluster_cidrs: flags.cluster_cidr,
        healthz_bind: Some(flags.healthz_bind_address),
        metrics_bind: Some(flags.metrics_bind_address),
        masquerade_all: flags.masquerade_all,
        ..proxy::Config::default()
    };
    let client = crate::kubeconfig::client(&flags.kubeconfig, "kube-proxy")?;
    until_signal("kube-proxy", async move |tasks: &Tasks| {
        Ok(proxy::run(client, config, tasks.stop_signal()).await?)
    })
    .await
}

#[derive(clap::Args, Clone, Debug)]
pub struct Kubelet {
    #[arg(long)]
    kubeconfig: PathBuf,
    #[arg(long)]
    hostname_override: Option<String>,
    #[arg(long, value_delimiter = ',')]
    node_ip: Vec<IpAddr>,
    #[arg(long, value_delimiter = ',')]
    node_labels: Vec<String>,
    #[arg(long, value_delimiter = ',')]
    register_with_taints: Vec<String>,
    #[arg(long, value_delimiter = ',')]
    cluster_dns: Vec<IpAddr>,
    #[arg(long, default_value = "cluster.local")]
    cluster_domain: String,
    #[arg(long)]
    pod_manifest_path: Option<PathBuf>,
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    address: IpAddr,
    #[arg(long, default_value_t = 10250)]
    port: u16,
    /// Certificate of the kubelet's server [default: one is created and kept in <root-dir>/pki]
    #[arg(long, requires = "tls_private_key_file")]
    tls_cert_file: Option<PathBuf>,
    /// Its key
    #[arg(long, requires = "tls_cert_file")]
    tls_private_key_file: Option<PathBuf>,
    #[arg(long)]
    client_ca_file: Option<PathBuf>,
    /// Unsafe sysctls that pods may set, for example kernel.msg*,net.core.somaxconn
    #[arg(long, value_delimiter = ',', value_name = "SYSCTL")]
    allowed_unsafe_sysctls: Vec<String>,
    /// Disk usage in percent above which unused images are removed
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100))]
    image_gc_high_threshold: Option<u8>,
    /// Disk usage in percent down to which they are removed
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100))]
    image_gc_low_threshold: Option<u8>,
    /// Maximum number of pods of the node [default: 110]
    #[arg(long)]
    max_pods: Option<u32>,
    /// Directory of pods' files and drivers' sockets [default: <data-dir>/kubelet]
    #[arg(long, value_name = "DIRECTORY")]
    root_dir: Option<PathBuf>,
    /// How long a machine shutdown that logind announces waits for pods to end
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    shutdown_grace_period: Option<std::time::Duration>,
    /// The last part of that time, reserved for critical pods
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    shutdown_grace_period_critical_pods: Option<std::time::Duration>,
    /// KubeletConfiguration; flags win
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
    #[command(flatten)]
    runtime: crate::flags::ContainerRuntime,
}

pub async fn kubelet(flags: Kubelet, data_dir: &Path) -> anyhow::Result<()> {
    let client = crate::kubeconfig::client(&flags.kubeconfig, "kubelet")?;
    let brought = flags.tls_cert_file.clone().zip(flags.tls_private_key_file.clone());
    let node = crate::flags::Node {
        node_name: flags.hostname_override,
        node_ip: flags.node_ip,
        node_label: flags.node_labels,
        node_taint: flags.register_with_taints,
        pod_manifest_path: flags.pod_manifest_path,
        image_gc_high_threshold: flags.image_gc_high_threshold,
        image_gc_low_threshold: flags.image_gc_low_threshold,
        max_pods: flags.max_pods,
        allowed_unsafe_sysctls: flags.allowed_unsafe_sysctls,
        kubelet_dir: flags.root_dir,
        shutdown_grace_period: flags.shutdown_grace_period,
        shutdown_grace_period_critical_pods: flags.shutdown_grace_period_critical_pods,
        runtime: flags.runtime,
    };
    let addresses = match node.node_ip.as_slice() {
        [] => crate::node::primary_address().await.into_iter().collect(),
        given => given.to_vec(),
    };
    let tasks = Tasks::new("kubelet");
    let serving = kubelet_serving(brought, &node, &addresses, data_dir, &tasks)?;
    let described = crate::node::Node {
        name: crate::node::name(&node)?,
        addresses,
        data_dir: data_dir.to_owned(),
        kubelet: client,
        proxy: None,
        routes: None,
        dns_kubeconfig: None,
        dns_renewed: Arc::default(),
        serving: Some(serving),
        bind: Some(SocketAddr::new(flags.address, flags.port)),
        client_ca_pem: read(flags.client_ca_file.as_deref())?,
        cluster_cidrs: vec![],
        service_cidrs: vec![],
        cluster_dns: flags.cluster_dns,
        cluster_domain: flags.cluster_domain,
        free_ports: false,
    };
    crate::node::start(described, &node, &tasks).await?;
    crate::process::wait_for_signal(&[&tasks]).await?;
    tasks.shutdown(SHUTDOWN_LIMIT).await;
    Ok(())
}

/// TLS of a kubelet that runs alone: with the certificate of the flags, or with its own.
fn kubelet_serving(
    brought: Option<(PathBuf, PathBuf)>,
    node: &crate::flags::Node,
    addresses: &[IpAddr],
    data_dir: &Path,
    tasks: &Tasks,
) -> anyhow::Result<transport::tls::ServerTls> {
    let name = crate::node::name(node)?;
    let root = node.kubelet_dir.clone().unwrap_or_else(|| data_dir.join("kubelet"));
    let mut names = vec![name.clone()];
    names.extend(addresses.iter().map(ToString::to_string));
    Pair::of_kubelet(brought, &root.join("pki"), &name, names)
        .serve(tasks)
        .context("the kubelet's server has no certificate")
}

fn read(path: Option<&Path>) -> anyhow::Result<Option<String>> {
    let read =
        |path: &Path| std::fs::read_to_string(path).with_context(|| path.display().to_string());
    path.map(read).transpose()
}

/// Runs `work` while this process holds the Lease with this name in kube-system.
async fn lead<F: Future<Output = ()>>(
    client: Client,
    name: &str,
    elects: bool,
    leadership: Leadership,
    stop: Stop,
    work: impl FnOnce(Stop) -> F,
) -> anyhow::Result<()> {
    if !elects {
        work(stop).await;
        return Ok(());
    }
    let host = nix::unistd::gethostname().context("cannot read the host's name")?;
    let election = Election::new(client, "kube-system", name, &host.to_string_lossy());
    let election = Election { leadership, ..election };
    match election.run(stop, work).await {
        // A process that lost its lease must not continue: it ends, as upstream's.
        Ended::Lost => anyhow::bail!("leaderelection lost"),
        Ended::Stopped | Ended::Finished => Ok(()),
    }
}

/// Runs one component until it ends or a signal stops it.
async fn until_signal(
    name: &'static str,
    work: impl AsyncFnOnce(&Tasks) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let tasks = Tasks::new(name);
    let running = work(&tasks);
    tokio::pin!(running);
    let outcome = tokio::select! {
        outcome = &mut running => outcome,
        () = crate::process::termination() => {
            tasks.stop();
            let limit = tokio::time::timeout(SHUTDOWN_LIMIT, running).await;
            limit.with_context(|| format!("{name} did not stop in time"))?
        }
    };
    tasks.shutdown(SHUTDOWN_LIMIT).await;
    outcome
}
