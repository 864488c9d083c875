//! The shim after the start: one poll loop until the container has ended.
//!
//! ```text
//!  running ──init ends──► draining: kill the rest of the cgroup, read the outputs to their end
//!                              (at most DRAIN) ──► exit.json, answer the waiters, end
//! ```

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::log::{Lines, Log};
use super::protocol::{self, Answer, Call, ExitRecord, Request, VERSION};
use super::stdio::{Stdio, set_nonblocking};
use super::{ShimConfig, StartedRecord, exec, now_nanos};
use crate::files;

/// How long outputs are read after the exit; a process outside of the cgroup may hold them open.
const DRAIN: Duration = Duration::from_secs(2);
/// How far an attached reader may lag before it is disconnected: it must not block the container.
const ATTACH_LIMIT: usize = 1 << 20;
const ATTACHED_READERS: usize = 16;
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
const CHUNK: usize = 16 << 10;
/// How long a container may take to end when the machine shuts down.
const TERM_GRACE: Duration = Duration::from_secs(3);

pub(super) struct Shim {
    config: ShimConfig,
    started: StartedRecord,
    log: Option<Log>,
    listener: UnixListener,
    signals: SignalFd,
    sources: Vec<Source>,
    stdin: Option<OwnedFd>,
    terminal: Option<OwnedFd>,
    readers: Vec<Reader>,
    execs: Vec<Exec>,
    waiters: Vec<UnixStream>,
    /// The init's exit code and time.
    ended: Option<(i32, i64)>,
    drain_until: i64,
    /// During a shutdown of the machine: the time of SIGKILL.
    kill_at: Option<i64>,
}

struct Source {
    file: File,
    lines: Lines,
    is_stderr: bool,
    open: bool,
}

struct Reader {
    file: File,
    pending: VecDeque<u8>,
    is_stderr: bool,
    open: bool,
}

struct Exec {
    pid: i32,
    connection: UnixStream,
    kill_on_hangup: bool,
}

/// The role of a polled descriptor.
#[derive(Clone, Copy)]
enum Polled {
    Signals,
    Listener,
    Source(usize),
    Reader(usize),
    Exec(usize),
    Waiter(usize),
}

impl Shim {
    pub(super) fn new(
        config: ShimConfig,
        started: StartedRecord,
        log: Option<Log>,
        listener: UnixListener,
        stdio: Stdio,
    ) -> io::Result<Self> {
        let mask = SigSet::from_iter([Signal::SIGCHLD, Signal::SIGTERM]);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        listener.set_nonblocking(true)?;
        let mut sources = Vec::new();
        let mut add = |fd: Option<OwnedFd>, stream, is_stderr| {
            if let Some(fd) = fd {
                let lines = Lines::new(stream);
                sources.push(Source { file: File::from(fd), lines, is_stderr, open: true });
            }
        };
        let terminal = stdio.terminal.as_ref().map(OwnedFd::try_clone).transpose()?;
        add(stdio.stdout, "stdout", false);
        add(stdio.stderr, "stderr", true);
        add(stdio.terminal, "stdout", false);
        Ok(Self {
            config,
            started,
            log,
            listener,
            signals,
            sources,
            stdin: stdio.stdin,
            terminal,
            readers: Vec::new(),
            execs: Vec::new(),
            waiters: Vec::new(),
            ended: None,
            drain_until: 0,
            kill_at: None,
        })
    }

    pub(super) fn run(mut self) -> io::Result<()> {
        // Reaps children that ended before the signal was blocked.
        self.reap();
        while !self.is_finished() {
            for (polled, flags) in self.wait_for_events()? {
                self.handle(polled, flags);
            }
            self.forget_closed();
            self.kill_when_due();
        }
        self.finish()
    }

    fn is_finished(&self) -> bool {
        let drained =
            self.sources.iter().all(|source| !source.open) || now_nanos() >= self.drain_until;
        self.ended.is_some() && drained
    }

    fn wait_for_events(&self) -> io::Result<Vec<(Polled, PollFlags)>> {
        let mut what = vec![Polled::Signals, Polled::Listener];
        let mut fds = vec![
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.listener.as_fd(), PollFlags::POLLIN),
        ];
        for (at, source) in self.sources.iter().enumerate().filter(|(_, s)| s.open) {
            what.push(Polled::Source(at));
            fds.push(PollFd::new(source.file.as_fd(), PollFlags::POLLIN));
        }
        for (at, reader) in self.readers.iter().enumerate() {
            let flags =
                if reader.pending.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
            what.push(Polled::Reader(at));
            fds.push(PollFd::new(reader.file.as_fd(), flags));
        }
        for (at, exec) in self.execs.iter().enumerate() {
            what.push(Polled::Exec(at));
            fds.push(PollFd::new(exec.connection.as_fd(), PollFlags::POLLIN));
        }
        for (at, waiter) in self.waiters.iter().enumerate() {
            what.push(Polled::Waiter(at));
            fds.push(PollFd::new(waiter.as_fd(), PollFlags::POLLIN));
        }
        let timeout = self.due().map_or(PollTimeout::NONE, |due| {
            let left = Duration::from_nanos((due - now_nanos()).max(0) as u64);
            // Rounded up: poll would return too early and be called again at once.
            let left = left.min(TERM_GRACE) + Duration::from_millis(1);
            PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO)
        });
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let ready = what.into_iter().zip(fds.iter().map(|fd| fd.revents()));
        Ok(ready
            .filter_map(|(what, flags)| Some((what, flags.filter(|f| !f.is_empty())?)))
            .collect())
    }

    fn handle(&mut self, polled: Polled, flags: PollFlags) {
        match polled {
            Polled::Signals => {
                while let Ok(Some(signal)) = self.signals.read_signal() {
                    if signal.ssi_signo == Signal::SIGTERM as u32 {
                        self.end_soon();
                    }
                }
                self.reap();
            }
            Polled::Listener => self.accept(),
            Polled::Source(at) => self.read_source(at),
            Polled::Reader(at) => {
                let reader = &mut self.readers[at];
                if flags.contains(PollFlags::POLLOUT) {
                    reader.flush();
                } else {
                    reader.open = false;
                }
            }
            Polled::Exec(at) => self.exec_hung_up(at),
            // A waiter sends no more data, so it disconnected. Shutting the connection down marks
            // it for removal.
            Polled::Waiter(at) => {
                let _ = self.waiters[at].shutdown(std::net::Shutdown::Both);
            }
        }
    }

    fn forget_closed(&mut self) {
        self.readers.retain(|reader| reader.open);
        self.waiters
            .retain(|waiter| waiter.take_error().is_ok_and(|e| e.is_none()) && connected(waiter));
        self.execs.retain(|exec| exec.pid > 0);
    }

    fn reap(&mut self) {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => self.process_ended(pid, code),
                Ok(WaitStatus::Signaled(pid, signal, _)) => {
                    self.process_ended(pid, 128 + signal as i32);
                }
                Ok(WaitStatus::StillAlive) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn process_ended(&mut self, pid: Pid, code: i32) {
        if pid.as_raw() == self.started.pid {
            let now = now_nanos();
            self.ended = Some((code, now));
            self.drain_until = now + DRAIN.as_nanos() as i64;
            // Without a PID namespace of its own, other processes may be left.
            self.kill_everything();
            return;
        }
        if let Some(exec) = self.execs.iter_mut().find(|exec| exec.pid == pid.as_raw()) {
            let answer = Answer { version: VERSION, code: Some(code), ..Default::default() };
            let _ = protocol::send(&exec.connection, &answer, &[]);
            exec.pid = 0;
        }
    }

    /// The next deadline that no descriptor signals.
    fn due(&self) -> Option<i64> {
        if self.ended.is_some() { Some(self.drain_until) } else { self.kill_at }
    }

    /// Only the machine's shutdown sends SIGTERM to a shim: a stopping server does not. Many
    /// programs ignore the signal as process 1, and would delay the shutdown.
    fn end_soon(&mut self) {
        if self.ended.is_none() && self.kill_at.is_none() {
            self.kill_at = Some(now_nanos() + TERM_GRACE.as_nanos() as i64);
            let _ = kill(Pid::from_raw(self.started.pid), Signal::SIGTERM);
        }
    }

    fn kill_when_due(&mut self) {
        if self.ended.is_none() && self.kill_at.is_some_and(|at| now_nanos() >= at) {
            self.kill_at = None;
            let _ = self.kill(Signal::SIGKILL as i32, true);
        }
    }

    fn kill_everything(&self) {
        self.config.hierarchies.kill(&self.config.cgroup);
    }

    fn read_source(&mut self, at: usize) {
        let mut buffer = [0; CHUNK];
        let source = &mut self.sources[at];
        match source.file.read(&mut buffer) {
            Ok(0) => {
                source.lines.end(self.log.as_mut());
                source.open = false;
            }
            Ok(n) => {
                let is_stderr = source.is_stderr;
                source.lines.push(&buffer[..n], self.log.as_mut());
                for reader in self.readers.iter_mut().filter(|r| r.is_stderr == is_stderr) {
                    reader.push(&buffer[..n]);
                }
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            // A terminal without open slaves returns EIO.
            Err(_) => {
                source.lines.end(self.log.as_mut());
                source.open = false;
            }
        }
    }

    fn exec_hung_up(&mut self, at: usize) {
        let exec = &mut self.execs[at];
        let mut byte = [0];
        // The client sends no data after the request: this is its end, or an error.
        if matches!((&exec.connection).read(&mut byte), Ok(1)) {
            return;
        }
        if exec.kill_on_hangup && exec.pid > 0 {
            // The exec leads a session and a group; the group may be gone already.
            let _ = kill(Pid::from_raw(-exec.pid), Signal::SIGKILL);
            let _ = kill(Pid::from_raw(exec.pid), Signal::SIGKILL);
        }
        exec.pid = 0;
    }

    fn accept(&mut self) {
        while let Ok((connection, _)) = self.listener.accept() {
            if let Err(error) = self.serve(connection) {
                eprintln!("{}: a call failed: {error}", super::SHIM_NAME);
            }
        }
    }

    fn serve(&mut self, connection: UnixStream) -> io::Result<()> {
        connection.set_nonblocking(false)?;
        connection.set_read_timeout(Some(CALL_TIMEOUT))?;
        connection.set_write_timeout(Some(CALL_TIMEOUT))?;
        let (request, fds) = protocol::receive::<Request>(&connection)?;
        let fine = Answer { version: VERSION, pid: Some(self.started.pid), ..Default::default() };
        let answered = |result: io::Result<()>| match result {
            Ok(()) => Answer { version: VERSION, pid: fine.pid, ..Default::default() },
            Err(error) => failure(&error),
        };
        match request.call {
            Call::Status => protocol::send(&connection, &fine, &[]),
            Call::Wait => {
                self.waiters.push(connection);
                Ok(())
            }
            Call::Kill { signal, everything } => {
                let answer = answered(self.kill(signal, everything));
                protocol::send(&connection, &answer, &[])
            }
            Call::ReopenLog => {
                let answer = answered(self.log.as_mut().map_or(Ok(()), Log::reopen));
                protocol::send(&connection, &answer, &[])
            }
            Call::Exec { process } => self.exec(connection, process, fds),
            Call::Attach { stdin, stdout, stderr } => {
                self.attach(&connection, stdin, stdout, stderr, fds)
            }
            Call::Unknown => {
                let answer = failure(&io::Error::other("unknown call"));
                protocol::send(&connection, &answer, &[])
            }
        }
    }

    fn kill(&self, signal: i32, everything: bool) -> io::Result<()> {
        if self.ended.is_some() {
            return Ok(());
        }
        if everything {
            self.kill_everything();
        }
        // SAFETY: a plain system call; the kernel checks the signal, which may be a real-time one.
        let sent = unsafe { libc::kill(self.started.pid, signal) };
        let error = io::Error::last_os_error();
        if sent < 0 && error.raw_os_error() != Some(libc::ESRCH) { Err(error) } else { Ok(()) }
    }

    fn exec(
        &mut self,
        connection: UnixStream,
        process: protocol::ExecProcess,
        fds: Vec<OwnedFd>,
    ) -> io::Result<()> {
        match exec::spawn(&self.config, self.started.pid, &process, fds) {
            Err(error) => {
                let ended = self.ended.is_some() || has_ended(self.started.pid);
                protocol::send(&connection, &Answer { ended, ..failure(&error) }, &[])
            }
            Ok(spawned) => {
                let mut answer =
                    Answer { version: VERSION, pid: Some(spawned.pid), ..Default::default() };
                let mut descriptors: Vec<RawFd> = Vec::new();
                if let Some(terminal) = &spawned.terminal {
                    answer.descriptors.push("terminal".into());
                    descriptors.push(terminal.as_raw_fd());
                }
                let sent = protocol::send(&connection, &answer, &descriptors);
                let kill_on_hangup = process.kill_on_hangup;
                self.execs.push(Exec { pid: spawned.pid, connection, kill_on_hangup });
                sent
            }
        }
    }

    fn attach(
        &mut self,
        connection: &UnixStream,
        stdin: bool,
        stdout: bool,
        stderr: bool,
        fds: Vec<OwnedFd>,
    ) -> io::Result<()> {
        if self.readers.len() >= ATTACHED_READERS {
            let answer = failure(&io::Error::other("too many attached readers"));
            return protocol::send(connection, &answer, &[]);
        }
        let mut given = fds.into_iter();
        for (wanted, is_stderr) in [(stdout, false), (stderr, true)] {
            if let (true, Some(fd)) = (wanted, given.next()) {
                set_nonblocking(&fd)?;
                let file = File::from(fd);
                self.readers.push(Reader { file, pending: VecDeque::new(), is_stderr, open: true });
            }
        }
        let mut answer =
            Answer { version: VERSION, pid: Some(self.started.pid), ..Default::default() };
        let mut handed: Vec<OwnedFd> = Vec::new();
        if let Some(terminal) = &self.terminal {
            answer.descriptors.push("terminal".into());
            handed.push(terminal.try_clone()?);
        } else if stdin {
            // With stdinOnce the only writing end is handed over: closing it there ends the input.
            let end = match self.config.stdin_once {
                true => self.stdin.take(),
                false => self.stdin.as_ref().map(OwnedFd::try_clone).transpose()?,
            };
            if let Some(end) = end {
                answer.descriptors.push("stdin".into());
                handed.push(end);
            }
        }
        let raw: Vec<RawFd> = handed.iter().map(AsRawFd::as_raw_fd).collect();
        protocol::send(connection, &answer, &raw)
    }

    fn finish(mut self) -> io::Result<()> {
        for source in self.sources.iter_mut().filter(|source| source.open) {
            source.lines.end(self.log.as_mut());
        }
        for reader in &mut self.readers {
            reader.flush();
        }
        let hierarchies = &self.config.hierarchies;
        let (code, finished_at) = self.ended.unwrap_or((255, now_nanos()));
        let exit = ExitRecord {
            code,
            oom_killed: hierarchies.oom_kills(&self.config.cgroup) > 0,
            started_at: self.started.started_at,
            finished_at,
            reason: String::new(),
            message: String::new(),
        };
        files::write_json(&self.config.exit_file, &exit)?;
        let answer = Answer { version: VERSION, exit: Some(exit), ..Default::default() };
        for waiter in &self.waiters {
            let _ = protocol::send(waiter, &answer, &[]);
        }
        // The backend removes remaining files when it removes the container.
        let _ = hierarchies.remove(&self.config.cgroup);
        let _ = std::fs::remove_file(self.config.socket());
        Ok(())
    }
}

impl Reader {
    fn push(&mut self, bytes: &[u8]) {
        if self.pending.len() + bytes.len() > ATTACH_LIMIT {
            self.open = false;
            return;
        }
        self.pending.extend(bytes);
        self.flush();
    }

    fn flush(&mut self) {
        while !self.pending.is_empty() {
            let (front, _) = self.pending.as_slices();
            match self.file.write(front) {
                Ok(n) => {
                    self.pending.drain(..n);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.open = false;
                    return;
                }
            }
        }
        self.pending.shrink_to(CHUNK);
    }
}

/// False after the other side, or this one, closed the connection.
fn connected(waiter: &UnixStream) -> bool {
    let mut fds = [PollFd::new(waiter.as_fd(), PollFlags::POLLIN)];
    !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(n) if n > 0)
}

/// Whether our child has ended. Does not reap it.
fn has_ended(pid: i32) -> bool {
    use nix::sys::wait::{Id, waitid};
    let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    !matches!(waitid(Id::Pid(Pid::from_raw(pid)), look), Ok(WaitStatus::StillAlive))
}

fn failure(error: &io::Error) -> Answer {
    Answer { version: VERSION, error: Some(error.to_string()), ..Default::default() }
}
