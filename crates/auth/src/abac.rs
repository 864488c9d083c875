//! The authorization mode ABAC: a file of policies, one JSON object per line, read once at the start.
//!
//! ```text
//! {"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy",
//!  "spec":{"user":"jane","namespace":"web","resource":"pods","readonly":true}}
//! ```
//!
//! Lines without a version have the oldest form, where an omitted field means everything.
//! Upstream: `pkg/auth/authorizer/abac`.

use apiserver::authz::{Attributes, Authorizer, Decision, PolicyRule};
use apiserver::request::UserInfo;
use async_trait::async_trait;
use serde::Deserialize;
use serde_json::Value as Json;

use crate::{ALL_AUTHENTICATED, ConfigError};

const VERSION: &str = "abac.authorization.kubernetes.io/v1beta1";
const READS: [&str; 3] = ["get", "list", "watch"];

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Policy {
    user: String,
    group: String,
    readonly: bool,
    api_group: String,
    resource: String,
    namespace: String,
    #[serde(rename = "nonResourcePath")]
    path: String,
}

/// The policies of a file, in order.
#[derive(Debug)]
pub struct Abac(Vec<Policy>);

impl Abac {
    /// `path` is for messages only.
    pub fn parse(text: &str, path: &str) -> Result<Self, ConfigError> {
        let mut policies = vec![];
        let mut unversioned = 0;
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let failed = |error| ConfigError::Policy {
                path: path.to_owned(),
                number: index + 1,
                line: line.to_owned(),
                error,
            };
            let parsed: Json = serde_json::from_str(line).map_err(failed)?;
            let is_new = parsed["apiVersion"] == VERSION && parsed["kind"] == "Policy";
            unversioned += usize::from(!is_new);
            let spec = if is_new { parsed["spec"].clone() } else { parsed };
            let policy = serde_json::from_value(spec).map_err(failed)?;
            policies.push(Policy::complete(policy, is_new));
        }
        if unversioned > 0 {
            tracing::warn!(path, unversioned, "Policy file contained unversioned rules");
        }
        Ok(Self(policies))
    }
}

impl Policy {
    fn complete(mut self, is_new: bool) -> Self {
        let everything = || "*".to_owned();
        if !is_new {
            if self.user.is_empty() && self.group.is_empty() {
                self.group = ALL_AUTHENTICATED.into();
            }
            self.api_group = everything();
            if self.namespace.is_empty() && self.resource.is_empty() {
                self.path = everything();
            }
            for field in [&mut self.namespace, &mut self.resource] {
                if field.is_empty() {
                    *field = everything();
                }
            }
        }
        if self.user == "*" || self.group == "*" {
            (self.user, self.group) = (String::new(), ALL_AUTHENTICATED.into());
        }
        self
    }

    fn is_about(&self, user: &UserInfo) -> bool {
        let is_named = !self.user.is_empty() || !self.group.is_empty();
        let is_user = self.user.is_empty() || self.user == user.name;
        let is_group = self.group.is_empty() || user.in_group(&self.group);
        is_named && is_user && is_group
    }

    fn allows(&self, attributes: &Attributes) -> bool {
        let asked = &attributes.request;
        let fits = |wanted: &str, got: &str| wanted == "*" || wanted == got;
        let is_allowed_verb = !self.readonly || READS.contains(&asked.verb.as_str());
        let is_place = if asked.is_resource {
            fits(&self.namespace, &asked.namespace)
                && fits(&self.resource, &asked.resource)
                && fits(&self.api_group, &asked.group)
        } else {
            let is_below = |front: &str| asked.path.starts_with(front.trim_end_matches('*'));
            self.path == asked.path || (self.path.ends_with('*') && is_below(&self.path))
        };
        self.is_about(&attributes.user) && is_allowed_verb && is_place
    }
}

#[async_trait]
impl Authorizer for Abac {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        match self.0.iter().any(|policy| policy.allows(attributes)) {
            true => Decision::Allow { reason: String::new() },
            false => Decision::NoOpinion { reason: "No policy matched.".into() },
        }
    }

    async fn rules(&self, user: &UserInfo, namespace: &str) -> Vec<PolicyRule> {
        let mut rules = vec![];
        let is_here = |one: &&Policy| one.namespace == "*" || one.namespace == namespace;
        for policy in self.0.iter().filter(|policy| policy.is_about(user)).filter(is_here) {
            let verbs: &[&str] = if policy.readonly { &READS } else { &["*"] };
            let verbs: Vec<String> = verbs.iter().map(|verb| (*verb).to_owned()).collect();
            if !policy.resource.is_empty() {
                rules.push(PolicyRule {
                    verbs: verbs.clone(),
                    api_groups: vec![policy.api_group.clone()],
                    resources: vec![policy.resource.clone()],
                    ..PolicyRule::default()
                });
            }
            if !policy.path.is_empty() {
                let non_resource_urls = vec![policy.path.clone()];
                rules.push(PolicyRule { verbs, non_resource_urls, ..PolicyRule::default() });
            }
        }
        rules
    }
}

#[cfg(test)]
mod tests {
    use apiserver::request::RequestInfo;

    use super::*;

    const FILE: &str = r##"
# administrators
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"group":"admins","namespace":"*","resource":"*","apiGroup":"*","nonResourcePath":"*"}}
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"user":"jane","namespace":"web","resource":"pods","readonly":true}}
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"user":"*","nonResourcePath":"/version*","readonly":true}}
{"user":"old","resource":"secrets"}
"##;

    fn question(user: &str, group: &str, words: &str) -> Attributes {
        let parts: Vec<&str> = words.split(' ').collect();
        let mut request = RequestInfo { verb: parts[0].into(), ..RequestInfo::default() };
        match parts[1..] {
            [path] => request.path = path.into(),
            [namespace, resource] => {
                request.is_resource = true;
                (request.namespace, request.resource) = (namespace.into(), resource.into());
            }
            _ => panic!("{words}"),
        }
        Attributes { user: UserInfo::new(user, &[group, "system:authenticated"]), request }
    }

    #[tokio::test]
    async fn lines_are_policies() {
        let abac = Abac::parse(FILE, "f").expect("a file");
        let check = async |user: &str, group: &str, words: &str, expected: bool| {
            let got = abac.authorize(&question(user, group, words)).await;
            assert_eq!(matches!(got, Decision::Allow { .. }), expected, "{user} {words}");
        };
        check("a", "admins", "delete web pods", true).await;
        check("a", "admins", "get /metrics", true).await;
        check("jane", "", "list web pods", true).await;
        check("jane", "", "delete web pods", false).await;
        check("jane", "", "list other pods", false).await;
        check("jane", "", "list web secrets", false).await;
        check("bob", "", "get /version/x", true).await;
        check("bob", "", "get /healthz", false).await;
        check("bob", "", "post /version", false).await;
        check("old", "", "delete any secrets", true).await;
        check("old", "", "get /metrics", false).await;
        let rules = abac.rules(&UserInfo::new("jane", &[]), "web").await;
        assert_eq!((rules.len(), rules[0].verbs.join(",")), (1, "get,list,watch".to_owned()));
        assert!(Abac::parse("{", "f").is_err() && Abac::parse("{\"user\":1}", "f").is_err());
    }
}
