//! The whole control plane in one thread, in virtual time, from one seed.
//!
//! In: a seed. Out: the same run each time: an API server over the simulated store, all controllers, the
//! scheduler, hollow kubelets, users; faults between them; laws that are checked at each write, and a
//! comparison with a naive model at the end. A violated law is reported with the seed and the writes before it.
//!
//! ```text
//!  seed ─► plan: steps of users, crashes, faults that are on
//!            │
//!  users ────┤                         ┌─ laws, at each write
//!  parts ─► network (faults) ─► API ─► history ─► simulated store
//!            ▲                           │
//!            └──────── watches ──────────┘      at rest: model, zero writes
//! ```
//!
//! Invariants: time, randomness and tasks come from `base`, the order of maps from [`entropy`]; nothing opens a
//! socket or a file; a part reaches the API server by the network only.

mod cluster;
mod entropy;
mod faults;
mod history;
mod laws;
mod network;
mod plan;
mod rest;
pub mod rounds;
mod user;
mod world;

pub use faults::Fault;
pub use plan::{Plan, SCENARIOS};
pub use world::{Report, prepare, run};
