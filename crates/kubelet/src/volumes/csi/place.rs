//! The paths of a CSI volume on this node: staged once for all pods, published for each pod.
//!
//! ```text
//!             a file system                                    a device (volumeMode: Block)
//! staged      plugins/kubernetes.io/csi/<driver>/<hash>/       plugins/kubernetes.io/csi/volumeDevices/
//!               globalmount                                      staging/<volume>
//! its record    vol_data.json beside it                          <volume>/data/vol_data.json
//! published   pods/<uid>/volumes/kubernetes.io~csi/            plugins/kubernetes.io/csi/volumeDevices/
//!               <volume>/mount                                   publish/<volume>/<uid>
//! its record    vol_data.json beside it                        pods/<uid>/volumeDevices/kubernetes.io~csi/
//!                                                                <volume>, a link to it
//! ```
//!
//! Invariants: paths are upstream's; the record exists before the driver is called, and is removed
//! after the driver unmounted the volume. A device has one record for all pods, and a link for each.
//! Deviation: upstream also binds a device below `<volume>/dev` and holds it open by a loop device.
//! Upstream: `csi_block.go`, `csi_mounter.go`.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::PLUGIN;
use super::record::{self, PERSISTENT, VolumeData, entries, gone, last};

const DEVICES: &str = "volumeDevices";

/// The paths of a staged volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    pub path: PathBuf,
    /// The directory of its record.
    pub record: PathBuf,
    is_device: bool,
}

/// The paths of a volume that is published for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub path: PathBuf,
    /// The directory of its record.
    pub record: PathBuf,
    /// The pod's link to a device.
    pub link: Option<PathBuf>,
}

fn devices(root: &Path) -> PathBuf {
    root.join("plugins").join(PLUGIN).join(DEVICES)
}

fn data(root: &Path, name: &str) -> PathBuf {
    devices(root).join(name).join("data")
}

/// The directory of a pod's links to devices, by plugin.
pub fn links(pod: &Path, plugin: &str) -> PathBuf {
    pod.join(DEVICES).join(format!("kubernetes.io~{plugin}"))
}

impl Stage {
    pub fn of_mount(root: &Path, driver: &str, handle: &str) -> Self {
        let path = record::staging_path(root, driver, handle);
        let record = path.parent().unwrap_or(&path).to_path_buf();
        Self { path, record, is_device: false }
    }

    pub fn of_device(root: &Path, name: &str) -> Self {
        let path = devices(root).join("staging").join(name);
        Self { path, record: data(root, name), is_device: true }
    }

    /// Removes the paths of an unstaged volume, whether or not its driver stages.
    /// Upstream: removeMountDir, cleanupOrphanDeviceFiles.
    pub fn forget(&self) -> io::Result<()> {
        if !self.is_device {
            return record::remove_mount(&self.path);
        }
        // Files that a driver left in its directory belong to no mounted file system.
        for left in entries(&self.path) {
            gone(fs::remove_file(left))?;
        }
        gone(fs::remove_dir(&self.path))?;
        let name = last(self.record.parent().unwrap_or(&self.record));
        if let Some(devices) = self.path.parent().and_then(Path::parent) {
            gone(fs::remove_dir(devices.join("publish").join(name)))?;
        }
        record::remove_record(&self.record)?;
        self.record.parent().map_or(Ok(()), |parent| gone(fs::remove_dir(parent)))
    }
}

impl Published {
    pub fn of_mount(pod: &Path, name: &str) -> Self {
        let record = record::pod_volumes(pod).join(name);
        Self { path: record.join("mount"), record, link: None }
    }

    pub fn of_device(root: &Path, pod: &Path, name: &str) -> Self {
        let path = devices(root).join("publish").join(name).join(last(pod));
        let link = Some(links(pod, "csi").join(name));
        Self { path, record: data(root, name), link }
    }

    /// Creates the record, directories and link that must exist before the driver publishes.
    pub fn prepare(&self, record: &VolumeData) -> io::Result<()> {
        record::make_dir(&self.record)?;
        record.write(&self.record)?;
        if let Some(link) = &self.link {
            self.path.parent().map_or(Ok(()), record::make_dir)?;
            make_link(link, &self.path)?;
        }
        Ok(())
    }

    /// Removes a device's file. Drivers do that themselves; one that does not must not block the pod.
    pub fn clear(&self) -> io::Result<()> {
        if self.link.is_some() { gone(fs::remove_file(&self.path)) } else { Ok(()) }
    }

    /// Removes the paths of an unpublished volume. A device's record is removed with its stage.
    pub fn forget(&self) -> io::Result<()> {
        let Some(link) = &self.link else { return record::remove_mount(&self.path) };
        self.clear()?;
        gone(fs::remove_file(link))
    }
}

/// Makes a pod's link to a device; false if it existed.
pub fn make_link(link: &Path, device: &Path) -> io::Result<bool> {
    if fs::read_link(link).is_ok_and(|known| known == device) {
        return Ok(false);
    }
    link.parent().map_or(Ok(()), record::make_dir)?;
    gone(fs::remove_file(link))?;
    std::os::unix::fs::symlink(device, link)?;
    Ok(true)
}

pub fn is_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|about| about.file_type().is_block_device())
}

/// A pod's CSI volumes, with their names: the paths, and the record if there is one.
pub fn of_pod(root: &Path, pod: &Path) -> Vec<(String, Published, io::Result<Option<VolumeData>>)> {
    let mounts = entries(&record::pod_volumes(pod));
    let mounts = mounts.iter().map(|volume| Published::of_mount(pod, &last(volume)));
    let devices = entries(&links(pod, "csi"));
    let devices = devices.iter().map(|link| Published::of_device(root, pod, &last(link)));
    let known = |published: Published| {
        let named = published.link.as_ref().unwrap_or(&published.record);
        let (name, data) = (last(named), VolumeData::read(&published.record));
        (name, published, data)
    };
    mounts.chain(devices).map(known).collect()
}

/// The volumes of a driver that are staged, by their records.
pub fn staged(root: &Path, driver: &str) -> Vec<(Stage, VolumeData)> {
    let mounts = entries(&root.join("plugins").join(PLUGIN).join(driver));
    let mounts = mounts.into_iter().map(|record| {
        let path = record.join("globalmount");
        Stage { path, record, is_device: false }
    });
    let devices = entries(&devices(root));
    let devices = devices.iter().map(|volume| Stage::of_device(root, &last(volume)));
    let known = |stage: Stage| {
        let data = VolumeData::read(&stage.record).ok().flatten()?;
        (data.driver_name == driver).then_some((stage, data))
    };
    mounts.chain(devices).filter_map(known).collect()
}

/// Whether the record says that a volume is persistent; upstream's records of devices have no mode.
pub fn is_persistent(data: &VolumeData) -> bool {
    data.mode.is_empty() || data.mode == PERSISTENT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data_of(volume: &str, mode: &str) -> VolumeData {
        VolumeData {
            driver_name: "d".into(),
            volume_handle: "h".into(),
            volume: volume.into(),
            mode: mode.into(),
            ..VolumeData::default()
        }
    }

    #[test]
    fn devices_have_upstreams_paths() {
        let root = Path::new("/k");
        let stage = Stage::of_device(root, "pv");
        let devices = "/k/plugins/kubernetes.io/csi/volumeDevices";
        assert_eq!(stage.path, Path::new(&format!("{devices}/staging/pv")));
        assert_eq!(stage.record, Path::new(&format!("{devices}/pv/data")));
        let published = Published::of_device(root, Path::new("/k/pods/u1"), "pv");
        assert_eq!(published.path, Path::new(&format!("{devices}/publish/pv/u1")));
        let link = Path::new("/k/pods/u1/volumeDevices/kubernetes.io~csi/pv");
        assert_eq!(published.link.as_deref(), Some(link));
    }

    #[test]
    fn a_forgotten_device_leaves_no_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, pod) = (dir.path(), dir.path().join("pods/u1"));
        let (stage, published) =
            (Stage::of_device(root, "pv"), Published::of_device(root, &pod, "pv"));
        record::make_dir(&stage.path).expect("made");
        published.prepare(&data_of("pv", "")).expect("prepared");
        published.prepare(&data_of("pv", "")).expect("again");
        fs::write(stage.path.join("left"), "x").expect("written");
        let found = of_pod(root, &pod);
        assert_eq!((found.len(), found[0].0.as_str(), &found[0].1), (1, "pv", &published));
        assert!(found[0].2.as_ref().is_ok_and(|data| data.as_ref().is_some_and(is_persistent)));
        assert_eq!(staged(root, "d"), [(stage.clone(), data_of("pv", ""))]);
        assert!(staged(root, "other").is_empty());
        published.forget().expect("forgotten");
        stage.forget().expect("forgotten");
        stage.forget().expect("again");
        assert!(of_pod(root, &pod).is_empty() && staged(root, "d").is_empty());
        let left = entries(&devices(root));
        assert!(left.iter().all(|one| entries(one).is_empty()), "{left:?}");
        assert_eq!(left.len(), 2, "staging and publish: {left:?}");
    }
}
