//! PersistentVolume: a volume that claims may have.

use apiserver::resource::{MetadataPass, MetadataRules};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeStatus};
use machinery::field::Path;
use machinery::names;
use serde_json::Value;

use super::{access_modes_cell, podspec};
use crate::defaults::fill;
use crate::kind::{Kind, Rules, STATUS, Updates, age, field, name, spec_and_status, text, wide};
use crate::validate::at::At;
use crate::validate::storage::access_modes;
use crate::validate::{internal, pod, quantity, volumes, warnings};

const METADATA: MetadataRules =
    MetadataRules { update: &[MetadataPass::Whole, MetadataPass::Whole], ..MetadataRules::FULL };

pub(crate) static KIND: Kind<PersistentVolume> = Kind {
    short: &["pv"],
    subresources: &[STATUS],
    default,
    parts: Some(spec_and_status!()),
    rules: Rules { create: volume, update: Some(volume_update), metadata: METADATA, ..Rules::NONE },
    warnings: Some(warnings::volume),
    warns_on_update: Updates::All,
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
            access_modes_cell(spec.and_then(|spec| spec.access_modes.as_deref())).into()
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
    podspec::round([&mut spec.capacity]);
    let status: &mut PersistentVolumeStatus = volume.status.get_or_insert_default();
    // The writer of a phase sets its time; a new volume's phase starts now.
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

fn volume(at: &At<'_>) {
    volume_spec(&at.get("spec"));
}

fn volume_spec(at: &At<'_>) {
    let modes = at.get("accessModes");
    modes.need();
    access_modes(&modes);
    capacity(&at.get("capacity"));
    let reclaim = at.get("persistentVolumeReclaimPolicy");
    if !reclaim.is_empty() {
        reclaim.one_of(&["Delete", "Recycle", "Retain"]);
    }
    let affinity = at.get("nodeAffinity");
    if affinity.is_set() {
        if affinity.has("required") {
            pod::node_selector(&affinity.get("required"));
        } else {
            affinity.get("required").required("must specify required node constraints");
        }
    }
    let source = volumes::persistent_source(at);
    if source == Some("local") && !affinity.is_set() {
        affinity.required("Local volume requires node affinity");
    }
    let is_root = at.get("hostPath.path").str().trim_end_matches('/').is_empty();
    if at.has("hostPath") && is_root && reclaim.is("Recycle") {
        reclaim.forbidden("may not be 'recycle' for a hostPath mount of '/'");
    }
    at.get("storageClassName").any_name(names::dns1123_subdomain);
    at.get("volumeMode").any_of(&["Block", "Filesystem"]);
    let class = at.get("volumeAttributesClassName");
    if class.is_set() {
        if class.is_empty() {
            class.required("an empty string is disallowed");
        } else {
            class.name(names::dns1123_subdomain);
        }
        if !at.has("csi") {
            at.get("csi").required("has to be specified when using volumeAttributesClassName");
        }
    }
}

fn capacity(at: &At<'_>) {
    at.need();
    if !at.has("storage") || at.len() > 1 {
        let shown = Some(at.value).filter(|value| value.as_object().is_some_and(|m| !m.is_empty()));
        at.errors().not_supported_value(&at.path, shown, &["storage"]);
    }
    for (_, amount) in at.entries() {
        if quantity::is_negative(&amount) {
            amount
                .invalid_as(quantity::amount(&amount).units(), "must be a valid resource quantity");
        }
        quantity::positive(&amount);
    }
}

fn volume_update(at: &At<'_>, old: &At<'_>) {
    // Upstream's strategy checks it, and so does its rule for updates.
    volume(at);
    volume(at);
    let (spec, before) = (at.get("spec"), old.get("spec"));
    let (mut new, was) = (volumes::source_part(spec.value), volumes::source_part(before.value));
    if before.has("csi")
        && !before.get("csi").has("controllerExpandSecretRef")
        && let Some(Value::Object(fields)) = new.get_mut("csi")
    {
        fields.remove("controllerExpandSecretRef");
    }
    if new != was {
        let diff = internal::diff("PersistentVolumeSource", &was, &new);
        let place = spec.called(spec.child_path("persistentvolumesource"));
        place
            .forbidden(&format!("spec.persistentvolumesource is immutable after creation\n{diff}"));
    }
    let mode = spec.get("volumeMode").called(Path::new("volumeMode"));
    mode.unchanged(&before.get("volumeMode"));
    if before.has("nodeAffinity") {
        let (now, was) = (spec.get("nodeAffinity"), before.get("nodeAffinity"));
        if now.value != was.value {
            now.called(Path::new("nodeAffinity"))
                .invalid("field is immutable, except for updating from beta label to GA");
        }
    }
    let class = spec.get("volumeAttributesClassName");
    if before.has("volumeAttributesClassName") && !class.is_set() {
        class.forbidden("update from non-nil value to nil is forbidden");
    }
}
