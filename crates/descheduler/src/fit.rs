//! Whether a pod would fit on a node: part of what the scheduler asks.
//!
//! In: the snapshot, a pod, a node. Out: yes or no. Cost: the pods of that node. Pure.
//! Upstream: `pkg/descheduler/node` NodeFit.

use std::collections::BTreeMap;

use api::node_selectors::pod_selects;
use api::quota::pod_requests;
use api::taints::tolerates;
use k8s_openapi::api::core::v1::{Node, Pod, PodAffinityTerm, Taint, Toleration};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use machinery::quantity;
use machinery::selector::Selector;

use crate::snapshot::{Snapshot, name_of, namespace, node_name};

/// Amounts by resource: cpu in thousandths, others in whole units.
pub type Amounts = BTreeMap<String, i64>;

pub const PODS: &str = "pods";

/// The amounts of a list.
pub fn amounts(list: &BTreeMap<String, Quantity>) -> Amounts {
    let amount = |(name, given): (&String, &Quantity)| {
        let is = if name == "cpu" { quantity::milli(given) } else { quantity::units(given) };
        (name.clone(), is)
    };
    list.iter().map(amount).collect()
}

/// The requests of a pod.
pub fn requests(pod: &Pod) -> Amounts {
    amounts(&pod_requests(pod))
}

/// The allocatable amounts of a node, or its capacity.
pub fn capacity(node: &Node) -> Amounts {
    let Some(status) = &node.status else { return Amounts::new() };
    let has = |list: &&BTreeMap<String, Quantity>| !list.is_empty();
    let list = status.allocatable.as_ref().filter(has).or(status.capacity.as_ref());
    list.map(amounts).unwrap_or_default()
}

/// The requests of a node's running pods, and their number.
pub fn used(snapshot: &Snapshot, node: &str) -> Amounts {
    let mut total = Amounts::new();
    let mut count = 0;
    for pod in snapshot.running(node) {
        count += 1;
        for (name, amount) in requests(pod) {
            *total.entry(name).or_default() += amount;
        }
    }
    total.insert(PODS.into(), count);
    total
}

/// Whether the pod fits on a node that is not its own.
pub fn elsewhere(snapshot: &Snapshot, pod: &Pod, node: &Node) -> bool {
    node_name(pod) != name_of(node) && fits(snapshot, pod, node)
}

/// Whether the pod fits on the node. It has its room on its own node already.
pub fn fits(snapshot: &Snapshot, pod: &Pod, node: &Node) -> bool {
    !is_unschedulable(node)
        && pod_selects(pod, node)
        && tolerates_hard(pod, node)
        && !repels(snapshot, pod, node)
        && (node_name(pod) == name_of(node) || has_room(snapshot, pod, node))
}

pub fn is_unschedulable(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false)
}

pub fn taints(node: &Node) -> &[Taint] {
    node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default()
}

pub fn tolerations(pod: &Pod) -> &[Toleration] {
    pod.spec.as_ref().and_then(|spec| spec.tolerations.as_deref()).unwrap_or_default()
}

/// Whether the tolerations cover all taints that matter.
pub fn covers(
    tolerations: &[Toleration],
    taints: &[Taint],
    matters: impl Fn(&Taint) -> bool,
) -> bool {
    let mut all = taints.iter().filter(|taint| matters(taint));
    all.all(|taint| tolerations.iter().any(|one| tolerates(one, taint)))
}

pub fn is_hard(taint: &Taint) -> bool {
    matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute")
}

pub fn tolerates_hard(pod: &Pod, node: &Node) -> bool {
    covers(tolerations(pod), taints(node), is_hard)
}

/// The pod's required terms of anti-affinity.
pub fn anti_affinity(pod: &Pod) -> &[PodAffinityTerm] {
    let affinity = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref());
    let anti = affinity.and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let required =
        anti.and_then(|anti| anti.required_during_scheduling_ignored_during_execution.as_deref());
    required.unwrap_or_default()
}

/// Whether the pod's term is about the other pod.
pub fn is_about(term: &PodAffinityTerm, pod: &Pod, other: &Pod) -> bool {
    let Ok(selector) = Selector::from_api(term.label_selector.as_ref()) else { return false };
    let given = term.namespaces.as_deref().unwrap_or_default();
    let is_there = match given {
        [] => namespace(other) == namespace(pod),
        given => given.iter().any(|one| one == namespace(other)),
    };
    is_there
        && other.metadata.name != pod.metadata.name
        && selector.matches(other.metadata.labels.as_ref())
}

fn repels(snapshot: &Snapshot, pod: &Pod, node: &Node) -> bool {
    let has = |key: &str| node.metadata.labels.as_ref().is_some_and(|all| all.contains_key(key));
    let mut terms = anti_affinity(pod).iter().filter(|term| has(&term.topology_key));
    terms.any(|term| snapshot.running(name_of(node)).any(|other| is_about(term, pod, other)))
}

fn has_room(snapshot: &Snapshot, pod: &Pod, node: &Node) -> bool {
    let (capacity, used) = (capacity(node), used(snapshot, name_of(node)));
    let of = |all: &Amounts, name: &str| all.get(name).copied().unwrap_or(0);
    let free = |name: &str| of(&capacity, name) - of(&used, name);
    free(PODS) > 0 && requests(pod).iter().all(|(name, amount)| *amount <= free(name))
}
