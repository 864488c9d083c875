//! Connections that stop being HTTP: taking them over on a server, asking for them as a client, and
//! passing them on.

use std::io;

use bytes::Bytes;
use http::{Request, Response};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// A raw byte stream after `101 Switching Protocols`.
pub type UpgradedIo = TokioIo<Upgraded>;

/// The answer to a request for an upgrade.
pub enum Upgrade {
    /// 101: the response's head, and the stream behind it.
    Switched(http::response::Parts, UpgradedIo),
    /// Anything else, with its whole (bounded) body.
    Refused(Response<Bytes>),
}

/// On the server: the stream of a request, once the 101 response has been sent. Take this before
/// answering, await it after, in a task of your own.
pub fn server_io<B>(
    request: &mut Request<B>,
) -> impl Future<Output = hyper::Result<UpgradedIo>> + use<B> {
    let upgrade: OnUpgrade = hyper::upgrade::on(request);
    async move { upgrade.await.map(TokioIo::new) }
}

/// Copies both ways until both sides have ended (half-closes are passed on). This is how exec,
/// attach and port-forward cross a server that only looks at their request.
pub async fn forward<A, B>(mut one: A, mut other: B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    tokio::io::copy_bidirectional(&mut one, &mut other).await.map(|_| ())
}
