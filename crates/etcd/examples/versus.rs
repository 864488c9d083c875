//! Compares the embedded store with a real etcd on one disk; the source of docs/performance.md.
//!
//! `ETCD=/path/to/etcd cargo run --release -p decapod-etcd --example versus [DIR]`. Without `ETCD`
//! it measures only our own: the store in this process; the same behind a transformation that changes
//! nothing (a server has one for its secrets); and the same served as an etcd over a socket, which is
//! comparable with etcd's client. `UPDATES`, `KEYS`, `WATCHERS` and `SECONDS` make the run smaller.
//!
//! Each subject writes to its own directory below `DIR`, with its own way of syncing and its default
//! settings, except for etcd's quota.

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
const EVENTS: usize = 100;
const CHURN_KEYS: usize = 10_000;

/// The size of the run.
#[derive(Clone, Copy)]
struct Extent {
    puts_for: Duration,
    keys: usize,
    watchers: usize,
    updates: usize,
}

impl Extent {
    fn asked() -> Self {
        let number = |name: &str, usual: usize| {
            let asked = std::env::var(name).ok();
            asked.map_or(usual, |text| text.parse().expect("a number"))
        };
        Self {
            puts_for: Duration::from_secs(number("SECONDS", 4) as u64),
            keys: number("KEYS", 100_000),
            watchers: number("WATCHERS", 1000),
            updates: number("UPDATES", 1_000_000),
        }
    }
}

/// A store to measure, and its process if it is not this one.
struct Subject {
    name: &'static str,
    store: Arc<dyn Store>,
    process: Option<Child>,
    dir: PathBuf,
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            // An error means that it has already exited.
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

/// A process's resident memory, and the anonymous part of it.
fn memory(process: Option<u32>) -> (u64, u64) {
    let path = process.map_or("/proc/self/status".into(), |pid| format!("/proc/{pid}/status"));
    let status = std::fs::read_to_string(path).expect("Linux");
    let kilobytes = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("Linux has it");
        line.trim_end_matches("kB").trim().parse::<u64>().expect("a number")
    };
    (kilobytes("VmRSS:") * 1024, kilobytes("RssAnon:") * 1024)
}

/// The disk blocks of the files: a file with holes takes less than its length, one with preallocated
/// space takes more.
fn size_of(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => size_of(&entry.path()),
            Ok(meta) => meta.blocks() * 512,
            Err(_) => 0,
        })
        .sum()
}

fn row(subject: &Subject, what: &str, value: String) {
    println!("| {} | {what} | {value} |", subject.name);
}

/// The maximum rate of one writer: appends and syncs a record repeatedly. Measured before each
/// subject that writes, because other programs may use the disk, too.
fn disk(dir: &Path, before: &str) {
    use std::io::Write;
    const TIMES: usize = 200;
    let mut file = std::fs::File::create(dir.join("disk")).expect("a file");
    let mut took = vec![];
    for _ in 0..TIMES {
        let begun = Instant::now();
        file.write_all(&[b'x'; VALUE]).and_then(|()| file.sync_data()).expect("synced");
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    let (p50, p99) = (took[TIMES / 2], took[TIMES * 99 / 100]);
    let rate = TIMES as f64 / took.iter().sum::<Duration>().as_secs_f64();
    println!(
        "| the disk before {before} | 1 KiB appended and synced | {rate:.0}/s, p50 {p50:.1?}, p99 {p99:.1?} |"
    );
}

async fn puts(subject: &Subject, writers: usize, puts_for: Duration) {
    let begun = Instant::now();
    let mut set = JoinSet::new();
    for writer in 0..writers {
        let store = subject.store.clone();
        set.spawn(async move {
            let mut took = vec![];
            while begun.elapsed() < puts_for {
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

/// Writes the keys of the range, and measures the memory per key.
async fn fill(subject: &Subject, keys: usize) {
    let pid = subject.process.as_ref().map(Child::id);
    let before = memory(pid);
    for chunk in (0..keys).collect::<Vec<_>>().chunks(100) {
        let key = |i: &usize| put(format!("/registry/pods/namespace-{}/{i:06}", i % 50), VALUE);
        write(&*subject.store, chunk.iter().map(key).collect()).await;
    }
    let after = memory(pid);
    let each = |now: u64, then: u64| now.saturating_sub(then) / keys as u64;
    let value =
        format!("{} bytes, {} of them anonymous", each(after.0, before.0), each(after.1, before.1));
    row(subject, &format!("memory per key of 1 KiB, {keys} keys"), value);
    let all = format!("{:.0} MB", after.0 as f64 / 1e6);
    row(subject, &format!("memory of the process, with {keys} keys"), all);
}

async fn range(subject: &Subject, keys: usize) {
    let mut took = vec![];
    for _ in 0..5 {
        let all = RangeRequest::new(KeyRange::prefix(&b"/registry/pods/"[..]));
        let begun = Instant::now();
        let answer = subject.store.range(all).await.expect("readable");
        took.push(begun.elapsed());
        assert_eq!(answer.kvs.len(), keys);
    }
    took.sort_unstable();
    row(
        subject,
        &format!("range of {keys} keys of 1 KiB, median of 5"),
        format!("{:.1?}", took[2]),
    );
}

/// Measures from the first write until each watcher has all events.
async fn fan_out(subject: &Subject, count: usize) {
    let mut watchers = JoinSet::new();
    for _ in 0..count {
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
    let rate = (count * EVENTS) as f64 / begun.elapsed().as_secs_f64();
    row(subject, &format!("events to {count} watchers"), format!("{rate:.0}/s"));
}

/// Updates few keys, then measures the files.
async fn churn(subject: &Subject, updates: usize) {
    for chunk in (0..updates).collect::<Vec<_>>().chunks(100) {
        let key = |i: &usize| put(format!("/churn/{}", i % CHURN_KEYS), VALUE);
        write(&*subject.store, chunk.iter().map(key).collect()).await;
    }
    // The size of all files, and the database's size in use according to the store: for ours, the live
    // values and the retained history.
    let sizes = async || {
        let used = subject.store.status().await.expect("it answers").used_bytes;
        (size_of(&subject.dir), used)
    };
    let megabytes = |(taken, used): (u64, u64)| {
        format!("{:.0} MB, {:.0} MB of them in use", taken as f64 / 1e6, used as f64 / 1e6)
    };
    let what = format!("bytes on disk after {updates} updates of {CHURN_KEYS} keys");
    row(subject, &what, megabytes(sizes().await));
    let present = subject.store.revision().await.expect("it answers");
    subject.store.compact(present).await.expect("it is there");
    // Both remove history and free space in the background: wait until the numbers are stable.
    // The file size alone is not enough: it does not change while history is removed.
    let mut before = sizes().await;
    loop {
        tokio::time::sleep(Duration::from_secs(3)).await;
        let now = sizes().await;
        if now == before {
            break;
        }
        before = now;
    }
    row(subject, "the same, all history compacted", megabytes(before));
}

fn opened(subject: &Subject, keys: usize, begun: Instant) {
    let what = format!("open, {keys} keys, without history");
    row(subject, &what, format!("{:.0?}", begun.elapsed()));
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
    let (limits, stop) = (etcd::server::limits(), tasks.stop_signal());
    tasks.spawn("server", transport::serve(listener, None, server, limits, stop));
    let endpoints = vec![format!("unix://{}", socket.display())];
    etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() }).expect("a socket")
}

async fn real(program: &Path, dir: &Path) -> Subject {
    let free = || {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        format!("http://{}", listener.local_addr().expect("it is bound"))
    };
    let (client, peer) = (&*free(), &*free());
    let process = Command::new(program)
        .arg("--data-dir")
        .arg(dir)
        .args(["--listen-client-urls", client, "--advertise-client-urls", client])
        .args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer])
        .args(["--name", "one", "--initial-cluster", &format!("one={peer}")])
        .args(["--quota-backend-bytes", "8000000000"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd starts");
    let endpoints = vec![client.to_owned()];
    let store = etcd::Etcd::open(&etcd::Options { endpoints, ..Default::default() });
    let store = store.expect("a URL");
    while store.revision().await.is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Subject { name: "etcd", store, process: Some(process), dir: dir.to_owned() }
}

async fn measure(subject: &Subject, extent: Extent) {
    for writers in WRITERS {
        puts(subject, writers, extent.puts_for).await;
    }
    fill(subject, extent.keys).await;
    range(subject, extent.keys).await;
    fan_out(subject, extent.watchers).await;
    churn(subject, extent.updates).await;
}

/// Measures the layers between the embedded store and its user, with the existing data.
async fn in_between(subject: &Subject, extent: Extent) {
    for writers in WRITERS {
        puts(subject, writers, extent.puts_for).await;
    }
    range(subject, extent.keys).await;
    fan_out(subject, extent.watchers).await;
}

/// Changes nothing.
struct Nothing;

impl store::Transform for Nothing {
    fn seal(&self, _key: &[u8], value: bytes::Bytes) -> store::Result<bytes::Bytes> {
        Ok(value)
    }

    fn open(&self, _key: &[u8], value: bytes::Bytes) -> store::Result<bytes::Bytes> {
        Ok(value)
    }
}

#[tokio::main]
async fn main() {
    let place = std::env::args().nth(1).map_or(std::env::temp_dir(), PathBuf::from);
    let extent = Extent::asked();
    let dir = tempfile::tempdir_in(place).expect("a directory");
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load of the machine at the beginning: {load}");
    println!("| store | what | value |\n|---|---|---|");
    disk(dir.path(), "embedded");
    let own = dir.path().join("embedded");
    let of = |name, store| Subject { name, store, process: None, dir: own.clone() };
    let subject = of("embedded", embedded(&own));
    measure(&subject, extent).await;
    let keys = subject.store.status().await.expect("it is open").keys;
    subject.store.close().await;
    let begun = Instant::now();
    let store = embedded(&own);
    opened(&subject, keys, begun);
    let transformed = store::Transformed::over(store.clone(), Arc::new(Nothing));
    in_between(&of("embedded, transformed", transformed), extent).await;
    disk(dir.path(), "served");
    let socket = tempfile::tempdir().expect("a directory");
    let behind = served(store.clone(), socket.path());
    in_between(&of("embedded, served", behind), extent).await;
    store.close().await;
    if let Some(program) = std::env::var_os("ETCD").map(PathBuf::from) {
        disk(dir.path(), "etcd");
        let dir = dir.path().join("etcd");
        let subject = real(&program, &dir).await;
        measure(&subject, extent).await;
        let keys = subject.store.status().await.expect("it is open").keys;
        drop(subject);
        let begun = Instant::now();
        opened(&real(&program, &dir).await, keys, begun);
    }
}
