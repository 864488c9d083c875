//! A pod that names its node goes there.

use std::sync::Arc;

use crate::framework::{CycleState, ExtensionPoints, Filter, Rejection, Row};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "NodeName",
    weight: 0,
    build: |_| ExtensionPoints { filter: Some(Arc::new(NodeName)), ..Default::default() },
    hint: super::hints::node_appears,
};

struct NodeName;

impl Filter for NodeName {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if pod.node_name.is_empty() || pod.node_name == node.name {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) didn't match the requested node name"))
    }
}
