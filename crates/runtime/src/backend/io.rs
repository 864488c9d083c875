//! Pipes and terminals as async streams.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use cri::TerminalSize;
use nix::fcntl::OFlag;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::pipe;

/// A pipe: we read, the child process writes.
pub(super) fn output_pipe() -> io::Result<(pipe::Receiver, OwnedFd)> {
    let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    Ok((pipe::Receiver::from_owned_fd(reader)?, writer))
}

/// A pipe: we write, the child process reads.
pub(super) fn input_pipe() -> io::Result<(PipeInput, OwnedFd)> {
    let (reader, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    Ok((PipeInput::new(writer)?, reader))
}

/// The writing end of a pipe. Shutdown closes it, which is end-of-file for the reader.
pub(super) struct PipeInput(Option<pipe::Sender>);

impl PipeInput {
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self(Some(pipe::Sender::from_owned_fd(fd)?)))
    }
}

impl AsyncWrite for PipeInput {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.0 {
            Some(pipe) => Pin::new(pipe).poll_write(context, bytes),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0 = None;
        Poll::Ready(Ok(()))
    }
}

/// The master side of a terminal. Clones share it.
#[derive(Clone)]
pub(super) struct Terminal(Arc<AsyncFd<OwnedFd>>);

impl Terminal {
    /// The descriptor must be non-blocking already (the shim sets that).
    pub(super) fn new(master: OwnedFd) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` gives out one descriptor, which stays open for its lifetime.
        Ok(Self(Arc::new(unsafe { AsyncFd::register(master) }?)))
    }

    pub(super) fn resize(&self, size: TerminalSize) -> io::Result<()> {
        let size =
            libc::winsize { ws_row: size.height, ws_col: size.width, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: `size` has the type that this request reads.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCSWINSZ, &size) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl AsyncRead for Terminal {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(context))?;
            let read = guard.try_io(|fd| {
                let space = buffer.initialize_unfilled();
                nix::unistd::read(fd.get_ref(), space).map_err(io::Error::from)
            });
            match read {
                Ok(Ok(n)) => {
                    buffer.advance(n);
                    return Poll::Ready(Ok(()));
                }
                // No process holds the other side any more.
                Ok(Err(error)) if error.raw_os_error() == Some(libc::EIO) => {
                    return Poll::Ready(Ok(()));
                }
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                Err(_would_block) => {}
            }
        }
    }
}

impl AsyncWrite for Terminal {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_write_ready(context))?;
            let wrote =
                guard.try_io(|fd| nix::unistd::write(fd.get_ref(), bytes).map_err(io::Error::from));
            if let Ok(result) = wrote {
                return Poll::Ready(result);
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Deviation from pipes: a terminal has no half-close. Its client types the end-of-file character.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
