//! Finds the pod and container for `logs` and `exec`: `web-1`, `pod/web-1`, `deployment/web`.
//!
//! Upstream: `kubectl/pkg/polymorphichelpers`, `kubectl/pkg/cmd/util/podcmd`.

use base::percent;
use serde_json::Value;

use super::console::Console;
use super::get::items_of;
use super::resources::{Catalog, Resource};
use crate::cluster::{Cluster, with_query};
use crate::failure::{Result, own};

const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// The pods for `word`, the best first: ready ones, then older ones.
pub async fn behind(cluster: &Cluster, word: &str) -> Result<Vec<Value>> {
    let (kind, name) = word.split_once('/').unwrap_or(("pod", word));
    if matches!(kind, "pod" | "pods" | "po") {
        return Ok(vec![cluster.get(&path(&cluster.namespace, name)).await?]);
    }
    let catalog = Catalog::read(cluster).await?;
    let resource = catalog.find(kind)?;
    let object = cluster.get(&resource.object(Some(&cluster.namespace), name)).await?;
    let selector = selector_of(resource, &object)?;
    let mut pods = matching(cluster, &selector).await?;
    let rank = |pod: &Value| {
        let created = pod["metadata"]["creationTimestamp"].as_str().unwrap_or_default().to_owned();
        (!is_ready(pod), created)
    };
    pods.sort_by_key(rank);
    if pods.is_empty() {
        return Err(own(format!("no pods found for {kind}/{name}")));
    }
    Ok(pods)
}

pub async fn matching(cluster: &Cluster, selector: &str) -> Result<Vec<Value>> {
    let path = format!("/api/v1/namespaces/{}/pods", percent::encode(&cluster.namespace));
    let list = cluster.get(&with_query(&path, &[("labelSelector", selector)])).await?;
    Ok(items_of(list))
}

pub fn path(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", percent::encode(namespace), percent::encode(name))
}

pub fn name(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().unwrap_or_default()
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|one| one["type"] == "Ready" && one["status"] == "True")
}

/// A Service's selector is a map; other selectors have matchLabels and matchExpressions.
fn selector_of(resource: &Resource, object: &Value) -> Result<String> {
    let selector = &object["spec"]["selector"];
    let is_plain = selector["matchLabels"].is_null() && selector["matchExpressions"].is_null();
    let labels = if is_plain { selector } else { &selector["matchLabels"] };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let labels = labels.as_object().into_iter().flatten();
    let mut parts: Vec<String> =
        labels.map(|(key, value)| format!("{key}={}", text(value))).collect();
    for one in selector["matchExpressions"].as_array().into_iter().flatten() {
        let key = text(&one["key"]);
        let values: Vec<String> =
            one["values"].as_array().into_iter().flatten().map(text).collect();
        parts.push(match text(&one["operator"]).as_str() {
            "In" => format!("{key} in ({})", values.join(",")),
            "NotIn" => format!("{key} notin ({})", values.join(",")),
            "Exists" => key,
            _ => format!("!{key}"),
        });
    }
    if parts.is_empty() {
        return Err(own(format!(
            "cannot attach to {}: selector is empty or of no use",
            resource.kind
        )));
    }
    Ok(parts.join(","))
}

/// The names of all containers in the order of the spec: init, main, ephemeral.
pub fn containers(pod: &Value) -> Vec<String> {
    ["initContainers", "containers", "ephemeralContainers"]
        .iter()
        .flat_map(|field| names(pod, field))
        .collect()
}

fn names(pod: &Value, field: &str) -> Vec<String> {
    let list = pod["spec"][field].as_array().into_iter().flatten();
    list.filter_map(|one| Some(one["name"].as_str()?.to_owned())).collect()
}

/// The default container if none is named; prints a note if there are several.
pub fn default_container(pod: &Value, console: &Console, quiet: bool) -> Result<String> {
    let all = containers(pod);
    if let Some(name) = pod["metadata"]["annotations"][DEFAULT_CONTAINER].as_str() {
        if all.iter().any(|one| one == name) {
            return Ok(name.to_owned());
        }
        console
            .note(format!("Default container name {name:?} not found in pod {}", self::name(pod)));
    }
    let first = names(pod, "containers").into_iter().next();
    let first = first.ok_or_else(|| own(format!("pod {} has no containers", name(pod))))?;
    if all.len() > 1 && !quiet {
        let described: Vec<String> = ["containers", "ephemeralContainers", "initContainers"]
            .iter()
            .flat_map(|field| {
                let mark = match *field {
                    "containers" => "",
                    "ephemeralContainers" => " (ephem)",
                    _ => " (init)",
                };
                names(pod, field).into_iter().map(move |name| format!("{name}{mark}"))
            })
            .collect();
        console.note(format!("Defaulted container {first:?} out of: {}", described.join(", ")));
    }
    Ok(first)
}

/// Checks that a named container exists.
pub fn check_container(pod: &Value, container: &str) -> Result<()> {
    if containers(pod).iter().any(|one| one == container) {
        return Ok(());
    }
    Err(own(format!("container {container} not found in pod {}", name(pod))))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_become_queries() {
        let check = |selector: Value, expected: Option<&str>| {
            let object = json!({"spec":{"selector":selector}});
            let got = selector_of(&Resource::default(), &object).ok();
            assert_eq!(got.as_deref(), expected);
        };
        check(json!({"app":"web","a":"b"}), Some("a=b,app=web"));
        check(json!({"matchLabels":{"app":"web"}}), Some("app=web"));
        check(
            json!({"matchExpressions":[{"key":"a","operator":"In","values":["x","y"]},{"key":"b","operator":"DoesNotExist"}]}),
            Some("a in (x,y),!b"),
        );
        check(json!(null), None);
    }

    #[test]
    fn the_first_container_is_the_default() {
        let console = Console::new(std::io::sink(), std::io::sink());
        let mut pod = json!({"metadata":{"name":"p"},"spec":{"containers":[{"name":"a"},{"name":"b"}],
            "initContainers":[{"name":"i"}]}});
        assert_eq!(default_container(&pod, &console, true).ok().as_deref(), Some("a"));
        assert_eq!(containers(&pod), ["i", "a", "b"]);
        pod["metadata"]["annotations"][DEFAULT_CONTAINER] = "b".into();
        assert_eq!(default_container(&pod, &console, true).ok().as_deref(), Some("b"));
        assert!(check_container(&pod, "c").is_err());
    }
}
