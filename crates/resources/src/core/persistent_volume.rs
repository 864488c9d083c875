//! PersistentVolume: a volume that claims may have.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeStatus};

use super::{access_modes, podspec};
use crate::defaults::fill;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status, text, wide};
use crate::validate::{storage, warnings};

pub(crate) static KIND: Kind<PersistentVolume> = Kind {
    short: &["pv"],
    subresources: &[STATUS],
    default,
    parts: Some(spec_and_status!()),
    rules: Rules { create: storage::volume, update: Some(storage::volume_update), ..Rules::NONE },
    warnings: Some(warnings::volume),
    returns_deleted: true,
    columns: &[
        name(),
        field("Capacity", "string", "api.core.v1.PersistentVolumeSpec.capacity", |volume| {
            let spec = volume.spec.as_ref();
            let size = spec.and_then(|spec| spec.capacity.as_ref()?.get("storage"));
            size.map_or("", |size| size.0.as_str()).into()
        }),
        field("Access Modes", "string", "api.core.v1.PersistentVolumeSpec.accessModes", |volume| {
            let spec = volume.spec.as_ref();
            access_modes(spec.and_then(|spec| spec.access_modes.as_deref())).into()
        }),
        field(
            "Reclaim Policy",
            "string",
            "api.core.v1.PersistentVolumeSpec.persistentVolumeReclaimPolicy",
            |volume| {
                let spec = volume.spec.as_ref();
                let policy = spec.and_then(|spec| spec.persistent_volume_reclaim_policy.clone());
                policy.unwrap_or_default().into()
            },
        ),
        field("Status", "string", "api.core.v1.PersistentVolumeStatus.phase", |volume| {
            let phase = volume.status.as_ref().and_then(|status| status.phase.clone());
            match volume.metadata.deletion_timestamp {
                Some(_) => "Terminating".into(),
                None => phase.unwrap_or_default().into(),
            }
        }),
        field("Claim", "string", "api.core.v1.PersistentVolumeSpec.claimRef", |volume| {
            claim(volume).into()
        }),
        text("StorageClass", "string", "StorageClass of the pv", |volume| {
            let spec = volume.spec.as_ref();
            spec.and_then(|spec| spec.storage_class_name.clone()).unwrap_or_default().into()
        }),
        text("VolumeAttributesClass", "string", "VolumeAttributesClass of the pv", |volume| {
            let spec = volume.spec.as_ref();
            let class = spec.and_then(|spec| spec.volume_attributes_class_name.as_deref());
            class.unwrap_or("<unset>").into()
        }),
        field("Reason", "string", "api.core.v1.PersistentVolumeStatus.reason", |volume| {
            let status = volume.status.as_ref();
            status.and_then(|status| status.reason.clone()).unwrap_or_default().into()
        }),
        age(),
        wide(field(
            "VolumeMode",
            "string",
            "api.core.v1.PersistentVolumeSpec.volumeMode",
            |volume| {
                let spec = volume.spec.as_ref();
                spec.and_then(|spec| spec.volume_mode.as_deref()).unwrap_or("<unset>").into()
            },
        )),
    ],
    ..Kind::BASE
};

fn default(volume: &mut PersistentVolume) {
    let spec = volume.spec.get_or_insert_default();
    fill(&mut spec.persistent_volume_reclaim_policy, "Retain");
    spec.volume_mode.get_or_insert_with(|| "Filesystem".into());
    podspec::default_source!(spec);
    let status: &mut PersistentVolumeStatus = volume.status.get_or_insert_default();
    // Who changes the phase says when; a new volume's begins now.
    if status.phase.is_none() {
        status.phase = Some("Pending".into());
        status.last_phase_transition_time = Some(machinery::Time(base::clock::now_seconds()));
    }
}

fn claim(volume: &PersistentVolume) -> String {
    let claim = volume.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    claim.map_or(String::new(), |claim| format!("{}/{}", text(&claim.namespace), text(&claim.name)))
}
