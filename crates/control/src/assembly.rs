//! The assembly of an API server: its rows, its admission plugins in their order, the rows that ask its
//! authorizers, webhooks that convert, and the checks and pages that it has under upstream's names.
//!
//! In: a store, identities and settings. Out: a registry to which everything is added. Invariant: the
//! plugins come before anything is served, and the reviews after the authorizers, which read the
//! registry.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use apiserver::Registry;
use apiserver::authz::Authorizer;
use apiserver::health::{Health, Hook};
use apiserver::runtime_config::RuntimeConfig;
use apiserver::serve::Page;
use auth::service_account::{Lifetimes, TokenKeys, TokenRequests};
use auth::{Authorizers, Rbac, tokens};
use base::task::Tasks;
use k8s_openapi::api::{authentication::v1 as authentication, authorization::v1 as authorization};
use machinery::patch::Schema;
use release::features::{self, Feature};
use resources::Row;

use crate::{Kubelets, connections, metrics};

/// Which setting does not fit this server.
#[derive(Debug, thiserror::Error)]
pub enum AssemblyError {
    /// Upstream's `--enable-admission-plugins`, `--disable-admission-plugins`, or the plugins' file.
    #[error(transparent)]
    Admission(#[from] admission::OptionsError),
    /// Upstream's `--runtime-config`.
    #[error(transparent)]
    RuntimeConfig(#[from] apiserver::ConfigError),
}

/// The server's settings that its rows need.
pub struct Options {
    pub kubelets: Kubelets,
    /// Sign the tokens of service accounts.
    pub keys: TokenKeys,
    /// Upstream's `--service-node-port-range`.
    pub node_ports: RangeInclusive<u16>,
    pub runtime_config: RuntimeConfig,
    /// Upstream's `--allow-privileged`.
    pub allow_privileged: bool,
    /// Upstream's `--event-ttl`.
    pub event_ttl: Duration,
    /// Limits of the tokens of service accounts.
    pub lifetimes: Lifetimes,
}

/// A registry over the store, with all rows but those of reviews. The admission plugins come when the
/// authorizers are there.
pub fn registry(store: Arc<dyn store::Store>, options: Options, tasks: &Tasks) -> Registry {
    let Options { kubelets, keys, node_ports, runtime_config, allow_privileged, .. } = options;
    let kubelets = Arc::new(kubelets);
    let facts: Option<Arc<dyn Schema>> = Some(Arc::new(api::facts::Facts));
    let is_on = move |row: &Row| runtime_config.serves(row.resource(), false) && row.is_open();
    let mut table = resources::table(resources::Options {
        schema: facts.clone(),
        node_ports,
        connections: connections(&kubelets),
        tokens: Arc::new(TokenRequests::new(keys, options.lifetimes)),
        is_on: Box::new(is_on),
        allow_privileged,
        event_ttl: options.event_ttl,
    });
    table.insert(Arc::new(resources::pod_addresses().build(facts.clone())));
    for row in metrics::rows(&kubelets) {
        table.insert(Arc::new(row.build(facts.clone())));
    }
    table.insert(Arc::new(extensions::definition::row(facts)));
    Registry::new(store, table, Default::default(), tasks.clone())
}

/// The admission plugins. NoEscalation and the signing of pods' certificates are always on.
pub fn set_admission(
    registry: &Registry,
    options: admission::Options,
    rbac: Rbac,
    authorizers: &Authorizers,
) -> Result<(), AssemblyError> {
    let authorizer: Arc<dyn Authorizer> = Arc::new(authorizers.clone());
    let options = admission::Options { authorizer: Some(authorizer.clone()), ..options };
    let mut chain = admission::chain(&options)?;
    chain.0.insert(0, Box::new(auth::rbac::NoEscalation::new(rbac, authorizer.clone())));
    chain.0.insert(0, Box::new(admission::PodCertificateSigning(authorizer)));
    registry.set_admission(chain);
    Ok(())
}

/// Adds the review kinds last: they ask the authorizers, which read the registry.
pub fn add_reviews(
    registry: &Registry,
    authorizers: &Authorizers,
    tokens: &Arc<tokens::BearerTokens>,
) {
    use auth::reviews;
    let ask: Arc<dyn Authorizer> = Arc::new(authorizers.clone());
    let rows = [
        Row::review::<authorization::SubjectAccessReview>(reviews::SubjectAccess(ask.clone())),
        Row::review::<authorization::LocalSubjectAccessReview>(reviews::LocalSubjectAccess(
            ask.clone(),
        )),
        Row::review::<authorization::SelfSubjectAccessReview>(reviews::SelfSubjectAccess(
            ask.clone(),
        )),
        Row::review::<authorization::SelfSubjectRulesReview>(reviews::SelfSubjectRules(ask)),
        Row::review::<authentication::SelfSubjectReview>(reviews::SelfSubject),
        Row::review::<authentication::TokenReview>(reviews::TokenReviews(tokens.clone())),
    ];
    let mut table = (*registry.resources()).clone();
    for row in rows {
        table.insert(Arc::new(row.build(Some(Arc::new(api::facts::Facts)))));
    }
    registry.set_resources(table);
}

/// Calls webhooks that convert custom resources, by the client that admission uses.
pub fn conversion_webhooks(registry: &Registry) -> extensions::Post {
    let (registry, clients) = (registry.clone(), Arc::new(admission::Clients::default()));
    Arc::new(move |config, body, timeout| {
        let (registry, clients) = (registry.clone(), clients.clone());
        let address = match (config.url, config.service) {
            (Some(url), _) => admission::Address::Url(url),
            (None, Some(service)) => admission::Address::Service {
                namespace: service.namespace,
                name: service.name,
                path: service.path.unwrap_or_default(),
                port: service.port.and_then(|port| u16::try_from(port).ok()).unwrap_or(443),
            },
            (None, None) => admission::Address::Nowhere,
        };
        let ca_pem = config.ca_bundle.and_then(|bundle| String::from_utf8(bundle.0).ok());
        let endpoint = admission::Endpoint { address, ca_pem };
        Box::pin(async move {
            let answer = clients.post(&registry, &endpoint, body, timeout).await;
            answer.map_err(|error| extensions::PostError(error.cause()))
        })
    })
}

/// Hides the versions that `--runtime-config` disables; returns an error for unknown ones.
pub fn hide_versions(config: &RuntimeConfig, registry: &Registry) -> Result<(), AssemblyError> {
    let table = registry.resources();
    let mut known = resources::versions::known();
    known.extend(table.iter().map(|row| (row.group.clone(), row.version.clone())));
    config.check(&known)?;
    let hidden = config.hidden(&table);
    registry.change_resources(|table| table.hide(hidden));
    Ok(())
}

/// What others need to check service account tokens by themselves. `jwks_uri` is where clients find the
/// keys.
pub fn pages(keys: &TokenKeys, jwks_uri: &str) -> Vec<Page> {
    let page = |path: &str, content_type, body: serde_json::Value, about, tag| Page {
        path: path.into(),
        content_type,
        body: body.to_string().into(),
        about,
        tag,
    };
    vec![
        page(
            "/.well-known/openid-configuration",
            "application/json",
            keys.openid_configuration(jwks_uri),
            "get service account issuer OpenID configuration, also known as the 'OIDC discovery doc'",
            "WellKnown",
        ),
        page(
            "/openid/v1/jwks",
            "application/jwk-set+json",
            keys.jwks(),
            "get service account issuer OpenID JSON Web Key Set (contains public token verification keys)",
            "openid",
        ),
    ]
}

/// The checks of `/readyz?verbose` under upstream's names, for clients that look for them. The server does
/// the work of each. All of it begins in one step, once the first objects exist.
const HOOKS: &[&str] = &[
    INFORMERS,
    "start-apiserver-admission-initializer",
    "generic-apiserver-start-informers",
    "priority-and-fairness-config-consumer",
    "priority-and-fairness-filter",
    "max-in-flight-filter",
    "start-apiextensions-informers",
    "start-apiextensions-controllers",
    "crd-informer-synced",
    "start-system-namespaces-controller",
    "start-cluster-authentication-info-controller",
    IDENTITY[0],
    IDENTITY[1],
    "storage-readiness",
    "start-legacy-token-tracking-controller",
    "start-service-ip-repair-controllers",
    "rbac/bootstrap-roles",
    "scheduling/bootstrap-system-priority-classes",
    "priority-and-fairness-config-producer",
    "bootstrap-controller",
    "start-kubernetes-service-cidr-controller",
    "aggregator-reload-proxy-client-cert",
    "start-kube-aggregator-informers",
    "apiservice-status-local-available-controller",
    "apiservice-status-remote-available-controller",
    "apiservice-registration-controller",
    "apiservice-wait-for-first-sync",
    "apiservice-discovery-controller",
    "kube-apiserver-autoregistration",
    AUTOREGISTRATION,
    "apiservice-openapi-controller",
    "apiservice-openapiv3-controller",
];

/// Checks that upstream does not call hooks; the first is of `/readyz` alone.
const INFORMERS: &str = "informer-sync";
const AUTOREGISTRATION: &str = "autoregister-completion";
/// With the gate APIServerIdentity.
const IDENTITY: [&str; 2] = [
    "start-kube-apiserver-identity-lease-controller",
    "start-kube-apiserver-identity-lease-garbage-collector",
];

/// The checks that are open until the server is ready.
pub fn hooks(is_fair: bool, health: &Health) -> Vec<Hook> {
    let is_done = |name: &&&str| match **name {
        "priority-and-fairness-config-consumer" | "priority-and-fairness-filter" => is_fair,
        "max-in-flight-filter" => !is_fair,
        name if IDENTITY.contains(&name) => features::enabled(Feature::APIServerIdentity),
        _ => true,
    };
    let hook = |name: &&str| match *name {
        INFORMERS => health.once(name, true),
        AUTOREGISTRATION => health.once(name, false),
        name => health.hook(name),
    };
    HOOKS.iter().filter(is_done).map(hook).collect()
}
