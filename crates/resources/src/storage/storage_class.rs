//! StorageClass: which driver makes a volume, and how.

use k8s_openapi::api::storage::v1::StorageClass;
use machinery::Object;

use crate::kind::{Kind, Rules, age, field, named};
use crate::validate::{storage, warnings};

const IS_DEFAULT: &str = "storageclass.kubernetes.io/is-default-class";

pub(crate) static KIND: Kind<StorageClass> = Kind {
    short: &["sc"],
    default: |class| {
        class.reclaim_policy.get_or_insert_with(|| "Delete".into());
        class.volume_binding_mode.get_or_insert_with(|| "Immediate".into());
    },
    rules: Rules {
        create: storage::storage_class,
        update: Some(storage::storage_class_update),
        ..Rules::NONE
    },
    warnings: Some(warnings::storage_class),
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
