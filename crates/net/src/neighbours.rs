//! ARP and NDP on one link: asks who has an address, and announces that this node has it.
//!
//! ```text
//!  ask ─────► who has 192.168.1.240? ─► the holder's kernel answers ─► Heard::Holder
//!  announce ► 192.168.1.240 is at our hardware address ─► caches of hosts and switches change
//! ```
//!
//! In: addresses. Out: frames; what other machines say about addresses. The kernel answers for the addresses that
//! a link has; this module only sends what the kernel does not.
//!
//! Invariants: questions have no source address, like those of duplicate address detection, so that they change
//! no cache. Frames are read by filters in the kernel: only ARP, and of IPv6 only neighbour messages.
//! Why packet sockets: a question must not depend on routes, nor use the address that it asks for.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::{During, Error};
use crate::links::Link;
use crate::monitor::attach;
use crate::netns;

pub type Mac = [u8; 6];

const BROADCAST: Mac = [0xff; 6];
const NOBODY: Mac = [0; 6];
const ETHERNET: usize = 14;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// An advertisement replaces a cached hardware address.
const OVERRIDE: u8 = 0x20;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Type and length, in units of eight bytes, of the option with the sender's hardware address.
const TARGET_LINK: [u8; 2] = [2, 1];

/// What another machine says about an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// This machine has the address.
    Holder(IpAddr, Mac),
    /// This machine asks all machines who has it.
    Question(IpAddr, Mac),
}

/// The packet sockets of one link.
pub struct Neighbours {
    arp: AsyncFd<OwnedFd>,
    ndp: AsyncFd<OwnedFd>,
    mac: Mac,
}

impl Neighbours {
    /// Opens sockets for a link with Ethernet addresses.
    pub async fn open(netns: Option<&Path>, link: &Link) -> Result<Self, Error> {
        let Ok(mac) = Mac::try_from(link.mac.as_slice()) else {
            return Err(Error::Invalid(format!("{} has no Ethernet address", link.name)));
        };
        let index = link.index;
        let open = move || -> io::Result<(OwnedFd, OwnedFd)> {
            Ok((socket(ARP, index, &[])?, socket(IPV6, index, &neighbour_messages())?))
        };
        let opened = netns::enter_or_here(netns, open).await?;
        let during = || format!("open packet sockets on {}", link.name);
        let (arp, ndp) = opened.during(during)?;
        Ok(Self { arp: register(arp).during(during)?, ndp: register(ndp).during(during)?, mac })
    }

    /// Asks for the machine that has an address: all machines, or one that is known to have it.
    pub fn ask(&self, address: IpAddr, at: Option<Mac>) -> Result<(), Error> {
        let sent = match address {
            IpAddr::V4(v4) => {
                let to = at.unwrap_or(BROADCAST);
                let frame = arp(REQUEST, (to, self.mac), Ipv4Addr::UNSPECIFIED, (NOBODY, v4));
                send(&self.arp, &frame)
            }
            IpAddr::V6(v6) => {
                let group = solicited_nodes(v6);
                let to = at.unwrap_or_else(|| multicast(group));
                let body = neighbour_message(SOLICITATION, 0, v6, None);
                send(&self.ndp, &icmp((to, self.mac), Ipv6Addr::UNSPECIFIED, group, body))
            }
        };
        sent.during(|| format!("ask for the machine that has {address}"))
    }

    /// Tells all machines that this one has an address.
    pub fn announce(&self, address: IpAddr) -> Result<(), Error> {
        let sent = match address {
            // Some machines read only one of them.
            IpAddr::V4(v4) => [(REQUEST, NOBODY), (REPLY, self.mac)].into_iter().try_for_each(
                |(operation, target)| {
                    send(&self.arp, &arp(operation, (BROADCAST, self.mac), v4, (target, v4)))
                },
            ),
            IpAddr::V6(v6) => {
                let body = neighbour_message(ADVERTISEMENT, OVERRIDE, v6, Some(self.mac));
                let ends = (multicast(ALL_NODES), self.mac);
                send(&self.ndp, &icmp(ends, v6, ALL_NODES, body))
            }
        };
        sent.during(|| format!("announce {address}"))
    }

    /// The next message of another machine. Dropping the future loses nothing.
    pub async fn hear(&self) -> Result<Heard, Error> {
        loop {
            let frame = tokio::select! {
                frame = receive(&self.arp) => frame,
                frame = receive(&self.ndp) => frame,
            };
            let frame = frame.during(|| "receive ARP and NDP".into())?;
            let heard = read(&frame).filter(|heard| {
                let (Heard::Holder(_, mac) | Heard::Question(_, mac)) = heard;
                *mac != self.mac
            });
            if let Some(heard) = heard {
                return Ok(heard);
            }
        }
    }
}

fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the registration owns the descriptor and closes it.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(io::Error::from)
}

/// A packet socket of one protocol on one link. It receives nothing before its filter is attached.
fn socket(protocol: u16, index: u32, filter: &[libc::sock_filter]) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: a system call on numbers; the descriptor is ours alone.
    let fd = unsafe {
        let fd = Errno::result(libc::socket(libc::AF_PACKET, kind, 0))?;
        OwnedFd::from_raw_fd(fd)
    };
    if !filter.is_empty() {
        attach(&fd, filter)?;
    }
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol.to_be(),
        sll_ifindex: index as i32,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: pointer and length describe `address`.
    let bound = unsafe {
        let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length)
    };
    Errno::result(bound)?;
    Ok(fd)
}

/// A filter for neighbour solicitations and advertisements without extension headers.
fn neighbour_messages() -> [libc::sock_filter; 7] {
    let step =
        |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = libc::BPF_LD | libc::BPF_B | libc::BPF_ABS;
    let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    [
        step(load, 0, 0, ETHERNET as u32 + 6),
        step(equals, 0, 4, ICMPV6.into()),
        step(load, 0, 0, ETHERNET as u32 + 40),
        step(equals, 1, 0, SOLICITATION.into()),
        step(equals, 0, 1, ADVERTISEMENT.into()),
        step(answer, 0, 0, u32::MAX),
        step(answer, 0, 0, 0),
    ]
}

fn send(socket: &AsyncFd<OwnedFd>, frame: &[u8]) -> io::Result<()> {
    // SAFETY: pointer and length describe `frame`.
    let sent =
        unsafe { libc::send(socket.get_ref().as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
    match Errno::result(sent) {
        // The link is down or full: the next frame follows soon.
        Err(Errno::ENETDOWN | Errno::ENOBUFS | Errno::EWOULDBLOCK) => Ok(()),
        sent => Ok(sent.map(drop)?),
    }
}

async fn receive(socket: &AsyncFd<OwnedFd>) -> io::Result<Vec<u8>> {
    loop {
        let mut ready = socket.readable().await?;
        let mut buffer = vec![0; 128];
        // SAFETY: pointer and length describe `buffer`.
        let size = unsafe {
            let fd = ready.get_inner().as_raw_fd();
            libc::recv(fd, buffer.as_mut_ptr().cast(), buffer.len(), 0)
        };
        match Errno::result(size) {
            Ok(size) => {
                buffer.truncate(size as usize);
                return Ok(buffer);
            }
            Err(Errno::EWOULDBLOCK) => ready.clear_ready(),
            // The error of a link that is down is reported once.
            Err(Errno::EINTR | Errno::ENETDOWN) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// `ends`: the destination's and the source's hardware addresses.
fn ethernet(ends: (Mac, Mac), protocol: u16) -> Vec<u8> {
    [&ends.0[..], &ends.1, &protocol.to_be_bytes()].concat()
}

fn arp(operation: u16, ends: (Mac, Mac), sender: Ipv4Addr, target: (Mac, Ipv4Addr)) -> Vec<u8> {
    let mut frame = ethernet(ends, ARP);
    // Ethernet and IPv4, with the lengths of their addresses.
    frame.extend([0, 1, 8, 0, 6, 4]);
    frame.extend(operation.to_be_bytes());
    frame.extend(ends.1);
    frame.extend(sender.octets());
    frame.extend(target.0);
    frame.extend(target.1.octets());
    frame
}

fn neighbour_message(kind: u8, flags: u8, target: Ipv6Addr, mac: Option<Mac>) -> Vec<u8> {
    let mut body = vec![kind, 0, 0, 0, flags, 0, 0, 0];
    body.extend(target.octets());
    if let Some(mac) = mac {
        body.extend(TARGET_LINK);
        body.extend(mac);
    }
    body
}

fn icmp(ends: (Mac, Mac), source: Ipv6Addr, destination: Ipv6Addr, mut body: Vec<u8>) -> Vec<u8> {
    let length = body.len() as u16;
    let mut pseudo = [source.octets(), destination.octets()].concat();
    pseudo.extend([0, 0, (length >> 8) as u8, length as u8, 0, 0, 0, ICMPV6]);
    pseudo.extend(&body);
    body[2..4].copy_from_slice(&checksum(&pseudo).to_be_bytes());
    let mut frame = ethernet(ends, IPV6);
    frame.extend([0x60, 0, 0, 0]);
    frame.extend(length.to_be_bytes());
    // Neighbours drop messages that a router has forwarded.
    frame.extend([ICMPV6, 255]);
    frame.extend(source.octets());
    frame.extend(destination.octets());
    frame.extend(body);
    frame
}

/// The bytes are an even number.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| (u32::from(pair[0]) << 8) | u32::from(pair[1]));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The group of machines that may have the address.
fn solicited_nodes(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]))
}

fn multicast(group: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = group.octets();
    [0x33, 0x33, a, b, c, d]
}

fn read(frame: &[u8]) -> Option<Heard> {
    let protocol = u16::from_be_bytes(bytes(frame, 12)?);
    let source: Mac = bytes(frame, 6)?;
    let heard = match protocol {
        ARP => read_arp(frame.get(ETHERNET..)?)?,
        IPV6 => {
            let from = Ipv6Addr::from(bytes::<16>(frame, ETHERNET + 8)?);
            read_icmp(frame.get(ETHERNET + 40..)?, source, from.is_unspecified())?
        }
        _ => return None,
    };
    // A question to this machine alone is the kernel's business.
    let is_to_all = frame[0] & 1 == 1;
    (is_to_all || matches!(heard, Heard::Holder(..))).then_some(heard)
}

fn read_arp(body: &[u8]) -> Option<Heard> {
    if body.get(..6)? != [0, 1, 8, 0, 6, 4] {
        return None;
    }
    let mac: Mac = bytes(body, 8)?;
    let sender = Ipv4Addr::from(bytes::<4>(body, 14)?);
    match sender.is_unspecified() {
        true => Some(Heard::Question(Ipv4Addr::from(bytes::<4>(body, 24)?).into(), mac)),
        false => Some(Heard::Holder(sender.into(), mac)),
    }
}

/// Questions with a source address are those of clients, which the kernel answers.
fn read_icmp(body: &[u8], source: Mac, is_anonymous: bool) -> Option<Heard> {
    let target = Ipv6Addr::from(bytes::<16>(body, 8)?).into();
    match *body.first()? {
        SOLICITATION => is_anonymous.then_some(Heard::Question(target, source)),
        ADVERTISEMENT => Some(Heard::Holder(target, source)),
        _ => None,
    }
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> Option<[u8; N]> {
    from.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Mac = [2, 0, 0, 0, 0, 1];

    #[test]
    fn frames_are_read_as_they_are_written() {
        let v4: Ipv4Addr = "192.168.1.240".parse().expect("an address");
        let v6: Ipv6Addr = "fd00::12:3456".parse().expect("an address");
        let question = arp(REQUEST, (BROADCAST, OURS), Ipv4Addr::UNSPECIFIED, (NOBODY, v4));
        assert_eq!(question.len(), 42);
        assert_eq!(read(&question), Some(Heard::Question(v4.into(), OURS)));
        let quiet = arp(REQUEST, (OURS, OURS), Ipv4Addr::UNSPECIFIED, (NOBODY, v4));
        assert_eq!(read(&quiet), None, "asked of one machine");
        let told = arp(REPLY, (BROADCAST, OURS), v4, (OURS, v4));
        assert_eq!(read(&told), Some(Heard::Holder(v4.into(), OURS)));
        let group = solicited_nodes(v6);
        assert_eq!(group.to_string(), "ff02::1:ff12:3456");
        assert_eq!(multicast(group), [0x33, 0x33, 0xff, 0x12, 0x34, 0x56]);
        let body = neighbour_message(SOLICITATION, 0, v6, None);
        let question = icmp((multicast(group), OURS), Ipv6Addr::UNSPECIFIED, group, body);
        assert_eq!(read(&question), Some(Heard::Question(v6.into(), OURS)));
        let body = neighbour_message(ADVERTISEMENT, OVERRIDE, v6, Some(OURS));
        let told = icmp((multicast(ALL_NODES), OURS), v6, ALL_NODES, body);
        assert_eq!(read(&told), Some(Heard::Holder(v6.into(), OURS)));
        // The sum over everything, the checksum included, is all ones.
        let mut pseudo = told[ETHERNET + 8..].to_vec();
        pseudo.extend([0, 0, 0, 32, 0, 0, 0, ICMPV6]);
        assert_eq!(checksum(&pseudo), 0);
    }

    #[test]
    fn short_and_foreign_frames_are_ignored() {
        let full = arp(REPLY, (BROADCAST, OURS), Ipv4Addr::LOCALHOST, (OURS, Ipv4Addr::LOCALHOST));
        for length in 0..32 {
            assert_eq!(read(&full[..length]), None, "{length}");
        }
        let mut foreign = full;
        foreign[12] = 0x12;
        assert_eq!(read(&foreign), None);
    }
}
