//! The socket for transactions. The kernel processes a transaction inside `send`, so all answers
//! are queued when it returns: no timeouts, no polling.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname,
    recv, send, setsockopt, socket, sockopt,
};

use super::wire::{Batch, HEADER, attributes};
use crate::netns;

const NLMSG_ERROR: u16 = 2;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSGERR_ATTR_MSG: u16 = 1;
/// The receive buffer: enough for a batch in which every request fails.
const RECEIVE_BUFFER: usize = 4 << 20;
const SPARE: usize = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused the transaction and applied nothing of it.
    #[error("nftables refused: {}", describe(.0))]
    Refused(Vec<Failure>),
    #[error("nftables socket: {0}")]
    Socket(#[from] io::Error),
    #[error("nftables gave no answer")]
    Silent,
    #[error(transparent)]
    Namespace(#[from] crate::Error),
}

/// A request that the kernel refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The refused request of the batch; none for the transaction as a whole.
    pub index: Option<usize>,
    pub about: String,
    pub errno: i32,
    /// The kernel's own error text, if any.
    pub message: Option<String>,
}

/// A netfilter socket of one network namespace.
pub struct Nft {
    fd: OwnedFd,
}

impl Nft {
    /// Opens a socket in the calling thread's namespace.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { fd: open_socket()? })
    }

    /// Opens a socket in the namespace pinned at `path`.
    pub fn open_in(path: &Path) -> Result<Self, Error> {
        netns::run(path, Self::open)?
    }

    /// The port id that the kernel puts into notifications about this socket's changes.
    pub(crate) fn port(&self) -> Result<u32, Error> {
        let own = || getsockname::<NetlinkAddr>(self.fd.as_raw_fd()).map_err(io::Error::from);
        if own()?.pid() == 0 {
            // The kernel chooses a port id.
            bind(self.fd.as_raw_fd(), &NetlinkAddr::new(0, 0)).map_err(io::Error::from)?;
        }
        Ok(own()?.pid())
    }

    /// Runs the transaction. Blocks while the kernel processes it (milliseconds; up to half a
    /// second for large ones).
    pub fn apply(&mut self, batch: &Batch) -> Result<(), Error> {
        if batch.is_empty() {
            return Ok(());
        }
        let bytes = batch.bytes();
        self.grow_send_buffer(bytes.len())?;
        let sent = retry(|| send(self.fd.as_raw_fd(), &bytes, MsgFlags::empty()))?;
        if sent != bytes.len() {
            return Err(io::Error::from(io::ErrorKind::WriteZero).into());
        }
        let answers = self.answers()?;
        let failures: Vec<Failure> =
            answers.iter().filter(|a| a.errno != 0).map(|a| a.failure(batch)).collect();
        match (answers.is_empty(), failures.is_empty()) {
            (true, _) => Err(Error::Silent),
            (_, true) => Ok(()),
            _ => Err(Error::Refused(failures)),
        }
    }

    fn grow_send_buffer(&self, bytes: usize) -> Result<(), Error> {
        let have =
            nix::sys::socket::getsockopt(&self.fd, sockopt::SndBuf).map_err(io::Error::from)?;
        if have < bytes + SPARE {
            setsockopt(&self.fd, sockopt::SndBufForce, &(bytes + SPARE))
                .map_err(io::Error::from)?;
        }
        Ok(())
    }

    fn answers(&self) -> Result<Vec<Answer>, Error> {
        let mut answers = Vec::new();
        let mut buffer = vec![0u8; SPARE];
        loop {
            match retry(|| recv(self.fd.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT)) {
                Ok(size) => parse(&buffer[..size], &mut answers),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(answers),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

pub(crate) fn open_socket() -> io::Result<OwnedFd> {
    let fd = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    // May fail without harm: the default buffer holds a thousand answers.
    let _ = setsockopt(&fd, sockopt::RcvBufForce, &RECEIVE_BUFFER);
    for option in [libc::NETLINK_EXT_ACK, libc::NETLINK_CAP_ACK] {
        let on: libc::c_int = 1;
        // SAFETY: the descriptor is open, the pointer and length describe `on`.
        let done = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_NETLINK,
                option,
                (&raw const on).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        Errno::result(done)?;
    }
    Ok(fd)
}

fn retry(mut call: impl FnMut() -> nix::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

struct Answer {
    sequence: u32,
    errno: i32,
    message: Option<String>,
}

impl Answer {
    fn failure(&self, batch: &Batch) -> Failure {
        let index = (self.sequence as usize).checked_sub(1).filter(|i| *i < batch.messages.len());
        let about = match index {
            Some(index) => batch.messages[index].about.clone(),
            None => "the transaction".into(),
        };
        Failure { index, about, errno: self.errno, message: self.message.clone() }
    }
}

/// Reads the answers in one datagram; ignores other messages.
fn parse(mut bytes: &[u8], answers: &mut Vec<Answer>) {
    let u16_at =
        |b: &[u8], at: usize| Some(u16::from_ne_bytes(b.get(at..at + 2)?.try_into().ok()?));
    let u32_at =
        |b: &[u8], at: usize| Some(u32::from_ne_bytes(b.get(at..at + 4)?.try_into().ok()?));
    while let Some(length) = u32_at(bytes, 0) {
        let length = length as usize;
        let (Some(message), true) = (bytes.get(..length), length >= HEADER) else { return };
        let kind = u16_at(message, 4).unwrap_or_default();
        let flags = u16_at(message, 6).unwrap_or_default();
        if let (NLMSG_ERROR, Some(code)) = (kind, u32_at(message, HEADER)) {
            // After the code comes the refused request: its header, or all of it unless capped.
            let echoed = u32_at(message, HEADER + 4).unwrap_or_default() as usize;
            let echoed = if flags & NLM_F_CAPPED != 0 { HEADER } else { echoed };
            let details = message.get(HEADER + 4 + echoed.next_multiple_of(4)..);
            let details = details.filter(|_| flags & NLM_F_ACK_TLVS != 0).unwrap_or_default();
            answers.push(Answer {
                sequence: u32_at(message, HEADER + 4 + 8).unwrap_or_default(),
                errno: (code as i32).saturating_neg(),
                message: attributes(details)
                    .find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG)
                    .map(|(_, text)| String::from_utf8_lossy(text).trim_end_matches('\0').into()),
            });
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

fn describe(failures: &[Failure]) -> String {
    let shown = failures.iter().take(3).map(|failure| {
        let error = io::Error::from_raw_os_error(failure.errno);
        let message = failure.message.as_deref().map(|m| format!(" ({m})")).unwrap_or_default();
        format!("{}: {error}{message}", failure.about)
    });
    let more = failures.len().saturating_sub(3);
    let rest = if more > 0 { format!("; and {more} more") } else { String::new() };
    shown.collect::<Vec<_>>().join("; ") + &rest
}
