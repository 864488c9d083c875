//! Hollow kubelets for a control plane: `decapod simulate` as a process of its own.
//!
//! In: the binary, a kubeconfig, how many. Out: a process, and what it has cost so far; it ends with its owner.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::{control_plane, wait};

pub struct Simulator {
    process: Child,
    log: PathBuf,
    _directory: tempfile::TempDir,
}

impl Simulator {
    pub fn start(binary: &Path, kubeconfig: &Path, arguments: &[&str]) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("decapod-simulate-").tempdir()?;
        let log = directory.path().join("log");
        let output = File::create(&log)?;
        let mut command = Command::new(binary);
        command.arg("simulate").arg("--kubeconfig").arg(kubeconfig).args(arguments);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let process = command.spawn().with_context(|| binary.display().to_string())?;
        Ok(Self { process, log, _directory: directory })
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_else(|error| error.to_string())
    }

    /// Sends SIGTERM and waits for the end.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        let pid = nix::unistd::Pid::from_raw(self.process.id().try_into()?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        wait::until(wait::LONG, "the simulation ends", || {
            self.process.try_wait()?.context("it still runs")
        })
    }

    /// Seconds of CPU that it has used.
    pub fn cpu(&self) -> Result<f64> {
        control_plane::cpu_of(self.process.id())
    }

    /// Bytes of memory, those of its file included.
    pub fn resident(&self) -> Result<u64> {
        control_plane::memory_of(self.process.id(), "VmRSS:")
    }
}

impl Drop for Simulator {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
