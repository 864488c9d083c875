//! Who is it? The seam to crate `auth`, whose authenticators run in order; the first answer wins.

use async_trait::async_trait;
use http::request::Parts;

use crate::StatusError;
use crate::request::UserInfo;

/// The DER certificates that the peer presented and TLS verified, leaf first; an extension of the
/// request.
#[derive(Clone, Debug)]
pub struct PeerCertificates(pub std::sync::Arc<[Vec<u8>]>);

/// The identity with which an in-process component enters the server's stack; an extension that
/// only this process can set.
#[derive(Clone, Debug)]
pub struct LocalIdentity(pub UserInfo);

#[async_trait]
pub trait Authenticator: Send + Sync {
    /// `None`: no credentials of this kind. An error: credentials of this kind, and wrong ones
    /// (`Unauthorized`).
    async fn authenticate(&self, request: &Parts) -> Result<Option<UserInfo>, StatusError>;
}
