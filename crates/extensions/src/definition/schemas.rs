//! Validates the schema of a version except its structure: unsupported keywords, list and map types,
//! the fields of rules.
//! Upstream: `ValidateCustomResourceDefinitionOpenAPISchema`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool, ValidationRule,
};
use machinery::field::{FieldErrors, Path};

use super::selectable;

type Props = JSONSchemaProps;

const TYPES: &[&str] = &["array", "boolean", "integer", "number", "object", "string"];
const REASONS: &[&str] =
    &["FieldValueDuplicate", "FieldValueForbidden", "FieldValueInvalid", "FieldValueRequired"];

/// Reports whether any node passes `test`.
pub fn any(schema: &Props, test: &mut dyn FnMut(&Props) -> bool) -> bool {
    if test(schema) {
        return true;
    }
    let lists = [&schema.all_of, &schema.any_of, &schema.one_of];
    let mut found = lists.into_iter().flatten().flatten().any(|one| any(one, test));
    found = found || schema.properties.iter().flatten().any(|(_, one)| any(one, test));
    found = found || schema.not.as_ref().is_some_and(|one| any(one, test));
    found = found || additional(schema).is_some_and(|one| any(one, test));
    found || items(schema).is_some_and(|one| any(one, test))
}

pub fn items(schema: &Props) -> Option<&Props> {
    match &schema.items {
        Some(JSONSchemaPropsOrArray::Schema(schema)) => Some(schema),
        _ => None,
    }
}

pub fn additional(schema: &Props) -> Option<&Props> {
    match &schema.additional_properties {
        Some(JSONSchemaPropsOrBool::Schema(schema)) => Some(schema),
        _ => None,
    }
}

pub fn kind(schema: &Props) -> &str {
    schema.type_.as_deref().unwrap_or_default()
}

pub fn is(flag: Option<bool>) -> bool {
    flag == Some(true)
}

/// The restrictions of a node by its parents.
#[derive(Clone, Default)]
struct Place {
    /// The reason why defaults are forbidden here.
    no_defaults: Option<String>,
    inside_metadata: bool,
}

pub fn check(schema: &Props, path: &Path) -> FieldErrors {
    let mut errors = FieldErrors::default();
    check_node(schema, path, &Place::default(), true, &mut errors);
    errors
}

fn check_node(schema: &Props, path: &Path, place: &Place, is_root: bool, errors: &mut FieldErrors) {
    check_keywords(schema, path, place, errors);
    if is(schema.unique_items) {
        let detail =
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic";
        errors.forbidden(&path.child("uniqueItems"), detail);
    }
    check_additional(schema, path, place, errors);
    for (name, property) in schema.properties.iter().flatten() {
        let mut place = place.clone();
        let is_meta = matches!(name.as_str(), "metadata" | "kind" | "apiVersion");
        if is_meta && (is_root || is(schema.x_kubernetes_embedded_resource)) {
            place.inside_metadata = true;
            if is_root {
                place.no_defaults = Some(format!("in top-level {name}"));
            }
        }
        check_node(property, &path.child("properties").key(name), &place, false, errors);
    }
    if let Some(not) = &schema.not {
        check_node(not, &path.child("not"), place, false, errors);
    }
    let lists = [("allOf", &schema.all_of), ("oneOf", &schema.one_of), ("anyOf", &schema.any_of)];
    for (name, list) in lists {
        for (index, one) in list.iter().flatten().enumerate() {
            check_node(one, &path.child(name).index(index), place, false, errors);
        }
    }
    if let Some(items) = items(schema) {
        check_node(items, &path.child("items"), place, false, errors);
    }
    if schema.x_kubernetes_preserve_unknown_fields == Some(false) {
        let path = path.child("x-kubernetes-preserve-unknown-fields");
        errors.invalid(&path, false, "must be true or undefined");
    }
    check_map_type(schema, path, errors);
    check_list_type(schema, path, errors);
    check_list_keys(schema, path, errors);
    check_list_items(schema, path, errors);
    for (index, rule) in schema.x_kubernetes_validations.iter().flatten().enumerate() {
        let path = path.child("x-kubernetes-validations").index(index);
        check_rule(schema, rule, &path, errors);
    }
}

/// Whether a field is set that custom resources do not support. An empty `$ref` is an error, but not here.
pub fn has_unsupported(schema: &Props) -> bool {
    let has = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    has(&schema.id)
        || has(&schema.schema)
        || has(&schema.ref_path)
        || schema.pattern_properties.as_ref().is_some_and(|all| !all.is_empty())
        || schema.dependencies.as_ref().is_some_and(|all| !all.is_empty())
        || schema.additional_items.is_some()
        || schema.definitions.as_ref().is_some_and(|all| !all.is_empty())
}

fn check_keywords(schema: &Props, path: &Path, place: &Place, errors: &mut FieldErrors) {
    let kind = kind(schema);
    if !kind.is_empty() && !TYPES.contains(&kind) {
        errors.not_supported(&path.child("type"), kind, TYPES);
    }
    if let Some(why) = place.no_defaults.as_ref().filter(|_| schema.default.is_some()) {
        errors.forbidden(&path.child("default"), &format!("must not be set {why}"));
    }
    let has = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
    let filled = |is: bool, name: &str, errors: &mut FieldErrors| {
        if is {
            errors.forbidden(&path.named(name), &format!("{name} is not supported"));
        }
    };
    filled(has(&schema.id), "id", errors);
    filled(schema.additional_items.is_some(), "additionalItems", errors);
    let patterns = schema.pattern_properties.as_ref();
    filled(patterns.is_some_and(|all| !all.is_empty()), "patternProperties", errors);
    let definitions = schema.definitions.as_ref();
    filled(definitions.is_some_and(|all| !all.is_empty()), "definitions", errors);
    filled(schema.dependencies.is_some(), "dependencies", errors);
    filled(schema.ref_path.is_some(), "$ref", errors);
    if kind == "null" {
        let detail = "type cannot be set to null, use nullable as an alternative";
        errors.forbidden(&path.child("type"), detail);
    }
    if matches!(&schema.items, Some(JSONSchemaPropsOrArray::Schemas(all)) if !all.is_empty()) {
        errors.forbidden(&path.child("items"), "items must be a schema object and not an array");
    }
    if place.inside_metadata && is(schema.x_kubernetes_embedded_resource) {
        let path = path.child("x-kubernetes-embedded-resource");
        errors.forbidden(&path, "must not be used inside of resource meta");
    }
}

fn check_additional(schema: &Props, path: &Path, place: &Place, errors: &mut FieldErrors) {
    let Some(said) = &schema.additional_properties else { return };
    let has_properties = schema.properties.as_ref().is_some_and(|all| !all.is_empty());
    if has_properties && !matches!(said, JSONSchemaPropsOrBool::Bool(true)) {
        let detail = "additionalProperties and properties are mutual exclusive";
        errors.forbidden(&path.child("additionalProperties"), detail);
    }
    let Some(inner) = additional(schema) else { return };
    let mut place = place.clone();
    if place.inside_metadata {
        let why = "inside additionalProperties applying to object metadata";
        place.no_defaults = Some(why.into());
    }
    check_node(inner, &path.child("additionalProperties"), &place, false, errors);
}

/// A keyword that applies to one type only.
fn check_host(
    schema: &Props,
    wanted: &str,
    keyword: &str,
    path: &Path,
    errors: &mut FieldErrors,
) -> bool {
    let kind = kind(schema);
    if kind == wanted {
        return true;
    }
    let detail = format!("must be {wanted} if {keyword} is specified");
    match kind {
        "" => errors.required(&path.child("type"), &detail),
        kind => errors.invalid(&path.child("type"), kind, &detail),
    }
    false
}

fn check_map_type(schema: &Props, path: &Path, errors: &mut FieldErrors) {
    const KEYWORD: &str = "x-kubernetes-map-type";
    let Some(map_type) = schema.x_kubernetes_map_type.as_deref() else { return };
    check_host(schema, "object", KEYWORD, path, errors);
    if !matches!(map_type, "atomic" | "granular") {
        errors.not_supported(&path.child(KEYWORD), map_type, &["atomic", "granular"]);
    }
}

fn check_list_type(schema: &Props, path: &Path, errors: &mut FieldErrors) {
    const KEYWORD: &str = "x-kubernetes-list-type";
    let Some(list_type) = schema.x_kubernetes_list_type.as_deref() else { return };
    let fits = check_host(schema, "array", KEYWORD, path, errors);
    if let Some(inner) = items(schema).filter(|_| fits && list_type == "set") {
        let path = path.child("items");
        let detail = "must be atomic as item of a list with x-kubernetes-list-type=set";
        let inner_list = inner.x_kubernetes_list_type.as_deref();
        match kind(inner) {
            "array" if inner_list.is_some_and(|one| one != "atomic") => {
                errors.invalid(&path.child(KEYWORD), inner_list, detail);
            }
            "object" if inner.x_kubernetes_map_type.as_deref() != Some("atomic") => {
                errors.invalid(&path.child("x-kubernetes-map-type"), inner_list, detail);
            }
            _ => {}
        }
    }
    if !matches!(list_type, "atomic" | "set" | "map") {
        errors.not_supported(&path.child(KEYWORD), list_type, &["atomic", "set", "map"]);
    }
}

fn check_list_keys(schema: &Props, path: &Path, errors: &mut FieldErrors) {
    let keys = schema.x_kubernetes_list_map_keys.as_deref().unwrap_or_default();
    let list_type = schema.x_kubernetes_list_type.as_deref();
    if !keys.is_empty() && list_type != Some("map") {
        let (path, detail) = (
            path.child("x-kubernetes-list-type"),
            "must be map if x-kubernetes-list-map-keys is non-empty",
        );
        match list_type {
            None => errors.required(&path, detail),
            Some(other) => errors.invalid(&path, other, detail),
        }
    }
    if list_type != Some("map") {
        return;
    }
    let keys_path = path.child("x-kubernetes-list-map-keys");
    if keys.is_empty() {
        errors.required(&keys_path, "must not be empty if x-kubernetes-list-type is map");
    }
    let Some(inner) = items(schema) else {
        let detail = "must have a schema if x-kubernetes-list-type is map";
        return errors.required(&path.child("items"), detail);
    };
    if kind(inner) != "object" {
        let detail = "must be object if parent array's x-kubernetes-list-type is map";
        return errors.invalid(&path.child("items").child("type"), kind(inner), detail);
    }
    for (index, key) in keys.iter().enumerate() {
        match inner.properties.as_ref().and_then(|properties| properties.get(key)) {
            None => {
                errors.invalid(&keys_path, keys, "entries must all be names of item properties");
            }
            Some(property) if matches!(kind(property), "array" | "object") => {
                let path = path.child("items").child("properties").key(key).child("type");
                let detail =
                    "must be a scalar type if parent array's x-kubernetes-list-type is map";
                errors.invalid(&path, kind(inner), detail);
            }
            _ => {}
        }
        if keys[..index].contains(key) {
            errors.invalid(&keys_path, keys, "must not contain duplicate entries");
        }
    }
}

fn check_list_items(schema: &Props, path: &Path, errors: &mut FieldErrors) {
    let list_type = schema.x_kubernetes_list_type.as_deref().unwrap_or_default();
    let Some(inner) = items(schema).filter(|_| matches!(list_type, "set" | "map")) else { return };
    let path = path.child("items");
    if is(inner.nullable) {
        let detail = format!("cannot be nullable when x-kubernetes-list-type is {list_type}");
        errors.forbidden(&path.child("nullable"), &detail);
    }
    if list_type != "map" {
        return;
    }
    for key in schema.x_kubernetes_list_map_keys.iter().flatten() {
        let Some(property) = inner.properties.as_ref().and_then(|all| all.get(key)) else {
            continue;
        };
        let path = path.child("properties").key(key);
        let is_required = inner.required.iter().flatten().any(|one| one == key);
        if !is_required && property.default.is_none() {
            let detail = "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property";
            errors.required(&path.child("default"), detail);
        }
        if is(property.nullable) {
            let detail = "this property is in x-kubernetes-list-map-keys, so it cannot be nullable";
            errors.forbidden(&path.child("nullable"), detail);
        }
    }
}

fn check_rule(schema: &Props, rule: &ValidationRule, path: &Path, errors: &mut FieldErrors) {
    let text = |given: &Option<String>| given.clone().unwrap_or_default();
    let (message, expression, field) =
        (text(&rule.message), text(&rule.message_expression), text(&rule.field_path));
    let breaks = |text: &str| text.contains(['\n', '\r']);
    if rule.rule.trim().is_empty() {
        errors.required(&path.child("rule"), "rule is not specified");
    } else if !message.is_empty() && message.trim().is_empty() {
        errors.invalid(&path.child("message"), &message, "must be non-empty if specified");
    } else if breaks(message.trim()) {
        errors.invalid(&path.child("message"), &message, "must not contain line breaks");
    } else if breaks(rule.rule.trim()) && message.trim().is_empty() {
        let detail = "message must be specified if rule contains line breaks";
        errors.required(&path.child("message"), detail);
    }
    if !expression.is_empty() && expression.trim().is_empty() {
        let detail = "messageExpression must be non-empty if specified";
        errors.required(&path.child("messageExpression"), detail);
    }
    if let Some(reason) = rule.reason.as_deref().filter(|reason| !REASONS.contains(reason)) {
        errors.not_supported(&path.child("reason"), reason, REASONS);
    }
    if field.is_empty() {
        return;
    }
    let path = path.child("fieldPath");
    if field.trim().is_empty() {
        errors.invalid(&path, &field, "must be non-empty if specified");
    }
    if breaks(&field) {
        errors.invalid(&path, &field, "must not contain line breaks");
    }
    if selectable::resolve(&field, schema, true).is_err() {
        errors.invalid(&path, &field, "must be a valid path");
    }
}
