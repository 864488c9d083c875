//! The record of a pod's CNI attachment on disk: `<data>/sandboxes/<id>/cni.json`.
//!
//! In: a network and what the plugins get for a pod. Out: the same for CHECK and DEL, also after a restart of this
//! process or of the machine, and after the configuration file has changed or is gone.
//! Invariant: the file exists from before the first plugin's ADD until after the last plugin's DEL. It is synced:
//! the plugins' own reservations of addresses survive a power failure, too.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::Network;
use crate::files;

const FILE: &str = "cni.json";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Attachment {
    pub network: Network,
    /// Where the plugins' programs were.
    pub bin_dirs: Vec<PathBuf>,
    pub args: String,
    pub capabilities: Map<String, Value>,
    /// Of the last plugin; none until all have succeeded.
    pub result: Option<Value>,
}

impl Attachment {
    /// `sandbox` is the sandbox's directory.
    pub(crate) fn read(sandbox: &Path) -> io::Result<Option<Self>> {
        files::read_json(&sandbox.join(FILE))
    }

    pub(super) fn write(&self, sandbox: &Path) -> io::Result<()> {
        files::write_durable(&sandbox.join(FILE), &serde_json::to_vec(self)?)
    }

    pub(super) fn forget(sandbox: &Path) -> io::Result<()> {
        match std::fs::remove_file(sandbox.join(FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
