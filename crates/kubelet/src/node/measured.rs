//! Wraps the runtime: counts and times every call.
//!
//! In: the kubelet's calls. Out: the same calls of the inner runtime, and metrics for `/metrics`.
//! Invariant: arguments, answers and errors pass unchanged.
//! Upstream: `kuberuntime/instrumented_services.go`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use cri::*;
use tokio::time::Instant;

use crate::node::figures::Figures;

pub struct Measured {
    inner: Arc<dyn Runtime>,
    figures: Arc<Figures>,
}

impl Measured {
    pub fn new(inner: Arc<dyn Runtime>, figures: Arc<Figures>) -> Self {
        Self { inner, figures }
    }

    async fn note<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let begun = Instant::now();
        let done = call.await;
        self.figures.operation(operation, begun.elapsed(), done.is_err());
        done
    }
}

#[async_trait]
impl RuntimeService for Measured {
    async fn version(&self) -> Result<VersionResponse> {
        self.note("version", self.inner.version()).await
    }

    async fn status(&self, verbose: bool) -> Result<StatusResponse> {
        self.note("status", self.inner.status(verbose)).await
    }

    async fn runtime_config(&self) -> Result<LinuxRuntimeConfiguration> {
        self.note("runtime_config", self.inner.runtime_config()).await
    }

    async fn update_runtime_config(&self, pod_cidr: &str) -> Result<()> {
        self.note("update_runtime_config", self.inner.update_runtime_config(pod_cidr)).await
    }

    async fn run_pod_sandbox(
        &self,
        config: PodSandboxConfig,
        runtime_handler: &str,
    ) -> Result<String> {
        self.note("run_podsandbox", self.inner.run_pod_sandbox(config, runtime_handler)).await
    }

    async fn stop_pod_sandbox(&self, id: &str) -> Result<()> {
        self.note("stop_podsandbox", self.inner.stop_pod_sandbox(id)).await
    }

    async fn remove_pod_sandbox(&self, id: &str) -> Result<()> {
        self.note("remove_podsandbox", self.inner.remove_pod_sandbox(id)).await
    }

    async fn pod_sandbox_status(&self, id: &str) -> Result<PodSandboxStatus> {
        self.note("podsandbox_status", self.inner.pod_sandbox_status(id)).await
    }

    async fn list_pod_sandbox(&self, filter: Option<PodSandboxFilter>) -> Result<Vec<PodSandbox>> {
        self.note("list_podsandbox", self.inner.list_pod_sandbox(filter)).await
    }

    async fn create_container(
        &self,
        sandbox_id: &str,
        config: ContainerConfig,
        sandbox_config: &PodSandboxConfig,
    ) -> Result<String> {
        let call = self.inner.create_container(sandbox_id, config, sandbox_config);
        self.note("create_container", call).await
    }

    async fn start_container(&self, id: &str) -> Result<()> {
        self.note("start_container", self.inner.start_container(id)).await
    }

    async fn stop_container(&self, id: &str, timeout: Duration) -> Result<()> {
        self.note("stop_container", self.inner.stop_container(id, timeout)).await
    }

    async fn remove_container(&self, id: &str) -> Result<()> {
        self.note("remove_container", self.inner.remove_container(id)).await
    }

    async fn list_containers(&self, filter: Option<ContainerFilter>) -> Result<Vec<Container>> {
        self.note("list_containers", self.inner.list_containers(filter)).await
    }

    async fn container_status(&self, id: &str) -> Result<ContainerStatus> {
        self.note("container_status", self.inner.container_status(id)).await
    }

    async fn update_container_resources(
        &self,
        id: &str,
        resources: LinuxContainerResources,
    ) -> Result<()> {
        let call = self.inner.update_container_resources(id, resources);
        self.note("update_container", call).await
    }

    async fn reopen_container_log(&self, id: &str) -> Result<()> {
        self.note("reopen_container_log", self.inner.reopen_container_log(id)).await
    }

    async fn exec_sync(
        &self,
        id: &str,
        command: Vec<String>,
        timeout: Option<Duration>,
    ) -> Result<ExecSyncResponse> {
        self.note("exec_sync", self.inner.exec_sync(id, command, timeout)).await
    }

    async fn exec(&self, request: ExecRequest) -> Result<ExecStreams> {
        self.note("exec", self.inner.exec(request)).await
    }

    async fn attach(&self, request: AttachRequest) -> Result<AttachStreams> {
        self.note("attach", self.inner.attach(request)).await
    }

    async fn port_forward(&self, sandbox_id: &str, port: u16) -> Result<Io> {
        self.note("port_forward", self.inner.port_forward(sandbox_id, port)).await
    }

    async fn container_stats(&self, id: &str) -> Result<ContainerStats> {
        self.note("container_stats", self.inner.container_stats(id)).await
    }

    async fn list_container_stats(
        &self,
        filter: Option<ContainerStatsFilter>,
    ) -> Result<Vec<ContainerStats>> {
        self.note("list_container_stats", self.inner.list_container_stats(filter)).await
    }

    async fn pod_sandbox_stats(&self, id: &str) -> Result<PodSandboxStats> {
        self.note("podsandbox_stats", self.inner.pod_sandbox_stats(id)).await
    }

    async fn list_pod_sandbox_stats(
        &self,
        filter: Option<PodSandboxStatsFilter>,
    ) -> Result<Vec<PodSandboxStats>> {
        self.note("list_podsandbox_stats", self.inner.list_pod_sandbox_stats(filter)).await
    }

    async fn events(&self) -> Result<Events> {
        self.inner.events().await
    }

    fn name(&self) -> &'static str {
        self.inner.name()
    }
}

#[async_trait]
impl ImageService for Measured {
    async fn list_images(&self, filter: Option<ImageFilter>) -> Result<Vec<Image>> {
        self.note("list_images", self.inner.list_images(filter)).await
    }

    async fn image_status(&self, image: &ImageSpec) -> Result<Option<Image>> {
        self.note("image_status", self.inner.image_status(image)).await
    }

    async fn pull_image(
        &self,
        image: &ImageSpec,
        auth: Option<AuthConfig>,
        sandbox_config: Option<&PodSandboxConfig>,
    ) -> Result<String> {
        self.note("pull_image", self.inner.pull_image(image, auth, sandbox_config)).await
    }

    async fn remove_image(&self, image: &ImageSpec) -> Result<()> {
        self.note("remove_image", self.inner.remove_image(image)).await
    }

    async fn image_fs_info(&self) -> Result<ImageFsInfoResponse> {
        self.note("image_fs_info", self.inner.image_fs_info()).await
    }
}
