//! Creation and start of the container, with libcontainer.
//!
//! libcontainer changes its caller: it sets the shim's own `oom_score_adj` to the container's. It
//! reads only the `config.json` of the bundle.
//!
//! Invariant: a seccomp profile in `config.json` is applied or the start fails. libcontainer loads
//! it before it drops capabilities when `noNewPrivileges` is absent, and after when it is present;
//! so the runtime never writes `false` there.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use libcontainer::container::builder::ContainerBuilder;
use libcontainer::oci_spec::runtime::{LinuxNamespaceType, Process, Spec};
use libcontainer::syscall::syscall::SyscallType;
use libcontainer::workload::{
    Executor, ExecutorError, ExecutorSetEnvsError, ExecutorValidationError,
};
use nix::errno::Errno;
use nix::poll::{PollTimeout, poll};
use nix::sys::signal::{SigHandler, Signal, signal};

use super::event_loop::Shim;
use super::log::Log;
use super::{ShimConfig, StartedRecord, inspect, now_nanos, stage, stdio};
use crate::files;

const OOM_FILE: &str = "/proc/self/oom_score_adj";
/// How long a program is retried that another process has open for writing.
const BUSY: Duration = Duration::from_secs(1);
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Creates and starts the container. On failure only files are left.
pub(super) fn start(config: ShimConfig) -> io::Result<(Shim, StartedRecord)> {
    let log = config.log_path.clone().map(Log::open).transpose().map_err(|error| {
        io::Error::new(error.kind(), format!("open the container's log: {error}"))
    })?;
    let _ = fs::remove_file(config.socket());
    let listener = UnixListener::bind(config.socket())?;
    fs::set_permissions(config.socket(), fs::Permissions::from_mode(0o600))?;
    let state = config.state_root();
    files::remove_tree(&state)?;
    fs::create_dir_all(&state)?;
    let (mut stdio, given) = stdio::open(&config)?;
    let spec = Spec::load(config.bundle.join("config.json")).map_err(start_error)?;
    if let Some(user) = outside(&spec) {
        [&given.stdin, &given.stdout, &given.stderr].into_iter().flatten().for_each(|stream| {
            stdio::give(stream, user);
        });
    }

    // The container sees its cgroup in every hierarchy, also in those that libcontainer ignores.
    config.hierarchies.prepare(&config.cgroup)?;
    let own_oom_score = fs::read_to_string(OOM_FILE);
    let mut builder = ContainerBuilder::new("c".to_owned(), SyscallType::default())
        .with_root_path(state)
        .map_err(start_error)?
        .with_executor(Payload)
        .with_console_socket(given.console.as_ref().map(|console| console.path.clone()));
    builder.stdin = given.stdin;
    builder.stdout = given.stdout;
    builder.stderr = given.stderr;
    let stage = config.stage.as_ref().map(stage::enter).transpose();
    let stage = stage.map_err(start_error)?;
    let build = || {
        inspect::check_root(&spec)?;
        let built = builder.as_init(&config.bundle).with_systemd(false).with_detach(true).build();
        built.map_err(start_error)
    };
    let built = build();
    let left = stage.map(stage::Entered::leave).transpose();
    if let Ok(score) = own_oom_score {
        // Lowering the score may be refused; then the OOM killer may choose the shim as soon as its
        // container.
        let _ = fs::write(OOM_FILE, score.trim());
    }
    let mut container = built.map_err(|error| cleared(&config, error))?;
    left?;
    if let Some(console) = given.console {
        stdio.terminal = Some(console.receive()?);
    }
    let pid = container.pid().ok_or_else(|| io::Error::other("the container has no process"))?;
    let settled = config
        .hierarchies
        .join_missing(&config.cgroup, pid.as_raw())
        .and_then(|()| inspect::settle(&spec, pid.as_raw(), config.stage.is_none()));
    settled.map_err(|error| cleared(&config, start_error(error)))?;
    let started_at = now_nanos();
    container.start().map_err(start_error)?;
    // From here on, writing to a closed connection is an error, not a signal.
    // SAFETY: no handler is installed.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn)? };
    let shim_pid = i32::try_from(std::process::id()).unwrap_or(0);
    let started = StartedRecord { pid: pid.as_raw(), shim_pid, started_at };
    files::write_json(&config.started_file(), &started)?;
    let shim = Shim::new(config, started.clone(), log, listener, stdio)?;
    Ok((shim, started))
}

/// Kills the container's processes after a failed start. Returns `error`.
fn cleared(config: &ShimConfig, error: io::Error) -> io::Error {
    config.hierarchies.kill(&config.cgroup);
    // A cgroup whose processes are still ending is removed with the container.
    let _ = config.hierarchies.remove(&config.cgroup);
    error
}

/// The container user's uid on the node.
pub(super) fn outside(spec: &Spec) -> Option<u32> {
    let uid = spec.process().as_ref()?.user().uid();
    let Some(ranges) = spec.linux().as_ref()?.uid_mappings() else { return Some(uid) };
    ranges.iter().find_map(|range| {
        let at = uid.checked_sub(range.container_id()).filter(|at| *at < range.size())?;
        range.host_id().checked_add(at)
    })
}

/// Whether the container has a user namespace.
pub(super) fn has_own_users(spec: &Spec) -> bool {
    let namespaces = spec.linux().as_ref().and_then(|linux| linux.namespaces().as_ref());
    namespaces.into_iter().flatten().any(|one| one.typ() == LinuxNamespaceType::User)
}

/// The error with its causes: libcontainer's outer errors say little.
fn start_error(error: impl std::error::Error) -> io::Error {
    let mut text = String::new();
    let mut next: Option<&dyn std::error::Error> = Some(&error);
    while let Some(error) = next {
        let line = error.to_string();
        if !text.contains(&line) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&line);
        }
        next = error.source();
    }
    match text.find("exec: \"") {
        // Users know this part of the text; the part before it is internal.
        Some(at) => io::Error::other(format!("unable to start container process: {}", &text[at..])),
        None => io::Error::other(format!("unable to start container process: {text}")),
    }
}

/// The container's command. The shim resolves it, for the usual error messages.
#[derive(Clone)]
struct Payload;

impl Executor for Payload {
    fn exec(&self, spec: &Spec) -> Result<(), ExecutorError> {
        let process = spec.process().as_ref().ok_or(ExecutorError::InvalidArg)?;
        let args = process.args().as_ref().ok_or(ExecutorError::InvalidArg)?;
        Err(ExecutorError::Other(execute(process, args)))
    }

    fn validate(&self, spec: &Spec) -> Result<(), ExecutorValidationError> {
        let process = spec.process().as_ref();
        let args = process.and_then(|process| process.args().as_ref());
        let (Some(process), Some(args)) = (process, args) else {
            return Err(ExecutorValidationError::ArgValidationError("no command".into()));
        };
        find(process, args).map(|_| ()).map_err(ExecutorValidationError::ArgValidationError)
    }

    fn setup_envs(
        &self,
        _: std::collections::HashMap<String, String>,
    ) -> Result<(), ExecutorSetEnvsError> {
        // `execute` sets the environment in its original order.
        Ok(())
    }
}

/// Executes the command; returns the error text on failure.
pub(super) fn execute(process: &Process, args: &[String]) -> String {
    let path = match find(process, args) {
        Ok(path) => path,
        Err(text) => return text,
    };
    let texts = |all: &[String]| -> Result<Vec<CString>, _> {
        all.iter().map(|text| CString::new(text.as_bytes())).collect()
    };
    let environment = process.env().as_deref().unwrap_or_default();
    match (CString::new(path.as_bytes()), texts(args), texts(environment)) {
        (Ok(file), Ok(args), Ok(environment)) => {
            let become_it = || match nix::unistd::execve(&file, &args, &environment) {
                Err(errno) => errno,
                Ok(never) => match never {},
            };
            let error = match while_busy(BUSY, become_it) {
                Errno::ENOEXEC => io::Error::other("exec format error"),
                errno => errno.into(),
            };
            format!("exec {path}: {error}")
        }
        _ => "the command or its environment contains a zero byte".into(),
    }
}

/// Retries while the program is open for writing. The unpacker has closed it, but a child that
/// another thread forked meanwhile holds a copy of the descriptor until its exec.
fn while_busy(patience: Duration, mut attempt: impl FnMut() -> Errno) -> Errno {
    const PAUSE_MILLIS: u16 = 10;
    let mut left = patience.as_millis();
    loop {
        let errno = attempt();
        if errno != Errno::ETXTBSY || left == 0 {
            return errno;
        }
        left = left.saturating_sub(PAUSE_MILLIS.into());
        // The container's seccomp profile may forbid waiting: then the retries follow each other at once.
        let _ = poll(&mut [], PollTimeout::from(PAUSE_MILLIS));
    }
}

/// Finds the command in the container's own `PATH`; runs inside the container.
fn find(process: &Process, args: &[String]) -> Result<String, String> {
    let name = args.first().filter(|name| !name.is_empty()).ok_or("no command")?;
    if name.contains('/') {
        return match fs::metadata(name) {
            Ok(file) if file.is_dir() => Err(format!("exec: \"{name}\": is a directory")),
            Ok(file) if file.permissions().mode() & 0o111 == 0 => {
                Err(format!("exec: \"{name}\": permission denied"))
            }
            Ok(_) => Ok(name.clone()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(format!("exec: \"{name}\": stat {name}: no such file or directory"))
            }
            Err(error) => Err(format!("exec: \"{name}\": {error}")),
        };
    }
    let environment = process.env().as_deref().unwrap_or_default();
    let path = environment.iter().rev().find_map(|entry| entry.strip_prefix("PATH="));
    let usable = |file: &Path| {
        fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    path.unwrap_or(DEFAULT_PATH)
        .split(':')
        .map(|directory| Path::new(if directory.is_empty() { "." } else { directory }).join(name))
        .find(|file| usable(file))
        .map(|file| file.to_string_lossy().into_owned())
        .ok_or_else(|| format!("exec: \"{name}\": executable file not found in $PATH"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::process::CommandExt;
    use std::process::Command;
    use std::ptr::null;

    use super::*;

    #[test]
    fn only_a_busy_program_is_retried() {
        let check = |busy: u32, end: Errno, expected: (Errno, u32)| {
            let mut tries = 0;
            let errno = while_busy(Duration::from_millis(30), || {
                tries += 1;
                if tries <= busy { Errno::ETXTBSY } else { end }
            });
            assert_eq!((errno, tries), expected);
        };
        check(0, Errno::ENOENT, (Errno::ENOENT, 1));
        check(2, Errno::ENOEXEC, (Errno::ENOEXEC, 3));
        check(100, Errno::ENOENT, (Errno::ETXTBSY, 4));
    }

    /// Simulates an image that was unpacked while another process was started.
    #[test]
    fn execution_waits_for_a_program_that_is_open_for_writing() {
        let directory = tempfile::tempdir().expect("a directory");
        let program = directory.path().join("program");
        fs::copy("/bin/sh", &program).expect("copied");
        let held = fs::OpenOptions::new().write(true).open(&program).expect("opened");
        let file = CString::new(program.as_os_str().as_encoded_bytes()).expect("no zero byte");
        let (mut refused, mut tell) = io::pipe().expect("a pipe");
        let copy = held.as_raw_fd();
        let mut command = Command::new(&program);
        // SAFETY: between fork and exec there are system calls only.
        unsafe {
            command.pre_exec(move || {
                libc::close(copy);
                let errno = while_busy(testkit::wait::LONG, || {
                    let arguments = [file.as_ptr(), c"-c".as_ptr(), c":".as_ptr(), null()];
                    let none = [null()];
                    libc::execve(file.as_ptr(), arguments.as_ptr(), none.as_ptr());
                    let errno = Errno::last();
                    if errno == Errno::ETXTBSY {
                        // The reader may have closed the pipe.
                        let _ = tell.write(b"!");
                    }
                    errno
                });
                Err(errno.into())
            });
        }
        let status = std::thread::scope(|scope| {
            scope.spawn(move || {
                refused.read_exact(&mut [0]).expect("it was refused while it was open");
                drop(held);
            });
            let status = command.status();
            // Closes its end of the pipe, so that the reader also ends when the program was never busy.
            drop(command);
            status
        });
        assert!(status.expect("it was run").success());
    }
}
