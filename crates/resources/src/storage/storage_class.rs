//! StorageClass: which driver makes a volume, and how.

use std::collections::HashSet;

use apiserver::resource::MetadataRules;
use k8s_openapi::api::storage::v1::StorageClass;
use machinery::{Object, names};

use super::{parameters, provisioner};
use crate::kind::{Kind, Rules, Updates, age, field, named};
use crate::validate::at::At;
use crate::validate::warnings;

const IS_DEFAULT: &str = "storageclass.kubernetes.io/is-default-class";

pub(crate) static KIND: Kind<StorageClass> = Kind {
    short: &["sc"],
    default: |class| {
        class.reclaim_policy.get_or_insert_with(|| "Delete".into());
        class.volume_binding_mode.get_or_insert_with(|| "Immediate".into());
    },
    rules: Rules {
        create: storage_class,
        update: Some(storage_class_update),
        metadata: MetadataRules::WHOLE_AND_UPDATE,
        ..Rules::NONE
    },
    warnings: Some(warnings::storage_class),
    warns_on_update: Updates::All,
    columns: &[
        named(|class| {
            let note = class.metadata.annotations.as_ref().and_then(|map| map.get(IS_DEFAULT));
            let is_default = note.is_some_and(|value| value == "true");
            format!("{}{}", class.name(), if is_default { " (default)" } else { "" }).into()
        }),
        field("Provisioner", "string", "api.storage.v1.StorageClass.provisioner", |class| {
            class.provisioner.clone().into()
        }),
        field("ReclaimPolicy", "string", "api.storage.v1.StorageClass.reclaimPolicy", |class| {
            class.reclaim_policy.clone().unwrap_or_default().into()
        }),
        field(
            "VolumeBindingMode",
            "string",
            "api.storage.v1.StorageClass.volumeBindingMode",
            |class| class.volume_binding_mode.clone().unwrap_or_default().into(),
        ),
        field(
            "AllowVolumeExpansion",
            "string",
            "api.storage.v1.StorageClass.allowVolumeExpansion",
            |class| class.allow_volume_expansion.unwrap_or_default().into(),
        ),
        age(),
    ],
    returns_deleted: true,
    ..Kind::BASE
};

fn storage_class(at: &At<'_>) {
    provisioner(&at.get("provisioner"));
    parameters(&at.get("parameters"), true);
    let policy = at.get("reclaimPolicy");
    if !policy.is_empty() {
        policy.one_of(&["Delete", "Retain"]);
    }
    let mode = at.get("volumeBindingMode");
    if mode.is_set() {
        mode.one_of(&["Immediate", "WaitForFirstConsumer"]);
    } else {
        mode.required("");
    }
    for term in at.get("allowedTopologies").items() {
        let list = term.get("matchLabelExpressions");
        let mut keys = HashSet::new();
        for one in list.items() {
            let values = one.get("values");
            values.need();
            let mut seen = HashSet::new();
            for value in values.items() {
                if !seen.insert(value.str()) {
                    value.duplicate();
                }
            }
            let key = one.get("key");
            key.name(names::qualified_name);
            if !keys.insert(key.str()) {
                key.duplicate();
            }
        }
    }
}

fn storage_class_update(at: &At<'_>, old: &At<'_>) {
    storage_class(at);
    for field in ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"] {
        at.get(field).unchanged(&old.get(field));
    }
}
