//! Tokens of OpenID providers, by a configuration that may change while the server runs.
//!
//! ```text
//!  configuration ► check ► new issuers ► healthy? ► current issuers
//!                            │ discovery ► keys     (the old ones answer until then)
//!  token ► issuer? ► signature, audience, times ► claims ► mapping ► user
//! ```
//!
//! In: an [`AuthenticationConfiguration`], tokens. Out: users. Keys are fetched when a token names an
//! unknown key, and when they are old.
//! Invariant: only its own issuer verifies a token; no claim is used before the signature is checked.
//! Upstream: `plugin/pkg/authenticator/token/oidc`.

pub mod config;
pub mod keys;
pub mod mapping;
mod provider;

use std::sync::Arc;
use std::time::Duration;

use apiserver::StatusError;
use arc_swap::ArcSwap;
use async_trait::async_trait;
use base::task::Tasks;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::Value as Json;

pub use config::AuthenticationConfiguration;
use mapping::Claims;
use provider::Provider;

use crate::tokens::{Recognized, TokenAuthenticator};

/// A new configuration is used when its issuers answer within this time. Upstream: the same.
const TAKEOVER: Duration = Duration::from_secs(60);
/// The tolerance of go-oidc for clocks that run ahead, in seconds.
const NOT_BEFORE_LEEWAY: i64 = 300;

/// Settings that do not change with the file.
#[derive(Clone)]
pub struct Options {
    /// The accepted signature algorithms.
    pub algorithms: Vec<String>,
    /// Issuers of the cluster's own tokens, which the configuration must not name.
    pub own_issuers: Vec<String>,
}

/// The current issuers.
pub struct Issuers {
    options: Options,
    tasks: Tasks,
    current: ArcSwap<Vec<Arc<Issuer>>>,
}

struct Issuer {
    checked: config::CheckedIssuer,
    algorithms: Vec<String>,
    provider: Provider,
}

impl Issuers {
    /// Issuers that cannot be reached are retried; their tokens are refused meanwhile.
    pub fn new(
        configuration: &AuthenticationConfiguration,
        options: Options,
        tasks: &Tasks,
    ) -> Result<Self, String> {
        let first = generation(configuration, &options, tasks)?;
        Ok(Self { options, tasks: tasks.clone(), current: ArcSwap::from_pointee(first) })
    }

    /// Uses a new configuration if it is valid and its issuers answer.
    pub async fn replace(&self, configuration: &AuthenticationConfiguration) -> Result<(), String> {
        let next = generation(configuration, &self.options, &self.tasks)?;
        let healthy = async {
            for issuer in &next {
                issuer.provider.ready().await;
            }
        };
        if tokio::time::timeout(TAKEOVER, healthy).await.is_err() {
            let failures = next.iter().filter_map(|issuer| issuer.provider.failure());
            return Err(failures.collect::<Vec<_>>().join(", "));
        }
        self.current.store(Arc::new(next));
        Ok(())
    }

    /// Resolves when every issuer has been reached; for tests, and for callers that wait at the start.
    pub async fn ready(&self) {
        for issuer in self.current.load_full().iter() {
            issuer.provider.ready().await;
        }
    }
}

fn generation(
    configuration: &AuthenticationConfiguration,
    options: &Options,
    tasks: &Tasks,
) -> Result<Vec<Arc<Issuer>>, String> {
    if let Some(bad) = options.algorithms.iter().find(|name| !keys::is_algorithm(name)) {
        return Err(format!("oidc: unsupported signing alg: {bad:?}"));
    }
    let algorithms = options.algorithms.clone();
    let issuer = |checked: config::CheckedIssuer| {
        let provider = Provider::start(&checked.issuer, tasks)?;
        Ok(Arc::new(Issuer { checked, algorithms: algorithms.clone(), provider }))
    };
    configuration.check(&options.own_issuers)?.into_iter().map(issuer).collect()
}

#[async_trait]
impl TokenAuthenticator for Issuers {
    async fn recognize(
        &self,
        token: &str,
        audiences: &[String],
    ) -> Result<Option<Recognized>, StatusError> {
        let Some(name) = untrusted_issuer(token) else { return Ok(None) };
        let issuers = self.current.load_full();
        let issuer = issuers.iter().find(|one| one.checked.issuer.url == name);
        let Some(issuer) = issuer else { return Ok(None) };
        let claims = issuer.verify(token).await;
        let user = claims.and_then(|claims| issuer.checked.mapping.user(&claims));
        let user = user.map_err(|why| {
            tracing::debug!(issuer = name, why, "refused a token");
            StatusError::unauthorized().with_message(why)
        })?;
        Ok(Some(Recognized { user, audiences: audiences.to_vec() }))
    }
}

/// The issuer that a token names, not verified.
fn untrusted_issuer(token: &str) -> Option<String> {
    let mut parts = token.split('.');
    let (_, payload, _) = (parts.next()?, parts.next()?, parts.next()?);
    let payload = URL_SAFE_NO_PAD.decode(payload).ok().filter(|_| parts.next().is_none())?;
    let payload: Json = serde_json::from_slice(&payload).ok()?;
    match payload.get("iss")?.as_str()? {
        // The issuer's name in its own tokens.
        "accounts.google.com" => Some("https://accounts.google.com".to_owned()),
        other => Some(other.to_owned()),
    }
}

impl Issuer {
    /// The claims of a token that is valid now.
    async fn verify(&self, token: &str) -> Result<Claims, String> {
        if !self.provider.is_ready() {
            return Err("oidc: authenticator not initialized".into());
        }
        let failed = |why: String| format!("oidc: verify token: {why}");
        let jws =
            keys::Jws::parse(token).map_err(|why| failed(format!("oidc: malformed jwt: {why}")))?;
        let claims: Claims = serde_json::from_slice(&jws.payload)
            .map_err(|why| failed(format!("oidc: failed to unmarshal claims: {why}")))?;
        self.check_audience(&claims).map_err(failed)?;
        check_times(&claims, base::clock::now().as_second()).map_err(failed)?;
        if !self.algorithms.contains(&jws.algorithm) {
            let (wanted, got) = (list(&self.algorithms), &jws.algorithm);
            return Err(failed(format!(
                "oidc: id token signed with unsupported algorithm, expected {wanted} got {got:?}"
            )));
        }
        self.provider.check_signature(&jws).await.map_err(failed)?;
        Ok(claims)
    }

    fn check_audience(&self, claims: &Claims) -> Result<(), String> {
        let got: Vec<&str> = match claims.get("aud") {
            Some(Json::String(one)) => vec![one],
            Some(Json::Array(many)) => many.iter().filter_map(Json::as_str).collect(),
            _ => vec![],
        };
        let wanted = &self.checked.issuer.audiences;
        if wanted.iter().any(|one| got.contains(&one.as_str())) {
            return Ok(());
        }
        let got = list(&got);
        Err(match &wanted[..] {
            [one] => format!("oidc: expected audience {one:?} got {got}"),
            _ => format!("oidc: expected audience in {} got {got}", list(wanted)),
        })
    }
}

/// Formats a slice of strings like Go's `%q`.
fn list<T: std::fmt::Debug>(items: &[T]) -> String {
    let quoted: Vec<String> = items.iter().map(|item| format!("{item:?}")).collect();
    format!("[{}]", quoted.join(" "))
}

fn check_times(claims: &Claims, now: i64) -> Result<(), String> {
    let time = |name: &str| match claims.get(name) {
        Some(Json::Number(at)) => at.as_i64().or_else(|| at.as_f64().map(|at| at as i64)),
        _ => None,
    };
    let shown = |at: i64| {
        let at = jiff::Timestamp::from_second(at).unwrap_or_default().to_string();
        format!("{} +0000 UTC", at.replace('T', " ").trim_end_matches('Z'))
    };
    match time("exp") {
        Some(exp) if exp >= now => {}
        Some(exp) => {
            return Err(format!("oidc: token is expired (Token Expiry: {})", shown(exp)));
        }
        None => {
            return Err(
                "oidc: token is expired (Token Expiry: 0001-01-01 00:00:00 +0000 UTC)".into()
            );
        }
    }
    match time("nbf") {
        Some(from) if now.saturating_add(NOT_BEFORE_LEEWAY) < from => Err(format!(
            "oidc: current time {} before the nbf (not before) time: {}",
            shown(now),
            shown(from)
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
