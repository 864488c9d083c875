//! Where a node keeps the kubelet's files and the logs of pods.
//!
//! In: the data directory and the directories that exist. Out: the directories of the kubelet.
//!
//! ```text
//! the default data directory     /var/lib/kubelet    /var/log/pods    /var/log/containers
//! any other data directory       <data-dir>/kubelet  <data-dir>/logs/pods  <data-dir>/logs/containers
//! ```
//!
//! Storage drivers, device plugins and log collectors expect the first line's places. A directory of that line
//! is not taken while another kubelet has it, and a node that has pods in its data directory (an older release
//! put them there) stays there: their mounts and logs are known by these paths.
//!
//! Invariant: a directory in use has the file [`MARK`] with the data directory of its node. Only the node that
//! is named there uses it again, and only `decapod uninstall` of that node removes it.

use std::io;
use std::path::{Path, PathBuf};

use crate::cluster::DEFAULT_DATA_DIR;

const KUBELET: &str = "/var/lib/kubelet";
const LOGS: &str = "/var/log";
const MARK: &str = ".decapod";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePlaces {
    /// The kubelet's directory.
    pub root: PathBuf,
    /// One directory per pod.
    pub logs: PathBuf,
    /// Links to containers' logs.
    pub links: PathBuf,
}

impl NodePlaces {
    /// `root` is the directory that the user chose for the kubelet.
    pub fn of(data_dir: &Path, root: Option<&Path>) -> io::Result<Self> {
        let data_dir = std::path::absolute(data_dir)?;
        let is_default = data_dir == Path::new(DEFAULT_DATA_DIR);
        let usual = is_default.then(|| (Path::new(KUBELET), Path::new(LOGS)));
        Self::choose(&data_dir, root, usual)
    }

    fn choose(
        data_dir: &Path,
        root: Option<&Path>,
        usual: Option<(&Path, &Path)>,
    ) -> io::Result<Self> {
        let (own_root, own_logs) = (data_dir.join("kubelet"), data_dir.join("logs"));
        let chosen = match (root, usual) {
            (Some(root), _) => std::path::absolute(root)?,
            (None, Some((usual, _)))
                if may_take(usual, &usual.join("pods"), &own_root, data_dir) =>
            {
                usual.to_owned()
            }
            _ => own_root,
        };
        let logs = match usual {
            Some((_, usual)) => {
                let pods = usual.join("pods");
                if may_take(&pods, &pods, &own_logs, data_dir) {
                    usual.to_owned()
                } else {
                    own_logs
                }
            }
            None => own_logs,
        };
        Ok(Self { root: chosen, logs: logs.join("pods"), links: logs.join("containers") })
    }

    /// Creates and marks the directories. Call it before the kubelet starts.
    pub fn claim(&self, data_dir: &Path) -> io::Result<()> {
        let text = format!("{}\n", std::path::absolute(data_dir)?.display());
        for directory in [&self.root, &self.logs] {
            std::fs::create_dir_all(directory)?;
            let mark = directory.join(MARK);
            if owner(directory).as_deref() != Some(text.trim()) {
                std::fs::write(&mark, &text)?;
            }
        }
        Ok(())
    }

    /// The directories outside of the data directory that belong to its node.
    pub fn outside(data_dir: &Path) -> Vec<PathBuf> {
        let logs = Path::new(LOGS).join("pods");
        let ours = [Path::new(KUBELET).to_owned(), logs].into_iter();
        ours.filter(|directory| owner(directory).as_deref() == data_dir.to_str()).collect()
    }

    /// Removes the links of `/var/log/containers` to logs below these directories, and that directory if it
    /// is empty then.
    pub fn remove_links(directories: &[PathBuf]) -> io::Result<()> {
        let leads = |link: &PathBuf| {
            std::fs::read_link(link)
                .is_ok_and(|target| directories.iter().any(|logs| target.starts_with(logs)))
        };
        let home = Path::new(LOGS).join("containers");
        let entries = std::fs::read_dir(&home).into_iter().flatten().flatten();
        for link in entries.map(|entry| entry.path()).filter(leads) {
            std::fs::remove_file(link)?;
        }
        if !directories.is_empty() {
            // Other programs' links stay.
            let _ = std::fs::remove_dir(home);
        }
        Ok(())
    }
}

/// The data directory in the mark.
fn owner(directory: &Path) -> Option<String> {
    let text = std::fs::read_to_string(directory.join(MARK)).ok()?;
    Some(text.trim().to_owned())
}

/// Whether the node may use `usual` instead of `own`. `pods` has an entry per pod of the kubelet that uses
/// `usual`.
fn may_take(usual: &Path, pods: &Path, own: &Path, data_dir: &Path) -> bool {
    if has_entries(&own.join("pods")) {
        return false;
    }
    match owner(usual) {
        Some(owner) => Some(owner.as_str()) == data_dir.to_str(),
        None => !has_entries(pods),
    }
}

fn has_entries(directory: &Path) -> bool {
    std::fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a directory"))
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        fn make(&self, path: &str) {
            std::fs::create_dir_all(self.at(path)).expect("created");
        }

        fn choose(&self, data_dir: &str) -> NodePlaces {
            let (kubelet, logs) = (self.at("lib/kubelet"), self.at("log"));
            let usual = Some((kubelet.as_path(), logs.as_path()));
            NodePlaces::choose(&self.at(data_dir), None, usual).expect("absolute")
        }

        fn check(&self, data_dir: &str, root: &str, logs: &str) {
            let places = self.choose(data_dir);
            assert_eq!((places.root, places.logs), (self.at(root), self.at(logs)));
        }
    }

    #[test]
    fn free_directories_are_taken_and_kept() {
        let machine = Machine::new();
        // Users put profiles of seccomp there before the first start.
        machine.make("lib/kubelet/seccomp");
        machine.make("log/pods");
        machine.check("d", "lib/kubelet", "log/pods");
        machine.choose("d").claim(&machine.at("d")).expect("claimed");
        machine.make("lib/kubelet/pods/uid");
        machine.make("log/pods/ns_name_uid");
        machine.check("d", "lib/kubelet", "log/pods");
        // Another node of the machine.
        machine.check("e", "e/kubelet", "e/logs/pods");
    }

    #[test]
    fn another_kubelets_directories_are_left_alone() {
        let machine = Machine::new();
        machine.make("lib/kubelet/pods/uid");
        machine.check("d", "d/kubelet", "log/pods");
        machine.make("log/pods/ns_name_uid");
        machine.check("d", "d/kubelet", "d/logs/pods");
    }

    /// A release that kept everything in the data directory.
    #[test]
    fn a_node_with_pods_stays_where_they_are() {
        let machine = Machine::new();
        machine.make("d/kubelet/pods/uid");
        machine.make("d/logs/pods/ns_name_uid");
        machine.check("d", "d/kubelet", "d/logs/pods");
        // Drained.
        std::fs::remove_dir(machine.at("d/kubelet/pods/uid")).expect("removed");
        std::fs::remove_dir(machine.at("d/logs/pods/ns_name_uid")).expect("removed");
        machine.check("d", "lib/kubelet", "log/pods");
    }

    #[test]
    fn a_data_directory_that_was_chosen_has_everything() {
        let places = NodePlaces::of(Path::new("/srv/d"), None).expect("absolute");
        assert_eq!(places.root, Path::new("/srv/d/kubelet"));
        assert_eq!(places.links, Path::new("/srv/d/logs/containers"));
        let root = Some(Path::new("/srv/k"));
        let places = NodePlaces::of(Path::new("/srv/d"), root).expect("absolute");
        assert_eq!(places.root, Path::new("/srv/k"));
        assert_eq!(places.logs, Path::new("/srv/d/logs/pods"));
    }
}
