//! Mirror pods: the API's copies of static pods.
//!
//! In: static pods, mirrors in the API. Out: a mirror for each static pod, none for any other.
//! Deleting a mirror never stops the pod: the mirror is recreated.
//! Upstream: `pkg/kubelet/pod/mirror_client.go`.

use std::sync::Arc;
use std::time::Duration;

use base::backoff::Backoff;
use client::{DeleteParams, ErrorExt, PostParams, Preconditions};
use k8s_openapi::api::core::v1::Pod;
use machinery::selector::Selector;

use crate::names;
use crate::node::this::ThisNode;
use crate::pod::api::PodApi;
use crate::pod::set::PodSet;
use crate::pod::static_pods::mirror_of;

/// Keeps mirrors up to date; never returns.
pub async fn keep(node: Arc<ThisNode>, api: Arc<PodApi>, pods: Arc<PodSet>) {
    api.pods.synced().await;
    let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
    loop {
        match reconcile(&node, &api, &pods).await {
            Ok(()) => {
                backoff.reset();
                pods.mirrors.notified().await;
            }
            Err(error) => {
                tracing::debug!(error = error.text(), "failed to update the mirror pods");
                tokio::time::sleep(backoff.step()).await;
            }
        }
    }
}

async fn reconcile(node: &ThisNode, api: &PodApi, pods: &PodSet) -> client::Result<()> {
    let statics = pods.static_pods();
    let all = api.pods.lister().list(None, &Selector::default());
    let mirrors: Vec<Arc<Pod>> = all.into_iter().filter(|pod| names::is_mirror(pod)).collect();
    let same = |a: &Pod, b: &Pod| {
        names::name(a) == names::name(b) && names::namespace(a) == names::namespace(b)
    };
    for mirror in &mirrors {
        let wanted = statics.values().find(|pod| same(pod, mirror));
        let is_current = wanted.is_some_and(|pod| {
            names::annotation(pod, names::CONFIG_HASH)
                == names::annotation(mirror, names::CONFIG_MIRROR)
        });
        if !is_current || mirror.metadata.deletion_timestamp.is_some() {
            delete(api, mirror).await?;
        }
    }
    for pod in statics.values() {
        if !mirrors.iter().any(|mirror| same(pod, mirror)) {
            create(node, api, pod).await?;
        }
    }
    Ok(())
}

async fn delete(api: &PodApi, mirror: &Pod) -> client::Result<()> {
    let api = api.client.api::<Pod>(Some(names::namespace(mirror)));
    let preconditions = Preconditions { uid: mirror.metadata.uid.clone(), resource_version: None };
    let options = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(preconditions),
        ..DeleteParams::default()
    };
    match api.delete(names::name(mirror), &options).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
        Err(error) => Err(error),
    }
}

async fn create(node: &ThisNode, api: &PodApi, pod: &Pod) -> client::Result<()> {
    let uid = node.object().metadata.uid.clone();
    let mirror = mirror_of(pod, uid.as_deref(), &node.config.node_name);
    let api = api.client.api::<Pod>(Some(names::namespace(pod)));
    match api.create(&PostParams::default(), &mirror).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_already_exists() => Ok(()),
        Err(error) => Err(error),
    }
}
