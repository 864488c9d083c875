//! A quick look at the store's speed, for people: `cargo run -p decapod-store --example bench`.
//! The directory is the first argument; put it on the disk that matters.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use decapod_store::{Embedded, KeyRange, Op, Options, RangeRequest, Store, Txn};
use tokio::time::Instant;

const VALUE: usize = 2048;

async fn put(store: &dyn Store, key: String) {
    let op = Op::Put { key: key.into(), value: vec![b'x'; VALUE].into(), lease: 0 };
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

/// What a live key costs in memory beyond its bytes: a store that was just opened has nothing else.
async fn memory(dir: &std::path::Path) {
    const KEYS: usize = 20_000;
    let key = |i: usize| format!("/registry/configmaps/namespace-{}/name-{i}", i % 50);
    let options = Options { sync: false, ..Options::default() };
    let store = Embedded::open(dir, options.clone()).expect("the store opens");
    for chunk in (0..KEYS).collect::<Vec<_>>().chunks(100) {
        let op =
            |i: &usize| Op::Put { key: key(*i).into(), value: vec![b'x'; 1000].into(), lease: 0 };
        let success = chunk.iter().map(op).collect();
        store.txn(Txn { success, ..Txn::default() }).await.expect("the write succeeds");
    }
    store.close().await;
    let bytes: usize = (0..KEYS).map(|i| key(i).len() + 1000).sum();
    let before = resident();
    let store = Embedded::open(dir, options).expect("the store opens");
    let used = resident() - before;
    println!("{KEYS} keys of {} bytes: {} resident each", bytes / KEYS, used / KEYS);
    store.close().await;
}

fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    pages.split(' ').nth(1).and_then(|n| n.parse::<usize>().ok()).expect("a number") * 4096
}

#[tokio::main]
async fn main() {
    // First, while the allocator has no free memory to hide in.
    let fresh = tempfile::tempdir().expect("a temporary directory");
    memory(fresh.path()).await;

    let dir = tempfile::tempdir().expect("a temporary directory");
    let dir = std::env::args().nth(1).map_or(dir.path().to_owned(), PathBuf::from);
    let store = open(&dir);
    single(&*store, 500).await;
    many(&store, 64, Duration::from_secs(5)).await;
    let start = Instant::now();
    let all = RangeRequest::new(KeyRange::prefix(&b""[..]));
    let all = store.range(all).await.expect("readable");
    println!("list {:>6} keys        {:>10.2?}", all.count, start.elapsed());
    // What a killed process would have left.
    let crashed = tempfile::tempdir_in(&dir).expect("a directory");
    std::fs::copy(dir.join("store.redb"), crashed.path().join("store.redb")).expect("copied");
    let start = Instant::now();
    store.close().await;
    println!("close                   {:>10.2?}", start.elapsed());
    open(&dir).close().await;
    print!("after a kill: ");
    open(crashed.path()).close().await;
}
