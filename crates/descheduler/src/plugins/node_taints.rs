//! RemovePodsViolatingNodeTaints: evicts pods that do not tolerate their node's taints any more.

use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Pod, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;

use super::{Namespaces, Plugin, Point, Row, Scope, checked, evict_all};
use crate::cycle::Cycle;
use crate::fit::{covers, taints, tolerations};
use crate::policy::args_of;

pub const ROW: Row = Row {
    name: "RemovePodsViolatingNodeTaints",
    point: Point::Deschedule,
    build: |args| {
        let args: Args = args_of(args)?;
        let mut wrong = vec![];
        let scope = Scope::new(args.namespaces.clone(), args.label_selector.as_ref(), &mut wrong);
        if args.included_taints.is_some() && !args.excluded_taints.is_empty() {
            let both = "either includedTaints or excludedTaints can be set, but not both";
            wrong.push(both.into());
        }
        checked(NodeTaints { args, scope }, wrong)
    },
};

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Args {
    namespaces: Option<Namespaces>,
    label_selector: Option<LabelSelector>,
    include_prefer_no_schedule: bool,
    /// `key` or `key=value`
    excluded_taints: Vec<String>,
    included_taints: Option<Vec<String>>,
}

impl Args {
    fn matters(&self, taint: &Taint) -> bool {
        let effect = match taint.effect.as_str() {
            "NoSchedule" => true,
            "PreferNoSchedule" => self.include_prefer_no_schedule,
            _ => false,
        };
        let pair = taint.value.as_ref().map(|value| format!("{}={value}", taint.key));
        let named = |list: &[String]| {
            list.iter().any(|one| *one == taint.key || Some(one) == pair.as_ref())
        };
        effect && !named(&self.excluded_taints) && self.included_taints.as_deref().is_none_or(named)
    }
}

struct NodeTaints {
    args: Args,
    scope: Scope,
}

#[async_trait]
impl Plugin for NodeTaints {
    async fn run(&self, cycle: &Cycle<'_>) {
        for (name, node) in &cycle.snapshot.nodes {
            let all = cycle.snapshot.running(name);
            let pods: Vec<&Arc<Pod>> = all
                .filter(|pod| {
                    !covers(tolerations(pod), taints(node), |taint| self.args.matters(taint))
                        && self.scope.may_evict(cycle, pod)
                })
                .collect();
            if !evict_all(cycle, pods).await {
                return;
            }
        }
    }
}
