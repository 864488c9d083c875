//! One OpenID provider: its discovery document and its keys.
//!
//! In: the issuer's URL. Out: whether a key of the issuer signed a token.
//!
//! ```text
//!  start ► discovery document, retried until found ► ready
//!  token ► a known key? yes ► done
//!             └ no, or the keys are old ► fetch, at most one useless fetch a second ► check again
//! ```
//!
//! Invariant: forged tokens cost the issuer at most one request a second.
//! Deviation: upstream fetches for every unknown key.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use base::backoff::Backoff;
use base::task::Tasks;
use bytes::Bytes;
use http::{HeaderMap, Request, header};
use http_body_util::{BodyExt, Limited};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use transport::{ClientOptions, HttpClient};

use super::config::Issuer;
use super::keys::{self, Jwk, Jws};

const WELL_KNOWN: &str = "/.well-known/openid-configuration";
const TIMEOUT: Duration = Duration::from_secs(30);
const DOCUMENT_BYTES: usize = 1 << 20;
/// How long keys are kept if the issuer does not send a lifetime.
const KEYS_LAST: Duration = Duration::from_secs(3600);
/// The pause after a fetch that brought no matching key.
const IN_VAIN: Duration = Duration::from_secs(1);

pub struct Provider {
    shared: Arc<Shared>,
    discovery: AbortHandle,
}

struct Shared {
    http: HttpClient,
    /// The URL of the keys; an error until discovery succeeds.
    jwks_url: watch::Sender<Result<String, String>>,
    keys: ArcSwap<Keys>,
    /// Serializes fetches; holds the time of the last useless one.
    fetching: tokio::sync::Mutex<Option<Instant>>,
    /// The last failure to fetch keys: logged when its text changes.
    failure: Mutex<String>,
}

struct Keys {
    all: Vec<Jwk>,
    until: Instant,
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.discovery.abort();
    }
}

impl Provider {
    pub fn start(issuer: &Issuer, tasks: &Tasks) -> Result<Self, String> {
        let ca = &issuer.certificate_authority;
        let http = HttpClient::new(&ClientOptions {
            ca_pem: (!ca.is_empty()).then(|| ca.clone()),
            user_agent: Some("kube-apiserver".into()),
            ..ClientOptions::default()
        });
        let first = format!("oidc: authenticator for issuer {:?} is not initialized", issuer.url);
        let shared = Arc::new(Shared {
            http: http.map_err(|error| error.to_string())?,
            jwks_url: watch::Sender::new(Err(first)),
            keys: ArcSwap::from_pointee(Keys { all: vec![], until: Instant::now() }),
            fetching: tokio::sync::Mutex::default(),
            failure: Mutex::default(),
        });
        let (url, well_known) = (issuer.url.clone(), well_known(issuer));
        let work = discover(shared.clone(), url, well_known);
        Ok(Self { shared, discovery: tasks.spawn("oidc discovery", work) })
    }

    pub async fn ready(&self) {
        // An error means that the server stops.
        let _ = self.shared.jwks_url.subscribe().wait_for(Result::is_ok).await;
    }

    pub fn is_ready(&self) -> bool {
        self.shared.jwks_url.borrow().is_ok()
    }

    pub fn failure(&self) -> Option<String> {
        self.shared.jwks_url.borrow().as_ref().err().cloned()
    }

    pub async fn check_signature(&self, token: &Jws<'_>) -> Result<(), String> {
        const UNKNOWN: &str = "failed to verify signature: failed to verify id token signature";
        let before = self.shared.keys.load_full();
        if Instant::now() < before.until && token.is_signed_by(&before.all) {
            return Ok(());
        }
        let mut in_vain = self.shared.fetching.lock().await;
        // Another request may have fetched them meanwhile.
        let mut now = self.shared.keys.load_full();
        let is_known = |keys: &Keys| token.is_signed_by(&keys.all);
        let is_fresh = !Arc::ptr_eq(&before, &now) && Instant::now() < now.until;
        if is_fresh && is_known(&now) {
            return Ok(());
        }
        let may_fetch = in_vain.is_none_or(|last| last.elapsed() >= IN_VAIN);
        if may_fetch {
            if let Err(why) = self.shared.fetch_keys().await {
                self.shared.report(&why);
            }
            now = self.shared.keys.load_full();
        }
        // Old keys stay valid if they could not be renewed.
        if is_known(&now) {
            return Ok(());
        }
        if may_fetch {
            *in_vain = Some(Instant::now());
        }
        Err(UNKNOWN.into())
    }
}

fn well_known(issuer: &Issuer) -> String {
    match issuer.discovery_url.as_str() {
        "" => format!("{}{WELL_KNOWN}", issuer.url.trim_end_matches('/')),
        other => other.to_owned(),
    }
}

async fn discover(shared: Arc<Shared>, issuer: String, well_known: String) {
    let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(10));
    loop {
        match shared.jwks_url(&issuer, &well_known).await {
            Ok(url) => {
                tracing::info!(issuer, "read the issuer's discovery document");
                let _ = shared.jwks_url.send_replace(Ok(url));
                return;
            }
            Err(why) => {
                let why =
                    format!("oidc: authenticator for issuer {issuer:?} is not healthy: {why}");
                let is_news = shared.jwks_url.borrow().as_ref().err() != Some(&why);
                if is_news {
                    tracing::error!(why, "oidc authenticator: initializing plugin");
                    let _ = shared.jwks_url.send_replace(Err(why));
                }
                tokio::time::sleep(backoff.step()).await;
            }
        }
    }
}

impl Shared {
    async fn jwks_url(&self, issuer: &str, well_known: &str) -> Result<String, String> {
        #[derive(Deserialize)]
        struct Document {
            #[serde(default)]
            issuer: String,
            #[serde(default)]
            jwks_uri: String,
        }
        let (_, body) = self.get(well_known).await?;
        let document: Document = serde_json::from_slice(&body).map_err(|error| {
            format!("oidc: failed to decode provider discovery object: {error}")
        })?;
        if document.issuer != issuer {
            return Err(format!(
                "oidc: issuer did not match the issuer returned by provider, expected {issuer:?} got {:?}",
                document.issuer
            ));
        }
        if document.jwks_uri.is_empty() {
            return Err("provider did not return JWKS URL".into());
        }
        Ok(document.jwks_uri)
    }

    async fn fetch_keys(&self) -> Result<(), String> {
        let url = self.jwks_url.borrow().clone()?;
        let (headers, body) = self.get(&url).await?;
        let all =
            keys::parse(&body).map_err(|why| format!("oidc: failed to decode keys: {why}"))?;
        let until = Instant::now() + max_age(&headers).unwrap_or(KEYS_LAST);
        self.keys.store(Arc::new(Keys { all, until }));
        self.failure.lock().expect("no panic under the lock").clear();
        Ok(())
    }

    fn report(&self, why: &str) {
        let mut last = self.failure.lock().expect("as above");
        if *last != why {
            tracing::warn!(why, "failed to fetch the issuer's keys");
            why.clone_into(&mut last);
        }
    }

    async fn get(&self, url: &str) -> Result<(HeaderMap, Bytes), String> {
        let work = async {
            let request = Request::get(url).header(header::ACCEPT, "application/json");
            let request = request.body(transport::empty()).map_err(|error| error.to_string())?;
            let response = self.http.request(request).await.map_err(|error| error.to_string())?;
            let (parts, body) = response.into_parts();
            let body = Limited::new(body, DOCUMENT_BYTES).collect().await;
            let body = body.map_err(|error| error.to_string())?.to_bytes();
            if !parts.status.is_success() {
                let text = String::from_utf8_lossy(&body[..body.len().min(1024)]).into_owned();
                return Err(format!("{}: {text}", parts.status));
            }
            Ok((parts.headers, body))
        };
        let outcome = tokio::time::timeout(TIMEOUT, work).await;
        let outcome = outcome.unwrap_or_else(|_| Err("context deadline exceeded".into()));
        outcome.map_err(|why: String| format!("Get {url:?}: {why}"))
    }
}

/// The lifetime of an answer, if it has one.
fn max_age(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::CACHE_CONTROL)?.to_str().ok()?;
    let mut parts = text.split(',').map(str::trim);
    let seconds = parts.find_map(|part| part.strip_prefix("max-age="))?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}
