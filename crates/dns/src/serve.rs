//! The server: reads queries from sockets, sends answers.
//!
//! In: packets. Out: packets. The socket's task itself answers names of the zone, of lists of hosts and of the cache;
//! it never waits. A query for another server gets its own task; there are at most [`WAITING`] of them, and
//! [`WAITING_OF_ONE`] for one client. Invariants: a packet that is not a query gets no answer (or FORMERR), so that
//! two servers never answer each other endlessly. Answers fit the client's size limit. A client that does not read
//! loses its connection, and one client cannot hold all connections or all answers.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use base::task::Tasks;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
    sockopt,
};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::answers::{Answers, Reply, Step};
use crate::custom::Follower;
use crate::directory::Directory;
use crate::forward::{read_framed, read_resolvers, write_framed};
use crate::limits::{Peers, Rate};
use crate::metrics::{Metrics, Served, code_name, type_name};
use crate::resolve::Resolver;
use crate::settings::{Base, Block, Plan};
use crate::wire::{Malformed, Query, code, text};
use crate::zone::Zone;
use crate::{Config, Error, status};

/// The limits on queries that wait for other servers, and on TCP connections.
const WAITING: usize = 2048;
const CONNECTIONS: usize = 256;
/// The limits for one address.
const WAITING_OF_ONE: usize = 512;
const CONNECTIONS_OF_ONE: usize = 64;
/// The timeout for receiving a query and for sending its answer.
const IDLE: Duration = Duration::from_secs(10);
/// The largest query by UDP.
const LARGEST_QUERY: usize = 4096;
/// Of a socket: a burst of some thousand queries waits here while the task is busy.
const SOCKET_BUFFER: usize = 1 << 20;

/// The bound sockets of a server that does not run yet.
pub struct Bound {
    config: Config,
    zone: Zone,
    udp: Vec<UdpSocket>,
    tcp: Vec<TcpListener>,
    status: Vec<TcpListener>,
}

impl Bound {
    /// Binds all addresses.
    pub fn new(config: Config) -> Result<Self, Error> {
        let servers = config.bind.iter().map(SocketAddr::ip).collect();
        let zone = Zone::new(&config.domain, servers);
        let zone = zone.ok_or_else(|| Error::Domain(config.domain.clone()))?;
        let (mut udp, mut tcp) = (vec![], vec![]);
        for address in &config.bind {
            let failed = |source| Error::Listen { address: *address, source };
            let datagrams = open(*address, SockType::Datagram).map_err(failed)?;
            let datagrams: std::net::UdpSocket = datagrams.into();
            // Port 0: TCP uses the port that UDP got.
            let actual = datagrams.local_addr().map_err(failed)?;
            tcp.push(listener(actual).map_err(failed)?);
            udp.push(UdpSocket::from_std(datagrams).map_err(failed)?);
        }
        let mut status = vec![];
        for address in &config.status {
            match listener(*address) {
                Ok(listener) => status.push(listener),
                Err(error) => tracing::warn!(
                    %address, %error, "failed to listen for /metrics, /ready and /health of the DNS"
                ),
            }
        }
        Ok(Self { config, zone, udp, tcp, status })
    }

    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.udp.iter().filter_map(|socket| socket.local_addr().ok()).collect()
    }

    /// Where `/metrics`, `/ready` and `/health` are.
    pub fn status_addresses(&self) -> Vec<SocketAddr> {
        self.status.iter().filter_map(|listener| listener.local_addr().ok()).collect()
    }

    /// Starts the server as tasks of `tasks`. The follower gives it settings.
    pub(crate) fn serve(self, directory: Arc<dyn Directory>, tasks: &Tasks) -> Follower {
        let own = self.addresses();
        let Config { domain, upstreams, resolv_conf, per_client, .. } = self.config;
        let followed = upstreams.is_none().then_some(resolv_conf);
        let servers =
            upstreams.unwrap_or_else(|| followed.as_deref().map_or(vec![], read_resolvers));
        let base = Base { domain, servers, own };
        let shared = Shared::new(self.zone, directory, &base, per_client, tasks);
        for socket in self.udp {
            tasks.spawn("dns-udp", datagrams(shared.clone(), Arc::new(socket), tasks.clone()));
        }
        for listener in self.tcp {
            tasks.spawn("dns-tcp", connections(shared.clone(), listener, tasks.clone()));
        }
        for listener in self.status {
            status::serve(listener, shared.clone(), tasks);
        }
        Follower { base, resolv_conf: followed, user: shared }
    }
}

fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::from_std(open(address, SockType::Stream)?.into())
}

/// A socket bound to an address that may not exist (yet): the cluster's DNS address comes and goes
/// with the network.
fn open(address: SocketAddr, kind: SockType) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let socket = socket(family, kind, flags, None)?;
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    if address.is_ipv4() {
        setsockopt(&socket, sockopt::IpFreebind, &true)?;
    } else {
        setsockopt(&socket, sockopt::Ipv6V6Only, &true)?;
    }
    bind(std::os::fd::AsRawFd::as_raw_fd(&socket.as_fd()), &SockaddrStorage::from(address))?;
    if kind == SockType::Datagram {
        // As much as the system allows.
        let _ = setsockopt(&socket, sockopt::RcvBuf, &SOCKET_BUFFER);
    }
    if kind == SockType::Stream {
        listen(&socket, Backlog::new(128)?)?;
    }
    Ok(socket)
}

struct Shared {
    answers: Answers,
    metrics: Arc<Metrics>,
    rate: Rate,
    waiting: Arc<Semaphore>,
    waiting_of: Arc<Peers>,
    connections: Arc<Semaphore>,
    connections_of: Arc<Peers>,
}

impl status::Report for Shared {
    fn is_ready(&self) -> bool {
        self.answers.is_ready()
    }

    fn metrics(&self) -> String {
        self.metrics.page(self.answers.cache_counts())
    }
}

impl crate::custom::User for Shared {
    fn use_plan(&self, plan: Plan, had_complaints: bool) {
        self.metrics.reloaded(&plan.zones(), &plan.servers(), plan.hosts(), had_complaints);
        self.answers.use_plan(plan);
    }
}

/// A query with what its answer is counted by.
struct Asking {
    query: Query,
    block: Arc<Block>,
    peer: SocketAddr,
    began: Instant,
}

enum Taken {
    Nothing,
    Send(Vec<u8>),
    Wait(Box<Asking>, Box<crate::answers::Work>),
}

impl Shared {
    fn new(
        zone: Zone,
        directory: Arc<dyn Directory>,
        base: &Base,
        per_client: u32,
        tasks: &Tasks,
    ) -> Arc<Self> {
        let (plan, _) = Plan::new(&BTreeMap::new(), base);
        let metrics = Metrics::new();
        let resolver = Resolver::new(metrics.clone(), tasks.clone());
        Arc::new(Self {
            answers: Answers::new(zone, directory, plan, resolver, metrics.clone()),
            metrics,
            rate: Rate::new(per_client),
            waiting: Arc::new(Semaphore::new(WAITING)),
            waiting_of: Peers::new(WAITING_OF_ONE),
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
            connections_of: Peers::new(CONNECTIONS_OF_ONE),
        })
    }

    /// Never waits.
    fn take(&self, packet: &[u8], peer: SocketAddr, by_tcp: bool) -> Taken {
        if !self.rate.allows(peer.ip()) {
            self.metrics.limited();
            return Taken::Nothing;
        }
        let began = Instant::now();
        let query = match Query::parse(packet, by_tcp) {
            Ok(query) => query,
            Err(Malformed::Silent) => {
                self.metrics.malformed(false);
                return Taken::Nothing;
            }
            Err(Malformed::Refused(reply)) => {
                self.metrics.malformed(true);
                return Taken::Send(reply);
            }
        };
        let (block, step) = self.answers.step(&query);
        let asking = Asking { query, block, peer, began };
        match step {
            Step::Reply(reply) => Taken::Send(self.done(&asking, reply)),
            Step::Wait(work) => Taken::Wait(Box::new(asking), work),
        }
    }

    async fn later(&self, asking: &Asking, work: crate::answers::Work) -> Vec<u8> {
        let reply = self.answers.finish(&asking.query, work).await;
        self.done(asking, reply)
    }

    /// Too many wait already.
    fn too_many(&self, asking: &Asking) -> Vec<u8> {
        self.metrics.rejected();
        let bytes = asking.query.reply(code::SERV_FAIL);
        self.done(asking, Reply { bytes, code: code::SERV_FAIL, plugin: "forward" })
    }

    /// Counts the answer, and logs it if the settings say so.
    fn done(&self, asking: &Asking, reply: Reply) -> Vec<u8> {
        let Asking { query, block, peer, began } = asking;
        let took = began.elapsed();
        self.metrics.served(&Served {
            zone: &block.zone,
            query,
            is_ipv6: peer.is_ipv6(),
            code: reply.code,
            size: reply.bytes.len(),
            plugin: reply.plugin,
            took,
        });
        if block.log {
            let (kind, name) = (type_name(query.kind), text(&query.name));
            let protocol = if query.by_tcp { "tcp" } else { "udp" };
            let (code, size) = (code_name(reply.code), reply.bytes.len());
            let (id, seconds) = (query.id, took.as_secs_f64());
            // CoreDNS' format, without the flags.
            tracing::info!(
                "{peer} - {id} \"{kind} IN {name}. {protocol}\" {code} {size} {seconds}s"
            );
        }
        reply.bytes
    }
}

async fn datagrams(shared: Arc<Shared>, socket: Arc<UdpSocket>, tasks: Tasks) {
    let mut buffer = vec![0; LARGEST_QUERY];
    loop {
        let (length, peer) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            // ICMP reported that an earlier client closed its port; this socket is fine.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            Err(error) => {
                tracing::warn!(%error, "failed to receive DNS packets");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        match shared.take(&buffer[..length], peer, false) {
            Taken::Nothing => {}
            Taken::Send(reply) => send(&socket, &reply, peer).await,
            Taken::Wait(asking, work) => {
                let permit = shared.waiting.clone().try_acquire_owned().ok();
                let share = shared.waiting_of.share(peer.ip());
                let (Some(permit), Some(share)) = (permit, share) else {
                    send(&socket, &shared.too_many(&asking), peer).await;
                    continue;
                };
                let (shared, socket) = (shared.clone(), socket.clone());
                tasks.spawn_contained("dns-waiting", async move {
                    let (_permit, _share) = (permit, share);
                    let reply = shared.later(&asking, *work).await;
                    send(&socket, &reply, peer).await;
                });
            }
        }
    }
}

async fn send(socket: &UdpSocket, reply: &[u8], peer: SocketAddr) {
    if let Err(error) = socket.send_to(reply, peer).await {
        tracing::debug!(%peer, %error, "failed to send a DNS answer");
    }
}

async fn connections(shared: Arc<Shared>, listener: TcpListener, tasks: Tasks) {
    loop {
        let Ok(permit) = shared.connections.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, peer)) => {
                let Some(share) = shared.connections_of.share(peer.ip()) else {
                    tracing::debug!(%peer, "refused a DNS connection: too many from this address");
                    continue;
                };
                let shared = shared.clone();
                tasks.spawn_contained("dns-connection", async move {
                    let (_permit, _share) = (permit, share);
                    if let Err(error) = connection(&shared, stream, peer, IDLE).await {
                        tracing::debug!(%error, "a DNS connection ended early");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "failed to accept DNS connections");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Answers one question after the other. `patience` is the timeout for sending an answer.
async fn connection(
    shared: &Shared,
    mut stream: TcpStream,
    peer: SocketAddr,
    patience: Duration,
) -> io::Result<()> {
    loop {
        let read = tokio::time::timeout(IDLE, read_framed(&mut stream)).await;
        let Ok(Some(packet)) = read.map_err(|_| io::ErrorKind::TimedOut)? else { return Ok(()) };
        let reply = match shared.take(&packet, peer, true) {
            Taken::Nothing => return Ok(()),
            Taken::Send(reply) => reply,
            Taken::Wait(asking, work) => shared.later(&asking, *work).await,
        };
        let written = tokio::time::timeout(patience, write_framed(&mut stream, &reply)).await;
        written.map_err(|_| io::ErrorKind::TimedOut)??;
    }
}

#[cfg(test)]
mod tests;
