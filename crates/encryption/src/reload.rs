//! Follows the configuration file: changes take effect while the server runs.
//!
//! In: a path; inotify on its directory. Out: [`Encryption`] with the file's current content. An unusable
//! file is logged once, and the previous configuration stays in use.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::watch::FileWatch;

use crate::{Encryption, hash};

impl Encryption {
    /// Follows the file; never returns. `may_go`: a missing file disables encryption; otherwise it is an
    /// error, and the last content stays in use.
    pub async fn follow(self: Arc<Self>, path: PathBuf, may_go: bool) {
        let watch = match FileWatch::open(&path) {
            Ok(watch) => watch,
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "failed to watch the encryption configuration: changes will have no effect");
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
                    tracing::info!(
                        "the encryption configuration was removed, nothing is encrypted any more"
                    );
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
                tracing::info!(hash = new, "loaded the changed encryption configuration");
                refused.clear();
                self.reloads.good.fetch_add(1, Ordering::Relaxed);
                self.reloads.last_good.store(now, Ordering::Relaxed);
            }
            Err(error) => {
                tracing::error!(path = %path.display(), %error, "failed to load the changed encryption configuration, the previous one stays in use");
                *refused = new;
                self.reloads.bad.fetch_add(1, Ordering::Relaxed);
                self.reloads.last_bad.store(now, Ordering::Relaxed);
            }
        }
    }
}
