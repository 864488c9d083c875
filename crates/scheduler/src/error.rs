//! Why a pod is rejected or not bound: plugins, PreBind, Bind and extenders. Events show these texts, which
//! are upstream's.

use std::borrow::Cow;

use client::ErrorExt;

/// The Status of a plugin that rejects a node, or all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rejection {
    pub reasons: Vec<Cow<'static, str>>,
    /// Preemption would not help. Upstream: `UnschedulableAndUnresolvable`.
    pub unresolvable: bool,
    /// The plugin failed: the attempt ends here and is retried later.
    pub broken: bool,
}

impl Rejection {
    pub fn new(reason: impl Into<Cow<'static, str>>) -> Self {
        Self { reasons: vec![reason.into()], ..Self::default() }
    }

    pub fn unresolvable(reason: impl Into<Cow<'static, str>>) -> Self {
        Self { unresolvable: true, ..Self::new(reason) }
    }

    pub fn broken(reason: impl Into<Cow<'static, str>>) -> Self {
        Self { broken: true, ..Self::unresolvable(reason) }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("{}", .0.reasons.join(", "))]
    Rejected(Rejection),
    #[error("{}", .0.text())]
    Api(Box<client::Error>),
    #[error("{action}: {}", .error.text())]
    Write { action: String, error: Box<client::Error> },
    #[error("binding volumes: context deadline exceeded")]
    VolumesTimeout,
    #[error("device binding timeout: context deadline exceeded")]
    DevicesTimeout,
    #[error("device binding failed: claim={claim}, reason={reason}, message={message:?}")]
    DeviceFailed { claim: String, reason: String, message: String },
    /// The claim is no longer as the decision found it.
    #[error("claim {claim} got {change} in the meantime")]
    ClaimChanged { claim: String, change: &'static str },
    #[error(transparent)]
    Extender(#[from] ExtenderError),
}

impl From<client::Error> for BindError {
    fn from(error: client::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ExtenderError {
    #[error("the pod is gone")]
    PodIsGone,
    #[error(transparent)]
    Request(#[from] http::Error),
    #[error(transparent)]
    Transport(#[from] transport::ClientError),
    #[error("failed {verb} with extender at URL {url}, code {code}")]
    Code { verb: String, url: String, code: u16 },
    #[error("failed {verb} with extender at URL {url}: deadline exceeded")]
    Timeout { verb: String, url: String },
    #[error("{0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    #[error(transparent)]
    Answer(#[from] serde_json::Error),
    /// The extender's own words.
    #[error("{0}")]
    Refused(String),
}
