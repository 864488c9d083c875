//! A host port is taken by one pod.

use std::sync::Arc;

use super::hints;
use crate::cluster::Cluster;
use crate::framework::{
    ClusterEvent, CycleState, ExtensionPoints, Filter, Next, PreFilter, Rejection, Row,
};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "NodePorts",
    weight: 0,
    build: |_| ExtensionPoints {
        pre_filter: Some(Arc::new(NodePorts)),
        filter: Some(Arc::new(NodePorts)),
        ..Default::default()
    },
    hint: port_appears,
};

/// A port becomes free.
pub(super) fn port_appears(pod: &PodInfo, event: &ClusterEvent) -> bool {
    match event {
        ClusterEvent::PodRemoved(other) => {
            pod.ports.iter().any(|port| other.ports.iter().any(|taken| port.conflicts(taken)))
        }
        event => hints::node_appears(pod, event),
    }
}

struct NodePorts;

impl PreFilter for NodePorts {
    fn pre_filter(
        &self,
        _: &mut CycleState,
        pod: &PodInfo,
        _: &Cluster,
    ) -> Result<Next, Rejection> {
        Ok(Next::only_if(!pod.ports.is_empty()))
    }
}

impl Filter for NodePorts {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let mut taken = node.pods.values().flat_map(|one| &one.ports);
        if taken.any(|taken| pod.ports.iter().any(|wanted| wanted.conflicts(taken))) {
            return Err(Rejection::new(
                "node(s) didn't have free ports for the requested pod ports",
            ));
        }
        Ok(())
    }
}
