//! Validates the defaults of a schema. Upstream: `schema/defaulting.ValidateDefaults`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSONSchemaProps;
use machinery::field::{FieldErrors, Path};

use super::schemas;
use crate::schema::{Schema, embedded, normal, rules, validate};

pub fn check(schema: &JSONSchemaProps, path: &Path) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_node(schema, path, false, &mut errors);
    errors
}

fn check_node(schema: &JSONSchemaProps, path: &Path, inside_meta: bool, errors: &mut FieldErrors) {
    let is_embedded = schemas::is(schema.x_kubernetes_embedded_resource);
    if let Some(default) = &schema.default {
        let (known, path) = (Schema::new(schema), path.child("default"));
        if !inside_meta && !normal::is_pruned(&default.0, &known) {
            errors.invalid(&path, &default.0, "must not have unknown fields");
        }
        let mut found = FieldErrors::default();
        embedded::check_value(&default.0, &known, &path, &mut found);
        if found.is_empty() {
            found = validate::validate(&default.0, None, &known, &path.to_string());
        }
        if found.is_empty() {
            found = rules::check_default(&default.0, &known, &path);
        }
        errors.append(found);
    }
    if let Some(items) = schemas::items(schema) {
        check_node(items, &path.child("items"), inside_meta, errors);
    }
    for (name, property) in schema.properties.iter().flatten() {
        let is_meta = matches!(name.as_str(), "metadata" | "apiVersion" | "kind");
        let inside = (inside_meta && !is_embedded) || (is_embedded && is_meta);
        check_node(property, &path.child("properties").key(name), inside, errors);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn defaults_follow_the_rules_of_their_schema() {
        let check = |default: Value, rule: Value, expected: &str| {
            let schema = json!({ "type": "object", "properties": { "n": { "type": "integer",
                "default": default, "x-kubernetes-validations": [rule] } } });
            let schema: JSONSchemaProps = serde_json::from_value(schema).expect("a schema");
            assert_eq!(super::check(&schema, &Path::new("s")).summary(), expected);
        };
        check(json!(5), json!({ "rule": "self > 4" }), "[]");
        check(
            json!(5),
            json!({ "rule": "self > 5", "messageExpression": "string(self) + '!'" }),
            "s.properties[n].default: Invalid value: 5: 5!",
        );
        check(
            json!(5),
            json!({ "rule": "self > oldSelf" }),
            "s.properties[n].default: Invalid value: 5: failed rule: self > oldSelf",
        );
    }
}
