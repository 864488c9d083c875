//! The authenticators, in upstream's order: front proxies, certificates, tokens.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use apiserver::request::UserInfo;
use auth::node_certificates::NodeCertificates;
use auth::oidc::config::{ClaimMappings, ClaimRule, Issuer, JwtAuthenticator, PrefixedClaim};
use auth::oidc::{self, AuthenticationConfiguration, Issuers};
use auth::reload::Followed;
use auth::request_header::{Headers, RequestHeader};
use auth::service_account::ServiceAccounts;
use auth::sightings::Sightings;
use auth::token_webhook::TokenWebhook;
use auth::tokens::{AnyAudience, BearerTokens, TokenAuthenticator};
use auth::webhook::Webhook;
use auth::{Authenticators, bootstrap_token, token_file, x509};
use base::task::Tasks;
use pki::{Component, Pki};

use super::Credentials;
use super::{Access, read};

/// All parts of authentication that the server needs.
pub struct Authentication {
    pub authenticators: Authenticators,
    /// Also used by TokenReview.
    pub bearer: Arc<BearerTokens>,
    pub anonymous: bool,
    /// If not empty, anonymous requests are allowed to these paths only.
    pub anonymous_paths: Vec<String>,
    /// Authorities of front proxies, PEM.
    pub front_proxy_ca_pem: String,
    /// Clients with certificates of a replaced authority.
    pub sightings: Sightings,
}

impl Authentication {
    pub async fn start(
        access: &Access,
        registry: &apiserver::Registry,
        pki: &Pki,
        credentials: &Credentials,
        tasks: &Tasks,
    ) -> anyhow::Result<Self> {
        let own = credentials.keys.audiences();
        let (configuration, followed) = configuration(access)?;
        let (anonymous, anonymous_paths) = anonymous(access, &configuration)?;
        let mut kinds: Vec<Box<dyn TokenAuthenticator>> = vec![];
        if let Some(path) = &access.token_auth_file {
            let shown = path.display().to_string();
            let tokens = token_file::parse(&read(path)?, &shown).map_err(anyhow::Error::msg)?;
            kinds.push(Box::new(AnyAudience { inner: tokens, own: own.to_vec() }));
        }
        kinds.push(Box::new(ServiceAccounts::new(registry.clone(), credentials.keys.clone())));
        let bootstrap = bootstrap_token::BootstrapTokens::new(registry.clone());
        kinds.push(Box::new(AnyAudience { inner: bootstrap, own: own.to_vec() }));
        let issuers = issuers(access, &configuration, credentials, tasks)?;
        kinds.push(Box::new(AnyAudience { inner: issuers.clone(), own: own.to_vec() }));
        if let Some(followed) = followed {
            tasks.spawn("authentication configuration", follow(followed, issuers));
        }
        if let Some(webhook) = token_webhook(access)? {
            kinds.push(Box::new(webhook));
        }
        let bearer = Arc::new(BearerTokens::new(kinds, own.to_vec()));
        let (front_proxy, front_proxy_ca_pem) = front_proxy(access, pki)?;
        let nodes = NodeCertificates::start(registry, tasks).await;
        let x509 = x509::X509::new(&credentials.client_ca_pem)?.with_nodes(nodes);
        let sightings = x509.sightings().clone();
        let authenticators = Authenticators(vec![
            Box::new(front_proxy),
            Box::new(x509),
            Box::new(SharedTokens(bearer.clone())),
        ]);
        Ok(Self {
            authenticators,
            bearer,
            anonymous,
            anonymous_paths,
            front_proxy_ca_pem,
            sightings,
        })
    }
}

/// The configuration and its file; without a file, the configuration of the flags.
fn configuration(
    access: &Access,
) -> anyhow::Result<(AuthenticationConfiguration, Option<Followed>)> {
    let Some(path) = &access.authentication_config else {
        let jwt = from_flags(access)?.into_iter().collect();
        return Ok((AuthenticationConfiguration { jwt, ..Default::default() }, None));
    };
    let failed =
        || format!("failed to load authentication configuration from file {:?}", path.display());
    let (followed, text) = Followed::open(path).with_context(failed)?;
    let parsed = AuthenticationConfiguration::parse(&text);
    let parsed = parsed.map_err(anyhow::Error::msg).with_context(failed)?;
    Ok((parsed, Some(followed)))
}

/// The issuer of the `--oidc-*` flags.
fn from_flags(access: &Access) -> anyhow::Result<Option<JwtAuthenticator>> {
    let (Some(url), Some(client)) = (&access.oidc_issuer_url, &access.oidc_client_id) else {
        return Ok(None);
    };
    let text = |flag: &Option<String>| flag.clone().unwrap_or_default();
    let claim = access.oidc_username_claim.clone().unwrap_or_else(|| "sub".to_owned());
    let prefix = match access.oidc_username_prefix.as_deref() {
        Some("-") => String::new(),
        None | Some("") if claim != "email" => format!("{url}#"),
        prefix => prefix.unwrap_or_default().to_owned(),
    };
    let mut claim_mappings = ClaimMappings {
        username: PrefixedClaim { claim, prefix: Some(prefix), ..Default::default() },
        ..ClaimMappings::default()
    };
    if let Some(claim) = &access.oidc_groups_claim {
        let prefix = Some(text(&access.oidc_groups_prefix));
        claim_mappings.groups =
            PrefixedClaim { claim: claim.clone(), prefix, ..Default::default() };
    }
    let mut claim_validation_rules = vec![];
    for pair in &access.oidc_required_claim {
        let Some((claim, value)) = pair.split_once('=') else {
            bail!("--oidc-required-claim {pair}: malformed pair, expect string=string");
        };
        let (claim, required_value) = (claim.trim().to_owned(), value.trim().to_owned());
        claim_validation_rules.push(ClaimRule { claim, required_value, ..ClaimRule::default() });
    }
    let authority = access.oidc_ca_file.as_deref().map(read).transpose()?;
    let issuer = Issuer {
        url: url.clone(),
        audiences: vec![client.clone()],
        certificate_authority: authority.unwrap_or_default(),
        ..Issuer::default()
    };
    Ok(Some(JwtAuthenticator {
        issuer,
        claim_mappings,
        claim_validation_rules,
        ..JwtAuthenticator::default()
    }))
}

fn anonymous(
    access: &Access,
    configuration: &AuthenticationConfiguration,
) -> anyhow::Result<(bool, Vec<String>)> {
    match (&configuration.anonymous, access.anonymous_auth) {
        (Some(_), Some(_)) => bail!(
            "anonymous: Forbidden: --anonymous-auth flag cannot be set when anonymous field is configured in authentication configuration file"
        ),
        (Some(said), None) => {
            let paths = said.conditions.iter().map(|condition| condition.path.clone());
            Ok((said.enabled, paths.collect()))
        }
        (None, flag) => Ok((flag.unwrap_or(true), vec![])),
    }
}

fn issuers(
    access: &Access,
    configuration: &AuthenticationConfiguration,
    credentials: &Credentials,
    tasks: &Tasks,
) -> anyhow::Result<Arc<Issuers>> {
    let algorithms = match (&access.authentication_config, &access.oidc_signing_algs[..]) {
        // Any algorithm that fits the key.
        (Some(_), _) => oidc::keys::algorithms(),
        (None, []) => vec!["RS256".to_owned()],
        (None, named) => named.to_vec(),
    };
    let own_issuers = credentials.keys.issuers().to_vec();
    let issuers = Issuers::new(configuration, oidc::Options { algorithms, own_issuers }, tasks);
    let issuers = issuers.map_err(anyhow::Error::msg);
    issuers.context("invalid authentication configuration").map(Arc::new)
}

async fn follow(mut followed: Followed, issuers: Arc<Issuers>) {
    loop {
        let text = followed.changed().await;
        let outcome = match AuthenticationConfiguration::parse(&text) {
            Ok(configuration) => issuers.replace(&configuration).await,
            Err(why) => Err(why),
        };
        auth::reload::AUTHENTICATION.note(outcome.is_ok());
        match outcome {
            Ok(()) => tracing::info!("reloaded authentication config"),
            Err(why) => tracing::error!(why, "failed to reload authentication config"),
        }
    }
}

fn token_webhook(access: &Access) -> anyhow::Result<Option<TokenWebhook>> {
    let Some(path) = &access.authentication_token_webhook_config_file else { return Ok(None) };
    let webhook = Webhook::from_kubeconfig(path).map_err(anyhow::Error::msg)?;
    let version = access.authentication_token_webhook_version.as_deref().unwrap_or("v1beta1");
    let lasts = access.authentication_token_webhook_cache_ttl;
    let lasts = lasts.unwrap_or(Duration::from_secs(120));
    TokenWebhook::new(webhook, version, lasts).map(Some).map_err(anyhow::Error::msg)
}

/// The cluster's own front proxy, or those of the flags.
fn front_proxy(access: &Access, pki: &Pki) -> anyhow::Result<(RequestHeader, String)> {
    let usual = Headers::default();
    let or = |given: &[String], usual: Vec<String>| {
        if given.is_empty() { usual } else { given.to_vec() }
    };
    let headers = Headers {
        user: or(&access.requestheader_username_headers, usual.user),
        uid: or(&access.requestheader_uid_headers, usual.uid),
        group: or(&access.requestheader_group_headers, usual.group),
        extra_prefix: or(&access.requestheader_extra_headers_prefix, usual.extra_prefix),
    };
    let (ca_pem, usual_names) = match access.requestheader_client_ca_file.as_deref() {
        Some(path) => (front_proxy_ca(path)?, vec![]),
        None => {
            let own = vec![Component::FrontProxyClient.identity().user];
            (pki.front_proxy_ca.cert_pem().to_owned(), own)
        }
    };
    let names = or(&access.requestheader_allowed_names, usual_names);
    Ok((RequestHeader::with_headers(&ca_pem, names, headers)?, ca_pem))
}

fn front_proxy_ca(path: &Path) -> anyhow::Result<String> {
    read(path).context("unable to load request header client CA file")
}

/// The bearer tokens, which both the filters and TokenReview ask.
struct SharedTokens(Arc<BearerTokens>);

#[async_trait::async_trait]
impl apiserver::authn::Authenticator for SharedTokens {
    async fn authenticate(
        &self,
        request: &http::request::Parts,
    ) -> Result<Option<UserInfo>, apiserver::StatusError> {
        self.0.authenticate(request).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_mean_an_issuer() {
        let check = |claim: Option<&str>, prefix: Option<&str>, expected: &str| {
            let text = |flag: Option<&str>| flag.map(str::to_owned);
            let access = Access {
                oidc_issuer_url: Some("https://a".into()),
                oidc_client_id: Some("kube".into()),
                oidc_username_claim: text(claim),
                oidc_username_prefix: text(prefix),
                oidc_required_claim: vec!["hd=acme".into()],
                ..Access::default()
            };
            access.check().expect("they fit");
            let jwt = from_flags(&access).expect("they fit").expect("an issuer");
            assert_eq!(jwt.claim_mappings.username.prefix.as_deref(), Some(expected));
            assert_eq!(jwt.claim_validation_rules[0].required_value, "acme");
        };
        check(None, None, "https://a#");
        check(Some("name"), None, "https://a#");
        check(Some("email"), None, "");
        check(Some("email"), Some("x:"), "x:");
        check(None, Some("-"), "");
        let half = Access { oidc_issuer_url: Some("https://a".into()), ..Access::default() };
        assert!(half.check().is_err());
    }
}
