//! The calls of a runtime. The traits are object-safe: backends are chosen at run time.

use std::time::Duration;

use async_trait::async_trait;

use crate::messages::*;
use crate::streams::{AttachStreams, Events, ExecStreams, Io};
use crate::{Error, Result};

/// Both services of one backend.
pub trait Runtime: RuntimeService + ImageService {}
impl<T: RuntimeService + ImageService> Runtime for T {}

/// Facts about a container that have no field in CRI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerDetails {
    pub sandbox_id: String,
    /// While the container runs.
    pub pid: Option<i32>,
    /// The OCI runtime specification, as JSON.
    pub spec: Option<String>,
    pub tty: bool,
    pub stdin_once: bool,
}

/// Sandboxes and containers. `stop_*` and `remove_*` are idempotent: they succeed if the object is
/// already gone.
#[async_trait]
pub trait RuntimeService: Send + Sync {
    async fn version(&self) -> Result<VersionResponse>;
    /// Conditions `RuntimeReady` and `NetworkReady`, and the features of the handlers.
    async fn status(&self, verbose: bool) -> Result<StatusResponse>;
    /// Which cgroup driver the kubelet must use.
    async fn runtime_config(&self) -> Result<LinuxRuntimeConfiguration>;
    /// Sets the node's pod CIDRs, comma-separated for two families. The network is not ready before.
    async fn update_runtime_config(&self, pod_cidr: &str) -> Result<()>;

    /// Returns the sandbox's id.
    async fn run_pod_sandbox(
        &self,
        config: PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<String>;
    /// Kills the sandbox's containers and releases its network.
    async fn stop_pod_sandbox(&self, id: &str) -> Result<()>;
    /// Removes the sandbox and its containers.
    async fn remove_pod_sandbox(&self, id: &str) -> Result<()>;
    async fn pod_sandbox_status(&self, id: &str) -> Result<PodSandboxStatus>;
    async fn list_pod_sandbox(&self, filter: Option<PodSandboxFilter>) -> Result<Vec<PodSandbox>>;

    /// Returns the container's id. The container does not run yet.
    async fn create_container(
        &self,
        sandbox_id: &str,
        config: ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String>;
    async fn start_container(&self, id: &str) -> Result<()>;
    /// Sends the stop signal, and SIGKILL after `timeout` (at once if it is zero). Returns when the
    /// container has ended.
    async fn stop_container(&self, id: &str, timeout: Duration) -> Result<()>;
    /// Kills the container first if it runs.
    async fn remove_container(&self, id: &str) -> Result<()>;
    /// What CRI puts into the verbose part of a status. `Unimplemented` if the backend has nothing.
    async fn container_details(&self, _id: &str) -> Result<ContainerDetails> {
        Err(Error::Unimplemented("this runtime has no details of containers".into()))
    }
    async fn list_containers(&self, filter: Option<ContainerFilter>) -> Result<Vec<Container>>;
    async fn container_status(&self, id: &str) -> Result<ContainerStatus>;
    async fn update_container_resources(
        &self,
        id: &str,
        resources: LinuxContainerResources,
    ) -> Result<()>;
    /// Opens a new log file at the same path, after the old one was renamed.
    async fn reopen_container_log(&self, id: &str) -> Result<()>;

    /// Runs a command to its end. After `timeout` kills it and returns `DeadlineExceeded`. `None`
    /// means no timeout. Each output is cut at 16 MiB.
    async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout: Option<Duration>,
    ) -> Result<ExecSyncResponse>;
    async fn exec(&self, request: ExecRequest) -> Result<ExecStreams>;
    async fn attach(&self, request: AttachRequest) -> Result<AttachStreams>;
    /// A connection to `localhost:port` inside the sandbox's network.
    async fn port_forward(&self, sandbox_id: &str, port: u16) -> Result<Io>;

    async fn container_stats(&self, id: &str) -> Result<ContainerStats>;
    async fn list_container_stats(
        &self,
        filter: Option<ContainerStatsFilter>,
    ) -> Result<Vec<ContainerStats>>;
    async fn pod_sandbox_stats(&self, id: &str) -> Result<PodSandboxStats>;
    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<PodSandboxStatsFilter>,
    ) -> Result<Vec<PodSandboxStats>>;

    /// Events from now on. `Unimplemented` if the backend has none: the caller must relist.
    async fn events(&self) -> Result<Events>;

    /// Deviation: upstream's runtimes report their name only by gRPC; this is the backend's name.
    fn name(&self) -> &'static str;
}

/// Images. An image is named by tag, digest or id.
#[async_trait]
pub trait ImageService: Send + Sync {
    async fn list_images(&self, filter: Option<ImageFilter>) -> Result<Vec<Image>>;
    /// `None` when the image does not exist.
    async fn image_status(&self, image: &ImageSpec) -> Result<Option<Image>>;
    /// Returns the image's reference (its id).
    async fn pull_image(
        &self,
        image: &ImageSpec,
        auth: Option<AuthConfig>,
        sandbox_config: Option<&PodSandboxConfig>,
    ) -> Result<String>;
    async fn remove_image(&self, image: &ImageSpec) -> Result<()>;
    async fn image_fs_info(&self) -> Result<ImageFsInfoResponse>;
}

impl RuntimeStatus {
    /// The condition of that type, for example [`RUNTIME_READY`].
    pub fn condition(&self, kind: &str) -> Option<&RuntimeCondition> {
        self.conditions.iter().find(|condition| condition.r#type == kind)
    }
}

impl TryFrom<ImageSpec> for String {
    type Error = Error;

    fn try_from(spec: ImageSpec) -> Result<String> {
        if spec.image.is_empty() {
            return Err(Error::InvalidArgument("image name is empty".into()));
        }
        Ok(spec.image)
    }
}
