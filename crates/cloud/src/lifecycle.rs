//! Nodes whose machines are gone or shut down.
//!
//! In: Nodes that are not Ready, the provider's answers. Out: a deleted Node whose machine the cloud does not have;
//! the taint `node.cloudprovider.kubernetes.io/shutdown` on a Node whose machine is shut down, removed when the
//! node is Ready; Events.
//!
//! Invariant: a Node is deleted only if the cloud says that its machine does not exist. An error of the cloud keeps it.
//! Cost: every `--node-monitor-period` the cloud is asked about the nodes that are not Ready, at most
//! [`AT_ONCE`] at a time. Ready nodes cost nothing.
//! Upstream: `cloud-provider/controllers/nodelifecycle`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use client::{
    Api, DeleteParams, ErrorExt, EventType, Lister, Patch, PatchParams, Preconditions,
    retry_on_conflict,
};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Taint};
use serde_json::json;

use crate::manager::{Context, Options, Unable};
use crate::provider::{Instances, Provider};

const SHUTDOWN: &str = "node.cloudprovider.kubernetes.io/shutdown";
const NO_SCHEDULE: &str = "NoSchedule";
/// How many nodes are looked at together.
const AT_ONCE: usize = 16;

pub fn check(provider: &dyn Provider, _: &Options) -> Result<(), Unable> {
    provider.instances().map(drop).ok_or(Unable::NoInstances)
}

pub fn start(context: Context) {
    let informer = context.informers.of::<Node>();
    let watched: Arc<Mutex<BTreeSet<Arc<str>>>> = Arc::default();
    let seen = watched.clone();
    informer.subscribe(move |event| {
        let node = event.object();
        let mut watched = seen.lock().expect("no panic while held");
        match !event.is_deleted() && (!is_ready(node) || has_shutdown_taint(node)) {
            true => watched.insert(event.key().name),
            false => watched.remove(&event.key().name),
        };
    });
    let this = Controller { nodes: informer.lister(), watched, context: context.clone() };
    context.tasks.spawn("cloud-node-lifecycle-controller", async move {
        informer.synced().await;
        this.monitor().await;
    });
}

struct Controller {
    context: Context,
    nodes: Lister<Node>,
    /// Guards the names of nodes that are not Ready, or have the taint; held for a set operation.
    watched: Arc<Mutex<BTreeSet<Arc<str>>>>,
}

impl Controller {
    async fn monitor(&self) {
        let mut ticks = tokio::time::interval(self.context.options.node_monitor_period);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let names = self.watched.lock().expect("no panic while held").clone();
            let look = |name: Arc<str>| async move { self.look(&name).await };
            futures::stream::iter(names).for_each_concurrent(AT_ONCE, look).await;
        }
    }

    async fn look(&self, name: &str) {
        let Some(instances) = self.context.provider.instances() else { return };
        let Some(node) = self.nodes.get("", name) else { return };
        if is_ready(&node) {
            if has_shutdown_taint(&node) {
                self.set_taint(name, false).await;
            }
            return;
        }
        match instances.exists(&node).await {
            Err(error) => {
                tracing::error!(node = name, %error, "failed to ask the cloud whether the node exists");
            }
            Ok(false) => self.delete(name, &node).await,
            Ok(true) => self.look_at_power(name, &node, instances).await,
        }
    }

    async fn delete(&self, name: &str, node: &Node) {
        let message =
            format!("Deleting node {name} because it does not exist in the cloud provider");
        tracing::info!(node = name, "deleting the node: the cloud provider does not have it");
        self.context.events.event(node, EventType::Normal, "DeletingNode", message);
        let api: Api<Node> = self.context.client.api(None);
        let preconditions =
            Preconditions { uid: node.metadata.uid.clone(), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match api.delete(name, &params).await {
            Err(error) if !error.is_not_found() => {
                tracing::error!(node = name, %error, "failed to delete the node");
                let message = format!("Failed deleting node {name}: {}", error.text());
                self.context.events.event(node, EventType::Warning, "DeletingNodeFailed", message);
            }
            _ => {}
        }
    }

    async fn look_at_power(&self, name: &str, node: &Node, instances: &dyn Instances) {
        match instances.is_shut_down(node).await {
            Err(error) => {
                tracing::error!(node = name, %error, "failed to ask the cloud whether the node is shut down");
            }
            Ok(true) if !has_shutdown_taint(node) => self.set_taint(name, true).await,
            Ok(_) => {}
        }
    }

    /// Adds or removes the taint.
    async fn set_taint(&self, name: &str, is_shut_down: bool) {
        let api: Api<Node> = self.context.client.api(None);
        let written = retry_on_conflict(|| async {
            let node = api.get(name).await?;
            if has_shutdown_taint(&node) == is_shut_down {
                return Ok(());
            }
            let patch = json!({
                "metadata": {"resourceVersion": node.metadata.resource_version},
                "spec": {"taints": taints(&node, is_shut_down)},
            });
            api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop)
        });
        match written.await {
            Err(error) if !error.is_not_found() => {
                tracing::error!(node = name, is_shut_down, %error, "failed to write the shutdown taint");
            }
            _ => {}
        }
    }
}

/// The node's taints with the shutdown taint, or without it.
fn taints(node: &Node, is_shut_down: bool) -> Vec<Taint> {
    let all = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let mut taints: Vec<Taint> = all.filter(|taint| !is_shutdown(taint)).cloned().collect();
    if is_shut_down {
        taints.push(Taint { key: SHUTDOWN.into(), effect: NO_SCHEDULE.into(), ..Taint::default() });
    }
    taints
}

fn is_shutdown(taint: &Taint) -> bool {
    taint.key == SHUTDOWN && taint.effect == NO_SCHEDULE
}

fn has_shutdown_taint(node: &Node) -> bool {
    node.spec.iter().flat_map(|spec| spec.taints.iter().flatten()).any(is_shutdown)
}

fn is_ready(node: &Node) -> bool {
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

#[cfg(test)]
mod tests;
