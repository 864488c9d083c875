//! Checks that lists of type `set` and `map` have no duplicates. Upstream: `schema/listtype`.

use machinery::field::{FieldErrors, Path};
use serde_json::{Map, Value};

use super::{List, Schema};

pub fn check(fields: &Map<String, Value>, schema: &Schema) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_fields(fields, schema, &Path::default(), &mut errors);
    errors
}

fn check_fields(
    fields: &Map<String, Value>,
    schema: &Schema,
    path: &Path,
    errors: &mut FieldErrors,
) {
    for (name, value) in fields {
        if let Some(property) = schema.property(name) {
            check_value(value, property, &path.named(name), errors);
        } else if let Some(additional) = schema.field(name) {
            check_value(value, additional, &path.key(name), errors);
        }
    }
}

fn check_value(value: &Value, schema: &Schema, path: &Path, errors: &mut FieldErrors) {
    match value {
        Value::Object(fields) => check_fields(fields, schema, path, errors),
        Value::Array(items) => {
            match &schema.list {
                List::Atomic => {}
                List::Set => {
                    for index in repeated(items.iter()) {
                        errors.duplicate(&path.index(index), &items[index]);
                    }
                }
                List::Map(keys) => check_map(items, keys, path, errors),
            }
            let Some(schema) = &schema.items else { return };
            for (index, item) in items.iter().enumerate() {
                check_value(item, schema, &path.index(index), errors);
            }
        }
        _ => {}
    }
}

fn check_map(items: &[Value], keys: &[Box<str>], path: &Path, errors: &mut FieldErrors) {
    let misfit = items.iter().position(|item| !item.is_object() && !item.is_null());
    if let Some(index) = misfit {
        let detail = "must be an object for an array of list-type map";
        return errors.invalid(&path.index(index), &items[index], detail);
    }
    let of = |item: &Value| key(item, keys);
    let all: Vec<Value> = items.iter().map(of).collect();
    for index in repeated(all.iter()) {
        errors.duplicate(&path.index(index), &all[index]);
    }
}

/// The part of an element that identifies it: its keys, or the whole value of a set.
pub fn key(item: &Value, keys: &[Box<str>]) -> Value {
    let field = |key: &str| Some((key.to_owned(), item.get(key)?.clone()));
    Value::Object(keys.iter().filter_map(|key| field(key)).collect())
}

/// The indexes of duplicates.
fn repeated<'a>(values: impl Iterator<Item = &'a Value>) -> Vec<usize> {
    let mut seen = std::collections::HashMap::new();
    let mut repeated = vec![];
    for (index, value) in values.enumerate() {
        let times: &mut usize = seen.entry(value.to_string()).or_default();
        *times += 1;
        if *times == 2 {
            repeated.push(index);
        }
    }
    repeated
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::testing::schema;

    #[test]
    fn repeats_are_named_at_their_second_place() {
        let of = schema(json!({ "type": "object", "properties": {
            "set": { "type": "array", "x-kubernetes-list-type": "set", "items": { "type": "string" } },
            "map": { "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
                "items": { "type": "object", "properties": { "k": { "type": "string" } } } },
        }}));
        let given =
            json!({ "set": ["a", "b", "a", "a"], "map": [{ "k": "x" }, { "k": "x", "v": 1 }] });
        let errors = check(given.as_object().expect("an object"), &of);
        assert_eq!(
            errors.summary(),
            r#"[map[1]: Duplicate value: {"k":"x"}, set[2]: Duplicate value: "a"]"#
        );
    }
}
