//! The kubelet: runs the pods that the API binds to this node.
//!
//! In: pods (from the API, from manifests), the runtime's state and events, probe results. Out:
//! running containers, statuses, events, the node object and its lease, and a server for logs, exec and
//! statistics.
//!
//! ```text
//!   API watch ──► pods ──► worker (one per pod) ──► plan ──► start / stop ──► runtime (CRI)
//!   manifests ──►   ▲          │  ▲   ▲                          │
//!   runtime events ─┘          │  │   └─ probes   objects ───────┤ volumes, env
//!                              ▼  └────── images, backoff        │
//!                        status_writer ──► API                   └► events
//!   node (status, lease) ──► API          server :10250 ◄── API server, people
//! ```
//!
//! Invariants: all state can be read back from the runtime, the disk and the API, so a kubelet can be
//! killed and replaced at any moment; a pod's worker does everything about that pod, one thing at a time;
//! decisions ([`pod::plan`], [`pod::status`], [`pod::admit`]) are pure; polling is only for what has no events.
//! Upstream: `pkg/kubelet`.

mod bucket;
mod config;
mod devices;
mod error;
mod kubelet;
mod managers;
mod names;
mod node;
mod plugins;
mod pod;
mod reason;
mod resources;
mod server;
mod volumes;

use std::sync::Arc;
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{Client, Informers};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::{Notify, watch};

pub use config::{
    Config, GateError, KUBELET_VERSION, KernelLimits, ManifestUrl, NetworkGate, Rate, ServerAuth,
    ServerTls, Swap,
};
pub use error::Error;
use kubelet::{Kubelet, set_up_network};
pub use managers::Settings as ManagerSettings;
pub use managers::cpuset::CpuSet;
pub use managers::hints::Policy as TopologyPolicy;
pub use managers::options::{CpuOptions, TopologyOptions};
pub use node::eviction::Settings as EvictionSettings;
pub use node::eviction::threshold::{Maps as EvictionMaps, parse as parse_thresholds};
pub use node::families::{Certificate, certificate_expires, certificate_not_renewed};
pub use node::log_links::LogLinks;
pub use node::reserve::{Amounts, Enforcement};
use node::this::ThisNode;
use node::{figures, machine, measured};
pub use pod::static_pods::own_pod;
pub use pod::sysctls::{SysctlError, Sysctls};

const SHUTDOWN: Duration = Duration::from_secs(3);
/// Runs until `stop`. A stop does not touch pods: the next kubelet adopts them.
pub async fn run(
    client: Client,
    runtime: Arc<dyn cri::Runtime>,
    config: Config,
    stop: Stop,
) -> Result<(), Error> {
    let pods = config.root_dir.join("pods");
    let links = config.log_links.directory();
    for path in [config.root_dir.as_path(), &pods, &config.log_dir, links] {
        let error = |source| Error::Directory { path: path.display().to_string(), source };
        std::fs::create_dir_all(path).map_err(error)?;
    }
    config.log_links.sweep(&config.log_dir);
    let tasks = Tasks::new("kubelet");
    let _bound = tasks.bound();
    let done = match start(client, runtime, config, &tasks).await {
        Err(error) => Err(error),
        Ok(()) => {
            let group = tasks.stop_signal();
            stop.or(group.wait()).await.map_or(Ok(()), |()| Err(Error::Broken))
        }
    };
    tasks.shutdown(SHUTDOWN).await;
    done
}

async fn start(
    client: Client,
    runtime: Arc<dyn cri::Runtime>,
    mut config: Config,
    tasks: &Tasks,
) -> Result<(), Error> {
    let listeners = listen(&mut config).await?;
    let figures = Arc::new(figures::Figures::default());
    let runtime: Arc<dyn cri::Runtime> =
        Arc::new(measured::Measured::new(runtime, figures.clone()));
    let informers = Informers::new(client.clone(), tasks.clone());
    let nodes = informers.scoped::<Node>(None, &format!("metadata.name={}", config.node_name), "");
    let (network_in, network) = watch::channel("pod network is not configured yet".to_string());
    let machine = machine::Machine::read(&config.managers.sys);
    check_swap(&config, &machine)?;
    let hurry = Arc::new(Notify::new());
    set_up_network(&*runtime, config.pod_cidr.as_deref(), &network_in).await;
    let problem = network.borrow().clone();
    let health = node::status::Health::check(&*runtime, &config, &problem).await;
    let first = node::status::initial(&config, &machine, &health, base::clock::now());
    let runtime_name = health.runtime_version.split("://").next().unwrap_or("decapod").to_string();
    let known = ThisNode::new(config, machine, runtime_name, first, network);
    let kubelet = Kubelet::new(known, client, runtime, &informers, figures, hurry.clone(), tasks)?;
    kubelet.follow_node(&nodes, network_in);
    let (reporter, stop) = (kubelet.reporter(), tasks.stop_signal());
    tasks.spawn("node-status", node::status::keep_status(reporter.clone(), hurry, health));
    tasks.spawn_graceful("node-lease", node::status::keep_lease(reporter, stop));
    kubelet.follow_pods(nodes);
    kubelet.follow_drivers();
    listeners.serve(&kubelet.server());
    Ok(())
}

/// The sockets of the kubelet's API server, of its health server, and of its server without authentication.
struct Listeners {
    listener: Option<transport::Listener>,
    health: Option<transport::Listener>,
    read_only: Option<transport::Listener>,
}

impl Listeners {
    fn serve(self, server: &server::Server) {
        if let Some(listener) = self.listener {
            server.listen(listener);
        }
        if let Some(listener) = self.health {
            server.listen_health(listener);
        }
        if let Some(listener) = self.read_only {
            server.listen_read_only(listener);
        }
    }
}

async fn listen(config: &mut Config) -> Result<Listeners, Error> {
    let listener = match config.server_tls {
        Some(_) => Some(server::bind(config.bind_address).await?),
        None => None,
    };
    let health = match config.healthz_address {
        Some(address) => Some(server::bind(address).await?),
        None => None,
    };
    let read_only = match config.read_only_address {
        Some(address) => Some(server::bind(address).await?),
        None => None,
    };
    // Port 0 asks for a free one: the node object reports the actual port.
    if let Some(address) = listener.as_ref().and_then(|one| one.local_addr()) {
        config.bind_address = address;
    }
    Ok(Listeners { listener, health, read_only })
}

/// Deviation: upstream's kubelet refuses to start with swap by default.
fn check_swap(config: &Config, machine: &machine::Machine) -> Result<(), Error> {
    if machine.swap > 0 && config.fails_on_swap {
        return Err(Error::SwapIsOn);
    }
    if machine.swap > 0 && config.limits.swap == Swap::None {
        tracing::warn!(
            bytes = machine.swap,
            "swap is on: processes outside of containers may use it; swapoff -a turns it off"
        );
    }
    Ok(())
}
