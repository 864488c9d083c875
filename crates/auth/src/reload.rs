//! Follows a file that may change while the server runs, and counts its reloads.
//!
//! In: a path. Out: the file's text whenever it changed. inotify reports changes in the file's directory
//! (files are mostly replaced, not written, and projected volumes swap a link above them); like upstream,
//! the file is also read once a minute.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use base::metrics::Family;
use base::watch::FileWatch;
use sha2::{Digest, Sha256};

/// The reloads of one kind of file.
pub struct Reloads {
    total: Family,
    last: Family,
}

const RELOAD_LABELS: &[&str] = &["apiserver_id_hash", "status"];

pub static AUTHENTICATION: Reloads = Reloads {
    total: Family::counter(
        "apiserver_authentication_config_controller_automatic_reloads_total",
        "[BETA] Total number of automatic reloads of authentication configuration split by status and apiserver identity.",
        RELOAD_LABELS,
    ),
    last: Family::gauge(
        "apiserver_authentication_config_controller_automatic_reload_last_timestamp_seconds",
        "[BETA] Timestamp of the last automatic reload of authentication configuration split by status and apiserver identity.",
        RELOAD_LABELS,
    ),
};

pub static AUTHORIZATION: Reloads = Reloads {
    total: Family::counter(
        "apiserver_authorization_config_controller_automatic_reloads_total",
        "[BETA] Total number of automatic reloads of authorization configuration split by status and apiserver identity.",
        RELOAD_LABELS,
    ),
    last: Family::gauge(
        "apiserver_authorization_config_controller_automatic_reload_last_timestamp_seconds",
        "[BETA] Timestamp of the last automatic reload of authorization configuration split by status and apiserver identity.",
        RELOAD_LABELS,
    ),
};

/// The hash of the server's identity, which the metrics show.
static SERVER: OnceLock<String> = OnceLock::new();

/// Names this server, once.
pub fn set_server(identity: &str) {
    let hash = Sha256::digest(identity.as_bytes());
    let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    // A process has one server, except in tests.
    let _ = SERVER.set(format!("sha256:{hash}"));
}

impl Reloads {
    pub fn note(&self, is_done: bool) {
        let server = SERVER.get().map_or("", String::as_str);
        let labels = [server, if is_done { "success" } else { "failure" }];
        self.total.count(&labels);
        self.last.set(&labels, base::clock::now().as_second() as f64);
    }
}

pub fn encode_metrics(out: &mut String) {
    for reloads in [&AUTHENTICATION, &AUTHORIZATION] {
        base::metrics::encode(&[&reloads.last, &reloads.total], out);
    }
}

const LOOK_ANYWAY: Duration = Duration::from_secs(60);
/// Editors write in steps: wait until the changes settle.
const SETTLE: Duration = Duration::from_millis(50);

pub struct Followed {
    path: PathBuf,
    /// The last text.
    text: String,
    /// `None` if the kernel has no watches left.
    events: Option<FileWatch>,
}

impl Followed {
    /// Opens and reads the file for the first time.
    pub fn open(path: &Path) -> std::io::Result<(Self, String)> {
        // The watch comes first, so that no change is missed.
        let events = FileWatch::open(path).ok();
        let text = std::fs::read_to_string(path)?;
        Ok((Self { path: path.to_path_buf(), text: text.clone(), events }, text))
    }

    /// Resolves when the file's text has changed.
    pub async fn changed(&mut self) -> String {
        loop {
            let told = async {
                match &self.events {
                    Some(events) => events.changed().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = told => tokio::time::sleep(SETTLE).await,
                () = tokio::time::sleep(LOOK_ANYWAY) => {}
            }
            match std::fs::read_to_string(&self.path) {
                Ok(text) if text != self.text => {
                    self.text.clone_from(&text);
                    return text;
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(path = %self.path.display(), %error, "failed to read the file again");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_replaced_file_is_detected() {
        let root = tempfile::tempdir().expect("a directory");
        let path = root.path().join("config");
        std::fs::write(&path, "one").expect("writes");
        let (mut followed, text) = Followed::open(&path).expect("opens");
        assert_eq!(text, "one");
        std::fs::write(&path, "two").expect("writes");
        let text = testkit::wait::soon("a change", followed.changed()).await;
        assert_eq!(text, "two");
        std::fs::write(root.path().join("new"), "three").expect("writes");
        std::fs::rename(root.path().join("new"), &path).expect("replaces");
        let text = testkit::wait::soon("a change", followed.changed()).await;
        assert_eq!(text, "three");
    }
}
