//! When memory runs out the kubelet chooses who goes, before the kernel does.
//!
//! In: the machine's free memory, what pods use and asked for. Out: one eviction per look.
//! Order: pods above their request first, then by priority, then by how far above.
//! Invariants: static and node-critical pods stay; one pod at a time, then look again.
//! Upstream: `pkg/kubelet/eviction`. Deviation: memory only; disks are freed by log rotation.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use client::EventType;
use k8s_openapi::api::core::v1::Pod;

use crate::context::Context;
use crate::machine::available_memory;
use crate::names;
use crate::pods::PodSet;
use crate::resources::{bytes_quantity, pod_requests};
use crate::worker::View;

const INTERVAL: Duration = Duration::from_secs(10);
const CRITICAL: i32 = 2_000_000_000;

/// Watches memory for ever.
pub async fn keep(context: Arc<Context>, pods: Arc<PodSet>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let available = available_memory();
        if available >= context.config.eviction_memory {
            continue;
        }
        let usage = usage(&context).await;
        let views = pods.views();
        let Some((pod, used)) = choose(&views, &usage) else { continue };
        let message = format!(
            "The node was low on resource: memory. Threshold quantity: {}, available: {}Ki. Pod was \
             using {}Ki, request is {}, has larger consumption of memory. ",
            bytes_quantity(context.config.eviction_memory as i64).0,
            available / 1024,
            used / 1024,
            bytes_quantity(requested(&pod)).0,
        );
        context.tell(&pod, EventType::Warning, "Evicted", message.clone());
        pods.evict(names::uid(&pod), "Evicted", &message);
    }
}

/// Memory in use by container id.
async fn usage(context: &Context) -> HashMap<String, i64> {
    let all = context.runtime.list_container_stats(None).await.unwrap_or_default();
    let one = |stats: cri::ContainerStats| {
        let id = stats.attributes?.id;
        let bytes = stats.memory?.working_set_bytes?.value;
        Some((id, bytes as i64))
    };
    all.into_iter().filter_map(one).collect()
}

fn requested(pod: &Pod) -> i64 {
    let requests = pod.spec.as_ref().map(pod_requests).unwrap_or_default();
    requests.get("memory").copied().unwrap_or(0) / 1000
}

/// The pod to go, and what it uses.
fn choose(views: &[View], usage: &HashMap<String, i64>) -> Option<(Arc<Pod>, i64)> {
    let mut candidates = vec![];
    for view in views.iter().filter(|view| !view.stopped) {
        let Some(pod) = &view.pod else { continue };
        let priority = pod.spec.as_ref().and_then(|s| s.priority).unwrap_or(0);
        if names::is_static(pod) || priority >= CRITICAL {
            continue;
        }
        let running = view.observed.running().filter_map(|c| usage.get(&c.id));
        let used: i64 = running.sum();
        let above = used - requested(pod);
        candidates.push(((above > 0, std::cmp::Reverse(priority), above), pod.clone(), used));
    }
    candidates.into_iter().max_by_key(|(rank, ..)| *rank).map(|(_, pod, used)| (pod, used))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::{Observed, State};
    use crate::plan::tests::container;
    use serde_json::json;

    #[test]
    fn the_greediest_of_the_least_important_goes() {
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
        let usage =
            |pairs: &[(&str, i64)]| pairs.iter().map(|(n, b)| (n.to_string(), *b)).collect();
        let views = [
            view("a", 0, "100"),
            view("b", 0, "10"),
            view("c", 5, "1"),
            view("d", 2_000_000_000, "0"),
        ];
        let name = |usage: &HashMap<String, i64>| {
            choose(&views, usage).map(|(pod, _)| names::name(&pod).to_string())
        };
        let all = usage(&[("a", 90), ("b", 50), ("c", 900), ("d", 9000)]);
        assert_eq!(name(&all).as_deref(), Some("b"));
        let modest = usage(&[("a", 90), ("b", 5), ("c", 900)]);
        assert_eq!(name(&modest).as_deref(), Some("c"));
    }
}
