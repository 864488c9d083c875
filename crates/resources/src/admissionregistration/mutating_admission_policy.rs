//! MutatingAdmissionPolicy: expressions that change objects before they are written.

use cel::Type;
use cel::environments;
use k8s_openapi::api::admissionregistration::v1::MutatingAdmissionPolicy;

use super::{
    API_EXTENSIONS, Composed, REINVOCATION, RULES, default_match, param_kind_cell, policy_head,
};
use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::at::At;

pub(crate) static KIND: Kind<MutatingAdmissionPolicy> = Kind {
    categories: API_EXTENSIONS,
    default: |policy| {
        let spec = policy.spec.get_or_insert_default();
        spec.failure_policy.get_or_insert_with(|| "Fail".into());
        default_match(spec.match_constraints.as_mut());
    },
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: mutating_policy, ..RULES },
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
                param_kind_cell(spec.and_then(|spec| spec.param_kind.as_ref())).into()
            },
        ),
        age(),
    ],
    ..Kind::BASE
};

fn mutating_policy(at: &At<'_>) {
    let spec = at.get("spec");
    let composed = policy_head(&spec, true);
    let mutations = spec.get("mutations");
    if mutations.is_empty() {
        mutations.required("mutations must contain at least one item");
    }
    for mutation in mutations.items() {
        let kind = mutation.get("patchType");
        let (config, patch) = (mutation.get("applyConfiguration"), mutation.get("jsonPatch"));
        match kind.str() {
            "" => kind.required(""),
            "ApplyConfiguration" => {
                let wanted = environments::patched();
                one_patch(kind.str(), (&config, wanted), (&patch, "{jsonPatch}"), &composed);
            }
            "JSONPatch" => {
                let wanted = environments::patches();
                one_patch(
                    kind.str(),
                    (&patch, wanted),
                    (&config, "{applyConfiguration}"),
                    &composed,
                );
            }
            _ => kind.unsupported(&["ApplyConfiguration", "JSONPatch"]),
        }
    }
    let policy = spec.get("reinvocationPolicy");
    if policy.is_empty() {
        policy.required("");
    } else {
        policy.one_of(REINVOCATION);
    }
}

/// The patch that the type asks for, and what it must evaluate to; and not the other, which is shown.
fn one_patch(kind: &str, wanted: (&At<'_>, Type), other: (&At<'_>, &str), composed: &Composed) {
    let (patch, wanted) = wanted;
    let expression = patch.get("expression");
    let text = expression.str().trim();
    if !patch.is_set() {
        patch.required(&format!("must be specified when patchType is {kind}"));
    } else if text.is_empty() {
        expression.required("");
    } else {
        composed.check(&expression.with(&text.into()), text, true, true, &[wanted]);
    }
    let (other, shown) = other;
    if other.is_set() {
        other.invalid_as(shown, &format!("must not be specified when patchType is {kind}"));
    }
}
