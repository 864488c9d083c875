//! The next step of a pod. Pure: decided from the stored pod, its behaviour and the time.
//!
//! ```text
//!  Waiting ─ start delay ─► Init(0) … Init(n) ─► Running ◄──────── back-off ────────┐
//!     │  (ContainerCreating, where the           │     │ runFor                     │
//!     │   delay is a second at least)            │     ├── restarts ──► BackOff ────┘
//!     └── deletion, deadline ──► Ended ◄─────────┴─────┴── restarts not
//!                                  └── if it is being deleted: Remove
//! ```
//!
//! In: [`Pod`], [`Behaviour`], since when the pod is in its stage. Out: a [`Step`].
//! Invariant: the stage is read from the status, so that another process goes on where one ended.
//! Upstream: `kubelet_pods.go`, `kuberuntime_manager.go`. Deviation: all containers of a pod start and end
//! together; sidecars end with them.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use crate::pod::{Pod, RestartPolicy};
use crate::settings::Behaviour;

/// Upstream: `MaxContainerBackOff` and its first step.
const BACK_OFF: Duration = Duration::from_secs(10);
const BACK_OFF_MOST: Duration = Duration::from_secs(300);
/// A start that takes so long is reported before.
const WORTH_TELLING: Duration = Duration::from_secs(1);
/// The exit code of a program that SIGTERM ended.
pub const TERMINATED: i32 = 143;

/// The stage of a pod, from its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Waiting,
    /// The n-th init container that ends runs.
    Init(usize),
    Running {
        restarts: u32,
    },
    BackOff {
        restarts: u32,
    },
    Ended,
}

/// The status that is reported for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    Creating,
    Init(usize),
    Running { restarts: u32, code: i32, is_ready: bool },
    BackOff { restarts: u32, code: i32 },
    Ended { code: i32, restarts: u32, reason: Option<&'static str> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Report(Report),
    /// The pod object goes away.
    Remove,
    /// Nothing before so long; `None`: before something happens to it.
    Wait(Option<Duration>),
}

impl Stage {
    pub fn of(pod: &Pod) -> Self {
        let main = &pod.status.container_statuses;
        let restarts = main.first().map_or(0, |status| status.restart_count);
        if pod.is_ended() {
            return Self::Ended;
        }
        if main.iter().any(|status| status.state.running.is_some()) {
            return Self::Running { restarts };
        }
        if main.iter().any(|status| status.last_state.terminated.is_some()) {
            return Self::BackOff { restarts };
        }
        let ending = pod.spec.init_containers.iter().zip(&pod.status.init_container_statuses);
        let mut ending = ending.filter(|(container, _)| !container.is_sidecar());
        match ending.position(|(_, status)| status.state.running.is_some()) {
            Some(at) => Self::Init(at),
            None => Self::Waiting,
        }
    }

    /// Since when the pod is in this stage, as far as its status tells, in whole seconds.
    pub fn since(self, pod: &Pod) -> Option<Timestamp> {
        let main = pod.status.container_statuses.first();
        let started = |state: &crate::pod::State| state.running.as_ref()?.started_at;
        match self {
            Self::Waiting => pod.scheduled_at(),
            Self::Init(_) => pod
                .status
                .init_container_statuses
                .iter()
                .filter_map(|one| started(&one.state))
                .max(),
            Self::Running { .. } => started(&main?.state),
            Self::BackOff { .. } => main?.last_state.terminated.as_ref()?.finished_at,
            Self::Ended => None,
        }
    }
}

/// The init containers that end.
pub fn ending_inits(pod: &Pod) -> usize {
    pod.spec.init_containers.iter().filter(|container| !container.is_sidecar()).count()
}

/// The step to take now.
pub fn next(pod: &Pod, does: &Behaviour, since: Timestamp, now: Timestamp) -> Step {
    let stage = Stage::of(pod);
    if pod.metadata.deletion_timestamp.is_some() {
        return removal(pod, stage, does, now);
    }
    if let Some(due) = deadline(pod).filter(|_| stage != Stage::Ended) {
        if due <= now {
            return ended(stage, TERMINATED, Some("DeadlineExceeded"));
        }
        return sooner(running(pod, stage, does, since, now), due, now);
    }
    running(pod, stage, does, since, now)
}

fn running(pod: &Pod, stage: Stage, does: &Behaviour, since: Timestamp, now: Timestamp) -> Step {
    match stage {
        Stage::Ended => Step::Wait(None),
        Stage::Waiting => started(pod, does, since, now),
        Stage::Init(at) => after(since, does.init_for, now, || match at + 1 < ending_inits(pod) {
            true => Report::Init(at + 1),
            false => fresh(pod, does, 0),
        }),
        Stage::BackOff { restarts } if !does.holds_starts => {
            after(since, back_off(restarts), now, || fresh(pod, does, restarts + 1))
        }
        Stage::BackOff { .. } => Step::Wait(None),
        Stage::Running { restarts } => running_on(pod, does, restarts, since, now),
    }
}

fn started(pod: &Pod, does: &Behaviour, since: Timestamp, now: Timestamp) -> Step {
    if does.holds_starts {
        return Step::Wait(None);
    }
    let left = left(since, does.start_delay, now);
    if left.is_zero() {
        let has_init = ending_inits(pod) > 0 && !does.init_for.is_zero();
        return Step::Report(if has_init { Report::Init(0) } else { fresh(pod, does, 0) });
    }
    match pod.status.start_time {
        None if left >= WORTH_TELLING => Step::Report(Report::Creating),
        _ => Step::Wait(Some(left)),
    }
}

/// Containers that have just started.
fn fresh(pod: &Pod, does: &Behaviour, restarts: u32) -> Report {
    let is_ready = does.is_ready && does.ready_delay.is_zero() && gates_are_open(pod);
    Report::Running { restarts, code: does.exit_code, is_ready }
}

fn running_on(
    pod: &Pod,
    does: &Behaviour,
    restarts: u32,
    since: Timestamp,
    now: Timestamp,
) -> Step {
    let end = does.run_for.map(|time| left(since, time, now));
    if end.is_some_and(|left| left.is_zero()) {
        return exited(pod, does, restarts);
    }
    let until_ready = left(since, does.ready_delay, now);
    let is_ready = does.is_ready && until_ready.is_zero() && gates_are_open(pod);
    let was = pod.status.condition("Ready").is_some_and(|ready| ready.status == "True");
    if is_ready != was {
        return Step::Report(Report::Running { restarts, code: does.exit_code, is_ready });
    }
    let until_ready = Some(until_ready).filter(|left| does.is_ready && !left.is_zero());
    Step::Wait([end, until_ready].into_iter().flatten().min())
}

fn exited(pod: &Pod, does: &Behaviour, restarts: u32) -> Step {
    let code = does.exit_code;
    let again = match pod.spec.restart_policy {
        RestartPolicy::Always => true,
        RestartPolicy::OnFailure => code != 0,
        RestartPolicy::Never => false,
    };
    match again {
        false => Step::Report(Report::Ended { code, restarts, reason: None }),
        true if back_off(restarts).is_zero() && !does.holds_starts => {
            Step::Report(fresh(pod, does, restarts + 1))
        }
        true => Step::Report(Report::BackOff { restarts, code }),
    }
}

fn gates_are_open(pod: &Pod) -> bool {
    pod.spec.readiness_gates.iter().all(|gate| {
        pod.status.condition(&gate.condition_type).is_some_and(|is| is.status == "True")
    })
}

/// The first restart is at once; then ten seconds, doubled each time.
fn back_off(restarts: u32) -> Duration {
    match restarts {
        0 => Duration::ZERO,
        restarts => BACK_OFF.saturating_mul(1 << (restarts - 1).min(10)).min(BACK_OFF_MOST),
    }
}

fn removal(pod: &Pod, stage: Stage, does: &Behaviour, now: Timestamp) -> Step {
    let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
    let grace = Duration::from_secs(u64::try_from(grace).unwrap_or(0));
    let Some(end) = pod.metadata.deletion_timestamp else { return Step::Wait(None) };
    if stage == Stage::Ended {
        return Step::Remove;
    }
    let asked = end.saturating_sub(SignedDuration::try_from(grace).unwrap_or_default());
    let asked = asked.unwrap_or(end);
    let left = left(asked, does.termination_delay.min(grace), now);
    match left.is_zero() {
        true => ended(stage, TERMINATED, None),
        false => Step::Wait(Some(left)),
    }
}

fn ended(stage: Stage, code: i32, reason: Option<&'static str>) -> Step {
    let restarts = match stage {
        Stage::Running { restarts } | Stage::BackOff { restarts } => restarts,
        _ => 0,
    };
    Step::Report(Report::Ended { code, restarts, reason })
}

fn deadline(pod: &Pod) -> Option<Timestamp> {
    let seconds = pod.spec.active_deadline_seconds?;
    pod.status.start_time?.checked_add(SignedDuration::from_secs(seconds)).ok()
}

fn after(since: Timestamp, delay: Duration, now: Timestamp, then: impl Fn() -> Report) -> Step {
    let left = left(since, delay, now);
    if left.is_zero() { Step::Report(then()) } else { Step::Wait(Some(left)) }
}

/// How much of a delay is left.
fn left(since: Timestamp, delay: Duration, now: Timestamp) -> Duration {
    // A status from a clock that is ahead does not make a pod wait longer.
    let passed = Duration::try_from(now.duration_since(since)).unwrap_or(Duration::ZERO);
    delay.saturating_sub(passed)
}

fn sooner(step: Step, due: Timestamp, now: Timestamp) -> Step {
    let Step::Wait(wait) = step else { return step };
    let until = Duration::try_from(due.duration_since(now)).unwrap_or(Duration::ZERO);
    Step::Wait(Some(wait.map_or(until, |wait| wait.min(until))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Mode, PodSettings};
    use serde_json::{Value, json};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).expect("in range")
    }

    fn does(text: &str) -> Behaviour {
        PodSettings::parse(text).expect("readable").resolve("uid", false, Mode::Well)
    }

    fn pod(value: &Value) -> Pod {
        Pod::decode(value.to_string().as_bytes()).expect("a pod")
    }

    fn waiting() -> Value {
        json!({"metadata": {"uid": "u"}, "spec": {"nodeName": "n", "containers": [{"name": "c"}]},
            "status": {"phase": "Pending"}})
    }

    fn is_running(restarts: u32) -> Value {
        let mut value = waiting();
        value["status"] = json!({"phase": "Running", "startTime": at(0).to_string(),
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"restartCount": restarts,
                "state": {"running": {"startedAt": at(0).to_string()}}}]});
        value
    }

    fn check(pod_value: &Value, text: &str, second: i64, expected: &Step) {
        let found = next(&pod(pod_value), &does(text), at(0), at(second));
        assert_eq!(found, *expected, "{pod_value} {text} after {second} s");
    }

    fn runs(restarts: u32, code: i32, is_ready: bool) -> Step {
        Step::Report(Report::Running { restarts, code, is_ready })
    }

    fn ends(code: i32, restarts: u32, reason: Option<&'static str>) -> Step {
        Step::Report(Report::Ended { code, restarts, reason })
    }

    fn wait(seconds: u64) -> Step {
        Step::Wait(Some(Duration::from_secs(seconds)))
    }

    #[test]
    fn a_pod_starts_after_its_delay() {
        check(&waiting(), "", 0, &runs(0, 0, true));
        check(&waiting(), "not-ready", 0, &runs(0, 0, false));
        check(&waiting(), "ready-delay=3s", 0, &runs(0, 0, false));
        check(&waiting(), "start-delay=2s", 0, &Step::Report(Report::Creating));
        let mut told = waiting();
        told["status"]["startTime"] = json!(at(0).to_string());
        check(&told, "start-delay=2s", 0, &wait(2));
        check(&told, "start-delay=2s", 2, &runs(0, 0, true));
        let held = Behaviour { holds_starts: true, ..does("") };
        assert_eq!(next(&pod(&waiting()), &held, at(0), at(9)), Step::Wait(None));
    }

    #[test]
    fn init_containers_run_one_after_the_other() {
        let mut value = waiting();
        value["spec"]["initContainers"] =
            json!([{"name": "s", "restartPolicy": "Always"}, {"name": "a"}, {"name": "b"}]);
        check(&value, "", 0, &Step::Report(Report::Init(0)));
        check(&value, "init-for=0s", 0, &runs(0, 0, true));
        let runs_now = json!({"state": {"running": {"startedAt": at(0).to_string()}}});
        value["status"]["initContainerStatuses"] = json!([runs_now, runs_now, {}]);
        check(&value, "init-for=4s", 1, &wait(3));
        check(&value, "init-for=4s", 4, &Step::Report(Report::Init(1)));
        value["status"]["initContainerStatuses"] = json!([runs_now, {}, runs_now]);
        check(&value, "init-for=4s", 4, &runs(0, 0, true));
    }

    #[test]
    fn a_pod_ends_or_restarts_by_its_policy() {
        let with = |policy: &str, restarts: u32| {
            let mut value = is_running(restarts);
            value["spec"]["restartPolicy"] = json!(policy);
            value
        };
        check(&with("Always", 0), "", 100, &Step::Wait(None));
        check(&with("Never", 0), "run-for=5s", 2, &wait(3));
        check(&with("Never", 0), "run-for=5s", 5, &ends(0, 0, None));
        check(&with("Never", 0), "run-for=5s,exit-code=2", 5, &ends(2, 0, None));
        check(&with("OnFailure", 0), "run-for=5s", 5, &ends(0, 0, None));
        check(&with("OnFailure", 0), "crash-loop", 1, &runs(1, 1, true));
        let back_off = Step::Report(Report::BackOff { restarts: 1, code: 1 });
        check(&with("OnFailure", 1), "crash-loop", 1, &back_off);
        check(&with("Always", 0), "run-for=5s", 5, &runs(1, 0, true));
    }

    #[test]
    fn restarts_wait_longer_each_time() {
        let mut value = waiting();
        let seconds = |restarts: u32| back_off(restarts).as_secs();
        let all = [0, 1, 2, 3, 6, 30].map(seconds);
        assert_eq!(all, [0, 10, 20, 40, 300, 300]);
        value["status"]["containerStatuses"] = json!([{"restartCount": 2,
            "lastState": {"terminated": {"finishedAt": at(0).to_string()}}}]);
        check(&value, "crash-loop", 5, &wait(15));
        check(&value, "crash-loop", 20, &runs(3, 1, true));
    }

    #[test]
    fn readiness_follows_what_is_said_and_the_gates() {
        check(&is_running(0), "not-ready", 9, &runs(0, 0, false));
        let mut value = is_running(0);
        value["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
        check(&value, "ready-delay=4s", 1, &wait(3));
        check(&value, "ready-delay=4s", 4, &runs(0, 0, true));
        value["spec"]["readinessGates"] = json!([{"conditionType": "example.com/gate"}]);
        check(&value, "", 9, &Step::Wait(None));
    }

    #[test]
    fn a_deletion_is_obeyed_within_its_grace() {
        let with_grace = |mut value: Value, grace: i64| {
            value["metadata"]["deletionTimestamp"] = json!(at(grace).to_string());
            value["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
            value
        };
        check(&with_grace(is_running(2), 30), "", 0, &ends(TERMINATED, 2, None));
        check(&with_grace(is_running(0), 30), "termination-delay=4s", 1, &wait(3));
        check(&with_grace(is_running(0), 2), "termination-delay=4s", 2, &ends(TERMINATED, 0, None));
        check(&with_grace(waiting(), 30), "", 0, &ends(TERMINATED, 0, None));
        let mut over = with_grace(is_running(0), 30);
        over["status"]["phase"] = json!("Failed");
        check(&over, "termination-delay=4s", 1, &Step::Remove);
    }

    #[test]
    fn a_deadline_ends_a_pod() {
        let mut value = is_running(0);
        value["spec"]["activeDeadlineSeconds"] = json!(10);
        check(&value, "", 4, &wait(6));
        check(&value, "run-for=5s", 4, &wait(1));
        check(&value, "", 10, &ends(TERMINATED, 0, Some("DeadlineExceeded")));
    }
}
