//! `Policy` of `audit.k8s.io/v1`: which requests are recorded, and with which details.
//!
//! In: YAML. Out: a level, the stages to omit and how to treat managed fields, from the first rule that
//! matches a request.

use machinery::field::{FieldErrors, Path};
use serde::Deserialize;

use crate::error::ConfigError;
use crate::request::{RequestInfo, UserInfo};

const API_VERSION: &str = "audit.k8s.io/v1";
const STAGES: [Stage; 4] =
    [Stage::RequestReceived, Stage::ResponseStarted, Stage::ResponseComplete, Stage::Panic];

/// How much is recorded, in ascending order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    #[default]
    None,
    Metadata,
    Request,
    RequestResponse,
}

impl Level {
    pub const ALL: [Self; 4] = [Self::None, Self::Metadata, Self::Request, Self::RequestResponse];

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Metadata => "Metadata",
            Self::Request => "Request",
            Self::RequestResponse => "RequestResponse",
        }
    }
}

/// When an event is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    RequestReceived,
    /// The headers are being sent; only for long-running requests.
    ResponseStarted,
    ResponseComplete,
    Panic,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Self::RequestReceived => "RequestReceived",
            Self::ResponseStarted => "ResponseStarted",
            Self::ResponseComplete => "ResponseComplete",
            Self::Panic => "Panic",
        }
    }
}

/// The policy's decision about a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub level: Level,
    pub omit_stages: Vec<Stage>,
    pub omits_managed_fields: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Given {
    api_version: String,
    kind: String,
    rules: Vec<GivenRule>,
    omit_stages: Vec<String>,
    omit_managed_fields: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct GivenRule {
    level: String,
    users: Vec<String>,
    user_groups: Vec<String>,
    verbs: Vec<String>,
    resources: Vec<GroupResources>,
    namespaces: Vec<String>,
    #[serde(rename = "nonResourceURLs")]
    non_resource_urls: Vec<String>,
    omit_stages: Vec<String>,
    omit_managed_fields: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct GroupResources {
    group: String,
    resources: Vec<String>,
    resource_names: Vec<String>,
}

/// A checked policy.
#[derive(Clone, Debug)]
pub struct Policy {
    rules: Vec<(GivenRule, Verdict)>,
    otherwise: Verdict,
}

impl Policy {
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let given: Given = serde_saphyr::from_str(text)
            .map_err(|error| ConfigError::AuditPolicy(Box::new(error)))?;
        if given.api_version != API_VERSION || given.kind != "Policy" {
            let (kind, version) = (given.kind, given.api_version);
            return Err(ConfigError::AuditPolicyKind { version, kind });
        }
        let errors = validate(&given);
        if !errors.is_empty() {
            return Err(ConfigError::AuditPolicyFields(errors.summary()));
        }
        if given.rules.is_empty() {
            return Err(ConfigError::NoAuditRules);
        }
        let everywhere = stages(&given.omit_stages);
        let omits = given.omit_managed_fields;
        let verdict = |rule: &GivenRule| Verdict {
            level: level(&rule.level).unwrap_or_default(),
            omit_stages: [everywhere.clone(), stages(&rule.omit_stages)].concat(),
            omits_managed_fields: rule.omit_managed_fields.unwrap_or(omits),
        };
        let rules = given.rules.into_iter().map(|rule| {
            let verdict = verdict(&rule);
            (rule, verdict)
        });
        let rules = rules.collect();
        let otherwise =
            Verdict { level: Level::None, omit_stages: everywhere, omits_managed_fields: omits };
        Ok(Self { rules, otherwise })
    }

    /// `user` is unknown if authentication failed.
    pub fn evaluate(&self, user: Option<&UserInfo>, info: &RequestInfo) -> &Verdict {
        let first = self.rules.iter().find(|(rule, _)| rule.matches(user, info));
        first.map_or(&self.otherwise, |(_, verdict)| verdict)
    }
}

fn level(name: &str) -> Option<Level> {
    Level::ALL.into_iter().find(|level| level.name() == name)
}

fn stages(names: &[String]) -> Vec<Stage> {
    STAGES.into_iter().filter(|stage| names.iter().any(|name| name == stage.name())).collect()
}

fn has(list: &[String], value: &str) -> bool {
    list.iter().any(|one| one == value)
}

impl GivenRule {
    fn matches(&self, user: Option<&UserInfo>, info: &RequestInfo) -> bool {
        if !self.users.is_empty() && !user.is_some_and(|user| has(&self.users, &user.name)) {
            return false;
        }
        let in_group = |user: &UserInfo| user.groups.iter().any(|one| has(&self.user_groups, one));
        if !self.user_groups.is_empty() && !user.is_some_and(in_group) {
            return false;
        }
        if !self.verbs.is_empty() && !has(&self.verbs, &info.verb) {
            return false;
        }
        if !self.namespaces.is_empty() || !self.resources.is_empty() {
            return self.matches_resource(info);
        }
        if !self.non_resource_urls.is_empty() {
            let fits = |spec: &String| path_fits(&info.path, spec);
            return !info.is_resource && self.non_resource_urls.iter().any(fits);
        }
        true
    }

    fn matches_resource(&self, info: &RequestInfo) -> bool {
        if !info.is_resource {
            return false;
        }
        if !self.namespaces.is_empty() && !has(&self.namespaces, &info.namespace) {
            return false;
        }
        self.resources.is_empty() || self.resources.iter().any(|one| one.matches(info))
    }
}

impl GroupResources {
    fn matches(&self, info: &RequestInfo) -> bool {
        if self.group != info.group && self.group != "*" {
            return false;
        }
        if self.resources.is_empty() {
            return true;
        }
        if !self.resource_names.is_empty() && !has(&self.resource_names, &info.name) {
            return false;
        }
        self.resources.iter().any(|one| match one.split_once('/') {
            None => one == "*" || (info.subresource.is_empty() && *one == info.resource),
            Some(("*", subresource)) => {
                !info.subresource.is_empty() && subresource == info.subresource
            }
            Some((resource, "*")) => resource == info.resource,
            Some((resource, subresource)) => {
                resource == info.resource && subresource == info.subresource
            }
        })
    }
}

fn path_fits(path: &str, spec: &str) -> bool {
    spec == "*"
        || spec == path
        || spec.strip_suffix('*').is_some_and(|start| path.starts_with(start))
}

fn validate(given: &Given) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_stages(&given.omit_stages, &Path::new("omitStages"), &mut errors);
    for (index, rule) in given.rules.iter().enumerate() {
        let at = Path::new("rules").index(index);
        let names = Level::ALL.map(Level::name);
        match rule.level.as_str() {
            "" => errors.required(&at.child("level"), ""),
            name if level(name).is_none() => {
                errors.not_supported(&at.child("level"), name, &names);
            }
            _ => {}
        }
        let urls = at.child("nonResourceURLs");
        check_urls(&rule.non_resource_urls, &urls, &mut errors);
        for one in &rule.resources {
            if !one.resource_names.is_empty() && one.resources.is_empty() {
                let why = "using resourceNames requires at least one resource";
                let path = at.child("resources").child("resourceNames");
                errors.invalid(&path, &one.resource_names, why);
            }
            if one.group.contains('/') {
                let why = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
                errors.invalid(&at.child("resources").child("group"), &one.group, why);
            }
        }
        check_stages(&rule.omit_stages, &at.child("omitStages"), &mut errors);
        if !rule.non_resource_urls.is_empty()
            && (!rule.resources.is_empty() || !rule.namespaces.is_empty())
        {
            let why = "rules cannot apply to both regular resources and non-resource URLs";
            errors.invalid(&urls, &rule.non_resource_urls, why);
        }
    }
    errors
}

fn check_urls(urls: &[String], path: &Path, errors: &mut FieldErrors) {
    for (index, url) in urls.iter().enumerate().filter(|(_, url)| *url != "*") {
        if !url.starts_with('/') {
            let why = "non-resource URL rules must begin with a '/' character";
            errors.invalid(&path.index(index), url, why);
        }
        if url.find('*').is_some_and(|at| at + 1 < url.len()) {
            let why = "non-resource URL wildcards '*' must be the final character of the rule";
            errors.invalid(&path.index(index), url, why);
        }
    }
}

fn check_stages(names: &[String], path: &Path, errors: &mut FieldErrors) {
    let allowed = STAGES.map(Stage::name);
    for (index, name) in names.iter().enumerate() {
        if !allowed.contains(&name.as_str()) {
            let why = format!("allowed stages are {}", allowed.join(","));
            errors.invalid(&path.index(index), name, &why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &str) -> Result<Policy, ConfigError> {
        Policy::parse(&format!("apiVersion: audit.k8s.io/v1\nkind: Policy\n{rules}"))
    }

    fn info(verb: &str, resource: &str, subresource: &str, namespace: &str) -> RequestInfo {
        RequestInfo {
            is_resource: true,
            path: "/api/v1/x".into(),
            verb: verb.into(),
            version: "v1".into(),
            namespace: namespace.into(),
            resource: resource.into(),
            subresource: subresource.into(),
            name: "n".into(),
            ..RequestInfo::default()
        }
    }

    #[test]
    fn the_first_matching_rule_decides() {
        let policy = policy(
            r#"
omitStages: [RequestReceived]
omitManagedFields: true
rules:
- {level: None, users: ["system:kube-proxy"], verbs: [watch], resources: [{group: "", resources: [endpoints, services]}]}
- {level: None, nonResourceURLs: ["/healthz*", /version]}
- {level: Metadata, resources: [{resources: [secrets, configmaps]}]}
- {level: Request, resources: [{resources: ["pods/log", "*/status"]}], omitStages: [ResponseStarted]}
- {level: RequestResponse, userGroups: [admins], omitManagedFields: false}
- {level: Request, namespaces: [""], resources: [{resources: [nodes], resourceNames: [n]}]}
- {level: Metadata, resources: [{resources: ["pods/*"]}]}
"#,
        );
        let policy = policy.expect("valid");
        let jane = UserInfo::new("jane", &[]);
        let proxy = UserInfo::new("system:kube-proxy", &[]);
        let admin = UserInfo::new("root", &["admins"]);
        let path = |path: &str| RequestInfo {
            path: path.into(),
            verb: "get".into(),
            ..RequestInfo::default()
        };
        for (user, info, expected) in [
            (&proxy, info("watch", "services", "", ""), Level::None),
            (&proxy, info("get", "services", "", ""), Level::None),
            (&jane, path("/healthz/ping"), Level::None),
            (&admin, path("/metrics"), Level::RequestResponse),
            (&admin, path("/version"), Level::None),
            (&jane, info("get", "secrets", "", "a"), Level::Metadata),
            (&jane, info("get", "pods", "log", "a"), Level::Request),
            (&jane, info("get", "pods", "status", "a"), Level::Request),
            (&jane, info("get", "pods", "exec", "a"), Level::Metadata),
            (&jane, info("get", "pods", "", "a"), Level::Metadata),
            (&admin, info("get", "pods", "", "a"), Level::RequestResponse),
            (&jane, info("get", "nodes", "", ""), Level::Request),
            (&jane, info("get", "services", "", "a"), Level::None),
        ] {
            assert_eq!(policy.evaluate(Some(user), &info).level, expected, "{info:?}");
        }
        let verdict = policy.evaluate(Some(&jane), &info("get", "pods", "log", "a"));
        assert_eq!(verdict.omit_stages, [Stage::RequestReceived, Stage::ResponseStarted]);
        assert!(verdict.omits_managed_fields);
        let verdict = policy.evaluate(Some(&admin), &info("get", "pods", "", "a"));
        assert!(!verdict.omits_managed_fields);
        assert_eq!(policy.evaluate(None, &info("get", "pods", "exec", "a")).level, Level::Metadata);
    }

    #[test]
    fn errors_are_upstreams() {
        let told = |rules: &str| policy(rules).expect_err(rules).to_string();
        assert_eq!(told("rules: []"), "loaded illegal policy with 0 rules");
        assert_eq!(told("rules: [{}]"), "rules[0].level: Required value");
        assert_eq!(
            told("rules: [{level: All}]"),
            "rules[0].level: Unsupported value: \"All\": supported values: \"None\", \"Metadata\", \"Request\", \"RequestResponse\""
        );
        assert_eq!(
            told("rules: [{level: None, nonResourceURLs: [healthz], namespaces: [a]}]"),
            "[rules[0].nonResourceURLs[0]: Invalid value: \"healthz\": non-resource URL rules must begin with a '/' character, rules[0].nonResourceURLs: Invalid value: [\"healthz\"]: rules cannot apply to both regular resources and non-resource URLs]"
        );
        assert_eq!(
            told("rules: [{level: None}]\nomitStages: [Done]"),
            "omitStages[0]: Invalid value: \"Done\": allowed stages are RequestReceived,ResponseStarted,ResponseComplete,Panic"
        );
    }
}
