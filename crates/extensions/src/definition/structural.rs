//! Checks that a schema is structural: that it gives the type of each field outside of `allOf`, `anyOf`,
//! `oneOf` and `not`.
//! Upstream: `apiserver/schema/{validation,complete}.go`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrBool,
};
use machinery::field::{FieldErrors, Path};

use super::schemas::{additional, is, items, kind};
use crate::schema::Pattern;

type Props = JSONSchemaProps;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Root,
    Item,
    Field,
}

/// Errors are sorted by their text, as upstream does.
pub fn check(schema: &Props, path: &Path) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_node(schema, Level::Root, path, &mut errors);
    check_complete(schema, Some(schema), path, path, &mut errors);
    errors.0.sort_by_key(ToString::to_string);
    errors
}

fn check_node(schema: &Props, level: Level, path: &Path, errors: &mut FieldErrors) {
    if kind(schema) == "array" && schema.items.is_none() {
        errors.required(&path.child("items"), "must be specified");
    }
    if let Some(items) = items(schema) {
        check_node(items, Level::Item, &path.child("items"), errors);
    }
    for (name, property) in schema.properties.iter().flatten() {
        check_node(property, Level::Field, &path.child("properties").key(name), errors);
    }
    if schema.additional_properties.is_some() {
        let path = path.child("additionalProperties");
        if level == Level::Root {
            errors.forbidden(&path, "must not be used at the root");
        }
        if let Some(inner) = additional(schema) {
            check_node(inner, Level::Field, &path, errors);
        }
    }
    check_extensions(schema, path, errors);
    let skip_any = is_either(schema.any_of.as_deref());
    let first = schema.all_of.as_ref().and_then(|all| all.first());
    let skip_first = first.is_some_and(|first| is_either(first.any_of.as_deref()));
    check_values(schema, skip_any, skip_first, path, errors);
    check_type(schema, level, path, errors);
    check_metadata(schema, level, path, errors);
}

/// `anyOf: [{type: integer}, {type: string}]`
fn is_either(any_of: Option<&[Props]>) -> bool {
    let only = |schema: &Props, kind: &str| {
        *schema == Props { type_: Some(kind.into()), ..Props::default() }
    };
    matches!(any_of, Some([a, b]) if only(a, "integer") && only(b, "string"))
}

fn check_extensions(schema: &Props, path: &Path, errors: &mut FieldErrors) {
    if !is(schema.x_kubernetes_int_or_string) {
        return;
    }
    let detail = "must be false if x-kubernetes-int-or-string is true";
    if is(schema.x_kubernetes_preserve_unknown_fields) {
        errors.invalid(&path.child("x-kubernetes-preserve-unknown-fields"), true, detail);
    }
    if is(schema.x_kubernetes_embedded_resource) {
        errors.invalid(&path.child("x-kubernetes-embedded-resource"), true, detail);
    }
}

fn check_type(schema: &Props, level: Level, path: &Path, errors: &mut FieldErrors) {
    let (kind, path_of_type) = (kind(schema), path.child("type"));
    let embedded = is(schema.x_kubernetes_embedded_resource);
    let free =
        is(schema.x_kubernetes_int_or_string) || is(schema.x_kubernetes_preserve_unknown_fields);
    if embedded && kind != "object" {
        let detail = "must be object if x-kubernetes-embedded-resource is true";
        match kind {
            "" => errors.required(&path_of_type, detail),
            kind => errors.invalid(&path_of_type, kind, detail),
        }
    } else if kind.is_empty() && !free {
        let detail = match level {
            Level::Root => "must not be empty at the root",
            Level::Item => "must not be empty for specified array items",
            Level::Field => "must not be empty for specified object fields",
        };
        errors.required(&path_of_type, detail);
    }
    if embedded && schema.additional_properties.is_some() {
        let detail = "must not be used if x-kubernetes-embedded-resource is set";
        errors.forbidden(&path.child("additionalProperties"), detail);
    }
    if level == Level::Root && !kind.is_empty() && kind != "object" {
        errors.invalid(&path_of_type, kind, "must be object at the root");
    }
    let has_properties = schema.properties.as_ref().is_some_and(|all| !all.is_empty());
    if embedded && !is(schema.x_kubernetes_preserve_unknown_fields) && !has_properties {
        let detail = "must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields";
        errors.required(&path.child("properties"), detail);
    }
}

fn check_metadata(schema: &Props, level: Level, path: &Path, errors: &mut FieldErrors) {
    let Some(properties) = &schema.properties else { return };
    let checks = level == Level::Root || is(schema.x_kubernetes_embedded_resource);
    let path = path.child("properties");
    for name in ["kind", "apiVersion"] {
        let wrong = properties.get(name).filter(|one| checks && kind(one) != "string");
        if let Some(property) = wrong {
            errors.invalid(&path.key(name).child("type"), kind(property), "must be string");
        }
    }
    let Some(metadata) = properties.get("metadata") else { return };
    if checks && kind(metadata) != "object" {
        let path = path.key("metadata").child("type");
        errors.invalid(&path, kind(metadata), "must be object");
    }
    if level != Level::Root {
        return;
    }
    let names = metadata.properties.iter().flatten();
    let only_names =
        names.clone().all(|(name, _)| matches!(name.as_str(), "name" | "generateName"));
    let bare = Props { type_: None, default: None, properties: None, ..metadata.clone() };
    if !only_names || bare != Props::default() {
        let detail = "must not specify anything other than name and generateName, but metadata is implicitly specified";
        errors.forbidden(&path.key("metadata"), detail);
    }
}

fn check_values(
    schema: &Props,
    skip_any: bool,
    skip_first: bool,
    path: &Path,
    errors: &mut FieldErrors,
) {
    for (index, one) in schema.any_of.iter().flatten().enumerate().filter(|_| !skip_any) {
        check_nested(one, false, &path.child("anyOf").index(index), errors);
    }
    for (index, one) in schema.all_of.iter().flatten().enumerate() {
        let skip = skip_first && index == 0;
        check_nested(one, skip, &path.child("allOf").index(index), errors);
    }
    for (index, one) in schema.one_of.iter().flatten().enumerate() {
        check_nested(one, false, &path.child("oneOf").index(index), errors);
    }
    if let Some(not) = &schema.not {
        check_nested(not, false, &path.child("not"), errors);
    }
    if let Some(pattern) = schema.pattern.as_deref().filter(|text| !text.is_empty())
        && let Err(why) = Pattern::check(pattern)
    {
        let detail = format!("must be a valid regular expression, but isn't: {why}");
        errors.invalid(&path.child("pattern"), pattern, &detail);
    }
}

/// Inside `allOf`, `anyOf`, `oneOf` and `not`, a schema restricts values. It does not describe them.
fn check_nested(schema: &Props, skip_any: bool, path: &Path, errors: &mut FieldErrors) {
    check_values(schema, skip_any, false, path, errors);
    if let Some(items) = items(schema) {
        check_nested(items, false, &path.child("items"), errors);
    }
    for (name, property) in schema.properties.iter().flatten() {
        check_nested(property, false, &path.child("properties").key(name), errors);
    }
    let filled = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    let has_keys = schema.x_kubernetes_list_map_keys.as_ref().is_some_and(|all| !all.is_empty());
    let has_rules = schema.x_kubernetes_validations.as_ref().is_some_and(|all| !all.is_empty());
    let says_more =
        !matches!(&schema.additional_properties, None | Some(JSONSchemaPropsOrBool::Bool(false)));
    let table = [
        (!kind(schema).is_empty(), "type", "must be empty"),
        (says_more, "additionalProperties", "must be undefined"),
        (schema.default.is_some(), "default", "must be undefined"),
        (filled(&schema.title), "title", "must be empty"),
        (filled(&schema.description), "description", "must be empty"),
        (is(schema.nullable), "nullable", "must be false"),
        (
            is(schema.x_kubernetes_preserve_unknown_fields),
            "x-kubernetes-preserve-unknown-fields",
            "must be false",
        ),
        (
            is(schema.x_kubernetes_embedded_resource),
            "x-kubernetes-embedded-resource",
            "must be false",
        ),
        (is(schema.x_kubernetes_int_or_string), "x-kubernetes-int-or-string", "must be false"),
        (has_keys, "x-kubernetes-list-map-keys", "must be empty"),
        (schema.x_kubernetes_list_type.is_some(), "x-kubernetes-list-type", "must be undefined"),
        (schema.x_kubernetes_map_type.is_some(), "x-kubernetes-map-type", "must be undefined"),
        (has_rules, "x-kubernetes-validations", "must be empty"),
    ];
    for (is_there, name, words) in table {
        if is_there {
            errors.forbidden(&path.child(name), &format!("{words} to be structural"));
        }
    }
    if schema.properties.as_ref().is_some_and(|all| all.contains_key("metadata")) {
        let path = path.child("properties").key("metadata");
        errors.forbidden(&path, "must not be specified in a nested context");
    }
}

/// Each restricted field must be described outside.
fn check_complete(
    values: &Props,
    described: Option<&Props>,
    path: &Path,
    value_path: &Path,
    errors: &mut FieldErrors,
) {
    let lists = [("allOf", &values.all_of), ("anyOf", &values.any_of), ("oneOf", &values.one_of)];
    if let Some(not) = &values.not {
        check_described(not, described, path, &value_path.child("not"), errors);
    }
    for (name, list) in lists {
        for (index, one) in list.iter().flatten().enumerate() {
            check_described(one, described, path, &value_path.child(name).index(index), errors);
        }
    }
}

fn check_described(
    values: &Props,
    described: Option<&Props>,
    path: &Path,
    value_path: &Path,
    errors: &mut FieldErrors,
) {
    let Some(known) = described else {
        return errors.required(path, &format!("because it is defined in {value_path}"));
    };
    check_complete(values, described, path, value_path, errors);
    if let Some(inner) = items(values) {
        let (path, value_path) = (path.child("items"), value_path.child("items"));
        check_described(inner, items(known), &path, &value_path, errors);
    }
    for (name, property) in values.properties.iter().flatten() {
        let below = |path: &Path| path.child("properties").key(name);
        let known = known.properties.as_ref().and_then(|all| all.get(name));
        check_described(property, known, &below(path), &below(value_path), errors);
    }
}
