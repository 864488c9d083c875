//! VolumeAttributesClass: attributes of volumes that can be changed later.

use k8s_openapi::api::storage::v1::VolumeAttributesClass;

use crate::kind::{Kind, Rules, age, field, name};
use crate::validate::storage;

pub(crate) static KIND: Kind<VolumeAttributesClass> = Kind {
    short: &["vac"],
    rules: Rules {
        create: storage::attributes_class,
        update: Some(storage::attributes_class_update),
        ..Rules::NONE
    },
    columns: &[
        name(),
        field("DriverName", "string", "api.storage.v1.VolumeAttributesClass.driverName", |class| {
            class.driver_name.clone().into()
        }),
        age(),
    ],
    returns_deleted: true,
    ..Kind::BASE
};
