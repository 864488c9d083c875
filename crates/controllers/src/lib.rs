//! The controllers of kube-controller-manager.
//!
//! In: informers' caches and the keys that their events name. Out: API writes and events.
//! A controller is a row of [`CONTROLLERS`] and a file: a pure `plan(observed) → actions` and a thin
//! reconcile around it.
//!
//! Invariants: reconciles are idempotent and get a key and no hint; decisions are pure; events wake
//! controllers, nothing polls where an event serves.

mod autoscaler;
mod bootstrap_tokens;
mod certificates;
mod cluster_role_aggregation;
mod context;
mod cronjob;
mod csr_cleaner;
mod daemonset;
mod deployment;
mod descriptor;
mod disruption;
mod endpoints;
mod endpointslice;
mod endpointslice_mirroring;
mod expectations;
mod garbage;
mod hints;
mod job;
mod legacy_token_cleaner;
mod metrics;
mod namespace;
mod node_ipam;
mod node_lifecycle;
mod node_ttl;
mod owner;
mod pod;
mod pod_certificate_cleaner;
mod pod_control;
mod pod_gc;
mod pod_group_protection;
mod policy_status;
mod replicaset;
mod replication;
mod resource_claim;
mod resource_quota;
mod revision;
mod root_ca;
mod service;
mod service_account_tokens;
mod service_cidr;
mod service_lb;
mod serviceaccount;
mod statefulset;
mod storage_version_gc;
mod storage_version_migrator;
mod table;
mod taint_eviction;
#[cfg(test)]
mod testing;
mod topology;
mod trust_bundle_publisher;
mod ttl_after_finished;
mod volume;

pub use context::{
    Autoscaling, Context, Evictions, LoadBalancer, Options, Reserved, SignError, TokenSigner,
};
pub use descriptor::Row;
pub use metrics::encode as encode_metrics;
pub use table::{CONTROLLERS, run, selected};
