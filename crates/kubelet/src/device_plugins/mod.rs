//! Device plugins: programs that have devices of this node and say what containers need to use them.
//!
//! ```text
//!  device-plugins/kubelet.sock ◄─ Register ── plugin          (or plugins_registry/*.sock)
//!      └─► connect ─► ListAndWatch ─► table ─► status.capacity, status.allocatable
//!                                      ▲ │
//!  pod worker, before all else: choose ┘ └─► kubelet_internal_checkpoint
//!      └─► GetPreferredAllocation, Allocate: refused ─► the pod fails
//!  pod worker, container: PreStartContainer ─► env, mounts, devices, annotations, CDI devices
//!  pod worker, all stopped: devices are free again
//! ```
//!
//! In: sockets, pods. Out: devices for containers, amounts for the node, the record on the disk.
//! Invariants: the record is written before a container starts; a plugin that another one replaced
//! changes nothing any more; while a plugin is asked nobody else waits.
//! Upstream: `pkg/kubelet/cm/devicemanager`. Deviation: NUMA nodes are told, not chosen by: there is no
//! topology manager. Of devices that are as good as others those with the least names are taken.

mod allocate;
mod counts;
mod messages;
mod plugin;
mod record;
mod registration;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use base::task::Tasks;
use k8s_openapi::api::core::v1::{PodStatus, ResourceHealth, ResourceStatus};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::config::Config;
pub use allocate::{Extras, REFUSED};
use counts::Counts;
use messages::Device;
use plugin::Plugin;
pub use registration::{Registered, serve};
use table::Table;
pub use table::{Amounts, NO_NODE};

pub struct DevicePlugins {
    /// Where sockets and the record are.
    dir: PathBuf,
    /// Held for look-ups and to write the file, never across await.
    state: Mutex<State>,
    /// Told when the node's status has to be written.
    hurry: Arc<Notify>,
    /// Told when the health of a device that a pod has changed.
    pub changed: watch::Sender<()>,
    pub counts: Counts,
    /// No kubelet kept a record here before.
    pub is_new: bool,
    tasks: Tasks,
}

struct State {
    table: Table,
    /// By resource; those that stopped stay until the resource counts no more.
    plugins: BTreeMap<String, Arc<Plugin>>,
}

/// A device of a container, or of the node.
pub struct Told {
    pub resource: String,
    pub id: String,
    pub nodes: Vec<i64>,
}

impl DevicePlugins {
    pub fn new(config: &Config, hurry: Arc<Notify>, tasks: &Tasks) -> Self {
        let dir = config.root_dir.join("device-plugins");
        let is_new = !record::exists(&dir);
        let table = record::read(&dir, Instant::now());
        Self {
            dir,
            state: Mutex::new(State { table, plugins: BTreeMap::new() }),
            hurry,
            changed: watch::channel(()).0,
            counts: Counts::default(),
            is_new,
            tasks: tasks.clone(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    /// A record that is not written costs the devices of pods if the kubelet ends before the next one.
    fn save(&self, state: &State) {
        if let Err(error) = record::write(&self.dir, &state.table) {
            tracing::error!(dir = %self.dir.display(), %error, "devices of pods are not recorded");
        }
    }

    /// A plugin that can be asked has this resource from now on.
    async fn connect(
        self: &Arc<Self>,
        resource: &str,
        socket: PathBuf,
    ) -> Result<Arc<Plugin>, String> {
        let plugin = Arc::new(plugin::connect(&socket).await?);
        {
            let mut state = self.state();
            state.table.connected(resource);
            if let Some(old) = state.plugins.insert(resource.to_owned(), plugin.clone()) {
                old.replaced.notify_one();
            }
        }
        tracing::info!(resource, socket = %socket.display(), "a device plugin registered");
        let (own, resource, followed) = (self.clone(), resource.to_owned(), plugin.clone());
        self.tasks.spawn("device-plugin", async move {
            tokio::select! {
                () = followed.replaced.notified() => {}
                why = own.follow(&resource, &followed) => {
                    tracing::warn!(resource, error = why, "a device plugin stopped");
                    own.disconnect(&resource, &followed);
                }
            }
        });
        Ok(plugin)
    }

    /// Hears what a plugin has; ends with it, and says why.
    async fn follow(&self, resource: &str, plugin: &Arc<Plugin>) -> String {
        let mut stream = match plugin.list_and_watch().await {
            Ok(stream) => stream,
            Err(error) => return error.to_string(),
        };
        loop {
            match stream.message().await {
                Ok(Some(listed)) => self.listed(resource, plugin, listed.devices),
                Ok(None) => return "EOF".into(),
                Err(status) => return plugin.error(&status).to_string(),
            }
        }
    }

    fn listed(&self, resource: &str, plugin: &Arc<Plugin>, devices: Vec<Device>) {
        let mut state = self.state();
        if !state.has(resource, plugin) {
            return;
        }
        tracing::info!(resource, devices = devices.len(), "a device plugin says what it has");
        let is_news_for_pods = state.table.listed(resource, devices);
        self.save(&state);
        drop(state);
        self.hurry.notify_one();
        if is_news_for_pods {
            self.changed.send_replace(());
        }
    }

    /// The plugin is gone, unless another one took its place already.
    fn disconnect(&self, resource: &str, plugin: &Arc<Plugin>) {
        let mut state = self.state();
        if state.has(resource, plugin) {
            state.table.stopped(resource, Instant::now());
            plugin.replaced.notify_one();
            self.hurry.notify_one();
        }
    }

    /// What the node has of all this.
    pub fn amounts(&self) -> Amounts {
        let mut state = self.state();
        let (amounts, has_gone) = state.table.amounts(Instant::now());
        if has_gone {
            let State { table, plugins } = &mut *state;
            let counting = table.registered();
            plugins.retain(|resource, _| counting.contains_key(resource));
            self.save(&state);
        }
        amounts
    }

    /// Do plugins decide who has this resource?
    pub fn is_known(&self, resource: &str) -> bool {
        self.state().table.is_known(resource)
    }

    /// The pods that have devices.
    pub fn pods(&self) -> BTreeSet<String> {
        self.state().table.pods().keys().cloned().collect()
    }

    /// A pod is over.
    pub fn forget(&self, pod: &str) {
        let mut state = self.state();
        if state.table.forget(pod) {
            self.save(&state);
        }
    }

    /// All pods but these are over.
    pub fn keep_only(&self, pods: &BTreeSet<String>) {
        let mut state = self.state();
        if state.table.keep_only(pods) {
            self.save(&state);
        }
    }

    /// How the devices of containers are. Upstream: `UpdateAllocatedResourcesStatus`.
    pub fn tell(&self, pod: &str, status: &mut PodStatus) {
        let state = self.state();
        for container in status.container_statuses.iter_mut().flatten() {
            let all = state.table.of_container(pod, &container.name);
            let one = |resource: &str, id: String| ResourceHealth {
                health: Some(match state.table.is_healthy(resource, &id) {
                    true => "Healthy".into(),
                    false => "Unhealthy".into(),
                }),
                resource_id: id,
                ..ResourceHealth::default()
            };
            let told = all.map(|(resource, given)| ResourceStatus {
                name: resource.clone(),
                resources: Some(given.ids().into_iter().map(|id| one(resource, id)).collect()),
            });
            let told: Vec<_> = told.collect();
            if !told.is_empty() {
                container.allocated_resources_status = Some(told);
            }
        }
    }

    /// The devices of one container.
    pub fn of_container(&self, pod: &str, container: &str) -> Vec<Told> {
        let mut all: BTreeMap<(String, String), Vec<i64>> = BTreeMap::new();
        for (resource, given) in self.state().table.of_container(pod, container) {
            for (node, ids) in &given.devices {
                for id in ids {
                    let nodes = all.entry((resource.clone(), id.clone())).or_default();
                    nodes.extend(Some(*node).filter(|node| *node != NO_NODE));
                }
            }
        }
        let told = all.into_iter().map(|((resource, id), nodes)| Told { resource, id, nodes });
        told.collect()
    }

    /// All that could be given out, given out or not.
    pub fn healthy(&self) -> Vec<Told> {
        let state = self.state();
        let all = state.table.healthy().into_iter().map(|(resource, id, device)| Told {
            resource: resource.clone(),
            id: id.clone(),
            nodes: device.nodes.clone(),
        });
        all.collect()
    }
}

impl State {
    fn has(&self, resource: &str, plugin: &Arc<Plugin>) -> bool {
        self.plugins.get(resource).is_some_and(|known| Arc::ptr_eq(known, plugin))
    }
}
