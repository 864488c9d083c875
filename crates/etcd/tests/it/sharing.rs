//! Several clients of one etcd, like several API servers: all see each other's writes, each through one
//! stream for all its watches, even with slow readers; and one of them compacts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use store::{
    Error, KeyRange, Op, RangeRequest, Revision, Store, Txn, Watch, WatchItem, WatchRequest,
};
use testkit::http;
use testkit::wait::{LONG, found, soon};

use crate::{CLIENT_PORT, open, program, served};

const CLIENTS: usize = 3;
const RESOURCES: usize = 40;
const WRITES: usize = 200;

fn key(resource: usize, name: usize) -> String {
    format!("/registry/resource-{resource}/default/name-{name}")
}

async fn put(store: &dyn Store, key: String, value: Vec<u8>) -> Revision {
    let op = Op::Put { key: key.into(), value: value.into(), lease: 0 };
    store.txn(Txn { success: vec![op], ..Txn::default() }).await.expect("written").revision
}

async fn watch(store: &dyn Store, prefix: String, start: Option<Revision>) -> Watch {
    let range = KeyRange::prefix(prefix);
    store.watch(WatchRequest { range, start }).await.expect("it starts")
}

/// The keys and revisions of the events up to `until`, which a `Progress` must reach.
async fn follow(mut watch: Watch, until: Revision) -> Vec<(Bytes, Revision)> {
    let mut seen = vec![];
    watch.request_progress();
    loop {
        match soon("an item", watch.items.recv()).await {
            Some(WatchItem::Events(revision, events)) => {
                seen.extend(events.iter().map(|event| (event.kv.key.clone(), revision)));
            }
            Some(WatchItem::Progress(revision)) if revision >= until => return seen,
            Some(WatchItem::Progress(_)) => watch.request_progress(),
            other => panic!("the watch ended: {other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_client_has_one_stream_for_all_its_watches() {
    if program().is_none() {
        println!("skipped: no etcd on the path or in the cache, and ETCD does not name one");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let clients: Vec<Arc<dyn Store>> =
        (0..CLIENTS).map(|_| open(dir.path(), program).expect("etcd answers")).collect();
    let mut watches = BTreeMap::new();
    for (at, client) in clients.iter().enumerate() {
        for resource in 0..RESOURCES {
            let prefix = format!("/registry/resource-{resource}/");
            watches.insert((at, resource), watch(&**client, prefix, None).await);
        }
    }
    let address = std::fs::read_to_string(dir.path().join("address")).expect("it runs");
    // A watch that began before the stream was open had another one for a moment.
    let what = format!("{CLIENTS} streams for {} watches", watches.len());
    found(&what, async || (watchers(&address) == CLIENTS).then_some(())).await;
    let mut written: BTreeMap<usize, Vec<(Bytes, Revision)>> = BTreeMap::new();
    let mut last = Revision(0);
    for at in 0..WRITES {
        let (resource, writer) = (at % RESOURCES, &clients[at % CLIENTS]);
        last = put(&**writer, key(resource, at), vec![b'x'; 100]).await;
        written.entry(resource).or_default().push((key(resource, at).into(), last));
    }
    for ((client, resource), watch) in watches {
        let seen = follow(watch, last).await;
        assert_eq!(Some(&seen), written.get(&resource), "client {client}, resource {resource}");
    }
    for client in clients {
        client.close().await;
    }
}

/// The number of watches that etcd counts.
fn watchers(address: &str) -> usize {
    const NAME: &str = "etcd_debugging_mvcc_watcher_total ";
    let page = http::get(&format!("{address}:{CLIENT_PORT}"), "/metrics", LONG).expect("a page");
    let line = page.body.lines().find_map(|line| line.strip_prefix(NAME));
    line.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("no {NAME}"))
}

/// One reader pauses until more events have passed than are kept for it: the others do not wait, and it
/// misses nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_far_behind_reads_history() {
    const VALUE: usize = 100 * 1024;
    let dir = tempfile::tempdir().expect("a directory");
    let store = served(dir.path(), None).expect("it is served");
    let prefix = || "/registry/resource-0/".to_owned();
    let slow = watch(&*store, prefix(), None).await;
    let quick = watch(&*store, prefix(), None).await;
    let mut following = tokio::task::JoinSet::new();
    let first = store.revision().await.expect("it answers");
    let end = Revision(first.0 + 300);
    following.spawn(follow(quick, end));
    let mut written = vec![];
    for at in 0..300 {
        let revision = put(&*store, key(0, at % 7), vec![b'x'; VALUE]).await;
        written.push((Bytes::from(key(0, at % 7)), revision));
    }
    assert_eq!(following.join_all().await.remove(0), written, "a reader that reads at once");
    assert_eq!(follow(slow, end).await, written, "a reader that reads at the end");
    let late = watch(&*store, prefix(), Some(Revision(first.0 + 1))).await;
    assert_eq!(follow(late, end).await, written, "a reader that joins at the end");
    store.close().await;
}

/// Three compactors: together they compact once per interval, not three times.
#[tokio::test]
async fn one_of_three_compacts() {
    const INTERVAL: Duration = Duration::from_millis(300);
    const ROUNDS: u32 = 6;
    if program().is_none() {
        println!("skipped: no etcd on the path or in the cache, and ETCD does not name one");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let clients: Vec<Arc<dyn Store>> =
        (0..CLIENTS).map(|_| open(dir.path(), program).expect("etcd answers")).collect();
    let old = put(&*clients[0], key(0, 0), b"old".to_vec()).await;
    put(&*clients[0], key(0, 0), b"new".to_vec()).await;
    let mut rounds = watch(&*clients[0], "compact_rev_key".into(), None).await;
    let begun = tokio::time::Instant::now();
    let compactors = clients.iter().map(|client| etcd::compactor::run(client.clone(), INTERVAL));
    let _compactors: tokio::task::JoinSet<()> = compactors.collect();
    let mut count = 0;
    while count < ROUNDS {
        let item = soon("a round", rounds.items.recv()).await;
        if let Some(WatchItem::Events(_, events)) = item {
            count += u32::try_from(events.len()).expect("few");
        }
    }
    let took = begun.elapsed();
    // If each compacted on its own, it would take a third of that.
    assert!(took >= INTERVAL * (ROUNDS - 1), "{ROUNDS} rounds in {took:?}");
    let range = KeyRange::one(key(0, 0));
    // The server that counts a round compacts in the next one.
    found("old revisions are compacted", async || {
        let past = RangeRequest { revision: Some(old), ..RangeRequest::new(range.clone()) };
        let past = clients[1].range(past).await;
        matches!(past, Err(Error::Compacted { .. })).then_some(())
    })
    .await;
    let now = clients[2].range(RangeRequest::new(range)).await.expect("readable");
    assert_eq!(now.kvs[0].value, "new");
}
