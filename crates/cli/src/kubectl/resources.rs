//! The server's resources and their names.
//!
//! In: the server's discovery documents (the aggregated ones, or the classic ones of older servers).
//! Out: [`Catalog`], which finds a resource by plural, singular, short name or kind, with or without
//! version and group (`deploy`, `deployments.apps`, `deployments.v1.apps`), or by apiVersion and kind.

use base::percent;
use serde_json::Value;

use crate::cluster::Cluster;
use crate::failure::{Failure, Result, own};

const AGGREGATED: &str =
    "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resource {
    pub group: String,
    pub version: String,
    pub name: String,
    pub singular: String,
    pub short: Vec<String>,
    pub categories: Vec<String>,
    pub kind: String,
    pub namespaced: bool,
    pub verbs: Vec<String>,
}

impl Resource {
    pub fn collection(&self, namespace: Option<&str>) -> String {
        let root = match self.group.as_str() {
            "" => format!("/api/{}", self.version),
            group => format!("/apis/{group}/{}", self.version),
        };
        match namespace.filter(|_| self.namespaced) {
            Some(namespace) => {
                format!("{root}/namespaces/{}/{}", percent::encode(namespace), self.name)
            }
            None => format!("{root}/{}", self.name),
        }
    }

    pub fn object(&self, namespace: Option<&str>, name: &str) -> String {
        format!("{}/{}", self.collection(namespace), percent::encode(name))
    }

    /// `deployment.apps`: kubectl's name for the kind of one object.
    pub fn kind_name(&self) -> String {
        let kind = self.kind.to_lowercase();
        if self.group.is_empty() { kind } else { format!("{kind}.{}", self.group) }
    }

    fn can(&self, verb: &str) -> bool {
        self.verbs.iter().any(|one| one == verb)
    }

    fn is_called(&self, word: &str) -> bool {
        self.name == word
            || self.singular == word
            || self.short.iter().any(|short| short == word)
            || self.kind.to_lowercase() == word
    }
}

/// In the order of look-ups: the core group first, preferred versions first.
#[derive(Clone, Debug, Default)]
pub struct Catalog(Vec<Resource>);

impl Catalog {
    pub async fn read(cluster: &Cluster) -> Result<Self> {
        let (core, groups) =
            futures::join!(cluster.get_as("/api", AGGREGATED), cluster.get_as("/apis", AGGREGATED));
        let (core, groups) = (core?, groups?);
        let mut all = vec![];
        for document in [core, groups] {
            if document["kind"] == "APIGroupDiscoveryList" {
                all.extend(aggregated(&document));
            } else {
                all.extend(classic(cluster, &document).await?);
            }
        }
        Ok(Self(all))
    }

    /// `word` may be `pods`, `pods.apps` or `pods.v1.apps`.
    pub fn find(&self, word: &str) -> Result<&Resource> {
        let lower = word.to_lowercase();
        let by_name = |name: &str, fits: &dyn Fn(&Resource) -> bool| {
            let usable = |one: &&Resource| one.is_called(name) && fits(one);
            self.0.iter().find(|one| one.name == name && fits(one)).or(self.0.iter().find(usable))
        };
        let mut found = None;
        if let Some((name, rest)) = lower.split_once('.') {
            found = by_name(name, &|one| one.group == rest);
            if let Some((version, group)) = rest.split_once('.') {
                found =
                    found.or(by_name(name, &|one| one.version == version && one.group == group));
            }
            // The beginning of a group suffices: `ingresses.networking`.
            found = found.or(by_name(name, &|one| one.group.starts_with(rest)));
            found = found.or(by_name(name, &|one| one.group.is_empty() && one.version == rest));
        }
        found
            .or_else(|| by_name(&lower, &|_| true))
            .ok_or_else(|| own(format!("the server doesn't have a resource type {word:?}")))
    }

    /// The resources of a category such as `all`, each in its preferred version.
    pub fn category(&self, word: &str) -> Vec<&Resource> {
        let mut found: Vec<&Resource> = vec![];
        for one in &self.0 {
            let known =
                found.iter().any(|other| other.group == one.group && other.name == one.name);
            if one.categories.iter().any(|category| category == word) && one.can("list") && !known {
                found.push(one);
            }
        }
        found
    }

    pub fn by_kind(&self, api_version: &str, kind: &str) -> Option<&Resource> {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        self.0.iter().find(|one| one.kind == kind && one.version == version && one.group == group)
    }

    #[cfg(test)]
    pub fn of(resources: Vec<Resource>) -> Self {
        Self(resources)
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(text).collect()
}

fn aggregated(document: &Value) -> Vec<Resource> {
    let mut all = vec![];
    for group in document["items"].as_array().into_iter().flatten() {
        for version in group["versions"].as_array().into_iter().flatten() {
            for one in version["resources"].as_array().into_iter().flatten() {
                all.push(Resource {
                    group: text(&group["metadata"]["name"]),
                    version: text(&version["version"]),
                    name: text(&one["resource"]),
                    singular: text(&one["singularResource"]),
                    short: texts(&one["shortNames"]),
                    categories: texts(&one["categories"]),
                    kind: text(&one["responseKind"]["kind"]),
                    namespaced: one["scope"] == "Namespaced",
                    verbs: texts(&one["verbs"]),
                });
            }
        }
    }
    all
}

/// One request per group and version.
async fn classic(cluster: &Cluster, document: &Value) -> Result<Vec<Resource>> {
    let mut all = vec![];
    let core = texts(&document["versions"]).into_iter().map(|version| (String::new(), version));
    let mut paths: Vec<(String, String)> =
        if document["kind"] == "APIVersions" { core.collect() } else { vec![] };
    for group in document["groups"].as_array().into_iter().flatten() {
        let preferred = text(&group["preferredVersion"]["version"]);
        let versions = group["versions"].as_array().into_iter().flatten();
        let mut versions: Vec<String> = versions.map(|one| text(&one["version"])).collect();
        versions.sort_by_key(|version| *version != preferred);
        paths.extend(versions.into_iter().map(|version| (text(&group["name"]), version)));
    }
    for (group, version) in paths {
        let path = match group.as_str() {
            "" => format!("/api/{version}"),
            group => format!("/apis/{group}/{version}"),
        };
        match cluster.get(&path).await {
            Ok(list) => all.extend(classic_resources(&list, &group, &version)),
            // A group whose server is unavailable must not hide the others.
            Err(Failure::Status(_)) => {
                eprintln!("Warning: couldn't get resource list for {group}/{version}");
            }
            Err(other) => return Err(other),
        }
    }
    Ok(all)
}

fn classic_resources(list: &Value, group: &str, version: &str) -> Vec<Resource> {
    let rows = list["resources"].as_array().into_iter().flatten();
    rows.filter(|row| !text(&row["name"]).contains('/'))
        .map(|row| Resource {
            group: group.into(),
            version: version.into(),
            name: text(&row["name"]),
            singular: text(&row["singularName"]),
            short: texts(&row["shortNames"]),
            categories: texts(&row["categories"]),
            kind: text(&row["kind"]),
            namespaced: row["namespaced"] == true,
            verbs: texts(&row["verbs"]),
        })
        .collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn catalog() -> Catalog {
        let row = |group: &str, version: &str, name: &str, short: &str, kind: &str, namespaced| {
            Resource {
                group: group.into(),
                version: version.into(),
                name: name.into(),
                singular: kind.to_lowercase(),
                short: short.split(',').filter(|s| !s.is_empty()).map(Into::into).collect(),
                categories: if namespaced { vec!["all".into()] } else { vec![] },
                kind: kind.into(),
                namespaced,
                verbs: vec!["list".into()],
            }
        };
        Catalog::of(vec![
            row("", "v1", "pods", "po", "Pod", true),
            row("", "v1", "services", "svc", "Service", true),
            row("", "v1", "nodes", "no", "Node", false),
            row("", "v1", "events", "ev", "Event", true),
            row("apps", "v1", "deployments", "deploy", "Deployment", true),
            row("apps", "v1beta1", "deployments", "deploy", "Deployment", true),
            row("events.k8s.io", "v1", "events", "ev", "Event", true),
        ])
    }

    #[test]
    fn resources_have_many_names() {
        let catalog = catalog();
        for (word, expected) in [
            ("po", "/api/v1/pods"),
            ("Pod", "/api/v1/pods"),
            ("svc", "/api/v1/services"),
            ("deployment", "/apis/apps/v1/deployments"),
            ("deployments.apps", "/apis/apps/v1/deployments"),
            ("deployments.v1beta1.apps", "/apis/apps/v1beta1/deployments"),
            ("ev", "/api/v1/events"),
            ("events.events.k8s.io", "/apis/events.k8s.io/v1/events"),
            ("events.v1.events.k8s.io", "/apis/events.k8s.io/v1/events"),
            ("pods.v1.", "/api/v1/pods"),
        ] {
            let got = catalog.find(word).map(|one| one.collection(None));
            assert_eq!(got.ok().as_deref(), Some(expected), "{word}");
        }
        let error = catalog.find("nonsense").expect_err("no such resource");
        assert_eq!(error.lines(), ["error: the server doesn't have a resource type \"nonsense\""]);
        assert_eq!(catalog.category("all").len(), 5);
    }

    #[test]
    fn discovery_is_read_in_both_forms() {
        let document = serde_json::json!({"kind":"APIGroupDiscoveryList","items":[{
            "metadata":{"name":"apps"},
            "versions":[{"version":"v1","resources":[{"resource":"deployments","singularResource":"deployment",
                "shortNames":["deploy"],"categories":["all"],"scope":"Namespaced","verbs":["get"],
                "responseKind":{"group":"apps","version":"v1","kind":"Deployment"},
                "subresources":[{"subresource":"scale"}]}]}]}]});
        let list = serde_json::json!({"resources":[
            {"name":"deployments","singularName":"deployment","shortNames":["deploy"],"categories":["all"],
             "namespaced":true,"kind":"Deployment","verbs":["get"]},
            {"name":"deployments/scale","kind":"Scale"}]});
        let rows = aggregated(&document);
        assert_eq!(rows, classic_resources(&list, "apps", "v1"));
        assert_eq!(rows[0].object(Some("x"), "web"), "/apis/apps/v1/namespaces/x/deployments/web");
        assert_eq!(rows[0].kind_name(), "deployment.apps");
    }
}
