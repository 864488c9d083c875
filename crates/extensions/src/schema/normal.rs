//! The stored form of objects: with defaults, without unknown fields and invalid nulls.
//!
//! In: the fields of an object (without apiVersion, kind and metadata at its root), a schema. Out:
//! the same object in normal form, and the paths of removed fields. A second pass changes
//! nothing. Upstream: `schema/{defaulting,pruning}`.

use serde_json::{Map, Value};

use super::{Additional, Schema};

type Fields = Map<String, Value>;

/// Applies defaults, prunes, then removes nulls. Returns the sorted paths of unknown fields.
pub fn normalize(fields: &mut Fields, schema: &Schema) -> Vec<String> {
    default_fields(fields, schema);
    let mut pruning = Pruning::default();
    pruning.fields(fields, schema, true);
    drop_nulls(fields, Some(schema));
    pruning.unknown.sort_unstable();
    pruning.unknown
}

/// Reports whether pruning leaves this default unchanged.
pub fn is_pruned(value: &Value, schema: &Schema) -> bool {
    let mut pruned = value.clone();
    let mut pruning = Pruning::default();
    pruning.value(&mut pruned, Some(schema));
    pruned == *value
}

fn is_impossible_null(value: &Value, schema: &Schema) -> bool {
    value.is_null() && !schema.nullable
}

fn default_value(value: &mut Value, schema: &Schema) {
    match value {
        Value::Object(fields) => default_fields(fields, schema),
        Value::Array(items) => {
            let Some(schema) = &schema.items else { return };
            for item in items {
                default_in_place(item, schema);
            }
        }
        _ => {}
    }
}

fn default_in_place(value: &mut Value, schema: &Schema) {
    if is_impossible_null(value, schema)
        && let Some(default) = &schema.default
    {
        *value = (**default).clone();
    }
    default_value(value, schema);
}

fn default_fields(fields: &mut Fields, schema: &Schema) {
    for (name, property) in &schema.properties {
        let Some(default) = &property.default else { continue };
        if fields.get(&**name).is_none_or(|value| is_impossible_null(value, property)) {
            fields.insert(name.to_string(), (**default).clone());
        }
    }
    for (name, value) in fields.iter_mut() {
        if let Some(property) = schema.property(name) {
            default_value(value, property);
        } else if let Additional::Schema(additional) = &schema.additional {
            default_in_place(value, additional);
        }
    }
}

#[derive(Default)]
struct Pruning {
    path: Vec<String>,
    unknown: Vec<String>,
}

fn is_meta(name: &str) -> bool {
    matches!(name, "apiVersion" | "kind" | "metadata")
}

impl Pruning {
    fn value(&mut self, value: &mut Value, schema: Option<&Schema>) {
        match (value, schema) {
            (Value::Object(fields), Some(schema)) => self.fields(fields, schema, schema.embedded),
            (Value::Object(fields), None) => {
                for name in fields.keys() {
                    let path = self.child(name);
                    self.unknown.push(path);
                }
                fields.clear();
            }
            (Value::Array(items), schema) => {
                if let Some(schema) = schema.filter(|schema| schema.preserves) {
                    return self.items(items, schema, true);
                }
                for (index, item) in items.iter_mut().enumerate() {
                    self.path.push(format!("[{index}]"));
                    self.value(item, schema.and_then(|schema| schema.items.as_deref()));
                    self.path.pop();
                }
            }
            _ => {}
        }
    }

    fn items(&mut self, items: &mut [Value], schema: &Schema, preserves: bool) {
        let Some(inner) = &schema.items else { return };
        for (index, item) in items.iter_mut().enumerate() {
            self.path.push(format!("[{index}]"));
            match item {
                Value::Object(fields) if preserves => self.kept_fields(fields, inner),
                Value::Array(items) if preserves => self.items(items, inner, true),
                item => self.value(item, Some(inner)),
            }
            self.path.pop();
        }
    }

    fn fields(&mut self, fields: &mut Fields, schema: &Schema, embedded: bool) {
        if schema.preserves {
            return self.kept_fields(fields, schema);
        }
        let mut gone = vec![];
        for (name, value) in fields.iter_mut() {
            if embedded && is_meta(name) {
                continue;
            }
            if let Some(property) = schema.property(name) {
                self.path.push(name.clone());
                self.value(value, Some(property));
                self.path.pop();
                continue;
            }
            match &schema.additional {
                Additional::Unsaid => gone.push(name.clone()),
                Additional::Schema(additional) => {
                    self.path.push(name.clone());
                    self.value(value, Some(additional));
                    self.path.pop();
                }
                Additional::Allowed | Additional::Forbidden => {
                    self.path.push(name.clone());
                    self.value(value, None);
                    self.path.pop();
                }
            }
        }
        for name in gone {
            let path = self.child(&name);
            self.unknown.push(path);
            fields.remove(&name);
        }
    }

    /// Undescribed fields stay. Described fields are pruned inside.
    fn kept_fields(&mut self, fields: &mut Fields, schema: &Schema) {
        for (name, value) in fields.iter_mut() {
            if schema.embedded && is_meta(name) {
                continue;
            }
            let inner = match (schema.property(name), &schema.additional) {
                (Some(property), _) => Some(property),
                (None, Additional::Schema(additional)) => Some(&**additional),
                (None, Additional::Unsaid) => continue,
                _ => None,
            };
            self.path.push(name.clone());
            self.value(value, inner);
            self.path.pop();
        }
    }

    fn child(&self, name: &str) -> String {
        let mut text = String::new();
        for part in self.path.iter().map(String::as_str).chain([name]) {
            if !text.is_empty() && !part.starts_with('[') {
                text.push('.');
            }
            text.push_str(part);
        }
        text
    }
}

/// Removes nulls of fields that are not nullable and have no default.
fn drop_nulls(fields: &mut Fields, schema: Option<&Schema>) {
    let schema_of = |name: &str| schema.and_then(|schema| schema.field(name));
    fields.retain(|name, value| {
        !schema_of(name).is_some_and(|one| is_impossible_null(value, one) && one.default.is_none())
    });
    for (name, value) in fields.iter_mut() {
        drop_nulls_inside(value, schema.and_then(|schema| schema.field(name)));
    }
}

fn drop_nulls_inside(value: &mut Value, schema: Option<&Schema>) {
    match value {
        Value::Object(fields) => drop_nulls(fields, schema),
        Value::Array(items) => {
            let inner = schema.and_then(|schema| schema.items.as_deref());
            items.iter_mut().for_each(|item| drop_nulls_inside(item, inner));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::testing::schema;

    #[test]
    fn normal_form() {
        let text = json!({ "type": "string" });
        let check = |of: Value, given: Value, expected: Value, unknown: &[&str]| {
            let schema = schema(of);
            let Value::Object(mut fields) = given.clone() else { panic!("an object") };
            assert_eq!(normalize(&mut fields, &schema), unknown, "{given}");
            assert_eq!(Value::Object(fields.clone()), expected, "{given}");
            assert!(normalize(&mut fields, &schema).is_empty());
            assert_eq!(Value::Object(fields), expected, "twice: {given}");
        };
        let spec = |inner: Value| json!({ "type": "object", "properties": { "spec": inner } });
        check(
            spec(json!({ "type": "object", "properties": {
                "a": { "type": "string", "default": "x" }, "b": text } })),
            json!({ "spec": { "b": null, "c": 1 }, "other": {} }),
            json!({ "spec": { "a": "x" } }),
            &["other", "spec.c"],
        );
        check(
            spec(json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true,
                "properties": { "known": { "type": "object", "properties": { "a": text } } } })),
            json!({ "spec": { "free": { "any": 1 }, "known": { "a": "b", "c": 1 } } }),
            json!({ "spec": { "free": { "any": 1 }, "known": { "a": "b" } } }),
            &["spec.known.c"],
        );
        check(
            spec(
                json!({ "type": "array", "items": { "type": "object", "properties": { "a": text } } }),
            ),
            json!({ "spec": [{ "a": "b", "c": 1 }, {}] }),
            json!({ "spec": [{ "a": "b" }, {}] }),
            &["spec[0].c"],
        );
        check(
            spec(json!({ "type": "object", "x-kubernetes-embedded-resource": true,
                "properties": { "spec": { "type": "object" } } })),
            json!({ "spec": { "kind": "Pod", "apiVersion": "v1", "metadata": { "name": "a" }, "x": 1 } }),
            json!({ "spec": { "kind": "Pod", "apiVersion": "v1", "metadata": { "name": "a" } } }),
            &["spec.x"],
        );
        check(
            spec(
                json!({ "type": "object", "additionalProperties": { "type": "string", "nullable": true } }),
            ),
            json!({ "spec": { "a": null, "b": "c" } }),
            json!({ "spec": { "a": null, "b": "c" } }),
            &[],
        );
        check(
            spec(json!({ "type": "string", "nullable": true, "default": "x" })),
            json!({ "spec": null }),
            json!({ "spec": null }),
            &[],
        );
    }
}
