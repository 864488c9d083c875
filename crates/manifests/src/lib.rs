//! The directory of manifests: objects of its files are applied, kept up to date, and pruned.
//!
//! In: `<data-dir>/manifests`, watched; a client that may do everything. Out: objects in the cluster, one ConfigMap
//! of the namespace kube-system for each file, Events about that ConfigMap.
//!
//! ```text
//!  directory ─► files ─► objects ─► server-side apply, in rounds until all are there
//!                          │
//!                          └─► what the ConfigMap lists and the file no longer has: deleted
//! ```
//!
//! Invariants: the ConfigMap lists an object before it is applied, so that nothing is forgotten after a crash. An
//! object is deleted only if this program's field manager is still among its managers, and no other file has it. A
//! directory that cannot be read, and a file that cannot be parsed, prune nothing. Each server has its own files.
//!
//! Why ConfigMaps: they exist before any definition, cost nothing if there are no files, and `kubectl describe` shows
//! them with their Events. Upstream: k3s' `manifests` directory. Deviations: k3s keeps its list in a kind of its own
//! (Addon), and leaves the objects of a removed file.
//!
//! Cost: a change reads the directory's metadata and the changed files only; the rest waits.

mod apply;
mod documents;
mod folder;
mod inventory;
mod keeper;
mod object;

use std::path::PathBuf;

use base::task::Stop;
use client::Client;

pub use documents::{Unreadable, documents, flatten};

/// The field manager of applied objects, and the source of Events.
pub const MANAGER: &str = "decapod-manifests";

/// What [`run`] needs.
#[derive(Clone)]
pub struct Config {
    /// It may apply and delete everything.
    pub client: Client,
    pub directory: PathBuf,
    /// The name of this server: it prunes only what it has applied.
    pub server: String,
}

/// Why nothing can be done.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot make the directory {path}: {source}")]
    Directory { path: PathBuf, source: std::io::Error },
    #[error("cannot watch {path}: {source}")]
    Watch { path: PathBuf, source: std::io::Error },
    #[error("cannot list the ConfigMaps of manifests: {0}")]
    Inventory(String),
}

/// Keeps the objects of the directory until the stop.
///
/// # Errors
/// The directory or the API cannot be used; the caller starts it again.
pub async fn run(config: Config, stop: Stop) -> Result<(), Error> {
    keeper::Keeper::open(config).await?.keep(stop).await
}
