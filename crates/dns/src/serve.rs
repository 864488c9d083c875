//! The server: reads queries from sockets, sends answers.
//!
//! In: packets. Out: packets. The socket's task itself answers names of the zone. Each query for
//! another server gets its own task; there are at most [`PENDING`] of them. Invariants: a packet
//! that is not a query gets no answer (or FORMERR), so that two servers never answer each other
//! endlessly. Answers fit the client's size limit. A client that does not read loses its
//! connection, and one client cannot hold all connections.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::Tasks;
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, Record, RecordType};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
    sockopt,
};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use crate::directory::Directory;
use crate::forward::{Forwarder, read_framed, read_resolvers, write_framed};
use crate::zone::{Answer, Records, Zone};
use crate::{Config, Error};

/// The limits on concurrent queries to other servers, and on TCP connections.
const PENDING: usize = 512;
const CONNECTIONS: usize = 256;
/// The limit on connections from one address.
const PER_PEER: usize = 64;
/// The timeout for receiving a query and for sending its answer.
const IDLE: Duration = Duration::from_secs(10);
/// The size limit of a UDP answer without EDNS, and with EDNS ([`WITH_EDNS`]).
const PLAIN: usize = 512;
const WITH_EDNS: u16 = 1232;
/// How many aliases within the zone are followed.
const ALIASES: usize = 8;

/// The bound sockets of a server that does not run yet.
pub struct Bound {
    zone: Zone,
    forwarder: Forwarder,
    udp: Vec<UdpSocket>,
    tcp: Vec<TcpListener>,
}

impl Bound {
    /// Binds all addresses.
    pub fn new(config: Config) -> Result<Self, Error> {
        let zone = Zone::new(&config.domain).ok_or_else(|| Error::Domain(config.domain.clone()))?;
        let (mut udp, mut tcp) = (vec![], vec![]);
        for address in &config.bind {
            let failed = |source| Error::Listen { address: *address, source };
            let datagrams = open(*address, SockType::Datagram).map_err(failed)?;
            let datagrams: std::net::UdpSocket = datagrams.into();
            // Port 0: TCP uses the port that UDP got.
            let actual = datagrams.local_addr().map_err(failed)?;
            let streams = open(actual, SockType::Stream).map_err(failed)?;
            let streams: std::net::TcpListener = streams.into();
            udp.push(UdpSocket::from_std(datagrams).map_err(failed)?);
            tcp.push(TcpListener::from_std(streams).map_err(failed)?);
        }
        let upstreams = config.upstreams.unwrap_or_else(|| read_resolvers(&config.resolv_conf));
        let own: Vec<SocketAddr> = udp.iter().filter_map(|s| s.local_addr().ok()).collect();
        Ok(Self { zone, forwarder: Forwarder::new(upstreams, &own), udp, tcp })
    }

    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.udp.iter().filter_map(|socket| socket.local_addr().ok()).collect()
    }

    /// Starts the server as tasks of `tasks`.
    pub(crate) fn serve(self, directory: Arc<dyn Directory>, tasks: &Tasks) {
        let shared = Arc::new(Shared {
            zone: self.zone,
            forwarder: self.forwarder,
            directory,
            pending: Arc::new(Semaphore::new(PENDING)),
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
            peers: Arc::default(),
        });
        for socket in self.udp {
            tasks.spawn("dns-udp", datagrams(shared.clone(), Arc::new(socket), tasks.clone()));
        }
        for listener in self.tcp {
            tasks.spawn("dns-tcp", connections(shared.clone(), listener, tasks.clone()));
        }
    }
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
    if kind == SockType::Stream {
        listen(&socket, Backlog::new(128)?)?;
    }
    Ok(socket)
}

struct Shared {
    zone: Zone,
    forwarder: Forwarder,
    directory: Arc<dyn Directory>,
    pending: Arc<Semaphore>,
    connections: Arc<Semaphore>,
    peers: Arc<Peers>,
}

/// The number of connections by address. The lock is held for one change.
#[derive(Default)]
struct Peers(Mutex<HashMap<IpAddr, usize>>);

/// Counts one connection of an address until dropped.
struct Share {
    peers: Arc<Peers>,
    address: IpAddr,
}

impl Peers {
    /// `None`: the address has reached its limit.
    fn share(self: &Arc<Self>, address: IpAddr) -> Option<Share> {
        let mut counts = self.0.lock().expect("no panic while held");
        let count = counts.entry(address).or_default();
        if *count >= PER_PEER {
            return None;
        }
        *count += 1;
        Some(Share { peers: self.clone(), address })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut counts = self.peers.0.lock().expect("no panic while held");
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// The next step for a packet.
enum Step {
    Reply(Vec<u8>),
    /// Forward the whole query.
    Forward(Message),
    /// Resolve the target of an alias elsewhere.
    Chase {
        query: Message,
        so_far: Vec<Record>,
        target: Name,
    },
    Ignore,
}

async fn datagrams(shared: Arc<Shared>, socket: Arc<UdpSocket>, tasks: Tasks) {
    let mut buffer = vec![0; 4096];
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
        let packet = &buffer[..length];
        match shared.step(packet, false) {
            Step::Ignore => {}
            Step::Reply(reply) => send(&socket, &reply, peer).await,
            step => {
                let Ok(permit) = shared.pending.clone().try_acquire_owned() else { continue };
                let (shared, socket, packet) = (shared.clone(), socket.clone(), packet.to_vec());
                tasks.spawn("dns-forward", async move {
                    let _permit = permit;
                    let reply = shared.elsewhere(step, &packet, false).await;
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
                let Some(share) = shared.peers.share(peer.ip()) else {
                    tracing::debug!(%peer, "refused a DNS connection: too many from this address");
                    continue;
                };
                let shared = shared.clone();
                tasks.spawn("dns-connection", async move {
                    let (_permit, _share) = (permit, share);
                    if let Err(error) = connection(&shared, stream, IDLE).await {
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

/// `patience` is the timeout for sending an answer.
async fn connection(shared: &Shared, mut stream: TcpStream, patience: Duration) -> io::Result<()> {
    loop {
        let read = tokio::time::timeout(IDLE, read_framed(&mut stream)).await;
        let Ok(Some(packet)) = read.map_err(|_| io::ErrorKind::TimedOut)? else { return Ok(()) };
        let reply = match shared.step(&packet, true) {
            Step::Ignore => return Ok(()),
            Step::Reply(reply) => reply,
            step => shared.elsewhere(step, &packet, true).await,
        };
        let written = tokio::time::timeout(patience, write_framed(&mut stream, &reply)).await;
        written.map_err(|_| io::ErrorKind::TimedOut)??;
    }
}

impl Shared {
    fn step(&self, packet: &[u8], by_tcp: bool) -> Step {
        let Ok(query) = Message::from_vec(packet) else {
            return refuse_malformed(packet);
        };
        if query.metadata.message_type != MessageType::Query {
            return Step::Ignore;
        }
        if query.metadata.op_code != OpCode::Query {
            return Step::Reply(encode(reply_to(&query, ResponseCode::NotImp), &query, by_tcp));
        }
        let [question] = query.queries.as_slice() else {
            return Step::Reply(encode(reply_to(&query, ResponseCode::FormErr), &query, by_tcp));
        };
        let (mut name, kind) = (question.name().clone(), question.query_type());
        let mut aliases: Vec<Record> = vec![];
        for _ in 0..ALIASES {
            match self.zone.answer(&name, kind, &*self.directory) {
                Answer::Found(records) => {
                    return Step::Reply(self.found(&query, aliases, records, by_tcp));
                }
                Answer::NoSuchName => {
                    return Step::Reply(self.denied(
                        &query,
                        aliases,
                        ResponseCode::NXDomain,
                        by_tcp,
                    ));
                }
                Answer::NotReady => {
                    return Step::Reply(self.denied(
                        &query,
                        aliases,
                        ResponseCode::ServFail,
                        by_tcp,
                    ));
                }
                Answer::Alias(record, target) => {
                    aliases.push(*record);
                    if kind == RecordType::CNAME {
                        let none = Records::default();
                        return Step::Reply(self.found(&query, aliases, none, by_tcp));
                    }
                    name = target;
                }
                Answer::Elsewhere if aliases.is_empty() => return Step::Forward(query),
                Answer::Elsewhere => {
                    return Step::Chase { query, so_far: aliases, target: name };
                }
            }
        }
        Step::Reply(self.denied(&query, vec![], ResponseCode::ServFail, by_tcp))
    }

    fn found(
        &self,
        query: &Message,
        aliases: Vec<Record>,
        records: Records,
        by_tcp: bool,
    ) -> Vec<u8> {
        let mut reply = reply_to(query, ResponseCode::NoError);
        reply.metadata.authoritative = true;
        let empty = aliases.is_empty() && records.answers.is_empty();
        reply.add_answers(aliases);
        reply.add_answers(records.answers);
        reply.add_additionals(records.additionals);
        if empty {
            reply.add_authority(self.zone.soa());
        }
        encode(reply, query, by_tcp)
    }

    fn denied(
        &self,
        query: &Message,
        aliases: Vec<Record>,
        code: ResponseCode,
        by_tcp: bool,
    ) -> Vec<u8> {
        let mut reply = reply_to(query, code);
        reply.add_answers(aliases);
        if code == ResponseCode::NXDomain {
            reply.metadata.authoritative = true;
            reply.add_authority(self.zone.soa());
        }
        encode(reply, query, by_tcp)
    }

    async fn elsewhere(&self, step: Step, packet: &[u8], by_tcp: bool) -> Vec<u8> {
        match step {
            Step::Forward(query) => match self.forwarder.ask(packet, by_tcp).await {
                Some(answer) => answer,
                None => self.denied(&query, vec![], ResponseCode::ServFail, by_tcp),
            },
            Step::Chase { query, so_far, target } => {
                let kind = query.queries.first().map_or(RecordType::A, Query::query_type);
                let mut ask = Message::new(0, MessageType::Query, OpCode::Query);
                ask.metadata.id = query.metadata.id;
                ask.metadata.recursion_desired = true;
                ask.add_query(Query::query(target, kind));
                let raw = ask.to_vec().unwrap_or_default();
                let answer = self.forwarder.ask(&raw, by_tcp).await;
                let answer = answer.and_then(|bytes| Message::from_vec(&bytes).ok());
                let mut reply = reply_to(&query, ResponseCode::NoError);
                reply.metadata.authoritative = true;
                reply.add_answers(so_far);
                if let Some(answer) = answer {
                    reply.add_answers(answer.answers);
                }
                encode(reply, &query, by_tcp)
            }
            Step::Reply(reply) => reply,
            Step::Ignore => vec![],
        }
    }
}

/// FORMERR for a malformed query, no answer for other packets.
fn refuse_malformed(packet: &[u8]) -> Step {
    let is_query = packet.len() >= 12 && packet[2] & 0x80 == 0;
    if !is_query {
        return Step::Ignore;
    }
    let id = u16::from_be_bytes([packet[0], packet[1]]);
    let reply = Message::error_msg(id, OpCode::Query, ResponseCode::FormErr);
    reply.to_vec().map_or(Step::Ignore, Step::Reply)
}

fn reply_to(query: &Message, code: ResponseCode) -> Message {
    let mut reply = Message::response(query.metadata.id, query.metadata.op_code);
    reply.metadata.recursion_desired = query.metadata.recursion_desired;
    reply.metadata.recursion_available = true;
    reply.metadata.response_code = code;
    reply.add_queries(query.queries.iter().cloned());
    if query.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(WITH_EDNS);
        reply.set_edns(edns);
    }
    reply
}

/// Encodes the reply within the client's limit: drops additional records first, then answers, and
/// marks the reply as truncated.
fn encode(mut reply: Message, query: &Message, by_tcp: bool) -> Vec<u8> {
    let limit = match (by_tcp, &query.edns) {
        (true, _) => usize::from(u16::MAX),
        (false, Some(edns)) => usize::from(edns.max_payload().min(WITH_EDNS)).max(PLAIN),
        (false, None) => PLAIN,
    };
    loop {
        match reply.to_vec() {
            Ok(bytes) if bytes.len() <= limit => return bytes,
            Ok(_) | Err(_) if !reply.additionals.is_empty() => reply.additionals.clear(),
            Ok(_) | Err(_) if !reply.answers.is_empty() => {
                reply.metadata.truncation = true;
                reply.answers.truncate(reply.answers.len() * 3 / 4);
            }
            Ok(bytes) => return bytes,
            Err(error) => {
                tracing::warn!(%error, "failed to encode a DNS answer");
                return vec![];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zone::tests::cluster;

    async fn ask_udp(server: SocketAddr, name: &str, kind: RecordType) -> Message {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        let mut query = Message::new(0, MessageType::Query, OpCode::Query);
        query.metadata.id = 77;
        query.metadata.recursion_desired = true;
        query.add_query(Query::query(Name::from_ascii(name).expect("a name"), kind));
        let query = query.to_vec().expect("bytes");
        testkit::wait::found("an answer", async || {
            // A datagram may be lost: asks again, like a resolver.
            socket.send_to(&query, server).await.expect("sent");
            let mut buffer = vec![0; 4096];
            let received = tokio::time::timeout(Duration::from_secs(5), socket.recv(&mut buffer));
            let length = received.await.ok()?.expect("received");
            Some(Message::from_vec(&buffer[..length]).expect("a message"))
        })
        .await
    }

    fn start(tasks: &Tasks, upstreams: Vec<SocketAddr>) -> SocketAddr {
        // The same port by UDP and TCP must be free, so the server uses its own loopback address.
        let local = SocketAddr::from((testkit::places::own_loopback(), 15_353));
        let config =
            Config { upstreams: Some(upstreams), ..Config::new(vec![local], "cluster.local") };
        let bound = Bound::new(config).expect("sockets");
        let address = bound.addresses()[0];
        bound.serve(Arc::new(cluster()), tasks);
        address
    }

    #[tokio::test]
    async fn answers_by_udp_and_tcp() {
        let tasks = Tasks::new("test");
        let server = start(&tasks, vec![]);
        let answer = ask_udp(server, "web.ns.svc.cluster.local.", RecordType::A).await;
        assert_eq!(answer.metadata.id, 77);
        assert!(answer.metadata.authoritative);
        assert_eq!(answer.answers[0].data.to_string(), "10.43.0.9");
        assert_eq!(answer.answers[0].ttl, 5);

        let none = ask_udp(server, "none.ns.svc.cluster.local.", RecordType::A).await;
        assert_eq!(none.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(none.authorities.len(), 1, "the SOA says how long that holds");
        let outside = ask_udp(server, "example.com.", RecordType::A).await;
        assert_eq!(outside.metadata.response_code, ResponseCode::ServFail);

        let mut stream = TcpStream::connect(server).await.expect("a connection");
        let mut query = Message::new(0, MessageType::Query, OpCode::Query);
        let name = Name::from_ascii("db.ns.svc.cluster.local.").expect("a name");
        query.add_query(Query::query(name, RecordType::A));
        write_framed(&mut stream, &query.to_vec().expect("bytes")).await.expect("sent");
        let reply = read_framed(&mut stream).await.expect("read").expect("an answer");
        assert_eq!(Message::from_vec(&reply).expect("a message").answers.len(), 2);
        tasks.shutdown(Duration::from_secs(5)).await;
    }

    fn framed_query() -> Vec<u8> {
        let mut query = Message::new(0, MessageType::Query, OpCode::Query);
        let name = Name::from_ascii("db.ns.svc.cluster.local.").expect("a name");
        query.add_query(Query::query(name, RecordType::A));
        let bytes = query.to_vec().expect("bytes");
        [&(bytes.len() as u16).to_be_bytes()[..], &bytes].concat()
    }

    /// Such a client used to hold a connection forever.
    #[tokio::test]
    async fn a_client_that_does_not_read_is_disconnected() {
        let shared = Shared {
            zone: Zone::new("cluster.local").expect("a zone"),
            forwarder: Forwarder::new(vec![], &[]),
            directory: Arc::new(cluster()),
            pending: Arc::new(Semaphore::new(1)),
            connections: Arc::new(Semaphore::new(1)),
            peers: Arc::default(),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
        let address = listener.local_addr().expect("an address");
        let mut client = TcpStream::connect(address).await.expect("a connection");
        let (stream, _) = listener.accept().await.expect("accepted");
        let tasks = Tasks::new("test");
        tasks.spawn("client", async move {
            use tokio::io::AsyncWriteExt;
            let many = framed_query().repeat(1000);
            // Writes until the server closes.
            while client.write_all(&many).await.is_ok() {}
        });
        let served = connection(&shared, stream, Duration::from_millis(100));
        let ended = tokio::time::timeout(Duration::from_secs(90), served).await;
        let error = ended.expect("it does not wait for ever").expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        tasks.shutdown(Duration::from_secs(5)).await;
    }

    #[test]
    fn one_address_cannot_hold_all_connections() {
        let peers: Arc<Peers> = Arc::default();
        let [one, other] = ["10.42.0.7", "10.42.0.8"].map(|ip| ip.parse().expect("an address"));
        let mut held: Vec<Share> = (0..PER_PEER).filter_map(|_| peers.share(one)).collect();
        assert_eq!(held.len(), PER_PEER);
        assert!(peers.share(one).is_none());
        assert!(peers.share(other).is_some());
        held.pop();
        assert!(peers.share(one).is_some());
        held.clear();
        assert!(peers.0.lock().expect("no panic").is_empty());
    }

    #[tokio::test]
    async fn other_names_are_forwarded_and_aliases_chased() {
        let tasks = Tasks::new("test");
        // A second server, for another zone: it answers every query with one address.
        let upstream = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        let address = upstream.local_addr().expect("an address");
        tasks.spawn("upstream", async move {
            let mut buffer = vec![0; 4096];
            while let Ok((length, peer)) = upstream.recv_from(&mut buffer).await {
                let query = Message::from_vec(&buffer[..length]).expect("a query");
                let mut reply = reply_to(&query, ResponseCode::NoError);
                let data = hickory_proto::rr::RData::A("192.0.2.1".parse().expect("an address"));
                reply.add_answer(Record::from_rdata(query.queries[0].name().clone(), 60, data));
                upstream.send_to(&reply.to_vec().expect("bytes"), peer).await.expect("sent");
            }
        });
        let server = start(&tasks, vec![address]);
        // A resolver that does not answer in time is skipped; the next query tries it again.
        let check = async |name: &str, expected: &[&str]| {
            let id = testkit::wait::found(name, async || {
                let answer = ask_udp(server, name, RecordType::A).await;
                let shown: Vec<_> = answer.answers.iter().map(|r| r.data.to_string()).collect();
                (shown == expected).then_some(answer.metadata.id)
            });
            assert_eq!(id.await, 77);
        };
        check("example.com.", &["192.0.2.1"]).await;
        check("out.ns.svc.cluster.local.", &["example.com.", "192.0.2.1"]).await;
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
