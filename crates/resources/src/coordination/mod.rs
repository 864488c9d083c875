//! coordination.k8s.io: who leads, and who is there.

pub(crate) mod lease;
pub(crate) mod lease_candidate;
