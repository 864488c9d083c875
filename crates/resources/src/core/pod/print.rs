//! The pod's row in `kubectl get`: one word for all that can be going on.
//! Upstream: `printPod` in `pkg/printers/internalversion`.

use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, Pod, PodCondition, PodSpec, PodStatus,
};
use machinery::Time;
use serde_json::Value;

use crate::kind::{Column, age, field, name, text, wide};
use crate::print::{or_none, since};

pub(super) const COLUMNS: &[Column<Pod>] = &[
    name(),
    text(
        "Ready",
        "string",
        "The aggregate readiness state of this pod for accepting traffic.",
        |pod| {
            let summary = Summary::of(pod);
            format!("{}/{}", summary.ready, summary.total).into()
        },
    ),
    text("Status", "string", "The aggregate status of the containers in this pod.", |pod| {
        Summary::of(pod).reason.into()
    }),
    text(
        "Restarts",
        "string",
        "The number of times the containers in this pod have been restarted and when the last container in this pod has restarted.",
        |pod| Summary::of(pod).restarts_text.into(),
    ),
    age(),
    wide(field("IP", "string", "api.core.v1.PodStatus.podIP", |pod| {
        let status = pod.status.as_ref();
        let first = status.and_then(|status| status.pod_ips.as_ref()?.first());
        let ip = first.map(|one| &one.ip).or(status.and_then(|status| status.pod_ip.as_ref()));
        or_none(ip.cloned().unwrap_or_default()).into()
    })),
    wide(field("Node", "string", "api.core.v1.PodSpec.nodeName", |pod| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        or_none(node.unwrap_or_default()).into()
    })),
    wide(field("Nominated Node", "string", "api.core.v1.PodStatus.nominatedNodeName", |pod| {
        let node = pod.status.as_ref().and_then(|status| status.nominated_node_name.clone());
        or_none(node.unwrap_or_default()).into()
    })),
    wide(field("Readiness Gates", "string", "api.core.v1.PodSpec.readinessGates", |pod| {
        gates(pod).into()
    })),
];

/// How many of the pod's readiness gates are passed.
fn gates(pod: &Pod) -> String {
    let gates = pod.spec.as_ref().and_then(|spec| spec.readiness_gates.as_deref());
    let Some(gates) = gates.filter(|gates| !gates.is_empty()) else { return "<none>".into() };
    let is_true = |kind: &str| {
        let mut conditions =
            pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.any(|one| one.type_ == kind && one.status == "True")
    };
    let passed = gates.iter().filter(|gate| is_true(&gate.condition_type)).count();
    format!("{passed}/{}", gates.len())
}

/// What `kubectl get` greys out. Upstream: `podSuccessConditions`, `podFailedConditions`.
pub(super) fn row_conditions(pod: &Pod) -> Vec<Value> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let (reason, message) = match phase {
        Some("Succeeded") => ("Succeeded", "The pod has completed successfully."),
        Some("Failed") => ("Failed", "The pod failed."),
        _ => return vec![],
    };
    let condition = serde_json::json!({
        "type": "Completed", "status": "True", "reason": reason, "message": message,
    });
    vec![condition]
}

struct Summary {
    ready: usize,
    total: usize,
    reason: String,
    restarts_text: String,
}

/// Counts of one pass over container statuses.
#[derive(Default)]
struct Restarts {
    count: i32,
    last: Option<Time>,
}

impl Restarts {
    fn add(&mut self, status: &ContainerStatus) {
        self.count += status.restart_count;
        let ended = status.last_state.as_ref().and_then(|state| state.terminated.as_ref());
        if let Some(at) = ended.and_then(|ended| ended.finished_at.clone()) {
            self.last = Some(
                self.last.take().map_or(at.clone(), |last| if last.0 > at.0 { last } else { at }),
            );
        }
    }

    fn text(&self) -> String {
        match (&self.last, self.count) {
            (Some(last), 1..) => format!("{} ({} ago)", self.count, since(Some(last))),
            _ => self.count.to_string(),
        }
    }
}

fn has_condition(status: &PodStatus, test: impl Fn(&PodCondition) -> bool) -> bool {
    status.conditions.iter().flatten().any(test)
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

impl Summary {
    fn of(pod: &Pod) -> Self {
        let (no_spec, no_status) = (PodSpec::default(), PodStatus::default());
        let spec = pod.spec.as_ref().unwrap_or(&no_spec);
        let status = pod.status.as_ref().unwrap_or(&no_status);
        let inits = spec.init_containers.as_deref().unwrap_or_default();
        let mut total = spec.containers.len() + inits.iter().filter(|one| is_sidecar(one)).count();
        let phase = status.phase.clone().unwrap_or_default();
        let mut reason =
            status.reason.clone().filter(|reason| !reason.is_empty()).unwrap_or(phase.clone());
        let gated = |one: &PodCondition| {
            one.type_ == "PodScheduled" && one.reason.as_deref() == Some("SchedulingGated")
        };
        if has_condition(status, gated) {
            reason = "SchedulingGated".into();
        }
        let is_true =
            |kind: &str| has_condition(status, |one| one.type_ == kind && one.status == "True");
        let (mut ready, mut restarts, mut sidecar_restarts) =
            (0, Restarts::default(), Restarts::default());
        let mut initializing = false;
        for (index, one) in status.init_container_statuses.iter().flatten().enumerate() {
            restarts.add(one);
            let spec = inits.iter().find(|spec| spec.name == one.name);
            let sidecar = spec.is_some_and(is_sidecar);
            if sidecar {
                sidecar_restarts.add(one);
            }
            match init_reason(one, sidecar, index, inits.len()) {
                InitState::Done => {}
                InitState::Running => ready += usize::from(one.ready),
                InitState::Stuck(why) => {
                    reason = why;
                    initializing = true;
                    break;
                }
            }
        }
        if !initializing || is_true("Initialized") {
            restarts = sidecar_restarts;
            let mut running = false;
            for one in status.container_statuses.iter().flatten().rev() {
                restarts.add(one);
                if let Some(why) = container_reason(one) {
                    reason = why;
                } else if one.ready
                    && one.state.as_ref().is_some_and(|state| state.running.is_some())
                {
                    running = true;
                    ready += 1;
                }
            }
            if reason == "Completed" && running {
                reason = if is_true("Ready") { "Running".into() } else { "NotReady".into() };
            }
        }
        if pod.metadata.deletion_timestamp.is_some() {
            if status.reason.as_deref() == Some("NodeLost") {
                reason = "Unknown".into();
            } else if !matches!(phase.as_str(), "Succeeded" | "Failed") {
                reason = "Terminating".into();
            }
        }
        total = total.max(ready);
        Self { ready, total, reason, restarts_text: restarts.text() }
    }
}

enum InitState {
    Done,
    /// A sidecar that has started.
    Running,
    Stuck(String),
}

fn init_reason(status: &ContainerStatus, sidecar: bool, index: usize, count: usize) -> InitState {
    let state = status.state.clone().unwrap_or_default();
    if let Some(ended) = &state.terminated {
        if ended.exit_code == 0 {
            return InitState::Done;
        }
        let why =
            match (ended.reason.as_deref().unwrap_or_default(), ended.signal.unwrap_or_default()) {
                ("", 0) => format!("Init:ExitCode:{}", ended.exit_code),
                ("", signal) => format!("Init:Signal:{signal}"),
                (reason, _) => format!("Init:{reason}"),
            };
        return InitState::Stuck(why);
    }
    if sidecar && status.started == Some(true) {
        return InitState::Running;
    }
    match state.waiting.and_then(|waiting| waiting.reason).filter(|reason| !reason.is_empty()) {
        Some(reason) if reason != "PodInitializing" => InitState::Stuck(format!("Init:{reason}")),
        _ => InitState::Stuck(format!("Init:{index}/{count}")),
    }
}

fn container_reason(status: &ContainerStatus) -> Option<String> {
    let state = status.state.clone().unwrap_or_default();
    if let Some(reason) =
        state.waiting.and_then(|waiting| waiting.reason).filter(|reason| !reason.is_empty())
    {
        return Some(reason);
    }
    let ended = state.terminated?;
    Some(match (ended.reason.unwrap_or_default(), ended.signal.unwrap_or_default()) {
        (reason, _) if !reason.is_empty() => reason,
        (_, 0) => format!("ExitCode:{}", ended.exit_code),
        (_, signal) => format!("Signal:{signal}"),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn one_word_says_what_goes_on() {
        let main = |state| {
            json!({"phase": "Running", "containerStatuses": [{"name": "c", "image": "", "imageID": "",
            "ready": true, "restartCount": 2, "state": state}]})
        };
        for (status, expected) in [
            (json!({"phase": "Pending"}), ("0/1", "Pending", "0")),
            (main(json!({"running": {}})), ("1/1", "Running", "2")),
            (
                main(json!({"waiting": {"reason": "CrashLoopBackOff"}})),
                ("0/1", "CrashLoopBackOff", "2"),
            ),
            (main(json!({"terminated": {"exitCode": 3}})), ("0/1", "ExitCode:3", "2")),
            (
                json!({"phase": "Pending", "initContainerStatuses": [{"name": "i", "image": "", "imageID": "",
                    "ready": false, "restartCount": 0, "state": {"running": {}}}]}),
                ("0/1", "Init:0/1", "0"),
            ),
        ] {
            let pod: Pod =
                serde_json::from_value(json!({"metadata": {"name": "p"}, "status": status,
                "spec": {"containers": [{"name": "c"}], "initContainers": [{"name": "i"}]}}))
                .expect("a pod");
            let cells: Vec<Value> = COLUMNS.iter().map(|column| (column.cell)(&pod)).collect();
            let got = (cells[1].as_str(), cells[2].as_str(), cells[3].as_str());
            assert_eq!(got, (Some(expected.0), Some(expected.1), Some(expected.2)));
        }
    }
}
