//! The way from a part to the API server, which loses, delays and refuses as the seed says.
//!
//! In: requests of a part's client. Out: the server's answer, a made-up refusal, or a broken connection.
//!
//! Invariants: each fault is one that the protocol promises a client may see: an answer that says "refused" means
//! that nothing was written; a broken connection says nothing; a watch delivers in order what it delivers, and
//! ends or not. While faults are off, only small delays remain.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use apiserver::request::UserInfo;
use apiserver::serve::{Server, ServerService};
use base::rng::Stream;
use bytes::Bytes;
use client::Client;
use futures::StreamExt;
use http::request::Parts;
use http::{Method, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use machinery::StatusError;
use machinery::status::Reason;
use tokio::time::Instant;
use tower::Service;
use transport::local::{Changes, Given, Objects, Wanted};
use transport::{Body, BoxError};

use crate::faults::Fault;
use crate::history::{ACTOR, Actor, History};

/// Where nothing is wrong: a request takes up to twice this.
const USUAL_MILLIS: u64 = 8;
/// A slow request, or a delivery that stalls, takes up to this.
const SLOW_MILLIS: u64 = 8_000;
/// How long a watch lasts that is cut, at most.
const CUT_MILLIS: u64 = 60_000;

#[derive(Debug, thiserror::Error)]
#[error("the connection was lost")]
struct Lost;

#[derive(Clone)]
pub struct Network(Arc<Inner>);

struct Inner {
    server: Server,
    history: History,
    /// Held for a few draws, never across await.
    state: Mutex<State>,
}

struct State {
    random: Stream,
    on: BTreeSet<Fault>,
    is_active: bool,
    /// Parts that reach nobody.
    cut_off: BTreeMap<String, Instant>,
    requests: u64,
    injected: BTreeMap<&'static str, u64>,
}

/// What happens to a request.
enum Fate {
    Passes,
    /// Before it arrives.
    Dropped,
    /// After it was carried out.
    Lost,
    Refused(StatusError),
}

struct Course {
    before: Duration,
    after: Duration,
    fate: Fate,
    /// Of a watch.
    cut: Option<Duration>,
    stalls: bool,
    has_bookmarks: bool,
    as_bytes: bool,
}

impl Network {
    pub fn new(server: Server, history: History, seed: u64, on: BTreeSet<Fault>) -> Self {
        let state = State {
            random: Stream::new(seed ^ 0x006e_6574),
            on,
            is_active: false,
            cut_off: BTreeMap::new(),
            requests: 0,
            injected: BTreeMap::new(),
        };
        Self(Arc::new(Inner { server, history, state: Mutex::new(state) }))
    }

    /// A client of `part` with an identity.
    pub fn client(&self, part: &str, user: &str, groups: &[&str], agent: &str) -> Client {
        let mut user = UserInfo::new(user, groups);
        user.groups.push("system:authenticated".into());
        let account = user.name.rsplit(':').next().unwrap_or_default().into();
        let service = self.0.server.local(user);
        Client::new(Line { network: self.clone(), service, part: part.into(), account }, agent)
    }

    pub fn set_active(&self, is_active: bool) {
        let mut state = self.state();
        state.is_active = is_active;
        state.cut_off.clear();
    }

    /// From now on the part reaches nobody for so long.
    pub fn cut_off(&self, part: &str, lasts: Duration) {
        self.state().cut_off.insert(part.into(), Instant::now() + lasts);
    }

    pub fn requests(&self) -> u64 {
        self.state().requests
    }

    /// How often each fault happened.
    pub fn injected(&self) -> BTreeMap<&'static str, u64> {
        self.state().injected.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect("no panic while held")
    }
}

impl State {
    fn happens(&mut self, fault: Fault, name: &'static str, probability: f64) -> bool {
        let happens = self.is_active && self.on.contains(&fault) && self.random.chance(probability);
        if happens {
            *self.injected.entry(name).or_default() += 1;
        }
        happens
    }

    fn millis(&mut self, most: u64) -> Duration {
        Duration::from_millis(self.random.below(most.max(1)))
    }

    fn course(&mut self, part: &str, call: &Call) -> Course {
        self.requests += 1;
        let is_user = part == "user";
        let mut course = Course {
            before: self.millis(USUAL_MILLIS),
            after: self.millis(USUAL_MILLIS),
            fate: Fate::Passes,
            cut: None,
            stalls: false,
            has_bookmarks: true,
            as_bytes: self.on.contains(&Fault::Bytes) && part.ends_with('0'),
        };
        if is_user {
            return course;
        }
        if self.cut_off.get(part).is_some_and(|until| *until > Instant::now()) {
            course.fate = Fate::Dropped;
            return course;
        }
        if self.happens(Fault::Slow, "slow request", 0.04) {
            course.before = self.millis(SLOW_MILLIS);
        }
        if self.happens(Fault::Slow, "slow answer", 0.04) {
            course.after = self.millis(SLOW_MILLIS);
        }
        if call.is_watch {
            if self.happens(Fault::Cuts, "watch cut", 0.7) {
                course.cut = Some(self.millis(CUT_MILLIS));
            }
            course.stalls = self.happens(Fault::Stalls, "watch stalls", 0.4);
            course.has_bookmarks = !self.happens(Fault::NoBookmarks, "no bookmarks", 1.0);
        }
        course.fate = self.fate(call);
        course
    }

    fn fate(&mut self, call: &Call) -> Fate {
        if call.is_watch && self.happens(Fault::Expired, "410", 0.1) {
            return Fate::Refused(StatusError::expired("too old resource version"));
        }
        if self.happens(Fault::Dropped, "dropped request", 0.03) {
            return Fate::Dropped;
        }
        if call.is_write && self.happens(Fault::Lost, "lost answer", 0.04) {
            return Fate::Lost;
        }
        if self.happens(Fault::TooMany, "429", 0.03) {
            return Fate::Refused(StatusError::too_many_requests("too many requests", 1));
        }
        if self.happens(Fault::Errors, "5xx", 0.03) {
            let code = *self.random.pick(&[500, 503, 504]);
            let status = StatusError::new(Reason::InternalError, "an error of the simulation");
            return Fate::Refused(status.with_code(code));
        }
        if call.replaces && self.happens(Fault::Conflicts, "409", 0.05) {
            let why = "the object has been modified; please apply your changes to the latest version and try again";
            return Fate::Refused(StatusError::conflict("", "objects", "simulated", why));
        }
        Fate::Passes
    }
}

/// What matters of a request.
struct Call {
    is_watch: bool,
    is_write: bool,
    /// PUT or PATCH.
    replaces: bool,
    text: String,
    version: Option<u64>,
}

impl Call {
    fn of(head: &Parts, body: &Bytes) -> Self {
        let query = head.uri.query().unwrap_or_default();
        let is_read = matches!(head.method, Method::GET | Method::HEAD);
        let version = (head.method == Method::PUT).then(|| version_in(body)).flatten();
        Self {
            is_watch: is_read
                && query.split('&').any(|one| one == "watch=true" || one == "watch=1"),
            is_write: !is_read,
            replaces: matches!(head.method, Method::PUT | Method::PATCH),
            text: format!("{} {}", head.method, head.uri.path()),
            version,
        }
    }
}

fn version_in(body: &[u8]) -> Option<u64> {
    #[derive(serde::Deserialize)]
    struct Whole {
        metadata: Metadata,
    }
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        resource_version: Option<String>,
    }
    let whole: Whole = serde_json::from_slice(body).ok()?;
    whole.metadata.resource_version?.parse().ok()
}

/// A part's connection.
#[derive(Clone)]
struct Line {
    network: Network,
    service: ServerService,
    part: Arc<str>,
    account: Arc<str>,
}

impl<B> Service<Request<B>> for Line
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let line = self.clone();
        let request = request.map(transport::boxed);
        Box::pin(async move { line.pass(request).await })
    }
}

impl Line {
    async fn pass(mut self, request: Request<Body>) -> Result<Response<Body>, BoxError> {
        let (mut head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let call = Call::of(&head, &body);
        let course = self.network.state().course(&self.part, &call);
        tokio::time::sleep(course.before).await;
        match course.fate {
            Fate::Dropped => return Err(Box::new(Lost)),
            Fate::Refused(status) => return Ok(refusal(&status)),
            Fate::Passes | Fate::Lost => {}
        }
        if course.as_bytes {
            head.extensions.remove::<Wanted>();
        }
        let actor = Actor {
            part: self.part.to_string(),
            account: self.account.to_string(),
            request: call.text.clone(),
            version: call.version,
        };
        let answer = self.service.call(Request::from_parts(head, transport::full(body)));
        let answer: Result<_, Infallible> = ACTOR.scope(Arc::new(actor), answer).await;
        let Ok(answer) = answer;
        tokio::time::sleep(course.after).await;
        if matches!(course.fate, Fate::Lost) {
            if answer.status().is_success() {
                self.network.0.history.lose(&self.part, &call.text);
            }
            return Err(Box::new(Lost));
        }
        if call.is_watch && answer.status().is_success() {
            return Ok(self.troubled(answer, &course));
        }
        Ok(answer)
    }

    /// A watch that may stall and end.
    fn troubled(&self, mut answer: Response<Body>, course: &Course) -> Response<Body> {
        let end = course.cut.map(|cut| Instant::now() + cut);
        let stalls = Stalls { network: self.network.clone(), is_on: course.stalls };
        let given = answer.extensions_mut().remove::<Given>().and_then(|given| given.take());
        if let Some(Objects::Changes(changes)) = given {
            let changes: Changes = Box::pin(until(changes, end, stalls));
            answer.extensions_mut().insert(Given::new(Objects::Changes(changes)));
            return answer;
        }
        let has_bookmarks = course.has_bookmarks;
        answer.map(|body| {
            let frames = until(body.into_data_stream(), end, stalls);
            let frames = frames.map(move |frame| {
                frame.map(|bytes| {
                    Frame::data(if has_bookmarks { bytes } else { without_bookmarks(&bytes) })
                })
            });
            StreamBody::new(frames).boxed_unsync()
        })
    }
}

/// The pauses of a watch.
struct Stalls {
    network: Network,
    is_on: bool,
}

impl Stalls {
    async fn pause(&self) {
        let pause = {
            let mut state = self.network.state();
            let happens = self.is_on && state.is_active && state.random.chance(0.2);
            happens.then(|| state.millis(SLOW_MILLIS))
        };
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
        }
    }
}

/// The stream up to a time, with pauses.
fn until<S>(
    stream: S,
    end: Option<Instant>,
    stalls: Stalls,
) -> impl futures::Stream<Item = S::Item> + Send
where
    S: futures::Stream + Unpin + Send,
    S::Item: Send,
{
    futures::stream::unfold((stream, stalls), move |(mut stream, stalls)| async move {
        let next = async {
            let item = stream.next().await;
            stalls.pause().await;
            item
        };
        let item = match end {
            Some(end) => tokio::time::timeout_at(end, next).await.ok().flatten(),
            None => next.await,
        };
        item.map(|item| (item, (stream, stalls)))
    })
}

fn without_bookmarks(bytes: &Bytes) -> Bytes {
    let lines = bytes.split_inclusive(|byte| *byte == b'\n');
    let kept = lines.filter(|line| !line.starts_with(br#"{"type":"BOOKMARK""#));
    Bytes::from(kept.flatten().copied().collect::<Vec<u8>>())
}

fn refusal(status: &StatusError) -> Response<Body> {
    let body = transport::full(status.to_json().to_string());
    let mut response = Response::new(body);
    *response.status_mut() =
        http::StatusCode::from_u16(status.code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    let json = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, json);
    response
}
