//! The built binary as a control plane: no root, no namespaces, a free port of the loopback interface, a
//! temporary directory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testkit::http::ApiClient;
use testkit::wait;
pub use testkit::wait::LONG;

/// Lines about clients' actions come at most once in this time.
const SELDOM: Duration = Duration::from_secs(60);
/// Warnings that appear only because the machine is slow: a time-out of the server.
const OF_SLOWNESS: &[&str] = &["the garbage collector starts before every resource is listed"];

/// A directory that is removed after the test.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Result<Self> {
        let unique = base::rng::uuid();
        let path = std::env::temp_dir().join(format!("decapod-it-{unique}"));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file and returns its path.
    pub fn file(&self, name: &str, text: &str) -> Result<String> {
        let path = self.0.join(name);
        fs::write(&path, text)?;
        Ok(path.display().to_string())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// `decapod server --disable-agent`.
pub struct Server {
    process: Option<Child>,
    arguments: Vec<String>,
    /// Environment variables of its processes.
    pub variables: Vec<(String, String)>,
    /// The address that it listens on.
    bind: String,
    scratch: Scratch,
    /// When the first of its processes started.
    begun: Instant,
}

impl Server {
    /// Starts a server with additional flags; returns when it is ready.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        Self::start_in(Scratch::new()?, arguments)
    }

    /// The same, with files that the flags name.
    pub fn start_in(scratch: Scratch, arguments: &[&str]) -> Result<Self> {
        let arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
        let mut server = Self::prepared_in(scratch, "127.0.0.1");
        server.arguments = arguments;
        server.launch()?;
        Ok(server)
    }

    /// A server whose process is not started yet.
    pub fn prepared() -> Result<Self> {
        Ok(Self::prepared_in(Scratch::new()?, "127.0.0.1"))
    }

    /// The same at another address of the loopback interface, for servers beside each other.
    pub fn prepared_at(address: std::net::Ipv4Addr) -> Result<Self> {
        Ok(Self::prepared_in(Scratch::new()?, &address.to_string()))
    }

    fn prepared_in(scratch: Scratch, bind: &str) -> Self {
        let (bind, begun) = (bind.to_owned(), wait::now());
        Self { process: None, arguments: vec![], variables: vec![], bind, scratch, begun }
    }

    /// Starts the process, also after a stop; returns when it is ready.
    pub fn launch(&mut self) -> Result<()> {
        self.spawn()?;
        self.ready()
    }

    fn spawn(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.log_file())?;
        let _ = fs::remove_file(self.data().join("kubeconfig"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_decapod"));
        command.args(["server", "--disable-agent", "--https-listen-port", "0"]);
        command.args(["--bind-address", &self.bind, "--data-dir"]).arg(self.data());
        command.args(&self.arguments).env("NO_COLOR", "1").env_remove("DECAPOD_LOG");
        // Not the configuration of the machine that the test runs on.
        command.env("DECAPOD_CONFIG", "/dev/null").envs(self.variables.clone());
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.process = Some(command.spawn()?);
        Ok(())
    }

    /// Waits until a started process is ready.
    pub fn ready(&mut self) -> Result<()> {
        let ready = wait::until(LONG, "the server is ready", || {
            if let Some(status) = self.running()?.try_wait()? {
                return Ok(Err(status));
            }
            let answer = self.api()?.get("/readyz", LONG)?;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(Ok(()))
        })?;
        ready.map_err(|status| anyhow::anyhow!("the server ended: {status}\n{}", self.log()))
    }

    /// Sends SIGINT, as Ctrl-C does; returns when the process has ended.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        kill(Pid::from_raw(self.process_id()?.cast_signed()), Signal::SIGINT)?;
        let process = self.running()?;
        let status = wait::until(LONG, "the server has ended", || {
            process.try_wait()?.context("it still runs")
        })?;
        self.process = None;
        Ok(status)
    }

    /// Ends it as a power cut does.
    pub fn kill(&mut self) -> Result<()> {
        let process = self.running()?;
        process.kill()?;
        process.wait()?;
        self.process = None;
        Ok(())
    }

    /// Waits until it ends by itself; returns what it printed.
    pub fn ends(&mut self) -> Result<String> {
        let process = self.running()?;
        wait::until(LONG, "the server has ended", || process.try_wait()?.context("it still runs"))?;
        self.process = None;
        Ok(self.log())
    }

    /// Its exit status, if it has ended.
    pub fn has_ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.running()?.try_wait()?)
    }

    /// Starts it with other flags, also after a stop; does not wait for it.
    pub fn launch_with(&mut self, arguments: &[&str]) -> Result<()> {
        self.arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
        self.spawn()
    }

    pub fn process_id(&mut self) -> Result<u32> {
        Ok(self.running()?.id())
    }

    fn running(&mut self) -> Result<&mut Child> {
        self.process.as_mut().context("it was not started")
    }

    /// Runs a command against this server's data; returns its output, or its error.
    pub fn decapod(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_decapod"));
        command.args(words).arg("--data-dir").arg(self.data()).stdin(Stdio::null());
        let output = command.output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "decapod {}: {text}{complaint}", words.join(" "));
        Ok(text)
    }

    pub fn data(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    /// A client of the administrator.
    pub fn api(&self) -> Result<ApiClient> {
        ApiClient::from_kubeconfig(&self.kubeconfig()?)
    }

    pub fn kubeconfig(&self) -> Result<String> {
        Ok(fs::read_to_string(self.data().join("kubeconfig"))?)
    }

    fn log_file(&self) -> PathBuf {
        self.scratch.path().join("log")
    }

    /// Its output so far, both streams.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_else(|error| error.to_string())
    }

    /// The number of lines about `cause`.
    pub fn lines_about(&self, cause: &str) -> u64 {
        self.log().lines().filter(|line| line.contains(cause)).count() as u64
    }

    /// At most one line a minute: clients cannot fill the disk.
    pub fn speaks_seldom_of(&self, cause: &str) -> Result<()> {
        let lines = self.lines_about(cause);
        let most = 1 + self.begun.elapsed().as_secs() / SELDOM.as_secs();
        ensure!(lines <= most, "{cause}: {lines} lines, {most} at most\n{}", self.log());
        Ok(())
    }

    /// Checks for warnings and errors about other causes.
    pub fn complains_of_nothing_but(&self, causes: &[&str]) -> Result<()> {
        let log = self.log();
        let is_known =
            |line: &&str| causes.iter().chain(OF_SLOWNESS).any(|cause| line.contains(cause));
        let others: Vec<&str> = log
            .lines()
            .filter(|line| line.contains(" WARN ") || line.contains(" ERROR "))
            .filter(|line| !is_known(line))
            .collect();
        ensure!(others.is_empty(), "{}", others.join("\n"));
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
