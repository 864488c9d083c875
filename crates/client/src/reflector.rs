//! Keeps a cache equal to a collection of the API.
//!
//! ```text
//!            ┌───────── page ─────────┐
//!            ▼                        │
//!  Empty ► Listing ── last page ► Listed ── open ► Watching ── event ► (itself)
//!    ▲                              ▲                  │
//!    │                              └── ended, broken ─┤
//!    └───────────────── 410, unreadable ───────────────┘
//! ```
//!
//! In: a path and a client. Out: [`Change`]s, in the server's order. A server of this process answers with its own
//! objects ([`transport::local`]): then nothing is framed, parsed and packed again, and `Following` is the
//! state of the watch.
//! Invariants: a watch starts at the revision of the list or of the last event or bookmark, so no
//! change is lost; an error never loses the place unless the server says that it is gone.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use base::percent;
use base::task::Stop;
use bytes::{Buf, Bytes, BytesMut};
use futures::StreamExt;
use http::{Method, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use serde::Deserialize;
use serde_json::value::RawValue;
use transport::local::{self, Objects};

use crate::cache::Entry;
use crate::client::{self, Client, Error, ErrorExt};

/// Objects per page of a list.
const PAGE: usize = 500;
/// Upstream: a watch is asked to last 5 to 10 minutes, at random.
const WATCH_AT_LEAST: u64 = 300;
/// A watch that outlives its own limit by this much is dead.
const WATCH_GRACE: Duration = Duration::from_secs(30);
/// After this long without trouble, trouble is new.
const CALM: Duration = Duration::from_secs(60);
/// The longest event accepted; the API's limit for one object is far below.
const LINE_LIMIT: usize = 64 << 20;
const PARTIAL: &str =
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json";
pub(crate) const PARTIAL_LIST: &str =
    "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";

/// The mirrored resource.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// The collection.
    pub(crate) path: String,
    pub(crate) fields: String,
    pub(crate) labels: String,
    pub(crate) metadata_only: bool,
}

/// A step's effect on the cache.
pub(crate) enum Change {
    None,
    /// The whole collection, after a list.
    Replaced(Vec<Arc<Entry>>),
    Applied(Arc<Entry>),
    Deleted(Arc<Entry>),
}

#[derive(Default)]
enum State {
    #[default]
    Empty,
    Listing {
        token: String,
        seen: Vec<Arc<Entry>>,
    },
    Listed {
        revision: String,
    },
    Watching {
        revision: String,
        lines: Lines,
        deadline: tokio::time::Instant,
    },
    Following {
        revision: String,
        changes: local::Changes,
        /// Received, and not yet applied.
        ready: VecDeque<local::Change>,
    },
}

#[derive(Debug, thiserror::Error)]
enum Trouble {
    #[error("{}", .0.text())]
    Request(#[from] Error),
    #[error("unreadable: {0}")]
    Unreadable(#[from] serde_json::Error),
    #[error("the server ended the watch: {0}")]
    Ended(String),
    #[error("the watch did not end at its limit")]
    Silent,
}

pub(crate) struct Reflector {
    client: Client,
    source: Source,
    state: State,
}

impl Reflector {
    pub(crate) fn new(client: Client, source: Source) -> Self {
        Self { client, source, state: State::Empty }
    }

    /// Mirrors until told to stop.
    pub(crate) async fn run(mut self, stop: Stop, apply: Box<dyn Fn(Change) + Send + Sync>) {
        let mut backoff =
            Backoff::new(Duration::from_millis(800), Duration::from_secs(30)).with_jitter(1.0);
        let mut prompt = true;
        let mut troubled = tokio::time::Instant::now();
        while let Some(result) = stop.or(self.step()).await {
            if result.is_err() {
                if troubled.elapsed() > CALM {
                    backoff.reset();
                    prompt = true;
                }
                troubled = tokio::time::Instant::now();
            }
            match result {
                Ok(change) => {
                    if !matches!(change, Change::None) {
                        backoff.reset();
                        prompt = true;
                    }
                    apply(change);
                }
                // A watch that worked and ended is resumed at once; only repeated trouble waits.
                Err(trouble) if prompt && matches!(trouble, Trouble::Ended(_)) => {
                    prompt = false;
                    tracing::debug!(path = self.source.path, %trouble, "watching again");
                }
                Err(trouble) => {
                    tracing::warn!(path = self.source.path, %trouble, "failed to list or watch, will retry");
                    if stop.or(tokio::time::sleep(backoff.step())).await.is_none() {
                        return;
                    }
                }
            }
        }
    }

    /// One request or one event. Invariant: after an error the state is the one to continue from.
    async fn step(&mut self) -> Result<Change, Trouble> {
        match std::mem::take(&mut self.state) {
            // Boxed, because a watch waits for long and needs none of their state.
            State::Empty => Box::pin(self.page(String::new(), vec![])).await,
            State::Listing { token, seen } => Box::pin(self.page(token, seen)).await,
            State::Listed { revision } => Box::pin(self.open(revision)).await,
            State::Watching { revision, lines, deadline } => {
                self.next(revision, lines, deadline).await
            }
            State::Following { revision, changes, ready } => {
                self.follow(revision, changes, ready).await
            }
        }
    }

    async fn page(&mut self, token: String, mut seen: Vec<Arc<Entry>>) -> Result<Change, Trouble> {
        let mut path = format!("{}?limit={PAGE}", self.source.path);
        self.select(&mut path);
        if !token.is_empty() {
            path.push_str(&format!("&continue={}", percent::encode(&token)));
        }
        let accept = if self.source.metadata_only { PARTIAL_LIST } else { client::JSON };
        let (given, response) = ask(&self.client, &path, accept).await?;
        if let Some(Objects::List(list)) = given {
            let share = |object| Entry::share(object, self.source.metadata_only).map(Arc::new);
            let entries = list.objects.into_iter().map(share).collect::<Result<_, _>>()?;
            self.state = State::Listed { revision: list.revision.to_string() };
            return Ok(Change::Replaced(entries));
        }
        let body = response.into_body().collect_bytes().await?;
        let list: RawList = serde_json::from_slice(&body)?;
        for item in list.items.unwrap_or_default() {
            seen.push(Arc::new(Entry::parse(item.get().as_bytes(), self.source.metadata_only)?));
        }
        match list.metadata.r#continue {
            Some(token) if !token.is_empty() => {
                self.state = State::Listing { token, seen };
                Ok(Change::None)
            }
            _ => {
                self.state = State::Listed { revision: list.metadata.resource_version };
                Ok(Change::Replaced(seen))
            }
        }
    }

    async fn open(&mut self, revision: String) -> Result<Change, Trouble> {
        let seconds = WATCH_AT_LEAST + base::rng::below(WATCH_AT_LEAST);
        let mut path = format!(
            "{}?watch=true&allowWatchBookmarks=true&resourceVersion={revision}&timeoutSeconds={seconds}",
            self.source.path
        );
        self.select(&mut path);
        let accept = if self.source.metadata_only { PARTIAL } else { client::JSON };
        match ask(&self.client, &path, accept).await {
            Ok((Some(Objects::Changes(changes)), _)) => {
                self.state = State::Following { revision, changes, ready: VecDeque::new() };
                Ok(Change::None)
            }
            Ok((_, response)) => {
                let lines = Lines::new(response.into_body());
                let deadline =
                    tokio::time::Instant::now() + Duration::from_secs(seconds) + WATCH_GRACE;
                self.state = State::Watching { revision, lines, deadline };
                Ok(Change::None)
            }
            Err(error) if error.is_expired() => Err(error.into()), // state: Empty, list again
            Err(error) => {
                self.state = State::Listed { revision };
                Err(error.into())
            }
        }
    }

    /// The next change of a server in this process, which ends the watch at its limit.
    async fn follow(
        &mut self,
        mut revision: String,
        mut changes: local::Changes,
        mut ready: VecDeque<local::Change>,
    ) -> Result<Change, Trouble> {
        // There may be no end of changes, and nothing else here waits: others get their turn.
        tokio::task::coop::consume_budget().await;
        if ready.is_empty() {
            match changes.next().await {
                Some(more) => ready.extend(more),
                None => {
                    self.state = State::Listed { revision };
                    return Err(Trouble::Ended("end of stream".into()));
                }
            }
        }
        let metadata_only = self.source.metadata_only;
        let share = |object| Entry::share(object, metadata_only).map(Arc::new);
        let change = match ready.pop_front() {
            Some(local::Change::Applied(object)) => Change::Applied(share(object)?),
            Some(local::Change::Deleted(object)) => Change::Deleted(share(object)?),
            Some(local::Change::Reached(at)) => {
                revision = at.to_string();
                Change::None
            }
            Some(local::Change::Expired(why)) => return Err(Trouble::Ended(why)), // state: Empty
            None => Change::None,
        };
        self.state = State::Following { revision, changes, ready };
        Ok(change)
    }

    async fn next(
        &mut self,
        revision: String,
        mut lines: Lines,
        deadline: tokio::time::Instant,
    ) -> Result<Change, Trouble> {
        let overdue = tokio::time::Instant::now() > deadline;
        let line = match tokio::time::timeout_at(deadline, lines.next()).await {
            // Bookmarks beyond the limit are no sign of life: the server forgot to end the watch.
            _ if overdue => {
                self.state = State::Listed { revision };
                return Err(Trouble::Silent);
            }
            Err(_) => {
                self.state = State::Listed { revision };
                return Err(Trouble::Silent);
            }
            Ok(Err(why)) => {
                self.state = State::Listed { revision };
                return Err(Trouble::Ended(why));
            }
            Ok(Ok(line)) => line,
        };
        let event: RawWatchEvent = serde_json::from_slice(&line)?;
        let json = event.object.get().as_bytes();
        if event.r#type == "ERROR" {
            let status: kube::core::Status = serde_json::from_slice(json)?;
            let error = Error::Api(Box::new(status));
            if !error.is_expired() {
                self.state = State::Listed { revision };
            }
            return Err(error.into());
        }
        let entry = Arc::new(Entry::parse(json, self.source.metadata_only)?);
        let revision = entry.header.resource_version.clone();
        self.state = State::Watching { revision, lines, deadline };
        Ok(match &*event.r#type {
            "ADDED" | "MODIFIED" => Change::Applied(entry),
            "DELETED" => Change::Deleted(entry),
            _ => Change::None, // BOOKMARK, or a type from the future
        })
    }

    fn select(&self, path: &mut String) {
        for (name, value) in
            [("fieldSelector", &self.source.fields), ("labelSelector", &self.source.labels)]
        {
            if !value.is_empty() {
                path.push_str(&format!("&{name}={}", percent::encode(value)));
            }
        }
    }
}

/// Asks for objects, in whatever form the server has them for us.
async fn ask(
    client: &Client,
    path: &str,
    accept: &str,
) -> client::Result<(Option<Objects>, Response<Body>)> {
    let mut request = client::request(Method::GET, path, accept, Bytes::new())?;
    request.extensions_mut().insert(local::Wanted);
    let mut response = client.send(request).await?;
    let given = response.extensions_mut().remove::<local::Given>();
    Ok((given.and_then(|given| given.take()), response))
}

#[derive(Deserialize)]
struct RawList<'a> {
    #[serde(default)]
    metadata: RawListMeta,
    #[serde(borrow)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct RawListMeta {
    resource_version: String,
    r#continue: Option<String>,
}

#[derive(Deserialize)]
struct RawWatchEvent<'a> {
    #[serde(borrow)]
    r#type: std::borrow::Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// A body cut at newlines.
struct Lines {
    body: Body,
    /// Bytes after the last newline.
    rest: BytesMut,
    ready: VecDeque<Bytes>,
}

impl Lines {
    fn new(body: Body) -> Self {
        Self { body, rest: BytesMut::new(), ready: VecDeque::new() }
    }

    /// The next line that is not blank; why there is none otherwise.
    async fn next(&mut self) -> Result<Bytes, String> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                return Ok(line);
            }
            match self.body.frame().await {
                None => return Err("end of stream".into()),
                Some(Err(error)) => return Err(error.to_string()),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.push(&data);
                    }
                }
            }
            if self.rest.len() > LINE_LIMIT {
                return Err("an event is too long".into());
            }
        }
    }

    fn push(&mut self, data: &[u8]) {
        let mut from = self.rest.len();
        self.rest.extend_from_slice(data);
        while let Some(at) = self.rest[from..].iter().position(|byte| *byte == b'\n') {
            let line = self.rest.split_to(from + at).freeze();
            self.rest.advance(1);
            from = 0;
            if !line.trim_ascii().is_empty() {
                self.ready.push_back(line);
            }
        }
    }
}
