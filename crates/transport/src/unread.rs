//! What a service leaves unread of a request, on HTTP/2: it is read after the answer.
//!
//! ```text
//!  service drops the body ─► Leftover ─► the answer ends ─► Lingering: read, throw away
//!                                                           │ the client has sent all: the stream ends
//!                                                           └ too much, too long: RST_STREAM(NO_ERROR)
//! ```
//!
//! In: bodies that services dropped, ends of answers. Out: streams that end without an error.
//!
//! A server that resets the stream right behind an early answer (401, 413) is within its rights, but
//! clients that still send then lose the answer: curl 7 shows "Stream error in the HTTP/2 framing
//! layer". Go's server reads the rest, too, on HTTP/1.
//!
//! Invariant: a stream is kept after its answer for no longer than [`LINGER`], and holds no more than
//! its window; streams are counted by the connection's limit until they end.

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

/// Bytes that are read after the answer; what comes then waits in the client. Upstream: as Go's
/// server on HTTP/1.
const MOST: usize = 256 << 10;
/// How long a client may go on sending after the answer.
const LINGER: Duration = Duration::from_secs(2);

/// The body of a request to a service of [`crate::serve()`].
pub struct Incoming {
    /// Taken when it is dropped.
    body: Option<hyper::body::Incoming>,
    /// On HTTP/2.
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

/// The rest of one request.
pub(crate) struct Leftover {
    /// Held for a look.
    state: Mutex<State>,
    lingering: Arc<Lingering>,
}

enum State {
    /// The answer is not over. With the body, if the service has dropped it.
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

    /// The answer is over.
    pub(crate) fn answered(&self) {
        let mut state = self.state.lock().expect("no panic under the lock");
        if let State::Answering(Some(body)) = std::mem::replace(&mut *state, State::Answered) {
            self.lingering.add(body);
        }
    }
}

/// The rests of one connection's requests.
#[derive(Default)]
pub(crate) struct Lingering {
    /// Not yet looked after. As many as the connection has streams at most. Held for a push.
    new: Mutex<Vec<hyper::body::Incoming>>,
    added: Notify,
}

impl Lingering {
    fn add(&self, body: hyper::body::Incoming) {
        self.new.lock().expect("no panic under the lock").push(body);
        self.added.notify_one();
    }

    /// Reads what is added; never ends. The connection must be driven beside it.
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
        // An error is the end, too: the client took the stream back.
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            match left.checked_sub(length) {
                Some(less) => left = less,
                None => std::future::pending().await,
            }
        }
    };
    // Over or not, the body is dropped, which resets a stream that has not ended.
    let _ = tokio::time::timeout(LINGER, to_the_end).await;
}
