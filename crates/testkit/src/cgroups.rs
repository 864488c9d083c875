//! A cgroup subtree per test host, in every hierarchy.
//!
//! In: a name that no other run has. Out: directories to join and to mount as roots, so that the host
//! inside sees its own empty tree. Works on version 1, version 2 and both mounted together.
//! Invariant: nothing is left after [`Cgroups::remove`]; the next run removes the leftovers of a killed
//! run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::wait;

/// The prefix of every test host's directory; the test's process id and a number follow.
const PREFIX: &str = "decapod-test-";

pub struct Cgroups {
    hierarchies: Vec<Hierarchy>,
}

struct Hierarchy {
    mount: PathBuf,
    kind: String,
    /// In the form of `mount` options: controllers, or a name.
    options: String,
    own: PathBuf,
    /// Version 2 forbids processes beside children with controllers: the processes are in a leaf.
    leaf: Option<PathBuf>,
}

impl Cgroups {
    pub fn create(number: u32) -> Result<Self> {
        let name = format!("{PREFIX}{}-{number}", std::process::id());
        let mut made = Self { hierarchies: Vec::new() };
        for (mount, kind, options) in mounts()? {
            sweep(&mount);
            let own = mount.join(&name);
            fs::create_dir(&own).with_context(|| format!("{}", own.display()))?;
            let mut hierarchy = Hierarchy { mount, kind, options, own, leaf: None };
            hierarchy.prepare()?;
            made.hierarchies.push(hierarchy);
        }
        Ok(made)
    }

    /// Files that take the id of a process to move.
    pub fn process_files(&self) -> Vec<PathBuf> {
        let place = |h: &Hierarchy| h.leaf.clone().unwrap_or_else(|| h.own.clone());
        self.hierarchies.iter().map(|h| place(h).join("cgroup.procs")).collect()
    }

    /// The same, for the process whose cgroup becomes the root of a cgroup namespace.
    pub fn root_process_files(&self) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|h| h.own.join("cgroup.procs")).collect()
    }

    /// The host's directories, as paths outside.
    pub fn directories(&self) -> Vec<PathBuf> {
        self.hierarchies.iter().map(|h| h.own.clone()).collect()
    }

    /// The mounts to make inside: (mount point, kind, options). In a cgroup namespace a new mount shows the
    /// host's own directory as its root.
    pub fn mounts(&self) -> Vec<(PathBuf, String, String)> {
        let all = self.hierarchies.iter();
        all.map(|h| (h.mount.clone(), h.kind.clone(), h.options.clone())).collect()
    }

    /// Removes the directories. Their processes have ended, but the kernel may need a moment to notice.
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
    fn prepare(&mut self) -> Result<()> {
        // Version 1: a cpuset without CPUs accepts no process.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(value) = fs::read_to_string(self.mount.join(file)) {
                fs::write(self.own.join(file), value)?;
            }
        }
        if self.kind == "cgroup2" {
            let leaf = self.own.join("host");
            fs::create_dir(&leaf)?;
            self.leaf = Some(leaf);
            let all = fs::read_to_string(self.mount.join("cgroup.controllers"))?;
            for controller in all.split_whitespace() {
                // Best effort: the root cgroup of a container may not delegate every controller.
                let _ =
                    fs::write(self.mount.join("cgroup.subtree_control"), format!("+{controller}"));
            }
        }
        Ok(())
    }
}

/// Mount points of cgroup file systems, their kinds and options.
fn mounts() -> Result<Vec<(PathBuf, String, String)>> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(text.lines().filter_map(mount_line).collect())
}

/// `… … … ROOT POINT … - KIND SOURCE OPTIONS`
fn mount_line(line: &str) -> Option<(PathBuf, String, String)> {
    let (place, what) = line.split_once(" - ")?;
    let point = place.split(' ').nth(4)?;
    let what: Vec<&str> = what.split(' ').collect();
    let [kind @ ("cgroup" | "cgroup2"), _, options] = what[..] else { return None };
    let wanted: Vec<&str> = match kind {
        "cgroup2" => Vec::new(),
        _ => options.split(',').filter(|word| !matches!(*word, "rw" | "ro" | "xattr")).collect(),
    };
    let named = wanted.iter().any(|word| word.starts_with("name="));
    let options = wanted.join(",");
    Some((point.into(), kind.to_owned(), if named { format!("none,{options}") } else { options }))
}

/// Removes the leftovers of runs whose process has ended.
fn sweep(mount: &Path) {
    let Ok(entries) = fs::read_dir(mount) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
        let process = rest.split('-').next().unwrap_or_default();
        if !Path::new("/proc").join(process).exists() {
            // Best effort: another run may remove the same ones.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: Option<(&str, &str, &str)>) {
        let expected = expected.map(|(p, k, o)| (PathBuf::from(p), k.to_owned(), o.to_owned()));
        assert_eq!(mount_line(line), expected, "{line}");
    }

    #[test]
    fn reads_mounts() {
        let line = "48 47 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:6 - cgroup cgroup rw,cpu";
        check(line, Some(("/sys/fs/cgroup/cpu", "cgroup", "cpu")));
        let line = "48 47 0:29 / /c/systemd rw - cgroup systemd rw,xattr,name=systemd";
        check(line, Some(("/c/systemd", "cgroup", "none,name=systemd")));
        check(
            "48 47 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate",
            Some(("/sys/fs/cgroup", "cgroup2", "")),
        );
        check("46 47 0:2 / / rw - ext4 /dev/vda rw", None);
    }
}
