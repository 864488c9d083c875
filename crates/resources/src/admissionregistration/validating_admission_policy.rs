//! ValidatingAdmissionPolicy: expressions that may refuse objects before they are written.

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;

use super::{API_EXTENSIONS, RULES, default_match, param_kind};
use crate::kind::{Kind, Rules, STATUS, age, name, spec_and_status, text};
use crate::validate::admission;

pub(crate) static KIND: Kind<ValidatingAdmissionPolicy> = Kind {
    categories: API_EXTENSIONS,
    subresources: &[STATUS],
    default: |policy| {
        let spec = policy.spec.get_or_insert_default();
        spec.failure_policy.get_or_insert_with(|| "Fail".into());
        default_match(spec.match_constraints.as_mut());
    },
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules {
        create: admission::validating_policy,
        parts: &[("status", admission::policy_status)],
        ..RULES
    },
    columns: &[
        name(),
        text(
            "Validations",
            "integer",
            "Validations indicates the number of validation rules defined in this configuration",
            |policy| {
                let spec = policy.spec.as_ref();
                spec.and_then(|spec| spec.validations.as_ref()).map_or(0, Vec::len).into()
            },
        ),
        text(
            "ParamKind",
            "string",
            "ParamKind specifies the kind of resources used to parameterize this policy",
            |policy| {
                let spec = policy.spec.as_ref();
                param_kind(spec.and_then(|spec| spec.param_kind.as_ref())).into()
            },
        ),
        age(),
    ],
    ..Kind::BASE
};
