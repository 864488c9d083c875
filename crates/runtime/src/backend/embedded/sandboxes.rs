//! Sandboxes: run, stop, remove, list.

use std::sync::{Arc, Mutex};

use cri::*;
use prost::Message;

use super::{Embedded, blocking, now_nanos, selects};
use crate::cni::Attachment;
use crate::files;
use crate::layout::new_id;
use crate::sandbox::{self, Modes, SandboxState, Settings};
use crate::shim::Order;
use crate::users::Mappings;

pub(super) struct SandboxEntry {
    pub id: String,
    pub config: PodSandboxConfig,
    /// Guards the copy of `state.json`. The lock is held briefly.
    state: Mutex<SandboxState>,
    /// Serializes changes. It is held across await and therefore async.
    pub busy: tokio::sync::Mutex<()>,
}

impl SandboxEntry {
    pub fn new(id: String, config: PodSandboxConfig, state: SandboxState) -> Self {
        Self { id, config, state: Mutex::new(state), busy: tokio::sync::Mutex::default() }
    }

    pub fn state(&self) -> SandboxState {
        self.state.lock().expect("no panic while the state is held").clone()
    }

    pub fn modes(&self) -> Modes {
        Modes::of(&self.config)
    }

    /// The pod's user namespace mappings, if it has a user namespace.
    pub fn mappings(&self) -> Result<Option<Mappings>> {
        Mappings::of(&sandbox::namespace_options(&self.config))
    }

    fn update(&self, change: impl FnOnce(&mut SandboxState)) -> SandboxState {
        let mut state = self.state.lock().expect("no panic while the state is held");
        change(&mut state);
        state.clone()
    }

    pub fn cgroup_parent(&self) -> String {
        self.config.linux.as_ref().map(|linux| linux.cgroup_parent.clone()).unwrap_or_default()
    }
}

impl Embedded {
    pub(super) async fn run_sandbox(
        self,
        config: PodSandboxConfig,
        handler: String,
    ) -> Result<String> {
        if !handler.is_empty() {
            return Err(Error::NotFound(format!(
                "failed to get sandbox runtime: no runtime for {handler:?} is configured"
            )));
        }
        Mappings::of(&sandbox::namespace_options(&config))?;
        if config.metadata.is_none() {
            return Err(Error::InvalidArgument("sandbox config must include metadata".into()));
        }
        let id = new_id();
        let state = SandboxState { created_at: now_nanos(), handler, ..Default::default() };
        let entry = Arc::new(SandboxEntry::new(id.clone(), config, state));
        let _busy = entry.busy.lock().await;
        let mut made = self.make_sandbox(&entry).await;
        if made.is_ok() {
            self.table().sandboxes.insert(id.clone(), entry.clone());
            made = self.0.host_ports.follow(self.host_ports()).await;
        }
        match made {
            Ok(()) => {
                self.tell(ContainerEventType::Created, &id, &id);
                self.tell(ContainerEventType::Started, &id, &id);
                Ok(id)
            }
            Err(error) => {
                // Removes everything of a failed attempt: the kubelet does not know its id.
                self.table().sandboxes.remove(&id);
                self.unmake_or_keep(&entry).await;
                Err(error)
            }
        }
    }

    async fn make_sandbox(&self, entry: &Arc<SandboxEntry>) -> Result<()> {
        let places = self.places(&entry.id);
        std::fs::create_dir_all(&places.data)?;
        std::fs::create_dir_all(&places.run)?;
        files::write_atomic(&places.data.join("config.pb"), &entry.config.encode_to_vec())?;
        self.save_sandbox(entry, |_| {})?;
        let config = entry.config.clone();
        blocking(move || sandbox::set_up(&places, &config)).await??;
        self.make_namespaces(entry).await?;
        let connection = self.connect(entry).await?;
        self.save_sandbox(entry, |state| {
            state.addresses = connection.addresses;
            state.by_plugins = connection.by_plugins;
            state.ready = true;
        })
    }

    /// Creates the namespaces that need a process.
    async fn make_namespaces(&self, entry: &SandboxEntry) -> Result<()> {
        let (places, mappings) = (self.places(&entry.id), entry.mappings()?);
        let order = Order {
            own: mappings.map(|_| Settings::of(&entry.config, mappings)),
            processes: entry.modes().shared_pid,
        };
        if order.own.is_none() && !order.processes {
            return Ok(());
        }
        let users = |pid: u32| {
            let Some(own) = mappings else { return Ok(()) };
            // Group ids are mapped first; either order keeps all rights.
            std::fs::write(format!("/proc/{pid}/gid_map"), own.gids.line())?;
            std::fs::write(format!("/proc/{pid}/uid_map"), own.uids.line())
        };
        let made = |pid: u32, init: i32| {
            if init > 0 {
                files::write_atomic(&places.pause_pid(), init.to_string().as_bytes())?;
            }
            mappings.map_or(Ok(()), |_| sandbox::pin_all(&places, pid))
        };
        let program = self.0.program.path();
        let done = crate::shim::make_namespaces(program, &order, users, made).await;
        done.map_err(|error| Error::Internal(format!("make the sandbox's namespaces: {error}")))
    }

    async fn unmake_sandbox(&self, entry: &Arc<SandboxEntry>) -> Result<()> {
        self.release_network(entry).await?;
        let places = self.places(&entry.id);
        blocking(move || {
            sandbox::tear_down(&places)?;
            files::remove_tree(&places.data)
        })
        .await??;
        Ok(())
    }

    /// Removes a sandbox whose creation failed. If that fails, too (a network plugin may refuse), the kubelet
    /// finds the sandbox, which is not ready, and removes it later.
    async fn unmake_or_keep(&self, entry: &Arc<SandboxEntry>) {
        if let Err(error) = self.unmake_sandbox(entry).await {
            tracing::warn!(sandbox = entry.id, %error, "failed to clean up after a failed sandbox creation");
            self.table().sandboxes.insert(entry.id.clone(), entry.clone());
        }
    }

    fn save_sandbox(
        &self,
        entry: &SandboxEntry,
        change: impl FnOnce(&mut SandboxState),
    ) -> Result<()> {
        let state = entry.update(change);
        let path = self.0.layout.sandbox(&entry.id).join("state.json");
        Ok(files::write_json(&path, &state)?)
    }

    pub(super) async fn stop_sandbox(&self, id: &str) -> Result<()> {
        let entry = match self.sandbox(id) {
            Err(Error::NotFound(_)) => return Ok(()),
            other => other?,
        };
        let _busy = entry.busy.lock().await;
        for container in self.containers_of(&entry.id) {
            self.kill_and_wait(&container).await?;
        }
        let before = entry.state();
        self.release_network(&entry).await?;
        let places = self.places(&entry.id);
        blocking(move || sandbox::tear_down(&places)).await??;
        self.save_sandbox(&entry, |state| state.stopped = true)?;
        self.0.host_ports.follow(self.host_ports()).await?;
        if !before.stopped {
            self.tell(ContainerEventType::Stopped, &entry.id, &entry.id);
        }
        Ok(())
    }

    pub(super) async fn remove_sandbox(&self, id: &str) -> Result<()> {
        let entry = match self.sandbox(id) {
            Err(Error::NotFound(_)) => return Ok(()),
            other => other?,
        };
        self.stop_sandbox(&entry.id).await?;
        for container in self.containers_of(&entry.id) {
            self.remove(&container.id).await?;
        }
        let _busy = entry.busy.lock().await;
        let places = self.places(&entry.id);
        blocking(move || files::remove_tree(&places.data)).await??;
        self.tell(ContainerEventType::Deleted, &entry.id, &entry.id);
        self.table().sandboxes.remove(&entry.id);
        Ok(())
    }

    pub(super) fn sandbox_is_ready(&self, entry: &SandboxEntry) -> bool {
        let state = entry.state();
        state.ready && !state.stopped && self.places(&entry.id).usable(entry.modes())
    }

    pub(super) fn sandbox_status_of(&self, entry: &SandboxEntry) -> PodSandboxStatus {
        let state = entry.state();
        let ready = self.sandbox_is_ready(entry);
        let mut addresses = state.addresses.iter().map(ToString::to_string);
        let network = PodSandboxNetworkStatus {
            ip: addresses.next().unwrap_or_default(),
            additional_ips: addresses.map(|ip| PodIP { ip }).collect(),
        };
        let options = sandbox::namespace_options(&entry.config);
        PodSandboxStatus {
            id: entry.id.clone(),
            metadata: entry.config.metadata.clone(),
            state: state_of(ready) as i32,
            created_at: state.created_at,
            network: Some(network).filter(|_| ready),
            linux: Some(LinuxPodSandboxStatus {
                namespaces: Some(Namespace { options: Some(options) }),
            }),
            labels: entry.config.labels.clone(),
            annotations: entry.config.annotations.clone(),
            runtime_handler: state.handler,
        }
    }

    pub(super) fn list_sandboxes(&self, filter: &PodSandboxFilter) -> Vec<PodSandbox> {
        let all: Vec<_> = self.table().sandboxes.values().cloned().collect();
        all.iter()
            .filter(|entry| filter.id.is_empty() || entry.id.starts_with(&filter.id))
            .filter(|entry| selects(&filter.label_selector, &entry.config.labels))
            .map(|entry| {
                let state = entry.state();
                PodSandbox {
                    id: entry.id.clone(),
                    metadata: entry.config.metadata.clone(),
                    state: state_of(self.sandbox_is_ready(entry)) as i32,
                    created_at: state.created_at,
                    labels: entry.config.labels.clone(),
                    annotations: entry.config.annotations.clone(),
                    runtime_handler: state.handler,
                }
            })
            .filter(|sandbox| {
                filter.state.as_ref().is_none_or(|wanted| wanted.state == sandbox.state)
            })
            .collect()
    }

    /// At start: restores a sandbox from disk, or removes it if its creation was interrupted.
    pub(super) async fn adopt_sandbox(&self, id: &str) -> Result<()> {
        let directory = self.0.layout.sandbox(id);
        let config = files::read(&directory.join("config.pb"))?;
        let config = config.and_then(|bytes| PodSandboxConfig::decode(bytes.as_slice()).ok());
        let state: Option<SandboxState> = files::read_json(&directory.join("state.json"))?;
        match (config, state) {
            (Some(config), Some(state)) if state.ready => {
                let entry = Arc::new(SandboxEntry::new(id.to_owned(), config, state));
                self.table().sandboxes.insert(id.to_owned(), entry);
                Ok(())
            }
            (config, state) => {
                let entry = Arc::new(SandboxEntry::new(
                    id.to_owned(),
                    config.unwrap_or_default(),
                    state.unwrap_or_default(),
                ));
                if Attachment::read(&directory)?.is_some() {
                    // Its network plugins may take their time: the kubelet removes the sandbox, which is not ready.
                    self.table().sandboxes.insert(id.to_owned(), entry);
                } else {
                    self.unmake_or_keep(&entry).await;
                }
                Ok(())
            }
        }
    }
}

fn state_of(ready: bool) -> PodSandboxState {
    if ready { PodSandboxState::Ready } else { PodSandboxState::NotReady }
}
