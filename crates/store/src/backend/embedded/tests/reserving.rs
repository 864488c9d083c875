//! The reserve, seen from the store's callers: a disk that has space only when a part of it is freed.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::reserve::Room;
use super::*;

const MIB: u64 = 1 << 20;

/// A store with a reserve of 4 MiB in `dir`, on a disk with the free bytes that the test says.
async fn open(platter: &Platter, dir: &Path) -> (Arc<Embedded>, Arc<AtomicU64>) {
    let free = Arc::new(AtomicU64::new(100 * MIB));
    let said = free.clone();
    let room: Room = Box::new(move |_| Ok((128 * MIB, said.load(Ordering::Relaxed))));
    let durable = Durable::open_on("platter".into(), platter.opener(), None).expect("it opens");
    let options = Options::default();
    let store = Embedded::start_with(durable, &options, Some(dir), room).expect("it starts");
    let held = || store.shared.space.held.load(Ordering::Relaxed);
    eventually(async || (held() == 4 * MIB).then_some(())).await;
    (store, free)
}

async fn delete(store: &Embedded, key: &'static str) -> Result<Revision> {
    let success = vec![Op::DeleteRange { range: KeyRange::one(key) }];
    Ok(store.txn(Txn { success, ..Txn::default() }).await?.revision)
}

fn is_no_space(result: &Result<impl Sized>) -> bool {
    matches!(result, Err(Error::NoSpace(_)))
}

#[tokio::test]
async fn a_full_disk_takes_deletes_and_small_updates_until_there_is_room() {
    let dir = tempfile::tempdir().expect("a directory");
    let reserve = dir.path().join("reserve");
    let platter = Platter::default();
    let (store, free) = open(&platter, dir.path()).await;
    for key in ["a", "b", "c", "d"] {
        put(&store, key, &"x".repeat(2000)).await.expect("written");
    }
    assert!(store.status().await.expect("open").alarms.is_empty());
    free.store(0, Ordering::Relaxed);
    platter.with(|content| content.fails_beside = Some((reserve.clone(), 3 * MIB)));
    // The first failure already succeeds with space of the reserve.
    delete(&store, "a").await.expect("deleted");
    assert_eq!(store.status().await.expect("open").alarms, ["NOSPACE"]);
    let space = store.space().await.expect("open");
    assert_eq!((space.is_low, space.reserve_bytes), (true, Some(3 * MIB)));
    let refused = put(&store, "new", "1").await;
    assert!(is_no_space(&refused), "{refused:?}");
    assert!(is_no_space(&store.lease_grant(10).await), "a lease is for a new object");
    put(&store, "b", &"y".repeat(3000)).await.expect("a deletion timestamp fits");
    let refused = put(&store, "b", &"y".repeat(5000)).await;
    assert!(is_no_space(&refused), "{refused:?}");
    // Another program takes what was freed, twice.
    platter.with(|content| content.fails_beside = Some((reserve.clone(), MIB)));
    delete(&store, "c").await.expect("deleted");
    let refused = put(&store, "b", &"z".repeat(3001)).await;
    assert!(is_no_space(&refused), "with less than half of the reserve nothing grows: {refused:?}");
    put(&store, "b", &"z".repeat(3000)).await.expect("the same size");
    put(&store, "b", "small").await.expect("smaller");
    // History is forgotten: otherwise deletes would free nothing.
    eventually(async || (store.shared.state().floor.0 > 5).then_some(())).await;
    platter.with(|content| content.fails_beside = None);
    free.store(100 * MIB, Ordering::Relaxed);
    eventually(async || put(&store, "new", "1").await.ok()).await;
    let space = store.space().await.expect("open");
    assert_eq!((space.is_low, space.reserve_bytes), (false, Some(4 * MIB)));
    let now = values(&store, None).await.expect("readable");
    assert_eq!(now.len(), 3, "{now:?}");
    store.close().await;
    let (store, _) = open(&platter, dir.path()).await;
    assert_eq!(values(&store, None).await.expect("readable"), now);
}

#[tokio::test]
async fn without_anything_left_of_the_reserve_a_full_disk_refuses() {
    let dir = tempfile::tempdir().expect("a directory");
    let platter = Platter::default();
    let (store, free) = open(&platter, dir.path()).await;
    put(&store, "a", "1").await.expect("written");
    free.store(0, Ordering::Relaxed);
    platter.with(|content| content.writes_fail = true);
    let refused = delete(&store, "a").await;
    assert!(is_no_space(&refused), "{refused:?}");
    assert_eq!(values(&store, None).await.expect("reads still work"), ["a=1"]);
    platter.with(|content| content.writes_fail = false);
    eventually(async || delete(&store, "a").await.ok()).await;
    free.store(100 * MIB, Ordering::Relaxed);
    eventually(async || put(&store, "a", "2").await.ok()).await;
}
