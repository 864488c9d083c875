//! A container's root: overlayfs with the image's layers below a writable directory.
//!
//! For a pod with a user namespace, overlayfs gets an idmapped mount of the layers' directory. One
//! mount serves all layers and is removed after the overlay exists. Files that the container writes
//! have the mapped ids on the disk.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::mount::{MsFlags, mount};

use super::store::ImageStore;
use super::{During, Error, Result};
use crate::files;
use crate::idmap::{self, Travel};

/// The temporary idmapped mount of the layers, below the container's directory.
const MAPPED: &str = "mapped";

/// The user namespace of a pod, for idmapped mounts.
#[derive(Clone, Debug)]
pub struct Owners {
    /// The path of the pinned user namespace.
    pub namespace: PathBuf,
    /// The node's ids of the pod's root user.
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
    // The upper directory becomes the container's root directory.
    let upper = container.join("upper");
    set_mode(&upper, 0o755).during(|| "set the mode of the root directory".into())?;
    if let Some(owners) = owners {
        std::os::unix::fs::chown(&upper, Some(owners.uid), Some(owners.gid))
            .during(|| "set the owner of the root directory".into())?;
    }
    let lower = lower(store, layers, container)?;
    let writable =
        format!(",upperdir={},workdir={}", upper.display(), container.join("work").display());
    let target = container.join("rootfs");
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    let (flags, writable) = (MsFlags::empty(), writable.as_str());
    let overlay = Overlay { lower: &lower, target: &target, flags, writable };
    mount_mapped(store, container, owners, &overlay)
}

/// Mounts an image read-only at `container/volumes/<index>`. Blocks.
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
    let mut lower = lower(store, layers, container)?;
    // Without an upper directory overlayfs needs two lower ones.
    lower.push(container.join("empty"));
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    let overlay =
        Overlay { lower: &lower, target: &target, flags: MsFlags::MS_RDONLY, writable: "" };
    mount_mapped(store, container, owners, &overlay)?;
    Ok(target)
}

struct Overlay<'a> {
    /// Relative to the directory of all layers.
    lower: &'a [PathBuf],
    target: &'a Path,
    flags: MsFlags,
    /// The mount option for the writable directory, or empty.
    writable: &'a str,
}

/// Mounts the overlay over the layers, idmapped if the pod has a user namespace.
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
    show().during(|| "mount the image's layers with the pod's id mapping".into())?;
    let mounted = mount_overlay(&mapped, overlay);
    // The overlay holds its own clones of the mount.
    files::unmount(&mapped).during(|| format!("unmount {}", mapped.display()))?;
    mounted
}

fn volume(container: &Path, index: usize) -> PathBuf {
    container.join("volumes").join(index.to_string())
}

/// Allows one mount at a time, so that a burst of pods needs descriptors for one image's layers only.
static MOUNTING: Mutex<()> = Mutex::new(());

/// Opens the layers and passes their descriptors: mount options may fill one page, and an image may
/// have a hundred layers with names of 64 digits.
fn mount_overlay(layers: &Path, overlay: &Overlay<'_>) -> Result<()> {
    let Overlay { lower, target, flags, writable } = *overlay;
    let during = || format!("mount {}", target.display());
    let _alone = MOUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let opened: io::Result<Vec<fs::File>> =
        lower.iter().map(|path| open_place(&layers.join(path))).collect();
    let opened = opened.during(during)?;
    let names: Vec<String> =
        opened.iter().map(|file| format!("/proc/self/fd/{}", file.as_raw_fd())).collect();
    let options = format!("lowerdir={}{writable}", names.join(":"));
    mount(Some("overlay"), target, Some("overlay"), flags, Some(options.as_str()))
        .map_err(|errno| crate::machine::overlay_error(errno.into()))
        .during(during)
}

fn open_place(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(path)
}

/// The layers' directories relative to the directory of all layers, the uppermost first.
fn lower(store: &ImageStore, layers: &[String], container: &Path) -> Result<Vec<PathBuf>> {
    let mut lower: Vec<PathBuf> = Vec::new();
    for diff_id in layers.iter().rev() {
        let path = store.layer(diff_id);
        if !path.is_dir() {
            return Err(Error::NotFound(format!("layer {diff_id} is missing")));
        }
        let name = path.file_name().map(PathBuf::from);
        // Overlayfs refuses duplicate layers; the lower duplicate has no effect.
        lower.extend(name.filter(|name| !lower.contains(name)));
    }
    if lower.is_empty() {
        lower.push(container.join("empty"));
    }
    Ok(lower)
}

/// Unmounts the root, the image volumes and the leftovers of an interrupted start.
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

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    /// Mounts the maximum number of layers in a mount namespace that ends with its thread.
    #[test]
    fn an_image_of_many_layers_is_mounted() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let store = ImageStore::open(directory.path()).expect("opened");
        let layers: Vec<String> = (0..127).map(|number| format!("sha256:{number:064x}")).collect();
        for (number, layer) in layers.iter().enumerate() {
            let place = store.layer(layer);
            fs::create_dir(&place).expect("made");
            fs::write(place.join("top"), number.to_string()).expect("written");
            fs::write(place.join(number.to_string()), "").expect("written");
        }
        let container = directory.path().join("container");
        let mounted = std::thread::scope(|scope| {
            let look = scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
                let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
                mount(None::<&str>, "/", None::<&str>, private, None::<&str>).expect("private");
                let root = mount_volume(&store, &layers, &container, 0, None).expect("mounted");
                let top = fs::read_to_string(root.join("top")).expect("the uppermost");
                (top, fs::read_dir(&root).expect("listed").count())
            });
            look.join().expect("it looks")
        });
        assert_eq!(mounted, ("126".to_owned(), 128));
    }
}
