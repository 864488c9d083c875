//! Important pods first. Among equals the queue keeps the order of arrival.

use std::sync::Arc;

use crate::framework::{ExtensionPoints, QueueSort, Row};
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "PrioritySort",
    weight: 0,
    build: |_| ExtensionPoints { queue_sort: Some(Arc::new(PrioritySort)), ..Default::default() },
    hint: super::hints::never,
};

struct PrioritySort;

impl QueueSort for PrioritySort {
    fn rank(&self, pod: &PodInfo) -> i64 {
        -i64::from(pod.priority)
    }
}
