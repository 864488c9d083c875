//! RemovePodsHavingTooManyRestarts: evicts pods whose containers restart again and again.

use std::cmp::Reverse;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;

use super::{Namespaces, Plugin, Point, Row, Scope, checked, evict_all, statuses, waiting_reason};
use crate::cycle::Cycle;
use crate::policy::args_of;

pub const ROW: Row = Row {
    name: "RemovePodsHavingTooManyRestarts",
    point: Point::Deschedule,
    build: |args| {
        let args: Args = args_of(args)?;
        let mut wrong = vec![];
        let scope = Scope::new(args.namespaces.clone(), args.label_selector.as_ref(), &mut wrong);
        if args.pod_restart_threshold < 1 {
            wrong.push("invalid PodsHavingTooManyRestarts threshold".into());
        }
        if args.states.iter().any(|state| !STATES.contains(&state.as_str())) {
            wrong.push(format!("states must be one of [{}]", STATES.join(" ")));
        }
        checked(TooManyRestarts { args, scope }, wrong)
    },
};

/// Upstream accepts these words.
const STATES: [&str; 2] = ["CrashLoopBackOff", "Running"];

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Args {
    namespaces: Option<Namespaces>,
    label_selector: Option<LabelSelector>,
    pod_restart_threshold: i32,
    including_init_containers: bool,
    states: Vec<String>,
}

impl Args {
    fn restarts(&self, pod: &Pod) -> i32 {
        let Some(status) = &pod.status else { return 0 };
        statuses(status, self.including_init_containers).map(|one| one.restart_count).sum()
    }

    fn is_in_state(&self, status: &PodStatus) -> bool {
        let wanted = |word: &str| self.states.iter().any(|one| one == word);
        let mut containers = statuses(status, self.including_init_containers);
        status.phase.as_deref().is_some_and(wanted)
            || containers.any(|one| waiting_reason(one).is_some_and(wanted))
    }

    fn concerns(&self, pod: &Pod) -> bool {
        self.restarts(pod) >= self.pod_restart_threshold
            && (self.states.is_empty()
                || pod.status.as_ref().is_some_and(|status| self.is_in_state(status)))
    }
}

struct TooManyRestarts {
    args: Args,
    scope: Scope,
}

#[async_trait]
impl Plugin for TooManyRestarts {
    async fn run(&self, cycle: &Cycle<'_>) {
        for node in cycle.snapshot.nodes.keys() {
            let all = cycle.snapshot.all(node);
            let concerns =
                |pod: &&Arc<Pod>| self.args.concerns(pod) && self.scope.may_evict(cycle, pod);
            let mut pods: Vec<&Arc<Pod>> = all.filter(concerns).collect();
            pods.sort_by_key(|pod| Reverse(self.args.restarts(pod)));
            if !evict_all(cycle, pods).await {
                return;
            }
        }
    }
}
