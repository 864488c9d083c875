//! The PersistentVolumeClaims of a StatefulSet's pods, and who owns them. Pure.
//!
//! Claims are kept unless `persistentVolumeClaimRetentionPolicy` says otherwise: then they get an
//! owner, and the garbage collector deletes them with it: the set, or a pod beyond the scale.

use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use machinery::{ObjectMeta, OwnerReference};

use super::plan::{in_range, ordinal_of};
use crate::owner;

/// The claims of one pod, with the volume's name of each.
pub fn of_pod(set: &StatefulSet, ordinal: i32) -> Vec<(String, PersistentVolumeClaim)> {
    let Some(spec) = &set.spec else { return vec![] };
    let name = set.metadata.name.as_deref().unwrap_or_default();
    let one = |template: &PersistentVolumeClaim| {
        let volume = template.metadata.name.clone().unwrap_or_default();
        let mut labels = template.metadata.labels.clone().unwrap_or_default();
        labels.extend(spec.selector.match_labels.clone().unwrap_or_default());
        let claim = PersistentVolumeClaim {
            metadata: ObjectMeta {
                name: Some(format!("{volume}-{name}-{ordinal}")),
                namespace: set.metadata.namespace.clone(),
                labels: Some(labels),
                annotations: template.metadata.annotations.clone(),
                ..ObjectMeta::default()
            },
            spec: template.spec.clone(),
            status: None,
        };
        (volume, claim)
    };
    spec.volume_claim_templates.iter().flatten().map(one).collect()
}

/// Deleted with the set, deleted when scaled down.
fn policy(set: &StatefulSet) -> (bool, bool) {
    let spec = set.spec.as_ref();
    let policy = spec.and_then(|spec| spec.persistent_volume_claim_retention_policy.as_ref());
    let is_delete = |value: Option<&String>| value.is_some_and(|value| value == "Delete");
    let when = policy.map(|one| (one.when_deleted.as_ref(), one.when_scaled.as_ref()));
    when.map_or((false, false), |(deleted, scaled)| (is_delete(deleted), is_delete(scaled)))
}

pub fn are_deleted_when_scaled(set: &StatefulSet) -> bool {
    policy(set).1
}

fn names(reference: &OwnerReference, version: &str, kind: &str, meta: &ObjectMeta) -> bool {
    reference.api_version == version
        && reference.kind == kind
        && Some(&reference.name) == meta.name.as_ref()
}

fn is_set(reference: &OwnerReference, set: &StatefulSet) -> bool {
    names(reference, StatefulSet::API_VERSION, StatefulSet::KIND, &set.metadata)
}

fn is_pod(reference: &OwnerReference, pod: &Pod) -> bool {
    names(reference, Pod::API_VERSION, Pod::KIND, &pod.metadata)
}

/// Owned by an earlier pod of this name: it goes with that one.
pub fn is_stale(claim: &PersistentVolumeClaim, pod: &Pod) -> bool {
    let owners = claim.metadata.owner_references.iter().flatten();
    let mut named = owners.filter(|owner| is_pod(owner, pod));
    named.any(|owner| Some(&owner.uid) != pod.metadata.uid.as_ref())
}

/// The owners that the claim should have; `None` if it has them.
pub fn wanted_owners(
    claim: &PersistentVolumeClaim,
    set: &StatefulSet,
    pod: &Pod,
) -> Option<Vec<OwnerReference>> {
    let owners = claim.metadata.owner_references.clone().unwrap_or_default();
    let stale = |owner: &OwnerReference| {
        (is_set(owner, set) && Some(&owner.uid) != set.metadata.uid.as_ref())
            || (is_pod(owner, pod) && Some(&owner.uid) != pod.metadata.uid.as_ref())
    };
    if owners.iter().any(stale) {
        return None;
    }
    let ours = |owner: &OwnerReference| is_set(owner, set) || is_pod(owner, pod);
    let (with_set, when_scaled) = policy(set);
    let foreign = (with_set || when_scaled)
        && owners.iter().any(|owner| !ours(owner) && owner.controller == Some(true));
    let mut wanted: Vec<_> = owners.iter().filter(|owner| !ours(owner)).cloned().collect();
    if !foreign {
        let scaled_down = !in_range(set, ordinal_of(pod).unwrap_or(-1));
        if when_scaled && scaled_down {
            wanted.push(owner::reference(pod));
        } else if with_set {
            wanted.push(owner::reference(set));
        }
    }
    (wanted != owners).then_some(wanted)
}
