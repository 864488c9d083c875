//! RemoveFailedPods: evicts pods in the phase Failed.

use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;

use super::{
    Namespaces, Plugin, Point, Row, Scope, checked, end_reason, evict_all, exit_code, has_owner_of,
    statuses, waiting_reason,
};
use crate::cycle::Cycle;
use crate::policy::args_of;
use crate::snapshot::phase;

pub const ROW: Row = Row {
    name: "RemoveFailedPods",
    point: Point::Deschedule,
    build: |args| {
        let args: Args = args_of(args)?;
        let mut wrong = vec![];
        let scope = Scope::new(args.namespaces.clone(), args.label_selector.as_ref(), &mut wrong);
        checked(FailedPods { args, scope }, wrong)
    },
};

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Args {
    namespaces: Option<Namespaces>,
    label_selector: Option<LabelSelector>,
    exclude_owner_kinds: Vec<String>,
    min_pod_lifetime_seconds: Option<i64>,
    reasons: Vec<String>,
    exit_codes: Vec<i32>,
    including_init_containers: bool,
}

impl Args {
    fn concerns(&self, pod: &Pod, now: Timestamp) -> bool {
        let none = PodStatus::default();
        let status = pod.status.as_ref().unwrap_or(&none);
        phase(pod) == "Failed"
            && self.is_old(pod, now)
            && !has_owner_of(pod, &self.exclude_owner_kinds)
            && (self.reasons.is_empty() || self.has_reason(status))
            && (self.exit_codes.is_empty()
                || statuses(status, self.including_init_containers)
                    .filter_map(exit_code)
                    .any(|code| self.exit_codes.contains(&code)))
    }

    fn is_old(&self, pod: &Pod, now: Timestamp) -> bool {
        let Some(least) = self.min_pod_lifetime_seconds else { return true };
        let made = pod.metadata.creation_timestamp.as_ref();
        made.is_some_and(|made| now.duration_since(made.0).as_secs() >= least)
    }

    fn has_reason(&self, status: &PodStatus) -> bool {
        let wanted = |reason: &str| self.reasons.iter().any(|one| one == reason);
        let mut containers = statuses(status, self.including_init_containers);
        status.reason.as_deref().is_some_and(wanted)
            || containers.any(|one| {
                waiting_reason(one).is_some_and(wanted) || end_reason(one).is_some_and(wanted)
            })
    }
}

struct FailedPods {
    args: Args,
    scope: Scope,
}

#[async_trait]
impl Plugin for FailedPods {
    async fn run(&self, cycle: &Cycle<'_>) {
        for node in cycle.snapshot.nodes.keys() {
            let all = cycle.snapshot.all(node);
            let pods: Vec<&Arc<Pod>> = all
                .filter(|pod| {
                    self.args.concerns(pod, cycle.now) && self.scope.may_evict(cycle, pod)
                })
                .collect();
            if !evict_all(cycle, pods).await {
                return;
            }
        }
    }
}
