//! Tells of changes of a file, by inotify on its directory: files are replaced by rename, and what
//! an orchestrator mounts is a link that is switched.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::unix::AsyncFd;

/// One watched directory. Changes between two calls of [`FileWatch::changed`] count as one.
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
        let directory = match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        Self::directory(directory)
    }

    pub fn directory(directory: &Path) -> std::io::Result<Self> {
        let flags = AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE;
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        inotify.add_watch(directory, flags)?;
        // SAFETY: `Bare` owns its descriptor, which stays the same and open until it is dropped.
        let registered = unsafe { AsyncFd::register(Bare(inotify)) };
        registered.map(Self).map_err(std::io::Error::from)
    }

    /// Resolves after a change in the directory. Which file it was does not matter: callers look at
    /// what they are about.
    pub async fn changed(&self) {
        if let Ok(mut ready) = self.0.readable().await {
            // Until it would block: what is left behind would never wake anybody.
            while self.0.get_ref().0.read_events().is_ok_and(|events| !events.is_empty()) {}
            ready.clear_ready();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_replaced_file_is_noticed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        let watch = FileWatch::open(&path).expect("inotify");
        for content in ["one", "two"] {
            crate::write_private(&path, content.as_bytes(), 0o600).expect("written");
            testkit::wait::soon("it is noticed", watch.changed()).await;
        }
    }
}
