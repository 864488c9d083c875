//! Device plugins: programs that provide devices of this node and set containers up to use them.
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
//! Invariants: the record is written before a container starts; a replaced plugin has no effect any
//! more; a call to one plugin blocks no other.
//! A pod that was deleted from the API keeps its devices until its containers have ended. The next pod
//! waits for that, up to a limit. Upstream frees the devices at once.
//! With a topology policy, the NUMA nodes of devices are hints (`managers/`), and near devices are taken first.
//! Upstream: `pkg/kubelet/cm/devicemanager`. Among equal devices, those with the lowest names are taken.

mod allocate;
mod counts;
mod error;
mod messages;
mod plugin;
mod record;
mod registration;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::task::Tasks;
use k8s_openapi::api::core::v1::{Pod, PodStatus, ResourceHealth, ResourceStatus};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use crate::config::Config;
pub use allocate::Extras;
use counts::Counts;
pub use error::DevicePluginError;
use messages::Device;
use plugin::Plugin;
pub use registration::{Registered, serve};
pub use table::{Amounts, NO_NODE};
use table::{News, Table};

/// The lists of one plugin update the node's status at most once in this time.
const HURRY_PAUSE: Duration = Duration::from_secs(1);

pub struct DevicePlugins {
    /// The directory of sockets and the record.
    dir: PathBuf,
    /// Held for look-ups and while the file is written, never across await.
    state: Mutex<State>,
    /// Notified when the node's status must be updated.
    hurry: Arc<Notify>,
    /// Notified when the health of an allocated device changed.
    pub changed: watch::Sender<()>,
    /// Notified when devices became free, or when a pod is to keep its devices.
    freed: watch::Sender<()>,
    pub counts: Counts,
    /// No kubelet kept a record here before.
    pub is_new: bool,
    /// The machine's NUMA nodes.
    nodes: Vec<usize>,
    tasks: Tasks,
}

struct State {
    table: Table,
    /// By resource; stopped plugins stay until their resource is removed.
    plugins: BTreeMap<String, Arc<Plugin>>,
    /// Pods that are terminating as far as is known: their devices become free soon.
    unwanted: BTreeSet<String>,
}

/// A device, with its NUMA nodes.
pub struct DeviceInfo {
    pub resource: String,
    pub id: String,
    pub nodes: Vec<i64>,
}

impl DevicePlugins {
    pub fn new(config: &Config, hurry: Arc<Notify>, tasks: &Tasks) -> Self {
        let dir = config.root_dir.join("device-plugins");
        let is_new = !record::exists(&dir);
        let table = record::read(&dir, Instant::now());
        let unwanted = table.pods().keys().cloned().collect();
        Self {
            dir,
            state: Mutex::new(State { table, plugins: BTreeMap::new(), unwanted }),
            hurry,
            changed: watch::channel(()).0,
            freed: watch::channel(()).0,
            counts: Counts::default(),
            is_new,
            nodes: vec![],
            tasks: tasks.clone(),
        }
    }

    /// On a machine with these NUMA nodes.
    pub fn with_nodes(self, nodes: impl Iterator<Item = usize>) -> Self {
        Self { nodes: nodes.collect(), ..self }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    /// If this fails and the kubelet restarts before the next write, pods lose their devices.
    fn save(&self, state: &State) {
        if let Err(error) = record::write(&self.dir, &state.table) {
            tracing::error!(dir = %self.dir.display(), %error, "failed to record the devices of pods");
        }
    }

    /// Connects to a plugin, which provides this resource from now on.
    async fn connect(
        self: &Arc<Self>,
        resource: &str,
        socket: PathBuf,
    ) -> Result<Arc<Plugin>, DevicePluginError> {
        let plugin = Arc::new(plugin::connect(&socket).await?);
        {
            let mut state = self.state();
            state.table.connected(resource);
            if let Some(old) = state.plugins.insert(resource.to_owned(), plugin.clone()) {
                old.replaced.notify_one();
            }
        }
        tracing::info!(resource, socket = %socket.display(), "registered the device plugin");
        let (own, resource, followed) = (self.clone(), resource.to_owned(), plugin.clone());
        self.tasks.spawn("device-plugin", async move {
            tokio::select! {
                biased;
                () = followed.replaced.notified() => {}
                why = own.follow(&resource, &followed) => {
                    tracing::warn!(resource, error = why, "the device plugin stopped");
                    own.disconnect(&resource, &followed);
                }
            }
        });
        Ok(plugin)
    }

    /// Follows the plugin's ListAndWatch stream; returns why it ended.
    async fn follow(&self, resource: &str, plugin: &Arc<Plugin>) -> String {
        let mut stream = match plugin.list_and_watch().await {
            Ok(stream) => stream,
            Err(error) => return error.to_string(),
        };
        // The earliest time at which the node's status may be updated, and the time at which it must be.
        let (mut rested, mut due) = (Instant::now(), None);
        loop {
            let message = tokio::select! {
                message = stream.message() => message,
                () = sleep_until(due.unwrap_or(rested)), if due.is_some() => {
                    self.hurry.notify_one();
                    (rested, due) = (Instant::now() + HURRY_PAUSE, None);
                    continue;
                }
            };
            match message {
                Ok(Some(listed)) => {
                    if self.listed(resource, plugin, listed.devices) {
                        due = Some(rested);
                    }
                }
                Ok(None) => return "EOF".into(),
                Err(status) => return plugin.error(&status).to_string(),
            }
        }
    }

    /// True if the node's amounts changed.
    fn listed(&self, resource: &str, plugin: &Arc<Plugin>, devices: Vec<Device>) -> bool {
        let mut state = self.state();
        // A stopped plugin's last list may arrive late.
        if !state.has(resource, plugin) || state.table.is_stopped(resource) {
            return false;
        }
        let count = devices.len();
        let News { record, amounts, health } = state.table.listed(resource, devices);
        if record {
            self.save(&state);
        }
        drop(state);
        if record || amounts {
            tracing::info!(resource, devices = count, "the device plugin listed its devices");
        }
        if health {
            self.changed.send_replace(());
        }
        amounts
    }

    /// Removes the plugin, unless another one has replaced it.
    fn disconnect(&self, resource: &str, plugin: &Arc<Plugin>) {
        let mut state = self.state();
        if state.has(resource, plugin) {
            state.table.stopped(resource, Instant::now());
            plugin.replaced.notify_one();
            self.hurry.notify_one();
        }
    }

    /// The node's amounts of all plugin resources.
    pub fn amounts(&self) -> Amounts {
        let mut state = self.state();
        let (amounts, has_gone) = state.table.amounts(Instant::now());
        if has_gone {
            let State { table, plugins, .. } = &mut *state;
            let counting = table.registered();
            plugins.retain(|resource, _| counting.contains_key(resource));
            self.save(&state);
        }
        amounts
    }

    /// Records that the node's status says 0 of these resources, so that they are not reported again.
    pub fn told(&self, is_none: impl Fn(&str) -> bool) {
        self.state().table.told(is_none);
    }

    /// Whether device plugins provide this resource.
    pub fn is_known(&self, resource: &str) -> bool {
        self.state().table.is_known(resource)
    }

    /// The pods that hold devices.
    pub fn pods(&self) -> BTreeSet<String> {
        self.state().table.pods().keys().cloned().collect()
    }

    /// Whether each container of the pod has all the devices that it requests.
    pub fn has_all(&self, pod: &Pod) -> bool {
        self.state().has_all(pod)
    }

    /// Marks a pod as wanted, or as terminating: then its devices become free.
    pub fn want(&self, pod: &str, is_wanted: bool) {
        let mut state = self.state();
        let is_news = match is_wanted {
            true => state.unwanted.remove(pod),
            false => state.table.pods().contains_key(pod) && state.unwanted.insert(pod.to_owned()),
        };
        drop(state);
        if is_news {
            self.freed.send_replace(());
        }
    }

    /// Frees the devices of a pod that has ended.
    pub fn forget(&self, pod: &str) {
        let mut state = self.state();
        state.unwanted.remove(pod);
        if state.table.forget(pod) {
            self.save(&state);
            drop(state);
            self.freed.send_replace(());
        }
    }

    /// Frees the devices of all pods but these.
    pub fn keep_only(&self, pods: &BTreeSet<String>) {
        let mut state = self.state();
        state.unwanted.retain(|uid| pods.contains(uid));
        if state.table.keep_only(pods) {
            self.save(&state);
            drop(state);
            self.freed.send_replace(());
        }
    }

    /// Writes the health of allocated devices into `status`; a pod that has freed its devices keeps those
    /// of `before`. Upstream: `UpdateAllocatedResourcesStatus`.
    pub fn tell(&self, pod: &str, before: &PodStatus, status: &mut PodStatus) {
        let state = self.state();
        let is_forgotten = !state.table.pods().contains_key(pod);
        for container in status.container_statuses.iter_mut().flatten() {
            if is_forgotten {
                let mut all = before.container_statuses.iter().flatten();
                let old = all.find(|old| old.name == container.name);
                let told = old.and_then(|old| old.allocated_resources_status.clone());
                container.allocated_resources_status = told;
                continue;
            }
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
    pub fn of_container(&self, pod: &str, container: &str) -> Vec<DeviceInfo> {
        let mut all: BTreeMap<(String, String), Vec<i64>> = BTreeMap::new();
        let state = self.state();
        // A device whose plugin has not answered yet is not allocated.
        let given = state.table.of_container(pod, container);
        for (resource, given) in given.filter(|(_, given)| given.answer.is_some()) {
            for (node, ids) in &given.devices {
                for id in ids {
                    let nodes = all.entry((resource.clone(), id.clone())).or_default();
                    nodes.extend(Some(*node).filter(|node| *node != NO_NODE));
                }
            }
        }
        let told =
            all.into_iter().map(|((resource, id), nodes)| DeviceInfo { resource, id, nodes });
        told.collect()
    }

    /// All healthy devices, allocated or not.
    pub fn healthy(&self) -> Vec<DeviceInfo> {
        let state = self.state();
        let all = state.table.healthy().into_iter().map(|(resource, id, device)| DeviceInfo {
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::messages::{Allocated, HEALTHY};
    use super::*;

    const RES: &str = "example.com/dongle";
    const OTHER: &str = "example.com/other";

    fn devices(ids: &[&str]) -> Vec<Device> {
        let one = |id: &&str| Device { id: id.to_string(), health: HEALTHY.into(), topology: None };
        ids.iter().map(one).collect()
    }

    fn pod(uid: &str, asks: &[&str]) -> Pod {
        let limits: serde_json::Map<_, _> =
            asks.iter().map(|name| (name.to_string(), json!("1"))).collect();
        let container = json!({"name": "x", "resources": {"limits": limits}});
        serde_json::from_value(json!({"metadata": {"name": uid, "uid": uid},
            "spec": {"containers": [container]}}))
        .expect("a pod")
    }

    struct Bench {
        plugins: Arc<DevicePlugins>,
        hurry: Arc<Notify>,
        dir: tempfile::TempDir,
    }

    impl Bench {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            let hurry = Arc::new(Notify::new());
            let config = Config::new("n1", dir.path().into());
            std::fs::create_dir_all(config.root_dir.join("device-plugins")).expect("made");
            let plugins = DevicePlugins::new(&config, hurry.clone(), &Tasks::new("test"));
            Self { plugins: Arc::new(plugins), hurry, dir }
        }

        /// A plugin whose list is not followed.
        fn plugin(&self, resource: &str, pre_start_required: bool) -> Arc<Plugin> {
            let socket = self.dir.path().join("x.sock");
            let options = messages::Options { pre_start_required, ..messages::Options::default() };
            let plugin = Arc::new(plugin::unasked(&socket, options).expect("a path"));
            let mut state = self.plugins.state();
            state.table.connected(resource);
            state.plugins.insert(resource.to_owned(), plugin.clone());
            plugin
        }

        fn gives(&self, pod: &Pod, resource: &str) {
            let mut state = self.plugins.state();
            state.table.take(pod, "x", resource, 1, &[]).expect("room");
            let uid = crate::names::uid(pod);
            state.table.answered(uid, "x", resource, Some(Allocated::default()));
        }

        fn record(&self) -> Option<std::time::SystemTime> {
            let file = self.plugins.dir.join(record::FILE);
            let meta = std::fs::metadata(&file).ok()?;
            std::fs::remove_file(file).expect("removed");
            meta.modified().ok()
        }
    }

    #[tokio::test]
    async fn an_unchanged_list_changes_nothing() {
        let bench = Bench::new();
        let plugin = bench.plugin(RES, false);
        let check = |ids: &[&str], ill: bool, amounts: bool, saved: bool| {
            let mut all = devices(ids);
            if ill {
                all.push(Device { id: "ill".into(), ..Device::default() });
            }
            let found = bench.plugins.listed(RES, &plugin, all);
            assert_eq!((found, bench.record().is_some()), (amounts, saved), "{ids:?} {ill}");
        };
        check(&["a", "b"], false, true, true);
        check(&["a", "b"], false, false, false);
        check(&["a", "c"], false, false, true);
        check(&["a", "c"], true, true, false);
        check(&[], false, true, true);
    }

    #[tokio::test]
    async fn a_stopped_plugin_has_no_effect() {
        let bench = Bench::new();
        let plugin = bench.plugin(RES, false);
        assert!(bench.plugins.listed(RES, &plugin, devices(&["a"])));
        bench.plugins.disconnect(RES, &plugin);
        bench.hurry.notified().await;
        assert!(!bench.plugins.listed(RES, &plugin, devices(&["a"])));
        let amounts = bench.plugins.amounts();
        assert_eq!((amounts.capacity[RES], amounts.allocatable[RES]), (1, 0));
    }

    #[tokio::test]
    async fn pre_start_needs_the_plugin() {
        let bench = Bench::new();
        let owner = pod("1", &[RES]);
        let plugin = bench.plugin(RES, true);
        bench.plugins.listed(RES, &plugin, devices(&["a"]));
        bench.gives(&owner, RES);
        let container = &owner.spec.as_ref().expect("a spec").containers[0];
        bench.plugins.disconnect(RES, &plugin);
        let stopped = bench.plugins.extras(&owner, container).await.expect_err("it stopped");
        let why = DevicePluginError::Stopped(RES.to_owned());
        assert_eq!(stopped, DevicePluginError::PreStart(Box::new(why)));
        {
            let mut state = bench.plugins.state();
            state.plugins.clear();
        }
        assert_eq!(bench.plugins.extras(&owner, container).await, Ok(Extras::default()));
        bench.plugins.state().table.amounts(Instant::now() + Duration::from_secs(301));
        let gone = bench.plugins.extras(&owner, container).await.expect_err("it is gone");
        assert_eq!(gone, DevicePluginError::NoEndpoint(RES.to_owned()));
    }

    #[tokio::test]
    async fn some_devices_are_not_all() {
        let bench = Bench::new();
        for resource in [RES, OTHER] {
            let plugin = bench.plugin(resource, false);
            bench.plugins.listed(resource, &plugin, devices(&["a", "b"]));
        }
        let owner = pod("1", &[RES, OTHER]);
        assert!(!bench.plugins.has_all(&owner));
        bench.gives(&owner, RES);
        assert!(!bench.plugins.has_all(&owner));
        bench.plugins.state().table.take(&owner, "x", OTHER, 1, &[]).expect("room");
        assert!(!bench.plugins.has_all(&owner), "its plugin is being asked");
        let shown: Vec<String> =
            bench.plugins.of_container("1", "x").into_iter().map(|one| one.resource).collect();
        assert_eq!(shown, [RES]);
        bench.plugins.state().table.answered("1", "x", OTHER, Some(Allocated::default()));
        assert!(bench.plugins.has_all(&owner));
        let mut state = bench.plugins.state();
        state.table.answered("1", "x", OTHER, None);
        state.table.answered("1", "x", RES, None);
        assert!(state.table.pods().is_empty());
    }

    #[tokio::test]
    async fn freed_devices_stay_in_the_status() {
        let bench = Bench::new();
        let plugin = bench.plugin(RES, false);
        bench.plugins.listed(RES, &plugin, devices(&["a"]));
        bench.gives(&pod("1", &[RES]), RES);
        let bare: PodStatus = serde_json::from_value(
            json!({"containerStatuses": [{"name": "x", "image": "", "imageID": "",
                "ready": false, "restartCount": 0}]}),
        )
        .expect("a status");
        let mut told = bare.clone();
        bench.plugins.tell("1", &bare, &mut told);
        assert_ne!(told, bare);
        bench.plugins.forget("1");
        let mut after = bare.clone();
        bench.plugins.tell("1", &told, &mut after);
        assert_eq!(after, told);
    }
}
