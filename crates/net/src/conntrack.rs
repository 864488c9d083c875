//! The parts of the kernel's connection table that the proxy needs: listing UDP flows with their
//! translation, and deleting one.
//!
//! TCP connections end by themselves when an endpoint dies. A UDP client that keeps its port (a resolver)
//! would keep sending to the dead endpoint: every packet extends the life of the flow's entry.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::{MsgFlags, recv, send};

use crate::error::{During, Error};
use crate::netns;
use crate::nft::wire::{
    Attrs, GENERIC_HEADER, HEADER, NLM_F_ACK, NLM_F_REQUEST, attributes, put_message,
};
use crate::nft::{Ip, open_socket};

const SUBSYSTEM: u16 = 1;
const NEW: u16 = 0;
const GET: u16 = 1;
const DELETE: u16 = 2;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const UDP: u8 = 17;
const BUFFER: usize = 64 << 10;

/// One UDP flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub client: SocketAddr,
    /// The client's destination.
    pub to: SocketAddr,
    /// The endpoint that answers, after translation of the destination.
    pub answered_by: SocketAddr,
}

pub struct Conntrack {
    fd: OwnedFd,
}

impl Conntrack {
    /// Opens a socket in the calling thread's namespace.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { fd: open_socket().during(|| "open a conntrack socket".into())? })
    }

    /// Opens a socket in the namespace pinned at `path`.
    pub fn open_in(path: &Path) -> Result<Self, Error> {
        netns::run(path, Self::open)?
    }

    /// Lists all UDP flows of a family. Blocks for milliseconds per ten thousand connections.
    pub fn udp_flows(&mut self, ip: Ip) -> Result<Vec<Flow>, Error> {
        let mut flows = Vec::new();
        self.exchange(GET, NLM_F_DUMP, ip, &[], |body| flows.extend(flow(body)))
            .during(|| "list connections".into())?;
        Ok(flows)
    }

    /// Deletes a flow; a missing one is no error.
    pub fn delete(&mut self, flow: &Flow) -> Result<(), Error> {
        let ip = Ip::of(&flow.client.ip());
        let body = Attrs::new().nest(1, tuple(&flow.client, &flow.to));
        match self.exchange(DELETE, NLM_F_ACK, ip, &body.0, |_| ()) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other.during(|| format!("forget the flow {} to {}", flow.client, flow.to)),
        }
    }

    /// Sends one request and reads all answers; passes the entries to `entry`.
    fn exchange(
        &mut self,
        kind: u16,
        flags: u16,
        ip: Ip,
        body: &[u8],
        mut entry: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let mut request = Vec::new();
        let family = ip.family().number();
        let header = (SUBSYSTEM << 8 | kind, flags | NLM_F_REQUEST);
        put_message(&mut request, header, 1, (family, 0), body);
        send(self.fd.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut buffer = vec![0; BUFFER];
        loop {
            let size = recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
            let mut bytes = &buffer[..size];
            while let Some(length) = number(bytes, 0).map(|n| n as usize).filter(|n| *n >= HEADER) {
                let Some(message) = bytes.get(..length) else { break };
                let kind = u16::from_ne_bytes([message[4], message[5]]);
                match (kind, number(message, HEADER)) {
                    (NLMSG_DONE, _) => return Ok(()),
                    (NLMSG_ERROR, Some(0)) => return Ok(()),
                    (NLMSG_ERROR, code) => {
                        let code = code.unwrap_or_default() as i32;
                        return Err(io::Error::from_raw_os_error(code.saturating_neg()));
                    }
                    (kind, _) if kind == SUBSYSTEM << 8 | NEW => {
                        entry(message.get(HEADER + GENERIC_HEADER..).unwrap_or_default());
                    }
                    _ => {}
                }
                bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Encodes the addresses and ports of one direction.
fn tuple(from: &SocketAddr, to: &SocketAddr) -> Attrs {
    let addresses = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            Attrs::new().bytes(1, &from.octets()).bytes(2, &to.octets())
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            Attrs::new().bytes(3, &from.octets()).bytes(4, &to.octets())
        }
        _ => Attrs::new(),
    };
    let ports = Attrs::new()
        .bytes(1, &[UDP])
        .bytes(2, &from.port().to_be_bytes())
        .bytes(3, &to.port().to_be_bytes());
    Attrs::new().nest(1, addresses).nest(2, ports)
}

/// `None` for other protocols than UDP.
fn flow(body: &[u8]) -> Option<Flow> {
    let part = |kind| attributes(body).find(|(k, _)| *k == kind).map(|(_, value)| value);
    let (client, to) = ends(part(1)?)?;
    let (answered_by, _) = ends(part(2)?)?;
    Some(Flow { client, to, answered_by })
}

/// Decodes source and destination of one direction.
fn ends(tuple: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let part = |kind| attributes(tuple).find(|(k, _)| *k == kind).map(|(_, value)| value);
    let (mut from, mut to) = (None, None);
    for (kind, value) in attributes(part(1)?) {
        let address = match value.len() {
            4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(value).ok()?)),
            16 => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?)),
            _ => continue,
        };
        match kind {
            1 | 3 => from = Some(address),
            2 | 4 => to = Some(address),
            _ => {}
        }
    }
    let (mut from_port, mut to_port) = (0, 0);
    for (kind, value) in attributes(part(2)?) {
        match (kind, value) {
            (1, [UDP]) => {}
            (1, _) => return None,
            (2, [high, low]) => from_port = u16::from_be_bytes([*high, *low]),
            (3, [high, low]) => to_port = u16::from_be_bytes([*high, *low]),
            _ => {}
        }
    }
    Some((SocketAddr::new(from?, from_port), SocketAddr::new(to?, to_port)))
}
