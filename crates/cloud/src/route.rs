//! Routes of the cloud's network to the pods of each node.
//!
//! In: `spec.podCIDRs` of Nodes, the cloud's routes. Out: a route for each pod CIDR, no others within the cluster's
//! ranges; the condition NetworkUnavailable of each node with pod CIDRs.
//!
//! Invariant: a route outside of `--cluster-cidr` is never touched.
//! Cost: every `--route-reconciliation-period` one list of the cloud's routes, compared with all nodes in memory;
//! at most [`AT_ONCE`] routes change at a time. A node whose condition is right costs no write.
//! Upstream: `cloud-provider/controllers/route`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use base::metrics::Timer;
use client::{
    Api, EventRecorder, EventType, Patch, PatchParams, Projection, View, retry_on_conflict,
};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, NodeAddress, ObjectReference};
use serde_json::json;

use crate::manager::{Context, Options, Unable};
use crate::metrics;
use crate::provider::{Provider, Result, Route, Routes};

/// How many routes change together. Upstream: 200.
const AT_ONCE: usize = 200;
/// How many conditions are written together.
const WRITES: usize = 16;

pub fn check(provider: &dyn Provider, options: &Options) -> std::result::Result<(), Unable> {
    if !options.configure_routes {
        return Err(Unable::RoutesAreOff);
    }
    provider.routes().ok_or(Unable::NoRoutes)?;
    match options.cluster_cidrs.is_empty() {
        true => Err(Unable::NoClusterCidr),
        false => Ok(()),
    }
}

pub fn start(context: Context) {
    let informer = context.informers.of::<Node>();
    let this = Controller { nodes: informer.view(), context: context.clone() };
    context.tasks.spawn("node-route-controller", async move {
        informer.synced().await;
        this.run().await;
    });
}

/// The fields of a Node that routes need.
#[derive(Clone, Debug, Default, PartialEq)]
struct Facts {
    name: String,
    uid: String,
    cidrs: Vec<String>,
    addresses: Vec<NodeAddress>,
    /// Status and reason of the condition NetworkUnavailable.
    condition: Option<(String, String)>,
}

impl Projection<Node> for Facts {
    fn of(node: &Node) -> Self {
        let status = node.status.as_ref();
        let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let condition = conditions.iter().find(|one| one.type_ == "NetworkUnavailable");
        Self {
            name: node.metadata.name.clone().unwrap_or_default(),
            uid: node.metadata.uid.clone().unwrap_or_default(),
            cidrs: node.spec.as_ref().and_then(|spec| spec.pod_cidrs.clone()).unwrap_or_default(),
            addresses: status.and_then(|status| status.addresses.clone()).unwrap_or_default(),
            condition: condition
                .map(|one| (one.status.clone(), one.reason.clone().unwrap_or_default())),
        }
    }
}

/// What must happen with the cloud's routes.
#[derive(Debug, Default, PartialEq)]
struct Plan {
    delete: Vec<Route>,
    /// The node's index, and the route.
    create: Vec<(usize, Route)>,
}

struct Controller {
    context: Context,
    nodes: View<Facts>,
}

impl Controller {
    async fn run(&self) {
        let mut ticks = tokio::time::interval(self.context.options.route_reconciliation_period);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let Some(routes) = self.context.provider.routes() else { return };
        loop {
            ticks.tick().await;
            if let Err(error) = self.reconcile(routes).await {
                tracing::error!(%error, "failed to reconcile the routes of nodes");
            }
        }
    }

    async fn reconcile(&self, routes: &dyn Routes) -> Result<()> {
        metrics::ROUTE_SYNCS.count(&[]);
        let options = &self.context.options;
        let present = routes.list(&options.cluster).await?;
        let nodes: Vec<Arc<Facts>> = self.nodes.all().into_iter().map(|(_, facts)| facts).collect();
        let plan = plan(&nodes, &present, &options.cluster_cidrs);
        // Deletions come first: a route that changes is deleted and created.
        let mut deleting = vec![];
        for route in &plan.delete {
            deleting.push(self.delete(routes, route).boxed());
        }
        together(deleting, AT_ONCE).await;
        let mut creating = vec![];
        for (index, route) in &plan.create {
            let node = nodes[*index].clone();
            let create = async move {
                let is_there = self.create(routes, &node, route).await;
                (!is_there).then_some(*index)
            };
            creating.push(create.boxed());
        }
        let failed: HashSet<usize> =
            together(creating, AT_ONCE).await.into_iter().flatten().collect();
        let mut marking = vec![];
        for (index, node) in nodes.iter().enumerate() {
            if !node.cidrs.is_empty() {
                marking.push(self.mark(node, !failed.contains(&index)).boxed());
            }
        }
        together(marking, WRITES).await;
        Ok(())
    }

    async fn delete(&self, routes: &dyn Routes, route: &Route) {
        let Route { name, destination, node, .. } = route;
        match routes.delete(&self.context.options.cluster, route).await {
            Ok(()) => tracing::info!(route = name, destination, node, "deleted the route"),
            Err(error) => {
                tracing::error!(route = name, destination, node, %error, "failed to delete the route");
            }
        }
    }

    /// Returns whether the route exists now.
    async fn create(&self, routes: &dyn Routes, node: &Facts, route: &Route) -> bool {
        let timer = Timer::start();
        let created = routes.create(&self.context.options.cluster, &node.uid, route).await;
        let Err(error) = created else {
            tracing::info!(node = node.name, destination = route.destination, "created the route");
            return true;
        };
        let message = format!(
            "Could not create route {} {} for node {} after {:?}: {error}",
            node.uid,
            route.destination,
            node.name,
            timer.elapsed()
        );
        tracing::error!(node = node.name, destination = route.destination, %error, "failed to create the route");
        warn(&self.context.events, node, &message);
        false
    }

    /// Writes the condition, if it differs.
    async fn mark(&self, node: &Facts, has_routes: bool) {
        let (status, reason, message) = match has_routes {
            true => ("False", "RouteCreated", "RouteController created a route"),
            false => ("True", "NoRouteCreated", "RouteController failed to create a route"),
        };
        let now =
            node.condition.as_ref().map(|(status, reason)| (status.as_str(), reason.as_str()));
        if now == Some((status, reason)) {
            return;
        }
        let time = base::clock::now_seconds().to_string();
        let patch = json!({"status": {"conditions": [{
            "type": "NetworkUnavailable", "status": status, "reason": reason, "message": message,
            "lastTransitionTime": time, "lastHeartbeatTime": time}]}});
        let api: Api<Node> = self.context.client.api(None);
        let patch = Patch::Strategic(patch);
        let params = PatchParams::default();
        let written =
            retry_on_conflict(|| async { api.patch_status(&node.name, &params, &patch).await });
        if let Err(error) = written.await {
            tracing::error!(node = node.name, %error, "failed to write the condition NetworkUnavailable");
        }
    }
}

/// Runs the work, some of it at a time.
async fn together<T: Send>(work: Vec<BoxFuture<'_, T>>, at_once: usize) -> Vec<T> {
    futures::stream::iter(work).buffer_unordered(at_once).collect().await
}

fn warn(events: &EventRecorder, node: &Facts, message: &str) {
    let about = ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Node".into()),
        name: Some(node.name.clone()),
        uid: Some(node.uid.clone()),
        ..ObjectReference::default()
    };
    events.event_about(about, EventType::Warning, "FailedToCreateRoute", message);
}

/// Compares the cloud's routes with the pod CIDRs of nodes.
fn plan(nodes: &[Arc<Facts>], present: &[Route], cluster: &[IpNet]) -> Plan {
    let mut by_node: HashMap<&str, Vec<&Route>> = HashMap::new();
    for route in present.iter().filter(|route| !route.node.is_empty() && !route.is_blackhole) {
        by_node.entry(&route.node).or_default().push(route);
    }
    let mut kept: BTreeMap<(&str, &str), bool> = BTreeMap::new();
    let mut plan = Plan::default();
    for (index, node) in nodes.iter().enumerate() {
        let own = by_node.get(node.name.as_str()).map(Vec::as_slice).unwrap_or_default();
        for cidr in &node.cidrs {
            let found = own.iter().find(|route| route.destination == *cidr);
            let is_kept = found.is_some_and(|route| has_addresses(route, &node.addresses));
            kept.insert((&node.name, cidr), is_kept);
            if !is_kept {
                let route = Route {
                    node: node.name.clone(),
                    addresses: Some(node.addresses.clone()),
                    destination: cidr.clone(),
                    ..Route::default()
                };
                plan.create.push((index, route));
            }
        }
    }
    let is_kept = |route: &Route| {
        !route.is_blackhole
            && kept.get(&(route.node.as_str(), route.destination.as_str())) == Some(&true)
    };
    let unused = present.iter().filter(|route| is_within(route, cluster) && !is_kept(route));
    plan.delete = unused.cloned().collect();
    plan
}

/// Whether a route still has the node's addresses, in any order; most clouds have routes without addresses.
fn has_addresses(route: &Route, addresses: &[NodeAddress]) -> bool {
    route.addresses.as_ref().is_none_or(|of_route| {
        of_route.len() == addresses.len() && addresses.iter().all(|one| of_route.contains(one))
    })
}

/// Whether the route's destination begins or ends in a range of the cluster.
fn is_within(route: &Route, cluster: &[IpNet]) -> bool {
    let Ok(destination) = route.destination.parse::<IpNet>() else {
        tracing::error!(
            route = route.name,
            destination = route.destination,
            "ignored a route: its destination is no CIDR"
        );
        return false;
    };
    let ends = [destination.network(), destination.broadcast()];
    cluster.iter().any(|range| ends.iter().any(|end| range.contains(end)))
}

#[cfg(test)]
mod tests;
