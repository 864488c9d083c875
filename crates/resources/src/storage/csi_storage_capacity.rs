//! CSIStorageCapacity: how much room a driver has for a class in a part of the cluster.

use k8s_openapi::api::storage::v1::CSIStorageCapacity;

use crate::kind::{Kind, Rules};
use crate::validate::storage;

pub(crate) static KIND: Kind<CSIStorageCapacity> = Kind {
    rules: Rules {
        create: storage::storage_capacity,
        update: Some(storage::storage_capacity_update),
        unconditional_update: false,
        ..Rules::NONE
    },
    ..Kind::BASE
};
