//! PodLifeTime: evicts pods that are old, or have been in a state for long; the oldest first.

use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;

use super::{
    Namespaces, Plugin, Point, Row, Scope, checked, end_reason, exit_code, has_owner_of, statuses,
    waiting_reason,
};
use crate::cycle::{Cycle, Refused};
use crate::policy::args_of;

pub const ROW: Row = Row {
    name: "PodLifeTime",
    point: Point::Deschedule,
    build: |args| {
        let args: Args = args_of(args)?;
        let mut wrong = vec![];
        let scope = Scope::new(args.namespaces.clone(), args.label_selector.as_ref(), &mut wrong);
        args.check(&mut wrong);
        checked(PodLifeTime { args, scope }, wrong)
    },
};

/// Upstream accepts these words.
const STATES: [&str; 24] = [
    "Completed",
    "ContainerCannotRun",
    "ContainerCreating",
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "DeadlineExceeded",
    "ErrImagePull",
    "Error",
    "Evicted",
    "Failed",
    "ImagePullBackOff",
    "InvalidImageName",
    "NodeAffinity",
    "NodeLost",
    "OOMKilled",
    "Pending",
    "PodInitializing",
    "Running",
    "Shutdown",
    "StartError",
    "Succeeded",
    "UnexpectedAdmissionError",
    "Unknown",
];

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Args {
    namespaces: Option<Namespaces>,
    label_selector: Option<LabelSelector>,
    owner_kinds: Option<Namespaces>,
    max_pod_life_time_seconds: Option<i64>,
    states: Vec<String>,
    conditions: Vec<Condition>,
    exit_codes: Vec<i32>,
    including_init_containers: bool,
    including_ephemeral_containers: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
    min_time_since_last_transition_seconds: Option<i64>,
}

impl Args {
    fn check(&self, wrong: &mut Vec<String>) {
        if let Some(kinds) = &self.owner_kinds
            && !kinds.include.is_empty()
            && !kinds.exclude.is_empty()
        {
            wrong.push("only one of Include/Exclude ownerKinds can be set".into());
        }
        if self.states.iter().any(|state| !STATES.contains(&state.as_str())) {
            wrong.push(format!("states must be one of [{}]", STATES.join(" ")));
        }
        for (at, one) in self.conditions.iter().enumerate() {
            let is_empty = one.kind.is_empty() && one.status.is_empty() && one.reason.is_empty();
            if is_empty && one.min_time_since_last_transition_seconds.is_none() {
                wrong.push(format!("conditions[{at}]: at least one of type, status, reason, or minTimeSinceLastTransitionSeconds must be set"));
            }
        }
        let has_filter = self.max_pod_life_time_seconds.is_some()
            || !self.states.is_empty()
            || !self.conditions.is_empty()
            || !self.exit_codes.is_empty();
        if !has_filter {
            wrong.push("at least one filtering criterion must be specified (maxPodLifeTimeSeconds, states, conditions, or exitCodes)".into());
        }
    }

    fn concerns(&self, pod: &Pod, now: Timestamp) -> bool {
        let none = PodStatus::default();
        let status = pod.status.as_ref().unwrap_or(&none);
        self.is_old(pod, now)
            && (self.states.is_empty() || self.is_in_state(status))
            && self.has_owner(pod)
            && (self.conditions.is_empty() || self.has_condition(status, now))
            && (self.exit_codes.is_empty()
                || statuses(status, self.including_init_containers)
                    .filter_map(exit_code)
                    .any(|code| self.exit_codes.contains(&code)))
    }

    fn is_old(&self, pod: &Pod, now: Timestamp) -> bool {
        let Some(most) = self.max_pod_life_time_seconds else { return true };
        let made = pod.metadata.creation_timestamp.as_ref();
        made.is_some_and(|made| now.duration_since(made.0).as_secs() > most)
    }

    fn is_in_state(&self, status: &PodStatus) -> bool {
        let wanted = |word: &str| self.states.iter().any(|one| one == word);
        let ephemeral = status.ephemeral_container_statuses.iter().flatten();
        let ephemeral = ephemeral.filter(|_| self.including_ephemeral_containers);
        let mut containers = statuses(status, self.including_init_containers).chain(ephemeral);
        status.phase.as_deref().is_some_and(wanted)
            || status.reason.as_deref().is_some_and(wanted)
            || containers.any(|one| {
                waiting_reason(one).is_some_and(wanted) || end_reason(one).is_some_and(wanted)
            })
    }

    fn has_owner(&self, pod: &Pod) -> bool {
        let Some(kinds) = &self.owner_kinds else { return true };
        match (kinds.include.is_empty(), kinds.exclude.is_empty()) {
            (false, _) => has_owner_of(pod, &kinds.include),
            (true, false) => !has_owner_of(pod, &kinds.exclude),
            (true, true) => true,
        }
    }

    fn has_condition(&self, status: &PodStatus, now: Timestamp) -> bool {
        let mut all = status.conditions.iter().flatten();
        all.any(|is| self.conditions.iter().any(|wanted| wanted.matches(is, now)))
    }
}

impl Condition {
    fn matches(&self, is: &PodCondition, now: Timestamp) -> bool {
        let fits = |wanted: &str, is: &str| wanted.is_empty() || wanted == is;
        let lasts = self.min_time_since_last_transition_seconds.is_none_or(|least| {
            let since = is.last_transition_time.as_ref();
            since.is_some_and(|since| now.duration_since(since.0).as_secs() >= least)
        });
        fits(&self.kind, &is.type_)
            && fits(&self.status, &is.status)
            && fits(&self.reason, is.reason.as_deref().unwrap_or_default())
            && lasts
    }
}

struct PodLifeTime {
    args: Args,
    scope: Scope,
}

#[async_trait]
impl Plugin for PodLifeTime {
    async fn run(&self, cycle: &Cycle<'_>) {
        let nodes = cycle.snapshot.nodes.keys();
        let mut pods: Vec<&Arc<Pod>> = nodes
            .flat_map(|node| cycle.snapshot.all(node))
            .filter(|pod| self.args.concerns(pod, cycle.now) && self.scope.may_evict(cycle, pod))
            .collect();
        pods.sort_by_key(|pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0));
        for pod in pods {
            if cycle.evict(pod).await == Err(Refused::TotalLimit) {
                return;
            }
        }
    }
}
