//! A log that is read by several threads gives the same state.

use std::collections::BTreeMap;
use std::path::Path;

use redb::ReadableTable as _;

use super::*;
use crate::backend::embedded::record::{Address, PlainBelow};
use crate::backend::embedded::verify;

const LOG: redb::TableDefinition<(u64, u32), &[u8]> = redb::TableDefinition::new("log");
const WRITES: u64 = 12_000;

fn options() -> Options {
    Options { sync: false, ..Options::default() }
}

/// Puts and deletes of near and distant keys, in transactions of a hundred; returns the expected content,
/// and the revision in the middle.
async fn fill(dir: &Path) -> (BTreeMap<String, String>, Revision) {
    let store = Embedded::open(dir, options()).expect("it opens");
    let mut expected = BTreeMap::new();
    let mut half = Revision(0);
    for batch in 0..WRITES / 100 {
        let mut success = vec![];
        for i in batch * 100..batch * 100 + 100 {
            let key = if i % 3 == 0 { format!("many/{i}") } else { format!("few/{}", i % 97) };
            if i % 11 == 0 {
                expected.remove(&key);
                success.push(Op::DeleteRange { range: KeyRange::one(key) });
            } else {
                expected.insert(key.clone(), i.to_string());
                success.push(Op::Put { key: key.into(), value: i.to_string().into(), lease: 0 });
            }
        }
        let written = store.txn(Txn { success, ..Txn::default() }).await.expect("written");
        half = if batch == WRITES / 200 { written.revision } else { half };
    }
    store.close().await;
    (expected, half)
}

async fn all(store: &Arc<dyn Store>, at: Option<Revision>) -> BTreeMap<String, String> {
    let range = RangeRequest { revision: at, ..RangeRequest::new(KeyRange::prefix(Bytes::new())) };
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).expect("text");
    let answer = store.range(range).await.expect("readable");
    answer.kvs.iter().map(|kv| (text(&kv.key), text(&kv.value.bytes()))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_log_is_read_completely_and_in_order() {
    let dir = tempfile::tempdir().expect("a directory");
    let (expected, half) = fill(dir.path()).await;
    let store = Embedded::open(dir.path(), options()).expect("it opens");
    assert_eq!(all(&store, None).await, expected);
    let then = all(&store, Some(half)).await;
    assert!(then.len() > 100 && then != expected, "{} keys", then.len());
    // Trimmed records are not missed.
    store.compact(half).await.expect("compacted");
    let key = |n: u64| Op::Put { key: format!("few/{n}").into(), value: "new".into(), lease: 0 };
    for n in 0..100 {
        let success = vec![key(n % 97)];
        store.txn(Txn { success, ..Txn::default() }).await.expect("written");
    }
    let now = all(&store, None).await;
    store.close().await;
    let store = Embedded::open(dir.path(), options()).expect("it opens");
    assert_eq!(all(&store, None).await, now);
    assert_eq!(all(&store, Some(half)).await, then);
    store.close().await;
}

/// Removes the second change of a revision, of a key that is written repeatedly.
fn damage(file: &Path, revision: Revision) {
    let database = redb::Database::create(file).expect("a store");
    let write = database.begin_write().expect("a transaction");
    let gone =
        write.open_table(LOG).expect("a log").remove((revision.0, 1)).expect("readable").is_some();
    assert!(gone, "there was one");
    write.commit().expect("committed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_record_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let (_, half) = fill(dir.path()).await;
    damage(&dir.path().join("store.redb"), half);
    let why = refusal(Embedded::open(dir.path(), options()));
    assert!(why.contains("which is missing; restore a snapshot"), "{why}");
    assert_eq!(why, refusal(verify(dir.path())), "verifying says the same");
}

/// Makes the newest put of a revision one without a previous change.
fn forget(file: &Path, revision: Revision) {
    let database = redb::Database::create(file).expect("a store");
    let write = database.begin_write().expect("a transaction");
    {
        let mut log = write.open_table(LOG).expect("a log");
        let record = log.get((revision.0, 0)).expect("readable").expect("there").value().to_vec();
        // Clears the previous address, see `record.rs`. As format 1, the record gets a new checksum.
        let mut plain = record[..record.len() - 4].to_vec();
        plain[0] = 1;
        plain[33..45].fill(0);
        let mut orphan = vec![];
        let at = Address { revision: revision.0, index: 0 };
        PlainBelow(u64::MAX).summed(at, &plain, &mut orphan).expect("a record");
        assert_ne!(orphan, record, "there was one before it");
        log.insert((revision.0, 0), &orphan[..]).expect("written");
    }
    write.commit().expect("committed");
}

#[tokio::test]
async fn keys_with_two_newest_changes_are_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Embedded::open(dir.path(), options()).expect("it opens");
    let mut last = Revision(0);
    for value in ["1", "2"] {
        let put = Op::Put { key: "a".into(), value: value.into(), lease: 0 };
        let txn = Txn { success: vec![put], ..Txn::default() };
        last = store.txn(txn).await.expect("written").revision;
    }
    store.close().await;
    assert_eq!(verify(dir.path()).expect("all is in order").keys, 1);
    forget(&dir.path().join("store.redb"), last);
    let why = refusal(Embedded::open(dir.path(), options()));
    assert!(why.starts_with("1 keys have two newest changes; restore a snapshot"), "{why}");
    assert_eq!(why, refusal(verify(dir.path())), "verifying says the same");
}
