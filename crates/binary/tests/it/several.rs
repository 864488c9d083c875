//! Several servers on one datastore: an etcd that starts late, a server of another cluster, frozen members.
//! Tests that need a real etcd with three members, or upstream's API server, print `skipped` without one.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use testkit::http::{ApiClient, Connection};
use testkit::{places, wait};

use crate::support::{LONG, Scratch, Server};

const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2380;

/// A process that is killed on drop.
struct Running(Child);

impl Running {
    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.0.id().cast_signed()), signal)?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `decapod etcd` at an address.
fn own_etcd(scratch: &Scratch, url: &str) -> Result<Running> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_decapod"));
    command.args(["etcd", "--listen-client-urls", url, "--advertise-client-urls", url]);
    command.arg("--data-dir").arg(scratch.path().join("etcd"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(Running(command.spawn()?))
}

fn url_of(address: Ipv4Addr) -> String {
    format!("http://{address}:{CLIENT_PORT}")
}

/// After a power cut machines start in any order. Upstream and k3s wait, too.
#[test]
fn a_server_waits_for_its_datastore_and_refuses_a_stranger() -> Result<()> {
    let (scratch, url) = (Scratch::new()?, url_of(places::own_loopback()));
    let mut server = Server::prepared()?;
    server.launch_with(&["--datastore-endpoint", &url])?;
    wait::until(LONG, "it says that it waits", || {
        ensure!(
            server.lines_about("the datastore does not answer, waiting") > 0,
            "{}",
            server.log()
        );
        Ok(())
    })?;
    ensure!(server.has_ended()?.is_none(), "{}", server.log());
    let _etcd = own_etcd(&scratch, &url)?;
    server.ready()?;

    // Another authority: the servers would not accept each other's certificates.
    let Err(refused) = Server::start(&["--datastore-endpoint", &url]) else {
        bail!("a server of another cluster was taken in");
    };
    let refused = format!("{refused:#}");
    let told = "is not the one of the cluster in this datastore: copy ";
    ensure!(refused.contains(told), "{refused}");
    let mut second = Server::prepared()?;
    copy(&server.data(), &second.data())?;
    second.launch_with(&["--datastore-endpoint", &url])?;
    second.ready()?;

    // A new authority is accepted because of the old one.
    server.decapod(&["certificate", "rotate-ca"])?;
    server.stop()?;
    server.launch()?;
    second.stop()?;
    second.launch()
}

/// Service kubernetes shows the servers that live: a dead one leaves within 15 s, one that stops at once.
#[test]
fn live_servers_are_listed() -> Result<()> {
    let (scratch, url) = (Scratch::new()?, url_of(places::own_loopback()));
    let _etcd = own_etcd(&scratch, &url)?;
    let mut servers: Vec<Server> = vec![];
    for address in ["192.0.2.1", "192.0.2.2", "192.0.2.3"] {
        let mut server = Server::prepared()?;
        if let Some(first) = servers.first() {
            copy(&first.data(), &server.data())?;
        }
        server.launch_with(&["--datastore-endpoint", &url, "--advertise-address", address])?;
        server.ready()?;
        servers.push(server);
    }
    let listed = |server: &Server| -> Result<Vec<String>> {
        let path = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes";
        let slice: Value = serde_json::from_str(&server.api()?.get(path, LONG)?.body)?;
        let endpoints = slice["endpoints"].as_array().context("no endpoints")?;
        let first = |one: &Value| one["addresses"][0].as_str().unwrap_or_default().to_owned();
        Ok(endpoints.iter().map(first).collect())
    };
    let shows = |server: &Server, wanted: &[&str]| {
        wait::until(LONG, &format!("{wanted:?} are listed"), || {
            let now = listed(server)?;
            ensure!(now == wanted, "{now:?}");
            Ok(())
        })
    };
    shows(&servers[2], &["192.0.2.1", "192.0.2.2", "192.0.2.3"])?;
    let leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases\
        ?labelSelector=apiserver.kubernetes.io/identity%3Dkube-apiserver";
    let leases: Value = serde_json::from_str(&servers[2].api()?.get(leases, LONG)?.body)?;
    // All have the name of this host.
    let name = leases["items"][0]["metadata"]["name"].as_str().unwrap_or_default();
    ensure!(name.starts_with("apiserver-"), "{leases}");
    let begun = wait::now();
    servers[0].kill()?;
    shows(&servers[2], &["192.0.2.2", "192.0.2.3"])?;
    println!("a dead server left after {:?}", begun.elapsed());
    servers[1].stop()?;
    ensure!(listed(&servers[2])? == ["192.0.2.3"], "a stopping server is still listed");
    servers[0].launch()?;
    shows(&servers[2], &["192.0.2.1", "192.0.2.3"])
}

/// Copies what a second server needs: certificates and the token.
fn copy(from: &Path, to: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    for directory in [to.to_owned(), to.join("pki")] {
        fs::DirBuilder::new().mode(0o700).create(directory)?;
    }
    for file in ["ca.crt", "ca.key", "front-proxy-ca.crt", "front-proxy-ca.key", "sa.key", "sa.pub"]
    {
        fs::copy(from.join("pki").join(file), to.join("pki").join(file))?;
    }
    fs::copy(from.join("token"), to.join("token"))?;
    Ok(())
}

/// Three members of a real etcd.
struct Etcd {
    members: Vec<(Ipv4Addr, Running)>,
    _scratch: Scratch,
}

/// `ETCD`, the program in `PATH`, or the one in the cache.
pub fn program() -> Option<PathBuf> {
    let found = places::cached("ETCD", "etcd-3.6/etcd").or_else(|| places::program("etcd"));
    if found.is_none() {
        println!("skipped: no etcd on the path or in the cache (cargo xtask etcd)");
    }
    found
}

impl Etcd {
    fn start(program: &Path) -> Result<Self> {
        let scratch = Scratch::new()?;
        let addresses = [(); 3].map(|()| places::own_loopback());
        let peer = |address: &Ipv4Addr| format!("http://{address}:{PEER_PORT}");
        let all: Vec<String> = addresses.iter().map(|at| format!("{at}={}", peer(at))).collect();
        let member = |address: Ipv4Addr| {
            let (name, client) = (address.to_string(), url_of(address));
            let mut command = Command::new(program);
            command.args(["--name", &name, "--initial-cluster", &all.join(",")]);
            command.arg("--data-dir").arg(scratch.path().join(&name));
            command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
            command.args(["--listen-peer-urls", &peer(&address)]);
            command.args(["--initial-advertise-peer-urls", &peer(&address)]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            Ok((address, Running(command.spawn()?)))
        };
        let members = addresses.into_iter().map(member).collect::<Result<_>>()?;
        let etcd = Self { members, _scratch: scratch };
        wait::until(LONG, "etcd has a leader", || etcd.leader())?;
        Ok(etcd)
    }

    fn endpoints(&self) -> String {
        let urls: Vec<String> = self.members.iter().map(|(at, _)| url_of(*at)).collect();
        urls.join(",")
    }

    /// The index of the leader.
    fn leader(&self) -> Result<usize> {
        let leads = |address: &Ipv4Addr| {
            let page = testkit::http::get(&format!("{address}:{CLIENT_PORT}"), "/metrics", LONG);
            page.is_ok_and(|page| page.body.contains("\netcd_server_is_leader 1\n"))
        };
        self.members.iter().position(|(at, _)| leads(at)).context("no member leads")
    }

    fn freeze(&self, at: usize) -> Result<()> {
        self.members[at].1.signal(Signal::SIGSTOP)
    }

    fn thaw(&self, at: usize) -> Result<()> {
        self.members[at].1.signal(Signal::SIGCONT)
    }
}

/// Three servers of one cluster.
fn servers(etcd: &Etcd) -> Result<Vec<Server>> {
    let endpoints = etcd.endpoints();
    let first = Server::start(&["--datastore-endpoint", &endpoints])?;
    let mut all = vec![];
    for _ in 1..3 {
        let mut server = Server::prepared()?;
        copy(&first.data(), &server.data())?;
        server.launch_with(&["--datastore-endpoint", &endpoints])?;
        server.ready()?;
        all.push(server);
    }
    all.insert(0, first);
    Ok(all)
}

fn none_has_ended(servers: &mut [Server]) -> Result<()> {
    for server in servers {
        if let Some(status) = server.has_ended()? {
            bail!("a server ended: {status}\n{}", server.log());
        }
    }
    Ok(())
}

/// The results of a server's writers.
#[derive(Debug, Default)]
struct Seen {
    written: AtomicUsize,
    failed: AtomicUsize,
    /// The longest time without an acknowledged write.
    pause: Mutex<Duration>,
}

impl Seen {
    fn failed(&self) -> usize {
        self.failed.load(Ordering::Relaxed)
    }

    fn pause(&self) -> Duration {
        *self.pause.lock().expect("no panic")
    }
}

/// Writers for each server.
const WRITERS: usize = 4;
/// A Lease expires after 15 s; its holder gives up after 10 s without a renewal.
const FROZEN: Duration = Duration::from_secs(25);

/// Writes to all servers during `trouble`; returns the results of each.
fn write_during(clients: &[ApiClient], trouble: impl FnOnce() -> Result<()>) -> Result<Vec<Seen>> {
    let all: Vec<Seen> = clients.iter().map(|_| Seen::default()).collect();
    let end = End::default();
    std::thread::scope(|scope| {
        for (number, (client, seen)) in clients.iter().zip(&all).enumerate() {
            let last = std::sync::Arc::new(Mutex::new(wait::now()));
            for writer in 0..WRITERS {
                let (end, last) = (&end, last.clone());
                scope.spawn(move || {
                    let name = format!("w{number}-{writer}-{}", base::rng::uuid());
                    write(client, &name, seen, end, &last);
                });
            }
        }
        let outcome = trouble();
        end.come();
        outcome
    })?;
    Ok(all)
}

/// The end of the test; writers wait for it between two writes.
#[derive(Default)]
struct End(Mutex<bool>, Condvar);

impl End {
    fn come(&self) {
        *self.0.lock().expect("no panic") = true;
        self.1.notify_all();
    }

    /// Whether it comes within [`PACE`].
    fn comes(&self) -> bool {
        let has_come = self.0.lock().expect("no panic");
        let waited = self.1.wait_timeout_while(has_come, PACE, |has_come| !*has_come);
        *waited.expect("no panic").0
    }
}

/// Pause between two writes of one writer.
const PACE: Duration = Duration::from_millis(100);

fn write(client: &ApiClient, name: &str, seen: &Seen, end: &End, last: &Mutex<Instant>) {
    let path = "/api/v1/namespaces/default/configmaps";
    let mut connection = Connection::new(client.clone(), LONG);
    let json = [("Content-Type", "application/json")];
    for number in 0.. {
        if end.comes() {
            return;
        }
        let map = json!({"metadata": {"name": format!("{name}-{number}")}}).to_string();
        match connection.send("POST", path, &json, map.as_bytes()) {
            Ok(answer) if answer.status == 201 => {
                seen.written.fetch_add(1, Ordering::Relaxed);
                let now = wait::now();
                let before = std::mem::replace(&mut *last.lock().expect("no panic"), now);
                let mut pause = seen.pause.lock().expect("no panic");
                *pause = pause.max(now - before);
            }
            _ => {
                seen.failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[test]
fn a_frozen_member_costs_no_server_and_few_writes() -> Result<()> {
    let Some(program) = program() else { return Ok(()) };
    let etcd = Etcd::start(&program)?;
    let mut servers = servers(&etcd)?;
    let leader = wait::until(LONG, "etcd has a leader", || etcd.leader())?;
    for (what, at) in [("a follower", (leader + 1) % 3), ("the leader", leader)] {
        let clients = servers.iter().map(Server::api).collect::<Result<Vec<_>>>()?;
        let seen = write_during(&clients, || {
            etcd.freeze(at)?;
            let lasts =
                wait::throughout(FROZEN, "all servers run", || none_has_ended(&mut servers));
            etcd.thaw(at)?;
            lasts
        })?;
        println!("{what} frozen: {seen:?}");
        let failed: usize = seen.iter().map(Seen::failed).sum();
        // The writes that were in flight.
        ensure!(failed <= 3 * WRITERS, "{failed} writes failed while {what} was frozen");
        let pause = seen.iter().map(Seen::pause).max().unwrap_or_default();
        ensure!(pause < Duration::from_secs(12), "no write for {pause:?} while {what} was frozen");
        wait::until(LONG, "etcd has a leader", || etcd.leader())?;
    }
    works(&servers[1])?;
    for server in &servers {
        ensure!(server.lines_about("leadership lost") == 0, "{}", server.log());
    }
    Ok(())
}

/// Longer than upstream's API server needs to notice a dead connection to etcd: 40 s. Until then it sends
/// every third call to a frozen member.
const UNNOTICED: Duration = Duration::from_secs(45);

/// Both servers use one etcd at the same time, so that both meet the same failure.
#[test]
fn a_frozen_member_costs_no_more_writes_than_upstreams_server() -> Result<()> {
    let (Some(program), Some(upstream)) = (program(), places::kube_apiserver()) else {
        println!("skipped: no kube-apiserver in the cache (cargo xtask kube-apiserver)");
        return Ok(());
    };
    let etcd = Etcd::start(&program)?;
    let address = places::own_loopback();
    let (endpoints, names) = (etcd.endpoints(), address.to_string());
    let mut ours = Server::start(&["--datastore-endpoint", &endpoints, "--tls-san", &names])?;
    let (_theirs, theirs) = upstreams(&upstream, address, &etcd, &ours)?;
    let leader = wait::until(LONG, "etcd has a leader", || etcd.leader())?;
    for (what, at) in [("a follower", (leader + 1) % 3), ("the leader", leader)] {
        let clients = [ours.api()?, theirs.clone()];
        let seen = write_during(&clients, || {
            etcd.freeze(at)?;
            let lasts = wait::throughout(UNNOTICED, "our server runs", || {
                none_has_ended(std::slice::from_mut(&mut ours))
            });
            etcd.thaw(at)?;
            lasts
        })?;
        let [here, there] = &seen[..] else { bail!("two servers") };
        println!("{what} frozen: ours {here:?}, upstream's {there:?}");
        let (lost, lost_there) = (here.failed(), there.failed());
        ensure!(lost <= lost_there, "{what} frozen: {lost} writes failed, {lost_there} upstream");
        let (pause, pause_there) = (here.pause(), there.pause());
        // An election stops both.
        let most = pause_there + Duration::from_secs(1);
        ensure!(pause <= most, "{what} frozen: no write for {pause:?}, {pause_there:?} upstream");
        wait::until(LONG, "etcd has a leader", || etcd.leader())?;
    }
    Ok(())
}

/// Upstream's API server with the keys of ours, and a client of its administrator.
fn upstreams(
    program: &Path,
    address: Ipv4Addr,
    etcd: &Etcd,
    ours: &Server,
) -> Result<(Running, ApiClient)> {
    const PORT: u16 = 6443;
    let mut command = Command::new(program);
    command.args(["--bind-address", &address.to_string(), "--advertise-address", "192.0.2.9"]);
    command.args(["--secure-port", &PORT.to_string(), "--etcd-servers", &etcd.endpoints()]);
    command.args(["--service-cluster-ip-range", "10.43.0.0/16", "--authorization-mode", "RBAC"]);
    command.args(["--service-account-issuer", "https://kubernetes.default.svc"]);
    command.args(["--endpoint-reconciler-type", "none"]);
    let pki = ours.data().join("pki");
    for (flag, file) in [
        ("--client-ca-file", "ca.crt"),
        ("--tls-cert-file", "apiserver.crt"),
        ("--tls-private-key-file", "apiserver.key"),
        ("--service-account-key-file", "sa.pub"),
        ("--service-account-signing-key-file", "sa.key"),
    ] {
        command.arg(flag).arg(pki.join(file));
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = Running(command.spawn()?);
    let own = ours.kubeconfig()?;
    let server = own.lines().find_map(|line| line.trim().strip_prefix("server: "));
    let server = server.context("the kubeconfig names no server")?;
    let text = own.replace(server, &format!("https://{address}:{PORT}"));
    let client = ApiClient::from_kubeconfig(&text)?;
    wait::until(LONG, "upstream's server is ready", || {
        let answer = client.get("/readyz", LONG)?;
        ensure!(answer.status == 200, "{}", answer.body);
        Ok(())
    })?;
    Ok((process, client))
}

/// Upstream's controller manager and scheduler end then, and its API server continues.
#[test]
fn a_lost_lease_ends_no_server() -> Result<()> {
    let Some(program) = program() else { return Ok(()) };
    let etcd = Etcd::start(&program)?;
    let mut servers = servers(&etcd)?;
    etcd.freeze(0)?;
    etcd.freeze(1)?;
    let lost = wait::until(LONG, "Leases are lost", || {
        let lines: u64 = servers.iter().map(|server| server.lines_about("leadership lost")).sum();
        ensure!(lines >= 2, "{lines} are");
        Ok(())
    });
    etcd.thaw(0)?;
    etcd.thaw(1)?;
    lost?;
    none_has_ended(&mut servers)?;
    works(&servers[0])?;
    none_has_ended(&mut servers)
}

/// The controllers of some server work.
fn works(server: &Server) -> Result<()> {
    let name = format!("d{}", base::rng::alphanumeric(8));
    let pod = json!({"metadata": {"labels": {"app": name}},
        "spec": {"containers": [{"name": "c", "image": "none"}]}});
    let deployment = json!({"metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": name}}, "template": pod}});
    let base = "/apis/apps/v1/namespaces/default";
    let created = wait::until(LONG, "a deployment is created", || {
        let deployments = format!("{base}/deployments");
        let answer = server.api()?.post(&deployments, &deployment.to_string(), LONG)?;
        ensure!(matches!(answer.status, 201 | 409), "{}", answer.body);
        Ok(())
    });
    created?;
    wait::until(LONG, "its replica set is made", || {
        let path = format!("{base}/replicasets?labelSelector=app%3D{name}");
        let list: Value = serde_json::from_str(&server.api()?.get(&path, LONG)?.body)?;
        ensure!(list["items"].as_array().is_some_and(|all| !all.is_empty()), "{list}");
        Ok(())
    })
}
