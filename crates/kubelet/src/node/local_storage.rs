//! Evicts pods that exceed their limits of local storage.
//!
//! In: pods with limits (`emptyDir.sizeLimit`, `limits.ephemeral-storage`), their usage. Out:
//! evictions. Pods without such limits are not measured, because walking directories is expensive.
//! Invariant: only data on disk counts: writable layers, logs, and volumes that are not in memory.
//! Upstream: `pkg/kubelet/eviction` localStorageEviction, at the configured interval.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use client::EventType;
use k8s_openapi::api::core::v1::{Container, EmptyDirVolumeSource, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::names;
use crate::node::upkeep::Upkeep;
use crate::pod::observed::all_containers;
use crate::pod::worker::View;
use crate::reason::Reason;
use crate::resources::{limit, pod_limits, units};
use crate::volumes::PodDir;

const RESOURCE: &str = "ephemeral-storage";

/// Measures pods; never returns.
pub async fn keep(own: Arc<Upkeep>) {
    loop {
        tokio::time::sleep(own.node.config.eviction_interval).await;
        for view in own.pods.views().into_iter().filter(|view| !view.stopped) {
            let Some(pod) = view.pod.clone().filter(|pod| is_limited(pod)) else { continue };
            let usage = measure(&own, &view, pod.clone()).await;
            if let Some(message) = verdict(&pod, &usage)
                && own.pods.evict(names::uid(&pod), Reason::new("Evicted", message.clone()))
            {
                own.events.tell(&pod, EventType::Warning, "Evicted", message);
            }
        }
    }
}

/// A pod's bytes on disk.
#[derive(Debug, Default)]
pub struct Usage {
    pub volumes: BTreeMap<String, i64>,
    /// Writable layers and logs.
    pub containers: BTreeMap<String, i64>,
}

fn empty_dirs(pod: &Pod) -> impl Iterator<Item = (&String, &EmptyDirVolumeSource)> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    volumes.filter_map(|volume| Some((&volume.name, volume.empty_dir.as_ref()?)))
}

fn positive(quantity: Option<&Quantity>) -> Option<&Quantity> {
    quantity.filter(|quantity| units(quantity) > 0)
}

fn storage_limit(container: &Container) -> Option<&Quantity> {
    positive(limit(container.resources.as_ref(), RESOURCE))
}

fn is_limited(pod: &Pod) -> bool {
    let containers = pod.spec.as_ref().map(all_containers).unwrap_or_default();
    empty_dirs(pod).any(|(_, source)| positive(source.size_limit.as_ref()).is_some())
        || containers.iter().any(|(_, container)| storage_limit(container).is_some())
}

/// Why the pod is evicted, in upstream's words and order.
fn verdict(pod: &Pod, usage: &Usage) -> Option<String> {
    for (name, source) in empty_dirs(pod) {
        let Some(allowed) = positive(source.size_limit.as_ref()) else { continue };
        if usage.volumes.get(name).is_some_and(|used| *used > units(allowed)) {
            return Some(format!(
                "Usage of EmptyDir volume {name:?} exceeds the limit {:?}. ",
                allowed.0
            ));
        }
    }
    let spec = pod.spec.as_ref()?;
    let on_disk = |name: &String| {
        empty_dirs(pod)
            .any(|(own, source)| own == name && source.medium.as_deref() != Some("Memory"))
    };
    let volumes: i64 =
        usage.volumes.iter().filter(|(name, _)| on_disk(name)).map(|(_, used)| used).sum();
    let total = volumes + usage.containers.values().sum::<i64>();
    let all_limited = spec.containers.iter().all(|container| storage_limit(container).is_some());
    let allowed = pod_limits(spec).get(RESOURCE).map_or(0, |milli| milli / 1000);
    if all_limited && allowed > 0 && total > allowed {
        let told = crate::resources::bytes_quantity(allowed).0;
        return Some(format!(
            "Pod ephemeral local storage usage exceeds the total limit of containers {told}. "
        ));
    }
    let containers = all_containers(spec);
    let (name, allowed) = containers.iter().find_map(|(_, container)| {
        let allowed = storage_limit(container)?;
        let used = usage.containers.get(&container.name).copied().unwrap_or(0);
        (used > units(allowed)).then(|| (container.name.clone(), allowed.0.clone()))
    })?;
    Some(format!("Container {name} exceeded its local ephemeral storage limit {allowed:?}. "))
}

pub async fn measure(own: &Upkeep, view: &View, pod: Arc<Pod>) -> Usage {
    let all = own.runtime.list_container_stats(None).await.unwrap_or_default();
    let written = |stats: cri::ContainerStats| {
        Some((stats.attributes?.id, stats.writable_layer?.used_bytes?.value as i64))
    };
    let written: HashMap<String, i64> = all.into_iter().filter_map(written).collect();
    let mut usage = Usage::default();
    for container in view.observed.running() {
        let bytes = written.get(&container.id).copied().unwrap_or(0);
        usage.containers.insert(container.name.clone(), bytes);
    }
    let dir = PodDir::new(&own.node.config.root_dir, names::uid(&pod));
    let logs = names::log_directory(&own.node.config.log_dir, &pod);
    let names: Vec<String> = usage.containers.keys().cloned().collect();
    let walked = tokio::task::spawn_blocking(move || {
        let volumes: BTreeMap<String, i64> = empty_dirs(&pod)
            .map(|(name, _)| (name.clone(), disk_usage(&dir.volume("empty-dir", name))))
            .collect();
        let logs: Vec<i64> = names.iter().map(|name| disk_usage(&logs.join(name))).collect();
        (volumes, names.into_iter().zip(logs).collect::<Vec<_>>())
    });
    if let Ok((volumes, logs)) = walked.await {
        usage.volumes = volumes;
        for (name, bytes) in logs {
            *usage.containers.entry(name).or_default() += bytes;
        }
    }
    usage
}

/// The inodes of the pod's volumes and logs.
pub async fn inodes(own: &Upkeep, pod: Arc<Pod>) -> i64 {
    let dir = PodDir::new(&own.node.config.root_dir, names::uid(&pod));
    let logs = names::log_directory(&own.node.config.log_dir, &pod);
    let walked = tokio::task::spawn_blocking(move || {
        let volumes = empty_dirs(&pod).map(|(name, _)| inode_usage(&dir.volume("empty-dir", name)));
        volumes.sum::<i64>() + inode_usage(&logs)
    });
    walked.await.unwrap_or_default()
}

/// The bytes of blocks below `path`, each file once, without other mounts.
pub fn disk_usage(path: &Path) -> i64 {
    let mut blocks = 0;
    walk(path, |about| blocks += about.blocks());
    (blocks * 512) as i64
}

fn inode_usage(path: &Path) -> i64 {
    let mut count = 0;
    walk(path, |_| count += 1);
    count
}

/// Calls `each` for `path` and all below it, each file once, without other mounts.
fn walk(path: &Path, mut each: impl FnMut(&std::fs::Metadata)) {
    let Ok(top) = std::fs::symlink_metadata(path) else { return };
    let mut seen = std::collections::HashSet::new();
    let mut left = vec![path.to_path_buf()];
    while let Some(place) = left.pop() {
        let Ok(about) = std::fs::symlink_metadata(&place) else { continue };
        if about.dev() != top.dev() || (about.nlink() > 1 && !seen.insert(about.ino())) {
            continue;
        }
        each(&about);
        if about.is_dir() {
            left.extend(
                std::fs::read_dir(&place).into_iter().flatten().flatten().map(|e| e.path()),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::plan::tests::pod;
    use serde_json::{Value, json};

    fn check(spec: Value, volume: i64, container: i64, expected: Option<&str>) {
        let pod = pod(spec);
        assert!(is_limited(&pod));
        let usage = Usage {
            volumes: [("v".to_string(), volume)].into(),
            containers: [("a".to_string(), container)].into(),
        };
        assert_eq!(verdict(&pod, &usage).as_deref(), expected);
    }

    #[test]
    fn pods_above_their_limit_are_evicted() {
        let volume = |source: Value| json!({"containers": [{"name": "a"}], "volumes": [{"name": "v", "emptyDir": source}]});
        let text = "Usage of EmptyDir volume \"v\" exceeds the limit \"1Ki\". ";
        check(volume(json!({"sizeLimit": "1Ki"})), 1025, 0, Some(text));
        check(volume(json!({"sizeLimit": "1Ki"})), 1024, 9999, None);
        let storage = |medium: &str, limits: Value| {
            json!({"containers": [{"name": "a", "resources": {"limits": limits}}],
                "volumes": [{"name": "v", "emptyDir": {"medium": medium}}]})
        };
        let limits = json!({"ephemeral-storage": "1Ki"});
        let whole = "Pod ephemeral local storage usage exceeds the total limit of containers 1Ki. ";
        check(storage("", limits.clone()), 600, 600, Some(whole));
        check(storage("Memory", limits.clone()), 600, 600, None);
        let two =
            json!({"containers": [{"name": "a", "resources": {"limits": limits}}, {"name": "b"}]});
        let one = "Container a exceeded its local ephemeral storage limit \"1Ki\". ";
        check(two.clone(), 0, 1025, Some(one));
        check(two, 0, 1024, None);
        assert!(!is_limited(&pod(json!({"containers": [{"name": "a"}]}))));
    }

    #[test]
    fn files_count_once() {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::write(root.path().join("f"), vec![1; 10_000]).expect("written");
        let before = disk_usage(root.path());
        assert!(before >= 10_000, "{before}");
        std::fs::hard_link(root.path().join("f"), root.path().join("g")).expect("linked");
        assert_eq!(disk_usage(root.path()), before);
        assert_eq!(disk_usage(&root.path().join("none")), 0);
        assert_eq!(inode_usage(root.path()), 2, "the directory and one file");
    }
}
