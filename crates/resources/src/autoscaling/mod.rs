//! autoscaling: how many pods a workload has.

mod forms;
pub(crate) mod horizontal_pod_autoscaler;
