//! Checksums of the file's pages: a read returns the page that was written, or an error.
//!
//! `redb` keeps a checksum of each page, too, but verifies them only on request, which reads the file
//! two more times. Here a page is verified when it is read anyway.
//!
//! ```text
//!  write ─► table: one CRC32 per page of 4 KiB ◄─ read: compared, or recorded if unknown
//!              │ after a clean close                      ▲
//!              └──────────► store.redb.sums ──────────────┘ read, and removed, at the next opening
//!
//!  store.redb.sums   "DCPSUMS1", CRC32 of the file's header, CRC32 of each page (0: unknown), CRC32
//!                    of everything before; little endian
//! ```
//!
//! Invariants: the file of checksums exists only while the store is closed, so it never describes an older
//! state; a file that does not match the store's header (of a store that was copied into its place) is
//! ignored. Without it, `redb` checks all its pages at opening, like after a crash, and they are recorded
//! then. A page after a failed write is unknown.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::disk::open_private;

/// `redb`'s own unit; bigger pages span several.
pub(super) const PAGE: usize = 4096;
const MAGIC: &[u8; 8] = b"DCPSUMS1";
/// The size of `redb`'s file header, which changes with every commit.
const HEADER: usize = 320;

#[derive(Debug)]
pub(super) struct Sums {
    sync: bool,
    /// One for each page from the file's beginning; locked for look-ups.
    table: Mutex<Vec<u32>>,
    /// Whether the last clean close left the checksums.
    known: bool,
    damaged: AtomicBool,
}

impl Sums {
    /// Reads the file of checksums of the last clean close, and removes it durably.
    pub fn take(store: &Path, file: &File, sync: bool) -> io::Result<Self> {
        let path = beside(store);
        let found = match File::open(&path) {
            Ok(mut sums) => {
                let mut bytes = vec![];
                sums.read_to_end(&mut bytes)?;
                std::fs::remove_file(&path)?;
                if let (true, Some(dir)) = (sync, path.parent()) {
                    File::open(dir)?.sync_all()?;
                }
                parse(&bytes, file)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let (known, table) = (found.is_some(), Mutex::new(found.unwrap_or_default()));
        Ok(Self { sync, table, known, damaged: AtomicBool::new(false) })
    }

    /// Whether all reads are verified; otherwise `redb` has to check its pages itself.
    pub fn are_known(&self) -> bool {
        self.known
    }

    /// Whether a damaged page was found.
    pub fn found_damage(&self) -> bool {
        self.damaged.load(Ordering::Relaxed)
    }

    /// After the file was closed: writes the checksums for the next opening, which takes longer without
    /// them.
    pub fn leave(&self, store: &Path) -> io::Result<()> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(header_sum(&File::open(store)?)?.to_le_bytes());
        for sum in self.table().iter() {
            bytes.extend(sum.to_le_bytes());
        }
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        let path = beside(store);
        let file = open_private(&path)?;
        let written = file
            .set_len(0)
            .and_then(|()| file.write_all_at(&bytes, 0))
            .and_then(|()| if self.sync { file.sync_all() } else { Ok(()) });
        if written.is_err() {
            // An incomplete file would be refused by its checksum, and take space on a full disk.
            let _ = std::fs::remove_file(&path);
        }
        written
    }

    fn table(&self) -> MutexGuard<'_, Vec<u32>> {
        self.table.lock().expect("no panic while it is held")
    }

    /// Verifies data that was read, except parts of pages.
    pub fn check(&self, offset: u64, read: &[u8]) -> io::Result<()> {
        for (page, bytes) in whole_pages(offset, read) {
            let sum = sum(bytes);
            let mut table = self.table();
            match table.get(page).copied().unwrap_or(0) {
                0 => set(&mut table, page, sum),
                known if known == sum => {}
                _ => {
                    drop(table);
                    self.damaged.store(true, Ordering::Relaxed);
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!("page {page} does not match its checksum"),
                    ));
                }
            }
        }
        Ok(())
    }

    pub fn note(&self, offset: u64, written: &[u8]) {
        for (page, bytes) in whole_pages(offset, written) {
            set(&mut self.table(), page, sum(bytes));
        }
    }

    /// Forgets pages whose bytes are about to change.
    pub fn forget(&self, offset: u64, length: usize) {
        let first = offset as usize / PAGE;
        let end = (offset as usize + length).div_ceil(PAGE);
        let mut table = self.table();
        let end = end.min(table.len());
        if first < end {
            table[first..end].fill(0);
        }
    }

    /// Handles a new length of the file.
    pub fn cut(&self, length: u64) {
        let pages = length as usize / PAGE;
        self.table().truncate(pages);
    }
}

fn beside(store: &Path) -> PathBuf {
    store.with_added_extension("sums")
}

fn whole_pages(offset: u64, bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let first = offset as usize / PAGE;
    let bytes = if (offset as usize).is_multiple_of(PAGE) { bytes } else { &[] };
    bytes.chunks_exact(PAGE).enumerate().map(move |(n, page)| (first + n, page))
}

/// Never 0, which means "unknown".
fn sum(page: &[u8]) -> u32 {
    crc32fast::hash(page).max(1)
}

fn set(table: &mut Vec<u32>, page: usize, sum: u32) {
    if table.len() <= page {
        table.resize(page + 1, 0);
    }
    table[page] = sum;
}

fn header_sum(file: &File) -> io::Result<u32> {
    let mut header = [0; HEADER];
    file.read_exact_at(&mut header, 0)?;
    Ok(crc32fast::hash(&header))
}

/// `None`: it does not describe this file.
fn parse(bytes: &[u8], file: &File) -> Option<Vec<u32>> {
    let (bytes, whole) = bytes.split_last_chunk::<4>()?;
    let number = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
    let rest = bytes.strip_prefix(MAGIC)?;
    let (header, table) = rest.split_first_chunk::<4>()?;
    let fits = crc32fast::hash(bytes) == number(whole)
        && header_sum(file).is_ok_and(|sum| sum == number(header));
    let (table, []) = table.as_chunks::<4>() else { return None };
    fits.then(|| table.iter().map(number).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Lab {
        _dir: tempfile::TempDir,
        path: PathBuf,
        file: File,
    }

    fn lab() -> Lab {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("store.redb");
        let file = open_private(&path).expect("made");
        file.set_len(4 * PAGE as u64).expect("made longer");
        Lab { _dir: dir, path, file }
    }

    impl Lab {
        fn take(&self) -> Sums {
            Sums::take(&self.path, &self.file, false).expect("readable")
        }
    }

    #[test]
    fn checksums_are_known_only_after_a_clean_close() {
        let lab = lab();
        let sums = lab.take();
        assert!(!sums.are_known());
        let page = |n: u8| vec![n; PAGE];
        sums.note(PAGE as u64, &[page(1), page(2)].concat());
        sums.leave(&lab.path).expect("written");
        let sums = lab.take();
        assert!(sums.are_known());
        sums.check(PAGE as u64, &page(1)).expect("the right page");
        assert!(sums.check(2 * PAGE as u64, &page(1)).is_err() && sums.found_damage());
        // An unknown page is recorded by its first read.
        sums.check(0, &page(7)).expect("not known");
        assert!(sums.check(0, &page(8)).is_err());
        sums.forget(PAGE as u64, 1);
        sums.check(PAGE as u64, &page(9)).expect("about to change");
        sums.check(100, &page(9)).expect("not a page");
        assert!(!lab.take().are_known(), "it was taken");
    }

    #[test]
    fn checksums_that_do_not_match_are_ignored() {
        let lab = lab();
        let path = beside(&lab.path);
        let leave = || {
            let sums = lab.take();
            sums.note(0, &[3; 2 * PAGE]);
            sums.leave(&lab.path).expect("written");
        };
        leave();
        lab.file.write_all_at(b"another store", 0).expect("written");
        assert!(!lab.take().are_known(), "another header");
        leave();
        let whole = std::fs::read(&path).expect("readable");
        for (cut, bit) in [(0, None), (7, None), (whole.len() - 1, None), (whole.len(), Some(100))]
        {
            let mut bytes = whole[..cut].to_vec();
            bit.into_iter().for_each(|bit: usize| bytes[bit / 8] ^= 1 << (bit % 8));
            std::fs::write(&path, bytes).expect("written");
            assert!(!lab.take().are_known(), "{cut} bytes of it, flipped {bit:?}");
        }
    }
}
