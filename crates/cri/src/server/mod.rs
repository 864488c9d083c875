//! The server's side of CRI v1: a backend of this process for other programs, by a Unix socket.
//!
//! ```text
//! crictl, a kubelet ─► socket ─► grpc ─► calls: runtime.rs, images.rs ─► dyn Runtime
//!                 └─► 127.0.0.1 ─► streaming.rs: exec, attach, port-forward by one-time URLs
//! ```
//!
//! In: a backend and the path of the socket. Out: both services of `runtime.v1`. The socket is its owner's
//! alone: who reaches it can do all that root can.
//!
//! Invariants: an answer is the backend's answer; nothing is kept between calls except URLs that were not
//! used yet. The process that made a sandbox does not own it: a kubelet on the same backend removes sandboxes
//! of pods that it does not know.
//!
//! Upstream: containerd's CRI plugin. Deviation: `CheckpointContainer` is not implemented.

mod grpc;
mod images;
mod metrics;
mod runtime;
mod streaming;

use std::convert::Infallible;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::task::{Stop, Tasks};
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use http::Request;
use prost::Message;
use tonic::{Code, Status};
use transport::{Incoming, Limits, Listener};

use crate::{Error, Result, Runtime};
use grpc::Messages;
use streaming::Streaming;

const RUNTIME: &str = "/runtime.v1.RuntimeService/";
const IMAGES: &str = "/runtime.v1.ImageService/";
const DRAIN: Duration = Duration::from_secs(1);

/// Serves until `stop`. An error means that the socket cannot be opened.
pub async fn serve(runtime: Arc<dyn Runtime>, socket: PathBuf, stop: Stop) -> io::Result<()> {
    let listener = listen(&socket)?;
    let tasks = Tasks::new("cri");
    let _bound = tasks.bound();
    let streaming = Streaming::new(runtime.clone(), tasks.clone());
    let server = Server { runtime, streaming: Arc::new(streaming) };
    let service = tower::service_fn(move |request: Request<Incoming>| {
        let (server, path) = (server.clone(), request.uri().path().to_owned());
        async move {
            let run = move |body| async move { server.answer(&path, body).await }.boxed();
            Ok::<_, Infallible>(grpc::respond(request, run).await)
        }
    });
    tracing::info!(socket = %socket.display(), "serving the container runtime interface");
    let limits = Limits { drain: DRAIN, ..Limits::default() };
    transport::serve(listener, None, service, limits, stop).await;
    tasks.shutdown(DRAIN).await;
    // It may be gone already; the next start replaces it otherwise.
    let _ = std::fs::remove_file(&socket);
    Ok(())
}

/// Refuses to take the socket of a living process.
fn listen(socket: &Path) -> io::Result<Listener> {
    if is_served(socket) {
        let text = format!("another process serves {}", socket.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
    }
    if let Some(directory) = socket.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let listener = Listener::unix(socket)?;
    std::fs::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Whether a process listens on the socket.
pub fn is_served(socket: &Path) -> bool {
    std::os::unix::net::UnixStream::connect(socket).is_ok()
}

#[derive(Clone)]
struct Server {
    runtime: Arc<dyn Runtime>,
    streaming: Arc<Streaming>,
}

impl Server {
    async fn answer(&self, path: &str, body: Bytes) -> std::result::Result<Messages, Status> {
        let answered = match (path.strip_prefix(RUNTIME), path.strip_prefix(IMAGES)) {
            (Some("GetContainerEvents"), _) => return self.events().await.map_err(status),
            (Some(method), _) => self.runtime(method, body).await,
            (_, Some(method)) => self.images(method, body).await,
            _ => Ok(None),
        };
        let unknown = || {
            // In the words of gRPC for Go.
            let (service, method) = path.trim_matches('/').rsplit_once('/').unwrap_or_default();
            Error::Unimplemented(format!("unknown method {method} for service {service}"))
        };
        let message = answered.and_then(|bytes| bytes.ok_or_else(unknown)).map_err(status)?;
        Ok(futures::stream::iter([Ok(message)]).boxed())
    }
}

fn status(error: Error) -> Status {
    let code = match &error {
        Error::NotFound(_) => Code::NotFound,
        Error::AlreadyExists(_) => Code::AlreadyExists,
        Error::InvalidArgument(_) => Code::InvalidArgument,
        Error::FailedPrecondition(_) => Code::FailedPrecondition,
        Error::Unavailable(_) => Code::Unavailable,
        Error::PermissionDenied(_) => Code::PermissionDenied,
        Error::DeadlineExceeded(_) => Code::DeadlineExceeded,
        Error::ResourceExhausted(_) => Code::ResourceExhausted,
        Error::Unimplemented(_) => Code::Unimplemented,
        Error::Internal(_) => Code::Unknown,
    };
    Status::new(code, error.to_string())
}

fn read<Q: Message + Default>(body: Bytes) -> Result<Q> {
    Q::decode(body).map_err(|error| Error::InvalidArgument(format!("request: {error}")))
}

/// The answer of a known method.
fn reply(message: &impl Message) -> Result<Option<Bytes>> {
    Ok(Some(message.encode_to_vec().into()))
}

/// The answer of a method without results.
fn done() -> Result<Option<Bytes>> {
    Ok(Some(Bytes::new()))
}

fn required<T>(part: Option<T>, name: &str) -> Result<T> {
    part.ok_or_else(|| Error::InvalidArgument(format!("the request has no {name}")))
}
