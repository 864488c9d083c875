//! Space that the store holds back, so that deletes work on a full disk.
//!
//! ```text
//!            a commit finds no space: a quarter is freed, the commit runs again
//!  ┌────────┐ ───────────────────────────────────────────────────────────────► ┌─────┐
//!  │ normal │                                                                   │ low │ ─┐ the same
//!  └────────┘ ◄─────────────────────────────────────────────────────────────── └─────┘ ◄┘
//!            there is room for the whole reserve, or records gave as much back
//! ```
//!
//! In: failed commits, the disk's free space, the bytes of the records. Out: whether the store is low on
//! space, and by how many bytes an update may enlarge a value meanwhile.
//!
//! The reserve is the file `reserve` beside the store's file. It owns its blocks. It is freed in quarters,
//! because the program that filled the disk may take what is freed: then the next failure frees the next
//! quarter.
//!
//! While the store is low on space it takes deletes, and updates of existing keys that add at most
//! [`GROWTH`] bytes: a graceful delete first writes a deletion timestamp, and Leases must go on, so that
//! controllers can delete dependents. With less than half of the reserve left, an update may add nothing. The
//! store also forgets its history, because deletes free no space before that.
//!
//! Upstream: etcd's alarm NOSPACE, which refuses puts and allows reads, deletes and compaction.
//! Deviation: etcd also refuses updates that do not grow, and stays so until `etcdctl alarm disarm`.
//!
//! Cost: in normal operation nothing, once the reserve is whole. Otherwise one look at the disk per
//! [`LOOK`] or [`COMPLETE`].

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use tokio::time::Instant;

/// How much an update may add to a value while the store is low on space.
const GROWTH: usize = 1024;
/// The reserve is at most this part of the disk.
const SHARE: u64 = 32;
/// It is freed in so many parts.
const PARTS: u64 = 4;
/// A smaller reserve is of no use.
const LEAST: u64 = 256 << 10;
/// The interval of looks at the disk while the store is low on space…
const LOOK: Duration = Duration::from_secs(1);
/// …and while the reserve is incomplete otherwise.
const COMPLETE: Duration = Duration::from_secs(60);

/// The total and the free bytes of a disk.
pub(super) type Room = Box<dyn Fn(&Path) -> io::Result<(u64, u64)> + Send>;

/// The part of the reserve's state that other threads show.
#[derive(Debug, Default)]
pub(super) struct Shown {
    pub is_low: AtomicBool,
    pub held: AtomicU64,
}

pub(super) struct Reserve {
    /// `None` if the store has no directory, or is not to have a reserve.
    path: Option<PathBuf>,
    room: Room,
    sync: bool,
    /// The intended size, and the size now, in bytes.
    whole: u64,
    held: u64,
    low: Option<Low>,
    next_look: Option<Instant>,
}

struct Low {
    /// The bytes of the records when the space ran out.
    used: u64,
}

/// What a look at the disk has found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing has changed.
    Same,
    /// The store is low on space no more.
    Room,
}

impl Reserve {
    /// A reserve of at most `limit` bytes in `dir`; [`Reserve::look`] makes it.
    pub fn new(dir: Option<&Path>, limit: u64, sync: bool, room: Room) -> Self {
        let path = dir.filter(|_| limit >= LEAST).map(|dir| dir.join("reserve"));
        let next_look = path.is_some().then(Instant::now);
        Self { path, room, sync, whole: limit, held: 0, low: None, next_look }
    }

    pub fn is_low(&self) -> bool {
        self.low.is_some()
    }

    /// The bytes that an update may add to a value; `None` for any number.
    pub fn growth(&self) -> Option<usize> {
        self.low.as_ref()?;
        Some(if self.held >= self.whole / 2 { GROWTH } else { 0 })
    }

    /// The time of the next look.
    pub fn next_look(&self) -> Option<Instant> {
        self.next_look
    }

    /// The bytes that are left of it.
    pub fn held(&self) -> u64 {
        self.held
    }

    pub fn show(&self, to: &Shown) {
        to.is_low.store(self.is_low(), Ordering::Relaxed);
        to.held.store(self.held, Ordering::Relaxed);
    }

    /// Whether the part that one failure frees can hold a commit of so many bytes.
    pub fn holds(&self, bytes: usize) -> bool {
        // A commit also writes the pages on the way to the records.
        bytes as u64 <= self.whole / PARTS / 2
    }

    /// After a commit that found no space: frees a part of the reserve. False if none is left.
    pub fn release(&mut self, now: Instant, used: u64) -> bool {
        let Some(path) = &self.path else { return false };
        if self.low.is_none() {
            self.low = Some(Low { used });
        }
        self.next_look = Some(now + LOOK);
        if self.held == 0 {
            return false;
        }
        let left = self.held.saturating_sub(self.whole.div_ceil(PARTS));
        match shrink(path, left) {
            Ok(()) => self.held = left,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "failed to free a part of the store's reserve");
                return false;
            }
        }
        let (path, left) = (path.display(), self.held);
        tracing::warn!(
            %path, left,
            "the disk is full: the store uses its reserve; it takes only deletes and updates that hardly enlarge an object"
        );
        true
    }

    /// Makes the reserve whole if there is room, and decides whether the store is still low on space.
    pub fn look(&mut self, now: Instant, used: u64) -> Found {
        if self.next_look.is_none_or(|at| now < at) {
            return Found::Same;
        }
        let Some(path) = self.path.clone() else { return Found::Same };
        let is_whole = match self.complete(&path) {
            Ok(is_whole) => is_whole,
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "failed to make the store's reserve");
                false
            }
        };
        // Pages of removed records are used again.
        let gave_back = |low: &Low| used + 2 * self.whole <= low.used;
        let ends = self.low.as_ref().is_some_and(|low| is_whole || gave_back(low));
        if ends {
            self.low = None;
        }
        self.next_look = match (is_whole, self.low.is_some()) {
            (true, _) => None,
            (false, true) => Some(now + LOOK),
            (false, false) => Some(now + COMPLETE),
        };
        if ends { Found::Room } else { Found::Same }
    }

    /// Whether the reserve is whole, and as much space is free beside it when it had to grow.
    fn complete(&mut self, path: &Path) -> io::Result<bool> {
        let dir = path.parent().unwrap_or(path);
        let (total, free) = (self.room)(dir)?;
        let whole = self.whole.min(total / SHARE);
        if whole < LEAST {
            self.path = None;
            return Ok(true);
        }
        self.whole = whole;
        self.held = held(path, whole);
        if self.held >= whole {
            return Ok(!self.is_low() || free >= whole);
        }
        if free < 2 * whole - self.held {
            return Ok(false);
        }
        allocate(path, whole, self.sync)?;
        self.held = held(path, whole);
        Ok(self.held >= whole)
    }
}

/// The total and the free bytes of the disk of a directory.
pub(super) fn room() -> Room {
    Box::new(|dir| {
        let disk = nix::sys::statvfs::statvfs(dir)?;
        let size = disk.fragment_size();
        Ok((disk.blocks() * size, disk.blocks_available() * size))
    })
}

/// The blocks that the file owns, in bytes, at most `most`: allocation units are larger on some disks.
fn held(path: &Path, most: u64) -> u64 {
    std::fs::metadata(path).map_or(0, |meta| (meta.blocks() * 512).min(meta.len()).min(most))
}

fn shrink(path: &Path, left: u64) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    file.set_len(left)?;
    // Some file systems free the blocks with their next transaction only.
    file.sync_all()
}

fn allocate(path: &Path, bytes: u64, sync: bool) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let length = i64::try_from(bytes).map_err(io::Error::other)?;
    match fallocate(&file, FallocateFlags::empty(), 0, length) {
        Ok(()) => {}
        Err(Errno::EOPNOTSUPP) => fill(&file, bytes)?,
        Err(error) => {
            // A part of it would only take space.
            let undone = file.set_len(0);
            return undone.and(Err(error.into()));
        }
    }
    if sync { file.sync_all() } else { Ok(()) }
}

/// Writes bytes that no file system can compress away.
fn fill(file: &File, bytes: u64) -> io::Result<()> {
    let mut block = [0; 64 << 10];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for at in (0..bytes).step_by(block.len()) {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let rest = usize::try_from(bytes - at).map_or(block.len(), |rest| rest.min(block.len()));
        file.write_all_at(&block[..rest], at)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// A reserve of 4 MiB on a disk whose free space the test says.
    fn small(dir: &Path) -> (Reserve, Arc<AtomicU64>) {
        let free = Arc::new(AtomicU64::new(100 * MIB));
        let said = free.clone();
        let room: Room = Box::new(move |_| Ok((128 * MIB, said.load(Ordering::Relaxed))));
        (Reserve::new(Some(dir), 16 * MIB, true, room), free)
    }

    #[test]
    fn the_reserve_owns_its_blocks_and_is_freed_in_parts() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("reserve");
        let (mut reserve, free) = small(dir.path());
        let mut now = Instant::now();
        assert_eq!(reserve.look(now, 0), Found::Same);
        assert_eq!((reserve.held, held(&path, u64::MAX)), (4 * MIB, 4 * MIB));
        assert_eq!((reserve.next_look(), reserve.growth()), (None, None), "nothing more to do");
        free.store(0, Ordering::Relaxed);
        for (left, growth) in [(3, 1024), (2, 1024), (1, 0), (0, 0)] {
            assert!(reserve.release(now, 50 * MIB));
            assert_eq!(held(&path, u64::MAX), left * MIB);
            assert_eq!(reserve.growth(), Some(growth), "{left} MiB left");
        }
        assert!(!reserve.release(now, 50 * MIB), "nothing is left");
        now += LOOK;
        assert_eq!(reserve.look(now, 50 * MIB), Found::Same);
        // As much must stay free, or the next write would find no space again.
        free.store(7 * MIB, Ordering::Relaxed);
        now += LOOK;
        assert_eq!(reserve.look(now, 50 * MIB), Found::Same);
        free.store(8 * MIB, Ordering::Relaxed);
        now += LOOK;
        assert_eq!(reserve.look(now, 50 * MIB), Found::Room);
        assert_eq!((reserve.growth(), held(&path, u64::MAX)), (None, 4 * MIB));
    }

    #[test]
    fn removed_records_are_room_too() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut reserve, free) = small(dir.path());
        let now = Instant::now();
        reserve.look(now, 0);
        free.store(0, Ordering::Relaxed);
        assert!(reserve.release(now, 50 * MIB));
        assert_eq!(reserve.look(now + LOOK, 43 * MIB), Found::Same);
        assert_eq!(reserve.look(now + 2 * LOOK, 42 * MIB), Found::Room);
        assert_eq!(reserve.next_look(), Some(now + 2 * LOOK + COMPLETE), "to complete it later");
    }

    #[test]
    fn a_tiny_disk_has_none() {
        let dir = tempfile::tempdir().expect("a directory");
        let room: Room = Box::new(|_| Ok((4 * MIB, 4 * MIB)));
        let mut reserve = Reserve::new(Some(dir.path()), 16 * MIB, true, room);
        assert_eq!(reserve.look(Instant::now(), 0), Found::Same);
        assert!(!dir.path().join("reserve").exists());
        assert!(!reserve.release(Instant::now(), 0));
    }

    #[test]
    fn bytes_are_written_where_nothing_can_be_allocated() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("reserve");
        fill(&File::create(&path).expect("a file"), MIB + 10).expect("written");
        assert_eq!(std::fs::metadata(&path).expect("it is there").len(), MIB + 10);
    }
}
