//! discovery.k8s.io: where Services' pods are.

pub(crate) mod endpoint_slice;
