//! Cordoned nodes take no pods, but those that tolerate it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;

use super::hints;
use crate::framework::{ClusterEvent, CycleState, ExtensionPoints, Filter, Rejection, Row};
use crate::node::{NodeInfo, tolerates_all};
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "NodeUnschedulable",
    weight: 0,
    build: |_| ExtensionPoints { filter: Some(Arc::new(NodeUnschedulable)), ..Default::default() },
    hint: is_open,
};

pub(super) fn is_open(_: &PodInfo, event: &ClusterEvent) -> bool {
    hints::becomes(event, |node| !node.unschedulable)
}

struct NodeUnschedulable;

impl Filter for NodeUnschedulable {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if !node.unschedulable {
            return Ok(());
        }
        let taint = Taint {
            key: "node.kubernetes.io/unschedulable".into(),
            effect: "NoSchedule".into(),
            ..Default::default()
        };
        if tolerates_all(&pod.tolerations, std::iter::once(&taint)) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) were unschedulable"))
    }
}
