//! Errors of device plugins: a plugin does not register, or a container gets no devices.
//!
//! The texts are upstream's: plugins, events and pods' statuses show them.

use super::registration::VERSION;
use crate::plugins::rpc::RpcError;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DevicePluginError {
    #[error(
        "requested API version {0:?} is not supported by kubelet. Supported version is [{VERSION:?}]"
    )]
    Version(String),
    #[error("manager version, {VERSION}, is not among plugin supported versions [{0}]")]
    Versions(String),
    #[error("the endpoint {0:?} is invalid")]
    Endpoint(String),
    #[error("the ResourceName {0:?} is invalid")]
    Name(String),
    #[error("invalid name of device plugin socket: {0}")]
    SocketName(Box<Self>),
    #[error("plugin validation failed with err: {0}")]
    Validation(Box<Self>),
    #[error("plugin registration failed with err: {0}")]
    Registration(Box<Self>),
    #[error("failed to dial device plugin: {0}")]
    Dial(RpcError),
    #[error("failed to dial device plugin: context deadline exceeded")]
    DialTimeout,
    #[error("failed to get device plugin options: {0}")]
    Options(RpcError),
    #[error(transparent)]
    Rpc(#[from] RpcError),
    #[error("no containers return in allocation response ")]
    NoAnswer,
    #[error("device plugin GetPreferredAllocation rpc failed with err: {0}")]
    Preferred(RpcError),
    #[error("device plugin PreStartContainer rpc failed with err: {0}")]
    PreStart(Box<Self>),
    #[error("unknown Device Plugin {0}")]
    Unknown(String),
    #[error("endpoint {0} has been stopped")]
    Stopped(String),
    #[error("endpoint not found in cache for a registered resource: {0}")]
    NoEndpoint(String),
    #[error(
        "no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}"
    )]
    NotAllocated { pod: String, container: String, resource: String },
    #[error(
        "pod {pod:?} container {container:?} changed request for resource {resource:?} from {from} to {to}"
    )]
    Changed { pod: String, container: String, resource: String, from: usize, to: usize },
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(String),
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoneHealthy(String),
    #[error(
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}"
    )]
    NoLongerHealthy(String),
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {needed}, Available: {free}"
    )]
    Unavailable { resource: String, needed: usize, free: usize },
}
