//! The scheduler: finds a node for every pod.
//!
//! In: pods, nodes and namespaces from informers. Out: bindings, `PodScheduled` conditions, events.
//!
//! ```text
//!  informers ► Cluster (columns) ──┐
//!      └─────► Queue ► schedule_one ► assume ► binders ► /binding
//!                 ▲         │ no node fits
//!                 └─────────┴► condition, event, perhaps preemption
//! ```
//!
//! `topology` keeps the counts over all pods that plugins need.
//!
//! Upstream: `pkg/scheduler` with its framework: every extension point is a trait of
//! [`framework`], the plugins are the rows of [`plugins::PLUGINS`].
//!
//! Invariants: one decision at a time, on the state at that moment, assumed pods included; nothing
//! is awaited while deciding; binding goes through the `/binding` subresource only.

mod capacity;
pub mod claims;
pub mod cluster;
pub mod config;
pub mod devices;
mod error;
mod event;
mod extended;
mod extender;
mod families;
pub mod framework;
mod gang;
mod metrics;
pub mod node;
pub mod objects;
pub mod plugins;
pub mod pod;
mod pod_resources;
mod queue;
pub mod resources;
mod scheduler;
mod templates;
#[cfg(test)]
mod testing;
mod topology;
mod volumes;

pub use config::Config;
pub use metrics::encode as encode_metrics;
pub use pod_resources::encode as encode_pod_resources;
pub use scheduler::{check, run, run_with};
