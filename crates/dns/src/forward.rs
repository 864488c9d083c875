//! Asks other servers, side by side if they are slow.
//!
//! In: a question. Out: the first useful answer, checked. Upstream: CoreDNS' `forward`.
//!
//! ```text
//! first server ──┬─ answer ─────────────────────────► done
//!                ├─ 250 ms without an answer ──► next server too; the first useful answer counts
//!                └─ SERVFAIL, REFUSED, no route ─► next server at once
//! ```
//!
//! A server that failed twice in a row is down: others go first. After half a second, then longer, up to ten
//! seconds, one query asks it beside the first server; an answer ends its rest. So a dead server costs no
//! client time, and no probes are sent while nobody asks. Deviation: CoreDNS probes a dead server twice a second.
//! Deviation: servers are asked in their order, as libc does with a resolv.conf; CoreDNS takes a random one
//! unless `policy` says otherwise.
//!
//! Invariants: a query ends after five seconds. Each has a new socket (so a new port) and a new id, and an answer
//! must repeat id and question, to make answers hard to forge. A truncated answer is fetched again by TCP.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::wire::{Answer, Asked, code};

/// The time for all servers, for one, and for one before it is asked again by a new packet.
const TOTAL: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_millis(2500);
const AGAIN: Duration = Duration::from_secs(1);
/// The time after which the next server is asked too.
const BESIDE: Duration = Duration::from_millis(250);
/// CoreDNS' `max_fails`.
const MAX_FAILS: u32 = 2;
const SHORTEST_REST: Duration = Duration::from_millis(500);
const LONGEST_REST: Duration = Duration::from_secs(10);
const LARGEST: usize = 65_535;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    #[default]
    Sequential,
    Random,
    RoundRobin,
}

/// How the servers of one zone are asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Settings {
    pub servers: Vec<SocketAddr>,
    pub policy: Policy,
    pub force_tcp: bool,
    /// CoreDNS' `max_concurrent`; 0: no limit of its own.
    pub max_concurrent: usize,
}

pub struct Forward {
    servers: Vec<Arc<Server>>,
    settings: Settings,
    turn: AtomicUsize,
}

struct Server {
    address: SocketAddr,
    /// Guards the health; held for one look or change.
    health: Mutex<Health>,
    /// It does not understand EDNS.
    plain: AtomicBool,
}

#[derive(Default)]
struct Health {
    fails: u32,
    /// When a query asks a server that is down.
    due: Option<Instant>,
}

/// The resolvers in a resolv.conf.
pub fn read_resolvers(path: &Path) -> Vec<SocketAddr> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()).flatten()
    });
    servers.filter_map(|ip| ip.parse::<IpAddr>().ok()).map(|ip| SocketAddr::new(ip, 53)).collect()
}

impl Forward {
    pub fn new(settings: Settings) -> Self {
        let server = |address: &SocketAddr| {
            Arc::new(Server {
                address: *address,
                health: Mutex::default(),
                plain: AtomicBool::new(false),
            })
        };
        let servers = settings.servers.iter().map(server).collect();
        Self { servers, settings, turn: AtomicUsize::new(0) }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// `None` when no server answers. An answer that is not useful is the servers' best one.
    pub async fn ask(&self, asked: &Asked, metrics: &Metrics) -> Option<Answer> {
        let deadline = tokio::time::sleep(TOTAL);
        tokio::pin!(deadline);
        let (order, beside) = self.order(metrics);
        let mut next = order.into_iter();
        let mut running = FuturesUnordered::new();
        running.extend(beside.map(|server| self.ask_one(server, asked, metrics)));
        running.extend(next.next().map(|server| self.ask_one(server, asked, metrics)));
        let mut best = None;
        loop {
            if running.is_empty() {
                match next.next() {
                    Some(server) => running.push(self.ask_one(server, asked, metrics)),
                    None => return best,
                }
            }
            let is_more = next.len() > 0;
            tokio::select! {
                Some(answer) = running.next() => match answer {
                    Some(answer) if answer.is_useful() => return Some(answer),
                    other => {
                        best = other.or(best);
                        let another = next.next();
                        running.extend(another.map(|server| self.ask_one(server, asked, metrics)));
                    }
                },
                () = tokio::time::sleep(BESIDE), if is_more => {
                    let another = next.next();
                    running.extend(another.map(|server| self.ask_one(server, asked, metrics)));
                }
                () = &mut deadline => return best,
            }
        }
    }

    /// The servers in the order of asking, and one to ask beside the first because it may be up again.
    fn order(&self, metrics: &Metrics) -> (Vec<Arc<Server>>, Option<Arc<Server>>) {
        let count = self.servers.len();
        let first = match self.settings.policy {
            _ if count == 0 => 0,
            Policy::Sequential => 0,
            Policy::Random => base::rng::below(count as u64) as usize,
            Policy::RoundRobin => self.turn.fetch_add(1, Ordering::Relaxed) % count,
        };
        let all = (0..count).map(|index| &self.servers[(first + index) % count]);
        let (mut up, down): (Vec<_>, Vec<_>) =
            all.cloned().partition(|server| server.health().fails < MAX_FAILS);
        if up.is_empty() {
            if !down.is_empty() {
                metrics.all_servers_down();
            }
            return (down, None);
        }
        let beside = down.iter().find(|server| server.health().takes_turn()).cloned();
        let resting = down.into_iter();
        up.extend(resting.filter(|s| beside.as_ref().is_none_or(|b| !Arc::ptr_eq(b, s))));
        (up, beside)
    }

    async fn ask_one(
        &self,
        server: Arc<Server>,
        asked: &Asked,
        metrics: &Metrics,
    ) -> Option<Answer> {
        let began = Instant::now();
        let asking = server.ask(asked, self.settings.force_tcp);
        let outcome = match tokio::time::timeout(PATIENCE, asking).await {
            Ok(outcome) => outcome,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        let address = server.address;
        match outcome {
            Ok(answer) => {
                *server.health() = Health::default();
                metrics.forwarded(address, answer.code, began.elapsed());
                Some(answer)
            }
            Err(error) => {
                tracing::debug!(server = %address, %error, "failed to query a DNS server");
                if server.health().failed() {
                    let server = address.to_string();
                    tracing::warn!(server, %error, "a DNS server does not answer, others go first");
                }
                metrics.failed(address);
                None
            }
        }
    }
}

impl Health {
    /// Returns whether the server is down since this failure.
    fn failed(&mut self) -> bool {
        self.fails = self.fails.saturating_add(1);
        let rests = self.fails.saturating_sub(MAX_FAILS).min(10);
        self.due = Some(Instant::now() + (SHORTEST_REST * (1 << rests)).min(LONGEST_REST));
        self.fails == MAX_FAILS
    }

    /// Whether a query should ask this server, which is down. Only one does.
    fn takes_turn(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.due.is_some_and(|due| due <= now);
        if is_due {
            self.due = Some(now + LONGEST_REST);
        }
        is_due
    }
}

impl Server {
    fn health(&self) -> std::sync::MutexGuard<'_, Health> {
        self.health.lock().expect("no panic while held")
    }

    async fn ask(&self, asked: &Asked, force_tcp: bool) -> io::Result<Answer> {
        let with_edns = !self.plain.load(Ordering::Relaxed);
        let answer = self.ask_with(asked, with_edns, force_tcp).await?;
        let refused = matches!(answer.code, code::FORM_ERR | code::NOT_IMP | code::BAD_VERS);
        if !with_edns || !refused {
            return Ok(answer);
        }
        // An old server: asks again without EDNS, and from now on.
        let answer = self.ask_with(asked, false, force_tcp).await?;
        if answer.is_useful() {
            self.plain.store(true, Ordering::Relaxed);
        }
        Ok(answer)
    }

    async fn ask_with(&self, asked: &Asked, edns: bool, force_tcp: bool) -> io::Result<Answer> {
        if force_tcp {
            return ask_tcp(self.address, asked, edns).await;
        }
        let answer = ask_udp(self.address, asked, edns).await?;
        if !answer.is_truncated() {
            return Ok(answer);
        }
        // Without TCP the client gets what there is, and asks by TCP itself.
        Ok(ask_tcp(self.address, asked, edns).await.unwrap_or(answer))
    }
}

async fn ask_udp(server: SocketAddr, asked: &Asked, edns: bool) -> io::Result<Answer> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    let id = base::rng::below(65_536) as u16;
    let packet = asked.packet(id, edns);
    socket.send(&packet).await?;
    let received = receive(&socket, id, asked);
    tokio::pin!(received);
    match tokio::time::timeout(AGAIN, &mut received).await {
        Ok(answer) => answer,
        Err(_) => {
            socket.send(&packet).await?;
            received.await
        }
    }
}

/// Packets that do not answer this question are ignored: others may send them.
async fn receive(socket: &UdpSocket, id: u16, asked: &Asked) -> io::Result<Answer> {
    let mut buffer = vec![0; 4096];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if length >= 12
            && buffer[..2] == id.to_be_bytes()
            && let Some(answer) = Answer::check(buffer[..length].to_vec(), asked)
        {
            return Ok(answer);
        }
    }
}

async fn ask_tcp(server: SocketAddr, asked: &Asked, edns: bool) -> io::Result<Answer> {
    let mut stream = TcpStream::connect(server).await?;
    let id = base::rng::below(65_536) as u16;
    write_framed(&mut stream, &asked.packet(id, edns)).await?;
    let message = read_framed(&mut stream).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let answer = Answer::check(message, asked).filter(|answer| answer.id_is(id));
    answer.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// One message after its two-byte length; `None` at the end.
pub async fn read_framed(stream: &mut TcpStream) -> io::Result<Option<Vec<u8>>> {
    let length = match stream.read_u16().await {
        Ok(length) => usize::from(length),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    Ok(Some(message))
}

pub async fn write_framed(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    if message.len() > LARGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut framed = Vec::with_capacity(message.len() + 2);
    framed.extend_from_slice(&(message.len() as u16).to_be_bytes());
    framed.extend_from_slice(message);
    stream.write_all(&framed).await
}
