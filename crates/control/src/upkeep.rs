//! Recreates the first objects that a cluster needs when they are deleted: without
//! `kube-node-lease` all nodes are taken for dead, without the `kubernetes` Service no pod finds the
//! API, without its ConfigMap no extension server knows whom to believe.
//!
//! In: deletions of these kinds. Out: creates, by [`bootstrap::keep`]. What a user
//! changed stays changed: several servers would mend each other's work.
//! Upstream: loops, by which a minute, ten seconds or nothing goes by
//! (`systemnamespaces`, `kubernetesservice`, `defaultservicecidr`, `clusterauthenticationtrust`).

use std::sync::Arc;
use std::time::Duration;

use apiserver::cacher::{CacheEvent, Cursor};
use apiserver::{Registry, StatusError};
use base::backoff::Backoff;
use base::task::Tasks;
use k8s_openapi::api::core::v1::{ConfigMap, Endpoints, Namespace, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;

use crate::bootstrap::{self, Cluster};
use crate::endpoints::Reconciler;

/// Before the next try: a Service's address is free only a moment after the Service is gone.
const RETRY: Duration = Duration::from_secs(1);
/// If another Service has the address, this may never succeed.
const RETRY_CEILING: Duration = Duration::from_secs(60);

/// Follows until the tasks end.
pub fn start(registry: &Registry, cluster: Cluster, endpoints: Arc<Reconciler>, tasks: &Tasks) {
    tasks.spawn("upkeep of the first objects", run(registry.clone(), cluster, endpoints));
}

async fn run(registry: Registry, cluster: Cluster, endpoints: Arc<Reconciler>) {
    loop {
        let mut removals = Removals::follow(&registry).await;
        loop {
            // Also objects that were deleted before the watch.
            let mut retry = Backoff::new(RETRY, RETRY_CEILING);
            while let Err(error) = bootstrap::keep(&registry, &cluster, &endpoints).await {
                tracing::warn!(%error, "failed to recreate the first objects");
                tokio::time::sleep(retry.step()).await;
            }
            if removals.next().await.is_err() {
                break;
            }
        }
        // Too slow for history, or the cache is another.
        tokio::time::sleep(RETRY).await;
    }
}

struct Removals([Cursor; 6]);

impl Removals {
    async fn follow(registry: &Registry) -> Self {
        Self([
            registry.follow::<Namespace>().await.1,
            registry.follow::<Service>().await.1,
            registry.follow::<Endpoints>().await.1,
            registry.follow::<EndpointSlice>().await.1,
            registry.follow::<ServiceCIDR>().await.1,
            registry.follow::<ConfigMap>().await.1,
        ])
    }

    /// Waits until one of ours went.
    async fn next(&mut self) -> Result<(), StatusError> {
        let waits = self.0.iter_mut().map(|cursor| Box::pin(removed(cursor)));
        futures::future::select_all(waits).await.0
    }
}

/// Cancel-safe: what it has read and passed over was not ours.
async fn removed(cursor: &mut Cursor) -> Result<(), StatusError> {
    while !cursor.next().await?.iter().any(is_ours) {}
    Ok(())
}

fn is_ours(event: &CacheEvent) -> bool {
    let Some(gone) = event.previous.as_ref().filter(|_| event.entry.is_none()) else {
        return false;
    };
    bootstrap::is_kept(&gone.key.namespace, &gone.key.name)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use apiserver::registry::{DeleteOptions, Intent};
    use apiserver::request::Key;
    use machinery::ObjectMeta;

    use super::*;
    use crate::endpoints::Own;
    use crate::testing;

    /// Deletes it, and waits for another.
    async fn check<T>(registry: &Registry, namespace: &str, name: &str)
    where
        T: k8s_openapi::Metadata<Ty = ObjectMeta> + Clone + 'static,
    {
        let find = async || {
            let found = registry.find::<T>(namespace, name).await.expect("readable");
            found.and_then(|object| object.metadata().uid.clone())
        };
        let old = find().await;
        assert!(old.is_some(), "{} {name} is there from the beginning", T::KIND);
        let (ctx, key) = (registry.own_context::<T>(), Key::new(namespace, name));
        let intent = Intent::Delete { options: DeleteOptions::default() };
        registry.write(&ctx, &key, intent).await.expect("deleted");
        if T::KIND == "Namespace" {
            let finalized = Intent::Modify(Box::new(|object| {
                let namespace = object.expect_mut::<Namespace>();
                namespace.spec.get_or_insert_default().finalizers = None;
                Ok(())
            }));
            let mut ctx = ctx;
            ctx.subresource = "finalize".into();
            registry.write(&ctx, &key, finalized).await.expect("finalized");
        }
        let anew = async {
            loop {
                let now = find().await;
                if now.is_some() && now != old {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, anew).await.unwrap_or_else(|_| panic!("{} {name}", T::KIND));
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_cluster_needs_comes_back() {
        let registry = testing::registry(&Tasks::new("test"));
        let address: IpAddr = "192.0.2.1".parse().expect("an address");
        let cluster = Cluster {
            service_cidrs: vec!["10.96.0.0/24".parse().expect("a range")],
            own: Own { address: Some(address), port: 6443, ..Own::default() },
            ..Cluster::default()
        };
        let endpoints = Reconciler::new(&registry, cluster.own.clone());
        bootstrap::keep(&registry, &cluster, &endpoints).await.expect("an empty cluster is filled");
        let tasks = Tasks::new("test");
        start(&registry, cluster, endpoints, &tasks);
        check::<Namespace>(&registry, "", "kube-node-lease").await;
        check::<Service>(&registry, "default", "kubernetes").await;
        check::<Endpoints>(&registry, "default", "kubernetes").await;
        check::<EndpointSlice>(&registry, "default", "kubernetes").await;
        let name = "extension-apiserver-authentication";
        check::<ConfigMap>(&registry, "kube-system", name).await;
        check::<ServiceCIDR>(&registry, "", "kubernetes").await;
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
