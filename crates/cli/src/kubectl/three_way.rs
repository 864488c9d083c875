//! Computes the patch of `apply`, from the live object to the manifest.
//!
//! In: `original` (the last applied manifest), `modified` (the manifest), `current` (the live object).
//! Out: a patch. It sets fields of the manifest that differ in the object, and deletes fields that were
//! applied last but are no longer in the manifest; all other fields stay.
//!
//! With a [`Schema`] the patch is a strategic merge patch: keyed lists are compared element by
//! element. Without one it is a JSON merge patch, and lists are replaced.
//!
//! Upstream: `strategicpatch.CreateThreeWayMergePatch`, `jsonmergepatch.CreateThreeWayJSONMergePatch`.

use machinery::patch::{FieldFacts, Schema};
use serde_json::{Map, Value, json};

type Fields = Map<String, Value>;

pub struct Differ<'a> {
    pub schema: Option<&'a dyn Schema>,
}

impl Differ<'_> {
    /// `definition` is the schema's name for the object's kind.
    pub fn patch(
        &self,
        original: &Value,
        modified: &Value,
        current: &Value,
        definition: Option<&str>,
    ) -> Result<Value, String> {
        let empty = Fields::new();
        let fields = |value| Value::as_object(value).unwrap_or(&empty);
        let patch = self.fields(fields(original), fields(modified), fields(current), definition)?;
        Ok(Value::Object(patch))
    }

    fn facts(&self, definition: Option<&str>, field: &str) -> FieldFacts {
        let schema = self.schema.zip(definition);
        schema.and_then(|(schema, name)| schema.field(name, field)).unwrap_or_default()
    }

    fn fields(
        &self,
        original: &Fields,
        modified: &Fields,
        current: &Fields,
        definition: Option<&str>,
    ) -> Result<Fields, String> {
        let mut patch = Fields::new();
        for (key, wanted) in modified {
            let Some(live) = current.get(key) else {
                if !wanted.is_null() {
                    patch.insert(key.clone(), wanted.clone());
                }
                continue;
            };
            let before = original.get(key);
            let facts = self.facts(definition, key);
            match (wanted, live) {
                (Value::Object(wanted), Value::Object(live)) => {
                    let before = before.and_then(Value::as_object);
                    let inner = self.inner(before, wanted, live, &facts)?;
                    if !inner.is_empty() {
                        patch.insert(key.clone(), Value::Object(inner));
                    }
                }
                (Value::Array(wanted), Value::Array(live)) if facts.merges => {
                    let before = before.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
                    let lists = Lists { before, wanted, live };
                    self.list(&mut patch, key, &lists, &facts)?;
                }
                _ if is_same(wanted, live) => {}
                _ => {
                    patch.insert(key.clone(), wanted.clone());
                }
            }
        }
        for key in original.keys() {
            if !modified.contains_key(key) && current.contains_key(key) {
                patch.insert(key.clone(), Value::Null);
            }
        }
        Ok(patch)
    }

    fn inner(
        &self,
        before: Option<&Fields>,
        wanted: &Fields,
        live: &Fields,
        facts: &FieldFacts,
    ) -> Result<Fields, String> {
        let nothing = Fields::new();
        let before = before.unwrap_or(&nothing);
        let mut inner = self.fields(before, wanted, live, facts.definition.as_deref())?;
        if facts.retain_keys && !inner.is_empty() {
            let keys: Vec<&String> = wanted.keys().collect();
            inner.insert("$retainKeys".into(), json!(keys));
        }
        Ok(inner)
    }

    fn list(
        &self,
        patch: &mut Fields,
        field: &str,
        lists: &Lists,
        facts: &FieldFacts,
    ) -> Result<(), String> {
        let elements = lists.before.iter().chain(lists.wanted).chain(lists.live);
        let key = facts.merge_key.as_deref().filter(|_| elements.clone().all(Value::is_object));
        let Some(key) = key else {
            scalars(patch, field, lists);
            return Ok(());
        };
        if let Some(odd) = elements.clone().find(|one| one.get(key).is_none()) {
            return Err(format!("map: {odd} does not contain declared merge key: {key}"));
        }
        let mut changes = vec![];
        for wanted in lists.wanted {
            let Some(live) = find(lists.live, key, wanted) else {
                changes.push(wanted.clone());
                continue;
            };
            let before = find(lists.before, key, wanted).and_then(Value::as_object);
            if let (Some(wanted), Some(live)) = (wanted.as_object(), live.as_object()) {
                let mut inner = self.inner(before, wanted, live, facts)?;
                if !inner.is_empty() {
                    inner.insert(key.to_owned(), wanted[key].clone());
                    changes.push(Value::Object(inner));
                }
            }
        }
        for gone in lists.before.iter().filter(|one| find(lists.wanted, key, one).is_none()) {
            if find(lists.live, key, gone).is_some() {
                changes.push(json!({ "$patch": "delete", (key): gone[key] }));
            }
        }
        let kept: Vec<&Value> =
            lists.live.iter().filter(|one| find(lists.wanted, key, one).is_some()).collect();
        let in_order = kept.iter().zip(lists.wanted).all(|(live, wanted)| live[key] == wanted[key]);
        if !changes.is_empty() || !in_order {
            let order: Vec<Value> =
                lists.wanted.iter().map(|one| json!({ (key): one[key] })).collect();
            patch.insert(format!("$setElementOrder/{field}"), Value::Array(order));
        }
        if !changes.is_empty() {
            patch.insert(field.to_owned(), Value::Array(changes));
        }
        Ok(())
    }
}

struct Lists<'v> {
    before: &'v [Value],
    wanted: &'v [Value],
    live: &'v [Value],
}

fn scalars(patch: &mut Fields, field: &str, lists: &Lists) {
    let added: Vec<Value> =
        lists.wanted.iter().filter(|one| !lists.live.contains(one)).cloned().collect();
    let gone = |one: &&Value| !lists.wanted.contains(one) && lists.live.contains(one);
    let removed: Vec<Value> = lists.before.iter().filter(gone).cloned().collect();
    if added.is_empty() && removed.is_empty() {
        return;
    }
    patch.insert(format!("$setElementOrder/{field}"), json!(lists.wanted));
    if !added.is_empty() {
        patch.insert(field.to_owned(), Value::Array(added));
    }
    if !removed.is_empty() {
        patch.insert(format!("$deleteFromPrimitiveList/{field}"), Value::Array(removed));
    }
}

fn find<'v>(list: &'v [Value], key: &str, like: &Value) -> Option<&'v Value> {
    list.iter().find(|one| one.get(key) == like.get(key))
}

/// `1` and `1.0` are the same number.
fn is_same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|number| b.as_f64() == Some(number))
}

/// The patch strategies in a server's OpenAPI v3 document.
pub struct OpenApi {
    schemas: Value,
}

impl OpenApi {
    pub fn new(mut document: Value) -> Self {
        Self { schemas: document["components"]["schemas"].take() }
    }

    /// The name of a kind's definition, if the document describes its fields.
    pub fn definition(&self, group: &str, version: &str, kind: &str) -> Option<String> {
        let wanted = json!({ "group": group, "kind": kind, "version": version });
        let is_it = |schema: &Value| {
            let kinds = schema["x-kubernetes-group-version-kind"].as_array();
            kinds.is_some_and(|kinds| kinds.contains(&wanted)) && schema["properties"].is_object()
        };
        let schemas = self.schemas.as_object()?;
        schemas.iter().find(|(_, schema)| is_it(schema)).map(|(name, _)| name.clone())
    }
}

impl Schema for OpenApi {
    fn field(&self, definition: &str, field: &str) -> Option<FieldFacts> {
        let schema = self.schemas.get(definition)?["properties"].get(field)?;
        let strategy = schema["x-kubernetes-patch-strategy"].as_str().unwrap_or_default();
        let has = |word: &str| strategy.split(',').any(|one| one == word);
        let element = if schema["items"].is_object() { &schema["items"] } else { schema };
        Some(FieldFacts {
            merge_key: schema["x-kubernetes-patch-merge-key"].as_str().map(Into::into),
            merges: has("merge"),
            retain_keys: has("retainKeys"),
            definition: reference(element),
            ..FieldFacts::default()
        })
    }
}

/// `$ref`, or the only one in `allOf`, which schemas with a default have.
fn reference(schema: &Value) -> Option<String> {
    let text = schema["$ref"].as_str().or(schema["allOf"][0]["$ref"].as_str())?;
    text.rsplit('/').next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> OpenApi {
        OpenApi::new(json!({"components":{"schemas":{
            "Deployment": {
                "x-kubernetes-group-version-kind": [{"group":"apps","kind":"Deployment","version":"v1"}],
                "properties": {"spec": {"allOf":[{"$ref":"#/components/schemas/Spec"}]}, "metadata": {"type":"object"}}},
            "Spec": {"properties": {
                "containers": {"type":"array","items":{"allOf":[{"$ref":"#/components/schemas/Container"}]},
                    "x-kubernetes-patch-merge-key":"name","x-kubernetes-patch-strategy":"merge"},
                "finalizers": {"type":"array","items":{"type":"string"},"x-kubernetes-patch-strategy":"merge"},
                "strategy": {"allOf":[{"$ref":"#/components/schemas/Strategy"}],"x-kubernetes-patch-strategy":"retainKeys"},
                "args": {"type":"array"}}},
            "Container": {"properties": {"name": {}, "image": {}}},
            "Strategy": {"properties": {"type": {}}},
        }}}))
    }

    /// Checks the patch, and that a server that applies it to the live object gets the result.
    fn check(original: Value, modified: Value, current: Value, expected: Value, result: Value) {
        let schema = document();
        let name = schema.definition("apps", "v1", "Deployment").expect("described");
        let wrap = |value: &Value| json!({ "spec": value });
        let (original, modified, current) = (wrap(&original), wrap(&modified), wrap(&current));
        let differ = Differ { schema: Some(&schema) };
        let patch = differ.patch(&original, &modified, &current, Some(&name)).expect("a patch");
        let expected = if expected == json!({}) { json!({}) } else { wrap(&expected) };
        assert_eq!(patch, expected);
        let text = patch.to_string();
        let applied = machinery::patch::strategic(&current, text.as_bytes(), Some(&schema), &name);
        assert_eq!(applied, Ok(wrap(&result)));
    }

    #[test]
    fn fields_of_three_origins_merge() {
        check(
            json!({"a":1,"gone":2}),
            json!({"a":3,"new":{"x":1}}),
            json!({"a":1,"gone":2,"theirs":4}),
            json!({"a":3,"new":{"x":1},"gone":null}),
            json!({"a":3,"new":{"x":1},"theirs":4}),
        );
        check(
            json!({"a":1}),
            json!({"a":1}),
            json!({"a":1,"b":2}),
            json!({}),
            json!({"a":1,"b":2}),
        );
        check(json!({"a":1}), json!({}), json!({}), json!({}), json!({}));
        check(
            json!({"args":[1]}),
            json!({"args":[2]}),
            json!({"args":[1,3]}),
            json!({"args":[2]}),
            json!({"args":[2]}),
        );
    }

    #[test]
    fn keyed_lists_merge_by_element() {
        check(
            json!({"containers":[{"name":"a","image":"1"},{"name":"old"}]}),
            json!({"containers":[{"name":"a","image":"2"},{"name":"new"}]}),
            json!({"containers":[{"name":"a","image":"1","policy":"x"},{"name":"old"},{"name":"sidecar"}]}),
            json!({
                "$setElementOrder/containers":[{"name":"a"},{"name":"new"}],
                "containers":[{"name":"a","image":"2"},{"name":"new"},{"$patch":"delete","name":"old"}],
            }),
            json!({"containers":[{"name":"a","image":"2","policy":"x"},{"name":"new"},{"name":"sidecar"}]}),
        );
        check(
            json!({"finalizers":["a","b"]}),
            json!({"finalizers":["a","c"]}),
            json!({"finalizers":["a","b","x"]}),
            json!({
                "$setElementOrder/finalizers":["a","c"],
                "finalizers":["c"],
                "$deleteFromPrimitiveList/finalizers":["b"],
            }),
            json!({"finalizers":["a","c","x"]}),
        );
    }

    #[test]
    fn unions_keep_only_their_keys() {
        check(
            json!({"strategy":{"type":"Recreate"}}),
            json!({"strategy":{"type":"Recreate"}}),
            json!({"strategy":{"type":"RollingUpdate","rollingUpdate":{"maxSurge":1}}}),
            json!({"strategy":{"$retainKeys":["type"],"type":"Recreate"}}),
            json!({"strategy":{"type":"Recreate"}}),
        );
    }

    #[test]
    fn without_a_schema_lists_are_replaced() {
        let patch = Differ { schema: None }.patch(
            &json!({"l":[{"name":"a"}],"x":1}),
            &json!({"l":[{"name":"b"}]}),
            &json!({"l":[{"name":"a"},{"name":"c"}],"x":1}),
            None,
        );
        assert_eq!(patch, Ok(json!({"l":[{"name":"b"}],"x":null})));
    }
}
