//! Errors of CSI: a driver does not register, or a volume is not mounted or unmounted.
//!
//! The texts are upstream's: drivers and events show them.

use std::io;

use client::ErrorExt;

use super::PLUGIN;
use crate::plugins::rpc::RpcError;
use crate::pod::objects::ObjectError;
use crate::reason::Reason;

#[derive(Debug, thiserror::Error)]
pub enum CsiError {
    #[error("{}", .0.text())]
    Api(Box<client::Error>),
    #[error(transparent)]
    Rpc(#[from] RpcError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error(transparent)]
    Event(#[from] Reason),
    #[error("driver name {0} not found in the list of registered CSI drivers")]
    NotRegistered(String),
    #[error("volume mode {mode:?} not supported by driver {driver} ({why})")]
    Mode { mode: &'static str, driver: String, why: String },
    #[error("fetching {what} {namespace}/{name} failed: {PLUGIN}: failed to find the secret {name} in the namespace {namespace} with error: {}", .error.text())]
    Secret { what: &'static str, namespace: String, name: String, error: Box<client::Error> },
    #[error("Expander.NodeExpand failed to expand the volume : {0}")]
    Expand(RpcError),
    /// A step of unmounting failed.
    #[error("{step} failed for volume {volume:?} : {why}")]
    Step { step: &'static str, volume: String, why: Box<Self> },
    #[error("{PLUGIN}: {call}: {why}")]
    Call { call: &'static str, why: Box<Self> },
    #[error("error adding CSI driver node info: driverNodeID must not be empty")]
    NoNodeId,
    /// The driver's entry in the Node or CSINode was not changed.
    #[error("error {change} {why}")]
    NodeInfo { change: &'static str, why: Box<Self> },
    #[error(
        "detected topology value collision: driver reported {key:?}:{value:?} but existing label is {key:?}:{known:?}"
    )]
    Topology { key: String, value: String, known: String },
    #[error("error updating CSINode: timed out waiting for the condition; caused by: {}", .0.as_ref().map(|error| error.text()).unwrap_or_default())]
    CsiNode(Option<Box<client::Error>>),
    #[error("None of the versions specified {0:?} are supported.")]
    NoVersion(String),
    #[error(
        "Another driver with the same name is already registered with a higher supported version: {0:?}"
    )]
    NewerDriver(String),
    #[error(
        "plugin validation failed with err: validation failed for CSI Driver {driver} at endpoint {endpoint}: {PLUGIN}: ValidatePlugin for CSI driver {driver:?} failed. {why}"
    )]
    Validation { driver: String, endpoint: String, why: Box<Self> },
    #[error("plugin registration failed with err: {0}")]
    Registration(Box<Self>),
}

impl From<client::Error> for CsiError {
    fn from(error: client::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

impl CsiError {
    /// Names the driver's call that failed.
    pub fn call<E: Into<Self>>(call: &'static str) -> impl FnOnce(E) -> Self {
        move |why| Self::Call { call, why: Box::new(why.into()) }
    }
}
