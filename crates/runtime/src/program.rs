//! The executable of the shims: this machine's binary, which no container can write to.
//!
//! The last stage of a container's start is a shim's child. Through `/proc/self/exe` a container's
//! process can reach the file of that child. So shims do not start from the file's path, but from a
//! read-only mount of that file alone. The mount is in no mount namespace: opening it for writing
//! fails with EROFS, even when no process runs it any more, and nothing can remount it writable. It
//! shares the file's pages, so it costs no memory.
//!
//! In: the path of the binary. Out: a path that this process can execute.
//! Invariant: a shim's `/proc/<pid>/exe` is never writable.
//! Upstream: runc's `exeseal`, which uses an overlayfs. Its fallback is a sealed copy, as here.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::idmap;

/// Seals that even this process cannot remove.
const SEALS: libc::c_int =
    libc::F_SEAL_SEAL | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE;

#[derive(Debug)]
pub(crate) struct Program {
    /// The file, through its own mount or as a copy in memory; open while shims are started.
    _file: OwnedFd,
    path: PathBuf,
}

impl Program {
    pub(crate) fn open(binary: &Path) -> io::Result<Self> {
        let file = match read_only(binary) {
            Ok(file) => file,
            Err(error) => {
                tracing::warn!(
                    binary = %binary.display(), %error,
                    "failed to mount the binary read-only for shims, using a copy in memory"
                );
                copied(binary)?
            }
        };
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        Ok(Self { _file: file, path })
    }

    /// Valid in this process, and in its children until their exec.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Opens the file through a read-only mount of its own. After `unshare` the file's mount is in
/// another mount namespace; then its name is looked up in this one.
fn read_only(binary: &Path) -> io::Result<OwnedFd> {
    let mounted = idmap::copy(binary).or_else(|_| idmap::copy(&fs::read_link(binary)?))?;
    idmap::make_read_only(&mounted)?;
    Ok(mounted)
}

fn copied(binary: &Path) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a plain system call with a constant name.
    let fd = unsafe { libc::memfd_create(c"decapod".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it.
    let mut copy = unsafe { File::from_raw_fd(fd) };
    io::copy(&mut File::open(binary)?, &mut copy)?;
    // SAFETY: a plain system call on a descriptor that we own.
    if unsafe { libc::fcntl(copy.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(copy.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    /// Tries to write through a descriptor that outlives the running program.
    fn written(program: &Path) -> io::Result<()> {
        let held = File::open(program)?;
        let again = format!("/proc/self/fd/{}", held.as_raw_fd());
        fs::OpenOptions::new().write(true).open(again)?.write_all(b"x")
    }

    #[test]
    fn a_process_cannot_write_to_its_executable() {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: needs root");
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let shell = directory.path().join("sh");
        fs::copy("/bin/sh", &shell).expect("copied");
        let before = fs::read(&shell).expect("read");
        let check = |program: &Path, errno: i32| {
            let done = Command::new(program).args(["-c", "exit 7"]).status().expect("it runs");
            assert_eq!(done.code(), Some(7));
            let error = written(program).expect_err("refused");
            assert_eq!(error.raw_os_error(), Some(errno), "{error}");
            assert!(fs::read(program).expect("read") == before);
        };
        let program = Program::open(&shell).expect("opened");
        check(program.path(), libc::EROFS);
        let memory = copied(&shell).expect("copied");
        check(Path::new(&format!("/proc/self/fd/{}", memory.as_raw_fd())), libc::EPERM);

        // Simulates an upgrade: the executable of a running server was deleted.
        let held = File::open(&shell).expect("opened");
        fs::remove_file(&shell).expect("removed");
        let nameless = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
        let mounted = read_only(&nameless).expect("mounted");
        check(Path::new(&format!("/proc/self/fd/{}", mounted.as_raw_fd())), libc::EROFS);
    }
}
