//! The interface for authentication: crate `auth` has authenticators, which run in order; the first answer
//! counts.

use async_trait::async_trait;
use http::request::Parts;

use crate::StatusError;
use crate::request::UserInfo;

pub const AUTHENTICATED: &str = "system:authenticated";
pub const UNAUTHENTICATED: &str = "system:unauthenticated";
pub const ANONYMOUS: &str = "system:anonymous";

/// The DER certificates that the peer presented and TLS verified, leaf first; an extension of the
/// request.
#[derive(Clone, Debug)]
pub struct PeerCertificates(pub std::sync::Arc<[Vec<u8>]>);

/// The identity of an in-process component's request; an extension that only this process can set.
#[derive(Clone, Debug)]
pub struct LocalIdentity(pub UserInfo);

#[async_trait]
pub trait Authenticator: Send + Sync {
    /// `None`: no credentials of this kind. An error: wrong credentials of this kind (`Unauthorized`).
    async fn authenticate(&self, request: &Parts) -> Result<Option<UserInfo>, StatusError>;
}

/// Adds `system:authenticated` to a known user.
pub fn with_group(mut user: UserInfo) -> UserInfo {
    if !user.in_group(AUTHENTICATED) && !user.in_group(UNAUTHENTICATED) && user.name != ANONYMOUS {
        user.groups.push(AUTHENTICATED.into());
    }
    user
}
