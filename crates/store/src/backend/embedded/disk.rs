//! The file of the durable layer: the operations that `redb` requires of a disk.
//!
//! It replaces `redb`'s own for three reasons: syncing can be disabled; every page that is read is
//! compared with its checksum (`sums.rs`); and tests can use a failing or power-losing disk instead
//! ([`OpenDisk`] is that seam). It takes no lock: the durable layer holds one on its own file, also while
//! it reopens this file after an error.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::StorageBackend;

use super::sums::{PAGE, Sums};

/// Opens the disk, also again after an error.
pub(super) type OpenDisk = Arc<dyn Fn() -> io::Result<Disk> + Send + Sync>;

#[derive(Debug)]
pub(super) struct Disk {
    backend: Box<dyn StorageBackend>,
    /// The checksums of pages; `None` on a test's disk.
    pub sums: Option<Arc<Sums>>,
}

impl Disk {
    #[cfg(test)]
    pub(super) fn new(inner: impl StorageBackend) -> Self {
        Self { backend: Box::new(inner), sums: None }
    }
}

/// The disk of production: one file, readable by its owner only.
pub(super) fn file(path: PathBuf, sync: bool) -> OpenDisk {
    Arc::new(move || {
        let file = open_private(&path)?;
        let sums = Arc::new(Sums::take(&path, &file, sync)?);
        let backend = Box::new(PlainFile { file, sync, sums: sums.clone() });
        Ok(Disk { backend, sums: Some(sums) })
    })
}

pub(super) fn open_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

#[derive(Debug)]
struct PlainFile {
    file: File,
    /// Disable it only if a power loss may lose the data: tests and throw-away clusters.
    sync: bool,
    sums: Arc<Sums>,
}

impl StorageBackend for PlainFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Reads whole pages, except for the header at opening, which `redb` checks itself.
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)?;
        self.sums.check(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.sums.cut(len);
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.sync { self.file.sync_data() } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        debug_assert!(data.len().is_multiple_of(PAGE) || offset < PAGE as u64);
        self.sums.forget(offset, data.len());
        self.file.write_all_at(data, offset)?;
        self.sums.note(offset, data);
        Ok(())
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.backend.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.backend.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.backend.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.backend.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.backend.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.backend.close()
    }
}
