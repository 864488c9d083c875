//! A container's root: its image's layers with a writable directory above, by overlayfs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use super::store::ImageStore;
use super::{During, Error, Result};
use crate::files;

/// Mounts at `container/rootfs`; the upper directory is `container/upper`. Blocks.
pub fn mount_root(store: &ImageStore, layers: &[String], container: &Path) -> Result<()> {
    for name in ["upper", "work", "rootfs", "empty"] {
        fs::create_dir_all(container.join(name))
            .during(|| format!("create {}", container.display()))?;
    }
    // The root directory of the container is the upper one's.
    set_mode(&container.join("upper"), 0o755).during(|| "open up the root directory".into())?;
    let lower = lower(store, layers, container)?;
    let options = format!(
        "lowerdir={lower},upperdir={},workdir={}",
        container.join("upper").display(),
        container.join("work").display()
    );
    let target = container.join("rootfs");
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    mount_overlay(store, &target, MsFlags::empty(), &options)
}

/// Mounts an image at `container/volumes/<index>`, for reading only. Blocks.
pub fn mount_volume(
    store: &ImageStore,
    layers: &[String],
    container: &Path,
    index: usize,
) -> Result<PathBuf> {
    let target = volume(container, index);
    for path in [&target, &container.join("empty")] {
        fs::create_dir_all(path).during(|| format!("create {}", path.display()))?;
    }
    let lower = lower(store, layers, container)?;
    // Without an upper directory there must be two lower ones.
    let options = format!("lowerdir={lower}:{}", container.join("empty").display());
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    mount_overlay(store, &target, MsFlags::MS_RDONLY, &options)?;
    Ok(target)
}

fn volume(container: &Path, index: usize) -> PathBuf {
    container.join("volumes").join(index.to_string())
}

/// The kernel takes at most a page of options, and an image may have a hundred layers: their names
/// are relative to a working directory that is the mounting thread's alone.
fn mount_overlay(store: &ImageStore, target: &Path, flags: MsFlags, options: &str) -> Result<()> {
    let directory = store.layers_dir();
    std::thread::scope(|scope| {
        let mounting = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS)?;
            std::env::set_current_dir(&directory)?;
            mount(Some("overlay"), target, Some("overlay"), flags, Some(options))?;
            Ok::<(), io::Error>(())
        });
        mounting.join().unwrap_or_else(|_| Err(io::Error::other("a thread died")))
    })
    .during(|| format!("mount {}", target.display()))
}

/// The layers' names, the uppermost first.
fn lower(store: &ImageStore, layers: &[String], container: &Path) -> Result<String> {
    if layers.is_empty() {
        return Ok(container.join("empty").display().to_string());
    }
    let mut names = Vec::new();
    for diff_id in layers.iter().rev() {
        let path = store.layer(diff_id);
        if !path.is_dir() {
            return Err(Error::NotFound(format!("layer {diff_id} is missing")));
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        // The same layer twice is one too many for overlayfs, and changes nothing.
        if let Some(name) = name.filter(|name| !names.contains(name)) {
            names.push(name);
        }
    }
    Ok(names.join(":"))
}

/// The root and the image volumes.
pub fn unmount_root(container: &Path) -> Result<()> {
    let volumes = fs::read_dir(container.join("volumes")).into_iter().flatten().flatten();
    for target in volumes.map(|entry| entry.path()).chain([container.join("rootfs")]) {
        files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
