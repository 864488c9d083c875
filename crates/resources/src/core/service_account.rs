//! ServiceAccount: who pods are.

use apiserver::resource::Behaviour;
use k8s_openapi::api::core::v1::ServiceAccount;

use crate::kind::{Kind, Made, Sub, age, name};

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
    returns_deleted: true,
    columns: &[name(), age()],
    ..Kind::BASE
};
