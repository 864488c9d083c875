//! Node selectors and node affinity.

use std::sync::Arc;

use crate::cluster::Cluster;
use crate::framework::{
    CycleState, Filter, Next, Points, PreScore, Rejection, Row, Score, normalize,
};
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::selector;

pub const ROW: Row = Row {
    name: "NodeAffinity",
    weight: 2,
    build: |_| Points {
        filter: Some(Arc::new(NodeAffinity)),
        pre_score: Some(Arc::new(NodeAffinity)),
        score: Some(Arc::new(NodeAffinity)),
        ..Default::default()
    },
    helps: super::node_changes,
};

struct NodeAffinity;

impl Filter for NodeAffinity {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if pod.selects(&node.name, &node.labels) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) didn't match Pod's node affinity/selector"))
    }
}

impl PreScore for NodeAffinity {
    fn pre_score(&self, _: &mut CycleState, pod: &PodInfo, _: &Cluster, _: &[&NodeInfo]) -> Next {
        if pod.node_preferences.is_empty() { Next::Skip } else { Next::Filter }
    }
}

impl Score for NodeAffinity {
    fn score(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let preferred = pod.node_preferences.iter();
        let matching = preferred
            .filter(|one| selector::term_matches(&one.preference, &node.name, &node.labels));
        matching.map(|one| i64::from(one.weight)).sum()
    }

    fn normalize(&self, _: &CycleState, _: &PodInfo, scores: &mut [i64]) {
        normalize(scores, false);
    }
}
