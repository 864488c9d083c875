//! The file is rewritten while the store runs.

use std::path::Path;

use super::*;
use crate::backend::embedded::verify;

/// Keeps little history, and rewrites for any slack.
fn short() -> Options {
    Options {
        history_age: Duration::from_millis(10),
        history_revisions: 50,
        slack_bytes: 0,
        ..Options::default()
    }
}

fn open(dir: &Path, options: &Options) -> Arc<Embedded> {
    let durable = Durable::open(dir, options.sync).expect("the file opens");
    Embedded::start(durable, options).expect("the store opens")
}

/// The length of the file, which shrinks only when the file is replaced.
fn size(dir: &Path) -> u64 {
    dir.join("store.redb").metadata().expect("it is there").len()
}

/// Many updates of few keys, some concurrently.
async fn churn(store: &Arc<Embedded>, rounds: u64) {
    let value = "x".repeat(4000);
    for round in 0..rounds {
        let mut set = tokio::task::JoinSet::new();
        for key in 0..20 {
            let (store, value) = (store.clone(), format!("{round} {value}"));
            set.spawn(async move { put(&store, &format!("k{key}"), &value).await });
        }
        let written = set.join_all().await;
        assert!(written.iter().all(Result::is_ok), "writes succeed meanwhile: {written:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_file_stays_below_twice_its_content() {
    let dir = tempfile::tempdir().expect("a directory");
    let options = Options { sync: false, ..short() };
    // Nothing is trimmed: the file after a burst.
    let long = Options { history_revisions: u64::MAX / 2, ..options.clone() };
    let store = open(dir.path(), &long);
    churn(&store, 200).await;
    let (big, used) = store.shared.durable.sizes();
    assert!(big > used && used > 12 << 20, "{big} bytes for {used}");
    assert!(big < 2 * used, "{big} bytes for {used}");
    store.close().await;

    let store = open(dir.path(), &options);
    let range = KeyRange::prefix(Bytes::new());
    let mut next = Revision(store.shared.state().revision.0 + 1);
    let request = WatchRequest { range, start: Some(next) };
    let mut watch = store.watch(request).await.expect("it starts");
    churn(&store, 10).await;
    eventually(async || (size(dir.path()) < big / 2).then_some(())).await;
    churn(&store, 10).await;
    let last = store.revision().await.expect("it is open");
    // All events, from before and after.
    while next <= last {
        let item = testkit::wait::soon("an item", watch.items.recv()).await;
        if let Some(WatchItem::Events(revision, _)) = item {
            assert_eq!(revision, next);
            next.0 += 1;
        }
    }
    let bound = |(taken, used): (u64, u64)| (taken < 2 * used + (1 << 20)).then_some(());
    eventually(async || bound(store.shared.durable.sizes())).await;
    let floor = store.shared.state().floor;
    let past = values(&store, Some(floor)).await.expect("the history is there");
    let now = values(&store, None).await.expect("readable");
    assert_eq!((past.len(), now.len()), (20, 20));
    store.close().await;

    let found = verify(dir.path()).expect("all is in order");
    assert_eq!((found.keys, found.revision), (20, last));
    let store = open(dir.path(), &long);
    assert_eq!(values(&store, None).await.expect("readable"), now);
    store.close().await;
}

#[tokio::test]
async fn files_of_an_interrupted_rewrite_are_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path(), &Options::default());
    put(&store, "a", "1").await.expect("written");
    store.close().await;
    let left = dir.path().join("store.redb.new");
    std::fs::write(&left, "half a copy").expect("written");
    let store = open(dir.path(), &Options::default());
    assert!(!left.exists());
    assert_eq!(values(&store, None).await.expect("readable"), ["a=1"]);
    store.close().await;
}

#[tokio::test]
async fn a_copy_is_complete_or_unused() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = open(dir.path(), &Options::default());
    for i in 0..10 {
        put(&store, &format!("k{i}"), "1").await.expect("written");
    }
    let durable = &store.shared.durable;
    let mut copy = durable.begin_copy().expect("there is a place for it");
    assert!(!durable.go_on_copying(&mut copy).expect("copied"), "all in one go");
    let begun = dir.path().join("store.redb.new");
    assert!(begun.exists());
    drop(copy);
    assert!(!begun.exists(), "an unused copy is removed");
    let copy = durable.begin_copy().expect("and again");
    std::fs::remove_file(&begun).expect("removed");
    assert!(durable.install(copy).is_err());
    assert!(durable.is_open(), "the store is unchanged");
    let lease = store.lease_grant(1000).await.expect("granted");
    durable.install(durable.begin_copy().expect("and again")).expect("installed");
    put(&store, "more", "1").await.expect("it accepts writes");
    let now = values(&store, None).await.expect("readable");
    store.close().await;
    let store = open(dir.path(), &Options::default());
    assert_eq!(values(&store, None).await.expect("readable"), now);
    assert_eq!(store.leases().await.expect("readable")[0].id, lease);
    store.close().await;
}
