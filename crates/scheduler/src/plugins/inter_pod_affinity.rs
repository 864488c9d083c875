//! Pods that want to be near others, or far from them.
//!
//! Works per topology value (a zone, a host): how many pods there match a term. Only pods that
//! matter are looked at: all of them if the new pod has terms, else those with anti-affinity of
//! their own.

use std::collections::HashMap;
use std::sync::Arc;

use crate::cluster::Cluster;
use crate::framework::{
    CycleState, Filter, MAX_SCORE, Next, Points, PreFilter, PreScore, Rejection, Row, Score,
};
use crate::node::NodeInfo;
use crate::pod::{PodInfo, Term};

const NAME: &str = "InterPodAffinity";

pub const ROW: Row = Row {
    name: NAME,
    weight: 2,
    build: |handle| {
        let plugin = Arc::new(InterPodAffinity {
            hard_weight: handle.args.hard_pod_affinity_weight,
            ignores_others: handle.args.ignore_preferred_terms_of_existing_pods,
        });
        Points {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin.clone()),
            pre_score: Some(plugin.clone()),
            score: Some(plugin),
            ..Default::default()
        }
    },
    helps: super::hints::neighbours_change,
};

struct InterPodAffinity {
    /// What a required term of a pod that is there counts in scoring.
    hard_weight: i64,
    /// Pods that are there do not attract or repel one without terms of its own.
    ignores_others: bool,
}

type Pair = (String, String);

/// How many pods count for or against, by topology key and value.
#[derive(Default)]
struct Counts {
    existing_anti: HashMap<Pair, i64>,
    affinity: HashMap<Pair, i64>,
    anti: HashMap<Pair, i64>,
}

fn pair(node: &NodeInfo, key: &str) -> Option<Pair> {
    Some((key.to_owned(), node.labels.get(key)?.clone()))
}

fn count(counts: &mut HashMap<Pair, i64>, node: &NodeInfo, key: &str, by: i64) {
    if let Some(pair) = pair(node, key) {
        *counts.entry(pair).or_default() += by;
    }
}

impl PreFilter for InterPodAffinity {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
    ) -> Result<Next, Rejection> {
        let mut counts = Counts::default();
        let has_terms = !(pod.affinity.is_empty() && pod.anti_affinity.is_empty());
        let spaces = &cluster.namespaces;
        for node in cluster.nodes().filter(|node| has_terms || node.with_anti_affinity > 0) {
            for other in node.pods.values() {
                for term in other.anti_affinity.iter().filter(|term| term.matches(pod, spaces)) {
                    count(&mut counts.existing_anti, node, &term.topology_key, 1);
                }
                // Affinity counts pods that match all terms, anti-affinity those that match one.
                if !pod.affinity.is_empty()
                    && pod.affinity.iter().all(|term| term.matches(other, spaces))
                {
                    for term in &pod.affinity {
                        count(&mut counts.affinity, node, &term.topology_key, 1);
                    }
                }
                for term in pod.anti_affinity.iter().filter(|term| term.matches(other, spaces)) {
                    count(&mut counts.anti, node, &term.topology_key, 1);
                }
            }
        }
        if counts.existing_anti.is_empty() && !has_terms {
            return Ok(Next::Skip);
        }
        let matches_itself = pod.affinity.iter().all(|term| term.matches(pod, spaces));
        state.put(NAME, (counts, matches_itself));
        Ok(Next::Filter)
    }
}

impl Filter for InterPodAffinity {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some((counts, matches_itself)) = state.get::<(Counts, bool)>(NAME) else {
            return Ok(());
        };
        let any = |counts: &HashMap<Pair, i64>, key: &str| {
            pair(node, key).and_then(|pair| counts.get(&pair)).is_some_and(|count| *count > 0)
        };
        if !near_enough(pod, node, &counts.affinity, *matches_itself) {
            return Err(Rejection::unresolvable("node(s) didn't match pod affinity rules"));
        }
        if pod.anti_affinity.iter().any(|term| any(&counts.anti, &term.topology_key)) {
            return Err(Rejection::new("node(s) didn't match pod anti-affinity rules"));
        }
        let forbidden =
            |(pair, count): (&Pair, &i64)| *count > 0 && node.labels.get(&pair.0) == Some(&pair.1);
        if counts.existing_anti.iter().any(forbidden) {
            return Err(Rejection::new("node(s) didn't satisfy existing pods anti-affinity rules"));
        }
        Ok(())
    }
}

/// The first pod of a group that wants its own kind near may go anywhere.
fn near_enough(
    pod: &PodInfo,
    node: &NodeInfo,
    counts: &HashMap<Pair, i64>,
    matches_itself: bool,
) -> bool {
    let mut all = true;
    for term in &pod.affinity {
        let Some(pair) = pair(node, &term.topology_key) else {
            return false;
        };
        all &= counts.get(&pair).is_some_and(|count| *count > 0);
    }
    all || (counts.is_empty() && matches_itself)
}

impl PreScore for InterPodAffinity {
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
        _: &[&NodeInfo],
    ) -> Next {
        let has_preferences =
            !(pod.preferred_affinity.is_empty() && pod.preferred_anti_affinity.is_empty());
        if !has_preferences && self.ignores_others {
            return Next::Skip;
        }
        let mut scores: HashMap<Pair, i64> = HashMap::new();
        let spaces = &cluster.namespaces;
        for node in cluster.nodes().filter(|node| has_preferences || node.with_affinity > 0) {
            let mut add = |term: &Term, subject: &PodInfo, weight: i64| {
                if term.matches(subject, spaces) {
                    count(&mut scores, node, &term.topology_key, weight);
                }
            };
            for other in node.pods.values() {
                pod.preferred_affinity
                    .iter()
                    .for_each(|(weight, term)| add(term, other, i64::from(*weight)));
                pod.preferred_anti_affinity
                    .iter()
                    .for_each(|(weight, term)| add(term, other, -i64::from(*weight)));
                other.affinity.iter().for_each(|term| add(term, pod, self.hard_weight));
                other
                    .preferred_affinity
                    .iter()
                    .for_each(|(weight, term)| add(term, pod, i64::from(*weight)));
                other
                    .preferred_anti_affinity
                    .iter()
                    .for_each(|(weight, term)| add(term, pod, -i64::from(*weight)));
            }
        }
        if scores.is_empty() {
            return Next::Skip;
        }
        state.put("InterPodAffinity/score", scores);
        Next::Filter
    }
}

impl Score for InterPodAffinity {
    fn score(&self, state: &CycleState, _: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let scores = state.get::<HashMap<Pair, i64>>("InterPodAffinity/score");
        let here = scores
            .into_iter()
            .flatten()
            .filter(|(pair, _)| node.labels.get(&pair.0) == Some(&pair.1));
        here.map(|(_, score)| *score).sum()
    }

    fn normalize(&self, _: &CycleState, _: &PodInfo, scores: &mut [i64]) {
        let (min, max) =
            (scores.iter().min().copied().unwrap_or(0), scores.iter().max().copied().unwrap_or(0));
        for score in scores {
            *score = if max > min { MAX_SCORE * (*score - min) / (max - min) } else { 0 };
        }
    }
}
