//! A test host on this machine: namespaces for network, mounts, processes, host name and cgroups.
//!
//! In: a name. Out: a place to run commands in. The file system is the real one, with a new `/run` and
//! `/var/log`, mount events shared inside and private towards the real host, and an empty cgroup tree.
//! Sysfs is not mounted again: that would hide the cgroups below it.
//!
//! ```text
//! test process ──fork──► A (waits) ──fork──► B, process 1 of the host
//!       │                                      └ reads a pipe until the test process is gone
//!       └── spawn(): a thread enters the process namespace, its child the others
//! ```
//!
//! Invariant: when B ends, the kernel kills everything inside, so nothing survives the test process.
//! Why not `unshare` and `nsenter`: a helper program between the test and its child would hide the
//! child's process id and signals.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

use crate::cgroups::Cgroups;

/// The number of hosts of this process, a part of their names.
static NUMBER: AtomicU32 = AtomicU32::new(0);

pub struct Host {
    name: String,
    waiter: libc::pid_t,
    init: libc::pid_t,
    /// Only held open: process 1 ends when this closes.
    alive: Option<OwnedFd>,
    entrance: Arc<Entrance>,
    cgroups: Cgroups,
    directory: Option<tempfile::TempDir>,
}

/// The files that a child needs to enter the host.
struct Entrance {
    process_files: Vec<CString>,
    processes: File,
    /// In the order of entering; mounts last but one, because the files above are outside.
    namespaces: Vec<File>,
    network: File,
}

impl Host {
    pub fn new(name: &str) -> Result<Self> {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let cgroups = Cgroups::create(number)?;
        let plan = Plan::new(name, &cgroups)?;
        let (alive_read, alive_write) = pipe()?;
        let (report_read, report_write) = pipe()?;
        // SAFETY: the child calls only async-signal-safe functions on memory made before.
        let waiter = match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error()).context("fork"),
            // SAFETY: as above; it never returns.
            0 => unsafe { outer(&plan, alive_read.as_raw_fd(), report_write.as_raw_fd()) },
            child => child,
        };
        drop((alive_read, report_write));
        let init = read_report(report_read)?;
        let entrance = Arc::new(Entrance::open(init, &cgroups)?);
        let directory = Some(tempfile::Builder::new().prefix("decapod-test-").tempdir()?);
        let host = Self {
            name: name.to_owned(),
            waiter,
            init,
            alive: Some(alive_write),
            entrance,
            cgroups,
            directory,
        };
        host.run("ip", &["link", "set", "lo", "up"])?;
        host.filter_bridges(false)?;
        Ok(host)
    }

    /// Sets whether bridged packets pass netfilter, if the kernel supports it. It is off on a new host, as on
    /// a machine without `br_netfilter`: Decapod must not depend on it.
    pub fn filter_bridges(&self, on: bool) -> Result<()> {
        let script = format!(
            "for file in /proc/sys/net/bridge/bridge-nf-call-ip*tables; do \
             if [ -e $file ]; then echo {} > $file; fi; done",
            u8::from(on)
        );
        self.run("sh", &["-c", &script]).map(drop)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A directory for the host's files, removed with it.
    pub fn directory(&self) -> &Path {
        self.directory.as_ref().expect("taken by drop only").path()
    }

    /// Its cgroups, as paths outside.
    pub fn cgroups(&self) -> Vec<PathBuf> {
        self.cgroups.directories()
    }

    /// The id, outside, of the host's first process.
    pub fn init(&self) -> i32 {
        self.init
    }

    /// A command that will run on the host; start it with [`Host::spawn`] or [`Host::output`].
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        let entrance = Arc::clone(&self.entrance);
        // SAFETY: `enter` only makes system calls on what was opened before.
        unsafe { command.pre_exec(move || entrance.enter()) };
        command
    }

    /// Starts a command of this host. The child's process id is the real host's.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        // The PID namespace of future children belongs to the thread: use a thread that ends at once.
        let work = || {
            set_namespace(self.entrance.processes.as_raw_fd(), libc::CLONE_NEWPID)?;
            command.spawn()
        };
        std::thread::scope(|scope| scope.spawn(work).join().expect("spawning does not panic"))
    }

    pub fn output(&self, command: &mut Command) -> io::Result<Output> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        self.spawn(command)?.wait_with_output()
    }

    /// Runs a program that must succeed, and returns its output.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let output = self
            .output(self.command(program).args(arguments))
            .with_context(|| format!("starting {program}"))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("{program} {}: {}\n{stderr}", arguments.join(" "), output.status);
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `work` on a thread inside the host's network: its sockets are the host's.
    pub fn in_network<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        let work = || {
            set_namespace(self.entrance.network.as_raw_fd(), libc::CLONE_NEWNET)?;
            Ok(work())
        };
        std::thread::scope(|scope| scope.spawn(work).join().expect("the work does not panic"))
    }

    /// The host's network, for threads that live longer than a borrow of the host.
    pub fn network(&self) -> io::Result<File> {
        self.entrance.network.try_clone()
    }
}

/// Moves the calling thread into a network.
pub fn enter_network(network: &File) -> io::Result<()> {
    set_namespace(network.as_raw_fd(), libc::CLONE_NEWNET)
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.alive.take());
        // A waits for B, and B's end waits for all processes inside.
        let mut status = 0;
        // SAFETY: `waiter` is our child, waited for only here.
        unsafe { libc::waitpid(self.waiter, &mut status, 0) };
        if let Err(error) = self.cgroups.remove() {
            eprintln!("{}: {error:#}", self.name);
        }
        if let Some(directory) = self.directory.take()
            && std::env::var_os("DECAPOD_KEEP").is_some()
        {
            eprintln!("{}: kept {}", self.name, directory.keep().display());
        }
    }
}

impl Entrance {
    fn open(init: libc::pid_t, cgroups: &Cgroups) -> Result<Self> {
        let open = |name: &str| {
            let path = format!("/proc/{init}/ns/{name}");
            File::open(&path).with_context(|| path)
        };
        let namespaces = ["cgroup", "ipc", "uts", "net", "mnt"].map(open);
        Ok(Self {
            process_files: paths(&cgroups.process_files())?,
            processes: open("pid")?,
            namespaces: namespaces.into_iter().collect::<Result<_>>()?,
            network: open("net")?,
        })
    }

    /// Runs between fork and exec.
    fn enter(&self) -> io::Result<()> {
        for file in &self.process_files {
            // SAFETY: plain system calls on a valid path.
            unsafe { join_cgroup(file) }?;
        }
        for namespace in &self.namespaces {
            set_namespace(namespace.as_raw_fd(), 0)?;
        }
        Ok(())
    }
}

/// Everything that the children need. It is made before the fork, because they may not allocate.
struct Plan {
    name: CString,
    process_files: Vec<CString>,
    /// Mount point, kind, options.
    cgroups: Vec<[CString; 3]>,
}

impl Plan {
    fn new(name: &str, cgroups: &Cgroups) -> Result<Self> {
        let text = |text: String| CString::new(text);
        let mounts = cgroups.mounts().into_iter();
        let mounts =
            mounts.map(|(to, kind, options)| Ok([path(&to)?, text(kind)?, text(options)?]));
        Ok(Self {
            name: CString::new(name)?,
            process_files: paths(&cgroups.root_process_files())?,
            cgroups: mounts.collect::<Result<_>>()?,
        })
    }
}

const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWCGROUP;

/// Process A: creates the namespaces, starts process 1, reports its id, waits for it.
unsafe fn outer(plan: &Plan, alive: RawFd, report: RawFd) -> ! {
    // SAFETY (whole function): system calls only, on memory that the plan owns.
    unsafe {
        only_keep(alive, report);
        for file in &plan.process_files {
            if join_cgroup(file).is_err() {
                fail(1);
            }
        }
        if libc::unshare(NAMESPACES) != 0 {
            fail(2);
        }
        match libc::fork() {
            -1 => fail(3),
            0 => inner(plan),
            init => {
                send(init);
                libc::close(REPORT);
                libc::close(ALIVE);
                let mut status = 0;
                libc::waitpid(init, &mut status, 0);
                libc::_exit(0)
            }
        }
    }
}

/// Process B: sets up the host, reports that, and runs until the test process has ended.
unsafe fn inner(plan: &Plan) -> ! {
    // SAFETY (whole function): as above.
    unsafe {
        libc::setsid();
        // The kernel reaps the children of a parent that ignores SIGCHLD.
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        libc::signal(libc::SIGINT, libc::SIG_IGN);
        mount(None, c"/", None, libc::MS_REC | libc::MS_PRIVATE, 4);
        mount(None, c"/", None, libc::MS_REC | libc::MS_SHARED, 5);
        for [to, kind, options] in &plan.cgroups {
            // The old mount must be removed: programs that read the list of mounts would find it first.
            libc::umount2(to.as_ptr(), libc::MNT_DETACH);
            let data = options.as_ptr().cast();
            if libc::mount(kind.as_ptr(), to.as_ptr(), kind.as_ptr(), 0, data) != 0 {
                fail(6);
            }
        }
        mount(Some(c"proc"), c"/proc", Some(c"proc"), 0, 7);
        mount(Some(c"tmpfs"), c"/run", Some(c"tmpfs"), 0, 8);
        mount(Some(c"tmpfs"), c"/var/log", Some(c"tmpfs"), 0, 9);
        if libc::sethostname(plan.name.as_ptr(), plan.name.as_bytes().len()) != 0 {
            fail(10);
        }
        send(0);
        libc::close(REPORT);
        let mut byte = 0_u8;
        while libc::read(ALIVE, (&raw mut byte).cast(), 1) < 0 {}
        libc::_exit(0)
    }
}

/// File descriptors of the two pipes in the children.
const ALIVE: RawFd = 3;
const REPORT: RawFd = 4;

/// Closes every file but the two pipes: an inherited pipe of another host would keep that host alive.
unsafe fn only_keep(alive: RawFd, report: RawFd) {
    // SAFETY: system calls on numbers.
    unsafe {
        // First move them away from their target numbers.
        let alive = libc::fcntl(alive, libc::F_DUPFD, 10);
        let report = libc::fcntl(report, libc::F_DUPFD, 10);
        libc::dup2(alive, ALIVE);
        libc::dup2(report, REPORT);
        libc::syscall(libc::SYS_close_range, 5, libc::c_uint::MAX, 0);
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        for standard in 0..3 {
            libc::dup2(null, standard);
        }
        libc::close(null);
    }
}

unsafe fn mount(
    from: Option<&std::ffi::CStr>,
    to: &std::ffi::CStr,
    kind: Option<&std::ffi::CStr>,
    flags: libc::c_ulong,
    step: i32,
) {
    let from = from.map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    let kind = kind.map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    // SAFETY: the pointers are valid or null.
    if unsafe { libc::mount(from, to.as_ptr(), kind, flags, std::ptr::null()) } != 0 {
        // SAFETY: ends the process.
        unsafe { fail(step) }
    }
}

unsafe fn join_cgroup(file: &CString) -> io::Result<()> {
    // SAFETY: plain system calls on a valid path.
    unsafe {
        let opened = libc::open(file.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if opened < 0 {
            return Err(io::Error::last_os_error());
        }
        let written = libc::write(opened, c"0".as_ptr().cast(), 1);
        let outcome = if written == 1 { Ok(()) } else { Err(io::Error::last_os_error()) };
        libc::close(opened);
        outcome
    }
}

/// Sends the parent one number: an id, 0 for ready, or a failed step as a negative pair.
unsafe fn send(value: i32) {
    let bytes = value.to_ne_bytes();
    // SAFETY: the buffer is on the stack.
    unsafe { libc::write(REPORT, bytes.as_ptr().cast(), bytes.len()) };
}

unsafe fn fail(step: i32) -> ! {
    // SAFETY: errno is the thread's own.
    unsafe {
        let errno = *libc::__errno_location();
        send(-(step * 1000 + errno));
        libc::_exit(1)
    }
}

fn read_report(pipe: OwnedFd) -> Result<libc::pid_t> {
    let mut pipe = File::from(pipe);
    let mut init = None;
    loop {
        let mut bytes = [0; 4];
        pipe.read_exact(&mut bytes).context("the new host's first process is gone")?;
        match (i32::from_ne_bytes(bytes), init) {
            (value, _) if value < 0 => {
                let error = io::Error::from_raw_os_error(-value % 1000);
                bail!("making a host: step {}: {error}", -value / 1000);
            }
            (0, Some(id)) => return Ok(id),
            (0, None) => bail!("the new host's first process is ready, but did not report its id"),
            (id, _) => init = Some(id),
        }
    }
}

fn set_namespace(namespace: RawFd, kind: libc::c_int) -> io::Result<()> {
    // SAFETY: a system call on an open file.
    if unsafe { libc::setns(namespace, kind) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two; both are ours alone afterwards.
    unsafe {
        if libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) != 0 {
            return Err(io::Error::last_os_error()).context("pipe");
        }
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

fn path(path: &Path) -> Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn paths(list: &[PathBuf]) -> Result<Vec<CString>> {
    list.iter().map(|item| path(item)).collect()
}

/// The content of a file of the host, `/proc` and `/run` included.
pub fn read(host: &Host, file: &str) -> Result<String> {
    if !file.starts_with("/proc/") && !file.starts_with("/run/") {
        return Ok(fs::read_to_string(file)?);
    }
    host.run("cat", &[file])
}
