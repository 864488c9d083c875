//! The init of the PID namespace that a pod's containers share.
//!
//! The process that creates a sandbox's namespaces ([`super::namespaces`]) forks it. It gives up
//! everything (root directory, capabilities, user) and then only reaps children. Containers see it
//! as process 1, so it must expose nothing of the host.

use std::fs;
use std::io;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Gid, Uid};

/// Upstream: the user of the pause image.
const NOBODY: u32 = 65535;

/// Creates the namespace and its init; returns the init's pid outside of the namespace.
pub(super) fn start() -> io::Result<i32> {
    unshare(CloneFlags::CLONE_NEWPID)?;
    let (ready_reader, ready_writer) = nix::unistd::pipe()?;
    // SAFETY: a shim has one thread.
    match unsafe { nix::unistd::fork()? } {
        ForkResult::Child => {
            drop(ready_reader);
            crate::memory::trim();
            if let Err(error) = confine() {
                eprintln!("pause: {error}");
                std::process::exit(1);
            }
            let _ = nix::unistd::write(&ready_writer, b"1");
            drop(ready_writer);
            reap()
        }
        ForkResult::Parent { child } => {
            drop(ready_writer);
            let mut byte = [0];
            if nix::unistd::read(&ready_reader, &mut byte)? != 1 {
                return Err(io::Error::other("the init of the process namespace failed"));
            }
            Ok(child.as_raw())
        }
    }
}

/// Leaves the process with an empty read-only root, no capability and the user nobody.
fn confine() -> io::Result<()> {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let root = "/proc";
    mount(Some("tmpfs"), root, Some("tmpfs"), MsFlags::empty(), Some("size=0,mode=555"))?;
    std::env::set_current_dir(root)?;
    nix::unistd::pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    mount(none, "/", none, MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none)?;
    for fd in 0..3 {
        // Nothing is written from here on.
        let _ = nix::unistd::close(fd);
    }
    nix::unistd::setgroups(&[])?;
    nix::unistd::setresgid(Gid::from_raw(NOBODY), Gid::from_raw(NOBODY), Gid::from_raw(NOBODY))?;
    // Leaving root also drops the capabilities.
    nix::unistd::setresuid(Uid::from_raw(NOBODY), Uid::from_raw(NOBODY), Uid::from_raw(NOBODY))?;
    Ok(())
}

fn reap() -> ! {
    // The signals are blocked and awaited: an init has no default actions, and none is missed.
    let signals = SigSet::from_iter([Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT]);
    let _ = signals.thread_block();
    loop {
        while let Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) =
            waitpid(None, Some(WaitPidFlag::WNOHANG))
        {}
        if !matches!(signals.wait(), Ok(Signal::SIGCHLD) | Err(_)) {
            std::process::exit(0);
        }
    }
}

/// Whether the process is alive.
pub(crate) fn alive(pid: i32) -> bool {
    pid > 0 && fs::metadata(format!("/proc/{pid}/ns/pid")).is_ok()
}
