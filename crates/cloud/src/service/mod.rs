//! Load balancers of the cloud for Services of type LoadBalancer.
//!
//! ```text
//!   Service ─► queue "service" ─► ensure or delete ─► finalizer, status.loadBalancer, Events
//!   Node ────► queue "node" ────► update, for each Service whose nodes changed
//! ```
//!
//! In: Services of type LoadBalancer without a class, Nodes that may take their traffic. Out: the finalizer
//! `service.kubernetes.io/load-balancer-cleanup` before a load balancer is made, its addresses in
//! `status.loadBalancer`, and upstream's Events.
//!
//! Invariants: a Service with a load balancer has the finalizer, so that it is gone only after its load balancer.
//! A failed Service is tried again after 5 s, then twice as long each time, up to 5 minutes.
//! Cost: a change of a Service calls the cloud if it concerns the load balancer ([`change`]). A node that comes, goes
//! or changes its provider ID or its exclusion is compared with the nodes of each load balancer; the cloud is
//! called for those that differ.
//! Upstream: `cloud-provider/controllers/service`.

mod change;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::metrics::Timer;
use client::{
    Api, ErrorExt, Event, EventType, Lister, ObjectKey, Outcome, Patch, PatchParams, View,
    WorkQueue, spawn_workers,
};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Node, Service};
use serde_json::{Value, json};

use crate::manager::{Context, Options, Unable};
use crate::metrics;
use crate::provider::{Error, LoadBalancers, Provider};
use crate::target::{Target, is_included, provider_id};
pub use change::has_finalizer;
use change::{FINALIZER, needs_cleanup, wants};

const FIRST_RETRY: Duration = Duration::from_secs(5);
const LAST_RETRY: Duration = Duration::from_secs(300);
/// How many names of nodes an Event has at most.
const NAMES: usize = 20;

pub fn check(provider: &dyn Provider, _: &Options) -> Result<(), Unable> {
    provider.load_balancers().map(drop).ok_or(Unable::NoLoadBalancers)
}

pub fn start(context: Context) {
    let services = context.informers.of::<Service>();
    let nodes = context.informers.of::<Node>();
    let this = Arc::new(Controller {
        services: services.lister(),
        targets: nodes.view(),
        state: Mutex::default(),
        queue: WorkQueue::new("service"),
        changes: WorkQueue::new("node"),
        context: context.clone(),
    });
    let seen = this.clone();
    services.subscribe(move |event| seen.service_event(event));
    let seen = this.clone();
    nodes.subscribe(move |event| seen.node_event(event));
    context.tasks.clone().spawn("service-lb-controller", async move {
        services.synced().await;
        nodes.synced().await;
        let own = this.clone();
        let workers = context.options.service_syncs.max(1);
        spawn_workers(&context.tasks, &this.queue, workers, move |key: ObjectKey| {
            let this = own.clone();
            async move { Ok::<_, String>(this.reconcile(&key).await) }
        });
        // One worker: a second look at all load balancers starts after the first.
        let own = this.clone();
        spawn_workers(&context.tasks, &this.changes, 1, move |()| {
            let this = own.clone();
            async move { Ok::<_, String>(this.update_all().await) }
        });
    });
}

struct Controller {
    context: Context,
    services: Lister<Service>,
    targets: View<Target>,
    queue: WorkQueue<ObjectKey>,
    /// Changes of the nodes: one key for all of them.
    changes: WorkQueue<()>,
    /// Guards what is known between reconciles; held for map operations, never across a request.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The Services whose load balancers this process has worked on.
    known: HashMap<ObjectKey, Known>,
    /// The node's exclusion and its provider ID, by name.
    nodes: HashMap<Arc<str>, (bool, String)>,
    /// Failures since the last success.
    failures: HashMap<ObjectKey, u32>,
}

struct Known {
    service: Arc<Service>,
    /// The nodes that the load balancer was last told: names and provider IDs.
    nodes: Option<Vec<(String, String)>>,
}

/// Why a sync failed. The Event has the text.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("failed to check if load balancer exists before cleanup: {0}")]
    Check(Error),
    #[error("failed to delete load balancer: {0}")]
    Delete(Error),
    #[error("failed to ensure load balancer: {0}")]
    Ensure(Error),
    /// Of a Service that is gone, or was replaced by another of the same name.
    #[error("{0}")]
    DeleteGone(Error),
    #[error("failed to {what}: {}", error.text())]
    Write { what: &'static str, error: client::Error },
}

impl Failure {
    /// When the cloud wants to be asked again.
    fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Ensure(Error::RetryAfter { after, .. }) => Some(*after),
            _ => None,
        }
    }
}

impl Controller {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while held")
    }

    fn service_event(&self, event: &Event<Service>) {
        let new = event.object();
        if event.is_deleted() {
            // The finalizer has brought it here before; a Service that lost it must be noticed as well.
            if self.state().known.contains_key(&event.key()) {
                self.queue.add(event.key());
            }
            return;
        }
        let is_changed = || event.old().is_none_or(|old| change::concerns(&old, new));
        if needs_cleanup(new) || (wants(new) && is_changed()) {
            self.queue.add(event.key());
        }
    }

    /// Conditions and other taints of a node change nothing.
    fn node_event(&self, event: &Event<Node>) {
        let (node, name) = (event.object(), event.key().name);
        let mut state = self.state();
        let is_changed = match event.is_deleted() {
            true => state.nodes.remove(&name).is_some(),
            false => {
                let now = (is_included(node), provider_id(node).to_owned());
                state.nodes.get(&name) != Some(&now) && {
                    state.nodes.insert(name, now);
                    true
                }
            }
        };
        if is_changed {
            self.changes.add(());
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Outcome {
        let Some(balancers) = self.context.provider.load_balancers() else { return Outcome::Done };
        let result = match self.services.get_key(key) {
            Some(service) => self.sync(balancers, key, &service).await,
            None => self.forget(balancers, key).await,
        };
        let Err(failure) = result else {
            self.state().failures.remove(key);
            return Outcome::Done;
        };
        if let Some(after) = failure.retry_after() {
            tracing::warn!(service = %key, error = %failure, ?after, "failed to sync the load balancer, trying again");
            return Outcome::After(after);
        }
        let mut state = self.state();
        let failures = state.failures.entry(key.clone()).or_insert(0);
        let after = FIRST_RETRY.saturating_mul(1 << (*failures).min(10)).min(LAST_RETRY);
        *failures += 1;
        tracing::warn!(service = %key, error = %failure, ?after, "failed to sync the load balancer, trying again");
        Outcome::After(after)
    }

    /// The Service is gone. Usually its load balancer is gone as well.
    async fn forget(&self, balancers: &dyn LoadBalancers, key: &ObjectKey) -> Result<(), Failure> {
        let known = self.state().known.get(key).map(|known| known.service.clone());
        if let Some(service) = known {
            self.delete_gone(balancers, &service).await?;
            self.state().known.remove(key);
        }
        Ok(())
    }

    async fn delete_gone(
        &self,
        balancers: &dyn LoadBalancers,
        service: &Service,
    ) -> Result<(), Failure> {
        if !wants(service) {
            return Ok(());
        }
        self.say(service, EventType::Normal, "DeletingLoadBalancer", "Deleting load balancer");
        if let Err(error) = balancers.delete(&self.context.options.cluster, service).await {
            let message = format!("Error deleting load balancer: {error}");
            self.say(service, EventType::Warning, "DeleteLoadBalancerFailed", message);
            return Err(Failure::DeleteGone(error));
        }
        self.say(service, EventType::Normal, "DeletedLoadBalancer", "Deleted load balancer");
        Ok(())
    }

    async fn sync(
        &self,
        balancers: &dyn LoadBalancers,
        key: &ObjectKey,
        service: &Arc<Service>,
    ) -> Result<(), Failure> {
        let replaced = self.state().known.get(key).map(|known| known.service.clone());
        let replaced = replaced.filter(|known| known.metadata.uid != service.metadata.uid);
        if let Some(other) = replaced {
            self.delete_gone(balancers, &other).await?;
            self.state().known.remove(key);
        }
        self.state()
            .known
            .entry(key.clone())
            .and_modify(|known| known.service = service.clone())
            .or_insert_with(|| Known { service: service.clone(), nodes: None });
        let is_over = !wants(service) || needs_cleanup(service);
        let done = match is_over {
            true => self.clean_up(balancers, key, service).await,
            false => self.ensure(balancers, key, service).await,
        };
        if let Err(failure) = &done {
            let message = format!("Error syncing load balancer: {failure}");
            self.say(service, EventType::Warning, "SyncLoadBalancerFailed", message);
        } else if is_over {
            self.state().known.remove(key);
        }
        done
    }

    async fn clean_up(
        &self,
        balancers: &dyn LoadBalancers,
        key: &ObjectKey,
        service: &Service,
    ) -> Result<(), Failure> {
        let cluster = &self.context.options.cluster;
        if balancers.get(cluster, service).await.map_err(Failure::Check)?.is_some() {
            self.say(service, EventType::Normal, "DeletingLoadBalancer", "Deleting load balancer");
            match balancers.delete(cluster, service).await {
                Ok(()) | Err(Error::ImplementedElsewhere) => {}
                Err(error) => return Err(Failure::Delete(error)),
            }
        }
        if has_finalizer(service) {
            let patch = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}});
            self.patch(key, &patch, "remove load balancer cleanup finalizer").await?;
        }
        self.say(service, EventType::Normal, "DeletedLoadBalancer", "Deleted load balancer");
        self.write_status(key, service, &[]).await
    }

    async fn ensure(
        &self,
        balancers: &dyn LoadBalancers,
        key: &ObjectKey,
        service: &Service,
    ) -> Result<(), Failure> {
        self.say(service, EventType::Normal, "EnsuringLoadBalancer", "Ensuring load balancer");
        if !has_finalizer(service) {
            let patch = json!({"metadata": {"finalizers": [FINALIZER]}});
            self.patch(key, &patch, "add load balancer cleanup finalizer").await?;
        }
        let targets = self.targets();
        if targets.is_empty() {
            self.say_no_nodes(service);
        }
        self.note_nodes(key, &targets);
        metrics::BALANCER_SYNCS.count(&[]);
        match balancers.ensure(&self.context.options.cluster, service, &targets).await {
            Ok(ingress) => {
                self.say(
                    service,
                    EventType::Normal,
                    "EnsuredLoadBalancer",
                    "Ensured load balancer",
                );
                self.write_status(key, service, &ingress).await
            }
            Err(Error::ImplementedElsewhere) => Ok(()),
            Err(error) => Err(Failure::Ensure(error)),
        }
    }

    /// The nodes that may take traffic, in the order of their names.
    fn targets(&self) -> Vec<Arc<Target>> {
        self.targets.all().into_iter().map(|(_, target)| target).collect()
    }

    /// Notes the nodes before the cloud is called: a failed call is repeated by the Service's own queue.
    fn note_nodes(&self, key: &ObjectKey, targets: &[Arc<Target>]) {
        if let Some(known) = self.state().known.get_mut(key) {
            known.nodes = Some(identities(targets));
        }
    }

    /// The same, and returns whether the nodes differ from those that the load balancer was told. A load balancer
    /// that was told none yet is about to be made with the current ones.
    fn note_changed_nodes(&self, key: &ObjectKey, targets: &[Arc<Target>]) -> bool {
        let mut state = self.state();
        let Some(known) = state.known.get_mut(key) else { return false };
        let now = identities(targets);
        let differs = known.nodes.as_ref().is_some_and(|before| *before != now);
        if differs {
            known.nodes = Some(now);
        }
        differs
    }

    /// Tells each load balancer the nodes, if they changed. Failed ones go to the queue of Services.
    async fn update_all(&self) -> Outcome {
        let Some(balancers) = self.context.provider.load_balancers() else { return Outcome::Done };
        let timer = Timer::start();
        let known: Vec<(ObjectKey, Arc<Service>)> = {
            let state = self.state();
            state.known.iter().map(|(key, known)| (key.clone(), known.service.clone())).collect()
        };
        let targets = self.targets();
        let at_once = self.context.options.service_syncs.max(1);
        let wanting = known.into_iter().filter(|(_, service)| wants(service));
        let update = |(key, service): (ObjectKey, Arc<Service>)| {
            let targets = &targets;
            async move {
                if self.note_changed_nodes(&key, targets)
                    && !self.update(balancers, &service, targets).await
                {
                    metrics::NODE_SYNC_ERRORS.count(&[]);
                    self.queue.add(key);
                }
            }
        };
        futures::stream::iter(wanting).for_each_concurrent(at_once, update).await;
        metrics::NODE_SYNC_SECONDS.took(&[], timer.elapsed());
        Outcome::Done
    }

    /// Returns whether the load balancer has the nodes, or is gone.
    async fn update(
        &self,
        balancers: &dyn LoadBalancers,
        service: &Service,
        targets: &[Arc<Target>],
    ) -> bool {
        let cluster = &self.context.options.cluster;
        let timer = Timer::start();
        metrics::BALANCER_SYNCS.count(&[]);
        let updated = balancers.update(cluster, service, targets).await;
        metrics::UPDATE_SECONDS.took(&[], timer.elapsed());
        let error = match updated {
            Ok(()) if targets.is_empty() => {
                self.say_no_nodes(service);
                return true;
            }
            Ok(()) => {
                let message = "Updated load balancer with new hosts";
                self.say(service, EventType::Normal, "UpdatedLoadBalancer", message);
                return true;
            }
            Err(Error::ImplementedElsewhere) => return true,
            Err(error) => error,
        };
        if let Ok(None) = balancers.get(cluster, service).await {
            return true;
        }
        let names = loggable(targets);
        let message = format!(
            "Error updating load balancer with new hosts [{}] [node names limited, total number of nodes: {}], error: {error}",
            names.join(" "),
            targets.len()
        );
        self.say(service, EventType::Warning, "UpdateLoadBalancerFailed", message);
        false
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        service: &Service,
        ingress: &[LoadBalancerIngress],
    ) -> Result<(), Failure> {
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let present = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
        if present == ingress {
            return Ok(());
        }
        let ingress = (!ingress.is_empty()).then_some(ingress);
        let patch = json!({"status": {"loadBalancer": {"ingress": ingress}}});
        self.patch(key, &patch, "update load balancer status").await
    }

    /// A Service that is gone needs no patch.
    async fn patch(
        &self,
        key: &ObjectKey,
        patch: &Value,
        what: &'static str,
    ) -> Result<(), Failure> {
        let api: Api<Service> = self.context.client.api(Some(&key.namespace));
        let patch = Patch::Strategic(patch);
        match api.patch_status(&key.name, &PatchParams::default(), &patch).await {
            Err(error) if !error.is_not_found() => Err(Failure::Write { what, error }),
            _ => Ok(()),
        }
    }

    fn say_no_nodes(&self, service: &Service) {
        let message = "There are no available nodes for LoadBalancer";
        self.say(service, EventType::Warning, "UnAvailableLoadBalancer", message);
    }

    fn say(&self, about: &Service, kind: EventType, reason: &str, message: impl Into<String>) {
        self.context.events.event(about, kind, reason, message);
    }
}

fn identities(targets: &[Arc<Target>]) -> Vec<(String, String)> {
    targets.iter().map(|one| (one.name.clone(), one.provider_id.clone())).collect()
}

/// The first names.
fn loggable(targets: &[Arc<Target>]) -> Vec<String> {
    let mut names: Vec<String> =
        targets.iter().take(NAMES).map(|target| target.name.clone()).collect();
    if targets.len() > NAMES {
        names.push(format!("<{} more>", targets.len() - NAMES));
    }
    names
}

#[cfg(test)]
mod tests;
