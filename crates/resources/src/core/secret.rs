//! Secret: settings that not everybody may read.

use apiserver::resource::MetadataRules;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;

use crate::defaults::fill;
use crate::kind::{Fields, Kind, Rules, Updates, age, field, name};
use crate::validate::{core, warnings};

pub(crate) static KIND: Kind<Secret> = Kind {
    default: |secret| {
        fill(&mut secret.type_, "Opaque");
        // What comes as text is kept as bytes.
        if let Some(text) = secret.string_data.take() {
            let data = secret.data.get_or_insert_default();
            data.extend(text.into_iter().map(|(key, text)| (key, ByteString(text.into_bytes()))));
        }
        secret.data.take_if(|data| data.is_empty());
    },
    rules: Rules {
        create: core::secret,
        update: Some(core::secret_update),
        metadata: MetadataRules::UPDATE_AND_WHOLE,
        ..Rules::NONE
    },
    warnings: Some(warnings::secret),
    warns_on_update: Updates::All,
    columns: &[
        name(),
        field("Type", "string", "api.core.v1.Secret.type", |secret| secret.type_.clone().into()),
        field("Data", "string", "api.core.v1.Secret.data", |secret| {
            secret.data.as_ref().map_or(0, |data| data.len()).into()
        }),
        age(),
    ],
    fields: Fields::Of(&[("type", |secret| secret.type_.clone().unwrap_or_default())]),
    ..Kind::BASE
};
