//! ServiceAccount: who pods are.

use apiserver::request::RequestContext;
use apiserver::resource::{Behaviour, MetadataRules};
use k8s_openapi::api::core::v1::{ObjectReference, ServiceAccount};

use crate::kind::{Hooks, Kind, Made, Rules, Sub, Updates, age, name};
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
    hooks: &NamesOnly,
    ..Kind::BASE
};

/// References to secrets keep their name alone. Upstream: `cleanSecretReferences`.
struct NamesOnly;

impl NamesOnly {
    fn clean(account: &mut ServiceAccount) {
        for secret in account.secrets.iter_mut().flatten() {
            let name = secret.name.take();
            *secret = ObjectReference { name, ..ObjectReference::default() };
        }
    }
}

impl Hooks<ServiceAccount> for NamesOnly {
    fn prepare_create(&self, _ctx: &RequestContext, account: &mut ServiceAccount) {
        Self::clean(account);
    }

    fn prepare_update(
        &self,
        _ctx: &RequestContext,
        account: &mut ServiceAccount,
        _old: &ServiceAccount,
    ) {
        Self::clean(account);
    }
}
