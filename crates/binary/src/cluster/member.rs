//! The etcd process beside a server: started, restarted, stopped last.
//!
//! In: the program, certificates, this server's address. Out: a running member; the news that the cluster
//! has removed it. Invariants: the process ends with this one, even if this one is killed: its parent is a
//! thread that lives as long as the process. Its data are only in `<data-dir>/etcd`.
//!
//! Settings that differ from etcd's defaults: a quota of 8 GiB instead of 2; no compaction, which is the API
//! servers' work; a heartbeat of 200 ms and elections after 2 s, for machines whose disks pause.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, bail};
use base::backoff::Backoff;
use base::task::Tasks;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pki::etcd::Kind;
use tokio::sync::watch;

use super::{ClusterFlags, Own, PORTS};
use crate::flags;

const QUOTA: &str = "8589934592";
const HEARTBEAT: &str = "200";
const ELECTION: &str = "2000";
const AGAIN_FIRST: Duration = Duration::from_secs(1);
const AGAIN_CEILING: Duration = Duration::from_secs(30);
/// A run of this length resets the pause between restarts.
const WELL: Duration = Duration::from_secs(60);
/// For etcd to hand over its leadership and end.
const STOPPING: Duration = Duration::from_secs(4);
/// etcd reads its certificates again by itself.
const LOOK: Duration = Duration::from_secs(3600);
/// For the etcd of a killed server to end: it hands over its leadership first.
const PREDECESSOR: Duration = Duration::from_secs(30);
const PREDECESSOR_AGAIN: Duration = Duration::from_millis(100);
/// So many starts without success are a failure, while this server starts.
const STARTS: u32 = 3;

/// How a member begins.
#[derive(Clone, Debug)]
pub enum Start {
    /// A new cluster of this member.
    First,
    /// A member that was added; the value of `--initial-cluster`.
    Added(String),
    /// From its data.
    Again,
    /// From its data, as the only member.
    Alone,
}

/// A running member; it ends when this is dropped.
pub struct Member {
    pub own: Own,
    shared: Arc<Shared>,
    tasks: Tasks,
}

struct Shared {
    /// Held for a few assignments; the thread waits on `changed` with it.
    state: Mutex<State>,
    changed: Condvar,
    /// The number of ends of the process; asks whether it was removed.
    ends: watch::Sender<u32>,
    is_removed: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    pid: Option<Pid>,
    is_stopping: bool,
    has_stopped: bool,
    /// Ends one after the other without a long run between them.
    failures: u32,
    last_end: String,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }
}

impl Member {
    /// Starts the process; returns before it serves.
    pub fn start(own: &Own, flags: &flags::Server, start: Start) -> anyhow::Result<Self> {
        let program = program(&flags.cluster)?;
        let mut first = arguments(own, &start)?;
        let again = arguments(own, &Start::Again)?;
        if matches!(start, Start::Alone) {
            first.push("--force-new-cluster=true".into());
        }
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            ends: watch::Sender::new(0),
            is_removed: watch::Sender::new(false),
        });
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        let keeper = shared.clone();
        let work = move || {
            // In this thread: the child of another thread would end with that thread.
            let started =
                spawn(&program, &first).inspect(|child| keeper.state().pid = Some(pid_of(child)));
            // The receiver waits.
            let (outcome, child) = match started {
                Ok(child) => (Ok(()), Some(child)),
                Err(error) => (Err(error), None),
            };
            let _ = tell.send(outcome);
            if let Some(child) = child {
                keep(&keeper, &program, &again, child);
            }
        };
        let thread = std::thread::Builder::new().name("etcd".into());
        thread.spawn(work).context("cannot start the thread of etcd")?;
        told.recv().context("the thread of etcd ended")??;
        let tasks = Tasks::new("etcd member");
        tasks.spawn("removal", look_for_removal(own.clone(), shared.clone()));
        tasks.spawn("etcd certificates", renew(own.clone()));
        tasks.spawn("etcd members", super::follow(own.clone()));
        Ok(Self { own: own.clone(), shared, tasks })
    }

    /// Resolves when the cluster has removed this member.
    pub async fn removed(&self) {
        let mut is_removed = self.shared.is_removed.subscribe();
        // The sender lives in `shared`.
        let _ = is_removed.wait_for(|is_removed| *is_removed).await;
    }

    /// Why it does not start, after several attempts.
    pub fn has_failed(&self) -> Option<String> {
        let state = self.shared.state();
        (state.failures >= STARTS).then(|| state.last_end.clone())
    }

    /// Ends the process.
    pub async fn stop(&self) {
        self.tasks.stop();
        let shared = self.shared.clone();
        // It waits for the thread.
        let stopped = tokio::task::spawn_blocking(move || end(&shared));
        let _ = stopped.await;
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.tasks.stop();
        let mut state = self.shared.state();
        state.is_stopping = true;
        if let Some(pid) = state.pid {
            // An error means that it has ended.
            let _ = kill(pid, Signal::SIGTERM);
        }
        self.shared.changed.notify_all();
    }
}

/// Waits until etcd's ports are free. The server before this one may have been killed a moment ago.
pub async fn ports_are_free(own: &Own) -> anyhow::Result<()> {
    let begun = tokio::time::Instant::now();
    for port in PORTS {
        let at = SocketAddr::new(own.address, port);
        loop {
            match tokio::net::TcpListener::bind(at).await {
                Ok(_) => break,
                Err(error) if error.kind() != std::io::ErrorKind::AddrInUse => {
                    return Err(error).with_context(|| format!("etcd cannot listen on {at}"));
                }
                Err(_) if begun.elapsed() < PREDECESSOR => {
                    tokio::time::sleep(PREDECESSOR_AGAIN).await;
                }
                Err(_) => bail!(
                    "etcd cannot listen on {at}: another process does; stop it (if it is Debian's etcd: systemctl disable --now etcd)"
                ),
            }
        }
    }
    Ok(())
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

fn end(shared: &Shared) {
    let mut state = shared.state();
    state.is_stopping = true;
    shared.changed.notify_all();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        if let Some(pid) = state.pid {
            // An error means that it has ended.
            let _ = kill(pid, signal);
        }
        let waited = shared.changed.wait_timeout_while(state, STOPPING, |state| !state.has_stopped);
        state = waited.expect("no panic under the lock").0;
        if state.has_stopped {
            return;
        }
    }
}

/// The thread of the process. Returns when it was stopped.
fn keep(shared: &Shared, program: &Path, arguments: &[OsString], mut child: Child) {
    let mut pause = Backoff::new(AGAIN_FIRST, AGAIN_CEILING);
    loop {
        let begun = tokio::time::Instant::now();
        let ended =
            child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let mut state = shared.state();
        state.pid = None;
        if state.is_stopping {
            state.has_stopped = true;
            return shared.changed.notify_all();
        }
        if begun.elapsed() > WELL {
            pause.reset();
            state.failures = 0;
        }
        state.failures += 1;
        state.last_end.clone_from(&ended);
        shared.ends.send_modify(|ends| *ends += 1);
        let pause = pause.step();
        tracing::error!(ended, ?pause, "etcd ended, restarting it");
        let waited = shared.changed.wait_timeout_while(state, pause, |state| !state.is_stopping);
        let mut state = waited.expect("no panic under the lock").0;
        if state.is_stopping {
            state.has_stopped = true;
            return shared.changed.notify_all();
        }
        match spawn(program, arguments) {
            Ok(started) => {
                state.pid = Some(pid_of(&started));
                child = started;
            }
            // The next round waits for the old child, which returns at once.
            Err(error) => tracing::error!(error = format!("{error:#}"), "failed to start etcd"),
        }
    }
}

fn spawn(program: &Path, arguments: &[OsString]) -> anyhow::Result<Child> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    // Its settings are the arguments alone.
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_etcds(name)) {
        command.env_remove(name);
    }
    // SAFETY: both calls are async-signal-safe and touch no memory of ours. In its own group it does not
    // get a terminal's Ctrl-C before the API server has stopped.
    unsafe {
        command.pre_exec(|| {
            nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
            nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
            Ok(())
        });
    }
    command.spawn().with_context(|| format!("cannot start {}", program.display()))
}

fn is_etcds(name: &OsString) -> bool {
    name.to_string_lossy().starts_with("ETCD_")
}

fn arguments(own: &Own, start: &Start) -> anyhow::Result<Vec<OsString>> {
    let pki = own.pki()?;
    let address = own.address.to_string();
    let names = ["localhost", "127.0.0.1", "::1", address.as_str()];
    let (server, peer) =
        (pki.member(&own.name, Kind::Server, &names)?, pki.member(&own.name, Kind::Peer, &names)?);
    pki.client()?;
    let (client_url, peer_url) = (own.client_url(), own.peer_url());
    let token = new_token();
    let mut all: Vec<OsString> = vec![];
    let mut add = |name: &str, value: &std::ffi::OsStr| {
        let mut word = OsString::from(format!("--{name}="));
        word.push(value);
        all.push(word);
    };
    let texts = [
        ("name", own.name.as_str()),
        ("listen-client-urls", client_url.as_str()),
        ("advertise-client-urls", client_url.as_str()),
        ("listen-peer-urls", peer_url.as_str()),
        ("initial-advertise-peer-urls", peer_url.as_str()),
        ("initial-cluster-token", token.as_str()),
        ("client-cert-auth", "true"),
        ("peer-client-cert-auth", "true"),
        ("quota-backend-bytes", QUOTA),
        ("heartbeat-interval", HEARTBEAT),
        ("election-timeout", ELECTION),
        ("log-level", "warn"),
        ("logger", "zap"),
    ];
    for (name, value) in texts {
        add(name, value.as_ref());
    }
    let files = [
        ("data-dir", own.etcd()),
        ("trusted-ca-file", pki.ca_file()),
        ("cert-file", server.cert),
        ("key-file", server.key),
        ("peer-trusted-ca-file", pki.ca_file()),
        ("peer-cert-file", peer.cert),
        ("peer-key-file", peer.key),
    ];
    for (name, value) in files {
        add(name, value.as_os_str());
    }
    let alone = format!("{}={peer_url}", own.name);
    match start {
        Start::First | Start::Alone => {
            add("initial-cluster", alone.as_ref());
            add("initial-cluster-state", "new".as_ref());
        }
        Start::Added(all) => {
            add("initial-cluster", all.as_ref());
            add("initial-cluster-state", "existing".as_ref());
        }
        // etcd takes all from its data, and checks only that its own name is in the list.
        Start::Again => {
            add("initial-cluster", alone.as_ref());
            add("initial-cluster-state", "existing".as_ref());
        }
    }
    Ok(all)
}

/// Part of a new cluster's id; no other start looks at it. Members of a cluster that was reset have another id,
/// so the new one refuses their messages.
pub fn new_token() -> String {
    format!("decapod-{}", base::rng::alphanumeric(16))
}

/// The etcd program: the flag's, or the one on the path.
pub fn program(flags: &ClusterFlags) -> anyhow::Result<PathBuf> {
    let found = match &flags.etcd_binary {
        Some(path) if path.exists() => path.clone(),
        Some(path) => bail!("--etcd-binary {}: there is no such file", path.display()),
        None => on_path("etcd").context(
            "there is no etcd on the path: install one (on Debian: apt install etcd-server), or name one with --etcd-binary",
        )?,
    };
    let output = Command::new(&found).arg("--version").stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {}", found.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !is_new_enough(&text) {
        let line = text.lines().next().unwrap_or_default();
        bail!("{} is not etcd 3.4 or newer: {line:?}", found.display());
    }
    Ok(found)
}

/// A program of this name beside etcd, or on the path.
pub fn beside(program: &Path, name: &str) -> Option<PathBuf> {
    let near = program.with_file_name(name);
    if near.exists() { Some(near) } else { on_path(name) }
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|file| file.is_file())
}

/// `etcd Version: 3.6.1`. Learners came with 3.4.
fn is_new_enough(text: &str) -> bool {
    let version = text.lines().find_map(|line| line.strip_prefix("etcd Version: "));
    let mut numbers = version.unwrap_or_default().split('.').map(|part| part.parse::<u32>().ok());
    let (major, minor) = (numbers.next().flatten(), numbers.next().flatten());
    (major, minor) >= (Some(3), Some(4))
}

/// Asks the other members after each end of the process.
async fn look_for_removal(own: Own, shared: Arc<Shared>) {
    let mut ends = shared.ends.subscribe();
    while ends.changed().await.is_ok() {
        let others: Vec<String> = own.known_urls().into_iter().skip(1).collect();
        if others.is_empty() {
            continue;
        }
        let Ok(cluster) = own.cluster(&others) else { continue };
        match cluster.members().await {
            Ok(members) => {
                let peer = own.peer_url();
                if members.iter().all(|member| !member.peer_urls.contains(&peer)) {
                    shared.is_removed.send_replace(true);
                    return;
                }
            }
            Err(error) => tracing::debug!(%error, "failed to list etcd's members"),
        }
    }
}

/// Issues the member's certificates again when they are due.
async fn renew(own: Own) {
    loop {
        tokio::time::sleep(LOOK).await;
        if let Err(error) = arguments(&own, &Start::Again) {
            tracing::error!(error = format!("{error:#}"), "failed to renew etcd's certificates");
        }
    }
}

#[cfg(test)]
mod tests {
    use testkit::places;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_predecessor_is_waited_for_and_a_stranger_is_named() {
        let address = places::own_loopback();
        let own =
            Own { name: "n1".into(), address: address.into(), data_dir: "/nonexistent".into() };
        ports_are_free(&own).await.expect("nothing listens there");
        let held = tokio::net::TcpListener::bind((address, PORTS[1])).await.expect("ours");
        let begun = tokio::time::Instant::now();
        let why = ports_are_free(&own).await.expect_err("it is taken").to_string();
        assert!(begun.elapsed() >= PREDECESSOR, "{:?}", begun.elapsed());
        assert!(why.contains(&format!("{address}:{}: another process", PORTS[1])), "{why}");
        let tasks = Tasks::new("test");
        tasks.spawn("predecessor", async move {
            tokio::time::sleep(Duration::from_secs(10)).await;
            drop(held);
        });
        ports_are_free(&own).await.expect("it has ended");
        tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[test]
    fn versions_are_read() {
        for (text, expected) in [
            ("etcd Version: 3.6.1\nGit SHA: x\n", true),
            ("etcd Version: 3.4.23\n", true),
            ("etcd Version: 3.3.27\n", false),
            ("etcd Version: 4.0.0\n", true),
            ("something else", false),
        ] {
            assert_eq!(is_new_enough(text), expected, "{text}");
        }
    }
}
