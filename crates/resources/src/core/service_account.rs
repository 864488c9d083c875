//! ServiceAccount: who pods are.

use apiserver::resource::{Behaviour, MetadataRules};
use k8s_openapi::api::core::v1::ServiceAccount;

use crate::kind::{Kind, Made, Rules, Sub, Updates, age, name};
use crate::validate::warnings;

pub(crate) static KIND: Kind<ServiceAccount> = Kind {
    short: &["sa"],
    subresources: &[Sub {
        name: "token",
        kind: Some(("authentication.k8s.io", "v1", "TokenRequest")),
        verbs: &["create"],
        behaviour: Made::Wired(|wiring| Behaviour::Create(wiring.tokens.clone())),
    }],
    default: |account| {
        account.secrets.take_if(|secrets| secrets.is_empty());
        account.image_pull_secrets.take_if(|secrets| secrets.is_empty());
    },
    rules: Rules { metadata: MetadataRules::UPDATE_AND_WHOLE, ..Rules::NONE },
    returns_deleted: true,
    warnings: Some(warnings::kinds::service_account),
    warns_on_update: Updates::All,
    columns: &[name(), age()],
    ..Kind::BASE
};
