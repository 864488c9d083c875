//! The protocol of the shim's socket: JSON frames with a length prefix, with descriptors beside them.
//!
//! ```text
//!  4 bytes, big endian: n │ n bytes of JSON │ (SCM_RIGHTS with the first byte)
//! ```
//!
//! One request per connection. The shim answers once; `exec` and `wait` get a second frame with the
//! exit. A shim lives as long as its container, so the other side may have a later or an earlier version. So
//! fields are only added, unknown fields are ignored, and an unknown request gets an error.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub(crate) const VERSION: u32 = 1;
const FRAME_LIMIT: usize = 4 << 20;
const MAX_DESCRIPTORS: usize = 4;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub version: u32,
    pub call: Call,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub(crate) enum Call {
    Status,
    /// The answer comes when the container has ended.
    Wait,
    Kill {
        signal: i32,
        everything: bool,
    },
    ReopenLog,
    /// Descriptors: the process's stdin, stdout and stderr that `process` asks for. With a terminal
    /// there are none; the first answer carries its master.
    Exec {
        process: ExecProcess,
    },
    /// Descriptors: where to write the requested stdout and stderr. The answer carries the
    /// container's stdin and, with a terminal, its master.
    Attach {
        stdin: bool,
        stdout: bool,
        stderr: bool,
    },
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ExecProcess {
    pub args: Vec<String>,
    pub terminal: bool,
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    /// Sends SIGKILL to the process group when the caller disconnects before the exit.
    #[serde(default)]
    pub kill_on_hangup: bool,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Answer {
    pub version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// True when the request failed because the container has ended.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ended: bool,
    /// The process concerned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The kinds of the attached descriptors, in order: `stdin`, `terminal`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub descriptors: Vec<String>,
    /// The exit code of an exec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// The container's exit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit: Option<ExitRecord>,
}

/// How a container exited; the content of `exit.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExitRecord {
    /// The exit code, or 128 + n after signal n.
    pub code: i32,
    pub oom_killed: bool,
    /// Nanoseconds since 1970; 0 when it never started.
    pub started_at: i64,
    pub finished_at: i64,
    /// Empty for the usual reasons, which follow from the code.
    #[serde(default)]
    pub reason: String,
    #[serde(default)]
    pub message: String,
}

impl ExitRecord {
    /// Upstream: containerd's code and reason for a container that could not be started.
    pub(crate) fn start_failed(message: &str) -> Self {
        Self {
            code: 128,
            oom_killed: false,
            started_at: 0,
            finished_at: super::now_nanos(),
            reason: "StartError".into(),
            message: message.to_owned(),
        }
    }
}

pub(crate) fn send<T: Serialize>(socket: &UnixStream, value: &T, fds: &[RawFd]) -> io::Result<()> {
    let body = serde_json::to_vec(value)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?.to_be_bytes();
    let rights = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() { &rights[..0] } else { &rights[..] };
    let slices = [IoSlice::new(&length)];
    let sent = sendmsg::<()>(socket.as_raw_fd(), &slices, control, MsgFlags::MSG_NOSIGNAL, None)?;
    let mut socket = socket;
    socket.write_all(&length[sent..])?;
    socket.write_all(&body)
}

/// Blocks until a frame arrives, or until the socket's timeout.
pub(crate) fn receive<T: DeserializeOwned>(socket: &UnixStream) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut head = [0u8; 4];
    let (got, fds) = receive_head(socket, &mut head)?;
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut socket = socket;
    socket.read_exact(&mut head[got..])?;
    let length = u32::from_be_bytes(head) as usize;
    if length > FRAME_LIMIT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "frame too long"));
    }
    let mut body = vec![0; length];
    socket.read_exact(&mut body)?;
    Ok((serde_json::from_slice(&body)?, fds))
}

fn receive_head(socket: &UnixStream, head: &mut [u8; 4]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = nix::cmsg_space!([RawFd; MAX_DESCRIPTORS]);
    let mut slices = [IoSliceMut::new(head)];
    let message = recvmsg::<()>(
        socket.as_raw_fd(),
        &mut slices,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let mut fds = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = control {
            // SAFETY: the kernel just made these descriptors for us.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    Ok((message.bytes, fds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_carry_descriptors_and_unknown_requests_parse() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (reader, writer) = nix::unistd::pipe().expect("a pipe");
        let text = serde_json::json!({"version": 9, "call": {"op": "dance", "how": "well"}});
        send(&ours, &text, &[writer.as_raw_fd()]).expect("sent");
        drop(writer);
        let (request, mut fds) = receive::<Request>(&theirs).expect("received");
        assert!(matches!(request, Request { version: 9, call: Call::Unknown }));
        let mut writer = std::fs::File::from(fds.pop().expect("one descriptor"));
        writer.write_all(b"x").expect("written");
        let mut byte = [0];
        std::fs::File::from(reader).read_exact(&mut byte).expect("read");
        assert_eq!(&byte, b"x");
    }
}
