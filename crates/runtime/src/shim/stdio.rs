//! The container's standard streams: pipes, or a pseudo terminal.

use std::fs::OpenOptions;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd::Uid;

use super::ShimConfig;

/// The shim's ends.
pub(super) struct Stdio {
    /// The writing end of the container's input.
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    /// The terminal's master: output, input and size.
    pub terminal: Option<OwnedFd>,
}

/// The container's ends.
pub(super) struct Given {
    pub stdin: Option<OwnedFd>,
    pub stdout: Option<OwnedFd>,
    pub stderr: Option<OwnedFd>,
    pub console: Option<Console>,
}

/// The socket on which the container's init sends its terminal's master.
pub(super) struct Console {
    pub path: PathBuf,
    listener: UnixListener,
}

pub(super) fn open(config: &ShimConfig) -> io::Result<(Stdio, Given)> {
    if config.terminal {
        let path = config.run.join("console.sock");
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        let console = Some(Console { path, listener });
        let none = Stdio { stdin: None, stdout: None, stderr: None, terminal: None };
        return Ok((none, Given { stdin: None, stdout: None, stderr: None, console }));
    }
    let (stdout, out) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let (stderr, err) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let (stdin, input) = if config.stdin {
        let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        (Some(writer), reader)
    } else {
        (None, OpenOptions::new().read(true).open("/dev/null")?.into())
    };
    set_nonblocking(&stdout)?;
    set_nonblocking(&stderr)?;
    Ok((
        Stdio { stdin, stdout: Some(stdout), stderr: Some(stderr), terminal: None },
        Given { stdin: Some(input), stdout: Some(out), stderr: Some(err), console: None },
    ))
}

impl Console {
    /// Call this when the init is ready: the socket's queue then holds the descriptor.
    pub(super) fn receive(self) -> io::Result<OwnedFd> {
        self.listener.set_nonblocking(true)?;
        let (socket, _) = self.listener.accept()?;
        socket.set_nonblocking(true)?;
        let master = receive_descriptor(socket.as_raw_fd())?;
        let _ = std::fs::remove_file(&self.path);
        set_nonblocking(&master)?;
        Ok(master)
    }
}

/// Receives one descriptor, and ignores the bytes with it.
pub(super) fn receive_descriptor(socket: RawFd) -> io::Result<OwnedFd> {
    let mut space = nix::cmsg_space!([RawFd; 1]);
    let mut bytes = [0; 64];
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket, &mut slices, Some(&mut space), flags)?;
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control
            && let Some(fd) = fds.first()
        {
            // SAFETY: the kernel just made this descriptor for us.
            return Ok(unsafe { OwnedFd::from_raw_fd(*fd) });
        }
    }
    Err(io::Error::other("the container sent no terminal descriptor"))
}

/// Makes the user own a pipe: programs open `/dev/stdout` again. Upstream: runc's fixStdioPermissions.
pub(super) fn give(stream: &OwnedFd, user: u32) {
    let is_pipe = fstat(stream).is_ok_and(|about| {
        SFlag::from_bits_truncate(about.st_mode & libc::S_IFMT) == SFlag::S_IFIFO
    });
    if is_pipe {
        // Best effort: descriptors that are open work anyway.
        let _ = nix::unistd::fchown(stream, Some(Uid::from_raw(user)), None);
    }
}

pub(super) fn set_nonblocking(fd: &impl AsFd) -> io::Result<()> {
    let flags = OFlag::from_bits_truncate(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
    Ok(())
}
