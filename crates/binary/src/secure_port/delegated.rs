//! Delegated authentication and authorization: the cluster checks certificates (by the authorities that it
//! publishes), tokens (TokenReview) and rights (SubjectAccessReview).
//!
//! In: kubeconfigs for these requests. Out: access, or 401 or 403 in upstream's words. Invariant: without
//! a kubeconfig no user is recognised, and only the always-allowed paths are served.
//! Deviation: at the start this waits for a cluster that cannot be reached, and recognises no certificate
//! until then; upstream's programs end.
//! Upstream: `apiserver/pkg/server/options/{authentication,authorization}.go`.

use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use anyhow::Context;
use apiserver::StatusError;
use apiserver::authn::Authenticator;
use apiserver::authz::{Attributes, Authorizer, Decision, forbidden};
use apiserver::request::{RequestInfo, UserInfo};
use auth::authz_webhook::{AuthorizationWebhook, Settings};
use auth::request_header::{Headers, RequestHeader};
use auth::token_webhook::TokenWebhook;
use auth::tokens::BearerTokens;
use auth::webhook::Webhook;
use auth::{Authenticators, MASTERS, x509};
use base::task::Tasks;
use client::Informers;
use http::request::Parts;
use k8s_openapi::api::core::v1::ConfigMap;

const NAMESPACE: &str = "kube-system";
const PUBLISHED: &str = "extension-apiserver-authentication";
/// Limit of one SubjectAccessReview, retries included.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(clap::Args, Clone, Debug)]
pub struct Delegation {
    /// Kubeconfig for TokenReviews; without it no token is recognised
    #[arg(long, value_name = "FILE")]
    authentication_kubeconfig: Option<PathBuf>,
    /// Kubeconfig for SubjectAccessReviews; without it only the paths below are served
    #[arg(long, value_name = "FILE")]
    authorization_kubeconfig: Option<PathBuf>,
    /// Paths that everybody may read; `/a*` means all paths with that prefix
    #[arg(long, value_delimiter = ',', default_value = "/healthz,/readyz,/livez")]
    authorization_always_allow_paths: Vec<String>,
    /// Authorities of clients, PEM [default: those that the cluster publishes]
    #[arg(long, value_name = "FILE")]
    client_ca_file: Option<PathBuf>,
    /// Do not read the authorities of clients from the cluster
    #[arg(long)]
    authentication_skip_lookup: bool,
    #[arg(long, default_value = "10s", value_parser = base::duration::parse, value_name = "DURATION")]
    authentication_token_webhook_cache_ttl: Duration,
    #[arg(long, default_value = "10s", value_parser = base::duration::parse, value_name = "DURATION")]
    authorization_webhook_cache_authorized_ttl: Duration,
    #[arg(long, default_value = "10s", value_parser = base::duration::parse, value_name = "DURATION")]
    authorization_webhook_cache_unauthorized_ttl: Duration,
}

pub struct Delegated {
    /// Replaced when the cluster publishes new ones; locked only to clone it.
    certificates: Arc<RwLock<Arc<Authenticators>>>,
    tokens: Option<BearerTokens>,
    rights: Option<AuthorizationWebhook>,
    open: Vec<String>,
}

impl Delegated {
    pub fn start(flags: &Delegation, agent: &str, tasks: &Tasks) -> anyhow::Result<Self> {
        let given = flags.client_ca_file.as_deref().map(super::read).transpose()?;
        let certificates = authenticators(given.as_deref(), &ConfigMap::default())?;
        let certificates = Arc::new(RwLock::new(Arc::new(certificates)));
        let mut tokens = None;
        match &flags.authentication_kubeconfig {
            Some(path) => {
                let lasts = flags.authentication_token_webhook_cache_ttl;
                let webhook = reviewer(path, "/apis/authentication.k8s.io/v1/tokenreviews")?;
                let webhook =
                    TokenWebhook::new(webhook, "v1", lasts).map_err(anyhow::Error::msg)?;
                tokens = Some(BearerTokens::new(vec![Box::new(webhook)], vec![]));
                if !flags.authentication_skip_lookup {
                    let client = crate::kubeconfig::client(path, agent)?;
                    follow(&Informers::new(client, tasks.clone()), given, certificates.clone());
                }
            }
            None => tracing::warn!(
                "No authentication-kubeconfig provided in order to lookup client-ca-file in configmap/extension-apiserver-authentication in kube-system, so client certificate authentication won't work."
            ),
        }
        let rights = match &flags.authorization_kubeconfig {
            Some(path) => {
                let webhook = reviewer(path, "/apis/authorization.k8s.io/v1/subjectaccessreviews")?;
                Some(AuthorizationWebhook::new(webhook, settings(flags)))
            }
            None => {
                tracing::warn!(
                    "No authorization-kubeconfig provided, so SubjectAccessReview of authorization tokens won't work."
                );
                None
            }
        };
        let open = flags.authorization_always_allow_paths.clone();
        Ok(Self { certificates, tokens, rights, open })
    }

    pub async fn admit(&self, parts: &Parts) -> Result<(), StatusError> {
        let user = self.user(parts).await?;
        let path = parts.uri.path();
        if user.in_group(MASTERS) || is_open(&self.open, path) {
            return Ok(());
        }
        let request = RequestInfo {
            path: path.to_owned(),
            verb: parts.method.as_str().to_ascii_lowercase(),
            ..RequestInfo::default()
        };
        let attributes = Attributes { user, request };
        let reason = match &self.rights {
            None => String::new(),
            Some(rights) => match rights.authorize(&attributes).await {
                Decision::Allow { .. } => return Ok(()),
                Decision::Deny { reason } | Decision::NoOpinion { reason } => reason,
            },
        };
        Err(forbidden(&attributes, &reason))
    }

    /// The user of the certificate, else of the token, else anonymous.
    async fn user(&self, parts: &Parts) -> Result<UserInfo, StatusError> {
        let certificates = self.certificates.read().expect("no panic while held").clone();
        let by_certificate = certificates.authenticate(parts).await;
        let by_token = match (&by_certificate, &self.tokens) {
            (Ok(Some(_)), _) | (_, None) => Ok(None),
            (_, Some(tokens)) => tokens.authenticate(parts).await,
        };
        for known in [&by_certificate, &by_token] {
            if let Ok(Some(user)) = known {
                return Ok(user.clone());
            }
        }
        if let Some(error) = by_certificate.err().or(by_token.err()) {
            tracing::debug!(error = error.message, "Unable to authenticate the request");
            return Err(StatusError::unauthorized());
        }
        Ok(UserInfo::new("system:anonymous", &["system:unauthenticated"]))
    }
}

/// A webhook for one kind of review.
fn reviewer(kubeconfig: &std::path::Path, path: &str) -> anyhow::Result<Webhook> {
    let (http, server) = crate::kubeconfig::http(kubeconfig)?;
    Ok(Webhook::at(http, format!("{}{path}", server.trim_end_matches('/'))))
}

fn settings(flags: &Delegation) -> Settings {
    Settings {
        name: "delegated".into(),
        version: "v1".into(),
        timeout: LIMIT,
        authorized_lasts: flags.authorization_webhook_cache_authorized_ttl,
        unauthorized_lasts: flags.authorization_webhook_cache_unauthorized_ttl,
        denies_on_failure: false,
        conditions: vec![],
    }
}

/// Uses the published authorities, and every change of them.
fn follow(
    informers: &Informers,
    given: Option<String>,
    certificates: Arc<RwLock<Arc<Authenticators>>>,
) {
    let named = format!("metadata.name={PUBLISHED}");
    let published = informers.scoped::<ConfigMap>(Some(NAMESPACE), &named, "");
    published.subscribe(move |event| {
        if event.is_deleted() {
            return;
        }
        match authenticators(given.as_deref(), event.object()) {
            Ok(next) => *certificates.write().expect("no panic while held") = Arc::new(next),
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!(error, "failed to use the published authorities of clients");
            }
        }
    });
}

/// Front proxies come first, as upstream: the user in their headers counts, not their own certificate.
fn authenticators(given: Option<&str>, published: &ConfigMap) -> anyhow::Result<Authenticators> {
    let text = |key: &str| {
        let text = published.data.as_ref()?.get(key)?;
        Some(text.as_str()).filter(|text| !text.is_empty())
    };
    let list = |key: &str| -> anyhow::Result<Vec<String>> {
        let parsed = text(key).map(serde_json::from_str).transpose();
        Ok(parsed.with_context(|| key.to_owned())?.unwrap_or_default())
    };
    let mut all: Vec<Box<dyn Authenticator>> = vec![];
    if let Some(authority) = text("requestheader-client-ca-file") {
        let headers = Headers {
            user: list("requestheader-username-headers")?,
            uid: list("requestheader-uid-headers")?,
            group: list("requestheader-group-headers")?,
            extra_prefix: list("requestheader-extra-headers-prefix")?,
        };
        let names = list("requestheader-allowed-names")?;
        all.push(Box::new(RequestHeader::with_headers(authority, names, headers)?));
    }
    if let Some(authority) = given.or_else(|| text("client-ca-file")) {
        all.push(Box::new(x509::X509::new(authority)?));
    }
    Ok(Authenticators(all))
}

/// Upstream: `authorizer/path`: a leading slash is ignored, a star at the end matches any suffix.
fn is_open(open: &[String], path: &str) -> bool {
    let path = path.trim_start_matches('/');
    open.iter().map(|pattern| pattern.trim_start_matches('/')).any(|pattern| {
        match pattern.strip_suffix('*') {
            Some(start) => path.starts_with(start),
            None => path == pattern,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn always_allowed_paths_match_exactly() {
        let open = ["/healthz".to_owned(), "/debug/*".to_owned()];
        let check =
            |path: &str, expected: bool| assert_eq!(is_open(&open, path), expected, "{path}");
        check("/healthz", true);
        check("/healthz/", false);
        check("/healthz/ping", false);
        check("/debug/pprof", true);
        check("/debug", false);
        check("/metrics", false);
        assert!(!is_open(&[], "/healthz"));
    }

    #[test]
    fn published_authorities_are_used() {
        let check = |pairs: &[(&str, &str)], expected: Option<usize>| {
            let data = pairs.iter().map(|(key, text)| ((*key).to_owned(), (*text).to_owned()));
            let published = ConfigMap { data: Some(data.collect()), ..ConfigMap::default() };
            let count = authenticators(None, &published).map(|found| found.0.len()).ok();
            assert_eq!(count, expected, "{pairs:?}");
        };
        let authority = pki::Authority::generate("ca").expect("an authority");
        let pem = authority.cert_pem();
        check(&[], Some(0));
        check(&[("client-ca-file", pem)], Some(1));
        let proxy = ("requestheader-client-ca-file", pem);
        let headers = ("requestheader-username-headers", "[\"X-Remote-User\"]");
        check(&[("client-ca-file", pem), proxy, headers], Some(2));
        check(&[("client-ca-file", "no PEM")], None);
        check(&[proxy, ("requestheader-allowed-names", "no list")], None);
    }
}
