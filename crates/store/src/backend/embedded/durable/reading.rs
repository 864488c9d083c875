//! The whole log, read by several threads: what opening takes its time for.
//!
//! ```text
//! thread 0: revisions ..499   ─► batches ─┐
//! thread 1: revisions 500..   ─► batches ─┴─► the caller: one record after the other
//! ```
//!
//! Finding the pages, reading them and taking the records out of them is most of the work, and each
//! thread does it for a part of the log. The caller alone keeps what it wants of the records: so the
//! memory that stays comes from one thread's arena (a second one's grows page by page, by a system
//! call each), and a batch is no more than a copy on its way.
//!
//! Invariants: each record is handed over once, those of a part in order; what is in memory at a
//! time is bounded; all threads have ended when this returns, whatever it returns.

use std::ops::RangeInclusive;
use std::sync::mpsc::{SyncSender, sync_channel};

use redb::{Database, ReadableDatabase, ReadableTable, ReadableTableMetadata};

use super::{LOG, read_log};
use crate::backend::embedded::record::Address;

type Result<T> = std::result::Result<T, redb::Error>;
/// Told the number of the part first.
type EachOfPart<'a> = dyn FnMut(usize, Address, &[u8]) -> Result<()> + 'a;

/// Threads at most; records that are worth another one; bytes and number of batches on their way.
const PARTS: u64 = 4;
const PART_RECORDS: u64 = 5000;
const BATCH_BYTES: usize = 256 << 10;
const BATCHES: usize = 8;

/// Some records of a part, their bytes one behind the other.
#[derive(Default)]
struct Batch {
    part: usize,
    records: Vec<(Address, usize)>,
    bytes: Vec<u8>,
}

/// Hands every record to `each`, with the part of the log that it is of. Returns their bytes.
pub(super) fn all(database: &Database, each: &mut EachOfPart<'_>) -> Result<u64> {
    let parts = parts(database)?;
    if parts.len() == 1 {
        return read_log(database, 0..=u64::MAX, &mut |at, bytes| each(0, at, bytes));
    }
    std::thread::scope(|scope| {
        let (sender, batches) = sync_channel(BATCHES);
        let read = |(part, revisions)| {
            let sender = sender.clone();
            scope.spawn(move || read_part(database, part, revisions, &sender))
        };
        let threads: Vec<_> = parts.into_iter().enumerate().map(read).collect();
        drop(sender);
        // After an error nobody receives any more, and the threads end.
        for batch in batches {
            let mut rest = &batch.bytes[..];
            for (at, length) in batch.records {
                let record;
                (record, rest) = rest.split_at(length);
                each(batch.part, at, record)?;
            }
        }
        let mut used = 0;
        for thread in threads {
            used += match thread.join() {
                Ok(part) => part?,
                Err(panic) => std::panic::resume_unwind(panic),
            };
        }
        Ok(used)
    })
}

fn read_part(
    database: &Database,
    part: usize,
    revisions: RangeInclusive<u64>,
    batches: &SyncSender<Batch>,
) -> Result<u64> {
    let empty = || Batch { part, bytes: Vec::with_capacity(BATCH_BYTES), ..Batch::default() };
    let nobody = |_| redb::Error::DatabaseClosed;
    let mut batch = empty();
    let used = read_log(database, revisions, &mut |at, bytes| {
        if !batch.records.is_empty() && batch.bytes.len() + bytes.len() > BATCH_BYTES {
            batches.send(std::mem::replace(&mut batch, empty())).map_err(nobody)?;
        }
        batch.records.push((at, bytes.len()));
        batch.bytes.extend_from_slice(bytes);
        Ok(())
    })?;
    batches.send(batch).map_err(nobody)?;
    Ok(used)
}

/// The log in parts of about as many revisions each, one of all where it is short.
fn parts(database: &Database) -> Result<Vec<RangeInclusive<u64>>> {
    let log = database.begin_read()?.open_table(LOG)?;
    let (Some((first, _)), Some((last, _))) = (log.first()?, log.last()?) else {
        return Ok(vec![0..=u64::MAX]);
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    let count = threads.min(PARTS).min(1 + log.len()? / PART_RECORDS);
    Ok(divide(first.value().0, last.value().0, count))
}

/// All revisions there can be, in so many parts; those that there are, evenly.
fn divide(first: u64, last: u64, count: u64) -> Vec<RangeInclusive<u64>> {
    let step = (last - first) / count + 1;
    let begin = |part: u64| if part == 0 { 0 } else { first + part * step };
    let end = |part: u64| if part + 1 == count { u64::MAX } else { begin(part + 1) - 1 };
    (0..count).map(|part| begin(part)..=end(part)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_all_revisions_once() {
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
        // One revision with all of it.
        check(7, 7, 3, &[(0, 7), (8, 8), (9, u64::MAX)]);
    }
}
