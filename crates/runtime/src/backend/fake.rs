//! A runtime that runs nothing: tests change the containers' states.
//!
//! It keeps CRI's rules (states, idempotence, events), so that the kubelet's tests are meaningful.
//! Every image exists unless a test removed it. A command returns the result that the test set.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use cri::*;
use tokio::sync::{broadcast, oneshot};

pub const NAME: &str = "fake";
const EVENTS: usize = 1024;

/// Cheap to clone; clones are the same runtime.
#[derive(Clone)]
pub struct Fake(Arc<Inner>);

struct Inner {
    /// Guards all state. The lock is held briefly.
    world: Mutex<World>,
    events: broadcast::Sender<ContainerEventResponse>,
}

#[derive(Default)]
struct World {
    next: u64,
    network_ready: bool,
    user_namespaces: bool,
    sandboxes: BTreeMap<String, (PodSandboxStatus, PodSandboxConfig)>,
    containers: BTreeMap<String, FakeContainer>,
    images: BTreeSet<String>,
    missing: BTreeSet<String>,
    exec: ExecSyncResponse,
    calls: Vec<String>,
    failures: BTreeMap<String, Error>,
    /// By name of a read-only call: how often it failed.
    refused: BTreeMap<String, usize>,
}

struct FakeContainer {
    status: ContainerStatus,
    sandbox: String,
    config: ContainerConfig,
}

impl Default for Fake {
    fn default() -> Self {
        Self::new()
    }
}

impl Fake {
    pub fn new() -> Self {
        let world = World { network_ready: true, ..Default::default() };
        Self(Arc::new(Inner { world: Mutex::new(world), events: broadcast::Sender::new(EVENTS) }))
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.world.lock().expect("no panic while the world is held")
    }

    /// Ends the container, as if its process exited.
    pub fn exit(&self, container: &str, code: i32) {
        self.end(container, code, if code == 0 { "Completed" } else { "Error" });
    }

    /// Makes all later calls of that name (`start_container`) fail; `None` ends that.
    pub fn fail(&self, call: &str, error: Option<Error>) {
        let mut world = self.world();
        match error {
            Some(error) => world.failures.insert(call.to_owned(), error),
            None => world.failures.remove(call),
        };
    }

    /// Sets the result of all later commands.
    pub fn set_exec(&self, code: i32, stdout: &str) {
        self.world().exec = ExecSyncResponse {
            stdout: Bytes::copy_from_slice(stdout.as_bytes()),
            stderr: Bytes::new(),
            exit_code: code,
        };
    }

    /// Removes the image and makes its pulls fail.
    pub fn take_image(&self, name: &str) {
        let mut world = self.world();
        world.images.remove(name);
        world.missing.insert(name.to_owned());
    }

    /// Sets whether the runtime reports support for user namespaces.
    pub fn set_user_namespaces(&self, supported: bool) {
        self.world().user_namespaces = supported;
    }

    /// All changing calls as `call argument`, oldest first.
    pub fn calls(&self) -> Vec<String> {
        self.world().calls.clone()
    }

    /// The configuration from the container's creation.
    pub fn container_config(&self, id: &str) -> Option<ContainerConfig> {
        self.world().containers.get(id).map(|container| container.config.clone())
    }

    /// How often a read-only call failed because of [`Fake::fail`].
    pub fn refusals(&self, call: &str) -> usize {
        self.world().refused.get(call).copied().unwrap_or(0)
    }

    /// Checks a read-only call.
    fn asked(&self, call: &str) -> Result<MutexGuard<'_, World>> {
        let mut world = self.world();
        let Some(error) = world.failures.get(call).cloned() else { return Ok(world) };
        *world.refused.entry(call.to_owned()).or_default() += 1;
        Err(error)
    }

    fn called(&self, call: &str, argument: &str) -> Result<MutexGuard<'_, World>> {
        let mut world = self.world();
        world.calls.push(format!("{call} {argument}"));
        match world.failures.get(call) {
            Some(error) => Err(error.clone()),
            None => Ok(world),
        }
    }

    fn end(&self, container: &str, code: i32, reason: &str) {
        {
            let mut world = self.world();
            let Some(found) = world.containers.get_mut(container) else { return };
            if found.status.state() == ContainerState::Exited {
                return;
            }
            found.status.set_state(ContainerState::Exited);
            found.status.exit_code = code;
            found.status.reason = reason.to_owned();
            found.status.finished_at = now();
        }
        self.tell(ContainerEventType::Stopped, container);
    }

    fn tell(&self, kind: ContainerEventType, id: &str) {
        let event = {
            let world = self.world();
            let sandbox = match world.containers.get(id) {
                Some(container) => container.sandbox.clone(),
                None => id.to_owned(),
            };
            let statuses = world
                .containers
                .values()
                .filter(|container| container.sandbox == sandbox)
                .map(|container| container.status.clone())
                .collect();
            ContainerEventResponse {
                container_id: id.to_owned(),
                container_event_type: kind as i32,
                created_at: now(),
                pod_sandbox_status: world.sandboxes.get(&sandbox).map(|(status, _)| status.clone()),
                containers_statuses: statuses,
            }
        };
        // There may be no listeners.
        let _ = self.0.events.send(event);
    }
}

fn now() -> i64 {
    i64::try_from(base::clock::now().as_nanosecond()).unwrap_or(i64::MAX)
}

fn no(what: &str, id: &str) -> Error {
    Error::NotFound(format!("{what} {id:?} not found"))
}

fn selects(selector: &BTreeMap<String, String>, labels: &BTreeMap<String, String>) -> bool {
    selector.iter().all(|(name, value)| labels.get(name) == Some(value))
}

#[async_trait]
impl RuntimeService for Fake {
    async fn version(&self) -> Result<VersionResponse> {
        Ok(VersionResponse {
            version: "0.1.0".into(),
            runtime_name: NAME.into(),
            runtime_version: "0".into(),
            runtime_api_version: "v1".into(),
        })
    }

    async fn status(&self, _verbose: bool) -> Result<StatusResponse> {
        let condition = |kind: &str, status| RuntimeCondition {
            r#type: kind.into(),
            status,
            ..Default::default()
        };
        let (network, user_namespaces) = {
            let world = self.world();
            (world.network_ready, world.user_namespaces)
        };
        let features = RuntimeHandlerFeatures { user_namespaces, ..Default::default() };
        let conditions = vec![condition(RUNTIME_READY, true), condition(NETWORK_READY, network)];
        Ok(StatusResponse {
            status: Some(RuntimeStatus { conditions }),
            runtime_handlers: vec![RuntimeHandler {
                name: String::new(),
                features: Some(features),
            }],
            ..Default::default()
        })
    }

    async fn runtime_config(&self) -> Result<LinuxRuntimeConfiguration> {
        Ok(LinuxRuntimeConfiguration { cgroup_driver: CgroupDriver::Cgroupfs as i32 })
    }

    async fn update_runtime_config(&self, pod_cidr: &str) -> Result<()> {
        self.called("update_runtime_config", pod_cidr)?.network_ready = true;
        Ok(())
    }

    async fn run_pod_sandbox(&self, config: PodSandboxConfig, handler: &str) -> Result<String> {
        let name = config.metadata.as_ref().map(|m| m.name.clone()).unwrap_or_default();
        let id = {
            let mut world = self.called("run_pod_sandbox", &name)?;
            world.next += 1;
            let number = world.next;
            let id = format!("sandbox{number}");
            let status = PodSandboxStatus {
                id: id.clone(),
                metadata: config.metadata.clone(),
                state: PodSandboxState::Ready as i32,
                created_at: now(),
                network: Some(PodSandboxNetworkStatus {
                    ip: format!("10.42.{}.{}", number / 250, number % 250 + 2),
                    ..Default::default()
                }),
                labels: config.labels.clone(),
                annotations: config.annotations.clone(),
                runtime_handler: handler.into(),
                ..Default::default()
            };
            world.sandboxes.insert(id.clone(), (status, config));
            id
        };
        self.tell(ContainerEventType::Started, &id);
        Ok(id)
    }

    async fn stop_pod_sandbox(&self, id: &str) -> Result<()> {
        let running: Vec<String> = {
            let mut world = self.called("stop_pod_sandbox", id)?;
            let Some((status, _)) = world.sandboxes.get_mut(id) else { return Ok(()) };
            status.set_state(PodSandboxState::NotReady);
            let all = world.containers.iter().filter(|(_, c)| c.sandbox == id);
            all.map(|(id, _)| id.clone()).collect()
        };
        running.iter().for_each(|container| self.end(container, 137, "Error"));
        self.tell(ContainerEventType::Stopped, id);
        Ok(())
    }

    async fn remove_pod_sandbox(&self, id: &str) -> Result<()> {
        self.stop_pod_sandbox(id).await?;
        let mut world = self.called("remove_pod_sandbox", id)?;
        world.sandboxes.remove(id);
        world.containers.retain(|_, container| container.sandbox != id);
        Ok(())
    }

    async fn pod_sandbox_status(&self, id: &str) -> Result<PodSandboxStatus> {
        let world = self.world();
        world.sandboxes.get(id).map(|(status, _)| status.clone()).ok_or_else(|| no("sandbox", id))
    }

    async fn list_pod_sandbox(&self, filter: Option<PodSandboxFilter>) -> Result<Vec<PodSandbox>> {
        let filter = filter.unwrap_or_default();
        let world = self.asked("list_pod_sandbox")?;
        let fits = |status: &&PodSandboxStatus| {
            (filter.id.is_empty() || filter.id == status.id)
                && filter.state.as_ref().is_none_or(|wanted| wanted.state == status.state)
                && selects(&filter.label_selector, &status.labels)
        };
        let all = world.sandboxes.values().map(|(status, _)| status).filter(fits);
        Ok(all
            .cloned()
            .map(|status| PodSandbox {
                id: status.id,
                metadata: status.metadata,
                state: status.state,
                created_at: status.created_at,
                labels: status.labels,
                annotations: status.annotations,
                runtime_handler: status.runtime_handler,
            })
            .collect())
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: ContainerConfig,
        _sandbox_config: &PodSandboxConfig,
    ) -> Result<String> {
        let name = config.metadata.as_ref().map(|m| m.name.clone()).unwrap_or_default();
        let id = {
            let mut world = self.called("create_container", &name)?;
            if !world.sandboxes.contains_key(sandbox_id) {
                return Err(no("sandbox", sandbox_id));
            }
            world.next += 1;
            let id = format!("container{}", world.next);
            let image = config.image.clone();
            let status = ContainerStatus {
                id: id.clone(),
                metadata: config.metadata.clone(),
                state: ContainerState::Created as i32,
                created_at: now(),
                image_ref: image.as_ref().map(|image| image.image.clone()).unwrap_or_default(),
                image,
                labels: config.labels.clone(),
                annotations: config.annotations.clone(),
                mounts: config.mounts.clone(),
                log_path: config.log_path.clone(),
                ..Default::default()
            };
            let sandbox = sandbox_id.to_owned();
            world.containers.insert(id.clone(), FakeContainer { status, sandbox, config });
            id
        };
        self.tell(ContainerEventType::Created, &id);
        Ok(id)
    }

    async fn start_container(&self, id: &str) -> Result<()> {
        let asked = self.called("start_container", id).map(drop);
        if asked.is_err() {
            // As in real runtimes, a container that failed to start is in the exited state.
            self.end(id, 128, "StartError");
        }
        asked?;
        {
            let mut world = self.world();
            let found = world.containers.get_mut(id).ok_or_else(|| no("container", id))?;
            if found.status.state() != ContainerState::Created {
                return Err(Error::FailedPrecondition(format!("container {id:?} was started")));
            }
            found.status.set_state(ContainerState::Running);
            found.status.started_at = now();
        }
        self.tell(ContainerEventType::Started, id);
        Ok(())
    }

    async fn stop_container(&self, id: &str, timeout: Duration) -> Result<()> {
        drop(self.called("stop_container", &format!("{id} {}", timeout.as_secs()))?);
        self.end(id, 143, "Error");
        Ok(())
    }

    async fn remove_container(&self, id: &str) -> Result<()> {
        drop(self.called("remove_container", id)?);
        self.end(id, 137, "Error");
        self.tell(ContainerEventType::Deleted, id);
        self.world().containers.remove(id);
        Ok(())
    }

    async fn list_containers(&self, filter: Option<ContainerFilter>) -> Result<Vec<Container>> {
        let filter = filter.unwrap_or_default();
        let world = self.world();
        let fits = |container: &&FakeContainer| {
            (filter.id.is_empty() || filter.id == container.status.id)
                && (filter.pod_sandbox_id.is_empty() || filter.pod_sandbox_id == container.sandbox)
                && filter.state.as_ref().is_none_or(|wanted| wanted.state == container.status.state)
                && selects(&filter.label_selector, &container.status.labels)
        };
        Ok(world
            .containers
            .values()
            .filter(fits)
            .map(|container| Container {
                id: container.status.id.clone(),
                pod_sandbox_id: container.sandbox.clone(),
                metadata: container.status.metadata.clone(),
                image: container.status.image.clone(),
                image_ref: container.status.image_ref.clone(),
                state: container.status.state,
                created_at: container.status.created_at,
                labels: container.status.labels.clone(),
                annotations: container.status.annotations.clone(),
                image_id: container.status.image_id.clone(),
            })
            .collect())
    }

    async fn container_status(&self, id: &str) -> Result<ContainerStatus> {
        let world = self.world();
        let found = world.containers.get(id).map(|container| container.status.clone());
        found.ok_or_else(|| no("container", id))
    }

    async fn update_container_resources(
        &self,
        id: &str,
        resources: LinuxContainerResources,
    ) -> Result<()> {
        let mut world = self.called("update_container_resources", id)?;
        let found = world.containers.get_mut(id).ok_or_else(|| no("container", id))?;
        found.status.resources = Some(ContainerResources { linux: Some(resources) });
        Ok(())
    }

    async fn reopen_container_log(&self, id: &str) -> Result<()> {
        self.called("reopen_container_log", id).map(|_| ())
    }

    async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        _timeout: Option<Duration>,
    ) -> Result<ExecSyncResponse> {
        let world = self.called("exec_sync", &format!("{id} {}", command.join(" ")))?;
        if !world.containers.contains_key(id) {
            return Err(no("container", id));
        }
        Ok(world.exec.clone())
    }

    async fn exec(&self, request: ExecRequest) -> Result<ExecStreams> {
        let answer = self.exec_sync(&request.container_id, request.cmd, None).await?;
        let (sender, exit) = oneshot::channel();
        // `receiver` is still alive, so this cannot fail.
        let _ = sender.send(Ok(answer.exit_code));
        let output = |wanted: bool, bytes: Bytes| {
            wanted.then(|| Box::new(std::io::Cursor::new(bytes)) as Output)
        };
        Ok(ExecStreams {
            stdin: request.stdin.then(|| Box::new(tokio::io::sink()) as Input),
            stdout: output(request.stdout, answer.stdout),
            stderr: output(request.stderr, answer.stderr),
            resize: None,
            exit,
        })
    }

    async fn attach(&self, request: AttachRequest) -> Result<AttachStreams> {
        drop(self.called("attach", &request.container_id)?);
        Ok(AttachStreams {
            stdin: request.stdin.then(|| Box::new(tokio::io::sink()) as Input),
            stdout: request.stdout.then(|| Box::new(tokio::io::empty()) as Output),
            stderr: request.stderr.then(|| Box::new(tokio::io::empty()) as Output),
            resize: None,
        })
    }

    /// Echoes all bytes.
    async fn port_forward(&self, sandbox_id: &str, port: u16) -> Result<Io> {
        drop(self.called("port_forward", &format!("{sandbox_id} {port}"))?);
        let echo = tokio::io::SimplexStream::new_unsplit(64 << 10);
        Ok(Box::new(echo))
    }

    async fn container_stats(&self, id: &str) -> Result<ContainerStats> {
        let status = self.container_status(id).await?;
        Ok(ContainerStats {
            attributes: Some(ContainerAttributes {
                id: status.id,
                metadata: status.metadata,
                labels: status.labels,
                annotations: status.annotations,
            }),
            ..Default::default()
        })
    }

    async fn list_container_stats(
        &self,
        _filter: Option<ContainerStatsFilter>,
    ) -> Result<Vec<ContainerStats>> {
        Ok(Vec::new())
    }

    async fn pod_sandbox_stats(&self, id: &str) -> Result<PodSandboxStats> {
        self.pod_sandbox_status(id).await.map(|_| PodSandboxStats::default())
    }

    async fn list_pod_sandbox_stats(
        &self,
        _filter: Option<PodSandboxStatsFilter>,
    ) -> Result<Vec<PodSandboxStats>> {
        Ok(Vec::new())
    }

    async fn events(&self) -> Result<Events> {
        Ok(self.0.events.subscribe())
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

#[async_trait]
impl ImageService for Fake {
    async fn list_images(&self, _filter: Option<ImageFilter>) -> Result<Vec<Image>> {
        Ok(self.world().images.iter().map(|name| image(name)).collect())
    }

    async fn image_status(&self, wanted: &ImageSpec) -> Result<Option<Image>> {
        let world = self.world();
        Ok(world.images.get(&wanted.image).map(|name| image(name)))
    }

    async fn pull_image(
        &self,
        wanted: &ImageSpec,
        _auth: Option<AuthConfig>,
        _sandbox_config: Option<&PodSandboxConfig>,
    ) -> Result<String> {
        let mut world = self.called("pull_image", &wanted.image)?;
        if world.missing.contains(&wanted.image) {
            return Err(no("image", &wanted.image));
        }
        world.images.insert(wanted.image.clone());
        Ok(image(&wanted.image).id)
    }

    async fn remove_image(&self, wanted: &ImageSpec) -> Result<()> {
        self.called("remove_image", &wanted.image)?.images.remove(&wanted.image);
        Ok(())
    }

    async fn image_fs_info(&self) -> Result<ImageFsInfoResponse> {
        Ok(ImageFsInfoResponse::default())
    }
}

fn image(name: &str) -> Image {
    Image {
        id: format!("sha256:{name}"),
        repo_tags: vec![name.to_owned()],
        size: 1,
        uid: Some(0.into()),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn containers_keep_cris_rules() {
        let fake = Fake::new();
        let mut events = fake.events().await.expect("events");
        let config = PodSandboxConfig::default();
        let sandbox = fake.run_pod_sandbox(config.clone(), "").await.expect("run");
        let container = fake
            .create_container(&sandbox, ContainerConfig::default(), &config)
            .await
            .expect("created");
        fake.start_container(&container).await.expect("started");
        assert!(fake.start_container(&container).await.is_err());
        fake.exit(&container, 3);
        let status = fake.container_status(&container).await.expect("there");
        assert_eq!((status.state(), status.exit_code), (ContainerState::Exited, 3));
        let mut kinds = Vec::new();
        while let Ok(event) = events.try_recv() {
            kinds.push(event.container_event_type());
        }
        use ContainerEventType::*;
        assert_eq!(kinds, [Started, Created, Started, Stopped]);
    }
}
