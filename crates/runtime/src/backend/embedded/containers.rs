//! Containers: create, start, stop, remove, list.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use cri::*;
use prost::Message;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::sandboxes::SandboxEntry;
use super::{Embedded, blocking, now_nanos, selects};
use crate::cdi;
use crate::files;
use crate::images::overlay;
use crate::images::store::{ImageRecord, ImageStore};
use crate::images::user::{self, Databases};
use crate::layout::new_id;
use crate::machine;
use crate::oci::{self, PidNamespace, PodFacts, Users};
use crate::shim::{Client, ExitRecord, ShimConfig, Started, Wait, spawn_shim};
use crate::users::Mappings;

/// How long a killed container may take to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);
/// A file beside `state.json`: the machine's boot id at the container's start.
pub(super) const STARTED: &str = "started";
/// The mounts of a container with a user namespace; a file beside `config.json`.
const STAGE: &str = "stage.json";
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;

/// `state.json` of a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ContainerRecord {
    pub sandbox: String,
    /// Nanoseconds since 1970.
    pub created_at: i64,
    pub image_id: String,
    /// The image's digest names, for the pod's status.
    pub image_ref: String,
    pub log_path: Option<PathBuf>,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub stop_signal: i32,
    pub cgroup: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Phase {
    Created,
    /// The shim is starting, or runs; the pid may still be unknown.
    Running {
        pid: i32,
        started_at: i64,
    },
    Exited(ExitRecord),
}

pub(super) struct ContainerEntry {
    pub id: String,
    pub record: ContainerRecord,
    /// Guards the copy of `config.pb`, whose resources may change. The lock is held briefly.
    config: Mutex<ContainerConfig>,
    pub phase: watch::Sender<Phase>,
    /// True after the exit event was sent. Waiters for the exit continue only then, so that events
    /// stay in order.
    told: watch::Sender<bool>,
    /// Serializes changes. It is held across await and therefore async.
    pub busy: tokio::sync::Mutex<()>,
}

impl ContainerEntry {
    pub fn new(id: String, record: ContainerRecord, config: ContainerConfig, phase: Phase) -> Self {
        Self {
            id,
            record,
            config: Mutex::new(config),
            told: watch::Sender::new(matches!(phase, Phase::Exited(_))),
            phase: watch::Sender::new(phase),
            busy: tokio::sync::Mutex::default(),
        }
    }

    pub fn config(&self) -> ContainerConfig {
        self.locked().clone()
    }

    fn locked(&self) -> MutexGuard<'_, ContainerConfig> {
        self.config.lock().expect("no panic while the config is held")
    }

    pub fn is_running(&self) -> bool {
        matches!(*self.phase.borrow(), Phase::Running { .. })
    }

    async fn ended(&self) {
        // `self` holds the sender, so waiting cannot fail.
        let _ = self.told.subscribe().wait_for(|told| *told).await;
    }
}

impl Embedded {
    pub(super) async fn create(
        self,
        sandbox_id: String,
        config: ContainerConfig,
        sandbox_config: PodSandboxConfig,
    ) -> Result<String> {
        let sandbox = self.sandbox(&sandbox_id)?;
        if config.metadata.is_none() {
            return Err(Error::InvalidArgument("container config must include metadata".into()));
        }
        let id = new_id();
        let made = self.make_container(&id, &sandbox, config, &sandbox_config).await;
        match made {
            Ok(entry) => {
                let sandbox = entry.record.sandbox.clone();
                self.table().containers.insert(id.clone(), Arc::new(entry));
                self.tell(ContainerEventType::Created, &id, &sandbox);
                Ok(id)
            }
            Err(error) => {
                if let Err(left) = self.remove_files(&id).await {
                    tracing::warn!(container = id, error = %left, "failed to clean up after a failed container creation");
                }
                Err(error)
            }
        }
    }

    async fn make_container(
        &self,
        id: &str,
        sandbox: &SandboxEntry,
        config: ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<ContainerEntry> {
        let apparmor = self.apparmor(&config).await?;
        let pod = self.pod_facts(sandbox, &config)?;
        let owners = pod.users.as_ref().map(owners);
        let wanted = config.image.clone().unwrap_or_default();
        let image = self.lease(id.to_owned(), wanted.image).await?;
        let directory = self.0.layout.container(id);
        std::fs::create_dir_all(&directory)?;
        // Other users may traverse the directory but not list it.
        set_private(&directory)?;
        let (store, layers, place) =
            (self.0.images.clone(), image.layers.clone(), directory.clone());
        let root_owners = owners.clone();
        let databases = blocking(move || {
            overlay::mount_root(&store, &layers, &place, root_owners.as_ref())?;
            Ok::<_, crate::images::Error>(Databases::read(&place.join("rootfs")))
        })
        .await??;
        let security = config.linux.as_ref().and_then(|l| l.security_context.clone());
        let mut user =
            user::resolve(&security.unwrap_or_default(), &image.config.user, &databases)?;
        let mut mounted = self.image_volumes(id, &config, &directory, owners).await?;
        let extra = cdi::inject(&cdi::DIRECTORIES.map(Path::new), &mut mounted)?;
        user.groups.extend(extra.groups);
        let rootfs = directory.join("rootfs");
        let mut spec = oci::build(&oci::Request {
            id,
            config: &mounted,
            image: &image.config,
            user: &user,
            pod: &pod,
            rootfs: &rootfs,
            cgroups_v2: self.0.hierarchies.is_v2(),
            cgroup_mounts: self.0.hierarchies.shown(&oci::cgroup_path(&pod.cgroup_parent, id)),
            apparmor,
            lowest_oom_score: self.0.lowest_oom_score,
        })?;
        if !extra.hooks.is_empty() {
            spec["hooks"] = extra.hooks.into();
        }
        if let Some(users) = &pod.users {
            let devices = oci::device_paths(&mounted);
            let stage = oci::stage::plan(&mut spec, &users.namespace, &devices);
            files::write_json(&directory.join(STAGE), &stage)?;
        }
        files::write_json(&directory.join("config.json"), &spec)?;
        let record = ContainerRecord {
            sandbox: sandbox.id.clone(),
            created_at: now_nanos(),
            image_ref: image.digests.first().cloned().unwrap_or_else(|| image.id.clone()),
            image_id: image.id,
            log_path: log_path(sandbox_config, &config),
            uid: user.uid,
            gid: user.gid,
            groups: user.groups,
            stop_signal: stop_signal(&config, &image.config.stop_signal),
            cgroup: oci::cgroup_path(&pod.cgroup_parent, id),
        };
        files::write_atomic(&directory.join("config.pb"), &config.encode_to_vec())?;
        // Written last: a directory without this file counts as a leftover.
        files::write_json(&directory.join("state.json"), &record)?;
        Ok(ContainerEntry::new(id.to_owned(), record, config, Phase::Created))
    }

    /// Looks up the image and leases it to `user`. Waits while garbage collection runs.
    async fn lease(&self, user: String, image: String) -> Result<ImageRecord> {
        let images = self.0.images.clone();
        let (found, image) = blocking(move || (images.lease(&user, &image), image)).await?;
        found?.ok_or_else(|| Error::NotFound(format!("image {image:?} not found")))
    }

    async fn image_volumes(
        &self,
        id: &str,
        config: &ContainerConfig,
        directory: &Path,
        owners: Option<overlay::Owners>,
    ) -> Result<ContainerConfig> {
        let mut config = config.clone();
        let volumes = config.mounts.iter_mut().filter(|mount| mount.image.is_some());
        for (index, mount) in volumes.enumerate() {
            let Some(wanted) = mount.image.take() else { continue };
            let lease = ImageStore::volume_lease(id, index);
            let image = self.lease(lease, wanted.image).await?;
            let (store, place) = (self.0.images.clone(), directory.to_owned());
            let (below, owners) = (mount.image_sub_path.clone(), owners.clone());
            let source = blocking(move || {
                let owners = owners.as_ref();
                let root = overlay::mount_volume(&store, &image.layers, &place, index, owners)?;
                files::below(&root, &below).map_err(Error::from)
            });
            mount.host_path = source.await??.display().to_string();
            mount.readonly = true;
            // The layers are idmapped already; overlayfs itself cannot be.
            mount.uid_mappings.clear();
            mount.gid_mappings.clear();
        }
        Ok(config)
    }

    fn pod_facts(&self, sandbox: &SandboxEntry, config: &ContainerConfig) -> Result<PodFacts> {
        let places = self.places(&sandbox.id);
        let modes = sandbox.modes();
        let mappings = sandbox.mappings()?;
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = security.and_then(|security| security.namespace_options.as_ref());
        Mappings::agree(mappings, options)?;
        if !places.usable(modes) {
            return Err(Error::FailedPrecondition(format!(
                "sandbox {:?} is not ready",
                sandbox.id
            )));
        }
        let of = |pid: i32| PidNamespace::Of(PathBuf::from(format!("/proc/{pid}/ns/pid")));
        let pid = match oci::pid_mode(config) {
            (NamespaceMode::Node, _) => PidNamespace::Host,
            (NamespaceMode::Pod, _) => match places.pause() {
                Some(pid) => of(pid),
                // The sandbox has no shared PID namespace: the container gets its own.
                None => PidNamespace::Own,
            },
            (NamespaceMode::Target, target) => match *self.container(&target)?.phase.borrow() {
                Phase::Running { pid, .. } => of(pid),
                _ => {
                    return Err(Error::FailedPrecondition(format!(
                        "target container {target:?} is not running"
                    )));
                }
            },
            (NamespaceMode::Container, _) => PidNamespace::Own,
        };
        Ok(PodFacts {
            net: (!modes.host_network).then(|| places.net()),
            uts: (!modes.host_network).then(|| places.uts()),
            ipc: (!modes.host_ipc).then(|| places.ipc()),
            pid,
            resolv_conf: places.resolv_conf(),
            hostname_file: places.hostname(),
            hostname: crate::sandbox::hostname(&sandbox.config),
            shm: if modes.host_ipc { "/dev/shm".into() } else { places.shm() },
            cgroup_parent: sandbox.cgroup_parent(),
            users: mappings.map(|mappings| Users { mappings, namespace: places.user() }),
        })
    }

    pub(super) async fn start(self, id: String) -> Result<()> {
        let entry = self.container(&id)?;
        let _busy = entry.busy.lock().await;
        if *entry.phase.borrow() != Phase::Created {
            return Err(Error::FailedPrecondition(format!(
                "container {:?} is not in the created state",
                entry.id
            )));
        }
        match self.spawn(&entry).await {
            Ok(started) => {
                let (pid, started_at) = (started.pid, started.started_at);
                entry.phase.send_replace(Phase::Running { pid, started_at });
                self.tell(ContainerEventType::Started, &entry.id, &entry.record.sandbox);
                self.supervise(entry.clone(), None);
                Ok(())
            }
            Err(error) => {
                let exit = ExitRecord::start_failed(&error.to_string());
                self.exited(&entry, exit, true)?;
                Err(error)
            }
        }
    }

    async fn spawn(&self, entry: &ContainerEntry) -> Result<Started> {
        let config = entry.config();
        let layout = &self.0.layout;
        let run = layout.run_container(&entry.id);
        std::fs::create_dir_all(&run)?;
        if let Some(directory) = entry.record.log_path.as_ref().and_then(|path| path.parent()) {
            std::fs::create_dir_all(directory)?;
        }
        let shim = ShimConfig {
            version: 1,
            id: entry.id.clone(),
            bundle: layout.container(&entry.id),
            exit_file: layout.container(&entry.id).join("exit.json"),
            log_path: entry.record.log_path.clone(),
            terminal: config.tty,
            stdin: config.stdin,
            stdin_once: config.stdin_once,
            cgroup: entry.record.cgroup.clone(),
            hierarchies: self.0.hierarchies.clone(),
            shim_cgroup: format!("{}/shims", self.0.config.cgroup_root.trim_end_matches('/')),
            stage: files::read_json(&layout.container(&entry.id).join(STAGE))?,
            run: run.clone(),
        };
        let path = run.join("shim.json");
        files::write_json(&path, &shim)?;
        // Written to a disk that survives a reboot: after a reboot the container counts as ended.
        let boot = machine::boot_id().unwrap_or_default();
        std::fs::write(layout.container(&entry.id).join(STARTED), boot)?;
        let errors = std::fs::File::create(run.join("shim.log"))?;
        spawn_shim(self.0.program.path(), &path, errors).await.map_err(Error::from)
    }

    /// Waits for the container's exit. `wait` is an existing connection to the shim, if any.
    pub(super) fn supervise(&self, entry: Arc<ContainerEntry>, wait: Option<Wait>) {
        let this = self.clone();
        self.0.tasks.spawn("container", async move {
            let client = this.client(&entry);
            let wait = match wait {
                Some(wait) => Ok(wait),
                None => client.wait().await,
            };
            let exit = match wait {
                Ok(wait) => wait.exit().await,
                Err(_) => None,
            };
            if let Err(error) = this.settle(&entry, exit).await {
                tracing::error!(container = entry.id, %error, "failed to record the exit of a container");
            }
        });
    }

    /// Records the exit after the shim has ended: from its message, its exit file, or as lost when it died.
    pub(super) async fn settle(
        &self,
        entry: &Arc<ContainerEntry>,
        exit: Option<ExitRecord>,
    ) -> Result<()> {
        let file = self.0.layout.container(&entry.id).join("exit.json");
        let exit = match exit {
            Some(exit) => Some(exit),
            None => files::read_json(&file)?,
        };
        if let Some(exit) = exit {
            return self.exited(entry, exit, false);
        }
        tracing::warn!(container = entry.id, "the container's shim died; killing the container");
        self.kill_cgroup(&entry.record.cgroup).await?;
        self.lost(entry, "the container's shim died")
    }

    /// Records an exit whose code is unknown.
    pub(super) fn lost(&self, entry: &Arc<ContainerEntry>, why: &str) -> Result<()> {
        let started_at = match *entry.phase.borrow() {
            Phase::Running { started_at, .. } => started_at,
            _ => 0,
        };
        let exit = ExitRecord {
            code: 255,
            oom_killed: false,
            started_at,
            finished_at: now_nanos(),
            reason: "Unknown".into(),
            message: why.into(),
        };
        self.exited(entry, exit, true)
    }

    async fn apparmor(&self, config: &ContainerConfig) -> Result<Option<String>> {
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let asked = security.and_then(|security| security.apparmor.as_ref());
        let privileged = security.is_some_and(|security| security.privileged);
        self.0.apparmor.profile(asked, privileged).await
    }

    /// Kills until the cgroup and those below it are empty, and removes them.
    pub(super) async fn kill_cgroup(&self, cgroup: &str) -> Result<()> {
        match self.0.hierarchies.clear(cgroup, KILL_TIMEOUT).await {
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
                Err(Error::DeadlineExceeded(error.to_string()))
            }
            other => Ok(other?),
        }
    }

    fn exited(&self, entry: &Arc<ContainerEntry>, exit: ExitRecord, write: bool) -> Result<()> {
        if write {
            files::write_json(&self.0.layout.container(&entry.id).join("exit.json"), &exit)?;
        }
        entry.phase.send_replace(Phase::Exited(exit));
        self.tell(ContainerEventType::Stopped, &entry.id, &entry.record.sandbox);
        entry.told.send_replace(true);
        Ok(())
    }

    pub(super) fn client(&self, entry: &ContainerEntry) -> Client {
        Client::new(self.0.layout.socket(&entry.id))
    }

    pub(super) async fn stop(&self, id: &str, timeout: Duration) -> Result<()> {
        let entry = match self.container(id) {
            Err(Error::NotFound(_)) => return Ok(()),
            other => other?,
        };
        if entry.is_running() && !timeout.is_zero() {
            let gentle = async {
                self.signal(&entry, entry.record.stop_signal).await?;
                entry.ended().await;
                Ok::<_, Error>(())
            };
            match tokio::time::timeout(timeout, gentle).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => {
                    tracing::warn!(container = entry.id, %error, "failed to send the stop signal, killing the container");
                }
                // The grace period is over: the container is killed below.
                Err(_) => {}
            }
        }
        self.kill_and_wait(&entry).await
    }

    async fn signal(&self, entry: &ContainerEntry, signal: i32) -> Result<()> {
        match self.client(entry).kill(signal, signal == SIGKILL).await {
            // The container ended by now, or its supervisor notices that the shim is gone.
            Err(crate::shim::ClientError::Gone(_)) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) async fn kill_and_wait(&self, entry: &ContainerEntry) -> Result<()> {
        if *entry.phase.borrow() == Phase::Created {
            return Ok(());
        }
        let killing = async {
            if entry.is_running() {
                self.kill_running(entry).await?;
            }
            entry.ended().await;
            Ok(())
        };
        tokio::time::timeout(KILL_TIMEOUT, killing).await.unwrap_or_else(|_| {
            Err(Error::DeadlineExceeded(format!(
                "container {:?} did not end after SIGKILL",
                entry.id
            )))
        })
    }

    /// Kills the cgroup first instead of asking the shim: the shim may wait for a frozen process of
    /// the container. The shim then reports the exit.
    async fn kill_running(&self, entry: &ContainerEntry) -> Result<()> {
        let (hierarchies, cgroup) = (self.0.hierarchies.clone(), entry.record.cgroup.clone());
        blocking(move || hierarchies.kill(&cgroup)).await?;
        tokio::select! {
            told = self.signal(entry, SIGKILL) => told,
            () = entry.ended() => Ok(()),
        }
    }

    pub(super) async fn remove(&self, id: &str) -> Result<()> {
        let entry = match self.container(id) {
            Err(Error::NotFound(_)) => return Ok(()),
            other => other?,
        };
        let _busy = entry.busy.lock().await;
        self.kill_and_wait(&entry).await?;
        self.kill_cgroup(&entry.record.cgroup).await?;
        self.remove_files(&entry.id).await?;
        let removed = self.table().containers.remove(&entry.id);
        if removed.is_some() {
            self.tell(ContainerEventType::Deleted, &entry.id, &entry.record.sandbox);
        }
        Ok(())
    }

    pub(super) async fn remove_files(&self, id: &str) -> Result<()> {
        let (directory, run) = (self.0.layout.container(id), self.0.layout.run_container(id));
        blocking(move || {
            overlay::unmount_root(&directory)?;
            files::remove_tree(&run)?;
            files::remove_tree(&directory)?;
            Ok::<_, Error>(())
        })
        .await??;
        Ok(self.0.images.release(id)?)
    }

    pub(super) fn containers_of(&self, sandbox: &str) -> Vec<Arc<ContainerEntry>> {
        let table = self.table();
        table.containers.values().filter(|entry| entry.record.sandbox == sandbox).cloned().collect()
    }

    pub(super) fn list(&self, filter: &ContainerFilter) -> Vec<Container> {
        let all: Vec<_> = self.table().containers.values().cloned().collect();
        all.iter()
            .filter(|entry| filter.id.is_empty() || entry.id.starts_with(&filter.id))
            .filter(|entry| {
                filter.pod_sandbox_id.is_empty()
                    || entry.record.sandbox.starts_with(&filter.pod_sandbox_id)
            })
            .filter(|entry| selects(&filter.label_selector, &entry.locked().labels))
            .map(|entry| {
                let config = entry.config();
                Container {
                    id: entry.id.clone(),
                    pod_sandbox_id: entry.record.sandbox.clone(),
                    metadata: config.metadata,
                    image: config.image,
                    image_ref: entry.record.image_ref.clone(),
                    state: state_of(&entry.phase.borrow()) as i32,
                    created_at: entry.record.created_at,
                    labels: config.labels,
                    annotations: config.annotations,
                    image_id: entry.record.image_id.clone(),
                }
            })
            .filter(|container| {
                filter.state.as_ref().is_none_or(|wanted| wanted.state == container.state)
            })
            .collect()
    }

    pub(super) fn status_of(&self, entry: &ContainerEntry) -> ContainerStatus {
        let config = entry.config();
        let record = &entry.record;
        let phase = entry.phase.borrow().clone();
        let resources = config.linux.as_ref().and_then(|linux| linux.resources.clone());
        let asked = config.stop_signal();
        let mut status = ContainerStatus {
            id: entry.id.clone(),
            metadata: config.metadata,
            state: state_of(&phase) as i32,
            created_at: record.created_at,
            image: config.image,
            image_ref: record.image_ref.clone(),
            image_id: record.image_id.clone(),
            labels: config.labels,
            annotations: config.annotations,
            mounts: config.mounts,
            log_path: record.log_path.as_ref().map(|p| p.display().to_string()).unwrap_or_default(),
            resources: Some(ContainerResources { linux: resources }),
            user: Some(ContainerUser {
                linux: Some(LinuxContainerUser {
                    uid: record.uid.into(),
                    gid: record.gid.into(),
                    supplemental_groups: record.groups.iter().map(|gid| (*gid).into()).collect(),
                }),
            }),
            stop_signal: shown_signal(asked, record.stop_signal) as i32,
            ..Default::default()
        };
        match phase {
            Phase::Created => {}
            Phase::Running { started_at, .. } => status.started_at = started_at,
            Phase::Exited(exit) => {
                status.started_at = exit.started_at;
                status.finished_at = exit.finished_at;
                status.exit_code = exit.code;
                status.reason = reason(&exit);
                status.message = exit.message;
            }
        }
        status
    }

    pub(super) fn details_of(&self, entry: &ContainerEntry) -> Result<ContainerDetails> {
        let pid = match *entry.phase.borrow() {
            Phase::Running { pid, .. } => Some(pid).filter(|pid| *pid > 0),
            _ => None,
        };
        let spec = files::read(&self.0.layout.container(&entry.id).join("config.json"))?;
        let config = entry.locked();
        Ok(ContainerDetails {
            sandbox_id: entry.record.sandbox.clone(),
            pid,
            spec: spec.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
            tty: config.tty,
            stdin_once: config.stdin_once,
        })
    }

    pub(super) async fn update_resources(
        &self,
        id: &str,
        resources: LinuxContainerResources,
    ) -> Result<()> {
        let entry = self.container(id)?;
        let _busy = entry.busy.lock().await;
        if entry.is_running() {
            self.0.hierarchies.update(&entry.record.cgroup, &resources)?;
        }
        let config = {
            let mut config = entry.config.lock().expect("no panic while the config is held");
            merge(
                config.linux.get_or_insert_default().resources.get_or_insert_default(),
                resources,
            );
            config.clone()
        };
        let path = self.0.layout.container(&entry.id).join("config.pb");
        Ok(files::write_atomic(&path, &config.encode_to_vec())?)
    }

    pub(super) async fn reopen_log(&self, id: &str) -> Result<()> {
        let entry = self.container(id)?;
        if !entry.is_running() {
            return Err(Error::FailedPrecondition("container is not running".into()));
        }
        Ok(self.client(&entry).reopen_log().await?)
    }
}

impl From<crate::shim::ClientError> for Error {
    fn from(error: crate::shim::ClientError) -> Self {
        match error {
            crate::shim::ClientError::Gone(error) => {
                Self::FailedPrecondition(format!("container is not running: {error}"))
            }
            other => Self::Internal(other.to_string()),
        }
    }
}

/// Takes over what the update sets: zero and empty values mean "unchanged".
fn merge(known: &mut LinuxContainerResources, update: LinuxContainerResources) {
    let number = |known: &mut i64, new: i64| {
        if new != 0 {
            *known = new;
        }
    };
    number(&mut known.cpu_period, update.cpu_period);
    number(&mut known.cpu_quota, update.cpu_quota);
    number(&mut known.cpu_shares, update.cpu_shares);
    number(&mut known.memory_limit_in_bytes, update.memory_limit_in_bytes);
    number(&mut known.oom_score_adj, update.oom_score_adj);
    number(&mut known.memory_swap_limit_in_bytes, update.memory_swap_limit_in_bytes);
    let text = |known: &mut String, new: String| {
        if !new.is_empty() {
            *known = new;
        }
    };
    text(&mut known.cpuset_cpus, update.cpuset_cpus);
    text(&mut known.cpuset_mems, update.cpuset_mems);
    if !update.hugepage_limits.is_empty() {
        known.hugepage_limits = update.hugepage_limits;
    }
    known.unified.extend(update.unified);
}

fn owners(users: &Users) -> overlay::Owners {
    overlay::Owners {
        namespace: users.namespace.clone(),
        uid: users.mappings.uids.host,
        gid: users.mappings.gids.host,
    }
}

/// Upstream: containerd's reasons.
fn reason(exit: &ExitRecord) -> String {
    match (exit.reason.as_str(), exit.oom_killed, exit.code) {
        ("", true, _) => "OOMKilled",
        ("", false, 0) => "Completed",
        ("", false, _) => "Error",
        (reason, ..) => reason,
    }
    .to_owned()
}

fn state_of(phase: &Phase) -> ContainerState {
    match phase {
        Phase::Created => ContainerState::Created,
        Phase::Running { .. } => ContainerState::Running,
        Phase::Exited(_) => ContainerState::Exited,
    }
}

fn log_path(sandbox: &PodSandboxConfig, config: &ContainerConfig) -> Option<PathBuf> {
    if sandbox.log_directory.is_empty() || config.log_path.is_empty() {
        return None;
    }
    Some(PathBuf::from(&sandbox.log_directory).join(&config.log_path))
}

/// The pod's stop signal, else the image's, else SIGTERM.
fn stop_signal(config: &ContainerConfig, image: &str) -> i32 {
    if let Some(number) = config.stop_signal().number() {
        return number;
    }
    if let Ok(number) = image.parse::<i32>()
        && (1..=64).contains(&number)
    {
        return number;
    }
    let full = if image.starts_with("SIG") { image.to_owned() } else { format!("SIG{image}") };
    Signal::from_name(&full).and_then(Signal::number).unwrap_or(SIGTERM)
}

/// The signal for the status: the requested name, or for the runtime's default the effective one.
fn shown_signal(asked: Signal, number: i32) -> Signal {
    match asked {
        Signal::RuntimeDefault => Signal::from_number(number).unwrap_or(Signal::RuntimeDefault),
        named => named,
    }
}

fn set_private(directory: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o711))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_signal_comes_from_pod_then_image_then_sigterm() {
        let check = |asked: Signal, image: &str, number: i32, shown: Signal| {
            let config = ContainerConfig { stop_signal: asked as i32, ..Default::default() };
            assert_eq!(stop_signal(&config, image), number, "{asked:?} {image}");
            assert_eq!(shown_signal(asked, number), shown, "{asked:?} {image}");
        };
        check(Signal::RuntimeDefault, "", 15, Signal::Sigterm);
        check(Signal::RuntimeDefault, "SIGQUIT", 3, Signal::Sigquit);
        check(Signal::RuntimeDefault, "QUIT", 3, Signal::Sigquit);
        check(Signal::RuntimeDefault, "37", 37, Signal::Sigrtminplus3);
        check(Signal::RuntimeDefault, "nonsense", 15, Signal::Sigterm);
        check(Signal::Sigusr1, "SIGQUIT", 10, Signal::Sigusr1);
        check(Signal::Sigcld, "", 17, Signal::Sigcld);
    }

    #[test]
    fn an_update_changes_only_what_it_sets() {
        let mut known = LinuxContainerResources {
            cpu_quota: 50_000,
            memory_limit_in_bytes: 1 << 20,
            cpuset_cpus: "0-3".into(),
            ..LinuxContainerResources::default()
        };
        let update = LinuxContainerResources {
            cpuset_cpus: "1".into(),
            cpu_shares: 2,
            ..LinuxContainerResources::default()
        };
        merge(&mut known, update);
        assert_eq!((known.cpu_quota, known.memory_limit_in_bytes), (50_000, 1 << 20));
        assert_eq!((known.cpuset_cpus.as_str(), known.cpu_shares), ("1", 2));
    }
}
