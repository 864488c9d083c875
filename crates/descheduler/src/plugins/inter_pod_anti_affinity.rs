//! RemovePodsViolatingInterPodAntiAffinity: evicts pods whose required anti-affinity another pod breaks.
//!
//! Cost: for each pod with such a term, the pods of the namespaces that it names.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde::Deserialize;

use super::{Namespaces, Plugin, Point, Row, Scope, checked, sort_for_eviction};
use crate::cycle::{Cycle, Refused};
use crate::fit::{anti_affinity, is_about};
use crate::policy::args_of;
use crate::snapshot::{Snapshot, name_of, namespace};

pub const ROW: Row = Row {
    name: "RemovePodsViolatingInterPodAntiAffinity",
    point: Point::Deschedule,
    build: |args| {
        let args: Args = args_of(args)?;
        let mut wrong = vec![];
        let scope = Scope::new(args.namespaces.clone(), args.label_selector.as_ref(), &mut wrong);
        checked(InterPodAntiAffinity { scope }, wrong)
    },
};

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Args {
    namespaces: Option<Namespaces>,
    label_selector: Option<LabelSelector>,
}

struct InterPodAntiAffinity {
    scope: Scope,
}

/// Pods in scope, by namespace. Evicted ones leave.
type Present = BTreeMap<String, Vec<Arc<Pod>>>;

fn is_repelled(pod: &Pod, node: &Node, snapshot: &Snapshot, present: &Present) -> bool {
    anti_affinity(pod).iter().any(|term| {
        let own = [namespace(pod).to_owned()];
        let named = term.namespaces.as_deref().filter(|named| !named.is_empty()).unwrap_or(&own);
        let others = named.iter().flat_map(|one| present.get(one).into_iter().flatten());
        others.into_iter().any(|other| {
            is_about(term, pod, other)
                && snapshot
                    .node_of(other)
                    .is_some_and(|there| share(node, there, &term.topology_key))
        })
    })
}

/// Whether both nodes are in one domain.
fn share(one: &Node, other: &Node, key: &str) -> bool {
    let value = |node: &Node| node.metadata.labels.as_ref()?.get(key).cloned();
    name_of(one) == name_of(other) || value(one).is_some() && value(one) == value(other)
}

#[async_trait]
impl Plugin for InterPodAntiAffinity {
    async fn run(&self, cycle: &Cycle<'_>) {
        let snapshot = &cycle.snapshot;
        let mut present = Present::new();
        for pod in snapshot.nodes.keys().flat_map(|node| snapshot.running(node)) {
            if self.scope.has(pod) {
                present.entry(namespace(pod).to_owned()).or_default().push(pod.clone());
            }
        }
        for (name, node) in &snapshot.nodes {
            let in_scope = snapshot.running(name).filter(|pod| self.scope.has(pod));
            let mut pods: Vec<Arc<Pod>> = in_scope.cloned().collect();
            sort_for_eviction(&mut pods);
            for pod in pods {
                if !is_repelled(&pod, node, snapshot, &present)
                    || !cycle.may_go(&pod)
                    || !cycle.may_move(&pod)
                {
                    continue;
                }
                match cycle.evict(&pod).await {
                    // Those that only this pod repelled may stay.
                    Ok(()) => {
                        let of_namespace = present.entry(namespace(&pod).to_owned()).or_default();
                        of_namespace.retain(|one| !Arc::ptr_eq(one, &pod));
                    }
                    Err(Refused::ThisPod) => {}
                    Err(Refused::NodeLimit) => break,
                    Err(Refused::TotalLimit) => return,
                }
            }
        }
    }
}
