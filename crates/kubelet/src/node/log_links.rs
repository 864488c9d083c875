//! Links to containers' logs at one place, where log collectors look for them.
//!
//! ```text
//! <links>/<pod>_<namespace>_<container>-<id>.log ─► <logs>/<namespace>_<pod>_<uid>/<container>/<n>.log
//! ```
//!
//! In: starts and removals of containers. Out: one symbolic link per container. A failure is logged and hurts
//! nothing else: the log itself is elsewhere.
//! Cost: one system call per start and per removal, and one look at all links when the kubelet starts.
//! Upstream: `legacyLogSymlink`, `pkg/kubelet/kuberuntime`. Deviation: upstream looks for dead links every
//! minute; here a link goes with its container, and only an earlier kubelet can have left a dead one.

use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;

use crate::names;

/// Upstream: `maxFileNameLength` minus the ending: a longer name is cut.
const NAME_LIMIT: usize = 255;
const ENDING: &str = ".log";

#[derive(Clone, Debug)]
pub struct LogLinks(PathBuf);

impl LogLinks {
    pub fn new(directory: PathBuf) -> Self {
        Self(directory)
    }

    pub fn directory(&self) -> &Path {
        &self.0
    }

    fn link(&self, pod: &Pod, container: &str, id: &str) -> PathBuf {
        let (name, namespace) = (names::name(pod), names::namespace(pod));
        let front = format!("{name}_{namespace}_{container}-{id}");
        let front = front.get(..NAME_LIMIT - ENDING.len()).unwrap_or(&front);
        self.0.join(format!("{front}{ENDING}"))
    }

    pub(crate) fn add(&self, pod: &Pod, container: &str, id: &str, log: &Path) {
        let link = self.link(pod, container, id);
        match std::os::unix::fs::symlink(log, &link) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                tracing::warn!(link = %link.display(), %error, "failed to create the link to the container's log");
            }
            _ => {}
        }
    }

    pub(crate) fn remove(&self, pod: &Pod, container: &str, id: &str) {
        remove(&self.link(pod, container, id));
    }

    /// Removes links to logs below `logs` that do not exist any more.
    pub(crate) fn sweep(&self, logs: &Path) {
        let entries = std::fs::read_dir(&self.0).into_iter().flatten().flatten();
        for link in entries.map(|entry| entry.path()) {
            let is_dead = std::fs::read_link(&link)
                .is_ok_and(|target| target.starts_with(logs) && !target.exists());
            if is_dead {
                remove(&link);
            }
        }
    }
}

fn remove(link: &Path) {
    match std::fs::remove_file(link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(link = %link.display(), %error, "failed to remove the link to a container's log");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    use super::*;

    #[test]
    fn links_have_upstreams_names_and_go_with_their_logs() {
        let dir = tempfile::tempdir().expect("a directory");
        let (logs, links) = (dir.path().join("pods"), dir.path().join("containers"));
        std::fs::create_dir_all(&logs).expect("created");
        std::fs::create_dir_all(&links).expect("created");
        let log = logs.join("0.log");
        std::fs::write(&log, "words").expect("written");
        let foreign = links.join("foreign.log");
        std::os::unix::fs::symlink("/nowhere/0.log", &foreign).expect("linked");
        let metadata = ObjectMeta {
            name: Some("web".into()),
            namespace: Some("ns".into()),
            ..Default::default()
        };
        let pod = Pod { metadata, ..Default::default() };
        let own = LogLinks::new(links.clone());
        own.add(&pod, "main", "id1", &log);
        own.add(&pod, "main", "id2", &log);
        let link = links.join("web_ns_main-id1.log");
        assert_eq!(std::fs::read_to_string(&link).expect("it leads to the log"), "words");
        own.remove(&pod, "main", "id1");
        assert!(link.symlink_metadata().is_err());
        let second = links.join("web_ns_main-id2.log");
        own.sweep(&logs);
        assert!(second.exists(), "its log exists");
        std::fs::remove_file(&log).expect("removed");
        own.sweep(&logs);
        assert!(second.symlink_metadata().is_err());
        assert!(foreign.symlink_metadata().is_ok(), "another program's link stays");
        let long = Pod {
            metadata: ObjectMeta { name: Some("n".repeat(253)), ..Default::default() },
            ..Default::default()
        };
        let name = own.link(&long, "main", "id").file_name().map_or(0, |name| name.len());
        assert_eq!(name, NAME_LIMIT);
    }
}
