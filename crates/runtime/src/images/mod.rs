//! Images: a content store, unpacked layers, import from archives, pull from registries.
//!
//! ```text
//!  archive ─► import ─┐                       ┌─► layers/<diff id>   unpacked once, shared
//!                     ├─► blobs/sha256/<hex> ─┤
//!  registry ─► pull ──┘                       └─► index.json         names → image
//!                                                   container: overlay(layers, upper, work)
//! ```
//!
//! Invariants: blobs and layer directories are either complete or absent; a blob's name is its
//! hash; the index names only images whose layers are all unpacked.

pub mod config;
pub mod folder;
pub mod import;
pub mod name;
pub mod overlay;
pub mod progress;
pub mod pull;
pub mod registries;
pub mod store;
pub mod unpack;
pub mod user;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Invalid(String),
    #[error("{action}: {source}")]
    Io { action: String, source: std::io::Error },
    /// The registry reports that the image does not exist.
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Denied(String),
    /// The registry is unreachable or sends an invalid answer.
    #[error("{0}")]
    Registry(String),
}

pub type Result<T> = std::result::Result<T, Error>;

pub(crate) trait During<T> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T>;
}

impl<T> During<T> for std::io::Result<T> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Io { action: action(), source })
    }
}

impl From<Error> for cri::Error {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::Invalid(_) => Self::InvalidArgument(text),
            Error::Io { .. } => Self::Internal(text),
            Error::NotFound(_) => Self::NotFound(text),
            Error::Denied(_) => Self::PermissionDenied(text),
            Error::Registry(_) => Self::Unavailable(text),
        }
    }
}
