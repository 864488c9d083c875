//! Validates the CEL rules of a schema: types and cost. Upstream: the CEL part of
//! `ValidateCustomResourceDefinitionOpenAPISchema`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSONSchemaProps;
use machinery::field::{FieldErrors, Path};

use crate::schema::extent::{self, REQUEST};
use crate::schema::rules::Rule;
use crate::schema::{Additional, Kind, List, Schema};

/// The cost limits of one rule and of all rules of a schema. Upstream's numbers.
const RULE_LIMIT: u64 = 10_000_000;
const SCHEMA_LIMIT: u64 = 100_000_000;
/// The number of expensive rules that the error names.
const NAMED: usize = 4;

pub fn check(schema: &JSONSchemaProps, path: &Path) -> FieldErrors {
    let mut asked = Asked { errors: FieldErrors::default(), total: 0, dear: vec![] };
    let root = Node { path: path.clone(), loose: None, is_root: true, count: Some(1) };
    asked.node(&Schema::new(schema), &root);
    asked.judge_total(path);
    asked.errors
}

/// A node on the path to the current one.
struct Node {
    path: Path,
    /// The first node on the path whose parts cannot be matched with those of the old object.
    loose: Option<Path>,
    is_root: bool,
    /// The largest number of values. `None` if nothing limits it.
    count: Option<u64>,
}

impl Node {
    fn below(&self, path: Path, loose: bool, count: Option<u64>) -> Self {
        let loose = self.loose.clone().or_else(|| loose.then(|| self.path.clone()));
        Self { path, loose, is_root: false, count }
    }
}

struct Asked {
    errors: FieldErrors,
    total: u64,
    /// The most expensive rules.
    dear: Vec<(u64, Path)>,
}

impl Asked {
    fn node(&mut self, schema: &Schema, node: &Node) {
        let path = &node.path;
        let count = most_elements(schema)
            .and_then(|most| node.count.map(|count| count.saturating_mul(most)));
        if let Additional::Schema(additional) = &schema.additional {
            self.node(additional, &node.below(path.child("additionalProperties"), false, count));
        }
        for (name, property) in &schema.properties {
            let path = path.child("properties").key(name);
            self.node(property, &node.below(path, schema.atomic_map, count));
        }
        if let Some(items) = &schema.items {
            let loose = !matches!(schema.list, List::Map(_));
            self.node(items, &node.below(path.child("items"), loose, count));
        }
        for (index, rule) in schema.rules.iter().enumerate() {
            self.rule(rule, schema, node, &path.child("x-kubernetes-validations").index(index));
        }
    }

    fn rule(&mut self, rule: &Rule, schema: &Schema, node: &Node, path: &Path) {
        let compiled = rule.compiled(schema, node.is_root);
        let (rule_path, message_path) = (path.child("rule"), path.child("messageExpression"));
        let extent = extent::of(schema, node.is_root);
        let [cost, message_cost] = extent.as_ref().map_or([0, 0], |(extent, least)| {
            let [cost, message] = rule.costs(schema, node.is_root, extent);
            [cost.saturating_mul(node.count.unwrap_or(REQUEST / (least + 1))), message]
        });
        self.cost(&rule_path, "estimated rule cost", cost);
        if let Err(why) = &compiled.rule {
            self.errors.invalid(&rule_path, rule.as_internal(), why);
        }
        match &compiled.message {
            Some(Err(why)) => self.errors.invalid(&message_path, rule.as_internal(), why),
            Some(Ok(_)) => {
                self.cost(&message_path, "estimated messageExpression cost", message_cost);
            }
            None => {}
        }
        let Ok(program) = &compiled.rule else { return };
        if !program.uses("oldSelf") {
            if let Some(optional) = rule.optional_old {
                let detail = "may not be set if oldSelf is not used in rule";
                self.errors.invalid(&path.child("optionalOldSelf"), optional, detail);
            }
        } else if let Some(within) = &node.loose {
            let detail = format!(
                "oldSelf cannot be used on the uncorrelatable portion of the schema within {within}"
            );
            self.errors.invalid(&rule_path, &*rule.text, &detail);
        }
    }

    fn cost(&mut self, path: &Path, what: &str, cost: u64) {
        if cost > RULE_LIMIT {
            self.errors.forbidden(path, &too_expensive(what, cost, RULE_LIMIT));
        }
        self.total = self.total.saturating_add(cost);
        if cost >= SCHEMA_LIMIT / 100 {
            self.dear.push((cost, path.clone()));
            self.dear.sort_by_key(|(cost, _)| std::cmp::Reverse(*cost));
            self.dear.truncate(NAMED);
        }
    }

    fn judge_total(&mut self, path: &Path) {
        if self.total <= SCHEMA_LIMIT {
            return;
        }
        for (_, path) in &self.dear {
            self.errors.forbidden(path, "contributed to estimated rule cost total exceeding cost limit for entire OpenAPIv3 schema");
        }
        let what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema";
        self.errors.forbidden(path, &too_expensive(what, self.total, SCHEMA_LIMIT));
    }
}

/// The factor by which a node multiplies the number of values below it. `None` if nothing limits it.
fn most_elements(schema: &Schema) -> Option<u64> {
    let checks = schema.checks.as_deref();
    let limit = match (schema.kind, &schema.additional) {
        (Kind::Array, _) => checks?.max_items?,
        (Kind::Object, Additional::Unsaid) => return Some(1),
        (Kind::Object, _) => checks?.max_properties?,
        _ => return Some(1),
    };
    Some(u64::try_from(limit).unwrap_or(0))
}

fn too_expensive(what: &str, cost: u64, limit: u64) -> String {
    let factor = match cost as f64 / limit as f64 {
        factor if factor > 100.0 => "more than 100x".into(),
        factor if factor < 1.5 => format!("{factor:.6}x"),
        factor => format!("{factor:.1}x"),
    };
    format!(
        "{what} exceeds budget by factor of {factor} (try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are declared)"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(schema: Value, expected: &[&str]) {
        let schema: JSONSchemaProps = serde_json::from_value(schema).expect("a schema");
        let errors = super::check(&schema, &Path::new("s"));
        let shown: Vec<String> = errors.0.iter().map(ToString::to_string).collect();
        assert_eq!(shown.len(), expected.len(), "{shown:?}");
        for (shown, expected) in shown.iter().zip(expected) {
            assert!(shown.starts_with(expected), "{shown}, not {expected}");
        }
    }

    #[test]
    fn rules_that_could_cost_too_much_are_refused() {
        let rule = |rule: &str| json!([{ "rule": rule }]);
        let list = |most: Value| {
            let items = json!({ "type": "array", "maxItems": most, "items": { "type": "string", "maxLength": most } });
            json!({ "type": "object", "properties": { "a": { "type": "array", "maxItems": most, "items": items } },
                "x-kubernetes-validations": rule("self.a.all(x, x.all(y, self.a.all(z, z.all(w, w == y))))") })
        };
        check(list(json!(5)), &[]);
        check(
            list(Value::Null),
            &[
                "s.x-kubernetes-validations[0].rule: Forbidden: estimated rule cost exceeds budget by factor of more than 100x (try",
                "s.x-kubernetes-validations[0].rule: Forbidden: contributed to estimated rule cost total",
                "s: Forbidden: x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema exceeds budget",
            ],
        );
        let number = |message: &str| {
            json!({ "type": "object", "properties": { "f": { "type": "integer", "x-kubernetes-validations":
                [{ "rule": "self % 2 == 0", "messageExpression": message }] } } })
        };
        check(number("'odd'"), &[]);
        check(
            number("'odd: ' + string(self)"),
            &[
                "s.properties[f].x-kubernetes-validations[0].messageExpression: Forbidden: estimated messageExpression cost",
                "s.properties[f].x-kubernetes-validations[0].messageExpression: Forbidden: contributed",
                "s: Forbidden: x-kubernetes-validations estimated rule cost total",
            ],
        );
    }

    #[test]
    fn errors_of_expressions_show_the_whole_rule() {
        check(
            json!({ "type": "object", "properties": { "a": { "type": "integer" } },
                "x-kubernetes-validations": [{ "rule": " self.b == 1\n", "message": "m" }] }),
            &[
                "s.x-kubernetes-validations[0].rule: Invalid value: {\"Rule\":\" self.b == 1\\n\",\"Message\":\"m\",\"MessageExpression\":\"\",\"Reason\":null,\"FieldPath\":\"\",\"OptionalOldSelf\":null}: compilation failed",
            ],
        );
    }

    /// A cheap rule on many values.
    #[test]
    fn the_number_of_values_counts() {
        let of = |most: Value| {
            json!({ "type": "object", "properties": { "l": { "type": "array", "maxItems": most,
                "items": { "type": "string", "maxLength": 1000, "x-kubernetes-validations":
                    [{ "rule": "self.contains('abcdefghij') || self.contains('x')" }] } } } })
        };
        check(of(json!(10)), &[]);
        check(of(Value::Null), &["s.properties[l].items", "s.properties[l].items", "s: Forbidden"]);
    }
}
