//! Nobody grants what they do not hold: whoever writes a role must hold its rules (or may
//! `escalate` it), whoever writes a binding must hold the role's rules (or may `bind` it).
//!
//! An admission plugin, because it judges a write by its outcome, patches included.
//! Upstream: `pkg/registry/rbac/*/policybased`.

use std::collections::BTreeMap;
use std::sync::Arc;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::authz::{self, Authorizer, Decision, PolicyRule};
use apiserver::request::{RequestInfo, UserInfo};
use async_trait::async_trait;
use k8s_openapi::api::rbac::v1::{
    ClusterRole, ClusterRoleBinding, PolicyRule as ApiRule, Role, RoleBinding, RoleRef,
};
use machinery::Object;

use super::{Rbac, index};
use crate::MASTERS;

const GROUP: &str = "rbac.authorization.k8s.io";

pub struct NoEscalation {
    rbac: Rbac,
    /// Answers for `escalate` and `bind`.
    authorizer: Arc<dyn Authorizer>,
}

/// What a write would grant.
enum Grant {
    Rules(Vec<ApiRule>),
    Role(RoleRef),
    Nothing,
}

impl NoEscalation {
    pub fn new(rbac: Rbac, authorizer: Arc<dyn Authorizer>) -> Self {
        Self { rbac, authorizer }
    }

    async fn may(&self, user: &UserInfo, verb: &str, place: &Place<'_>) -> bool {
        let request = RequestInfo {
            is_resource: true,
            verb: verb.into(),
            group: GROUP.into(),
            version: "v1".into(),
            namespace: place.namespace.into(),
            resource: place.resource.into(),
            name: place.name.into(),
            ..RequestInfo::default()
        };
        let question = authz::Attributes { user: user.clone(), request };
        matches!(self.authorizer.authorize(&question).await, Decision::Allow { .. })
    }
}

struct Place<'a> {
    namespace: &'a str,
    resource: &'a str,
    name: &'a str,
}

#[async_trait]
impl Plugin for NoEscalation {
    fn name(&self) -> &'static str {
        "RBACEscalation"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let row = &attributes.ctx.resource;
        let user = &attributes.ctx.user;
        if row.group != GROUP || !attributes.ctx.subresource.is_empty() || user.in_group(MASTERS) {
            return Ok(());
        }
        let Some(object) = attributes.object.as_deref() else { return Ok(()) };
        let namespace = attributes.key.namespace.as_str();
        let name = object.name();
        let (verb, place, rules) = match grant(&**object, attributes.old) {
            Grant::Nothing => return Ok(()),
            Grant::Rules(rules) => {
                let rules = rules.into_iter().map(index::rule_of).collect();
                ("escalate", Place { namespace, resource: &row.plural, name }, rules)
            }
            Grant::Role(role) => {
                let resource = if role.kind == "Role" { "roles" } else { "clusterroles" };
                if self.may(user, "bind", &Place { namespace, resource, name: &role.name }).await {
                    return Ok(());
                }
                let rules = self.rbac.role_rules(&role.kind, namespace, &role.name);
                let rules =
                    rules.ok_or_else(|| StatusError::not_found(GROUP, &row.plural, &role.name))?;
                ("", Place { namespace, resource: &row.plural, name }, rules)
            }
        };
        let missing = self.rbac.missing(user, namespace, &rules);
        if missing.is_empty() || (!verb.is_empty() && self.may(user, verb, &place).await) {
            return Ok(());
        }
        let why = format!(
            "user {:?} (groups={}) is attempting to grant RBAC permissions not currently held:\n{}",
            user.name,
            quoted(&user.groups),
            compacted(missing).join("\n")
        );
        Err(StatusError::forbidden(GROUP, &row.plural, name, why))
    }
}

/// Writes that leave the grant as it is are nobody's escalation.
fn grant(object: &dyn Object, old: Option<&dyn Object>) -> Grant {
    if let Some(role) = object.downcast::<ClusterRole>() {
        let old = old.and_then(|old| old.downcast::<ClusterRole>());
        return rules(&role.rules, old.map(|old| &old.rules));
    }
    if let Some(role) = object.downcast::<Role>() {
        let old = old.and_then(|old| old.downcast::<Role>());
        return rules(&role.rules, old.map(|old| &old.rules));
    }
    if let Some(binding) = object.downcast::<ClusterRoleBinding>() {
        let old = old.and_then(|old| old.downcast::<ClusterRoleBinding>());
        let is_same = old.is_some_and(|old| old.subjects == binding.subjects);
        return if is_same { Grant::Nothing } else { Grant::Role(binding.role_ref.clone()) };
    }
    if let Some(binding) = object.downcast::<RoleBinding>() {
        let old = old.and_then(|old| old.downcast::<RoleBinding>());
        let is_same = old.is_some_and(|old| old.subjects == binding.subjects);
        return if is_same { Grant::Nothing } else { Grant::Role(binding.role_ref.clone()) };
    }
    Grant::Nothing
}

fn rules(new: &Option<Vec<ApiRule>>, old: Option<&Option<Vec<ApiRule>>>) -> Grant {
    if old == Some(new) { Grant::Nothing } else { Grant::Rules(new.clone().unwrap_or_default()) }
}

/// Rules of one resource each, their verbs put together, as text, sorted. Upstream: `CompactRules`
/// and `CompactString`.
fn compacted(rules: Vec<PolicyRule>) -> Vec<String> {
    let mut merged: BTreeMap<[Vec<String>; 4], Vec<String>> = BTreeMap::new();
    let mut order = vec![];
    for rule in rules {
        let key = [rule.api_groups, rule.resources, rule.non_resource_urls, rule.resource_names];
        let verbs = merged.entry(key.clone()).or_insert_with(|| {
            order.push(key);
            vec![]
        });
        verbs.extend(
            rule.verbs.into_iter().filter(|verb| !verbs.contains(verb)).collect::<Vec<_>>(),
        );
    }
    let mut texts: Vec<String> = order.iter().map(|key| shown(key, &merged[key])).collect();
    texts.sort_unstable();
    texts
}

fn shown([groups, resources, urls, names]: &[Vec<String>; 4], verbs: &[String]) -> String {
    let parts = [
        ("APIGroups", groups.as_slice()),
        ("Resources", resources),
        ("NonResourceURLs", urls),
        ("ResourceNames", names),
        ("Verbs", verbs),
    ];
    let parts = parts.iter().filter(|(_, list)| !list.is_empty());
    let parts: Vec<String> = parts.map(|(name, list)| format!("{name}:{}", quoted(list))).collect();
    format!("{{{}}}", parts.join(", "))
}

/// As Go's `%q` shows a list: `["a" "b"]`.
fn quoted(list: &[String]) -> String {
    let quoted: Vec<String> = list.iter().map(|one| format!("{one:?}")).collect();
    format!("[{}]", quoted.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_rules_are_shown_as_upstream_shows_them() {
        let rule = |verb: &str, resource: &str, url: &str| PolicyRule {
            verbs: vec![verb.into()],
            api_groups: if resource.is_empty() { vec![] } else { vec![String::new()] },
            resources: resource.split_whitespace().map(str::to_owned).collect(),
            non_resource_urls: url.split_whitespace().map(str::to_owned).collect(),
            resource_names: vec![],
        };
        let rules =
            vec![rule("*", "", "/x"), rule("get", "nodes", ""), rule("delete", "nodes", "")];
        let expected = [
            r#"{APIGroups:[""], Resources:["nodes"], Verbs:["get" "delete"]}"#,
            r#"{NonResourceURLs:["/x"], Verbs:["*"]}"#,
        ];
        assert_eq!(compacted(rules), expected);
    }
}
