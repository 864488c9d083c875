//! Role: what may be done in a namespace.

use k8s_openapi::api::rbac::v1::Role;

use super::{RULES, rules};
use crate::kind::{Kind, Rules};
use crate::validate::at::At;

pub(crate) static KIND: Kind<Role> = Kind { rules: Rules { create: role, ..RULES }, ..Kind::BASE };

fn role(at: &At<'_>) {
    rules(at, true);
}
