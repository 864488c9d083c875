//! rbac.authorization.k8s.io: roles, and who has them.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::rbac::v1::{RoleRef, Subject};
use machinery::names;
use serde_json::Value;

use crate::defaults::fill;
use crate::kind::Rules;
use crate::validate::at::At;
use crate::validate::internal;

pub(crate) mod cluster_role;
pub(crate) mod cluster_role_binding;
pub(crate) mod role;
pub(crate) mod role_binding;

const GROUP: &str = "rbac.authorization.k8s.io";

/// What the rules of all kinds of the group have alike.
const RULES: Rules = Rules {
    name: names::path_segment,
    create_on_update: true,
    metadata: MetadataRules::WHOLE_AND_UPDATE,
    ..Rules::NONE
};

fn default_binding(role: &mut RoleRef, subjects: &mut Option<Vec<Subject>>) {
    fill(&mut role.api_group, GROUP);
    for subject in subjects.iter_mut().flatten() {
        if matches!(subject.kind.as_str(), "User" | "Group") {
            fill(&mut subject.api_group, GROUP);
        }
    }
    subjects.take_if(|subjects| subjects.is_empty());
}

fn role_cell(role: &RoleRef) -> Value {
    format!("{}/{}", role.kind, role.name).into()
}

/// The subjects of a kind.
fn subjects_cell(subjects: Option<&[Subject]>, kind: &str) -> Value {
    let all = subjects.unwrap_or_default().iter().filter(|subject| subject.kind == kind);
    let shown = |subject: &Subject| match &subject.namespace {
        Some(namespace) if kind == "ServiceAccount" => format!("{namespace}/{}", subject.name),
        _ => subject.name.clone(),
    };
    all.map(shown).collect::<Vec<_>>().join(", ").into()
}

const RBAC: &str = "rbac.authorization.k8s.io";

fn rules(at: &At<'_>, is_namespaced: bool) {
    for rule in at.get("rules").items() {
        if rule.get("verbs").is_empty() {
            rule.get("verbs").required("verbs must contain at least one value");
        }
        let urls = rule.get("nonResourceURLs");
        if urls.is_empty() {
            if rule.get("apiGroups").is_empty() {
                rule.get("apiGroups").required("resource rules must supply at least one api group");
            }
            if rule.get("resources").is_empty() {
                rule.get("resources").required("resource rules must supply at least one resource");
            }
            continue;
        }
        if is_namespaced {
            urls.invalid("namespaced rules cannot apply to non-resource URLs");
        }
        if ["apiGroups", "resources", "resourceNames"].iter().any(|f| !rule.get(f).is_empty()) {
            urls.invalid("rules cannot apply to both regular resources and non-resource URLs");
        }
    }
}

fn binding(at: &At<'_>, kinds: &[&str], is_namespaced: bool) {
    let role = at.get("roleRef");
    role.get("apiGroup").one_of(&[RBAC]);
    role.get("kind").one_of(kinds);
    role.get("name").need_name(names::path_segment);
    for subject in at.get("subjects").items() {
        let (name, group) = (subject.get("name"), subject.get("apiGroup"));
        name.need();
        match subject.get("kind").str() {
            "ServiceAccount" => {
                name.any_name(names::dns1123_subdomain);
                group.one_of(&[""]);
                if !is_namespaced && subject.get("namespace").is_empty() {
                    subject.get("namespace").required("");
                }
            }
            "User" | "Group" => group.one_of(&[RBAC]),
            _ => subject.get("kind").unsupported(&["ServiceAccount", "User", "Group"]),
        }
    }
}

fn role_stays(at: &At<'_>, old: &At<'_>) {
    let role = at.get("roleRef");
    if role.value != old.get("roleRef").value {
        let shown = internal::shown("RoleRef", role.value);
        role.errors().invalid_shown(&role.path, Some(&shown), "cannot change roleRef");
    }
}
