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
//! decisions ([`plan`], [`status`], [`admit`]) are pure; polling is only for what has no events.
//! Upstream: `pkg/kubelet`.

mod admit;
mod allocation;
mod backoff;
mod cgroups;
mod claims;
mod config;
mod container;
mod context;
mod csi;
mod device_plugins;
mod devices;
mod downward;
mod env;
mod env_file;
mod eviction;
mod expand;
mod figures;
mod grpc;
mod handler;
mod hosts;
mod image_gc;
mod images;
mod local_storage;
mod local_volume;
mod log_rotation;
mod logind;
mod machine;
mod measured;
mod mirrors;
mod names;
mod node;
mod objects;
mod observed;
mod phase;
mod plan;
mod pod_resources;
mod pods;
mod probe;
mod probe_counts;
mod relist;
mod resize;
mod resources;
mod runtime;
mod sandbox;
mod server;
mod shutdown;
mod slices;
mod start;
mod static_pods;
mod status;
mod status_writer;
mod stop;
mod sysctls;
mod users;
mod volumes;
mod worker;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{Client, EventRecorder, Informer, Informers};
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::storage::v1::CSIDriver;
use machinery::selector::Selector;
use tokio::sync::{Notify, watch};

pub use config::{Config, KUBELET_VERSION, ServerAuth, ServerTls};
use context::Context;
use device_plugins::DevicePlugins;
use pods::PodSet;
pub use sysctls::{SysctlError, Sysctls};

/// Why a kubelet does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot create {path}: {source}")]
    Directory { path: String, source: std::io::Error },
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error(transparent)]
    Users(#[from] users::UsersError),
    #[error("a task of the kubelet failed")]
    Broken,
}

const SHUTDOWN: Duration = Duration::from_secs(3);
/// Delay before the kubelet reconnects to a runtime that failed.
const RUNTIME_RETRY: Duration = Duration::from_secs(1);
/// How often the runtime is asked whether its network is ready (upstream: 5 s, always), until it is;
/// after that, the node status reports changes.
const NETWORK_RETRY: Duration = Duration::from_secs(1);

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
    let pods = informers.scoped::<Pod>(None, &format!("spec.nodeName={}", config.node_name), "");
    let nodes = informers.scoped::<Node>(None, &format!("metadata.name={}", config.node_name), "");
    let services = informers.of::<Service>();
    let (network_in, network) = watch::channel("pod network is not configured yet".to_string());
    let machine = machine::Machine::read();
    warn_of_swap(&machine);
    let hurry = Arc::new(Notify::new());
    set_up_network(&*runtime, config.pod_cidr.as_deref(), &network_in).await;
    let problem = network.borrow().clone();
    let health = node::Health::check(&*runtime, &config, &problem).await;
    let first = node::initial(&config, &machine, &health, base::clock::now());
    let runtime_name = health.runtime_version.split("://").next().unwrap_or("decapod").to_string();
    let context = Arc::new(Context {
        events: EventRecorder::new(client.clone(), tasks, "kubelet", Some(&config.node_name)),
        images: images::Images::new(runtime.clone(), config.parallel_pulls),
        objects: objects::Objects::new(client.clone()),
        users: Arc::new(users::Users::new(&config.root_dir, config.max_pods, Path::new("/etc"))?),
        csi: Arc::new(new_csi(&client, &config, informers.of(), hurry.clone())),
        devices: Arc::new(devices::Devices::new(&client, &config)),
        device_plugins: Arc::new(DevicePlugins::new(&config, hurry.clone(), tasks)),
        cgroups: new_cgroups(&config, &machine),
        resolver: new_resolver(&config),
        node: Mutex::new(Arc::new(first)),
        runtime_name,
        machine,
        probes: Arc::default(),
        figures,
        pod_resources: Default::default(),
        is_shutting_down: watch::channel(false).0,
        known_services: services.view(),
        services,
        pods,
        network,
        tasks: tasks.clone(),
        client,
        runtime,
        config,
    });
    let set = PodSet::new(context.clone(), tasks.clone());
    follow_node(&context, &nodes, network_in, hurry.clone());
    tasks.spawn("node-status", node::keep_status(context.clone(), hurry.clone(), health));
    tasks.spawn("node-shutdown", shutdown::keep(context.clone(), set.clone(), hurry));
    tasks.spawn_graceful("node-lease", node::keep_lease(context.clone(), tasks.stop_signal()));
    follow_pods(&context, &set, nodes);
    follow_drivers(&context, &set);
    let server = server::Server::new(context, set, tasks.clone());
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

fn new_resolver(config: &Config) -> hosts::Resolver {
    hosts::Resolver::parse(&std::fs::read_to_string(&config.resolv_conf).unwrap_or_default())
}

fn new_cgroups(config: &Config, machine: &machine::Machine) -> cgroups::Cgroups {
    let layout = cgroups::Layout::of_this_machine();
    let cgroups = cgroups::Cgroups::new(layout, &config.cgroup_root, config.cgroups_per_qos)
        .driven_by(config.cgroup_driver);
    cgroups.prepare(node::enforced(config, machine));
    cgroups
}

fn new_csi(
    client: &Client,
    config: &Config,
    drivers: Informer<CSIDriver>,
    hurry: Arc<Notify>,
) -> csi::Csi {
    let setting = csi::Setting {
        node_name: config.node_name.clone(),
        root: config.root_dir.clone(),
        may_mount: config.may_mount,
    };
    csi::Csi::new(client.clone(), setting, drivers, hurry)
}

/// Configures the runtime's pod network, and reports whether it is ready.
async fn set_up_network(
    runtime: &dyn cri::Runtime,
    pod_cidr: Option<&str>,
    network: &watch::Sender<String>,
) {
    if let Some(cidr) = pod_cidr
        && let Err(error) = runtime.update_runtime_config(cidr).await
    {
        network.send_replace(error.to_string());
        return;
    }
    let why = match runtime.status(false).await {
        Ok(status) => match status.status.unwrap_or_default().condition(cri::NETWORK_READY) {
            Some(condition) if !condition.status => {
                format!("{} {}", condition.reason, condition.message).trim().to_string()
            }
            _ => String::new(),
        },
        Err(error) => error.to_string(),
    };
    network.send_if_modified(|known| {
        let changed = *known != why;
        *known = why;
        changed
    });
}

/// Follows the API's node: the pod CIDR, and labels and taints that others changed.
fn follow_node(
    context: &Arc<Context>,
    nodes: &Informer<Node>,
    network: watch::Sender<String>,
    hurry: Arc<Notify>,
) {
    let changed = Arc::new(Notify::new());
    let tell = changed.clone();
    let (own, name) = (context.clone(), context.config.node_name.clone());
    let lister = nodes.lister();
    nodes.subscribe_raw(move |_| tell.notify_one());
    context.tasks.spawn("node-follower", async move {
        let mut known = own.config.pod_cidr.clone();
        loop {
            tokio::select! {
                () = changed.notified() => {}
                // There is no event when another runtime's network plugin becomes ready.
                () = tokio::time::sleep(NETWORK_RETRY), if !network.borrow().is_empty() => {
                    set_up_network(&*own.runtime, known.as_deref(), &network).await;
                    if network.borrow().is_empty() {
                        hurry.notify_one();
                    }
                    continue;
                }
            }
            let Some(node) = lister.get("", &name) else { continue };
            let spec = node.spec.clone().unwrap_or_default();
            let cidrs = spec.pod_cidrs.unwrap_or_else(|| spec.pod_cidr.into_iter().collect());
            let cidr = Some(cidrs.join(",")).filter(|text| !text.is_empty());
            own.csi.follow(&node);
            remember_newer(&own, node);
            if cidr.is_some() && cidr != known {
                set_up_network(&*own.runtime, cidr.as_deref(), &network).await;
                known = cidr;
                hurry.notify_one();
            }
        }
    });
}

/// Keeps the newest version: the watch may lag behind the answers to our own writes.
fn remember_newer(context: &Context, node: Arc<Node>) {
    let version = |node: &Node| {
        node.metadata.resource_version.as_deref().and_then(|v| v.parse::<u64>().ok()).unwrap_or(0)
    };
    let mut known = context.node.lock().expect("no panic while held");
    if version(&node) >= version(&known) {
        *known = node;
    }
}

fn follow_pods(context: &Arc<Context>, set: &Arc<PodSet>, nodes: Informer<Node>) {
    let tasks = &context.tasks;
    let signals = set.signals.clone();
    tasks.spawn("pods", set.clone().run());
    tasks.spawn("eviction", eviction::keep(context.clone(), set.clone()));
    tasks.spawn("local-storage", local_storage::keep(context.clone(), set.clone()));
    tasks.spawn("image-gc", image_gc::keep(context.clone(), set.clone()));
    tasks.spawn("log-rotation", log_rotation::keep(context.clone(), set.clone()));
    tasks.spawn("mirrors", mirrors::keep(context.clone(), set.clone()));
    tasks.spawn("runtime-events", follow_runtime(context.clone(), set.clone()));
    if let Some(path) = context.config.pod_manifest_path.clone() {
        let statics = signals.clone();
        let name = context.config.node_name.clone();
        tasks.spawn("manifests", static_pods::watch(path, name, move |pods| statics.statics(pods)));
    }
    let own = context.clone();
    tasks.spawn("api-pods", async move {
        // Admission checks the node's labels: they must be known first.
        nodes.synced().await;
        let keys = signals.clone();
        own.pods.subscribe_raw(move |event| keys.api(event.entry().header.key.clone()));
        own.pods.synced().await;
        signals.synced();
        // The subscription ends with the informer, which belongs to the same group.
        std::future::pending::<()>().await;
    });
}

/// Follows CSI and DRA drivers that register and unregister; pods may wait for them.
fn follow_drivers(context: &Arc<Context>, set: &Arc<PodSet>) {
    let tasks = &context.tasks;
    tasks.spawn("csi-node", csi::keep_node(context.csi.clone()));
    let plugins = csi::Plugins {
        csi: context.csi.clone(),
        devices: context.devices.clone(),
        device_plugins: context.device_plugins.clone(),
    };
    tasks.spawn("plugins", csi::watch_registry(plugins, tasks.clone()));
    tasks.spawn("device-slices", devices::keep_slices(context.devices.clone()));
    follow_device_plugins(context, set);
    let (mut changed, set, own) = (context.csi.changed.subscribe(), set.clone(), context.clone());
    tasks.spawn("drivers", async move {
        own.pods.synced().await;
        loop {
            give_back_devices(&own, &set).await;
            if changed.changed().await.is_err() {
                return;
            }
            set.wake(None);
        }
    });
}

/// Serves the registration of device plugins; wakes pods when the health of their devices changes.
fn follow_device_plugins(context: &Arc<Context>, set: &Arc<PodSet>) {
    let tasks = &context.tasks;
    let serving = device_plugins::serve(context.device_plugins.clone(), tasks.stop_signal());
    tasks.spawn("device-plugin-registration", serving);
    let serving = pod_resources::serve(context.clone(), set.clone(), tasks.stop_signal());
    tasks.spawn("pod-resources", serving);
    let mut changed = context.device_plugins.changed.subscribe();
    let (set, own) = (set.clone(), context.clone());
    tasks.spawn("device-health", async move {
        while changed.changed().await.is_ok() {
            for pod in own.device_plugins.pods() {
                set.wake(Some(&pod));
            }
        }
    });
}

/// Unprepares the claims of pods that were deleted while no kubelet ran.
async fn give_back_devices(context: &Context, set: &PodSet) {
    let known: BTreeSet<String> = {
        let all = context.pods.lister().list(None, &Selector::everything());
        let bound = all.iter().map(|pod| names::uid(pod).to_string());
        let views = set.views().into_iter().filter_map(|view| view.pod);
        bound.chain(views.map(|pod| names::uid(&pod).to_string())).collect()
    };
    for pod in context.devices.pods().difference(&known) {
        if let Err(error) = context.devices.give_back(pod).await {
            tracing::warn!(pod, error, "failed to unprepare the claims of a deleted pod");
        }
    }
}

/// Wakes workers when the runtime reports events.
async fn follow_runtime(context: Arc<Context>, set: Arc<PodSet>) {
    let mut is_away = false;
    loop {
        match context.runtime.events().await {
            Ok(mut events) => {
                is_away = false;
                set.wake(None);
                loop {
                    use tokio::sync::broadcast::error::RecvError;
                    match events.recv().await {
                        Ok(event) => {
                            let sandbox = event.pod_sandbox_status.as_ref();
                            let uid =
                                sandbox.and_then(|s| s.metadata.as_ref()).map(|m| m.uid.as_str());
                            let labelled = event
                                .containers_statuses
                                .iter()
                                .find_map(|c| c.labels.get(names::POD_UID).map(String::as_str));
                            set.wake(uid.or(labelled));
                        }
                        Err(RecvError::Lagged(_)) => set.wake(None),
                        Err(RecvError::Closed) => break,
                    }
                }
            }
            Err(cri::Error::Unimplemented(_)) => {
                is_away = true;
                let error = relist::follow(&*context.runtime, &set).await;
                tracing::warn!(%error, "failed to list the runtime's containers");
            }
            // Logged once per outage.
            Err(error) if !is_away => {
                is_away = true;
                tracing::warn!(%error, "failed to subscribe to the runtime's events");
            }
            Err(_) => {}
        }
        tokio::time::sleep(RUNTIME_RETRY).await;
    }
}
