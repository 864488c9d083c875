//! Compares the machine's own files, which no cluster, container or image may change.
//!
//! In: nothing. Out: the state of the machine's configuration and programs, and the changes between two
//! snapshots. Test hosts use the real machine's file system, so a container that escapes reaches these
//! files.
//! Invariant: a snapshot changes nothing, and follows no link.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Directories that are compared with everything below them.
const TREES: [&str; 9] = [
    "/bin",
    "/boot",
    "/etc",
    "/root/.ssh",
    "/sbin",
    "/usr/bin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/usr/sbin",
];

/// Directories of which only direct entries are compared: people and their tools work below.
const DIRECTORIES: [&str; 4] = ["/", "/home", "/root", "/usr"];

/// Written by tools of tests and users.
const OF_TOOLS: [&str; 6] = [
    "/root/.bash_history",
    "/root/.lesshst",
    "/root/.python_history",
    "/root/.viminfo",
    "/root/.wget-hsts",
    "/root/.gitconfig",
];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFiles(BTreeMap<PathBuf, File>);

/// A directory has no size or time here: only its entries count.
#[derive(Clone, Debug, PartialEq, Eq)]
struct File {
    inode: u64,
    mode: u32,
    owner: (u32, u32),
    size: u64,
    modified: (i64, i64),
}

impl HostFiles {
    pub fn look() -> Self {
        let mut found = Self::default();
        let is_own = |tree: &&Path| fs::symlink_metadata(tree).is_ok_and(|about| about.is_dir());
        TREES.iter().map(Path::new).filter(is_own).for_each(|tree| found.add(tree, true));
        DIRECTORIES.iter().for_each(|directory| found.add(Path::new(directory), false));
        found.0.retain(|path, _| !OF_TOOLS.iter().any(|tool| path == Path::new(tool)));
        found
    }

    fn add(&mut self, directory: &Path, deep: bool) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let Ok(about) = entry.metadata() else { continue };
            let file = match about.is_dir() {
                true if deep => {
                    self.add(&entry.path(), true);
                    File { size: 0, modified: (0, 0), ..File::of(&about) }
                }
                // Direct entries of a directory in which users work.
                true => continue,
                false => File::of(&about),
            };
            self.0.insert(entry.path(), file);
        }
    }

    /// A line for each file that changed.
    pub fn changes(&self, later: &Self) -> Vec<String> {
        let mut lines = vec![];
        for (path, before) in &self.0 {
            match later.0.get(path) {
                None => lines.push(format!("removed: {}", path.display())),
                Some(after) if after != before => {
                    lines.push(format!("changed: {}: {before:?}, now {after:?}", path.display()));
                }
                Some(_) => {}
            }
        }
        let new = later.0.keys().filter(|path| !self.0.contains_key(*path));
        lines.extend(new.map(|path| format!("new: {}", path.display())));
        lines
    }
}

impl File {
    fn of(about: &fs::Metadata) -> Self {
        Self {
            inode: about.ino(),
            mode: about.mode(),
            owner: (about.uid(), about.gid()),
            size: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_is_named() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |name: &str| root.path().join(name);
        fs::create_dir(at("sub")).expect("made");
        for name in ["kept", "sub/gone", "sub/longer", "replaced"] {
            fs::write(at(name), "text").expect("written");
        }
        let look = || {
            let mut found = HostFiles::default();
            found.add(root.path(), true);
            found
        };
        let before = look();
        assert!(before.changes(&look()).is_empty());
        fs::remove_file(at("sub/gone")).expect("removed");
        fs::write(at("sub/longer"), "longer text").expect("written");
        fs::write(at("next"), "text").expect("written");
        fs::rename(at("next"), at("replaced")).expect("renamed");
        std::os::unix::fs::symlink("/proc/self/fd", at("fd")).expect("linked");
        let changes = before.changes(&look());
        let has = |start: &str, name: &str| {
            let wanted = format!("{start}: {}", at(name).display());
            assert!(changes.iter().any(|line| line.starts_with(&wanted)), "{wanted}: {changes:?}");
        };
        has("removed", "sub/gone");
        has("changed", "sub/longer");
        has("changed", "replaced");
        has("new", "fd");
        assert_eq!(changes.len(), 4, "{changes:?}");
    }

    #[test]
    fn a_snapshot_finds_files_of_every_machine() {
        let found = HostFiles::look();
        assert!(found.0.contains_key(Path::new("/etc/passwd")));
        assert!(!found.0.contains_key(Path::new("/root/.bash_history")));
    }
}
