//! Spreads pods over the values of a topology key: hard constraints filter, soft ones score.
//!
//! A pod that says nothing is spread by the profile's constraints, together with the pods of its
//! services and controller; upstream's own are over nodes and zones, softly.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::TopologySpreadConstraint;

use crate::cluster::Cluster;
use crate::framework::{
    CycleState, Filter, MAX_SCORE, Next, Points, PreFilter, PreScore, Rejection, Row, Score,
};
use crate::node::{NodeInfo, tolerates_all};
use crate::objects::Objects;
use crate::pod::{PodInfo, Spread};

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
            defaults: handle.args.default_spread.clone(),
            objects: handle.objects.clone(),
        });
        Points {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin.clone()),
            pre_score: Some(plugin.clone()),
            score: Some(plugin),
            ..Default::default()
        }
    },
    helps: super::hints::spread_changes,
};

struct PodTopologySpread {
    /// `None`: upstream's own.
    defaults: Option<Vec<TopologySpreadConstraint>>,
    objects: Option<Objects>,
}

impl PodTopologySpread {
    /// The pod's constraints of one sort, or the profile's.
    fn constraints(&self, pod: &PodInfo, hard: bool) -> Vec<Spread> {
        if !pod.spread.is_empty() {
            return pod.spread.iter().filter(|one| one.hard == hard).cloned().collect();
        }
        let wanted: Vec<(String, i32)> = match &self.defaults {
            None if hard => return vec![],
            None => SYSTEM.iter().map(|(key, skew)| ((*key).to_owned(), *skew)).collect(),
            Some(listed) => listed
                .iter()
                .filter(|one| (one.when_unsatisfiable == "DoNotSchedule") == hard)
                .map(|one| (one.topology_key.clone(), one.max_skew))
                .collect(),
        };
        if wanted.is_empty() {
            return vec![];
        }
        let Some(selector) = self.objects.as_ref().and_then(|objects| objects.siblings(pod)) else {
            return vec![];
        };
        let spread = |(topology_key, max_skew)| Spread {
            max_skew,
            topology_key,
            hard,
            selector: selector.clone(),
            min_domains: 1,
            honors_affinity: true,
            honors_taints: false,
        };
        wanted.into_iter().map(spread).collect()
    }

    /// Must a node have the keys of all constraints to be scored? Not for upstream's own: where there
    /// are no zones, there are nodes all the same.
    fn needs_all_keys(&self, pod: &PodInfo) -> bool {
        !pod.spread.is_empty() || self.defaults.is_some()
    }
}

fn has_all_keys(node: &NodeInfo, constraints: &[Spread]) -> bool {
    constraints.iter().all(|spread| node.labels.contains_key(&spread.topology_key))
}

/// Matching pods per topology value, of one constraint.
struct Domain {
    counts: BTreeMap<String, i64>,
    least: i64,
}

/// Whether a node takes part in a constraint's counting.
fn counts_in(spread: &Spread, pod: &PodInfo, node: &NodeInfo) -> bool {
    let hard = node.taints.iter().filter(|taint| taint.effect != "PreferNoSchedule");
    (!spread.honors_affinity || pod.selects(&node.name, &node.labels))
        && (!spread.honors_taints || tolerates_all(&pod.tolerations, hard))
}

fn matching(spread: &Spread, pod: &PodInfo, node: &NodeInfo) -> i64 {
    // Upstream: an empty selector counts nobody.
    if spread.selector.is_everything() {
        return 0;
    }
    let same = |other: &&Arc<PodInfo>| {
        !other.deleting
            && other.key.namespace == pod.key.namespace
            && spread.selector.matches(Some(&other.labels))
    };
    node.pods.values().filter(same).count() as i64
}

impl PreFilter for PodTopologySpread {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
    ) -> Result<Next, Rejection> {
        let hard = self.constraints(pod, true);
        if hard.is_empty() {
            return Ok(Next::Skip);
        }
        let complete = |node: &&NodeInfo| has_all_keys(node, &hard);
        let domains: Vec<Domain> = hard
            .iter()
            .map(|spread| {
                let mut counts = BTreeMap::new();
                for node in
                    cluster.nodes().filter(complete).filter(|node| counts_in(spread, pod, node))
                {
                    let value = node.labels[&spread.topology_key].clone();
                    *counts.entry(value).or_default() += matching(spread, pod, node);
                }
                // Too few domains: the missing ones count as empty.
                let enough = counts.len() as i32 >= spread.min_domains;
                let least = if enough { counts.values().min().copied().unwrap_or(0) } else { 0 };
                Domain { counts, least }
            })
            .collect();
        let all: Vec<(Spread, Domain)> = hard.into_iter().zip(domains).collect();
        state.put(NAME, all);
        Ok(Next::Filter)
    }
}

impl Filter for PodTopologySpread {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        for (spread, domain) in state.get::<Vec<(Spread, Domain)>>(NAME).into_iter().flatten() {
            let Some(value) = node.labels.get(&spread.topology_key) else {
                let why =
                    "node(s) didn't match pod topology spread constraints (missing required label)";
                return Err(Rejection::unresolvable(why));
            };
            let itself = i64::from(spread.selector.matches(Some(&pod.labels)));
            let here = domain.counts.get(value).copied().unwrap_or(0);
            if here + itself - domain.least > i64::from(spread.max_skew) {
                return Err(Rejection::new("node(s) didn't match pod topology spread constraints"));
            }
        }
        Ok(())
    }
}

/// What soft constraints need to know of the cluster.
struct Soft {
    constraints: Vec<Spread>,
    needs_all_keys: bool,
    /// Matching pods by topology value, of each constraint; those on one node are counted there.
    counts: Vec<HashMap<String, i64>>,
    /// More domains make each pod weigh more: they differ less.
    weights: Vec<f64>,
}

impl Soft {
    fn takes(&self, node: &NodeInfo) -> bool {
        !self.needs_all_keys || has_all_keys(node, &self.constraints)
    }
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
        let mut soft = Soft { constraints, needs_all_keys, counts: vec![], weights: vec![] };
        let scored: Vec<_> = nodes.iter().filter(|node| soft.takes(node)).collect();
        for spread in &soft.constraints {
            let values = scored.iter().filter_map(|node| node.labels.get(&spread.topology_key));
            let mut counts = HashMap::new();
            let domains = match spread.topology_key.as_str() {
                HOSTNAME => scored.len(),
                _ => {
                    counts.extend(values.map(|value| (value.clone(), 0i64)));
                    let unlabelled =
                        scored.iter().any(|node| !node.labels.contains_key(&spread.topology_key));
                    counts.len() + usize::from(unlabelled)
                }
            };
            let candidates = cluster.nodes().filter(|_| !counts.is_empty());
            let counted: Vec<_> = candidates
                .filter(|node| soft.takes(node) && counts_in(spread, pod, node))
                .collect();
            for node in counted {
                let value = node.labels.get(&spread.topology_key);
                if let Some(count) = value.and_then(|value| counts.get_mut(value)) {
                    *count += matching(spread, pod, node);
                }
            }
            soft.counts.push(counts);
            soft.weights.push((domains as f64 + 2.0).ln());
        }
        state.put(SCORE, soft);
        Next::Filter
    }
}

/// Nodes that take no part come last.
const UNLABELED: i64 = -1;

impl Score for PodTopologySpread {
    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let Some(soft) = state.get::<Soft>(SCORE) else { return 0 };
        if !soft.takes(node) {
            return UNLABELED;
        }
        let mut total = 0.0;
        let known = soft.counts.iter().zip(&soft.weights);
        for (spread, (counts, weight)) in soft.constraints.iter().zip(known) {
            let Some(value) = node.labels.get(&spread.topology_key) else { continue };
            let count = match spread.topology_key.as_str() {
                HOSTNAME => matching(spread, pod, node),
                _ => counts.get(value).copied().unwrap_or(0),
            };
            total += count as f64 * weight + f64::from(spread.max_skew - 1);
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
