//! Whole objects in custom resources (`x-kubernetes-embedded-resource`). Their apiVersion, kind and
//! metadata are validated like those of any object. Upstream: `schema/objectmeta`.

use machinery::ObjectMeta;
use machinery::field::{FieldErrors, Path};
use machinery::names;
use serde_json::{Map, Value};

use super::{Additional, Schema};

/// Removes unknown fields of embedded metadata and returns their paths. Malformed metadata is an error.
pub fn coerce(
    fields: &mut Map<String, Value>,
    schema: &Schema,
    unknown: &mut Vec<String>,
) -> Result<(), String> {
    coerce_fields(fields, schema, &Path::default(), unknown)
}

fn coerce_fields(
    fields: &mut Map<String, Value>,
    schema: &Schema,
    path: &Path,
    unknown: &mut Vec<String>,
) -> Result<(), String> {
    for (name, value) in fields.iter_mut() {
        let (inner, path) = match (schema.property(name), &schema.additional) {
            (Some(property), _) => (property, path.named(name)),
            (None, Additional::Schema(additional)) => (&**additional, path.key(name)),
            _ => continue,
        };
        coerce_value(value, inner, &path, unknown)?;
    }
    Ok(())
}

fn coerce_value(
    value: &mut Value,
    schema: &Schema,
    path: &Path,
    unknown: &mut Vec<String>,
) -> Result<(), String> {
    match value {
        Value::Object(fields) => {
            if schema.embedded {
                coerce_head(fields, path, unknown)?;
            }
            coerce_fields(fields, schema, path, unknown)
        }
        Value::Array(items) => {
            let Some(schema) = &schema.items else { return Ok(()) };
            for (index, item) in items.iter_mut().enumerate() {
                coerce_value(item, schema, &path.index(index), unknown)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

fn coerce_head(
    fields: &mut Map<String, Value>,
    path: &Path,
    unknown: &mut Vec<String>,
) -> Result<(), String> {
    for name in ["apiVersion", "kind"] {
        if let Some(value) = fields.get(name).filter(|value| !value.is_string()) {
            return Err(format!("{}: Invalid value: {value}: must be a string", path.child(name)));
        }
    }
    let Some(given) = fields.get("metadata") else { return Ok(()) };
    let path = path.child("metadata");
    let (meta, strange) =
        metadata(given).map_err(|why| format!("{path}: Invalid value: {given}: {why}"))?;
    if !strange.is_empty() {
        unknown.extend(strange.iter().map(|field| format!("{path}.{field}")));
        let json = serde_json::to_value(&meta).expect("metadata has string keys");
        fields.insert("metadata".into(), json);
    }
    Ok(())
}

/// The metadata, and the paths of unknown fields.
pub fn metadata(json: &Value) -> Result<(ObjectMeta, Vec<String>), String> {
    let mut unknown = vec![];
    let note = |path: serde_ignored::Path<'_>| unknown.push(path.to_string());
    match serde_ignored::deserialize::<_, _, ObjectMeta>(json, note) {
        Ok(meta) => Ok((meta, unknown)),
        Err(error) => Err(error.to_string()),
    }
}

/// The errors in apiVersion, kind and metadata of embedded objects.
pub fn check(fields: &Map<String, Value>, schema: &Schema) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_fields(fields, schema, &Path::default(), &mut errors);
    errors
}

/// The same for a default value, which may itself be an embedded object.
pub fn check_value(value: &Value, schema: &Schema, path: &Path, errors: &mut FieldErrors) {
    match value {
        Value::Object(fields) => {
            if schema.embedded {
                check_head(fields, path, errors);
            }
            check_fields(fields, schema, path, errors);
        }
        Value::Array(items) => {
            let Some(schema) = &schema.items else { return };
            for (index, item) in items.iter().enumerate() {
                check_value(item, schema, &path.index(index), errors);
            }
        }
        _ => {}
    }
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

fn check_head(fields: &Map<String, Value>, path: &Path, errors: &mut FieldErrors) {
    for name in ["apiVersion", "kind"] {
        let path = path.child(name);
        match fields.get(name) {
            None => errors.required(&path, ""),
            Some(Value::String(text)) if text.is_empty() => {
                errors.invalid(&path, text, "must not be empty");
            }
            Some(Value::String(text)) if name == "kind" => {
                let wrong = names::dns1035_label(&text.to_lowercase());
                if !wrong.is_empty() {
                    let detail = "may have mixed case, but should otherwise match: ";
                    errors.invalid(&path, text, &format!("{detail}{}", wrong.join(",")));
                }
            }
            Some(Value::String(text)) => {
                if text.matches('/').count() > 1 {
                    let detail = format!("unexpected GroupVersion string: {text}");
                    errors.invalid(&path, text, &detail);
                }
            }
            Some(other) => errors.invalid(&path, other, "must be a string"),
        }
    }
    let Some(given) = fields.get("metadata") else { return };
    let path = path.child("metadata");
    match metadata(given) {
        Err(why) => errors.invalid(&path, given, &why),
        Ok((meta, _)) => check_metadata(&meta, &path, errors),
    }
}

fn check_metadata(meta: &ObjectMeta, path: &Path, errors: &mut FieldErrors) {
    for why in names::path_segment(meta.name.as_deref().unwrap_or_default()) {
        errors.invalid(&path.child("name"), &meta.name, &why);
    }
    if let Some(namespace) = meta.namespace.as_deref().filter(|name| !name.is_empty()) {
        for why in names::dns1123_label(namespace) {
            errors.invalid(&path.child("namespace"), namespace, &why);
        }
    }
    let labels = path.child("labels");
    for (key, value) in meta.labels.iter().flatten() {
        names::qualified_name(key).iter().for_each(|why| errors.invalid(&labels, key, why));
        names::label_value(value).iter().for_each(|why| errors.invalid(&labels, value, why));
    }
    for key in meta.annotations.iter().flatten().map(|(key, _)| key) {
        for why in names::qualified_name(&key.to_lowercase()) {
            errors.invalid(&path.child("annotations"), key, &why);
        }
    }
}
