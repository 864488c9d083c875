//! Why a kubelet does not start.

use crate::managers::ManagerError;
use crate::node::reserve::ReserveError;
use crate::pod::users::UsersError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot create {path}: {source}")]
    Directory { path: String, source: std::io::Error },
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error(transparent)]
    Users(#[from] UsersError),
    #[error(transparent)]
    Managers(#[from] ManagerError),
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    #[error(
        "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false"
    )]
    SwapIsOn,
    #[error(
        "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be removed in a future release"
    )]
    CgroupV1,
    #[error("a task of the kubelet failed")]
    Broken,
}
