//! The records on disk about mounted volumes: where they are, and which pod uses them.
//!
//! ```text
//! <root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount          published here
//! <root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/vol_data.json
//! <root>/plugins/kubernetes.io/csi/<driver>/<sha256 of the handle>/globalmount   staged here
//! <root>/plugins/kubernetes.io/csi/<driver>/<sha256 of the handle>/vol_data.json
//! ```
//!
//! Invariant: names and fields are upstream's, so that either kubelet can read the other's records.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{PLUGIN, unique_name};

const FILE: &str = "vol_data.json";
pub const PERSISTENT: &str = "Persistent";
pub const EPHEMERAL: &str = "Ephemeral";

/// `vol_data.json`; a staged volume's record has the driver and the handle only.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeData {
    #[serde(skip_serializing_if = "String::is_empty", rename = "attachmentID")]
    pub attachment_id: String,
    pub driver_name: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    #[serde(skip_serializing_if = "String::is_empty", rename = "specVolID")]
    pub volume: String,
    pub volume_handle: String,
    #[serde(skip_serializing_if = "String::is_empty", rename = "volumeLifecycleMode")]
    pub mode: String,
}

impl VolumeData {
    /// `None`: there is no record. An unreadable record is an error, because a volume depends on it.
    pub fn read(dir: &Path) -> io::Result<Option<Self>> {
        match fs::read(dir.join(FILE)) {
            Ok(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn write(&self, dir: &Path) -> io::Result<()> {
        let next = dir.join(format!("{FILE}.new"));
        fs::write(&next, serde_json::to_vec(self).map_err(io::Error::other)?)?;
        fs::rename(next, dir.join(FILE))
    }

    pub fn unique(&self) -> String {
        unique_name(&self.driver_name, &self.volume_handle)
    }
}

pub fn hash(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The handle of an inline volume.
pub fn inline_handle(pod_uid: &str, volume: &str) -> String {
    format!("csi-{}", hash(&format!("{pod_uid}{volume}")))
}

pub fn attachment_name(handle: &str, driver: &str, node: &str) -> String {
    format!("csi-{}", hash(&format!("{handle}{driver}{node}")))
}

/// Where a volume is staged, for all pods of the node.
pub fn staging_path(root: &Path, driver: &str, handle: &str) -> PathBuf {
    root.join("plugins").join(PLUGIN).join(driver).join(hash(handle)).join("globalmount")
}

/// The directory of a pod's CSI volumes.
pub fn pod_volumes(pod: &Path) -> PathBuf {
    pod.join("volumes").join("kubernetes.io~csi")
}

pub fn make_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(path)
}

/// Removes the directory of an unmounted volume, its record and the directory around both.
/// A directory that is still mounted, or has files in it, stays with its record.
/// Upstream: removeMountDir.
pub fn remove_mount(target: &Path) -> io::Result<()> {
    gone(fs::remove_dir(target))?;
    target.parent().map_or(Ok(()), remove_record)
}

/// Removes a record, and its directory.
pub fn remove_record(dir: &Path) -> io::Result<()> {
    gone(fs::remove_file(dir.join(FILE)))?;
    gone(fs::remove_dir(dir))
}

pub fn gone(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

pub fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

pub fn last(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::place;
    use super::super::plugin::uses;
    use super::*;

    #[test]
    fn records_are_upstreams() {
        let dir = tempfile::tempdir().expect("a directory");
        let pod = pod_volumes(&dir.path().join("pods/u1")).join("pvc-1");
        make_dir(&pod.join("mount")).expect("made");
        let data = VolumeData {
            attachment_id: attachment_name("h", "d", "n"),
            driver_name: "d".into(),
            node_name: "n".into(),
            volume: "pvc-1".into(),
            volume_handle: "h".into(),
            mode: PERSISTENT.into(),
        };
        data.write(&pod).expect("written");
        let text = fs::read_to_string(pod.join(FILE)).expect("a file");
        let tree: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let keys: Vec<&String> = tree.as_object().expect("an object").keys().collect();
        let expected = [
            "attachmentID",
            "driverName",
            "nodeName",
            "specVolID",
            "volumeHandle",
            "volumeLifecycleMode",
        ];
        assert_eq!(keys, expected);
        let uses = uses(dir.path());
        assert_eq!(uses[&("u1".to_string(), "pvc-1".to_string())].unique, "kubernetes.io/csi/d^h");

        let target = staging_path(dir.path(), "d", "h");
        make_dir(&target).expect("made");
        let data =
            VolumeData { driver_name: "d".into(), volume_handle: "h".into(), ..Default::default() };
        data.write(target.parent().expect("a parent")).expect("written");
        let stage = place::Stage::of_mount(dir.path(), "d", "h");
        assert_eq!(place::staged(dir.path(), "d"), [(stage, data)]);
        fs::write(target.join("file"), "x").expect("written");
        assert!(remove_mount(&target).is_err(), "a file is in it");
        assert_eq!(place::staged(dir.path(), "d").len(), 1);
        fs::remove_file(target.join("file")).expect("removed");
        remove_mount(&target).expect("removed");
        remove_mount(&target).expect("again");
        assert!(place::staged(dir.path(), "d").is_empty());
    }
}
