//! A long-running command of the binary on a host: `server`, `agent`, or one component.
//!
//! In: a host, the command line. Out: a process that can be started, stopped or killed; its output is
//! appended to one log across restarts.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::host::Host;
use crate::wait;

pub struct Daemon {
    name: String,
    binary: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    process: Option<Child>,
}

impl Daemon {
    /// Prepares a command; `name` is for messages and the log's file name.
    pub fn new(host: &Host, name: &str, binary: &Path, arguments: Vec<String>) -> Self {
        let log = host.directory().join(format!("{name}.log"));
        Self { name: name.to_owned(), binary: binary.to_owned(), arguments, log, process: None }
    }

    /// Starts the process and returns at once.
    pub fn launch(&mut self, host: &Host) -> Result<()> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = host.command(&self.binary);
        command.args(&self.arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.process = Some(host.spawn(&mut command)?);
        Ok(())
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_else(|error| error.to_string())
    }

    /// The id of the process, seen from outside.
    pub fn process_id(&self) -> Option<u32> {
        self.process.as_ref().map(Child::id)
    }

    /// `None` while it runs.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.running()?.try_wait()?)
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    /// Sends SIGINT, as Ctrl-C does, and waits for the process to end.
    pub fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        let id = nix::unistd::Pid::from_raw(self.running()?.id().cast_signed());
        nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGINT)?;
        self.reap(limit)
    }

    /// Waits for a process that ends by itself, or that something else has stopped.
    pub fn reap(&mut self, limit: Duration) -> Result<ExitStatus> {
        let what = format!("the {} has ended", self.name);
        let process = self.running()?;
        wait::until(limit, &what, || process.try_wait()?.context("it still runs"))
    }

    fn running(&mut self) -> Result<&mut Child> {
        self.process.as_mut().with_context(|| format!("the {} was not started", self.name))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The host waits for every process inside that it does not reap itself: this one.
        let _ = self.kill();
    }
}
