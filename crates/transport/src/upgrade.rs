//! Connections that stop being HTTP: taking them over on a server, asking for them as a client, and
//! passing them on.

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

/// On the server: the stream of a request, once the 101 response has been sent. Take this before
/// answering, await it after, in a task of your own.
pub fn server_io<B>(
    request: &mut Request<B>,
) -> impl Future<Output = hyper::Result<UpgradedIo>> + use<B> {
    let upgrade: OnUpgrade = hyper::upgrade::on(request);
    async move { upgrade.await.map(TokioIo::new) }
}

/// Copies both ways until one side has ended, and [`LINGER`] longer the other way: what is on its
/// way arrives, and a side that stays silent holds nothing open. This is how exec, attach and
/// port-forward cross a server that only looks at their request.
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
    // The end of the second way tells nothing that the first did not.
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

/// How long the other way stays open when one has ended. Upstream: containerd's port-forward.
pub const LINGER: Duration = Duration::from_secs(1);

/// Copies to the end, and passes the end on.
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

    /// One side says its word and ends; the other hears all of it, and stays silent.
    #[tokio::test(start_paused = true)]
    async fn a_silent_side_holds_nothing_open() {
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
