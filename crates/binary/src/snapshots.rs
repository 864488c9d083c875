//! Scheduled snapshots: `--snapshot-schedule-cron`, `--snapshot-retention`, `--snapshot-dir`.
//!
//! In: a store. Out: files in a directory; only the newest are kept. A failed snapshot is logged, and the
//! schedule continues.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::task::Tasks;
use cli::snapshot;
use machinery::cron::Schedule;
use store::Store;

#[derive(clap::Args, Clone, Debug)]
pub struct Flags {
    /// Save a snapshot of the state at these times (UTC), for example "0 */12 * * *"
    #[arg(long, value_name = "CRON")]
    pub snapshot_schedule_cron: Option<String>,
    /// How many scheduled snapshots are kept
    #[arg(long, default_value_t = 5, value_name = "COUNT")]
    pub snapshot_retention: usize,
    /// Directory of snapshots [default: <data-dir>/snapshots]
    #[arg(long, value_name = "DIR")]
    pub snapshot_dir: Option<PathBuf>,
}

impl Flags {
    pub fn start(
        &self,
        store: Arc<dyn Store>,
        data_dir: &Path,
        tasks: &Tasks,
    ) -> anyhow::Result<()> {
        let Some(text) = &self.snapshot_schedule_cron else { return Ok(()) };
        let schedule = Schedule::parse(text)
            .map_err(|why| anyhow::anyhow!("--snapshot-schedule-cron {text:?}: {why}"))?;
        let directory = self.snapshot_dir.clone().unwrap_or(snapshot::directory(data_dir));
        let keep = self.snapshot_retention.max(1);
        tasks.spawn("snapshots", async move {
            while let Some(at) = schedule.next(base::clock::now()) {
                let wait = base::clock::now().duration_until(at).unsigned_abs();
                tokio::time::sleep(wait).await;
                match save(&*store, &directory, keep).await {
                    Ok(file) => tracing::info!(file = %file.display(), "snapshot saved"),
                    Err(error) => {
                        tracing::error!(error = format!("{error:#}"), "failed to save a snapshot");
                    }
                }
            }
        });
        Ok(())
    }
}

async fn save(store: &dyn Store, directory: &Path, keep: usize) -> anyhow::Result<PathBuf> {
    let file = directory.join(snapshot::file_name(snapshot::PREFIX, base::clock::now()));
    snapshot::write(store, &file).await?;
    snapshot::prune(directory, snapshot::PREFIX, keep)?;
    Ok(file)
}
