//! The file written anew, without the room that it no longer needs.
//!
//! redb uses free pages again, but gives few of them back: a page that is still needed near the
//! file's end keeps all of it. So after much has gone the log is copied to a second file, which then
//! takes the first one's name:
//!
//! ```text
//! store.redb ──── records, in order, 4 MiB a commit ────► store.redb.new      a thread of its own
//! committer:  rest of the log, meta, leases ─► sync ─► rename ─► sync of the directory ─► goes on
//! ```
//!
//! Invariants: nothing is trimmed meanwhile, so the copy is at any time exactly the log's beginning;
//! until the rename the first file is all there is to the store, and the second is thrown away
//! whatever happens (also by the next opening); the second is whole and durable before the rename,
//! and no write is acknowledged between that and the directory's sync, so that after a loss of power
//! either name leads to the same records.
//!
//! Why not redb's own compaction: it wants the database for itself, for as long as it takes.

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

/// Copied in one commit: what a sync of the copy may cost the writes beside it.
const COPY_BYTES: usize = 4 << 20;

/// A directory that is the store's own.
#[derive(Debug)]
pub(super) struct Home {
    dir: PathBuf,
    sync: bool,
}

impl Home {
    /// Removes what an earlier process may have left.
    pub fn new(dir: &Path, sync: bool) -> io::Result<Self> {
        let home = Self { dir: dir.to_owned(), sync };
        match std::fs::remove_file(home.spare()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(home),
        }
    }

    /// An error where the copy could leave no room for what is written meanwhile.
    fn check_room(&self, bytes: u64) -> Result<()> {
        let disk = nix::sys::statvfs::statvfs(&self.dir).map_err(Error::unavailable)?;
        let free = disk.blocks_available() * disk.fragment_size();
        if free / 2 >= bytes { Ok(()) } else { Err(Error::unavailable("the disk is too full")) }
    }

    fn spare(&self) -> PathBuf {
        self.dir.join("store.redb.new")
    }

    /// The names in it become as durable as the files' content.
    pub fn sync(&self) -> io::Result<()> {
        if self.sync { File::open(&self.dir)?.sync_all() } else { Ok(()) }
    }
}

/// The second file. Dropped before it has the first one's name, it is removed.
pub(in crate::backend::embedded) struct Copy {
    path: PathBuf,
    /// Gone once it is the store's.
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
            tracing::warn!(path = %self.path.display(), %error, "a copy of the store is left");
        }
    }
}

impl Durable {
    /// Whether there is a place for a second file.
    pub fn can_be_copied(&self) -> bool {
        self.home.is_some()
    }

    /// An empty second file.
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

    /// Copies the next few megabytes. False when there was less than that: it has caught up.
    pub fn go_on_copying(&self, copy: &mut Copy) -> Result<bool> {
        let database = self.database()?;
        let plain = self.plain_below();
        let copied = guarded(|| copy.records(database.get(), plain, COPY_BYTES))
            .map_err(|e| database.opened().trouble(&self.path, e))?;
        Ok(copied >= COPY_BYTES)
    }

    /// Puts the copy, completed, in the store's place. Only for the one writer, between two commits.
    /// After an error the store is what it was, or closed, until [`Durable::reopen`].
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
        // Nobody can find it any more; what it takes is free now.
        drop(old);
        Ok(())
    }

    /// False after an error, until [`Durable::reopen`].
    pub fn is_open(&self) -> bool {
        self.database.read().expect("no panic while it is held").is_some()
    }
}

impl Copy {
    /// Of the records that it has.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn database(&self) -> &Database {
        &self.database.as_ref().expect("it is not the store's yet").database
    }

    /// Takes over records, durably, until it has so many bytes of them or all; returns how many.
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
                // What is damaged must not become what has a good checksum.
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

    /// The last records, and what is not in the log.
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
