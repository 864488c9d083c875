//! Authentication: the authenticators run in order; the first answer counts.

use http::request::Parts;
use machinery::StatusError;

use crate::authn::{ANONYMOUS, LocalIdentity, UNAUTHENTICATED, with_group};
use crate::request::UserInfo;
use crate::shared::Shared;

pub async fn authenticate(shared: &Shared, parts: &Parts) -> Result<UserInfo, StatusError> {
    // Only this process can set the extension: it is not part of a message.
    if let Some(LocalIdentity(user)) = parts.extensions.get() {
        return Ok(with_group(user.clone()));
    }
    for authenticator in &shared.authenticators {
        match authenticator.authenticate(parts).await {
            Ok(Some(user)) => return Ok(with_group(user)),
            Ok(None) => {}
            Err(error) => {
                note(shared, parts, &error.message);
                return Err(StatusError::unauthorized());
            }
        }
    }
    let paths = &shared.options.anonymous_paths;
    let is_open = paths.is_empty() || paths.iter().any(|path| path == parts.uri.path());
    if shared.options.anonymous && is_open {
        return Ok(UserInfo::new(ANONYMOUS, &[UNAUTHENTICATED]));
    }
    Err(StatusError::unauthorized())
}

/// The reason is for the operator only, not for a client that guesses passwords; and not for each attempt.
fn note(shared: &Shared, parts: &Parts, error: &str) {
    let connection = parts.extensions.get::<transport::ConnectionInfo>();
    let remote = connection.and_then(|info| info.remote);
    let path = parts.uri.path();
    match shared.refusals.ask(remote.map(|remote| remote.ip())) {
        Some(unsaid) => {
            tracing::warn!(?remote, path, error, unsaid, "Unable to authenticate the request");
        }
        None => tracing::debug!(?remote, path, error, "Unable to authenticate the request"),
    }
}
