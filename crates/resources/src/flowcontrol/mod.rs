//! flowcontrol.apiserver.k8s.io: which requests wait for which.

pub(crate) mod flow_schema;
pub(crate) mod priority_level_configuration;
