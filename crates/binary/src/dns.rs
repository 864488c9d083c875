//! The cluster's DNS as a separate process: like containers, it keeps running when the server stops, and
//! the next server adopts it.
//!
//! `<data-dir>/dns.pid` has the process id; the process is ours if its command line matches. A process
//! with outdated settings is replaced.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base::backoff::Backoff;
use base::task::Tasks;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

const LOG: &str = "dns.log";

/// Settings of the DNS process.
#[derive(Clone)]
pub struct Service {
    pub data_dir: PathBuf,
    pub kubeconfig: PathBuf,
    pub addresses: Vec<IpAddr>,
    pub domain: String,
    /// Servers for names outside of the cluster; `None`: the usual file.
    pub resolv_conf: Option<PathBuf>,
    /// Of /metrics, /ready and /health; empty: the addresses of the DNS with the usual port.
    pub metrics: Vec<SocketAddr>,
    /// Notified when the kubeconfig changes.
    pub renewed: Arc<Notify>,
}

/// Addresses with the DNS port.
pub fn sockets(addresses: &[IpAddr]) -> Vec<SocketAddr> {
    addresses.iter().map(|address| SocketAddr::new(*address, 53)).collect()
}

/// `decapod dns`: runs until it gets a signal.
#[derive(clap::Args, Clone, Debug)]
pub struct Dns {
    #[arg(long)]
    kubeconfig: PathBuf,
    /// Addresses to listen on, UDP and TCP
    #[arg(long, value_delimiter = ',', required = true)]
    address: Vec<IpAddr>,
    #[arg(long, default_value = "cluster.local")]
    domain: String,
    /// File with the servers for names outside of the cluster
    #[arg(long, default_value = "/etc/resolv.conf", value_name = "FILE")]
    resolv_conf: PathBuf,
    /// Addresses of /metrics, /ready and /health
    #[arg(long, value_delimiter = ',', value_name = "ADDRESS:PORT")]
    metrics_bind_address: Vec<SocketAddr>,
    /// Changes with the kubeconfig, so that a server can see whether this process has the current one
    #[arg(long, hide = true, default_value = "")]
    settings: String,
}

pub async fn run(flags: Dns) -> anyhow::Result<()> {
    let client = crate::kubeconfig::client(&flags.kubeconfig, "decapod-dns")?;
    let config = dns::Config {
        status: flags.metrics_bind_address,
        resolv_conf: flags.resolv_conf,
        ..dns::Config::new(sockets(&flags.address), &flags.domain)
    };
    let tasks = Tasks::new("dns");
    let stop = tasks.stop_signal();
    crate::process::give_back_what_the_start_needed(&tasks);
    let serving = dns::run(client, config, stop);
    tokio::pin!(serving);
    tokio::select! {
        outcome = &mut serving => outcome.context("the DNS server ended"),
        () = crate::process::termination() => {
            tasks.stop();
            serving.await.context("the DNS server ended")
        }
    }
}

/// Keeps a DNS process running; does not stop it at the end.
pub fn supervise(service: Service, tasks: &Tasks) {
    tasks.spawn("dns supervisor", async move {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
        loop {
            match run_once(&service).await {
                Err(error) => {
                    let error = crate::process::told(&error);
                    tracing::error!(error, "failed to run the cluster's DNS process");
                }
                Ok(Ended::Renewed) => tracing::info!("restarting the DNS process: it has new credentials"),
                Ok(Ended::Alone) => {
                    let log = service.data_dir.join(LOG);
                    let why = last_words(&log);
                    tracing::warn!(why, log = %log.display(), "the DNS process ended, restarting it");
                }
            }
            tokio::time::sleep(backoff.step()).await;
        }
    });
}

/// Why a process must be replaced.
enum Ended {
    Alone,
    Renewed,
}

/// The last line of the process's log: why it ended.
fn last_words(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    text.lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("it said nothing")
        .trim()
        .to_owned()
}

/// Adopts or starts the process, and returns when it has ended.
async fn run_once(service: &Service) -> anyhow::Result<Ended> {
    let pid_file = service.data_dir.join("dns.pid");
    let arguments = arguments(service)?;
    let adopted = read_pid(&pid_file)
        .filter(|pid| command_line(*pid).is_some_and(|line| is_dns(&line, &service.kubeconfig)));
    let pid = match adopted {
        Some(pid) if command_line(pid).is_some_and(|line| line.ends_with(&arguments)) => pid,
        stale => {
            if let Some(pid) = stale {
                end(pid).await?;
            }
            let pid = spawn(service, &arguments)?;
            if let Err(error) = std::fs::write(&pid_file, pid.to_string()) {
                // For example on a full disk: the DNS process runs all the same.
                let path = pid_file.display();
                tracing::warn!(%error, %path, "failed to write the pid file of the DNS process");
            }
            pid
        }
    };
    tokio::select! {
        ended = wait_for_end(pid) => ended.map(|()| Ended::Alone),
        // The next round sees that the process has outdated settings.
        () = service.renewed.notified() => Ok(Ended::Renewed),
    }
}

fn arguments(service: &Service) -> anyhow::Result<Vec<String>> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let kubeconfig = std::fs::read(&service.kubeconfig)
        .with_context(|| service.kubeconfig.display().to_string())?;
    let mut hasher = DefaultHasher::new();
    kubeconfig.hash(&mut hasher);
    let addresses: Vec<String> = service.addresses.iter().map(IpAddr::to_string).collect();
    let metrics: Vec<String> = metrics(service).iter().map(SocketAddr::to_string).collect();
    let mut arguments = vec![
        "dns".into(),
        format!("--kubeconfig={}", service.kubeconfig.display()),
        format!("--address={}", addresses.join(",")),
        format!("--domain={}", service.domain),
        format!("--metrics-bind-address={}", metrics.join(",")),
    ];
    let file = service.resolv_conf.as_ref();
    arguments.extend(file.map(|file| format!("--resolv-conf={}", file.display())));
    arguments.push(format!("--settings={:016x}", hasher.finish()));
    Ok(arguments)
}

/// By default an address of the cluster's alone: several clusters on one machine do not collide, and no
/// other network sees it.
fn metrics(service: &Service) -> Vec<SocketAddr> {
    if !service.metrics.is_empty() {
        return service.metrics.clone();
    }
    let own = service.addresses.iter();
    own.map(|address| SocketAddr::new(*address, dns::METRICS_PORT)).collect()
}

fn read_pid(path: &Path) -> Option<i32> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn command_line(pid: i32) -> Option<Vec<String>> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
    Some(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect())
}

/// Whether this is the DNS process of our cluster, with any settings.
fn is_dns(line: &[String], kubeconfig: &Path) -> bool {
    let own = format!("--kubeconfig={}", kubeconfig.display());
    line.get(1).is_some_and(|word| word == "dns") && line.contains(&own)
}

fn spawn(service: &Service, arguments: &[String]) -> anyhow::Result<i32> {
    let (out, err) = output(&service.data_dir.join(LOG))?;
    let mut command = std::process::Command::new("/proc/self/exe");
    command.arg0("decapod").args(arguments).stdin(Stdio::null()).stdout(out).stderr(err);
    // SAFETY: setsid is async-signal-safe and touches no memory of ours. In its own session the process
    // survives a Ctrl-C at the server's terminal.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(|_| ()).map_err(std::io::Error::from));
    }
    let child = command.spawn().context("cannot start the DNS process")?;
    Ok(child.id() as i32)
}

/// The log file, or `/dev/null` if it cannot be created on a full disk.
fn output(log: &Path) -> anyhow::Result<(Stdio, Stdio)> {
    match std::fs::File::create(log) {
        Ok(file) => Ok((file.try_clone()?.into(), file.into())),
        Err(error) => {
            tracing::warn!(%error, path = %log.display(), "failed to create the log of the DNS process");
            Ok((Stdio::null(), Stdio::null()))
        }
    }
}

fn open_pid(pid: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: the call takes two integers and returns a new descriptor or -1.
    let descriptor = unsafe { nix::libc::syscall(nix::libc::SYS_pidfd_open, pid, 0) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as i32) })
}

/// A pidfd is readable when its process has ended: no polling, for children and other processes.
async fn wait_for_end(pid: i32) -> anyhow::Result<()> {
    let Ok(descriptor) = open_pid(pid) else { return Ok(()) };
    // SAFETY: the descriptor is owned by `ended` and stays open as long as it.
    let ended = unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }?;
    ended.readable().await?.retain_ready();
    // Our own child must be reaped; an adopted one is not ours to reap.
    let _ = nix::sys::wait::waitpid(
        nix::unistd::Pid::from_raw(pid),
        Some(nix::sys::wait::WaitPidFlag::WNOHANG),
    );
    tracing::debug!(pid, descriptor = ended.get_ref().as_raw_fd(), "the DNS process has ended");
    Ok(())
}

async fn end(pid: i32) -> anyhow::Result<()> {
    use nix::sys::signal::{Signal, kill};
    let pid_of = nix::unistd::Pid::from_raw(pid);
    for (signal, patience) in [(Signal::SIGTERM, 2), (Signal::SIGKILL, 5)] {
        if kill(pid_of, signal).is_err() {
            return Ok(());
        }
        if tokio::time::timeout(Duration::from_secs(patience), wait_for_end(pid)).await.is_ok() {
            return Ok(());
        }
    }
    anyhow::bail!("the old DNS process {pid} does not end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_says_why_it_ended() {
        let root = tempfile::tempdir().expect("a directory");
        let log = root.path().join(LOG);
        assert_eq!(last_words(&log), "it said nothing");
        std::fs::write(&log, "INFO started\ndecapod: cannot listen on 10.43.0.10:53\n\n")
            .expect("written");
        assert_eq!(last_words(&log), "decapod: cannot listen on 10.43.0.10:53");
    }
}
