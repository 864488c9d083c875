//! Subresources that are answered by another server: a pod's log, a node's proxy.
//!
//! In: a handler for each [`Target`]. The server that makes the table passes them in, because this crate
//! knows no kubelets. Out: the behaviour of a subresource.

use std::sync::Arc;

use apiserver::resource::{Behaviour, Connect};

use crate::Wiring;

/// What a request to such a subresource is passed on to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    PodLog,
    PodExec,
    PodAttach,
    PodPortForward,
    PodProxy,
    ServiceProxy,
    NodeProxy,
}

/// The handler of each target.
pub type Connections = dyn Fn(Target) -> Arc<dyn Connect>;

/// Verbs of a proxy: the requests are passed on, whatever they are.
pub(crate) const PROXY_VERBS: &[&str] = &["create", "delete", "get", "patch", "update"];

pub(crate) fn to(target: Target, wiring: &Wiring) -> Behaviour {
    Behaviour::Connect((wiring.connections)(target))
}
