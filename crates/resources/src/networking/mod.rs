//! networking.k8s.io: ways into the cluster, what may talk to what, and Services' addresses.

pub(crate) mod ingress;
pub(crate) mod ingress_class;
pub(crate) mod ip_address;
pub(crate) mod network_policy;
pub(crate) mod service_cidr;
