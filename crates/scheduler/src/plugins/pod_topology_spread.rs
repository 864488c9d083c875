//! Spreads pods over the values of a topology key: hard constraints filter, soft ones score.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::cluster::Cluster;
use crate::framework::{
    CycleState, Filter, MAX_SCORE, Next, Points, PreFilter, PreScore, Rejection, Row, Score,
};
use crate::node::{NodeInfo, tolerates_all};
use crate::pod::{PodInfo, Spread};

const NAME: &str = "PodTopologySpread";
const SCORE: &str = "PodTopologySpread/score";

pub const ROW: Row = Row {
    name: NAME,
    weight: 2,
    build: |_| Points {
        pre_filter: Some(Arc::new(PodTopologySpread)),
        filter: Some(Arc::new(PodTopologySpread)),
        pre_score: Some(Arc::new(PodTopologySpread)),
        score: Some(Arc::new(PodTopologySpread)),
        ..Default::default()
    },
    helps: super::anything,
};

struct PodTopologySpread;

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
        let hard: Vec<_> = pod.spread.iter().filter(|spread| spread.hard).collect();
        if hard.is_empty() {
            return Ok(Next::Skip);
        }
        let complete = |node: &&NodeInfo| {
            hard.iter().all(|spread| node.labels.contains_key(&spread.topology_key))
        };
        let domains: Vec<_> = hard
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
        state.put(NAME, domains);
        Ok(Next::Filter)
    }
}

impl Filter for PodTopologySpread {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let domains = state.get::<Vec<Domain>>(NAME);
        let hard = pod.spread.iter().filter(|spread| spread.hard);
        for (spread, domain) in hard.zip(domains.into_iter().flatten()) {
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

impl PreScore for PodTopologySpread {
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
        nodes: &[&NodeInfo],
    ) -> Next {
        let soft: Vec<_> = pod.spread.iter().filter(|spread| !spread.hard).collect();
        if soft.is_empty() {
            return Next::Skip;
        }
        let domains: Vec<_> = soft
            .iter()
            .map(|spread| {
                let mut counts: HashMap<String, i64> = HashMap::new();
                for node in cluster.nodes().filter(|node| counts_in(spread, pod, node)) {
                    if let Some(value) = node.labels.get(&spread.topology_key) {
                        *counts.entry(value.clone()).or_default() += matching(spread, pod, node);
                    }
                }
                let values = nodes.iter().filter_map(|node| node.labels.get(&spread.topology_key));
                let distinct = values.collect::<std::collections::BTreeSet<_>>().len();
                // More domains make each pod weigh more: they differ less.
                (counts, (distinct as f64 + 2.0).ln())
            })
            .collect();
        state.put(SCORE, domains);
        Next::Filter
    }
}

/// Nodes without the topology key come last.
const UNLABELED: i64 = -1;

impl Score for PodTopologySpread {
    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let domains = state.get::<Vec<(HashMap<String, i64>, f64)>>(SCORE);
        let soft = pod.spread.iter().filter(|spread| !spread.hard);
        let mut total = 0.0;
        for (spread, (counts, weight)) in soft.zip(domains.into_iter().flatten()) {
            let Some(value) = node.labels.get(&spread.topology_key) else {
                return UNLABELED;
            };
            let count = counts.get(value).copied().unwrap_or(0);
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
