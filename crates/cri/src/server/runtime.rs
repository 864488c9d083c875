//! The methods of `runtime.v1.RuntimeService`. A method that streams a list sends it as one message, which
//! has the same fields as the answer of the plain list.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use prost::Message;
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;
use tonic::Status;

use super::grpc::Messages;
use super::{Server, done, metrics, read, reply, required};
use crate::*;

impl Server {
    /// `None`: no such method.
    pub(super) async fn runtime(&self, method: &str, body: Bytes) -> Result<Option<Bytes>> {
        if let Some(answer) = self.general(method, body.clone()).await? {
            return Ok(Some(answer));
        }
        if let Some(answer) = self.sandboxes(method, body.clone()).await? {
            return Ok(Some(answer));
        }
        if let Some(answer) = self.containers(method, body.clone()).await? {
            return Ok(Some(answer));
        }
        if let Some(answer) = self.commands(method, body.clone()).await? {
            return Ok(Some(answer));
        }
        self.statistics(method, body).await
    }

    async fn general(&self, method: &str, body: Bytes) -> Result<Option<Bytes>> {
        match method {
            "Version" => reply(&self.runtime.version().await?),
            "Status" => {
                let ask: StatusRequest = read(body)?;
                reply(&self.runtime.status(ask.verbose).await?)
            }
            "RuntimeConfig" => {
                let linux = Some(self.runtime.runtime_config().await?);
                reply(&RuntimeConfigResponse { linux })
            }
            "UpdateRuntimeConfig" => {
                let ask: UpdateRuntimeConfigRequest = read(body)?;
                let network = ask.runtime_config.and_then(|config| config.network_config);
                let cidr = network.map(|network| network.pod_cidr).unwrap_or_default();
                self.runtime.update_runtime_config(&cidr).await?;
                done()
            }
            "ListMetricDescriptors" => reply(&metrics::descriptors()),
            "ListPodSandboxMetrics" | "StreamPodSandboxMetrics" => {
                let stats = self.runtime.list_pod_sandbox_stats(None).await?;
                reply(&metrics::of(&stats))
            }
            _ => Ok(None),
        }
    }

    async fn sandboxes(&self, method: &str, body: Bytes) -> Result<Option<Bytes>> {
        let runtime = &self.runtime;
        match method {
            "RunPodSandbox" => {
                let ask: RunPodSandboxRequest = read(body)?;
                let config = required(ask.config, "config")?;
                let made = runtime.run_pod_sandbox(config, &ask.runtime_handler).await?;
                reply(&RunPodSandboxResponse { pod_sandbox_id: made })
            }
            "StopPodSandbox" => {
                let ask: StopPodSandboxRequest = read(body)?;
                runtime.stop_pod_sandbox(&ask.pod_sandbox_id).await?;
                done()
            }
            "RemovePodSandbox" => {
                let ask: RemovePodSandboxRequest = read(body)?;
                runtime.remove_pod_sandbox(&ask.pod_sandbox_id).await?;
                done()
            }
            "PodSandboxStatus" => {
                let ask: PodSandboxStatusRequest = read(body)?;
                let status = Some(runtime.pod_sandbox_status(&ask.pod_sandbox_id).await?);
                reply(&PodSandboxStatusResponse { status, ..Default::default() })
            }
            "ListPodSandbox" | "StreamPodSandboxes" => {
                let ask: ListPodSandboxRequest = read(body)?;
                let items = runtime.list_pod_sandbox(ask.filter).await?;
                reply(&ListPodSandboxResponse { items })
            }
            // The kubelet has changed the pod's cgroup before; the containers' own limits stay.
            "UpdatePodSandboxResources" => {
                let ask: UpdatePodSandboxResourcesRequest = read(body)?;
                runtime.pod_sandbox_status(&ask.pod_sandbox_id).await?;
                done()
            }
            _ => Ok(None),
        }
    }

    async fn containers(&self, method: &str, body: Bytes) -> Result<Option<Bytes>> {
        let runtime = &self.runtime;
        match method {
            "CreateContainer" => {
                let ask: CreateContainerRequest = read(body)?;
                let config = required(ask.config, "config")?;
                check_group(&config)?;
                let pod = ask.sandbox_config.unwrap_or_default();
                let made = runtime.create_container(&ask.pod_sandbox_id, config, &pod).await?;
                reply(&CreateContainerResponse { container_id: made })
            }
            "StartContainer" => {
                let ask: StartContainerRequest = read(body)?;
                runtime.start_container(&ask.container_id).await?;
                done()
            }
            "StopContainer" => {
                let ask: StopContainerRequest = read(body)?;
                runtime.stop_container(&ask.container_id, seconds(ask.timeout)).await?;
                done()
            }
            "RemoveContainer" => {
                let ask: RemoveContainerRequest = read(body)?;
                runtime.remove_container(&ask.container_id).await?;
                done()
            }
            "ListContainers" | "StreamContainers" => {
                let ask: ListContainersRequest = read(body)?;
                let containers = runtime.list_containers(ask.filter).await?;
                reply(&ListContainersResponse { containers })
            }
            "ContainerStatus" => {
                let ask: ContainerStatusRequest = read(body)?;
                let status = Some(runtime.container_status(&ask.container_id).await?);
                let info = match ask.verbose {
                    true => details(runtime.container_details(&ask.container_id).await)?,
                    false => BTreeMap::new(),
                };
                reply(&ContainerStatusResponse { status, info })
            }
            "UpdateContainerResources" => {
                let ask: UpdateContainerResourcesRequest = read(body)?;
                let resources = required(ask.linux, "resources for Linux")?;
                runtime.update_container_resources(&ask.container_id, resources).await?;
                done()
            }
            "ReopenContainerLog" => {
                let ask: ReopenContainerLogRequest = read(body)?;
                runtime.reopen_container_log(&ask.container_id).await?;
                done()
            }
            "CheckpointContainer" => Err(Error::Unimplemented(format!(
                "the runtime {:?} cannot checkpoint containers",
                runtime.name()
            ))),
            _ => Ok(None),
        }
    }

    async fn commands(&self, method: &str, body: Bytes) -> Result<Option<Bytes>> {
        match method {
            "ExecSync" => {
                let ask: ExecSyncRequest = read(body)?;
                let limit = Some(seconds(ask.timeout)).filter(|limit| !limit.is_zero());
                reply(&self.runtime.exec_sync(&ask.container_id, ask.cmd, limit).await?)
            }
            "Exec" => {
                let url = self.streaming.exec(read(body)?).await?;
                reply(&ExecResponse { url })
            }
            "Attach" => {
                let url = self.streaming.attach(read(body)?).await?;
                reply(&AttachResponse { url })
            }
            "PortForward" => {
                let url = self.streaming.forward(read(body)?).await?;
                reply(&PortForwardResponse { url })
            }
            _ => Ok(None),
        }
    }

    async fn statistics(&self, method: &str, body: Bytes) -> Result<Option<Bytes>> {
        let runtime = &self.runtime;
        match method {
            "ContainerStats" => {
                let ask: ContainerStatsRequest = read(body)?;
                let stats = Some(runtime.container_stats(&ask.container_id).await?);
                reply(&ContainerStatsResponse { stats })
            }
            "ListContainerStats" | "StreamContainerStats" => {
                let ask: ListContainerStatsRequest = read(body)?;
                let stats = runtime.list_container_stats(ask.filter).await?;
                reply(&ListContainerStatsResponse { stats })
            }
            "PodSandboxStats" => {
                let ask: PodSandboxStatsRequest = read(body)?;
                let stats = Some(runtime.pod_sandbox_stats(&ask.pod_sandbox_id).await?);
                reply(&PodSandboxStatsResponse { stats })
            }
            "ListPodSandboxStats" | "StreamPodSandboxStats" => {
                let ask: ListPodSandboxStatsRequest = read(body)?;
                let stats = runtime.list_pod_sandbox_stats(ask.filter).await?;
                reply(&ListPodSandboxStatsResponse { stats })
            }
            _ => Ok(None),
        }
    }

    /// Events from now on. A reader that is too slow gets an error and must list again.
    pub(super) async fn events(&self) -> Result<Messages> {
        let events = self.runtime.events().await?;
        let next = |mut events: Events| async move {
            let message = match events.recv().await {
                Ok(event) => Ok(event.encode_to_vec().into()),
                Err(RecvError::Closed) => return None,
                Err(RecvError::Lagged(count)) => Err(Status::resource_exhausted(format!(
                    "{count} events were dropped because the reader was too slow: list again"
                ))),
            };
            Some((message, events))
        };
        Ok(futures::stream::unfold(events, next).boxed())
    }
}

/// The protocol demands this error. The kubelet of this process may leave the user to the image.
fn check_group(config: &ContainerConfig) -> Result<()> {
    let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    match security.and_then(|it| it.run_as_group.as_ref().map(|group| (it, group.value))) {
        Some((it, group)) if it.run_as_user.is_none() && it.run_as_username.is_empty() => {
            Err(Error::InvalidArgument(format!("user group {group} is specified without user")))
        }
        _ => Ok(()),
    }
}

fn seconds(count: i64) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or(0))
}

/// The verbose part of a container's status, with containerd's names.
fn details(found: Result<ContainerDetails>) -> Result<BTreeMap<String, String>> {
    let found = match found {
        Err(Error::Unimplemented(_)) => return Ok(BTreeMap::new()),
        other => other?,
    };
    let spec: Value = found.spec.as_deref().map_or(Value::Null, |text| {
        // The runtime wrote this text itself.
        serde_json::from_str(text).unwrap_or_default()
    });
    let info = json!({
        "sandboxID": found.sandbox_id,
        "pid": found.pid.unwrap_or(0),
        "runtimeSpec": spec,
    });
    Ok(BTreeMap::from([("info".to_owned(), info.to_string())]))
}
