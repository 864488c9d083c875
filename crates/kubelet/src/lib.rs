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

mod config;
mod devices;
mod error;
mod kubelet;
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

pub use config::{Config, GateError, KUBELET_VERSION, NetworkGate, ServerAuth, ServerTls};
pub use error::Error;
use kubelet::{Kubelet, set_up_network};
pub use node::families::{Certificate, certificate_expires, certificate_not_renewed};
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
    for path in [&config.root_dir, &config.root_dir.join("pods"), &config.log_dir] {
        let error = |source| Error::Directory { path: path.display().to_string(), source };
        std::fs::create_dir_all(path).map_err(error)?;
    }
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
    let (listener, health_listener) = listen(&mut config).await?;
    let figures = Arc::new(figures::Figures::default());
    let runtime: Arc<dyn cri::Runtime> =
        Arc::new(measured::Measured::new(runtime, figures.clone()));
    let informers = Informers::new(client.clone(), tasks.clone());
    let nodes = informers.scoped::<Node>(None, &format!("metadata.name={}", config.node_name), "");
    let (network_in, network) = watch::channel("pod network is not configured yet".to_string());
    let machine = machine::Machine::read();
    warn_of_swap(&machine);
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
    let server = kubelet.server();
    if let Some(listener) = listener {
        server.listen(listener);
    }
    if let Some(listener) = health_listener {
        server.listen_health(listener);
    }
    Ok(())
}

/// The sockets of the kubelet's API server and of its health server.
async fn listen(
    config: &mut Config,
) -> Result<(Option<transport::Listener>, Option<transport::Listener>), Error> {
    let listener = match config.server_tls {
        Some(_) => Some(server::bind(config.bind_address).await?),
        None => None,
    };
    let health = match config.healthz_address {
        Some(address) => Some(server::bind(address).await?),
        None => None,
    };
    // Port 0 asks for a free one: the node object reports the actual port.
    if let Some(address) = listener.as_ref().and_then(|one| one.local_addr()) {
        config.bind_address = address;
    }
    Ok((listener, health))
}

/// Upstream's kubelet refuses to start with swap, unless `failSwapOn` is false.
fn warn_of_swap(machine: &machine::Machine) {
    if machine.swap > 0 {
        tracing::warn!(
            bytes = machine.swap,
            "swap is on: containers may use it beyond their memory limits; swapoff -a turns it off"
        );
    }
}
