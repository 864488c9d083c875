//! HTTP over TLS, client and server, and the streams that Kubernetes tunnels through it.
//!
//! In: listeners, services, PEM texts. Out: requests with a [`ConnectionInfo`] extension, responses, and
//! upgraded byte streams with WebSocket or SPDY on them. It knows no API object (except the `Status` that
//! ends an exec, which it passes on as bytes), and uses only the workspace's `base`.
//!
//! Invariants: no task outlives the call that owns it ([`serve()`] drains or aborts its
//! connections; the caller's futures drive upgrades and sessions). Every queue, header and
//! handshake has a limit. No request goes to an address with user information. TLS settings are
//! read for each new connection, so certificates rotate without a restart.

mod authority;
pub mod channels;
mod client;
mod gather;
mod host_port;
pub mod local;
pub mod remote;
mod serve;
pub mod spdy;
pub mod streaming;
pub mod tls;
mod unread;
mod upgrade;
pub mod ws;

use bytes::Bytes;
use http_body_util::BodyExt;

pub use client::{ClientError, ClientOptions, CredentialSource, HttpClient, Shown, Token};
pub use host_port::{Host, HostPort, is_global_unicast};
pub use serve::{ConnectionInfo, Limits, Listener, serve};
pub use unread::Incoming;
pub use upgrade::{LINGER, Upgrade, UpgradedIo, carry, forward, server_io};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body of any origin.
pub type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;

/// A complete body.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    http_body_util::Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

pub fn empty() -> Body {
    http_body_util::Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// Any body as [`Body`].
pub fn boxed<B>(body: B) -> Body
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}
