//! The processes of pods, as the real host sees them.
//!
//! A pod's processes are found by its UID in their cgroup path, which upstream's kubelet writes in the
//! same way. So a test can name a process, kill it, and recognise it after a restart of the server.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A process; its start time distinguishes it from a later one with the same id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub id: i32,
    pub name: String,
    started: String,
}

/// Processes inside the pod with this UID, without shims that share its cgroup.
pub fn of_pod(uid: &str) -> Result<BTreeSet<Process>> {
    let dashed = uid.replace('-', "_");
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let read = |file: &str| fs::read_to_string(entry.path().join(file));
        // The process may end meanwhile; then it is skipped.
        let (Ok(cgroup), Ok(stat)) = (read("cgroup"), read("stat")) else { continue };
        if !cgroup.contains(uid) && !cgroup.contains(&dashed) {
            continue;
        }
        let (head, tail) = stat.rsplit_once(')').context("stat names its process")?;
        let name = head.split_once('(').context("stat names its process")?.1.to_owned();
        let started = tail.split_whitespace().nth(19).context("stat says when")?.to_owned();
        if !name.starts_with("decapod") {
            found.insert(Process { id, name, started });
        }
    }
    Ok(found)
}

/// The oldest process with that name in a pod.
pub fn named(uid: &str, name: &str) -> Result<Process> {
    let all = of_pod(uid)?;
    all.iter()
        .find(|process| process.name == name)
        .cloned()
        .with_context(|| format!("no {name} in pod {uid} among {all:?}"))
}

impl Process {
    pub fn kill(&self) -> Result<()> {
        Ok(kill(Pid::from_raw(self.id), Signal::SIGKILL)?)
    }
}
