//! The kubelet's own mounts: tmpfs, and subpaths of volumes.
//!
//! Subpaths are pinned by a bind mount, because a container that can write the volume could replace the
//! directory by a link to the host's between our check and the runtime's mount. The kernel resolves the
//! path inside the volume (`RESOLVE_IN_ROOT`); the file is opened, and exactly that file is mounted.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, fstat};

/// Mounts a tmpfs at `path` unless it is mounted; its root has `mode` and `group` from the start.
pub fn tmpfs(path: &Path, size: Option<u64>, mode: u32, group: Option<u32>) -> io::Result<()> {
    if is_mounted(path)? {
        return Ok(());
    }
    let size = size.map(|size| format!(",size={size}")).unwrap_or_default();
    let group = group.map(|group| format!(",gid={group}")).unwrap_or_default();
    let options = format!("mode={mode:o}{size}{group}");
    let flags = MsFlags::empty();
    mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options.as_str()))
        .map_err(io::Error::from)
}

/// Mounts a file system of huge pages at `path` unless it is mounted.
pub fn hugetlbfs(path: &Path, page_size: &str, mode: u32, group: Option<u32>) -> io::Result<()> {
    if is_mounted(path)? {
        return Ok(());
    }
    let group = group.map(|group| format!(",gid={group}")).unwrap_or_default();
    let options = format!("pagesize={page_size},mode={mode:o}{group}");
    mount(Some("nodev"), path, Some("hugetlbfs"), MsFlags::empty(), Some(options.as_str()))
        .map_err(io::Error::from)
}

/// Bind-mounts `subpath` of the volume at `root` to `target` and returns `target`. A missing path is
/// created as a directory.
pub fn pin_subpath(root: &Path, subpath: &str, target: &Path) -> io::Result<PathBuf> {
    let file = resolve(root, subpath)?;
    let is_dir = SFlag::from_bits_truncate(fstat(&file)?.st_mode).contains(SFlag::S_IFDIR);
    if is_mounted(target)? {
        umount2(target, MntFlags::MNT_DETACH)?;
    }
    if is_dir {
        fs::create_dir_all(target)?;
    } else {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::OpenOptions::new().create(true).append(true).open(target)?;
    }
    let source = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    mount(Some(&source), target, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)?;
    Ok(target.to_path_buf())
}

/// Opens `subpath` as if `root` were `/`, and creates missing directories.
fn resolve(root: &Path, subpath: &str) -> io::Result<OwnedFd> {
    if subpath.starts_with('/') || subpath.split('/').any(|part| part == "..") {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "subPath must stay in the volume"));
    }
    let root = nix::fcntl::open(root, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let how = || {
        OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS)
    };
    let mode = fstat(&root)?.st_mode & 0o7777;
    let mut so_far = String::from(".");
    let mut current = openat2(&root, ".", how())?;
    for part in subpath.split('/').filter(|part| !part.is_empty() && *part != ".") {
        so_far = format!("{so_far}/{part}");
        current = match openat2(&root, so_far.as_str(), how()) {
            Ok(next) => next,
            Err(nix::Error::ENOENT) => {
                nix::sys::stat::mkdirat(&current, part, Mode::from_bits_truncate(mode))?;
                let made = openat2(&root, so_far.as_str(), how())?;
                let path = format!("/proc/self/fd/{}", made.as_raw_fd());
                // The umask may have removed bits that the volume's own directory has.
                fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
                made
            }
            Err(error) => return Err(error.into()),
        };
    }
    Ok(current)
}

/// The mount points of this thread.
fn mount_points() -> io::Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo")?;
    Ok(table.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape).collect())
}

/// Decodes octal escapes such as `\040`.
fn unescape(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = (bytes[at] == b'\\')
            .then(|| text.get(at + 1..at + 4))
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    std::ffi::OsString::from_vec(out).into()
}

/// Whether `path` is a mount point. It asks the kernel about the path itself: the mount table has lines
/// for every pod, so reading it would cost the square of their number. The file system's server is not
/// asked; a mount whose server is dead is found in the table only.
pub fn is_mounted(path: &Path) -> io::Result<bool> {
    let text = CString::new(path.as_os_str().as_bytes())?;
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    // SAFETY: the path ends with a zero byte, and the buffer has room for the kernel's answer.
    let code = unsafe { libc::statx(libc::AT_FDCWD, text.as_ptr(), flags, 0, found.as_mut_ptr()) };
    if code != 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            _ if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Some(libc::ENOTCONN | libc::ESTALE | libc::EIO) => is_in_table(path),
            _ => Err(error),
        };
    }
    // SAFETY: all zeros are a valid value, and the kernel has overwritten it with its answer.
    let found = unsafe { found.assume_init() };
    let root = libc::STATX_ATTR_MOUNT_ROOT as u64;
    if found.stx_attributes_mask & root != 0 {
        return Ok(found.stx_attributes & root != 0);
    }
    // Linux before 5.8.
    Ok(mount_points()?.contains(&fs::canonicalize(path)?))
}

/// Whether a path without a working server is mounted: only its parent directory can be accessed.
fn is_in_table(path: &Path) -> io::Result<bool> {
    let path = match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => fs::canonicalize(parent)?.join(name),
        _ => path.to_path_buf(),
    };
    Ok(mount_points()?.contains(&path))
}

/// Removes a directory, if it exists, after everything that is mounted below it.
pub fn unmount_and_remove(dir: &Path) -> io::Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    unmount_below(dir)?;
    fs::remove_dir_all(dir)
}

/// Like [`unmount_below`], but the directory may be missing.
pub fn unmount_below_if_there(dir: &Path) -> io::Result<()> {
    match unmount_below(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Unmounts everything at or below `dir`, the innermost first.
pub fn unmount_below(dir: &Path) -> io::Result<()> {
    let dir = fs::canonicalize(dir)?;
    let mut points: Vec<PathBuf> =
        mount_points()?.into_iter().filter(|point| point.starts_with(&dir)).collect();
    points.sort_unstable_by_key(|point| std::cmp::Reverse(point.components().count()));
    for point in points {
        match umount2(&point, MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(nix::Error::EINVAL) => {}
            Err(nix::Error::EBUSY) => {
                umount2(&point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_path() {
        let check = |path: &Path, expected: bool| {
            assert_eq!(is_mounted(path).expect("asked"), expected, "{}", path.display());
        };
        let directory = tempfile::tempdir().expect("a directory");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/proc", &link).expect("a link");
        check(Path::new("/proc"), true);
        check(&link, true);
        check(Path::new("/proc/self"), false);
        check(directory.path(), false);
        check(&directory.path().join("none"), false);
        assert!(is_mounted(&directory.path().join("a\0b")).is_err());
    }

    #[test]
    fn a_mount_with_a_dead_server_is_a_mount() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let place = directory.path().join("fuse");
        fs::create_dir(&place).expect("made");
        // In its own mount namespace, which ends with the thread.
        let asked = std::thread::scope(|scope| {
            let of_thread = || -> io::Result<(Option<i32>, bool)> {
                use nix::sched::{CloneFlags, unshare};
                unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)?;
                let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
                mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
                let server = fs::File::options().read(true).write(true).open("/dev/fuse")?;
                let fd = server.as_raw_fd();
                let options = format!("fd={fd},rootmode=40000,user_id=0,group_id=0");
                let none = MsFlags::empty();
                mount(Some("x"), &place, Some("fuse"), none, Some(options.as_str()))?;
                drop(server);
                let error = fs::read_dir(&place).err().and_then(|error| error.raw_os_error());
                let found = is_mounted(&place);
                umount2(&place, MntFlags::MNT_DETACH)?;
                Ok((error, found?))
            };
            scope.spawn(of_thread).join().expect("no panic")
        });
        match asked {
            Ok(found) => assert_eq!(found, (Some(libc::ENOTCONN), true)),
            Err(error) => eprintln!("skipped: no FUSE here: {error}"),
        }
        assert!(is_in_table(Path::new("/proc")).expect("asked"));
        assert!(!is_in_table(directory.path()).expect("asked"));
    }

    #[test]
    fn escapes_of_the_mount_table() {
        assert_eq!(unescape(r"/a\040b\134c"), PathBuf::from(r"/a b\c"));
        assert_eq!(unescape("/plain"), PathBuf::from("/plain"));
    }

    #[test]
    fn subpaths_stay_in_the_volume() {
        let volume = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink("/etc", volume.path().join("evil")).expect("a link");
        assert!(resolve(volume.path(), "../x").is_err());
        assert!(resolve(volume.path(), "/etc").is_err());
        resolve(volume.path(), "a/b").expect("made");
        assert!(volume.path().join("a/b").is_dir());
        // The link is resolved inside the volume, where its target does not exist.
        assert!(resolve(volume.path(), "evil/passwd").is_err());
    }
}
