//! A place in an object under judgement: its path, its value, and where errors about it go.
//!
//! In: the tree of an object. Out: field errors. Checks are methods or small functions over places, so
//! that a rule reads as what it demands: `spec.get("replicas").not_negative()`.
//!
//! Invariant: what an object lacks is a place with the value `null`; no check panics on a value of an
//! unexpected type, for decoding has refused those before.
//! Invariant: a rule asks only for fields that the schema has. Tests hold each name against it
//! (`guard`), for a misspelt name is `null` and its check never fires.

use std::cell::RefCell;
use std::collections::HashSet;

use machinery::field::{FieldErrors, Path};
use serde_json::Value;

use super::guard::Of;

pub(crate) type NameCheck = fn(&str) -> Vec<String>;

#[derive(Clone)]
pub(crate) struct At<'a> {
    pub(crate) path: Path,
    pub(crate) value: &'a Value,
    judgement: &'a Judgement<'a>,
    of: Of,
}

/// What all places of an object share.
struct Judgement<'a> {
    errors: RefCell<FieldErrors>,
    /// The object before, if there was one: what stood in it may be let stand.
    old: Option<&'a Value>,
}

static NULL: Value = Value::Null;

/// Runs checks over a tree of no kind, such as a name or a part of an object.
pub(crate) fn judge(tree: &Value, check: impl FnOnce(&At<'_>)) -> FieldErrors {
    judged(Of::ANY, tree, None, |new, _| check(new))
}

/// As [`judge`], over an object and the one before it.
#[cfg(test)]
pub(crate) fn judge_both(
    tree: &Value,
    old: &Value,
    check: impl FnOnce(&At<'_>, &At<'_>),
) -> FieldErrors {
    judged(Of::ANY, tree, Some(old), check)
}

/// Runs checks over a whole object of a kind and the one before it, and returns what they found.
pub(crate) fn judged(
    of: Of,
    tree: &Value,
    old: Option<&Value>,
    check: impl FnOnce(&At<'_>, &At<'_>),
) -> FieldErrors {
    let judgement = Judgement { errors: RefCell::default(), old };
    let at = |value| At { path: Path::default(), value, judgement: &judgement, of };
    check(&at(tree), &at(old.unwrap_or(&NULL)));
    judgement.errors.into_inner()
}

impl<'a> At<'a> {
    /// A field below, or several steps below (`template.spec`).
    #[cfg_attr(test, track_caller)]
    pub(crate) fn get(&self, names: &'static str) -> Self {
        let below = |value: &'a Value, name| value.get(name).unwrap_or(&NULL);
        let value = names.split('.').fold(self.value, below);
        let of = self.of.fields(names, &self.path);
        Self { path: self.path.child(names), value, of, ..*self }
    }

    /// A field below whose name comes from the object.
    pub(crate) fn named(&self, name: &str) -> Self {
        let value = self.value.get(name).unwrap_or(&NULL);
        Self { path: self.path.named(name), value, of: self.of.named(name), ..*self }
    }

    /// The element of a map.
    pub(crate) fn key(&self, key: &str) -> Self {
        let value = self.value.get(key).unwrap_or(&NULL);
        Self { path: self.path.key(key), value, of: self.of.element(), ..*self }
    }

    /// The same value under another name: upstream's paths follow its internal types here and there.
    pub(crate) fn called(&self, path: Path) -> Self {
        Self { path, ..*self }
    }

    /// Another value at the same place.
    pub(crate) fn with<'b>(&self, value: &'b Value) -> At<'b>
    where
        'a: 'b,
    {
        At { path: self.path.clone(), value, judgement: self.judgement, of: self.of }
    }

    #[cfg_attr(test, track_caller)]
    pub(crate) fn child_path(&self, names: &'static str) -> Path {
        self.of.shown(names, &self.path);
        self.path.child(names)
    }

    pub(crate) fn items(&self) -> impl Iterator<Item = At<'a>> + use<'a> {
        let (path, judgement, of) = (self.path.clone(), self.judgement, self.of.element());
        let list = self.value.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().enumerate().map(move |(index, value)| At {
            path: path.index(index),
            value,
            judgement,
            of,
        })
    }

    /// The elements of a map, each at its key.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'a str, At<'a>)> + use<'a> {
        let (path, judgement, of) = (self.path.clone(), self.judgement, self.of.element());
        let map = self.value.as_object().into_iter().flatten();
        map.map(move |(key, value)| {
            (key.as_str(), At { path: path.key(key), value, judgement, of })
        })
    }

    /// The whole object as it was before, if there was one.
    pub(crate) fn old(&self) -> Option<&'a Value> {
        self.judgement.old
    }

    // What is there.

    pub(crate) fn is_set(&self) -> bool {
        !self.value.is_null()
    }

    /// Absent, or empty text, list, map.
    pub(crate) fn is_empty(&self) -> bool {
        match self.value {
            Value::Null => true,
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => false,
        }
    }

    #[cfg_attr(test, track_caller)]
    pub(crate) fn has(&self, name: &str) -> bool {
        self.of.field(name, &self.path);
        self.value.get(name).is_some_and(|value| !value.is_null())
    }

    pub(crate) fn len(&self) -> usize {
        match self.value {
            Value::Array(list) => list.len(),
            Value::Object(map) => map.len(),
            Value::String(text) => text.len(),
            _ => 0,
        }
    }

    pub(crate) fn str(&self) -> &'a str {
        self.value.as_str().unwrap_or_default()
    }

    pub(crate) fn is(&self, text: &str) -> bool {
        self.str() == text
    }

    pub(crate) fn number(&self) -> Option<i64> {
        self.value.as_i64()
    }

    pub(crate) fn int(&self) -> i64 {
        self.number().unwrap_or_default()
    }

    pub(crate) fn bool(&self) -> bool {
        self.value.as_bool().unwrap_or_default()
    }

    pub(crate) fn strings(&self) -> Vec<&'a str> {
        let list = self.value.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().filter_map(Value::as_str).collect()
    }

    pub(crate) fn string_set(&self) -> HashSet<&'a str> {
        self.strings().into_iter().collect()
    }

    // What is wrong with it.

    pub(crate) fn errors(&self) -> std::cell::RefMut<'a, FieldErrors> {
        self.judgement.errors.borrow_mut()
    }

    pub(crate) fn required(&self, detail: &str) {
        self.errors().required(&self.path, detail);
    }

    pub(crate) fn invalid(&self, detail: &str) {
        // The one type whose fields upstream shows in another order than the tree has.
        match (self.value.get("matchLabels"), self.value.get("matchExpressions")) {
            (Some(labels), Some(terms)) => {
                let shown = format!(r#"{{"matchLabels":{labels},"matchExpressions":{terms}}}"#);
                self.errors().invalid_shown(&self.path, Some(&shown), detail);
            }
            _ => self.errors().invalid(&self.path, self.value, detail),
        }
    }

    /// For texts: a missing value is shown as empty.
    pub(crate) fn invalid_text(&self, detail: &str) {
        self.errors().invalid(&self.path, self.str(), detail);
    }

    pub(crate) fn invalid_as(&self, shown: impl serde::Serialize, detail: &str) {
        self.errors().invalid(&self.path, shown, detail);
    }

    pub(crate) fn forbidden(&self, detail: &str) {
        self.errors().forbidden(&self.path, detail);
    }

    pub(crate) fn unsupported(&self, supported: &[&str]) {
        self.errors().not_supported(&self.path, self.str(), supported);
    }

    pub(crate) fn duplicate(&self) {
        self.errors().duplicate(&self.path, self.value);
    }

    pub(crate) fn duplicate_text(&self) {
        self.errors().duplicate(&self.path, self.str());
    }

    pub(crate) fn not_found(&self) {
        self.errors().not_found(&self.path, self.value);
    }

    pub(crate) fn too_long(&self, limit: usize) {
        self.errors().too_long(&self.path, limit);
    }

    pub(crate) fn too_many(&self, limit: usize) {
        self.errors().too_many(&self.path, self.len(), limit);
    }

    // Checks that many kinds share.

    /// Is it there? Says that it must be.
    pub(crate) fn need(&self) -> bool {
        if self.is_empty() {
            self.required("");
        }
        !self.is_empty()
    }

    pub(crate) fn name(&self, check: NameCheck) {
        for why in check(self.str()) {
            self.invalid_text(&why);
        }
    }

    /// There and well-formed.
    pub(crate) fn need_name(&self, check: NameCheck) {
        if self.need() {
            self.name(check);
        }
    }

    /// Well-formed, if it is there.
    pub(crate) fn any_name(&self, check: NameCheck) {
        if !self.is_empty() {
            self.name(check);
        }
    }

    pub(crate) fn at_least(&self, least: i64) {
        if self.number().is_some_and(|number| number < least) {
            self.invalid(&format!("must be greater than or equal to {least}"));
        }
    }

    pub(crate) fn not_negative(&self) {
        self.at_least(0);
    }

    pub(crate) fn port(&self) {
        if let Some(why) = machinery::names::port_number(self.int()) {
            self.invalid_as(self.int(), why);
        }
    }

    /// One of these, absence included only if empty text is one of them.
    pub(crate) fn one_of(&self, supported: &[&str]) {
        if !supported.contains(&self.str()) {
            self.unsupported(supported);
        }
    }

    /// One of these, if it is there.
    pub(crate) fn any_of(&self, supported: &[&str]) {
        if self.is_set() {
            self.one_of(supported);
        }
    }

    pub(crate) fn unchanged(&self, old: &At<'_>) {
        if self.value != old.value {
            self.invalid("field is immutable");
        }
    }

    /// The same for a text, which is empty if it is missing.
    pub(crate) fn unchanged_text(&self, old: &At<'_>) {
        if self.str() != old.str() {
            self.invalid_text("field is immutable");
        }
    }

    /// Labels, and selectors that are maps of labels.
    pub(crate) fn labels(&self) {
        for (key, value) in self.entries() {
            for why in machinery::names::qualified_name(key) {
                self.errors().invalid(&self.path, key, &why);
            }
            for why in machinery::names::label_value(value.str()) {
                self.errors().invalid(&self.path, value.value, &why);
            }
        }
    }

    pub(crate) fn annotations(&self) {
        for (key, _) in self.entries() {
            for why in machinery::names::qualified_name(&key.to_lowercase()) {
                self.errors().invalid(&self.path, key, &why);
            }
        }
    }

    /// `metav1.LabelSelector`.
    pub(crate) fn selector(&self) {
        self.get("matchLabels").labels();
        for term in self.get("matchExpressions").items() {
            let values = term.get("values");
            match term.get("operator").str() {
                "In" | "NotIn" if values.is_empty() => {
                    values.required("must be specified when `operator` is 'In' or 'NotIn'");
                }
                "In" | "NotIn" => {}
                "Exists" | "DoesNotExist" if !values.is_empty() => values.forbidden(
                    "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                ),
                "Exists" | "DoesNotExist" => {}
                _ => term.get("operator").invalid_text("not a valid selector operator"),
            }
            term.get("key").name(machinery::names::qualified_name);
            for value in values.items() {
                value.name(machinery::names::label_value);
            }
        }
    }

    pub(crate) fn is_empty_selector(&self) -> bool {
        self.get("matchLabels").is_empty() && self.get("matchExpressions").is_empty()
    }

    /// Reports the second and later elements whose key came before.
    pub(crate) fn unique(&self, key: impl Fn(&At<'a>) -> String, at: impl Fn(&At<'a>) -> At<'a>) {
        let mut seen = HashSet::new();
        for item in self.items() {
            let key = key(&item);
            if !seen.insert(key) {
                at(&item).duplicate();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use machinery::names;
    use serde_json::json;

    use super::*;

    #[test]
    fn places_tell_what_is_wrong_where() {
        let tree = json!({
            "spec": {"replicas": -1, "names": ["a", "B"], "policy": "Maybe", "labels": {"a b": "c"}},
        });
        let errors = judge(&tree, |at| {
            let spec = at.get("spec");
            spec.get("replicas").not_negative();
            spec.get("missing.deeper").need();
            spec.get("policy").one_of(&["Always", "Never"]);
            for name in spec.get("names").items() {
                name.need_name(names::port_name);
            }
            assert_eq!(spec.get("labels").entries().count(), 1);
        });
        let texts: Vec<String> = errors.0.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "spec.replicas: Invalid value: -1: must be greater than or equal to 0",
                "spec.missing.deeper: Required value",
                "spec.policy: Unsupported value: \"Maybe\": supported values: \"Always\", \"Never\"",
                "spec.names[1]: Invalid value: \"B\": must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)",
                "spec.names[1]: Invalid value: \"B\": must contain at least one letter (a-z)",
            ]
        );
    }
}
