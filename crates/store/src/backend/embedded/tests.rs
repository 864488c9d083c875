//! Tests of this backend only: refusals with reasons, survived errors, power loss.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::rng;
use bytes::Bytes;
use redb::StorageBackend;

use super::disk::{Disk, OpenDisk};
use super::durable::Durable;
use super::{Embedded, Options};
use crate::{
    Error, KeyRange, Op, RangeRequest, Result, Revision, Store, Txn, WatchItem, WatchRequest,
};

mod damage;
#[path = "../../../tests/it/linear.rs"]
mod linear;
mod opening;
mod reserving;
mod rewriting;

const SECTOR: usize = 512;

/// A disk that can fail, and that loses unsynced data when its power goes.
#[derive(Clone, Debug, Default)]
struct Platter(Arc<Mutex<Content>>);

#[derive(Debug, Default)]
struct Content {
    now: Vec<u8>,
    synced: Vec<u8>,
    /// Changes since the last sync, in order.
    unsynced: Vec<Change>,
    /// Takes a snapshot after this many more changes.
    snapshot_in: Option<u64>,
    snapshot: Option<(Vec<u8>, Vec<Change>)>,
    writes_fail: bool,
    /// Writes fail while this file has more than so many bytes.
    fails_beside: Option<(std::path::PathBuf, u64)>,
    syncs_fail: bool,
}

#[derive(Clone, Debug)]
enum Change {
    Length(u64),
    Sector(u64, Vec<u8>),
}

impl Change {
    fn apply(&self, image: &mut Vec<u8>) {
        match self {
            Self::Length(length) => image.resize(*length as usize, 0),
            Self::Sector(offset, data) => {
                let start = *offset as usize;
                // A write beyond an end that was itself lost is lost, too.
                if let Some(place) = image.get_mut(start..start + data.len()) {
                    place.copy_from_slice(data);
                }
            }
        }
    }
}

impl Content {
    fn is_full(&self) -> bool {
        let is_beside = |(path, most): &(std::path::PathBuf, u64)| {
            std::fs::metadata(path).is_ok_and(|meta| meta.len() > *most)
        };
        self.writes_fail || self.fails_beside.as_ref().is_some_and(is_beside)
    }

    fn change(&mut self, change: Change) {
        change.apply(&mut self.now);
        self.unsynced.push(change);
        match &mut self.snapshot_in {
            Some(0) if self.snapshot.is_none() => {
                self.snapshot = Some((self.synced.clone(), self.unsynced.clone()));
            }
            Some(left) => *left = left.saturating_sub(1),
            None => {}
        }
    }
}

impl Platter {
    fn with<T>(&self, act: impl FnOnce(&mut Content) -> T) -> T {
        act(&mut self.0.lock().expect("no panic while it is held"))
    }

    fn opener(&self) -> OpenDisk {
        let platter = self.clone();
        Arc::new(move || Ok(Disk::new(platter.clone())))
    }

    fn open(&self) -> Result<Arc<Embedded>> {
        self.open_with(&Options::default())
    }

    fn open_with(&self, options: &Options) -> Result<Arc<Embedded>> {
        Embedded::start(Durable::open_on("platter".into(), self.opener(), None)?, options)
    }

    /// The disk after a power loss: synced data, and any part of the rest, with torn sectors.
    fn after_power_loss(&self) -> Self {
        let kept = self.with(|content| {
            let last = (content.synced.clone(), content.unsynced.clone());
            let (mut image, unsynced) = content.snapshot.take().unwrap_or(last);
            let share = rng::unit();
            for change in &unsynced {
                if rng::unit() < share {
                    change.apply(&mut image);
                }
            }
            image
        });
        let after = Self::default();
        after.with(|content| {
            *content = Content { now: kept.clone(), synced: kept, ..Content::default() }
        });
        after
    }
}

impl StorageBackend for Platter {
    fn len(&self) -> io::Result<u64> {
        Ok(self.with(|content| content.now.len() as u64))
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        self.with(|content| match content.now.get(start..start + out.len()) {
            Some(bytes) => {
                out.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        })
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.with(|content| {
            if content.is_full() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            content.change(Change::Length(len));
            Ok(())
        })
    }

    fn sync_data(&self) -> io::Result<()> {
        self.with(|content| {
            if content.syncs_fail {
                return Err(io::Error::other("the platter is scratched"));
            }
            content.synced = content.now.clone();
            content.unsynced.clear();
            Ok(())
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.with(|content| {
            if content.is_full() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            for (i, sector) in data.chunks(SECTOR).enumerate() {
                content.change(Change::Sector(offset + (i * SECTOR) as u64, sector.to_vec()));
            }
            Ok(())
        })
    }
}

fn put_op(key: &str, value: &str) -> Op {
    Op::Put { key: key.to_owned().into(), value: value.to_owned().into(), lease: 0 }
}

async fn put(store: &Embedded, key: &str, value: &str) -> Result<Revision> {
    let txn = Txn { success: vec![put_op(key, value)], ..Txn::default() };
    Ok(store.txn(txn).await?.revision)
}

async fn values(store: &Embedded, revision: Option<Revision>) -> Result<Vec<String>> {
    let request = RangeRequest { revision, ..RangeRequest::new(KeyRange::prefix(Bytes::new())) };
    let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
    let kvs = store.range(request).await?.kvs;
    Ok(kvs.iter().map(|kv| format!("{}={}", text(&kv.key), text(&kv.value.bytes()))).collect())
}

/// Retries until it returns a value.
async fn eventually<T>(attempt: impl AsyncFnMut() -> Option<T>) -> T {
    testkit::wait::found("it holds", attempt).await
}

fn refusal(result: Result<impl Sized>) -> String {
    match result {
        Err(Error::Unusable(why)) => why.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it opened"),
    }
}

#[tokio::test]
async fn two_processes_do_not_share_a_store() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = Embedded::open(dir.path(), Options::default()).expect("it opens");
    let why = refusal(Embedded::open(dir.path(), Options::default()));
    assert_eq!(why, format!("the store in {} is in use by another process", dir.path().display()));
    drop(first);
    Embedded::open(dir.path(), Options::default()).expect("dropping frees it");
}

#[tokio::test]
async fn unreadable_stores_are_refused_in_one_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("store.redb");
    let database = redb::Database::create(&file).expect("a file");
    let write = database.begin_write().expect("a transaction");
    let meta: redb::TableDefinition<&str, u64> = redb::TableDefinition::new("meta");
    write.open_table(meta).expect("a table").insert("format", 7).expect("inserted");
    write.commit().expect("committed");
    drop(database);
    let why = refusal(Embedded::open(dir.path(), Options::default()));
    let expected = format!(
        "{} was written by a newer version of this program: it has format 7, this version reads 2",
        file.display()
    );
    assert_eq!(why, expected);

    std::fs::write(&file, "no store at all, just text".repeat(1000)).expect("written");
    let why = refusal(Embedded::open(dir.path(), Options::default()));
    assert!(why.starts_with(&format!("{} is damaged: ", file.display())), "{why}");
    assert!(!why.contains('\n'), "{why}");

    let why = refusal(Embedded::open(&file, Options::default()));
    assert!(why.starts_with("cannot "), "{why}");
}

#[tokio::test]
async fn files_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a directory");
    let inner = dir.path().join("a/b");
    Embedded::open(&inner, Options::default()).expect("it opens").close().await;
    let mode =
        |name: &str| inner.join(name).metadata().expect("it is there").permissions().mode() & 0o777;
    assert_eq!([mode(""), mode("store.redb"), mode("lock")], [0o700, 0o600, 0o600]);
}

#[tokio::test]
async fn a_full_disk_refuses_writes_and_loses_nothing() {
    let platter = Platter::default();
    let store = platter.open().expect("it opens");
    put(&store, "a", "1").await.expect("written");
    platter.with(|content| content.writes_fail = true);
    let big = "x".repeat(1 << 20);
    for _ in 0..3 {
        let refused = put(&store, "b", &big).await;
        assert!(matches!(refused, Err(Error::Unavailable(_) | Error::NoSpace(_))), "{refused:?}");
    }
    assert_eq!(values(&store, None).await.expect("reads still work"), ["a=1"]);
    platter.with(|content| content.writes_fail = false);
    let revision = eventually(async || put(&store, "a", "2").await.ok()).await;
    assert_eq!(revision, Revision(3));
    assert_eq!(put(&store, "a", "2").await.expect("it has recovered"), Revision(4));
    assert_eq!(values(&store, Some(Revision(2))).await.expect("readable"), ["a=1"]);
    store.close().await;
    let store = platter.open().expect("it opens");
    assert_eq!(values(&store, None).await.expect("readable"), ["a=2"]);
}

#[tokio::test]
async fn a_write_of_unknown_outcome_is_seen_once_or_never() {
    let platter = Platter::default();
    let store = platter.open().expect("it opens");
    let watch = WatchRequest { range: KeyRange::prefix(Bytes::new()), start: None };
    let mut watch = store.watch(watch).await.expect("it starts");
    put(&store, "a", "1").await.expect("written");
    platter.with(|content| content.syncs_fail = true);
    let unknown = put(&store, "b", "1").await;
    assert!(matches!(unknown, Err(Error::Unavailable(_))), "{unknown:?}");
    assert_eq!(values(&store, None).await.expect("reads still work"), ["a=1"], "not visible yet");
    platter.with(|content| content.syncs_fail = false);
    let last = eventually(async || put(&store, "c", "1").await.ok()).await;
    let seen = values(&store, None).await.expect("readable");
    let revisions = if seen.len() == 3 { vec![2, 3, 4] } else { vec![2, 3] };
    assert_eq!(last.0, revisions[revisions.len() - 1], "{seen:?}");
    for expected in revisions {
        let item = testkit::wait::soon("an item", watch.items.recv()).await;
        let Some(WatchItem::Events(revision, _)) = item else { panic!("{item:?}") };
        assert_eq!(revision.0, expected);
    }
    store.close().await;
    let store = platter.open().expect("it opens");
    assert_eq!(values(&store, None).await.expect("readable"), seen);
}

/// Several writers write, and the power fails at any point. Afterwards every acknowledged write exists,
/// and the other data is a prefix of the writes in flight.
#[tokio::test]
async fn power_loss_costs_no_acknowledged_write() {
    let first = number("STORE_SEED", 1);
    for seed in first..first + number("STORE_ROUNDS", 300) {
        let _world = base::sim::enter(seed);
        println!("STORE_SEED={seed} STORE_ROUNDS=1 repeats this one");
        let platter = Platter::default();
        let store = platter.open().expect("it opens");
        let mut acknowledged = Revision(1);
        for batch in 0..rng::below(20) {
            acknowledged = write_batch(&store, batch).await.max(acknowledged);
            if rng::below(4) == 0 && acknowledged > store.shared.state().floor {
                store.compact(acknowledged).await.expect("compacted");
            }
        }
        let before = values(&store, None).await.expect("readable");
        // In the middle of the next commits, or after them, or never.
        platter.with(|content| content.snapshot_in = Some(rng::below(150)));
        let mut late = tokio::task::JoinSet::new();
        for i in 0..3 {
            let store = store.clone();
            late.spawn(async move { put(&store, &format!("zz{i}"), "late").await });
        }
        late.join_all().await;
        let after = platter.after_power_loss().open().expect("it opens after power loss");
        let there = values(&after, None).await.expect("readable");
        let revision = after.revision().await.expect("open");
        assert!(revision >= acknowledged, "{revision} is before {acknowledged}");
        assert_eq!(there[..before.len()], before);
        assert!(there[before.len()..].iter().all(|late| late.ends_with("=late")));
        put(&after, "more", "1").await.expect("it accepts writes");
    }
}

/// Concurrent writes; returns the newest acknowledged revision.
async fn write_batch(store: &Arc<Embedded>, batch: u64) -> Revision {
    let value = "v".repeat(rng::below(9000) as usize);
    let mut set = tokio::task::JoinSet::new();
    for i in 0..=rng::below(5) {
        let (store, value) = (store.clone(), value.clone());
        set.spawn(async move { put(&store, &format!("{batch}-{i}"), &value).await });
    }
    let written = set.join_all().await.into_iter();
    written.map(|revision| revision.expect("written")).max().expect("at least one")
}

/// A number from the environment, e.g. for long nightly runs.
fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn records_on_disk(store: &Embedded) -> usize {
    let mut count = 0;
    store.shared.durable.load(Revision(0), &mut |_, _| count += 1).expect("readable");
    count
}

#[tokio::test]
async fn old_history_is_removed_automatically() {
    let platter = Platter::default();
    let options = Options {
        history_age: Duration::from_millis(10),
        history_revisions: 50,
        ..Options::default()
    };
    let store = platter.open_with(&options).expect("it opens");
    for i in 0..500 {
        put(&store, &format!("k{}", i % 3), &i.to_string()).await.expect("written");
    }
    // Up to the last samples: history is removed also without further writes.
    eventually(async || (records_on_disk(&store) < 100).then_some(())).await;
    let past = values(&store, Some(Revision(300))).await;
    assert!(matches!(past, Err(Error::Compacted { .. })), "{past:?}");
    let now = values(&store, None).await.expect("readable");
    store.close().await;
    // With the default history the floor does not move any more.
    let store = platter.open().expect("it opens");
    let floor = store.shared.state().floor;
    assert!(floor.0 > 400 && floor.0 <= 451, "{floor}");
    let at_floor = values(&store, Some(floor)).await.expect("readable");
    store.close().await;
    let store = platter.open().expect("it opens");
    assert_eq!(store.shared.state().floor, floor);
    assert_eq!(values(&store, None).await.expect("readable"), now);
    assert_eq!(values(&store, Some(floor)).await.expect("readable"), at_floor);
}

#[tokio::test]
async fn trimming_keeps_live_and_recent_records() {
    let platter = Platter::default();
    let store = platter.open().expect("it opens");
    put(&store, "old", "1").await.expect("written");
    for i in 0..20 {
        put(&store, "busy", &i.to_string()).await.expect("written");
    }
    let gone = Op::DeleteRange { range: KeyRange::one("busy") };
    store.txn(Txn { success: vec![gone], ..Txn::default() }).await.expect("deleted");
    let last = put(&store, "new", "1").await.expect("written");
    store.compact(last).await.expect("compacted");
    eventually(async || (records_on_disk(&store) == 2).then_some(())).await;
    assert_eq!(values(&store, None).await.expect("readable"), ["new=1", "old=1"]);
}

/// A value is held once, independent of its request's buffer, and old values are freed.
#[tokio::test]
async fn values_do_not_pin_their_request() {
    let platter = Platter::default();
    let store = platter.open().expect("it opens");
    let request = Bytes::from(vec![b'x'; 1 << 20]);
    let weak = request.slice(0..10);
    let success = vec![Op::Put { key: request.slice(10..20), value: weak, lease: 0 }];
    store.txn(Txn { success, ..Txn::default() }).await.expect("written");
    assert!(request.is_unique(), "nothing else holds the request's buffer");
}

/// Clients call while the disk repeatedly fails and recovers.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_calls_are_linearizable_with_a_failing_disk() {
    let seed = std::env::var("LINEAR_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let platter = Platter::default();
    let store = platter.open().expect("it opens");
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let trouble = async {
        // tidy: allow(random): the seed is the test's own
        let mut random = fastrand::Rng::with_seed(seed);
        loop {
            let writes = random.bool();
            platter.with(|content| {
                content.writes_fail = writes;
                content.syncs_fail = !writes;
            });
            // Writes until one fails.
            let noticed = async { while put(&store, "trouble", "x").await.is_ok() {} };
            tokio::select! {
                () = noticed => {}
                _ = &mut stopped => return,
            }
            platter.with(|content| {
                content.writes_fail = false;
                content.syncs_fail = false;
            });
            let works = async {
                eventually(async || put(&store, "trouble", "y").await.ok()).await;
                for _ in 0..random.usize(10..200) {
                    put(&store, "trouble", "z").await.expect("it works");
                }
            };
            tokio::select! {
                () = works => {}
                _ = &mut stopped => return,
            }
        }
    };
    let shared: Arc<dyn Store> = store.clone();
    let load = linear::Load { clients: 8, keys: 6, calls: 100 };
    let checked = async {
        let found = linear::check(&shared, load, seed).await;
        drop(stop);
        found
    };
    let ((calls, unknown), ()) = tokio::join!(checked, trouble);
    assert_eq!(calls, 800);
    println!("{unknown} of {calls} calls have an unknown fate");
}
