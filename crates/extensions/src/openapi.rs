//! The schemas of custom kinds, for the server's OpenAPI documents.
//!
//! In: the bytes of established CRDs, shared with the watch cache. Out: definitions as upstream
//! publishes them, built at the request. Another source answers for built-in kinds.
//! Upstream: `controller/openapi/{builder,v2}`.

use std::collections::HashMap;
use std::sync::Arc;

use apiserver::schemas::{GoField, SchemaSource};
use arc_swap::ArcSwap;
use bytes::Bytes;
use serde_json::{Map, Value, json};

const META: &str = "#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1";
const API_VERSION: &str = "APIVersion defines the versioned schema of this representation of an object. Servers should convert recognized schemas to the latest internal value, and may reject unrecognized values. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#resources";
const KIND: &str = "Kind is a string value representing the REST resource this object represents. Servers may infer this from the endpoint the client submits requests to. Cannot be updated. In CamelCase. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";
const METADATA: &str = "Standard object's metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata";
const LIST_METADATA: &str = "Standard list metadata. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds";

/// `com.example.stable.v1.CronTab` of the group `stable.example.com`.
pub fn definition_name(group: &str, version: &str, kind: &str) -> String {
    let reversed: Vec<&str> = group.split('.').rev().collect();
    format!("{}.{version}.{kind}", reversed.join("."))
}

/// A published kind, and the CRD that describes it.
#[derive(Clone)]
pub struct Published {
    pub group: String,
    pub version: String,
    pub kind: String,
    /// The JSON of the CRD.
    pub crd: Bytes,
}

/// The published kinds by definition name. The controller replaces the whole map.
pub type PublishedKinds = HashMap<String, Published>;

/// Built-in and custom kinds.
pub struct Schemas {
    built_in: Arc<dyn SchemaSource>,
    custom: Arc<ArcSwap<PublishedKinds>>,
}

impl Schemas {
    pub fn new(built_in: Arc<dyn SchemaSource>, custom: Arc<ArcSwap<PublishedKinds>>) -> Self {
        Self { built_in, custom }
    }

    fn custom(&self, name: &str, for_v2: bool) -> Option<Value> {
        let kinds = self.custom.load();
        if let Some(kind) = kinds.get(name) {
            return kind.definition(for_v2);
        }
        let kind = kinds.get(name.strip_suffix("List")?)?;
        kind.list_definition()
    }
}

impl SchemaSource for Schemas {
    fn definition_name(&self, group: &str, version: &str, kind: &str) -> Option<String> {
        self.built_in.definition_name(group, version, kind).or_else(|| {
            let name = definition_name(group, version, kind);
            self.custom.load().contains_key(&name).then_some(name)
        })
    }

    fn knows(&self, name: &str) -> bool {
        let kinds = self.custom.load();
        let is_list = || name.strip_suffix("List").is_some_and(|kind| kinds.contains_key(kind));
        self.built_in.knows(name) || kinds.contains_key(name) || is_list()
    }

    fn definition(&self, name: &str) -> Option<Value> {
        self.custom(name, false).or_else(|| self.built_in.definition(name))
    }

    fn definition_v2(&self, name: &str) -> Option<Value> {
        self.custom(name, true).or_else(|| self.built_in.definition_v2(name))
    }

    fn go_fields(&self, name: &str) -> Vec<GoField> {
        self.built_in.go_fields(name)
    }

    fn revision(&self) -> String {
        self.built_in.revision()
    }
}

impl Published {
    fn definition(&self, for_v2: bool) -> Option<Value> {
        let crd: Value = serde_json::from_slice(&self.crd).ok()?;
        let preserves_all = crd["spec"]["preserveUnknownFields"] == true;
        let versions = crd["spec"]["versions"].as_array()?;
        let version = versions.iter().find(|version| version["name"] == *self.version)?;
        let kinds = json!([{ "group": self.group, "version": self.version, "kind": self.kind }]);
        let mut schema = match version["schema"].get("openAPIV3Schema") {
            Some(Value::Object(schema)) => schema.clone(),
            _ => Map::from_iter([("type".to_owned(), "object".into())]),
        };
        let is_free = preserves_all || is(&schema, "x-kubernetes-preserve-unknown-fields");
        if version["schema"].get("openAPIV3Schema").is_none() || (for_v2 && is_free) {
            schema = Map::from_iter([("type".to_owned(), "object".into())]);
        } else {
            unfold(&mut schema);
            if for_v2 {
                simplify(&mut schema);
            }
            add_embedded(&mut schema, for_v2);
            add_type(&mut schema);
            let metadata = json!({ "$ref": format!("{META}.ObjectMeta"), "description": METADATA });
            properties(&mut schema).insert("metadata".into(), metadata);
        }
        schema.insert("x-kubernetes-group-version-kind".into(), kinds);
        let selectable = version.get("selectableFields").and_then(Value::as_array);
        if let Some(fields) = selectable.filter(|fields| !fields.is_empty() && !for_v2) {
            let paths = fields.iter().map(|field| {
                let path = field["jsonPath"].as_str().unwrap_or_default();
                json!({ "fieldPath": path.trim_start_matches('.') })
            });
            schema.insert("x-kubernetes-selectable-fields".into(), paths.collect());
        }
        Some(Value::Object(schema))
    }

    fn list_definition(&self) -> Option<Value> {
        let crd: Value = serde_json::from_slice(&self.crd).ok()?;
        let names = &crd["spec"]["names"];
        let list_kind = names["listKind"].as_str().unwrap_or_default();
        let plural = names["plural"].as_str().unwrap_or_default();
        let item = definition_name(&self.group, &self.version, &self.kind);
        let mut schema = Map::new();
        schema.insert("type".into(), "object".into());
        schema
            .insert("description".into(), format!("{list_kind} is a list of {}", self.kind).into());
        schema.insert("required".into(), json!(["items"]));
        schema.insert(
            "x-kubernetes-group-version-kind".into(),
            json!([{ "group": self.group, "version": self.version, "kind": list_kind }]),
        );
        add_type(&mut schema);
        let fields = properties(&mut schema);
        fields.insert(
            "items".into(),
            json!({
                "type": "array",
                "description": format!("List of {plural}. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md"),
                "items": { "$ref": format!("#/definitions/{item}") },
            }),
        );
        let metadata = json!({ "$ref": format!("{META}.ListMeta"), "description": LIST_METADATA });
        fields.insert("metadata".into(), metadata);
        Some(Value::Object(schema))
    }
}

type Node = Map<String, Value>;

fn is(schema: &Node, name: &str) -> bool {
    schema.get(name) == Some(&Value::Bool(true))
}

fn properties(schema: &mut Node) -> &mut Node {
    let entry = schema.entry("properties").or_insert_with(|| json!({}));
    if !entry.is_object() {
        *entry = json!({});
    }
    entry.as_object_mut().expect("made above")
}

fn add_type(schema: &mut Node) {
    let fields = properties(schema);
    fields.insert("apiVersion".into(), json!({ "type": "string", "description": API_VERSION }));
    fields.insert("kind".into(), json!({ "type": "string", "description": KIND }));
}

/// All nodes below, then the node itself.
fn visit(schema: &mut Node, change: &mut dyn FnMut(&mut Node)) {
    for name in ["items", "additionalProperties"] {
        if let Some(Value::Object(inner)) = schema.get_mut(name) {
            visit(inner, change);
        }
    }
    if let Some(Value::Object(fields)) = schema.get_mut("properties") {
        for (_, field) in fields {
            if let Value::Object(field) = field {
                visit(field, change);
            }
        }
    }
    change(schema);
}

/// Expands `x-kubernetes-int-or-string` to plain OpenAPI.
fn unfold(schema: &mut Node) {
    let either = json!([{ "type": "integer" }, { "type": "string" }]);
    visit(schema, &mut |node| {
        if !is(node, "x-kubernetes-int-or-string") {
            return;
        }
        let first = node.get("allOf").and_then(|all| all.get(0)).and_then(|one| one.get("anyOf"));
        if node.get("anyOf") == Some(&either) || first == Some(&either) {
            return;
        }
        if !node.contains_key("anyOf") {
            node.insert("anyOf".into(), either.clone());
            return;
        }
        let mut all = vec![json!({ "anyOf": either })];
        all.extend(node.get("allOf").and_then(Value::as_array).cloned().unwrap_or_default());
        node.insert("allOf".into(), all.into());
    });
}

/// Removes what OpenAPI v2 does not have.
fn simplify(schema: &mut Node) {
    visit(schema, &mut |node| {
        for name in ["allOf", "oneOf", "anyOf", "not"] {
            node.remove(name);
        }
        let (nullable, free) =
            (is(node, "nullable"), is(node, "x-kubernetes-preserve-unknown-fields"));
        node.remove("nullable");
        if nullable || free {
            node.remove("items");
            node.remove("properties");
        }
        let kind = node.get("type").and_then(Value::as_str).unwrap_or_default();
        let untyped = nullable
            || (kind == "array" && !node.contains_key("items"))
            || (kind == "object" && free);
        if untyped {
            node.remove("type");
            node.insert("x-decapod-untyped".into(), nullable.into());
        }
        drop_nullable_required(node);
    });
    visit(schema, &mut |node| drop(node.remove("x-decapod-untyped")));
}

/// A nullable field cannot be required in OpenAPI v2, which has no null.
fn drop_nullable_required(node: &mut Node) {
    let nullable: Vec<String> = node
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .filter(|(_, field)| field.get("x-decapod-untyped") == Some(&Value::Bool(true)))
        .map(|(name, _)| name.clone())
        .collect();
    if let Some(Value::Array(required)) = node.get_mut("required") {
        required.retain(|name| !nullable.iter().any(|one| name == one.as_str()));
        if required.is_empty() {
            node.remove("required");
        }
    }
}

fn add_embedded(schema: &mut Node, for_v2: bool) {
    visit(schema, &mut |node| {
        let free = is(node, "x-kubernetes-preserve-unknown-fields");
        if !is(node, "x-kubernetes-embedded-resource") || (for_v2 && free) {
            return;
        }
        let fields = properties(node);
        fields.insert("apiVersion".into(), json!({ "type": "string", "description": "apiVersion defines the versioned schema of this representation of an object. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#resources" }));
        fields.insert("kind".into(), json!({ "type": "string", "description": "kind is a string value representing the type of this object. In CamelCase. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#types-kinds" }));
        let metadata = json!({ "$ref": format!("{META}.ObjectMeta"), "description": METADATA });
        fields.insert("metadata".into(), metadata);
        let required = node.entry("required").or_insert_with(|| json!([]));
        if let Value::Array(required) = required {
            for name in ["kind", "apiVersion"] {
                if !required.iter().any(|one| one == name) {
                    required.push(name.into());
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published(schema: Value) -> Published {
        let crd = json!({ "spec": {
            "names": { "plural": "tabs", "kind": "Tab", "listKind": "TabList" },
            "versions": [{ "name": "v1", "schema": { "openAPIV3Schema": schema } }] } });
        Published {
            group: "stable.example.com".into(),
            version: "v1".into(),
            kind: "Tab".into(),
            crd: crd.to_string().into(),
        }
    }

    #[test]
    fn names_are_reversed() {
        assert_eq!(definition_name("stable.example.com", "v1", "Tab"), "com.example.stable.v1.Tab");
    }

    #[test]
    fn both_dialects() {
        let kind = published(json!({ "type": "object", "properties": {
            "port": { "x-kubernetes-int-or-string": true },
            "none": { "type": "object", "nullable": true, "properties": { "a": { "type": "string" } } },
        }, "required": ["none"] }));
        let v3 = kind.definition(false).expect("a definition");
        assert_eq!(v3["properties"]["port"]["anyOf"][0]["type"], "integer");
        assert_eq!(v3["properties"]["metadata"]["$ref"], format!("{META}.ObjectMeta"));
        assert_eq!(v3["x-kubernetes-group-version-kind"][0]["kind"], "Tab");
        assert_eq!(v3["required"], json!(["none"]));
        let v2 = kind.definition(true).expect("a definition");
        assert_eq!(v2["properties"]["none"], json!({}));
        assert_eq!(v2.get("required"), None);
        let list = kind.list_definition().expect("a definition");
        let item = &list["properties"]["items"]["items"]["$ref"];
        assert_eq!(*item, "#/definitions/com.example.stable.v1.Tab");
    }
}
