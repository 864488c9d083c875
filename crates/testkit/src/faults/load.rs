//! The load on a cluster while something fails: writers, watches, and the readings of an observer.
//!
//! In: the cluster's places. Out, at [`Load::stop`]: a [`History`], and how long clients had to wait.
//!
//! ```text
//! writer 0..b      ─► balancer of a node ─► some server
//! writer b..b+3    ─► one server each, also while it is down
//! watch 0..n       ─► half by balancers, half by a list of the servers; ten on a connection
//! ```
//!
//! Each writer creates, replaces and deletes its own ConfigMaps, one request at a time. A request that no server
//! has processed is repeated, as Go's client does. After one whose fate is unknown the writer reads its object.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base::task::{Stop, Tasks};
use http::Method;
use serde_json::{Value, json};

use super::history::{Attempt, Change, History, Outcome, Verb};
use super::link::{Answer, Ask, Failure, Link};
use super::watches::{self, Watch};
use crate::wait;

const REQUEST: Duration = Duration::from_secs(10);
/// Between two tries of a request that no server has processed.
const AGAIN: Duration = Duration::from_millis(100);
/// A request that no server takes for this long is given up.
const GIVEN_UP: Duration = Duration::from_secs(120);
/// Objects that a writer keeps before it deletes the oldest.
const KEPT: usize = 20;
/// For watches to arrive at the last event.
const DRAIN: Duration = Duration::from_secs(60);
pub const NAMESPACE: &str = "faults";

/// Where a writer writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Balanced,
    /// To the server with this number.
    Direct(usize),
}

/// When a request was asked and how it ended; reads of the readiness probe are requests, too.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub begun: Instant,
    pub ended: Instant,
    pub is_good: bool,
}

pub struct Writer {
    pub way: Way,
    pub samples: Vec<Sample>,
    pub retries: usize,
}

/// What a run of the load found.
pub struct Findings {
    pub history: History,
    pub writers: Vec<Writer>,
    pub watches: watches::Ends,
}

#[derive(Default)]
struct Log {
    history: History,
    writers: Vec<Writer>,
}

pub struct Load {
    tasks: Tasks,
    log: Arc<Mutex<Log>>,
    watches: Vec<Arc<Watch>>,
    /// For the list at the end.
    link: Arc<Link>,
    run: String,
}

pub struct Plan {
    /// Writers by their way, each with its own connection.
    pub writers: Vec<(Way, Arc<Link>)>,
    /// Connections of watches.
    pub watchers: Vec<Arc<Link>>,
    pub watches: usize,
    /// Writes a second, of all writers.
    pub rate: u32,
    pub observer: Arc<Link>,
}

impl Load {
    /// Returns when all watches run and the first writes are under way.
    pub async fn start(plan: Plan) -> Result<Self> {
        let (tasks, run) = (Tasks::new("load"), base::rng::alphanumeric(6).to_lowercase());
        let revision = revision(&plan.observer).await?;
        let groups = (plan.watches / 10).max(1);
        let watches: Vec<Arc<Watch>> = (0..plan.watches)
            .map(|number| {
                let link = &plan.watchers[number % plan.watchers.len()];
                let selector = format!("group%3D{run}-{}", number % groups);
                watches::start(link, number % groups, &selector, revision)
            })
            .collect();
        let log = Arc::new(Mutex::new(Log::default()));
        let pace = Duration::from_secs(1) * u32::try_from(plan.writers.len())? / plan.rate.max(1);
        for (number, (way, link)) in plan.writers.into_iter().enumerate() {
            lock(&log).writers.push(Writer { way, samples: vec![], retries: 0 });
            let own = Own {
                number,
                group: format!("{run}-{}", number % groups),
                prefix: format!("{run}-{number}"),
                link,
                log: log.clone(),
                counter: None,
                made: VecDeque::new(),
                next: 0,
                has_unknown: false,
            };
            let stop = tasks.stop_signal();
            tasks.spawn_graceful("writer", own.write(pace, stop));
        }
        Ok(Self { tasks, log, watches, link: plan.observer, run })
    }

    pub async fn stop(self) -> Result<Findings> {
        self.tasks.stop();
        // Writers end after their request; watches go on until they have seen all.
        self.tasks.shutdown(GIVEN_UP).await;
        let mut log = std::mem::take(&mut *lock(&self.log));
        let (last, until) = wait::found("the last list", async || self.list().await.ok()).await;
        (log.history.last, log.history.listed_at) = (last, until);
        watches::drain(&self.watches, until, DRAIN).await;
        let ends = watches::finish(self.watches, &mut log.history).await;
        Ok(Findings { history: log.history, writers: log.writers, watches: ends })
    }

    /// The objects of this run, and the revision of the list.
    async fn list(&self) -> Result<(BTreeMap<String, (u64, u64)>, u64)> {
        let answer = self.link.ask(Ask::get(&objects(), REQUEST)).await;
        let answer = answer.map_err(|failure| anyhow::anyhow!("{failure:?}"))?;
        ensure!(answer.status == 200, "status {}", answer.status);
        let list: Value = serde_json::from_slice(&answer.body)?;
        let all = list["items"].as_array().context("a list has items")?;
        let own = all.iter().filter_map(|item| {
            let name = item["metadata"]["name"].as_str()?;
            name.starts_with(&self.run).then(|| Some((name.to_owned(), at_rest(item)?)))?
        });
        let until =
            number(&list["metadata"]["resourceVersion"]).context("a list has a revision")?;
        Ok((own.collect(), until))
    }
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().expect("no panic under the lock")
}

pub fn objects() -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/configmaps")
}

fn number(text: &Value) -> Option<u64> {
    text.as_str()?.parse().ok()
}

/// Revision and value.
fn at_rest(object: &Value) -> Option<(u64, u64)> {
    Some((number(&object["metadata"]["resourceVersion"])?, number(&object["data"]["value"])?))
}

async fn revision(link: &Link) -> Result<u64> {
    let path = format!("{}?limit=1", objects());
    let answer = link.ask(Ask::get(&path, REQUEST)).await;
    let answer = answer.map_err(|failure| anyhow::anyhow!("{failure:?}"))?;
    let list: Value = serde_json::from_slice(&answer.body)?;
    number(&list["metadata"]["resourceVersion"]).context("a list has a revision")
}

/// One writer.
struct Own {
    number: usize,
    group: String,
    prefix: String,
    link: Arc<Link>,
    log: Arc<Mutex<Log>>,
    /// Revision and value of the object that it replaces again and again.
    counter: Option<(u64, u64)>,
    made: VecDeque<String>,
    next: u64,
    /// A request of unknown fate may be processed at any time, also later.
    has_unknown: bool,
}

impl Own {
    async fn write(mut self, pace: Duration, stop: Stop) {
        while !stop.is_raised() {
            let begun = wait::now();
            self.step(&stop).await;
            let rest = pace.saturating_sub(begun.elapsed());
            stop.or(tokio::time::sleep(rest)).await;
        }
    }

    async fn step(&mut self, stop: &Stop) {
        self.next += 1;
        let number = self.next;
        match self.counter {
            None => self.create("counter".into(), stop).await,
            Some(_) if number.is_multiple_of(16) => self.read(stop).await,
            Some(_) if number.is_multiple_of(4) => self.create(number.to_string(), stop).await,
            Some(_) if number % 4 == 3 && self.made.len() > KEPT => self.delete(stop).await,
            // Each value is written once, so that an event tells which attempt it is.
            Some((revision, _)) => self.replace(revision, number, stop).await,
        }
    }

    async fn create(&mut self, name: String, stop: &Stop) {
        // Another name after each failure: an attempt of unknown fate may still succeed.
        let name = match name.as_str() {
            "counter" => format!("{}-counter-{}", self.prefix, self.next),
            _ => format!("{}-{name}", self.prefix),
        };
        let change = Change { verb: Verb::Create, name: name.clone(), value: 1 };
        let body = self.object(&name, 1, None);
        let ask = Ask::new(Method::POST, objects(), body, REQUEST);
        if let Some(revision) = self.change(change, ask, 201, stop).await {
            match self.counter {
                None => {
                    self.counter = Some((revision, 1));
                    self.made.push_front(name);
                }
                Some(_) => self.made.push_back(name),
            }
        }
    }

    async fn replace(&mut self, revision: u64, value: u64, stop: &Stop) {
        let Some(name) = self.made.front().cloned() else { return };
        let body = self.object(&name, value, Some(revision));
        let ask = Ask::new(Method::PUT, format!("{}/{name}", objects()), body, REQUEST);
        let change = Change { verb: Verb::Update, name, value };
        match self.change(change, ask, 200, stop).await {
            Some(revision) => self.counter = Some((revision, value)),
            None => self.read(stop).await,
        }
    }

    async fn delete(&mut self, stop: &Stop) {
        // The first one is the counter.
        let Some(name) = self.made.remove(1) else { return };
        let path = format!("{}/{name}", objects());
        let ask = Ask::new(Method::DELETE, path, "", REQUEST);
        self.change(Change { verb: Verb::Delete, name, value: 0 }, ask, 200, stop).await;
    }

    /// Reads the counter, which must not be older than what this writer was told.
    async fn read(&mut self, stop: &Stop) {
        let (Some(name), Some((known, _))) = (self.made.front().cloned(), self.counter) else {
            return;
        };
        let ask = Ask::get(&format!("{}/{name}", objects()), REQUEST);
        while !stop.is_raised() {
            let begun = wait::now();
            let answer = self.link.ask(ask.clone()).await;
            let found = answer.ok().filter(|answer| answer.status == 200);
            let found: Option<Value> =
                found.and_then(|answer| serde_json::from_slice(&answer.body).ok());
            let Some((revision, value)) = found.as_ref().and_then(at_rest) else {
                tokio::time::sleep(AGAIN).await;
                continue;
            };
            if revision < known {
                let took = begun.elapsed();
                self.notice(format!(
                    "{name} was read at {revision} after {known} was acknowledged ({took:?})"
                ));
            }
            self.counter = Some((revision.max(known), value));
            return;
        }
    }

    /// Sends a change until a server has processed it; returns the revision if it was acknowledged.
    async fn change(&mut self, change: Change, ask: Ask, success: u16, stop: &Stop) -> Option<u64> {
        let begun = wait::now();
        loop {
            let answer = self.link.ask(ask.clone()).await;
            let may_repeat = match &answer {
                Ok(answer) => answer.may_repeat && answer.status != success,
                Err(failure) => matches!(failure, Failure::Unsent(_)),
            };
            if may_repeat && begun.elapsed() < GIVEN_UP {
                // Nothing has happened, so that nothing is recorded.
                if stop.is_raised() {
                    return None;
                }
                lock(&self.log).writers[self.number].retries += 1;
                tokio::time::sleep(AGAIN).await;
                continue;
            }
            return self.record(change, answer, success, begun);
        }
    }

    fn record(
        &mut self,
        change: Change,
        answer: Result<Answer, Failure>,
        success: u16,
        begun: Instant,
    ) -> Option<u64> {
        let mut revision = None;
        let outcome = match answer {
            Ok(answer) if answer.status == success => {
                let object: Option<Value> = serde_json::from_slice(&answer.body).ok();
                revision = object.as_ref().and_then(at_rest).map(|(revision, _)| revision);
                Outcome::Acknowledged(revision)
            }
            Ok(answer) => {
                let text = String::from_utf8_lossy(&answer.body);
                let text = format!("status {}: {}", answer.status, text.trim());
                match answer.status {
                    400..500 => Outcome::Refused(text),
                    _ => Outcome::Unknown(text),
                }
            }
            Err(Failure::Unknown(why) | Failure::Unsent(why)) => Outcome::Unknown(why),
        };
        if let Outcome::Refused(why) = &outcome
            && !self.has_unknown
        {
            self.notice(format!("{change:?} was refused without a reason: {why}"));
        }
        self.has_unknown |= matches!(outcome, Outcome::Unknown(_));
        let is_good = matches!(outcome, Outcome::Acknowledged(_));
        let mut log = lock(&self.log);
        log.writers[self.number].samples.push(Sample { begun, ended: wait::now(), is_good });
        log.history.attempts.push(Attempt { change, outcome });
        revision
    }

    fn notice(&self, text: String) {
        lock(&self.log).history.noticed.push(text);
    }

    fn object(&self, name: &str, value: u64, revision: Option<u64>) -> String {
        let mut metadata = json!({"name": name, "labels": {"group": self.group}});
        if let Some(revision) = revision {
            metadata["resourceVersion"] = revision.to_string().into();
        }
        let data = json!({"value": value.to_string()});
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
            .to_string()
    }
}
