//! A control plane without a node: `decapod server --disable-agent` in its own directory on this machine.
//!
//! In: the binary. Out: a ready process, its client, its log, its cost so far. It takes no namespaces:
//! it uses only a port of 127.0.0.1 of the machine. It ends when it is dropped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::http::ApiClient;
use crate::wait;

/// Ticks a second in `/proc/PID/stat`; the kernel always reports 100.
const TICKS: f64 = 100.0;

pub struct ControlPlane {
    process: Child,
    directory: tempfile::TempDir,
    log: PathBuf,
}

impl ControlPlane {
    pub fn start(binary: &Path) -> Result<Self> {
        Self::start_with(binary, &[])
    }

    /// With additional arguments of `decapod server`.
    pub fn start_with(binary: &Path, arguments: &[&str]) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("decapod-alone-").tempdir()?;
        let log = directory.path().join("server.log");
        let output = File::create(&log)?;
        let mut command = Command::new(binary);
        command.args(["server", "--disable-agent", "--https-listen-port", "0", "--data-dir"]);
        command.arg(directory.path().join("data")).args(arguments);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let process = command.spawn().with_context(|| binary.display().to_string())?;
        let mut server = Self { process, directory, log };
        let ended = wait::until(wait::LONG, "the server is ready", || {
            if let Some(status) = server.exit_status()? {
                return Ok(Some(status));
            }
            let answer = server.client()?.get("/readyz", wait::LONG)?;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(None)
        })?;
        match ended {
            Some(status) => bail!("the server ended: {status}\n{}", server.log()),
            None => Ok(server),
        }
    }

    /// A client with the administrator's certificate.
    pub fn client(&self) -> Result<ApiClient> {
        ApiClient::from_kubeconfig(&fs::read_to_string(self.kubeconfig())?)
    }

    /// `None` while it runs.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.process.try_wait()?)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_else(|error| error.to_string())
    }

    /// Sends SIGTERM and waits for the end.
    pub fn terminate(&mut self) -> Result<ExitStatus> {
        let pid = nix::unistd::Pid::from_raw(self.process.id().try_into()?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        wait::until(wait::LONG, "the server ends", || {
            self.process.try_wait()?.context("it still runs")
        })
    }

    /// Seconds of CPU that it has used.
    pub fn cpu(&self) -> Result<f64> {
        cpu_of(self.process.id())
    }

    /// Bytes of anonymous memory, without file mappings.
    pub fn memory(&self) -> Result<u64> {
        memory_of(self.process.id(), "RssAnon:")
    }

    /// Of the administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("data/kubeconfig")
    }
}

/// Seconds of CPU that a process has used.
pub fn cpu_of(process: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The second field is a name in parentheses, which may hold anything.
    let rest = text.rsplit(')').next().unwrap_or_default();
    let ticks = |index| -> Option<f64> { rest.split_whitespace().nth(index)?.parse().ok() };
    let (user, system) = (ticks(11).context("utime")?, ticks(12).context("stime")?);
    Ok((user + system) / TICKS)
}

/// Bytes of a process' memory, by a line of its status.
pub fn memory_of(process: u32, line: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/status"))?;
    let rest =
        text.lines().find_map(|text| text.strip_prefix(line)).with_context(|| line.to_owned())?;
    let kib = rest.split_whitespace().next().context("a number")?;
    Ok(kib.parse::<u64>()? << 10)
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
