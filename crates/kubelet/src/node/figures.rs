//! Metrics of pods and containers for `/metrics`.
//!
//! In: calls from pod workers. Out: Prometheus text, with upstream's names.
//! Invariant: label values come from small sets, so that the number of series stays small.
//! Upstream: `pkg/kubelet/metrics/metrics.go`, `status_manager.go` for ends of containers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::time::Duration;

use client::Histogram;
use k8s_openapi::api::core::v1::{ContainerStatus, PodStatus};

use crate::pod::observed::Role;

/// Prometheus' default buckets, in seconds.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Buckets for the start of a pod.
const START_SECONDS: [f64; 25] = [
    0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0,
    300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0,
];

/// Buckets for the runtime's calls; each limit is 2.5 times the one before.
const CALL_SECONDS: [f64; 14] = [
    0.005,
    0.0125,
    0.03125,
    0.078125,
    0.1953125,
    0.48828125,
    1.220703125,
    3.0517578125,
    7.62939453125,
    19.073486328125,
    47.6837158203125,
    119.20928955078125,
    298.0232238769531,
    745.0580596923828,
];

/// Names and helps of the counters.
const COUNTERS: [(&str, &str); 7] = [
    ("kubelet_runtime_operations_errors_total", "runtime operation errors by operation type."),
    ("kubelet_runtime_operations_total", "runtime operations by operation type."),
    ("kubelet_started_containers_errors_total", "errors when starting containers"),
    ("kubelet_started_containers_total", "containers started"),
    ("kubelet_started_pods_errors_total", "errors when starting pods"),
    ("kubelet_started_pods_total", "pods started"),
    ("kubelet_terminated_containers_total", "container terminations"),
];

#[derive(Default)]
struct Inner {
    /// By name, then by labels.
    counters: BTreeMap<&'static str, BTreeMap<String, u64>>,
    /// Durations of a pod worker's steps, by step.
    steps: BTreeMap<&'static str, Histogram<11>>,
    starts: Option<Histogram<25>>,
    /// Durations of the runtime's calls, by operation.
    calls: BTreeMap<&'static str, Histogram<14>>,
}

/// Guards the metrics; held for single counts and scrapes.
#[derive(Default)]
pub struct Figures(Mutex<Inner>);

impl Figures {
    fn count(&self, name: &'static str, labels: String) {
        let mut inner = self.0.lock().expect("no panic while held");
        *inner.counters.entry(name).or_default().entry(labels).or_default() += 1;
    }

    /// Counts an attempt to create a sandbox.
    pub fn pod_starts(&self) {
        self.count("kubelet_started_pods_total", String::new());
    }

    pub fn pod_not_started(&self) {
        self.count("kubelet_started_pods_errors_total", String::new());
    }

    /// Counts an attempt to create a container.
    pub fn container_starts(&self, role: Role) {
        let labels = format!("container_type={:?}", shown(role));
        self.count("kubelet_started_containers_total", labels);
    }

    /// `code` is the reason in the container's status.
    pub fn container_not_started(&self, role: Role, code: &str) {
        let labels = format!("container_type={:?},code={code:?}", shown(role));
        self.count("kubelet_started_containers_errors_total", labels);
    }

    /// Records the time from the kubelet's first sight of a pod to its running phase.
    pub fn pod_runs(&self, took: Duration) {
        let mut inner = self.0.lock().expect("no panic while held");
        let starts = inner.starts.get_or_insert_with(|| Histogram::new(&START_SECONDS));
        starts.observe(took.as_secs_f64());
    }

    /// Records one step of a pod's worker.
    pub fn step(&self, what: &'static str, took: Duration) {
        let mut inner = self.0.lock().expect("no panic while held");
        let steps = inner.steps.entry(what).or_insert_with(|| Histogram::new(&SECONDS));
        steps.observe(took.as_secs_f64());
    }

    /// Records one call of the runtime.
    pub fn operation(&self, what: &'static str, took: Duration, failed: bool) {
        let labels = format!("operation_type={what:?}");
        if failed {
            self.count("kubelet_runtime_operations_errors_total", labels.clone());
        }
        self.count("kubelet_runtime_operations_total", labels);
        let mut inner = self.0.lock().expect("no panic while held");
        let calls = inner.calls.entry(what).or_insert_with(|| Histogram::new(&CALL_SECONDS));
        calls.observe(took.as_secs_f64());
    }

    /// Counts the containers that have ended since the status `before`.
    pub fn ends(&self, before: &PodStatus, now: &PodStatus) {
        let lists = [
            (Role::Init, &before.init_container_statuses, &now.init_container_statuses),
            (Role::Main, &before.container_statuses, &now.container_statuses),
            (
                Role::Ephemeral,
                &before.ephemeral_container_statuses,
                &now.ephemeral_container_statuses,
            ),
        ];
        for (role, before, now) in lists {
            for status in now.iter().flatten() {
                let Some(end) = ended(status) else { continue };
                let known = before.iter().flatten().find(|known| known.name == status.name);
                if known.and_then(ended).is_none() {
                    let (code, reason) = (end.exit_code, end.reason.as_deref().unwrap_or_default());
                    let labels = format!(
                        "container_type={:?},exit_code=\"{code}\",reason={reason:?}",
                        shown(role)
                    );
                    self.count("kubelet_terminated_containers_total", labels);
                }
            }
        }
    }

    pub fn encode(&self, out: &mut String) {
        let inner = self.0.lock().expect("no panic while held");
        for (name, help) in COUNTERS {
            let Some(lines) = inner.counters.get(name) else { continue };
            let _ = writeln!(
                out,
                "# HELP {name} [ALPHA] Cumulative number of {help}\n# TYPE {name} counter"
            );
            for (labels, count) in lines {
                let labels =
                    if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
                let _ = writeln!(out, "{name}{labels} {count}");
            }
        }
        if let Some(starts) = &inner.starts {
            let name = "kubelet_pod_start_duration_seconds";
            let help = "Duration in seconds from kubelet seeing a pod for the first time to the pod starting to run";
            let _ = writeln!(out, "# HELP {name} [ALPHA] {help}\n# TYPE {name} histogram");
            starts.write(out, name, "");
        }
        if !inner.calls.is_empty() {
            let name = "kubelet_runtime_operations_duration_seconds";
            let help = "Duration in seconds of runtime operations. Broken down by operation type.";
            let _ = writeln!(out, "# HELP {name} [ALPHA] {help}\n# TYPE {name} histogram");
            for (what, calls) in &inner.calls {
                calls.write(out, name, &format!("operation_type={what:?}"));
            }
        }
        if !inner.steps.is_empty() {
            let name = "kubelet_pod_worker_duration_seconds";
            let help = "Duration in seconds to sync a single pod. Broken down by operation type: create, update, or sync";
            let _ = writeln!(out, "# HELP {name} [ALPHA] {help}\n# TYPE {name} histogram");
            for (what, steps) in &inner.steps {
                steps.write(out, name, &format!("operation_type={what:?}"));
            }
        }
    }
}

fn shown(role: Role) -> &'static str {
    match role {
        Role::Init => "init_container",
        Role::Main => "container",
        Role::Ephemeral => "ephemeral_container",
    }
}

fn ended(
    status: &ContainerStatus,
) -> Option<&k8s_openapi::api::core::v1::ContainerStateTerminated> {
    status.state.as_ref()?.terminated.as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn ends_count_once() {
        let figures = Figures::default();
        let status = |state: Value| -> PodStatus {
            let all = json!({"containerStatuses": [{"name": "c", "image": "", "imageID": "",
                "ready": false, "restartCount": 0, "state": state}]});
            serde_json::from_value(all).expect("a status")
        };
        let runs = || status(json!({"running": {}}));
        let end = |code: i32| status(json!({"terminated": {"exitCode": code, "reason": "Error"}}));
        figures.ends(&PodStatus::default(), &runs());
        figures.ends(&runs(), &end(139));
        figures.ends(&end(139), &end(139));
        figures.ends(&PodStatus::default(), &end(1));
        figures.pod_starts();
        figures.container_not_started(Role::Init, "ErrImagePull");
        figures.pod_runs(Duration::from_secs(2));
        figures.step("sync", Duration::from_millis(20));
        figures.operation("exec_sync", Duration::from_secs(20), true);
        let mut text = String::new();
        figures.encode(&mut text);
        let ended = "kubelet_terminated_containers_total{container_type=\"container\",exit_code";
        for line in [
            format!("{ended}=\"139\",reason=\"Error\"}} 1"),
            format!("{ended}=\"1\",reason=\"Error\"}} 1"),
            "kubelet_started_pods_total 1".into(),
            "kubelet_runtime_operations_total{operation_type=\"exec_sync\"} 1".into(),
            "kubelet_runtime_operations_errors_total{operation_type=\"exec_sync\"} 1".into(),
            "kubelet_runtime_operations_duration_seconds_bucket{operation_type=\"exec_sync\",le=\"47.6837158203125\"} 1".into(),
            "kubelet_started_containers_errors_total{container_type=\"init_container\",code=\"ErrImagePull\"} 1".into(),
            "kubelet_pod_start_duration_seconds_bucket{le=\"2\"} 1".into(),
            "kubelet_pod_start_duration_seconds_count 1".into(),
            "kubelet_pod_worker_duration_seconds_bucket{operation_type=\"sync\",le=\"0.025\"} 1".into(),
        ] {
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
        assert!(COUNTERS.is_sorted_by_key(|counter| counter.0));
    }
}
