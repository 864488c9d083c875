//! The generic API server. It knows no kind: rows of the [`resource::ResourceTable`] register resources,
//! strategies define how a kind behaves, and every write goes through one function.
//!
//! ```text
//!  bytes ► serve ► filters ► verbs ► registry.write ► store
//!          TLS    authn,     HTTP→    the one write    bytes,
//!                 authz      intent   path             revisions
//!                                                        │ events, in revision order
//!  frames ◄──────── verbs/watch ◄──── cacher ◄───────────┘
//! ```
//!
//! Invariants: only `registry` writes; `cacher` reads store events and nothing else; `filters` and `verbs`
//! know HTTP; `codec` knows encodings. An object at a revision is immutable: encoded once, shared by all
//! readers.

pub mod admission;
pub mod aggregate;
pub mod audit;
pub mod authn;
pub mod authz;
pub mod cacher;
pub mod codec;
pub mod discovery;
mod error;
pub mod fairness;
pub mod filters;
pub mod health;
mod limiter;
pub mod metrics;
pub mod openapi;
mod options;
pub mod query;
pub mod registry;
pub mod relay;
pub mod request;
pub mod resource;
pub mod runtime_config;
pub mod schemas;
pub mod serve;
mod shared;
pub mod stored;
#[cfg(test)]
pub(crate) mod testing;
pub mod verbs;
mod warnings;
mod zpages;

pub use error::ConfigError;
pub use machinery::StatusError;
pub use registry::Registry;
