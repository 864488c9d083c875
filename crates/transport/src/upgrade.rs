//! Upgraded connections: taking them over on a server, requesting them as a client, and forwarding them.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{Either, select};
use http::{Request, Response};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

/// A raw byte stream after `101 Switching Protocols`.
pub type UpgradedIo = TokioIo<Upgraded>;

/// The answer to a request for an upgrade.
pub enum Upgrade {
    /// 101: the response's head, and the stream behind it.
    Switched(http::response::Parts, UpgradedIo),
    /// Anything else, with its whole (bounded) body.
    Refused(Response<Bytes>),
}

/// On the server: the stream of a request, after the 101 response was sent. Call this before
/// answering, and await it afterwards in a separate task.
pub fn server_io<B>(
    request: &mut Request<B>,
) -> impl Future<Output = hyper::Result<UpgradedIo>> + use<B> {
    let upgrade: OnUpgrade = hyper::upgrade::on(request);
    async move { upgrade.await.map(TokioIo::new) }
}

/// Copies both ways until one side has ended, and [`LINGER`] longer the other way: data in flight
/// arrives, and a silent side cannot keep the connection open. Exec, attach and port-forward pass
/// through a server like this if it only inspects the request.
/// Upstream: `UpgradeAwareHandler`, which closes both sides at the first end.
pub async fn forward<A, B>(one: A, other: B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite,
    B: AsyncRead + AsyncWrite,
{
    let (from_one, to_one) = tokio::io::split(one);
    let (from_other, to_other) = tokio::io::split(other);
    let there = std::pin::pin!(carry(from_one, to_other));
    let back = std::pin::pin!(carry(from_other, to_one));
    // The result of the second direction adds nothing to the first.
    match select(there, back).await {
        Either::Left((ended, rest)) => {
            let _ = tokio::time::timeout(LINGER, rest).await;
            ended
        }
        Either::Right((ended, rest)) => {
            let _ = tokio::time::timeout(LINGER, rest).await;
            ended
        }
    }
}

/// How long the other direction stays open after one has ended. Upstream: containerd's port-forward.
pub const LINGER: Duration = Duration::from_secs(1);

/// Copies to the end, then shuts the target down.
pub async fn carry(from: impl AsyncRead, to: impl AsyncWrite) -> io::Result<()> {
    let (mut from, mut to) = (std::pin::pin!(from), std::pin::pin!(to));
    let copied = tokio::io::copy(&mut from, &mut to).await;
    let ended = to.shutdown().await;
    copied.and(ended)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// One side sends a text and ends; the other reads all of it and stays silent.
    #[tokio::test(start_paused = true)]
    async fn a_silent_side_does_not_keep_the_connection_open() {
        for (client_ends, word) in [(true, "to the pod"), (false, "to the client")] {
            let (mut client, near) = tokio::io::duplex(4);
            let (mut pod, far) = tokio::io::duplex(4);
            let (speaker, listener) =
                if client_ends { (&mut client, &mut pod) } else { (&mut pod, &mut client) };
            let mut heard = String::new();
            let speak = async {
                speaker.write_all(word.as_bytes()).await.expect("writes");
                speaker.shutdown().await.expect("ends");
            };
            let ((), read, forwarded) =
                tokio::join!(speak, listener.read_to_string(&mut heard), forward(near, far));
            read.expect("reads");
            forwarded.expect("ends well");
            assert_eq!(heard, word);
        }
    }
}
