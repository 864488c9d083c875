//! The node part: runtime, kubelet, proxy, DNS.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use base::task::Tasks;
use cli::node_places::NodePlaces;
use client::Client;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Pod, Taint};
use machinery::address_range::AddressRange;
use tokio::sync::{Notify, watch};
use transport::tls::ServerTls;

use crate::flags::{self, Backend};
use crate::own_pods::OwnPods;
use crate::supervise;

const ETHERNET_MTU: u32 = 1500;
const RUNTIME_RETRY: Duration = Duration::from_secs(1);

/// The settings of a node, in the server's process or in an agent's.
pub struct Node {
    pub name: String,
    pub addresses: Vec<IpAddr>,
    pub data_dir: PathBuf,
    pub kubelet: Client,
    pub proxy: Option<Client>,
    /// A client that may read all nodes, to route to their pods; `None`: another program creates routes.
    pub routes: Option<Client>,
    /// None: VXLAN, unless CNI plugins connect the pods.
    pub backend: Option<Backend>,
    pub policies: Policies,
    pub announcements: Announcements,
    /// Kubeconfig of the DNS server; `None`: no DNS on this node.
    pub dns_kubeconfig: Option<PathBuf>,
    /// Notified when that file changes.
    pub dns_renewed: Arc<Notify>,
    /// Without it the kubelet has no server: no logs, no exec.
    pub serving: Option<ServerTls>,
    /// Listen address of the kubelet's server; by default its usual port on all addresses.
    pub bind: Option<SocketAddr>,
    pub client_ca_pem: Option<String>,
    pub cluster_cidrs: Vec<IpNet>,
    pub service_cidrs: Vec<IpNet>,
    pub cluster_dns: Vec<IpAddr>,
    pub cluster_domain: String,
    /// Use free ports instead of the well-known ones.
    pub free_ports: bool,
    /// The components of this process, shown as pods.
    pub own: OwnPods,
}

/// The component that enforces network policies on the node.
pub enum Policies {
    /// This process. The client may read policies and all pods' labels and addresses.
    Ours(Client),
    /// Another program: rules of earlier starts are removed.
    Off,
    /// This process runs a kubelet alone and does not know.
    NotOurs,
}

impl Policies {
    pub fn new(is_on: bool, client: impl FnOnce() -> Client) -> Self {
        if is_on { Self::Ours(client()) } else { Self::Off }
    }
}

/// The process that announces load balancers' addresses of pools on the node.
pub enum Announcements {
    /// This process. The client may read Services, EndpointSlices and Nodes.
    Ours(Client, Vec<AddressRange>),
    /// Another program, or there are no pools: addresses of earlier starts are removed.
    Off,
    /// This process runs a kubelet alone and does not know.
    NotOurs,
}

impl Announcements {
    pub fn new(pools: &[AddressRange], client: impl FnOnce() -> Client) -> Self {
        if pools.is_empty() { Self::Off } else { Self::Ours(client(), pools.to_vec()) }
    }
}

/// The address of the interface that the default route leaves by.
pub async fn primary_address() -> Option<IpAddr> {
    let links = net::Links::open().ok()?;
    let uplink = links.uplink().await.ok().flatten()?;
    Some(uplink.address)
}

/// The node's name: the flag's value, or the host name in lower case.
pub fn name(flags: &flags::Node) -> anyhow::Result<String> {
    let name = match &flags.node_name {
        Some(name) => name.clone(),
        None => nix::unistd::gethostname()
            .context("cannot read the host's name")?
            .to_string_lossy()
            .to_lowercase(),
    };
    if let Some(wrong) = machinery::names::dns1123_subdomain(&name).first() {
        bail!("the node name {name:?} cannot be used ({wrong}); choose another with --node-name");
    }
    Ok(name)
}

/// Starts everything that a node runs. It adopts the pods of an earlier process.
pub async fn start(node: Node, flags: &flags::Node, tasks: &Tasks) -> anyhow::Result<()> {
    let links = net::Links::open().context("cannot talk to the kernel's network")?;
    links.set_loopback_up().await?;
    let (runtime, connects) = open_runtime(&node, flags, &links, tasks).await?;
    let runtime = with_parts(runtime, &node.own, tasks);
    start_images(&node, flags, tasks)?;
    start_cri(&node, flags, &runtime, tasks);
    let driver = cgroup_driver(&*runtime, &flags.runtime.cgroup_driver).await?;
    net::sysctl::prepare_node(None).await?;
    let gate = start_policies(&node, tasks)?;
    start_kubelet(&node, flags, runtime, driver, gate, tasks)?;
    start_proxy(&node, flags, &connects, tasks)?;
    start_routes(&node, &connects, tasks);
    start_announcements(&node, tasks).await?;
    if let Some(kubeconfig) = &node.dns_kubeconfig {
        for address in &node.cluster_dns {
            links.ensure_local_address(*address).await?;
        }
        crate::dns::supervise(
            crate::dns::Service {
                data_dir: node.data_dir.clone(),
                kubeconfig: kubeconfig.clone(),
                addresses: node.cluster_dns.clone(),
                domain: node.cluster_domain.clone(),
                resolv_conf: flags.resolv_conf.clone(),
                metrics: flags.dns_metrics_address.clone(),
                renewed: node.dns_renewed.clone(),
            },
            tasks,
        );
    }
    Ok(())
}

/// MTU of pods: that of the node minus the overhead of the overlay. The same on a single node, because
/// other nodes may join later.
pub async fn pod_mtu(
    links: &net::Links,
    addresses: &[IpAddr],
    backend: Option<Backend>,
    wanted: Option<u32>,
) -> anyhow::Result<u32> {
    if let Some(mtu) = wanted {
        return Ok(mtu);
    }
    let mut outer = match addresses.first() {
        Some(address) => links.link_of(*address).await?,
        None => None,
    };
    if outer.is_none()
        && let Some(uplink) = links.uplink().await?
    {
        outer = links.find(&uplink.interface).await?;
    }
    let mtu = outer.filter(|link| link.name != "lo").map_or(ETHERNET_MTU, |link| link.mtu);
    let overhead = match (backend, addresses.first()) {
        (Some(Backend::HostGateway), _) => 0,
        (_, Some(address)) => net::vxlan::overhead(address),
        (_, None) => net::vxlan::OVERHEAD,
    };
    Ok(mtu.saturating_sub(overhead))
}

/// Whether this node connects its pods with other nodes and the world: masquerading and routes. Not if CNI
/// plugins do.
type Connects = watch::Receiver<bool>;

/// `plugins`: whether CNI plugins connect new pods.
fn connects(
    backend: Option<Backend>,
    mut plugins: watch::Receiver<bool>,
    tasks: &Tasks,
) -> Connects {
    let fixed = match backend {
        None => None,
        Some(Backend::None) => Some(false),
        Some(Backend::Vxlan | Backend::HostGateway) => Some(true),
    };
    let (told, connects) = watch::channel(fixed.unwrap_or(!*plugins.borrow()));
    if fixed.is_none() {
        tasks.spawn("pod network", async move {
            while plugins.changed().await.is_ok() {
                told.send_replace(!*plugins.borrow_and_update());
            }
        });
    }
    connects
}

async fn open_runtime(
    node: &Node,
    flags: &flags::Node,
    links: &net::Links,
    tasks: &Tasks,
) -> anyhow::Result<(Arc<dyn cri::Runtime>, Connects)> {
    let home = runtime_dir(&node.data_dir);
    if let Some(endpoints) = flags.runtime.endpoints() {
        refuse_leftovers(&home)?;
        let remote = tokio::select! {
            remote = wait_for_runtime(&endpoints, tasks) => remote?,
            () = crate::process::termination() => {
                bail!("stopped while the container runtime did not answer");
            }
        };
        endpoints.remember(&node.data_dir)?;
        route_services(links, &node.service_cidrs).await?;
        let connects = watch::Sender::new(node.backend != Some(Backend::None)).subscribe();
        return Ok((Arc::new(remote), connects));
    }
    runtime::backend::remote::Endpoints::forget(&node.data_dir)?;
    let mtu = pod_mtu(links, &node.addresses, node.backend, flags.runtime.pod_mtu).await?;
    let cni = flags.runtime.cni(node.backend == Some(Backend::None));
    let runtime = open_embedded(&node.data_dir, &node.service_cidrs, mtu, cni, tasks).await?;
    let connects = connects(node.backend, runtime.plugins_in_use(), tasks);
    Ok((Arc::new(runtime), connects))
}

/// The embedded runtime of the cluster with this data directory.
pub async fn open_embedded(
    data_dir: &Path,
    service_cidrs: &[IpNet],
    mtu: u32,
    cni: runtime::CniConfig,
    tasks: &Tasks,
) -> anyhow::Result<runtime::Embedded> {
    let config = runtime::Config {
        registries: runtime::images::registries::places(data_dir),
        service_cidrs: service_cidrs.to_vec(),
        mtu,
        cni,
        ..runtime::Config::new(runtime_dir(data_dir))
    };
    let opened = runtime::Embedded::open(config, tasks.clone()).await;
    opened.context("cannot open the container runtime")
}

/// The runtime that also has the containers of this process' components.
fn with_parts(
    runtime: Arc<dyn cri::Runtime>,
    own: &OwnPods,
    tasks: &Tasks,
) -> Arc<dyn cri::Runtime> {
    match own.parts.as_slice() {
        [] => runtime,
        parts => {
            let lines = crate::kept_log::lines();
            Arc::new(runtime::WithParts::new(runtime, parts.to_vec(), lines, tasks))
        }
    }
}

/// Imports the archives of `<data-dir>/images`. CRI has no import: another runtime has a tool of its own.
fn start_images(node: &Node, flags: &flags::Node, tasks: &Tasks) -> anyhow::Result<()> {
    let directory = node.data_dir.join("images");
    if flags.runtime.endpoints().is_some() {
        if directory.is_dir() {
            tracing::warn!(
                directory = %directory.display(),
                "archives of images are not imported: CRI cannot; use the container runtime's own tool"
            );
        }
        return Ok(());
    }
    let store = runtime::ImageStore::open(runtime_dir(&node.data_dir).join("images"))
        .context("cannot open the images")?;
    supervise::keep(tasks, "images", move |stop| {
        runtime::images::folder::keep(store.clone(), directory.clone(), stop)
    });
    Ok(())
}

/// Serves the embedded runtime to other programs of the machine.
fn start_cri(node: &Node, flags: &flags::Node, runtime: &Arc<dyn cri::Runtime>, tasks: &Tasks) {
    if flags.runtime.endpoints().is_some() {
        return;
    }
    if let Some(socket) = flags.runtime.cri_socket(&node.data_dir) {
        serve_cri(runtime.clone(), socket, tasks);
    }
}

/// A socket that cannot be served hurts nothing else: the kubelet uses the runtime without it.
pub fn serve_cri(runtime: Arc<dyn cri::Runtime>, socket: PathBuf, tasks: &Tasks) {
    supervise::keep(tasks, "cri", move |stop| {
        cri::server::serve(runtime.clone(), socket.clone(), stop)
    });
}

/// Upstream's kubelet ends if its runtime does not run yet, and a supervisor restarts it. Here a control
/// plane may be in the same process: it continues, and the node waits.
async fn wait_for_runtime(
    endpoints: &runtime::backend::remote::Endpoints,
    tasks: &Tasks,
) -> anyhow::Result<runtime::backend::remote::Remote> {
    let mut has_said = false;
    loop {
        match runtime::backend::remote::Remote::open(endpoints, tasks.clone()).await {
            Ok(remote) => return Ok(remote),
            Err(cri::Error::Unavailable(error)) => {
                if !has_said {
                    tracing::warn!(error, "the container runtime does not answer, waiting");
                }
                has_said = true;
                tokio::time::sleep(RUNTIME_RETRY).await;
            }
            Err(error) => bail!("--container-runtime-endpoint: {error}"),
        }
    }
}

/// The driver that the runtime reports, or the flag's value if it reports none.
/// Upstream: getCgroupDriverFromCRI.
async fn cgroup_driver(
    runtime: &dyn cri::Runtime,
    flag: &str,
) -> anyhow::Result<cri::CgroupDriver> {
    match runtime.runtime_config().await {
        Ok(config) => Ok(config.cgroup_driver()),
        Err(cri::Error::Unimplemented(_)) if flag == "systemd" => Ok(cri::CgroupDriver::Systemd),
        Err(cri::Error::Unimplemented(_)) => Ok(cri::CgroupDriver::Cgroupfs),
        Err(error) => Err(error).context("cannot get the container runtime's cgroup driver"),
    }
}

/// Containers of the embedded runtime run without this process: no other runtime would manage them.
fn refuse_leftovers(home: &Path) -> anyhow::Result<()> {
    let containers = home.join("containers");
    let left = std::fs::read_dir(&containers).into_iter().flatten().flatten().count();
    if left > 0 {
        bail!(
            "--container-runtime-endpoint: {left} containers of the embedded runtime are in {}; \
             drain the node, or choose another --data-dir",
            containers.display()
        );
    }
    Ok(())
}

/// Routes Service ranges through an interface, for a node without a default route. With the embedded
/// runtime that is its bridge; here it is the interface of the node's address, because only the runtime
/// knows the interfaces of its pods.
async fn route_services(links: &net::Links, service_cidrs: &[IpNet]) -> anyhow::Result<()> {
    let Some(uplink) = links.uplink().await? else { return Ok(()) };
    for cidr in service_cidrs {
        links.ensure_service_route(*cidr, &uplink.interface).await?;
    }
    Ok(())
}

/// Directory of the embedded runtime's images and containers.
pub fn runtime_dir(data_dir: &Path) -> PathBuf {
    data_dir.join("runtime")
}

fn start_kubelet(
    node: &Node,
    flags: &flags::Node,
    runtime: Arc<dyn cri::Runtime>,
    driver: cri::CgroupDriver,
    gate: Option<policy::Gate>,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    let mut config = kubelet::Config::new(&node.name, node.data_dir.clone());
    config.network_gate = gate.map(|gate| Arc::new(Gate(gate)) as Arc<dyn kubelet::NetworkGate>);
    config.cgroup_driver = driver;
    config.node_ips = node.addresses.clone();
    config.node_ip_is_given = !flags.node_ip.is_empty();
    config.labels = labels(&flags.node_label)?;
    config.taints =
        flags.node_taint.iter().map(|text| taint(text)).collect::<anyhow::Result<_>>()?;
    config.cluster_dns = node.cluster_dns.clone();
    config.cluster_domain = node.cluster_domain.clone();
    config.pod_manifest_path = flags.pod_manifest_path.clone();
    config.own_pods = node.own.pods.clone();
    config.server_tls = node.serving.clone();
    config.bind_address = node.bind.unwrap_or(config.bind_address);
    let percent = |given: Option<u8>, default| given.map_or(default, u64::from);
    config.image_gc_high = percent(flags.image_gc_high_threshold, config.image_gc_high);
    config.image_gc_low = percent(flags.image_gc_low_threshold, config.image_gc_low);
    anyhow::ensure!(
        config.image_gc_low <= config.image_gc_high,
        "--image-gc-low-threshold must not be above --image-gc-high-threshold"
    );
    config.sysctls = kubelet::Sysctls::with_unsafe(&flags.allowed_unsafe_sysctls)
        .context("--allowed-unsafe-sysctls")?;
    config.max_pods = flags.max_pods.map_or(config.max_pods, i64::from);
    config.shutdown_grace = flags.shutdown_grace_period.unwrap_or_default();
    config.shutdown_grace_critical = flags.shutdown_grace_period_critical_pods.unwrap_or_default();
    anyhow::ensure!(
        config.shutdown_grace_critical <= config.shutdown_grace,
        "--shutdown-grace-period-critical-pods must not be longer than --shutdown-grace-period"
    );
    let places = NodePlaces::of(&node.data_dir, flags.kubelet_dir.as_deref())?;
    places.claim(&node.data_dir).context("cannot create the kubelet's directories")?;
    tracing::info!(root = %places.root.display(), logs = %places.logs.display(), "the kubelet's directories");
    config.root_dir = places.root;
    config.log_dir = places.logs;
    config.log_links = kubelet::LogLinks::new(places.links);
    let ca = node.client_ca_pem.clone();
    config.server_auth = kubelet::ServerAuth {
        client_ca: Some(Arc::new(move || ca.clone())),
        webhook_tokens: true,
        anonymous: false,
        webhook_authorization: true,
    };
    if node.free_ports {
        config.bind_address.set_port(0);
        config.healthz_address = None;
    }
    if let Some(file) = &flags.resolv_conf {
        config.resolv_conf.clone_from(file);
    }
    flags.settings.apply(&mut config)?;
    crate::kubelet_command::wait_for_cloud(flags.cloud_provider.as_deref(), &mut config)?;
    let client = node.kubelet.clone();
    supervise::keep(tasks, "kubelet", move |stop| {
        kubelet::run(client.clone(), runtime.clone(), config.clone(), stop)
    });
    Ok(())
}

fn start_proxy(
    node: &Node,
    flags: &flags::Node,
    connects: &Connects,
    tasks: &Tasks,
) -> anyhow::Result<()> {
    let Some(client) = node.proxy.clone() else { return Ok(()) };
    let well_known = proxy::Config::default();
    let mut config = proxy::Config {
        node_name: node.name.clone(),
        cluster_cidrs: node.cluster_cidrs.clone(),
        service_cidrs: node.service_cidrs.clone(),
        healthz_bind: well_known.healthz_bind.filter(|_| !node.free_ports),
        metrics_bind: well_known.metrics_bind.filter(|_| !node.free_ports),
        ..well_known
    };
    flags.proxy.apply(&mut config)?;
    let connects = connects.clone();
    supervise::keep(tasks, "kube-proxy", move |stop| {
        let (client, config) = (client.clone(), config.clone());
        supervise::with_value("kube-proxy", connects.clone(), stop, move |connects, stop| {
            let config = proxy::Config { masquerade_pods: connects, ..config.clone() };
            proxy::run(client.clone(), config, stop)
        })
    });
    Ok(())
}

/// A gate for the kubelet beside it, if policies are enforced here.
fn start_policies(node: &Node, tasks: &Tasks) -> anyhow::Result<Option<policy::Gate>> {
    let client = match &node.policies {
        Policies::Ours(client) => client.clone(),
        Policies::Off => {
            policy::remove().context("cannot remove the rules of network policies")?;
            return Ok(None);
        }
        Policies::NotOurs => return Ok(None),
    };
    let config = policy::Config {
        node_name: node.name.clone(),
        cluster_dns: node.dns_kubeconfig.iter().flat_map(|_| node.cluster_dns.clone()).collect(),
        netns: None,
    };
    let gate = policy::Gate::default();
    let kept = gate.clone();
    supervise::keep(tasks, "network-policy", move |stop| {
        policy::run(client.clone(), config.clone(), gate.clone(), stop)
    });
    Ok(Some(kept))
}

/// The kubelet's view of the gate: neither crate knows the other.
struct Gate(policy::Gate);

#[async_trait::async_trait]
impl kubelet::NetworkGate for Gate {
    async fn admit(&self, pod: &Pod, addresses: &[IpAddr]) -> Result<(), kubelet::GateError> {
        Ok(self.0.admit(pod, addresses).await?)
    }
}

fn start_routes(node: &Node, connects: &Connects, tasks: &Tasks) {
    let Some(client) = node.routes.clone() else { return };
    let kind = match node.backend {
        Some(Backend::HostGateway) => proxy::routes::Kind::HostGateway,
        _ => proxy::routes::Kind::Vxlan,
    };
    let config = proxy::routes::RoutesConfig {
        node_name: node.name.clone(),
        cluster_cidrs: node.cluster_cidrs.clone(),
        service_cidrs: node.service_cidrs.clone(),
        kind,
        netns: None,
    };
    let connects = connects.clone();
    supervise::keep(tasks, "routes", move |stop| {
        let (client, config) = (client.clone(), config.clone());
        supervise::with_value("routes", connects.clone(), stop, move |connects, stop| {
            let (client, config) = (client.clone(), config.clone());
            async move {
                if connects {
                    return proxy::routes::follow_nodes(client, config, stop).await;
                }
                // A CNI plugin may use the same port.
                proxy::routes::remove(config.netns.as_deref()).await?;
                stop.wait().await;
                Ok(())
            }
        })
    });
}

async fn start_announcements(node: &Node, tasks: &Tasks) -> anyhow::Result<()> {
    let (client, pools) = match &node.announcements {
        Announcements::Ours(client, pools) => (client.clone(), pools.clone()),
        Announcements::Off => {
            let removed = proxy::announce::remove(None).await;
            return removed.context("cannot remove the addresses of load balancers");
        }
        Announcements::NotOurs => return Ok(()),
    };
    let config =
        proxy::announce::AnnounceConfig { node_name: node.name.clone(), pools, netns: None };
    supervise::keep(tasks, "service-lb", move |stop| {
        proxy::announce::run(client.clone(), config.clone(), stop)
    });
    Ok(())
}

fn labels(texts: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    let pair = |text: &String| {
        let (key, value) = text
            .split_once('=')
            .with_context(|| format!("--node-label {text}: expected KEY=VALUE"))?;
        Ok((key.to_owned(), value.to_owned()))
    };
    texts.iter().map(pair).collect()
}

/// `KEY=VALUE:EFFECT` or `KEY:EFFECT`.
fn taint(text: &str) -> anyhow::Result<Taint> {
    const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];
    let expected = || {
        format!(
            "--node-taint {text}: expected KEY=VALUE:EFFECT, with EFFECT one of {}",
            EFFECTS.join(", ")
        )
    };
    let (what, effect) = text.rsplit_once(':').with_context(expected)?;
    if what.is_empty() || !EFFECTS.contains(&effect) {
        bail!(expected());
    }
    let (key, value) =
        what.split_once('=').map_or((what, None), |(key, value)| (key, Some(value.to_owned())));
    Ok(Taint { key: key.into(), value, effect: effect.into(), ..Taint::default() })
}

#[cfg(test)]
mod tests {
    #[test]
    fn taints_are_parsed() {
        let taint = super::taint("a/b=c:NoSchedule").expect("a taint");
        assert_eq!((taint.key.as_str(), taint.value.as_deref()), ("a/b", Some("c")));
        assert!(super::taint("a:NoSchedule").is_ok_and(|taint| taint.value.is_none()));
        for bad in ["a", "a=b:Never", ":NoExecute"] {
            assert!(super::taint(bad).is_err(), "{bad}");
        }
    }
}
