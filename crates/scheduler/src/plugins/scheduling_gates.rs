//! Pods with scheduling gates are not tried.

use std::sync::Arc;

use crate::framework::{ClusterEvent, ExtensionPoints, PreEnqueue, Rejection, Row};
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "SchedulingGates",
    weight: 0,
    build: |_| ExtensionPoints {
        pre_enqueue: Some(Arc::new(SchedulingGates)),
        ..Default::default()
    },
    hint: |_, event| matches!(event, ClusterEvent::PodUpdated),
};

struct SchedulingGates;

impl PreEnqueue for SchedulingGates {
    fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), Rejection> {
        if pod.gates.is_empty() {
            return Ok(());
        }
        Err(Rejection::unresolvable(format!(
            "waiting for scheduling gates: [{}]",
            pod.gates.join(" ")
        )))
    }
}
