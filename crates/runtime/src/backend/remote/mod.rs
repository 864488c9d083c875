//! The remote backend: a separate runtime (containerd, CRI-O), reached over CRI v1.
//!
//! In: the path of its socket. Out: [`cri::Runtime`]. The messages are those of the protocol, so
//! this module mostly lists calls and their timeouts.
//!
//! ```text
//!  kubelet ─► Remote ─┬─ rpc        one gRPC connection per socket ─► runtime, image service
//!                     ├─ events     one shared stream
//!                     └─ streaming  SPDY to the URLs of exec, attach, port-forward
//! ```
//!
//! Invariants: only the connection is kept between calls. A call while the runtime is down fails at
//! once with `Unavailable`, and the first call after its return succeeds. No request is sent twice.
//!
//! Upstream: `k8s.io/cri-client`, including its limits and messages.

mod events;
mod rpc;
mod streaming;

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use base::task::Tasks;
use cri::*;
use prost::Message;
use transport::channels::Streams;

use events::Hub;
use rpc::{Nothing, Rpc};
use streaming::Streamer;

pub const NAME: &str = "remote";
/// Upstream: `--runtime-request-timeout`.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(2 * 60);

#[derive(Clone, Debug)]
pub struct Endpoints {
    /// `unix:///run/containerd/containerd.sock`, or a path.
    pub runtime: String,
    /// The endpoint of the image service, if it differs.
    pub images: Option<String>,
    pub timeout: Duration,
}

/// A file in a node's data directory with the endpoints of its remote runtime, in two lines. It is
/// for commands that know only the directory.
const RECORD: &str = "runtime.endpoint";

impl Endpoints {
    pub fn remember(&self, data_dir: &Path) -> std::io::Result<()> {
        let images = self.images.as_ref().unwrap_or(&self.runtime);
        let text = format!("{}\n{images}\n", self.runtime);
        crate::files::write_atomic(&data_dir.join(RECORD), text.as_bytes())
    }

    /// Removes the record: the node uses the embedded runtime (again).
    pub fn forget(data_dir: &Path) -> std::io::Result<()> {
        match std::fs::remove_file(data_dir.join(RECORD)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// `None`: the node uses the embedded runtime.
    pub fn of_cluster(data_dir: &Path) -> std::io::Result<Option<Self>> {
        let Some(bytes) = crate::files::read(&data_dir.join(RECORD))? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        let mut lines = text.lines().map(str::to_owned);
        let (runtime, images) = (lines.next(), lines.next());
        Ok(runtime.map(|runtime| Self { runtime, images, timeout: REQUEST_TIMEOUT }))
    }
}

/// Cheap to clone; clones share the connection.
#[derive(Clone)]
pub struct Remote {
    runtime: Rpc,
    images: Rpc,
    timeout: Duration,
    events: Hub,
    streamer: Streamer,
    tasks: Tasks,
}

macro_rules! runtime_call {
    ($name:literal) => {
        concat!("/runtime.v1.RuntimeService/", $name)
    };
}

macro_rules! image_call {
    ($name:literal) => {
        concat!("/runtime.v1.ImageService/", $name)
    };
}

impl Remote {
    /// Checks that both services answer. `Unavailable` when a retry may succeed.
    pub async fn open(endpoints: &Endpoints, tasks: Tasks) -> Result<Self> {
        let runtime = Rpc::new(&endpoints.runtime)?;
        let images = match endpoints.images.as_deref() {
            Some(other) if other != endpoints.runtime => Rpc::new(other)?,
            _ => runtime.clone(),
        };
        let streamer = Streamer::new(tasks.clone());
        let events = Hub::default();
        let remote = Self { runtime, images, timeout: endpoints.timeout, events, streamer, tasks };
        let image_at = endpoints.images.as_ref().unwrap_or(&endpoints.runtime);
        let invalid = |what: &str, at: &str, error: Error| {
            let code = error.code();
            let text = format!(
                "validate CRI v1 {what} API for endpoint {at:?}: rpc error: code = {code} desc = {error}"
            );
            match error {
                Error::Unavailable(_) | Error::DeadlineExceeded(_) => Error::Unavailable(text),
                _ => Error::Internal(text),
            }
        };
        remote.version().await.map_err(|error| invalid("runtime", &endpoints.runtime, error))?;
        remote.image_fs_info().await.map_err(|error| invalid("image", image_at, error))?;
        Ok(remote)
    }

    /// A call to the runtime service with the default timeout.
    async fn ask<Q, A>(&self, path: &'static str, request: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.runtime.call(path, request, Some(self.timeout)).await
    }

    /// Like `ask`, for calls without an answer.
    async fn tell<Q: Message + Send + Sync + 'static>(
        &self,
        path: &'static str,
        request: Q,
    ) -> Result<()> {
        self.ask::<Q, Nothing>(path, request).await.map(drop)
    }

    async fn ask_images<Q, A>(&self, path: &'static str, request: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.images.call(path, request, Some(self.timeout)).await
    }
}

/// Unwraps a required field.
fn required<T>(value: Option<T>, what: &str) -> Result<T> {
    value.ok_or_else(|| Error::Internal(format!("{what} is not set")))
}

fn named(text: String, what: &str) -> Result<String> {
    required(Some(text).filter(|text| !text.is_empty()), what)
}

/// CRI counts in whole seconds. Rounds up, because zero would mean "no limit" or "at once".
fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis().div_ceil(1000)).unwrap_or(i64::MAX)
}

#[async_trait]
impl RuntimeService for Remote {
    async fn version(&self) -> Result<VersionResponse> {
        let answer: VersionResponse =
            self.ask(runtime_call!("Version"), VersionRequest::default()).await?;
        let fields = [
            ("Version", &answer.version),
            ("RuntimeName", &answer.runtime_name),
            ("RuntimeApiVersion", &answer.runtime_api_version),
            ("RuntimeVersion", &answer.runtime_version),
        ];
        let missing: Vec<&str> =
            fields.iter().filter(|(_, value)| value.is_empty()).map(|(name, _)| *name).collect();
        if !missing.is_empty() {
            let text = format!(
                "not all fields are set in VersionResponse (missing {})",
                missing.join(", ")
            );
            return Err(Error::Internal(text));
        }
        Ok(answer)
    }

    async fn status(&self, verbose: bool) -> Result<StatusResponse> {
        let answer: StatusResponse =
            self.ask(runtime_call!("Status"), StatusRequest { verbose }).await?;
        let conditions = answer.status.as_ref().map_or(0, |status| status.conditions.len());
        required(Some(()).filter(|()| conditions >= 2), "RuntimeReady or NetworkReady condition")?;
        Ok(answer)
    }

    async fn runtime_config(&self) -> Result<LinuxRuntimeConfiguration> {
        let answer: RuntimeConfigResponse =
            self.ask(runtime_call!("RuntimeConfig"), RuntimeConfigRequest {}).await?;
        // Upstream: without an answer the kubelet's own setting stays, as without the call.
        answer
            .linux
            .ok_or_else(|| Error::Unimplemented("the runtime reports no cgroup driver".into()))
    }

    async fn update_runtime_config(&self, pod_cidr: &str) -> Result<()> {
        let network = NetworkConfig { pod_cidr: pod_cidr.to_owned() };
        let config = RuntimeConfig { network_config: Some(network) };
        let request = UpdateRuntimeConfigRequest { runtime_config: Some(config) };
        self.tell(runtime_call!("UpdateRuntimeConfig"), request).await
    }

    async fn run_pod_sandbox(
        &self,
        config: PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<String> {
        let request = RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: runtime_handler.to_owned(),
        };
        // Upstream: setting up the network may take long.
        let limit = Some(self.timeout * 2);
        let answer: RunPodSandboxResponse =
            self.runtime.call(runtime_call!("RunPodSandbox"), request, limit).await?;
        named(answer.pod_sandbox_id, "PodSandboxId")
    }

    async fn stop_pod_sandbox(&self, id: &str) -> Result<()> {
        let request = StopPodSandboxRequest { pod_sandbox_id: id.to_owned() };
        gone_is_done(self.tell(runtime_call!("StopPodSandbox"), request).await)
    }

    async fn remove_pod_sandbox(&self, id: &str) -> Result<()> {
        let request = RemovePodSandboxRequest { pod_sandbox_id: id.to_owned() };
        gone_is_done(self.tell(runtime_call!("RemovePodSandbox"), request).await)
    }

    async fn pod_sandbox_status(&self, id: &str) -> Result<PodSandboxStatus> {
        let request = PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
        let answer: PodSandboxStatusResponse =
            self.ask(runtime_call!("PodSandboxStatus"), request).await?;
        required(answer.status, "PodSandboxStatus")
    }

    async fn list_pod_sandbox(&self, filter: Option<PodSandboxFilter>) -> Result<Vec<PodSandbox>> {
        let answer: ListPodSandboxResponse =
            self.ask(runtime_call!("ListPodSandbox"), ListPodSandboxRequest { filter }).await?;
        Ok(answer.items)
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String> {
        let request = CreateContainerRequest {
            pod_sandbox_id: sandbox_id.to_owned(),
            config: Some(config),
            sandbox_config: Some(sandbox_config.clone()),
        };
        let answer: CreateContainerResponse =
            self.ask(runtime_call!("CreateContainer"), request).await?;
        named(answer.container_id, "ContainerId")
    }

    async fn start_container(&self, id: &str) -> Result<()> {
        let request = StartContainerRequest { container_id: id.to_owned() };
        self.tell(runtime_call!("StartContainer"), request).await
    }

    async fn stop_container(&self, id: &str, timeout: Duration) -> Result<()> {
        let request =
            StopContainerRequest { container_id: id.to_owned(), timeout: seconds(timeout) };
        let limit = Some(self.timeout + timeout);
        let done: Result<Nothing> =
            self.runtime.call(runtime_call!("StopContainer"), request, limit).await;
        gone_is_done(done.map(drop))
    }

    async fn remove_container(&self, id: &str) -> Result<()> {
        let request = RemoveContainerRequest { container_id: id.to_owned() };
        gone_is_done(self.tell(runtime_call!("RemoveContainer"), request).await)
    }

    async fn list_containers(&self, filter: Option<ContainerFilter>) -> Result<Vec<Container>> {
        let answer: ListContainersResponse =
            self.ask(runtime_call!("ListContainers"), ListContainersRequest { filter }).await?;
        Ok(answer.containers)
    }

    async fn container_status(&self, id: &str) -> Result<ContainerStatus> {
        let request = ContainerStatusRequest { container_id: id.to_owned(), verbose: false };
        let answer: ContainerStatusResponse =
            self.ask(runtime_call!("ContainerStatus"), request).await?;
        required(answer.status, "container status")
    }

    async fn update_container_resources(
        &self,
        id: &str,
        resources: LinuxContainerResources,
    ) -> Result<()> {
        let request = UpdateContainerResourcesRequest {
            container_id: id.to_owned(),
            linux: Some(resources),
            ..Default::default()
        };
        self.tell(runtime_call!("UpdateContainerResources"), request).await
    }

    async fn reopen_container_log(&self, id: &str) -> Result<()> {
        let request = ReopenContainerLogRequest { container_id: id.to_owned() };
        self.tell(runtime_call!("ReopenContainerLog"), request).await
    }

    async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout: Option<Duration>,
    ) -> Result<ExecSyncResponse> {
        let text = command.join(" ");
        let request = ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command,
            timeout: timeout.map_or(0, seconds),
        };
        let limit = timeout.map(|timeout| self.timeout + timeout);
        let done = self.runtime.call(runtime_call!("ExecSync"), request, limit).await;
        done.map_err(|error| match error {
            Error::DeadlineExceeded(_) => {
                Error::DeadlineExceeded(format!("command {text:?} timed out"))
            }
            other => other,
        })
    }

    async fn exec(&self, request: ExecRequest) -> Result<ExecStreams> {
        let ExecRequest { tty, stdin, stdout, stderr, .. } = request;
        let answer: ExecResponse = self.ask(runtime_call!("Exec"), request).await?;
        let url = named(answer.url, "URL")?;
        self.streamer.exec(&url, Streams { stdin, stdout, stderr, tty }).await
    }

    async fn attach(&self, request: AttachRequest) -> Result<AttachStreams> {
        let AttachRequest { tty, stdin, stdout, stderr, .. } = request;
        let answer: AttachResponse = self.ask(runtime_call!("Attach"), request).await?;
        let url = named(answer.url, "URL")?;
        self.streamer.attach(&url, Streams { stdin, stdout, stderr, tty }).await
    }

    async fn port_forward(&self, sandbox_id: &str, port: u16) -> Result<Io> {
        let request = PortForwardRequest {
            pod_sandbox_id: sandbox_id.to_owned(),
            port: vec![i32::from(port)],
        };
        let answer: PortForwardResponse = self.ask(runtime_call!("PortForward"), request).await?;
        self.streamer.forward(&named(answer.url, "URL")?, port).await
    }

    async fn container_stats(&self, id: &str) -> Result<ContainerStats> {
        let request = ContainerStatsRequest { container_id: id.to_owned() };
        let answer: ContainerStatsResponse =
            self.ask(runtime_call!("ContainerStats"), request).await?;
        required(answer.stats, "container stats")
    }

    async fn list_container_stats(
        &self,
        filter: Option<ContainerStatsFilter>,
    ) -> Result<Vec<ContainerStats>> {
        let request = ListContainerStatsRequest { filter };
        let answer: ListContainerStatsResponse =
            self.ask(runtime_call!("ListContainerStats"), request).await?;
        Ok(answer.stats)
    }

    async fn pod_sandbox_stats(&self, id: &str) -> Result<PodSandboxStats> {
        let request = PodSandboxStatsRequest { pod_sandbox_id: id.to_owned() };
        let answer: PodSandboxStatsResponse =
            self.ask(runtime_call!("PodSandboxStats"), request).await?;
        required(answer.stats, "pod sandbox stats")
    }

    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<PodSandboxStatsFilter>,
    ) -> Result<Vec<PodSandboxStats>> {
        let request = ListPodSandboxStatsRequest { filter };
        let answer: ListPodSandboxStatsResponse =
            self.ask(runtime_call!("ListPodSandboxStats"), request).await?;
        Ok(answer.stats)
    }

    async fn events(&self) -> Result<Events> {
        self.events.subscribe(&self.runtime, &self.tasks).await
    }

    fn name(&self) -> &'static str {
        NAME
    }
}

#[async_trait]
impl ImageService for Remote {
    async fn list_images(&self, filter: Option<ImageFilter>) -> Result<Vec<Image>> {
        let answer: ListImagesResponse =
            self.ask_images(image_call!("ListImages"), ListImagesRequest { filter }).await?;
        Ok(answer.images)
    }

    async fn image_status(&self, image: &ImageSpec) -> Result<Option<Image>> {
        let request = ImageStatusRequest { image: Some(image.clone()), verbose: false };
        let answer: ImageStatusResponse =
            self.ask_images(image_call!("ImageStatus"), request).await?;
        if answer.image.as_ref().is_some_and(|found| found.id.is_empty() || found.size == 0) {
            let text = format!("Id or size of image {:?} is not set", image.image);
            return Err(Error::Internal(text));
        }
        Ok(answer.image)
    }

    async fn pull_image(
        &self,
        image: &ImageSpec,
        auth: Option<AuthConfig>,
        sandbox_config: Option<&PodSandboxConfig>,
    ) -> Result<String> {
        let request = PullImageRequest {
            image: Some(image.clone()),
            auth,
            sandbox_config: sandbox_config.cloned(),
        };
        // No timeout: images may be large, and the runtime notices a stalled download.
        let answer: PullImageResponse =
            self.images.call(image_call!("PullImage"), request, None).await?;
        named(answer.image_ref, &format!("imageRef of image {:?}", image.image))
    }

    async fn remove_image(&self, image: &ImageSpec) -> Result<()> {
        let request = RemoveImageRequest { image: Some(image.clone()) };
        self.ask_images::<_, Nothing>(image_call!("RemoveImage"), request).await.map(drop)
    }

    async fn image_fs_info(&self) -> Result<ImageFsInfoResponse> {
        self.ask_images(image_call!("ImageFsInfo"), ImageFsInfoRequest {}).await
    }
}

/// CRI requires idempotent stops and removals; old containerd versions return NotFound.
fn gone_is_done(done: Result<()>) -> Result<()> {
    match done {
        Err(Error::NotFound(_)) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_recorded_in_the_data_directory() {
        let home = tempfile::tempdir().expect("a directory");
        let read = || Endpoints::of_cluster(home.path()).expect("reads");
        assert!(read().is_none());
        let endpoints = Endpoints {
            runtime: "unix:///run/c.sock".into(),
            images: None,
            timeout: REQUEST_TIMEOUT,
        };
        endpoints.remember(home.path()).expect("writes");
        let found = read().expect("a record");
        assert_eq!(found.runtime, "unix:///run/c.sock");
        assert_eq!(found.images.as_deref(), Some("unix:///run/c.sock"));
        Endpoints::forget(home.path()).expect("removes");
        Endpoints::forget(home.path()).expect("removes what is gone");
        assert!(read().is_none());
    }

    #[test]
    fn timeouts_round_up_to_whole_seconds() {
        let check = |millis, expected| {
            assert_eq!(seconds(Duration::from_millis(millis)), expected, "{millis}");
        };
        check(0, 0);
        check(1, 1);
        check(1000, 1);
        check(1001, 2);
    }
}
