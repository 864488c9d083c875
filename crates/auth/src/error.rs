//! Errors of the files and webhooks of authentication and authorization, in upstream's words.

use transport::ClientError;

/// A file or flag cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("error reading policy file {path}, line {number}: {line}: {error}")]
    Policy { path: String, number: usize, line: String, error: serde_json::Error },
    #[error(
        "token file '{path}' must have at least 3 columns (token, user name, user uid), found {found}"
    )]
    Columns { path: String, found: usize },
    #[error("record on line {line}: {why}")]
    Record { line: usize, why: &'static str },
    #[error("{0}")]
    Syntax(Box<serde_saphyr::Error>),
    #[error("no kind {kind:?} is registered for version {version:?}")]
    Kind { kind: String, version: String },
    #[error("missing required types: [{0}]")]
    MissingModes(String),
    #[error("authorizer type {0} is not allowed if it was not enabled at initial server startup")]
    Mode(String),
    /// Field errors.
    #[error("{0}")]
    Fields(String),
    #[error(transparent)]
    Kubeconfig(#[from] pki::Error),
    #[error("{path}: {error}")]
    Client { path: String, error: ClientError },
    #[error("{0}: the kubeconfig names no server")]
    NoServer(String),
    #[error(
        "unsupported webhook authenticator version {0:?}, supported versions are \"v1\", \"v1beta1\""
    )]
    WebhookVersion(String),
}

/// A webhook has not answered.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WebhookError {
    /// `passing`: a retry may succeed.
    #[error("Post {url:?}: {why}")]
    Post { url: String, why: String, passing: bool },
    /// The answer is no success.
    #[error("{text}")]
    Refused { text: String, passing: bool },
    #[error("couldn't decode the answer: {0}")]
    Answer(String),
}

impl WebhookError {
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Post { passing, .. } | Self::Refused { passing, .. } => *passing,
            Self::Answer(_) => false,
        }
    }
}
