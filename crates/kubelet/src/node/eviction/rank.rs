//! The order in which pods are evicted, and what an evicted pod is told.
//!
//! ```text
//!  memory, disk, inodes: above its requests first ─► low priority first ─► far above its requests first
//!  process ids:                                      low priority first ─► many processes first
//! ```
//!
//! Invariant: static and critical pods stay. Pure.
//! Upstream: `eviction/helpers.go` rank functions, evictionMessage.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};

use super::threshold::Signal;
use crate::names;
use crate::resources::{pod_requests, request, units};

const CRITICAL: i32 = 2_000_000_000;

/// A pod's usage of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// By container, where the resource is counted so.
    pub containers: BTreeMap<String, i64>,
    pub total: i64,
}

/// By pod uid.
pub type Usage = HashMap<String, Used>;

/// Upstream: IsCriticalPod.
pub fn is_critical(pod: &Pod) -> bool {
    let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
    names::is_static(pod) || names::is_mirror(pod) || priority >= CRITICAL
}

/// The pod to evict first. A pod without a known usage goes before all others.
pub fn choose<'a>(
    pods: impl Iterator<Item = &'a Arc<Pod>>,
    usage: &Usage,
    signal: Signal,
) -> Option<Arc<Pod>> {
    let rank = |pod: &Arc<Pod>| {
        let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
        let used = usage.get(names::uid(pod)).map(|used| used.total);
        let above = used.unwrap_or(0) - requested(pod, signal);
        let exceeds = signal != Signal::Pids && above > 0;
        (used.is_none(), exceeds, Reverse(priority), above)
    };
    pods.filter(|pod| !is_critical(pod)).max_by_key(|pod| rank(pod)).cloned()
}

fn requested(pod: &Pod, signal: Signal) -> i64 {
    let resource = signal.resource();
    let requests = pod.spec.as_ref().map(pod_requests).unwrap_or_default();
    requests.get(resource).map_or(0, |milli| milli / 1000)
}

/// The message of the event and of the pod's status.
pub fn message(signal: Signal, met: Option<(u64, u64)>, pod: &Pod, used: Option<&Used>) -> String {
    let resource = signal.resource();
    let mut out = format!("The node was low on resource: {resource}. ");
    if let Some((threshold, available)) = met {
        let show = |amount: u64| match signal {
            Signal::Pids | Signal::NodeFsInodes | Signal::ImageFsInodes => {
                crate::resources::count_quantity(amount as i64).0
            }
            _ => binary(amount as i64),
        };
        out.push_str(&format!(
            "Threshold quantity: {}, available: {}. ",
            show(threshold),
            show(available)
        ));
    }
    let Some(used) = used.filter(|_| matches!(resource, "memory" | "ephemeral-storage")) else {
        return out;
    };
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

/// Bytes in upstream's form: with the largest suffix that divides them.
fn binary(bytes: i64) -> String {
    let suffixes = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
    let fits = suffixes.iter().find(|(_, shift)| bytes != 0 && bytes % (1_i64 << shift) == 0);
    fits.map_or_else(|| bytes.to_string(), |(suffix, shift)| format!("{}{suffix}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(name: &str, priority: i32, memory: &str) -> Arc<Pod> {
        let resources = json!({"requests": {"memory": memory}});
        let pod = json!({"metadata": {"name": name, "uid": name}, "spec": {"priority": priority,
            "containers": [{"name": "c", "resources": resources}]}});
        Arc::new(serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn the_order_is_upstreams() {
        let pods =
            [pod("a", 0, "100"), pod("b", 0, "10"), pod("c", 5, "1"), pod("d", 2_000_000_000, "0")];
        let check = |signal, usage: &[(&str, i64)], expected: &str| {
            let used = |total: i64| Used { total, ..Used::default() };
            let usage: Usage =
                usage.iter().map(|(name, total)| (name.to_string(), used(*total))).collect();
            let chosen = choose(pods.iter(), &usage, signal).expect("a pod");
            assert_eq!(names::name(&chosen), expected, "{signal:?} {usage:?}");
        };
        use Signal::{Memory, NodeFsInodes, Pids};
        check(Memory, &[("a", 90), ("b", 50), ("c", 900), ("d", 9000)], "b");
        check(Memory, &[("a", 90), ("b", 5), ("c", 900)], "c");
        check(Memory, &[("a", 90), ("b", 50)], "c");
        check(Pids, &[("a", 3), ("b", 5), ("c", 900)], "b");
        check(NodeFsInodes, &[("a", 30), ("b", 5), ("c", 900)], "a");
    }

    #[test]
    fn the_message_names_the_containers() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {
            "containers": [{"name": "a", "resources": {"requests": {"memory": "1Mi"}}},
                {"name": "b"}]}}))
        .expect("a pod");
        let containers = [("a".to_string(), 2_i64 << 30), ("b".to_string(), 0)].into();
        let used = Used { containers, total: 0 };
        assert_eq!(
            message(Signal::Memory, Some((100 << 20, 2048)), &pod, Some(&used)),
            "The node was low on resource: memory. Threshold quantity: 100Mi, available: 2Ki. \
             Container a was using 2Gi, request is 1Mi, has larger consumption of memory. "
        );
        assert_eq!(
            message(Signal::Pids, Some((1000, 12)), &pod, Some(&used)),
            "The node was low on resource: pids. Threshold quantity: 1k, available: 12. "
        );
    }
}
