//! Starts another process in the running container.
//!
//! ```text
//!  shim ─fork─► joins cgroups and namespaces ─clone(CLONE_PARENT)─► process: terminal, user,
//!    │ ◄──────── "pid n" ──────┘ ends                                seccomp, capabilities, exec
//!    └ waits for both; the process is the shim's own child
//! ```
//!
//! This does not use libcontainer's tenant builder: that builds a new `linux` section without the
//! seccomp profile, so the process would run without the filter.
//!
//! The process gets the caller's descriptors directly: its bytes do not pass through the shim.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;

use libcontainer::oci_spec::runtime::Spec;
use nix::fcntl::OFlag;
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::{ForkResult, Gid, Uid};

use super::ShimConfig;
use super::container::{execute, has_own_users, outside};
use super::namespaces::become_root;
use super::protocol::ExecProcess;
use super::stdio::{give, receive_descriptor, set_nonblocking};

pub(super) struct Spawned {
    pub pid: i32,
    pub terminal: Option<OwnedFd>,
}

/// Starts the process. `streams` are the descriptors 0, 1 and 2 that `process` asks for.
pub(super) fn spawn(
    config: &ShimConfig,
    init: i32,
    process: &ExecProcess,
    streams: Vec<OwnedFd>,
) -> io::Result<Spawned> {
    let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let console = process.terminal.then(UnixStream::pair).transpose()?;
    // SAFETY: a shim has one thread, so the child may allocate.
    match unsafe { nix::unistd::fork()? } {
        ForkResult::Child => {
            drop(reader);
            let mut writer = File::from(writer);
            let theirs = console.map(|(_, theirs)| theirs);
            if let Err(error) = join(config, init, process, streams, theirs, &mut writer) {
                let _ = write!(writer, "error {error}");
            }
            // SAFETY: ends at once, without running the parent's destructors.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            drop((writer, streams));
            let ours = console.map(|(ours, _)| ours);
            let mut text = String::new();
            // The pipe ends when the process has executed the command, or died.
            let read = File::from(reader).read_to_string(&mut text);
            let _ = nix::sys::wait::waitpid(child, None);
            read?;
            finish(&text, ours)
        }
    }
}

fn finish(text: &str, console: Option<UnixStream>) -> io::Result<Spawned> {
    if let Some((_, error)) = text.split_once("error ") {
        return Err(io::Error::other(error.to_owned()));
    }
    let pid = text.strip_prefix("pid ").and_then(|rest| rest.trim().parse().ok());
    let pid = pid.ok_or_else(|| io::Error::other("the process did not start"))?;
    let terminal = match console {
        Some(console) => {
            console.set_nonblocking(true)?;
            let master = receive_descriptor(console.as_raw_fd())?;
            set_nonblocking(&master)?;
            Some(master)
        }
        None => None,
    };
    Ok(Spawned { pid, terminal })
}

fn join(
    config: &ShimConfig,
    init: i32,
    process: &ExecProcess,
    streams: Vec<OwnedFd>,
    console: Option<UnixStream>,
    report: &mut File,
) -> io::Result<()> {
    let spec = Spec::load(config.bundle.join("config.json")).map_err(io::Error::other)?;
    let pidfd = pidfd_open(init)?;
    config.hierarchies.join(&config.cgroup, 0, false)?;
    if let Some(score) = spec.process().as_ref().and_then(|p| p.oom_score_adj()) {
        // The kernel may refuse it, as for the container itself.
        let _ = std::fs::write("/proc/self/oom_score_adj", score.to_string());
    }
    if let Some(user) = outside(&spec) {
        streams.iter().for_each(|stream| give(stream, user));
    }
    if let Some(profile) = spec.process().as_ref().and_then(|p| p.apparmor_profile().as_ref()) {
        // Written through the node's /proc; it applies to the next exec.
        crate::apparmor::apply_at_exec(profile)?;
    }
    let mut joined = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWPID
        | CloneFlags::CLONE_NEWCGROUP;
    let has_own_users = has_own_users(&spec);
    if has_own_users {
        joined |= CloneFlags::CLONE_NEWUSER;
    }
    setns(&pidfd, joined)?;
    drop(pidfd);
    if has_own_users {
        // Becomes root of the user namespace, where the node's root has no id.
        become_root()?;
    }
    // A sibling process: the shim is its parent. It starts inside the PID namespace.
    // SAFETY: as a fork; one thread.
    let pid =
        unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_PARENT | libc::SIGCHLD, 0, 0, 0, 0) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let error = become_process(&spec, process, streams, console);
            let _ = write!(report, "error {error}");
            // SAFETY: ends at once.
            unsafe { libc::_exit(127) }
        }
        pid => write!(report, "pid {pid} "),
    }
}

fn become_process(
    spec: &Spec,
    process: &ExecProcess,
    streams: Vec<OwnedFd>,
    console: Option<UnixStream>,
) -> String {
    match set_up(spec, process, streams, console) {
        Ok(template) => execute(&template, &process.args),
        Err(error) => error.to_string(),
    }
}

fn set_up(
    spec: &Spec,
    process: &ExecProcess,
    streams: Vec<OwnedFd>,
    console: Option<UnixStream>,
) -> io::Result<libcontainer::oci_spec::runtime::Process> {
    let missing = || io::Error::other("config.json has no process");
    let mut template = spec.process().clone().ok_or_else(missing)?;
    super::reset_signals();
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
    nix::unistd::setsid()?;
    let user = template.user().clone();
    match console {
        Some(console) => open_terminal(console, user.uid())?,
        None => place_streams(process, streams)?,
    }
    if process.terminal {
        let mut environment = template.env().clone().unwrap_or_default();
        if !environment.iter().any(|entry| entry.starts_with("TERM=")) {
            environment.push("TERM=xterm".into());
        }
        template.set_env(Some(environment));
    }
    // SAFETY: plain system calls; everything above 2 closes at exec.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    std::env::set_current_dir(template.cwd()).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("chdir to cwd (\"{}\"): {error}", template.cwd().display()),
        )
    })?;
    drop_privileges(spec, &template, &user)?;
    // A directory outside of the container has no absolute path here.
    if !std::env::current_dir()?.is_absolute() {
        return Err(io::Error::other("the working directory is not in the container"));
    }
    Ok(template)
}

/// In libcontainer's order: the filter comes before dropping capabilities, unless noNewPrivileges is set.
fn drop_privileges(
    spec: &Spec,
    template: &libcontainer::oci_spec::runtime::Process,
    user: &libcontainer::oci_spec::runtime::User,
) -> io::Result<()> {
    let syscall = libcontainer::syscall::syscall::create_syscall();
    let no_new_privileges = template.no_new_privileges() == Some(true);
    if no_new_privileges {
        nix::sys::prctl::set_no_new_privs()?;
    }
    let groups: Vec<Gid> =
        user.additional_gids().iter().flatten().map(|gid| Gid::from_raw(*gid)).collect();
    nix::unistd::setgroups(&groups)?;
    set_ids(user.uid(), user.gid())?;
    // Leaving root cleared the effective capabilities; loading the filter needs one.
    libcontainer::capabilities::reset_effective(syscall.as_ref()).map_err(io::Error::other)?;
    let filter = spec.linux().as_ref().and_then(|linux| linux.seccomp().as_ref());
    let load = || match filter {
        Some(profile) => libcontainer::seccomp::initialize_seccomp(profile)
            .map(|_| ())
            .map_err(|error| io::Error::other(format!("seccomp: {error}"))),
        None => Ok(()),
    };
    if !no_new_privileges {
        load()?;
    }
    if let Some(capabilities) = template.capabilities() {
        libcontainer::capabilities::drop_privileges(capabilities, syscall.as_ref())
            .map_err(io::Error::other)?;
    }
    if no_new_privileges {
        load()?;
    }
    Ok(())
}

/// Changes the user but keeps the permitted capabilities until the caller drops them.
fn set_ids(uid: u32, gid: u32) -> io::Result<()> {
    nix::sys::prctl::set_keepcaps(true)?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)?;
    nix::sys::prctl::set_keepcaps(false)?;
    Ok(())
}

fn place_streams(process: &ExecProcess, streams: Vec<OwnedFd>) -> io::Result<()> {
    let mut given = streams.into_iter();
    for (at, wanted) in [process.stdin, process.stdout, process.stderr].into_iter().enumerate() {
        let fd: OwnedFd = if wanted {
            given.next().ok_or_else(|| io::Error::other("a stream is missing"))?
        } else {
            OpenOptions::new().read(true).write(true).open("/dev/null")?.into()
        };
        // SAFETY: 0 to 2 are this process's own; `dup2` to them leaks nothing.
        if unsafe { libc::dup2(fd.as_raw_fd(), at as i32) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Opens a terminal of the container and sends its master to the shim.
fn open_terminal(console: UnixStream, uid: u32) -> io::Result<()> {
    let master = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOCTTY | libc::O_CLOEXEC)
        .open("/dev/ptmx")?;
    let about = master.metadata()?;
    // The container may have replaced the file.
    if !about.file_type().is_char_device() || about.rdev() != libc::makedev(5, 2) {
        return Err(io::Error::other("/dev/ptmx is not a terminal multiplexer"));
    }
    let unlock: libc::c_int = 0;
    // SAFETY: the arguments have the types of these requests.
    let slave = unsafe {
        if libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &unlock) < 0 {
            return Err(io::Error::last_os_error());
        }
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags)
    };
    if slave < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it.
    let slave = unsafe { OwnedFd::from_raw_fd(slave) };
    // Best effort: a user who does not own the file can still use the open terminal.
    let _ = nix::unistd::fchown(&slave, Some(Uid::from_raw(uid)), None);
    let fds = [master.as_raw_fd()];
    let slices = [io::IoSlice::new(b"t")];
    let control = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(console.as_raw_fd(), &slices, &control, MsgFlags::MSG_NOSIGNAL, None)?;
    // SAFETY: plain system calls on descriptors that we own.
    unsafe {
        if libc::ioctl(slave.as_raw_fd(), libc::TIOCSCTTY, 0) < 0 {
            return Err(io::Error::last_os_error());
        }
        for at in 0..3 {
            if libc::dup2(slave.as_raw_fd(), at) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: a plain system call.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
