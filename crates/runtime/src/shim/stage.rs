//! What a container with users of its own is put together from, in a place where its root may go.
//!
//! The container's init is nobody to the node: it cannot walk to a volume behind a directory that is
//! the node's root's alone, nor map its owners. So the shim enters a mount namespace of its own for
//! the time of the start, copies everything in there as root, mapped where that is wanted, and shows
//! it below a `/dev` that is the container's: devices, root file system, volumes, namespaces.
//!
//! ```text
//!  /dev/null zero … (the container's devices, at their places)
//!  /dev/.decapod/root          the root file system
//!  /dev/.decapod/0 1 2 …       sources of bind mounts, files of namespaces
//! ```
//!
//! Invariant: the namespace ends with the start: the node sees none of it, nothing is left of it
//! when the shim is killed, and no file system is held by it. `/proc` and `/sys` stay as they are,
//! since the kernel lets new users mount only what they see already.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::{SFlag, fstat};
use serde::{Deserialize, Serialize};

use crate::idmap::{self, Travel};

const ROOT: &str = "/dev";
/// Below [`ROOT`].
pub(crate) const DIRECTORY: &str = ".decapod";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stage {
    /// Where the pod's user namespace is pinned.
    pub users: PathBuf,
    pub items: Vec<Item>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Item {
    pub source: PathBuf,
    /// Below [`ROOT`].
    pub name: String,
    /// Its files belong to the pod's users.
    pub mapped: bool,
    pub travel: Travel,
}

impl Item {
    /// The path that the container's configuration has.
    pub(crate) fn path(&self) -> PathBuf {
        Path::new(ROOT).join(&self.name)
    }
}

/// The way back.
pub(super) struct Entered(OwnedFd);

/// From here on this process sees the stage.
pub(super) fn enter(stage: &Stage) -> io::Result<Entered> {
    let entered = Entered(File::open("/proc/self/ns/mnt")?.into());
    unshare(CloneFlags::CLONE_NEWNS)?;
    match fill(stage) {
        Ok(()) => Ok(entered),
        Err(error) => {
            entered.leave()?;
            Err(error)
        }
    }
}

impl Entered {
    /// The node's mounts again; with the last process in it the stage is gone.
    pub(super) fn leave(self) -> io::Result<()> {
        Ok(setns(self.0, CloneFlags::CLONE_NEWNS)?)
    }
}

fn fill(stage: &Stage) -> io::Result<()> {
    let none = None::<&str>;
    // What the node unmounts meanwhile goes here, too; nothing goes the other way.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
    let users = File::open(&stage.users)?;
    let copies = stage.items.iter().map(|item| {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("mount {}: {error}", item.source.display()))
        };
        made(item, &users).map(|copy| (item, copy)).map_err(named)
    });
    // All of them before the node's devices are covered.
    let copies = copies.collect::<io::Result<Vec<_>>>()?;
    let flags = MsFlags::MS_NOSUID;
    mount(Some("decapod"), ROOT, Some("tmpfs"), flags, Some("mode=755,size=1m"))?;
    fs::create_dir(Path::new(ROOT).join(DIRECTORY))?;
    copies.into_iter().try_for_each(|(item, copy)| show(item, copy))
}

fn made(item: &Item, users: &File) -> io::Result<OwnedFd> {
    let copy = idmap::copy(&item.source)?;
    if item.mapped {
        idmap::map(&copy, users.as_fd())?;
    }
    idmap::let_travel(&copy, item.travel)?;
    Ok(copy)
}

fn show(item: &Item, copy: OwnedFd) -> io::Result<()> {
    let target = item.path();
    let is_dir = SFlag::from_bits_truncate(fstat(&copy)?.st_mode & libc::S_IFMT) == SFlag::S_IFDIR;
    if is_dir {
        fs::create_dir_all(&target)?;
    } else {
        target.parent().map_or(Ok(()), fs::create_dir_all)?;
        File::create(&target)?;
    }
    idmap::attach(copy, &target)
}
