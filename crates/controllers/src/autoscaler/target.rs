//! What an autoscaler scales: any kind with a scale subresource.
//!
//! In: an API version and a kind. Out: the resource of that kind, from a small table or discovery.
//! Upstream: `RESTMapper` and `ScalesGetter`.

use client::{Client, ErrorExt, Gvr};
use serde::Deserialize;

/// The usual targets, which need no discovery.
const KNOWN: [(&str, &str, &str); 4] = [
    ("apps", "Deployment", "deployments"),
    ("apps", "StatefulSet", "statefulsets"),
    ("apps", "ReplicaSet", "replicasets"),
    ("", "ReplicationController", "replicationcontrollers"),
];

/// Group and version of `apps/v1`.
pub fn split(api_version: &str) -> (&str, &str) {
    api_version.split_once('/').unwrap_or(("", api_version))
}

/// The resource of a kind. The version named is tried first, then the others of its group.
pub async fn resource(client: &Client, api_version: &str, kind: &str) -> Result<Gvr, String> {
    let (group, version) = split(api_version);
    if let Some((_, _, plural)) =
        KNOWN.iter().find(|one| one.0 == group && one.1 == kind && matches!(version, "v1" | ""))
    {
        return Ok(Gvr::new(group, "v1", plural));
    }
    let mut versions = versions(client, group).await?;
    versions.sort_by_key(|one| one != version);
    for version in versions {
        let list: Resources = match group {
            "" => client.get(&format!("/api/{version}")).await,
            _ => client.get(&format!("/apis/{group}/{version}")).await,
        }
        .map_err(|error| error.text())?;
        let found = list.resources.iter().find(|one| one.kind == kind && !one.name.contains('/'));
        if let Some(found) = found {
            return Ok(Gvr::new(group, &version, &found.name));
        }
    }
    Err(format!("no matches for kind {kind:?} in group {group:?}"))
}

async fn versions(client: &Client, group: &str) -> Result<Vec<String>, String> {
    if group.is_empty() {
        return Ok(vec!["v1".into()]);
    }
    match client.get::<Group>(&format!("/apis/{group}")).await {
        Ok(found) => Ok(found.versions.into_iter().map(|one| one.version).collect()),
        Err(error) if error.is_not_found() => Ok(vec![]),
        Err(error) => Err(error.text()),
    }
}

#[derive(Deserialize)]
struct Group {
    versions: Vec<Version>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct Resources {
    resources: Vec<Listed>,
}

#[derive(Deserialize)]
struct Listed {
    name: String,
    kind: String,
}
