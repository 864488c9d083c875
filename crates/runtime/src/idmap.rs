//! Idmapped mounts: a copy of a mount whose files belong to a pod's user namespace.
//!
//! ```text
//!  on the disk: 0, 1000 ─► mapped copy ─► 65536, 66536 on the node = 0, 1000 inside the pod
//! ```
//!
//! A copy is a descriptor until it is attached, and disappears with the descriptor. Mapping must
//! come before attaching: the kernel maps no visible mount. Only some file systems support it (not
//! NFS, not overlayfs); for others the error says so.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The propagation of later mounts into a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Travel {
    Not,
    Inwards,
}

/// A detached copy of the mount at `path`, with all mounts below.
pub(crate) fn copy(path: &Path) -> io::Result<OwnedFd> {
    let flags = libc::OPEN_TREE_CLONE
        | libc::O_CLOEXEC as libc::c_uint
        | libc::AT_RECURSIVE as libc::c_uint;
    let name = text(path)?;
    // SAFETY: the path is a string that outlives the call.
    let fd = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Maps the copy's files to the ids of a user namespace. As in runc, mounts below are not mapped:
/// they may not support it. Their owners have no id inside the pod.
pub(crate) fn map(copy: &OwnedFd, users: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: all zeroes is a valid value.
    let mut attributes: libc::mount_attr = unsafe { std::mem::zeroed() };
    attributes.attr_set = libc::MOUNT_ATTR_IDMAP;
    attributes.userns_fd = users.as_raw_fd() as u64;
    set(copy, &attributes, 0).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => io::Error::new(
            io::ErrorKind::Unsupported,
            "its file system does not support mapped mounts, which a pod with hostUsers: false needs",
        ),
        _ => error,
    })
}

/// Sets the propagation of the copy and of all mounts below.
pub(crate) fn let_travel(copy: &OwnedFd, travel: Travel) -> io::Result<()> {
    // SAFETY: all zeroes is a valid value.
    let mut attributes: libc::mount_attr = unsafe { std::mem::zeroed() };
    attributes.propagation = match travel {
        Travel::Not => libc::MS_PRIVATE,
        Travel::Inwards => libc::MS_SLAVE,
    };
    set(copy, &attributes, libc::AT_RECURSIVE)
}

/// Makes the copy read-only.
pub(crate) fn make_read_only(copy: &OwnedFd) -> io::Result<()> {
    // SAFETY: all zeroes is a valid value.
    let mut attributes: libc::mount_attr = unsafe { std::mem::zeroed() };
    attributes.attr_set = libc::MOUNT_ATTR_RDONLY;
    set(copy, &attributes, 0)
}

fn set(copy: &OwnedFd, attributes: &libc::mount_attr, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: an empty path with AT_EMPTY_PATH; the attributes outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            copy.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | flags,
            std::ptr::from_ref(attributes),
            size_of::<libc::mount_attr>(),
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Attaches the copy at `target`, which must exist and be of the same kind (file or directory).
pub(crate) fn attach(copy: OwnedFd, target: &Path) -> io::Result<()> {
    let name = text(target)?;
    // SAFETY: strings that outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            copy.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            name.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn text(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}
