//! ConfigMap: settings, by name.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::kind::{Kind, Rules, age, field, name};
use crate::validate::core;

pub(crate) static KIND: Kind<ConfigMap> = Kind {
    short: &["cm"],
    default: |map| {
        map.data.take_if(|data| data.is_empty());
        map.binary_data.take_if(|data| data.is_empty());
    },
    rules: Rules {
        create: core::config_map,
        update: Some(core::config_map_update),
        metadata: MetadataRules::UPDATE_AND_WHOLE,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field("Data", "string", "api.core.v1.ConfigMap.data", |map| {
            let texts = map.data.as_ref().map_or(0, |data| data.len());
            let bytes = map.binary_data.as_ref().map_or(0, |data| data.len());
            (texts + bytes).into()
        }),
        age(),
    ],
    ..Kind::BASE
};
