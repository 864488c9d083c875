//! Taking over what is there: the state directories, and shims that live.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cri::{ContainerConfig, Result};
use prost::Message;

use super::Embedded;
use super::containers::{ContainerEntry, ContainerRecord, Phase, STARTED};
use crate::files;
use crate::machine;
use crate::shim::{self, ExitRecord, StartedRecord, Wait};

const SHIM_START: Duration = Duration::from_secs(60);

impl Embedded {
    pub(super) async fn adopt(&self) -> Result<()> {
        for id in names(&self.0.layout.sandboxes())? {
            if let Err(error) = self.adopt_sandbox(&id).await {
                tracing::warn!(sandbox = id, %error, "a sandbox could not be read back");
            }
        }
        let boot = machine::boot_id();
        let mut ended_with_the_machine = 0;
        for id in names(&self.0.layout.containers())? {
            match self.adopt_container(&id, boot.as_deref()).await {
                Ok(restarted) => ended_with_the_machine += usize::from(restarted),
                Err(error) => {
                    tracing::warn!(container = id, %error, "a container could not be read back");
                }
            }
        }
        if ended_with_the_machine > 0 {
            tracing::info!(
                containers = ended_with_the_machine,
                "the machine was restarted: its containers ended with it"
            );
        }
        if !self.0.network.borrow().cidrs.is_empty() {
            self.adopt_links().await;
            // The next sandbox tries again.
            if let Err(error) = self.0.host_ports.replace(self.host_ports()).await {
                tracing::warn!(%error, "host ports are not as they should be");
            }
        }
        let known: Vec<String> = self.table().sandboxes.keys().cloned().collect();
        self.0.ipam.keep_only(|sandbox| known.iter().any(|id| id == sandbox))?;
        // Layers that a container kept, and downloads that were cut short.
        let images = self.0.images.clone();
        super::blocking(move || images.collect()).await??;
        Ok(())
    }

    /// True when it ran, and ended with the machine.
    async fn adopt_container(&self, id: &str, boot: Option<&str>) -> Result<bool> {
        let directory = self.0.layout.container(id);
        let record: Option<ContainerRecord> = files::read_json(&directory.join("state.json"))?;
        let config = files::read(&directory.join("config.pb"))?;
        let config = config.and_then(|bytes| ContainerConfig::decode(bytes.as_slice()).ok());
        let (Some(record), Some(config)) = (record, config) else {
            // Its creation was cut short; nobody knows its id.
            return self.remove_files(id).await.map(|()| false);
        };
        let exit: Option<ExitRecord> = files::read_json(&directory.join("exit.json"))?;
        let phase = exit.map_or(Phase::Created, Phase::Exited);
        let entry = Arc::new(ContainerEntry::new(id.to_owned(), record, config, phase));
        self.table().containers.insert(id.to_owned(), entry.clone());
        let started = files::read(&directory.join(STARTED))?;
        let Some(started) = started.filter(|_| *entry.phase.borrow() == Phase::Created) else {
            return Ok(false);
        };
        if machine::restarted_since(&String::from_utf8_lossy(&started), boot) {
            self.lost(&entry, "the machine was restarted while the container ran")?;
            return Ok(true);
        }
        self.adopt_shim(&entry).await?;
        Ok(false)
    }

    /// A shim was started and no end is on record: it lives, it is starting its container, or it
    /// died without a word.
    async fn adopt_shim(&self, entry: &Arc<ContainerEntry>) -> Result<()> {
        let client = self.client(entry);
        let Some(wait) = self.reach_shim(entry).await else {
            return self.settle(entry, None).await;
        };
        // Answered by the loop that runs after the start: the start's record is there then.
        if client.status().await.is_err() {
            let exit = wait.exit().await;
            return self.settle(entry, exit).await;
        }
        let path = self.0.layout.run_container(&entry.id).join("started.json");
        let started: Option<StartedRecord> = files::read_json(&path)?;
        let (pid, started_at) = started.map_or((0, 0), |s| (s.pid, s.started_at));
        entry.phase.send_replace(Phase::Running { pid, started_at });
        self.supervise(entry.clone(), Some(wait));
        Ok(())
    }
}

impl Embedded {
    /// A connection to the shim, unless it is dead. One that was started a moment ago, by a backend
    /// that was killed then, may not listen yet.
    async fn reach_shim(&self, entry: &ContainerEntry) -> Option<Wait> {
        let client = self.client(entry);
        let run = self.0.layout.run_container(&entry.id);
        let deadline = tokio::time::Instant::now() + SHIM_START;
        loop {
            if let Ok(wait) = client.wait().await {
                return Some(wait);
            }
            let pid = shim::find(&run)?;
            if tokio::time::Instant::now() > deadline {
                // It has done nothing for minutes.
                // SAFETY: a plain system call.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                return None;
            }
            // A socket that is not there sends no event when it comes.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn names(directory: &Path) -> std::io::Result<Vec<String>> {
    let entries = std::fs::read_dir(directory)?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}
