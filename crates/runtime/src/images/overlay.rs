//! A container's root: its image's layers with a writable directory above, by overlayfs.
//!
//! For a pod with users of its own overlayfs gets the layers' directory mapped to them, all layers by
//! one mount that goes when the overlay is there, and what the container writes has their ids on the
//! disk.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

use super::store::ImageStore;
use super::{During, Error, Result};
use crate::files;
use crate::idmap::{self, Travel};

/// Where the layers are shown to overlayfs for a moment, below the container's directory.
const MAPPED: &str = "mapped";

/// Users of a pod's own, to whom files are shown as theirs.
#[derive(Clone, Debug)]
pub struct Owners {
    /// Where the user namespace is pinned.
    pub namespace: PathBuf,
    /// The node's ids of their root.
    pub uid: u32,
    pub gid: u32,
}

/// Mounts at `container/rootfs`; the upper directory is `container/upper`. Blocks.
pub fn mount_root(
    store: &ImageStore,
    layers: &[String],
    container: &Path,
    owners: Option<&Owners>,
) -> Result<()> {
    for name in ["upper", "work", "rootfs", "empty"] {
        fs::create_dir_all(container.join(name))
            .during(|| format!("create {}", container.display()))?;
    }
    // The root directory of the container is the upper one's.
    let upper = container.join("upper");
    set_mode(&upper, 0o755).during(|| "open up the root directory".into())?;
    if let Some(owners) = owners {
        std::os::unix::fs::chown(&upper, Some(owners.uid), Some(owners.gid))
            .during(|| "give the root directory away".into())?;
    }
    let lower = lower(store, layers, container)?;
    let options = format!(
        "lowerdir={lower},upperdir={},workdir={}",
        upper.display(),
        container.join("work").display()
    );
    let target = container.join("rootfs");
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    let overlay = Overlay { target: &target, flags: MsFlags::empty(), options: &options };
    mount_mapped(store, container, owners, &overlay)
}

/// Mounts an image at `container/volumes/<index>`, for reading only. Blocks.
pub fn mount_volume(
    store: &ImageStore,
    layers: &[String],
    container: &Path,
    index: usize,
    owners: Option<&Owners>,
) -> Result<PathBuf> {
    let target = volume(container, index);
    for path in [&target, &container.join("empty")] {
        fs::create_dir_all(path).during(|| format!("create {}", path.display()))?;
    }
    let lower = lower(store, layers, container)?;
    // Without an upper directory there must be two lower ones.
    let options = format!("lowerdir={lower}:{}", container.join("empty").display());
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    let overlay = Overlay { target: &target, flags: MsFlags::MS_RDONLY, options: &options };
    mount_mapped(store, container, owners, &overlay)?;
    Ok(target)
}

struct Overlay<'a> {
    target: &'a Path,
    flags: MsFlags,
    options: &'a str,
}

/// Mounts over the layers as they are, or as they are to be seen by others.
fn mount_mapped(
    store: &ImageStore,
    container: &Path,
    owners: Option<&Owners>,
    overlay: &Overlay<'_>,
) -> Result<()> {
    let Some(owners) = owners else { return mount_overlay(&store.layers_dir(), overlay) };
    let mapped = container.join(MAPPED);
    let show = || {
        fs::create_dir_all(&mapped)?;
        files::unmount(&mapped)?;
        let copy = idmap::copy(&store.layers_dir())?;
        idmap::map(&copy, fs::File::open(&owners.namespace)?.as_fd())?;
        idmap::let_travel(&copy, Travel::Not)?;
        idmap::attach(copy, &mapped)
    };
    show().during(|| "map the image's layers to the pod's users".into())?;
    let mounted = mount_overlay(&mapped, overlay);
    // The overlay has copies of its own.
    files::unmount(&mapped).during(|| format!("unmount {}", mapped.display()))?;
    mounted
}

fn volume(container: &Path, index: usize) -> PathBuf {
    container.join("volumes").join(index.to_string())
}

/// The kernel takes at most a page of options, and an image may have a hundred layers: their names
/// are relative to a working directory that is the mounting thread's alone.
fn mount_overlay(layers: &Path, overlay: &Overlay<'_>) -> Result<()> {
    let Overlay { target, flags, options } = *overlay;
    std::thread::scope(|scope| {
        let mounting = scope.spawn(|| {
            unshare(CloneFlags::CLONE_FS)?;
            std::env::set_current_dir(layers)?;
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

/// The root and the image volumes, and what a start that was cut short left.
pub fn unmount_root(container: &Path) -> Result<()> {
    let volumes = fs::read_dir(container.join("volumes")).into_iter().flatten().flatten();
    let own = [container.join("rootfs"), container.join(MAPPED)];
    for target in volumes.map(|entry| entry.path()).chain(own) {
        files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    }
    Ok(())
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}
