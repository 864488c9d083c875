//! Nodes with taints take only pods that tolerate them; soft taints cost score.

use std::sync::Arc;

use super::hints;
use crate::cluster::Cluster;
use crate::framework::{
    ClusterEvent, CycleState, ExtensionPoints, Filter, Rejection, Row, Score, normalize,
};
use crate::node::{NodeInfo, tolerates, tolerates_all};
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "TaintToleration",
    weight: 3,
    build: |_| ExtensionPoints {
        filter: Some(Arc::new(TaintToleration)),
        score: Some(Arc::new(TaintToleration)),
        ..Default::default()
    },
    hint: is_tolerated,
};

pub(super) fn is_tolerated(pod: &PodInfo, event: &ClusterEvent) -> bool {
    let repels = |effect: &str| matches!(effect, "NoSchedule" | "NoExecute");
    hints::becomes(event, |node| {
        let hard = node.taints.iter().filter(|taint| repels(&taint.effect));
        tolerates_all(&pod.tolerations, hard)
    })
}

struct TaintToleration;

impl Filter for TaintToleration {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let hard = node
            .taints
            .iter()
            .filter(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"));
        if tolerates_all(&pod.tolerations, hard) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) had untolerated taint(s)"))
    }
}

impl Score for TaintToleration {
    /// How many soft taints the pod does not tolerate.
    fn score(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let soft = node.taints.iter().filter(|taint| taint.effect == "PreferNoSchedule");
        let for_soft =
            |effect: Option<&str>| matches!(effect, None | Some("" | "PreferNoSchedule"));
        let untolerated = soft.filter(|taint| {
            let mut tolerations =
                pod.tolerations.iter().filter(|one| for_soft(one.effect.as_deref()));
            !tolerations.any(|one| tolerates(one, taint))
        });
        untolerated.count() as i64
    }

    fn normalize(&self, _: &CycleState, _: &PodInfo, scores: &mut [i64]) {
        normalize(scores, true);
    }
}
