//! The choice of a PersistentVolume for a claim. Pure.
//! The controller and the scheduler choose by these rules.
//! Upstream: `k8s.io/component-helpers/storage/volume`: the smallest sufficient volume.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec};
use k8s_openapi::api::storage::v1::StorageClass;
use machinery::quantity::Amount;
use machinery::selector::Selector;

const CLASS: &str = "volume.beta.kubernetes.io/storage-class";
const DEFAULT_CLASS: [&str; 2] = [
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
];

/// The claim's class; `None` if it leaves the choice to the cluster.
pub fn class_of(claim: &PersistentVolumeClaim) -> Option<&str> {
    let annotated = claim.metadata.annotations.as_ref().and_then(|all| all.get(CLASS));
    let named = claim.spec.as_ref().and_then(|spec| spec.storage_class_name.as_ref());
    annotated.or(named).map(String::as_str)
}

/// The volume's class; empty for none.
pub fn class_of_volume(volume: &PersistentVolume) -> &str {
    let annotated = volume.metadata.annotations.as_ref().and_then(|all| all.get(CLASS));
    let named = volume.spec.as_ref().and_then(|spec| spec.storage_class_name.as_ref());
    annotated.or(named).map_or("", String::as_str)
}

/// The newest default class. Of equally old ones, the first by name.
pub fn default_class(classes: &[Arc<StorageClass>]) -> Option<&Arc<StorageClass>> {
    let is_default = |class: &&Arc<StorageClass>| {
        let annotations = class.metadata.annotations.as_ref();
        DEFAULT_CLASS
            .iter()
            .any(|key| annotations.is_some_and(|all| all.get(*key).is_some_and(|on| on == "true")))
    };
    classes.iter().filter(is_default).min_by_key(|class| {
        let created = class.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (std::cmp::Reverse(created), class.metadata.name.clone())
    })
}

pub fn waits_for_consumer(class: Option<&StorageClass>) -> bool {
    class.is_some_and(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"))
}

pub fn size(claim: &PersistentVolumeClaim) -> Amount {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    requests
        .and_then(|requests| requests.get("storage"))
        .and_then(|size| Amount::parse(&size.0).ok())
        .unwrap_or_default()
}

fn capacity(spec: &PersistentVolumeSpec) -> Amount {
    let capacity = spec.capacity.as_ref().and_then(|capacity| capacity.get("storage"));
    capacity.and_then(|size| Amount::parse(&size.0).ok()).unwrap_or_default()
}

/// Reports whether the volume's claimRef names this claim.
pub fn is_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    reference.is_some_and(|reference| {
        reference.name == claim.metadata.name
            && reference.namespace == claim.metadata.namespace
            && reference
                .uid
                .as_ref()
                .is_none_or(|uid| uid.is_empty() || Some(uid) == claim.metadata.uid.as_ref())
    })
}

/// Reports whether the volume meets the claim's needs, regardless of its claimRef.
pub fn suits(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let Some(asks) = &claim.spec else { return false };
    let selector = asks.selector.as_ref().map(|selector| Selector::from_api(Some(selector)));
    let selected = match selector {
        None => true,
        Some(Ok(selector)) => selector.matches(volume.metadata.labels.as_ref()),
        Some(Err(_)) => false,
    };
    suits_named(volume, claim) && selected
}

/// Like [`suits`], for a volume that the claim names. The claim's selector does not apply.
pub fn suits_named(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let (Some(has), Some(asks)) = (&volume.spec, &claim.spec) else { return false };
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "Filesystem".into());
    let modes = has.access_modes.clone().unwrap_or_default();
    mode(&has.volume_mode) == mode(&asks.volume_mode)
        && capacity(has) >= size(claim)
        && class_of_volume(volume) == class_of(claim).unwrap_or_default()
        && has.volume_attributes_class_name.as_deref().unwrap_or_default()
            == asks.volume_attributes_class_name.as_deref().unwrap_or_default()
        && asks.access_modes.iter().flatten().all(|mode| modes.contains(mode))
}

/// A volume with a claimRef for the claim; else, if `any`, the smallest suitable free volume.
pub fn find<'a>(
    claim: &PersistentVolumeClaim,
    volumes: &'a [Arc<PersistentVolume>],
    any: bool,
) -> Option<&'a Arc<PersistentVolume>> {
    let alive = || volumes.iter().filter(|one| one.metadata.deletion_timestamp.is_none());
    if let Some(named) = alive().find(|one| is_for(one, claim) && suits(one, claim)) {
        return Some(named);
    }
    let is_free = |one: &&Arc<PersistentVolume>| {
        let unclaimed = one.spec.as_ref().is_some_and(|spec| spec.claim_ref.is_none());
        let phase = one.status.as_ref().and_then(|status| status.phase.as_deref());
        unclaimed && phase == Some("Available")
    };
    alive()
        .filter(|_| any)
        .filter(is_free)
        .filter(|one| suits(one, claim))
        .min_by_key(|one| (one.spec.as_ref().map(capacity), one.metadata.name.clone()))
}
