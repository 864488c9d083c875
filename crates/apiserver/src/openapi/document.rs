//! Makes OpenAPI documents from operations and schemas.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::operations::{Operation, Shape, group_word, operations, parameter, tag};
use super::rows_of;
use crate::codec::cbor;
use crate::options::Page;
use crate::resource::{Resource, ResourceTable};
use crate::schemas::SchemaSource;

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";
const JSON: &str = "application/json";
const MEDIA_TYPES: &[&str] = &[JSON, "application/yaml", "application/vnd.kubernetes.protobuf"];
/// Media types of custom kinds, which have no protobuf messages.
const TEXTS: &[&str] = &[JSON, "application/yaml"];
const STREAMS: &[&str] =
    &["application/json;stream=watch", "application/vnd.kubernetes.protobuf;stream=watch"];
const STRATEGIC: &str = "application/strategic-merge-patch+json";
const PATCH_TYPES: &[&str] = &[
    "application/json-patch+json",
    "application/merge-patch+json",
    STRATEGIC,
    "application/apply-patch+yaml",
];

const VERSIONS: &str = "get available API versions";

/// The dialects differ in the place of schemas, and in the form of parameters and bodies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dialect {
    V2,
    V3,
}

impl Dialect {
    fn reference(self, name: &str) -> String {
        match self {
            Self::V2 => format!("#/definitions/{name}"),
            Self::V3 => format!("#/components/schemas/{name}"),
        }
    }
}

/// Collects the paths of a document and the definitions that they reference.
struct Builder<'a> {
    dialect: Dialect,
    schemas: &'a dyn SchemaSource,
    paths: BTreeMap<String, Map<String, Value>>,
    needed: BTreeSet<String>,
}

/// The document below `/openapi/v3/`; `None` if there is none at this path.
pub fn v3(
    table: &ResourceTable,
    path: &str,
    pages: &[Page],
    schemas: &dyn SchemaSource,
) -> Option<Value> {
    let mut builder = Builder::new(Dialect::V3, schemas);
    let mut rows = rows_of(table, path).peekable();
    let is_version = rows.peek().is_some();
    for row in rows {
        builder.row(row);
    }
    if !builder.about(table, path, pages) && !is_version {
        return None;
    }
    let (paths, definitions) = builder.finish();
    Some(json!({
        "openapi": "3.0.0",
        "info": info(),
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": { "BearerToken": bearer_token() },
        },
    }))
}

/// The one document with everything.
pub fn v2(
    table: &ResourceTable,
    paths: &[String],
    pages: &[Page],
    schemas: &dyn SchemaSource,
) -> Value {
    let mut builder = Builder::new(Dialect::V2, schemas);
    for row in table.iter() {
        builder.row(row);
    }
    for path in paths {
        builder.about(table, path, pages);
    }
    let (paths, definitions) = builder.finish();
    json!({
        "swagger": "2.0",
        "info": info(),
        "paths": paths,
        "definitions": definitions,
        "securityDefinitions": { "BearerToken": bearer_token() },
        "security": [{ "BearerToken": [] }],
    })
}

fn info() -> Value {
    json!({ "title": "Kubernetes", "version": release::KUBERNETES.tag })
}

fn bearer_token() -> Value {
    json!({ "type": "apiKey", "name": "authorization", "in": "header", "description": "Bearer Token authentication" })
}

impl<'a> Builder<'a> {
    fn new(dialect: Dialect, schemas: &'a dyn SchemaSource) -> Self {
        Self { dialect, schemas, paths: BTreeMap::new(), needed: BTreeSet::new() }
    }

    fn row(&mut self, row: &Resource) {
        for operation in operations(row) {
            let json = self.operation(row, &operation);
            let item = self.paths.entry(operation.path.clone()).or_default();
            item.insert(operation.method.into(), json);
            if !item.contains_key("parameters") {
                let parameters = path_parameters(self.dialect, &operation.path);
                item.insert("parameters".into(), parameters);
            }
        }
    }

    /// Adds the path with information about the API itself, if there is one.
    fn about(&mut self, table: &ResourceTable, path: &str, pages: &[Page]) -> bool {
        if let Some(page) = pages.iter().find(|page| page.path.trim_matches('/') == path) {
            let (types, schema) = ([page.content_type], json!({ "type": "string" }));
            self.overview(path, page.about, page.tag, &types, &schema);
            return true;
        }
        let row = rows_of(table, path).next();
        let mut is_version = false;
        let (description, tag, kind) = match path.split('/').collect::<Vec<_>>()[..] {
            ["api"] => (VERSIONS, "core".into(), format!("{META}.APIVersions")),
            ["apis"] => (VERSIONS, "apis".into(), format!("{META}.APIGroupList")),
            ["version"] => {
                let kind = "io.k8s.apimachinery.pkg.version.Info".to_owned();
                ("get the version information for this server", "version".into(), kind)
            }
            ["apis", group] if table.iter().any(|row| row.group == group) => {
                ("get information of a group", group_word(group), format!("{META}.APIGroup"))
            }
            _ => match row {
                Some(row) => {
                    is_version = true;
                    ("get available resources", tag(row), format!("{META}.APIResourceList"))
                }
                None => return false,
            },
        };
        let schema = self.reference(&kind);
        let mut types = if path == "version" { vec![JSON] } else { MEDIA_TYPES.to_vec() };
        types.extend((is_version && cbor::is_served()).then_some(cbor::MEDIA_TYPE));
        self.overview(path, description, &tag, &types, &schema);
        let get = self.paths.get_mut(&format!("/{path}/")).and_then(|item| item.get_mut("get"));
        if let (Some(get), Dialect::V2) = (get, self.dialect) {
            get["consumes"] = types.into();
        }
        true
    }

    fn overview(
        &mut self,
        path: &str,
        description: &str,
        tag: &str,
        types: &[&str],
        schema: &Value,
    ) {
        let mut response = json!({ "description": "OK" });
        let mut get = json!({ "description": description, "tags": [tag] });
        match self.dialect {
            Dialect::V2 => {
                response["schema"] = schema.clone();
                get["produces"] = types.into();
                get["schemes"] = json!(["https"]);
            }
            Dialect::V3 => response["content"] = content(types, schema),
        }
        get["responses"] = json!({ "200": response, "401": { "description": "Unauthorized" } });
        self.paths.entry(format!("/{path}/")).or_default().insert("get".into(), get);
    }

    /// A reference, recorded for the definitions; without a schema, any object.
    fn reference(&mut self, name: &str) -> Value {
        if !self.schemas.knows(name) {
            return json!({ "type": "object" });
        }
        self.needed.insert(name.to_owned());
        json!({ "$ref": self.dialect.reference(name) })
    }

    fn shape(&mut self, row: &Resource, kind: &Value, shape: Shape) -> Value {
        let text = |name: &str| kind[name].as_str().unwrap_or_default();
        let name = self.schemas.definition_name(text("group"), text("version"), text("kind"));
        match shape {
            Shape::Object => self.reference(&name.unwrap_or_else(|| row.definition.clone())),
            Shape::List => {
                self.reference(&format!("{}List", name.unwrap_or_else(|| row.definition.clone())))
            }
            Shape::Patch => self.reference(&format!("{META}.Patch")),
            Shape::DeleteOptions => self.reference(&format!("{META}.DeleteOptions")),
            Shape::Status => self.reference(&format!("{META}.Status")),
            Shape::WatchEvent => self.reference(&format!("{META}.WatchEvent")),
            Shape::Text => json!({ "type": "string" }),
        }
    }

    fn operation(&mut self, row: &Resource, operation: &Operation) -> Value {
        let kind = &operation.group_version_kind;
        let answer = self.shape(row, kind, operation.answer);
        let body = operation.body.map(|shape| self.shape(row, kind, shape));
        let mut json = json!({
            "description": operation.description,
            "tags": [operation.tag],
            "operationId": operation.id,
            "x-kubernetes-action": operation.action,
            "x-kubernetes-group-version-kind": kind,
        });
        let mut parameters: Vec<Value> = operation
            .query
            .iter()
            .map(|name| write_parameter(self.dialect, name, "query"))
            .collect();
        let (answers, bodies) = (answer_types(row, operation), body_types(row, operation));
        let mut response = json!({ "description": "OK" });
        match self.dialect {
            Dialect::V2 => {
                response["schema"] = answer;
                json["consumes"] = json!(bodies);
                json["produces"] = json!(answers);
                json["schemes"] = json!(["https"]);
                if let Some(schema) = body {
                    let required = operation.body != Some(Shape::DeleteOptions);
                    let mut parameter = json!({ "name": "body", "in": "body", "schema": schema });
                    if required {
                        parameter["required"] = true.into();
                    }
                    parameters.push(parameter);
                }
            }
            Dialect::V3 => {
                response["content"] = content(&answers, &answer);
                if let Some(schema) = body {
                    json["requestBody"] = json!({ "content": content(&bodies, &schema) });
                    if operation.body != Some(Shape::DeleteOptions) {
                        json["requestBody"]["required"] = true.into();
                    }
                }
            }
        }
        if !parameters.is_empty() {
            json["parameters"] = parameters.into();
        }
        json["responses"] = json!({ "200": response, "401": { "description": "Unauthorized" } });
        json
    }

    /// The paths, and all definitions that they reference, directly or indirectly.
    fn finish(self) -> (Value, Value) {
        let mut definitions = BTreeMap::new();
        let mut open: Vec<String> = self.needed.into_iter().collect();
        while let Some(name) = open.pop() {
            if definitions.contains_key(&name) {
                continue;
            }
            let found = match self.dialect {
                Dialect::V2 => self.schemas.definition_v2(&name),
                Dialect::V3 => self.schemas.definition(&name),
            };
            let Some(mut schema) = found else { continue };
            translate(self.dialect, &mut schema, &mut open);
            definitions.insert(name, schema);
        }
        let paths: Map<String, Value> =
            self.paths.into_iter().map(|(path, item)| (path, item.into())).collect();
        (paths.into(), serde_json::to_value(definitions).expect("keys are strings"))
    }
}

/// Rewrites references for this dialect, and records their targets.
fn translate(dialect: Dialect, schema: &mut Value, found: &mut Vec<String>) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| translate(dialect, item, found)),
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get_mut("$ref")
                && let Some(name) = reference.strip_prefix("#/definitions/").map(str::to_owned)
            {
                *reference = dialect.reference(&name);
                found.push(name);
                // OpenAPI 3.0 ignores other fields beside a reference, so the reference is wrapped in
                // `allOf`.
                if dialect == Dialect::V3 && fields.len() > 1 {
                    let reference = fields.remove("$ref").expect("found above");
                    fields.insert("allOf".into(), json!([{ "$ref": reference }]));
                    return;
                }
            }
            for (_, value) in fields.iter_mut() {
                translate(dialect, value, found);
            }
        }
        _ => {}
    }
}

/// Media types of an operation's answers.
fn answer_types(row: &Resource, operation: &Operation) -> Vec<&'static str> {
    if operation.action == "connect" {
        return vec!["*/*"];
    }
    if row.custom {
        return TEXTS.to_vec();
    }
    let mut types = MEDIA_TYPES.to_vec();
    types.extend(cbor::is_served().then_some(cbor::MEDIA_TYPE));
    if operation.answer == Shape::Text {
        types.insert(0, "text/plain");
    }
    if matches!(operation.action, "list" | "watch" | "watchlist") {
        types.extend(STREAMS);
        types.extend(cbor::is_served().then_some(cbor::SEQUENCE));
    }
    types
}

/// Media types of an operation's body.
fn body_types(row: &Resource, operation: &Operation) -> Vec<&'static str> {
    if operation.body != Some(Shape::Patch) {
        return if row.custom { TEXTS.to_vec() } else { vec!["*/*"] };
    }
    let mut types = PATCH_TYPES.to_vec();
    types.retain(|name| !row.custom || *name != STRATEGIC);
    types.extend((cbor::is_served() && !row.custom).then_some(cbor::APPLY_PATCH));
    types
}

fn content(types: &[&str], schema: &Value) -> Value {
    let entries = types.iter().map(|media| ((*media).to_owned(), json!({ "schema": schema })));
    Value::Object(entries.collect())
}

fn path_parameters(dialect: Dialect, path: &str) -> Value {
    let mut names: Vec<&str> = ["name", "namespace", "path"]
        .into_iter()
        .filter(|name| path.contains(&format!("{{{name}}}")))
        .collect();
    names.push("pretty");
    let place = |name: &str| if name == "pretty" { "query" } else { "path" };
    names.into_iter().map(|name| write_parameter(dialect, name, place(name))).collect()
}

fn write_parameter(dialect: Dialect, name: &str, place: &str) -> Value {
    let (kind, description) = parameter(name);
    let mut json = json!({ "name": name, "in": place, "description": description });
    match dialect {
        Dialect::V2 => {
            json["type"] = kind.into();
            json["uniqueItems"] = true.into();
        }
        Dialect::V3 => json["schema"] = json!({ "type": kind, "uniqueItems": true }),
    }
    if place == "path" {
        json["required"] = true.into();
    }
    json
}
