//! Forwards names outside of the cluster's zone to the node's resolvers.
//!
//! In: the query's bytes. Out: the answer's bytes, with the client's id. The resolvers are tried in
//! order, each with a timeout: by UDP if the client used UDP, otherwise by TCP.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

const PATIENCE: Duration = Duration::from_secs(2);
const LARGEST: usize = 65_535;

#[derive(Clone, Debug, Default)]
pub struct Forwarder {
    upstreams: Vec<SocketAddr>,
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

impl Forwarder {
    /// Leaves out the addresses in `own`: forwarding to this server would never end.
    pub fn new(upstreams: Vec<SocketAddr>, own: &[SocketAddr]) -> Self {
        Self { upstreams: upstreams.into_iter().filter(|a| !own.contains(a)).collect() }
    }

    /// The answer to a raw query; `None` when no resolver answers.
    pub async fn ask(&self, query: &[u8], by_tcp: bool) -> Option<Vec<u8>> {
        if query.len() < 12 {
            return None;
        }
        for upstream in &self.upstreams {
            let asked = async {
                match by_tcp {
                    true => ask_tcp(*upstream, query).await,
                    false => ask_udp(*upstream, query).await,
                }
            };
            match tokio::time::timeout(PATIENCE, asked).await {
                Ok(Ok(answer)) => return Some(answer),
                Ok(Err(error)) => tracing::debug!(%upstream, %error, "failed to query a resolver"),
                Err(_) => tracing::debug!(%upstream, "a resolver did not answer in time"),
            }
        }
        None
    }
}

/// Uses a new socket (so a new port) and a new id, to make answers hard to forge.
async fn ask_udp(upstream: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = match upstream {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(upstream).await?;
    let id = (base::rng::below(65_536) as u16).to_be_bytes();
    let mut packet = query.to_vec();
    packet[..2].copy_from_slice(&id);
    socket.send(&packet).await?;
    let mut buffer = vec![0; 4096];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if length >= 12 && buffer[..2] == id {
            let mut answer = buffer[..length].to_vec();
            answer[..2].copy_from_slice(&query[..2]);
            return Ok(answer);
        }
    }
}

async fn ask_tcp(upstream: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(upstream).await?;
    write_framed(&mut stream, query).await?;
    read_framed(&mut stream).await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
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
