//! Reads the whole log with several threads, because that dominates the time of opening.
//!
//! ```text
//! thread 0: revisions ..499   ─► batches ─┐
//! thread 1: revisions 500..   ─► batches ─┴─► the caller: records one by one
//! ```
//!
//! Most of the work is to find and read the pages, extract the records and pack their values; each
//! thread does this for a part of the log. Only the caller keeps data of the records. So the remaining
//! memory comes from one thread's arena (a second one grows page by page, with a system call each), and
//! a batch is only a temporary copy.
//!
//! If no thread can be created (a low limit of processes), the caller reads that part itself, after the
//! others.
//!
//! Invariants: each record is passed on once, those of a part in order; the memory in use is bounded; all
//! threads have ended when this returns, also with an error.

use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::Builder;

use redb::{Database, ReadableDatabase, ReadableTable, ReadableTableMetadata};

use super::{LOG, damaged, read_log};
use crate::backend::embedded::record::{Address, PlainBelow, View};
use crate::value::keep;

type Result<T> = std::result::Result<T, redb::Error>;
/// The first argument is the number of the part.
type EachOfPart<'a> = dyn FnMut(usize, Address, View<'_>) -> Result<()> + 'a;

/// The maximum number of threads, the records per thread, and the size and number of queued batches.
const PARTS: u64 = 4;
const PART_RECORDS: u64 = 5000;
const BATCH_BYTES: usize = 256 << 10;
const BATCHES: usize = 8;

/// Some records of a part, with their bytes concatenated.
#[derive(Default)]
struct Batch {
    part: usize,
    /// The address and length of each record, and whether its value is packed.
    records: Vec<(Address, usize, bool)>,
    bytes: Vec<u8>,
}

/// Passes every record to `each`, with the number of its part. Returns the bytes of all.
pub(super) fn all(
    database: &Database,
    plain: PlainBelow,
    each: &mut EachOfPart<'_>,
) -> Result<u64> {
    let parts = parts(database)?;
    if parts.len() == 1 {
        return read_log(database, 0..=u64::MAX, &mut |at, bytes| {
            let (bytes, is_packed) = kept(plain, at, bytes)?;
            each(0, at, view(at, &bytes, is_packed)?)
        });
    }
    let thread = || Builder::new().name("store reading".into());
    read_parts(database, plain, parts, thread, each)
}

/// For a record whose checksum was verified.
fn view(at: Address, record: &[u8], is_packed: bool) -> Result<View<'_>> {
    Ok(View { is_packed, ..View::read(record).ok_or_else(|| damaged(at))? })
}

fn read_parts(
    database: &Database,
    plain: PlainBelow,
    parts: Vec<RangeInclusive<u64>>,
    thread: impl Fn() -> Builder,
    each: &mut EachOfPart<'_>,
) -> Result<u64> {
    std::thread::scope(|scope| {
        let (sender, batches) = sync_channel(BATCHES);
        let (mut threads, mut left) = (vec![], vec![]);
        for (part, revisions) in parts.into_iter().enumerate() {
            let (sender, range) = (sender.clone(), revisions.clone());
            let read = move || read_part(database, plain, part, range, &sender);
            match thread().spawn_scoped(scope, read) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    tracing::debug!(%error, part, "failed to start a thread for a part of the log");
                    left.push((part, revisions));
                }
            }
        }
        drop(sender);
        // After an error the receiver is dropped, and the threads end.
        for batch in batches {
            let mut rest = &batch.bytes[..];
            for (at, length, is_packed) in batch.records {
                let record;
                (record, rest) = rest.split_at(length);
                each(batch.part, at, view(at, record, is_packed)?)?;
            }
        }
        let mut used = 0;
        for thread in threads {
            used += match thread.join() {
                Ok(part) => part?,
                Err(panic) => std::panic::resume_unwind(panic),
            };
        }
        for (part, revisions) in left {
            used += read_log(database, revisions, &mut |at, bytes| {
                let (bytes, is_packed) = kept(plain, at, bytes)?;
                each(part, at, view(at, &bytes, is_packed)?)
            })?;
        }
        Ok(used)
    })
}

fn read_part(
    database: &Database,
    plain: PlainBelow,
    part: usize,
    revisions: RangeInclusive<u64>,
    batches: &SyncSender<Batch>,
) -> Result<u64> {
    let empty = || Batch { part, bytes: Vec::with_capacity(BATCH_BYTES), ..Batch::default() };
    let nobody = |_| redb::Error::DatabaseClosed;
    let mut batch = empty();
    let used = read_log(database, revisions, &mut |at, bytes| {
        let (bytes, is_packed) = kept(plain, at, bytes)?;
        if !batch.records.is_empty() && batch.bytes.len() + bytes.len() > BATCH_BYTES {
            batches.send(std::mem::replace(&mut batch, empty())).map_err(nobody)?;
        }
        batch.records.push((at, bytes.len(), is_packed));
        batch.bytes.extend_from_slice(&bytes);
        Ok(())
    })?;
    batches.send(batch).map_err(nobody)?;
    Ok(used)
}

/// The record without its checksum, with its value in in-memory form, and whether that is packed.
fn kept(plain: PlainBelow, at: Address, record: &[u8]) -> Result<(Cow<'_, [u8]>, bool)> {
    let record = plain.checked(at, record).ok_or_else(|| damaged(at))?;
    let value = view(at, record, false)?.value;
    let before = &record[..record.len() - value.len()];
    let kept = |value: &[u8], is_packed| match is_packed {
        true => (Cow::Owned([before, value].concat()), true),
        false => (Cow::Borrowed(record), false),
    };
    Ok(keep(value, kept))
}

/// Divides the log into parts of roughly equally many revisions; a short log is one part.
fn parts(database: &Database) -> Result<Vec<RangeInclusive<u64>>> {
    let log = database.begin_read()?.open_table(LOG)?;
    let (Some((first, _)), Some((last, _))) = (log.first()?, log.last()?) else {
        return Ok(vec![0..=u64::MAX]);
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let count = threads.min(PARTS).min(1 + log.len()? / PART_RECORDS);
    Ok(divide(first.value().0, last.value().0, count))
}

/// Divides all possible revisions into parts; the existing ones are distributed evenly.
fn divide(first: u64, last: u64, count: u64) -> Vec<RangeInclusive<u64>> {
    let step = (last - first) / count + 1;
    let begin = |part: u64| if part == 0 { 0 } else { first + part * step };
    let end = |part: u64| if part + 1 == count { u64::MAX } else { begin(part + 1) - 1 };
    (0..count).map(|part| begin(part)..=end(part)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::embedded::record::Record;

    #[test]
    fn parts_cover_all_revisions_once() {
        let check = |first, last, count, expected: &[(u64, u64)]| {
            let parts: Vec<_> = divide(first, last, count)
                .iter()
                .map(|part| (*part.start(), *part.end()))
                .collect();
            assert_eq!(parts, expected, "{first} to {last} in {count}");
        };
        check(2, 2, 1, &[(0, u64::MAX)]);
        check(2, 1001, 2, &[(0, 501), (502, u64::MAX)]);
        check(101, 400, 3, &[(0, 200), (201, 300), (301, u64::MAX)]);
        // One revision contains everything.
        check(7, 7, 3, &[(0, 7), (8, 8), (9, u64::MAX)]);
    }

    #[test]
    fn a_machine_without_threads_reads_the_same() {
        let disk = redb::backends::InMemoryBackend::new();
        let database = Database::builder().create_with_backend(disk).expect("a database");
        let write = database.begin_write().expect("a transaction");
        let mut log = write.open_table(LOG).expect("a table");
        let mut bytes = vec![];
        // Long values are packed.
        let value = |revision: u64| vec![b'x'; revision as usize * 10];
        let mut written = 0;
        for revision in 0..100 {
            let record = Record {
                kind: crate::EventKind::Put,
                at: 0,
                create: revision,
                version: 1,
                lease: 0,
                previous: None,
                key: revision.to_be_bytes().to_vec().into(),
                value: value(revision).into(),
            };
            record.encode(Address { revision, index: 0 }, &mut bytes);
            written += bytes.len() as u64;
            log.insert((revision, 0), &bytes[..]).expect("written");
        }
        drop(log);
        write.commit().expect("committed");
        // A stack size that no machine has the memory for.
        let never = || Builder::new().stack_size(1 << 60);
        let made = std::cell::Cell::new(0);
        let once = || match made.replace(made.get() + 1) {
            0 => Builder::new(),
            _ => never(),
        };
        let threads: [&dyn Fn() -> Builder; 3] = [&Builder::new, &never, &once];
        for thread in threads {
            let mut seen = vec![vec![]; 3];
            let parts = divide(0, 99, 3);
            let plain = PlainBelow::default();
            let used = read_parts(&database, plain, parts, thread, &mut |part, at, view| {
                assert_eq!(view.key, at.revision.to_be_bytes());
                assert_eq!(view.is_packed, at.revision >= 26);
                let kv = view.key_value(at);
                assert_eq!(kv.value, value(at.revision));
                assert_eq!(kv.value.len(), view.value_len());
                seen[part].push(at.revision);
                Ok(())
            });
            assert_eq!(used.expect("readable"), written);
            assert_eq!(seen.concat(), (0..100).collect::<Vec<_>>());
        }
        assert_eq!(made.get(), 3);
    }
}
