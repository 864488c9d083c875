//! Are the rules of a schema expressions that fit it? Upstream: the CEL part of
//! `ValidateCustomResourceDefinitionOpenAPISchema`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSONSchemaProps;
use machinery::field::{FieldErrors, Path};

use crate::schema::rules::Rule;
use crate::schema::{Additional, List, Schema};

pub fn check(schema: &JSONSchemaProps, path: &Path) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_node(&Schema::new(schema), path, None, true, &mut errors);
    errors
}

/// `loose` is the first node on the way whose parts cannot be told to be the same as before.
fn check_node(
    schema: &Schema,
    path: &Path,
    loose: Option<&Path>,
    is_root: bool,
    errors: &mut FieldErrors,
) {
    if let Additional::Schema(additional) = &schema.additional {
        check_node(additional, &path.child("additionalProperties"), loose, false, errors);
    }
    let below = if schema.atomic_map { loose.or(Some(path)) } else { loose };
    for (name, property) in &schema.properties {
        check_node(property, &path.child("properties").key(name), below, false, errors);
    }
    if let Some(items) = &schema.items {
        let below = if matches!(schema.list, List::Map(_)) { loose } else { loose.or(Some(path)) };
        check_node(items, &path.child("items"), below, false, errors);
    }
    for (index, rule) in schema.rules.iter().enumerate() {
        let path = path.child("x-kubernetes-validations").index(index);
        check_rule(rule, schema, is_root, &path, loose, errors);
    }
}

fn check_rule(
    rule: &Rule,
    schema: &Schema,
    is_root: bool,
    path: &Path,
    loose: Option<&Path>,
    errors: &mut FieldErrors,
) {
    let compiled = rule.compiled(schema, is_root);
    let rule_path = path.child("rule");
    if let Err(why) = &compiled.rule {
        errors.invalid(&rule_path, &*rule.text, why);
    }
    if let Some(Err(why)) = &compiled.message {
        errors.invalid(&path.child("messageExpression"), &*rule.message_expression, why);
    }
    let Ok(program) = &compiled.rule else { return };
    if !program.uses("oldSelf") {
        if let Some(optional) = rule.optional_old {
            let detail = "may not be set if oldSelf is not used in rule";
            errors.invalid(&path.child("optionalOldSelf"), optional, detail);
        }
    } else if let Some(within) = loose {
        let detail = format!(
            "oldSelf cannot be used on the uncorrelatable portion of the schema within {within}"
        );
        errors.invalid(&rule_path, &*rule.text, &detail);
    }
}
