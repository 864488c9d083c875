//! The part of a request's body that a service leaves unread, on HTTP/2: it is read after the answer.
//!
//! ```text
//!  service drops the body ─► Leftover ─► the answer ends ─► Lingering: read, throw away
//!                                                           │ the client has sent all: the stream ends
//!                                                           └ too much, too long: RST_STREAM(NO_ERROR)
//! ```
//!
//! In: bodies that services dropped, and the ends of answers. Out: streams that end without an error.
//!
//! A server may reset the stream right after an early answer (401, 413), but clients that still
//! send then lose the answer: curl 7 shows "Stream error in the HTTP/2 framing layer". On HTTP/1,
//! Go's server reads the rest, too.
//!
//! Invariant: a stream stays open after its answer for at most [`LINGER`], and holds at most its
//! window. Streams count against the connection's limit until they end.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::Notify;

/// How many bytes are read after the answer; more bytes wait in the client. Upstream: the value of
/// Go's server on HTTP/1.
const MOST: usize = 256 << 10;
/// How long a client may continue to send after the answer.
const LINGER: Duration = Duration::from_secs(2);

/// The body of a request to a service of [`crate::serve()`].
pub struct Incoming {
    /// Taken on drop.
    body: Option<hyper::body::Incoming>,
    /// Set on HTTP/2.
    leftover: Option<Arc<Leftover>>,
}

impl Incoming {
    pub(crate) fn new(body: hyper::body::Incoming, leftover: Option<Arc<Leftover>>) -> Self {
        Self { body: Some(body), leftover }
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let Some(leftover) = &self.leftover else { return };
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            leftover.dropped(body);
        }
    }
}

/// The unread rest of one request.
pub(crate) struct Leftover {
    /// The lock is held briefly.
    state: Mutex<State>,
    lingering: Arc<Lingering>,
}

enum State {
    /// The answer is not complete. Has the body if the service has dropped it.
    Answering(Option<hyper::body::Incoming>),
    Answered,
}

impl Leftover {
    pub(crate) fn new(lingering: Arc<Lingering>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::Answering(None)), lingering })
    }

    fn dropped(&self, body: hyper::body::Incoming) {
        let mut state = self.state.lock().expect("no panic under the lock");
        match &mut *state {
            State::Answering(place) => *place = Some(body),
            State::Answered => self.lingering.add(body),
        }
    }

    /// Call this when the answer is complete.
    pub(crate) fn answered(&self) {
        let mut state = self.state.lock().expect("no panic under the lock");
        if let State::Answering(Some(body)) = std::mem::replace(&mut *state, State::Answered) {
            self.lingering.add(body);
        }
    }
}

/// The unread rests of one connection's requests.
#[derive(Default)]
pub(crate) struct Lingering {
    /// Bodies that are not read yet: at most as many as the connection has streams. The lock is
    /// held for a push.
    new: Mutex<Vec<hyper::body::Incoming>>,
    added: Notify,
}

impl Lingering {
    fn add(&self, body: hyper::body::Incoming) {
        self.new.lock().expect("no panic under the lock").push(body);
        self.added.notify_one();
    }

    /// Reads the added bodies; never ends. The connection must be polled at the same time.
    pub(crate) async fn read_on(&self) {
        let mut reading = FuturesUnordered::new();
        loop {
            let new = std::mem::take(&mut *self.new.lock().expect("no panic under the lock"));
            reading.extend(new.into_iter().map(read));
            tokio::select! {
                () = self.added.notified() => {}
                Some(()) = reading.next(), if !reading.is_empty() => {}
            }
        }
    }
}

async fn read(mut body: hyper::body::Incoming) {
    let to_the_end = async {
        let mut left = MOST;
        // An error also ends it: the client reset the stream.
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            match left.checked_sub(length) {
                Some(less) => left = less,
                None => std::future::pending().await,
            }
        }
    };
    // Dropping the body resets a stream that has not ended.
    let _ = tokio::time::timeout(LINGER, to_the_end).await;
}
