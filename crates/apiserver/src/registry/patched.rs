//! Upstream's error for a JSON or merge patch whose result is not a valid object of its kind.
//!
//! In: the patched tree, the patch, the reason. Out: the 422 with the whole text, in the order of Go's patch:
//! the parts that the patch touched are sorted, the rest is in the order of Go's structs.

use machinery::StatusError;
use machinery::field::{FieldErrors, Path};
use serde_json::{Map, Value};

use crate::schemas::SchemaSource;

/// The error of a patch.
pub(super) fn misfit(
    patched: &Value,
    patch: &[u8],
    why: &str,
    (schemas, definition): (&dyn SchemaSource, &str),
) -> StatusError {
    let patch: Value = serde_json::from_slice(patch).unwrap_or_default();
    let mut shown = String::new();
    write(patched, Some(&Touched::by(&patch)), (schemas, definition), &mut shown);
    let mut errors = FieldErrors::default();
    errors.invalid(&Path::new("patch"), shown, why);
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

/// The objects that a patch opened, by their fields. Go writes these from maps.
#[derive(Default)]
struct Touched(Vec<(String, Self)>);

impl Touched {
    fn by(patch: &Value) -> Self {
        match patch {
            Value::Array(steps) => {
                let mut all = Self::default();
                for path in steps.iter().filter_map(|step| step["path"].as_str()) {
                    let mut at = &mut all;
                    let steps: Vec<&str> = path.split('/').skip(1).collect();
                    for step in steps.iter().take(steps.len().saturating_sub(1)) {
                        at = at.field(&step.replace("~1", "/").replace("~0", "~"));
                    }
                }
                all
            }
            Value::Object(fields) => {
                let objects = fields.iter().filter(|(_, value)| value.is_object());
                Self(objects.map(|(name, value)| (name.clone(), Self::by(value))).collect())
            }
            _ => Self::default(),
        }
    }

    fn field(&mut self, name: &str) -> &mut Self {
        let at = self.0.iter().position(|(one, _)| one == name).unwrap_or_else(|| {
            self.0.push((name.to_owned(), Self::default()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }

    fn get(&self, name: &str) -> Option<&Self> {
        self.0.iter().find(|(one, _)| one == name).map(|(_, inner)| inner)
    }
}

/// Writes a value. The definition of a map is empty.
fn write(
    value: &Value,
    touched: Option<&Touched>,
    of: (&dyn SchemaSource, &str),
    out: &mut String,
) {
    match value {
        Value::Object(fields) => write_object(fields, touched, of, out),
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                let comma = if index == 0 { "" } else { "," };
                out.push_str(comma);
                let inner = touched.and_then(|touched| touched.get(&index.to_string()));
                write(item, inner, of, out);
            }
            out.push(']');
        }
        other => out.push_str(&other.to_string()),
    }
}

fn write_object(
    fields: &Map<String, Value>,
    touched: Option<&Touched>,
    (schemas, definition): (&dyn SchemaSource, &str),
    out: &mut String,
) {
    let known = schemas.go_fields(definition);
    let place = |name: &str| known.iter().position(|field| field.name == name);
    let mut all: Vec<(&String, &Value)> = fields.iter().collect();
    all.sort_unstable_by_key(|(name, _)| *name);
    if touched.is_none() {
        all.sort_by_key(|(name, _)| place(name));
    }
    out.push('{');
    for (index, (name, value)) in all.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str(&Value::from(name.as_str()).to_string());
        out.push(':');
        // The elements of a map have the map's definition.
        let inner = match place(name) {
            Some(at) => known[at].definition,
            None if known.is_empty() => definition,
            None => "",
        };
        write(value, touched.and_then(|touched| touched.get(name)), (schemas, inner), out);
    }
    out.push('}');
}

fn sorted(fields: &Map<String, Value>) -> Vec<(&str, &Value)> {
    let mut all: Vec<_> = fields.iter().map(|(name, value)| (name.as_str(), value)).collect();
    all.sort_unstable_by_key(|(name, _)| *name);
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schemas::GoField;

    struct Schemas;

    impl SchemaSource for Schemas {
        fn definition_name(&self, _: &str, _: &str, _: &str) -> Option<String> {
            None
        }

        fn knows(&self, _: &str) -> bool {
            true
        }

        fn definition(&self, _: &str) -> Option<Value> {
            None
        }

        fn go_fields(&self, name: &str) -> Vec<GoField> {
            let field = |name, definition| GoField { name, definition, kind: "", embedded: "" };
            match name {
                "Kind" => {
                    vec![field("kind", ""), field("metadata", "Meta"), field("parts", "Part")]
                }
                "Meta" => vec![field("name", ""), field("labels", "")],
                "Part" => vec![field("z", ""), field("a", "Meta")],
                _ => vec![],
            }
        }

        fn revision(&self) -> String {
            String::new()
        }
    }

    #[test]
    fn untouched_parts_are_in_gos_order() {
        let patched = json!({
            "parts": [{ "a": { "labels": { "y": "1", "x": "2" }, "name": "n" }, "z": 1 }],
            "metadata": { "labels": {}, "name": "n" }, "kind": "K", "bogus": 1,
        });
        let parts = r#"[{"z":1,"a":{"name":"n","labels":{"x":"2","y":"1"}}}]"#;
        let opened = r#"[{"a":{"name":"n","labels":{"x":"2","y":"1"}},"z":1}]"#;
        let meta = r#"{"name":"n","labels":{}}"#;
        let sorted = r#"{"labels":{},"name":"n"}"#;
        for (patch, meta, parts) in [
            (json!({ "bogus": 1 }), meta, parts),
            (json!({ "metadata": { "x": null } }), sorted, parts),
            (json!([{ "op": "add", "path": "/metadata/x" }]), sorted, parts),
            (json!([{ "op": "add", "path": "/parts/0/z" }]), meta, opened),
        ] {
            let error = misfit(&patched, patch.to_string().as_bytes(), "w", (&Schemas, "Kind"));
            let shown = format!(r#"{{"bogus":1,"kind":"K","metadata":{meta},"parts":{parts}}}"#);
            let expected = format!(" \"\" is invalid: patch: Invalid value: {shown:?}: w");
            assert_eq!(error.message, expected, "{patch}");
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
