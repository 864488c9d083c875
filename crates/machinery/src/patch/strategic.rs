//! Strategic merge: a merge patch that knows which lists are keyed.
//!
//! Directives: `$patch: replace|delete|merge` in maps and list elements, `$retainKeys`,
//! `$deleteFromPrimitiveList/FIELD`, `$setElementOrder/FIELD`. Elements of a merged list come in the
//! patch's order; those that only the object has keep their place relative to the ones that both
//! have. Upstream: `k8s.io/apimachinery/pkg/util/strategicpatch`.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::{Map, Value};

use super::{FieldFacts, PatchError, Schema};

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const DELETE_FROM: &str = "$deleteFromPrimitiveList/";
const SET_ORDER_NAME: &str = "$setElementOrder";
const SET_ORDER: &str = "$setElementOrder/";

/// Applies `patch` to `document`, an object of `definition`.
pub fn strategic(
    document: &Value,
    patch: &[u8],
    schema: Option<&dyn Schema>,
    definition: &str,
) -> Result<Value, PatchError> {
    let patch: Value =
        serde_json::from_slice(patch).map_err(|error| PatchError::Malformed(error.to_string()))?;
    let (Value::Object(document), Value::Object(patch)) = (document.clone(), patch) else {
        return Err(PatchError::Malformed("a strategic merge patch must be a JSON object".into()));
    };
    let schema = schema.ok_or_else(|| {
        PatchError::Malformed("strategic merge patches are not supported for this kind".into())
    })?;
    Merger { schema }.map(document, patch, Some(definition)).map(Value::Object)
}

struct Merger<'a> {
    schema: &'a dyn Schema,
}

type Fields = Map<String, Value>;

impl Merger<'_> {
    fn facts(&self, definition: Option<&str>, field: &str) -> FieldFacts {
        definition.and_then(|name| self.schema.field(name, field)).unwrap_or_default()
    }

    fn map(
        &self,
        mut original: Fields,
        mut patch: Fields,
        definition: Option<&str>,
    ) -> Result<Fields, PatchError> {
        match patch.remove(PATCH) {
            None => {}
            Some(Value::String(directive)) => match directive.as_str() {
                "replace" => return Ok(patch),
                "delete" => return Ok(Fields::new()),
                "merge" => {}
                _ => return Err(unknown_directive(directive.into(), patch)),
            },
            Some(other) => return Err(unknown_directive(other, patch)),
        }
        if let Some(Value::Array(kept)) = patch.remove(RETAIN_KEYS) {
            let kept: HashSet<&str> = kept.iter().filter_map(Value::as_str).collect();
            original.retain(|key, _| kept.contains(key.as_str()));
        }
        let (mut orders, mut sent) = (vec![], BTreeMap::new());
        for (key, value) in patch {
            if let Some(field) = key.strip_prefix(DELETE_FROM) {
                delete_from(&mut original, field, &value);
            } else if let Some(field) = key.strip_prefix(SET_ORDER) {
                orders.push((field.to_owned(), value));
            } else {
                sent.extend(value.as_array().map(|list| (key.clone(), list.clone())));
                self.field(&mut original, key, value, definition)?;
            }
        }
        for (field, order) in orders {
            if let (Some(list), Value::Array(order)) = (sent.get(&field), &order) {
                let key = self.facts(definition, &field).merge_key;
                check_order(list, order, key.as_deref())?;
            }
            self.reorder(&mut original, &field, order, definition);
        }
        Ok(original)
    }

    fn field(
        &self,
        original: &mut Fields,
        key: String,
        value: Value,
        definition: Option<&str>,
    ) -> Result<(), PatchError> {
        if value.is_null() {
            original.remove(&key);
            return Ok(());
        }
        let facts = self.facts(definition, &key);
        let merged = match (original.remove(&key), value) {
            (Some(Value::Object(old)), Value::Object(new)) => {
                Value::Object(self.map(old, new, facts.definition.as_deref())?)
            }
            (Some(Value::Array(old)), Value::Array(new)) if facts.merges => {
                Value::Array(self.list(old, new, &facts)?)
            }
            (_, Value::Array(new)) if facts.merges => {
                Value::Array(self.list(vec![], new, &facts)?)
            }
            (_, new) => match without_directives(new) {
                Some(new) => new,
                None => return Ok(()),
            },
        };
        original.insert(key, merged);
        Ok(())
    }

    fn list(
        &self,
        original: Vec<Value>,
        patch: Vec<Value>,
        facts: &FieldFacts,
    ) -> Result<Vec<Value>, PatchError> {
        let Some(key) = facts
            .merge_key
            .as_deref()
            .filter(|_| patch.iter().chain(&original).all(Value::is_object))
        else {
            let mut seen = HashSet::new();
            let all = original.iter().chain(&patch).filter(|one| seen.insert(*one));
            let merged: Vec<Value> = all.cloned().collect();
            return Ok(in_order(merged, &patch, &original, None));
        };
        let (mut gone, mut plain) = (HashSet::new(), vec![]);
        let mut replaces = false;
        for element in patch {
            match element.get(PATCH).and_then(Value::as_str) {
                None | Some("merge") => plain.push(element),
                Some("replace") => replaces = true,
                Some("delete") => {
                    let wanted = element.get(key).ok_or_else(|| no_key(key))?;
                    gone.insert(wanted.clone());
                }
                Some(_) => return Err(not_a_directive(&element)),
            }
        }
        if replaces {
            return Ok(plain);
        }
        let stays = |one: &&Value| one.get(key).is_none_or(|name| !gone.contains(name));
        let mut merged: Vec<Value> = original.iter().filter(stays).cloned().collect();
        let mut places: HashMap<Value, usize> = HashMap::new();
        for (at, one) in merged.iter().enumerate() {
            if let Some(name) = one.get(key) {
                places.entry(name.clone()).or_insert(at);
            }
        }
        for element in &plain {
            let wanted = element.get(key).ok_or_else(|| no_key(key))?;
            match places.get(wanted).copied() {
                Some(at) => {
                    let (Value::Object(old), Value::Object(new)) =
                        (merged[at].take(), element.clone())
                    else {
                        unreachable!("all elements are objects");
                    };
                    merged[at] = Value::Object(self.map(old, new, facts.definition.as_deref())?);
                }
                None => {
                    places.insert(wanted.clone(), merged.len());
                    merged.extend(without_directives(element.clone()));
                }
            }
        }
        Ok(in_order(merged, &plain, &original, Some(key)))
    }

    fn reorder(&self, fields: &mut Fields, field: &str, order: Value, definition: Option<&str>) {
        let key = self.facts(definition, field).merge_key;
        if let (Some(Value::Array(list)), Value::Array(order)) = (fields.get_mut(field), order) {
            let before = std::mem::take(list);
            let key = key.filter(|_| before.iter().all(Value::is_object));
            *list = in_order(before.clone(), &order, &before, key.as_deref());
        }
    }
}

/// The positions of a list's elements by their keys; of equal elements, the first counts.
struct Places<'a> {
    key: Option<&'a str>,
    all: HashMap<Option<&'a Value>, usize>,
}

impl<'a> Places<'a> {
    fn of(list: &'a [Value], key: Option<&'a str>) -> Self {
        let mut all = HashMap::with_capacity(list.len());
        for (at, one) in list.iter().enumerate() {
            all.entry(told_by(one, key)).or_insert(at);
        }
        Self { key, all }
    }

    fn index(&self, one: &Value) -> Option<usize> {
        self.all.get(&told_by(one, self.key)).copied()
    }
}

/// The identity of an element: the merge key's value, or the element itself.
fn told_by<'a>(one: &'a Value, key: Option<&str>) -> Option<&'a Value> {
    match key {
        Some(key) => one.get(key),
        None => Some(one),
    }
}

/// The elements of the patch in the patch's order, the others woven in where they stood.
fn in_order(
    merged: Vec<Value>,
    patch: &[Value],
    server: &[Value],
    key: Option<&str>,
) -> Vec<Value> {
    let (patch, server) = (Places::of(patch, key), Places::of(server, key));
    let (mut ours, mut others): (Vec<Value>, Vec<Value>) =
        merged.into_iter().partition(|one| patch.index(one).is_some());
    ours.sort_by_cached_key(|one| patch.index(one));
    others.sort_by_cached_key(|one| server.index(one));
    let mut woven = Vec::with_capacity(ours.len() + others.len());
    let (mut ours, mut others) = (ours.into_iter().peekable(), others.into_iter().peekable());
    while let (Some(our), Some(other)) = (ours.peek(), others.peek()) {
        let before = match (server.index(other), server.index(our)) {
            (Some(other), Some(our)) => other < our,
            _ => false,
        };
        woven.extend(if before { others.next() } else { ours.next() });
    }
    woven.extend(ours);
    woven.extend(others);
    woven
}

/// All that the patch has of a list must be in the order that it sets, and in that order.
fn check_order(list: &[Value], order: &[Value], key: Option<&str>) -> Result<(), PatchError> {
    let is_sent = |one: &&Value| {
        one.get(PATCH).and_then(Value::as_str).is_none_or(|directive| directive == "merge")
    };
    let ordered = Places::of(order, key);
    let places = list.iter().filter(is_sent).map(|one| ordered.index(one));
    let places: Option<Vec<usize>> = places.collect();
    if places.is_some_and(|places| places.is_sorted()) {
        return Ok(());
    }
    let shown = |list: &[Value]| {
        let all: Vec<String> = list.iter().map(go_value).collect();
        format!("[{}]", all.join(" "))
    };
    Err(PatchError::Broken(format!(
        "The order in patch list:\n{}\n doesn't match {SET_ORDER_NAME} list:\n{}\n",
        shown(list),
        shown(order)
    )))
}

/// A value as Go prints it.
fn go_value(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".into(),
        Value::String(text) => text.clone(),
        Value::Array(list) => {
            format!("[{}]", list.iter().map(go_value).collect::<Vec<_>>().join(" "))
        }
        Value::Object(fields) => go_fields(fields),
        other => other.to_string(),
    }
}

fn go_fields(fields: &Fields) -> String {
    let sorted: BTreeMap<&String, &Value> = fields.iter().collect();
    let shown: Vec<String> =
        sorted.into_iter().map(|(key, value)| format!("{key}:{}", go_value(value))).collect();
    format!("map[{}]", shown.join(" "))
}

fn delete_from(original: &mut Fields, field: &str, values: &Value) {
    if let (Some(Value::Array(list)), Value::Array(values)) = (original.get_mut(field), values) {
        let gone: HashSet<&Value> = values.iter().collect();
        list.retain(|one| !gone.contains(one));
    }
}

/// A new subtree in its stored form: without directives and nulls. `None`: it deletes itself.
fn without_directives(value: Value) -> Option<Value> {
    match value {
        Value::Object(fields) => {
            // Upstream drops a map with a directive for a map that is not there, whatever it says.
            if fields.contains_key(PATCH) {
                return None;
            }
            let keep = |(key, value): (String, Value)| {
                let directive = key == PATCH
                    || key == RETAIN_KEYS
                    || key.starts_with(DELETE_FROM)
                    || key.starts_with(SET_ORDER);
                if directive || value.is_null() {
                    None
                } else {
                    Some((key, without_directives(value)?))
                }
            };
            Some(Value::Object(fields.into_iter().filter_map(keep).collect()))
        }
        Value::Array(list) => {
            Some(Value::Array(list.into_iter().filter_map(without_directives).collect()))
        }
        other => Some(other),
    }
}

fn unknown_directive(directive: Value, mut patch: Fields) -> PatchError {
    patch.insert(PATCH.into(), directive);
    not_a_directive(&Value::Object(patch))
}

fn not_a_directive(patch: &Value) -> PatchError {
    let directive = go_value(&patch[PATCH]);
    PatchError::Broken(format!("unknown patch type: {directive} in map: {}", go_value(patch)))
}

fn no_key(key: &str) -> PatchError {
    PatchError::Malformed(format!("map: does not contain declared merge key: {key}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// `list` merges by `name`, `set` merges scalars, `plain` is replaced.
    struct Facts;

    impl Schema for Facts {
        fn field(&self, _: &str, field: &str) -> Option<FieldFacts> {
            let facts = match field {
                "list" => FieldFacts {
                    merge_key: Some("name".into()),
                    merges: true,
                    definition: Some("element".into()),
                    ..FieldFacts::default()
                },
                "set" => FieldFacts { merges: true, ..FieldFacts::default() },
                _ => FieldFacts { definition: Some("other".into()), ..FieldFacts::default() },
            };
            Some(facts)
        }
    }

    #[test]
    fn what_upstream_cannot_do_is_told_in_its_words() {
        for (patch, expected) in [
            (
                json!({"list":[{"name":"x","$patch":"bogus"}]}),
                "unknown patch type: bogus in map: map[$patch:bogus name:x]",
            ),
            (json!({"m":{"$patch":"b"}}), "unknown patch type: b in map: map[$patch:b]"),
            (
                json!({"list":[{"name":"y","v":1}],"$setElementOrder/list":[{"name":"x"}]}),
                "The order in patch list:\n[map[name:y v:1]]\n doesn't match $setElementOrder list:\n[map[name:x]]\n",
            ),
        ] {
            let document = json!({"list":[{"name":"x"}],"m":{"a":1}});
            let text = patch.to_string();
            let refused = strategic(&document, text.as_bytes(), Some(&Facts), "root");
            assert_eq!(refused, Err(PatchError::Broken(expected.into())), "{text}");
        }
    }

    #[test]
    fn merges_as_upstream_does() {
        let n = |name: &str| json!({ "name": name });
        for (document, patch, expected) in [
            (json!({"a":1,"b":{"c":2}}), json!({"a":null,"b":{"d":3}}), json!({"b":{"c":2,"d":3}})),
            (json!({"plain":[1,2]}), json!({"plain":[3]}), json!({"plain":[3]})),
            (json!({"set":[1,2]}), json!({"set":[3,2]}), json!({"set":[3,1,2]})),
            (
                json!({"list":[{"name":"x","v":1},{"name":"y"}]}),
                json!({"list":[{"name":"x","v":2},{"name":"z"}]}),
                json!({"list":[{"name":"x","v":2},{"name":"z"},{"name":"y"}]}),
            ),
            (
                json!({"list":[n("x"), n("y")]}),
                json!({"list":[{"name":"x","$patch":"delete"}]}),
                json!({"list":[n("y")]}),
            ),
            (
                json!({"list":[n("x"), n("y")]}),
                json!({"list":[{"$patch":"replace"}, n("z")]}),
                json!({"list":[n("z")]}),
            ),
            (
                json!({"list":[n("a"), n("b")]}),
                json!({"$setElementOrder/list":[n("b"), n("a")]}),
                json!({"list":[n("b"), n("a")]}),
            ),
            (
                json!({"set":[1,2,3]}),
                json!({"$deleteFromPrimitiveList/set":[2]}),
                json!({"set":[1,3]}),
            ),
            (
                json!({"m":{"a":1,"b":2}}),
                json!({"m":{"$retainKeys":["b","c"],"c":3}}),
                json!({"m":{"b":2,"c":3}}),
            ),
            (json!({"m":{"a":1}}), json!({"m":{"$patch":"replace","b":2}}), json!({"m":{"b":2}})),
            (json!({}), json!({"m":{"a":null,"b":1}}), json!({"m":{"b":1}})),
            (json!({}), json!({"m":{"$patch":"replace","b":1}}), json!({})),
        ] {
            let text = patch.to_string();
            let merged = strategic(&document, text.as_bytes(), Some(&Facts), "root");
            assert_eq!(merged, Ok(expected), "{document} + {text}");
        }
    }

    /// What looks for each element among all takes sixty-four times as long for eight times as many.
    #[test]
    fn time_grows_with_the_length_of_lists() {
        let list = |count: usize, turned: bool| -> Value {
            let at = |n: usize| if turned { count - 1 - n } else { n };
            (0..count).map(|n| json!({"name": format!("n{}", at(n)), "v": n})).collect()
        };
        let set = |count: usize| -> Value { (0..count).map(|n| format!("s{n}")).collect() };
        let took = |count: usize| {
            let document = json!({"list": list(count, false), "set": set(count)});
            let gone: Value = (0..count / 2)
                .map(|n| json!({"name": format!("n{n}"), "$patch": "delete"}))
                .collect();
            let patches = [
                json!({"list": list(count, true), "$setElementOrder/list": list(count, true),
                    "set": set(count)}),
                json!({"list": gone, "$deleteFromPrimitiveList/set": set(count / 2)}),
            ];
            let once = || {
                let begun = base::clock::busy();
                for patch in &patches {
                    let text = patch.to_string();
                    strategic(&document, text.as_bytes(), Some(&Facts), "root").expect("merged");
                }
                base::clock::busy().saturating_sub(begun)
            };
            (0..3).map(|_| once()).min().expect("three times")
        };
        let (few, lots) = (took(500), took(4000));
        assert!(lots < few * 20, "{few:?} for 500, {lots:?} for 4000");
    }
}
