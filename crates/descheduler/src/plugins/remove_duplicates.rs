//! RemoveDuplicates: spreads the pods of one owner with the same images over the nodes that could run them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{NodeSelector, Pod, Toleration};
use serde::Deserialize;

use super::{Namespaces, Plugin, Point, Row, Scope, checked, evict_all, has_owner_of};
use crate::cycle::Cycle;
use crate::fit;
use crate::policy::args_of;
use crate::snapshot::namespace;

pub const ROW: Row = Row {
    name: "RemoveDuplicates",
    point: Point::Balance,
    build: |args| {
        let args: Args = args_of(args)?;
        let mut wrong = vec![];
        let scope = Scope::new(args.namespaces, None, &mut wrong);
        checked(RemoveDuplicates { excluded: args.exclude_owner_kinds, scope }, wrong)
    },
};

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Args {
    namespaces: Option<Namespaces>,
    exclude_owner_kinds: Vec<String>,
}

struct RemoveDuplicates {
    excluded: Vec<String>,
    scope: Scope,
}

/// Namespace, the owner's kind and name, and the images.
type Owner = (String, String, String, Vec<String>);

#[derive(Default)]
struct Found {
    /// How many pods each owner has.
    counts: BTreeMap<Owner, usize>,
    /// The pods of an owner beyond the first on each node.
    surplus: BTreeMap<Owner, BTreeMap<String, Vec<Arc<Pod>>>>,
}

fn images(pod: &Pod) -> Vec<String> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut images: Vec<String> =
        containers.map(|one| one.image.clone().unwrap_or_default()).collect();
    images.sort();
    images
}

fn owners(pod: &Pod) -> Vec<Owner> {
    let (all, images) = (pod.metadata.owner_references.iter().flatten(), images(pod));
    let owner = |kind: &String, name: &String| {
        (namespace(pod).to_owned(), kind.clone(), name.clone(), images.clone())
    };
    let mut owners: Vec<Owner> = all.map(|one| owner(&one.kind, &one.name)).collect();
    owners.sort();
    owners
}

impl RemoveDuplicates {
    fn find(&self, cycle: &Cycle<'_>) -> Found {
        let mut found = Found::default();
        for node in cycle.snapshot.nodes.keys() {
            // Pods with the same owners and images are duplicates of the first of them.
            let mut seen = BTreeSet::new();
            for pod in cycle.snapshot.running(node) {
                if has_owner_of(pod, &self.excluded) || !self.scope.may_evict(cycle, pod) {
                    continue;
                }
                let owners = owners(pod);
                if owners.is_empty() {
                    continue;
                }
                for owner in &owners {
                    *found.counts.entry(owner.clone()).or_default() += 1;
                }
                if seen.insert(owners.clone()) {
                    continue;
                }
                for owner in owners {
                    let by_node = found.surplus.entry(owner).or_default();
                    by_node.entry(node.clone()).or_default().push(pod.clone());
                }
            }
        }
        found
    }
}

/// What decides about nodes: pods with equal demands could run on the same ones.
type Demands<'a> =
    (&'a [Toleration], Option<&'a BTreeMap<String, String>>, Option<&'a NodeSelector>);

fn demands(pod: &Pod) -> Demands<'_> {
    let spec = pod.spec.as_ref();
    let affinity = spec.and_then(|spec| spec.affinity.as_ref()?.node_affinity.as_ref());
    let required =
        affinity.and_then(|one| one.required_during_scheduling_ignored_during_execution.as_ref());
    (fit::tolerations(pod), spec.and_then(|spec| spec.node_selector.as_ref()), required)
}

/// How many nodes could run the surplus pods.
fn targets(cycle: &Cycle<'_>, surplus: &BTreeMap<String, Vec<Arc<Pod>>>) -> usize {
    let mut distinct: Vec<&Arc<Pod>> = vec![];
    for pod in surplus.values().flatten() {
        if !distinct.iter().any(|one| demands(one) == demands(pod)) {
            distinct.push(pod);
        }
    }
    let mut targets = BTreeSet::new();
    for pod in distinct {
        let fitting = cycle.snapshot.nodes.iter().filter(|(_, node)| {
            fit::tolerates_hard(pod, node) && api::node_selectors::pod_selects(pod, node)
        });
        let fitting: Vec<&String> = fitting.map(|(name, _)| name).collect();
        if fitting.len() > 1 {
            targets.extend(fitting);
        }
    }
    targets.len()
}

#[async_trait]
impl Plugin for RemoveDuplicates {
    async fn run(&self, cycle: &Cycle<'_>) {
        let found = self.find(cycle);
        for (owner, surplus) in &found.surplus {
            let targets = targets(cycle, surplus);
            if targets < 2 {
                continue;
            }
            let count = found.counts.get(owner).copied().unwrap_or(0);
            // The most pods that a node has when all nodes have the same.
            let even = count.div_ceil(targets).max(1);
            for pods in surplus.values() {
                // The first pod of the node is not in the list.
                let going = pods.get(even - 1..).unwrap_or_default();
                if !evict_all(cycle, going).await {
                    return;
                }
            }
        }
    }
}
