//! Why a kubelet does not start.

use crate::pod::users::UsersError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot create {path}: {source}")]
    Directory { path: String, source: std::io::Error },
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error(transparent)]
    Users(#[from] UsersError),
    #[error("a task of the kubelet failed")]
    Broken,
}
