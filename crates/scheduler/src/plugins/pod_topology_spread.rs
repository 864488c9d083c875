//! Spreads pods over the values of a topology key: hard constraints filter, soft ones score.
//!
//! A pod that says nothing is spread by the profile's constraints, together with the pods of its
//! services and controller; upstream's own are over nodes and zones, softly.
//!
//! Deviation: pods that are going are not counted, so that a victim of preemption that is going already
//! changes no count; upstream takes it off a number that it was never part of.

use std::collections::HashSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::TopologySpreadConstraint;
use machinery::selector::Selector;

use crate::cluster::Cluster;
use crate::framework::{
    ClusterEvent, CycleState, ExtensionPoints, Filter, MAX_SCORE, Next, PreFilter, PreScore,
    Rejection, Row, Score,
};
use crate::node::NodeInfo;
use crate::objects::Objects;
use crate::pod::{PodInfo, Spread};
use crate::topology::{Scope, View, Who};

const NAME: &str = "PodTopologySpread";
const SCORE: &str = "PodTopologySpread/score";
const HOSTNAME: &str = "kubernetes.io/hostname";
/// Upstream: `systemDefaultConstraints`, key and skew.
const SYSTEM: [(&str, i32); 2] = [(HOSTNAME, 3), ("topology.kubernetes.io/zone", 5)];

pub const ROW: Row = Row {
    name: NAME,
    weight: 2,
    build: |handle| {
        let plugin = Arc::new(PodTopologySpread {
            defaults: defaults(handle.args.default_spread.as_deref()),
            is_listed: handle.args.default_spread.is_some(),
            objects: handle.objects.clone(),
        });
        ExtensionPoints {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin.clone()),
            pre_score: Some(plugin.clone()),
            score: Some(plugin),
            ..Default::default()
        }
    },
    hint: spread_changes,
};

/// How pods are spread changes. A pod without constraints of its own has the profile's.
pub(super) fn spread_changes(pod: &PodInfo, event: &ClusterEvent) -> bool {
    let hard = || pod.spread.iter().filter(|one| one.hard);
    let is_own = !pod.spread.is_empty();
    let counts = |one: &Spread, other: &PodInfo| one.selector.matches(Some(&other.labels));
    let near = |other: &PodInfo| other.key.namespace == pod.key.namespace;
    match event {
        ClusterEvent::PodAssigned(other) | ClusterEvent::PodRemoved(other) => {
            near(other) && (!is_own || hard().any(|one| counts(one, other)))
        }
        ClusterEvent::PodChanged { old, new } => {
            let differs = |one: &Spread| counts(one, old) != counts(one, new);
            near(new) && (hard().any(differs) || !is_own && old.labels != new.labels)
        }
        ClusterEvent::NodeAdded(node) => {
            !is_own || hard().all(|one| node.labels.contains_key(&one.topology_key))
        }
        ClusterEvent::NodeUpdated { old, new } => {
            let moves = |one: &Spread| {
                old.labels.get(&one.topology_key) != new.labels.get(&one.topology_key)
            };
            old.taints != new.taints || hard().any(moves) || !is_own && old.labels != new.labels
        }
        event => matches!(event, ClusterEvent::NodeRemoved | ClusterEvent::PodUpdated),
    }
}

/// The constraints that a profile lists, or upstream's own.
fn defaults(listed: Option<&[TopologySpreadConstraint]>) -> Vec<Spread> {
    let system = SYSTEM.map(|(key, max_skew)| TopologySpreadConstraint {
        topology_key: key.into(),
        max_skew,
        when_unsatisfiable: "ScheduleAnyway".into(),
        ..Default::default()
    });
    let all = listed.unwrap_or(&system).iter();
    all.map(|one| Spread::new(one, Selector::nothing())).collect()
}

struct PodTopologySpread {
    /// The profile's constraints, whose selector each pod's siblings are.
    defaults: Vec<Spread>,
    /// They are not upstream's own.
    is_listed: bool,
    objects: Option<Objects>,
}

impl PodTopologySpread {
    /// The pod's constraints of one sort, or the profile's.
    fn constraints(&self, pod: &PodInfo, hard: bool) -> Vec<Spread> {
        if !pod.spread.is_empty() {
            return pod.spread.iter().filter(|one| one.hard == hard).cloned().collect();
        }
        let mut wanted = self.defaults.iter().filter(|one| one.hard == hard).peekable();
        if wanted.peek().is_none() {
            return vec![];
        }
        let Some(selector) = self.objects.as_ref().and_then(|objects| objects.siblings(pod)) else {
            return vec![];
        };
        wanted.map(|one| Spread { selector: selector.clone(), ..one.clone() }).collect()
    }

    /// Must a node have the keys of all constraints to be scored? Not for upstream's own: where there
    /// are no zones, there are nodes all the same.
    fn needs_all_keys(&self, pod: &PodInfo) -> bool {
        !pod.spread.is_empty() || self.is_listed
    }
}

/// The nodes that take part in a constraint's counting; those without all of the labels do not.
fn scope<'a>(spread: &Spread, pod: &PodInfo, needed: impl Iterator<Item = &'a Spread>) -> Scope {
    let mut scope = Scope::of(&spread.topology_key).needing(needed.map(|one| &one.topology_key));
    if spread.honors_affinity {
        scope = scope.selected_by(pod);
    }
    if spread.honors_taints {
        scope = scope.tolerated_by(pod);
    }
    scope
}

/// The pods that a constraint counts.
fn kin(spread: &Spread, pod: &PodInfo) -> Who {
    // Upstream: an empty selector counts no pods.
    let is_empty = spread.selector.is_everything();
    let selector = if is_empty { Selector::nothing() } else { spread.selector.clone() };
    Who::Kin { namespace: pod.key.namespace.clone(), selector }
}

/// A hard constraint.
struct Hard {
    topology_key: String,
    max_skew: i64,
    /// Whether the pod counts itself.
    itself: i64,
    view: View,
    least: i64,
}

impl PreFilter for PodTopologySpread {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
    ) -> Result<Next, Rejection> {
        let constraints = self.constraints(pod, true);
        if constraints.is_empty() {
            return Ok(Next::Skip);
        }
        let hard = |spread: &Spread| {
            let view = cluster.matching(kin(spread, pod), scope(spread, pod, constraints.iter()));
            // Too few domains: the missing ones count as empty.
            let enough = view.values() as i32 >= spread.min_domains;
            Hard {
                topology_key: spread.topology_key.clone(),
                max_skew: i64::from(spread.max_skew),
                itself: i64::from(spread.selector.matches(Some(&pod.labels))),
                least: if enough { view.least() } else { 0 },
                view,
            }
        };
        state.put(NAME, constraints.iter().map(hard).collect::<Vec<Hard>>());
        Ok(Next::Filter)
    }
}

impl Filter for PodTopologySpread {
    fn filter(&self, state: &CycleState, _: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        for hard in state.get::<Vec<Hard>>(NAME).into_iter().flatten() {
            let elsewhere = || Some(hard.view.of(node.labels.get(&hard.topology_key)?));
            let Some(here) = hard.view.here(node).or_else(elsewhere) else {
                let why =
                    "node(s) didn't match pod topology spread constraints (missing required label)";
                return Err(Rejection::unresolvable(why));
            };
            if here + hard.itself - hard.least > hard.max_skew {
                return Err(Rejection::new("node(s) didn't match pod topology spread constraints"));
            }
        }
        Ok(())
    }
}

/// The counts of the cluster for soft constraints.
struct Soft {
    /// Labels that a node must have to be scored.
    needed: Vec<String>,
    constraints: Vec<SoftOne>,
}

struct SoftOne {
    topology_key: String,
    max_skew: i32,
    /// Matching pods; for hosts, those on each node.
    view: View,
    /// More domains make each pod weigh more: they differ less.
    weight: f64,
}

fn has_all(node: &NodeInfo, keys: &[String]) -> bool {
    keys.iter().all(|key| node.labels.contains_key(key))
}

/// How many values there are among the nodes; none at all is one.
fn domains(nodes: &[&NodeInfo], key: &str) -> usize {
    let mut values: HashSet<Option<&str>> = HashSet::new();
    values.extend(nodes.iter().map(|node| node.labels.get(key).map(String::as_str)));
    values.len()
}

impl PreScore for PodTopologySpread {
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
        nodes: &[&NodeInfo],
    ) -> Next {
        let constraints = self.constraints(pod, false);
        if constraints.is_empty() {
            return Next::Skip;
        }
        let needs_all_keys = self.needs_all_keys(pod);
        let needed = || constraints.iter().filter(|_| needs_all_keys);
        let keys: Vec<String> = needed().map(|one| one.topology_key.clone()).collect();
        let scored: Vec<&NodeInfo> =
            nodes.iter().copied().filter(|node| has_all(node, &keys)).collect();
        let soft = |spread: &Spread| {
            let (scope, domains) = match spread.topology_key.as_str() {
                HOSTNAME => (Scope::each_node(), scored.len()),
                key => (scope(spread, pod, needed()), domains(&scored, key)),
            };
            SoftOne {
                topology_key: spread.topology_key.clone(),
                max_skew: spread.max_skew,
                view: cluster.matching(kin(spread, pod), scope),
                weight: (domains as f64 + 2.0).ln(),
            }
        };
        let constraints = constraints.iter().map(soft).collect();
        state.put(SCORE, Soft { needed: keys, constraints });
        Next::Filter
    }
}

/// Nodes that take no part come last.
const UNLABELED: i64 = -1;

impl Score for PodTopologySpread {
    fn score(&self, state: &CycleState, _: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let Some(soft) = state.get::<Soft>(SCORE) else { return 0 };
        if !has_all(node, &soft.needed) {
            return UNLABELED;
        }
        let mut total = 0.0;
        for one in &soft.constraints {
            let Some(value) = node.labels.get(&one.topology_key) else { continue };
            let count = one.view.here(node).unwrap_or_else(|| one.view.of(value));
            total += count as f64 * one.weight + f64::from(one.max_skew - 1);
        }
        total.round() as i64
    }

    fn normalize(&self, _: &CycleState, _: &PodInfo, scores: &mut [i64]) {
        let known = scores.iter().copied().filter(|score| *score != UNLABELED);
        let (min, max) = (known.clone().min().unwrap_or(0), known.max().unwrap_or(0));
        for score in scores {
            *score = match *score {
                UNLABELED => 0,
                _ if max == 0 => MAX_SCORE,
                score => MAX_SCORE * (max + min - score) / max,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_profiles_constraints_mean_all_that_they_say() {
        let listed = json!([
            {"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule", "minDomains": 3,
                "nodeAffinityPolicy": "Ignore", "nodeTaintsPolicy": "Honor"},
            {"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"},
        ]);
        let listed: Vec<TopologySpreadConstraint> = from_value(listed).unwrap();
        let said = |listed| {
            let of = |one: Spread| {
                let policies = (one.honors_affinity, one.honors_taints);
                (one.topology_key, one.max_skew, one.hard, one.min_domains, policies)
            };
            defaults(listed).into_iter().map(of).collect::<Vec<_>>()
        };
        let usual = (true, false);
        assert_eq!(
            said(Some(&listed)),
            [("zone".into(), 2, true, 3, (false, true)), ("rack".into(), 1, false, 1, usual)]
        );
        assert_eq!(
            said(None),
            [
                (HOSTNAME.into(), 3, false, 1, usual),
                ("topology.kubernetes.io/zone".into(), 5, false, 1, usual)
            ]
        );
    }
}
