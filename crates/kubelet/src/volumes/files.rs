//! Volumes whose files have their content from API objects, and change with those.
//!
//! In: the content of one volume. Out: its directory.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};

use k8s_openapi::api::core::v1::Pod;

use super::atomic::{self, Payload};
use super::mounts;
use super::plugin::{Host, Mounted, Request, VolumeError};

/// Where a volume's files are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    Disk,
    /// A tmpfs, so that secrets never reach the disk.
    Memory,
}

/// Makes the volume's directory contain exactly the files.
pub async fn write(
    host: &Host,
    request: &Request<'_>,
    plugin: &str,
    medium: Medium,
    files: Payload,
) -> Result<Mounted, VolumeError> {
    let path = request.dir.volume(plugin, &request.source.volume.name);
    let in_memory = medium == Medium::Memory && host.may_mount;
    let group = fs_group(request.pod);
    let work = move || {
        fs::create_dir_all(&path).map_err(VolumeError::io("mkdir"))?;
        if in_memory {
            mounts::tmpfs(&path, None, 0o777, None).map_err(VolumeError::io("mount tmpfs"))?;
        }
        if let Some(group) = group {
            chown(&path, None, Some(group)).map_err(VolumeError::io("chown"))?;
        }
        let mode = fs::Permissions::from_mode(mode_of_root(group));
        fs::set_permissions(&path, mode).map_err(VolumeError::io("chmod"))?;
        atomic::write(&path, &files, group).map_err(VolumeError::io("write"))?;
        Ok(Mounted::directory(path, true))
    };
    tokio::task::spawn_blocking(work).await?
}

pub fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref()?.security_context.as_ref()?;
    context.fs_group.and_then(|group| u32::try_from(group).ok())
}

/// The mode of a volume's directory: open for all, and its files belong to the pod's group.
pub fn mode_of_root(group: Option<u32>) -> u32 {
    if group.is_some() { 0o2777 } else { 0o777 }
}
