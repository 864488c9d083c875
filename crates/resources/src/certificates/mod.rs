//! certificates.k8s.io: who wants a certificate, and whom to trust.

pub(crate) mod certificate_signing_request;
pub(crate) mod cluster_trust_bundle;
pub(crate) mod pod_certificate_request;
