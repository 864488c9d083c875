//! A host port is taken by one pod.

use std::sync::Arc;

use crate::cluster::Cluster;
use crate::framework::{CycleState, Filter, Next, Points, PreFilter, Rejection, Row};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "NodePorts",
    weight: 0,
    build: |_| Points {
        pre_filter: Some(Arc::new(NodePorts)),
        filter: Some(Arc::new(NodePorts)),
        ..Default::default()
    },
    helps: super::hints::port_appears,
};

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
