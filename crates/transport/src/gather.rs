//! Collects the writes of a connection during one poll and sends them together.
//!
//! HTTP/2 flushes after each frame: the events of a thousand watchers would need as many TLS records and
//! system calls. Here frames are collected, and sent when the connection's task has no more work.
//!
//! In: a stream. Out: [`Gathering`], which replaces it, and its [`Outlet`], for the task that
//! drives the connection: [`Outlet::drive`].
//! Invariants: after a poll, only bytes that the peer does not accept are left. After the connection's end
//! they are dropped after [`LINGER`]. At most [`ROOM`] bytes are kept, and no memory while there is nothing
//! to write. Both halves belong to one task, so that the lock is free.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::serve::BoxIo;

/// The limit on waiting bytes: four usual HTTP/2 frames, or four of TLS's longest records.
const ROOM: usize = 64 << 10;
/// How long a peer may take to accept the last bytes.
const LINGER: Duration = Duration::from_secs(5);
/// Writes of this size are not copied: they fill a TLS record by themselves.
const LARGE: usize = 16 << 10;

/// The half that HTTP writes to.
pub(crate) struct Gathering(Arc<Mutex<Gathered>>);

/// The half that writes to the stream.
pub(crate) struct Outlet(Arc<Mutex<Gathered>>);

struct Gathered {
    io: BoxIo,
    waiting: Vec<u8>,
    /// How many bytes of `waiting` are written.
    written: usize,
    /// True if bytes were written since the last flush of the stream.
    is_unflushed: bool,
}

pub(crate) fn gather(io: BoxIo) -> (Gathering, Outlet) {
    let gathered = Gathered { io, waiting: vec![], written: 0, is_unflushed: false };
    let shared = Arc::new(Mutex::new(gathered));
    (Gathering(shared.clone()), Outlet(shared))
}

fn locked(shared: &Mutex<Gathered>) -> MutexGuard<'_, Gathered> {
    shared.lock().expect("no panic while held")
}

impl Gathered {
    fn poll_write_out(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.waiting.len() {
            let rest = &self.waiting[self.written..];
            let count = ready!(Pin::new(&mut self.io).poll_write(context, rest))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += count;
            self.is_unflushed = true;
        }
        (self.waiting, self.written) = (vec![], 0);
        Poll::Ready(Ok(()))
    }

    fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_write_out(context))?;
        if self.is_unflushed {
            ready!(Pin::new(&mut self.io).poll_flush(context))?;
            self.is_unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_take(
        &mut self,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let count = parts.iter().map(|part| part.len()).sum();
        if count >= LARGE || self.waiting.len() + count > ROOM {
            ready!(self.poll_write_out(context))?;
        }
        if count >= LARGE {
            self.is_unflushed = true;
            return Pin::new(&mut self.io).poll_write_vectored(context, parts);
        }
        parts.iter().for_each(|part| self.waiting.extend_from_slice(part));
        Poll::Ready(Ok(count))
    }
}

impl AsyncRead for Gathering {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut locked(&self.0).io).poll_read(context, buffer)
    }
}

impl AsyncWrite for Gathering {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        locked(&self.0).poll_take(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        locked(&self.0).poll_take(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: [`Outlet::drive`] flushes.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut gathered = locked(&self.0);
        ready!(gathered.poll_drain(context))?;
        Pin::new(&mut gathered.io).poll_shutdown(context)
    }
}

impl Outlet {
    /// Polls the connection, and writes its output after all other ready tasks had their turn: streams are
    /// separate tasks, and each of them wakes this one. Ends with an error of the stream, or with the
    /// connection. In that case its last bytes may be unsent ([`Outlet::finish`]).
    pub(crate) async fn drive<C, E>(&self, mut connection: Pin<&mut C>) -> Result<(), E>
    where
        C: Future<Output = Result<(), E>>,
        E: From<io::Error>,
    {
        let mut has_yielded = false;
        std::future::poll_fn(|context| {
            let outcome = connection.as_mut().poll(context);
            let mut gathered = locked(&self.0);
            let is_first = !std::mem::take(&mut has_yielded);
            if outcome.is_pending() && is_first && !gathered.waiting.is_empty() {
                has_yielded = true;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            match gathered.poll_drain(context) {
                Poll::Ready(Err(error)) if outcome.is_pending() => Poll::Ready(Err(error.into())),
                _ => outcome,
            }
        })
        .await
    }

    /// Waits until the peer has the last bytes of an ended connection: an answer to a client that sends no
    /// more, or the reason of the end. A peer that accepts nothing, or is gone, gets at most [`LINGER`].
    pub(crate) async fn finish(&self) {
        let rest = std::future::poll_fn(|context| locked(&self.0).poll_drain(context));
        let _ = tokio::time::timeout(LINGER, rest).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Records the size of each write and passes it on.
    struct Counted {
        io: tokio::io::DuplexStream,
        writes: Arc<Mutex<Vec<usize>>>,
    }

    impl AsyncRead for Counted {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_read(context, buffer)
        }
    }

    impl AsyncWrite for Counted {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let count = ready!(Pin::new(&mut self.io).poll_write(context, bytes))?;
            self.writes.lock().expect("no panic").push(count);
            Poll::Ready(Ok(count))
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_flush(context)
        }

        fn poll_shutdown(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_shutdown(context)
        }
    }

    /// Writes frames of these sizes, flushing each, then ends. Checks the sizes of the writes to a
    /// peer that accepts `room` bytes at a time, and that all bytes arrive in order.
    async fn check(frames: &[usize], room: usize, expected: Option<&[usize]>) {
        let (near, mut far) = tokio::io::duplex(room);
        let writes = Arc::new(Mutex::new(vec![]));
        let io = Counted { io: near, writes: writes.clone() };
        let (mut gathering, outlet) = gather(Box::new(io));
        let sent: Vec<u8> = (0..frames.iter().sum()).map(|index: usize| index as u8).collect();
        let connection = async {
            let mut rest = &sent[..];
            for frame in frames {
                let (head, tail) = rest.split_at(*frame);
                gathering.write_all(head).await?;
                gathering.flush().await?;
                rest = tail;
            }
            // Meanwhile the task waits for something else.
            tokio::task::yield_now().await;
            gathering.shutdown().await
        };
        let connection = std::pin::pin!(connection);
        let mut got = vec![];
        let (driven, read) =
            tokio::join!(outlet.drive::<_, io::Error>(connection), far.read_to_end(&mut got));
        driven.expect("written");
        read.expect("read");
        assert!(got == sent, "{frames:?} through {room}");
        if let Some(expected) = expected {
            assert_eq!(*writes.lock().expect("no panic"), expected, "{frames:?}");
        }
    }

    #[tokio::test]
    async fn frames_of_one_poll_are_one_write_and_all_arrive() {
        check(&[], 1 << 20, Some(&[])).await;
        check(&[9, 700, 9, 700, 9, 700], 1 << 20, Some(&[2127])).await;
        check(&[100, LARGE, 100], 1 << 20, Some(&[100, LARGE, 100])).await;
        check(&[10_000; 8], 1 << 20, Some(&[60_000, 20_000])).await;
        // A peer that accepts little at a time.
        check(&[10_000; 30], 1000, None).await;
        check(&[9, LARGE + 9, 9, ROOM * 3, 9], 777, None).await;
    }

    /// A connection that ends right after its writes, like one whose client has closed its half.
    async fn ends_at_once(taken: bool) -> (usize, Duration) {
        const SENT: usize = 3 * LARGE;
        let (near, mut far) = tokio::io::duplex(1000);
        let (mut gathering, outlet) = gather(Box::new(near));
        let connection = async move {
            for _ in 0..SENT / 1024 {
                gathering.write_all(&[7; 1024]).await?;
            }
            Err(io::ErrorKind::ConnectionAborted.into())
        };
        let begun = tokio::time::Instant::now();
        let driven = async move {
            let ended = outlet.drive::<_, io::Error>(std::pin::pin!(connection)).await;
            assert_eq!(ended.map_err(|e| e.kind()), Err(io::ErrorKind::ConnectionAborted));
            assert_eq!(begun.elapsed(), Duration::ZERO, "how it ended is known at once");
            outlet.finish().await;
            let after = begun.elapsed();
            drop(outlet);
            after
        };
        let mut got = vec![];
        if taken {
            let (after, read) = tokio::join!(driven, far.read_to_end(&mut got));
            read.expect("read");
            return (SENT - got.len(), after);
        }
        (SENT, driven.await)
    }

    #[tokio::test(start_paused = true)]
    async fn last_bytes_arrive_unless_the_peer_accepts_nothing() {
        assert_eq!(ends_at_once(true).await, (0, Duration::ZERO));
        assert_eq!(ends_at_once(false).await.1, LINGER);
    }

    #[tokio::test]
    async fn a_broken_stream_ends_the_connection() {
        let (near, far) = tokio::io::duplex(100);
        let (mut gathering, outlet) = gather(Box::new(near));
        drop(far);
        let connection = async {
            gathering.write_all(b"frame").await?;
            std::future::pending::<io::Result<()>>().await
        };
        let ended = outlet.drive::<_, io::Error>(std::pin::pin!(connection)).await;
        assert_eq!(ended.map_err(|error| error.kind()), Err(io::ErrorKind::BrokenPipe));
    }
}
