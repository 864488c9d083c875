//! Container logs are rotated before they fill the disk.
//!
//! ```text
//! 0.log ─ at 10 MiB ─► 0.log.20260101-000000   and a new 0.log, which the runtime opens
//!                      the oldest go when there are more than five in all
//! ```
//!
//! In: running containers. Out: renamed and deleted files, a word to the runtime.
//! Upstream: `pkg/kubelet/logs/container_log_manager.go`, every ten seconds. Deviation: rotated
//! files stay uncompressed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::context::Context;
use crate::names;
use crate::observed::State;
use crate::pods::PodSet;

const INTERVAL: Duration = Duration::from_secs(10);

/// Looks at all logs for ever.
pub async fn keep(context: Arc<Context>, pods: Arc<PodSet>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        for view in pods.views() {
            let Some(pod) = &view.pod else { continue };
            let home = names::log_directory(&context.config.log_dir, pod);
            for container in view.observed.containers.iter().filter(|c| c.state == State::Running) {
                let path = home.join(&container.log_path);
                let size = fs::metadata(&path).map_or(0, |meta| meta.len());
                if size < context.config.log_max_bytes {
                    continue;
                }
                if let Err(error) = rotate(&path, context.config.log_max_files) {
                    tracing::warn!(log = %path.display(), %error, "a log is not rotated");
                    continue;
                }
                if let Err(error) = context.runtime.reopen_container_log(&container.id).await {
                    tracing::warn!(log = %path.display(), %error, "a log is not opened again");
                }
            }
        }
    }
}

/// Renames the log and deletes the oldest, so that at most `keep` files are left with the new one.
fn rotate(path: &Path, keep: usize) -> io::Result<()> {
    let stamp = base::clock::now().strftime("%Y%m%d-%H%M%S");
    let mut target = path.as_os_str().to_owned();
    target.push(format!(".{stamp}"));
    fs::rename(path, &target)?;
    let mut rotated = rotated_files(path)?;
    rotated.sort();
    let spare = rotated.len().saturating_sub(keep.saturating_sub(1));
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

    #[test]
    fn the_oldest_go() {
        let dir = tempfile::tempdir().expect("a directory");
        let log = dir.path().join("0.log");
        for stamp in ["20200101-000000", "20210101-000000", "20220101-000000"] {
            fs::write(dir.path().join(format!("0.log.{stamp}")), stamp).expect("written");
        }
        fs::write(&log, "now").expect("written");
        rotate(&log, 3).expect("rotated");
        let mut left = rotated_files(&log).expect("a listing");
        left.sort();
        assert_eq!(left.len(), 2);
        assert!(left[0].ends_with("0.log.20220101-000000") && !log.exists());
    }
}
