//! Why JSON does not match a kind, in Go's words: `json: cannot unmarshal string into Go struct field
//! ReplicaSetSpec.spec.replicas of type int32`. The result of a strategic merge patch is a tree in Go, with
//! other messages: `cannot convert string to int32`. The CBOR decoder has a third form.
//!
//! Runs only after decoding failed: it walks the text along the kind's schema to the first value of a
//! wrong type. Without a schema the decoder's own message is used.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::schemas::SchemaSource;

const QUANTITY: &str = "io.k8s.apimachinery.pkg.api.resource.Quantity";
const TIME: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Time";
const MICRO_TIME: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.MicroTime";

/// The component that reports: a decoder of JSON or CBOR, or the converter of trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reader {
    Json,
    Cbor,
    Tree,
}

/// The first mismatch, or `None` if there is none.
pub fn explain(
    reader: Reader,
    json: &[u8],
    definition: &str,
    schemas: &dyn SchemaSource,
) -> Option<String> {
    let raw: &RawValue = serde_json::from_slice(json).ok()?;
    let schema = schemas.definition(definition)?;
    Walk { reader, schemas, root: definition, path: vec![], owner: definition.to_owned() }
        .fields(raw, &schema)
}

struct Walk<'a> {
    reader: Reader,
    schemas: &'a dyn SchemaSource,
    /// The definition of the whole object.
    root: &'a str,
    /// Struct fields from the root, without list indexes and map keys.
    path: Vec<String>,
    /// The definition with the last field.
    owner: String,
}

impl Walk<'_> {
    /// Checks the fields of a struct.
    fn fields(&mut self, raw: &RawValue, schema: &Value) -> Option<String> {
        let properties = schema.get("properties")?;
        let known = self.schemas.go_fields(&self.owner);
        for (name, value) in members(raw)? {
            let Some(field) = properties.get(&name) else { continue };
            let go = known.iter().find(|go| go.name == name).copied().unwrap_or_default();
            let depth = self.path.len();
            self.path
                .extend(go.embedded.split('.').filter(|one| !one.is_empty()).map(str::to_owned));
            self.path.push(name);
            if let Some(found) = self.value(value, field, go.kind) {
                return Some(found);
            }
            self.path.truncate(depth);
        }
        None
    }

    /// `named` is Go's name of the type, if the schema does not tell it.
    fn value(&mut self, raw: &RawValue, schema: &Value, named: &str) -> Option<String> {
        let text = raw.get();
        if text == "null" {
            return None;
        }
        if let Some(name) = reference(schema) {
            return self.referenced(raw, name);
        }
        let misfit = || {
            let plain = go_type(schema);
            let wanted = if named.is_empty() { &plain } else { named };
            Some(self.misfit(text, wanted, &plain))
        };
        match (schema.get("type").and_then(Value::as_str)?, kind(text)) {
            ("string", "string") if self.reader == Reader::Json && is_binary(schema) => {
                let encoded: String = serde_json::from_str(text).ok()?;
                let at = invalid_base64(encoded.as_bytes())?;
                Some(format!("illegal base64 data at input byte {at}"))
            }
            ("string", "string") | ("boolean", "bool") | ("number", "number") => None,
            ("integer", "number") if is_integer(text, schema) => None,
            ("array", "array") => {
                let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
                let schema = schema.get("items")?;
                let named = named.strip_prefix("[]").unwrap_or_default();
                items.into_iter().find_map(|item| self.value(item, schema, named))
            }
            ("object", "object") => {
                let values = schema.get("additionalProperties")?;
                let named = named.strip_prefix("map[").and_then(|rest| rest.split_once(']'));
                let named = named.map_or("", |(_, value)| value);
                members(raw)?.into_iter().find_map(|(_, value)| self.value(value, values, named))
            }
            _ => misfit(),
        }
    }

    fn referenced(&mut self, raw: &RawValue, name: &str) -> Option<String> {
        let text = raw.get();
        let schema = self.schemas.definition(name)?;
        if name == QUANTITY {
            let is_text = matches!(kind(text), "string" | "number");
            return (!is_text).then(|| {
                "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'".into()
            });
        }
        if (name == TIME || name == MICRO_TIME) && kind(text) == "string" {
            let time: String = serde_json::from_str(text).ok()?;
            return machinery::gotime::misfit(&time, name == MICRO_TIME);
        }
        if schema.get("format").and_then(Value::as_str) == Some("int-or-string") {
            let fits = match kind(text) {
                "string" => true,
                "number" => text.parse::<i32>().is_ok(),
                _ => false,
            };
            return (!fits).then(|| self.misfit(text, "int32", "int32"));
        }
        if schema.get("properties").is_none() {
            return self.value(raw, &schema, "");
        }
        if kind(text) != "object" {
            let wanted = versioned(name);
            return Some(self.misfit(text, &wanted, &wanted));
        }
        let outer = std::mem::replace(&mut self.owner, name.to_owned());
        let found = self.fields(raw, &schema);
        self.owner = outer;
        found
    }

    /// `wanted` is the type's name, `plain` the type behind it.
    fn misfit(&self, text: &str, wanted: &str, plain: &str) -> String {
        match self.reader {
            Reader::Json => {}
            Reader::Tree => return unrestorable(text, wanted, plain),
            Reader::Cbor => {
                // The message names the outermost field.
                return format!(
                    "cbor: cannot unmarshal {} into Go struct field {}.{} of type {wanted}",
                    cbor_kind(text),
                    versioned(self.root),
                    self.path.first().map_or("", String::as_str),
                );
            }
        }
        let kind = kind(text);
        let is_number = plain.starts_with("int") || plain.starts_with("float");
        let what =
            if kind == "number" && is_number { format!("number {text}") } else { kind.into() };
        format!(
            "json: cannot unmarshal {what} into Go struct field {}.{} of type {wanted}",
            short(&self.owner),
            self.path.join(".")
        )
    }
}

/// The converter's message for a value that is not `wanted`. Go can convert an integer to a string and a
/// number to another type of number: only these combinations are `cannot convert`.
fn unrestorable(text: &str, wanted: &str, plain: &str) -> String {
    let is_whole = text.parse::<i64>().is_ok();
    let found = match kind(text) {
        "object" => "map",
        "array" => "slice",
        "number" if is_whole => "int64",
        "number" => "float64",
        kind => kind,
    };
    let is_number = plain.starts_with("int") || plain.starts_with("float");
    match plain {
        _ if plain.starts_with("map[") => format!("cannot restore map from {found}"),
        _ if plain.starts_with("[]") => format!("cannot restore slice from {found}"),
        _ if plain.contains('.') => format!("cannot restore struct from: {found}"),
        "string" if found == "int64" => format!("cannot convert {found} to {wanted}"),
        _ if is_number && matches!(found, "int64" | "float64") => {
            format!("cannot convert {found} to {wanted}")
        }
        _ => format!("unrecognized type: {plain}"),
    }
}

/// The members of an object, in order.
fn members(raw: &RawValue) -> Option<Vec<(String, &RawValue)>> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, &'de RawValue)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = vec![];
            while let Some(member) = map.next_entry()? {
                members.push(member);
            }
            Ok(members)
        }
    }
    serde_json::Deserializer::from_str(raw.get()).deserialize_map(Members).ok()
}

fn is_binary(schema: &Value) -> bool {
    schema.get("format").and_then(Value::as_str) == Some("byte")
}

/// The place at which Go's decoder of base64 stops; it skips line ends.
fn invalid_base64(text: &[u8]) -> Option<usize> {
    let mut characters =
        text.iter().enumerate().filter(|(_, byte)| !matches!(byte, b'\r' | b'\n')).peekable();
    let ends = |next: Option<(usize, &u8)>| next.map(|(at, _)| at);
    while characters.peek().is_some() {
        for place in 0..4 {
            match characters.next() {
                None => return Some(text.len() - place),
                Some((_, byte)) if byte.is_ascii_alphanumeric() || b"+/".contains(byte) => {}
                Some((at, b'=')) if place < 2 => return Some(at),
                Some((_, b'=')) if place == 2 => {
                    return match characters.next() {
                        None => Some(text.len()),
                        Some((at, byte)) if *byte != b'=' => Some(at),
                        Some(_) => ends(characters.next()),
                    };
                }
                Some((_, b'=')) => return ends(characters.next()),
                Some((at, _)) => return Some(at),
            }
        }
    }
    None
}

fn reference(schema: &Value) -> Option<&str> {
    schema.get("$ref")?.as_str()?.strip_prefix("#/definitions/")
}

/// Whether it fits into the integer type of the schema.
fn is_integer(text: &str, schema: &Value) -> bool {
    match schema.get("format").and_then(Value::as_str) {
        Some("int32") => text.parse::<i32>().is_ok(),
        _ => text.parse::<i64>().is_ok(),
    }
}

pub(crate) fn kind(text: &str) -> &'static str {
    match text.as_bytes().first() {
        Some(b'"') => "string",
        Some(b'{') => "object",
        Some(b'[') => "array",
        Some(b't' | b'f') => "bool",
        _ => "number",
    }
}

/// The CBOR type of a JSON value, in the words of Go's CBOR decoder. Go's texts are byte strings.
pub(crate) fn cbor_kind(text: &str) -> &'static str {
    match kind(text) {
        "object" => "map",
        "array" => "array",
        "string" => "byte string",
        "number" if text.parse::<u64>().is_ok() => "positive integer",
        "number" if text.parse::<i64>().is_ok() => "negative integer",
        _ => "primitives",
    }
}

/// The Go type of a schema.
fn go_type(schema: &Value) -> String {
    if let Some(name) = reference(schema) {
        return versioned(name);
    }
    let text = |name: &str| schema.get(name).and_then(Value::as_str).unwrap_or_default();
    match (text("type"), text("format")) {
        ("integer", "") => "int64".into(),
        ("integer", format) => format.into(),
        ("number", _) => "float64".into(),
        ("boolean", _) => "bool".into(),
        ("array", _) => format!("[]{}", schema.get("items").map(go_type).unwrap_or_default()),
        ("object", _) => {
            format!(
                "map[string]{}",
                schema.get("additionalProperties").map(go_type).unwrap_or_default()
            )
        }
        _ => "string".into(),
    }
}

/// `PodSpec` for `io.k8s.api.core.v1.PodSpec`.
fn short(definition: &str) -> &str {
    definition.rsplit('.').next().unwrap_or(definition)
}

/// `v1.PodSpec` for `io.k8s.api.core.v1.PodSpec`.
fn versioned(definition: &str) -> String {
    let mut parts = definition.rsplitn(3, '.');
    let name = parts.next().unwrap_or_default();
    format!("{}.{name}", parts.next().unwrap_or_default())
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

        fn definition(&self, name: &str) -> Option<Value> {
            Some(match name {
                "a.v1.Set" => json!({ "properties": {
                    "spec": { "$ref": "#/definitions/a.v1.SetSpec" },
                    "data": { "type": "object", "additionalProperties": { "type": "string" } },
                    "port": { "$ref": "#/definitions/a.v1.Port" },
                    "key": { "type": "string", "format": "byte" },
                    "mode": { "type": "string" },
                    "modes": { "type": "array", "items": { "type": "string" } },
                }}),
                "a.v1.Port" => json!({ "type": "string", "format": "int-or-string" }),
                "a.v1.SetSpec" => json!({ "properties": {
                    "replicas": { "type": "integer", "format": "int32" },
                    "args": { "type": "array", "items": { "type": "string" } },
                    "parts": { "type": "array", "items": { "$ref": "#/definitions/a.v1.SetSpec" } },
                }}),
                _ => return None,
            })
        }

        fn go_fields(&self, name: &str) -> Vec<GoField> {
            let field = |name, kind, embedded| GoField { name, kind, embedded, definition: "" };
            match name {
                "a.v1.Set" => {
                    vec![field("mode", "v1.Mode", "Inner.Deeper"), field("modes", "[]v1.Mode", "")]
                }
                _ => vec![],
            }
        }

        fn revision(&self) -> String {
            String::new()
        }
    }

    #[test]
    fn mismatches_have_gos_messages() {
        for (json, expected) in [
            (
                r#"{"spec":{"replicas":true}}"#,
                Some(
                    "json: cannot unmarshal bool into Go struct field SetSpec.spec.replicas of type int32",
                ),
            ),
            (
                r#"{"spec":{"replicas":1e2}}"#,
                Some(
                    "json: cannot unmarshal number 1e2 into Go struct field SetSpec.spec.replicas of type int32",
                ),
            ),
            (
                r#"{"data":{"a":1}}"#,
                Some("json: cannot unmarshal number into Go struct field Set.data of type string"),
            ),
            (
                r#"{"spec":[]}"#,
                Some(
                    "json: cannot unmarshal array into Go struct field Set.spec of type v1.SetSpec",
                ),
            ),
            (
                r#"{"spec":{"args":"x"}}"#,
                Some(
                    "json: cannot unmarshal string into Go struct field SetSpec.spec.args of type []string",
                ),
            ),
            (
                r#"{"spec":{"parts":[{},{"replicas":"x"}]}}"#,
                Some(
                    "json: cannot unmarshal string into Go struct field SetSpec.spec.parts.replicas of type int32",
                ),
            ),
            (
                r#"{"spec":{"parts":{}}}"#,
                Some(
                    "json: cannot unmarshal object into Go struct field SetSpec.spec.parts of type []v1.SetSpec",
                ),
            ),
            (
                r#"{"mode":1}"#,
                Some(
                    "json: cannot unmarshal number into Go struct field Set.Inner.Deeper.mode of type v1.Mode",
                ),
            ),
            (
                r#"{"modes":[{}]}"#,
                Some(
                    "json: cannot unmarshal object into Go struct field Set.modes of type v1.Mode",
                ),
            ),
            (r#"{"port":80}"#, None),
            (
                r#"{"port":1.0}"#,
                Some(
                    "json: cannot unmarshal number 1.0 into Go struct field Set.port of type int32",
                ),
            ),
            (
                r#"{"port":true}"#,
                Some("json: cannot unmarshal bool into Go struct field Set.port of type int32"),
            ),
            (r#"{"key":"YQ==\n"}"#, None),
            (r#"{"key":"YQ="}"#, Some("illegal base64 data at input byte 3")),
            (r#"{"key":"YQ"}"#, Some("illegal base64 data at input byte 0")),
            (r#"{"key":"!!"}"#, Some("illegal base64 data at input byte 0")),
            (r#"{"spec":{"replicas":-3,"args":null},"other":{}}"#, None),
        ] {
            assert_eq!(
                explain(Reader::Json, json.as_bytes(), "a.v1.Set", &Schemas).as_deref(),
                expected,
                "{json}"
            );
        }
    }

    #[test]
    fn trees_have_the_converters_messages() {
        for (json, expected) in [
            (r#"{"spec":{"replicas":"x"}}"#, Some("unrecognized type: int32")),
            (r#"{"spec":{"replicas":1.5}}"#, Some("cannot convert float64 to int32")),
            (r#"{"spec":{"args":[7]}}"#, Some("cannot convert int64 to string")),
            (r#"{"spec":{"args":[true]}}"#, Some("unrecognized type: string")),
            (r#"{"spec":{"args":"x"}}"#, Some("cannot restore slice from string")),
            (r#"{"spec":[]}"#, Some("cannot restore struct from: slice")),
            (r#"{"data":true}"#, Some("cannot restore map from bool")),
            (r#"{"mode":1}"#, Some("cannot convert int64 to v1.Mode")),
            (r#"{"mode":true}"#, Some("unrecognized type: string")),
            (r#"{"spec":{"replicas":3}}"#, None),
        ] {
            let found = explain(Reader::Tree, json.as_bytes(), "a.v1.Set", &Schemas);
            assert_eq!(found.as_deref(), expected, "{json}");
        }
    }
}
