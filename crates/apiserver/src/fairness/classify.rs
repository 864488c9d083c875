//! Selects the FlowSchema of a request: the first, by precedence and name, with a rule that matches both
//! the user and the request. Upstream: `rule.go`.

use crate::request::{RequestInfo, UserInfo};

/// A FlowSchema.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlowSchema {
    pub name: String,
    pub uid: String,
    pub precedence: i32,
    /// The name of its priority level.
    pub level: String,
    pub distinguisher: Distinguisher,
    pub rules: Vec<Rule>,
}

/// The flow distinguisher of a FlowSchema.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distinguisher {
    /// All requests are one flow.
    #[default]
    None,
    ByUser,
    ByNamespace,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    pub subjects: Vec<Subject>,
    pub resources: Vec<ResourceRule>,
    pub paths: Vec<PathRule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    User(String),
    Group(String),
    ServiceAccount { namespace: String, name: String },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceRule {
    pub verbs: Vec<String>,
    pub groups: Vec<String>,
    pub resources: Vec<String>,
    /// Whether requests without a namespace match.
    pub cluster_scope: bool,
    pub namespaces: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathRule {
    pub verbs: Vec<String>,
    pub paths: Vec<String>,
}

const ANY: &str = "*";

impl FlowSchema {
    pub fn matches(&self, info: &RequestInfo, user: &UserInfo) -> bool {
        self.rules.iter().any(|rule| rule.matches(info, user))
    }

    /// The name of the request's flow within the schema.
    pub fn flow(&self, info: &RequestInfo, user: &UserInfo) -> String {
        match self.distinguisher {
            Distinguisher::None => String::new(),
            Distinguisher::ByUser => user.name.clone(),
            Distinguisher::ByNamespace => info.namespace.clone(),
        }
    }
}

impl Rule {
    fn matches(&self, info: &RequestInfo, user: &UserInfo) -> bool {
        self.subjects.iter().any(|subject| subject.matches(user))
            && match info.is_resource {
                true => self.resources.iter().any(|rule| rule.matches(info)),
                false => self.paths.iter().any(|rule| rule.matches(info)),
            }
    }
}

impl Subject {
    fn matches(&self, user: &UserInfo) -> bool {
        match self {
            Self::User(name) => name == ANY || *name == user.name,
            Self::Group(name) => name == ANY || user.in_group(name),
            Self::ServiceAccount { namespace, name } => {
                let account = user.name.strip_prefix("system:serviceaccount:");
                let parts = account.and_then(|account| account.split_once(':'));
                parts.is_some_and(|(of, account)| {
                    of == namespace && (name == ANY || name == account)
                })
            }
        }
    }
}

impl ResourceRule {
    fn matches(&self, info: &RequestInfo) -> bool {
        lists(&self.verbs, &info.verb)
            && self.lists_resource(info)
            && lists(&self.groups, &info.group)
            && match info.namespace.as_str() {
                "" => self.cluster_scope,
                namespace => lists(&self.namespaces, namespace),
            }
    }

    fn lists_resource(&self, info: &RequestInfo) -> bool {
        match info.subresource.as_str() {
            "" => lists(&self.resources, &info.resource),
            subresource => {
                let is_part = |one: &String| {
                    one.split_once('/') == Some((info.resource.as_str(), subresource))
                };
                is_any(&self.resources) || self.resources.iter().any(is_part)
            }
        }
    }
}

impl PathRule {
    fn matches(&self, info: &RequestInfo) -> bool {
        lists(&self.verbs, &info.verb) && self.paths.iter().any(|rule| covers(rule, &info.path))
    }
}

/// Whether a rule covers a path: the same path or one below it. A star at the rule's end changes nothing.
fn covers(rule: &str, path: &str) -> bool {
    if rule == ANY || rule == path {
        return true;
    }
    let prefix = rule.strip_suffix('*').unwrap_or(rule);
    let prefix = prefix.strip_suffix('/').unwrap_or(prefix);
    path.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'))
}

fn is_any(list: &[String]) -> bool {
    matches!(list, [only] if only == ANY)
}

fn lists(list: &[String], wanted: &str) -> bool {
    is_any(list) || list.iter().any(|one| one == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(list: &str) -> Vec<String> {
        list.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn subjects_match_as_upstreams() {
        let check = |subject: Subject, name: &str, groups: &[&str], expected| {
            assert_eq!(
                subject.matches(&UserInfo::new(name, groups)),
                expected,
                "{subject:?} {name}"
            );
        };
        check(Subject::User("jane".into()), "jane", &[], true);
        check(Subject::User("jane".into()), "jane2", &[], false);
        check(Subject::User("*".into()), "", &[], true);
        check(Subject::Group("dev".into()), "jane", &["ops", "dev"], true);
        check(Subject::Group("dev".into()), "dev", &["ops"], false);
        let account = |namespace: &str, name: &str| Subject::ServiceAccount {
            namespace: namespace.into(),
            name: name.into(),
        };
        check(account("a", "*"), "system:serviceaccount:a:x", &[], true);
        check(account("a", "*"), "system:serviceaccount:ab:x", &[], false);
        check(account("a", "x"), "system:serviceaccount:a:x", &[], true);
        check(account("a", "x"), "system:serviceaccount:a:y", &[], false);
        check(account("a", "x"), "x", &[], false);
    }

    #[test]
    fn resources_match_as_upstreams() {
        let check = |rule: [&str; 4], cluster_scope, request: [&str; 5], expected| {
            let [verbs, groups, resources, namespaces] = rule.map(texts);
            let rule = ResourceRule { verbs, groups, resources, cluster_scope, namespaces };
            let [verb, group, resource, subresource, namespace] = request.map(str::to_owned);
            let info = RequestInfo {
                is_resource: true,
                verb,
                group,
                resource,
                subresource,
                namespace,
                ..RequestInfo::default()
            };
            assert_eq!(rule.matches(&info), expected, "{rule:?} {info:?}");
        };
        let all = ["*"; 4];
        check(all, true, ["get", "", "pods", "", "a"], true);
        check(all, false, ["get", "", "pods", "", ""], false);
        check(all, false, ["get", "", "pods", "log", "a"], true);
        let leases = ["get update", "coordination.k8s.io", "leases", "*"];
        check(leases, false, ["get", "coordination.k8s.io", "leases", "", "a"], true);
        check(leases, false, ["list", "coordination.k8s.io", "leases", "", "a"], false);
        check(leases, false, ["get", "", "leases", "", "a"], false);
        let parts = ["*", "*", "pods/log nodes", "a b"];
        check(parts, false, ["get", "", "pods", "log", "b"], true);
        check(parts, false, ["get", "", "pods", "", "b"], false);
        check(parts, false, ["get", "", "nodes", "log", "b"], false);
        check(parts, false, ["get", "", "pods", "log", "c"], false);
        // A star inside a longer text has no special meaning.
        check(["*", "*", "* x", "*"], true, ["get", "", "pods", "", ""], false);
    }

    #[test]
    fn paths_match_as_upstreams() {
        let check =
            |rule, path, expected| assert_eq!(covers(rule, path), expected, "{rule} {path}");
        check("*", "/anything", true);
        check("/healthz", "/healthz", true);
        check("/healthz", "/healthz/etcd", true);
        check("/healthz", "/healthzz", false);
        check("/healthz/*", "/healthz/etcd", true);
        check("/healthz/*", "/healthz", false);
        check("/", "/healthz", true);
    }
}
