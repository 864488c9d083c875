//! OpenAPI documents, for `kubectl explain`, `apply` and client generators.
//!
//! In: the rows, and a [`SchemaSource`] with the kinds' schemas. Out: `/openapi/v3` (an index with a hash
//! per document), a document per group and version, and `/openapi/v2` with everything. Documents are made at
//! the first request, and cached until the rows change.

mod document;
mod gnostic;
mod operations;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::header::{ETAG, HeaderValue, IF_NONE_MATCH};
use http::{HeaderMap, Response, StatusCode};
use machinery::StatusError;
use machinery::status::Reason;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::aggregate::Aggregator;
use crate::codec::negotiate::clauses;
use crate::codec::{self, Accept};
use crate::options::Page;
use crate::registry::Registry;
use crate::resource::{Body, Resource, ResourceTable};
use crate::schemas::{NoSchemas, SchemaSource};

/// The media type of v2 in protobuf. Clients may still request the old name, but it is not a media type
/// that Go's `mime` can parse, so answers have this one.
const PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";
const OLD_PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf";

pub struct OpenApi {
    schemas: Arc<dyn SchemaSource>,
    pages: Vec<Page>,
    /// The schemas of custom kinds may change under the same name, so the hashes of their documents differ
    /// after each start.
    start: String,
    /// The documents of one generation of rows, by path. Locked while one is made.
    cached: Mutex<(u64, HashMap<String, Document>)>,
}

#[derive(Clone)]
struct Document {
    bytes: Bytes,
    content_type: &'static str,
    hash: String,
}

impl OpenApi {
    pub fn new(schemas: Option<Arc<dyn SchemaSource>>, pages: Vec<Page>) -> Self {
        let schemas = schemas.unwrap_or_else(|| Arc::new(NoSchemas));
        Self { schemas, pages, start: base::rng::uuid(), cached: Mutex::default() }
    }

    pub fn schemas(&self) -> &dyn SchemaSource {
        &*self.schemas
    }

    pub(crate) fn serve(
        &self,
        registry: &Registry,
        aggregator: Option<&dyn Aggregator>,
        path: &str,
        headers: &HeaderMap,
    ) -> Response<Body> {
        let protobuf = if path == "/openapi/v2" { wanted_protobuf(headers) } else { None };
        if protobuf.is_none() && !accepts_json(headers) {
            let error = StatusError::new(
                Reason::NotAcceptable,
                "only the following media types are accepted: application/json",
            );
            return codec::error(&Accept::JSON, &error.without_details());
        }
        if path == "/openapi/v3" || path == "/openapi/v3/" {
            let index = self.index(registry, aggregator).to_string();
            return codec::text(StatusCode::OK, index);
        }
        match self.document(registry, path, protobuf) {
            Some(document) => answer(document, headers),
            None => {
                let mut nothing = Response::new(codec::empty());
                *nothing.status_mut() = StatusCode::NOT_FOUND;
                nothing
            }
        }
    }

    fn index(&self, registry: &Registry, aggregator: Option<&dyn Aggregator>) -> Value {
        let table = registry.resources();
        let generation = registry.resources_generation();
        let mut paths = serde_json::Map::new();
        for path in self.paths(&table) {
            let hash = self.hash(&table, &path, generation);
            let url = format!("/openapi/v3/{path}?hash={hash}");
            paths.insert(path, json!({ "serverRelativeURL": url }));
        }
        let remotes = aggregator.map(|aggregator| aggregator.remotes());
        for remote in remotes.iter().flat_map(|remotes| remotes.iter()) {
            // Not cached: this server does not know when the other server's document changes.
            let path = format!("apis/{}/{}", remote.group, remote.version);
            let url = format!("/openapi/v3/{path}");
            paths.insert(path, json!({ "serverRelativeURL": url }));
        }
        json!({ "paths": paths })
    }

    /// The paths of all documents: `api`, `apis`, a group, a group's version, `version`, the pages.
    fn paths(&self, table: &ResourceTable) -> Vec<String> {
        let mut paths = document_paths(table);
        paths.extend(self.pages.iter().map(|page| page.path.trim_matches('/').to_owned()));
        paths
    }

    fn document(
        &self,
        registry: &Registry,
        path: &str,
        protobuf: Option<&'static str>,
    ) -> Option<Document> {
        let generation = registry.resources_generation();
        let mut cached = self.cached.lock().expect("no panic under the lock");
        if cached.0 != generation {
            *cached = (generation, HashMap::new());
        }
        let key = format!("{path} {}", protobuf.unwrap_or_default());
        if let Some(document) = cached.1.get(&key) {
            return Some(document.clone());
        }
        let table = registry.resources();
        let (json, hash) = match path.strip_prefix("/openapi/v3/") {
            Some(below) => {
                let json = document::v3(&table, below, &self.pages, &*self.schemas)?;
                (json, self.hash(&table, below, generation))
            }
            None if path == "/openapi/v2" => {
                let json = document::v2(&table, &self.paths(&table), &self.pages, &*self.schemas);
                let hash = hex(&Sha256::digest(json.to_string()));
                (json, hash)
            }
            None => return None,
        };
        let (bytes, content_type) = match protobuf {
            Some(content_type) => (gnostic::document(&json), content_type),
            None => (json.to_string().into_bytes(), "application/json"),
        };
        let document = Document { bytes: bytes.into(), content_type, hash };
        cached.1.insert(key, document.clone());
        Some(document)
    }

    /// Changes whenever the document may have changed; computed without making it.
    fn hash(&self, table: &ResourceTable, path: &str, generation: u64) -> String {
        let mut digest = Sha256::new();
        digest.update(self.schemas.revision());
        digest.update(env!("CARGO_PKG_VERSION"));
        for row in rows_of(table, path) {
            digest.update(format!("{} {} {:?};", row.plural, row.kind, row.verbs));
            for subresource in &row.subresources {
                digest.update(format!("{} {:?};", subresource.name, subresource.verbs));
            }
            if row.custom {
                digest.update(format!("{} {generation}", self.start));
            }
        }
        hex(&digest.finalize())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02X}")).collect()
}

/// The first known media type in the header decides; wildcards mean JSON.
fn wanted_protobuf(headers: &HeaderMap) -> Option<&'static str> {
    let clauses = clauses(headers);
    let known = clauses.iter().find_map(|clause| match clause.media {
        "*/*" | "application/*" | "application/json" => Some(None),
        PROTOBUF | OLD_PROTOBUF => Some(Some(PROTOBUF)),
        _ => None,
    });
    known.flatten()
}

fn accepts_json(headers: &HeaderMap) -> bool {
    clauses(headers)
        .iter()
        .any(|clause| matches!(clause.media, "*/*" | "application/*" | "application/json"))
}

fn answer(document: Document, headers: &HeaderMap) -> Response<Body> {
    let known = headers.get(IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let is_known = known.is_some_and(|known| known.trim_matches('"') == document.hash);
    let mut response = match is_known {
        true => codec::respond(StatusCode::NOT_MODIFIED, document.content_type, codec::empty()),
        false => codec::respond(StatusCode::OK, document.content_type, codec::full(document.bytes)),
    };
    let tag = HeaderValue::from_str(&format!("\"{}\"", document.hash)).expect("hex digits");
    response.headers_mut().insert(ETAG, tag);
    response
}

fn document_paths(table: &ResourceTable) -> Vec<String> {
    let mut paths: BTreeMap<String, ()> = BTreeMap::new();
    paths.insert("api".into(), ());
    paths.insert("apis".into(), ());
    paths.insert("version".into(), ());
    for row in table.iter() {
        paths.insert(version_path(row), ());
        if !row.group.is_empty() {
            paths.insert(format!("apis/{}", row.group), ());
        }
    }
    paths.into_keys().collect()
}

/// `api/v1`, `apis/apps/v1`.
fn version_path(row: &Resource) -> String {
    match row.group.as_str() {
        "" => format!("api/{}", row.version),
        group => format!("apis/{group}/{}", row.version),
    }
}

fn rows_of<'a>(table: &'a ResourceTable, path: &str) -> impl Iterator<Item = &'a Arc<Resource>> {
    table.iter().filter(move |row| version_path(row) == path)
}
