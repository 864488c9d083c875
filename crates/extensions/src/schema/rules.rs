//! Rules in CEL (`x-kubernetes-validations`), compiled at their first use.
//!
//! In: a value, the old value, a schema with rules. Out: errors with upstream's messages. A rule with
//! `oldSelf` runs only if there is an old value, unless it has `optionalOldSelf`. A rule without
//! `oldSelf` does not refuse an unchanged value.
//! Upstream: `apiserver/schema/cel/validation.go`.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use cel::cost::Extent;
use cel::{Budget, EvalError, ListKind, Object, Program, Type, Value as Cel};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::ValidationRule;
use machinery::field::{FieldError, FieldErrors, Path};
use serde_json::Value;

use super::validate::counterpart;
use super::{Additional, Kind, List, Schema};

/// The cost limits of one evaluation and of all evaluations of an object. Upstream's numbers.
pub const CALL_LIMIT: u64 = 1_000_000;
const OBJECT_LIMIT: u64 = 10_000_000;
const EXHAUSTED: &str =
    "validation failed due to running out of cost budget, no further validation rules will be run";

/// A rule. Its programs are compiled at the first evaluation.
pub struct Rule {
    pub text: Box<str>,
    message: Box<str>,
    pub message_expression: Box<str>,
    reason: Option<Box<str>>,
    field_path: Box<str>,
    pub optional_old: Option<bool>,
    compiled: OnceLock<Compiled>,
}

/// The compiled programs of a rule.
pub struct Compiled {
    pub rule: Result<Program, String>,
    pub message: Option<Result<Program, String>>,
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rule({:?})", self.text)
    }
}

impl Rule {
    pub fn new(from: &ValidationRule) -> Self {
        let text =
            |text: &Option<String>| -> Box<str> { text.as_deref().unwrap_or_default().into() };
        Self {
            text: from.rule.as_str().into(),
            message: text(&from.message),
            message_expression: text(&from.message_expression),
            reason: from.reason.as_deref().map(Into::into),
            field_path: from.field_path.as_deref().unwrap_or_default().trim().into(),
            optional_old: from.optional_old_self,
            compiled: OnceLock::new(),
        }
    }

    /// The whole rule, as Go encodes upstream's internal type, which has no JSON names.
    pub fn as_internal(&self) -> impl serde::Serialize + '_ {
        #[derive(serde::Serialize)]
        #[serde(rename_all = "PascalCase")]
        struct Internal<'a> {
            rule: &'a str,
            message: &'a str,
            message_expression: &'a str,
            reason: Option<&'a str>,
            field_path: &'a str,
            optional_old_self: Option<bool>,
        }
        Internal {
            rule: &self.text,
            message: &self.message,
            message_expression: &self.message_expression,
            reason: self.reason.as_deref(),
            field_path: &self.field_path,
            optional_old_self: self.optional_old,
        }
    }

    /// Compiles the rule for values of this schema.
    pub fn compiled(&self, schema: &Schema, is_root: bool) -> &Compiled {
        self.compiled.get_or_init(|| self.compile(type_of(schema, is_root)))
    }

    /// The estimated cost of the rule and its message, for values up to `extent`.
    pub fn costs(&self, schema: &Schema, is_root: bool, extent: &Extent) -> [u64; 2] {
        let compiled = self.compiled(schema, is_root);
        let variables = self.variables(type_of(schema, is_root));
        let most = |program: Option<&Program>| {
            program.map_or(0, |program| program.most(&variables, extent))
        };
        let message = compiled.message.as_ref().and_then(|message| message.as_ref().ok());
        [most(compiled.rule.as_ref().ok()), most(message)]
    }

    fn variables(&self, kind: Type) -> [(&'static str, Type); 2] {
        let old = match self.optional_old {
            Some(true) => Type::optional(kind.clone()),
            _ => kind.clone(),
        };
        [("self", kind), ("oldSelf", old)]
    }

    fn compile(&self, kind: Type) -> Compiled {
        let variables = self.variables(kind);
        let program = |text: &str, wanted: Type, refusal: &str| match cel::compile(text, &variables)
        {
            Err(error) => Err(format!("compilation failed: {error}")),
            Ok(program) if program.kind().fits(&wanted) => Ok(program),
            Ok(_) => Err(refusal.to_owned()),
        };
        let rule = program(&self.text, Type::Bool, "cel expression must evaluate to a bool");
        let message = (!self.message_expression.trim().is_empty()).then(|| {
            let refusal = "messageExpression must evaluate to a string";
            program(&self.message_expression, Type::String, refusal).map_err(|why| {
                match why.strip_prefix("compilation failed: ") {
                    Some(rest) => format!("messageExpression compilation failed: {rest}"),
                    None => why,
                }
            })
        });
        Compiled { rule, message }
    }

    fn uses_old(&self, schema: &Schema, is_root: bool) -> bool {
        self.compiled(schema, is_root).rule.as_ref().is_ok_and(|program| program.uses("oldSelf"))
    }

    /// The rule's name in errors.
    fn shown(&self) -> &str {
        if self.message.is_empty() { self.text.trim() } else { self.message.trim() }
    }

    fn default_message(&self) -> String {
        match self.message.trim() {
            "" => format!("failed rule: {}", self.text.trim()),
            message => message.to_owned(),
        }
    }
}

/// The CEL type of a schema's values.
pub fn type_of(schema: &Schema, is_root: bool) -> Type {
    if schema.nullable && !matches!(schema.kind, Kind::Object | Kind::Array) {
        return Type::Dyn;
    }
    match schema.kind {
        Kind::Any => Type::Dyn,
        Kind::Integer => Type::Int,
        Kind::Number => Type::Double,
        Kind::Boolean => Type::Bool,
        Kind::String => match schema.format.as_deref().map(|format| format.replace('-', "")) {
            Some(format) if format == "byte" => Type::Bytes,
            Some(format) if format == "duration" => Type::Duration,
            Some(format) if matches!(&*format, "date" | "datetime") => Type::Timestamp,
            _ => Type::String,
        },
        Kind::Array => {
            let of = schema.items.as_deref().map_or(Type::Dyn, |items| type_of(items, false));
            let kind = match &schema.list {
                List::Atomic => ListKind::Atomic,
                List::Set => ListKind::Set,
                List::Map(keys) => ListKind::Map(keys.iter().map(ToString::to_string).collect()),
            };
            Type::List(Arc::new(of), kind)
        }
        Kind::Object => object_type(schema, is_root),
    }
}

fn object_type(schema: &Schema, is_root: bool) -> Type {
    if let Additional::Schema(additional) = &schema.additional {
        return Type::Map(Arc::new(type_of(additional, false)));
    }
    let has_head = is_root || schema.embedded;
    if schema.properties.is_empty() && !has_head && schema.preserves {
        return Type::Dyn;
    }
    let mut fields: BTreeMap<String, Type> = schema
        .properties
        .iter()
        .map(|(name, property)| (name.to_string(), type_of(property, false)))
        .collect();
    if has_head {
        let names = [("name", Type::String), ("generateName", Type::String)];
        let metadata = Object {
            name: "objectMeta".into(),
            fields: names.map(|(name, kind)| (name.to_owned(), kind)).into(),
            is_open: false,
        };
        fields.insert("apiVersion".into(), Type::String);
        fields.insert("kind".into(), Type::String);
        fields.insert("metadata".into(), Type::Object(Arc::new(metadata)));
    }
    Type::Object(Arc::new(Object { name: "object".into(), fields, is_open: false }))
}

/// Reports whether any node has a rule.
pub fn has_rules(schema: &Schema) -> bool {
    schema.any(&mut |node| !node.rules.is_empty())
}

/// Evaluates the rules of a whole object.
pub fn check(value: &Value, old: Option<&Value>, schema: &Schema) -> FieldErrors {
    let mut asking = Asking { errors: FieldErrors::default(), left: OBJECT_LIMIT, is_over: false };
    asking.node(value, old, schema, &Path::default(), true);
    asking.errors
}

/// What the rules say about a default: as a new value, and as one that stays. Upstream: `ValidateDefaults`.
pub fn check_default(value: &Value, schema: &Schema, path: &Path) -> FieldErrors {
    let mut errors = FieldErrors::default();
    for old in [None, Some(value)] {
        let mut asking = Asking { errors, left: OBJECT_LIMIT, is_over: false };
        asking.node(value, old, schema, path, false);
        errors = asking.errors;
        if !errors.is_empty() {
            break;
        }
    }
    errors
}

struct Asking {
    errors: FieldErrors,
    left: u64,
    is_over: bool,
}

impl Asking {
    fn node(
        &mut self,
        value: &Value,
        old: Option<&Value>,
        schema: &Schema,
        path: &Path,
        is_root: bool,
    ) {
        if value.is_null() || self.is_over {
            return;
        }
        if !schema.rules.is_empty() {
            self.rules(value, old, schema, path, is_root);
        }
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    let (inner, path) = match (schema.property(name), &schema.additional) {
                        (Some(property), _) => (property, path.named(name)),
                        (None, Additional::Schema(additional)) => (&**additional, path.key(name)),
                        _ => continue,
                    };
                    let old = old.and_then(|old| old.get(name)).filter(|_| !schema.atomic_map);
                    self.node(value, old, inner, &path, false);
                }
            }
            Value::Array(items) => {
                let Some(inner) = &schema.items else { return };
                for (index, item) in items.iter().enumerate() {
                    let old = old.and_then(|old| counterpart(item, old, &schema.list));
                    self.node(item, old, inner, &path.index(index), false);
                }
            }
            _ => {}
        }
    }

    fn rules(
        &mut self,
        value: &Value,
        old: Option<&Value>,
        schema: &Schema,
        path: &Path,
        is_root: bool,
    ) {
        let kind = type_of(schema, is_root);
        let now = Cel::from_json(value, &kind);
        let before = old.map(|old| Cel::from_json(old, &kind));
        let is_same = old == Some(value);
        for rule in &schema.rules {
            let uses_old = rule.uses_old(schema, is_root);
            let is_optional = rule.optional_old == Some(true);
            // A transition rule needs an old value. Other rules do not refuse an unchanged value.
            if (uses_old && before.is_none() && !is_optional) || (!uses_old && is_same) {
                continue;
            }
            let variables = |name: &str| match name {
                "self" => Some(now.clone()),
                "oldSelf" if is_optional => Some(Cel::Optional(before.clone().map(Arc::new))),
                "oldSelf" => before.clone(),
                _ => None,
            };
            self.rule(rule, value, schema, path, is_root, &variables);
            if self.is_over {
                return;
            }
        }
    }

    /// Evaluates within the limit of one call and within the remaining budget.
    fn ask(
        &mut self,
        program: &Program,
        variables: &dyn Fn(&str) -> Option<Cel>,
    ) -> Result<Cel, EvalError> {
        let start = self.left.min(CALL_LIMIT);
        let mut budget = Budget::new(start);
        let outcome = program.evaluate(variables, &mut budget);
        self.left -= start - budget.left;
        outcome
    }

    fn rule(
        &mut self,
        rule: &Rule,
        value: &Value,
        schema: &Schema,
        path: &Path,
        is_root: bool,
        variables: &dyn Fn(&str) -> Option<Cel>,
    ) {
        let kind = schema.kind.name();
        let compiled = rule.compiled(schema, is_root);
        let program = match &compiled.rule {
            Ok(program) => program,
            Err(why) => {
                return self.errors.invalid(path, kind, &format!("rule compile error: {why}"));
            }
        };
        match self.ask(program, variables) {
            Ok(Cel::Bool(true)) => return,
            Ok(_) => {}
            Err(EvalError::TooExpensive) => {
                self.is_over = true;
                let detail = if self.left == 0 {
                    EXHAUSTED.to_owned()
                } else {
                    format!(
                        "'{}': no further validation rules will be run due to call cost exceeds limit for rule: {}",
                        EvalError::TooExpensive,
                        rule.shown()
                    )
                };
                return self.errors.invalid(path, kind, &detail);
            }
            Err(EvalError::Failed(why)) if why.starts_with("no such overload") => {
                let detail = format!(
                    "'{why}': call arguments did not match a supported operator, function or macro signature for rule: {}",
                    rule.shown()
                );
                return self.errors.invalid(path, kind, &detail);
            }
            Err(EvalError::Failed(why)) => {
                let detail = format!("{why} evaluating rule: {}", rule.shown());
                return self.errors.invalid(path, kind, &detail);
            }
        }
        let expressed = match &compiled.message {
            Some(Ok(program)) => self.ask(program, variables).ok(),
            _ => None,
        };
        let expressed = expressed.as_ref().and_then(Cel::as_str).map(str::trim);
        let usable = |text: &&str| !text.is_empty() && !text.contains(['\n', '\r']);
        let detail = expressed.filter(usable).map_or_else(|| rule.default_message(), str::to_owned);
        self.refuse(rule, value, path, &detail);
    }

    fn refuse(&mut self, rule: &Rule, value: &Value, path: &Path, detail: &str) {
        let path = match &*rule.field_path {
            "" => path.clone(),
            below => path.named(below.trim_start_matches('.')),
        };
        match rule.reason.as_deref() {
            Some("FieldValueRequired") => self.errors.required(&path, detail),
            Some("FieldValueForbidden") => self.errors.forbidden(&path, detail),
            Some("FieldValueDuplicate") => self.errors.duplicate(&path, value),
            // Upstream shows scalars only.
            _ if value.is_object() || value.is_array() => self.errors.0.push(FieldError {
                reason: "FieldValueInvalid",
                field: path.to_string(),
                message: format!("Invalid value: {detail}"),
            }),
            _ => self.errors.invalid(&path, value, detail),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::testing::schema;

    fn of(f: Value) -> Schema {
        schema(json!({ "type": "object", "properties": { "f": f } }))
    }

    fn summary(errors: &FieldErrors) -> String {
        if errors.is_empty() { String::new() } else { errors.summary() }
    }

    #[test]
    fn rules_refuse_in_upstreams_words() {
        let check = |f: Value, given: Value, expected: &str| {
            let errors = super::check(&json!({ "f": given }), None, &of(f));
            assert_eq!(summary(&errors), expected, "{given}");
        };
        let quantity = json!({ "type": "string", "x-kubernetes-validations": [
            { "rule": "isQuantity(self) && quantity(self).isLessThan(quantity('1Gi'))" }] });
        check(quantity.clone(), json!("1Mi"), "");
        check(
            quantity,
            json!("2Gi"),
            "f: Invalid value: \"2Gi\": failed rule: isQuantity(self) && quantity(self).isLessThan(quantity('1Gi'))",
        );
        check(
            json!({ "type": "string", "x-kubernetes-validations": [{ "rule": "url(self).getScheme() == 'https'" }] }),
            json!(":"),
            "f: Invalid value: \"string\": URL parse error during conversion from string: parse \":\": missing protocol scheme evaluating rule: url(self).getScheme() == 'https'",
        );
        check(
            json!({ "type": "array", "items": { "type": "string" },
                "x-kubernetes-validations": [{ "rule": "self.all(x, x.matches('^[a-z]+$'))" }] }),
            json!(["ONE"]),
            "f: Invalid value: failed rule: self.all(x, x.matches('^[a-z]+$'))",
        );
        check(
            json!({ "type": "integer", "x-kubernetes-validations": [{ "rule": "self % 2 == 0",
                "messageExpression": "'odd: ' + string(self)", "reason": "FieldValueForbidden" }] }),
            json!(3),
            "f: Forbidden: odd: 3",
        );
        check(
            json!({ "type": "object", "properties": { "a": { "type": "integer" } },
                "x-kubernetes-validations": [{ "rule": "self.a > 1", "fieldPath": ".a", "message": "too small" }] }),
            json!({ "a": 1 }),
            "f.a: Invalid value: too small",
        );
    }

    /// Three calls would turn four characters into a gigabyte. The rule is refused before it allocates that.
    #[test]
    fn a_rule_that_would_make_a_huge_text_is_stopped() {
        let long = "a".repeat(1000);
        let rule = format!("size(self{}) > 0", format!(".replace('a', '{long}')").repeat(3));
        let of = of(json!({ "type": "string", "maxLength": 20,
            "x-kubernetes-validations": [{ "rule": rule }] }));
        let errors = summary(&super::check(&json!({ "f": "aaaa" }), None, &of));
        let expected = "call cost exceeds limit for rule";
        assert!(errors.contains(expected), "{errors}");
    }

    #[test]
    fn transitions_compare_with_what_was() {
        let check = |f: Value, old: Value, new: Value, expected: &str| {
            let (old, new) = (json!({ "f": old }), json!({ "f": new }));
            let errors = super::check(&new, Some(&old), &of(f));
            assert_eq!(summary(&errors), expected, "{new}");
        };
        let rule = |rule: &str| json!({ "type": "integer", "x-kubernetes-validations": [{ "rule": rule }] });
        check(
            rule("self >= oldSelf"),
            json!(5),
            json!(4),
            "f: Invalid value: 4: failed rule: self >= oldSelf",
        );
        check(rule("self >= oldSelf"), json!(5), json!(6), "");
        // An unchanged value is not refused.
        check(rule("self > 10"), json!(5), json!(5), "");
        check(rule("self > 10"), json!(5), json!(6), "f: Invalid value: 6: failed rule: self > 10");
        let once = json!({ "type": "string", "x-kubernetes-validations": [
            { "rule": "!oldSelf.hasValue() || self == oldSelf.value()", "optionalOldSelf": true }] });
        check(
            once,
            json!("z"),
            json!("y"),
            "f: Invalid value: \"y\": failed rule: !oldSelf.hasValue() || self == oldSelf.value()",
        );
    }
}
