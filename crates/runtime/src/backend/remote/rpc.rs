//! One connection to one socket, and the texts of its errors.

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use cri::{Error, Result};
use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// Upstream: the size limit of lists and command output.
const ANSWER_LIMIT: usize = 16 << 20;
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The kernel's limit on a socket's path.
const SOCKET_PATH: usize = 108;

/// Cheap to clone; clones share the connection. The first call connects, and so does the first call
/// after a loss.
#[derive(Clone)]
pub(super) struct Rpc {
    grpc: Grpc<Channel>,
    socket: PathBuf,
}

/// The answer of calls without a result. Unknown fields are ignored.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Nothing {}

/// `unix:///run/x.sock`, `unix:/run/x.sock` or `/run/x.sock`.
pub(super) fn socket_path(endpoint: &str) -> std::result::Result<PathBuf, String> {
    let path = endpoint.strip_prefix("unix://").or_else(|| endpoint.strip_prefix("unix:"));
    let path = match (path, endpoint.split_once("://")) {
        (Some(path), _) => path,
        (None, Some((scheme, _))) => {
            return Err(format!("protocol {scheme:?} not supported, only unix sockets are"));
        }
        (None, None) => endpoint,
    };
    if !path.starts_with('/') {
        return Err("expected the absolute path of a unix socket".into());
    }
    if path.len() >= SOCKET_PATH {
        return Err(format!("the path of a unix socket has fewer than {SOCKET_PATH} bytes"));
    }
    Ok(path.into())
}

impl Rpc {
    pub fn new(endpoint: &str) -> Result<Self> {
        let wrong = |why: String| Error::InvalidArgument(format!("endpoint {endpoint:?}: {why}"));
        let socket = socket_path(endpoint).map_err(wrong)?;
        let channel = Endpoint::from_shared(format!("unix://{}", socket.display()))
            .map_err(|error| wrong(error.to_string()))?
            .connect_timeout(CONNECT_LIMIT)
            .origin(http::Uri::from_static("http://localhost"))
            .connect_lazy();
        let grpc = Grpc::new(channel)
            .max_decoding_message_size(ANSWER_LIMIT)
            .max_encoding_message_size(ANSWER_LIMIT);
        Ok(Self { grpc, socket })
    }

    /// A call with one request and one answer. The timeout is also sent to the runtime, which then
    /// stops its work.
    pub async fn call<Q, A>(
        &self,
        path: &'static str,
        request: Q,
        limit: Option<Duration>,
    ) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut request = Request::new(request);
        let mut grpc = self.grpc.clone();
        if let Some(limit) = limit {
            request.set_timeout(limit);
        }
        let call = async {
            grpc.ready().await.map_err(|error| self.lost(&error))?;
            let path = PathAndQuery::from_static(path);
            let answer = grpc.unary(request, path, ProstCodec::default()).await;
            answer.map(tonic::Response::into_inner).map_err(|status| self.error(&status))
        };
        match limit {
            None => call.await,
            Some(limit) => tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
                Err(Error::DeadlineExceeded("context deadline exceeded".into()))
            }),
        }
    }

    /// A call with a stream of answers. Resolves with the response headers, which some runtimes
    /// send only with the first answer.
    pub async fn stream<Q, A>(&self, path: &'static str, request: Q) -> Result<Streaming<A>>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(|error| self.lost(&error))?;
        let path = PathAndQuery::from_static(path);
        let answers = grpc.server_streaming(Request::new(request), path, ProstCodec::default());
        answers.await.map(tonic::Response::into_inner).map_err(|status| self.error(&status))
    }

    pub fn error(&self, status: &Status) -> Error {
        if let Some(cause) = status.source() {
            return self.lost(cause);
        }
        let text = status.message().to_owned();
        match status.code() {
            Code::NotFound => Error::NotFound(text),
            Code::AlreadyExists => Error::AlreadyExists(text),
            Code::InvalidArgument => Error::InvalidArgument(text),
            Code::FailedPrecondition => Error::FailedPrecondition(text),
            Code::Unavailable => Error::Unavailable(text),
            Code::PermissionDenied | Code::Unauthenticated => Error::PermissionDenied(text),
            Code::DeadlineExceeded => Error::DeadlineExceeded(text),
            Code::ResourceExhausted => Error::ResourceExhausted(text),
            Code::Unimplemented => Error::Unimplemented(text),
            _ => Error::Internal(text),
        }
    }

    /// The error for a call without an answer, in the words of gRPC for Go, which people search for.
    fn lost(&self, error: &(dyn std::error::Error + 'static)) -> Error {
        let mut cause = error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        let refused = cause.downcast_ref::<io::Error>().filter(|error| {
            use io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
            matches!(error.kind(), ConnectionRefused | NotFound | PermissionDenied)
        });
        Error::Unavailable(match refused {
            Some(error) => format!(
                "connection error: desc = \"transport: Error while dialing: dial unix {}: connect: {}\"",
                self.socket.display(),
                plain(error)
            ),
            None => format!("error reading from server: {cause}"),
        })
    }
}

/// The error text as C and Go spell it.
fn plain(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory",
        io::ErrorKind::PermissionDenied => "permission denied",
        _ => "connection refused",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_unix_sockets() {
        let check = |endpoint: &str, expected: Option<&str>| {
            let got = socket_path(endpoint).ok();
            assert_eq!(got.as_deref().and_then(|path| path.to_str()), expected, "{endpoint}");
        };
        check("unix:///run/c/c.sock", Some("/run/c/c.sock"));
        check("unix:/run/c.sock", Some("/run/c.sock"));
        check("/run/c.sock", Some("/run/c.sock"));
        check("tcp://127.0.0.1:1", None);
        check("npipe://x", None);
        check("c.sock", None);
        check("unix://c.sock", None);
        check("", None);
        check(&format!("/{}", "x".repeat(108)), None);
    }

    #[tokio::test]
    async fn a_missing_runtime_is_unavailable_with_upstreams_message() {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("none.sock");
        let rpc = Rpc::new(&socket.display().to_string()).expect("an endpoint");
        let call = rpc.call("/runtime.v1.RuntimeService/Version", Nothing {}, None);
        let answer: Result<Nothing> = call.await;
        let expected = format!(
            "connection error: desc = \"transport: Error while dialing: dial unix {}: connect: \
             no such file or directory\"",
            socket.display()
        );
        assert_eq!(answer, Err(Error::Unavailable(expected)));
    }
}
