//! A cgroup subtree per test host, in every hierarchy.
//!
//! In: a name that no other run has. Out: directories to join, and to bind over the real roots, so
//! that the host inside sees an empty tree of its own. Works on version 1, version 2 and both
//! mounted together. Invariant: nothing is left after [`Cgroups::remove`]; what a killed run left,
//! the next one sweeps.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::wait;

/// Every test host's directory begins so; then come the test's process id and a number.
const PREFIX: &str = "decapod-test-";

pub struct Cgroups {
    hierarchies: Vec<Hierarchy>,
}

struct Hierarchy {
    mount: PathBuf,
    own: PathBuf,
    /// Version 2 forbids processes beside children with controllers: they sit in a leaf.
    leaf: Option<PathBuf>,
}

impl Cgroups {
    pub fn create(number: u32) -> Result<Self> {
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let mut made = Self { hierarchies: Vec::new() };
        for (mount, kind) in mounts()? {
            sweep(&mount);
            let own = mount.join(&name);
            fs::create_dir(&own).with_context(|| format!("{}", own.display()))?;
            let mut hierarchy = Hierarchy { mount, own, leaf: None };
            hierarchy.prepare(&kind)?;
            made.hierarchies.push(hierarchy);
        }
        Ok(made)
    }

    /// Files that take the id of a process to move.
    pub fn process_files(&self) -> Vec<PathBuf> {
        let place = |h: &Hierarchy| h.leaf.clone().unwrap_or_else(|| h.own.clone());
        self.hierarchies.iter().map(|h| place(h).join("cgroup.procs")).collect()
    }

    /// The same, for the process whose place becomes the root of a cgroup namespace.
    pub fn root_process_files(&self) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|h| h.own.join("cgroup.procs")).collect()
    }

    /// What to bind over what: (own directory, mount point).
    pub fn binds(&self) -> Vec<(PathBuf, PathBuf)> {
        self.hierarchies.iter().map(|h| (h.own.clone(), h.mount.clone())).collect()
    }

    /// Removes the directories. Their processes are gone, but the kernel may be a little behind.
    pub fn remove(&self) -> Result<()> {
        for hierarchy in &self.hierarchies {
            wait::until(Duration::from_secs(10), "cgroups are empty", || {
                remove_tree(&hierarchy.own).with_context(|| format!("{}", hierarchy.own.display()))
            })?;
        }
        Ok(())
    }
}

impl Hierarchy {
    fn prepare(&mut self, kind: &str) -> Result<()> {
        // Version 1: an empty cpuset takes no process.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(value) = fs::read_to_string(self.mount.join(file)) {
                fs::write(self.own.join(file), value)?;
            }
        }
        if kind == "cgroup2" {
            let leaf = self.own.join("host");
            fs::create_dir(&leaf)?;
            self.leaf = Some(leaf);
            let all = fs::read_to_string(self.mount.join("cgroup.controllers"))?;
            for controller in all.split_whitespace() {
                // Best effort: the root of a container may not hand every controller down.
                let _ =
                    fs::write(self.mount.join("cgroup.subtree_control"), format!("+{controller}"));
            }
        }
        Ok(())
    }
}

/// Mount points of cgroup file systems and their kinds.
fn mounts() -> Result<Vec<(PathBuf, String)>> {
    let text = fs::read_to_string("/proc/self/mounts")?;
    let fields = text.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let cgroups = fields.filter(|fields| fields.len() > 2 && fields[2].starts_with("cgroup"));
    Ok(cgroups.map(|fields| (PathBuf::from(fields[1]), fields[2].to_owned())).collect())
}

/// Removes what runs left whose process is gone.
fn sweep(mount: &Path) {
    let Ok(entries) = fs::read_dir(mount) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let process = rest.split('-').next().unwrap_or_default();
        if !Path::new("/proc").join(process).exists() {
            // Best effort: another run may sweep the same.
            let _ = remove_tree(&entry.path());
        }
    }
}

fn remove_tree(directory: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries.flatten() {
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    match fs::remove_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
