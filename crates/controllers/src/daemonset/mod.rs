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
    Api, DeleteParams, ErrorExt, EventType, Lister, ObjectKey, Outcome, PostParams, Projection,
    RawEvent, Result, View, WorkQueue, spawn_workers,
};
use futures::future::join_all;
use k8s_openapi::Resource;
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::core::v1::{Node, NodeSpec, Pod};
use machinery::ObjectMeta;
use machinery::selector::Selector;

use crate::context::{Context, Descriptor};
use crate::expectations::Expectations;
use crate::owner::{self, Claim};
use crate::pod::Facts;
use plan::{Observed, Plan};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "daemonset-controller",
    account: "daemon-set-controller",
    component: "daemonset-controller",
    start,
};

const WORKERS: usize = 2;
/// At once. Upstream: `BurstReplicas`.
const BURST: usize = 250;

/// What decides whether a node gets a pod.
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

struct Controller {
    context: Context,
    sets: Lister<DaemonSet>,
    pods: Lister<Pod>,
    facts: View<Facts>,
    nodes: View<Place>,
    revisions: Lister<ControllerRevision>,
    queue: WorkQueue<ObjectKey>,
    expectations: Expectations,
}

fn start(context: Context) {
    let sets = context.informers.of::<DaemonSet>();
    let (pods, nodes) = (context.informers.of::<Pod>(), context.informers.of::<Node>());
    let revisions = context.informers.of::<ControllerRevision>();
    owner::index_orphans(&pods);
    let controller = Arc::new(Controller {
        sets: sets.lister(),
        pods: pods.lister(),
        facts: pods.view(),
        nodes: nodes.view(),
        revisions: revisions.lister(),
        queue: WorkQueue::new("daemonset"),
        expectations: Expectations::default(),
        context,
    });
    let this = controller.clone();
    sets.subscribe_raw(move |event| this.queue.add(event.entry().header.key.clone()));
    let this = controller.clone();
    pods.subscribe_raw(move |event| this.pod_event(event));
    let this = controller.clone();
    revisions.subscribe_raw(move |event| {
        let header = &event.entry().header;
        let owner = header.controller().filter(|owner| owner.kind == DaemonSet::KIND);
        let keys = owner.map(|owner| ObjectKey::new(&header.key.namespace, &owner.name));
        keys.into_iter().for_each(|key| this.queue.add(key));
    });
    let this = controller.clone();
    nodes.subscribe(move |event| {
        let facts = |node: &Node| {
            (node.metadata.labels.clone(), node.spec.as_ref().and_then(|spec| spec.taints.clone()))
        };
        let changed = event.old().is_none_or(|old| facts(&old) != facts(event.object()));
        if changed || event.is_deleted() {
            for entry in this.sets.entries(None, &Selector::everything()) {
                this.queue.add(entry.header.key.clone());
            }
        }
    });
    let tasks = controller.context.tasks.clone();
    tasks.clone().spawn("daemonset", async move {
        sets.synced().await;
        nodes.synced().await;
        pods.synced().await;
        revisions.synced().await;
        let queue = controller.queue.clone();
        spawn_workers(&tasks, &queue, WORKERS, move |key| {
            let this = controller.clone();
            async move { this.reconcile(&key).await }
        });
    });
}

impl Controller {
    fn pod_event(&self, event: &RawEvent) {
        let header = &event.entry().header;
        let owner = header.controller().filter(|owner| owner.kind == DaemonSet::KIND);
        let owner = owner.map(|owner| ObjectKey::new(&header.key.namespace, &owner.name));
        let Some(owner) = owner else {
            return;
        };
        match event {
            RawEvent::Applied { old, .. } => {
                if old.is_none() {
                    self.expectations.created(&owner);
                }
                if header.deleting {
                    self.expectations.deleted(&owner, &header.key);
                }
            }
            RawEvent::Deleted(_) => self.expectations.deleted(&owner, &header.key),
        }
        self.queue.add(owner);
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
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        let uid = set.metadata.uid.as_deref().unwrap_or_default();
        let api: Api<Pod> = self.context.client.api(Some(namespace));
        let mut pods = vec![];
        for entry in owner::claimable(&self.pods, &set.metadata) {
            let header = &entry.header;
            match owner::claim(&set.metadata, selector, header) {
                Claim::Keep => {}
                Claim::Adopt => {
                    let sets: Api<DaemonSet> = self.context.client.api(Some(namespace));
                    if !owner::may_adopt(&sets, &set.metadata).await? {
                        continue;
                    }
                    owner::adopt(&api, &header.key.name, &header.uid, &owner::reference(set))
                        .await?;
                }
                Claim::Release => {
                    owner::release(&api, &header.key.name, &header.uid, uid).await?;
                    continue;
                }
                Claim::Ignore => continue,
            }
            pods.extend(self.facts.get(&header.key).filter(|facts| *facts.uid == *header.uid));
        }
        Ok(pods)
    }

    async fn act(&self, key: &ObjectKey, set: &DaemonSet, hash: &str, plan: Plan) -> Result<()> {
        for message in plan.failed {
            self.context.events.event(set, EventType::Warning, "FailedDaemonPod", message);
        }
        if plan.create.is_empty() && plan.delete.is_empty() {
            return Ok(());
        }
        self.expectations.expect_both(key, plan.create.len(), plan.delete.iter().cloned());
        let (mut rest, mut batch) = (plan.create.as_slice(), 1);
        let mut failure = None;
        while !rest.is_empty() && failure.is_none() {
            let (now, later) = rest.split_at(batch.min(rest.len()));
            let results = join_all(now.iter().map(|node| self.create(key, set, hash, node))).await;
            failure = results.into_iter().find_map(Result::err);
            rest = later;
            batch *= 2;
        }
        rest.iter().for_each(|_| self.expectations.created(key));
        let results =
            join_all(plan.delete.iter().map(|victim| self.delete(key, set, victim))).await;
        let deleted: Result<()> = results.into_iter().collect();
        match failure {
            Some(error) if !error.is_namespace_terminating() => Err(error),
            _ => deleted,
        }
    }

    async fn create(&self, key: &ObjectKey, set: &DaemonSet, hash: &str, node: &str) -> Result<()> {
        let pod = plan::pod_for(set, hash, node);
        match self
            .context
            .client
            .api::<Pod>(Some(&key.namespace))
            .create(&PostParams::default(), &pod)
            .await
        {
            Ok(created) => {
                let message = format!("Created pod: {}", created.metadata.name.unwrap_or_default());
                self.context.events.event(set, EventType::Normal, "SuccessfulCreate", message);
                Ok(())
            }
            Err(error) => {
                self.expectations.created(key);
                if !error.is_namespace_terminating() {
                    let message = format!("Error creating: {}", error.text());
                    self.context.events.event(set, EventType::Warning, "FailedCreate", message);
                }
                Err(error)
            }
        }
    }

    async fn delete(&self, key: &ObjectKey, set: &DaemonSet, victim: &ObjectKey) -> Result<()> {
        let api: Api<Pod> = self.context.client.api(Some(&key.namespace));
        match api.delete(&victim.name, &DeleteParams::default()).await {
            Ok(_) => {
                let message = format!("Deleted pod: {}", victim.name);
                self.context.events.event(set, EventType::Normal, "SuccessfulDelete", message);
                Ok(())
            }
            Err(error) => {
                self.expectations.deleted(key, victim);
                if error.is_not_found() {
                    return Ok(());
                }
                let message = format!("Error deleting: {}", error.text());
                self.context.events.event(set, EventType::Warning, "FailedDelete", message);
                Err(error)
            }
        }
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
