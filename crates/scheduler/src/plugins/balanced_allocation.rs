//! Prefers nodes where CPU and memory would be used in like shares.

use std::sync::Arc;

use crate::cluster::Cluster;
use crate::framework::{CycleState, MAX_SCORE, Next, Points, PreScore, Row, Score};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "NodeResourcesBalancedAllocation",
    weight: 1,
    build: |_| Points {
        pre_score: Some(Arc::new(BalancedAllocation)),
        score: Some(Arc::new(BalancedAllocation)),
        ..Default::default()
    },
    helps: super::never,
};

struct BalancedAllocation;

impl PreScore for BalancedAllocation {
    /// A pod that asks for nothing would always go where there is balance already.
    fn pre_score(&self, _: &mut CycleState, pod: &PodInfo, _: &Cluster, _: &[&NodeInfo]) -> Next {
        let asks = pod.requests.milli_cpu > 0 || pod.requests.memory > 0;
        if asks { Next::Filter } else { Next::Skip }
    }
}

impl Score for BalancedAllocation {
    fn score(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        let share = |used: i64, capacity: i64| {
            (capacity > 0).then(|| (used as f64 / capacity as f64).min(1.0))
        };
        let cpu =
            share(node.requested.milli_cpu + pod.requests.milli_cpu, node.allocatable.milli_cpu);
        let memory = share(node.requested.memory + pod.requests.memory, node.allocatable.memory);
        let deviation = match (cpu, memory) {
            (Some(cpu), Some(memory)) => (cpu - memory).abs() / 2.0,
            _ => 0.0,
        };
        ((1.0 - deviation) * MAX_SCORE as f64) as i64
    }
}
