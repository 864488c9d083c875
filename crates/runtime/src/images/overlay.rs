//! A container's root: its image's layers with a writable directory above, by overlayfs.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::mount::{MsFlags, mount};

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
    let writable = format!(
        ",upperdir={},workdir={}",
        container.join("upper").display(),
        container.join("work").display()
    );
    let target = container.join("rootfs");
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    mount_overlay(&store.layers_dir(), &lower, &target, MsFlags::empty(), &writable)
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
    let mut lower = lower(store, layers, container)?;
    // Without an upper directory there must be two lower ones.
    lower.push(container.join("empty"));
    files::unmount(&target).during(|| format!("unmount {}", target.display()))?;
    mount_overlay(&store.layers_dir(), &lower, &target, MsFlags::MS_RDONLY, "")?;
    Ok(target)
}

fn volume(container: &Path, index: usize) -> PathBuf {
    container.join("volumes").join(index.to_string())
}

/// One at a time, so that a burst of pods needs no more descriptors than one image has layers.
static MOUNTING: Mutex<()> = Mutex::new(());

/// The kernel takes at most a page of options, and an image may have a hundred layers with names of 64
/// digits: they are opened, and called by their descriptors.
fn mount_overlay(
    layers: &Path,
    lower: &[PathBuf],
    target: &Path,
    flags: MsFlags,
    writable: &str,
) -> Result<()> {
    let during = || format!("mount {}", target.display());
    let _alone = MOUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let opened: io::Result<Vec<fs::File>> =
        lower.iter().map(|path| open_place(&layers.join(path))).collect();
    let opened = opened.during(during)?;
    let names: Vec<String> =
        opened.iter().map(|file| format!("/proc/self/fd/{}", file.as_raw_fd())).collect();
    let options = format!("lowerdir={}{writable}", names.join(":"));
    mount(Some("overlay"), target, Some("overlay"), flags, Some(options.as_str()))
        .map_err(io::Error::from)
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
                let root = mount_volume(&store, &layers, &container, 0).expect("mounted");
                let top = fs::read_to_string(root.join("top")).expect("the uppermost");
                (top, fs::read_dir(&root).expect("listed").count())
            });
            look.join().expect("it looks")
        });
        assert_eq!(mounted, ("126".to_owned(), 128));
    }
}
