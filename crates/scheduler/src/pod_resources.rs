//! `/metrics/resources`: what each pod of the cluster requests, and its limits.
//!
//! In: the scheduler's cache of pods. Out: Prometheus text.
//! Cost: each scrape decodes all pods, as upstream's does; without scrapes nothing.
//! Upstream: `pkg/scheduler/metrics/resources`.

use std::fmt::Write;

use api::quota::{Amounts, pod_limits, pod_requests};
use k8s_openapi::api::core::v1::Pod;
use machinery::quantity::Amount;

/// The page.
pub fn encode(out: &mut String) {
    let pods = crate::metrics::pods();
    type Family = (&'static str, &'static str, fn(&Pod) -> Amounts);
    let families: [Family; 2] = [
        (
            "kube_pod_resource_limit",
            "[STABLE] Resources limit for workloads on the cluster, broken down by pod. This shows the resource usage the scheduler and kubelet expect per pod for resources along with the unit for the resource if any.",
            pod_limits,
        ),
        (
            "kube_pod_resource_request",
            "[STABLE] Resources requested by workloads on the cluster, broken down by pod. This shows the resource usage the scheduler and kubelet expect per pod for resources along with the unit for the resource if any.",
            pod_requests,
        ),
    ];
    for (name, help, amounts) in families {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
        for pod in pods.iter().filter(|pod| !has_ended(pod)) {
            encode_one(out, name, pod, &amounts(pod));
        }
    }
}

fn encode_one(out: &mut String, name: &str, pod: &Pod, amounts: &Amounts) {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (meta, spec) = (&pod.metadata, pod.spec.clone().unwrap_or_default());
    let (namespace, pod) = (text(&meta.namespace), text(&meta.name));
    let (node, scheduler) = (text(&spec.node_name), text(&spec.scheduler_name));
    let priority = spec.priority.map_or(String::new(), |priority| priority.to_string());
    for (resource, quantity) in amounts {
        let value = Amount::parse(&quantity.0).map_or(0.0, |amount| amount.milli() as f64 / 1e3);
        if value == 0.0 {
            continue;
        }
        let unit = unit_of(resource);
        let _ = writeln!(
            out,
            "{name}{{namespace={namespace:?},node={node:?},pod={pod:?},priority={priority:?},resource={resource:?},scheduler={scheduler:?},unit={unit:?}}} {value}"
        );
    }
}

fn unit_of(resource: &str) -> &'static str {
    match resource {
        "cpu" => "cores",
        "memory" | "storage" | "ephemeral-storage" => "bytes",
        other if other.starts_with("hugepages-") => "bytes",
        other if other.starts_with("attachable-volumes-") => "integer",
        _ => "",
    }
}

fn has_ended(pod: &Pod) -> bool {
    let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    is_bound && matches!(phase, Some("Succeeded" | "Failed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_resource_of_a_pod_has_a_line() {
        let pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"namespace": "n", "name": "p"},
            "spec": {"nodeName": "a", "schedulerName": "s", "priority": 5, "containers": [
                {"name": "c", "resources": {"requests": {"cpu": "250m", "memory": "1Ki"}}},
                {"name": "d", "resources": {"requests": {"cpu": "1", "example.com/gpu": "2"}}}]}
        }))
        .expect("a pod");
        let mut out = String::new();
        encode_one(&mut out, "f", &pod, &pod_requests(&pod));
        let line = |resource: &str, unit: &str, value: &str| {
            format!(
                "f{{namespace=\"n\",node=\"a\",pod=\"p\",priority=\"5\",resource=\"{resource}\",scheduler=\"s\",unit=\"{unit}\"}} {value}"
            )
        };
        let expected = [
            line("cpu", "cores", "1.25"),
            line("example.com/gpu", "", "2"),
            line("memory", "bytes", "1024"),
        ];
        assert_eq!(out.lines().collect::<Vec<_>>(), expected);
    }
}
