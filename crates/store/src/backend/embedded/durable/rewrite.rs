//! Rewrites the file to free the space that it no longer needs.
//!
//! redb reuses free pages, but returns few of them to the file system: one page in use near the file's end
//! keeps all space before it. So after large removals the log is copied to a second file, which then
//! replaces the first one:
//!
//! ```text
//! store.redb ──── records, in order, 4 MiB a commit ────► store.redb.new      a thread of its own
//! committer:  rest of the log, meta, leases ─► sync ─► rename ─► sync of the directory ─► goes on
//! ```
//!
//! Invariants: nothing is trimmed meanwhile, so the copy is always exactly the beginning of the log;
//! until the rename, the first file alone is the store, and the second is removed after any failure (also
//! by the next opening); the second is complete and durable before the rename, and no write is
//! acknowledged between the rename and the sync of the directory, so that after a power loss either
//! name leads to the same records.
//!
//! redb's own compaction is unsuitable, because it needs exclusive access for its whole duration.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use redb::{Database, Durability, ReadableDatabase, ReadableTable};

use super::{
    Durable, FORMAT, LEASES, LOG, META, Opened, address, create_tables, damaged, guarded,
    open_database,
};
use crate::backend::embedded::disk;
use crate::backend::embedded::record::PlainBelow;
use crate::{Error, Result};

/// Bytes to copy in one commit: limits how long a sync of the copy delays concurrent writes.
const COPY_BYTES: usize = 4 << 20;

/// The store's directory.
#[derive(Debug)]
pub(super) struct Home {
    dir: PathBuf,
    sync: bool,
}

impl Home {
    /// Removes files that an earlier process may have left.
    pub fn new(dir: &Path, sync: bool) -> io::Result<Self> {
        let home = Self { dir: dir.to_owned(), sync };
        match std::fs::remove_file(home.spare()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(home),
        }
    }

    /// An error if the copy could take the space that concurrent writes need.
    fn check_room(&self, bytes: u64) -> Result<()> {
        let disk = nix::sys::statvfs::statvfs(&self.dir).map_err(Error::unavailable)?;
        let free = disk.blocks_available() * disk.fragment_size();
        if free / 2 >= bytes { Ok(()) } else { Err(Error::unavailable("the disk is too full")) }
    }

    fn spare(&self) -> PathBuf {
        self.dir.join("store.redb.new")
    }

    /// Makes the names in it as durable as the files' content.
    pub fn sync(&self) -> io::Result<()> {
        if self.sync { File::open(&self.dir)?.sync_all() } else { Ok(()) }
    }
}

/// The second file. It is removed when dropped before it has replaced the first one.
pub(in crate::backend::embedded) struct Copy {
    path: PathBuf,
    /// `None` once it is the store's.
    database: Option<Opened>,
    /// The first record that may be missing.
    next: (u64, u32),
    bytes: u64,
}

impl Drop for Copy {
    fn drop(&mut self) {
        if self.database.take().is_some()
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            // The next opening removes it.
            tracing::warn!(path = %self.path.display(), %error, "failed to remove an unused copy of the store");
        }
    }
}

impl Durable {
    /// Whether the store has a directory for a second file.
    pub fn can_be_copied(&self) -> bool {
        self.home.is_some()
    }

    /// The store's directory, if it has one.
    pub fn dir(&self) -> Option<&Path> {
        self.home.as_ref().map(|home| home.dir.as_path())
    }

    /// Creates an empty second file.
    pub fn begin_copy(&self) -> Result<Copy> {
        let nowhere = || Error::unavailable("the store has no directory of its own");
        let home = self.home.as_ref().ok_or_else(nowhere)?;
        home.check_room(self.used.load(Ordering::Relaxed))?;
        let path = home.spare();
        let database = open_database(&path, &disk::file(path.clone(), home.sync))?;
        let copy = Copy { path, database: Some(database), next: (0, 0), bytes: 0 };
        create_tables(copy.database()).map_err(Error::unavailable)?;
        Ok(copy)
    }

    /// Copies the next few megabytes. False if there was less than that: the copy has caught up.
    pub fn go_on_copying(&self, copy: &mut Copy) -> Result<bool> {
        let database = self.database()?;
        let plain = self.plain_below();
        let copied = guarded(|| copy.records(database.get(), plain, COPY_BYTES))
            .map_err(|e| database.opened().trouble(&self.path, e))?;
        Ok(copied >= COPY_BYTES)
    }

    /// Completes the copy and replaces the store's file by it. Only for the one writer, between two commits.
    /// After an error the store is unchanged, or closed until [`Durable::reopen`].
    pub fn install(&self, mut copy: Copy) -> Result<()> {
        let home = self.home.as_ref().ok_or_else(|| Error::unavailable("there is no directory"))?;
        let mut slot = self.database.write().expect("no panic while it is held");
        let old = slot.as_ref().ok_or_else(|| Error::unavailable("the store is closed"))?;
        let plain = self.plain_below();
        guarded(|| copy.rest(&old.database, plain)).map_err(|e| old.trouble(&self.path, e))?;
        std::fs::rename(&copy.path, &self.path).map_err(Error::unavailable)?;
        let old = slot.take();
        let new = copy.database.take();
        home.sync().map_err(Error::unavailable)?;
        *slot = new;
        // Each record of the copy has a checksum, and its tables say so.
        self.plain_below.store(0, Ordering::Relaxed);
        self.upgrades.store(false, Ordering::Relaxed);
        drop(slot);
        // The old file has no name any more; its space is free now.
        drop(old);
        Ok(())
    }

    /// False after an error, until [`Durable::reopen`].
    pub fn is_open(&self) -> bool {
        self.database.read().expect("no panic while it is held").is_some()
    }
}

impl Copy {
    /// The bytes of its records.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn database(&self) -> &Database {
        &self.database.as_ref().expect("it is not the store's yet").database
    }

    /// Copies records durably, up to a size or to the end; returns how many bytes.
    fn records(
        &mut self,
        old: &Database,
        plain: PlainBelow,
        limit: usize,
    ) -> std::result::Result<usize, redb::Error> {
        let log = old.begin_read()?.open_table(LOG)?;
        let mut write = self.database().begin_write()?;
        write.set_durability(Durability::Immediate)?;
        let (mut next, mut bytes) = (self.next, 0);
        {
            let mut copy = write.open_table(LOG)?;
            let mut summed = vec![];
            for row in ReadableTable::range(&log, self.next..)? {
                let (at, record) = row?;
                let (at, record) = (at.value(), record.value());
                // Damaged data must not get a valid checksum.
                let place = address(at);
                plain.summed(place, record, &mut summed).ok_or_else(|| damaged(place))?;
                copy.insert(at, &summed[..])?;
                next = (at.0, at.1 + 1);
                bytes += summed.len();
                if bytes >= limit {
                    break;
                }
            }
        }
        write.commit()?;
        self.next = next;
        self.bytes += bytes as u64;
        Ok(bytes)
    }

    /// Copies the last records, and the other tables.
    fn rest(&mut self, old: &Database, plain: PlainBelow) -> std::result::Result<(), redb::Error> {
        while self.records(old, plain, COPY_BYTES)? >= COPY_BYTES {}
        let read = old.begin_read()?;
        let mut write = self.database().begin_write()?;
        write.set_durability(Durability::Immediate)?;
        {
            let mut meta = write.open_table(META)?;
            for row in ReadableTable::range::<&str>(&read.open_table(META)?, ..)? {
                let (name, number) = row?;
                meta.insert(name.value(), number.value())?;
            }
            meta.insert("format", FORMAT)?;
            meta.insert("plain", 0)?;
            let mut leases = write.open_table(LEASES)?;
            for row in ReadableTable::range::<i64>(&read.open_table(LEASES)?, ..)? {
                let (id, ttl) = row?;
                leases.insert(id.value(), ttl.value())?;
            }
        }
        Ok(write.commit()?)
    }
}
