//! Prefers nodes where CPU and memory would be used in like shares.

use std::sync::Arc;

use crate::cluster::Cluster;
use crate::config::ResourceWeight;
use crate::framework::{CycleState, ExtensionPoints, Next, PreScore, Row, Score};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "NodeResourcesBalancedAllocation",
    weight: 1,
    build: |handle| {
        let plugin = Arc::new(BalancedAllocation(handle.args.balanced.clone()));
        ExtensionPoints {
            pre_score: Some(plugin.clone()),
            score: Some(plugin),
            ..Default::default()
        }
    },
    hint: super::hints::never,
};

struct BalancedAllocation(Vec<ResourceWeight>);

impl PreScore for BalancedAllocation {
    /// A pod that asks for nothing would always go where there is balance already.
    fn pre_score(&self, _: &mut CycleState, pod: &PodInfo, _: &Cluster, _: &[&NodeInfo]) -> Next {
        let asks = pod.requests.milli_cpu > 0 || pod.requests.memory > 0;
        if asks { Next::Filter } else { Next::Skip }
    }
}

impl Score for BalancedAllocation {
    fn score(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        super::allocation::balance(&self.0, pod, node)
    }
}
