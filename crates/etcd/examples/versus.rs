//! The embedded store and a real etcd, side by side on one disk: what docs/performance.md shows.
//!
//! `ETCD=/path/to/etcd cargo run --release -p decapod-etcd --example versus [DIR]`. Without `ETCD`
//! only our own are measured: the store in this process, and the same served as an etcd by a socket,
//! which is what is fair to compare with etcd's client.

extern crate decapod_etcd as etcd;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use store::{KeyRange, Op, RangeRequest, Store, Txn, WatchItem, WatchRequest};
use tokio::task::JoinSet;
use tokio::time::Instant;

const VALUE: usize = 1024;
const WRITERS: [usize; 4] = [1, 16, 64, 256];
const PUTS_FOR: Duration = Duration::from_secs(4);
const KEYS: usize = 100_000;
const WATCHERS: usize = 1000;
const EVENTS: usize = 100;
const CHURN_KEYS: usize = 10_000;

/// A store to measure, and the process to look at if it is not this one.
struct Subject {
    name: &'static str,
    store: Arc<dyn Store>,
    process: Option<Child>,
    dir: PathBuf,
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            // It has ended by itself otherwise.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn put(key: String, size: usize) -> Op {
    Op::Put { key: key.into(), value: vec![b'x'; size].into(), lease: 0 }
}

async fn write(store: &dyn Store, ops: Vec<Op>) {
    store.txn(Txn { success: ops, ..Txn::default() }).await.expect("the write succeeds");
}

fn resident(process: Option<u32>) -> u64 {
    let path = process.map_or("/proc/self/statm".into(), |pid| format!("/proc/{pid}/statm"));
    let pages = std::fs::read_to_string(path).expect("Linux");
    pages.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).expect("a number") * 4096
}

fn size_of(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => size_of(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

fn row(subject: &Subject, what: &str, value: String) {
    println!("| {} | {what} | {value} |", subject.name);
}

async fn puts(subject: &Subject, writers: usize) {
    let begun = Instant::now();
    let mut set = JoinSet::new();
    for writer in 0..writers {
        let store = subject.store.clone();
        set.spawn(async move {
            let mut took = vec![];
            while begun.elapsed() < PUTS_FOR {
                let at = Instant::now();
                write(&*store, vec![put(format!("/puts/{writer}/{}", took.len() % 100), VALUE)])
                    .await;
                took.push(at.elapsed());
            }
            took
        });
    }
    let mut took: Vec<Duration> = set.join_all().await.into_iter().flatten().collect();
    took.sort_unstable();
    let rate = took.len() as f64 / begun.elapsed().as_secs_f64();
    let at = |share: f64| took[(share * (took.len() - 1) as f64) as usize];
    let value = format!("{rate:.0}/s, p50 {:.1?}, p99 {:.1?}", at(0.5), at(0.99));
    row(subject, &format!("durable puts of 1 KiB, {writers} writers"), value);
}

/// Fills in the keys of the range, and says what a key costs in memory.
async fn fill(subject: &Subject) {
    let pid = subject.process.as_ref().map(Child::id);
    let before = resident(pid);
    for chunk in (0..KEYS).collect::<Vec<_>>().chunks(100) {
        let key = |i: &usize| put(format!("/registry/pods/namespace-{}/{i:06}", i % 50), VALUE);
        write(&*subject.store, chunk.iter().map(key).collect()).await;
    }
    let each = resident(pid).saturating_sub(before) / KEYS as u64;
    row(subject, "memory per key of 1 KiB, 100,000 keys", format!("{each} bytes"));
}

async fn range(subject: &Subject) {
    let mut took = vec![];
    for _ in 0..5 {
        let all = RangeRequest::new(KeyRange::prefix(&b"/registry/pods/"[..]));
        let begun = Instant::now();
        let answer = subject.store.range(all).await.expect("readable");
        took.push(begun.elapsed());
        assert_eq!(answer.kvs.len(), KEYS);
    }
    took.sort_unstable();
    row(subject, "range of 100,000 keys of 1 KiB, median of 5", format!("{:.1?}", took[2]));
}

/// From the first write until each watcher has all events.
async fn fan_out(subject: &Subject) {
    let mut watchers = JoinSet::new();
    for _ in 0..WATCHERS {
        let range = KeyRange::prefix(&b"/fan/"[..]);
        let request = WatchRequest { range, start: None };
        let mut watch = subject.store.watch(request).await.expect("it starts");
        watchers.spawn(async move {
            let mut seen = 0;
            while seen < EVENTS {
                match watch.items.recv().await.expect("it goes on") {
                    WatchItem::Events(_, events) => seen += events.len(),
                    WatchItem::Progress(_) => {}
                    WatchItem::Compacted(floor) => panic!("compacted at {floor}"),
                }
            }
        });
    }
    let begun = Instant::now();
    for i in 0..EVENTS {
        write(&*subject.store, vec![put(format!("/fan/{i}"), VALUE)]).await;
    }
    watchers.join_all().await;
    let rate = (WATCHERS * EVENTS) as f64 / begun.elapsed().as_secs_f64();
    row(subject, "events to 1,000 watchers", format!("{rate:.0}/s"));
}

/// Updates of few keys, then what the files take.
async fn churn(subject: &Subject, updates: usize) {
    for chunk in (0..updates).collect::<Vec<_>>().chunks(100) {
        let key = |i: &usize| put(format!("/churn/{}", i % CHURN_KEYS), VALUE);
        write(&*subject.store, chunk.iter().map(key).collect()).await;
    }
    let what = format!("bytes on disk after {updates} updates of {CHURN_KEYS} keys");
    row(subject, &what, format!("{:.0} MB", size_of(&subject.dir) as f64 / 1e6));
}

fn embedded(dir: &Path) -> Arc<dyn Store> {
    store::Embedded::open(dir, store::Options::default()).expect("the store opens")
}

/// The same store behind a socket, in this process.
fn served(store: Arc<dyn Store>, dir: &Path) -> Arc<dyn Store> {
    let socket = dir.join("socket");
    let listener = transport::Listener::unix(&socket).expect("the directory is ours");
    let tasks = base::task::Tasks::new("served");
    let options = etcd::server::Options { request_limit: 4 << 20, ..Default::default() };
    let server = etcd::server::Server::new(store, options, tasks.clone());
    let (limits, stop) = (transport::Limits::default(), tasks.stop_signal());
    tasks.spawn("server", transport::serve(listener, None, server, limits, stop));
    let endpoints = vec![format!("unix://{}", socket.display())];
    etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() }).expect("a socket")
}

async fn real(program: &Path, dir: &Path) -> Subject {
    const CLIENT: &str = "http://127.0.0.1:23790";
    const PEER: &str = "http://127.0.0.1:23800";
    let process = Command::new(program)
        .arg("--data-dir")
        .arg(dir)
        .args(["--listen-client-urls", CLIENT, "--advertise-client-urls", CLIENT])
        .args(["--listen-peer-urls", PEER, "--initial-advertise-peer-urls", PEER])
        .args(["--name", "one", "--initial-cluster", &format!("one={PEER}")])
        .args(["--quota-backend-bytes", "8000000000"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd starts");
    let endpoints = vec![CLIENT.to_owned()];
    let store = etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() });
    let store = store.expect("a URL");
    while store.revision().await.is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Subject { name: "etcd", store, process: Some(process), dir: dir.to_owned() }
}

async fn measure(subject: &Subject, updates: usize) {
    for writers in WRITERS {
        puts(subject, writers).await;
    }
    fill(subject).await;
    range(subject).await;
    fan_out(subject).await;
    churn(subject, updates).await;
}

#[tokio::main]
async fn main() {
    let place = std::env::args().nth(1).map_or(std::env::temp_dir(), PathBuf::from);
    let updates = std::env::var("UPDATES").ok().and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
    let dir = tempfile::tempdir_in(place).expect("a directory");
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load of the machine at the beginning: {load}");
    println!("| store | what | value |\n|---|---|---|");
    let own = dir.path().join("embedded");
    let store = embedded(&own);
    let subject =
        Subject { name: "embedded", store: store.clone(), process: None, dir: own.clone() };
    measure(&subject, updates).await;
    let socket = tempfile::tempdir().expect("a directory");
    let behind = served(store.clone(), socket.path());
    let through =
        Subject { name: "embedded, served", store: behind, process: None, dir: own.clone() };
    for writers in WRITERS {
        puts(&through, writers).await;
    }
    range(&through).await;
    fan_out(&through).await;
    store.close().await;
    let begun = Instant::now();
    let again = embedded(&own);
    row(&subject, "open, 100,000 keys and all history", format!("{:.0?}", begun.elapsed()));
    again.close().await;
    if let Some(program) = std::env::var_os("ETCD").map(PathBuf::from) {
        let subject = real(&program, &dir.path().join("etcd")).await;
        measure(&subject, updates).await;
    }
}
