//! Creates a new store from a snapshot.
//!
//! In: a snapshot's content, and the revision to continue from. Out: a directory for the next server
//! to open. The keys keep their revisions; history begins at the given one, which is above every
//! revision that clients may have seen, so that a client with an older revision gets `Compacted` and
//! lists again.
//!
//! Invariant: the directory exists completely, or not at all.

use std::path::Path;

use bytes::Bytes;

use super::durable::{Batch, Durable, Trim};
use super::record::{Address, Record};
use crate::snapshot::Content;
use crate::{Error, EventKind, KeyValue, Result, Revision};

/// The key with the origin of a restored store.
pub const MARK: &str = "/decapod/restored";
/// Bytes of values per commit.
const BATCH: usize = 4 << 20;

/// `mark` is written under [`MARK`], at `revision`.
pub fn restore(dir: &Path, content: &Content, revision: Revision, mark: &str) -> Result<()> {
    if dir.join("store.redb").exists() {
        return Err(Error::unusable(format!(
            "there is a store in {} already; restore into a new data directory",
            dir.display()
        )));
    }
    let newest = content.kvs.iter().map(|kv| kv.mod_revision).max().unwrap_or_default();
    if revision <= newest.max(content.revision) {
        return Err(Error::unusable(format!(
            "the revision to go on from ({revision}) is not above the snapshot's ({})",
            newest.max(content.revision)
        )));
    }
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let making = dir.with_file_name(format!("{name}.restoring"));
    // Left by a restore that was interrupted.
    match std::fs::remove_dir_all(&making) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::unusable(format!("cannot clear {}: {error}", making.display())));
        }
        _ => {}
    }
    let durable = Durable::open(&making, true)?;
    fill(&durable, content, revision, mark)?;
    durable.close();
    // An empty directory may exist there.
    std::fs::rename(&making, dir)
        .and_then(|()| match dir.parent() {
            Some(parent) => std::fs::File::open(parent)?.sync_all(),
            None => Ok(()),
        })
        .map_err(|error| Error::unusable(format!("cannot make {}: {error}", dir.display())))
}

fn fill(durable: &Durable, content: &Content, revision: Revision, mark: &str) -> Result<()> {
    let at = u64::try_from(base::clock::now().as_millisecond()).unwrap_or_default();
    let mut kvs: Vec<&KeyValue> = content.kvs.iter().filter(|kv| kv.key != MARK).collect();
    kvs.sort_unstable_by(|a, b| (a.mod_revision, &a.key).cmp(&(b.mod_revision, &b.key)));
    let commit = |records: &[(Address, Record)], trim| {
        durable.commit(&Batch { records, granted: &[], revoked: &[], trim })
    };
    let granted = &content.leases;
    durable.commit(&Batch { records: &[], granted, revoked: &[], trim: None })?;
    let known = |lease: i64| granted.iter().any(|(id, _)| *id == lease);
    let mut records = vec![];
    let mut bytes = 0;
    let mut last = Address::default();
    for kv in kvs {
        let index = if kv.mod_revision.0 == last.revision { last.index + 1 } else { 0 };
        last = Address { revision: kv.mod_revision.0, index };
        let lease = if known(kv.lease) { kv.lease } else { 0 };
        let record = record(kv, at, lease);
        bytes += record.size();
        records.push((last, record));
        if bytes > BATCH {
            commit(&records, None)?;
            records.clear();
            bytes = 0;
        }
    }
    let mark = KeyValue {
        key: Bytes::from_static(MARK.as_bytes()),
        value: Bytes::copy_from_slice(mark.as_bytes()).into(),
        create_revision: revision,
        mod_revision: revision,
        version: 1,
        lease: 0,
    };
    records.push((Address { revision: revision.0, index: 0 }, record(&mark, at, 0)));
    commit(&records, Some(Trim { from: revision, floor: revision, limit: 0 })).map(|_| ())
}

fn record(kv: &KeyValue, at: u64, lease: i64) -> Record {
    Record {
        kind: EventKind::Put,
        at,
        create: kv.create_revision.0,
        version: kv.version,
        lease,
        previous: None,
        key: kv.key.clone(),
        value: kv.value.bytes(),
    }
}
