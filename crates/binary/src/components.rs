//! Components alone, under upstream's names and with upstream's main flags: each can be replaced by
//! upstream's program, or replace it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base::task::{Stop, Tasks};
use client::Client;
use client::election::{Election, Ended};
use ipnet::IpNet;

/// How long a component may take to end.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(10);

#[derive(clap::Args, Clone, Debug)]
pub struct ControllerManager {
    #[arg(long)]
    kubeconfig: PathBuf,
    /// `*` for all, `NAME` for one, `-NAME` for all but one
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
    #[arg(long)]
    cluster_signing_cert_file: Option<PathBuf>,
    #[arg(long)]
    cluster_signing_key_file: Option<PathBuf>,
}

pub async fn controller_manager(flags: ControllerManager) -> anyhow::Result<()> {
    let options = controllers::Options {
        cluster_cidr: flags.cluster_cidr,
        allocate_node_cidrs: flags.allocate_node_cidrs,
        node_cidr_mask_size: flags.node_cidr_mask_size,
        root_ca: read(flags.root_ca_file.as_deref())?,
        signing_cert: read(flags.cluster_signing_cert_file.as_deref())?,
        signing_key: read(flags.cluster_signing_key_file.as_deref())?,
        ..controllers::Options::default()
    };
    let client = crate::kubeconfig::client(&flags.kubeconfig, "kube-controller-manager")?;
    let own = client.clone();
    until_signal("kube-controller-manager", async move |stop: Stop| {
        let work = |stop| controllers::run(|_| client.clone(), &flags.controllers, options, stop);
        lead(own, "kube-controller-manager", flags.leader_elect, stop, work).await
    })
    .await
}

#[derive(clap::Args, Clone, Debug)]
pub struct Scheduler {
    #[arg(long)]
    kubeconfig: PathBuf,
    /// KubeSchedulerConfiguration: profiles, plugins and their arguments, extenders
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    leader_elect: bool,
}

pub async fn scheduler(flags: Scheduler) -> anyhow::Result<()> {
    let client = crate::kubeconfig::client(&flags.kubeconfig, "kube-scheduler")?;
    let config = scheduler_config(flags.config.as_deref(), &client)?;
    let own = client.clone();
    until_signal("kube-scheduler", async move |stop: Stop| {
        let work = |stop| scheduler::run(client, config, stop);
        lead(own, "kube-scheduler", flags.leader_elect, stop, work).await
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
    /// The node's name [default: the host's]
    #[arg(long)]
    hostname_override: Option<String>,
    #[arg(long, value_delimiter = ',')]
    cluster_cidr: Vec<IpNet>,
    /// nftables; iptables and ipvs are accepted, and nftables is used
    #[arg(long, default_value = "nftables")]
    proxy_mode: String,
    #[arg(long, default_value = "0.0.0.0:10256")]
    healthz_bind_address: SocketAddr,
    #[arg(long, default_value = "127.0.0.1:10249")]
    metrics_bind_address: SocketAddr,
    #[arg(long)]
    masquerade_all: bool,
}

pub async fn proxy(flags: Proxy) -> anyhow::Result<()> {
    match flags.proxy_mode.as_str() {
        "nftables" => {}
        "iptables" | "ipvs" => tracing::warn!(
            mode = flags.proxy_mode,
            "this proxy mode is not built in, using nftables"
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
    until_signal("kube-proxy", async move |stop| Ok(proxy::run(client, config, stop).await?)).await
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
    #[arg(long)]
    tls_cert_file: Option<PathBuf>,
    #[arg(long)]
    tls_private_key_file: Option<PathBuf>,
    #[arg(long)]
    client_ca_file: Option<PathBuf>,
    /// Percent of the disk in use from which unused images are removed
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100))]
    image_gc_high_threshold: Option<u8>,
    /// Percent of the disk in use down to which they are removed
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=100))]
    image_gc_low_threshold: Option<u8>,
    /// How many pods the node takes [default: 110]
    #[arg(long)]
    max_pods: Option<u32>,
    /// Where pods' files and drivers' sockets are [default: <data-dir>/kubelet]
    #[arg(long, value_name = "DIRECTORY")]
    root_dir: Option<PathBuf>,
    /// How long a shutdown of the machine, which logind tells of, waits for pods to end
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    shutdown_grace_period: Option<std::time::Duration>,
    /// The end of that time, for critical pods alone
    #[arg(long, value_parser = cli::duration::parse, value_name = "DURATION")]
    shutdown_grace_period_critical_pods: Option<std::time::Duration>,
    #[command(flatten)]
    runtime: crate::flags::ContainerRuntime,
}

pub async fn kubelet(flags: Kubelet, data_dir: &Path) -> anyhow::Result<()> {
    let client = crate::kubeconfig::client(&flags.kubeconfig, "kubelet")?;
    let node = crate::flags::Node {
        node_name: flags.hostname_override,
        node_ip: flags.node_ip,
        node_label: flags.node_labels,
        node_taint: flags.register_with_taints,
        pod_manifest_path: flags.pod_manifest_path,
        image_gc_high_threshold: flags.image_gc_high_threshold,
        image_gc_low_threshold: flags.image_gc_low_threshold,
        max_pods: flags.max_pods,
        kubelet_dir: flags.root_dir,
        shutdown_grace_period: flags.shutdown_grace_period,
        shutdown_grace_period_critical_pods: flags.shutdown_grace_period_critical_pods,
        runtime: flags.runtime,
    };
    let addresses = match node.node_ip.as_slice() {
        [] => crate::node::primary_address().await.into_iter().collect(),
        given => given.to_vec(),
    };
    let serving =
        match (read(flags.tls_cert_file.as_deref())?, read(flags.tls_private_key_file.as_deref())?)
        {
            (Some(cert), Some(key)) => {
                let identity = transport::tls::Identity::from_pem(&cert, &key)?;
                Some(transport::tls::server_tls(&identity, &transport::tls::ClientCerts::Request)?)
            }
            _ => None,
        };
    let described = crate::node::Node {
        name: crate::node::name(&node)?,
        addresses,
        data_dir: data_dir.to_owned(),
        kubelet: client,
        proxy: None,
        routes: None,
        dns_kubeconfig: None,
        dns_renewed: Arc::default(),
        serving,
        bind: Some(SocketAddr::new(flags.address, flags.port)),
        client_ca_pem: read(flags.client_ca_file.as_deref())?,
        cluster_cidrs: vec![],
        service_cidrs: vec![],
        cluster_dns: flags.cluster_dns,
        cluster_domain: flags.cluster_domain,
        free_ports: false,
    };
    let tasks = Tasks::new("kubelet");
    crate::node::start(described, &node, &tasks).await?;
    crate::server::wait_for_signal(&[&tasks]).await?;
    tasks.shutdown(SHUTDOWN_LIMIT).await;
    Ok(())
}

fn read(path: Option<&Path>) -> anyhow::Result<Option<String>> {
    let read =
        |path: &Path| std::fs::read_to_string(path).with_context(|| path.display().to_string());
    path.map(read).transpose()
}

/// Runs `work` while this process holds the Lease of that name in kube-system.
async fn lead<F: Future<Output = ()>>(
    client: Client,
    name: &str,
    elects: bool,
    stop: Stop,
    work: impl FnOnce(Stop) -> F,
) -> anyhow::Result<()> {
    if !elects {
        work(stop).await;
        return Ok(());
    }
    let host = nix::unistd::gethostname().context("cannot read the host's name")?;
    let election = Election::new(client, "kube-system", name, &host.to_string_lossy());
    match election.run(stop, work).await {
        // Work of a leader that no longer is one must not go on: the process ends, as upstream's.
        Ended::Lost => anyhow::bail!("leaderelection lost"),
        Ended::Stopped | Ended::Finished => Ok(()),
    }
}

/// Runs one component until it ends or a signal stops it.
async fn until_signal(
    name: &'static str,
    work: impl AsyncFnOnce(Stop) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let tasks = Tasks::new(name);
    let running = work(tasks.stop_signal());
    tokio::pin!(running);
    tokio::select! {
        outcome = &mut running => outcome,
        signal = crate::server::termination() => {
            signal?;
            tasks.stop();
            let limit = tokio::time::timeout(SHUTDOWN_LIMIT, running).await;
            limit.with_context(|| format!("{name} did not stop in time"))?
        }
    }
}
