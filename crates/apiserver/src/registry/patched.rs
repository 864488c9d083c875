//! Upstream's error for a JSON or merge patch whose result is not a valid object of its kind.
//!
//! In: the patched tree, the patch, the reason. Out: the 422 with the whole text, in the order of Go's patch:
//! the parts that the patch touched are sorted, the rest is in the order of Go's structs. Of these only
//! metadata is known here, the part that every object has.

use machinery::StatusError;
use machinery::field::{FieldErrors, Path};
use serde_json::{Map, Value};

const METADATA: &[&str] = &[
    "name",
    "generateName",
    "namespace",
    "selfLink",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "labels",
    "annotations",
    "ownerReferences",
    "finalizers",
    "managedFields",
];
const MANAGED: &[&str] =
    &["manager", "operation", "apiVersion", "time", "fieldsType", "fieldsV1", "subresource"];

/// The error of a patch.
pub(super) fn misfit(patched: &Value, patch: &[u8], why: &str) -> StatusError {
    let mut errors = FieldErrors::default();
    errors.invalid(&Path::new("patch"), text(patched, patch), why);
    StatusError::invalid("", "", "", errors)
}

/// The error of a strategic merge patch, which is shown in Go's format of a map.
pub(super) fn misfit_tree(patch: &[u8], why: &str) -> StatusError {
    let patch: Value = serde_json::from_slice(patch).unwrap_or_default();
    let mut errors = FieldErrors::default();
    errors.invalid(&Path::new("patch"), printed(&patch), why);
    StatusError::invalid("", "", "", errors)
}

/// Go's `%+v`: `map[spec:map[replicas:x]]`.
fn printed(value: &Value) -> String {
    match value {
        Value::Null => "<nil>".into(),
        Value::String(text) => text.clone(),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(printed).collect::<Vec<_>>().join(" "))
        }
        Value::Object(fields) => {
            let member = |(name, value): (&str, &Value)| format!("{name}:{}", printed(value));
            format!("map[{}]", sorted(fields).into_iter().map(member).collect::<Vec<_>>().join(" "))
        }
        other => other.to_string(),
    }
}

fn text(patched: &Value, patch: &[u8]) -> String {
    let patch: Value = serde_json::from_slice(patch).unwrap_or_default();
    let touches = match &patch {
        Value::Array(steps) => steps
            .iter()
            .any(|step| step["path"].as_str().is_some_and(|path| path.starts_with("/metadata"))),
        patch => patch["metadata"].is_object(),
    };
    let Value::Object(fields) = patched else { return patched.to_string() };
    object(&sorted(fields), |name, value| match (name, value) {
        ("metadata", Value::Object(metadata)) if !touches => metadata_text(metadata),
        (_, value) => value.to_string(),
    })
}

fn metadata_text(metadata: &Map<String, Value>) -> String {
    object(&ordered(metadata, METADATA), |name, value| match (name, value) {
        ("managedFields", Value::Array(entries)) => {
            let entry = |entry: &Value| match entry {
                Value::Object(entry) => {
                    object(&ordered(entry, MANAGED), |_, value| value.to_string())
                }
                other => other.to_string(),
            };
            format!("[{}]", entries.iter().map(entry).collect::<Vec<_>>().join(","))
        }
        (_, value) => value.to_string(),
    })
}

type Fields<'a> = Vec<(&'a str, &'a Value)>;

fn sorted(fields: &Map<String, Value>) -> Fields<'_> {
    let mut all: Fields<'_> = fields.iter().map(|(name, value)| (name.as_str(), value)).collect();
    all.sort_unstable_by_key(|(name, _)| *name);
    all
}

fn ordered<'a>(fields: &'a Map<String, Value>, order: &[&str]) -> Fields<'a> {
    let mut all = sorted(fields);
    all.sort_by_key(|(name, _)| order.iter().position(|known| known == name));
    all
}

fn object(fields: &Fields<'_>, show: impl Fn(&str, &Value) -> String) -> String {
    let members =
        fields.iter().map(|(name, value)| format!("{}:{}", Value::from(*name), show(name, value)));
    format!("{{{}}}", members.collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn untouched_parts_are_in_gos_order() {
        let patched = json!({
            "metadata": { "uid": "u", "name": "n", "managedFields": [{ "time": "t", "manager": "m" }] },
            "kind": "K", "bogus": 1,
        });
        // In the order of the tree.
        let touched = format!(r#"{{"bogus":1,"kind":"K","metadata":{}}}"#, patched["metadata"]);
        for (patch, expected) in [
            (
                json!({ "bogus": 1 }),
                r#"{"bogus":1,"kind":"K","metadata":{"name":"n","uid":"u","managedFields":[{"manager":"m","time":"t"}]}}"#,
            ),
            (json!({ "metadata": { "uid": "u" } }), touched.as_str()),
        ] {
            assert_eq!(text(&patched, patch.to_string().as_bytes()), expected);
        }
    }

    #[test]
    fn a_tree_is_shown_as_go_prints_it() {
        let patch = json!({ "spec": { "replicas": "x", "args": ["a", 1, null, true] }, "a": {} });
        let error = misfit_tree(patch.to_string().as_bytes(), "unrecognized type: int32");
        let shown = "map[a:map[] spec:map[args:[a 1 <nil> true] replicas:x]]";
        let expected =
            format!(" \"\" is invalid: patch: Invalid value: {shown:?}: unrecognized type: int32");
        assert_eq!((error.code, error.message.as_str()), (422, expected.as_str()));
    }
}
