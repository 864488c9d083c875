//! Word from the kernel when somebody changes its network: netlink's multicast groups.
//!
//! ```text
//!  `nft flush ruleset`, `ip link del`, a firewall's restart ─► kernel ─► Monitor::told
//! ```
//!
//! In: a namespace; out: a wait that ends when a change matters to the caller, who then makes anew
//! what he made there. So nobody has to look again and again.
//!
//! Invariants: changes to rules that go through the given socket tell nothing (a filter in the kernel
//! keeps them out: a large transaction of one's own would fill the buffer); of links, only what takes
//! something away is told, so that making it anew tells nothing either; messages that were lost count
//! as a change that matters.

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
/// Where a message's header names the socket whose request it tells of.
const SENDER_AT: u32 = 12;
const RULES: u32 = 1 << (libc::NFNLGRP_NFTABLES - 1);
const LINKS: u32 = (libc::RTMGRP_LINK
    | libc::RTMGRP_NEIGH
    | libc::RTMGRP_IPV4_IFADDR
    | libc::RTMGRP_IPV6_IFADDR
    | libc::RTMGRP_IPV4_ROUTE
    | libc::RTMGRP_IPV6_ROUTE) as u32;
/// The number of a generation, which is no table's.
const NFT_MSG_NEWGEN: u16 = 15;
const NFTA_TABLE: u16 = 1;
const RTA_OIF: u16 = 4;
/// `rtmsg`, before its attributes.
const ROUTE_HEADER: usize = 12;

/// What somebody changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// A table of nftables, by its family's number.
    Rules { family: u8, table: &'a str },
    /// The link of this index is gone or down, or lost an address, a route or a neighbour.
    Link(u32),
}

/// A netlink socket that listens.
pub struct Monitor {
    socket: AsyncFd<OwnedFd>,
    /// Something that matters was told, and the caller does not know it yet.
    told: bool,
}

impl Monitor {
    /// Changes to nftables by others than `own`.
    pub fn of_rules(netns: Option<&Path>, own: &Nft) -> Result<Self, nft::Error> {
        let filter = all_but(own.port()?);
        Ok(Self::open(netns, SockProtocol::NetlinkNetFilter, RULES, &filter)?)
    }

    /// What links, routes and neighbours lose.
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
        // SAFETY: the descriptor is owned by what holds the registration, and closed with it.
        let registered = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
        let socket = registered.map_err(io::Error::from).during(during)?;
        Ok(Self { socket, told: false })
    }

    /// Resolves when a change that matters was told, and at once from then on until
    /// [`Monitor::forget`]: it may be dropped while it waits.
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

    /// What was told until now is about to be made good.
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
    // Not the end of the world without: what is lost counts as a change.
    let _ = setsockopt(&fd, sockopt::RcvBufForce, &RECEIVE_BUFFER);
    if !filter.is_empty() {
        attach(&fd, filter)?;
    }
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
    Ok(fd)
}

/// A filter that drops what tells of one socket's requests. All messages that come at once are of one
/// request.
fn all_but(port: u32) -> [libc::sock_filter; 4] {
    let step = |code: u32, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    // Words are loaded as if they were big-endian; this one is in the machine's order.
    let port = u32::from_be_bytes(port.to_ne_bytes());
    [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, SENDER_AT),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, port),
        step(libc::BPF_RET | libc::BPF_K, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, 0, u32::MAX),
    ]
}

fn attach(fd: &OwnedFd, filter: &[libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: filter.len() as libc::c_ushort,
        // The kernel copies it, and writes nothing.
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the descriptor is open, the pointer and length describe `program`, which describes
    // `filter`; both live through the call.
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

/// Reads all that is there; whether any of it matters.
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
    // `ifinfomsg`, `ifaddrmsg` and `ndmsg` have the link's index after four bytes.
    let link = number(body, 4).map(Change::Link);
    match kind {
        libc::RTM_DELLINK | libc::RTM_DELADDR => link,
        libc::RTM_NEWLINK => link.filter(|_| went_down(body)),
        // Those for multicast come and go by themselves.
        libc::RTM_DELNEIGH => link.filter(|_| !body.get(8..10).is_some_and(is_static)),
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
    // Whatever the object is, its table is attribute 1, and a table's own name too.
    let mut attributes = attributes(body.get(GENERIC_HEADER..)?);
    let (_, table) = attributes.find(|(kind, _)| *kind == NFTA_TABLE)?;
    let table = std::str::from_utf8(table).ok()?.trim_end_matches('\0');
    Some(Change::Rules { family: *body.first()?, table })
}

/// `ifinfomsg` has the link's flags, and which of them changed: all of them when it is new, and then
/// it is not up yet.
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
    fn messages_tell_what_is_lost() {
        let check = |kind: u16, words: &[u32], expected: Option<u32>| {
            let body: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(change(kind, &body), expected.map(Change::Link), "{kind} {words:x?}");
        };
        // Family, index, flags, which of them changed: as the kernel tells of a VXLAN device.
        check(libc::RTM_NEWLINK, &[0, 3, 0x1002, u32::MAX], None);
        check(libc::RTM_NEWLINK, &[0, 3, 0x11043, 1], None);
        check(libc::RTM_NEWLINK, &[0, 3, 0x1002, 0], None);
        check(libc::RTM_NEWLINK, &[0, 3, 0x1002, 1], Some(3));
        check(libc::RTM_DELLINK, &[0, 3, 0x1002, u32::MAX], Some(3));
        check(libc::RTM_DELADDR, &[2, 3], Some(3));
        // Family, index, state: permanent, and that of multicast.
        check(libc::RTM_DELNEIGH, &[2, 3, 0x80], Some(3));
        check(libc::RTM_DELNEIGH, &[10, 3, 0x40], None);
        // Three words, then the attribute of the link.
        let (length, kind) = (8u16.to_ne_bytes(), RTA_OIF.to_ne_bytes());
        let attribute = u32::from_ne_bytes([length[0], length[1], kind[0], kind[1]]);
        check(libc::RTM_DELROUTE, &[0, 0, 0, attribute, 3], Some(3));
        check(libc::RTM_DELROUTE, &[0, 0], None);
        check(libc::RTM_NEWROUTE, &[0, 0, 0, attribute, 3], None);
        check(libc::RTM_NEWLINK, &[0], None);
    }
}
