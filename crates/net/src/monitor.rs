//! Notices other programs' changes to the kernel's network, with netlink's multicast groups.
//!
//! ```text
//!  `nft flush ruleset`, `ip link del`, a firewall's restart ─► kernel ─► Monitor::told
//! ```
//!
//! In: a namespace. Out: a wait that ends when a relevant change happens. The caller then restores
//! its objects there, so no polling is needed.
//!
//! Invariants: rule changes through the given socket are not reported: a filter in the kernel drops
//! them, because a large transaction would fill the buffer. For links, only losses are reported, so
//! that restoring an object reports nothing. Lost messages count as a relevant change.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt,
    socket, sockopt,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::{During, Error};
use crate::netns;
use crate::nft::wire::{GENERIC_HEADER, HEADER, SUBSYSTEM, attributes};
use crate::nft::{self, Nft};

const RECEIVE_BUFFER: usize = 1 << 20;
const BUFFER: usize = 64 << 10;
/// The offset of the header field with the sender's port id.
const SENDER_AT: u32 = 12;
const RULES: u32 = 1 << (libc::NFNLGRP_NFTABLES - 1);
const LINKS: u32 = (libc::RTMGRP_LINK
    | libc::RTMGRP_NEIGH
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV6_ROUTE) as u32;
/// The message with a new generation number, which belongs to no table.
const NFT_MSG_NEWGEN: u16 = 15;
const NFTA_TABLE: u16 = 1;
const RTA_OIF: u16 = 4;
/// The length of `rtmsg`, which precedes the attributes.
const ROUTE_HEADER: usize = 12;

/// A change that another program made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// A table of nftables, by its family's number.
    Rules { family: u8, table: &'a str },
    /// The link of this index was removed or set down, or lost an address or a route.
    Link(u32),
    /// The link of this index lost a neighbour.
    Neighbour(u32),
}

/// A netlink socket that receives notifications.
pub struct Monitor {
    socket: AsyncFd<OwnedFd>,
    /// A relevant change happened since the last [`Monitor::forget`].
    told: bool,
}

impl Monitor {
    /// Watches nftables for changes by others than `own`.
    pub fn of_rules(netns: Option<&Path>, own: &Nft) -> Result<Self, nft::Error> {
        let filter = all_but(own.port()?);
        Ok(Self::open(netns, SockProtocol::NetlinkNetFilter, RULES, &filter)?)
    }

    /// Watches links, routes and neighbours for losses.
    pub fn of_links(netns: Option<&Path>) -> Result<Self, Error> {
        Self::open(netns, SockProtocol::NetlinkRoute, LINKS, &[])
    }

    fn open(
        netns: Option<&Path>,
        protocol: SockProtocol,
        groups: u32,
        filter: &[libc::sock_filter],
    ) -> Result<Self, Error> {
        let listen = || listen(protocol, groups, filter);
        let listening = match netns {
            Some(path) => netns::run(path, listen)?,
            None => listen(),
        };
        let during = || "listen to the kernel".into();
        let fd = listening.during(during)?;
        // SAFETY: the registration owns the descriptor and closes it.
        let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        let socket = registered.map_err(io::Error::from).during(during)?;
        Ok(Self { socket, told: false })
    }

    /// Resolves after a relevant change, then at once until [`Monitor::forget`]. Dropping the
    /// future loses nothing.
    pub async fn told(&mut self, matters: impl Fn(Change<'_>) -> bool) -> Result<(), Error> {
        let during = || "listen to the kernel".into();
        while !self.told {
            let mut ready = self.socket.readable().await.during(during)?;
            let told = drain(ready.get_inner(), &matters).during(during)?;
            ready.clear_ready();
            self.told = told;
        }
        Ok(())
    }

    /// Forgets the changes until now. Call this before restoring the objects.
    pub fn forget(&mut self) -> Result<(), Error> {
        self.told = false;
        drain(self.socket.get_ref(), &|_| false).during(|| "listen to the kernel".into())?;
        Ok(())
    }
}

fn listen(
    protocol: SockProtocol,
    groups: u32,
    filter: &[libc::sock_filter],
) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
    // May fail without harm: lost messages count as a change.
    let _ = setsockopt(&fd, sockopt::RcvBufForce, &RECEIVE_BUFFER);
    if !filter.is_empty() {
        attach(&fd, filter)?;
    }
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    Ok(fd)
}

/// A socket filter that drops notifications about one socket's requests. All messages of one
/// datagram belong to one request.
fn all_but(port: u32) -> [libc::sock_filter; 4] {
    let step = |code: u32, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    // The filter loads words as big-endian; this one is in host byte order.
    let port = u32::from_be_bytes(port.to_ne_bytes());
    [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, SENDER_AT),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, port),
        step(libc::BPF_RET | libc::BPF_K, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, 0, u32::MAX),
    ]
}

pub(crate) fn attach(fd: &OwnedFd, filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: filter.len() as libc::c_ushort,
        // The kernel copies the filter and does not write to it.
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the descriptor is open; pointer and length describe `program`, which describes
    // `filter`; both outlive the call.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    Errno::result(done).map(drop).map_err(io::Error::from)
}

/// Reads all queued messages; returns whether one of them matters.
fn drain(fd: &OwnedFd, matters: &impl Fn(Change<'_>) -> bool) -> io::Result<bool> {
    let mut buffer = vec![0; BUFFER];
    let mut told = false;
    loop {
        match recv(fd.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            Ok(size) => told |= tells(&buffer[..size], matters),
            // Messages were lost.
            Err(Errno::ENOBUFS) => told = true,
            Err(Errno::EINTR) => {}
            Err(Errno::EWOULDBLOCK) => return Ok(told),
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn tells(mut bytes: &[u8], matters: &impl Fn(Change<'_>) -> bool) -> bool {
    let mut told = false;
    while let Some(length) = number(bytes, 0).map(|n| n as usize).filter(|n| *n >= HEADER) {
        let Some(message) = bytes.get(..length) else { break };
        let kind = u16::from_ne_bytes([message[4], message[5]]);
        told |= change(kind, &message[HEADER..]).is_some_and(matters);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    told
}

fn change(kind: u16, body: &[u8]) -> Option<Change<'_>> {
    if kind >> 8 == SUBSYSTEM {
        return rules(kind & 0xff, body);
    }
    // In `ifinfomsg`, `ifaddrmsg` and `ndmsg` the link's index follows four bytes.
    let link = number(body, 4).map(Change::Link);
    match kind {
        libc::RTM_DELLINK | libc::RTM_DELADDR => link,
        libc::RTM_NEWLINK => link.filter(|_| went_down(body)),
        // The kernel removes multicast neighbours by itself.
        libc::RTM_DELNEIGH if body.get(8..10).is_some_and(is_static) => None,
        libc::RTM_DELNEIGH => number(body, 4).map(Change::Neighbour),
        libc::RTM_DELROUTE => {
            let attributes = attributes(body.get(ROUTE_HEADER..)?);
            let mut links = attributes.filter(|(kind, _)| *kind == RTA_OIF);
            links.find_map(|(_, index)| number(index, 0)).map(Change::Link)
        }
        _ => None,
    }
}

fn rules(kind: u16, body: &[u8]) -> Option<Change<'_>> {
    if kind == NFT_MSG_NEWGEN {
        return None;
    }
    // Attribute 1 of every object is its table; for a table it is its own name.
    let mut attributes = attributes(body.get(GENERIC_HEADER..)?);
    let (_, table) = attributes.find(|(kind, _)| *kind == NFTA_TABLE)?;
    let table = std::str::from_utf8(table).ok()?.trim_end_matches('\0');
    Some(Change::Rules { family: *body.first()?, table })
}

/// `ifinfomsg` has the link's flags and a mask of changed flags. For a new link the mask is all
/// ones, and the link is not up yet.
fn went_down(body: &[u8]) -> bool {
    let (Some(flags), Some(changed)) = (number(body, 8), number(body, 12)) else { return false };
    changed != u32::MAX && changed & !flags & libc::IFF_UP as u32 != 0
}

fn is_static(state: &[u8]) -> bool {
    state.try_into().is_ok_and(|state| u16::from_ne_bytes(state) & libc::NUD_NOARP != 0)
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_report_losses() {
        let told = |kind: u16, words: &[u32], expected: Option<Change<'_>>| {
            let body: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(change(kind, &body), expected, "{kind} {words:x?}");
        };
        let check = |kind: u16, words: &[u32], expected: Option<u32>| {
            told(kind, words, expected.map(Change::Link));
        };
        // Family, index, flags, mask of changed flags: the kernel's messages for a VXLAN device.
        check(libc::RTM_NEWLINK, &[0, 3, 0x1002, u32::MAX], None);
        check(libc::RTM_NEWLINK, &[0, 3, 0x11043, 1], None);
        check(libc::RTM_NEWLINK, &[0, 3, 0x1002, 0], None);
        check(libc::RTM_NEWLINK, &[0, 3, 0x1002, 1], Some(3));
        check(libc::RTM_DELLINK, &[0, 3, 0x1002, u32::MAX], Some(3));
        check(libc::RTM_DELADDR, &[2, 3], Some(3));
        // Family, index, state: a permanent neighbour, and a multicast one.
        told(libc::RTM_DELNEIGH, &[2, 3, 0x80], Some(Change::Neighbour(3)));
        check(libc::RTM_DELNEIGH, &[10, 3, 0x40], None);
        // Three words, then the attribute with the link.
        let (length, kind) = (8u16.to_ne_bytes(), RTA_OIF.to_ne_bytes());
        let attribute = u32::from_ne_bytes([length[0], length[1], kind[0], kind[1]]);
        check(libc::RTM_DELROUTE, &[0, 0, 0, attribute, 3], Some(3));
        check(libc::RTM_DELROUTE, &[0, 0], None);
        check(libc::RTM_NEWROUTE, &[0, 0, 0, attribute, 3], None);
        check(libc::RTM_NEWLINK, &[0], None);
    }
}
