//! Authentication and authorization.
//!
//! In: request heads with connection facts, tokens, and the cluster's own objects (accounts, roles,
//! bindings, pods), read through the server's registry. Out: a [`UserInfo`] per request and a
//! decision per question. `apiserver` uses [`Authenticators`] as its `Authenticator` and [`Authorizers`] as
//! its `Authorizer`; its filters also do anonymous access and impersonation.
//!
//! ```text
//! request ─► front proxy ─► x509 ─► bearer token
//!                                   (static, service account, bootstrap,
//!                                    OpenID, webhook)
//! question ─► system:masters ─► the configured modes in order
//! ```
//!
//! Invariants: invalid credentials never fall back to anonymous; every decision uses indexes in memory,
//! without reads of the store; nothing here writes except [`rbac::bootstrap::reconcile`] and
//! [`bootstrap_token::ensure`], both through the registry.

pub mod abac;
pub mod authz_webhook;
pub mod bootstrap_token;
mod chain;
mod error;
mod mirror;
pub mod modes;
pub mod node;
pub mod node_certificates;
pub mod oidc;
pub mod rbac;
pub mod reload;
pub mod request_header;
pub mod reviews;
pub mod service_account;
pub mod sightings;
#[cfg(test)]
mod testing;
pub mod token_file;
pub mod token_webhook;
pub mod tokens;
pub mod webhook;
pub mod x509;

pub use apiserver::authn::Authenticator;
pub use apiserver::authz::{Attributes, Authorizer, Decision, PolicyRule};
pub use apiserver::request::{RequestInfo, UserInfo};
pub use chain::{Always, Authenticators, Authorizers, Masters};
pub use error::{ConfigError, WebhookError};
pub use rbac::Rbac;

pub const ALL_AUTHENTICATED: &str = "system:authenticated";
pub const MASTERS: &str = "system:masters";
