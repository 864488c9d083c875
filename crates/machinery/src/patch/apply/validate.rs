//! Does a configuration fit its type? In upstream's words: clients read them.

use std::collections::BTreeSet;

use serde_json::Value;

use super::path::Element;
use super::types::{Atom, Elements, ListType, Scalar, Type};
use super::walk::element_of;

/// All errors in one text; `None` if there are none.
pub fn misfit(value: &Value, of: &Type) -> Option<String> {
    let mut errors = vec![];
    validate(value, of, "", &mut errors);
    match &errors[..] {
        [] => None,
        [one] => Some(one.clone()),
        many => {
            let lines: Vec<String> = many.iter().map(|one| format!("\n  {one}")).collect();
            Some(format!("errors:{}", lines.concat()))
        }
    }
}

fn validate(value: &Value, of: &Type, path: &str, errors: &mut Vec<String>) {
    let mut wrong = |path: &str, why: String| {
        errors.push(if path.is_empty() { why } else { format!("{path}: {why}") });
    };
    match (of.atom(Some(value)), value) {
        (_, Value::Null) => {}
        (Atom::Nothing, _) => wrong(path, "schema error: invalid atom: inlined".into()),
        (Atom::Scalar(scalar), _) => {
            if let Some(why) = scalar_misfit(scalar, value) {
                wrong(path, why);
            }
        }
        (Atom::List(list), Value::Array(items)) => validate_list(items, list, path, errors),
        (Atom::List(_), _) => wrong(path, format!("expected list, got &{{{}}}", go_plain(value))),
        (Atom::Map(map), Value::Object(fields)) => {
            for (name, value) in fields {
                let path = format!("{path}.{name}");
                match map.field(name) {
                    Some(of) => validate(value, of, &path, errors),
                    None => {
                        errors.push(format!("{path}: field not declared in schema"));
                        break;
                    }
                }
            }
        }
        (Atom::Map(_), _) => wrong(path, format!("expected map, got &{{{}}}", go_plain(value))),
    }
}

fn validate_list(items: &[Value], list: &ListType, path: &str, errors: &mut Vec<String>) {
    let mut seen: BTreeSet<Element> = BTreeSet::new();
    for (at, item) in items.iter().enumerate() {
        let element = if list.elements == Elements::Atomic {
            Element::Index(at as i64)
        } else {
            match element_of(item, list) {
                Ok(element) => element,
                Err(why) => return errors.push(format!("{path}: element {at}: {why}")),
            }
        };
        if seen.contains(&element) {
            errors.push(format!("{path}: duplicate entries for key {element}"));
        }
        validate(item, list.element.get(), &format!("{path}{element}"), errors);
        if list.elements != Elements::Atomic {
            seen.insert(element);
        }
    }
}

fn scalar_misfit(scalar: Scalar, value: &Value) -> Option<String> {
    let is_scalar = !(value.is_array() || value.is_object());
    match scalar {
        Scalar::Numeric if !value.is_number() => {
            Some(format!("expected numeric (int or float), got {}", go_type(value)))
        }
        Scalar::String if !value.is_string() => Some(format!(
            "expected string, got &value.valueUnstructured{{Value:{}}}",
            go_syntax(value)
        )),
        Scalar::Boolean if !value.is_boolean() => {
            Some(format!("expected boolean, got &{{{}}}", go_plain(value)))
        }
        Scalar::Untyped if !is_scalar => {
            Some(format!("expected any scalar, got &{{{}}}", go_plain(value)))
        }
        _ => None,
    }
}

/// Go's `%T` of a decoded value.
fn go_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "<nil>",
        Value::Bool(_) => "bool",
        Value::Number(_) => "float64",
        Value::String(_) => "string",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
    }
}

/// Go's `%#v`.
fn go_syntax(value: &Value) -> String {
    let list = |items: Vec<String>| items.join(", ");
    match value {
        Value::Null => "interface {}(nil)".into(),
        Value::Array(items) => {
            format!("[]interface {{}}{{{}}}", list(items.iter().map(go_syntax).collect()))
        }
        Value::Object(fields) => {
            let fields =
                fields.iter().map(|(name, value)| format!("{name:?}:{}", go_syntax(value)));
            format!("map[string]interface {{}}{{{}}}", list(fields.collect()))
        }
        Value::String(text) => format!("{text:?}"),
        other => other.to_string(),
    }
}

/// Go's `%v`.
fn go_plain(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".into(),
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(go_plain).collect();
            format!("[{}]", items.join(" "))
        }
        Value::Object(fields) => {
            let fields: Vec<String> =
                fields.iter().map(|(name, value)| format!("{name}:{}", go_plain(value))).collect();
            format!("map[{}]", fields.join(" "))
        }
        other => other.to_string(),
    }
}
