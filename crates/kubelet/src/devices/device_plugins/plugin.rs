//! The kubelet's connection to a device plugin.
//!
//! In: a socket, devices. Out: the plugin's options, its lists of devices, its answers.
//! Upstream: `plugin/v1beta1/client.go`, `endpoint.go`.

use std::path::Path;
use std::time::Duration;

use base::backoff::Backoff;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Streaming;

use super::DevicePluginError;
use super::messages::{
    AllocateAnswer, AllocateRequest, Allocated, ContainerPreferredRequest, Ids, Listed, Options,
    PreStartRequest, PreferredAnswer, PreferredRequest,
};
use crate::plugins::rpc::{Rpc, RpcError};
use crate::volumes::csi::messages::Nothing;

/// A plugin may register before it listens. Upstream: `dial`.
const CONNECT: Duration = Duration::from_secs(10);
const CONNECT_RETRY: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// Upstream: `KubeletPreStartContainerRPCTimeoutInSecs`.
const PRE_START_LIMIT: Duration = Duration::from_secs(30);
/// Deviation: upstream has no timeout here, and starts no other pod meanwhile.
const ALLOCATE_LIMIT: Duration = Duration::from_secs(600);

const GET_OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
const LIST_AND_WATCH: &str = "/v1beta1.DevicePlugin/ListAndWatch";
const GET_PREFERRED: &str = "/v1beta1.DevicePlugin/GetPreferredAllocation";
const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";
const PRE_START: &str = "/v1beta1.DevicePlugin/PreStartContainer";

pub struct Plugin {
    rpc: Rpc,
    pub options: Options,
    /// Notified when another plugin has replaced this one.
    pub replaced: Notify,
}

/// Reads the plugin's options; waits until it listens.
pub async fn connect(socket: &Path) -> Result<Plugin, DevicePluginError> {
    let rpc = Rpc::new(socket).map_err(DevicePluginError::Dial)?;
    let deadline = Instant::now() + CONNECT;
    let mut backoff = Backoff::new(CONNECT_RETRY[0], CONNECT_RETRY[1]);
    let ask = async {
        loop {
            let call = rpc.call(GET_OPTIONS, Nothing {}, CONNECT).await;
            match call {
                Ok(options) => return Ok(options),
                Err(error) if error.is_unavailable() => sleep(backoff.step()).await,
                Err(error) => return Err(DevicePluginError::Options(error)),
            }
        }
    };
    let asked = timeout_at(deadline, ask).await;
    let options = asked.map_err(|_| DevicePluginError::DialTimeout)??;
    Ok(Plugin { rpc, options, replaced: Notify::new() })
}

/// A plugin that is not contacted.
#[cfg(test)]
pub fn unasked(socket: &Path, options: Options) -> Result<Plugin, DevicePluginError> {
    let rpc = Rpc::new(socket)?;
    Ok(Plugin { rpc, options, replaced: Notify::new() })
}

impl Plugin {
    pub async fn list_and_watch(&self) -> Result<Streaming<Listed>, RpcError> {
        self.rpc.stream(LIST_AND_WATCH, Nothing {}).await
    }

    /// The error with which a stream ended.
    pub fn error(&self, status: &tonic::Status) -> RpcError {
        self.rpc.error(status)
    }

    /// Calls Allocate: how a container uses these devices.
    pub async fn allocate(&self, devices: Vec<String>) -> Result<Allocated, DevicePluginError> {
        let request = AllocateRequest { containers: vec![Ids { devices }] };
        let call = self.rpc.call(ALLOCATE, request, ALLOCATE_LIMIT).await;
        let answer: AllocateAnswer = call?;
        let first = answer.containers.into_iter().next();
        first.ok_or(DevicePluginError::NoAnswer)
    }

    pub async fn preferred(
        &self,
        asked: ContainerPreferredRequest,
    ) -> Result<Vec<String>, DevicePluginError> {
        let request = PreferredRequest { containers: vec![asked] };
        let call = self.rpc.call(GET_PREFERRED, request, ALLOCATE_LIMIT).await;
        let answer: PreferredAnswer = call.map_err(DevicePluginError::Preferred)?;
        Ok(answer.containers.into_iter().next().map(|ids| ids.devices).unwrap_or_default())
    }

    pub async fn pre_start(&self, devices: Vec<String>) -> Result<(), DevicePluginError> {
        let request = PreStartRequest { devices };
        let call = self.rpc.call(PRE_START, request, PRE_START_LIMIT).await;
        let done: Result<Nothing, RpcError> = call;
        done.map(drop).map_err(|error| DevicePluginError::PreStart(Box::new(error.into())))
    }
}
