//! Evicts a pod when memory or disk runs out, before the kernel's OOM killer chooses one.
//!
//! In: the machine's free memory and disk, pods' usage and requests. Out: one eviction per round.
//! Order: pods above their request first, then by priority, then by how far above.
//! Invariants: static and node-critical pods stay; the next round waits until the evicted pod has
//! stopped, or a timeout; a pod is evicted once; the disk must be full for several rounds, because unused
//! images are removed first.
//! Upstream: `pkg/kubelet/eviction`. Deviation: a lack of inodes evicts no pod.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use client::EventType;
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::names;
use crate::node::families;
use crate::node::local_storage;
use crate::node::machine::{Disk, available_memory};
use crate::node::upkeep::Upkeep;
use crate::pod::set::PodSet;
use crate::pod::worker::View;
use crate::resources::{pod_requests, request, units};

/// How long a round waits for the evicted pod to stop. Upstream: podCleanupTimeout.
const CLEANUP: Duration = Duration::from_secs(30);
/// The number of consecutive rounds that must find the disk full.
const PATIENCE: u32 = 3;
const CRITICAL: i32 = 2_000_000_000;

/// The resource that runs out.
struct Shortage {
    resource: &'static str,
    threshold: String,
    available: u64,
}

/// A pod's usage of it, in bytes.
#[derive(Default)]
struct Used {
    containers: BTreeMap<String, i64>,
    total: i64,
}

/// Watches memory and disk; never returns.
pub async fn keep(own: Arc<Upkeep>) {
    let mut full = 0;
    loop {
        tokio::time::sleep(own.node.config.eviction_interval).await;
        let disk = disk_shortage(&own);
        full = if disk.is_some() { full + 1 } else { 0 };
        let disk = disk.filter(|_| full >= PATIENCE);
        let Some(shortage) = memory_shortage(&own).or(disk) else { continue };
        let views = candidates(&own.pods);
        let usage = match shortage.resource {
            "memory" => memory_of(&own, &views).await,
            _ => storage_of(&own, &views).await,
        };
        let Some(pod) = choose(&views, &usage, shortage.resource) else { continue };
        full = 0;
        let none = Used::default();
        let message = message(&shortage, &pod, usage.get(names::uid(&pod)).unwrap_or(&none));
        if !own.pods.evict_for_node(names::uid(&pod), &message) {
            continue;
        }
        families::evicted(match shortage.resource {
            "memory" => "memory.available",
            _ => "nodefs.available",
        });
        own.events.tell(&pod, EventType::Warning, "Evicted", message);
        let stopped = own.pods.until_stopped(names::uid(&pod));
        if tokio::time::timeout(CLEANUP, stopped).await.is_err() {
            tracing::warn!(pod = names::full(&pod), "the evicted pod did not stop in time");
        }
    }
}

/// Pods that use resources and are not being evicted: the resources of those will soon be free.
fn candidates(pods: &PodSet) -> Vec<View> {
    let mut views = pods.views();
    views.retain(|view| {
        !view.stopped && view.pod.as_ref().is_some_and(|pod| !pods.is_failed(names::uid(pod)))
    });
    views
}

fn memory_shortage(own: &Upkeep) -> Option<Shortage> {
    let (available, least) = (available_memory(), own.node.config.eviction_memory);
    let threshold = binary(least as i64);
    (available < least).then_some(Shortage { resource: "memory", threshold, available })
}

fn disk_shortage(own: &Upkeep) -> Option<Shortage> {
    let disk = Disk::of(&own.node.config.root_dir)?;
    let least = (disk.bytes as f64 * own.node.config.eviction_disk) as u64;
    (disk.free_bytes < least).then(|| Shortage {
        resource: "ephemeral-storage",
        threshold: least.to_string(),
        available: disk.free_bytes,
    })
}

/// Bytes in upstream's form: with the largest suffix that divides them.
fn binary(bytes: i64) -> String {
    let suffixes = [("Gi", 30), ("Mi", 20), ("Ki", 10)];
    let fits = suffixes.iter().find(|(_, shift)| bytes != 0 && bytes % (1_i64 << shift) == 0);
    fits.map_or_else(|| bytes.to_string(), |(suffix, shift)| format!("{}{suffix}", bytes >> shift))
}

/// Upstream: evictionMessage.
fn message(shortage: &Shortage, pod: &Pod, used: &Used) -> String {
    let Shortage { resource, threshold, available } = shortage;
    let mut out = format!(
        "The node was low on resource: {resource}. Threshold quantity: {threshold}, available: {}Ki. ",
        available / 1024
    );
    let spec = pod.spec.iter();
    let all = spec.flat_map(|s| s.containers.iter().chain(s.init_containers.iter().flatten()));
    for container in all {
        let asked = asked(container, resource);
        let Some(bytes) = used.containers.get(&container.name).filter(|used| **used > asked) else {
            continue;
        };
        out.push_str(&format!(
            "Container {} was using {}, request is {}, has larger consumption of {resource}. ",
            container.name,
            binary(*bytes),
            binary(asked),
        ));
    }
    out
}

fn asked(container: &Container, resource: &str) -> i64 {
    request(container.resources.as_ref(), resource).map_or(0, units)
}

/// By pod uid.
type Usage = HashMap<String, Used>;

fn living(views: &[View]) -> impl Iterator<Item = (&View, &Arc<Pod>)> {
    views.iter().filter_map(|view| Some((view, view.pod.as_ref()?)))
}

async fn memory_of(own: &Upkeep, views: &[View]) -> Usage {
    let all = own.runtime.list_container_stats(None).await.unwrap_or_default();
    let one = |stats: cri::ContainerStats| {
        let id = stats.attributes?.id;
        let bytes = stats.memory?.working_set_bytes?.value;
        Some((id, bytes as i64))
    };
    let by_id: HashMap<String, i64> = all.into_iter().filter_map(one).collect();
    let of = |view: &View| {
        let running = view.observed.running();
        let containers: BTreeMap<String, i64> =
            running.filter_map(|c| Some((c.name.clone(), *by_id.get(&c.id)?))).collect();
        Used { total: containers.values().sum(), containers }
    };
    living(views).map(|(view, pod)| (names::uid(pod).to_string(), of(view))).collect()
}

async fn storage_of(own: &Upkeep, views: &[View]) -> Usage {
    let mut out = Usage::new();
    for (view, pod) in living(views) {
        let usage = local_storage::measure(own, view, pod.clone()).await;
        let total = usage.containers.values().chain(usage.volumes.values()).sum();
        out.insert(names::uid(pod).to_string(), Used { containers: usage.containers, total });
    }
    out
}

/// The pod to evict.
fn choose(views: &[View], usage: &Usage, resource: &str) -> Option<Arc<Pod>> {
    let mut candidates = vec![];
    for (_, pod) in living(views) {
        let priority = pod.spec.as_ref().and_then(|s| s.priority).unwrap_or(0);
        if names::is_static(pod) || priority >= CRITICAL {
            continue;
        }
        let requests = pod.spec.as_ref().map(pod_requests).unwrap_or_default();
        let asked = requests.get(resource).map_or(0, |milli| milli / 1000);
        let above = usage.get(names::uid(pod)).map_or(0, |used| used.total) - asked;
        candidates.push(((above > 0, std::cmp::Reverse(priority), above), pod.clone()));
    }
    candidates.into_iter().max_by_key(|(rank, _)| *rank).map(|(_, pod)| pod)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::observed::{Observed, State};
    use crate::pod::plan::tests::container;
    use serde_json::json;

    #[test]
    fn lowest_priority_then_largest_excess_is_evicted() {
        let view = |name: &str, priority: i32, request: &str| {
            let mut run = container(name, State::Running, 0);
            run.id = name.into();
            let pod = json!({"metadata": {"name": name, "uid": name}, "spec": {"priority": priority,
                "containers": [{"name": "c", "resources": {"requests": {"memory": request}}}]}});
            View {
                pod: Some(Arc::new(serde_json::from_value(pod).expect("a pod"))),
                observed: Observed { sandboxes: vec![], containers: vec![run] },
                ..View::default()
            }
        };
        let usage = |pairs: &[(&str, i64)]| -> Usage {
            let used = |bytes: i64| Used { containers: [("c".into(), bytes)].into(), total: bytes };
            pairs.iter().map(|(name, bytes)| (name.to_string(), used(*bytes))).collect()
        };
        let views = [
            view("a", 0, "100"),
            view("b", 0, "10"),
            view("c", 5, "1"),
            view("d", 2_000_000_000, "0"),
        ];
        let name = |usage: &Usage| {
            choose(&views, usage, "memory").map(|pod| names::name(&pod).to_string())
        };
        let all = usage(&[("a", 90), ("b", 50), ("c", 900), ("d", 9000)]);
        assert_eq!(name(&all).as_deref(), Some("b"));
        let modest = usage(&[("a", 90), ("b", 5), ("c", 900)]);
        assert_eq!(name(&modest).as_deref(), Some("c"));
    }

    #[test]
    fn the_message_names_the_containers() {
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [
            {"name": "a", "resources": {"requests": {"memory": "1Mi"}}}, {"name": "b"}]}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let shortage =
            Shortage { resource: "memory", threshold: binary(100 << 20), available: 2048 };
        let containers = [("a".to_string(), 2_i64 << 30), ("b".to_string(), 0)].into();
        assert_eq!(
            message(&shortage, &pod, &Used { containers, total: 0 }),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 2Ki. \
             Container a was using 2Gi, request is 1Mi, has larger consumption of memory. "
        );
    }
}
