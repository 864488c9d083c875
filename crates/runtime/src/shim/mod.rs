//! The shim: this binary, executed again, with one process per container.
//!
//! ```text
//!  backend ──spawn──► shim: setsid, subreaper ──libcontainer──► init of the container
//!     ▲ ▲                 │  stdout, stderr, pty ─► log file, attached readers
//!     │ └── one line ─────┘  wait ─► exit.json ─► waiting connections ─► the shim ends
//!     └── shim.sock: status, kill, exec, attach, reopen-log, wait
//! ```
//!
//! The shim outlives the backend: if the backend is killed, the container and its log continue, and
//! the exit code is kept. The next backend connects to the socket.
//!
//! Invariants: one thread (libcontainer and fork need that); no async runtime; no heap use that
//! grows with time. It runs in its own cgroup, not in the container's.

mod client;
mod container;
mod event_loop;
mod exec;
mod inspect;
mod log;
mod namespaces;
mod pause;
mod protocol;
pub(crate) mod stage;
mod stdio;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

pub(crate) use client::{
    Client, Error as ClientError, Executed, Started, Wait, make_namespaces, spawn_shim,
};
pub(crate) use namespaces::Order;
pub(crate) use pause::alive as pause_alive;
pub(crate) use protocol::{ExecProcess, ExitRecord};

use crate::cgroups::Hierarchies;
use crate::files;

/// The process name (`argv[0]`) that makes the binary a shim.
pub(crate) const SHIM_NAME: &str = "decapod-shim";

/// The configuration of one shim. It is a file, because it must outlive backend and shim.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ShimConfig {
    pub version: u32,
    pub id: String,
    /// The directory with `config.json`.
    pub bundle: PathBuf,
    /// The shim's own directory below the run directory.
    pub run: PathBuf,
    pub exit_file: PathBuf,
    pub log_path: Option<PathBuf>,
    pub terminal: bool,
    pub stdin: bool,
    pub stdin_once: bool,
    /// The container's cgroup.
    pub cgroup: String,
    /// The cgroup that all shims share.
    pub shim_cgroup: String,
    /// The cgroup hierarchies. The shim does not discover them itself: the mount table grows with every pod.
    #[serde(default)]
    pub hierarchies: Hierarchies,
    /// Set for a container with a user namespace.
    #[serde(default)]
    pub stage: Option<stage::Stage>,
}

impl ShimConfig {
    fn socket(&self) -> PathBuf {
        self.run.join("shim.sock")
    }

    fn started_file(&self) -> PathBuf {
        self.run.join("started.json")
    }

    fn state_root(&self) -> PathBuf {
        self.run.join("oci")
    }
}

/// Written when the container runs, for readers that do not ask the shim.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StartedRecord {
    pub pid: i32,
    pub shim_pid: i32,
    /// Nanoseconds since 1970.
    pub started_at: i64,
}

/// The first line of the shim's output.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub error: Option<String>,
    pub started: Option<StartedRecord>,
}

/// Whether this process was started as a shim. `main` must ask this first, before it starts a thread.
pub fn is_shim_invocation() -> bool {
    std::env::args_os().next().is_some_and(|name| name == SHIM_NAME)
}

/// Runs the shim command of the arguments, and ends the process.
pub fn shim_main() -> ! {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let code = match (args.first().and_then(|a| a.to_str()), args.get(1)) {
        (Some("container"), Some(config)) => run_container(Path::new(config)),
        (Some("namespaces"), Some(order)) => namespaces::run(&order.to_string_lossy()),
        _ => {
            eprintln!("{SHIM_NAME} is started by the runtime, not by hand");
            1
        }
    };
    std::process::exit(code)
}

fn run_container(config: &Path) -> i32 {
    match prepare(config).and_then(container::start) {
        Ok((running, started)) => {
            report(&Report { error: None, started: Some(started) });
            crate::memory::trim();
            match running.run() {
                Ok(()) => 0,
                Err(error) => {
                    eprintln!("{SHIM_NAME}: {error}");
                    1
                }
            }
        }
        Err(error) => {
            // Also written to disk: the backend may be gone before it reads the report.
            if let Ok(Some(config)) = files::read_json::<ShimConfig>(config)
                && !config.exit_file.exists()
            {
                let exit = ExitRecord::start_failed(&error.to_string());
                if let Err(error) = files::write_json(&config.exit_file, &exit) {
                    eprintln!("{SHIM_NAME}: {error}");
                }
            }
            report(&Report { error: Some(error.to_string()), started: None });
            1
        }
    }
}

/// The pid of the living shim with this run directory.
pub(crate) fn find(run: &Path) -> Option<i32> {
    let expected = [SHIM_NAME, "container", &run.join("shim.json").display().to_string()]
        .map(|argument| format!("{argument}\0"))
        .concat();
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        (line == expected.as_bytes()).then_some(pid)
    })
}

fn prepare(config: &Path) -> io::Result<ShimConfig> {
    let mut config: ShimConfig = files::read_json(config)?
        .ok_or_else(|| io::Error::other("the shim's config file does not exist"))?;
    if config.exit_file.exists() {
        // The backend was killed while it started this shim, and the next backend recorded the exit.
        return Err(io::Error::other("the container's exit is already recorded"));
    }
    // Fails when started by hand as a session leader, which is fine.
    let _ = nix::unistd::setsid();
    nix::sys::prctl::set_child_subreaper(true)?;
    // Processes in the container must not inspect a process of ours that enters it.
    nix::sys::prctl::set_dumpable(false)?;
    // Processes inherit these by exec: default signal actions and the usual umask.
    reset_signals();
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    std::env::set_current_dir("/")?;
    if config.hierarchies == Hierarchies::default() {
        // The configuration is from a release without this field.
        config.hierarchies = Hierarchies::discover()?;
    }
    if let Err(error) = config.hierarchies.join(&config.shim_cgroup, 0, true) {
        // A failed cgroup join is no reason to refuse the container.
        eprintln!("{SHIM_NAME}: join {}: {error}", config.shim_cgroup);
    }
    Ok(config)
}

/// Resets every signal to its default action. Uses the system call: the library reserves two
/// signals, and its `posix_spawn` leaves them ignored.
pub(super) fn reset_signals() {
    let default = [0u64; 4];
    for signal in 1..=64 {
        // SAFETY: an all-zero action is the default one; refused for KILL and STOP, which is fine.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), 0, 8) };
    }
}

/// Writes the report to standard output and closes it.
fn report(report: &Report) {
    // SAFETY: descriptor 1 is the pipe that the backend made; nothing else here uses it.
    let mut out = unsafe { File::from_raw_fd(1) };
    let mut line = serde_json::to_vec(report).unwrap_or_default();
    line.push(b'\n');
    // The backend may be gone; the container continues.
    let _ = out.write_all(&line);
    drop(out);
    // Keeps descriptor 1 taken, so that no later file gets it.
    let null = nix::fcntl::open("/dev/null", OFlag::O_RDWR, nix::sys::stat::Mode::empty());
    if let Ok(null) = null {
        std::mem::forget(null);
    }
}

fn now_nanos() -> i64 {
    i64::try_from(base::clock::now().as_nanosecond()).unwrap_or(i64::MAX)
}
