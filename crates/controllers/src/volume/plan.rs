//! The next step of a claim and of a volume. Pure.
//!
//! ```text
//! claim:  Pending ── volume found, or made ──► Bound ── volume lost ──► Lost
//! volume: Available ── claimRef with uid ──► Bound ── claim gone ──► Released ── Delete ──► gone
//! ```

use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    ObjectReference, PersistentVolume, PersistentVolumeClaim, PersistentVolumeClaimStatus,
};
use k8s_openapi::api::storage::v1::StorageClass;

use api::volumes as matching;

pub const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
pub const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
pub const PROVISIONER: [&str; 2] =
    ["volume.beta.kubernetes.io/storage-provisioner", "volume.kubernetes.io/storage-provisioner"];
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";

pub struct Observed<'a> {
    pub claim: &'a PersistentVolumeClaim,
    pub volumes: &'a [Arc<PersistentVolume>],
    pub classes: &'a [Arc<StorageClass>],
}

#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Nothing,
    /// The claim names no class, and there is a default one.
    TakeClass(String),
    /// Both sides refer to each other afterwards.
    Bind(Arc<PersistentVolume>),
    /// An external provisioner has to create the volume.
    Provision {
        class: Arc<StorageClass>,
        node: Option<String>,
    },
    Lost(&'static str, String),
    Wait {
        reason: &'static str,
        message: String,
        warning: bool,
    },
}

fn annotation<'a>(claim: &'a PersistentVolumeClaim, key: &str) -> Option<&'a str> {
    claim.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn is_refused(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    let reference = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    reference.is_some() && !matching::is_for(volume, claim)
}

pub fn of_claim(observed: &Observed) -> Step {
    let claim = observed.claim;
    let named = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
    let named = named.filter(|name| !name.is_empty());
    let completed = annotation(claim, BIND_COMPLETED).is_some();
    let Some(name) = named else {
        return if completed {
            let message =
                "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!";
            Step::Lost("ClaimLost", message.into())
        } else {
            unbound(observed)
        };
    };
    let found = observed.volumes.iter().find(|one| one.metadata.name.as_deref() == Some(name));
    match found {
        None if completed => {
            let message = "Bound claim has lost its PersistentVolume. Data on the volume is lost!";
            Step::Lost("ClaimLost", message.into())
        }
        // The user chose it; it may come.
        None => Step::Nothing,
        Some(volume) if is_refused(volume, claim) && completed => {
            let message = "Two claims are bound to the same volume, this one is bound incorrectly";
            Step::Lost("ClaimMisbound", message.into())
        }
        Some(volume) if is_refused(volume, claim) => Step::Wait {
            reason: "FailedBinding",
            message: format!("volume \"{name}\" already bound to a different claim."),
            warning: true,
        },
        Some(volume) if !completed && !matching::suits_named(volume, claim) => Step::Wait {
            reason: "VolumeMismatch",
            message: format!(
                "Cannot bind to requested volume \"{name}\": requested PV is too small or does not match"
            ),
            warning: true,
        },
        Some(volume) => Step::Bind(volume.clone()),
    }
}

fn unbound(observed: &Observed) -> Step {
    let claim = observed.claim;
    if claim.metadata.deletion_timestamp.is_some() {
        return Step::Nothing;
    }
    let Some(name) = matching::class_of(claim) else {
        if let Some(class) = matching::default_class(observed.classes) {
            return Step::TakeClass(class.metadata.name.clone().unwrap_or_default());
        }
        return free_volume(observed);
    };
    let class = observed.classes.iter().find(|one| one.metadata.name.as_deref() == Some(name));
    let node = annotation(claim, SELECTED_NODE);
    let waits = matching::waits_for_consumer(class.map(|class| &**class));
    // For a claim that waits, the scheduler chooses: a volume that a node can use.
    if let Some(volume) = matching::find(claim, observed.volumes, !waits) {
        return Step::Bind(volume.clone());
    }
    if waits && node.is_none() {
        return Step::Wait {
            reason: "WaitForFirstConsumer",
            message: "waiting for first consumer to be created before binding".into(),
            warning: false,
        };
    }
    match class {
        None if name.is_empty() => no_volume(),
        None => Step::Wait {
            reason: "ProvisioningFailed",
            message: format!("storageclass.storage.k8s.io \"{name}\" not found"),
            warning: true,
        },
        Some(class) if class.provisioner == NO_PROVISIONER => no_volume(),
        Some(class) => Step::Provision { class: class.clone(), node: node.map(str::to_owned) },
    }
}

fn free_volume(observed: &Observed) -> Step {
    let found = matching::find(observed.claim, observed.volumes, true);
    found.map_or_else(no_volume, |volume| Step::Bind(volume.clone()))
}

fn no_volume() -> Step {
    let message =
        "no persistent volumes available for this claim and no storage class is set".to_owned();
    Step::Wait { reason: "FailedBinding", message, warning: false }
}

/// The volume as bound to the claim; `None` if it is.
pub fn bound_volume(
    volume: &PersistentVolume,
    claim: &PersistentVolumeClaim,
) -> Option<PersistentVolume> {
    let mut bound = volume.clone();
    let spec = bound.spec.get_or_insert_default();
    let chosen_by_us = spec.claim_ref.is_none();
    let known = spec.claim_ref.as_ref().and_then(|reference| reference.uid.clone());
    if known.as_ref() != claim.metadata.uid.as_ref() {
        spec.claim_ref = Some(ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("PersistentVolumeClaim".into()),
            namespace: claim.metadata.namespace.clone(),
            name: claim.metadata.name.clone(),
            uid: claim.metadata.uid.clone(),
            resource_version: claim.metadata.resource_version.clone(),
            field_path: None,
        });
        if chosen_by_us {
            let annotations = bound.metadata.annotations.get_or_insert_default();
            annotations.insert(BOUND_BY_CONTROLLER.into(), "yes".into());
        }
    }
    (bound != *volume).then_some(bound)
}

/// The claim as bound to the volume; `None` if it is.
pub fn bound_claim(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
) -> Option<PersistentVolumeClaim> {
    let mut bound = claim.clone();
    let spec = bound.spec.get_or_insert_default();
    let annotations = bound.metadata.annotations.get_or_insert_default();
    if spec.volume_name.as_deref().unwrap_or_default().is_empty() {
        spec.volume_name = volume.metadata.name.clone();
        annotations.insert(BOUND_BY_CONTROLLER.into(), "yes".into());
    }
    annotations.insert(BIND_COMPLETED.into(), "yes".into());
    (bound != *claim).then_some(bound)
}

/// The status of a bound claim; `None` if it has it.
pub fn bound_status(
    claim: &PersistentVolumeClaim,
    volume: &PersistentVolume,
) -> Option<PersistentVolumeClaimStatus> {
    let known = claim.status.clone().unwrap_or_default();
    let spec = volume.spec.clone().unwrap_or_default();
    let mut status = known.clone();
    status.access_modes = spec.access_modes;
    if known.phase.as_deref() != Some("Bound") || known.capacity.is_none() {
        status.capacity = spec.capacity;
    }
    // Only now: later it is the driver's resizer that changes it.
    if known.phase.as_deref().is_none_or(|phase| phase == "Pending") {
        status.current_volume_attributes_class_name = spec.volume_attributes_class_name;
    }
    status.phase = Some("Bound".into());
    (status != known).then_some(status)
}

/// The next step of a volume.
#[derive(Clone, Debug, PartialEq)]
pub enum Fate {
    /// Its phase, and why.
    Phase(&'static str),
    /// Its claim is gone, and its reclaim policy is Delete.
    Delete,
}

pub fn of_volume(volume: &PersistentVolume, claim: Option<&PersistentVolumeClaim>) -> Fate {
    let spec = volume.spec.as_ref();
    let Some(reference) = spec.and_then(|spec| spec.claim_ref.as_ref()) else {
        return Fate::Phase("Available");
    };
    let Some(uid) = reference.uid.as_ref().filter(|uid| !uid.is_empty()) else {
        return Fate::Phase("Available");
    };
    if claim.is_some_and(|claim| claim.metadata.uid.as_ref() == Some(uid)) {
        return Fate::Phase("Bound");
    }
    match spec.and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref()) {
        Some("Delete") => Fate::Delete,
        _ => Fate::Phase("Released"),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    fn claim(meta: Value, spec: Value) -> PersistentVolumeClaim {
        let mut all = json!({"accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}}});
        for (key, value) in spec.as_object().unwrap() {
            all[key] = value.clone();
        }
        let mut metadata = json!({"name": "data", "namespace": "ns", "uid": "claim"});
        for (key, value) in meta.as_object().unwrap() {
            metadata[key] = value.clone();
        }
        from_value(json!({"metadata": metadata, "spec": all})).unwrap()
    }

    fn volume(name: &str, size: &str, spec: Value) -> Arc<PersistentVolume> {
        let mut all = json!({"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"]});
        for (key, value) in spec.as_object().unwrap() {
            all[key] = value.clone();
        }
        Arc::new(
            from_value(json!({"metadata": {"name": name}, "spec": all,
                "status": {"phase": "Available"}}))
            .unwrap(),
        )
    }

    fn class(name: &str, mode: &str, default: bool) -> Arc<StorageClass> {
        let annotations = if default {
            json!({"storageclass.kubernetes.io/is-default-class": "true"})
        } else {
            json!({})
        };
        Arc::new(
            from_value(json!({"metadata": {"name": name, "annotations": annotations},
                "provisioner": "p", "volumeBindingMode": mode}))
            .unwrap(),
        )
    }

    #[test]
    fn claims_find_their_volumes() {
        let volumes = [
            volume("large", "10Gi", json!({})),
            volume("small", "500Mi", json!({})),
            volume("fit", "2Gi", json!({})),
            volume(
                "taken",
                "1Gi",
                json!({"claimRef": {"name": "x", "namespace": "ns", "uid": "x"}}),
            ),
            volume("gold", "1Gi", json!({"storageClassName": "gold"})),
            volume("mine", "5Gi", json!({"claimRef": {"name": "mine", "namespace": "ns"}})),
        ];
        let classes =
            [class("gold", "Immediate", false), class("late", "WaitForFirstConsumer", true)];
        let check = |meta: Value, spec: Value, with_classes: bool, expected: &str| {
            let claim = claim(meta, spec.clone());
            let classes = if with_classes { &classes[..] } else { &[] };
            let told = match of_claim(&Observed { claim: &claim, volumes: &volumes, classes }) {
                Step::Nothing => "nothing".into(),
                Step::TakeClass(name) => format!("class {name}"),
                Step::Bind(volume) => format!("bind {}", volume.metadata.name.as_ref().unwrap()),
                Step::Provision { class, node } => {
                    format!("provision {} {node:?}", class.metadata.name.as_ref().unwrap())
                }
                Step::Lost(reason, _) => reason.into(),
                Step::Wait { reason, .. } => reason.into(),
            };
            assert_eq!(told, expected, "{spec}");
        };
        let none = || json!({});
        check(none(), json!({}), false, "bind fit");
        check(none(), json!({}), true, "class late");
        check(none(), json!({"storageClassName": ""}), true, "bind fit");
        check(none(), json!({"storageClassName": "gold"}), true, "bind gold");
        check(none(), json!({"storageClassName": "none"}), true, "ProvisioningFailed");
        check(none(), json!({"storageClassName": "late"}), true, "WaitForFirstConsumer");
        let selected = json!({"annotations": {SELECTED_NODE: "n1"}});
        check(selected, json!({"storageClassName": "late"}), true, "provision late Some(\"n1\")");
        check(json!({"name": "mine"}), json!({"storageClassName": ""}), true, "bind mine");
        check(
            none(),
            json!({"storageClassName": "", "accessModes": ["ReadWriteMany"]}),
            true,
            "FailedBinding",
        );
        check(none(), json!({"volumeName": "taken"}), true, "FailedBinding");
        check(none(), json!({"volumeName": "later"}), true, "nothing");
        let done = json!({"annotations": {BIND_COMPLETED: "yes"}});
        check(done, json!({"volumeName": "later"}), true, "ClaimLost");
    }

    #[test]
    fn both_sides_refer_to_each_other() {
        let claim = claim(json!({}), json!({}));
        let volume = volume("v", "1Gi", json!({}));
        let volume = bound_volume(&volume, &claim).unwrap();
        assert_eq!(volume.metadata.annotations.as_ref().unwrap()[BOUND_BY_CONTROLLER], "yes");
        assert_eq!(bound_volume(&volume, &claim), None);
        let mut bound = bound_claim(&claim, &volume).unwrap();
        assert_eq!(bound.spec.as_ref().unwrap().volume_name.as_deref(), Some("v"));
        assert_eq!(bound_claim(&bound, &volume), None);
        bound.status = bound_status(&bound, &volume);
        assert_eq!(bound.status.as_ref().unwrap().phase.as_deref(), Some("Bound"));
        assert_eq!(bound_status(&bound, &volume), None);
    }

    #[test]
    fn a_claim_has_its_volumes_attributes_class_from_when_it_is_bound() {
        let gold = json!({"volumeAttributesClassName": "gold"});
        let volume = volume("v", "1Gi", gold.clone());
        let mut claim = claim(json!({}), gold);
        let status = bound_status(&claim, &volume).expect("it was not bound");
        assert_eq!(status.current_volume_attributes_class_name.as_deref(), Some("gold"));
        claim.status = Some(PersistentVolumeClaimStatus {
            current_volume_attributes_class_name: Some("silver".into()),
            ..status
        });
        assert_eq!(bound_status(&claim, &volume), None);
    }

    #[test]
    fn volumes_follow_their_claims() {
        let check = |spec: Value, with_claim: bool, expected: Fate| {
            let claim = claim(json!({}), json!({}));
            let claim = with_claim.then_some(&claim);
            assert_eq!(of_volume(&volume("v", "1Gi", spec.clone()), claim), expected, "{spec}");
        };
        let reference = json!({"name": "data", "namespace": "ns", "uid": "claim"});
        check(json!({}), false, Fate::Phase("Available"));
        check(
            json!({"claimRef": {"name": "data", "namespace": "ns"}}),
            true,
            Fate::Phase("Available"),
        );
        check(json!({"claimRef": reference}), true, Fate::Phase("Bound"));
        check(json!({"claimRef": reference}), false, Fate::Phase("Released"));
        let deleted = json!({"claimRef": reference, "persistentVolumeReclaimPolicy": "Delete"});
        check(deleted, false, Fate::Delete);
    }
}
