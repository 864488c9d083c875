//! Role: what may be done in a namespace.

use k8s_openapi::api::rbac::v1::Role;

use super::RULES;
use crate::kind::{Kind, Rules};
use crate::validate::policy;

pub(crate) static KIND: Kind<Role> =
    Kind { rules: Rules { create: policy::role, ..RULES }, ..Kind::BASE };
