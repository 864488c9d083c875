//! Discovery: the groups, versions and resources. Derived from the table of resources alone.
//!
//! In: the resource table. Out: `/api`, `/apis` and the paths below, in the old form (one document per group
//! and version) and the aggregated one (one document, with an ETag). Documents are made at the first
//! request and cached until the table changes.
//!
//! Order: groups by [`crate::serve::Options::group_order`], the others by name; versions in Kubernetes'
//! order (`v2`, `v1`, `v1beta1`, `v1alpha1`).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderValue, IF_NONE_MATCH, VARY};
use http::{HeaderMap, Response, StatusCode};
use machinery::StatusError;
use machinery::status::Reason;
use release::features::{self, Feature};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::aggregate::Remote;
use crate::codec::decode::group_version;
use crate::codec::negotiate::clauses;
use crate::codec::{self, Accept, As};
use crate::options::Options;
use crate::registry::Registry;
use crate::resource::{Body, Resource, ResourceTable, Subresource};

const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

pub struct Discovery {
    group_order: &'static [&'static str],
    /// The documents of one generation of the table. Locked while they are made, never across an await.
    cached: Mutex<Option<(u64, Arc<Documents>)>>,
}

struct Documents {
    /// By path: `/apis/apps/v1`.
    by_path: BTreeMap<String, Bytes>,
    /// `/api` and `/apis`, with their ETags.
    aggregated: BTreeMap<&'static str, (Bytes, String)>,
}

/// A group's versions in order, each with its rows by name.
struct Group<'a> {
    name: &'a str,
    versions: Vec<(&'a str, Served<'a>)>,
}

/// The server of a version.
enum Served<'a> {
    Here(Vec<&'a Resource>),
    Elsewhere(&'a Remote),
}

/// The priority of groups without a priority of their own: groups of custom resources.
const OTHERS_PRIORITY: i32 = 1000;

impl Discovery {
    pub fn new(group_order: &'static [&'static str]) -> Self {
        Self { group_order, cached: Mutex::default() }
    }

    /// Answers `/api`, `/apis` and the paths below; `path` has no trailing slash.
    pub(crate) fn serve(
        &self,
        registry: &Registry,
        options: &Options,
        path: &str,
        headers: &HeaderMap,
        accept: Result<Accept, StatusError>,
    ) -> Response<Body> {
        let documents = self.documents(registry, options);
        if let Some((json, tag)) = documents.aggregated.get(path)
            && wants_aggregated(headers)
        {
            return aggregated(json, tag, headers);
        }
        let routed = is_routed(registry, path);
        if path != "/api" && !documents.by_path.contains_key(path) {
            let accept = accept.unwrap_or(Accept::JSON);
            // The rest of a group's paths is routed, and so is what it does not have.
            return match routed {
                true => codec::error(&accept, &codec::no_route()),
                false => codec::page_not_found(),
            };
        }
        let accept = match accept {
            Ok(Accept { shown_as: As::Itself, .. }) if accepts_plain(headers) => {
                accept.unwrap_or(Accept::JSON)
            }
            _ => {
                let is_refused = routed && !names_a_type(headers);
                return codec::error(&Accept::JSON, &not_acceptable(is_refused));
            }
        };
        if path == "/api" {
            let json = api_versions(&options.advertised);
            return codec::json(&accept, StatusCode::OK, json.to_string().into());
        }
        match documents.by_path.get(path) {
            Some(json) => codec::json(&accept, StatusCode::OK, json.clone()),
            None => codec::page_not_found(),
        }
    }

    /// The paths of all documents.
    pub(crate) fn paths(&self, registry: &Registry, options: &Options) -> Vec<String> {
        let mut paths: Vec<String> =
            self.documents(registry, options).by_path.keys().cloned().collect();
        paths.push("/api".into());
        paths
    }

    fn documents(&self, registry: &Registry, options: &Options) -> Arc<Documents> {
        // Read first: if the table changes meanwhile, the new documents get the old generation.
        let generation = registry.resources_generation();
        let mut cached = self.cached.lock().expect("no panic under the lock");
        if let Some((of, documents)) = &*cached
            && *of == generation
        {
            return documents.clone();
        }
        let remotes = options.aggregator.as_ref().map(|aggregator| aggregator.remotes());
        let remotes = remotes.as_ref().map_or(&[][..], |remotes| remotes.as_slice());
        let documents = Arc::new(build(&registry.resources(), remotes, self.group_order));
        *cached = Some((generation, documents.clone()));
        documents
    }
}

/// Does the path belong to a built-in group?
fn is_routed(registry: &Registry, path: &str) -> bool {
    let mut parts = path.split('/').skip(1);
    match (parts.next(), parts.next()) {
        (Some("api"), _) => true,
        (Some("apis"), Some(group)) => {
            registry.resources().iter().any(|row| row.group == group && !row.custom)
        }
        _ => false,
    }
}

fn wants_aggregated(headers: &HeaderMap) -> bool {
    clauses(headers).iter().any(|clause| {
        matches!(clause.media, "application/json")
            && clause.param("as") == Some("APIGroupDiscoveryList")
            && clause.param("g") == Some("apidiscovery.k8s.io")
            && clause.param("v") == Some("v2")
    })
}

/// Whether a clause names a media type of the documents, in whatever form.
fn names_a_type(headers: &HeaderMap) -> bool {
    const TYPES: &[&str] = &[
        "application/json",
        "application/yaml",
        "application/vnd.kubernetes.protobuf",
        "application/*",
        "*/*",
    ];
    clauses(headers).iter().any(|clause| TYPES.contains(&clause.media))
}

/// Whether a clause requests no kind. Unsupported forms of discovery must not be taken for the plain one.
fn accepts_plain(headers: &HeaderMap) -> bool {
    clauses(headers).iter().any(|clause| clause.param("as").is_none())
}

/// Upstream's router refuses for the paths of built-in groups, handlers for the others.
fn not_acceptable(routed: bool) -> StatusError {
    const TYPES: &str = "application/json, application/yaml, application/vnd.kubernetes.protobuf";
    let head = match routed {
        true => "406: Not Acceptable\n\nAvailable representations",
        false => "only the following media types are accepted",
    };
    let error = StatusError::new(Reason::NotAcceptable, format!("{head}: {TYPES}"));
    if routed { error } else { error.without_details() }
}

fn aggregated(json: &Bytes, tag: &str, headers: &HeaderMap) -> Response<Body> {
    let known = headers.get(IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    let mut response = match known.is_some_and(|known| known.trim_matches('"') == tag) {
        true => codec::respond(StatusCode::NOT_MODIFIED, AGGREGATED, codec::empty()),
        false => codec::respond(StatusCode::OK, AGGREGATED, codec::full(json.clone())),
    };
    if response.status() == StatusCode::NOT_MODIFIED {
        response.headers_mut().remove(CONTENT_TYPE);
    }
    let quoted = HeaderValue::from_str(&format!("\"{tag}\"")).expect("hex digits");
    let headers = response.headers_mut();
    headers.insert(ETAG, quoted);
    headers.insert(VARY, HeaderValue::from_static("Accept"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("public"));
    response
}

fn api_versions(address: &str) -> Value {
    json!({
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{ "clientCIDR": "0.0.0.0/0", "serverAddress": address }],
    })
}

fn build(table: &ResourceTable, remotes: &[Remote], order: &[&str]) -> Documents {
    let groups = groups(table, remotes, order);
    let mut by_path = BTreeMap::new();
    let mut put = |path: String, json: Value| by_path.insert(path, Bytes::from(json.to_string()));
    for group in &groups {
        let prefix =
            if group.name.is_empty() { "/api".to_owned() } else { format!("/apis/{}", group.name) };
        for (version, served) in &group.versions {
            // Another server's document comes from that server.
            if let Served::Here(rows) = served {
                put(format!("{prefix}/{version}"), resource_list(group.name, version, rows));
            }
        }
        if !group.name.is_empty() {
            let mut json = api_group(group);
            json["kind"] = "APIGroup".into();
            json["apiVersion"] = "v1".into();
            put(prefix, json);
        }
    }
    let named: Vec<Value> =
        groups.iter().filter(|group| !group.name.is_empty()).map(api_group).collect();
    put("/apis".into(), json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": named }));
    let one_document = |is_core: bool| {
        let items: Vec<Value> = groups
            .iter()
            .filter(|group| group.name.is_empty() == is_core)
            .map(aggregated_group)
            .collect();
        let json = json!({
            "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items,
        })
        .to_string();
        let tag: String = Sha256::digest(&json).iter().map(|byte| format!("{byte:02X}")).collect();
        (Bytes::from(json), tag)
    };
    let aggregated = [("/api", one_document(true)), ("/apis", one_document(false))].into();
    Documents { by_path, aggregated }
}

fn groups<'a>(table: &'a ResourceTable, remotes: &'a [Remote], order: &[&str]) -> Vec<Group<'a>> {
    let mut rows: BTreeMap<(&str, &str), Vec<&Resource>> = BTreeMap::new();
    for row in table.iter() {
        rows.entry((&row.group, &row.version)).or_default().push(row);
    }
    let mut by_name: BTreeMap<&str, Vec<(&str, Served<'_>)>> = BTreeMap::new();
    let mut priorities: BTreeMap<&str, i32> = BTreeMap::new();
    for remote in remotes {
        // An APIService decides who serves a version, even if this server could.
        rows.remove(&(remote.group.as_str(), remote.version.as_str()));
        let version = (remote.version.as_str(), Served::Elsewhere(remote));
        by_name.entry(&remote.group).or_default().push(version);
        let priority = priorities.entry(&remote.group).or_insert(remote.group_priority);
        *priority = remote.group_priority.max(*priority);
    }
    for ((group, version), rows) in rows {
        by_name.entry(group).or_default().push((version, Served::Here(rows)));
    }
    let mut groups: Vec<Group<'_>> = by_name
        .into_iter()
        .map(|(name, mut versions)| {
            versions.sort_unstable_by_key(|(version, _)| version_rank(version));
            Group { name, versions }
        })
        .collect();
    let rank = |name: &str| {
        let place = order.iter().position(|one| *one == name).unwrap_or(order.len());
        (place, Reverse(priorities.get(name).copied().unwrap_or(OTHERS_PRIORITY)))
    };
    groups.sort_by_key(|group| rank(group.name));
    groups
}

/// Kubernetes' order of versions: stable before beta before alpha, newer before older, others last.
pub fn version_rank(version: &str) -> (u8, Reverse<u64>, Reverse<u64>, String) {
    let last = || (3, Reverse(0), Reverse(0), version.to_owned());
    let Some(rest) = version.strip_prefix('v') else { return last() };
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let Ok(major) = rest[..digits].parse::<u64>() else { return last() };
    let (stage, minor) = match &rest[digits..] {
        "" => (0, "0"),
        tail => match (tail.strip_prefix("beta"), tail.strip_prefix("alpha")) {
            (Some(minor), _) => (1, minor),
            (_, Some(minor)) => (2, minor),
            _ => return last(),
        },
    };
    match minor.parse() {
        Ok(minor) => (stage, Reverse(major), Reverse(minor), String::new()),
        Err(_) => last(),
    }
}

fn api_group(group: &Group<'_>) -> Value {
    let version = |version: &str| json!({ "groupVersion": group_version(group.name, version), "version": version });
    let versions: Vec<Value> = group.versions.iter().map(|(name, _)| version(name)).collect();
    json!({ "name": group.name, "preferredVersion": versions[0], "versions": versions })
}

fn sorted(verbs: &[&'static str]) -> Vec<&'static str> {
    let mut verbs = verbs.to_vec();
    verbs.sort_unstable();
    verbs
}

/// Those of custom resources come in an order of upstream's own.
fn verbs(row: &Resource) -> Vec<&'static str> {
    const CUSTOM: &[&str] =
        &["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"];
    match row.custom {
        true => CUSTOM.iter().copied().filter(|verb| row.verbs.contains(verb)).collect(),
        false => sorted(&row.verbs),
    }
}

/// By name; the status of a custom resource comes before its scale.
fn subresources(row: &Resource) -> Vec<&Subresource> {
    let mut all: Vec<&Subresource> = row.subresources.iter().collect();
    all.sort_unstable_by_key(|one| (row.custom && one.name != "status", one.name));
    all
}

/// Built-in kinds have the group and version of the list that they are in.
fn response_kind(row: &Resource) -> Value {
    let (group, version) = if row.custom { (&*row.group, &*row.version) } else { ("", "") };
    json!({ "group": group, "version": version, "kind": row.kind })
}

fn resource_list(group: &str, version: &str, rows: &[&Resource]) -> Value {
    let mut resources = vec![];
    for row in rows {
        resources.push(api_resource(row));
        resources.extend(subresources(row).into_iter().map(|one| api_subresource(row, one)));
    }
    let mut json = json!({
        "kind": "APIResourceList", "groupVersion": group_version(group, version), "resources": resources,
    });
    // Upstream omits it in the core group.
    if !group.is_empty() {
        json["apiVersion"] = "v1".into();
    }
    json
}

fn api_resource(row: &Resource) -> Value {
    let mut json = json!({
        "name": row.plural, "singularName": row.singular, "namespaced": row.namespaced,
        "kind": row.kind, "verbs": verbs(row),
    });
    if !row.short_names.is_empty() {
        json["shortNames"] = row.short_names.clone().into();
    }
    if !row.categories.is_empty() {
        json["categories"] = row.categories.clone().into();
    }
    if row.is_stored() && features::enabled(Feature::StorageVersionHash) {
        json["storageVersionHash"] = storage_version_hash(row).into();
    }
    json
}

/// Tells clients when the storage version changes. Upstream: the first bytes of the hash of the stored
/// group, version and kind.
fn storage_version_hash(row: &Resource) -> String {
    let stored = row.stored_codec().empty();
    let (group, version) =
        stored.api_version().split_once('/').unwrap_or(("", stored.api_version()));
    let digest = Sha256::digest(format!("{group}/{version}/{}", stored.kind()));
    STANDARD.encode(&digest[..8])
}

fn api_subresource(row: &Resource, subresource: &Subresource) -> Value {
    let mut json = json!({
        "name": format!("{}/{}", row.plural, subresource.name), "singularName": "",
        "namespaced": row.namespaced, "kind": row.kind, "verbs": sorted(subresource.verbs),
    });
    if let Some(kind) = subresource.kind {
        json["kind"] = kind.kind.into();
        if (kind.group, kind.version) != (&row.group, &row.version) {
            json["group"] = kind.group.into();
            json["version"] = kind.version.into();
            if kind.group.is_empty() {
                json.as_object_mut().expect("made above").remove("group");
            }
        }
    }
    json
}

fn aggregated_group(group: &Group<'_>) -> Value {
    let metadata = if group.name.is_empty() { json!({}) } else { json!({ "name": group.name }) };
    let versions: Vec<Value> = group
        .versions
        .iter()
        .map(|(version, served)| {
            let (resources, is_current) = match served {
                Served::Here(rows) => {
                    (rows.iter().map(|row| aggregated_resource(row)).collect(), true)
                }
                Served::Elsewhere(remote) => (remote.resources.clone(), remote.is_available),
            };
            let freshness = if is_current { "Current" } else { "Stale" };
            json!({ "version": version, "resources": resources, "freshness": freshness })
        })
        .collect();
    json!({ "metadata": metadata, "versions": versions })
}

fn aggregated_resource(row: &Resource) -> Value {
    let mut json = json!({
        "resource": row.plural,
        "responseKind": response_kind(row),
        "scope": if row.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": row.singular,
        "verbs": verbs(row),
    });
    if !row.short_names.is_empty() {
        json["shortNames"] = row.short_names.clone().into();
    }
    if !row.categories.is_empty() {
        json["categories"] = row.categories.clone().into();
    }
    let subresources = subresources(row);
    if !subresources.is_empty() {
        json["subresources"] =
            subresources.into_iter().map(|one| aggregated_subresource(row, one)).collect();
    }
    json
}

fn aggregated_subresource(row: &Resource, subresource: &Subresource) -> Value {
    let listed = api_subresource(row, subresource);
    let text = |name: &str| listed[name].as_str().unwrap_or_default().to_owned();
    json!({
        "subresource": subresource.name,
        "responseKind": { "group": text("group"), "version": text("version"), "kind": text("kind") },
        "verbs": listed["verbs"],
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    #[test]
    fn custom_resources_have_an_order_of_their_own() {
        let part = |name| Subresource {
            name,
            kind: None,
            verbs: &[],
            behaviour: crate::resource::Behaviour::Part,
        };
        let mut row = crate::testing::row::<ConfigMap>("configmaps", &[], true);
        row.subresources = vec![part("status"), part("scale")];
        let names = |row: &Resource| -> Vec<&'static str> {
            subresources(row).iter().map(|one| one.name).collect()
        };
        assert_eq!(names(&row), ["scale", "status"]);
        assert_eq!(verbs(&row).first(), Some(&"create"));
        row.custom = true;
        assert_eq!(names(&row), ["status", "scale"]);
        assert_eq!(verbs(&row).first(), Some(&"delete"));
        assert_eq!(response_kind(&row)["version"], "v1");
    }

    #[test]
    fn the_router_refuses_types_and_the_handler_forms() {
        let headers = |accept: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(http::header::ACCEPT, http::HeaderValue::from_static(accept));
            headers
        };
        assert!(names_a_type(&headers("application/json;as=APIGroupDiscoveryList;v=v9")));
        assert!(!names_a_type(&headers("text/html")));
        assert!(not_acceptable(true).to_json()["details"].is_object());
        assert!(not_acceptable(false).to_json()["details"].is_null());
    }

    #[test]
    fn versions_are_in_kubernetes_order() {
        let mut versions = ["v1alpha1", "foo", "v1", "v10", "v2beta1", "v2", "v1beta2", "v1beta1"];
        versions.sort_by_key(|version| version_rank(version));
        assert_eq!(
            versions,
            ["v10", "v2", "v1", "v2beta1", "v1beta2", "v1beta1", "v1alpha1", "foo"]
        );
    }

    #[test]
    fn documents_derive_from_the_rows() {
        let documents = build(&crate::testing::table(), &[], &["apps"]);
        let list: Value = serde_json::from_slice(&documents.by_path["/api/v1"]).expect("JSON");
        assert_eq!(
            list["resources"][0],
            json!({
                "name": "configmaps", "singularName": "configmap", "namespaced": true, "kind": "ConfigMap",
                "verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
                "shortNames": ["cm"], "storageVersionHash": "qFsyl6wFWjQ=",
            })
        );
        let group: Value = serde_json::from_slice(&documents.by_path["/apis/apps"]).expect("JSON");
        assert_eq!(group["preferredVersion"]["groupVersion"], "apps/v1");
        let (json, tag) = &documents.aggregated["/apis"];
        let all: Value = serde_json::from_slice(json).expect("JSON");
        assert_eq!(
            all["items"][0]["versions"][0]["resources"][0]["subresources"][0]["subresource"],
            "scale"
        );
        assert_eq!(tag.len(), 64);
    }
}
