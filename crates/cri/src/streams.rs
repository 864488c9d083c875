//! Byte streams of exec, attach and port-forward, and the stream of container events.

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, oneshot};

use crate::{ContainerEventResponse, Result};

pub trait ReadWrite: AsyncRead + AsyncWrite {}
impl<T: AsyncRead + AsyncWrite> ReadWrite for T {}

/// A connection.
pub type Io = Box<dyn ReadWrite + Send + Unpin>;
/// The process's standard input; shutting it down (or dropping it) is end-of-file for the process.
pub type Input = Box<dyn AsyncWrite + Send + Unpin>;
/// An output of the process.
pub type Output = Box<dyn AsyncRead + Send + Unpin>;

/// Container events in order. The channel is bounded: a reader that lags too far gets
/// [`tokio::sync::broadcast::error::RecvError::Lagged`] and must list again.
pub type Events = tokio::sync::broadcast::Receiver<ContainerEventResponse>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    pub width: u16,
    pub height: u16,
}

/// A process started by exec. The requested streams are set; with a terminal there is no separate
/// `stderr`. Dropping everything does not kill the process.
pub struct ExecStreams {
    pub stdin: Option<Input>,
    pub stdout: Option<Output>,
    pub stderr: Option<Output>,
    /// Set with a terminal only.
    pub resize: Option<mpsc::Sender<TerminalSize>>,
    /// The exit code (128 + n after signal n), sent once after the process ended. The outputs may
    /// still hold bytes then.
    pub exit: oneshot::Receiver<Result<i32>>,
}

/// The running container's own streams. The outputs end when the container does.
pub struct AttachStreams {
    pub stdin: Option<Input>,
    pub stdout: Option<Output>,
    pub stderr: Option<Output>,
    pub resize: Option<mpsc::Sender<TerminalSize>>,
}
