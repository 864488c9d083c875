//! Requests for the operations that an OpenAPI document lists.
//!
//! In: operations, schemas, objects that the server accepted earlier. Out: method, path, headers and
//! bytes: mostly well-formed, some broken on purpose.
//!
//! Some requests would make the server refuse all later ones (unreachable webhooks, policies, priority
//! levels, aggregated groups). These are always dry runs.

use std::collections::BTreeMap;

use base::percent;
use serde_json::{Value, json};

use super::values::{self, Rng, Schemas};

/// Paths that need a kubelet or another server. Without one upstream answers 5xx, too.
const NEED_OTHERS: &[&str] = &["/proxy", "/exec", "/attach", "/portforward", "/log"];

const DRY_ONLY: &[&str] = &[
    "/apis/admissionregistration.k8s.io/",
    "/apis/apiregistration.k8s.io/",
    "/apis/flowcontrol.apiserver.k8s.io/",
];

/// How many accepted objects of one kind are kept as material.
const KEPT: usize = 16;

pub struct Operation {
    pub method: String,
    pub path: String,
    query: Vec<(String, Value)>,
    body: Option<Value>,
    patches: Vec<String>,
    /// `apiVersion` and `kind`, if the body is an object.
    kind: Option<(String, String)>,
}

pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

/// Objects that the server accepted, by the path of their list.
#[derive(Default)]
pub struct Pool(BTreeMap<String, Vec<Value>>);

impl Pool {
    pub fn keep(&mut self, rng: &mut Rng, path: &str, object: Value) {
        let of_path = self.0.entry(path.to_owned()).or_default();
        if of_path.len() < KEPT {
            of_path.push(object);
        } else {
            of_path[rng.below(KEPT)] = object;
        }
    }

    fn pick(&self, rng: &mut Rng, path: &str) -> Option<&Value> {
        let of_path = self.0.get(path)?;
        of_path.get(rng.below(of_path.len()))
    }
}

/// All operations of a document that this server can answer alone.
pub fn operations(document: &Value) -> Vec<Operation> {
    const METHODS: &[&str] = &["get", "put", "post", "patch", "delete"];
    let paths = document["paths"].as_object().into_iter().flatten();
    let mut operations = Vec::new();
    for (path, item) in paths {
        if NEED_OTHERS.iter().any(|part| path.contains(part)) {
            continue;
        }
        for method in METHODS.iter().filter(|method| item[**method].is_object()) {
            operations.push(operation(method, path, item));
        }
    }
    operations
}

fn operation(method: &str, path: &str, item: &Value) -> Operation {
    let own = &item[method];
    let both = [&item["parameters"], &own["parameters"]];
    let parameters = both.into_iter().filter_map(Value::as_array).flatten();
    let query = parameters
        .filter(|it| it["in"] == "query")
        .filter_map(|it| Some((it["name"].as_str()?.to_owned(), it["schema"].clone())))
        .collect();
    let content = own["requestBody"]["content"].as_object();
    let body = content.and_then(|it| it.values().next()).map(|it| it["schema"].clone());
    let patches = if method == "patch" {
        content.into_iter().flat_map(|it| it.keys().cloned()).collect()
    } else {
        Vec::new()
    };
    let about = &own["x-kubernetes-group-version-kind"];
    let kind = about["kind"].as_str().map(|kind| {
        let version = about["version"].as_str().unwrap_or_default();
        let api_version = match about["group"].as_str().unwrap_or_default() {
            "" => version.to_owned(),
            group => format!("{group}/{version}"),
        };
        (api_version, kind.to_owned())
    });
    Operation { method: method.to_uppercase(), path: path.to_owned(), query, body, patches, kind }
}

impl Operation {
    /// The path of the objects that this operation creates or changes.
    pub fn list_path(&self) -> &str {
        self.path.split_once("/{name}").map_or(&self.path, |(list, _)| list)
    }

    /// One of the old paths that always watch.
    pub fn is_watch(&self) -> bool {
        self.path.contains("/watch/")
    }

    pub fn request(&self, rng: &mut Rng, schemas: &Schemas, pool: &Pool) -> Request {
        let material = pool.pick(rng, self.list_path()).cloned();
        let path = self.filled(rng, material.as_ref());
        let (kind, body) = self.content(rng, schemas, material);
        let mut headers = vec![("Accept", accept(rng))];
        if !body.is_empty() {
            headers.push(("Content-Type", kind));
        }
        let query = self.query(rng);
        Request { method: self.method.clone(), path: format!("{path}{query}"), headers, body }
    }

    fn filled(&self, rng: &mut Rng, material: Option<&Value>) -> String {
        let mut path = String::new();
        for part in self.path.split('/').skip(1) {
            path.push('/');
            let known = match part {
                "{name}" => material.and_then(|it| it["metadata"]["name"].as_str()),
                "{namespace}" => Some("default"),
                _ if part.starts_with('{') => None,
                _ => {
                    path.push_str(part);
                    continue;
                }
            };
            match known.filter(|_| !rng.percent(4)) {
                Some(known) => path.push_str(&percent::encode(known)),
                None => path.push_str(&percent::encode(&values::text(rng))),
            }
        }
        path
    }

    fn query(&self, rng: &mut Rng) -> String {
        let mut words = Vec::new();
        for (name, schema) in &self.query {
            // A watch keeps its worker waiting: only a few are sent.
            let share = if name == "watch" { 2 } else { 8 };
            let is_timeout = name == "timeoutSeconds";
            if rng.percent(share) && !is_timeout {
                words.push(format!("{name}={}", percent::encode(&parameter(rng, name, schema))));
            }
        }
        let is_watch = self.is_watch() || words.iter().any(|it| it.starts_with("watch="));
        if is_watch {
            words.push("timeoutSeconds=1".to_owned());
        }
        if DRY_ONLY.iter().any(|prefix| self.path.starts_with(prefix)) && self.method != "GET" {
            words.retain(|word| !word.starts_with("dryRun="));
            words.push("dryRun=All".to_owned());
        }
        if words.is_empty() { String::new() } else { format!("?{}", words.join("&")) }
    }

    /// The media type and the bytes of a body.
    fn content(
        &self,
        rng: &mut Rng,
        schemas: &Schemas,
        material: Option<Value>,
    ) -> (String, Vec<u8>) {
        let Some(schema) = &self.body else { return (String::new(), Vec::new()) };
        if !self.patches.is_empty() {
            let kind = self.patches[rng.below(self.patches.len())].clone();
            let patch = self.patch(rng, &kind, schemas, material);
            return (kind, bytes(rng, &patch));
        }
        let fresh = |rng: &mut Rng| {
            let mut object = schemas.value(rng, schema);
            self.name(rng, &mut object);
            object
        };
        let object = match material {
            Some(mut known) if self.method != "DELETE" && rng.percent(60) => {
                if self.method == "POST" {
                    known["metadata"] = json!({"generateName": "f-"});
                }
                values::mutate(rng, &mut known);
                known
            }
            _ => fresh(rng),
        };
        (content_type(rng), bytes(rng, &object))
    }

    /// Nearly always sets the right type and name.
    fn name(&self, rng: &mut Rng, object: &mut Value) {
        let Some((api_version, kind)) = &self.kind else { return };
        let Some(map) = object.as_object_mut() else { return };
        // Delete options have their own kind, and may omit it.
        if self.method == "DELETE" {
            map.remove("apiVersion");
            map.remove("kind");
            return;
        }
        if !rng.percent(2) {
            map.insert("apiVersion".to_owned(), json!(api_version));
            map.insert("kind".to_owned(), json!(kind));
        }
        if !rng.percent(10) {
            let name = format!("f{}", rng.below(1000));
            map.insert("metadata".to_owned(), json!({"name": name}));
        }
    }

    fn patch(
        &self,
        rng: &mut Rng,
        kind: &str,
        schemas: &Schemas,
        material: Option<Value>,
    ) -> Value {
        let mut target = material.unwrap_or_else(|| json!({"metadata": {"name": "a"}}));
        if kind.contains("json-patch") {
            return json_patch(rng, &target);
        }
        if kind.contains("apply-patch") {
            let mut applied = json!({"spec": target["spec"], "data": target["data"]});
            if let Some(map) = applied.as_object_mut() {
                map.retain(|_, value| !value.is_null());
            }
            values::mutate(rng, &mut applied);
            self.name(rng, &mut applied);
            if let Some(map) = applied.as_object_mut() {
                map.insert("metadata".to_owned(), json!({"name": target["metadata"]["name"]}));
            }
            return applied;
        }
        values::mutate(rng, &mut target);
        let mut patch = if rng.percent(50) {
            // Only a part of it.
            let Value::Object(mut map) = target else { return target };
            map.retain(|name, _| name != "metadata" && name != "status" && rng.percent(60));
            Value::Object(map)
        } else {
            schemas.value(rng, &Value::Null)
        };
        if kind.contains("strategic") && rng.percent(50) {
            directive(rng, &mut patch);
        }
        patch
    }
}

fn json_patch(rng: &mut Rng, target: &Value) -> Value {
    const OPERATIONS: &[&str] = &["add", "remove", "replace", "move", "copy", "test", "", "ADD"];
    let one = |rng: &mut Rng| {
        let mut path = values::pointer(rng, target);
        match rng.below(8) {
            0 => path.push_str("/-"),
            1 => path.push_str("/99999999999999999999"),
            2 => path = values::text(rng),
            _ => {}
        }
        json!({
            "op": rng.pick(OPERATIONS), "path": path,
            "from": values::pointer(rng, target), "value": values::anything(rng, 3),
        })
    };
    let count = rng.below(5);
    let mut patch: Value = (0..count).map(|_| one(rng)).collect();
    if rng.percent(10) {
        values::mutate(rng, &mut patch);
    }
    patch
}

/// Inserts a directive of strategic merge somewhere.
fn directive(rng: &mut Rng, patch: &mut Value) {
    let path = values::pointer(rng, patch);
    let Some(place) = patch.pointer_mut(&path) else { return };
    let name = rng.pick(&[
        "$patch",
        "$retainKeys",
        "$setElementOrder/containers",
        "$deleteFromPrimitiveList/finalizers",
        "$setElementOrder/",
        "$patch/containers",
    ]);
    let value = match rng.below(5) {
        0 => json!("delete"),
        1 => json!("replace"),
        2 => json!("merge"),
        3 => json!([{"name": "a"}, "b"]),
        _ => values::anything(rng, 2),
    };
    match place {
        Value::Object(map) => drop(map.insert(name.to_owned(), value)),
        Value::Array(items) => items.push(json!({name: value})),
        other => *other = json!({name: value}),
    }
}

fn parameter(rng: &mut Rng, name: &str, schema: &Value) -> String {
    let words: &[&str] = match name {
        "continue" => {
            &["eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiJhXHUwMDAwIn0", "e30", "a", "="]
        }
        "resourceVersion" => &["0", "1", "5", "999999999", "18446744073709551616", "-1", "a"],
        "resourceVersionMatch" => &["Exact", "NotOlderThan", "Other"],
        "labelSelector" => {
            &["a=b", "a in (b,c)", "!a", "a,b!=c", "a in (", "=", "a=b=c", "a>1", "a notin ()"]
        }
        "fieldSelector" => {
            &["metadata.name=a", "spec.nodeName=", "a=b", "metadata.namespace!=x", "a", "=\\,"]
        }
        "dryRun" => &["All", "all", ""],
        "fieldValidation" => &["Strict", "Warn", "Ignore", "x"],
        "propagationPolicy" => &["Orphan", "Foreground", "Background", "x"],
        _ => &[],
    };
    if !words.is_empty() && rng.percent(80) {
        return rng.pick(words).to_owned();
    }
    match schema["type"].as_str() {
        Some("integer") if rng.percent(70) => values::number(rng).to_string(),
        Some("boolean") if rng.percent(80) => {
            rng.pick(&["true", "false", "1", "0", "t"]).to_owned()
        }
        _ => values::text(rng),
    }
}

fn accept(rng: &mut Rng) -> String {
    const KINDS: &[&str] = &[
        "application/yaml",
        "application/vnd.kubernetes.protobuf",
        "application/json;as=Table;v=v1;g=meta.k8s.io",
        "application/json;as=Table;v=v1beta1;g=meta.k8s.io, application/json",
        "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
        "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io",
        "application/vnd.kubernetes.protobuf;as=Table;v=v1;g=meta.k8s.io",
        "application/cbor",
        "application/json;q=0.1;pretty=1",
        "text/html",
        "*/*",
        ";;,,/",
    ];
    if rng.percent(85) { "application/json".to_owned() } else { rng.pick(KINDS).to_owned() }
}

fn content_type(rng: &mut Rng) -> String {
    const KINDS: &[&str] = &[
        "application/yaml",
        "application/vnd.kubernetes.protobuf",
        "application/cbor",
        "text/plain",
        "application/json;charset=utf-16",
        "/",
        "",
    ];
    if rng.percent(94) { "application/json".to_owned() } else { rng.pick(KINDS).to_owned() }
}

/// The encoded tree, sometimes broken.
fn bytes(rng: &mut Rng, value: &Value) -> Vec<u8> {
    let mut bytes = value.to_string().into_bytes();
    if !rng.percent(4) {
        return bytes;
    }
    let at = rng.below(bytes.len());
    match rng.below(8) {
        0 => bytes.truncate(at),
        1 => bytes[at] ^= 1 << rng.below(8),
        2 => bytes[at] = 0xff,
        3 => drop(bytes.splice(at..at, *b"\xc3\x28")),
        4 => bytes.extend_from_slice(b"{}"),
        5 => bytes = "[".repeat(20_000).into_bytes(),
        6 => bytes = "{\"a\":".repeat(20_000).into_bytes(),
        _ => bytes = [b"k8s\0".to_vec(), bytes].concat(),
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dangerous_writes_are_dry_runs_and_no_request_needs_another_server() {
        let hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
        let body = json!({"content": {"*/*": {"schema": {"type": "object"}}}});
        let dry = json!([{"in": "query", "name": "dryRun", "schema": {"type": "string"}}]);
        let document = json!({"paths": {
            hooks: {"post": {"requestBody": body, "parameters": dry}},
            "/api/v1/namespaces/{namespace}/pods/{name}/exec": {"get": {}},
        }});
        let operations = operations(&document);
        assert_eq!(operations.len(), 1);
        let (mut rng, schemas, pool) = (Rng::new(3), Schemas(Default::default()), Pool::default());
        for _ in 0..100 {
            let request = operations[0].request(&mut rng, &schemas, &pool);
            assert!(request.path.contains("dryRun=All"), "{}", request.path);
            assert_eq!(request.path.matches("dryRun").count(), 1);
        }
    }
}
