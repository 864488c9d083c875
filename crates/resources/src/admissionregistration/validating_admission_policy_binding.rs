//! ValidatingAdmissionPolicyBinding: where a policy is in force, and with which parameters.

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;

use super::{API_EXTENSIONS, RULES, default_match, param_ref};
use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::admission;

pub(crate) static KIND: Kind<ValidatingAdmissionPolicyBinding> = Kind {
    categories: API_EXTENSIONS,
    default: |binding| default_match(binding.spec.match_resources.as_mut()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: admission::validating_binding, ..RULES },
    columns: &[
        name(),
        text(
            "PolicyName",
            "string",
            "PolicyName indicates the policy definition which the policy binding binded to",
            |binding| binding.spec.policy_name.clone().into(),
        ),
        text(
            "ParamRef",
            "string",
            "ParamRef indicates the param resource which sets the configuration param",
            |binding| param_ref(binding.spec.param_ref.as_ref()).into(),
        ),
        age(),
    ],
    ..Kind::BASE
};
