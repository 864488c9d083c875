//! Describes nodes as their cloud does: provider ID, addresses, labels; then takes off the taint with which the
//! kubelet keeps pods away from a node that no cloud has described.
//!
//! In: Nodes, the provider's metadata. Out: `spec.providerID`, the labels of zone, region and instance type, the
//! taint `node.cloudprovider.kubernetes.io/uninitialized` removed, `status.addresses`, the Event `Synced`.
//!
//! Invariants: a tainted node gets everything in one write, and the taint goes with that write. Untainted nodes keep
//! their labels; only labels that must agree with each other are repaired, and addresses follow the cloud's.
//! Cost: a change of a node compares a few of its labels. Every `--node-status-update-frequency`, and when the provider
//! says that the cloud has changed, it is asked about all nodes, `--concurrent-node-status-updates` at a time.
//! Upstream: `cloud-provider/controllers/node`.

mod addresses;
mod labels;

use std::sync::Arc;

use client::{
    Api, EventType, Lister, Outcome, Patch, PatchParams, WorkQueue, retry_on_conflict,
    spawn_workers,
};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use machinery::selector::Selector;
use serde_json::{Value, json};

use crate::manager::{Context, Options, Unable};
use crate::metrics;
use crate::provider::{Error, Metadata, Provider};
use crate::target::provider_id;

/// The taint of a node that no cloud has described.
const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";

pub fn check(provider: &dyn Provider, _: &Options) -> Result<(), Unable> {
    provider.instances().map(drop).ok_or(Unable::NoInstances)
}

pub fn start(context: Context) {
    let informer = context.informers.of::<Node>();
    let queue: WorkQueue<Arc<str>> = WorkQueue::new("Nodes");
    let waiting = queue.clone();
    informer.subscribe(move |event| {
        let node = event.object();
        let has_work = is_uninitialized(node) || !labels::repairs(node).is_empty();
        if !event.is_deleted() && has_work {
            waiting.add(event.key().name);
        }
    });
    let tasks = context.tasks.clone();
    let this = Arc::new(Controller { nodes: informer.lister(), queue, context });
    tasks.clone().spawn("cloud-node-controller", async move {
        informer.synced().await;
        let workers = this.context.options.node_syncs;
        let own = this.clone();
        spawn_workers(&tasks, &this.queue, workers, move |name: Arc<str>| {
            let this = own.clone();
            async move { this.reconcile(&name).await.map_err(|failure| failure.to_string()) }
        });
        this.follow_addresses().await;
    });
}

struct Controller {
    context: Context,
    nodes: Lister<Node>,
    queue: WorkQueue<Arc<str>>,
}

/// A failure of a reconcile: the queue logs it and tries again.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("failed to get instance metadata for node {node}: {error}")]
    Metadata { node: String, error: Error },
    #[error(
        "failed to get instance metadata for node {0}: cloud provider does not set node provider ID for node {0}"
    )]
    NoProviderId(String),
    #[error(
        "failed to get node modifiers from cloud provider: provided node ip for node {node:?} is not valid: {error}"
    )]
    NodeIp { node: String, error: addresses::WrongNodeIp },
    #[error(transparent)]
    Api(#[from] client::Error),
}

impl Controller {
    async fn reconcile(&self, name: &str) -> Result<Outcome, Failure> {
        let Some(node) = self.nodes.get("", name) else { return Ok(Outcome::Done) };
        if is_uninitialized(&node) {
            return self.initialize(name, &node).await;
        }
        let repairs = labels::repairs(&node);
        if !repairs.is_empty() {
            self.patch(name, &json!({"metadata": {"labels": repairs}})).await?;
        }
        Ok(Outcome::Done)
    }

    async fn initialize(&self, name: &str, node: &Node) -> Result<Outcome, Failure> {
        tracing::debug!(node = name, "initializing the node with the cloud provider");
        let Some(metadata) = self.metadata(name, node).await? else {
            tracing::info!(node = name, "skipped the node: the cloud provider has no metadata");
            return Ok(Outcome::Done);
        };
        // A wrong node IP must stop here: the taint is the only reason to try again.
        addresses::with_node_ip(node, &metadata.addresses)
            .map_err(|error| Failure::NodeIp { node: name.to_owned(), error })?;
        let api: Api<Node> = self.context.client.api(None);
        let written = retry_on_conflict(|| async {
            let current = api.get(name).await?;
            let patch = initial_patch(&current, &metadata);
            api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await
        });
        let written = written.await?;
        observe_since_creation(&metrics::TAINT_REMOVAL, &written);
        self.update_addresses(&written, &metadata).await;
        tracing::info!(node = name, "initialized the node with the cloud provider");
        let message = "Node synced successfully";
        self.context.events.event(node, EventType::Normal, "Synced", message);
        observe_since_creation(&metrics::INITIAL_SYNC, &written);
        Ok(Outcome::Done)
    }

    /// The cloud's metadata, with a provider ID in any case: other controllers find the machine by it.
    async fn metadata(&self, name: &str, node: &Node) -> Result<Option<Metadata>, Failure> {
        let Some(instances) = self.context.provider.instances() else { return Ok(None) };
        let failed = |error| Failure::Metadata { node: name.to_owned(), error };
        let Some(mut metadata) = instances.metadata(node).await.map_err(failed)? else {
            return Ok(None);
        };
        if metadata.provider_id.is_empty() {
            metadata.provider_id = provider_id(node).to_owned();
        }
        match metadata.provider_id.is_empty() {
            true => Err(Failure::NoProviderId(name.to_owned())),
            false => Ok(Some(metadata)),
        }
    }

    /// Compares the addresses of all nodes with the cloud's, in each period and when the cloud has changed. Nodes
    /// that wait for the cloud are tried again then, whatever their backoff.
    async fn follow_addresses(&self) {
        let options = &self.context.options;
        let at_once = options.node_status_updates.max(1);
        let mut ticks = tokio::time::interval(options.node_status_update_frequency);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = self.context.provider.changed() => {}
            }
            let entries = self.nodes.entries(None, &Selector::everything());
            let nodes = futures::stream::iter(entries);
            nodes
                .for_each_concurrent(at_once, |entry| async move {
                    let key = &entry.header.key;
                    match self.nodes.get_key(key) {
                        Some(node) if is_uninitialized(&node) => self.queue.add(key.name.clone()),
                        Some(node) => self.follow_addresses_of(&node).await,
                        None => {}
                    }
                })
                .await;
        }
    }

    async fn follow_addresses_of(&self, node: &Node) {
        let Some(instances) = self.context.provider.instances() else { return };
        let name = node.metadata.name.as_deref().unwrap_or_default();
        match instances.metadata(node).await {
            Ok(Some(metadata)) => self.update_addresses(node, &metadata).await,
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(node = name, %error, "failed to get the node's addresses from the cloud");
            }
        }
    }

    /// Writes the cloud's addresses, if they differ. A failure is logged: the next period tries again.
    async fn update_addresses(&self, node: &Node, metadata: &Metadata) {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let addresses = match addresses::wanted(node, &metadata.addresses) {
            Ok(Some(addresses)) => addresses,
            Ok(None) => return,
            Err(error) => {
                tracing::error!(node = name, %error, "failed to update the node's addresses");
                return;
            }
        };
        // A JSON merge patch replaces the list; a strategic one would merge it by type.
        let patch = json!({"status": {"addresses": addresses}});
        let api: Api<Node> = self.context.client.api(None);
        let written = api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await;
        if let Err(error) = written {
            tracing::error!(node = name, %error, "failed to write the node's addresses");
        }
    }

    async fn patch(&self, name: &str, patch: &Value) -> client::Result<()> {
        let api: Api<Node> = self.context.client.api(None);
        match api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(error) if client::ErrorExt::is_not_found(&error) => Ok(()),
            written => written.map(drop),
        }
    }
}

/// Everything that a node gets when it is initialized. The resource version guards the list of taints.
fn initial_patch(node: &Node, metadata: &Metadata) -> Value {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let taints: Vec<_> = taints.filter(|taint| taint.key != UNINITIALIZED).collect();
    let mut patch = json!({
        "metadata": {
            "resourceVersion": node.metadata.resource_version,
            "labels": labels::of(node, metadata),
        },
        "spec": {"taints": taints},
    });
    if provider_id(node).is_empty() {
        patch["spec"]["providerID"] = metadata.provider_id.as_str().into();
    }
    patch
}

fn is_uninitialized(node: &Node) -> bool {
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    taints.is_some_and(|taints| taints.iter().any(|taint| taint.key == UNINITIALIZED))
}

fn observe_since_creation(family: &base::metrics::Family, node: &Node) {
    let Some(created) = &node.metadata.creation_timestamp else { return };
    let age = base::clock::now().duration_since(created.0);
    family.observe(&[], age.as_secs_f64());
}

#[cfg(test)]
mod tests;
