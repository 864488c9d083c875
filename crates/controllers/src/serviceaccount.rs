//! ServiceAccounts: every active namespace has a `default` one.
//!
//! In: namespaces and ServiceAccounts. Out: creations.
//! Upstream: `pkg/controller/serviceaccount/serviceaccounts_controller.go`.

use std::sync::Arc;

use client::{ErrorExt, Outcome, PostParams, RawEvent, Result, WorkQueue, spawn_workers};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use machinery::ObjectMeta;

use crate::context::{Context, Descriptor};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "serviceaccount-controller",
    account: "service-account-controller",
    component: "service-account-controller",
    start,
};

const DEFAULT: &str = "default";

fn start(context: Context) {
    let namespaces = context.informers.of::<Namespace>();
    let accounts = context.informers.of::<ServiceAccount>();
    let queue: WorkQueue<Arc<str>> = WorkQueue::new("serviceaccount");
    let adds = queue.clone();
    namespaces.subscribe_raw(move |event| adds.add(event.entry().header.key.name.clone()));
    let adds = queue.clone();
    accounts.subscribe_raw(move |event| {
        let key = &event.entry().header.key;
        if matches!(event, RawEvent::Deleted(_)) && &*key.name == DEFAULT {
            adds.add(key.namespace.clone());
        }
    });
    let tasks = context.tasks.clone();
    tasks.clone().spawn("serviceaccount", async move {
        namespaces.synced().await;
        accounts.synced().await;
        spawn_workers(&tasks, &queue, 1, move |namespace: Arc<str>| {
            let client = context.client.clone();
            let known = accounts.lister().get(&namespace, DEFAULT).is_some();
            let active = namespaces.lister().get("", &namespace).is_some_and(|one| is_active(&one));
            async move {
                if known || !active {
                    return Ok(Outcome::Done);
                }
                create(&client, &namespace).await.map(|()| Outcome::Done)
            }
        });
    });
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
