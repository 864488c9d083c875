//! A configuration file that is followed: changes are taken into use while the server runs.
//!
//! In: a path; inotify on its directory. Out: [`Encryption`] with the file's present content. A file
//! that cannot be used is told about once, and the one before stays in use.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::watch::FileWatch;

use crate::{Encryption, hash};

impl Encryption {
    /// Follows the file for ever. `may_go`: that the file is not there means that nothing is to be
    /// encrypted; otherwise it is a mistake, and the last content stays in use.
    pub async fn follow(self: Arc<Self>, path: PathBuf, may_go: bool) {
        let watch = match FileWatch::open(&path) {
            Ok(watch) => watch,
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "changes of the encryption configuration will not be noticed");
                return;
            }
        };
        let mut refused = String::new();
        loop {
            self.refresh(&path, may_go, &mut refused).await;
            watch.changed().await;
        }
    }

    async fn refresh(&self, path: &Path, may_go: bool, refused: &mut String) {
        let content = match std::fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && may_go => {
                if !self.hash().is_empty() {
                    tracing::info!("the encryption configuration is gone, nothing is encrypted");
                    self.unload();
                }
                return;
            }
            other => other.unwrap_or_default(),
        };
        let new = hash(&content);
        if new == self.hash() || new == *refused {
            return;
        }
        let now = base::clock::now().as_second();
        match self.load(path).await {
            Ok(()) => {
                tracing::info!(hash = new, "took a changed encryption configuration into use");
                refused.clear();
                self.reloads.good.fetch_add(1, Ordering::Relaxed);
                self.reloads.last_good.store(now, Ordering::Relaxed);
            }
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "the changed encryption configuration cannot be used, the one before stays");
                *refused = new;
                self.reloads.bad.fetch_add(1, Ordering::Relaxed);
                self.reloads.last_bad.store(now, Ordering::Relaxed);
            }
        }
    }
}
