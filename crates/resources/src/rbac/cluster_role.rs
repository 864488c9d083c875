//! ClusterRole: what may be done in the whole cluster, or in any namespace.

use k8s_openapi::api::rbac::v1::ClusterRole;

use super::{RULES, rules};
use crate::kind::{Kind, Rules};
use crate::validate::at::At;

pub(crate) static KIND: Kind<ClusterRole> =
    Kind { rules: Rules { create: cluster_role, ..RULES }, ..Kind::BASE };

fn cluster_role(at: &At<'_>) {
    rules(at, false);
    if !at.has("aggregationRule") {
        return;
    }
    let selectors = at.get("aggregationRule.clusterRoleSelectors");
    if selectors.is_empty() {
        selectors
            .required("at least one clusterRoleSelector required if aggregationRule is non-nil");
    }
    for selector in selectors.items() {
        let known = selector.errors().0.len();
        selector.selector();
        if selector.errors().0.len() > known {
            selector.invalid_as(serde_json::Value::Null, "invalid label selector.");
        }
    }
}
