//! Rotates container logs before they fill the disk.
//!
//! ```text
//! 0.log ─ at 10 MiB ─► 0.log.20260101-000000   and a new 0.log, which the runtime opens
//!                      the oldest are deleted when there are more than five in all
//! ```
//!
//! In: running containers. Out: renamed and deleted files, calls of ReopenContainerLog.
//! Invariant: after each round, or in the next one, a running container's log has its name: a log that
//! the runtime failed to reopen is renamed back, because the container still writes there.
//! Cost: each round (10 s by default) looks at the size of each running container's log.
//! Upstream: `pkg/kubelet/logs/container_log_manager.go`. Deviation: rotated
//! files stay uncompressed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures::StreamExt;

use crate::names;
use crate::node::upkeep::Upkeep;
use crate::pod::observed::State;

/// Rotates logs; never returns.
pub async fn keep(own: Arc<Upkeep>) {
    let config = &own.node.config;
    let limits = (config.log_max_bytes, config.log_max_files);
    loop {
        tokio::time::sleep(config.log_interval).await;
        let mut logs = vec![];
        for view in own.pods.views() {
            let Some(pod) = &view.pod else { continue };
            let home = names::log_directory(&config.log_dir, pod);
            let running = view.observed.containers.iter().filter(|c| c.state == State::Running);
            logs.extend(running.map(|c| (home.join(&c.log_path), c.id.clone())));
        }
        let rotate = async |(path, id): (PathBuf, String)| {
            let reopen = || own.runtime.reopen_container_log(&id);
            if let Err(error) = look_after(&path, limits, reopen).await {
                tracing::warn!(log = %path.display(), %error, "failed to rotate the log");
            }
        };
        futures::stream::iter(logs).for_each_concurrent(config.log_workers, rotate).await;
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Files(#[from] io::Error),
    #[error("the runtime failed to reopen the log: {0}")]
    Reopen(#[from] cri::Error),
}

/// Rotates the log if it has `max_bytes`; `reopen` makes the runtime write to a new file.
async fn look_after<F: Future<Output = cri::Result<()>>>(
    path: &Path,
    (max_bytes, max_files): (u64, usize),
    reopen: impl Fn() -> F,
) -> Result<(), Error> {
    let size = match fs::metadata(path) {
        Ok(meta) => meta.len(),
        // Upstream: an earlier rotation may have been interrupted.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(reopen().await?),
        Err(error) => return Err(error.into()),
    };
    if size < max_bytes {
        return Ok(());
    }
    remove_oldest(path, max_files)?;
    let rotated = rotated_name(path);
    fs::rename(path, &rotated)?;
    if let Err(error) = reopen().await {
        // The container still writes to the rotated file, which must get its name back.
        if !path.exists() {
            fs::rename(&rotated, path)?;
        }
        return Err(error.into());
    }
    Ok(())
}

fn rotated_name(path: &Path) -> PathBuf {
    let stamp = base::clock::now().strftime("%Y%m%d-%H%M%S");
    let mut target = path.as_os_str().to_owned();
    target.push(format!(".{stamp}"));
    target.into()
}

/// Deletes the oldest files, so that at most `keep` are left besides the log and its predecessor.
fn remove_oldest(path: &Path, keep: usize) -> io::Result<()> {
    let mut rotated = rotated_files(path)?;
    rotated.sort_unstable();
    let spare = rotated.len().saturating_sub(keep.saturating_sub(2));
    for old in rotated.into_iter().take(spare) {
        fs::remove_file(old)?;
    }
    Ok(())
}

/// `0.log.<stamp>` beside `0.log`; the stamps sort by age.
fn rotated_files(path: &Path) -> io::Result<Vec<PathBuf>> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(vec![]) };
    let prefix = format!("{}.", name.to_string_lossy());
    let entries = fs::read_dir(dir)?.flatten().map(|entry| entry.path());
    let is_rotated = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
    };
    Ok(entries.filter(is_rotated).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rotates a log of three bytes whose limit is one.
    async fn rotate(log: &Path, runtime: impl Fn() -> cri::Result<()>) -> Result<(), Error> {
        look_after(log, (1, 3), || std::future::ready(runtime())).await
    }

    #[tokio::test]
    async fn a_log_that_is_not_reopened_keeps_its_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("0.log");
        fs::write(&log, "now").expect("written");
        let busy = || Err(cri::Error::Unavailable("busy".into()));
        let error = rotate(&log, busy).await.expect_err("it is said");
        assert!(error.to_string().contains("busy"), "{error}");
        assert_eq!(fs::read_to_string(&log).expect("it is there"), "now");
        assert_eq!(rotated_files(&log).expect("a listing"), Vec::<PathBuf>::new());
        // The runtime opened the new file and then failed: both files are kept.
        let late = || {
            fs::write(&log, "new").expect("written");
            busy()
        };
        rotate(&log, late).await.expect_err("it is said");
        assert_eq!(fs::read_to_string(&log).expect("it is there"), "new");
        assert_eq!(rotated_files(&log).expect("a listing").len(), 1);
        // An earlier kubelet was killed during a rotation.
        fs::remove_file(&log).expect("removed");
        let open = || {
            fs::write(&log, "").expect("written");
            Ok(())
        };
        rotate(&log, open).await.expect("opened");
        assert!(log.exists());
    }

    #[tokio::test]
    async fn the_oldest_are_deleted() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("0.log");
        for stamp in ["20200101-000000", "20210101-000000", "20220101-000000"] {
            fs::write(dir.path().join(format!("0.log.{stamp}")), stamp).expect("written");
        }
        fs::write(&log, "now").expect("written");
        rotate(&log, || Ok(())).await.expect("rotated");
        let mut left = rotated_files(&log).expect("a listing");
        left.sort();
        assert_eq!(left.len(), 2);
        assert!(left[0].ends_with("0.log.20220101-000000") && !log.exists());
    }
}
