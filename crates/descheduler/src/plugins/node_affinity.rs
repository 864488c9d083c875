//! RemovePodsViolatingNodeAffinity: evicts pods whose node affinity, required or preferred, another node meets
//! better.

use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, NodeAffinity, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;

use super::{Namespaces, Plugin, Point, Row, Scope, checked, evict_all};
use crate::cycle::Cycle;
use crate::fit;
use crate::policy::args_of;
use crate::snapshot::name_of;

pub const ROW: Row = Row {
    name: "RemovePodsViolatingNodeAffinity",
    point: Point::Deschedule,
    build: |args| {
        let args: Args = args_of(args)?;
        let mut wrong = vec![];
        let scope = Scope::new(args.namespaces.clone(), args.label_selector.as_ref(), &mut wrong);
        if args.node_affinity_type.is_empty() {
            wrong.push("nodeAffinityType needs to be set".into());
        }
        checked(ByNodeAffinity { kinds: args.node_affinity_type, scope }, wrong)
    },
};

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Args {
    namespaces: Option<Namespaces>,
    label_selector: Option<LabelSelector>,
    node_affinity_type: Vec<String>,
}

struct ByNodeAffinity {
    kinds: Vec<String>,
    scope: Scope,
}

fn affinity(pod: &Pod) -> Option<&NodeAffinity> {
    pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()
}

/// The sum of the weights of preferred terms that match the node.
fn weight(pod: &Pod, node: &Node) -> i32 {
    let empty = std::collections::BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&empty);
    let preferred = affinity(pod)
        .and_then(|all| all.preferred_during_scheduling_ignored_during_execution.as_deref());
    let matching = preferred
        .unwrap_or_default()
        .iter()
        .filter(|one| api::node_selectors::term_matches(&one.preference, name_of(node), labels));
    matching.map(|one| one.weight).sum()
}

/// Reports whether the pod should leave its node for the sake of this kind of affinity.
fn violates(kind: &str, pod: &Pod, node: &Node, cycle: &Cycle<'_>) -> bool {
    match kind {
        "requiredDuringSchedulingIgnoredDuringExecution" => {
            let required = affinity(pod)
                .and_then(|all| all.required_during_scheduling_ignored_during_execution.as_ref());
            required.is_some() && !api::node_selectors::pod_selects(pod, node)
        }
        "preferredDuringSchedulingIgnoredDuringExecution" => {
            let best = cycle.snapshot.nodes.values().map(|one| weight(pod, one)).max();
            best.unwrap_or(0) > weight(pod, node)
        }
        _ => false,
    }
}

fn fits_somewhere(pod: &Pod, cycle: &Cycle<'_>) -> bool {
    cycle.snapshot.nodes.values().any(|node| fit::fits(&cycle.snapshot, pod, node))
}

#[async_trait]
impl Plugin for ByNodeAffinity {
    async fn run(&self, cycle: &Cycle<'_>) {
        for kind in &self.kinds {
            for (name, node) in &cycle.snapshot.nodes {
                let all = cycle.snapshot.running(name);
                let pods: Vec<&Arc<Pod>> = all
                    .filter(|pod| {
                        violates(kind, pod, node, cycle)
                            && self.scope.may_evict(cycle, pod)
                            && fits_somewhere(pod, cycle)
                    })
                    .collect();
                if !evict_all(cycle, pods).await {
                    return;
                }
            }
        }
    }
}
