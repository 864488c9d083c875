//! Damaged files: every read is right, or refused with the way out.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use redb::{ReadableDatabase as _, ReadableTable as _};

use super::*;
use crate::LeaseId;

const LOG: redb::TableDefinition<(u64, u32), &[u8]> = redb::TableDefinition::new("log");
const META: redb::TableDefinition<&str, u64> = redb::TableDefinition::new("meta");
const STRETCH: usize = 64;
const SEEDS: u64 = 300;

/// Without events in memory, history is read from the disk.
fn options() -> Options {
    Options { sync: false, ring_bytes: 0, history_revisions: 100_000, ..Options::default() }
}

/// A store's answers, for the current and for some past revisions.
#[derive(Debug, PartialEq)]
struct Answers {
    now: Vec<String>,
    past: Vec<(Revision, Vec<String>)>,
    leases: Vec<(LeaseId, i64)>,
    revision: Revision,
}

async fn answers(store: &Embedded, revisions: &[Revision]) -> Result<Answers> {
    let mut past = vec![];
    for at in revisions {
        past.push((*at, values(store, Some(*at)).await?));
    }
    let leases = store.leases().await?.into_iter().map(|l| (l.id, l.ttl_seconds)).collect();
    let (now, revision) = (values(store, None).await?, store.revision().await?);
    Ok(Answers { now, past, leases, revision })
}

fn open(dir: &Path) -> Result<Arc<Embedded>> {
    Embedded::start(Durable::open(dir, false)?, &options())
}

/// Creates and closes a store with all kinds of data; returns its answers.
async fn fill(dir: &Path, size: usize) -> (Vec<Revision>, Answers) {
    let store = open(dir).expect("it opens");
    let value = |n: usize| format!("{n}-{}", "abcdefgh".repeat(n * 7 % 150 * size));
    let lease = store.lease_grant(1000).await.expect("granted");
    let mut revisions = vec![];
    for n in 0..200 {
        let key = format!("key-{}", n % 40);
        let op = match n % 13 {
            12 => Op::DeleteRange { range: KeyRange::one(key) },
            _ => Op::Put {
                key: key.into(),
                value: value(n).into(),
                lease: if n % 10 == 0 { lease } else { 0 },
            },
        };
        let other = Op::Put { key: "same".into(), value: value(n).into(), lease: 0 };
        let txn = Txn { success: vec![op, other], ..Txn::default() };
        let revision = store.txn(txn).await.expect("written").revision;
        if n == 60 {
            store.compact(revision).await.expect("compacted");
        }
        if n > 60 && n % 20 == 0 {
            revisions.push(revision);
        }
    }
    let expected = answers(&store, &revisions).await.expect("readable");
    store.close().await;
    (revisions, expected)
}

/// The stretches with data: most of the file is empty.
fn used(image: &[u8]) -> Vec<usize> {
    let stretches = image.chunks(STRETCH).enumerate();
    stretches.filter(|(_, s)| s.iter().any(|byte| *byte != 0)).map(|(n, _)| n).collect()
}

/// Flips one bit, or the whole stretch, of the stretches in use or of the header.
fn damage(image: &mut [u8], used: &[usize], random: &mut fastrand::Rng) -> String {
    let stretch = match random.u8(..8) {
        0 => random.usize(..5),
        _ => used[random.usize(..used.len())],
    };
    let bytes = &mut image[stretch * STRETCH..][..STRETCH];
    if random.bool() {
        let bit = random.usize(..STRETCH * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        return format!("bit {bit} of stretch {stretch}");
    }
    bytes.iter_mut().for_each(|byte| *byte ^= random.u8(1..));
    format!("stretch {stretch}")
}

fn check_refusal(why: &str, what: &str) {
    assert!(!why.contains('\n'), "{what}: {why}");
    let says = |text| why.contains(text);
    assert!(says("decapod snapshot restore") || says("cannot use"), "{what}: {why}");
}

/// True if it was refused.
async fn right_or_refused(
    dir: &Path,
    what: &str,
    revisions: &[Revision],
    expected: &Answers,
) -> bool {
    let refused = match open(dir) {
        Err(error) => error,
        Ok(store) => {
            let found = answers(&store, revisions).await;
            store.close().await;
            match found {
                Ok(found) => {
                    assert_eq!(&found, expected, "{what}");
                    return false;
                }
                Err(error) => error,
            }
        }
    };
    check_refusal(&refused.to_string(), what);
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_file_with_flipped_bits_is_right_or_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let (revisions, expected) = fill(dir.path(), 1).await;
    let [file, sums] = ["store.redb", "store.redb.sums"].map(|name| dir.path().join(name));
    let (image, known) =
        (std::fs::read(&file).expect("there"), std::fs::read(&sums).expect("there"));
    let used = used(&image);
    let mut refused = 0;
    for seed in 0..SEEDS {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut image = image.clone();
        let what = damage(&mut image, &used, &mut random);
        std::fs::write(&file, &image).expect("written");
        // With its file of checksums, or as a copy without it.
        let what = match seed % 2 {
            0 => std::fs::write(&sums, &known).map(|()| format!("seed {seed}, {what}")),
            _ => std::fs::remove_file(&sums)
                .or(Ok(()))
                .map(|()| format!("seed {seed}, {what}, without sums")),
        };
        let what = what.expect("written");
        if right_or_refused(dir.path(), &what, &revisions, &expected).await {
            refused += 1;
            // A refusal must not make the next opening succeed wrongly.
            right_or_refused(dir.path(), &format!("{what}, again"), &revisions, &expected).await;
        }
    }
    assert!(refused > SEEDS / 10, "{refused} of {SEEDS}");
    // The undamaged file.
    std::fs::write(&file, &image).expect("written");
    std::fs::write(&sums, &known).expect("written");
    assert!(!right_or_refused(dir.path(), "undamaged", &revisions, &expected).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn bits_that_flip_under_an_open_store_are_detected() {
    let dir = tempfile::tempdir().expect("a directory");
    // More than redb keeps in memory.
    let (revisions, expected) = fill(dir.path(), 20).await;
    let path = dir.path().join("store.redb");
    let image = std::fs::read(&path).expect("there");
    let used = used(&image);
    let mut refused = 0;
    for seed in 0..20 {
        std::fs::write(&path, &image).expect("written");
        let store = open(dir.path()).expect("it opens");
        let mut flipped = image.clone();
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..used.len() / 20 {
            damage(&mut flipped[4096..], &used[..used.len() - 64], &mut random);
        }
        let file = File::options().write(true).open(&path).expect("there");
        file.write_all_at(&flipped[4096..], 4096).expect("written");
        match answers(&store, &revisions).await {
            Ok(found) => assert_eq!(found, expected, "seed {seed}"),
            Err(error) => {
                refused += 1;
                check_refusal(&error.to_string(), &format!("seed {seed}"));
            }
        }
        assert_eq!(values(&store, None).await.expect("in memory"), expected.now);
        store.close().await;
    }
    assert!(refused > 0, "nothing was read from the disk");
}

/// Converts a store to the form of the version without checksums.
fn as_format_1(file: &Path) {
    let database = redb::Database::create(file).expect("a store");
    let write = database.begin_write().expect("a transaction");
    {
        let mut log = write.open_table(LOG).expect("a log");
        let rows: Vec<_> = log
            .iter()
            .expect("readable")
            .map(|row| {
                let (at, bytes) = row.expect("readable");
                (at.value(), bytes.value().to_vec())
            })
            .collect();
        for (at, mut record) in rows {
            record.truncate(record.len() - 4);
            record[0] = if record[0] == b'P' { 1 } else { 2 };
            log.insert(at, &record[..]).expect("written");
        }
        let mut meta = write.open_table(META).expect("a table");
        meta.insert("format", 1).expect("written");
        meta.remove("plain").expect("removed");
    }
    write.commit().expect("committed");
}

fn number(file: &Path, name: &str) -> Option<u64> {
    let database = redb::Database::create(file).expect("a store");
    let read = database.begin_read().expect("a transaction");
    let meta = read.open_table(META).expect("a table");
    meta.get(name).expect("readable").map(|n| n.value())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_of_format_1_opens_and_becomes_one_of_format_2() {
    let dir = tempfile::tempdir().expect("a directory");
    let (revisions, expected) = fill(dir.path(), 1).await;
    let file = dir.path().join("store.redb");
    as_format_1(&file);
    let store = open(dir.path()).expect("an old store opens");
    assert_eq!(answers(&store, &revisions).await.expect("readable"), expected);
    store.close().await;
    // Reading alone does not change it.
    assert_eq!(number(&file, "format"), Some(1));
    let store = open(dir.path()).expect("it opens");
    let last = put(&store, "new", "1").await.expect("written");
    store.close().await;
    assert_eq!((number(&file, "format"), number(&file, "plain")), (Some(2), Some(last.0)));
    let store = open(dir.path()).expect("it opens");
    assert_eq!(answers(&store, &revisions).await.expect("readable").past, expected.past);
    // The copy of a rewrite has checksums throughout.
    let mut copy = store.shared.durable.begin_copy().expect("begun");
    while store.shared.durable.go_on_copying(&mut copy).expect("copied") {}
    store.shared.durable.install(copy).expect("installed");
    let now = answers(&store, &revisions).await.expect("readable");
    store.close().await;
    assert_eq!((number(&file, "format"), number(&file, "plain")), (Some(2), Some(0)));
    let store = open(dir.path()).expect("it opens");
    assert_eq!(answers(&store, &revisions).await.expect("readable"), now);
    store.close().await;
}
