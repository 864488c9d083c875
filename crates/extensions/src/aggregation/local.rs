//! The APIServices of groups that this server itself serves. Clients read them, and they give the order
//! of discovery.
//!
//! In: the resource table. Out: an object per group and version. Those of built-in groups are created
//! at the start. Those of custom resources are created and deleted with their kinds.
//! Upstream: `pkg/controllers/autoregister`, `pkg/controlplane/apiserver/aggregator.go`.

use std::collections::BTreeSet;

use apiserver::Registry;
use apiserver::registry::{DeleteOptions, Intent};
use apiserver::request::Key;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::{APIService, APIServiceSpec};
use machinery::status::Reason;
use machinery::{Object, ObjectMeta, StatusError};

const MANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";
/// The label value of objects that are created at the start and not changed later.
const ON_START: &str = "onstart";
const ALWAYS: &str = "true";

/// A group, its priority, and the priority of its version if it is not the usual one.
const PRIORITIES: &[(&str, i32)] = &[
    ("", 18000),
    ("apps", 17800),
    ("events.k8s.io", 17750),
    ("authentication.k8s.io", 17700),
    ("authorization.k8s.io", 17600),
    ("autoscaling", 17500),
    ("batch", 17400),
    ("certificates.k8s.io", 17300),
    ("networking.k8s.io", 17200),
    ("policy", 17100),
    ("rbac.authorization.k8s.io", 17000),
    ("storage.k8s.io", 16800),
    ("apiextensions.k8s.io", 16700),
    ("admissionregistration.k8s.io", 16700),
    ("scheduling.k8s.io", 16600),
    ("coordination.k8s.io", 16500),
    ("node.k8s.io", 16300),
    ("discovery.k8s.io", 16200),
    ("resource.k8s.io", 16200),
    ("flowcontrol.apiserver.k8s.io", 16100),
];

/// Priorities of versions that differ from [`USUAL`].
const VERSIONS: &[(&str, &str, i32)] = &[
    ("", "v1", 1),
    ("autoscaling", "v2", 30),
    ("flowcontrol.apiserver.k8s.io", "v1", 21),
    ("resource.k8s.io", "v1", 21),
];

const USUAL: i32 = 15;
/// The priorities of custom resources: group and version.
const CUSTOM: (i32, i32) = (1000, 100);
/// The aggregator's own group has no APIService.
const OWN: &str = "apiregistration.k8s.io";

/// Creates the APIServices, then follows the resource table.
pub(super) async fn run(registry: Registry) {
    let mut changes = registry.resource_changes();
    loop {
        if let Err(error) = register(&registry).await {
            tracing::warn!(%error, "failed to write the APIServices of this server's groups");
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Creates missing APIServices, and deletes those of custom resources that are gone.
async fn register(registry: &Registry) -> Result<(), StatusError> {
    let there = registry.cached::<APIService>("").await?;
    let mut wanted = BTreeSet::new();
    for row in registry.resources().iter().filter(|row| row.group != OWN) {
        wanted.insert((row.group.clone(), row.version.clone(), row.custom));
    }
    for (group, version, is_custom) in &wanted {
        let name = format!("{version}.{group}");
        if there.iter().any(|one| one.name() == name) {
            continue;
        }
        let Some((label, priorities)) = place(group, version, *is_custom) else { continue };
        create(registry, api_service(&name, group, version, label, priorities)).await?;
    }
    for service in &there {
        let label = service.metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED));
        let is_served =
            wanted.iter().any(|(group, version, _)| service.name() == format!("{version}.{group}"));
        if label.map(String::as_str) == Some(ALWAYS) && !is_served {
            remove(registry, service.name()).await?;
        }
    }
    Ok(())
}

fn place(group: &str, version: &str, is_custom: bool) -> Option<(&'static str, (i32, i32))> {
    if is_custom {
        return Some((ALWAYS, CUSTOM));
    }
    let (_, priority) = PRIORITIES.iter().find(|(name, _)| *name == group)?;
    let of_version = VERSIONS.iter().find(|one| (one.0, one.1) == (group, version));
    Some((ON_START, (*priority, of_version.map_or(USUAL, |one| one.2))))
}

fn api_service(
    name: &str,
    group: &str,
    version: &str,
    label: &str,
    (group_priority_minimum, version_priority): (i32, i32),
) -> APIService {
    APIService {
        metadata: ObjectMeta {
            name: Some(name.into()),
            labels: Some([(MANAGED.to_owned(), label.to_owned())].into()),
            ..ObjectMeta::default()
        },
        spec: Some(APIServiceSpec {
            group: Some(group.to_owned()).filter(|group| !group.is_empty()),
            version: Some(version.into()),
            group_priority_minimum,
            version_priority,
            ..APIServiceSpec::default()
        }),
        status: None,
    }
}

async fn create(registry: &Registry, service: APIService) -> Result<(), StatusError> {
    let ctx = registry.own_context::<APIService>();
    let key = Key::new("", service.name());
    match registry.write(&ctx, &key, Intent::Create { object: Box::new(service) }).await {
        Err(error) if !error.is(Reason::AlreadyExists) => Err(error),
        _ => Ok(()),
    }
}

async fn remove(registry: &Registry, name: &str) -> Result<(), StatusError> {
    let ctx = registry.own_context::<APIService>();
    let options = DeleteOptions::default();
    match registry.write(&ctx, &Key::new("", name), Intent::Delete { options }).await {
        Err(error) if !error.is(Reason::NotFound) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_upstreams_places() {
        for (group, version, is_custom, expected) in [
            ("", "v1", false, Some((ON_START, (18000, 1)))),
            ("apps", "v1", false, Some((ON_START, (17800, 15)))),
            ("autoscaling", "v2", false, Some((ON_START, (17500, 30)))),
            ("example.com", "v1", true, Some((ALWAYS, (1000, 100)))),
            ("unknown.k8s.io", "v1", false, None),
        ] {
            assert_eq!(place(group, version, is_custom), expected, "{group}/{version}");
        }
    }
}
