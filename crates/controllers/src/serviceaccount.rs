//! ServiceAccounts: every active namespace has a `default` one.
//!
//! In: namespaces and ServiceAccounts. Out: creations.
//! Upstream: `pkg/controller/serviceaccount/serviceaccounts_controller.go`.

use std::sync::Arc;

use client::{Client, ErrorExt, Lister, Outcome, PostParams, RawEvent, Result};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use machinery::ObjectMeta;

use crate::descriptor::{Descriptor, Row, on_metadata, own};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "serviceaccount-controller",
    account: "service-account-controller",
    component: "service-account-controller",
    queue: "serviceaccount",
    workers: 1,
    new: |setup| {
        Some(Controller {
            client: setup.client.clone(),
            namespaces: setup.lister(),
            accounts: setup.lister(),
        })
    },
    watches: &[
        &own::<Namespace>(),
        &on_metadata::<ServiceAccount, _, _>(|_: &Controller, queue, event| {
            let key = &event.entry().header.key;
            if matches!(event, RawEvent::Deleted(_)) && &*key.name == DEFAULT {
                queue.add(key.namespace.clone());
            }
        }),
    ],
    reconcile: |this, namespace| {
        Box::pin(async move {
            let known = this.accounts.get(&namespace, DEFAULT).is_some();
            if known || !this.namespaces.get("", &namespace).is_some_and(|one| is_active(&one)) {
                return Ok(Outcome::Done);
            }
            create(&this.client, &namespace).await.map(|()| Outcome::Done)
        })
    },
};

const DEFAULT: &str = "default";

struct Controller {
    client: Client,
    namespaces: Lister<Namespace>,
    accounts: Lister<ServiceAccount>,
}

pub fn is_active(namespace: &Namespace) -> bool {
    let phase = namespace.status.as_ref().and_then(|status| status.phase.as_deref());
    phase.unwrap_or("Active") == "Active" && namespace.metadata.deletion_timestamp.is_none()
}

async fn create(client: &client::Client, namespace: &str) -> Result<()> {
    let account = ServiceAccount {
        metadata: ObjectMeta {
            name: Some(DEFAULT.into()),
            namespace: Some(namespace.into()),
            ..Default::default()
        },
        ..Default::default()
    };
    match client.api(Some(namespace)).create(&PostParams::default(), &account).await {
        Err(error) if error.is_already_exists() || error.is_namespace_terminating() => Ok(()),
        done => done.map(drop),
    }
}
