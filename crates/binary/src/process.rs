//! Process handling of every long-running command: a data directory, messages for the user at the
//! terminal, a clean end on a signal, a runtime for work that the API must not wait for.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use base::task::{Stop, Tasks};

pub use crate::signals::termination;

/// After this time a start is complete.
const SETTLED: Duration = Duration::from_secs(20);

/// Frees memory once, when caches are filled and the node is Ready.
pub fn give_back_what_the_start_needed(tasks: &Tasks) {
    tasks.spawn("memory", async {
        tokio::time::sleep(SETTLED).await;
        runtime::memory::trim();
    });
}

/// Prints progress for the user at the terminal.
pub fn say(text: &str) {
    println!("{text}");
}

/// An error and its causes; each text appears once.
pub fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        match text.is_empty() {
            true => text = cause,
            false if text.ends_with(&cause) => {}
            false => text = format!("{text}: {cause}"),
        }
    }
    text
}

/// A data directory that only this process uses.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    /// `decapod.pid`, locked until the process ends.
    _lock: File,
}

impl Deref for DataDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

/// Creates the directory, private to its owner, and locks it for this process.
pub fn prepare_data_dir(wanted: &Path) -> anyhow::Result<DataDir> {
    use std::os::unix::fs::DirBuilderExt;
    let display = wanted.display();
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(wanted).with_context(|| {
        format!("cannot make the data directory {display}; choose another with --data-dir")
    })?;
    let path = wanted.canonicalize().with_context(|| format!("cannot read {display}"))?;
    let lock = lock(&path.join("decapod.pid"), display)?;
    Ok(DataDir { path, _lock: lock })
}

/// The pid file names the owner of the directory, so only the owner writes it.
fn lock(path: &Path, place: impl std::fmt::Display) -> anyhow::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).open(path);
    let file = file.with_context(|| format!("cannot write to {place}"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let pid = std::fs::read_to_string(path).unwrap_or_default();
            bail!(
                "the data directory {place} is in use by another process (pid {}); stop it, or choose another directory with --data-dir",
                pid.trim()
            );
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    let pid = std::process::id().to_string();
    let written =
        file.write_all_at(pid.as_bytes(), 0).and_then(|()| file.set_len(pid.len() as u64));
    match written {
        // Other programs read it to find this process; this process does not need it.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            tracing::warn!(%error, path = %path.display(), "failed to write the pid file");
        }
        other => other.with_context(|| format!("cannot write to {place}"))?,
    }
    Ok(file)
}

/// Waits for Ctrl-C, SIGTERM, or the end of a task that must not end, in any of the groups.
pub async fn wait_for_signal(groups: &[&Tasks]) -> anyhow::Result<()> {
    let signals: Vec<Stop> = groups.iter().map(|group| group.stop_signal()).collect();
    let broken = futures::future::select_all(signals.iter().map(|one| Box::pin(one.wait())));
    tokio::select! {
        () = termination() => Ok(()),
        _ = broken => bail!("a task of the server ended unexpectedly; see the log above"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_cause_is_said_twice() {
        let io = || io::Error::from_raw_os_error(2);
        let pki = pki::Error::File { path: "/x".into(), source: io() };
        let error = anyhow::Error::from(pki).context("cannot write the kubeconfig");
        let text = "cannot write the kubeconfig: /x: No such file or directory (os error 2)";
        assert_eq!(told(&error), text);
        assert_eq!(told(&anyhow::Error::from(io()).context("a")), format!("a: {}", io()));
        assert_eq!(told(&anyhow::anyhow!("alone")), "alone");
    }

    #[test]
    fn a_data_directory_has_one_process_and_the_pid_file_names_it() {
        let root = tempfile::tempdir().expect("a directory");
        let own = std::process::id().to_string();
        std::fs::write(root.path().join("decapod.pid"), "1234567890").expect("written");
        let first = prepare_data_dir(root.path()).expect("free");
        let noted = || std::fs::read_to_string(root.path().join("decapod.pid")).expect("there");
        assert_eq!(noted(), own);
        let why = told(&prepare_data_dir(root.path()).expect_err("it is taken"));
        assert!(why.contains("in use") && why.contains(&format!("pid {own}")), "{why}");
        assert_eq!(noted(), own);
        drop(first);
        prepare_data_dir(root.path()).expect("free again");
    }
}
