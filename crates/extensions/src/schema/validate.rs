//! Validates values against schemas, with upstream's messages.
//!
//! In: a value, the schema, and for an update the old value. Out: errors in upstream's order and
//! wording. Unchanged values are not refused (upstream: ratcheting): errors below a node with
//! an unchanged value are dropped.
//!
//! The errors of `anyOf` and `oneOf` come from the alternative with the most passed checks.
//! [`Outcome::fits`] counts the passed checks.
//! Upstream: `kube-openapi/pkg/validation/validate`, `apiextensions-apiserver/pkg/apiserver/validation`.

use machinery::field::{FieldError, FieldErrors};
use serde_json::{Map, Number, Value};

use super::{Additional, Checks, Kind, List, Schema, formats, lists};

/// The errors of `value`. `base` is its path, empty for a whole object.
pub fn validate(value: &Value, old: Option<&Value>, schema: &Schema, base: &str) -> FieldErrors {
    let outcome = check(value, old, schema, "");
    let errors = outcome.errors.into_iter().map(|error| error.field_error(base)).collect();
    FieldErrors(errors)
}

/// The errors of an object whose apiVersion, kind and metadata are validated elsewhere.
pub fn validate_fields(
    fields: &Map<String, Value>,
    head: &Value,
    old: Option<(&Map<String, Value>, &Value)>,
    schema: &Schema,
) -> FieldErrors {
    let whole = |fields: &Map<String, Value>, head: &Value| {
        let mut whole = fields.clone();
        if let Value::Object(head) = head {
            whole.extend(head.iter().map(|(key, value)| (key.clone(), value.clone())));
        }
        Value::Object(whole)
    };
    let old = old.map(|(fields, head)| whole(fields, head));
    validate(&whole(fields, head), old.as_ref(), schema, "")
}

struct Wrong {
    /// The path, with a leading dot at the root. `None` for errors without a path.
    path: Option<String>,
    reason: &'static str,
    message: String,
    /// The identity of an error, to drop duplicates.
    text: String,
}

impl Wrong {
    fn field_error(self, base: &str) -> FieldError {
        let below = self.path.as_deref().unwrap_or_default().trim_start_matches('.');
        let field = match (base.is_empty(), below.is_empty()) {
            (true, true) => "<nil>".to_owned(),
            (true, false) => below.to_owned(),
            (false, true) => base.to_owned(),
            (false, false) => format!("{base}.{below}"),
        };
        FieldError { reason: self.reason, field, message: self.message }
    }
}

#[derive(Default)]
struct Outcome {
    errors: Vec<Wrong>,
    fits: usize,
}

impl Outcome {
    fn add(&mut self, wrong: Wrong) {
        if !self.errors.iter().any(|error| error.text == wrong.text) {
            self.errors.push(wrong);
        }
    }

    fn merge(&mut self, other: Outcome) {
        self.fits += other.fits;
        other.errors.into_iter().for_each(|wrong| self.add(wrong));
    }

    fn is_good(&self) -> bool {
        self.errors.is_empty()
    }

    fn of(wrong: Wrong) -> Self {
        Self { errors: vec![wrong], fits: 0 }
    }
}

fn invalid(path: &str, value: &Value, text: String) -> Wrong {
    let message = format!("Invalid value: {value}: {text}");
    Wrong { path: Some(path.into()), reason: "FieldValueInvalid", message, text }
}

/// Upstream has no path for errors of combinations and ranges.
fn placeless(text: String) -> Wrong {
    let message = format!("Invalid value: \"\": {text}");
    Wrong { path: None, reason: "FieldValueInvalid", message, text }
}

fn wrong_type(path: &str, wanted: &str, given: &str) -> Wrong {
    let text = format!("{}must be of type {wanted}: {given:?}", place(path));
    let message = format!("Invalid value: {given:?}: {text}");
    Wrong { path: Some(path.into()), reason: "FieldValueTypeInvalid", message, text }
}

fn place(path: &str) -> String {
    format!("{path} in body ")
}

fn check(value: &Value, old: Option<&Value>, schema: &Schema, path: &str) -> Outcome {
    let outcome = check_all(value, old, schema, path);
    if !outcome.is_good() && old == Some(value) {
        return Outcome { errors: vec![], fits: outcome.fits };
    }
    outcome
}

fn check_all(value: &Value, old: Option<&Value>, schema: &Schema, path: &str) -> Outcome {
    let mut all = Outcome::default();
    let checks = schema.checks.as_deref();
    let take = |outcome: Outcome, all: &mut Outcome| {
        all.merge(outcome);
        all.fits += 1;
    };
    if value.is_null() {
        all.merge(check_type(value, schema, path));
        if let Some(checks) = checks {
            all.merge(check_enum(value, checks, path));
        }
        return all;
    }
    if schema.kind != Kind::Any || schema.int_or_string || schema.format.is_some() {
        take(check_type(value, schema, path), &mut all);
    }
    if let Some(checks) = checks {
        take(combinations(value, old, checks, path), &mut all);
    } else {
        all.fits += 2;
    }
    match value {
        Value::String(text) => {
            take(
                checks.map(|checks| check_string(text, checks, path)).unwrap_or_default(),
                &mut all,
            );
            if let Some(format) = schema.format.as_deref() {
                take(check_format(text, format, schema.kind, path), &mut all);
            }
        }
        Value::Number(number) => take(check_number(number, schema, path), &mut all),
        Value::Array(items) => take(check_items(items, old, schema, path), &mut all),
        _ => {}
    }
    take(checks.map(|checks| check_enum(value, checks, path)).unwrap_or_default(), &mut all);
    if let Value::Object(fields) = value {
        take(check_fields(fields, old, schema, path), &mut all);
    }
    all.fits += 1;
    all
}

/// Go's type and format of a value.
fn go_type(value: &Value) -> (&'static str, &'static str) {
    match value {
        Value::Null => ("null", ""),
        Value::Bool(_) => ("boolean", ""),
        Value::Number(number) if number.is_i64() => ("integer", "int64"),
        Value::Number(_) => ("number", "float64"),
        Value::String(_) => ("string", ""),
        Value::Array(_) => ("array", ""),
        Value::Object(_) => ("object", ""),
    }
}

fn check_type(value: &Value, schema: &Schema, path: &str) -> Outcome {
    let either = schema.int_or_string;
    let types: &[&str] = match (schema.kind, either) {
        (_, true) => &["integer", "string"],
        (Kind::Any, _) => &[],
        (kind, _) => &[kind.name()],
    };
    let joined = types.join(",");
    let format = schema.format.as_deref().unwrap_or_default();
    let fine = Outcome { errors: vec![], fits: 1 };
    if value.is_null() {
        let may = types.is_empty() || schema.nullable;
        return if may { fine } else { Outcome::of(wrong_type(path, &joined, "null")) };
    }
    let (given, given_format) = go_type(value);
    let wants = |kind: &str| types.contains(&kind);
    let is_whole = given == "number" && value.as_f64().is_some_and(|number| number.fract() == 0.0);
    let float_as_int = is_whole && wants("integer");
    let int_as_float = given == "integer" && wants("number");
    let is_text = matches!(value, Value::String(_) | Value::Array(_));
    let fits = wants(given) || float_as_int || int_as_float;
    if !(is_text || format.is_empty() || fits || given_format == format) {
        return Outcome::of(wrong_type(path, format, given_format));
    }
    if is_text && !format.is_empty() && !wants("number") && !wants("integer") {
        return fine;
    }
    if !fits { Outcome::of(wrong_type(path, &joined, given)) } else { fine }
}

fn check_format(text: &str, format: &str, kind: Kind, path: &str) -> Outcome {
    let is_text = matches!(kind, Kind::Any | Kind::String);
    if is_text && !formats::matches_format(format, text) {
        let told = format!("{}must be of type {format}: {text:?}", place(path));
        let message = format!("Invalid value: {}: {told}", Value::from(text));
        let reason = "FieldValueTypeInvalid";
        return Outcome::of(Wrong { path: Some(path.into()), reason, message, text: told });
    }
    Outcome::default()
}

fn check_string(text: &str, checks: &Checks, path: &str) -> Outcome {
    let length = || i64::try_from(text.chars().count()).unwrap_or(i64::MAX);
    let value = || Value::from(text);
    if let Some(limit) = checks.max_length.filter(|limit| length() > *limit) {
        return Outcome::of(Wrong {
            path: Some(path.into()),
            reason: "FieldValueTooLong",
            message: format!("Too long: may not be more than {limit} bytes"),
            text: format!("{}should be at most {limit} chars long", place(path)),
        });
    }
    if let Some(least) = checks.min_length.filter(|least| length() < *least) {
        let told = format!("{}should be at least {least} chars long", place(path));
        return Outcome::of(invalid(path, &value(), told));
    }
    if let Some(pattern) = checks.pattern.as_ref().filter(|pattern| !pattern.matches(text)) {
        let told = format!("{}should match '{}'", place(path), pattern.as_str());
        return Outcome::of(invalid(path, &value(), told));
    }
    Outcome::default()
}

fn check_number(number: &Number, schema: &Schema, path: &str) -> Outcome {
    let mut all = Outcome { errors: vec![], fits: 1 };
    let format = schema.format.as_deref().unwrap_or_default();
    let float = number.as_f64().unwrap_or(f64::INFINITY);
    let in_range = match (schema.kind, format) {
        (Kind::Integer, "int32") => number
            .as_i64()
            .or_else(|| whole(float))
            .is_some_and(|value| i32::try_from(value).is_ok()),
        (Kind::Integer, _) => number.is_i64() || whole(float).is_some(),
        (Kind::Number, "float") => float.abs() <= f64::from(f32::MAX),
        _ => true,
    };
    if !in_range {
        let kind = schema.kind.name();
        let suffix = match format {
            "" => "(default format)".to_owned(),
            format => format!("with format {format}"),
        };
        all.add(placeless(format!("Checked value must be of type {kind} {suffix} in {path}")));
    }
    let Some(checks) = schema.checks.as_deref() else { return all };
    let value = Value::Number(number.clone());
    // Go compares integers as integers, and prints the bound as an integer.
    let integer = number.as_i64();
    let shown =
        |bound: f64| if integer.is_some() { (bound as i64).to_string() } else { go_float(bound) };
    let bound = |bound: f64| if integer.is_some() { (bound as i64) as f64 } else { bound };
    if let Some(factor) = checks.multiple_of.map(bound).filter(|factor| *factor <= 0.0) {
        // The schema is at fault, or its factor is a fraction and the value an integer. Upstream says so at the
        // value, and shows the factor in its place.
        let shown = go_float(factor);
        let text = format!("factor MultipleOf declared for {path} must be positive: {shown}");
        let message = format!("Invalid value: {shown}: {text}");
        all.add(Wrong { path: Some(path.into()), reason: "FieldValueInvalid", message, text });
    } else if let Some(factor) = checks.multiple_of {
        let fits = match integer {
            Some(value) => value % (factor as i64) == 0,
            None => (float / factor).fract() == 0.0,
        };
        if !fits {
            let told = format!("{}should be a multiple of {}", place(path), shown(factor));
            all.add(invalid(path, &value, told));
        }
    }
    if let Some(least) = checks.minimum {
        let exclusive = checks.exclusive_minimum;
        if float < bound(least) || (exclusive && float == bound(least)) {
            let words = if exclusive { "greater than" } else { "greater than or equal to" };
            let told = format!("{}should be {words} {}", place(path), shown(least));
            all.add(invalid(path, &value, told));
        }
    }
    if let Some(most) = checks.maximum {
        let exclusive = checks.exclusive_maximum;
        if float > bound(most) || (exclusive && float == bound(most)) {
            let words = if exclusive { "less than" } else { "less than or equal to" };
            let told = format!("{}should be {words} {}", place(path), shown(most));
            all.add(invalid(path, &value, told));
        }
    }
    all
}

fn whole(float: f64) -> Option<i64> {
    let in_range = float.abs() < 9.2e18;
    (in_range && float.fract() == 0.0).then_some(float as i64)
}

/// Formats a float as Go's `%v` does.
fn go_float(value: f64) -> String {
    let size = value.abs();
    if value != 0.0 && !(1e-4..1e21).contains(&size) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or_default();
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{value}")
}

fn check_enum(value: &Value, checks: &Checks, path: &str) -> Outcome {
    let equal = |one: &Value| match (one, value) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (a, b) => a == b,
    };
    if checks.enumeration.is_empty() || checks.enumeration.iter().any(equal) {
        return Outcome::default();
    }
    let word = |value: &Value| match value {
        Value::String(text) => format!("{text:?}"),
        other => format!("{:?}", other.to_string()),
    };
    let supported: Vec<String> = checks.enumeration.iter().map(word).collect();
    let shown = match value {
        Value::String(text) => format!("{text:?}"),
        other => other.to_string(),
    };
    Outcome::of(Wrong {
        path: Some(path.into()),
        reason: "FieldValueNotSupported",
        message: format!("Unsupported value: {shown}: supported values: {}", supported.join(", ")),
        text: format!("{}should be one of {}", place(path), supported.join(" ")),
    })
}

fn too_many(path: &str, count: usize, limit: i64, what: &str) -> Wrong {
    Wrong {
        path: Some(path.into()),
        reason: "FieldValueTooMany",
        message: format!("Too many: {count}: must have at most {limit} items"),
        text: format!("{}should have at most {limit} {what}", place(path)),
    }
}

fn check_items(items: &[Value], old: Option<&Value>, schema: &Schema, path: &str) -> Outcome {
    let mut all = Outcome { errors: vec![], fits: 1 };
    if let Some(inner) = &schema.items {
        for (index, item) in items.iter().enumerate() {
            let before = old.and_then(|old| counterpart(item, old, &schema.list));
            all.merge(check(item, before, inner, &format!("{path}[{index}]")));
        }
    }
    let Some(checks) = schema.checks.as_deref() else { return all };
    let count = i64::try_from(items.len()).unwrap_or(i64::MAX);
    if let Some(least) = checks.min_items.filter(|least| count < *least) {
        let told = format!("{}should have at least {least} items", place(path));
        all.add(invalid(path, &items.len().into(), told));
    }
    if let Some(limit) = checks.max_items.filter(|limit| count > *limit) {
        all.add(too_many(path, items.len(), limit, "items"));
    }
    all
}

/// The same element in the old list. Only lists of type `map` have one.
pub fn counterpart<'a>(item: &Value, old: &'a Value, list: &List) -> Option<&'a Value> {
    let List::Map(keys) = list else { return None };
    let wanted = lists::key(item, keys);
    old.as_array()?.iter().find(|before| lists::key(before, keys) == wanted)
}

fn check_fields(
    fields: &Map<String, Value>,
    old: Option<&Value>,
    schema: &Schema,
    path: &str,
) -> Outcome {
    let mut all = Outcome::default();
    let checks = schema.checks.as_deref();
    let count = i64::try_from(fields.len()).unwrap_or(i64::MAX);
    if let Some(least) = checks.and_then(|checks| checks.min_properties).filter(|n| count < *n) {
        let told = format!("{}should have at least {least} properties", place(path));
        all.add(invalid(path, &fields.len().into(), told));
    }
    if let Some(limit) = checks.and_then(|checks| checks.max_properties).filter(|n| count > *n) {
        all.add(too_many(path, fields.len(), limit, "properties"));
    }
    let below = |name: &str| format!("{path}.{name}");
    for (name, value) in fields {
        if schema.property(name).is_some() {
            continue;
        }
        match &schema.additional {
            Additional::Forbidden => {
                let told = format!("{path}.{name} in body is a forbidden property");
                all.add(invalid(path, &Value::from(""), told));
            }
            Additional::Schema(inner) => {
                let before = old.and_then(|old| old.get(name));
                all.merge(check(value, before, inner, &below(name)));
            }
            _ => {}
        }
    }
    for (name, property) in &schema.properties {
        if let Some(value) = fields.get(&**name) {
            let place = if path.is_empty() { name.to_string() } else { below(name) };
            all.merge(check(value, old.and_then(|old| old.get(&**name)), property, &place));
        }
    }
    for name in checks.map(|checks| &checks.required).into_iter().flatten() {
        if !fields.contains_key(&**name) {
            let path = below(name);
            let text = format!("{path} in body is required");
            let message = "Required value".into();
            all.add(Wrong { path: Some(path), reason: "FieldValueRequired", message, text });
        }
    }
    all
}

fn combinations(value: &Value, old: Option<&Value>, checks: &Checks, path: &str) -> Outcome {
    let mut all = Outcome::default();
    let results = |schemas: &[Schema]| -> Vec<Outcome> {
        schemas.iter().map(|schema| check(value, old, schema, path)).collect()
    };
    if !checks.any_of.is_empty() {
        let results = results(&checks.any_of);
        if !results.iter().any(Outcome::is_good) {
            all.add(placeless(format!("{path:?} must validate at least one schema (anyOf)")));
        }
        best(results).into_iter().for_each(|outcome| all.merge(outcome));
    }
    if !checks.one_of.is_empty() {
        let results = results(&checks.one_of);
        let good = results.iter().filter(|outcome| outcome.is_good()).count();
        if good != 1 {
            let found = match good {
                0 => "Found none valid".to_owned(),
                good => format!("Found {good} valid alternatives"),
            };
            let told = format!("{path:?} must validate one and only one schema (oneOf). {found}");
            all.add(placeless(told));
        }
        if good <= 1 {
            best(results).into_iter().for_each(|outcome| all.merge(outcome));
        }
    }
    if !checks.all_of.is_empty() {
        let results = results(&checks.all_of);
        let good = results.iter().filter(|outcome| outcome.is_good()).count();
        let count = results.len();
        results.into_iter().for_each(|outcome| all.merge(outcome));
        if good != count {
            let none = if good == 0 { ". None validated" } else { "" };
            all.add(placeless(format!("{path:?} must validate all the schemas (allOf){none}")));
        }
    }
    if checks.not.as_ref().is_some_and(|schema| check(value, None, schema, path).is_good()) {
        all.add(placeless(format!("{path:?} must not validate the schema (not)")));
    }
    all.fits += 1;
    all
}

/// The first valid alternative, or else the first of those with the most passed checks.
fn best(results: Vec<Outcome>) -> Option<Outcome> {
    let mut best: Option<Outcome> = None;
    for outcome in results {
        if outcome.is_good() {
            return Some(outcome);
        }
        if best.as_ref().is_none_or(|best| outcome.fits > best.fits) {
            best = Some(outcome);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::testing::schema;

    fn check_f(of: Value, given: Value, expected: &str) {
        let schema = schema(json!({ "type": "object", "properties": { "f": of } }));
        let errors = validate(&json!({ "f": given }), None, &schema, "");
        let summary = if errors.is_empty() { String::new() } else { errors.summary() };
        assert_eq!(summary, expected, "{given}");
    }

    #[test]
    fn integers_are_multiples_of_whole_factors() {
        let half = json!({ "type": "number", "multipleOf": 0.5 });
        check_f(half.clone(), json!(1.5), "");
        let positive = "factor MultipleOf declared for f must be positive: 0";
        check_f(half, json!(1), &format!("f: Invalid value: 0: {positive}"));
        check_f(json!({ "type": "number", "multipleOf": 2.5 }), json!(4), "");
    }

    #[test]
    fn errors_read_as_upstream_writes_them() {
        let object = |more: Value| {
            let mut all = json!({ "type": "object" });
            all.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
            all
        };
        check_f(
            json!({ "type": "integer" }),
            json!("x"),
            "f: Invalid value: \"string\": f in body must be of type integer: \"string\"",
        );
        check_f(
            json!({ "x-kubernetes-int-or-string": true }),
            json!(1.5),
            "f: Invalid value: \"number\": f in body must be of type integer,string: \"number\"",
        );
        check_f(
            json!({ "type": "array", "items": { "type": "string" }, "minItems": 1, "maxItems": 2 }),
            json!([]),
            "f: Invalid value: 0: f in body should have at least 1 items",
        );
        check_f(
            json!({ "type": "array", "items": { "type": "string" }, "maxItems": 2 }),
            json!(["a", "b", "c"]),
            "f: Too many: 3: must have at most 2 items",
        );
        check_f(
            json!({ "type": "string", "enum": ["a", "b"] }),
            json!("c"),
            "f: Unsupported value: \"c\": supported values: \"a\", \"b\"",
        );
        check_f(
            json!({ "type": "string", "pattern": "^a$" }),
            json!("b"),
            "f: Invalid value: \"b\": f in body should match '^a$'",
        );
        check_f(
            json!({ "type": "integer", "minimum": 1, "maximum": 3 }),
            json!(4),
            "f: Invalid value: 4: f in body should be less than or equal to 3",
        );
        check_f(object(json!({ "required": ["a"] })), json!({}), "f.a: Required value");
        check_f(
            json!({ "type": "integer", "format": "int32" }),
            json!(1.5),
            "[f: Invalid value: \"float64\": f in body must be of type int32: \"float64\", <nil>: Invalid value: \"\": Checked value must be of type integer with format int32 in f]",
        );
        check_f(
            object(json!({ "oneOf": [{ "required": ["a"] }, { "required": ["b"] }] })),
            json!({ "a": 1, "b": 2 }),
            "<nil>: Invalid value: \"\": \"f\" must validate one and only one schema (oneOf). Found 2 valid alternatives",
        );
    }

    #[test]
    fn what_is_as_it_was_is_not_refused() {
        let schema = schema(json!({ "type": "object", "properties": {
            "a": { "type": "string", "maxLength": 1 }, "b": { "type": "string", "maxLength": 1 } } }));
        let old = json!({ "a": "long", "b": "x" });
        let new = json!({ "a": "long", "b": "also" });
        let errors = validate(&new, Some(&old), &schema, "");
        assert_eq!(errors.summary(), "b: Too long: may not be more than 1 bytes");
    }
}
