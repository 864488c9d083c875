//! Node selectors and node affinity.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{NodeAffinity as Added, NodeSelector, PreferredSchedulingTerm};

use super::hints;
use crate::cluster::Cluster;
use crate::framework::{
    ClusterEvent, CycleState, ExtensionPoints, Filter, Next, PreScore, Rejection, Row, Score,
    normalize,
};
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use api::node_selectors;

pub const ROW: Row = Row {
    name: "NodeAffinity",
    weight: 2,
    build: |handle| {
        let plugin = Arc::new(NodeAffinity::new(handle.args.added_affinity.clone()));
        ExtensionPoints {
            filter: Some(plugin.clone()),
            pre_score: Some(plugin.clone()),
            score: Some(plugin),
            ..Default::default()
        }
    },
    hint: is_selected,
};

pub(super) fn is_selected(pod: &PodInfo, event: &ClusterEvent) -> bool {
    hints::becomes(event, |node| pod.selects(&node.name, &node.labels))
}

/// With what the profile adds to every pod's own.
struct NodeAffinity {
    required: Option<NodeSelector>,
    preferred: Vec<PreferredSchedulingTerm>,
}

impl NodeAffinity {
    fn new(added: Option<Added>) -> Self {
        let added = added.unwrap_or_default();
        Self {
            required: added.required_during_scheduling_ignored_during_execution,
            preferred: added
                .preferred_during_scheduling_ignored_during_execution
                .unwrap_or_default(),
        }
    }
}

impl Filter for NodeAffinity {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let matches = |one| node_selectors::matches(one, &node.name, &node.labels);
        if !self.required.as_ref().is_none_or(matches) {
            let why = "node(s) didn't match scheduler-enforced node affinity";
            return Err(Rejection::unresolvable(why));
        }
        if pod.selects(&node.name, &node.labels) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) didn't match Pod's node affinity/selector"))
    }
}

impl PreScore for NodeAffinity {
    fn pre_score(&self, _: &mut CycleState, pod: &PodInfo, _: &Cluster, _: &[&NodeInfo]) -> Next {
        let is_idle = pod.node_preferences.is_empty() && self.preferred.is_empty();
        if is_idle { Next::Skip } else { Next::Filter }
    }
}

impl Score for NodeAffinity {
    fn score(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let preferred = pod.node_preferences.iter().chain(&self.preferred);
        let matching = preferred
            .filter(|one| node_selectors::term_matches(&one.preference, &node.name, &node.labels));
        matching.map(|one| i64::from(one.weight)).sum()
    }

    fn normalize(&self, _: &CycleState, _: &PodInfo, scores: &mut [i64]) {
        normalize(scores, false);
    }
}
