//! admissionregistration.k8s.io: webhooks and policies that look at requests, and what these kinds
//! share. Their objects are few and their changes weigh much: a PUT must name the resourceVersion.

use std::fmt::Write as _;

use k8s_openapi::api::admissionregistration::v1::{MatchResources, ParamKind, ParamRef};
use machinery::LabelSelector;

use crate::kind::Rules;

pub(crate) mod mutating_admission_policy;
pub(crate) mod mutating_admission_policy_binding;
pub(crate) mod mutating_webhook_configuration;
pub(crate) mod validating_admission_policy;
pub(crate) mod validating_admission_policy_binding;
pub(crate) mod validating_webhook_configuration;

const API_EXTENSIONS: &[&str] = &["api-extensions"];

/// What the rules of all kinds of the group have alike.
const RULES: Rules = Rules {
    metadata: apiserver::resource::MetadataRules::Plain,
    unconditional_update: false,
    ..Rules::NONE
};

const HTTPS: i32 = 443;
const WEBHOOK_SECONDS: i32 = 10;

/// Webhooks of both kinds, which are types of their own with the same fields.
macro_rules! default_webhook {
    ($hook:expr) => {{
        let hook = $hook;
        hook.failure_policy.get_or_insert_with(|| "Fail".into());
        hook.match_policy.get_or_insert_with(|| "Equivalent".into());
        hook.namespace_selector.get_or_insert_default();
        hook.object_selector.get_or_insert_default();
        hook.timeout_seconds.get_or_insert($crate::admissionregistration::WEBHOOK_SECONDS);
        for rule in hook.rules.iter_mut().flatten() {
            rule.scope.get_or_insert_with(|| "*".into());
        }
        if let Some(service) = &mut hook.client_config.service {
            service.port.get_or_insert($crate::admissionregistration::HTTPS);
        }
    }};
}
use default_webhook;

fn default_match(resources: Option<&mut MatchResources>) {
    let Some(resources) = resources else { return };
    resources.match_policy.get_or_insert_with(|| "Equivalent".into());
    resources.namespace_selector.get_or_insert_default();
    resources.object_selector.get_or_insert_default();
    for list in [&mut resources.resource_rules, &mut resources.exclude_resource_rules] {
        for rule in list.iter_mut().flatten() {
            rule.scope.get_or_insert_with(|| "*".into());
        }
    }
}

fn param_kind(kind: Option<&ParamKind>) -> String {
    let Some(kind) = kind else { return "<unset>".into() };
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", text(&kind.api_version), text(&kind.kind))
}

/// A policy's parameters: a name in a namespace, or what a selector selects.
fn param_ref(params: Option<&ParamRef>) -> String {
    let Some(params) = params else { return "<unset>".into() };
    let given = |part: &Option<String>| part.clone().filter(|text| !text.is_empty());
    match (given(&params.name), given(&params.namespace), &params.selector) {
        (Some(name), Some(namespace), _) => format!("{namespace}/{name}"),
        (Some(name), None, _) => format!("*/{name}"),
        (None, _, Some(selector)) => go_text(selector),
        _ => "<unset>".into(),
    }
}

/// A selector as Go's generated `String` method prints it.
fn go_text(selector: &LabelSelector) -> String {
    let mut labels = String::new();
    for (key, value) in selector.match_labels.iter().flatten() {
        let _ = write!(labels, "{key}: {value},");
    }
    let mut expressions = String::new();
    for one in selector.match_expressions.iter().flatten() {
        let values = one.values.as_deref().unwrap_or_default().join(" ");
        let _ = write!(
            expressions,
            "LabelSelectorRequirement{{Key:{},Operator:{},Values:[{values}],}},",
            one.key, one.operator
        );
    }
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}
