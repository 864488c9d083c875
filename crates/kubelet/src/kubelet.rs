//! The parts of one kubelet, and what each of them gets of the others.
//!
//! In: the node, a client, the runtime. Out: the tasks that follow the API, the runtime, drivers and
//! manifests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use client::{Client, EventRecorder, Informer, Informers};
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use machinery::selector::Selector;
use tokio::sync::{Notify, watch};

use crate::devices::device_plugins::{self, DevicePlugins};
use crate::devices::dra::{self, Devices};
use crate::devices::pod_resources;
use crate::error::Error;
use crate::managers::machine::huge_page_resource;
use crate::managers::{Managers, Reserved, reconcile};
use crate::names;
use crate::node::cgroups::{Cgroups, Layout};
use crate::node::eviction::threshold::Signal;
use crate::node::figures::Figures;
use crate::node::image_gc::Collector;
use crate::node::reserve;
use crate::node::status::{Reporter, capacity};
use crate::node::this::ThisNode;
use crate::node::upkeep::Upkeep;
use crate::node::{eviction, image_gc, local_storage, log_rotation, shutdown};
use crate::pod::api::PodApi;
use crate::pod::events::Events;
use crate::pod::hosts::Resolver;
use crate::pod::images::Images;
use crate::pod::objects::Objects;
use crate::pod::set::PodSet;
use crate::pod::static_pods::Source;
use crate::pod::users::Users;
use crate::pod::worker::{self, Starts};
use crate::pod::{manifest_url, mirrors, relist, static_pods};
use crate::server::Server;
use crate::server::context::Metrics;
use crate::volumes::csi::registration::{Plugins, watch as watch_registry};
use crate::volumes::csi::{self, Csi};
use crate::volumes::turns::Turns;
use crate::volumes::{self, Host};

/// Delay before the kubelet reconnects to a runtime that failed.
const RUNTIME_RETRY: Duration = Duration::from_secs(1);
/// How often the runtime is asked whether its network is ready (upstream: 5 s, always), until it is;
/// after that, the node status reports changes.
const NETWORK_RETRY: Duration = Duration::from_secs(1);

pub struct Kubelet {
    workers: Arc<worker::Context>,
    pods: Arc<PodSet>,
    pod_resources: Arc<pod_resources::Counts>,
    /// Notified when the node's status must be updated.
    hurry: Arc<Notify>,
    tasks: Tasks,
}

impl Kubelet {
    pub fn new(
        node: ThisNode,
        client: Client,
        runtime: Arc<dyn cri::Runtime>,
        informers: &Informers,
        figures: Arc<Figures>,
        hurry: Arc<Notify>,
        tasks: &Tasks,
    ) -> Result<Self, Error> {
        let node = Arc::new(node);
        let config = &node.config;
        let name = &config.node_name;
        let services = informers.of::<Service>();
        let recorder = EventRecorder::new(client.clone(), tasks, "kubelet", Some(name));
        let events = Events::new(recorder, config.events);
        let pods = informers.scoped::<Pod>(None, &format!("spec.nodeName={name}"), "");
        let users = Users::new(&config.root_dir, config.max_pods, Path::new("/etc"))?;
        let cgroups = new_cgroups(&node)?;
        let workers = Arc::new(worker::Context {
            cgroups: Arc::new(cgroups),
            managers: Arc::new(new_managers(&node)?),
            volumes: Arc::new(new_host(&node, &client, &events, informers, hurry.clone())),
            devices: Arc::new(Devices::new(&client, config)),
            device_plugins: Arc::new(
                DevicePlugins::new(config, hurry.clone(), tasks)
                    .with_nodes(node.machine.hardware.nodes.iter().map(|one| one.id)),
            ),
            probes: Arc::default(),
            starts: Starts {
                images: Images::new(runtime.clone(), config.parallel_pulls, config.pulls),
                users: Arc::new(users),
                resolver: new_resolver(&config.resolv_conf),
                known_services: services.view(),
                services,
            },
            api: Arc::new(PodApi { client, pods }),
            runtime,
            events,
            figures,
            node,
        });
        let pods = PodSet::new(workers.clone(), tasks.clone());
        let pod_resources = Arc::default();
        Ok(Self { workers, pods, pod_resources, hurry, tasks: tasks.clone() })
    }

    pub fn reporter(&self) -> Arc<Reporter> {
        let own = &self.workers;
        Arc::new(Reporter {
            node: own.node.clone(),
            client: own.api.client.clone(),
            runtime: own.runtime.clone(),
            events: own.events.clone(),
            csi: own.volumes.csi.clone(),
            device_plugins: own.device_plugins.clone(),
        })
    }

    pub fn server(&self) -> Server {
        let own = &self.workers;
        let context = crate::server::context::Context {
            node: own.node.clone(),
            client: own.api.client.clone(),
            runtime: own.runtime.clone(),
            csi: own.volumes.csi.clone(),
            cgroups: own.cgroups.clone(),
            metrics: Metrics {
                device_plugins: own.device_plugins.clone(),
                figures: own.figures.clone(),
                pod_resources: self.pod_resources.clone(),
                probes: own.probes.clone(),
                users: own.starts.users.clone(),
            },
        };
        Server::new(Arc::new(context), self.pods.clone(), self.tasks.clone())
    }

    /// Follows the API's node: the pod CIDR, and labels and taints that others changed.
    pub fn follow_node(&self, nodes: &Informer<Node>, network: watch::Sender<String>) {
        let changed = Arc::new(Notify::new());
        let tell = changed.clone();
        let (own, hurry, lister) = (self.workers.clone(), self.hurry.clone(), nodes.lister());
        nodes.subscribe_raw(move |_| tell.notify_one());
        self.tasks.spawn("node-follower", async move {
            let config = &own.node.config;
            let mut known = config.pod_cidr.clone();
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
                let Some(node) = lister.get("", &config.node_name) else { continue };
                let spec = node.spec.clone().unwrap_or_default();
                let cidrs = spec.pod_cidrs.unwrap_or_else(|| spec.pod_cidr.into_iter().collect());
                let cidr = Some(cidrs.join(",")).filter(|text| !text.is_empty());
                own.volumes.csi.follow(&node);
                own.node.remember_newer(node);
                if cidr.is_some() && cidr != known {
                    set_up_network(&*own.runtime, cidr.as_deref(), &network).await;
                    known = cidr;
                    hurry.notify_one();
                }
            }
        });
    }

    pub fn follow_pods(&self, nodes: Informer<Node>) {
        let (tasks, own, set) = (&self.tasks, self.workers.clone(), self.pods.clone());
        let upkeep = Arc::new(Upkeep {
            node: own.node.clone(),
            runtime: own.runtime.clone(),
            events: own.events.clone(),
            pods: set.clone(),
            cgroups: own.cgroups.clone(),
            images: Collector::default(),
        });
        tasks.spawn("pods", set.clone().run());
        tasks.spawn("node-shutdown", shutdown::keep(upkeep.clone(), self.hurry.clone()));
        tasks.spawn("eviction", eviction::keep(upkeep.clone(), self.hurry.clone()));
        tasks.spawn("cpusets", reconcile::keep(upkeep.clone(), own.managers.clone()));
        tasks.spawn("local-storage", local_storage::keep(upkeep.clone()));
        tasks.spawn("image-gc", image_gc::keep(upkeep.clone()));
        tasks.spawn("log-rotation", log_rotation::keep(upkeep));
        let mirrors = mirrors::keep(own.node.clone(), own.api.clone(), set.clone());
        tasks.spawn("mirrors", mirrors);
        tasks.spawn("runtime-events", follow_runtime(own.runtime.clone(), set.clone()));
        let signals = set.signals.clone();
        let own_pods = own.node.config.own_pods.clone();
        if let Some(path) = own.node.config.pod_manifest_path.clone() {
            let (statics, name) = (signals.clone(), own.node.config.node_name.clone());
            let told = move |pods| {
                statics.statics(Source::File, static_pods::with_own(pods, &own_pods));
            };
            tasks.spawn("manifests", static_pods::watch(path, name, told));
        } else if !own_pods.is_empty() {
            let own = static_pods::with_own(BTreeMap::new(), &own_pods);
            signals.statics(Source::File, own);
        }
        if let Some(server) = own.node.config.manifest_url.clone() {
            let (statics, name) = (signals.clone(), own.node.config.node_name.clone());
            let period = own.node.config.manifest_url_check;
            let asked = manifest_url::follow(server, period, name, move |pods| {
                statics.statics(Source::Http, pods);
            });
            tasks.spawn("manifest-url", asked);
        }
        tasks.spawn("api-pods", async move {
            // Admission checks the node's labels: they must be known first.
            nodes.synced().await;
            let (keys, pods) = (signals.clone(), &own.api.pods);
            pods.subscribe_raw(move |event| keys.api(event.entry().header.key.clone()));
            pods.synced().await;
            signals.synced();
            // The subscription ends with the informer, which belongs to the same group.
            std::future::pending::<()>().await;
        });
    }

    /// Follows CSI and DRA drivers that register and unregister; pods may wait for them.
    pub fn follow_drivers(&self) {
        let (tasks, own, set) = (&self.tasks, self.workers.clone(), self.pods.clone());
        let csi = own.volumes.csi.clone();
        tasks.spawn("csi-node", csi::node::keep(csi.clone()));
        let plugins = Plugins {
            csi: csi.clone(),
            devices: own.devices.clone(),
            device_plugins: own.device_plugins.clone(),
        };
        tasks.spawn("plugins", watch_registry(plugins, tasks.clone()));
        tasks.spawn("device-slices", dra::keep_slices(own.devices.clone()));
        self.follow_device_plugins();
        let mut changed = csi.changed.subscribe();
        tasks.spawn("drivers", async move {
            own.api.pods.synced().await;
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
    fn follow_device_plugins(&self) {
        let (tasks, own, set) = (&self.tasks, self.workers.clone(), self.pods.clone());
        let serving = device_plugins::serve(own.device_plugins.clone(), tasks.stop_signal());
        tasks.spawn("device-plugin-registration", serving);
        let source = pod_resources::Source {
            pods: set.clone(),
            devices: own.devices.clone(),
            device_plugins: own.device_plugins.clone(),
            managers: own.managers.clone(),
            counts: self.pod_resources.clone(),
            limit: pod_resources::limit(),
        };
        let root = own.node.config.root_dir.clone();
        let serving = pod_resources::serve(root, source, tasks.stop_signal());
        tasks.spawn("pod-resources", serving);
        let mut changed = own.device_plugins.changed.subscribe();
        tasks.spawn("device-health", async move {
            while changed.changed().await.is_ok() {
                for pod in own.device_plugins.pods() {
                    set.wake(Some(&pod));
                }
            }
        });
    }
}

fn new_resolver(resolv_conf: &Path) -> Resolver {
    Resolver::parse(&std::fs::read_to_string(resolv_conf).unwrap_or_default())
}

fn new_cgroups(node: &ThisNode) -> Result<Cgroups, Error> {
    let (config, machine) = (&node.config, &node.machine);
    let layout = Layout::of_this_machine();
    if config.fails_on_cgroup_v1 && !matches!(layout, Layout::V2(_)) {
        return Err(Error::CgroupV1);
    }
    let cgroups = Cgroups::new(layout, &config.cgroup_root, config.cgroups_per_qos)
        .driven_by(config.cgroup_driver)
        .with(config.limits, machine);
    let capacity = capacity(config, machine);
    reserve::check(config, machine, &capacity)?;
    cgroups.prepare(&reserve::of_pods(config, &capacity));
    reserve::enforce_existing(config, &cgroups)?;
    Ok(cgroups)
}

/// CPUs, memory and topology of containers, with the node's reservations.
fn new_managers(node: &ThisNode) -> Result<Managers, Error> {
    let (config, machine) = (&node.config, &node.machine);
    let capacity = u64::try_from(machine.memory).unwrap_or_default();
    let mut memory: BTreeMap<String, u64> = BTreeMap::new();
    let huge = machine.hardware.huge_pages().into_keys().map(huge_page_resource);
    for resource in huge.chain(["memory".to_owned()]) {
        let kept = u64::try_from(config.reserve.of(&resource)).unwrap_or_default();
        let free = match resource.as_str() {
            "memory" => config.eviction.hard(Signal::Memory, capacity),
            _ => 0,
        };
        memory.insert(resource, kept + free);
    }
    let milli_cpu = config.reserve.of("cpu");
    let reserved = Reserved { cpus: config.reserve.cpus.clone(), milli_cpu, memory };
    Ok(Managers::open(&config.managers, &machine.hardware, &reserved, &config.root_dir)?)
}

fn new_host(
    node: &ThisNode,
    client: &Client,
    events: &Events,
    informers: &Informers,
    hurry: Arc<Notify>,
) -> Host {
    let (root, may_mount) = (node.config.root_dir.clone(), node.config.may_mount);
    let node_name = node.config.node_name.clone();
    let setting = csi::Setting { node_name: node_name.clone(), root: root.clone() };
    let host = Host {
        client: client.clone(),
        events: events.clone(),
        objects: Arc::new(Objects::new(client.clone())),
        csi: Arc::new(Csi::new(client.clone(), setting, informers.of(), hurry)),
        turns: Turns::default(),
        node_name,
        root,
        may_mount,
    };
    volumes::recover(&host);
    host
}

/// Configures the runtime's pod network, and reports whether it is ready.
pub async fn set_up_network(
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
                let (kind, reason) = (cri::NETWORK_READY, &condition.reason);
                format!("{kind}=false reason:{reason} message:{}", condition.message)
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

/// Unprepares the claims of pods that were deleted while no kubelet ran.
async fn give_back_devices(workers: &worker::Context, set: &PodSet) {
    let known: BTreeSet<String> = {
        let all = workers.api.pods.lister().list(None, &Selector::everything());
        let bound = all.iter().map(|pod| names::uid(pod).to_string());
        let views = set.views().into_iter().filter_map(|view| view.pod);
        bound.chain(views.map(|pod| names::uid(&pod).to_string())).collect()
    };
    for pod in workers.devices.pods().difference(&known) {
        if let Err(error) = workers.devices.give_back(pod).await {
            tracing::warn!(pod, %error, "failed to unprepare the claims of a deleted pod");
        }
    }
}

/// Wakes workers when the runtime reports events.
async fn follow_runtime(runtime: Arc<dyn cri::Runtime>, set: Arc<PodSet>) {
    let mut is_away = false;
    loop {
        match runtime.events().await {
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
                let error = relist::follow(&*runtime, &set).await;
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
