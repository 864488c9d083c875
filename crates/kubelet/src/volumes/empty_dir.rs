//! A directory that lives as long as its pod, on disk or in memory.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::EmptyDirVolumeSource;

use super::files::{fs_group, mode_of_root};
use super::mounts;
use super::plugin::{Host, Mounted, Request, Source, VolumeError, VolumePlugin};
use crate::resources;

pub struct EmptyDirPlugin;

#[async_trait]
impl VolumePlugin for EmptyDirPlugin {
    fn name(&self) -> &'static str {
        "empty-dir"
    }

    fn supports(&self, source: &Source<'_>) -> bool {
        source.volume.empty_dir.is_some()
    }

    fn is_local_storage(&self) -> bool {
        true
    }

    async fn set_up(&self, host: &Host, request: &Request<'_>) -> Result<Mounted, VolumeError> {
        let volume = request.source.volume;
        let path = request.dir.volume(self.name(), &volume.name);
        let source = volume.empty_dir.clone().unwrap_or_default();
        let (group, tmpfs) = (fs_group(request.pod), host.may_mount);
        tokio::task::spawn_blocking(move || empty_dir(&path, group, &source, tmpfs)).await?
    }
}

fn empty_dir(
    path: &Path,
    group: Option<u32>,
    source: &EmptyDirVolumeSource,
    tmpfs: bool,
) -> Result<Mounted, VolumeError> {
    let bits = mode_of_root(group);
    if !path.is_dir() {
        make_open(path, bits, group)?;
    }
    if source.medium.as_deref() == Some("Memory") && tmpfs {
        let size = source.size_limit.as_ref().map(resources::units).filter(|size| *size > 0);
        let size = size.map(|size| size as u64);
        mounts::tmpfs(path, size, bits, group).map_err(VolumeError::io("mount tmpfs"))?;
    }
    Ok(Mounted::directory(path.to_path_buf(), false))
}

/// Creates a directory with its final mode and owner. Containers may change both afterwards, because the
/// directory is the root of their mount; such changes must stay.
fn make_open(path: &Path, bits: u32, group: Option<u32>) -> Result<(), VolumeError> {
    // No volume has this name: volume names are DNS labels.
    let mut name = std::ffi::OsString::from(".new-");
    name.push(path.file_name().unwrap_or_default());
    let fresh = path.with_file_name(name);
    fs::create_dir_all(&fresh).map_err(VolumeError::io("mkdir"))?;
    if group.is_some() {
        chown(&fresh, None, group).map_err(VolumeError::io("chown"))?;
    }
    fs::set_permissions(&fresh, fs::Permissions::from_mode(bits))
        .map_err(VolumeError::io("chmod"))?;
    fs::rename(&fresh, path).map_err(VolumeError::io("rename"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;
    use std::os::unix::fs::MetadataExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").permissions().mode() & 0o7777
    }

    #[test]
    fn a_mode_that_a_container_set_stays() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("kubernetes.io~empty-dir").join("data");
        // An earlier kubelet stopped in the middle.
        fs::create_dir_all(path.with_file_name(".new-data")).expect("a directory");
        let own = nix::unistd::getegid().as_raw();
        let pod = serde_json::from_value(json!({"spec": {"containers": [],
            "securityContext": {"fsGroup": own}}}));
        let (plain, grouped) = (Pod::default(), pod.expect("a pod"));
        let set_up = |pod: &Pod| {
            let ready = empty_dir(&path, fs_group(pod), &EmptyDirVolumeSource::default(), false);
            ready.expect("set up").path
        };
        assert_eq!(mode(&set_up(&plain)), 0o777);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).expect("closed");
        assert_eq!(mode(&set_up(&plain)), 0o700);
        assert_eq!(mode(&set_up(&grouped)), 0o700);
        fs::remove_dir(&path).expect("removed");
        assert_eq!(mode(&set_up(&grouped)), 0o2777);
        let names = fs::read_dir(root.path().join("kubernetes.io~empty-dir")).expect("a list");
        assert_eq!(names.count(), 1, "no other file is left");
    }

    #[test]
    fn a_tmpfs_mode_that_a_container_set_stays() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("data");
        let pod = json!({"spec": {"containers": [], "securityContext": {"fsGroup": 1234}}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let source = EmptyDirVolumeSource { medium: Some("Memory".into()), size_limit: None };
        let set_up = || {
            empty_dir(&path, fs_group(&pod), &source, true).map_err(|error| error.to_string())?;
            let about = fs::metadata(&path).map_err(|error| error.to_string())?;
            Ok::<_, String>((about.permissions().mode() & 0o7777, about.gid()))
        };
        let first = set_up();
        let closed = fs::set_permissions(&path, fs::Permissions::from_mode(0o700));
        let second = set_up();
        mounts::unmount_below(root.path()).expect("unmounted");
        assert_eq!(first, Ok((0o2777, 1234)));
        closed.expect("closed");
        assert_eq!(second, Ok((0o700, 1234)));
    }
}
