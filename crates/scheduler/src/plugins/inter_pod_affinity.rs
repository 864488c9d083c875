//! Pods that want to be near others, or far from them.
//!
//! Works per topology value (a zone, a host): how many pods there match a term, or carry one that
//! matches the new pod; [`crate::topology`] counts them.

use std::sync::Arc;

use super::hints;
use crate::cluster::Cluster;
use crate::framework::{
    ClusterEvent, CycleState, ExtensionPoints, Filter, MAX_SCORE, Next, PreFilter, PreScore,
    Rejection, Row, Score,
};
use crate::node::NodeInfo;
use crate::pod::{PodInfo, Term};
use crate::topology::{Kind, Scope, View, Weighed, Who};

const NAME: &str = "InterPodAffinity";
const SCORE: &str = "InterPodAffinity/score";

pub const ROW: Row = Row {
    name: NAME,
    weight: 2,
    build: |handle| {
        let plugin = Arc::new(InterPodAffinity {
            hard_weight: handle.args.hard_pod_affinity_weight,
            ignores_others: handle.args.ignore_preferred_terms_of_existing_pods,
        });
        ExtensionPoints {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin.clone()),
            pre_score: Some(plugin.clone()),
            score: Some(plugin),
            ..Default::default()
        }
    },
    hint: neighbours_change,
};

/// A pod that is required to be near, or not to be near, comes, changes or goes.
pub(super) fn neighbours_change(pod: &PodInfo, event: &ClusterEvent) -> bool {
    let attracts = |other: &PodInfo| {
        !pod.affinity.is_empty() && pod.affinity.iter().all(|term| term.may_match(other))
    };
    let repels = |terms: &[Term], other: &PodInfo| terms.iter().any(|term| term.may_match(other));
    match event {
        ClusterEvent::PodAssigned(other) => attracts(other),
        ClusterEvent::PodChanged { old, new } => {
            let is_near = attracts(new) && !attracts(old);
            let was_far = repels(&pod.anti_affinity, old) && !repels(&pod.anti_affinity, new);
            is_near || was_far
        }
        ClusterEvent::PodRemoved(other) => {
            repels(&pod.anti_affinity, other) || repels(&other.anti_affinity, pod)
        }
        ClusterEvent::NamespaceChanged => true,
        event => hints::is_labelled(pod, event),
    }
}

struct InterPodAffinity {
    /// The weight of a required term of an existing pod in scoring.
    hard_weight: i64,
    /// Pods that are there do not attract or repel one without terms of its own.
    ignores_others: bool,
}

/// Pods that are required to be near the new one, or not to be, by the topology of each term.
struct Required {
    /// Pods that match all terms, for each of them.
    near: Vec<View>,
    far: Vec<View>,
    /// Pods that want none like the new one near.
    repelling: Weighed,
    /// There is none to be near to, and the pod would do itself: the first of a group.
    is_first: bool,
}

fn scope(term: &Term) -> Scope {
    Scope::of(&term.topology_key)
}

fn matching(cluster: &Cluster, term: &Term) -> View {
    cluster.matching(Who::Matching(vec![term.clone()]), scope(term))
}

impl PreFilter for InterPodAffinity {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
    ) -> Result<Next, Rejection> {
        let repelling = Weighed::new(cluster.carrying(pod, |kind| i64::from(kind == Kind::Far)));
        if repelling.is_empty() && pod.affinity.is_empty() && pod.anti_affinity.is_empty() {
            return Ok(Next::Skip);
        }
        // Affinity counts pods that match all terms, anti-affinity those that match one.
        let all = |term| cluster.matching(Who::Matching(pod.affinity.clone()), scope(term));
        let near: Vec<View> = pod.affinity.iter().map(all).collect();
        let far = pod.anti_affinity.iter().map(|term| matching(cluster, term)).collect();
        let is_first = near.iter().all(View::is_empty)
            && pod.affinity.iter().all(|term| term.matches(pod, cluster.namespaces()));
        state.put(NAME, Required { near, far, repelling, is_first });
        Ok(Next::Filter)
    }
}

impl Filter for InterPodAffinity {
    fn filter(&self, state: &CycleState, _: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(required) = state.get::<Required>(NAME) else {
            return Ok(());
        };
        let has_any = |view: &View| view.here(node).is_some_and(|count| count > 0);
        let has_labels = || required.near.iter().all(|view| view.here(node).is_some());
        let is_near = required.near.iter().all(has_any) || required.is_first && has_labels();
        if !is_near {
            return Err(Rejection::unresolvable("node(s) didn't match pod affinity rules"));
        }
        if required.far.iter().any(has_any) {
            return Err(Rejection::new("node(s) didn't match pod anti-affinity rules"));
        }
        if required.repelling.here(node) > 0 {
            return Err(Rejection::new("node(s) didn't satisfy existing pods anti-affinity rules"));
        }
        Ok(())
    }
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
        let mut views = cluster.carrying(pod, |kind| match kind {
            Kind::Near => self.hard_weight,
            Kind::Far => 0,
            Kind::RatherNear(weight) => i64::from(weight),
            Kind::RatherFar(weight) => -i64::from(weight),
        });
        let near = pod.preferred_affinity.iter().map(|(weight, term)| (i64::from(*weight), term));
        let far = pod.preferred_anti_affinity.iter();
        let far = far.map(|(weight, term)| (-i64::from(*weight), term));
        let own = near.chain(far).map(|(weight, term)| (weight, matching(cluster, term)));
        views.extend(own.filter(|(_, view)| !view.is_empty()));
        let weighed = Weighed::new(views);
        if weighed.is_empty() {
            return Next::Skip;
        }
        state.put(SCORE, weighed);
        Next::Filter
    }
}

impl Score for InterPodAffinity {
    fn score(&self, state: &CycleState, _: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        state.get::<Weighed>(SCORE).map_or(0, |weighed| weighed.here(node))
    }

    fn normalize(&self, _: &CycleState, _: &PodInfo, scores: &mut [i64]) {
        let (min, max) =
            (scores.iter().min().copied().unwrap_or(0), scores.iter().max().copied().unwrap_or(0));
        // Rounding too is part of the score: 29 of 100 come to 28.
        let share = |score: i64| MAX_SCORE as f64 * ((score - min) as f64 / (max - min) as f64);
        for score in scores {
            *score = if max > min { share(*score) as i64 } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_rounded_as_upstream_rounds_them() {
        let plugin = InterPodAffinity { hard_weight: 1, ignores_others: false };
        let check = |mut scores: Vec<i64>, expected: &[i64]| {
            let pod = PodInfo::new(&k8s_openapi::api::core::v1::Pod::default());
            plugin.normalize(&CycleState::default(), &pod, &mut scores);
            assert_eq!(scores, expected);
        };
        check(vec![0, 29, 50, 57, 58, 100], &[0, 28, 50, 56, 57, 100]);
        check(vec![-3, 0, 3], &[0, 50, 100]);
        check(vec![7, 7], &[0, 0]);
    }
}
