//! The authorization modes and their order, from flags or from a file that may change.
//!
//! ```text
//! apiVersion: apiserver.config.k8s.io/v1
//! kind: AuthorizationConfiguration
//! authorizers:
//! - {type: Node, name: node}
//! - {type: RBAC, name: rbac}
//! - type: Webhook
//!   name: policy.example.com
//!   webhook: {timeout: 3s, subjectAccessReviewVersion: v1, failurePolicy: Deny,
//!             connectionInfo: {type: KubeConfigFile, kubeConfigFile: /etc/policy.conf}}
//! ```
//!
//! In: a configuration and the authorizers that the server has. Out: the current chain, always
//! with `system:masters` first. Upstream: `pkg/kubeapiserver/authorizer`.

use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use apiserver::authz::{Attributes, Authorizer, Decision, PolicyRule};
use apiserver::request::UserInfo;
use arc_swap::ArcSwap;
use async_trait::async_trait;
use machinery::field::{FieldErrors, Path};
use serde::Deserialize;

use crate::ConfigError;
use crate::authz_webhook::{AuthorizationWebhook, Condition, Settings};
use crate::chain::{Always, Authorizers, Masters};
use crate::webhook::Webhook;

/// The values of `--authorization-mode`.
pub const MODES: [&str; 6] = ["ABAC", "AlwaysAllow", "AlwaysDeny", "Node", "RBAC", "Webhook"];
const VERSIONS: [&str; 3] = [
    "apiserver.config.k8s.io/v1",
    "apiserver.config.k8s.io/v1beta1",
    "apiserver.config.k8s.io/v1alpha1",
];
const MOST_CONDITIONS: usize = 64;

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AuthorizationConfiguration {
    #[serde(default)]
    pub api_version: String,
    #[serde(default)]
    pub kind: String,
    #[serde(default)]
    pub authorizers: Vec<Configured>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Configured {
    #[serde(rename = "type")]
    pub mode: String,
    pub name: String,
    pub webhook: Option<WebhookConfiguration>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct WebhookConfiguration {
    #[serde(rename = "authorizedTTL")]
    pub authorized_ttl: String,
    pub cache_authorized_requests: Option<bool>,
    #[serde(rename = "unauthorizedTTL")]
    pub unauthorized_ttl: String,
    pub cache_unauthorized_requests: Option<bool>,
    pub timeout: String,
    pub subject_access_review_version: String,
    pub match_condition_subject_access_review_version: String,
    pub failure_policy: String,
    pub connection_info: ConnectionInfo,
    pub match_conditions: Vec<MatchCondition>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ConnectionInfo {
    #[serde(rename = "type")]
    pub kind: String,
    pub kube_config_file: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MatchCondition {
    pub expression: String,
}

impl AuthorizationConfiguration {
    pub fn parse(yaml: &str) -> Result<Self, ConfigError> {
        let config: Self =
            serde_saphyr::from_str(yaml).map_err(|error| ConfigError::Syntax(Box::new(error)))?;
        if config.kind != "AuthorizationConfiguration"
            || !VERSIONS.contains(&config.api_version.as_str())
        {
            let (kind, version) = (config.kind, config.api_version);
            return Err(ConfigError::Kind { kind, version });
        }
        Ok(config)
    }

    fn modes(&self) -> Vec<&str> {
        self.authorizers.iter().map(|one| one.mode.as_str()).collect()
    }
}

/// The authorizers that a configuration may name. `None`: not enabled at the start.
#[derive(Clone, Default)]
pub struct Available {
    pub node: Option<Arc<dyn Authorizer>>,
    pub rbac: Option<Arc<dyn Authorizer>>,
    pub abac: Option<Arc<dyn Authorizer>>,
}

/// The current chain of authorizers.
pub struct Modes {
    available: Available,
    /// The modes enabled at the start, which every later configuration must contain.
    required: Vec<String>,
    current: ArcSwap<Authorizers>,
}

impl Modes {
    pub fn new(
        configuration: &AuthorizationConfiguration,
        available: Available,
    ) -> Result<Self, ConfigError> {
        let first = chain(configuration, &available)?;
        let required = configuration.modes().into_iter().filter(|mode| *mode != "Webhook");
        let required = required.map(str::to_owned).collect();
        Ok(Self { available, required, current: ArcSwap::from_pointee(first) })
    }

    pub fn replace(&self, configuration: &AuthorizationConfiguration) -> Result<(), ConfigError> {
        let modes = configuration.modes();
        let missing = self.required.iter().filter(|mode| !modes.contains(&mode.as_str()));
        let missing: Vec<&str> = missing.map(String::as_str).collect();
        if !missing.is_empty() {
            return Err(ConfigError::MissingModes(missing.join(" ")));
        }
        self.current.store(Arc::new(chain(configuration, &self.available)?));
        Ok(())
    }
}

#[async_trait]
impl Authorizer for Modes {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        self.current.load_full().authorize(attributes).await
    }

    async fn rules(&self, user: &UserInfo, namespace: &str) -> Vec<PolicyRule> {
        self.current.load_full().rules(user, namespace).await
    }

    async fn unresolved(&self, user: &UserInfo, namespace: &str) -> Option<String> {
        self.current.load_full().unresolved(user, namespace).await
    }
}

fn chain(
    configuration: &AuthorizationConfiguration,
    available: &Available,
) -> Result<Authorizers, ConfigError> {
    let mut errors = FieldErrors::default();
    let mut all: Vec<Arc<dyn Authorizer>> = vec![Arc::new(Masters)];
    let root = Path::new("authorizers");
    if configuration.authorizers.is_empty() {
        errors.required(&root, "at least one authorization mode must be defined");
    }
    let mut settings = vec![];
    for (index, one) in configuration.authorizers.iter().enumerate() {
        let before = &configuration.authorizers[..index];
        settings.push(check(one, before, &root.index(index), &mut errors));
    }
    if !errors.is_empty() {
        return Err(ConfigError::Fields(errors.summary()));
    }
    for (one, settings) in configuration.authorizers.iter().zip(settings) {
        let not_there = || ConfigError::Mode(one.mode.clone());
        let there = |one: &Option<Arc<dyn Authorizer>>| one.clone().ok_or_else(not_there);
        all.push(match (one.mode.as_str(), settings, &one.webhook) {
            ("Node", ..) => there(&available.node)?,
            ("RBAC", ..) => there(&available.rbac)?,
            ("ABAC", ..) => there(&available.abac)?,
            ("Webhook", Some(settings), Some(webhook)) => {
                let file = webhook.connection_info.kube_config_file.as_deref().unwrap_or_default();
                let webhook = Webhook::from_kubeconfig(FilePath::new(file))?;
                Arc::new(AuthorizationWebhook::new(webhook, settings))
            }
            (mode, ..) => Arc::new(Always { allows: mode == "AlwaysAllow" }),
        });
    }
    Ok(Authorizers(all))
}

/// Checks one entry, and returns the settings of a valid webhook.
fn check(
    one: &Configured,
    before: &[Configured],
    path: &Path,
    errors: &mut FieldErrors,
) -> Option<Settings> {
    let mode = one.mode.as_str();
    if mode.is_empty() {
        errors.required(&path.child("type"), "");
        return None;
    }
    if !MODES.contains(&mode) {
        errors.not_supported(&path.child("type"), mode, &MODES);
        return None;
    }
    if mode != "Webhook" && before.iter().any(|other| other.mode == mode) {
        errors.duplicate(&path.child("type"), mode);
        return None;
    }
    let place = path.child("name");
    if one.name.is_empty() {
        errors.required(&place, "");
    } else if before.iter().any(|other| other.name == one.name) {
        errors.duplicate(&place, &one.name);
    } else {
        let whys = machinery::names::dns1123_subdomain(&one.name);
        if !whys.is_empty() {
            let why = format!("authorizer name is invalid: {}", whys.join(", "));
            errors.invalid(&place, &one.name, &why);
        }
    }
    match (mode, &one.webhook) {
        ("Webhook", Some(webhook)) => check_webhook(&one.name, webhook, path, errors),
        ("Webhook", None) => {
            errors.required(&path.child("webhook"), "required when type=Webhook");
            None
        }
        (_, Some(_)) => {
            let why = "may only be specified when type=Webhook";
            errors.invalid(&path.child("webhook"), "non-null", why);
            None
        }
        (_, None) => None,
    }
}

fn check_webhook(
    name: &str,
    webhook: &WebhookConfiguration,
    path: &Path,
    errors: &mut FieldErrors,
) -> Option<Settings> {
    let before = errors.0.len();
    let timeout = duration(&webhook.timeout, None, &path.child("timeout"), errors);
    if timeout > Duration::from_secs(30) {
        errors.invalid(&path.child("timeout"), &webhook.timeout, "must be > 0s and <= 30s");
    }
    let minutes = Some(Duration::from_secs(300));
    let authorized =
        duration(&webhook.authorized_ttl, minutes, &path.child("authorizedTTL"), errors);
    let seconds = Some(Duration::from_secs(30));
    let place = path.child("unauthorizedTTL");
    let unauthorized = duration(&webhook.unauthorized_ttl, seconds, &place, errors);
    let version = webhook.subject_access_review_version.as_str();
    one_of(version, &["v1", "v1beta1"], &path.child("subjectAccessReviewVersion"), errors);
    let seen = webhook.match_condition_subject_access_review_version.as_str();
    let place = path.child("matchConditionSubjectAccessReviewVersion");
    match (seen, webhook.match_conditions.is_empty()) {
        ("v1", _) | ("", true) => {}
        ("", false) => errors.required(&place, "required if match conditions are specified"),
        _ => errors.not_supported(&place, seen, &["v1"]),
    }
    let policy = webhook.failure_policy.as_str();
    one_of(policy, &["NoOpinion", "Deny"], &path.child("failurePolicy"), errors);
    check_connection(&webhook.connection_info, &path.child("connectionInfo"), errors);
    let conditions = check_conditions(&webhook.match_conditions, path, errors);
    let is_kept =
        |flag: Option<bool>, lasts| if flag == Some(false) { Duration::ZERO } else { lasts };
    (errors.0.len() == before).then(|| Settings {
        name: name.to_owned(),
        version: version.to_owned(),
        timeout,
        authorized_lasts: is_kept(webhook.cache_authorized_requests, authorized),
        unauthorized_lasts: is_kept(webhook.cache_unauthorized_requests, unauthorized),
        denies_on_failure: policy == "Deny",
        conditions,
    })
}

fn duration(
    text: &str,
    default: Option<Duration>,
    path: &Path,
    errors: &mut FieldErrors,
) -> Duration {
    let parsed = match text {
        "" => Some(0),
        text => base::duration::nanos(text).ok(),
    };
    match (parsed, default) {
        (Some(0), Some(default)) => default,
        (Some(0), None) => {
            errors.required(path, "");
            Duration::ZERO
        }
        (Some(nanos), _) if nanos > 0 => Duration::from_nanos(nanos.unsigned_abs()),
        _ => {
            let why = if default.is_some() { "must be > 0s" } else { "must be > 0s and <= 30s" };
            errors.invalid(path, text, why);
            Duration::ZERO
        }
    }
}

fn one_of(text: &str, known: &[&str], path: &Path, errors: &mut FieldErrors) {
    match text {
        "" => errors.required(path, ""),
        text if known.contains(&text) => {}
        text => errors.not_supported(path, text, known),
    }
}

fn check_connection(info: &ConnectionInfo, path: &Path, errors: &mut FieldErrors) {
    let place = path.child("kubeConfigFile");
    match (info.kind.as_str(), info.kube_config_file.as_deref()) {
        ("", _) => errors.required(&path.child("type"), ""),
        ("KubeConfigFile", None | Some("")) => errors.required(&place, ""),
        ("KubeConfigFile", Some(file)) => {
            let file_path = FilePath::new(file);
            match std::fs::metadata(file_path) {
                _ if !file_path.is_absolute() => {
                    errors.invalid(&place, file, "must be an absolute path");
                }
                Err(error) => errors.invalid(&place, file, &format!("error loading file: {error}")),
                Ok(found) if !found.is_file() => {
                    errors.invalid(&place, file, "must be a regular file");
                }
                Ok(_) => {}
            }
        }
        // The server is no pod of another cluster, so it has no in-cluster configuration.
        (kind, _) => errors.not_supported(&path.child("type"), kind, &["KubeConfigFile"]),
    }
}

fn check_conditions(
    conditions: &[MatchCondition],
    path: &Path,
    errors: &mut FieldErrors,
) -> Vec<Condition> {
    let root = path.child("matchConditions");
    if conditions.len() > MOST_CONDITIONS {
        errors.too_many(&root, conditions.len(), MOST_CONDITIONS);
        return vec![];
    }
    let mut compiled = vec![];
    for (index, MatchCondition { expression }) in conditions.iter().enumerate() {
        let place = root.index(index).child("expression");
        if expression.trim().is_empty() {
            errors.required(&place, "");
            continue;
        }
        if conditions[..index].iter().any(|other| other.expression == *expression) {
            errors.duplicate(&place, expression);
            continue;
        }
        match Condition::new(expression) {
            Ok(one) if *one.program.kind() == cel::Type::Bool => compiled.push(one),
            Ok(one) => {
                let why = format!("must evaluate to bool but got {}", one.program.kind());
                errors.invalid(&place, expression, &why);
            }
            Err(error) => {
                errors.invalid(&place, expression, &format!("compilation failed: {error}"));
            }
        }
    }
    compiled
}

#[cfg(test)]
mod tests {
    use super::*;

    fn available() -> Available {
        let no: Option<Arc<dyn Authorizer>> = Some(Arc::new(Always { allows: false }));
        Available { node: no.clone(), rbac: no, abac: None }
    }

    fn modes(authorizers: &str) -> Result<Modes, ConfigError> {
        let text = format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers: {authorizers}"
        );
        Modes::new(&AuthorizationConfiguration::parse(&text)?, available())
    }

    #[test]
    fn mistakes_have_upstreams_messages() {
        let check = |authorizers: &str, expected: &str| {
            let refused = modes(authorizers).err().map(|why| why.to_string());
            assert_eq!(refused.as_deref().unwrap_or_default(), expected);
        };
        check("[{type: Node, name: node}, {type: RBAC, name: rbac}]", "");
        check("[]", "authorizers: Required value: at least one authorization mode must be defined");
        let unknown = "authorizers[0].type: Unsupported value: \"X\": supported values: \"ABAC\", \"AlwaysAllow\", \"AlwaysDeny\", \"Node\", \"RBAC\", \"Webhook\"";
        check("[{type: X, name: x}]", unknown);
        check(
            "[{type: RBAC, name: a}, {type: RBAC, name: b}]",
            "authorizers[1].type: Duplicate value: \"RBAC\"",
        );
        check("[{type: RBAC}]", "authorizers[0].name: Required value");
        check(
            "[{type: ABAC, name: abac}]",
            "authorizer type ABAC is not allowed if it was not enabled at initial server startup",
        );
        let webhook = |rest: &str| {
            format!(
                "[{{type: Webhook, name: w, webhook: {{timeout: 3s, subjectAccessReviewVersion: v1, failurePolicy: Deny, connectionInfo: {{type: KubeConfigFile, kubeConfigFile: /none}}{rest}}}}}]"
            )
        };
        let missing = "authorizers[0].connectionInfo.kubeConfigFile: Invalid value: \"/none\": error loading file: No such file or directory (os error 2)";
        check(&webhook(""), missing);
        let conditions = ", matchConditionSubjectAccessReviewVersion: v1, matchConditions: [{expression: \"request.user\"}]";
        let error = modes(&webhook(conditions)).err().expect("wrong").to_string();
        let wanted = "authorizers[0].matchConditions[0].expression: Invalid value: \"request.user\": must evaluate to bool but got string";
        assert!(error.contains(wanted), "{error}");
        check(
            "[{type: Webhook, name: w}]",
            "authorizers[0].webhook: Required value: required when type=Webhook",
        );
    }

    #[tokio::test]
    async fn a_new_configuration_takes_over() {
        let modes = modes("[{type: RBAC, name: rbac}]").expect("right");
        let question = Attributes { user: UserInfo::new("a", &[]), request: Default::default() };
        let may = async || matches!(modes.authorize(&question).await, Decision::Allow { .. });
        assert!(!may().await);
        let entry =
            |mode: &str| Configured { mode: mode.into(), name: mode.to_lowercase(), webhook: None };
        let next = |all: &[&str]| AuthorizationConfiguration {
            authorizers: all.iter().map(|mode| entry(mode)).collect(),
            ..Default::default()
        };
        let refused = modes.replace(&next(&["AlwaysAllow"])).expect_err("RBAC is required");
        assert_eq!(refused.to_string(), "missing required types: [RBAC]");
        modes.replace(&next(&["RBAC", "AlwaysAllow"])).expect("right");
        assert!(may().await);
    }
}
