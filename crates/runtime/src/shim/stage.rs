//! The stage: the mount sources of a container with a user namespace, at paths that its root can access.
//!
//! The container's init has no rights on the node: it cannot reach a volume behind a directory that
//! only the node's root may enter, nor map its owners. So for the start the shim enters a mount
//! namespace of its own. There it copies all mounts as root, with id mapping where needed. It
//! attaches them below a `/dev` for the container: devices, root file system, volumes, namespaces.
//!
//! ```text
//!  /dev/null zero … (the container's devices, at their places)
//!  /dev/.decapod/root          the root file system
//!  /dev/.decapod/0 1 2 …       sources of bind mounts, files of namespaces
//! ```
//!
//! Invariant: the mount namespace ends with the start. The node sees none of it, a killed shim
//! leaves nothing, and it keeps no file system busy. `/proc` and `/sys` stay as they are, since the
//! kernel lets a new user namespace mount only those that it sees already.

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
    /// The path of the pod's pinned user namespace.
    pub users: PathBuf,
    pub items: Vec<Item>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Item {
    pub source: PathBuf,
    /// Below [`ROOT`].
    pub name: String,
    /// Whether the mount is mapped to the pod's ids.
    pub mapped: bool,
    pub travel: Travel,
}

impl Item {
    /// The path in the container's configuration.
    pub(crate) fn path(&self) -> PathBuf {
        Path::new(ROOT).join(&self.name)
    }
}

/// The node's mount namespace, for leaving the stage.
pub(super) struct Entered(OwnedFd);

/// Enters the stage: from here on this process sees its mounts.
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
    /// Returns to the node's mounts. The stage ends with the last process in it.
    pub(super) fn leave(self) -> io::Result<()> {
        Ok(setns(self.0, CloneFlags::CLONE_NEWNS)?)
    }
}

fn fill(stage: &Stage) -> io::Result<()> {
    let none = None::<&str>;
    // The node's unmounts propagate here; nothing propagates to the node.
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
    let users = File::open(&stage.users)?;
    let copies = stage.items.iter().map(|item| {
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("mount {}: {error}", item.source.display()))
        };
        made(item, &users).map(|copy| (item, copy)).map_err(named)
    });
    // Copies everything before the stage covers the node's devices.
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
