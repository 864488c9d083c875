//! Prevents privilege escalation: a writer of a role must hold its rules (or may `escalate` it), a writer
//! of a binding must hold the role's rules (or may `bind` it).
//!
//! It is an admission plugin, because it checks the result of a write, patches included.
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
use serde_json::Value;

use super::{Rbac, index};
use crate::MASTERS;

const GROUP: &str = "rbac.authorization.k8s.io";

pub struct NoEscalation {
    rbac: Rbac,
    /// Decides about `escalate` and `bind`.
    authorizer: Arc<dyn Authorizer>,
}

/// The rights that a write would grant.
enum Grant {
    /// The rules of a role. An aggregated one also collects the rules of future roles.
    Role {
        rules: Vec<ApiRule>,
        is_aggregated: bool,
    },
    /// The role that a binding references.
    Binding(RoleRef),
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
            version: "*".into(),
            namespace: place.namespace.into(),
            resource: place.resource.into(),
            name: place.name.into(),
            ..RequestInfo::default()
        };
        let question = authz::Attributes { user: user.clone(), request };
        matches!(self.authorizer.authorize(&question).await, Decision::Allow { .. })
    }

    /// Why the user may not write such a role without `escalate`.
    fn role_refusal(
        &self,
        user: &UserInfo,
        namespace: &str,
        rules: Vec<ApiRule>,
        is_aggregated: bool,
    ) -> Option<String> {
        let rules: Vec<PolicyRule> = rules.into_iter().map(index::rule_of).collect();
        let refusal = self.refusal(user, namespace, &rules);
        let is_refused = || !self.rbac.missing(user, namespace, &full_authority()).is_empty();
        refusal.or_else(|| {
            let why = "must have cluster-admin privileges to use the aggregationRule";
            (is_aggregated && is_refused()).then(|| why.to_owned())
        })
    }

    /// Why the user may not grant these rules.
    fn refusal(&self, user: &UserInfo, namespace: &str, rules: &[PolicyRule]) -> Option<String> {
        let missing = self.rbac.missing(user, namespace, rules);
        (!missing.is_empty()).then(|| {
            format!(
                "user {:?} (groups={}) is attempting to grant RBAC permissions not currently held:\n{}",
                user.name,
                quoted(&user.groups),
                compacted(missing).join("\n")
            )
        })
    }
}

/// The writer of an aggregation rule must hold all rights: the rule can select any role.
fn full_authority() -> [PolicyRule; 2] {
    let all = || vec!["*".to_owned()];
    [
        PolicyRule { verbs: all(), api_groups: all(), resources: all(), ..PolicyRule::default() },
        PolicyRule { verbs: all(), non_resource_urls: all(), ..PolicyRule::default() },
    ]
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
        if attributes.old.is_some_and(|old| is_bookkeeping(&**object, old)) {
            return Ok(());
        }
        let namespace = attributes.key.namespace.as_str();
        let name = object.name();
        let refusal = match grant(&**object, attributes.old) {
            Grant::Nothing => None,
            Grant::Role { rules, is_aggregated } => {
                let refusal = self.role_refusal(user, namespace, rules, is_aggregated);
                let place =
                    Place { namespace, resource: &row.plural, name: asked_name(attributes) };
                let may = refusal.is_some() && self.may(user, "escalate", &place).await;
                refusal.filter(|_| !may)
            }
            Grant::Binding(role) => {
                let resource = if role.kind == "Role" { "roles" } else { "clusterroles" };
                if self.may(user, "bind", &Place { namespace, resource, name: &role.name }).await {
                    return Ok(());
                }
                let rules = self.rbac.role_rules(&role.kind, namespace, &role.name);
                // Like upstream: the message has the resource of the request, not the role's.
                let rules =
                    rules.ok_or_else(|| StatusError::not_found(GROUP, &row.plural, &role.name))?;
                self.refusal(user, namespace, &rules)
            }
        };
        refusal.map_or(Ok(()), |why| Err(StatusError::forbidden(GROUP, &row.plural, name, why)))
    }
}

/// The name in the request's path. A POST has none, so a right to escalate named roles does not allow a
/// POST of them.
fn asked_name<'a>(attributes: &'a Attributes<'_>) -> &'a str {
    let is_post = attributes.operation == Operation::Create && attributes.ctx.may_create.is_none();
    if is_post { "" } else { &attributes.key.name }
}

/// Whether a write changes only the garbage collector's fields. Every other write of a role or a binding
/// is checked, even with the same rules and subjects: a label can add a role's rules to another role.
/// Upstream: `IsOnlyMutatingGCFields`.
fn is_bookkeeping(object: &dyn Object, old: &dyn Object) -> bool {
    let rest = |object: &dyn Object| {
        let mut tree = object.to_value();
        if let Some(metadata) = tree.get_mut("metadata").and_then(Value::as_object_mut) {
            for field in ["ownerReferences", "finalizers", "managedFields", "resourceVersion"] {
                metadata.remove(field);
            }
        }
        tree
    };
    rest(object) == rest(old)
}

fn grant(object: &dyn Object, old: Option<&dyn Object>) -> Grant {
    if let Some(role) = object.downcast::<ClusterRole>() {
        let old = old.and_then(|old| old.downcast::<ClusterRole>());
        // An old aggregation rule counts, too: its removal would keep rules that it collected.
        let is_aggregated = aggregates(role) || old.is_some_and(aggregates);
        return Grant::Role { rules: role.rules.clone().unwrap_or_default(), is_aggregated };
    }
    if let Some(role) = object.downcast::<Role>() {
        return Grant::Role { rules: role.rules.clone().unwrap_or_default(), is_aggregated: false };
    }
    if let Some(binding) = object.downcast::<ClusterRoleBinding>() {
        return Grant::Binding(binding.role_ref.clone());
    }
    match object.downcast::<RoleBinding>() {
        Some(binding) => Grant::Binding(binding.role_ref.clone()),
        None => Grant::Nothing,
    }
}

fn aggregates(role: &ClusterRole) -> bool {
    let rule = role.aggregation_rule.as_ref();
    let selectors = rule.and_then(|rule| rule.cluster_role_selectors.as_ref());
    selectors.is_some_and(|selectors| !selectors.is_empty())
}

/// Rules of one resource each, with merged verbs, as sorted text. Upstream: `CompactRules` and
/// `CompactString`.
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

/// Go's `%q` of a list: `["a" "b"]`.
fn quoted(list: &[String]) -> String {
    let quoted: Vec<String> = list.iter().map(|one| format!("{one:?}")).collect();
    format!("[{}]", quoted.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_rules_have_upstreams_text() {
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
