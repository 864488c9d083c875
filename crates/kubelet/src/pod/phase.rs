//! A pod's phase, from its containers' statuses.
//!
//! In: the spec, the new container statuses. Out: the phase, as far as containers decide it. Pure.
//! A stopped container has ended only if neither its rules nor its policies restart it; sidecars keep a
//! pod `Running`, and never fail it.
//! Upstream: `kubelet_pods.go` getPhase.

use api::restarts;
use k8s_openapi::api::core::v1::{
    Container, ContainerStateTerminated, ContainerStatus, PodSpec, PodStatus,
};

use crate::resources::is_sidecar;

/// The waiting reason, and the reason of the last exit, during a restart of all containers.
pub const RESTARTING: &str = "RestartingAllContainers";

/// `initialized`: main containers were created. `terminal`: nothing will run again.
pub fn phase(
    spec: &PodSpec,
    status: &PodStatus,
    initialized: bool,
    terminal: bool,
) -> &'static str {
    let (init, sidecars, main) =
        (init_tally(spec, status), sidecar_tally(spec, status), main_tally(spec, status));
    let pending = (init.waiting > 0 || sidecars.pending > 0) && !initialized;
    match () {
        () if init.ended > 0 => "Failed",
        () if pending || sidecars.waiting + main.waiting > 0 => "Pending",
        () if sidecars.running + main.running > 0 => "Running",
        () if main.stopped == 0 => "Pending",
        () if terminal && main.stopped == main.succeeded => "Succeeded",
        () if terminal => "Failed",
        () if main.stopped != main.ended => "Running",
        () if main.stopped == main.succeeded => "Succeeded",
        () => "Failed",
    }
}

/// Containers of a kind, counted by state.
#[derive(Default)]
struct Tally {
    /// Sidecars that have not started yet.
    pending: u32,
    running: u32,
    /// Never started.
    waiting: u32,
    /// Started, and does not run now.
    stopped: u32,
    succeeded: u32,
    /// Stopped containers that will not run again.
    ended: u32,
}

/// The spec's containers with their statuses.
fn with_statuses<'a>(
    containers: impl Iterator<Item = &'a Container>,
    statuses: &'a Option<Vec<ContainerStatus>>,
) -> impl Iterator<Item = (&'a Container, &'a ContainerStatus)> {
    containers.zip(statuses.iter().flatten())
}

/// The newest termination.
fn last_end(status: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    let now = status.state.as_ref().and_then(|state| state.terminated.as_ref());
    now.or_else(|| status.last_state.as_ref()?.terminated.as_ref())
}

fn runs(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|state| state.running.is_some())
}

fn runs_again(spec: &PodSpec, container: &Container, end: &ContainerStateTerminated) -> bool {
    restarts::after(spec, container, end.exit_code) || end.reason.as_deref() == Some(RESTARTING)
}

fn init_tally(spec: &PodSpec, status: &PodStatus) -> Tally {
    let mut out = Tally::default();
    let all = with_statuses(spec.init_containers.iter().flatten(), &status.init_container_statuses);
    for (container, status) in all.filter(|(container, _)| !is_sidecar(container)) {
        match last_end(status).filter(|_| !runs(status)) {
            None => out.waiting += 1,
            Some(end) if end.exit_code != 0 && !runs_again(spec, container, end) => out.ended += 1,
            Some(_) => {}
        }
    }
    out
}

/// Stopped sidecars are ignored: they start again, or the pod is over.
fn sidecar_tally(spec: &PodSpec, status: &PodStatus) -> Tally {
    let mut out = Tally::default();
    let all = with_statuses(spec.init_containers.iter().flatten(), &status.init_container_statuses);
    for (_, status) in all.filter(|(container, _)| is_sidecar(container)) {
        if runs(status) {
            out.running += 1;
            out.pending += u32::from(status.started != Some(true));
        } else if last_end(status).is_none() {
            out.pending += 1;
            out.waiting += 1;
        }
    }
    out
}

fn main_tally(spec: &PodSpec, status: &PodStatus) -> Tally {
    let mut out = Tally::default();
    for (container, status) in with_statuses(spec.containers.iter(), &status.container_statuses) {
        let is_over = status.state.as_ref().is_some_and(|state| state.terminated.is_some());
        match last_end(status) {
            _ if runs(status) => out.running += 1,
            None => out.waiting += 1,
            Some(end) => {
                out.stopped += 1;
                out.succeeded += u32::from(is_over && end.exit_code == 0);
                out.ended += u32::from(!runs_again(spec, container, end));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::PodStatus;
    use serde_json::{Value, json};

    use crate::pod::observed::State::{self, Exited, Running};
    use crate::pod::plan::tests::container;
    use crate::pod::status::tests::status_of;

    #[test]
    fn phases_follow_the_containers_policies() {
        let check = |containers: Value, seen: &[(&str, State, i32)], expected: &str| {
            let spec = json!({"restartPolicy": "Never", "containers": containers});
            let seen = seen.iter().map(|(name, state, code)| container(name, *state, *code));
            let status = status_of(spec, seen.collect(), &PodStatus::default());
            assert_eq!(status.phase.as_deref(), Some(expected), "{containers}");
        };
        let rules = |action: &str| {
            json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules":
                [{"action": action, "exitCodes": {"operator": "In", "values": [42]}}]})
        };
        let restart = json!([rules("Restart"), {"name": "b"}]);
        let b = ("b", Exited, 0);
        check(restart.clone(), &[("a", Exited, 42), b], "Running");
        check(restart.clone(), &[("a", Exited, 1), b], "Failed");
        check(restart, &[("a", Exited, 0), b], "Succeeded");
        check(json!([rules("RestartAllContainers")]), &[("a", Exited, 42)], "Running");
        let on_failure = json!([{"name": "a", "restartPolicy": "OnFailure"}]);
        check(on_failure.clone(), &[("a", Exited, 1)], "Running");
        check(on_failure, &[("a", Exited, 0)], "Succeeded");
    }

    #[test]
    fn a_pod_runs_while_a_sidecar_runs() {
        let spec = json!({"restartPolicy": "Never", "containers": [{"name": "a"}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}]});
        let check = |sidecar: State, main: i32, expected: &str| {
            let seen = vec![container("a", Exited, main), container("s", sidecar, 0)];
            let status = status_of(spec.clone(), seen, &PodStatus::default());
            assert_eq!(status.phase.as_deref(), Some(expected));
        };
        check(Running, 0, "Running");
        check(Exited, 0, "Succeeded");
        check(Exited, 1, "Failed");
    }

    #[test]
    fn failed_initialization_fails_a_pod_unless_a_rule_restarts_it() {
        let check = |policy: &str, code: i32, expected: &str| {
            let spec = json!({"restartPolicy": policy, "containers": [{"name": "a"}],
                "initContainers": [{"name": "i", "restartPolicy": "Never", "restartPolicyRules":
                    [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}]});
            let seen = vec![container("i", Exited, code)];
            let status = status_of(spec, seen, &PodStatus::default());
            assert_eq!(status.phase.as_deref(), Some(expected), "{policy} {code}");
        };
        check("Never", 42, "Pending");
        check("Never", 1, "Failed");
        check("Always", 1, "Failed");
        check("Always", 0, "Pending");
    }
}
