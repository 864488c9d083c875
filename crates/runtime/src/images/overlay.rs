//! A container's root: its image's layers with a writable directory above, by overlayfs.
//!
//! For a pod with users of its own overlayfs gets the layers' directory mapped to them, all layers by
//! one mount that goes when the overlay is there, and what the container writes has their ids on the
//! disk.

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
    let writable =
        format!(",upperdir={},workdir={}", upper.display(), container.join("work").display());
    let target = container.join("rootfs");
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    let (flags, writable) = (MsFlags::empty(), writable.as_str());
    let overlay = Overlay { lower: &lower, target: &target, flags, writable };
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
    let mut lower = lower(store, layers, container)?;
    // Without an upper directory there must be two lower ones.
    lower.push(container.join("empty"));
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    let overlay =
        Overlay { lower: &lower, target: &target, flags: MsFlags::MS_RDONLY, writable: "" };
    mount_mapped(store, container, owners, &overlay)?;
    Ok(target)
}

struct Overlay<'a> {
    /// Below the directory of all layers.
    lower: &'a [PathBuf],
    target: &'a Path,
    flags: MsFlags,
    /// The option of a directory to write to, if there is one.
    writable: &'a str,
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

/// One at a time, so that a burst of pods needs no more descriptors than one image has layers.
static MOUNTING: Mutex<()> = Mutex::new(());

/// The kernel takes at most a page of options, and an image may have a hundred layers with names of 64
/// digits: they are opened, and called by their descriptors.
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

/// The layers' directories below that of all layers, the uppermost first.
fn lower(store: &ImageStore, layers: &[String], container: &Path) -> Result<Vec<PathBuf>> {
    let mut lower: Vec<PathBuf> = Vec::new();
    for diff_id in layers.iter().rev() {
        let path = store.layer(diff_id);
        if !path.is_dir() {
            return Err(Error::NotFound(format!("layer {diff_id} is missing")));
        }
        let name = path.file_name().map(PathBuf::from);
        // The same layer twice is one too many for overlayfs, and changes nothing.
        lower.extend(name.filter(|name| !lower.contains(name)));
    }
    if lower.is_empty() {
        lower.push(container.join("empty"));
    }
    Ok(lower)
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

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;

    /// As many layers as an image may have, in a mount namespace that goes with its thread.
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
