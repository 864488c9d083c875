//! A fuzz test of every endpoint, driven by the server's own OpenAPI documents.
//!
//! In: the binary, a duration, a seed. Out: findings: a 5xx answer, no answer, a panic in the log, the end
//! of the server. Each kind of finding is reported once, with the whole request.
//!
//! Each worker has its own connection and series of random numbers. Later requests use objects that the
//! server has accepted, so that they pass the first checks.

mod requests;
mod values;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use crate::control_plane::ControlPlane;
use crate::http::{ApiClient, Connection, Response};
use crate::wait;
use requests::{Operation, Pool, Request};
use values::{Rng, Schemas};

const WORKERS: u64 = 2;
/// A request that takes longer counts as hanging.
const LIMIT: Duration = Duration::from_secs(20);
/// Invalid requests that upstream also answers with 5xx: code and a part of the message.
const UPSTREAMS: &[(u16, &str)] = &[
    (500, "failed to create typed patch object"),
    // An update of a Service.
    (500, "provided port is already allocated"),
    (500, "resourceVersion: Invalid value"),
    (500, "resourceVersion should not be set on objects to be created"),
    (500, "strconv.ParseUint: parsing"),
    // Bindings: upstream wraps their field errors.
    (500, "target.kind: Unsupported value"),
    (500, "target.name: Required value"),
    (500, "unknown patch type: "),
    (504, "Too large resource version"),
];
/// Bytes of a request that a finding shows.
const SHOWN: usize = 2000;

/// Starts a server, fuzzes it and prints the findings; an error if there were any.
pub fn run(binary: &Path, seconds: u64, seed: u64) -> Result<()> {
    let mut server = ControlPlane::start(binary)?;
    let client = server.client()?;
    let (operations, schemas) = documents(&client)?;
    println!("{} operations, {} schemas, seed {seed}", operations.len(), schemas.0.len());
    let fuzz = Fuzz {
        client,
        operations,
        schemas,
        seconds,
        findings: Mutex::default(),
        statuses: Mutex::default(),
        sent: AtomicU64::new(0),
    };
    std::thread::scope(|scope| {
        for worker in 0..WORKERS {
            let fuzz = &fuzz;
            scope.spawn(move || fuzz.work(Rng::new(seed.wrapping_add(worker << 32))));
        }
    });
    fuzz.conclude(&mut server)
}

struct Fuzz {
    client: ApiClient,
    operations: Vec<Operation>,
    schemas: Schemas,
    seconds: u64,
    /// By kind of finding. Locked only to report one; holds a few entries.
    findings: Mutex<BTreeMap<String, String>>,
    statuses: Mutex<BTreeMap<u16, u64>>,
    sent: AtomicU64,
}

impl Fuzz {
    fn work(&self, mut rng: Rng) {
        let started = wait::now();
        let mut connection = Connection::new(self.client.clone(), LIMIT);
        let mut pool = Pool::default();
        let mut statuses = BTreeMap::<u16, u64>::new();
        while started.elapsed().as_secs() < self.seconds {
            let operation = &self.operations[rng.below(self.operations.len())];
            // A watch keeps its worker waiting: only a few are sent.
            if operation.is_watch() && !rng.percent(2) {
                continue;
            }
            let request = operation.request(&mut rng, &self.schemas, &pool);
            self.sent.fetch_add(1, Ordering::Relaxed);
            let headers: Vec<_> =
                request.headers.iter().map(|(name, it)| (*name, it.as_str())).collect();
            let mut answer =
                connection.send(&request.method, &request.path, &headers, &request.body);
            if answer.is_err() {
                // The server may close a connection after any answer. A second failure is a finding.
                connection = Connection::new(self.client.clone(), LIMIT);
                answer = connection.send(&request.method, &request.path, &headers, &request.body);
            }
            match &answer {
                Ok(answer) => {
                    *statuses.entry(answer.status).or_default() += 1;
                    keep(&mut rng, &mut pool, operation, answer);
                }
                Err(_) => connection = Connection::new(self.client.clone(), LIMIT),
            }
            self.judge(&request, &answer);
            if self.findings.lock().expect("no panic under the lock").len() > 50 {
                break;
            }
        }
        let mut all = self.statuses.lock().expect("no panic under the lock");
        for (status, count) in statuses {
            *all.entry(status).or_default() += count;
        }
    }

    fn judge(&self, request: &Request, answer: &Result<Response>) {
        let what = match answer {
            Ok(answer) if answer.status < 500 => return,
            Ok(answer) => {
                let message: Value = serde_json::from_str(&answer.body).unwrap_or_default();
                let message = message["message"].as_str().unwrap_or(&answer.body);
                if UPSTREAMS
                    .iter()
                    .any(|(code, text)| *code == answer.status && message.contains(text))
                {
                    return;
                }
                format!("{} {}", answer.status, message.chars().take(200).collect::<String>())
            }
            Err(error) => format!("no answer: {error:#}"),
        };
        // Findings of one kind differ in names and numbers.
        let sort: String = what.chars().filter(|char| !char.is_ascii_digit()).take(60).collect();
        let sort = format!("{} {sort}", request.method);
        let body = String::from_utf8_lossy(&request.body);
        let body: String = body.chars().take(SHOWN).collect();
        let text = format!(
            "{what}\n    {} {}\n    {:?}\n    {body}",
            request.method, request.path, request.headers
        );
        self.findings.lock().expect("no panic under the lock").entry(sort).or_insert(text);
    }

    fn conclude(self, server: &mut ControlPlane) -> Result<()> {
        let mut findings = self.findings.into_inner().expect("no panic under the lock");
        if let Some(status) = server.exit_status()? {
            findings.insert("end".to_owned(), format!("the server ended: {status}"));
        } else if !self.client.get("/readyz", LIMIT).is_ok_and(|answer| answer.status == 200) {
            findings.insert("readyz".to_owned(), "the server is not ready afterwards".to_owned());
        }
        let log = server.log();
        let panics =
            log.lines().filter(|line| line.contains("panicked") || line.contains("overflowed"));
        findings.extend(panics.map(|line| (line.to_owned(), line.to_owned())));
        let statuses = self.statuses.into_inner().expect("no panic under the lock");
        println!("{} requests; answers by status: {statuses:?}", self.sent.into_inner());
        for finding in findings.values() {
            println!("FOUND {finding}");
        }
        ensure!(findings.is_empty(), "{} findings", findings.len());
        Ok(())
    }
}

/// Keeps created objects, and the items of lists, as material for later requests.
fn keep(rng: &mut Rng, pool: &mut Pool, operation: &Operation, answer: &Response) {
    let is_list = operation.method == "GET" && !operation.path.contains("{name}");
    let is_write =
        answer.status == 201 || (operation.method != "GET" && operation.method != "DELETE");
    if answer.status > 201 || !(is_write || is_list && rng.percent(30)) {
        return;
    }
    let Ok(object) = serde_json::from_str::<Value>(&answer.body) else { return };
    match object["items"].as_array() {
        Some(items) => {
            if let Some(item) = items.get(rng.below(items.len())) {
                pool.keep(rng, operation.list_path(), item.clone());
            }
        }
        None if object["metadata"]["name"].is_string()
            && operation.list_path() == operation.path
            || operation.path.ends_with("/{name}") =>
        {
            pool.keep(rng, operation.list_path(), object);
        }
        None => {}
    }
}

/// All OpenAPI documents.
fn documents(client: &ApiClient) -> Result<(Vec<Operation>, Schemas)> {
    let get = |path: &str| -> Result<Value> {
        let answer = client.get(path, LIMIT)?;
        ensure!(answer.status == 200, "{path}: {} {}", answer.status, answer.body);
        Ok(serde_json::from_str(&answer.body)?)
    };
    let index = get("/openapi/v3")?;
    let mut paths = Map::new();
    let mut schemas = Map::new();
    for entry in index["paths"].as_object().context("an index of documents")?.values() {
        let path = entry["serverRelativeURL"].as_str().context("an address of a document")?;
        let mut document = get(path)?;
        if let Value::Object(found) = document["paths"].take() {
            paths.extend(found);
        }
        if let Value::Object(found) = document["components"]["schemas"].take() {
            schemas.extend(found);
        }
    }
    Ok((requests::operations(&json!({"paths": paths})), Schemas(schemas)))
}
