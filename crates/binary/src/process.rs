//! What every long-running command does as a process: a data directory, words for the person at the
//! terminal, an end when it is asked for, a runtime for what the API must not wait for.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use base::task::{Stop, Tasks};

pub use crate::signals::termination;

/// After this long a start is over.
const SETTLED: Duration = Duration::from_secs(20);

/// Once, when caches are filled and the node is Ready.
pub fn give_back_what_the_start_needed(tasks: &Tasks) {
    tasks.spawn("memory", async {
        tokio::time::sleep(SETTLED).await;
        runtime::memory::trim();
    });
}

/// Progress for the person at the terminal.
pub fn say(text: &str) {
    println!("{text}");
}

/// Makes the directory, private to its owner, and returns its absolute path.
pub fn prepare_data_dir(wanted: &Path) -> anyhow::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let display = wanted.display();
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(wanted).with_context(|| {
        format!("cannot make the data directory {display}; choose another with --data-dir")
    })?;
    let path = wanted.canonicalize().with_context(|| format!("cannot read {display}"))?;
    let pid = std::process::id().to_string();
    std::fs::write(path.join("decapod.pid"), pid)
        .with_context(|| format!("cannot write to {display}"))?;
    Ok(path)
}

/// Until Ctrl-C, SIGTERM, or the end of a task that must not end, in any of the groups.
pub async fn wait_for_signal(groups: &[&Tasks]) -> anyhow::Result<()> {
    let signals: Vec<Stop> = groups.iter().map(|group| group.stop_signal()).collect();
    let broken = futures::future::select_all(signals.iter().map(|one| Box::pin(one.wait())));
    tokio::select! {
        () = termination() => Ok(()),
        _ = broken => bail!("a part of the server broke; see the log above"),
    }
}

/// A runtime of lower priority: its threads get a third of what others get, where there is not enough for
/// all. Given back at the end, without waiting for what is still running there.
pub struct Background(Option<tokio::runtime::Runtime>);

impl Background {
    /// Of threads below those of the API.
    const NICENESS: i32 = 5;

    pub fn start(name: &str) -> std::io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.enable_all().worker_threads(crate::workers()).thread_stack_size(crate::STACK);
        builder.thread_name(name).on_thread_start(|| {
            if let Err(error) = base::platform::yield_to_others(Self::NICENESS) {
                tracing::debug!(%error, "a thread keeps its priority");
            }
        });
        Ok(Self(Some(builder.build()?)))
    }

    pub fn handle(&self) -> tokio::runtime::Handle {
        self.0.as_ref().expect("it is there until the end").handle().clone()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
