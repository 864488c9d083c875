//! The controllers of kube-controller-manager.
//!
//! In: informers' caches and the keys that their events name. Out: API writes and events.
//! A controller is a row of [`CONTROLLERS`] and a file: a pure `plan(observed) → actions` and a thin
//! reconcile around it.
//!
//! Invariants: reconciles are idempotent and get a key and no hint; decisions are pure; events wake
//! controllers, nothing polls where an event serves.

mod certificates;
mod context;
mod cronjob;
mod daemonset;
mod deployment;
mod endpoints;
mod endpointslice;
mod expectations;
mod garbage;
mod job;
mod namespace;
mod node_ipam;
mod node_lifecycle;
mod owner;
mod pod;
mod pod_control;
mod pod_gc;
mod replicaset;
mod replication;
mod root_ca;
mod service;
mod serviceaccount;
mod statefulset;
mod taint_eviction;
mod ttl_after_finished;

pub use context::{CONTROLLERS, Context, Descriptor, Options, run};
