//! CSIStorageCapacity: how much room a driver has for a class in a part of the cluster.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use machinery::names;

use crate::kind::{Kind, Rules, Updates};
use crate::validate::at::At;
use crate::validate::{quantity, warnings};

pub(crate) static KIND: Kind<CSIStorageCapacity> = Kind {
    rules: Rules {
        create: storage_capacity,
        update: Some(storage_capacity_update),
        unconditional_update: false,
        metadata: MetadataRules::WHOLE_AND_UPDATE,
        ..Rules::NONE
    },
    warnings: Some(warnings::kinds::storage_capacity),
    warns_on_update: Updates::All,
    ..Kind::BASE
};

fn storage_capacity(at: &At<'_>) {
    at.get("nodeTopology").selector();
    at.get("storageClassName").name(names::dns1123_subdomain);
    if at.has("capacity") {
        quantity::not_negative(&at.get("capacity"));
    }
}

fn storage_capacity_update(at: &At<'_>, old: &At<'_>) {
    storage_capacity(at);
    for field in ["nodeTopology", "storageClassName"] {
        at.get(field).unchanged(&old.get(field));
    }
}
