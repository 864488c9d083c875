//! ClusterRoleBinding: who has a ClusterRole in the whole cluster.

use k8s_openapi::api::rbac::v1::ClusterRoleBinding;

use super::{RULES, binding, default_binding, role_cell, role_stays, subjects_cell};
use crate::kind::{Kind, Rules, age, name, text, wide};
use crate::validate::at::At;

pub(crate) static KIND: Kind<ClusterRoleBinding> = Kind {
    default: |binding| default_binding(&mut binding.role_ref, &mut binding.subjects),
    rules: Rules {
        create: cluster_role_binding,
        update: Some(cluster_role_binding_update),
        ..RULES
    },
    columns: &[
        name(),
        text(
            "Role",
            "string",
            "RoleRef can only reference a ClusterRole in the global namespace. If the RoleRef cannot be resolved, the Authorizer must return an error.",
            |binding| role_cell(&binding.role_ref),
        ),
        age(),
        wide(text("Users", "string", "Users in the clusterRoleBinding", |binding| {
            subjects_cell(binding.subjects.as_deref(), "User")
        })),
        wide(text("Groups", "string", "Groups in the clusterRoleBinding", |binding| {
            subjects_cell(binding.subjects.as_deref(), "Group")
        })),
        wide(text(
            "ServiceAccounts",
            "string",
            "ServiceAccounts in the clusterRoleBinding",
            |binding| subjects_cell(binding.subjects.as_deref(), "ServiceAccount"),
        )),
    ],
    ..Kind::BASE
};

fn cluster_role_binding(at: &At<'_>) {
    binding(at, &["ClusterRole"], false);
}

fn cluster_role_binding_update(at: &At<'_>, old: &At<'_>) {
    cluster_role_binding(at);
    role_stays(at, old);
}
