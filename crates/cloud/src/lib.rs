//! cloud-controller-manager: the controllers that connect a cluster to the machines and load balancers of a cloud.
//!
//! In: Nodes and Services, and a [`Provider`] that knows the cloud. Out: Nodes with the cloud's identifiers,
//! addresses and labels, Services with the addresses of load balancers, routes to the pods of nodes.
//!
//! ```text
//!   Nodes ────► cloud-node-controller ───────────► instances
//!          └──► cloud-node-lifecycle-controller ──► instances      Provider: metal, hetzner
//!          └──► node-route-controller ────────────► routes
//!   Services ─► service-lb-controller ────────────► load balancers
//! ```
//!
//! Invariants: a controller that the provider cannot serve does not start; a Node is deleted only if the provider
//! says that its machine is gone, never because of an error.
//! Upstream: `k8s.io/cloud-provider`.

mod hetzner;
mod lifecycle;
mod manager;
mod metal;
mod metrics;
mod node;
mod provider;
mod route;
mod service;
mod target;
#[cfg(test)]
mod testing;

pub use manager::{Options, UnknownController, WrongCidr, able, known, run};
pub use metrics::encode as encode_metrics;
pub use provider::{OpenError, Provider, open};
