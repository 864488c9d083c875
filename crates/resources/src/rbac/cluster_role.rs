//! ClusterRole: what may be done in the whole cluster, or in any namespace.

use k8s_openapi::api::rbac::v1::ClusterRole;

use super::RULES;
use crate::kind::{Kind, Rules};
use crate::validate::policy;

pub(crate) static KIND: Kind<ClusterRole> =
    Kind { rules: Rules { create: policy::cluster_role, ..RULES }, ..Kind::BASE };
