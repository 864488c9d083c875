//! ValidatingAdmissionPolicyBinding: where a policy is in force, and with which parameters.

use std::collections::HashSet;

use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicyBinding;

use super::{API_EXTENSIONS, RULES, binding, default_match, param_ref_cell};
use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::at::At;

pub(crate) static KIND: Kind<ValidatingAdmissionPolicyBinding> = Kind {
    categories: API_EXTENSIONS,
    default: |binding| default_match(binding.spec.match_resources.as_mut()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: validating_binding, ..RULES },
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
            |binding| param_ref_cell(binding.spec.param_ref.as_ref()).into(),
        ),
        age(),
    ],
    ..Kind::BASE
};

fn validating_binding(at: &At<'_>) {
    binding(at);
    let actions = at.get("spec.validationActions");
    let mut seen = HashSet::new();
    for action in actions.items() {
        action.one_of(&["Audit", "Deny", "Warn"]);
        if !seen.insert(action.str()) {
            action.duplicate();
        }
    }
    if seen.contains(&"Deny") && seen.contains(&"Warn") {
        actions.invalid("must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)");
    }
    if seen.is_empty() {
        actions.required("at least one validation action is required");
    }
}
