//! policy: how many pods may be disrupted.

pub(crate) mod pod_disruption_budget;
