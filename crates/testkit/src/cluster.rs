//! A running cluster on test hosts, and the real kubectl.
//!
//! In: the built binary and a host. Out: a server process, kubectl, and the logs after a failure.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::daemon::Daemon;
use crate::host::Host;
use crate::http::ApiClient;
use crate::{places, wait};

/// `decapod server` on a host.
pub struct Server {
    // Must be dropped before the host, which waits for its processes.
    daemon: Daemon,
    host: Host,
    binary: PathBuf,
    kubectl: PathBuf,
}

impl Server {
    /// Prepares a server; [`Server::start`] runs it.
    pub fn new(host: Host, binary: &Path, arguments: &[&str]) -> Result<Self> {
        let kubectl = places::kubectl()?;
        fs::create_dir(host.directory().join("home"))?;
        let data = host.directory().join("data").display().to_string();
        let words = ["server", "--data-dir", &data].into_iter().chain(arguments.iter().copied());
        let daemon = Daemon::new(&host, "server", binary, words.map(str::to_owned).collect());
        Ok(Self { daemon, host, binary: binary.to_owned(), kubectl })
    }

    pub fn host(&self) -> &Host {
        &self.host
    }

    pub fn data_directory(&self) -> PathBuf {
        self.host.directory().join("data")
    }

    /// Uses another kubectl from now on; returns the previous one.
    pub fn use_kubectl(&mut self, kubectl: PathBuf) -> PathBuf {
        std::mem::replace(&mut self.kubectl, kubectl)
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.data_directory().join("kubeconfig")
    }

    /// The URL of the API that the cluster tells its nodes.
    pub fn url(&self) -> Result<String> {
        let path = "jsonpath={.subsets[0].addresses[0].ip}:{.subsets[0].ports[0].port}";
        let place = self.kubectl(&["get", "endpoints", "kubernetes", "-o", path])?;
        Ok(format!("https://{}", place.trim()))
    }

    /// A client with the administrator's certificate, for requests that are too frequent for kubectl. It
    /// connects from inside the host's network only.
    pub fn api(&self) -> Result<ApiClient> {
        ApiClient::from_kubeconfig(&fs::read_to_string(self.kubeconfig())?)
    }

    /// Starts the process and returns when `/readyz` succeeds.
    pub fn start(&mut self) -> Result<()> {
        self.launch()?;
        let ended = wait::until(wait::LONG, "the server is ready", || {
            if let Some(status) = self.daemon.exit_status()? {
                return Ok(Some(status));
            }
            // Not with kubectl: each call costs a tenth of a second of CPU and would slow down the server.
            let client = self.api().context("its kubeconfig")?;
            let answer = self.host.in_network(|| client.get("/readyz", wait::LONG))??;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(None)
        })?;
        match ended {
            Some(status) => bail!("the server ended: {status}"),
            None => Ok(()),
        }
    }

    /// Starts the process and returns at once. Its output is appended to one log across restarts.
    pub fn launch(&mut self) -> Result<()> {
        self.daemon.launch(&self.host)
    }

    /// The id of the server's process, seen from outside.
    pub fn process_id(&self) -> Option<u32> {
        self.daemon.process_id()
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.daemon.kill()
    }

    /// Sends SIGINT, as Ctrl-C does, and waits for the process to end.
    pub fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.daemon.stop(limit)
    }

    /// `None` while it runs; an error if it was not started, or was killed.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        self.daemon.exit_status()
    }

    /// Waits for a process that something else has stopped.
    pub fn reap(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.daemon.reap(limit)
    }

    /// The server's log so far.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// Runs one of the binary's offline commands against this server's data.
    pub fn decapod(&self, arguments: &[&str]) -> Result<String> {
        let mut command = self.host.command(&self.binary);
        command.args(arguments).arg("--data-dir").arg(self.data_directory());
        finished(&self.host, &mut command, arguments)
    }

    /// Runs kubectl and returns its output; the error contains its error output.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        finished(&self.host, &mut self.limited(arguments), arguments)
    }

    /// The same, with text on standard input.
    pub fn kubectl_with(&self, arguments: &[&str], input: &str) -> Result<String> {
        let mut command = self.limited(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.host.spawn(&mut command)?;
        // The input is small: it fits into the pipe, so the write does not block.
        child.stdin.take().context("a pipe was asked for")?.write_all(input.as_bytes())?;
        judge(&child.wait_with_output()?, arguments)
    }

    /// Runs kubectl in its own terminal, which `exec -it` requires.
    pub fn kubectl_in_terminal(&self, arguments: &[&str]) -> Result<String> {
        let quoted: Vec<String> = arguments.iter().map(|word| format!("'{word}'")).collect();
        let line = format!("'{}' {}", self.kubectl.display(), quoted.join(" "));
        let mut command = self.host.command("script");
        command.args(["-qec", &line, "/dev/null"]);
        self.environment(&mut command);
        finished(&self.host, &mut command, arguments)
    }

    /// Starts kubectl and leaves it running; its output goes to a file.
    pub fn kubectl_in_background(&self, name: &str, arguments: &[&str]) -> Result<Background> {
        let path = self.host.directory().join(format!("{name}.out"));
        let file = File::create(&path)?;
        let mut command = self.kubectl_command(arguments);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        Ok(Background { child: self.host.spawn(&mut command)?, path })
    }

    /// With a limit: kubectl could wait without end for an object that never comes.
    fn limited(&self, arguments: &[&str]) -> Command {
        const SECONDS: &str = "300";
        let mut command = self.host.command("timeout");
        command.args(["--kill-after=5", SECONDS]).arg(&self.kubectl).args(arguments);
        self.environment(&mut command);
        command
    }

    pub fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut command = self.host.command(&self.kubectl);
        command.args(arguments);
        self.environment(&mut command);
        command
    }

    fn environment(&self, command: &mut Command) {
        let home = self.host.directory().join("home");
        command.env("KUBECONFIG", self.kubeconfig()).env("HOME", home).env("TZ", "UTC");
        command.env_remove("POD_NAMESPACE").env("TERM", "dumb");
    }

    /// The first things to look at after a failure.
    pub fn report(&self) -> String {
        let mut text = String::new();
        if !self.kubeconfig().exists() {
            text.push_str("--- no kubeconfig: kubectl cannot connect\n");
        } else {
            text.push_str(&self.report_objects());
        }
        text.push_str(&format!("--- the server's log, its end\n{}", tail(&self.log(), 100)));
        text
    }

    fn report_objects(&self) -> String {
        let mut text = String::new();
        for arguments in [
            &[
                "get",
                "nodes,pods,services,endpointslices,deployments,replicasets",
                "-A",
                "-o",
                "wide",
            ][..],
            &["get", "events", "-A", "--sort-by=.metadata.creationTimestamp"],
            &["describe", "nodes"],
            &["describe", "pods"],
        ] {
            let shown = self.kubectl(arguments).unwrap_or_else(|error| format!("{error:#}\n"));
            text.push_str(&format!("--- kubectl {}\n{}", arguments.join(" "), tail(&shown, 80)));
        }
        text
    }
}

/// A kubectl that runs until it is dropped.
pub struct Background {
    child: Child,
    path: PathBuf,
}

impl Background {
    /// Its output so far.
    pub fn output(&self) -> Result<String> {
        Ok(fs::read_to_string(&self.path)?)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn finished(host: &Host, command: &mut Command, arguments: &[&str]) -> Result<String> {
    judge(&host.output(command)?, arguments)
}

fn judge(output: &std::process::Output, arguments: &[&str]) -> Result<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("{}: {}\n{}{}", arguments.join(" "), output.status, text, stderr.trim_end());
    }
    Ok(text)
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    let mut end = all[all.len().saturating_sub(lines)..].join("\n");
    end.push('\n');
    end
}
