//! Takes over the state of an earlier process: the state directories and the living shims.

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
                tracing::warn!(sandbox = id, %error, "failed to restore a sandbox");
            }
        }
        let boot = machine::boot_id();
        let mut ended_with_the_machine = 0;
        for id in names(&self.0.layout.containers())? {
            match self.adopt_container(&id, boot.as_deref()).await {
                Ok(restarted) => ended_with_the_machine += usize::from(restarted),
                Err(error) => {
                    tracing::warn!(container = id, %error, "failed to restore a container");
                }
            }
        }
        if ended_with_the_machine > 0 {
            tracing::info!(
                containers = ended_with_the_machine,
                "the machine was restarted: its containers ended with it"
            );
        }
        if !self.0.network.borrow().cidrs.is_empty() || !self.table().sandboxes.is_empty() {
            self.adopt_links().await;
            // Creating the next sandbox writes the host ports again.
            if let Err(error) = self.0.host_ports.replace(self.host_ports()).await {
                tracing::warn!(%error, "failed to update the host port rules");
            }
        }
        let known: Vec<String> = self.table().sandboxes.keys().cloned().collect();
        self.0.ipam.keep_only(|sandbox| known.iter().any(|id| id == sandbox))?;
        // Removes layers that only a deleted container used, and interrupted downloads.
        let images = self.0.images.clone();
        super::blocking(move || images.collect()).await??;
        Ok(())
    }

    /// True when the container ran until the machine restarted.
    async fn adopt_container(&self, id: &str, boot: Option<&str>) -> Result<bool> {
        let directory = self.0.layout.container(id);
        let record: Option<ContainerRecord> = files::read_json(&directory.join("state.json"))?;
        let config = files::read(&directory.join("config.pb"))?;
        let config = config.and_then(|bytes| ContainerConfig::decode(bytes.as_slice()).ok());
        let (Some(record), Some(config)) = (record, config) else {
            // Its creation was interrupted before the kubelet got its id.
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

    /// Handles a container whose shim was started and that has no exit record. Its shim runs, is
    /// starting the container, or died without writing the record.
    async fn adopt_shim(&self, entry: &Arc<ContainerEntry>) -> Result<()> {
        let client = self.client(entry);
        let Some(wait) = self.reach_shim(entry).await else {
            return self.settle(entry, None).await;
        };
        // The shim answers after its start attempt, when the record of the start is on disk.
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
    /// A connection to the shim, unless the shim is dead. If an earlier backend died just after
    /// starting it, the shim may not listen yet.
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
                // The shim runs but has not listened for minutes.
                // SAFETY: a plain system call.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                return None;
            }
            // There is no event to wait for when a socket appears.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

pub(super) fn names(directory: &Path) -> std::io::Result<Vec<String>> {
    let entries = std::fs::read_dir(directory)?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}
