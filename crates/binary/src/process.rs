//! What every long-running command does as a process: a data directory, words for the person at the
//! terminal, an end when it is asked for.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use base::task::{Stop, Tasks};

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
        signal = termination() => Ok(signal?),
        _ = broken => bail!("a part of the server broke; see the log above"),
    }
}

/// Resolves at Ctrl-C or SIGTERM.
pub async fn termination() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}
