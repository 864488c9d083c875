//! The embedded backend: runs containers with shims of this binary, without another program.
//!
//! The in-memory [`Table`] is a copy of the state on disk and in shims. [`Embedded::open`] restores
//! it: it finds living shims, and containers that ended meanwhile.
//!
//! ```text
//!  create: files, overlay ─► Created ─start: shim─► Running ─exit.json─► Exited ─remove─► gone
//!                               └────── the start failed: StartError ──────┘
//! ```
//!
//! As in containerd, only files exist before the start, so a wrong command is an error of the start.
//!
//! Invariant: a container's phase changes to Exited only after its `exit.json` is on disk.

mod adopt;
mod containers;
mod networks;
mod sandboxes;
mod stats;
mod streaming;

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use base::task::Tasks;
use cri::*;
use ipnet::IpNet;
use tokio::sync::{broadcast, oneshot, watch};

use crate::apparmor::AppArmor;
use crate::cgroups::Hierarchies;
use crate::cni::{Cni, CniConfig};
use crate::host_ports::HostPorts;
use crate::images::pull::Puller;
use crate::images::store::{ImageRecord, ImageStore};
use crate::ipam::Ipam;
use crate::layout::{self, Layout, run_dir};
use crate::machine;
use crate::network::NetworkState;
use crate::program::Program;
use containers::ContainerEntry;
use sandboxes::SandboxEntry;

pub const NAME: &str = "decapod";
const EVENTS: usize = 1024;
/// Bit of `CapEff`.
const CAP_SYS_RESOURCE: u32 = 24;

/// The configuration of one node's runtime. Several runtimes can share a machine when data
/// directory, cgroup root and bridge differ.
#[derive(Clone, Debug)]
pub struct Config {
    pub data_dir: PathBuf,
    pub run_dir: PathBuf,
    /// The shims' own cgroup is `<cgroup_root>/shims`. The kubelet names the pods' cgroups.
    pub cgroup_root: String,
    /// At most 15 bytes.
    pub bridge: String,
    pub mtu: u32,
    /// Service CIDRs. A node without a default route reaches them through the bridge.
    pub service_cidrs: Vec<ipnet::IpNet>,
    /// The program to start as a shim.
    pub executable: PathBuf,
    pub cni: CniConfig,
    /// Places of `registries.yaml`, in k3s' format. Each pull reads the first file that exists.
    pub registries: Vec<PathBuf>,
}

impl Config {
    /// The configuration for the cluster with this data directory. Bridge and cgroup have fixed
    /// names for the default directory and derived names for any other.
    pub fn of_cluster(cluster: &Path) -> Self {
        let mut config = Self::new(cluster.join("runtime"));
        if cluster != Path::new(layout::DEFAULT_CLUSTER) {
            let hash = config.run_dir.file_name().map(|name| name.to_string_lossy().into_owned());
            let hash = hash.unwrap_or_default();
            config.bridge = format!("deca{}", hash.get(..8).unwrap_or(&hash));
            config.cgroup_root = format!("/decapod-{hash}");
        }
        config
    }

    /// `data_dir` is the runtime's own directory, below the cluster's.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        let data_dir = data_dir.into();
        Self {
            run_dir: run_dir(&data_dir),
            data_dir,
            cgroup_root: "/decapod".into(),
            bridge: "decapod0".into(),
            mtu: 1500,
            service_cidrs: vec![],
            executable: "/proc/self/exe".into(),
            cni: CniConfig::off(),
            registries: vec![],
        }
    }
}

/// Cheap to clone.
#[derive(Clone)]
pub struct Embedded(Arc<Inner>);

struct Inner {
    config: Config,
    layout: Layout,
    images: ImageStore,
    puller: Puller,
    ipam: Ipam,
    hierarchies: Hierarchies,
    lowest_oom_score: i64,
    /// The executable of the shims.
    program: Program,
    apparmor: AppArmor,
    /// Why overlayfs, and so a container's root, is unavailable here. The lock is held briefly.
    no_overlayfs: Mutex<Option<String>>,
    /// Guards the copy of the state on disk. The lock is held for look-ups and changes, never across await.
    table: Mutex<Table>,
    network: watch::Sender<NetworkState>,
    host_ports: HostPorts,
    cni: Cni,
    events: broadcast::Sender<ContainerEventResponse>,
    tasks: Tasks,
}

#[derive(Default)]
struct Table {
    sandboxes: BTreeMap<String, Arc<SandboxEntry>>,
    containers: BTreeMap<String, Arc<ContainerEntry>>,
}

impl Embedded {
    /// Restores the state on disk and takes over the running containers.
    pub async fn open(config: Config, tasks: Tasks) -> Result<Self> {
        let layout = Layout { data: config.data_dir.clone(), run: config.run_dir.clone() };
        for directory in [layout.sandboxes(), layout.containers(), layout.run.clone()] {
            std::fs::create_dir_all(directory)?;
        }
        let images = ImageStore::open(layout.images())?;
        let older = images.clone();
        blocking(move || older.name_layers_wholly()).await??;
        let known = NetworkState::read(&layout)?.unwrap_or_default();
        let network =
            NetworkState { cidrs: known.cidrs, bridge: config.bridge.clone(), mtu: config.mtu };
        // Written before the bridge is created: `destroy_all` reads the bridge's name here.
        network.write(&layout)?;
        let embedded = Self(Arc::new(Inner {
            puller: Puller::new(images.clone(), config.registries.clone()),
            ipam: Ipam::open(layout.ipam())?,
            hierarchies: Hierarchies::discover()?,
            lowest_oom_score: lowest_oom_score(),
            program: Program::open(&config.executable)?,
            apparmor: AppArmor::of_this_machine(),
            no_overlayfs: Mutex::default(),
            table: Mutex::default(),
            host_ports: HostPorts::new(&config.bridge),
            network: watch::Sender::new(network),
            cni: Cni::new(config.cni.clone()),
            events: broadcast::Sender::new(EVENTS),
            config,
            layout,
            images,
            tasks,
        }));
        net::modules::load(net::modules::PODS).await;
        if let Some(why) = embedded.look_for_overlayfs().await? {
            tracing::error!(%why, "no container can be started on this node");
        }
        embedded.adopt().await?;
        let following = embedded.clone().follow_cni(embedded.0.tasks.stop_signal());
        embedded.0.tasks.spawn("cni", following);
        embedded.0.tasks.spawn("cni-check", embedded.clone().check_attachments());
        Ok(embedded)
    }

    /// Whether CNI plugins, not the node's own network, connect new pods.
    pub fn plugins_in_use(&self) -> watch::Receiver<bool> {
        self.0.cni.in_use()
    }

    pub fn images(&self) -> &ImageStore {
        &self.0.images
    }

    /// Why overlayfs is unavailable, `None` when it works.
    async fn look_for_overlayfs(&self) -> Result<Option<String>> {
        let place = self.0.layout.data.clone();
        let checked = blocking(move || machine::check_overlayfs(&place)).await?;
        let why = checked.err().map(|error| error.to_string());
        self.no_overlayfs().clone_from(&why);
        Ok(why)
    }

    fn no_overlayfs(&self) -> MutexGuard<'_, Option<String>> {
        self.0.no_overlayfs.lock().expect("no panic while the text is held")
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().expect("no panic while the table is held")
    }

    /// The verbose part of the runtime's status.
    fn settings(&self) -> BTreeMap<String, String> {
        let config = &self.0.config;
        let cidrs: Vec<String> =
            self.0.network.borrow().cidrs.iter().map(ToString::to_string).collect();
        let settings = serde_json::json!({
            "dataDir": config.data_dir,
            "runDir": config.run_dir,
            "cgroupRoot": config.cgroup_root,
            "cgroupV2": self.0.hierarchies.is_v2(),
            "bridge": config.bridge,
            "mtu": config.mtu,
            "podCIDRs": cidrs,
        });
        BTreeMap::from([("config".to_owned(), settings.to_string())])
    }

    fn places(&self, sandbox: &str) -> crate::sandbox::Places {
        crate::sandbox::Places::of(&self.0.layout, sandbox)
    }

    fn container(&self, id: &str) -> Result<Arc<ContainerEntry>> {
        let found = by_prefix(&self.table().containers, id);
        found.ok_or_else(|| Error::NotFound(format!("container {id:?} not found")))
    }

    fn sandbox(&self, id: &str) -> Result<Arc<SandboxEntry>> {
        let found = by_prefix(&self.table().sandboxes, id);
        found.ok_or_else(|| Error::NotFound(format!("sandbox {id:?} not found")))
    }

    /// Sends an event to the listeners. `id` is a container's or, as upstream, a sandbox's.
    fn tell(&self, kind: ContainerEventType, id: &str, sandbox: &str) {
        if self.0.events.receiver_count() == 0 {
            return;
        }
        let entry = self.table().sandboxes.get(sandbox).cloned();
        let statuses = self
            .containers_of(sandbox)
            .into_iter()
            .map(|container| self.status_of(&container))
            .collect();
        // The last listener may be gone.
        let _ = self.0.events.send(ContainerEventResponse {
            container_id: id.to_owned(),
            container_event_type: kind as i32,
            created_at: now_nanos(),
            pod_sandbox_status: entry.map(|entry| self.sandbox_status_of(&entry)),
            containers_statuses: statuses,
        });
    }

    /// Completes the work even if the caller is cancelled: a half-started container would have no owner.
    async fn uninterrupted<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = oneshot::channel();
        self.0.tasks.spawn(name, async move {
            // The caller may be gone.
            let _ = sender.send(work.await);
        });
        receiver.await.unwrap_or_else(|_| Err(Error::Unavailable("the runtime is stopping".into())))
    }
}

fn by_prefix<T: Clone>(all: &BTreeMap<String, T>, id: &str) -> Option<T> {
    if let Some(found) = all.get(id) {
        return Some(found.clone());
    }
    // Like crictl, accepts a prefix of an id if it is unique.
    let mut fitting = all.range(id.to_owned()..).take_while(|(key, _)| key.starts_with(id));
    match (id.is_empty(), fitting.next(), fitting.next()) {
        (false, Some((_, found)), None) => Some(found.clone()),
        _ => None,
    }
}

fn now_nanos() -> i64 {
    i64::try_from(base::clock::now().as_nanosecond()).unwrap_or(i64::MAX)
}

/// The lowest `oom_score_adj` that containers can get: without the capability the score can only rise.
fn lowest_oom_score() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    if mask >> CAP_SYS_RESOURCE & 1 == 1 {
        return -1000;
    }
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").ok();
    let own = own.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    tracing::warn!(
        lowest = own,
        "no CAP_SYS_RESOURCE: raising lower oom_score_adj values of containers"
    );
    own
}

fn selects(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(name, value)| labels.get(name) == Some(value))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| Error::Internal("a blocking task panicked".into()))
}

#[async_trait]
impl RuntimeService for Embedded {
    async fn version(&self) -> Result<VersionResponse> {
        Ok(VersionResponse {
            version: "0.1.0".into(),
            runtime_name: NAME.into(),
            runtime_version: env!("CARGO_PKG_VERSION").into(),
            runtime_api_version: "v1".into(),
        })
    }

    async fn status(&self, verbose: bool) -> Result<StatusResponse> {
        let condition = |kind: &str, status, reason: &str, message: &str| RuntimeCondition {
            r#type: kind.into(),
            status,
            reason: reason.into(),
            message: message.into(),
        };
        let network = self.network_condition().await;
        // Checked again: an administrator may have loaded the module.
        let missing = self.no_overlayfs().is_some();
        let runtime = match if missing { self.look_for_overlayfs().await? } else { None } {
            None => condition(RUNTIME_READY, true, "", ""),
            Some(why) => condition(RUNTIME_READY, false, "OverlayfsNotReady", &why),
        };
        let features = RuntimeHandlerFeatures {
            recursive_read_only_mounts: true,
            user_namespaces: crate::users::supported(),
        };
        Ok(StatusResponse {
            status: Some(RuntimeStatus { conditions: vec![runtime, network] }),
            info: if verbose { self.settings() } else { BTreeMap::new() },
            runtime_handlers: vec![RuntimeHandler {
                name: String::new(),
                features: Some(features),
            }],
            features: Some(RuntimeFeatures {
                supplemental_groups_policy: true,
                user_namespaces_host_network: false,
            }),
        })
    }

    async fn runtime_config(&self) -> Result<LinuxRuntimeConfiguration> {
        Ok(LinuxRuntimeConfiguration { cgroup_driver: CgroupDriver::Cgroupfs as i32 })
    }

    async fn update_runtime_config(&self, pod_cidr: &str) -> Result<()> {
        let parsed: std::result::Result<Vec<IpNet>, _> =
            pod_cidr.split(',').map(str::trim).filter(|c| !c.is_empty()).map(str::parse).collect();
        let cidrs =
            parsed.map_err(|_| Error::InvalidArgument(format!("invalid pod CIDR {pod_cidr:?}")))?;
        if cidrs.is_empty() {
            return Ok(());
        }
        let state = NetworkState { cidrs, ..self.0.network.borrow().clone() };
        self.prepare_network(&state).await?;
        if *self.0.network.borrow() == state {
            return Ok(());
        }
        state.write(&self.0.layout)?;
        self.0.network.send_replace(state);
        Ok(())
    }

    async fn run_pod_sandbox(&self, config: PodSandboxConfig, handler: &str) -> Result<String> {
        let work = self.clone().run_sandbox(config, handler.to_owned());
        self.uninterrupted("sandbox", work).await
    }

    async fn stop_pod_sandbox(&self, id: &str) -> Result<()> {
        self.stop_sandbox(id).await
    }

    async fn remove_pod_sandbox(&self, id: &str) -> Result<()> {
        self.remove_sandbox(id).await
    }

    async fn pod_sandbox_status(&self, id: &str) -> Result<PodSandboxStatus> {
        Ok(self.sandbox_status_of(&*self.sandbox(id)?))
    }

    async fn list_pod_sandbox(&self, filter: Option<PodSandboxFilter>) -> Result<Vec<PodSandbox>> {
        Ok(self.list_sandboxes(&filter.unwrap_or_default()))
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String> {
        let work = self.clone().create(sandbox_id.to_owned(), config, sandbox_config.clone());
        self.uninterrupted("create", work).await
    }

    async fn start_container(&self, id: &str) -> Result<()> {
        self.uninterrupted("start", self.clone().start(id.to_owned())).await
    }

    async fn stop_container(&self, id: &str, timeout: Duration) -> Result<()> {
        self.stop(id, timeout).await
    }

    async fn remove_container(&self, id: &str) -> Result<()> {
        self.remove(id).await
    }

    async fn list_containers(&self, filter: Option<ContainerFilter>) -> Result<Vec<Container>> {
        Ok(self.list(&filter.unwrap_or_default()))
    }

    async fn container_status(&self, id: &str) -> Result<ContainerStatus> {
        Ok(self.status_of(&*self.container(id)?))
    }

    async fn container_details(&self, id: &str) -> Result<ContainerDetails> {
        self.details_of(&*self.container(id)?)
    }

    async fn update_container_resources(
        &self,
        id: &str,
        resources: LinuxContainerResources,
    ) -> Result<()> {
        self.update_resources(id, resources).await
    }

    async fn reopen_container_log(&self, id: &str) -> Result<()> {
        self.reopen_log(id).await
    }

    async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout: Option<Duration>,
    ) -> Result<ExecSyncResponse> {
        self.run_exec_sync(id, command, timeout).await
    }

    async fn exec(&self, request: ExecRequest) -> Result<ExecStreams> {
        self.run_exec(request).await
    }

    async fn attach(&self, request: AttachRequest) -> Result<AttachStreams> {
        self.run_attach(request).await
    }

    async fn port_forward(&self, sandbox_id: &str, port: u16) -> Result<Io> {
        self.forward(sandbox_id, port).await
    }

    async fn container_stats(&self, id: &str) -> Result<ContainerStats> {
        self.stats_of(self.container(id)?).await
    }

    async fn list_container_stats(
        &self,
        filter: Option<ContainerStatsFilter>,
    ) -> Result<Vec<ContainerStats>> {
        self.list_stats(filter.unwrap_or_default()).await
    }

    async fn pod_sandbox_stats(&self, id: &str) -> Result<PodSandboxStats> {
        self.sandbox_stats_of(self.sandbox(id)?).await
    }

    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<PodSandboxStatsFilter>,
    ) -> Result<Vec<PodSandboxStats>> {
        self.list_sandbox_stats(filter.unwrap_or_default()).await
    }

    async fn events(&self) -> Result<Events> {
        Ok(self.0.events.subscribe())
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

#[async_trait]
impl ImageService for Embedded {
    async fn list_images(&self, filter: Option<ImageFilter>) -> Result<Vec<Image>> {
        let wanted = filter.and_then(|f| f.image).map(|spec| spec.image).unwrap_or_default();
        if wanted.is_empty() {
            return Ok(self.0.images.list()?.iter().map(describe).collect());
        }
        Ok(self.0.images.find(&wanted)?.iter().map(describe).collect())
    }

    async fn image_status(&self, image: &ImageSpec) -> Result<Option<Image>> {
        Ok(self.0.images.find(&image.image)?.as_ref().map(describe))
    }

    async fn pull_image(
        &self,
        image: &ImageSpec,
        auth: Option<AuthConfig>,
        _sandbox_config: Option<&PodSandboxConfig>,
    ) -> Result<String> {
        Ok(self.0.puller.pull(&image.image, auth).await?.id)
    }

    async fn remove_image(&self, image: &ImageSpec) -> Result<()> {
        let (images, reference) = (self.0.images.clone(), image.image.clone());
        blocking(move || images.remove(&reference)).await??;
        Ok(())
    }

    async fn image_fs_info(&self) -> Result<ImageFsInfoResponse> {
        let images = self.0.images.root().to_owned();
        let containers = self.0.layout.containers();
        blocking(move || {
            let usage = |path: &Path| {
                let (bytes, inodes) = crate::images::store::disk_usage(path);
                FilesystemUsage {
                    timestamp: now_nanos(),
                    fs_id: Some(FilesystemIdentifier { mountpoint: path.display().to_string() }),
                    used_bytes: Some(bytes.into()),
                    inodes_used: Some(inodes.into()),
                }
            };
            // Counts the containers' writable layers, not the mounts in them.
            let mut writable = FilesystemUsage {
                fs_id: Some(FilesystemIdentifier { mountpoint: containers.display().to_string() }),
                timestamp: now_nanos(),
                ..Default::default()
            };
            let (mut bytes, mut inodes) = (0, 0);
            for entry in std::fs::read_dir(&containers).into_iter().flatten().flatten() {
                let upper = crate::images::store::disk_usage(&entry.path().join("upper"));
                bytes += upper.0;
                inodes += upper.1;
            }
            writable.used_bytes = Some(bytes.into());
            writable.inodes_used = Some(inodes.into());
            ImageFsInfoResponse {
                image_filesystems: vec![usage(&images)],
                container_filesystems: vec![writable],
            }
        })
        .await
    }
}

fn describe(record: &ImageRecord) -> Image {
    let name = record.config.user.split(':').next().unwrap_or_default();
    let (uid, username) = match (name, name.parse::<i64>()) {
        ("", _) => (Some(0.into()), String::new()),
        (_, Ok(uid)) => (Some(uid.into()), String::new()),
        (name, Err(_)) => (None, name.to_owned()),
    };
    Image {
        id: record.id.clone(),
        repo_tags: record.tags.clone(),
        repo_digests: record.digests.clone(),
        size: record.size,
        uid,
        username,
        spec: None,
        pinned: record.pinned,
    }
}
