//! VolumeAttributesClass: attributes of volumes that can be changed later.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::storage::v1::VolumeAttributesClass;

use super::{parameters, provisioner};
use crate::kind::{Kind, Rules, age, field, name};
use crate::validate::at::At;

pub(crate) static KIND: Kind<VolumeAttributesClass> = Kind {
    short: &["vac"],
    rules: Rules {
        create: attributes_class,
        update: Some(attributes_class_update),
        metadata: MetadataRules::UPDATE_AND_WHOLE,
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

fn attributes_class(at: &At<'_>) {
    provisioner(&at.get("driverName"));
    parameters(&at.get("parameters"), false);
}

fn attributes_class_update(at: &At<'_>, old: &At<'_>) {
    for field in ["driverName", "parameters"] {
        if at.get(field).value != old.get(field).value {
            at.get(field).forbidden(&format!("updates to {field} are forbidden."));
        }
    }
    attributes_class(at);
}
