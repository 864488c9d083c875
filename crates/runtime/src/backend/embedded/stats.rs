//! Statistics of containers and pods, read from their cgroups.

use std::sync::Arc;

use cri::*;

use super::containers::ContainerEntry;
use super::sandboxes::SandboxEntry;
use super::{Embedded, blocking, now_nanos, selects};
use crate::cgroups::Figures;
use crate::images::store::disk_usage;
use crate::network::veth;

impl Embedded {
    pub(super) async fn stats_of(&self, entry: Arc<ContainerEntry>) -> Result<ContainerStats> {
        let config = entry.config();
        let upper = self.0.layout.container(&entry.id).join("upper");
        let mountpoint = upper.display().to_string();
        let (bytes, inodes) = blocking(move || disk_usage(&upper)).await?;
        let figures = self.0.hierarchies.figures(&entry.record.cgroup);
        let now = now_nanos();
        let limit = config
            .linux
            .as_ref()
            .and_then(|linux| linux.resources.as_ref())
            .and_then(|resources| u64::try_from(resources.memory_limit_in_bytes).ok())
            .filter(|limit| *limit > 0);
        Ok(ContainerStats {
            attributes: Some(ContainerAttributes {
                id: entry.id.clone(),
                metadata: config.metadata,
                labels: config.labels,
                annotations: config.annotations,
            }),
            cpu: figures.map(|figures| cpu(now, &figures)),
            memory: figures.map(|figures| memory(now, &figures, limit)),
            writable_layer: Some(FilesystemUsage {
                timestamp: now,
                fs_id: Some(FilesystemIdentifier { mountpoint }),
                used_bytes: Some(bytes.into()),
                inodes_used: Some(inodes.into()),
            }),
            swap: figures.map(|figures| SwapUsage {
                timestamp: now,
                swap_available_bytes: None,
                swap_usage_bytes: Some(figures.swap_usage.into()),
            }),
            io: None,
        })
    }

    /// Statistics of running containers.
    pub(super) async fn list_stats(
        &self,
        filter: ContainerStatsFilter,
    ) -> Result<Vec<ContainerStats>> {
        let all: Vec<_> = self.table().containers.values().cloned().collect();
        let mut stats = Vec::new();
        for entry in all {
            let wanted = (filter.id.is_empty() || entry.id.starts_with(&filter.id))
                && (filter.pod_sandbox_id.is_empty()
                    || entry.record.sandbox.starts_with(&filter.pod_sandbox_id))
                && selects(&filter.label_selector, &entry.config().labels);
            if wanted && entry.is_running() {
                stats.push(self.stats_of(entry).await?);
            }
        }
        Ok(stats)
    }

    pub(super) async fn sandbox_stats_of(
        &self,
        entry: Arc<SandboxEntry>,
    ) -> Result<PodSandboxStats> {
        let filter =
            ContainerStatsFilter { pod_sandbox_id: entry.id.clone(), ..Default::default() };
        let containers = self.list_stats(filter).await?;
        let now = now_nanos();
        let parent = entry.cgroup_parent();
        let figures = Some(parent.as_str())
            .filter(|parent| !parent.trim_matches('/').is_empty())
            .and_then(|parent| self.0.hierarchies.figures(parent));
        let network =
            (!entry.modes().host_network).then(|| self.pod_network(now, &entry)).flatten();
        Ok(PodSandboxStats {
            attributes: Some(PodSandboxAttributes {
                id: entry.id.clone(),
                metadata: entry.config.metadata.clone(),
                labels: entry.config.labels.clone(),
                annotations: entry.config.annotations.clone(),
            }),
            linux: Some(LinuxPodSandboxStats {
                cpu: figures.map(|figures| cpu(now, &figures)),
                memory: figures.map(|figures| memory(now, &figures, None)),
                network,
                process: figures.map(|figures| ProcessUsage {
                    timestamp: now,
                    process_count: Some(figures.processes.into()),
                }),
                containers,
                io: None,
            }),
        })
    }

    pub(super) async fn list_sandbox_stats(
        &self,
        filter: PodSandboxStatsFilter,
    ) -> Result<Vec<PodSandboxStats>> {
        let all: Vec<_> = self.table().sandboxes.values().cloned().collect();
        let mut stats = Vec::new();
        for entry in all {
            let wanted = (filter.id.is_empty() || entry.id.starts_with(&filter.id))
                && selects(&filter.label_selector, &entry.config.labels);
            if wanted && !entry.state().stopped {
                stats.push(self.sandbox_stats_of(entry).await?);
            }
        }
        Ok(stats)
    }
}

fn cpu(timestamp: i64, figures: &Figures) -> CpuUsage {
    CpuUsage {
        timestamp,
        usage_core_nano_seconds: Some(figures.cpu_nanos.into()),
        // A rate needs two samples; the kubelet computes it.
        usage_nano_cores: None,
        psi: None,
    }
}

fn memory(timestamp: i64, figures: &Figures, limit: Option<u64>) -> MemoryUsage {
    MemoryUsage {
        timestamp,
        working_set_bytes: Some(figures.memory_working_set.into()),
        available_bytes: limit.map(|limit| limit.saturating_sub(figures.memory_working_set).into()),
        usage_bytes: Some(figures.memory_usage.into()),
        rss_bytes: Some(figures.memory_rss.into()),
        page_faults: Some(figures.page_faults.into()),
        major_page_faults: Some(figures.major_page_faults.into()),
        psi: None,
    }
}

impl Embedded {
    /// Reads the node's end of the veth pair: bytes that the node sent are bytes that the pod received. The links
    /// of CNI plugins have any name on the node, so the pod's own end is read.
    fn pod_network(&self, timestamp: i64, entry: &SandboxEntry) -> Option<NetworkUsage> {
        let read = || std::fs::read_to_string("/proc/thread-self/net/dev");
        if entry.state().by_plugins.is_some() {
            let table = net::netns::run(&self.places(&entry.id).net(), read).ok()?.ok()?;
            let numbers = device_line(&table, net::pods::POD_INTERFACE)?;
            return usage(timestamp, &numbers, [0, 2, 8, 10]);
        }
        let numbers = device_line(&read().ok()?, &veth(&entry.id))?;
        usage(timestamp, &numbers, [8, 10, 0, 2])
    }
}

/// `columns`: those of the pod's received bytes and errors, sent bytes and errors.
fn usage(timestamp: i64, numbers: &[u64], columns: [usize; 4]) -> Option<NetworkUsage> {
    let at = |index: usize| numbers.get(index).copied().map(UInt64Value::from);
    let interface = NetworkInterfaceUsage {
        name: net::pods::POD_INTERFACE.into(),
        rx_bytes: at(columns[0]),
        rx_errors: at(columns[1]),
        tx_bytes: at(columns[2]),
        tx_errors: at(columns[3]),
    };
    Some(NetworkUsage {
        timestamp,
        default_interface: Some(interface.clone()),
        interfaces: vec![interface],
    })
}

fn device_line(table: &str, name: &str) -> Option<Vec<u64>> {
    let line = table.lines().find_map(|line| line.trim().strip_prefix(name)?.strip_prefix(':'))?;
    Some(line.split_whitespace().filter_map(|number| number.parse().ok()).collect())
}
