//! `decapod kubelet`: the kubelet alone, with upstream's flags.
//!
//! In: flags and a KubeletConfiguration, whose fields arrive as flags. Out: a node with its runtime.
//! `bootstrap.rs` gets the client certificate, `settings.rs` has the flags that only this command has.
//! Upstream: `cmd/kubelet/app`.

mod bootstrap;
pub mod fields;
mod settings;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use base::task::Tasks;
pub use settings::{Settings, wait_for_cloud};

use crate::components::{SHUTDOWN_LIMIT, read};
use crate::secure_port::Pair;

#[derive(clap::Args, Clone, Debug)]
pub struct Kubelet {
    #[command(flatten)]
    identity: bootstrap::Identity,
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
    /// Directory of pods' files and drivers' sockets [default: /var/lib/kubelet; <data-dir>/kubelet with
    /// another --data-dir, or if another kubelet has that one]
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
    /// A directory of files *.conf that are merged into it, in the order of their names
    #[arg(long, value_name = "DIRECTORY")]
    config_dir: Option<PathBuf>,
    #[command(flatten)]
    pub feature_gates: crate::flags::FeatureGates,
    #[command(flatten)]
    runtime: crate::flags::ContainerRuntime,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    tls: crate::api_settings::TlsFlags,
}

pub async fn run(flags: Kubelet, data_dir: &Path) -> anyhow::Result<()> {
    flags.tls.install()?;
    flags.settings.fields.apply_to_process()?;
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
        // In the settings.
        cloud_provider: None,
        // In the kubelet's own settings.
        resolv_conf: None,
        dns_metrics_address: vec![],
        runtime: flags.runtime,
        settings: flags.settings,
        ..crate::flags::Node::default()
    };
    let addresses = match node.node_ip.as_slice() {
        [] => crate::node::primary_address().await.into_iter().collect(),
        given => given.to_vec(),
    };
    let tasks = Tasks::new("kubelet");
    let name = crate::node::name(&node)?;
    let client = flags.identity.client(&name, &tasks).await?;
    let serving = kubelet_serving(brought, &node, &addresses, data_dir, &tasks)?;
    let described = crate::node::Node {
        name,
        addresses,
        data_dir: data_dir.to_owned(),
        kubelet: client,
        proxy: None,
        routes: None,
        backend: None,
        policies: crate::node::Policies::NotOurs,
        announcements: crate::node::Announcements::NotOurs,
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
        own: crate::own_pods::OwnPods::default(),
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
    let root = cli::node_places::NodePlaces::of(data_dir, node.kubelet_dir.as_deref())?.root;
    let mut names = vec![name.clone()];
    names.extend(addresses.iter().map(ToString::to_string));
    Pair::of_kubelet(brought, &root.join("pki"), &name, names)
        .serve(tasks)
        .context("the kubelet's server has no certificate")
}
