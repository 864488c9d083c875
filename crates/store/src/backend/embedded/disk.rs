//! The file under the durable layer: what `redb` asks of a disk, and nothing else.
//!
//! Ours instead of `redb`'s own so that syncing can be turned off, and so that tests can put a
//! failing or power-losing disk in its place ([`OpenDisk`] is that seam). It takes no lock: the
//! durable layer holds one on a file of its own, also while it opens this file anew after an error.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use redb::StorageBackend;

/// Opens the disk, also for the second time after an error.
pub(super) type OpenDisk = Arc<dyn Fn() -> io::Result<Disk> + Send + Sync>;

#[derive(Debug)]
pub(super) struct Disk(Box<dyn StorageBackend>);

impl Disk {
    #[cfg(test)]
    pub(super) fn new(inner: impl StorageBackend) -> Self {
        Self(Box::new(inner))
    }
}

/// The disk of production: one file, readable by its owner only.
pub(super) fn file(path: PathBuf, sync: bool) -> OpenDisk {
    Arc::new(move || Ok(Disk(Box::new(PlainFile { file: open_private(&path)?, sync }))))
}

pub(super) fn open_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

#[derive(Debug)]
struct PlainFile {
    file: File,
    /// Off only where a power loss may cost the data: tests and throw-away clusters.
    sync: bool,
}

impl StorageBackend for PlainFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        if self.sync { self.file.sync_data() } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.0.close()
    }
}
