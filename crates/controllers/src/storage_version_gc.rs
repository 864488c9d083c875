//! Takes API servers that are gone off the StorageVersions, and deletes a StorageVersion that names none any more.
//!
//! In: StorageVersions, the identity Leases of API servers. Out: `status` without the entries of servers that have no
//! Lease; deletions. Upstream: `pkg/controller/storageversiongc`.
//! Cost: a Lease of an API server that goes decodes all StorageVersions, of which each resource has one.

use client::{
    Api, Client, DeleteParams, Event, Lister, ObjectKey, Outcome, PostParams, RawEvent, Result,
    WorkQueue,
};
use k8s_openapi::api::apiserverinternal::v1alpha1::{
    StorageVersion, StorageVersionCondition, StorageVersionStatus,
};
use k8s_openapi::api::coordination::v1::Lease;
use machinery::Time;
use machinery::selector::Selector;
use release::features::{self, Feature};

use crate::descriptor::{Descriptor, Row, on, on_metadata, or_gone};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "storageversion-garbage-collector-controller",
    account: "storage-version-garbage-collector",
    component: "storage-version-garbage-collector",
    queue: "storage_version_garbage_collector_storageversions",
    workers: 1,
    new: |setup| {
        let gates = [Feature::APIServerIdentity, Feature::StorageVersionAPI];
        gates.into_iter().all(features::enabled).then(|| Controller {
            client: setup.client.clone(),
            versions: setup.lister(),
            leases: setup.scoped(Some(NAMESPACE), "").lister(),
        })
    },
    watches: &[
        &on(|this: &Controller, queue, event: &Event<StorageVersion>| {
            let stale = |id: &str| !this.is_alive(id);
            if !event.is_deleted() && servers(event.object()).any(stale) {
                queue.add(event.key());
            }
        })
        .if_served(),
        &on_metadata::<Lease, _, _>(Controller::lease_event).within(Some(NAMESPACE), ""),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const NAMESPACE: &str = "kube-system";
const IDENTITY: &str = "apiserver.kubernetes.io/identity";
const SERVER: &str = "kube-apiserver";
const ALL_EQUAL: &str = "AllEncodingVersionsEqual";

struct Controller {
    client: Client,
    versions: Lister<StorageVersion>,
    leases: Lister<Lease>,
}

/// The identities of the servers that report a version.
fn servers(version: &StorageVersion) -> impl Iterator<Item = &str> {
    let all = version.status.iter().flat_map(|status| status.storage_versions.iter().flatten());
    all.map(|one| one.api_server_id.as_str())
}

impl Controller {
    fn is_alive(&self, id: &str) -> bool {
        let lease = self.leases.entry(&ObjectKey::new(NAMESPACE, id));
        let component = |lease: &client::Entry| {
            lease.header.labels.get(IDENTITY).is_some_and(|component| component == SERVER)
        };
        lease.is_some_and(|lease| component(&lease))
    }

    fn lease_event(&self, queue: &WorkQueue<ObjectKey>, event: &RawEvent) {
        let RawEvent::Deleted(lease) = event else { return };
        if lease.header.labels.get(IDENTITY).is_none_or(|component| component != SERVER) {
            return;
        }
        for version in self.versions.list(None, &Selector::everything()) {
            if servers(&version).any(|id| id == &*lease.header.key.name) {
                queue.add(ObjectKey::of(&version.metadata));
            }
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let api: Api<StorageVersion> = self.client.api(None);
        let Some(mut version) = api.get_opt(&key.name).await? else { return Ok(Outcome::Done) };
        let leases: Api<Lease> = self.client.api(Some(NAMESPACE));
        let mut alive = vec![];
        for id in servers(&version) {
            // The cache may lag behind a server that has just started.
            let known = self.is_alive(id);
            if known || leases.get_opt(id).await?.is_some_and(|lease| is_server(&lease)) {
                alive.push(id.to_owned());
            }
        }
        if alive.len() == servers(&version).count() {
            return Ok(Outcome::Done);
        }
        if alive.is_empty() {
            return or_gone(api.delete(&key.name, &DeleteParams::default()).await);
        }
        let generation = version.metadata.generation;
        let status = version.status.get_or_insert_default();
        keep(status, &alive, generation, Time(base::clock::now_seconds()));
        or_gone(api.replace_status(&key.name, &PostParams::default(), &version).await)
    }
}

fn is_server(lease: &Lease) -> bool {
    let labels = lease.metadata.labels.as_ref();
    labels.and_then(|labels| labels.get(IDENTITY)).is_some_and(|component| component == SERVER)
}

/// Keeps the entries of these servers, and says whether they agree. Pure. Upstream: `SetCommonEncodingVersion`.
fn keep(
    status: &mut StorageVersionStatus,
    alive: &[String],
    observed_generation: Option<i64>,
    now: Time,
) {
    let entries = status.storage_versions.get_or_insert_default();
    entries.retain(|one| alive.contains(&one.api_server_id));
    let first = entries.first().map(|one| one.encoding_version.clone());
    let agreed = |first: &String| entries.iter().all(|one| one.encoding_version == *first);
    let common = first.filter(agreed);
    let before = std::mem::replace(&mut status.common_encoding_version, common.clone());
    let (value, reason, message) = match &common {
        Some(_) => ("True", "CommonEncodingVersionSet", "Common encoding version set"),
        None => ("False", "CommonEncodingVersionUnset", "Common encoding version unset"),
    };
    let conditions = status.conditions.get_or_insert_default();
    let known = conditions.iter().position(|one| one.type_ == ALL_EQUAL);
    let known = known.map(|at| conditions.remove(at));
    let moved = before.is_some() && common.is_some() && before != common;
    let since = known.filter(|known| known.status == value && !moved);
    let since = since.and_then(|known| known.last_transition_time);
    conditions.push(StorageVersionCondition {
        type_: ALL_EQUAL.into(),
        status: value.into(),
        reason: reason.into(),
        message: message.into(),
        observed_generation,
        last_transition_time: since.or(Some(now)),
    });
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn servers_that_are_gone_no_longer_count_for_the_common_version() {
        let check = |alive: &[&str], common: Option<&str>, condition: &str| {
            let entry = |id: &str, version: &str| -> Value {
                json!({"apiServerID": id, "encodingVersion": version, "decodableVersions": [version]})
            };
            let mut status: StorageVersionStatus = from_value(json!({
                "storageVersions": [entry("a", "v1"), entry("b", "v2"), entry("c", "v1")],
                "conditions": [{"type": ALL_EQUAL, "status": "False", "reason": "r", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}]}))
            .expect("a status");
            let alive: Vec<String> = alive.iter().map(|id| (*id).to_owned()).collect();
            let now = Time("2026-02-01T00:00:00Z".parse().expect("a time"));
            keep(&mut status, &alive, Some(3), now);
            assert_eq!(status.storage_versions.map(|all| all.len()), Some(alive.len()));
            assert_eq!(status.common_encoding_version.as_deref(), common, "{alive:?}");
            let known = status.conditions.and_then(|all| all.into_iter().next()).expect("one");
            assert_eq!((known.status.as_str(), known.observed_generation), (condition, Some(3)));
            let since = known.last_transition_time.expect("a time").0.to_string();
            assert_eq!(since.starts_with("2026-02"), condition == "True", "{since}");
        };
        check(&["a", "c"], Some("v1"), "True");
        check(&["b"], Some("v2"), "True");
        check(&["a", "b"], None, "False");
    }
}
