//! MutatingAdmissionPolicy: expressions that change objects before they are written.

use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicy;

use super::{API_EXTENSIONS, RULES, default_match, param_kind};
use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::admission;

pub(crate) static KIND: Kind<MutatingAdmissionPolicy> = Kind {
    categories: API_EXTENSIONS,
    default: |policy| {
        let spec = policy.spec.get_or_insert_default();
        spec.failure_policy.get_or_insert_with(|| "Fail".into());
        default_match(spec.match_constraints.as_mut());
    },
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: admission::mutating_policy, ..RULES },
    columns: &[
        name(),
        text(
            "Mutations",
            "integer",
            "Mutation indicates the number of mutations rules defined in this configuration",
            |policy| {
                let spec = policy.spec.as_ref();
                spec.and_then(|spec| spec.mutations.as_ref()).map_or(0, Vec::len).into()
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
