//! Why a pod has no sandbox, or a container no configuration, in the words of upstream's events.

use client::ErrorExt;

use crate::devices::device_plugins::DevicePluginError;
use crate::devices::dra::DraError;
use crate::pod::env::EnvError;
use crate::pod::objects::ObjectError;
use crate::pod::users::UsersError;

/// The pod's sandbox cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("runtimeclass.node.k8s.io {0:?} not found")]
    NoRuntimeClass(String),
    #[error("failed to lookup RuntimeClass {class}: {}", .error.text())]
    RuntimeClass { class: String, error: Box<client::Error> },
    #[error(transparent)]
    Users(#[from] UsersError),
    #[error(transparent)]
    Aborted(#[from] tokio::task::JoinError),
    #[error(
        "can't set `spec.hostUsers: false`, {}",
        match .handler.as_str() {
            "" => "runtime does not support user namespaces".to_owned(),
            named => format!("RuntimeClass handler {named:?} does not support user namespaces"),
        }
    )]
    NoUserNamespaces { handler: String },
    #[error("{refused}: {why}")]
    UnknownUserNamespaces { refused: Box<Self>, why: cri::Error },
    #[error("{refused}: the handler {handler:?} is not known")]
    UnknownHandler { refused: Box<Self>, handler: String },
}

/// A container cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("services have not yet been read at least once, cannot construct envvars")]
    NoServices,
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error(transparent)]
    Environment(#[from] EnvError),
    #[error(transparent)]
    DevicePlugin(#[from] DevicePluginError),
    #[error(transparent)]
    Devices(#[from] DraError),
}
