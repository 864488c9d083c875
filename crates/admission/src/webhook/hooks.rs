//! The webhooks of all configurations, compiled for matching and calling.
//!
//! In: configurations as stored. Out: [`Hook`]s in the order of their configurations' names, with
//! upstream's defaults for omitted fields.

use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations,
    ValidatingWebhook, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use machinery::{LabelSelector, Object};

use super::call::{Address, Endpoint};
use crate::matching::{Criteria, Rule, selector};
use crate::policy::Conditions;

const TIMEOUT_SECONDS: i32 = 10;
const HTTPS_PORT: u16 = 443;

/// One webhook of one configuration.
pub(crate) struct Hook {
    /// Identifies the webhook, also among several of one name.
    pub id: String,
    pub name: String,
    pub configuration: String,
    pub criteria: Criteria,
    pub conditions: Conditions,
    pub endpoint: Endpoint,
    pub review_versions: Vec<String>,
    pub side_effects: String,
    pub timeout_seconds: u64,
    /// failurePolicy Ignore
    pub fails_open: bool,
    /// reinvocationPolicy IfNeeded
    pub reinvoked: bool,
}

/// The common fields of both kinds of webhooks.
struct Parts<'a> {
    name: &'a str,
    rules: Option<&'a [RuleWithOperations]>,
    namespaces: Option<&'a LabelSelector>,
    objects: Option<&'a LabelSelector>,
    match_policy: Option<&'a str>,
    failure_policy: Option<&'a str>,
    conditions: Option<&'a [MatchCondition]>,
    client: &'a WebhookClientConfig,
    versions: &'a [String],
    side_effects: &'a str,
    timeout: Option<i32>,
    reinvocation: Option<&'a str>,
}

pub(crate) fn mutating(all: &[MutatingWebhookConfiguration]) -> Vec<Hook> {
    let hooks = all.iter().flat_map(|one| {
        let hooks = one.webhooks.iter().flatten().enumerate();
        hooks.filter_map(|(index, hook)| compiled(one.name(), index, &of_mutating(hook)))
    });
    hooks.collect()
}

pub(crate) fn validating(all: &[ValidatingWebhookConfiguration]) -> Vec<Hook> {
    let hooks = all.iter().flat_map(|one| {
        let hooks = one.webhooks.iter().flatten().enumerate();
        hooks.filter_map(|(index, hook)| compiled(one.name(), index, &of_validating(hook)))
    });
    hooks.collect()
}

fn of_mutating(hook: &MutatingWebhook) -> Parts<'_> {
    Parts {
        name: &hook.name,
        rules: hook.rules.as_deref(),
        namespaces: hook.namespace_selector.as_ref(),
        objects: hook.object_selector.as_ref(),
        match_policy: hook.match_policy.as_deref(),
        failure_policy: hook.failure_policy.as_deref(),
        conditions: hook.match_conditions.as_deref(),
        client: &hook.client_config,
        versions: &hook.admission_review_versions,
        side_effects: &hook.side_effects,
        timeout: hook.timeout_seconds,
        reinvocation: hook.reinvocation_policy.as_deref(),
    }
}

fn of_validating(hook: &ValidatingWebhook) -> Parts<'_> {
    Parts {
        name: &hook.name,
        rules: hook.rules.as_deref(),
        namespaces: hook.namespace_selector.as_ref(),
        objects: hook.object_selector.as_ref(),
        match_policy: hook.match_policy.as_deref(),
        failure_policy: hook.failure_policy.as_deref(),
        conditions: hook.match_conditions.as_deref(),
        client: &hook.client_config,
        versions: &hook.admission_review_versions,
        side_effects: &hook.side_effects,
        timeout: hook.timeout_seconds,
        reinvocation: None,
    }
}

/// `None` only for selectors that validation would have rejected.
fn compiled(configuration: &str, index: usize, parts: &Parts<'_>) -> Option<Hook> {
    let read = |one: Option<&LabelSelector>| {
        selector(one).inspect_err(|error| {
            tracing::error!(configuration, webhook = parts.name, %error, "skipping a webhook with an invalid selector");
        })
    };
    let criteria = Criteria {
        rules: parts.rules.unwrap_or_default().iter().map(Rule::from).collect(),
        equivalent: parts.match_policy != Some("Exact"),
        namespaces: read(parts.namespaces).ok()?,
        objects: read(parts.objects).ok()?,
        ..Criteria::default()
    };
    let timeout = parts.timeout.unwrap_or(TIMEOUT_SECONDS);
    Some(Hook {
        id: format!("{configuration}/{}/{index}", parts.name),
        name: parts.name.into(),
        configuration: configuration.into(),
        criteria,
        conditions: Conditions::new(parts.conditions),
        endpoint: endpoint(parts.client),
        review_versions: parts.versions.to_vec(),
        side_effects: parts.side_effects.into(),
        timeout_seconds: u64::try_from(timeout).ok().filter(|seconds| *seconds > 0).unwrap_or(10),
        fails_open: parts.failure_policy == Some("Ignore"),
        reinvoked: parts.reinvocation == Some("IfNeeded"),
    })
}

fn endpoint(client: &WebhookClientConfig) -> Endpoint {
    let address = match (&client.service, &client.url) {
        (Some(service), _) => Address::Service {
            namespace: service.namespace.clone(),
            name: service.name.clone(),
            path: service.path.clone().unwrap_or_default(),
            port: service.port.and_then(|port| u16::try_from(port).ok()).unwrap_or(HTTPS_PORT),
        },
        (None, Some(url)) => Address::Url(url.clone()),
        (None, None) => Address::Nowhere,
    };
    let bundle = client.ca_bundle.as_ref().filter(|bundle| !bundle.0.is_empty());
    Endpoint { address, ca_pem: bundle.map(|pem| String::from_utf8_lossy(&pem.0).into_owned()) }
}
