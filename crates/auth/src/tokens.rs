//! Bearer tokens: where they are in a request, which kinds there are, and a short cache of answers,
//! because a signature and three reads would be most of a request's cost.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use apiserver::StatusError;
use apiserver::authn::Authenticator;
use apiserver::relay::WEBSOCKET_TOKEN;
use apiserver::request::UserInfo;
use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header;
use http::request::Parts;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

/// Upstream: ten seconds for valid tokens. Invalid ones are not cached here.
const REMEMBER: Duration = Duration::from_secs(10);
const REMEMBERED: usize = 4096;
/// The message for a token that no authenticator recognizes.
pub const UNKNOWN: &str = "invalid bearer token";

/// A user, and those of the requested audiences for which the token is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recognized {
    pub user: UserInfo,
    pub audiences: Vec<String>,
}

/// A kind of token.
#[async_trait]
pub trait TokenAuthenticator: Send + Sync {
    /// `None`: not a token of this kind. An error: an invalid token of this kind.
    async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError>;
}

type Memory = HashMap<[u8; 32], (Instant, Recognized)>;

/// All kinds of tokens in one authenticator.
pub struct BearerTokens {
    kinds: Vec<Box<dyn TokenAuthenticator>>,
    /// The API server's own audiences.
    audiences: Vec<String>,
    /// By hash of the token, so that memory holds no secrets. Short locks, never across an await.
    memory: Mutex<Memory>,
}

impl BearerTokens {
    pub fn new(kinds: Vec<Box<dyn TokenAuthenticator>>, audiences: Vec<String>) -> Self {
        Self { kinds, audiences, memory: Mutex::default() }
    }

    /// For TokenReview: whether the token is valid for one of `audiences` (the server's own if empty).
    pub async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError> {
        let audiences = if audiences.is_empty() { &self.audiences } else { audiences };
        let key = memory_key(token, audiences);
        if let Some(found) = self.remembered(&key) {
            return Ok(Some(found));
        }
        let mut failures: Vec<String> = vec![];
        for kind in &self.kinds {
            match kind.recognize(token, audiences).await {
                Ok(Some(mut found)) => {
                    found.user = crate::chain::authenticated(found.user);
                    self.remember(key, &found);
                    return Ok(Some(found));
                }
                Ok(None) => {}
                Err(error) if failures.contains(&error.message) => {}
                Err(error) => failures.push(error.message.clone()),
            }
        }
        match &failures[..] {
            [] => Ok(None),
            [one] => Err(StatusError::unauthorized().with_message(one)),
            many => Err(StatusError::unauthorized().with_message(format!("[{}]", many.join(", ")))),
        }
    }

    fn remembered(&self, key: &[u8; 32]) -> Option<Recognized> {
        let memory = self.memory.lock().expect("no panic under the lock");
        let (until, found) = memory.get(key)?;
        (*until > Instant::now()).then(|| found.clone())
    }

    fn remember(&self, key: [u8; 32], found: &Recognized) {
        let now = Instant::now();
        let mut memory = self.memory.lock().expect("no panic under the lock");
        if memory.len() >= REMEMBERED {
            memory.retain(|_, (until, _)| *until > now);
        }
        if memory.len() < REMEMBERED {
            memory.insert(key, (now + REMEMBER, found.clone()));
        }
    }
}

fn memory_key(token: &str, audiences: &[String]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in std::iter::once(token).chain(audiences.iter().map(String::as_str)) {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

#[async_trait]
impl Authenticator for BearerTokens {
    async fn authenticate(&self, request: &Parts) -> Result<Option<UserInfo>, StatusError> {
        let Some(token) = bearer(request) else { return Ok(None) };
        match self.recognize(&token, &[]).await? {
            Some(found) => Ok(Some(found.user)),
            // An unrecognized token is an error, not the same as no token.
            None => Err(StatusError::unauthorized().with_message(UNKNOWN)),
        }
    }
}

/// The token of a request: the Authorization header, else a WebSocket subprotocol.
pub fn bearer(request: &Parts) -> Option<String> {
    if let Some(value) = request.headers.get(header::AUTHORIZATION) {
        let (scheme, token) = value.to_str().ok()?.trim().split_once(' ')?;
        let token = token.trim();
        return (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty())
            .then(|| token.to_owned());
    }
    let encoded = transport::ws::offered(&request.headers)
        .into_iter()
        .find_map(|protocol| protocol.strip_prefix(WEBSOCKET_TOKEN))?;
    let token = URL_SAFE_NO_PAD.decode(encoded).ok()?;
    String::from_utf8(token).ok().filter(|token| !token.is_empty())
}

/// Compares two secrets in a time that does not depend on where they differ.
pub(crate) fn is_same_secret(one: &[u8], other: &[u8]) -> bool {
    Sha256::digest(one) == Sha256::digest(other)
}

/// Tokens given at the start, in the format of `--token-auth-file`.
pub struct StaticTokens(HashMap<[u8; 32], UserInfo>);

impl StaticTokens {
    pub fn new(tokens: impl IntoIterator<Item = (String, UserInfo)>) -> Self {
        let hash = |(token, user): (String, UserInfo)| (Sha256::digest(token).into(), user);
        Self(tokens.into_iter().map(hash).collect())
    }
}

/// Tokens of a kind without audiences: valid for the API server's own audiences only.
pub struct AnyAudience<T> {
    pub inner: T,
    pub own: Vec<String>,
}

#[async_trait]
impl<T: TokenAuthenticator> TokenAuthenticator for AnyAudience<T> {
    async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError> {
        let common: Vec<String> =
            audiences.iter().filter(|one| self.own.contains(one)).cloned().collect();
        if common.is_empty() {
            return Ok(None);
        }
        self.inner.recognize(token, &common).await
    }
}

/// A kind that is shared with the code that replaces its settings.
#[async_trait]
impl<T: TokenAuthenticator + ?Sized> TokenAuthenticator for std::sync::Arc<T> {
    async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError> {
        (**self).recognize(token, audiences).await
    }
}

#[async_trait]
impl TokenAuthenticator for StaticTokens {
    async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError> {
        let hash: [u8; 32] = Sha256::digest(token).into();
        let user = self.0.get(&hash).cloned();
        Ok(user.map(|user| Recognized { user, audiences: audiences.to_vec() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_found_in_headers_and_subprotocols() {
        let check = |name: &str, value: &str, expected: Option<&str>| {
            let request = http::Request::builder().header(name, value).body(()).expect("a request");
            let (parts, ()) = request.into_parts();
            assert_eq!(bearer(&parts).as_deref(), expected, "{name}: {value}");
        };
        check("authorization", "Bearer abc", Some("abc"));
        check("authorization", "bearer  abc ", Some("abc"));
        check("authorization", "Bearer ", None);
        check("authorization", "Basic abc", None);
        let protocols = "v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.YWJj";
        check("sec-websocket-protocol", protocols, Some("abc"));
    }

    #[tokio::test]
    async fn tokens_without_audiences_are_for_the_server_only() {
        let known = StaticTokens::new([("s".to_owned(), UserInfo::new("a", &[]))]);
        let known = AnyAudience { inner: known, own: vec!["api".into()] };
        let check = async |asked: &[&str], expected: Option<&str>| {
            let asked: Vec<String> = asked.iter().map(|one| (*one).to_owned()).collect();
            let found = known.recognize("s", &asked).await.expect("no error");
            assert_eq!(found.map(|one| one.audiences.join(",")).as_deref(), expected);
        };
        check(&["api"], Some("api")).await;
        check(&["x", "api"], Some("api")).await;
        check(&["x"], None).await;
    }

    #[tokio::test]
    async fn unknown_tokens_are_refused_and_known_ones_cached() {
        let known =
            StaticTokens::new([("s".to_owned(), UserInfo::new("admin", &["system:masters"]))]);
        let tokens = BearerTokens::new(vec![Box::new(known)], vec!["api".into()]);
        let request = |token: &str| {
            let value = format!("Bearer {token}");
            http::Request::builder().header("authorization", value).body(()).expect("a request")
        };
        for _ in 0..2 {
            let user = tokens.authenticate(&request("s").into_parts().0).await.expect("known");
            assert_eq!(user.expect("a user").name, "admin");
        }
        assert!(tokens.authenticate(&request("t").into_parts().0).await.is_err());
        assert_eq!(tokens.memory.lock().expect("no panic").len(), 1);
    }
}
