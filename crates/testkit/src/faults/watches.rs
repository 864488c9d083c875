//! Watches that resume by their revision, as an informer does, and remember every event.
//!
//! In: a connection, a selector, a revision. Out: the events, and how the streams ended. Invariant: a watch
//! never lists; one that a server refuses to resume is a finding.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::task::Tasks;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Deserialize;

use super::history::{Change, Event, History, Verb};
use super::link::Link;
use super::load::objects;

/// Before a watch that ended or was refused is opened again.
const AGAIN: Duration = Duration::from_millis(100);
const ENDING: Duration = Duration::from_secs(5);
/// Longer than a run, so that the server's own limit ends no watch.
const SECONDS: u32 = 3600;

pub struct Watch {
    group: usize,
    state: Mutex<State>,
    tasks: Tasks,
}

#[derive(Default)]
struct State {
    /// Of the last event or bookmark.
    revision: u64,
    events: Vec<Event>,
    noticed: Vec<String>,
    ends: Ends,
}

/// How streams ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ends {
    /// By the server, after a bookmark.
    pub with_bookmark: usize,
    /// By the server, without one.
    pub without: usize,
    /// The connection broke.
    pub broken: usize,
}

#[derive(Deserialize)]
struct Line {
    r#type: String,
    object: Object,
}

#[derive(Deserialize)]
struct Object {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    data: Data,
    message: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    name: String,
    resource_version: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Data {
    value: String,
}

/// Starts a watch of the objects that the selector names.
pub fn start(link: &Arc<Link>, group: usize, selector: &str, revision: u64) -> Arc<Watch> {
    let state = State { revision, ..State::default() };
    // Its own group: watches outlive the writers.
    let tasks = Tasks::new("watch");
    let watch = Arc::new(Watch { group, state: Mutex::new(state), tasks: tasks.clone() });
    let (own, link) = (watch.clone(), link.clone());
    let path = format!(
        "{}?watch=1&allowWatchBookmarks=true&timeoutSeconds={SECONDS}&labelSelector={selector}",
        objects()
    );
    tasks.spawn("watch", async move {
        loop {
            let from = own.state().revision;
            if let Ok(body) = link.stream(&format!("{path}&resourceVersion={from}")).await {
                own.read(body).await;
            }
            tokio::time::sleep(AGAIN).await;
        }
    });
    watch
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    async fn read(&self, mut body: Incoming) {
        let (mut rest, mut after_bookmark) = (Vec::new(), false);
        loop {
            let frame = body.frame().await;
            let data = match frame {
                None => {
                    let mut state = self.state();
                    match after_bookmark {
                        true => state.ends.with_bookmark += 1,
                        false => state.ends.without += 1,
                    }
                    return;
                }
                Some(Err(_)) => return self.state().ends.broken += 1,
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
            };
            rest.extend_from_slice(&data);
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                match self.take(&line) {
                    Some(is_bookmark) => after_bookmark = is_bookmark,
                    None => return,
                }
            }
        }
    }

    /// Takes a line; returns whether it is a bookmark, or `None` for the last line.
    fn take(&self, line: &[u8]) -> Option<bool> {
        let mut state = self.state();
        let Ok(Line { r#type, object }) = serde_json::from_slice::<Line>(line) else {
            state.noticed.push(format!("no event: {}", String::from_utf8_lossy(line)));
            return None;
        };
        let Metadata { name, resource_version } = object.metadata;
        let revision = resource_version.parse().unwrap_or_default();
        let verb = match r#type.as_str() {
            "ADDED" => Verb::Create,
            "MODIFIED" => Verb::Update,
            "DELETED" => Verb::Delete,
            "BOOKMARK" => {
                state.revision = state.revision.max(revision);
                return Some(true);
            }
            _ => {
                let from = state.revision;
                let why = object.message.unwrap_or_default();
                state.noticed.push(format!("a watch from {from} had to list again: {why}"));
                return None;
            }
        };
        let value = match verb {
            Verb::Delete => 0,
            _ => object.data.value.parse().unwrap_or_default(),
        };
        state.revision = revision;
        state.events.push(Event { change: Change { verb, name, value }, revision });
        Some(false)
    }
}

/// Waits until the watches of each group have the same events, at most for `limit`. Bookmarks tell a watch
/// without new events that it is at `until`.
pub async fn drain(watches: &[Arc<Watch>], until: u64, limit: Duration) {
    let is_done = || {
        watches.iter().all(|watch| {
            let same = watches.iter().filter(|other| other.group == watch.group);
            let most = same.map(|other| other.state().events.len()).max();
            let state = watch.state();
            state.revision >= until || most == Some(state.events.len())
        })
    };
    let waiting = async {
        // All watches of a group may lag alike, for as long as a server needs to fill its cache.
        let mut calm = 0;
        while calm < 20 {
            calm = if is_done() { calm + 1 } else { 0 };
            tokio::time::sleep(AGAIN).await;
        }
    };
    // A watch that is late differs from others, which the history shows.
    let _ = tokio::time::timeout(limit, waiting).await;
}

/// Ends the watches and moves what they saw into the history.
pub async fn finish(watches: Vec<Arc<Watch>>, history: &mut History) -> Ends {
    let mut ends = Ends::default();
    for watch in watches {
        watch.tasks.shutdown(ENDING).await;
        let mut state = watch.state();
        history.watches.entry(watch.group).or_default().push(std::mem::take(&mut state.events));
        history.noticed.append(&mut state.noticed);
        ends.with_bookmark += state.ends.with_bookmark;
        ends.without += state.ends.without;
        ends.broken += state.ends.broken;
    }
    ends
}
