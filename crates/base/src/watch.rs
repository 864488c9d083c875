//! Tells of changes in a directory, by inotify. Files are followed by their directories: they are
//! replaced by rename, and what an orchestrator mounts is a link that is switched.
//!
//! In: a path. Out: a future for each change, without what it was: callers look at what they are about.
//! Invariant: changes between two calls of [`FileWatch::changed`] count as one, and none is lost.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::unix::AsyncFd;

/// One watched directory.
pub struct FileWatch(AsyncFd<Bare>);

/// For the executor, which wants the bare number.
struct Bare(Inotify);

impl AsRawFd for Bare {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl FileWatch {
    /// Of the file's directory, which must exist; the file need not.
    pub fn open(file: &Path) -> std::io::Result<Self> {
        Self::directory(directory_of(file))
    }

    /// Files that come, go, are replaced, or were written and closed.
    pub fn directory(directory: &Path) -> std::io::Result<Self> {
        let flags = AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE;
        Self::of(directory, flags)
    }

    /// As [`directory`](Self::directory), and whatever is written to a file that stays open.
    pub fn directory_and_writes(directory: &Path) -> std::io::Result<Self> {
        let flags = AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE;
        Self::of(directory, flags)
    }

    fn of(directory: &Path, flags: AddWatchFlags) -> std::io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        inotify.add_watch(directory, flags)?;
        // SAFETY: `Bare` owns its descriptor, which stays the same and open until it is dropped.
        let registered = unsafe { AsyncFd::register(Bare(inotify)) };
        registered.map(Self).map_err(std::io::Error::from)
    }

    /// Resolves after a change.
    pub async fn changed(&self) {
        if let Ok(mut ready) = self.0.readable().await {
            // Reads until it would block: remaining events would not wake the reader again.
            while self.0.get_ref().0.read_events().is_ok_and(|events| !events.is_empty()) {}
            ready.clear_ready();
        }
    }
}

fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::time::Duration;

    use super::*;

    async fn soon(what: &str, watch: &FileWatch) {
        let told = tokio::time::timeout(Duration::from_secs(30), watch.changed()).await;
        told.unwrap_or_else(|_| panic!("{what} is not noticed"));
    }

    /// A directory of its own, gone with the test.
    struct Scratch(std::path::PathBuf);

    impl Scratch {
        fn new() -> Self {
            let path = std::env::temp_dir().join(format!("watch-{}", crate::rng::uuid()));
            std::fs::create_dir(&path).expect("a directory");
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[tokio::test]
    async fn changes_are_noticed() {
        let scratch = Scratch::new();
        let path = scratch.0.join("file");
        let watch = FileWatch::open(&path).expect("inotify");
        for content in ["one", "two"] {
            let other = scratch.0.join("other");
            std::fs::write(&other, content).expect("written");
            std::fs::rename(&other, &path).expect("replaced");
            soon("a replaced file", &watch).await;
        }
        // More events than one read takes are one change, and leave nothing behind.
        for index in 0..1000 {
            std::fs::write(scratch.0.join(format!("a-long-name-of-a-file-{index}")), "")
                .expect("written");
        }
        soon("files in great number", &watch).await;
        let nothing = tokio::time::timeout(Duration::ZERO, watch.changed()).await;
        assert!(nothing.is_err(), "all of it was one change");
        std::fs::remove_file(&path).expect("removed");
        soon("a file that is gone", &watch).await;

        let writes = FileWatch::directory_and_writes(&scratch.0).expect("inotify");
        let mut open = std::fs::File::create(&path).expect("made");
        soon("a new file", &writes).await;
        open.write_all(b"more").expect("written");
        soon("a write to a file that stays open", &writes).await;
        assert!(FileWatch::directory(Path::new("/no/such/directory")).is_err());
    }
}
