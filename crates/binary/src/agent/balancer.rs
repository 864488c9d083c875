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
//! Invariants: a list is never replaced by an empty one, and the servers of `--server` stay in it as the
//! last ones. Connections to a server that no longer answers are cut, so that clients go to another one. If
//! no server is well, all are tried.
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
use k8s_openapi::api::discovery::v1::EndpointSlice;
use machinery::selector::Selector;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use transport::{ClientOptions, HttpClient};

use super::certificates::Home;

const FILE: &str = "servers";
const CONNECT: Duration = Duration::from_secs(1);
/// Between two checks of a server that is in use and well.
const CHECK: Duration = Duration::from_secs(5);
/// Between two checks of a server that failed.
const CHECK_FAILED: Duration = Duration::from_secs(1);
const ANSWER: Duration = Duration::from_secs(2);
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
    is_well: bool,
    connections: usize,
    /// Raised to cut its connections.
    cut: watch::Sender<()>,
}

impl Default for Server {
    fn default() -> Self {
        Self { is_well: true, connections: 0, cut: watch::Sender::new(()) }
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
        all.sort_by_key(|at| !self.known.get(at).is_none_or(|server| server.is_well));
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
                known.retain(|at, _| learned.contains(at) || given.contains(at));
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
            // Also if it is no longer in the list: then its sender is dropped.
            _ = cut.changed() => {}
        }
        if let Some(known) = self.state().known.get_mut(&at) {
            known.connections = known.connections.saturating_sub(1);
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
                Err(error) => self.failed(&at, &error.to_string()),
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

    /// Prefers other servers from now on, and cuts the connections to this one if another is well.
    fn failed(&self, at: &str, why: &str) {
        let mut state = self.state();
        if !std::mem::replace(&mut state.server(at).is_well, false) {
            return;
        }
        let is_well = |at: &String| state.known.get(at).is_none_or(|server| server.is_well);
        if state.order(&self.node).iter().any(is_well) {
            state.server(at).cut.send_replace(());
        }
        drop(state);
        tracing::warn!(server = at, why, "an API server does not answer, using another one");
        self.changed.notify_one();
    }

    async fn check_all(&self, ca_pem: &str) {
        let mut clients: BTreeMap<String, HttpClient> = BTreeMap::new();
        loop {
            let (due, is_any_failed) = {
                let state = self.state();
                let is_due =
                    |(_, server): &(&String, &Server)| server.connections > 0 || !server.is_well;
                let due: Vec<String> =
                    state.known.iter().filter(is_due).map(|(at, _)| at.clone()).collect();
                (due, state.known.values().any(|server| !server.is_well))
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
            for (at, outcome) in futures::future::join_all(checks).await {
                match outcome {
                    Ok(()) => self.well(at),
                    Err(why) => self.failed(at, &why),
                }
            }
            let pause = if is_any_failed { CHECK_FAILED } else { CHECK };
            tokio::time::sleep(CHECK_FAILED).await;
            // Until the time is over, or the list is another.
            let rest = pause.saturating_sub(CHECK_FAILED);
            let _ = tokio::time::timeout(rest, self.changed.notified()).await;
        }
    }

    fn well(&self, at: &str) {
        let mut state = self.state();
        let server = state.server(at);
        if !std::mem::replace(&mut server.is_well, true) {
            drop(state);
            tracing::info!(server = at, "an API server answers again");
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
    let mut last = io::Error::other("the name has no address");
    let resolved = tokio::time::timeout(CONNECT, tokio::net::lookup_host(at)).await;
    for address in resolved.map_err(|_| io::Error::other("the name was not resolved in time"))?? {
        match tokio::time::timeout(CONNECT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::other("no connection in time"),
        }
    }
    Err(last)
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

async fn ready(client: &HttpClient) -> Result<(), String> {
    let request = http::Request::get("/readyz").body(transport::empty());
    let request = request.map_err(|error| error.to_string())?;
    match tokio::time::timeout(ANSWER, client.request(request)).await {
        // A server that wants an identity for this lives, too.
        Ok(Ok(answer)) if answer.status().is_server_error() => {
            Err(format!("/readyz: {}", answer.status()))
        }
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("/readyz: no answer within {ANSWER:?}")),
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
        state.server("b:6443").is_well = false;
        assert!((0..50).all(|node| state.order(&format!("n{node}"))[3] == "b:6443"));
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
        balancer.failed(&a, "frozen");
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0, "the connection ends");
        assert_eq!(answer(&balancer).await.0, "b");
        balancer.well(&a);
        let (name, mut stream) = answer(&balancer).await;
        assert_eq!(name, "a");
        first.shutdown(Duration::from_secs(5)).await;
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0, "the connection ends");
        let (name, _stream) = answer(&balancer).await;
        assert_eq!(name, "b");
        balancer.failed(&b, "frozen");
        assert_eq!(answer(&balancer).await.0, "b", "there is no other");
        assert_eq!(balancer.reachable().await, format!("https://{b}"));

        let port = |at: &str| at.rsplit(':').next().and_then(|port| port.parse().ok());
        let slice = |addresses: &[&str], port: Option<i32>| {
            let slice = serde_json::json!({"addressType": "IPv4", "metadata": {"name": "kubernetes"},
                "endpoints": [{"addresses": addresses}], "ports": [{"port": port}]});
            Arc::new(serde_json::from_value(slice).expect("a slice"))
        };
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
