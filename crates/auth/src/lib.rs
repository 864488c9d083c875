//! Who is it, and may they?
//!
//! In: request heads with connection facts, tokens, and the cluster's own objects (accounts, roles,
//! bindings, pods), read through the server's registry. Out: a [`UserInfo`] per request and a
//! decision per question. Plugs into the seams of `apiserver`, whose filters also do anonymous access
//! and impersonation: [`Authenticators`] is its `Authenticator`, [`Authorizers`] its `Authorizer`.
//!
//! ```text
//! request ─► front proxy ─► x509 ─► bearer token
//!                                   (static, service account, bootstrap,
//!                                    OpenID, webhook)
//! question ─► system:masters ─► the modes in their order
//! ```
//!
//! Invariants: wrong credentials never fall back to anonymous; every decision is made from indexes
//! in memory, without a look at the store; nothing here writes but [`rbac::bootstrap::reconcile`] and
//! [`bootstrap_token::ensure`], both through the registry.

pub mod abac;
pub mod authz_webhook;
pub mod bootstrap_token;
mod chain;
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
pub use rbac::Rbac;

pub const ALL_AUTHENTICATED: &str = "system:authenticated";
pub const MASTERS: &str = "system:masters";
