//! What this crate answers its callers with: wrong options, and failed calls of webhooks.

use std::io;
use std::path::PathBuf;

use transport::ClientError;

/// Why there is no admission chain.
#[derive(Debug, thiserror::Error)]
pub enum OptionsError {
    #[error("unknown admission plugin {name:?}; known are {known}")]
    UnknownPlugin { name: String, known: String },
    #[error("{0} requires an authorizer")]
    NoAuthorizer(&'static str),
    #[error("EventRateLimit needs a configuration with limits")]
    NoLimits,
    #[error("{}: {error}", .path.display())]
    File { path: PathBuf, error: io::Error },
    #[error("{0}")]
    Syntax(Box<serde_saphyr::Error>),
    #[error("{path}: {error}")]
    PluginFile { path: String, error: Box<serde_saphyr::Error> },
    #[error("unexpected kind {0:?}, expected AdmissionConfiguration")]
    Kind(String),
    #[error(transparent)]
    Configuration(#[from] serde_json::Error),
    /// Field errors.
    #[error("{0}")]
    Fields(String),
}

/// Why a webhook has not answered, in the words of upstream's client.
#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    #[error("failed to call webhook: {}", self.cause())]
    Post { url: String, why: String },
    #[error("could not get REST client: {0}")]
    Client(ClientError),
    #[error("could not get REST client: webhook configuration must have either service or URL")]
    NoAddress,
    /// The webhook's answer is no success.
    #[error("failed to call webhook: {}", self.cause())]
    Refused(String),
}

impl WebhookError {
    /// The error without the words that name an admission webhook.
    pub fn cause(&self) -> String {
        match self {
            Self::Post { url, why } => format!("Post {url:?}: {why}"),
            Self::Refused(why) => why.clone(),
            Self::Client(_) | Self::NoAddress => self.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_of_a_webhook_error_does_not_name_the_kind_of_webhook() {
        let check = |error: WebhookError, shown: &str, cause: &str| {
            assert_eq!((error.to_string().as_str(), error.cause().as_str()), (shown, cause));
        };
        let post = WebhookError::Post { url: "https://a/".into(), why: "EOF".into() };
        let cause = "Post \"https://a/\": EOF";
        check(post, "failed to call webhook: Post \"https://a/\": EOF", cause);
        check(WebhookError::Refused("no".into()), "failed to call webhook: no", "no");
        let none =
            "could not get REST client: webhook configuration must have either service or URL";
        check(WebhookError::NoAddress, none, none);
    }
}
