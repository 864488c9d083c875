//! The schemas of built-in kinds, as JSON schemas with upstream's extensions.
//!
//! In: the schemas that come with the types (structure and descriptions), which the build script
//! packed; the field facts (`x-kubernetes-*`). Out: one definition at a time, by name, with
//! references of the form `#/definitions/NAME`.
//!
//! All definitions together are a few megabytes of text. They are made on first use (OpenAPI is
//! read by people and tools, not by the cluster itself) and kept as text, a tenth of what value
//! trees would take.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Read as _;
use std::sync::{LazyLock, Mutex, OnceLock};

use flate2::read::DeflateDecoder;
use serde_json::{Map, Value, json};

use crate::facts::{self, Definition, Field};

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// Is there a definition of this name?
pub fn knows(name: &str) -> bool {
    texts().contains_key(name)
}

/// One definition.
pub fn definition(name: &str) -> Option<Value> {
    texts().get(name).map(|text| parsed(text))
}

/// What a definition says about one of its fields; empty if there is no such field. The path is the
/// definition's name without its `io.k8s.`, and the field's name: `api.core.v1.PodSpec.nodeName`.
///
/// Unpacks the chunk with this definition only, and keeps the answer: tables ask for a few dozen
/// sentences, for which megabytes of definitions would be too much.
pub fn describe(path: &'static str) -> String {
    static KNOWN: OnceLock<Mutex<HashMap<&'static str, String>>> = OnceLock::new();
    let known = KNOWN.get_or_init(Mutex::default);
    if let Some(text) = known.lock().expect("no panic under the lock").get(path) {
        return text.clone();
    }
    let (name, field) = path.rsplit_once('.').unwrap_or_default();
    let schema = raw(&format!("io.k8s.{name}")).unwrap_or_default();
    let text = schema["properties"][field]["description"].as_str().unwrap_or_default().to_owned();
    known.lock().expect("no panic under the lock").insert(path, text.clone());
    text
}

/// Changes when the definitions do.
pub fn revision() -> &'static str {
    static REVISION: LazyLock<String> = LazyLock::new(|| {
        let mut hasher = DefaultHasher::new();
        (PACKED, facts::FIELDS).hash(&mut hasher);
        format!("{} {:x}", release::KUBERNETES.full, hasher.finish())
    });
    &REVISION
}

/// What the build script packed, in the order of names: the first definition of a chunk, the chunk.
const PACKED: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/schemas.rs"));

fn unpacked(chunk: &[u8]) -> String {
    let mut text = String::new();
    DeflateDecoder::new(chunk).read_to_string(&mut text).expect("packed by the build script");
    text
}

/// The names and schemas in a chunk.
fn lines(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| line.split_once('\t'))
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect("written by serde_json")
}

/// A definition as the types have it.
fn raw(name: &str) -> Option<Value> {
    let after = PACKED.partition_point(|(first, _)| *first <= name);
    let (_, chunk) = PACKED[..after].last()?;
    lines(&unpacked(chunk)).find(|(known, _)| *known == name).map(|(_, text)| parsed(text))
}

fn texts() -> &'static HashMap<String, Box<str>> {
    static TEXTS: OnceLock<HashMap<String, Box<str>>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let mut all = HashMap::new();
        for (_, chunk) in PACKED {
            let text = unpacked(chunk);
            all.extend(lines(&text).map(|(name, text)| extended(name.to_owned(), parsed(text))));
        }
        for name in lists(&all) {
            let list = list(&name);
            all.extend([extended(name, list)]);
        }
        all.extend([extended(format!("{META}.Patch"), json!({
            "type": "object",
            "description": "Patch is provided to give a concrete name and type to the Kubernetes PATCH request body.",
        }))]);
        all
    })
}

/// The names of the lists of the kinds in `all`.
fn lists(all: &HashMap<String, Box<str>>) -> Vec<String> {
    let list = |name: &String| {
        Some(format!("{name}List")).filter(|list| facts::definition(list).is_some())
    };
    all.keys().filter_map(list).filter(|list| !all.contains_key(list)).collect()
}

/// The types have lists as a generic; the API has one definition each.
fn list(name: &str) -> Value {
    let item = name.strip_suffix("List").unwrap_or(name);
    let kind = name.rsplit('.').next().unwrap_or(name);
    json!({
        "type": "object",
        "description": format!("{kind} is a list of objects."),
        "required": ["items"],
        "properties": {
            "apiVersion": { "type": "string", "description": "APIVersion defines the versioned schema of this representation of an object." },
            "kind": { "type": "string", "description": "Kind is a string value representing the REST resource this object represents." },
            "metadata": { "$ref": format!("#/definitions/{META}.ListMeta"), "description": "Standard list metadata." },
            "items": { "type": "array", "description": "The objects.", "items": { "$ref": format!("#/definitions/{item}") } },
        },
    })
}

/// Adds the extensions, and keeps the text.
fn extended(name: String, mut schema: Value) -> (String, Box<str>) {
    let fields = schema.as_object_mut().expect("every definition is an object");
    // The types' mark for what OpenAPI writes as a format.
    if fields.remove("x-kubernetes-int-or-string").is_some() {
        fields.insert("type".into(), "string".into());
        fields.insert("format".into(), "int-or-string".into());
    }
    if let Some(definition) = facts::definition(&name) {
        // The types cannot be without metadata; the API's kinds can.
        if definition.kinds().next().is_some()
            && let Some(Value::Array(required)) = fields.get_mut("required")
        {
            required.retain(|field| field != "metadata");
            if required.is_empty() {
                fields.remove("required");
            }
        }
        add_kinds(fields, definition);
        if !definition.map_type.is_empty() {
            fields.insert("x-kubernetes-map-type".into(), definition.map_type.into());
        }
        let properties = fields.get_mut("properties").and_then(Value::as_object_mut);
        for field in properties.into_iter().flat_map(|properties| matching(properties, definition))
        {
            let (schema, facts) = field;
            add_facts(schema, facts);
        }
    }
    let text = schema.to_string().into_boxed_str();
    (name, text)
}

fn matching(
    properties: &mut Map<String, Value>,
    definition: Definition,
) -> impl Iterator<Item = (&mut Map<String, Value>, Field)> {
    properties
        .iter_mut()
        .filter_map(move |(name, schema)| Some((schema.as_object_mut()?, definition.field(name)?)))
}

fn add_kinds(schema: &mut Map<String, Value>, definition: Definition) {
    let kinds: Vec<Value> = definition
        .kinds()
        .map(|(group, version, kind)| json!({ "group": group, "version": version, "kind": kind }))
        .collect();
    if !kinds.is_empty() {
        schema.insert("x-kubernetes-group-version-kind".into(), kinds.into());
    }
}

fn add_facts(schema: &mut Map<String, Value>, field: Field) {
    let mut put = |name: &str, text: &str| {
        if !text.is_empty() {
            schema.insert(name.into(), text.into());
        }
    };
    let type_of =
        if field.shape == "[]" { "x-kubernetes-list-type" } else { "x-kubernetes-map-type" };
    put(type_of, field.list_type);
    put("x-kubernetes-patch-merge-key", field.merge_key);
    put("x-kubernetes-patch-strategy", field.strategy);
    if !field.map_keys.is_empty() {
        let keys: Vec<&str> = field.map_keys.split(',').collect();
        schema.insert("x-kubernetes-list-map-keys".into(), keys.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_have_structure_descriptions_and_facts() {
        let spec = definition("io.k8s.api.core.v1.ServiceSpec").expect("known");
        let ports = &spec["properties"]["ports"];
        assert_eq!(ports["items"]["$ref"], "#/definitions/io.k8s.api.core.v1.ServicePort");
        assert_eq!(ports["x-kubernetes-list-type"], "map");
        assert_eq!(ports["x-kubernetes-list-map-keys"], json!(["port", "protocol"]));
        assert_eq!(ports["x-kubernetes-patch-merge-key"], "port");
        assert_eq!(spec["properties"]["selector"]["x-kubernetes-map-type"], "atomic");
        assert!(ports["description"].as_str().is_some_and(|text| text.len() > 20));
        let deployment = definition("io.k8s.api.apps.v1.Deployment").expect("known");
        assert_eq!(
            deployment["x-kubernetes-group-version-kind"],
            json!([{ "group": "apps", "version": "v1", "kind": "Deployment" }])
        );
        let list = definition("io.k8s.api.apps.v1.DeploymentList").expect("known");
        assert_eq!(
            list["properties"]["items"]["items"]["$ref"],
            "#/definitions/io.k8s.api.apps.v1.Deployment"
        );
        let either = definition("io.k8s.apimachinery.pkg.util.intstr.IntOrString").expect("known");
        assert_eq!(either["format"], "int-or-string");
    }

    #[test]
    fn references_lead_somewhere() {
        fn check(schema: &Value, name: &str) {
            match schema {
                Value::Object(fields) => {
                    if let Some(Value::String(reference)) = fields.get("$ref") {
                        let target = reference.strip_prefix("#/definitions/").unwrap_or_default();
                        assert!(knows(target), "{name}: {reference}");
                    }
                    fields.values().for_each(|value| check(value, name));
                }
                Value::Array(items) => items.iter().for_each(|item| check(item, name)),
                _ => {}
            }
        }
        for name in texts().keys() {
            check(&definition(name).expect("known"), name);
        }
        let bytes: usize = texts().values().map(|text| text.len()).sum();
        assert!(
            texts().len() > 500 && bytes < 4 << 20,
            "{} definitions, {bytes} bytes",
            texts().len()
        );
    }

    #[test]
    fn packed_definitions_are_found() {
        let mut last = String::new();
        for (first, chunk) in PACKED {
            let text = unpacked(chunk);
            assert_eq!(lines(&text).next().map(|(name, _)| name), Some(*first));
            for (name, _) in lines(&text) {
                assert!(*name > *last, "{name} after {last}");
                name.clone_into(&mut last);
            }
            assert!(raw(first).is_some() && raw(&last).is_some(), "{first} to {last}");
            assert_eq!(raw(&format!("{last}!")), None);
        }
        assert_eq!(raw(""), None);
    }

    #[test]
    fn describes_fields() {
        let check = |path: &'static str, start: &str| {
            for _ in 0..2 {
                let text = describe(path);
                assert!(text.starts_with(start), "{path}: {text}");
                assert_eq!(text.is_empty(), start.is_empty(), "{path}: {text}");
            }
        };
        check("api.core.v1.PodSpec.nodeName", "NodeName indicates in which node this pod is");
        check("apimachinery.pkg.apis.meta.v1.ObjectMeta.name", "Name must be unique");
        check("api.core.v1.PodSpec.nothing", "");
        check("api.core.v1.Nothing.nodeName", "");
        check("nothing", "");
    }
}
