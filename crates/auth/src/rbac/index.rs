//! Roles by name, bindings by subject: a decision reads only the bindings of its user and groups.
//!
//! ```text
//! cluster   users:  system:kube-scheduler ─► {system:kube-scheduler, system:volume-scheduler}
//!           groups: system:authenticated  ─► {system:basic-user, system:discovery, …}
//! by namespace: the same, for RoleBindings
//! ```
//!
//! A service account is its user name, `system:serviceaccount:NAMESPACE:NAME`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;

use apiserver::authz::{Attributes, Decision, PolicyRule};
use apiserver::request::UserInfo;
use k8s_openapi::api::rbac::v1 as rbac;

use super::rule_allows;

#[derive(Default)]
pub struct Index {
    cluster_roles: HashMap<String, Arc<[PolicyRule]>>,
    /// By namespace, then name.
    roles: HashMap<String, HashMap<String, Arc<[PolicyRule]>>>,
    cluster_bindings: Bindings,
    /// By namespace.
    bindings: HashMap<String, Bindings>,
}

/// The bindings of one scope. Invariant: a binding is in the set of each of its subjects.
#[derive(Default)]
struct Bindings {
    by_name: HashMap<String, Binding>,
    users: HashMap<String, BTreeSet<String>>,
    groups: HashMap<String, BTreeSet<String>>,
}

struct Binding {
    role_kind: String,
    role: String,
    subjects: Vec<Subject>,
}

struct Subject {
    is_group: bool,
    /// The user or group name that requests carry.
    name: String,
    /// The subject in reasons: `Group "system:masters"`.
    shown: String,
}

/// The source of a rule, for the reason of a decision.
struct Source<'a> {
    kind: &'a str,
    binding: String,
    role_kind: &'a str,
    role: &'a str,
    subject: &'a str,
}

impl Index {
    pub fn put_cluster_role(&mut self, role: rbac::ClusterRole) {
        let name = role.metadata.name.unwrap_or_default();
        self.cluster_roles.insert(name, rules_of(role.rules));
    }

    pub fn put_role(&mut self, role: rbac::Role) {
        let namespace = role.metadata.namespace.unwrap_or_default();
        let name = role.metadata.name.unwrap_or_default();
        self.roles.entry(namespace).or_default().insert(name, rules_of(role.rules));
    }

    /// A ClusterRole if the namespace is empty.
    pub fn remove_role(&mut self, namespace: &str, name: &str) {
        if namespace.is_empty() {
            self.cluster_roles.remove(name);
        } else if let Some(roles) = self.roles.get_mut(namespace) {
            roles.remove(name);
            if roles.is_empty() {
                self.roles.remove(namespace);
            }
        }
    }

    pub fn put_cluster_binding(&mut self, binding: rbac::ClusterRoleBinding) {
        let name = binding.metadata.name.unwrap_or_default();
        self.cluster_bindings.put(name, Binding::new(binding.role_ref, binding.subjects, ""));
    }

    pub fn put_binding(&mut self, binding: rbac::RoleBinding) {
        let namespace = binding.metadata.namespace.unwrap_or_default();
        let name = binding.metadata.name.unwrap_or_default();
        let parsed = Binding::new(binding.role_ref, binding.subjects, &namespace);
        self.bindings.entry(namespace).or_default().put(name, parsed);
    }

    /// A ClusterRoleBinding if the namespace is empty.
    pub fn remove_binding(&mut self, namespace: &str, name: &str) {
        if namespace.is_empty() {
            self.cluster_bindings.remove(name);
        } else if let Some(bindings) = self.bindings.get_mut(namespace) {
            bindings.remove(name);
            if bindings.by_name.is_empty() {
                self.bindings.remove(namespace);
            }
        }
    }

    pub fn clear_cluster_roles(&mut self) {
        self.cluster_roles.clear();
    }

    pub fn clear_roles(&mut self) {
        self.roles.clear();
    }

    pub fn clear_cluster_bindings(&mut self) {
        self.cluster_bindings = Bindings::default();
    }

    pub fn clear_bindings(&mut self) {
        self.bindings.clear();
    }

    /// The number of bindings that a decision for this user reads.
    #[cfg(test)]
    pub(super) fn bindings_of(&self, user: &UserInfo, namespace: &str) -> usize {
        let own = self.bindings.get(namespace).map_or(0, |bindings| bindings.of(user).len());
        self.cluster_bindings.of(user).len() + own
    }

    pub fn decide(&self, attributes: &Attributes) -> Decision {
        let request = &attributes.request;
        let namespace = if request.is_resource { request.namespace.as_str() } else { "" };
        let mut errors = vec![];
        let found =
            self.visit(&attributes.user, namespace, &mut errors, |source, rules| {
                match rules.iter().any(|rule| rule_allows(rule, request)) {
                    true => ControlFlow::Break(source.describe()),
                    false => ControlFlow::Continue(()),
                }
            });
        if let ControlFlow::Break(source) = found {
            return Decision::Allow { reason: format!("RBAC: allowed by {source}") };
        }
        let reason = match errors.as_slice() {
            [] => String::new(),
            [one] => format!("RBAC: {one}"),
            many => format!("RBAC: [{}]", many.join(", ")),
        };
        Decision::NoOpinion { reason }
    }

    /// All rules of a user in a namespace.
    pub fn rules(&self, user: &UserInfo, namespace: &str) -> Vec<PolicyRule> {
        let mut all: Vec<PolicyRule> = vec![];
        let _: ControlFlow<()> = self.visit(user, namespace, &mut vec![], |_, rules| {
            all.extend_from_slice(rules);
            ControlFlow::Continue(())
        });
        all
    }

    /// Visits every binding of the user with its rules, cluster-wide ones first.
    fn visit<B>(
        &self,
        user: &UserInfo,
        namespace: &str,
        errors: &mut Vec<String>,
        mut see: impl FnMut(Source<'_>, &[PolicyRule]) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        for (name, subject) in self.cluster_bindings.of(user) {
            let binding = &self.cluster_bindings.by_name[name];
            match self.role(binding, "") {
                Some(rules) => {
                    see(binding.source("ClusterRoleBinding", name.to_owned(), subject), rules)?;
                }
                None => binding.not_found(errors),
            }
        }
        let Some(bindings) = self.bindings.get(namespace) else { return ControlFlow::Continue(()) };
        for (name, subject) in bindings.of(user) {
            let binding = &bindings.by_name[name];
            match self.role(binding, namespace) {
                Some(rules) => {
                    see(
                        binding.source("RoleBinding", format!("{name}/{namespace}"), subject),
                        rules,
                    )?;
                }
                None => binding.not_found(errors),
            }
        }
        ControlFlow::Continue(())
    }

    fn role(&self, binding: &Binding, namespace: &str) -> Option<&[PolicyRule]> {
        self.role_rules(&binding.role_kind, namespace, &binding.role)
    }

    pub(super) fn role_rules(
        &self,
        kind: &str,
        namespace: &str,
        name: &str,
    ) -> Option<&[PolicyRule]> {
        let found = match kind {
            "ClusterRole" => self.cluster_roles.get(name),
            "Role" => self.roles.get(namespace)?.get(name),
            _ => None,
        };
        found.map(|rules| &**rules)
    }
}

impl Bindings {
    fn put(&mut self, name: String, binding: Binding) {
        self.remove(&name);
        for subject in &binding.subjects {
            let names = if subject.is_group { &mut self.groups } else { &mut self.users };
            names.entry(subject.name.clone()).or_default().insert(name.clone());
        }
        self.by_name.insert(name, binding);
    }

    fn remove(&mut self, name: &str) {
        let Some(binding) = self.by_name.remove(name) else { return };
        for subject in &binding.subjects {
            let names = if subject.is_group { &mut self.groups } else { &mut self.users };
            if let Some(set) = names.get_mut(&subject.name) {
                set.remove(name);
                if set.is_empty() {
                    names.remove(&subject.name);
                }
            }
        }
    }

    /// The user's bindings by name, each with the matching subject.
    fn of<'a>(&'a self, user: &UserInfo) -> BTreeMap<&'a str, &'a str> {
        let sets = self.users.get(&user.name).into_iter();
        let sets = sets.chain(user.groups.iter().filter_map(|group| self.groups.get(group)));
        let mut found = BTreeMap::new();
        for name in sets.flatten() {
            let subject =
                self.by_name[name].subjects.iter().find(|subject| match subject.is_group {
                    true => user.in_group(&subject.name),
                    false => subject.name == user.name,
                });
            found.insert(name.as_str(), subject.map_or("", |subject| subject.shown.as_str()));
        }
        found
    }
}

impl Binding {
    fn new(role: rbac::RoleRef, subjects: Option<Vec<rbac::Subject>>, namespace: &str) -> Self {
        let subjects = subjects.unwrap_or_default();
        let subjects = subjects.into_iter().filter_map(|subject| Subject::new(subject, namespace));
        Self { role_kind: role.kind, role: role.name, subjects: subjects.collect() }
    }

    fn source<'a>(&'a self, kind: &'a str, binding: String, subject: &'a str) -> Source<'a> {
        Source { kind, binding, role_kind: &self.role_kind, role: &self.role, subject }
    }

    fn not_found(&self, errors: &mut Vec<String>) {
        let resource = self.role_kind.to_lowercase();
        let error = format!("{resource}.rbac.authorization.k8s.io {:?} not found", self.role);
        if !errors.contains(&error) {
            errors.push(error);
        }
    }
}

impl Subject {
    /// `namespace`: of the binding, for a service account without its own.
    fn new(subject: rbac::Subject, namespace: &str) -> Option<Self> {
        let rbac::Subject { kind, name, namespace: own, .. } = subject;
        match kind.as_str() {
            "User" | "Group" => {
                let shown = format!("{kind} {name:?}");
                Some(Self { is_group: kind == "Group", name, shown })
            }
            "ServiceAccount" => {
                let namespace = own.filter(|own| !own.is_empty()).unwrap_or(namespace.to_owned());
                let shown = format!("ServiceAccount {:?}", format!("{name}/{namespace}"));
                let name = format!("system:serviceaccount:{namespace}:{name}");
                Some(Self { is_group: false, name, shown })
            }
            _ => None,
        }
    }
}

impl Source<'_> {
    fn describe(&self) -> String {
        format!(
            "{} {:?} of {} {:?} to {}",
            self.kind, self.binding, self.role_kind, self.role, self.subject
        )
    }
}

fn rules_of(rules: Option<Vec<rbac::PolicyRule>>) -> Arc<[PolicyRule]> {
    rules.unwrap_or_default().into_iter().map(rule_of).collect()
}

/// Converts a rule of the API.
pub(crate) fn rule_of(rule: rbac::PolicyRule) -> PolicyRule {
    PolicyRule {
        verbs: rule.verbs,
        api_groups: rule.api_groups.unwrap_or_default(),
        resources: rule.resources.unwrap_or_default(),
        resource_names: rule.resource_names.unwrap_or_default(),
        non_resource_urls: rule.non_resource_urls.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use apiserver::request::RequestInfo;
    use serde_json::{Value, json};

    use super::*;

    fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).expect("an object of the kind")
    }

    fn index() -> Index {
        let mut index = Index::default();
        index.put_cluster_role(typed(json!({
            "metadata": {"name": "reader"},
            "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}],
        })));
        index.put_role(typed(json!({
            "metadata": {"name": "writer", "namespace": "web"},
            "rules": [{"verbs": ["update"], "apiGroups": [""], "resources": ["pods"]}],
        })));
        index.put_cluster_binding(typed(json!({
            "metadata": {"name": "readers"},
            "roleRef": {"apiGroup": "", "kind": "ClusterRole", "name": "reader"},
            "subjects": [{"kind": "Group", "name": "dev"}],
        })));
        index.put_binding(typed(json!({
            "metadata": {"name": "writers", "namespace": "web"},
            "roleRef": {"apiGroup": "", "kind": "Role", "name": "writer"},
            "subjects": [{"kind": "ServiceAccount", "name": "bot"}, {"kind": "User", "name": "jane"}],
        })));
        index
    }

    fn question(user: &str, groups: &[&str], verb: &str, namespace: &str) -> Attributes {
        let request = RequestInfo {
            is_resource: true,
            verb: verb.into(),
            resource: "pods".into(),
            namespace: namespace.into(),
            ..RequestInfo::default()
        };
        Attributes { user: UserInfo::new(user, groups), request }
    }

    #[test]
    fn decisions_name_the_binding() {
        let index = index();
        let check = |user: &str, groups: &[&str], verb: &str, namespace: &str, expected: &str| {
            let got = match index.decide(&question(user, groups, verb, namespace)) {
                Decision::Allow { reason } => reason,
                other => format!("{other:?}"),
            };
            assert_eq!(got, expected);
        };
        let no = "NoOpinion { reason: \"\" }";
        let reader = r#"RBAC: allowed by ClusterRoleBinding "readers" of ClusterRole "reader" to Group "dev""#;
        check("jane", &["dev"], "get", "", reader);
        check("jane", &["dev"], "get", "web", reader);
        check("jane", &[], "get", "", no);
        let writer =
            r#"RBAC: allowed by RoleBinding "writers/web" of Role "writer" to User "jane""#;
        check("jane", &[], "update", "web", writer);
        check("jane", &[], "update", "other", no);
        let bot = r#"RBAC: allowed by RoleBinding "writers/web" of Role "writer" to ServiceAccount "bot/web""#;
        check("system:serviceaccount:web:bot", &[], "update", "web", bot);
    }

    #[test]
    fn changes_are_applied() {
        let mut index = index();
        let may = |index: &Index| {
            matches!(index.decide(&question("a", &["dev"], "get", "")), Decision::Allow { .. })
        };
        assert!(may(&index));
        index.remove_role("", "reader");
        assert_eq!(
            index.decide(&question("a", &["dev"], "get", "")),
            Decision::NoOpinion {
                reason: r#"RBAC: clusterrole.rbac.authorization.k8s.io "reader" not found"#.into()
            }
        );
        index.put_cluster_role(typed(json!({
            "metadata": {"name": "reader"},
            "rules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}],
        })));
        assert!(may(&index));
        index.put_cluster_binding(typed(json!({
            "metadata": {"name": "readers"},
            "roleRef": {"apiGroup": "", "kind": "ClusterRole", "name": "reader"},
        })));
        assert!(!may(&index));
        assert!(index.cluster_bindings.groups.is_empty());
        index.remove_binding("web", "writers");
        index.remove_role("web", "writer");
        assert!(index.bindings.is_empty() && index.roles.is_empty());
    }
}
