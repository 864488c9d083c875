//! Role based access control: roles and bindings, indexed by subject.
//!
//! In: Roles, ClusterRoles and their bindings, mirrored from the watch cache. Out: decisions with
//! upstream's reasons. A controller fills aggregated roles; here they are like other roles.

pub mod bootstrap;
mod escalation;
mod index;
#[cfg(test)]
mod matrix;

use std::sync::{Arc, RwLock};

use apiserver::Registry;
use apiserver::authz::{Attributes, Authorizer, Decision, PolicyRule};
use apiserver::request::{RequestInfo, UserInfo};
use async_trait::async_trait;
use base::task::Tasks;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};

pub use escalation::NoEscalation;
pub use index::Index;

use crate::mirror::{Change, mirror};

/// The authorizer. Clones share the index.
#[derive(Clone, Default)]
pub struct Rbac {
    /// Written by the mirrors' tasks, read by every request; never held across an await.
    index: Arc<RwLock<Index>>,
}

impl Rbac {
    /// Reads all roles and bindings, and follows them with tasks of `tasks`.
    pub async fn start(registry: &Registry, tasks: &Tasks) -> Self {
        let rbac = Self::default();
        let index = rbac.index.clone();
        let clusterroles = mirror::<ClusterRole>(registry, tasks, {
            let index = index.clone();
            move |change| {
                let mut index = index.write().expect("no panic under the lock");
                match change {
                    Change::Reset(all) => {
                        index.clear_cluster_roles();
                        all.into_iter().for_each(|role| index.put_cluster_role(role));
                    }
                    Change::Put(role) => index.put_cluster_role(role),
                    Change::Remove(key) => index.remove_role("", &key.name),
                }
            }
        });
        let roles = mirror::<Role>(registry, tasks, {
            let index = index.clone();
            move |change| {
                let mut index = index.write().expect("no panic under the lock");
                match change {
                    Change::Reset(all) => {
                        index.clear_roles();
                        all.into_iter().for_each(|role| index.put_role(role));
                    }
                    Change::Put(role) => index.put_role(role),
                    Change::Remove(key) => index.remove_role(&key.namespace, &key.name),
                }
            }
        });
        let cluster_bindings = mirror::<ClusterRoleBinding>(registry, tasks, {
            let index = index.clone();
            move |change| {
                let mut index = index.write().expect("no panic under the lock");
                match change {
                    Change::Reset(all) => {
                        index.clear_cluster_bindings();
                        all.into_iter().for_each(|binding| index.put_cluster_binding(binding));
                    }
                    Change::Put(binding) => index.put_cluster_binding(binding),
                    Change::Remove(key) => index.remove_binding("", &key.name),
                }
            }
        });
        let bindings = mirror::<RoleBinding>(registry, tasks, move |change| {
            let mut index = index.write().expect("no panic under the lock");
            match change {
                Change::Reset(all) => {
                    index.clear_bindings();
                    all.into_iter().for_each(|binding| index.put_binding(binding));
                }
                Change::Put(binding) => index.put_binding(binding),
                Change::Remove(key) => index.remove_binding(&key.namespace, &key.name),
            }
        });
        futures::join!(clusterroles, roles, cluster_bindings, bindings);
        rbac
    }

    /// The parts of `wanted` that `user` does not hold in `namespace` and so may not grant, each of one verb
    /// and one resource. Upstream: `rbac/validation.ConfirmNoEscalation`.
    fn missing(&self, user: &UserInfo, namespace: &str, wanted: &[PolicyRule]) -> Vec<PolicyRule> {
        let held = self.index.read().expect("no panic under the lock").rules(user, namespace);
        wanted.iter().flat_map(broken_down).filter(|rule| !is_covered(&held, rule)).collect()
    }

    /// The rules of a role; `None` if there is none.
    fn role_rules(&self, kind: &str, namespace: &str, name: &str) -> Option<Vec<PolicyRule>> {
        let index = self.index.read().expect("no panic under the lock");
        index.role_rules(kind, namespace, name).map(<[PolicyRule]>::to_vec)
    }
}

#[async_trait]
impl Authorizer for Rbac {
    async fn authorize(&self, attributes: &Attributes) -> Decision {
        self.index.read().expect("no panic under the lock").decide(attributes)
    }

    async fn rules(&self, user: &UserInfo, namespace: &str) -> Vec<PolicyRule> {
        self.index.read().expect("no panic under the lock").rules(user, namespace)
    }
}

/// Whether a rule allows a request. Upstream: `rbac.RuleAllows`.
pub fn rule_allows(rule: &PolicyRule, request: &RequestInfo) -> bool {
    if !has(&rule.verbs, &request.verb) {
        return false;
    }
    if !request.is_resource {
        return rule.non_resource_urls.iter().any(|pattern| is_url_match(pattern, &request.path));
    }
    has(&rule.api_groups, &request.group)
        && rule.resources.iter().any(|one| is_resource_match(one, request))
        && (rule.resource_names.is_empty() || rule.resource_names.contains(&request.name))
}

fn has(list: &[String], wanted: &str) -> bool {
    list.iter().any(|one| one == "*" || one == wanted)
}

fn is_resource_match(pattern: &str, request: &RequestInfo) -> bool {
    if pattern == "*" {
        return true;
    }
    match (pattern.split_once('/'), request.subresource.as_str()) {
        (None, "") => pattern == request.resource,
        (Some((resource, subresource)), wanted) if !wanted.is_empty() => {
            subresource == wanted && (resource == "*" || resource == request.resource)
        }
        _ => false,
    }
}

fn is_url_match(pattern: &str, path: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => path.starts_with(prefix),
        None => pattern == path,
    }
}

/// Splits a rule into rules of one verb, one resource or path, and one name each.
fn broken_down(rule: &PolicyRule) -> Vec<PolicyRule> {
    let mut all = vec![];
    for verb in &rule.verbs {
        for url in &rule.non_resource_urls {
            all.push(PolicyRule {
                verbs: vec![verb.clone()],
                non_resource_urls: vec![url.clone()],
                ..PolicyRule::default()
            });
        }
        let pairs = rule
            .api_groups
            .iter()
            .flat_map(|group| rule.resources.iter().map(move |one| (group, one)));
        for (group, resource) in pairs {
            let one = PolicyRule {
                verbs: vec![verb.clone()],
                api_groups: vec![group.clone()],
                resources: vec![resource.clone()],
                ..PolicyRule::default()
            };
            if rule.resource_names.is_empty() {
                all.push(one);
                continue;
            }
            let named =
                |name: &String| PolicyRule { resource_names: vec![name.clone()], ..one.clone() };
            all.extend(rule.resource_names.iter().map(named));
        }
    }
    all
}

/// Whether one of `held` covers a rule from `broken_down`.
fn is_covered(held: &[PolicyRule], wanted: &PolicyRule) -> bool {
    let all = |held: &[String], wanted: &[String]| wanted.iter().all(|one| has(held, one));
    let resource = |held: &[String], wanted: &String| {
        let any_parent = wanted.split_once('/').map(|(_, subresource)| format!("*/{subresource}"));
        held.iter().any(|one| one == "*" || one == wanted || Some(one) == any_parent.as_ref())
    };
    held.iter().any(|rule| {
        all(&rule.verbs, &wanted.verbs)
            && all(&rule.api_groups, &wanted.api_groups)
            && wanted.resources.iter().all(|one| resource(&rule.resources, one))
            && wanted.non_resource_urls.iter().all(|url| {
                rule.non_resource_urls
                    .iter()
                    .any(|pattern| pattern == url || is_url_match(pattern, url))
            })
            && (rule.resource_names.is_empty()
                || (!wanted.resource_names.is_empty()
                    && wanted.resource_names.iter().all(|name| rule.resource_names.contains(name))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(verbs: &str, groups: &str, resources: &str, names: &str) -> PolicyRule {
        let list = |text: &str| match text {
            "" => vec![],
            text => text.split(',').map(|one| one.replace("core", "")).collect(),
        };
        PolicyRule {
            verbs: list(verbs),
            api_groups: list(groups),
            resources: list(resources),
            resource_names: list(names),
            non_resource_urls: vec![],
        }
    }

    #[test]
    fn rules_match_as_upstream() {
        let check = |rule: &PolicyRule, request: &str, expected: bool| {
            let parts: Vec<&str> = request.split(' ').collect();
            let [verb, group, resource, name] = parts[..] else { panic!("four words") };
            let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
            let request = RequestInfo {
                is_resource: true,
                verb: verb.into(),
                group: group.replace("core", ""),
                resource: resource.into(),
                subresource: subresource.into(),
                name: name.replace('-', ""),
                ..RequestInfo::default()
            };
            assert_eq!(rule_allows(rule, &request), expected, "{rule:?} {request:?}");
        };
        let pods = rule("get,list", "core", "pods", "");
        check(&pods, "get core pods a", true);
        check(&pods, "delete core pods a", false);
        check(&pods, "get apps pods a", false);
        check(&pods, "get core pods/log a", false);
        check(&rule("get", "core", "pods/log", ""), "get core pods/log a", true);
        check(&rule("get", "core", "pods/log", ""), "get core pods a", false);
        check(&rule("*", "*", "*", ""), "watch x y/z -", true);
        check(&rule("update", "*", "*/scale", ""), "update apps deployments/scale a", true);
        check(&rule("update", "*", "*/scale", ""), "update apps scale a", false);
        check(&rule("get", "core", "secrets", "a,b"), "get core secrets b", true);
        check(&rule("get", "core", "secrets", "a,b"), "get core secrets c", false);
        check(&rule("create", "core", "secrets", "a"), "create core secrets -", false);
    }

    #[test]
    fn urls_match_by_prefix() {
        let check = |pattern: &str, path: &str, expected: bool| {
            assert_eq!(is_url_match(pattern, path), expected, "{pattern} {path}");
        };
        check("*", "/anything", true);
        check("/healthz", "/healthz", true);
        check("/healthz", "/healthz/etcd", false);
        check("/healthz/*", "/healthz/etcd", true);
        check("/api/*", "/apis", false);
    }

    #[test]
    fn users_grant_only_rules_that_they_hold() {
        let check = |held: &[PolicyRule], wanted: &PolicyRule, expected: bool| {
            let all = broken_down(wanted);
            assert_eq!(all.iter().all(|rule| is_covered(held, rule)), expected, "{wanted:?}");
        };
        let held = [rule("get,list", "core", "pods", ""), rule("get", "core", "secrets", "a")];
        check(&held, &rule("get,list", "core", "pods", ""), true);
        check(&held, &rule("get,watch", "core", "pods", ""), false);
        check(&held, &rule("get", "core", "pods,secrets", ""), false);
        check(&held, &rule("get", "core", "secrets", "a"), true);
        check(&held, &rule("get", "core", "secrets", "a,b"), false);
        check(&[rule("*", "*", "*", "")], &rule("*", "apps", "deployments/scale", ""), true);
    }
}
