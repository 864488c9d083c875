//! RemovePodsViolatingTopologySpreadConstraint: evens out the domains of topology spread constraints.
//!
//! Cost: for each different constraint of a namespace, the namespace's pods once, and all nodes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, Pod, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use machinery::selector::Selector;
use serde::Deserialize;

use super::{Namespaces, Plugin, Point, Row, Scope, checked};
use crate::cycle::{Cycle, Refused};
use crate::fit;
use crate::policy::args_of;
use crate::snapshot::{Snapshot, namespace, node_name};

pub const ROW: Row = Row {
    name: "RemovePodsViolatingTopologySpreadConstraint",
    point: Point::Balance,
    build: |args| {
        let args: Args = args_of(args)?;
        let mut wrong = vec![];
        let scope = Scope::new(args.namespaces, args.label_selector.as_ref(), &mut wrong);
        let known = ["DoNotSchedule", "ScheduleAnyway"];
        let unknown = args.constraints.iter().filter(|one| !known.contains(&one.as_str()));
        wrong.extend(unknown.map(|one| {
            format!("constraint {one} is not one of map[DoNotSchedule:{{}} ScheduleAnyway:{{}}]")
        }));
        let mut actions = args.constraints;
        if actions.is_empty() {
            actions.push("DoNotSchedule".into());
        }
        let needs_room = args.topology_balance_node_fit.unwrap_or(true);
        checked(TopologySpread { actions, needs_room, scope }, wrong)
    },
};

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct Args {
    namespaces: Option<Namespaces>,
    label_selector: Option<LabelSelector>,
    constraints: Vec<String>,
    topology_balance_node_fit: Option<bool>,
}

struct TopologySpread {
    /// Values of `whenUnsatisfiable` that count.
    actions: Vec<String>,
    /// Pods go only if they fit on a node of a smaller domain.
    needs_room: bool,
    scope: Scope,
}

/// A constraint as one pod has it: selector and nodes depend on the pod.
struct Constraint<'a> {
    of: &'a TopologySpreadConstraint,
    pod: &'a Pod,
    selector: Selector,
    /// Labels that pods must share, by `matchLabelKeys`.
    shared: BTreeMap<&'a str, &'a str>,
}

impl<'a> Constraint<'a> {
    fn new(of: &'a TopologySpreadConstraint, pod: &'a Pod) -> Option<Self> {
        let selector = Selector::from_api(of.label_selector.as_ref()).ok()?;
        let keys = of.match_label_keys.iter().flatten();
        let value = |key: &'a String| {
            let labels = pod.metadata.labels.as_ref()?;
            Some((key.as_str(), labels.get(key)?.as_str()))
        };
        Some(Self { of, pod, selector, shared: keys.filter_map(value).collect() })
    }

    /// Whether two pods' constraints ask the same.
    fn equals(&self, other: &Self) -> bool {
        let nodes = |one: &Self| {
            let spec = one.pod.spec.clone().unwrap_or_default();
            let affinity = spec.affinity.and_then(|all| all.node_affinity);
            let required =
                affinity.and_then(|all| all.required_during_scheduling_ignored_during_execution);
            let by_affinity = one.honors_affinity().then_some((spec.node_selector, required));
            (by_affinity, one.honors_taints().then_some(spec.tolerations))
        };
        let asks = |one: &Self| {
            let of = one.of;
            (of.max_skew, of.topology_key.clone(), of.label_selector.clone(), one.shared.clone())
        };
        let (own, others) = (asks(self), asks(other));
        own == others && nodes(self) == nodes(other)
    }

    fn honors_affinity(&self) -> bool {
        self.of.node_affinity_policy.as_deref().unwrap_or("Honor") == "Honor"
    }

    fn honors_taints(&self) -> bool {
        self.of.node_taints_policy.as_deref() == Some("Honor")
    }

    fn includes(&self, node: &Node) -> bool {
        (!self.honors_affinity() || api::node_selectors::pod_selects(self.pod, node))
            && (!self.honors_taints() || fit::tolerates_hard(self.pod, node))
    }

    fn selects(&self, pod: &Pod) -> bool {
        let labels = pod.metadata.labels.as_ref();
        let has = |key: &str, value: &str| {
            labels.and_then(|all| all.get(key)).is_some_and(|is| is == value)
        };
        self.selector.matches(labels) && self.shared.iter().all(|(key, value)| has(key, value))
    }

    fn domain(&self, node: &Node) -> Option<String> {
        node.metadata.labels.as_ref()?.get(&self.of.topology_key).cloned()
    }
}

/// A domain's pods; those that go first are last.
struct Domain {
    name: String,
    pods: Vec<Arc<Pod>>,
}

impl TopologySpread {
    fn domains(
        &self,
        constraint: &Constraint<'_>,
        pods: &[Arc<Pod>],
        cycle: &Cycle<'_>,
    ) -> Vec<Domain> {
        let snapshot: &Snapshot = &cycle.snapshot;
        let mut domains: BTreeMap<String, Vec<Arc<Pod>>> = BTreeMap::new();
        for node in snapshot.nodes.values().filter(|node| constraint.includes(node)) {
            if let Some(name) = constraint.domain(node) {
                domains.entry(name).or_default();
            }
        }
        for pod in pods.iter().filter(|pod| constraint.selects(pod)) {
            let node = snapshot.nodes.get(node_name(pod));
            if let Some(name) = node.and_then(|node| constraint.domain(node)) {
                domains.entry(name).or_default().push(pod.clone());
            }
        }
        let mut domains: Vec<Domain> =
            domains.into_iter().map(|(name, pods)| Domain { name, pods }).collect();
        for domain in &mut domains {
            domain.pods.sort_by_cached_key(|pod| order(pod, cycle));
        }
        domains.sort_by_key(|domain| domain.pods.len());
        domains
    }

    /// Adds the pods that should leave large domains.
    fn balance(
        &self,
        constraint: &Constraint<'_>,
        mut domains: Vec<Domain>,
        cycle: &Cycle<'_>,
        going: &mut Vec<Arc<Pod>>,
    ) {
        let skew_limit = constraint.of.max_skew as usize;
        let sizes = || domains.iter().map(|domain| domain.pods.len());
        let (Some(least), Some(most)) = (sizes().min(), sizes().max()) else { return };
        if most - least <= skew_limit {
            return;
        }
        let average = sizes().sum::<usize>() as f64 / domains.len() as f64;
        let nodes = below(constraint, &domains, average, cycle);
        let has_room =
            |pod: &Pod| nodes.iter().any(|node| fit::elsewhere(&cycle.snapshot, pod, node));
        let (mut low, mut high) = (0, domains.len() - 1);
        while low < high {
            if domains[high].pods.len() as f64 <= average {
                high -= 1;
            }
            let Some(skew) = domains[high].pods.len().checked_sub(domains[low].pods.len()) else {
                break;
            };
            let count = moved(&domains, low, high, average, skew_limit);
            if skew <= skew_limit || count == 0 {
                low += 1;
                continue;
            }
            // Pods that fit elsewhere go first.
            domains[high].pods.sort_by_cached_key(|pod| has_room(pod));
            let from = domains[high].pods.len() - count;
            let leaving = domains[high].pods.split_off(from);
            let fitting = leaving.iter().filter(|pod| !self.needs_room || has_room(pod));
            going.extend(fitting.cloned());
            domains[low].pods.extend(leaving);
        }
    }
}

/// How many pods the larger domain gives to the smaller one.
fn moved(domains: &[Domain], low: usize, high: usize, average: f64, skew_limit: usize) -> usize {
    let (small, large) = (domains[low].pods.len() as f64, domains[high].pods.len() as f64);
    let half = ((large - small - skew_limit as f64) / 2.0).ceil();
    let most = (large - average).ceil().min((average - small).ceil()).min(half);
    if most > 0.0 { most as usize } else { 0 }
}

/// The nodes of domains with fewer pods than the average.
fn below<'a>(
    constraint: &Constraint<'_>,
    domains: &[Domain],
    average: f64,
    cycle: &'a Cycle<'_>,
) -> Vec<&'a Node> {
    let is_small = |name: &str| {
        domains.iter().any(|one| one.name == name && (one.pods.len() as f64) < average)
    };
    let nodes = cycle.snapshot.nodes.values().map(|node| &**node);
    let included = nodes.filter(|node| constraint.includes(node));
    included.filter(|node| constraint.domain(node).is_some_and(|name| is_small(&name))).collect()
}

/// Pods that stay, then those with a choice of nodes, then the others; high priority before low.
fn order(pod: &Pod, cycle: &Cycle<'_>) -> (bool, bool, Reverse<Option<i32>>) {
    let spec = pod.spec.as_ref();
    let chooses = spec.is_some_and(|spec| {
        let affinity = spec.affinity.as_ref().and_then(|all| all.node_affinity.as_ref());
        spec.node_selector.is_some() || affinity.is_some()
    });
    (cycle.may_go(pod), !chooses, Reverse(spec.and_then(|spec| spec.priority)))
}

#[async_trait]
impl Plugin for TopologySpread {
    async fn run(&self, cycle: &Cycle<'_>) {
        let mut by_namespace: BTreeMap<&str, Vec<Arc<Pod>>> = BTreeMap::new();
        for pod in cycle.snapshot.nodes.keys().flat_map(|node| cycle.snapshot.running(node)) {
            if self.scope.has(pod) && cycle.may_go(pod) {
                by_namespace.entry(namespace(pod)).or_default().push(pod.clone());
            }
        }
        let mut going = vec![];
        for pods in by_namespace.values() {
            let mut constraints: Vec<Constraint<'_>> = vec![];
            for pod in pods {
                let spec = pod.spec.as_ref();
                let all = spec
                    .into_iter()
                    .flat_map(|spec| spec.topology_spread_constraints.iter().flatten());
                for one in all.filter(|one| self.actions.contains(&one.when_unsatisfiable)) {
                    let Some(one) = Constraint::new(one, pod) else { continue };
                    if !constraints.iter().any(|known| known.equals(&one)) {
                        constraints.push(one);
                    }
                }
            }
            for constraint in &constraints {
                let domains = self.domains(constraint, pods, cycle);
                self.balance(constraint, domains, cycle, &mut going);
            }
        }
        let mut full = std::collections::BTreeSet::new();
        for pod in going {
            if full.contains(node_name(&pod)) || !cycle.may_go(&pod) || !cycle.may_move(&pod) {
                continue;
            }
            match cycle.evict(&pod).await {
                Ok(()) | Err(Refused::ThisPod) => {}
                Err(Refused::NodeLimit) => drop(full.insert(node_name(&pod).to_owned())),
                Err(Refused::TotalLimit) => return,
            }
        }
    }
}
