//! Pods go where kubelets say that they can do what the pods ask for.

use std::sync::Arc;

use crate::framework::{ClusterEvent, CycleState, ExtensionPoints, Filter, Rejection, Row};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "NodeDeclaredFeatures",
    weight: 0,
    build: |_| ExtensionPoints {
        filter: Some(Arc::new(NodeDeclaredFeatures)),
        ..Default::default()
    },
    hint: |pod, event| match event {
        ClusterEvent::NodeUpdated { old, new } => old.declared != new.declared,
        event => super::hints::node_appears(pod, event),
    },
};

struct NodeDeclaredFeatures;

impl Filter for NodeDeclaredFeatures {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        if pod.needs.iter().all(|need| node.declared.iter().any(|one| one == need)) {
            return Ok(());
        }
        Err(Rejection::unresolvable("node(s) didn't match Pod's required features"))
    }
}
