//! The data on disk, and the few functions that access it. Only this file knows `redb`.
//!
//! ```text
//! DIR/lock        empty; locked by the one process that has the store open
//! DIR/store.redb  one redb file with three tables
//! DIR/reserve     space for deletes on a full disk (`reserve.rs`)
//! DIR/store.redb.new  sometimes: the future store.redb (see `durable/rewrite.rs`)
//!
//! meta    name → u64          format    version of this layout, 2
//!                             plain     records below this revision may be of format 1
//!                             floor     history below is compacted
//!                             trimmed   the log below has been cleared of compacted records
//!
//! leases  id: i64 → ttl: i64  seconds; the time of a lease restarts when the store is opened
//!
//! log     (revision: u64, index: u32) → record, every change once, in the order they happened
//!
//! record  0      1    9        17        25      33         41       45         49
//!         ├──────┼────┼────────┼─────────┼───────┼──────────┼────────┼──────────┼─────┬───────┬───────┤
//!         │ kind │ at │ create │ version │ lease │ previous │ previo.│ key      │ key │ value │ CRC32 │
//!         │ P, D │ ms │ revis. │         │       │ revision │ index  │ length   │     │       │       │
//!         └──────┴────┴────────┴─────────┴───────┴──────────┴────────┴──────────┴─────┴───────┴───────┘
//!         little endian; kind P put, D delete; previous 0 = the change created the key; the
//!         checksum covers (revision: u64, index: u32) and everything before it
//! format 1: kind 1 put, 2 delete, and no checksum
//! ```
//!
//! There is no table of live values: the live value of a key is its newest record, and the map in
//! memory has its address. So each value is written once, always at the right edge of one tree: a
//! commit copies few pages. The price is that opening reads the whole log, which is needed anyway
//! to fill the map.
//!
//! Worked example. Two keys, written, changed, deleted:
//!
//! ```text
//!  (2,0) put a "1"   prev –         live at 6: nothing under a, b = "2"
//!  (3,0) put b "1"   prev –
//!  (4,0) put a "2"   prev (2,0)     compact(5): checks the records 2..5 once. (4,0)
//!  (5,0) del a       prev (4,0)     replaced (2,0), which is removed. (5,0) replaced (4,0), but a
//!  (6,0) put b "2"   prev (3,0)     watch from 5 still needs it; likewise 6 needs (3,0).
//! ```
//!
//! Invariants: a record is removed only when the record that replaced it is below the floor (a delete
//! replaces itself), so from the floor on every event has its previous value; the newest revision
//! always has a record, so it needs no field of its own.
//!
//! Damage: every page that is read is compared with its checksum (`sums.rs`); without known checksums,
//! redb checks all its pages at opening. Each record has its own checksum, from the commit to the
//! reader. A mismatch is refused with the way out ([`RESTORE`]); nothing is repaired by guessing. A store
//! of format 1 is readable, becomes one of format 2 with the first commit, and has no more records without
//! a checksum after a rewrite of the file.
//!
//! Durability: each commit is one redb transaction, `Durability::Immediate`, one sync (redb's
//! one-phase commit: after a crash a checksum shows whether the newest commit is complete).
//! Not quick repair, which syncs twice and writes the allocator state each time: measured, a put
//! took at least three times as long. It saves only the walk over the file after a crash, which adds
//! about a third to the time of opening (docs/performance.md). Not two-phase commit either: it protects
//! against values crafted to collide with a checksum, but that checksum also covers page content
//! that only the store knows.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

use bytes::Bytes;
use redb::{Database, Durability, ReadableDatabase, ReadableTable, Table, TableDefinition};

use super::disk::{self, OpenDisk};
use super::record::{Address, PlainBelow, Record, View};
use super::sums::Sums;
use crate::{Error, Event, KeyRange, LeaseId, Result, Revision};

pub(super) use rewrite::Copy;
use rewrite::Home;

mod reading;
mod rewrite;

const FORMAT: u64 = 2;
/// Records without checksums.
const FORMAT_1: u64 = 1;

/// The advice in errors about a damaged store.
const RESTORE: &str = "restore a snapshot into a new data directory (decapod snapshot list; decapod \
                       snapshot restore FILE -d NEWDIR), copy pki and token into it and start with it";

const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const LEASES: TableDefinition<i64, i64> = TableDefinition::new("leases");
const LOG: TableDefinition<(u64, u32), &[u8]> = TableDefinition::new("log");

/// A small cache suffices, because live values are in memory and history is read in order.
const CACHE_BYTES: usize = 2 << 20;
/// A read of history stops at the end of the revision that passes this size.
const CHUNK_BYTES: usize = 1 << 20;

pub(super) struct Durable {
    path: PathBuf,
    open_disk: OpenDisk,
    /// `None` after an error, until [`Durable::reopen`], and after close. Readers hold it for one
    /// short transaction; only reopening and closing need it exclusively.
    database: RwLock<Option<Opened>>,
    /// Bytes of all records.
    used: AtomicU64,
    /// Records below this revision may be of format 1.
    plain_below: AtomicU64,
    /// The next commit writes `plain` and the newer format.
    upgrades: AtomicBool,
    /// Held as long as the store is open, also while the database is reopened.
    lock: Mutex<Option<File>>,
    /// The directory for a second file; `None` on a disk without a directory.
    home: Option<Home>,
}

/// One commit.
pub(super) struct Batch<'a> {
    pub records: &'a [(Address, Record)],
    pub granted: &'a [(LeaseId, i64)],
    pub revoked: &'a [LeaseId],
    pub trim: Option<Trim>,
}

/// Removes records from the log between `from` and `floor` that are no longer needed; checks about
/// `limit` records.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trim {
    pub from: Revision,
    pub floor: Revision,
    pub limit: usize,
}

pub(super) struct Meta {
    pub floor: Revision,
    pub trimmed: Revision,
    pub leases: Vec<(LeaseId, i64)>,
}

/// A part of history.
pub(super) struct Chunk {
    /// Only revisions with changes in the requested range.
    pub events: Vec<(Revision, Vec<Event>)>,
    /// The revision to continue at.
    pub next: Revision,
}

impl Durable {
    /// Opens or creates the store in `dir`, exclusively.
    pub fn open(dir: &Path, sync: bool) -> Result<Self> {
        make_private_dir(dir, sync)
            .map_err(|e| Error::unusable(format!("cannot create {}: {e}", dir.display())))?;
        let path = dir.join("store.redb");
        let open_disk = disk::file(path.clone(), sync);
        let lock = lock(dir)?;
        let home = Home::new(dir, sync).map_err(Error::unavailable)?;
        let durable = Self::open_on(path, open_disk, Some(lock))?;
        // The new file's name must be as durable as its content.
        home.sync().map_err(Error::unavailable)?;
        Ok(Self { home: Some(home), ..durable })
    }

    pub fn open_on(path: PathBuf, open_disk: OpenDisk, lock: Option<File>) -> Result<Self> {
        let database = open_database(&path, &open_disk)?;
        let durable = Self {
            path,
            open_disk,
            database: RwLock::new(Some(database)),
            used: AtomicU64::new(0),
            plain_below: AtomicU64::new(0),
            upgrades: AtomicBool::new(false),
            lock: Mutex::new(lock),
            home: None,
        };
        durable.check_format()?;
        Ok(durable)
    }

    /// After an error: closes and reopens the file, with all committed data.
    pub fn reopen(&self) -> Result<()> {
        let mut slot = self.database.write().expect("no panic while it is held");
        drop(slot.take());
        // The error may have concerned a new file's name.
        self.home.as_ref().map_or(Ok(()), Home::sync).map_err(Error::unavailable)?;
        *slot = Some(open_database(&self.path, &self.open_disk)?);
        Ok(())
    }

    /// Closes cleanly, so that the next opening has nothing to repair.
    pub fn close(&self) {
        let database = self.database.write().expect("no panic while it is held").take();
        if let Some(Err(error)) = database.map(|opened| opened.close(&self.path)) {
            tracing::warn!(path = %self.path.display(), %error, "failed to close the store cleanly");
        }
        if let Some(lock) = self.lock.lock().expect("no panic while it is held").take() {
            // Closing is not enough: a process that is being started shares the file and the lock until it
            // runs its program. If unlocking fails, closing must suffice.
            let _ = lock.unlock();
        }
    }

    fn database(&self) -> Result<Open<'_>> {
        let slot = self.database.read().expect("no panic while it is held");
        if slot.is_none() {
            return Err(Error::unavailable("the store is closed"));
        }
        Ok(Open(slot))
    }

    fn check_format(&self) -> Result<()> {
        let database = self.database()?;
        let database = database.get();
        let format = guarded(|| stored_format(database)).map_err(|e| self.unusable(e))?;
        match format {
            None => create_tables(database).map_err(|e| self.unusable(e)),
            Some(FORMAT) => {
                let plain = guarded(|| number(database, "plain")).map_err(|e| self.unusable(e))?;
                self.plain_below.store(plain.unwrap_or(0), Ordering::Relaxed);
                Ok(())
            }
            Some(FORMAT_1) => {
                let last = guarded(|| last_revision(database)).map_err(|e| self.unusable(e))?;
                self.plain_below.store(last + 1, Ordering::Relaxed);
                self.upgrades.store(true, Ordering::Relaxed);
                Ok(())
            }
            Some(other) => Err(Error::unusable(format!(
                "{} was written by a newer version of this program: it has format {other}, this \
                 version reads {FORMAT}",
                self.path.display()
            ))),
        }
    }

    fn unusable(&self, error: redb::Error) -> Error {
        unusable(&self.path, error)
    }

    fn plain_below(&self) -> PlainBelow {
        PlainBelow(self.plain_below.load(Ordering::Relaxed))
    }

    /// Passes every record from `from` on to `each`, in order, and returns the other metadata.
    pub fn load(&self, from: Revision, each: &mut dyn FnMut(Address, View<'_>)) -> Result<Meta> {
        guarded(|| self.load_inner(from, each)).map_err(|e| self.unusable(e))
    }

    fn load_inner(
        &self,
        from: Revision,
        each: &mut dyn FnMut(Address, View<'_>),
    ) -> std::result::Result<Meta, redb::Error> {
        let database = self.database().map_err(|_| redb::Error::DatabaseClosed)?;
        let meta = meta(database.get())?;
        let plain = self.plain_below();
        let used = read_log(database.get(), from.0..=u64::MAX, &mut |at, bytes| {
            each(at, decoded(plain, at, bytes)?);
            Ok(())
        })?;
        self.used.fetch_add(used, Ordering::Relaxed);
        Ok(meta)
    }

    /// The same for all records, with values in their in-memory form. Several threads read a long log:
    /// `each` also gets the number of the record's part, from 0; the records of a part come in order, but
    /// parts are interleaved.
    pub fn load_parts(&self, each: &mut dyn FnMut(usize, Address, View<'_>)) -> Result<Meta> {
        let database = self.database()?;
        let read = || {
            let plain = self.plain_below();
            let used = reading::all(database.get(), plain, &mut |part, at, view| {
                each(part, at, view);
                Ok(())
            })?;
            self.used.fetch_add(used, Ordering::Relaxed);
            meta(database.get())
        };
        guarded(read).map_err(|e| self.unusable(e))
    }

    /// The error for a change whose previous change is missing.
    pub fn inconsistent(&self, at: Address, previous: Address) -> Error {
        inconsistent(at.revision, previous.revision)
    }

    /// Makes the batch durable, completely or not at all; after an error its outcome is unknown until
    /// [`Durable::reopen`]. Returns how far the log was trimmed, if that was requested.
    pub fn commit(&self, batch: &Batch<'_>) -> Result<Option<Revision>> {
        let database = self.database()?;
        let plain = self.plain_below();
        let upgrade = self.upgrades.load(Ordering::Relaxed).then_some(plain);
        let (trimmed, freed) = guarded(|| commit(database.get(), batch, plain, upgrade))
            .map_err(|e| database.opened().trouble(&self.path, e))?;
        self.upgrades.store(false, Ordering::Relaxed);
        let added = batch.records.iter().map(|(_, record)| record.size() as u64).sum();
        self.used.fetch_add(added, Ordering::Relaxed);
        self.used.fetch_sub(freed, Ordering::Relaxed);
        Ok(trimmed)
    }

    /// The file's blocks on the disk in bytes (its length is larger, because the end has holes), and the
    /// bytes of its records.
    pub fn sizes(&self) -> (u64, u64) {
        use std::os::unix::fs::MetadataExt;
        // An error means that the file does not exist yet. Blocks have 512 bytes on every file system.
        let taken = std::fs::metadata(&self.path).map(|meta| meta.blocks() * 512);
        (taken.unwrap_or_default(), self.used.load(Ordering::Relaxed))
    }

    /// Compares every page with its checksum; only for a file that is not in use.
    fn check_pages(&self) -> Result<()> {
        let mut slot = self.database.write().expect("no panic while it is held");
        let opened = slot.as_mut().ok_or_else(|| Error::unavailable("the store is closed"))?;
        match opened.database.check_integrity() {
            Ok(true) => Ok(()),
            Ok(false) => {
                tracing::warn!(path = %self.path.display(), "redb repaired the store's file");
                Ok(())
            }
            Err(error) => Err(unusable(&self.path, error.into())),
        }
    }

    /// The newest revision of `floor..=current` that existed at that time.
    pub fn revision_at(&self, millis: u64, floor: Revision, current: Revision) -> Result<Revision> {
        let database = self.database()?;
        let plain = self.plain_below();
        let found = guarded(|| revision_at(database.get(), plain, millis, floor, current));
        found
            .map_err(|e| database.opened().trouble(&self.path, e))?
            .ok_or(Error::Compacted { requested: Revision(0), floor })
    }

    /// The events of `from..=upto` in `range`, or the first part of them. Blocks on the disk.
    pub fn history(&self, from: Revision, upto: Revision, range: &KeyRange) -> Result<Chunk> {
        let database = self.database()?;
        let plain = self.plain_below();
        guarded(|| history(database.get(), plain, from, upto, range))
            .map_err(|e| database.opened().trouble(&self.path, e))
    }
}

/// The result of [`verify`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    pub records: u64,
    pub keys: u64,
    pub revision: Revision,
    pub floor: Revision,
}

/// Reads all of a store that is not in use: every page against its checksum, every record, and whether
/// each change has its previous one and each key only one newest. Changes nothing.
pub fn verify(dir: &Path) -> Result<Verified> {
    let path = dir.join("store.redb");
    if !path.is_file() {
        return Err(Error::unusable(format!("there is no store in {}", dir.display())));
    }
    let open_disk = disk::file(path.clone(), true);
    let durable = Durable::open_on(path, open_disk, Some(lock(dir)?))?;
    durable.check_pages()?;
    let mut found = Verified { revision: Revision(1), ..Verified::default() };
    let mut live = BTreeMap::new();
    let (mut missing, mut twice) = (vec![], 0);
    let meta = durable.load(Revision(0), &mut |at, view| {
        found.records += 1;
        found.revision = Revision(at.revision);
        let before = live.insert(exact(view.key), (at, view.kind == crate::EventKind::Put));
        if let Some(previous) = view.previous
            && before.map(|(at, _)| at) != Some(previous)
        {
            missing.push((at.revision, previous.revision));
        }
        // No change has replaced the value before this one.
        twice += usize::from(view.previous.is_none() && before.is_some_and(|(_, lives)| lives));
    })?;
    // Records below the floor may have been removed.
    missing.retain(|(at, _)| *at > meta.floor.0);
    if let Some((at, previous)) = missing.first() {
        return Err(inconsistent(*at, *previous));
    }
    if twice > 0 {
        return Err(two_newest(twice));
    }
    durable.close();
    found.keys = live.values().filter(|(_, lives)| *lives).count() as u64;
    found.floor = meta.floor;
    Ok(found)
}

/// A database, and the checksums of its file's pages.
struct Opened {
    database: Database,
    sums: Option<Arc<Sums>>,
}

impl Opened {
    /// Converts an error: damage, or a failure that may pass.
    fn trouble(&self, path: &Path, error: redb::Error) -> Error {
        // After the first error, redb reports only that there was one.
        let is_known = self.sums.as_ref().is_some_and(|sums| sums.found_damage());
        match error {
            redb::Error::PreviousIo if is_known => {
                unusable(path, redb::Error::Corrupted("a page does not match its checksum".into()))
            }
            error if is_damage(&error) => unusable(path, error),
            error if is_full(&error) => Error::NoSpace(error.to_string().into()),
            error => Error::unavailable(error),
        }
    }

    fn close(self, path: &Path) -> std::result::Result<(), redb::Error> {
        self.database.close()?;
        if let Some(Err(error)) = self.sums.map(|sums| sums.leave(path)) {
            // The disk may be full: then the next opening reads all pages twice.
            tracing::info!(path = %path.display(), %error, "failed to write the checksums of the store's pages");
        }
        Ok(())
    }
}

/// The open database, while it is in use.
struct Open<'a>(RwLockReadGuard<'a, Option<Opened>>);

impl Open<'_> {
    fn opened(&self) -> &Opened {
        self.0.as_ref().expect("checked when it was made")
    }

    fn get(&self) -> &Database {
        &self.opened().database
    }
}

fn make_private_dir(dir: &Path, sync: bool) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    if dir.is_dir() {
        return Ok(());
    }
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    match dir.parent() {
        Some(parent) if sync && !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => Ok(()),
    }
}

fn lock(dir: &Path) -> Result<File> {
    let path = dir.join("lock");
    let cannot = |e: io::Error| Error::unusable(format!("cannot lock {}: {e}", path.display()));
    let file = disk::open_private(&path).map_err(cannot)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::unusable(format!(
            "the store in {} is in use by another process",
            dir.display()
        ))),
        Err(TryLockError::Error(error)) => Err(cannot(error)),
    }
}

fn unusable(path: &Path, error: redb::Error) -> Error {
    let path = path.display();
    let is_damage = is_damage(&error);
    match error {
        redb::Error::Corrupted(what) => {
            Error::unusable(format!("{path} is damaged: {what}; {RESTORE}"))
        }
        redb::Error::Io(what) if is_damage => {
            Error::unusable(format!("{path} is damaged: {what}; {RESTORE}"))
        }
        other => Error::unusable(format!("cannot use {path}: {other}")),
    }
}

fn is_full(error: &redb::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error, redb::Error::Io(why) if [StorageFull, QuotaExceeded].contains(&why.kind()))
}

fn is_damage(error: &redb::Error) -> bool {
    match error {
        redb::Error::Corrupted(_) => true,
        // A page with a wrong checksum, or a truncated file.
        redb::Error::Io(why) => {
            matches!(why.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
        }
        _ => false,
    }
}

/// Damaged pages can make redb panic: that counts as damage, too.
fn guarded<T>(
    act: impl FnOnce() -> std::result::Result<T, redb::Error>,
) -> std::result::Result<T, redb::Error> {
    // None of our state changes halfway: the panic has dropped the transaction.
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(redb::Error::Corrupted(format!("reading it panicked: {}", text.unwrap_or("no text"))))
    })
}

fn inconsistent(at: u64, previous: u64) -> Error {
    Error::unusable(format!(
        "the change at revision {at} follows one at revision {previous}, which is missing; {RESTORE}"
    ))
}

/// The error for keys with two newest changes: one record wrongly says that it has no previous one.
pub(super) fn two_newest(keys: usize) -> Error {
    Error::unusable(format!("{keys} keys have two newest changes; {RESTORE}"))
}

fn open_database(path: &Path, open_disk: &OpenDisk) -> Result<Opened> {
    let disk =
        open_disk().map_err(|e| Error::unusable(format!("cannot open {}: {e}", path.display())))?;
    let sums = disk.sums.clone();
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder.set_check_integrity_on_open(!sums.as_ref().is_some_and(|sums| sums.are_known()));
    let name = path.to_owned();
    builder.set_repair_callback(move |session| {
        // redb reports 0.3 only if the newest commit is incomplete and it uses the one before.
        if session.progress() == 0.3 {
            let path = name.display();
            tracing::warn!(%path, "the store dropped its last commit, which was incomplete");
        }
    });
    let database = guarded(|| builder.create_with_backend(disk).map_err(redb::Error::from))
        .map_err(|e| unusable(path, e))?;
    Ok(Opened { database, sums })
}

fn stored_format(database: &Database) -> std::result::Result<Option<u64>, redb::Error> {
    match database.begin_read()?.open_table(META) {
        Ok(meta) => Ok(meta.get("format")?.map(|n| n.value())),
        Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn number(database: &Database, name: &str) -> std::result::Result<Option<u64>, redb::Error> {
    Ok(database.begin_read()?.open_table(META)?.get(name)?.map(|n| n.value()))
}

fn last_revision(database: &Database) -> std::result::Result<u64, redb::Error> {
    let log = database.begin_read()?.open_table(LOG)?;
    Ok(log.last()?.map_or(0, |(at, _)| at.value().0))
}

fn meta(database: &Database) -> std::result::Result<Meta, redb::Error> {
    let read = database.begin_read()?;
    let meta = read.open_table(META)?;
    let number = |name| Ok::<_, redb::Error>(meta.get(name)?.map_or(1, |n| n.value()));
    let (floor, trimmed) = (Revision(number("floor")?), Revision(number("trimmed")?));
    let mut leases = vec![];
    for row in ReadableTable::range::<i64>(&read.open_table(LEASES)?, ..)? {
        let (id, ttl) = row?;
        leases.push((id.value(), ttl.value()));
    }
    Ok(Meta { floor, trimmed, leases })
}

type EachRecord<'a> = dyn FnMut(Address, &[u8]) -> std::result::Result<(), redb::Error> + 'a;

/// Returns the bytes of the records.
fn read_log(
    database: &Database,
    revisions: RangeInclusive<u64>,
    each: &mut EachRecord<'_>,
) -> std::result::Result<u64, redb::Error> {
    let log = database.begin_read()?.open_table(LOG)?;
    let mut used = 0;
    let range = (*revisions.start(), 0)..=(*revisions.end(), u32::MAX);
    for row in ReadableTable::range(&log, range)? {
        let (at, bytes) = row?;
        used += bytes.value().len() as u64;
        each(address(at.value()), bytes.value())?;
    }
    Ok(used)
}

fn create_tables(database: &Database) -> std::result::Result<(), redb::Error> {
    let write = database.begin_write()?;
    write.open_table(META)?.insert("format", FORMAT)?;
    write.open_table(LEASES)?;
    write.open_table(LOG)?;
    Ok(write.commit()?)
}

/// Returns how far it trimmed, and how many bytes that freed.
fn commit(
    database: &Database,
    batch: &Batch<'_>,
    plain: PlainBelow,
    upgrade: Option<PlainBelow>,
) -> std::result::Result<(Option<Revision>, u64), redb::Error> {
    let mut write = database.begin_write()?;
    write.set_durability(Durability::Immediate)?;
    let (mut trimmed, mut freed) = (None, 0);
    {
        let mut log = write.open_table(LOG)?;
        let mut bytes = vec![];
        for (at, record) in batch.records {
            record.encode(*at, &mut bytes);
            log.insert((at.revision, at.index), &bytes[..])?;
        }
        if let Some(trim) = batch.trim {
            let next;
            (next, freed) = clear(&mut log, plain, trim)?;
            let mut meta = write.open_table(META)?;
            meta.insert("floor", trim.floor.0)?;
            meta.insert("trimmed", next.0)?;
            trimmed = Some(next);
        }
        if let Some(PlainBelow(revision)) = upgrade {
            let mut meta = write.open_table(META)?;
            meta.insert("plain", revision)?;
            meta.insert("format", FORMAT)?;
        }
        if !batch.granted.is_empty() || !batch.revoked.is_empty() {
            let mut leases = write.open_table(LEASES)?;
            for (id, ttl) in batch.granted {
                leases.insert(id, ttl)?;
            }
            for id in batch.revoked {
                leases.remove(id)?;
            }
        }
    }
    write.commit()?;
    Ok((trimmed, freed))
}

/// Removes the records that `from..floor` replaced, and the deletes in it. Stops after about `limit`
/// records, at a revision's end; returns the position, and the bytes removed.
fn clear(
    log: &mut Table<'_, (u64, u32), &'static [u8]>,
    plain: PlainBelow,
    trim: Trim,
) -> std::result::Result<(Revision, u64), redb::Error> {
    let mut doomed = vec![];
    let mut next = trim.floor;
    let mut last = 0;
    for (seen, row) in log.range((trim.from.0, 0)..(trim.floor.0, 0))?.enumerate() {
        let (at, bytes) = row?;
        let at = address(at.value());
        if seen >= trim.limit && at.revision != last {
            next = Revision(at.revision);
            break;
        }
        last = at.revision;
        let view = decoded(plain, at, bytes.value())?;
        doomed.extend(view.previous);
        if view.kind == crate::EventKind::Delete {
            doomed.push(at);
        }
    }
    let mut freed = 0;
    for at in doomed {
        freed += log.remove((at.revision, at.index))?.map_or(0, |gone| gone.value().len() as u64);
    }
    Ok((next, freed))
}

fn history(
    database: &Database,
    plain: PlainBelow,
    from: Revision,
    upto: Revision,
    range: &KeyRange,
) -> std::result::Result<Chunk, redb::Error> {
    let read = database.begin_read()?;
    let log = read.open_table(LOG)?;
    let mut events: Vec<(Revision, Vec<Event>)> = vec![];
    let mut bytes_read = 0;
    let mut last = 0;
    for row in ReadableTable::range(&log, (from.0, 0)..=(upto.0, u32::MAX))? {
        let (at, bytes) = row?;
        let at = address(at.value());
        if bytes_read >= CHUNK_BYTES && at.revision != last {
            return Ok(Chunk { events, next: Revision(at.revision) });
        }
        last = at.revision;
        bytes_read += bytes.value().len();
        let view = decoded(plain, at, bytes.value())?;
        if !range.contains(view.key) {
            continue;
        }
        let event = view.event(at, previous(&log, plain, &view)?);
        match events.last_mut() {
            Some((revision, group)) if revision.0 == at.revision => group.push(event),
            _ => events.push((Revision(at.revision), vec![event])),
        }
    }
    Ok(Chunk { events, next: Revision(upto.0 + 1) })
}

/// A binary search: times grow with revisions, unless the clock was set back.
fn revision_at(
    database: &Database,
    plain: PlainBelow,
    millis: u64,
    floor: Revision,
    current: Revision,
) -> std::result::Result<Option<Revision>, redb::Error> {
    let read = database.begin_read()?;
    let log = read.open_table(LOG)?;
    // The first record from a revision on: its revision and time.
    let first = |from: u64| {
        let Some(row) = ReadableTable::range(&log, (from, 0)..)?.next() else { return Ok(None) };
        let (at, bytes) = row?;
        let at = address(at.value());
        let view = decoded(plain, at, bytes.value())?;
        Ok::<_, redb::Error>(Some((at.revision, view.at)))
    };
    let is_past = |from: u64| Ok::<_, redb::Error>(first(from)?.is_none_or(|(_, at)| at > millis));
    if is_past(floor.0)? {
        // An empty store has no compacted history.
        return Ok((floor == Revision(1)).then_some(floor));
    }
    let (mut low, mut high) = (floor.0, current.0 + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if is_past(middle)? { high = middle } else { low = middle }
    }
    Ok(Some(Revision(low)))
}

/// The previous state, from its own record. The record may be missing if the floor has passed it
/// meanwhile; the reader checks the floor again and drops the chunk.
fn previous(
    log: &impl ReadableTable<(u64, u32), &'static [u8]>,
    plain: PlainBelow,
    view: &View<'_>,
) -> std::result::Result<Option<crate::KeyValue>, redb::Error> {
    let Some(at) = view.previous else { return Ok(None) };
    let Some(bytes) = log.get((at.revision, at.index))? else { return Ok(None) };
    Ok(Some(decoded(plain, at, bytes.value())?.key_value(at)))
}

fn address((revision, index): (u64, u32)) -> Address {
    Address { revision, index }
}

fn decoded(
    plain: PlainBelow,
    at: Address,
    record: &[u8],
) -> std::result::Result<View<'_>, redb::Error> {
    plain.decode(at, record).ok_or_else(|| damaged(at))
}

fn damaged(at: Address) -> redb::Error {
    redb::Error::Corrupted(format!(
        "the record at revision {} does not match its checksum",
        at.revision
    ))
}

/// An exact copy, because the bytes may be a small part of a large request buffer.
pub(super) fn exact(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}
