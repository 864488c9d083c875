//! Measures the store's speed: `cargo run --release -p decapod-store --example bench [DIR [PART,…]]`.
//! Put the directory on the disk to measure. The parts: `memory` and `small` (memory per key, of 1 KiB
//! and of 256 bytes), `opening`, `puts`. `fill` alone leaves a store of 100,000 keys in the directory,
//! and beside it a copy as after a kill; `time` opens it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use decapod_store::{Embedded, KeyRange, Op, Options, RangeRequest, Store, Txn};
use tokio::time::Instant;

const VALUE: usize = 2048;

/// A text of this length, similar to objects: the same names repeatedly, with varying values.
fn object(number: usize, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(number as u64);
    let mut text = format!(r#"{{"kind":"Pod","metadata":{{"name":"name-{number}"}},"env":["#);
    while text.len() < length {
        let (name, value) = (random.u8(..), random.u32(..));
        text += &format!(r#"{{"name":"VARIABLE_{name}","value":"{value:08x}"}},"#);
    }
    text.truncate(length);
    text.into()
}

async fn put(store: &dyn Store, key: String) {
    let value = object(key.len(), VALUE).into();
    let op = Op::Put { key: key.into(), value, lease: 0 };
    store.txn(Txn { success: vec![op], ..Txn::default() }).await.expect("the write succeeds");
}

fn open(dir: &std::path::Path) -> Arc<dyn Store> {
    let start = Instant::now();
    let store = Embedded::open(dir, Options::default()).expect("the store opens");
    println!("open                    {:>10.2?}", start.elapsed());
    store
}

async fn single(store: &dyn Store, count: usize) {
    let mut took = vec![];
    for i in 0..count {
        let start = Instant::now();
        put(store, format!("/registry/single/{i}")).await;
        took.push(start.elapsed());
    }
    took.sort_unstable();
    let at = |share: f64| took[(share * (count - 1) as f64) as usize];
    println!("put, one writer   p50 {:>10.2?}  p90 {:.2?}  p99 {:.2?}", at(0.5), at(0.9), at(0.99));
}

async fn many(store: &Arc<dyn Store>, writers: usize, time: Duration) {
    let start = Instant::now();
    let mut set = tokio::task::JoinSet::new();
    for writer in 0..writers {
        let store = store.clone();
        set.spawn(async move {
            let mut count = 0;
            while start.elapsed() < time {
                put(&*store, format!("/registry/many/{writer}/{}", count % 200)).await;
                count += 1;
            }
            count
        });
    }
    let count: usize = set.join_all().await.into_iter().sum();
    let rate = count as f64 / start.elapsed().as_secs_f64();
    println!("put, {writers:>3} writers        {rate:>10.0}/s");
}

/// Writes this many keys, in transactions of a hundred.
async fn fill(dir: &Path, keys: usize, size: usize) {
    let key = |i: usize| format!("/registry/configmaps/namespace-{}/name-{i}", i % 50);
    let options = Options { sync: false, ..Options::default() };
    let store = Embedded::open(dir, options).expect("the store opens");
    for chunk in (0..keys).collect::<Vec<_>>().chunks(100) {
        let op =
            |i: &usize| Op::Put { key: key(*i).into(), value: object(*i, size).into(), lease: 0 };
        let success = chunk.iter().map(op).collect();
        store.txn(Txn { success, ..Txn::default() }).await.expect("the write succeeds");
    }
    // The files that a killed process would leave.
    let copy = dir.with_extension("killed");
    std::fs::create_dir_all(&copy).expect("a directory");
    std::fs::copy(dir.join("store.redb"), copy.join("store.redb")).expect("copied");
    store.close().await;
}

/// Measures the memory of a live key beyond its bytes.
async fn memory(dir: &Path, keys: usize, size: usize) {
    let dir = dir.join(format!("memory-{size}"));
    fill(&dir, keys, size).await;
    let bytes = size + "/registry/configmaps/namespace-10/name-10000".len();
    println!("{keys} keys of {bytes} bytes: {}", in_a_process("weigh", &dir));
}

/// Measures the time and processor time of opening, after a clean close and after a kill.
async fn opening(dir: &Path, keys: usize) {
    let dir = dir.join("opening");
    fill(&dir, keys, 1024).await;
    let killed = dir.with_extension("killed");
    let again = dir.with_extension("again");
    std::fs::create_dir_all(&again).expect("a directory");
    for (what, from) in [("clean", &dir), ("killed", &killed)] {
        let mut took = vec![];
        for _ in 0..7 {
            let file = again.join("store.redb");
            std::fs::copy(from.join("store.redb"), &file).expect("copied");
            // Opening syncs, and would have to wait for the copy.
            std::fs::File::open(&file).and_then(|file| file.sync_all()).expect("synced");
            let answer = in_a_process("time", &again);
            let mut numbers = answer.split(' ').map(|n| n.parse::<u64>().expect("a number"));
            let mut next = || Duration::from_micros(numbers.next().expect("two numbers"));
            took.push((next(), next()));
        }
        took.sort_unstable();
        let (least, (wall, cpu)) = (took[0].0, took[took.len() / 2]);
        println!(
            "open {keys} keys, {what:>6}   {wall:>10.2?}, {cpu:.2?} of processor time, least {least:.2?}"
        );
    }
}

/// Runs one part in a new process, whose memory was not used before.
fn in_a_process(part: &str, dir: &Path) -> String {
    let program = std::env::current_exe().expect("Linux");
    let output = std::process::Command::new(program).arg(dir).arg(part).output().expect("it runs");
    String::from_utf8(output.stdout).expect("numbers").trim().to_owned()
}

async fn time(dir: &Path) {
    let (start, cpu) = (Instant::now(), processor());
    let store = Embedded::open(dir, Options::default()).expect("the store opens");
    println!("{} {}", start.elapsed().as_micros(), (processor() - cpu).as_micros());
    store.close().await;
}

async fn weigh(dir: &Path) {
    let before = resident();
    let store = Embedded::open(dir, Options::default()).expect("the store opens");
    let opened = resident() - before;
    let all = RangeRequest::new(KeyRange::prefix(&b""[..]));
    let keys = store.range(all).await.expect("readable").count;
    let read = resident() - before;
    println!("{} resident each, {} after a range of all", opened / keys, read / keys);
    store.close().await;
}

/// This process's processor time.
fn processor() -> Duration {
    use nix::sys::resource::{UsageWho, getrusage};
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("Linux");
    let micros = |time: nix::sys::time::TimeVal| {
        Duration::from_micros(time.tv_sec() as u64 * 1_000_000 + time.tv_usec() as u64)
    };
    micros(usage.user_time()) + micros(usage.system_time())
}

fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    pages.split(' ').nth(1).and_then(|n| n.parse::<usize>().ok()).expect("a number") * 4096
}

#[tokio::main]
async fn main() {
    let place = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let parts = std::env::args().nth(2).unwrap_or_else(|| "memory,small,opening,puts".into());
    match &*parts {
        "time" => return time(&place).await,
        "weigh" => return weigh(&place).await,
        "fill" => return fill(&place, 100_000, 1024).await,
        _ => {}
    }
    let dir = tempfile::tempdir_in(place).expect("a temporary directory");
    let dir = dir.path();
    for part in parts.split(',') {
        match part {
            "memory" => memory(dir, 100_000, 1024).await,
            "small" => memory(dir, 100_000, 256).await,
            "opening" => opening(dir, 100_000).await,
            "puts" => puts(&dir.join("puts")).await,
            other => panic!("{other}: there are memory, small, opening and puts"),
        }
    }
}

async fn puts(dir: &Path) {
    disk(dir);
    let store = open(dir);
    single(&*store, 1000).await;
    many(&store, 64, Duration::from_secs(5)).await;
    let start = Instant::now();
    let all = RangeRequest::new(KeyRange::prefix(&b""[..]));
    let all = store.range(all).await.expect("readable");
    println!("list {:>6} keys        {:>10.2?}", all.count, start.elapsed());
    let start = Instant::now();
    store.close().await;
    println!("close                   {:>10.2?}", start.elapsed());
}

/// The maximum rate of puts by one writer: appends and syncs a page repeatedly.
fn disk(dir: &Path) {
    use std::io::Write;
    std::fs::create_dir_all(dir).expect("a directory");
    let mut file = std::fs::File::create(dir.join("disk")).expect("a file");
    let mut took = vec![];
    for _ in 0..1000 {
        let start = Instant::now();
        file.write_all(&[b'x'; 4096]).and_then(|()| file.sync_data()).expect("synced");
        took.push(start.elapsed());
    }
    took.sort_unstable();
    println!(
        "append and sync   p50 {:>10.2?}  p90 {:.2?}  p99 {:.2?}",
        took[500], took[900], took[990]
    );
}
