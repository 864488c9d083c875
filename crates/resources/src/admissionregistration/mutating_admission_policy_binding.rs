//! MutatingAdmissionPolicyBinding: where a mutating policy is in force, and with which parameters.

use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicyBinding;

use super::{API_EXTENSIONS, RULES, binding, default_match, mutable_operations, param_ref_cell};
use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::at::At;

pub(crate) static KIND: Kind<MutatingAdmissionPolicyBinding> = Kind {
    categories: API_EXTENSIONS,
    default: |binding| {
        default_match(binding.spec.get_or_insert_default().match_resources.as_mut());
    },
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: mutating_binding, ..RULES },
    columns: &[
        name(),
        text(
            "PolicyName",
            "string",
            "PolicyName indicates the policy definition which the policy binding binded to",
            |binding| {
                let spec = binding.spec.as_ref();
                spec.and_then(|spec| spec.policy_name.clone()).unwrap_or_default().into()
            },
        ),
        text(
            "ParamRef",
            "string",
            "ParamRef indicates the param resource which sets the configuration param",
            |binding| {
                let spec = binding.spec.as_ref();
                param_ref_cell(spec.and_then(|spec| spec.param_ref.as_ref())).into()
            },
        ),
        age(),
    ],
    ..Kind::BASE
};

fn mutating_binding(at: &At<'_>) {
    binding(at);
    mutable_operations(&at.get("spec.matchResources"));
}
