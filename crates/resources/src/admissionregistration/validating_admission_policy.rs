//! ValidatingAdmissionPolicy: expressions that may refuse objects before they are written.

use std::collections::HashSet;

use cel::Type;
use k8s_openapi::api::admissionregistration::v1::ValidatingAdmissionPolicy;
use machinery::names;

use super::{API_EXTENSIONS, Composed, RULES, default_match, param_kind_cell, policy_head};
use crate::kind::{Kind, Rules, STATUS, age, name, spec_and_bare_status, text};
use crate::validate::at::At;
use crate::validate::shared::conditions;

pub(crate) static KIND: Kind<ValidatingAdmissionPolicy> = Kind {
    categories: API_EXTENSIONS,
    subresources: &[STATUS],
    default: |policy| {
        let spec = policy.spec.get_or_insert_default();
        spec.failure_policy.get_or_insert_with(|| "Fail".into());
        default_match(spec.match_constraints.as_mut());
    },
    parts: Some(spec_and_bare_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules { create: validating_policy, parts: &[("status", policy_status)], ..RULES },
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
                param_kind_cell(spec.and_then(|spec| spec.param_kind.as_ref())).into()
            },
        ),
        age(),
    ],
    ..Kind::BASE
};

fn validating_policy(at: &At<'_>) {
    let spec = at.get("spec");
    let composed = policy_head(&spec, false);
    let (rules, notes) = (spec.get("validations"), spec.get("auditAnnotations"));
    if rules.is_empty() && notes.is_empty() {
        for place in [&rules, &notes] {
            place.required("validations or auditAnnotations must contain at least one item");
        }
        return;
    }
    rules.items().for_each(|rule| validation(&rule, &composed));
    if notes.len() > 20 {
        notes.invalid("must not have more than 20 auditAnnotations");
    }
    let policy = at.get("metadata.name").str();
    let mut seen = HashSet::new();
    for note in notes.items() {
        let (key, expression) = (note.get("key"), note.get("valueExpression"));
        if policy.is_empty() {
            key.invalid_text("requires metadata.name be non-empty");
        } else {
            let full = format!("{policy}/{}", key.str());
            for why in names::qualified_name(&full) {
                key.invalid_as(&full, &why);
            }
        }
        if expression.str().trim().is_empty() {
            expression.required("valueExpression is not specified");
        } else if expression.str().trim().len() > 5 << 10 {
            expression.required("must not exceed 5120 bytes in length");
        } else {
            let text = expression.str().trim();
            composed.check(&expression, text, true, false, &[Type::String, Type::Null]);
        }
        if !seen.insert(key.str()) {
            key.duplicate_text();
        }
    }
}

fn validation(at: &At<'_>, composed: &Composed) {
    let [expression, message, by_expression] =
        ["expression", "message", "messageExpression"].map(|field| at.get(field));
    if expression.str().trim().is_empty() {
        expression.required("expression is not specified");
    } else {
        composed.check(&expression, expression.str(), true, false, &[Type::Bool]);
    }
    if !by_expression.is_empty() && by_expression.str().trim().is_empty() {
        by_expression.invalid("must be non-empty if specified");
    } else if !by_expression.is_empty() {
        composed.check(&by_expression, by_expression.str(), false, false, &[Type::String]);
    }
    if !message.is_empty() && message.str().trim().is_empty() {
        message.invalid("must be non-empty if specified");
    } else if message.str().trim().contains(['\n', '\r']) {
        message.invalid("must not contain line breaks");
    }
    at.get("reason").any_of(&["Forbidden", "Invalid", "RequestEntityTooLarge"]);
}

fn policy_status(at: &At<'_>, _old: &At<'_>) {
    let status = at.get("status");
    for warning in status.get("typeChecking.expressionWarnings").items() {
        warning.get("warning").need();
        let place = warning.get("fieldRef");
        if place.str().trim().is_empty() {
            place.required("");
        }
    }
    conditions(&status.get("conditions"));
}
