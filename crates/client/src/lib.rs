//! The components' access to the API: a typed client over any transport, informers shared within a
//! process, work queues, leader election, events.
//!
//! In: a tower service that answers HTTP requests: the API server's own stack entered with the
//! component's identity, or HTTPS with its certificate. The code above does not notice the difference.
//! Out: typed requests ([`Client::api`]), caches ([`Informers`]), wake-ups ([`WorkQueue`]).
//!
//! Invariants: a process has one watch for each kind, scope and identity, because rights belong to the identity. Where the
//! API server is in the same process, such a watch is a place in the server's watch cache, whose bytes and headers
//! all of them share ([`transport::local`]); else an informer's cache holds packed bytes of its own. Typed objects
//! are decoded on demand; a queue never runs one key twice at once.

mod cache;
mod client;
mod controller;
pub mod discovery;
pub mod election;
pub mod events;
pub mod exec;
mod histogram;
mod informer;
mod members;
mod queue;
mod queue_metrics;
mod reflector;
mod request_metrics;
mod resource;
mod selected;
mod view;

pub use cache::{Entry, Header, ObjectKey};
pub use client::{Client, Error, ErrorExt, Result, retry_on_conflict};
pub use controller::{Outcome, spawn_workers};
pub use election::Election;
pub use events::{EventRecorder, EventType};
pub use histogram::Histogram;
pub use informer::{Event, Informer, Informers, Lister, Old, RawEvent, RawInformer, Scope};
pub use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy,
};
pub use members::Members;
pub use queue::WorkQueue;
pub use queue_metrics::encode as encode_queues;
pub use request_metrics::encode as encode_requests;
pub use resource::{Gvr, Kind};
pub use selected::Selectors;
pub use view::{Projection, View, Whole};

#[cfg(test)]
mod fake;
