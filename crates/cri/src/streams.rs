//! Byte streams of exec, attach and port-forward, and the stream of container events.

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, oneshot};

use crate::{ContainerEventResponse, Result};

pub trait ReadWrite: AsyncRead + AsyncWrite {}
impl<T: AsyncRead + AsyncWrite> ReadWrite for T {}

/// A connection.
pub type Io = Box<dyn ReadWrite + Send + Unpin>;
/// What the process reads; shutting it down (or dropping it) is end-of-file there.
pub type Input = Box<dyn AsyncWrite + Send + Unpin>;
/// What the process writes.
pub type Output = Box<dyn AsyncRead + Send + Unpin>;

/// Container events in order. The channel is bounded: a reader that falls too far behind sees
/// [`tokio::sync::broadcast::error::RecvError::Lagged`] and lists again.
pub type Events = tokio::sync::broadcast::Receiver<ContainerEventResponse>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    pub width: u16,
    pub height: u16,
}

/// A process started by exec. The streams asked for are there; with a terminal there is no
/// separate `stderr`. Dropping all of it does not kill the process.
pub struct ExecStreams {
    pub stdin: Option<Input>,
    pub stdout: Option<Output>,
    pub stderr: Option<Output>,
    /// There with a terminal only.
    pub resize: Option<mpsc::Sender<TerminalSize>>,
    /// The exit code (128 + n after signal n), once, after the process ended. The outputs may still
    /// hold bytes then.
    pub exit: oneshot::Receiver<Result<i32>>,
}

/// The running container's own streams. The outputs end when the container does.
pub struct AttachStreams {
    pub stdin: Option<Input>,
    pub stdout: Option<Output>,
    pub stderr: Option<Output>,
    pub resize: Option<mpsc::Sender<TerminalSize>>,
}
