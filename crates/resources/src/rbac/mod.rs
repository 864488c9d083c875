//! rbac.authorization.k8s.io: roles, and who has them.

use k8s_openapi::api::rbac::v1::{RoleRef, Subject};
use machinery::names;
use serde_json::Value;

use crate::defaults::fill;
use crate::kind::Rules;

pub(crate) mod cluster_role;
pub(crate) mod cluster_role_binding;
pub(crate) mod role;
pub(crate) mod role_binding;

const GROUP: &str = "rbac.authorization.k8s.io";

/// What the rules of all kinds of the group have alike.
const RULES: Rules = Rules { name: names::path_segment, create_on_update: true, ..Rules::NONE };

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
