//! The agent's balancer: one local address, behind which any live API server answers.
//!
//! ```text
//! kubelet, proxy, DNS, pods of the host network ─► 127.0.0.1:6444 ─► the first server that lives
//!                                                        ▲
//!   --server, <data-dir>/agent/servers, EndpointSlices of Service kubernetes
//! ```
//!
//! In: the servers of `--server`, later those of the endpoints, which are kept on the disk. Out: a URL that
//! stays the same. TLS is the clients': the balancer passes bytes on and holds no key.
//!
//! ```text
//! well ──► leaving: /readyz says that it shuts down     no new connections; it ends the old ones by itself
//!   ├────► gone:    it refuses connections              the same: its kernel ends those of a dead process
//!   ├────► unready: /readyz fails for another reason    no new connections; after UNREADY the old ones are cut
//!   └────► silent:  no answer in time                   the old ones are cut at once
//! ```
//!
//! Invariants: a list is never replaced by an empty one, and the servers of `--server` stay in it as the
//! last ones. Connections to a server that no longer answers are cut, so that clients go to another one; those to a
//! server that stops are not, so that it can answer the requests that it has. If no server is well, all are tried.
//!
//! Each node has its own order of servers, so that nodes spread over them. Cost: a request of `/readyz`
//! every [`CHECK`] to the server in use, and every second to one that failed. A dead process refuses
//! connections at once; the kernel notices a dead machine after [`SILENCE`].

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, bail};
use base::task::Tasks;
use client::{Client, Informers};
use http_body_util::{BodyExt, Limited};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use machinery::selector::Selector;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use transport::{ClientOptions, HttpClient};

use super::certificates::Home;

const FILE: &str = "servers";
const CONNECT: Duration = Duration::from_secs(1);
/// Between two checks of a server that is in use and well.
const CHECK: Duration = Duration::from_secs(5);
/// Between two checks of a server that failed.
const CHECK_FAILED: Duration = Duration::from_secs(1);
const ANSWER: Duration = Duration::from_secs(2);
/// How long a server may answer that it is not ready before its connections are cut: longer than an election of
/// etcd, which makes all servers unready, and which an exec or a port-forward should survive.
const UNREADY: Duration = Duration::from_secs(3);
/// How long a server that shuts down may be silent, because it is busy with its last requests.
const LEAVES: Duration = Duration::from_secs(15);
/// In the answer of a server that shuts down.
const SHUTS_DOWN: &str = "[-]shutdown failed";
/// More than the list of all checks.
const ANSWER_BYTES: usize = 64 << 10;
/// A connection whose packets are not confirmed for this long is cut.
const SILENCE: Duration = Duration::from_secs(2);
/// Connections at once: those of a node's components and of pods on its network.
const CONNECTIONS: usize = 1024;
/// The label of the slices of Service `kubernetes`.
const SLICES: &str = "kubernetes.io/service-name=kubernetes";

pub struct Balancer {
    /// The node's name: another order of servers for each node.
    node: String,
    home: Arc<Home>,
    url: String,
    /// Held for a few assignments, never across an await.
    state: Mutex<State>,
    /// The list changed.
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// `host:port`, from `--server`.
    given: Vec<String>,
    learned: Vec<String>,
    known: BTreeMap<String, Server>,
}

struct Server {
    standing: Standing,
    connections: usize,
    /// Raised to cut its connections.
    cut: watch::Sender<()>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Standing {
    Well,
    Leaving { since: Instant },
    Gone,
    Unready { since: Instant, is_cut: bool },
    Silent,
}

/// What a check found.
#[derive(Debug, PartialEq)]
enum Found {
    Ready,
    Leaving,
    Gone(String),
    Unready(String),
    Silent(String),
}

impl Default for Server {
    fn default() -> Self {
        Self { standing: Standing::Well, connections: 0, cut: watch::Sender::new(()) }
    }
}

impl Server {
    fn is_well(&self) -> bool {
        self.standing == Standing::Well
    }

    /// The standing after a check, and whether connections are to be cut. Pure.
    fn after(&self, found: &Found, now: Instant) -> (Standing, bool) {
        match found {
            Found::Ready => (Standing::Well, false),
            Found::Leaving => match self.standing {
                Standing::Leaving { .. } => (self.standing, false),
                _ => (Standing::Leaving { since: now }, false),
            },
            Found::Gone(_) => (Standing::Gone, false),
            Found::Silent(_) => match self.standing {
                Standing::Leaving { since } if now - since < LEAVES => (self.standing, false),
                Standing::Silent => (Standing::Silent, false),
                _ => (Standing::Silent, true),
            },
            Found::Unready(_) => {
                let (since, was_cut) = match self.standing {
                    Standing::Unready { since, is_cut } => (since, is_cut),
                    // It answers again, on connections that are new.
                    Standing::Silent => (now, true),
                    _ => (now, false),
                };
                let is_due = !was_cut && now - since >= UNREADY;
                (Standing::Unready { since, is_cut: was_cut || is_due }, is_due)
            }
        }
    }
}

impl State {
    fn server(&mut self, at: &str) -> &mut Server {
        self.known.entry(at.to_owned()).or_default()
    }

    /// All servers in the order in which they are tried. Pure.
    fn order(&self, node: &str) -> Vec<String> {
        let mut learned = self.learned.clone();
        learned.sort_by_cached_key(|at| {
            let mut hash = DefaultHasher::new();
            (node, at).hash(&mut hash);
            hash.finish()
        });
        let others = self.given.iter().filter(|at| !self.learned.contains(at)).cloned();
        let mut all: Vec<String> = learned.into_iter().chain(others).collect();
        all.sort_by_key(|at| !self.known.get(at).is_none_or(Server::is_well));
        all
    }
}

impl Balancer {
    /// Listens on the port of the loopback address.
    pub async fn start(
        given: Vec<String>,
        node: &str,
        home: &Arc<Home>,
        port: u16,
        tasks: &Tasks,
    ) -> anyhow::Result<Arc<Self>> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address} for the servers' balancer; choose another port with --lb-server-port")
        })?;
        let address = listener.local_addr().context("a listener has an address")?;
        let learned = home.read(FILE).unwrap_or_default();
        let learned = learned.lines().map(str::to_owned).collect();
        let balancer = Arc::new(Self {
            node: node.to_owned(),
            home: home.clone(),
            url: format!("https://{address}"),
            state: Mutex::new(State { given, learned, known: BTreeMap::new() }),
            changed: Notify::new(),
        });
        tasks.spawn("balancer", balancer.clone().serve(listener, tasks.clone()));
        Ok(balancer)
    }

    /// The same for the life of the node: the DNS process keeps it longer than this process runs.
    pub fn url(&self) -> &str {
        &self.url
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Follows the endpoints, and checks the servers in use.
    pub fn follow(self: &Arc<Self>, client: Client, ca_pem: &str, tasks: &Tasks) {
        let informers = Informers::new(client, tasks.clone());
        let slices = informers.scoped::<EndpointSlice>(Some("default"), "", SLICES);
        let told = Arc::new(Notify::new());
        let tell = told.clone();
        slices.subscribe_raw(move |_| tell.notify_one());
        let learning = self.clone();
        tasks.spawn("servers of the cluster", async move {
            // Both live as long as the task.
            let (_informers, lister) = (informers, slices.lister());
            loop {
                told.notified().await;
                learning.learn(&lister.list(None, &Selector::everything()));
            }
        });
        let (checking, ca_pem) = (self.clone(), ca_pem.to_owned());
        tasks.spawn("checks of servers", async move { checking.check_all(&ca_pem).await });
    }

    fn learn(&self, slices: &[Arc<EndpointSlice>]) {
        let mut all = addresses(slices);
        all.sort_unstable();
        let is_new = {
            let mut state = self.state();
            let is_new = !all.is_empty() && all != state.learned;
            if is_new {
                state.learned.clone_from(&all);
                let State { given, learned, known } = &mut *state;
                // One that has left the list may still answer the requests that it has.
                known.retain(|at, server| {
                    server.connections > 0 || learned.contains(at) || given.contains(at)
                });
            }
            is_new
        };
        if !is_new {
            return;
        }
        tracing::info!(servers = all.join(" "), "the cluster's API servers");
        if let Err(error) = self.home.write(FILE, &all.join("\n")) {
            tracing::warn!(%error, "failed to write the list of API servers");
        }
        self.changed.notify_one();
    }

    async fn serve(self: Arc<Self>, listener: TcpListener, tasks: Tasks) {
        let places = Arc::new(tokio::sync::Semaphore::new(CONNECTIONS));
        loop {
            let place = places.clone().acquire_owned().await.expect("it is never closed");
            match listener.accept().await {
                Ok((stream, _)) => {
                    let balancer = self.clone();
                    tasks.spawn_contained("balanced connection", async move {
                        let _place = place;
                        balancer.pass(stream).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the balancer failed to accept a connection");
                    tokio::time::sleep(CHECK_FAILED).await;
                }
            }
        }
    }

    /// Passes the bytes of one connection on. Without any server it ends at once, and the client retries.
    async fn pass(&self, mut client: TcpStream) {
        let Some((at, mut server)) = self.connect().await else { return };
        let mut cut = {
            let mut state = self.state();
            let known = state.server(&at);
            known.connections += 1;
            known.cut.subscribe()
        };
        // An error means that one of the ends is gone already.
        let _ = client.set_nodelay(true);
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
            _ = cut.changed() => {}
        }
        let mut state = self.state();
        let Some(known) = state.known.get_mut(&at) else { return };
        known.connections = known.connections.saturating_sub(1);
        if known.connections == 0 && !state.learned.contains(&at) && !state.given.contains(&at) {
            state.known.remove(&at);
        }
    }

    async fn connect(&self) -> Option<(String, TcpStream)> {
        let order = self.state().order(&self.node);
        let has_others = order.len() > 1;
        for at in order {
            match dial(&at).await {
                Ok(stream) => {
                    if let Err(error) = watched(&stream, has_others) {
                        tracing::debug!(%error, server = at, "no limit for silence");
                    }
                    return Some((at, stream));
                }
                Err(error) => self.checked(&at, &undialled(&error)),
            }
        }
        None
    }

    /// The URL of the first server that accepts connections, those of `--server` before others; the first
    /// one if none does.
    pub async fn reachable(&self) -> String {
        let all: Vec<String> = {
            let state = self.state();
            state.given.iter().chain(&state.learned).cloned().collect()
        };
        for at in &all {
            if dial(at).await.is_ok() {
                return format!("https://{at}");
            }
        }
        all.first().map(|at| format!("https://{at}")).unwrap_or_default()
    }

    /// Takes a check's result: prefers other servers if it failed, and cuts the connections if that is due and
    /// another server is well.
    fn checked(&self, at: &str, found: &Found) {
        let mut state = self.state();
        let (standing, is_due) = state.server(at).after(found, Instant::now());
        let before = std::mem::replace(&mut state.server(at).standing, standing);
        let is_well = |at: &String| state.known.get(at).is_none_or(Server::is_well);
        if is_due && state.order(&self.node).iter().any(is_well) {
            state.server(at).cut.send_replace(());
        }
        drop(state);
        if std::mem::discriminant(&before) == std::mem::discriminant(&standing) {
            return;
        }
        match found {
            Found::Ready => tracing::info!(server = at, "an API server answers again"),
            Found::Leaving => tracing::info!(server = at, "an API server stops, using another one"),
            Found::Gone(why) | Found::Unready(why) | Found::Silent(why) => {
                tracing::warn!(
                    server = at,
                    why,
                    "an API server does not answer, using another one"
                );
            }
        }
        self.changed.notify_one();
    }

    async fn check_all(&self, ca_pem: &str) {
        let mut clients: BTreeMap<String, HttpClient> = BTreeMap::new();
        loop {
            let (due, is_any_failed) = {
                let state = self.state();
                let is_due =
                    |(_, server): &(&String, &Server)| server.connections > 0 || !server.is_well();
                let due: Vec<String> =
                    state.known.iter().filter(is_due).map(|(at, _)| at.clone()).collect();
                (due, state.known.values().any(|server| !server.is_well()))
            };
            clients.retain(|at, _| due.contains(at));
            for at in &due {
                if let (None, Ok(client)) = (clients.get(at), checker(at, ca_pem)) {
                    clients.insert(at.clone(), client);
                }
            }
            let checks = due.iter().filter_map(|at| {
                let client = clients.get(at)?.clone();
                Some(async move { (at, ready(&client).await) })
            });
            for (at, found) in futures::future::join_all(checks).await {
                self.checked(at, &found);
            }
            let pause = if is_any_failed { CHECK_FAILED } else { CHECK };
            tokio::time::sleep(CHECK_FAILED).await;
            // Until the time is over, or the list is another.
            let rest = pause.saturating_sub(CHECK_FAILED);
            let _ = tokio::time::timeout(rest, self.changed.notified()).await;
        }
    }
}

/// `host:port` of a server's URL.
pub fn host_port(url: &str) -> anyhow::Result<String> {
    let uri: Option<http::Uri> = url.parse().ok();
    let uri = uri.filter(|uri| uri.scheme_str() == Some("https"));
    let Some(authority) = uri.as_ref().and_then(http::Uri::authority) else {
        bail!("--server {url}: expected a URL, for example https://192.168.0.1:6443");
    };
    Ok(match authority.port() {
        Some(_) => authority.to_string(),
        None => format!("{authority}:443"),
    })
}

/// Tries all addresses of a name.
async fn dial(at: &str) -> io::Result<TcpStream> {
    let late = |what: &str| io::Error::new(io::ErrorKind::TimedOut, what);
    let mut last = io::Error::other("the name has no address");
    let resolved = tokio::time::timeout(CONNECT, tokio::net::lookup_host(at)).await;
    for address in resolved.map_err(|_| late("the name was not resolved in time"))?? {
        match tokio::time::timeout(CONNECT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = late("no connection in time"),
        }
    }
    Err(last)
}

/// A machine that answers has ended the connections of a dead process by itself.
fn undialled(error: &io::Error) -> Found {
    use io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    match error.kind() {
        HostUnreachable | NetworkUnreachable | TimedOut => Found::Silent(error.to_string()),
        _ => Found::Gone(error.to_string()),
    }
}

/// `host:port` of the endpoints that are ready.
fn addresses(slices: &[Arc<EndpointSlice>]) -> Vec<String> {
    let mut all = vec![];
    for slice in slices {
        let port = slice.ports.iter().flatten().find_map(|port| port.port);
        let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else { continue };
        for endpoint in slice.endpoints.iter().flatten() {
            let conditions = endpoint.conditions.as_ref();
            if conditions.and_then(|conditions| conditions.ready) == Some(false) {
                continue;
            }
            let parsed = endpoint.addresses.iter().filter_map(|address| address.parse().ok());
            all.extend(parsed.map(|ip| SocketAddr::new(ip, port).to_string()));
        }
    }
    all
}

/// A client for checks alone: it shows no identity.
fn checker(at: &str, ca_pem: &str) -> anyhow::Result<HttpClient> {
    let options = ClientOptions {
        server: format!("https://{at}"),
        ca_pem: Some(ca_pem.to_owned()),
        ..ClientOptions::default()
    };
    Ok(HttpClient::new(&options)?)
}

async fn ready(client: &HttpClient) -> Found {
    let Ok(request) = http::Request::get("/readyz").body(transport::empty()) else {
        return Found::Gone("/readyz: no request".into());
    };
    let asked = async {
        let answer = match client.request(request).await {
            Ok(answer) => answer,
            Err(error) => return Found::Gone(error.to_string()),
        };
        let status = answer.status();
        // A server that wants an identity for this lives, too.
        if !status.is_server_error() {
            return Found::Ready;
        }
        let body = Limited::new(answer.into_body(), ANSWER_BYTES).collect().await;
        let text = body.map(|body| body.to_bytes()).unwrap_or_default();
        unready(status, &String::from_utf8_lossy(&text))
    };
    let late = |_| Found::Silent(format!("/readyz: no answer within {ANSWER:?}"));
    tokio::time::timeout(ANSWER, asked).await.unwrap_or_else(late)
}

fn unready(status: http::StatusCode, text: &str) -> Found {
    match text.lines().any(|line| line.starts_with(SHUTS_DOWN)) {
        true => Found::Leaving,
        false => Found::Unready(format!("/readyz: {status}")),
    }
}

/// Has the kernel look after a quiet connection, and end it after [`SILENCE`] if there are other servers.
fn watched(stream: &TcpStream, has_others: bool) -> io::Result<()> {
    use nix::libc;
    stream.set_nodelay(true)?;
    if !has_others {
        return Ok(());
    }
    let seconds = SILENCE.as_secs() as libc::c_int;
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, seconds),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, seconds * 1000),
    ];
    for (level, name, value) in options {
        let size = size_of::<libc::c_int>() as libc::socklen_t;
        let from = (&raw const value).cast();
        // SAFETY: the descriptor is open, and the value lives longer than the call.
        if unsafe { libc::setsockopt(stream.as_raw_fd(), level, name, from, size) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn state(given: &[&str], learned: &[&str]) -> State {
        let all = |names: &[&str]| names.iter().map(|one| (*one).to_owned()).collect();
        State { given: all(given), learned: all(learned), known: BTreeMap::new() }
    }

    #[test]
    fn urls_are_checked() {
        for (url, expected) in [
            ("https://192.168.0.1:6443", "192.168.0.1:6443"),
            ("https://[fd00::1]:6443/", "[fd00::1]:6443"),
            ("https://name", "name:443"),
        ] {
            assert_eq!(host_port(url).expect("fits"), expected);
        }
        for bad in ["", "192.168.0.1:6443", "http://a:6443", "https://"] {
            assert!(host_port(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn nodes_spread_and_failed_servers_come_last() {
        let mut state = state(&["vip:6443", "a:6443"], &["a:6443", "b:6443", "c:6443"]);
        let mut firsts = std::collections::BTreeSet::new();
        for node in 0..50 {
            let order = state.order(&format!("n{node}"));
            assert_eq!((order.len(), order[3].as_str()), (4, "vip:6443"));
            firsts.insert(order[0].clone());
        }
        assert_eq!(firsts.len(), 3, "each is the first of some nodes");
        state.server("b:6443").standing = Standing::Gone;
        assert!((0..50).all(|node| state.order(&format!("n{node}"))[3] == "b:6443"));
    }

    #[tokio::test(start_paused = true)]
    async fn an_election_cuts_no_connection_and_a_long_failure_does() {
        let unready = || Found::Unready("etcd".into());
        let mut server = Server::default();
        let mut check = |after: Duration, found: Found, is_well: bool, cuts: bool| {
            let (standing, is_due) = server.after(&found, Instant::now() + after);
            server.standing = standing;
            assert_eq!((server.is_well(), is_due), (is_well, cuts), "{found:?} after {after:?}");
        };
        let seconds = Duration::from_secs;
        check(seconds(0), unready(), false, false);
        check(seconds(2), unready(), false, false);
        check(seconds(4), Found::Ready, true, false);
        check(seconds(8), unready(), false, false);
        check(seconds(13), unready(), false, true);
        check(seconds(14), unready(), false, false);
        check(seconds(15), Found::Silent("frozen".into()), false, true);
        check(seconds(16), Found::Silent("frozen".into()), false, false);
        check(seconds(17), Found::Ready, true, false);
        // One that shuts down has closed its port, and still answers the requests that it has.
        check(seconds(20), Found::Leaving, false, false);
        check(seconds(21), Found::Silent("busy".into()), false, false);
        check(seconds(22), Found::Gone("refused".into()), false, false);
        check(seconds(23), Found::Gone("refused".into()), false, false);
        check(seconds(24), Found::Ready, true, false);
        check(seconds(25), Found::Leaving, false, false);
        check(seconds(39), Found::Leaving, false, false);
        check(seconds(41), Found::Silent("frozen".into()), false, true);
    }

    #[tokio::test]
    async fn a_port_without_a_listener_is_no_silence() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("it listens").to_string();
        drop(listener);
        let error = dial(&at).await.expect_err("nothing listens");
        assert!(matches!(undialled(&error), Found::Gone(_)), "{error}");
        let late = io::Error::new(io::ErrorKind::TimedOut, "no connection in time");
        assert!(matches!(undialled(&late), Found::Silent(_)));
    }

    #[test]
    fn a_server_that_shuts_down_says_so() {
        let status = http::StatusCode::INTERNAL_SERVER_ERROR;
        let text = "[+]ping ok\n[-]shutdown failed: reason withheld\nreadyz check failed\n";
        assert_eq!(unready(status, text), Found::Leaving);
        let text = "[+]ping ok\n[-]etcd failed: reason withheld\n[+]shutdown ok\n";
        assert!(matches!(unready(status, text), Found::Unready(_)));
    }

    /// A server that answers each connection with its name.
    async fn named(name: &'static str) -> (String, Tasks) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("it listens").to_string();
        let own = Tasks::new(name);
        let held = own.clone();
        own.spawn("server", async move {
            loop {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                held.spawn_contained("connection", async move {
                    let _ = stream.write_all(name.as_bytes()).await;
                    let _ = stream.read(&mut [0]).await;
                });
            }
        });
        (at, own)
    }

    async fn answer(balancer: &Balancer) -> (String, TcpStream) {
        let at = balancer.url().trim_start_matches("https://");
        let mut stream = TcpStream::connect(at).await.expect("it listens");
        let mut name = [0; 1];
        stream.read_exact(&mut name).await.expect("an answer");
        (String::from_utf8_lossy(&name).into_owned(), stream)
    }

    #[tokio::test]
    async fn connections_move_to_a_server_that_lives() {
        let directory = tempfile::tempdir().expect("a directory");
        let home = Arc::new(Home::open(directory.path()).expect("a directory"));
        let tasks = Tasks::new("test");
        let ((a, first), (b, second)) = (named("a").await, named("b").await);
        let given = vec![a.clone(), b.clone()];
        let balancer = Balancer::start(given, "n1", &home, 0, &tasks).await.expect("it listens");
        assert_eq!(balancer.reachable().await, format!("https://{a}"));
        let (name, mut stream) = answer(&balancer).await;
        assert_eq!(name, "a");
        // A failed check cuts connections that are open.
        balancer.checked(&a, &Found::Silent("frozen".into()));
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0, "the connection ends");
        assert_eq!(answer(&balancer).await.0, "b");
        balancer.checked(&a, &Found::Ready);
        let (name, mut stream) = answer(&balancer).await;
        assert_eq!(name, "a");
        first.shutdown(Duration::from_secs(5)).await;
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0, "the connection ends");
        let (name, _stream) = answer(&balancer).await;
        assert_eq!(name, "b");
        balancer.checked(&b, &Found::Silent("frozen".into()));
        assert_eq!(answer(&balancer).await.0, "b", "there is no other");
        assert_eq!(balancer.reachable().await, format!("https://{b}"));

        let port = |at: &str| at.rsplit(':').next().and_then(|port| port.parse().ok());
        let slice = |addresses: &[&str], port: Option<i32>| {
            let slice = serde_json::json!({"addressType": "IPv4", "metadata": {"name": "kubernetes"},
                "endpoints": [{"addresses": addresses}], "ports": [{"port": port}]});
            Arc::new(serde_json::from_value(slice).expect("a slice"))
        };
        // The server leaves the endpoints: it may answer the requests that it has.
        let (name, mut held) = answer(&balancer).await;
        assert_eq!(name, "b");
        balancer.learn(&[slice(&["192.0.2.1"], Some(1))]);
        balancer.state().given.clear();
        let quiet = tokio::time::timeout(Duration::from_millis(100), held.read(&mut [0])).await;
        assert!(quiet.is_err(), "its connection stays");
        assert!(balancer.state().known.contains_key(&b), "it is still checked");
        balancer.learn(&[slice(&["127.0.0.1"], port(&b))]);
        balancer.learn(&[]);
        assert_eq!(home.read(FILE).as_deref(), Some(b.as_str()));
        second.shutdown(Duration::from_secs(5)).await;
        tasks.shutdown(Duration::from_secs(5)).await;
        // The next process knows the servers before it has asked any.
        let tasks = Tasks::new("test");
        let again = Balancer::start(vec![], "n1", &home, 0, &tasks).await.expect("it listens");
        assert_eq!(again.state().order("n1"), [b]);
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
