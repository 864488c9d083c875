//! DaemonSet: one pod on every node that fits.
//!
//! In: DaemonSets, nodes, pods, revisions. Out: pods created and deleted, revisions, `status`.
//! Upstream: `pkg/controller/daemon`: pods are pinned to their node by node affinity and bound by
//! the scheduler; failed pods are replaced with backoff; updates delete old pods within
//! `maxUnavailable`, or start new ones within `maxSurge`.
//!
//! Cost: a change of a set or of one of its pods goes through the nodes and the set's pods by small facts and
//! decodes the set. A node's new labels or taints wake all sets; its heartbeats wake none.

mod plan;
mod revision;

use std::collections::BTreeSet;
use std::sync::Arc;

use client::{
    Api, DeleteParams, ErrorExt, Event, EventType, Lister, ObjectKey, Outcome, PostParams,
    Projection, Result, Selectors, View, WorkQueue,
};
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::core::v1::{Node, NodeSpec, Pod};
use machinery::ObjectMeta;
use machinery::selector::Selector;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, on, own, owned_by};
use crate::expectations::Expectations;
use crate::owner;
use crate::pod::Facts;
use crate::pod_control::PodControl;
use plan::{Demands, Observed, Plan};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "daemonset-controller",
    account: "daemon-set-controller",
    component: "daemonset-controller",
    queue: "daemonset",
    workers: 2,
    new: Controller::new,
    watches: &[
        &own::<DaemonSet>(),
        &owned_by::<Pod, DaemonSet, _>()
            .expected(|this: &Controller| &this.expectations)
            .adopted(|this: &Controller| &this.selectors),
        &owned_by::<ControllerRevision, DaemonSet, _>(),
        &on(Controller::node_event),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// At once. Upstream: `BurstReplicas`.
const BURST: usize = 250;

/// The fields of a node that decide whether it gets a pod.
struct Place(Arc<Node>);

impl Projection<Node> for Place {
    fn of(node: &Node) -> Self {
        let spec = node.spec.as_ref().map(|spec| NodeSpec {
            taints: spec.taints.clone(),
            unschedulable: spec.unschedulable,
            ..NodeSpec::default()
        });
        let metadata = ObjectMeta {
            name: node.metadata.name.clone(),
            labels: node.metadata.labels.clone(),
            ..ObjectMeta::default()
        };
        Self(Arc::new(Node { metadata, spec, status: None }))
    }
}

/// The pods that a set may adopt. Pure.
fn selector_of(set: &DaemonSet) -> Selector {
    let selector = set.spec.as_ref().map(|spec| Selector::from_api(Some(&spec.selector)));
    let usable = selector.and_then(|parsed| parsed.ok()).filter(|one| !one.is_everything());
    usable.unwrap_or(Selector::nothing())
}

struct Controller {
    context: Context,
    sets: Lister<DaemonSet>,
    selectors: Selectors,
    demands: View<Demands>,
    pods: Lister<Pod>,
    facts: View<Facts>,
    nodes: View<Place>,
    revisions: Lister<ControllerRevision>,
    expectations: Expectations,
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let (sets, pods) = (setup.informer(), setup.informer());
        owner::index_orphans(&pods);
        Some(Self {
            context: setup.context.clone(),
            selectors: Selectors::of(&sets, selector_of),
            demands: sets.view(),
            sets: sets.lister(),
            facts: pods.view(),
            pods: pods.lister(),
            nodes: setup.view::<Node, _>(),
            revisions: setup.lister(),
            expectations: Expectations::default(),
        })
    }

    /// Wakes the sets for which the node's answer changes.
    fn node_event(&self, queue: &WorkQueue<ObjectKey>, event: &Event<Node>) {
        let old = event.old();
        let facts = |node: &Node| {
            (node.metadata.labels.clone(), node.spec.as_ref().and_then(|spec| spec.taints.clone()))
        };
        let new = event.object();
        if !event.is_deleted() && old.as_ref().is_some_and(|old| facts(old) == facts(new)) {
            return;
        }
        const NOT_THERE: (bool, bool) = (false, false);
        for (key, demands) in self.demands.all() {
            let before = old.as_ref().map_or(NOT_THERE, |old| demands.fit(old));
            let after = if event.is_deleted() { NOT_THERE } else { demands.fit(new) };
            if before != after {
                queue.add(key);
            }
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(set) = self.sets.get_key(key) else {
            self.expectations.forget(key);
            return Ok(Outcome::Done);
        };
        let Some(spec) = set.spec.as_ref().filter(|_| set.metadata.deletion_timestamp.is_none())
        else {
            return Ok(Outcome::Done);
        };
        let selector = Selector::from_api(Some(&spec.selector)).unwrap_or(Selector::nothing());
        if selector.is_everything() {
            let message =
                "This daemon set is selecting all pods. A non-empty selector is required.";
            self.context.events.event(&*set, EventType::Warning, "SelectingAll", message);
            return Ok(Outcome::Done);
        }
        let pods = self.claim(&set, &selector).await?;
        let hash = self.sync_revisions(&set, &pods).await?;
        let settled = self.expectations.satisfied(key);
        let now = base::clock::now();
        let observed = Observed {
            set: &set,
            pods: &pods,
            nodes: &self.nodes.all().iter().map(|(_, node)| node.0.clone()).collect::<Vec<_>>(),
            hash: &hash,
            now,
        };
        let (mut plan, status) = plan::plan(&observed);
        let mut failure = None;
        if settled {
            plan.create.truncate(BURST);
            plan.delete.truncate(BURST);
            failure = self.act(key, &set, &hash, plan).await.err();
        }
        let recheck = status.recheck;
        if set.status.as_ref() != Some(&status.status) {
            let mut updated = (*set).clone();
            updated.status = Some(status.status);
            let api: Api<DaemonSet> = self.context.client.api(Some(&key.namespace));
            match api.replace_status(&key.name, &PostParams::default(), &updated).await {
                Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                Err(error) => failure = failure.or(Some(error)),
                Ok(_) => {}
            }
        }
        match (failure, recheck) {
            (Some(error), _) => Err(error),
            (None, Some(delay)) => Ok(Outcome::After(delay)),
            (None, None) => Ok(Outcome::Done),
        }
    }

    async fn claim(&self, set: &DaemonSet, selector: &Selector) -> Result<Vec<Arc<Facts>>> {
        let (client, meta) = (&self.context.client, &set.metadata);
        let mine =
            owner::claim_all::<_, DaemonSet>(client, &self.pods, meta, selector, |_, _| true);
        let facts = mine.await?.into_iter().filter_map(|entry| {
            let facts = self.facts.get(&entry.header.key)?;
            (*facts.uid == *entry.header.uid).then_some(facts)
        });
        Ok(facts.collect())
    }

    async fn act(&self, key: &ObjectKey, set: &DaemonSet, hash: &str, plan: Plan) -> Result<()> {
        for message in plan.failed {
            self.context.events.event(set, EventType::Warning, "FailedDaemonPod", message);
        }
        if plan.create.is_empty() && plan.delete.is_empty() {
            return Ok(());
        }
        self.expectations.expect_both(key, plan.create.len(), plan.delete.iter().cloned());
        let (client, events) = (&self.context.client, &self.context.events);
        let control = PodControl { client, events, owner: set };
        let pods = plan.create.iter().map(|node| plan::pod_for(set, hash, node));
        let pods: Vec<Pod> = pods.collect();
        let created = control.create_all(&self.expectations, &pods).await;
        created.and(control.delete_all(&self.expectations, &plan.delete).await)
    }

    /// Writes the revision of the current template, drops old ones; returns the current hash.
    async fn sync_revisions(&self, set: &DaemonSet, pods: &[Arc<Facts>]) -> Result<String> {
        let uid = set.metadata.uid.as_deref().unwrap_or_default();
        let known = self.revisions.by_owner(uid);
        let hashes: BTreeSet<&str> =
            pods.iter().filter_map(|pod| pod.revision.as_deref()).collect();
        let plan = revision::plan(set, &known, &hashes);
        let api: Api<ControllerRevision> =
            self.context.client.api(set.metadata.namespace.as_deref());
        if let Some(create) = plan.create {
            match api.create(&PostParams::default(), &create).await {
                // Ours that the cache does not show yet: the name is the template's hash.
                Err(error) if error.is_already_exists() => {}
                done => drop(done?),
            }
        }
        for update in plan.update {
            let name = update.metadata.name.clone().unwrap_or_default();
            api.replace(&name, &PostParams::default(), &update).await?;
        }
        for name in plan.delete {
            match api.delete(&name, &DeleteParams::default()).await {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        Ok(plan.hash)
    }
}
