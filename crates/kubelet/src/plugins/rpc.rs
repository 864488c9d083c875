//! gRPC calls to the socket of a plugin, with the error texts of gRPC for Go.
//!
//! In: a call's name, a message. Out: the answer, or an error in the words of gRPC for Go, because
//! people search for those.

use std::error::Error as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// The kernel's limit of a socket's path.
const SOCKET_PATH: usize = 108;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rpc error: code = {code} desc = {text}")]
pub struct RpcError {
    /// In Go's spelling.
    pub code: String,
    pub text: String,
    /// The plugin has finished the call: none of its work goes on.
    /// Upstream: isFinalError.
    pub is_final: bool,
}

impl RpcError {
    fn new(code: Code, text: impl Into<String>) -> Self {
        use Code::{Aborted, Cancelled, DeadlineExceeded, ResourceExhausted, Unavailable};
        let open = [Cancelled, DeadlineExceeded, Unavailable, ResourceExhausted, Aborted];
        let code_text = match code {
            Cancelled => "Canceled".to_string(),
            other => format!("{other:?}"),
        };
        Self { code: code_text, text: text.into(), is_final: !open.contains(&code) }
    }
}

impl RpcError {
    /// The plugin could not be reached.
    pub fn is_unavailable(&self) -> bool {
        self.code == "Unavailable"
    }
}

/// A connection that is made at the first call, and again after it was lost. Clones share it.
#[derive(Clone)]
pub struct Rpc {
    grpc: Grpc<Channel>,
    socket: PathBuf,
}

impl Rpc {
    pub fn new(socket: &Path) -> Result<Self, RpcError> {
        let wrong = |why: &str| {
            RpcError::new(Code::Unavailable, format!("dial unix {}: {why}", socket.display()))
        };
        if socket.as_os_str().len() >= SOCKET_PATH {
            return Err(wrong("connect: invalid argument"));
        }
        let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))
            .map_err(|error| wrong(&error.to_string()))?
            .connect_timeout(CONNECT_LIMIT)
            .origin(http::Uri::from_static("http://localhost"))
            .connect_lazy();
        Ok(Self { grpc: Grpc::new(channel), socket: socket.into() })
    }

    /// A unary call. The plugin, too, gets the deadline.
    pub async fn call<Q, A>(
        &self,
        path: &'static str,
        request: Q,
        limit: Duration,
    ) -> Result<A, RpcError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut request = Request::new(request);
        request.set_timeout(limit);
        let mut grpc = self.grpc.clone();
        let call = async {
            grpc.ready().await.map_err(|error| self.lost(&error))?;
            let path = PathAndQuery::from_static(path);
            let answer = grpc.unary(request, path, ProstCodec::default()).await;
            answer.map(tonic::Response::into_inner).map_err(|status| self.error(&status))
        };
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            Err(RpcError::new(Code::DeadlineExceeded, "context deadline exceeded"))
        })
    }

    /// A call that answers until the plugin ends the stream or exits.
    pub async fn stream<Q, A>(
        &self,
        path: &'static str,
        request: Q,
    ) -> Result<Streaming<A>, RpcError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(|error| self.lost(&error))?;
        let path = PathAndQuery::from_static(path);
        let answer = grpc.server_streaming(Request::new(request), path, ProstCodec::default());
        answer.await.map(tonic::Response::into_inner).map_err(|status| self.error(&status))
    }

    pub fn error(&self, status: &Status) -> RpcError {
        match status.source() {
            Some(cause) => self.lost(cause),
            None => RpcError::new(status.code(), status.message()),
        }
    }

    /// The error of a call without an answer.
    fn lost(&self, error: &(dyn std::error::Error + 'static)) -> RpcError {
        let mut cause = error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        let why = match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
            Some(io::ErrorKind::NotFound) => "no such file or directory",
            Some(io::ErrorKind::PermissionDenied) => "permission denied",
            Some(io::ErrorKind::ConnectionRefused) => "connection refused",
            _ => {
                let text = format!("error reading from server: {cause}");
                return RpcError::new(Code::Unavailable, text);
            }
        };
        let text = format!(
            "connection error: desc = \"transport: Error while dialing: dial unix {}: connect: {why}\"",
            self.socket.display(),
        );
        RpcError::new(Code::Unavailable, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volumes::csi::messages::Nothing;

    #[tokio::test]
    async fn a_plugin_that_is_not_there_is_unavailable_in_upstreams_words() {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("none.sock");
        let rpc = Rpc::new(&socket).expect("an endpoint");
        let call = rpc.call("/csi.v1.Node/NodeGetInfo", Nothing {}, testkit::wait::LONG);
        let answer: Result<Nothing, RpcError> = call.await;
        let error = answer.expect_err("no plugin listens");
        let expected = format!(
            "rpc error: code = Unavailable desc = connection error: desc = \"transport: Error \
             while dialing: dial unix {}: connect: no such file or directory\"",
            socket.display()
        );
        assert_eq!(error.to_string(), expected);
        assert!(!error.is_final);
    }
}
