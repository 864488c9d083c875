//! A start on a full disk, on a read-only one, without the store, and beside another server. Tests that
//! need their own file system need root.

use std::fs::{self, File};
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use testkit::http::ApiClient;
use testkit::wait;

use crate::support::{LONG, Scratch};

/// A data directory on its own file system, and a server with a fixed port.
struct Place {
    scratch: Scratch,
    port: u16,
    server: Option<Child>,
    is_mounted: bool,
}

impl Place {
    fn new() -> Result<Self> {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let place = Self { scratch: Scratch::new()?, port, server: None, is_mounted: false };
        fs::create_dir(place.data())?;
        Ok(place)
    }

    fn mounted() -> Result<Self> {
        let mut place = Self::new()?;
        let none: Option<&Path> = None;
        mount(none, &place.data(), Some("tmpfs"), MsFlags::empty(), Some("size=64m,mode=700"))?;
        place.is_mounted = true;
        Ok(place)
    }

    fn data(&self) -> PathBuf {
        self.scratch.path().join("data")
    }

    fn command(&self, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_decapod"));
        command.args(["server", "--disable-agent", "--bind-address", "127.0.0.1"]);
        command.arg(format!("--https-listen-port={}", self.port));
        command.arg("--data-dir").arg(self.data()).args(more);
        command.env("NO_COLOR", "1").env_remove("DECAPOD_LOG").stdin(Stdio::null());
        command
    }

    fn start(&mut self) -> Result<()> {
        let log = File::create(self.scratch.path().join("log"))?;
        let child = self.command(&[]).stdout(log.try_clone()?).stderr(log).spawn()?;
        let server = self.server.insert(child);
        let data = self.scratch.path().join("data");
        let ready = wait::until(LONG, "the server is ready", || {
            if let Some(status) = server.try_wait()? {
                return Ok(Err(status));
            }
            let answer = api(&data)?.get("/readyz", LONG)?;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(Ok(()))
        })?;
        ready.map_err(|status| anyhow::anyhow!("the server ended: {status}\n{}", self.log()))
    }

    fn end(&mut self, signal: Signal) -> Result<ExitStatus> {
        let mut server = self.server.take().context("it runs")?;
        kill(Pid::from_raw(server.id().cast_signed()), signal)?;
        wait::until(LONG, "the server has ended", || server.try_wait()?.context("it still runs"))
    }

    /// Starts a server that must fail; returns its error.
    fn refusal(&self, more: &[&str]) -> Result<String> {
        let output = self.command(more).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success(), "it started");
        let last = said.lines().last().unwrap_or_default();
        ensure!(last.starts_with("decapod: "), "{said}");
        Ok(last.to_owned())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("log")).unwrap_or_default()
    }

    /// Fills the disk to the last byte.
    fn fill(&self) -> Result<()> {
        let mut ballast = File::options().append(true).create(true).open(self.ballast())?;
        for size in [1 << 20, 4096, 1] {
            let block = vec![0; size];
            while ballast.write_all(&block).is_ok() {}
        }
        Ok(())
    }

    fn ballast(&self) -> PathBuf {
        self.data().join("ballast")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        if self.is_mounted {
            let _ = umount2(&self.data(), MntFlags::MNT_DETACH);
        }
    }
}

fn api(data: &Path) -> Result<ApiClient> {
    ApiClient::from_kubeconfig(&fs::read_to_string(data.join("kubeconfig"))?)
}

const CONFIGMAPS: &str = "/api/v1/namespaces/default/configmaps";

fn create(data: &Path, name: &str) -> Result<()> {
    create_sized(data, name, 1)
}

fn create_sized(data: &Path, name: &str, bytes: usize) -> Result<()> {
    let body = serde_json::json!({"metadata": {"name": name}, "data": {"a": "b".repeat(bytes)}});
    let answer = api(data)?.post(CONFIGMAPS, &body.to_string(), LONG)?;
    ensure!(answer.status == 201, "{}", answer.body);
    Ok(())
}

/// A role that a start writes if it is missing.
const FIRST: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles/system:heapster";

/// Waits for a controller's change of an object that each start checks.
fn is_signed(data: &Path) -> Result<()> {
    let answer = api(data)?.get("/api/v1/namespaces/kube-public/configmaps/cluster-info", LONG)?;
    ensure!(answer.body.contains("jws-kubeconfig-"), "{}", answer.body);
    Ok(())
}

fn is_there(data: &Path, name: &str) -> Result<()> {
    let answer = api(data)?.get(&format!("{CONFIGMAPS}/{name}"), LONG)?;
    ensure!(answer.status == 200, "{}", answer.body);
    Ok(())
}

#[test]
fn a_server_starts_on_a_full_disk_and_fails_on_a_read_only_one() -> Result<()> {
    if !testkit::places::is_root_or_says_skipped() {
        return Ok(());
    }
    let mut place = Place::mounted()?;
    let data = place.data();
    place.start()?;
    create(&data, "before")?;
    // After a crash, and after a clean end that could not write everything.
    for (round, signal) in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGKILL].iter().enumerate() {
        wait::until(LONG, "the signer is done", || is_signed(&data))?;
        let gone = api(&data)?.delete(FIRST, LONG)?;
        ensure!(gone.status == 200, "{}", gone.body);
        place.fill()?;
        place.end(*signal)?;
        place.fill()?;
        place.start()?;
        is_there(&data, "before")?;
        // A write is refused, or fits into the free space of the store's file.
        let squeezed = format!("squeezed-{round}");
        if create(&data, &squeezed).is_ok() {
            is_there(&data, &squeezed)?;
        }
        fs::remove_file(place.ballast())?;
        wait::until(LONG, "writes are taken again", || create(&data, &format!("after-{round}")))?;
        // Objects that the start could not write are written later.
        wait::until(LONG, "the first objects are complete", || {
            let answer = api(&data)?.get(FIRST, LONG)?;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(())
        })?;
    }
    place.end(Signal::SIGTERM)?;
    let none: Option<&Path> = None;
    let read_only = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(none, &data, none, read_only, none)?;
    let why = place.refusal(&[])?;
    ensure!(why.contains("Read-only file system"), "{why}");
    ensure!(why.matches("Read-only").count() == 1, "said twice: {why}");
    Ok(())
}

/// Fills the disk again and again, as a program that logs does.
#[test]
fn deletes_work_on_a_full_disk_until_the_server_recovers() -> Result<()> {
    if !testkit::places::is_root_or_says_skipped() {
        return Ok(());
    }
    let mut place = Place::mounted()?;
    let data = place.data();
    place.start()?;
    for number in 0..20 {
        create(&data, &format!("before-{number}"))?;
    }
    let reserve = data.join("store/reserve");
    wait::until(LONG, "there is a reserve", || Ok(fs::metadata(&reserve)?.len()))?;
    for round in 0..3 {
        // Until a write finds no space in the store's file either.
        wait::until(LONG, "writes are refused", || {
            place.fill()?;
            let name = format!("filling-{round}-{}", base::rng::uuid());
            let Err(refused) = create_sized(&data, &name, 20_000) else { bail!("it fitted") };
            let refused = format!("{refused:#}");
            ensure!(refused.contains("until there is room, only deletes"), "{refused}");
            Ok(())
        })?;
        place.fill()?;
        for number in 0..5 {
            let name = format!("{CONFIGMAPS}/before-{}", 5 * round + number);
            let gone = api(&data)?.delete(&name, LONG)?;
            ensure!(gone.status == 200, "{name}: {}", gone.body);
        }
        let metrics = api(&data)?.get("/metrics", LONG)?.body;
        ensure!(metrics.contains("\ndecapod_store_low_on_space 1\n"), "no metric says so");
        fs::remove_file(place.ballast())?;
        wait::until(LONG, "writes are taken again", || create(&data, &format!("after-{round}")))?;
    }
    ensure!(place.log().contains("the store uses its reserve"), "{}", place.log());
    ensure!(place.log().contains("the store accepts all writes again"), "{}", place.log());
    is_there(&data, "before-19")
}

#[test]
fn a_lost_store_and_a_taken_directory_are_refused() -> Result<()> {
    let mut place = Place::new()?;
    let data = place.data();
    place.start()?;
    create(&data, "before")?;
    let pid = place.server.as_ref().context("it runs")?.id().to_string();
    // Another server in the same directory, with another port, leaves nothing behind.
    let why = place.refusal(&["--tls-san", "other"])?;
    ensure!(why.contains("is in use by another process") && why.contains(&pid), "{why}");
    ensure!(fs::read_to_string(data.join("decapod.pid"))? == pid, "the pid of the other");
    place.end(Signal::SIGTERM)?;
    let store = data.join("store/store.redb");
    let kept = fs::read(&store)?;
    for (what, lose) in [
        ("missing", (|path: &Path| fs::remove_file(path)) as fn(&Path) -> std::io::Result<()>),
        ("empty", |path: &Path| fs::write(path, b"")),
    ] {
        lose(&store)?;
        let why = place.refusal(&[])?;
        for part in [what, "snapshot restore", "--new-store"] {
            ensure!(why.contains(part), "{part}: {why}");
        }
    }
    let mut damaged = kept.clone();
    damaged.iter_mut().skip(4096).for_each(|byte| *byte ^= 1);
    fs::write(&store, damaged)?;
    let why = place.refusal(&[])?;
    ensure!(why.contains("is damaged") && why.contains("snapshot restore"), "{why}");
    fs::write(&store, kept)?;
    place.start()?;
    is_there(&data, "before")
}

#[test]
fn invalid_flags_are_refused_before_anything_is_created() -> Result<()> {
    let place = Place::new()?;
    let check = |words: &[&str], part: &str| -> Result<()> {
        let why = place.refusal(words)?;
        ensure!(why.contains(part), "{words:?}: {why}");
        ensure!(fs::read_dir(place.data())?.next().is_none(), "{words:?} left something");
        Ok(())
    };
    check(&["--cluster-cidr", "10.43.0.0/16"], "overlaps")?;
    check(&["--cluster-dns", "10.96.0.10"], "outside of --service-cidr 10.43.0.0/16")?;
    check(&["--service-cidr", "10.96.0.0/30"], "too small for the cluster's DNS")
}
