//! The server's resources, from its unaggregated discovery documents.

use serde::Deserialize;

use crate::client::{Client, Result};
use crate::resource::Gvr;

/// A resource of the server, at its group's preferred version that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovered {
    pub gvr: Gvr,
    pub kind: String,
    pub namespaced: bool,
    pub verbs: Vec<String>,
}

impl Discovered {
    pub fn can(&self, verb: &str) -> bool {
        self.verbs.iter().any(|one| one == verb)
    }
}

/// All resources (no subresources), one version of each, and whether every group answered.
pub async fn preferred(client: &Client) -> Result<(Vec<Discovered>, bool)> {
    let core: Resources = client.get("/api/v1").await?;
    let groups: Groups = client.get("/apis").await?;
    let mut found = collect("", "v1", core);
    let mut complete = true;
    for group in groups.groups {
        let preferred = group.preferred_version.map(|one| one.version);
        let mut versions: Vec<_> = group.versions.into_iter().map(|one| one.version).collect();
        versions.sort_by_key(|version| Some(version) != preferred.as_ref());
        for version in versions {
            match client.get(&format!("/apis/{}/{version}", group.name)).await {
                Ok(resources) => {
                    for one in collect(&group.name, &version, resources) {
                        let known = |other: &Discovered| {
                            other.gvr.group == one.gvr.group
                                && other.gvr.resource == one.gvr.resource
                        };
                        if !found.iter().any(known) {
                            found.push(one);
                        }
                    }
                }
                Err(error) => {
                    complete = false;
                    tracing::warn!(group = group.name, version, %error, "failed to read the discovery document of a group");
                }
            }
        }
    }
    Ok((found, complete))
}

fn collect(group: &str, version: &str, resources: Resources) -> Vec<Discovered> {
    let rows = resources.resources.into_iter().filter(|row| !row.name.contains('/'));
    rows.map(|row| Discovered {
        gvr: Gvr::new(group, version, &row.name),
        kind: row.kind,
        namespaced: row.namespaced,
        verbs: row.verbs,
    })
    .collect()
}

#[derive(Deserialize)]
struct Resources {
    #[serde(default)]
    resources: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    name: String,
    kind: String,
    #[serde(default)]
    namespaced: bool,
    #[serde(default)]
    verbs: Vec<String>,
}

#[derive(Deserialize)]
struct Groups {
    #[serde(default)]
    groups: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Group {
    name: String,
    #[serde(default)]
    versions: Vec<Version>,
    preferred_version: Option<Version>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}
