//! ReplicaSet: keeps as many pods as asked.
//!
//! In: ReplicaSets and pods. Out: pod creations and deletions, `status`.
//! Upstream: `pkg/controller/replicaset`: creations in batches of 1, 2, 4, … so that an error (a
//! quota, say) costs one try and not five hundred; at most 500 at once; expectations bridge the
//! cache's lag.
//!
//! Cost of a change of one pod: a look at the [`Facts`] of its own set's pods. Of other pods only those
//! without a controller are looked at. The pods of sibling sets count for a scale-down only.

use std::sync::Arc;
use std::time::Duration;

use client::{
    Api, DeleteParams, Entry, ErrorExt, EventType, Kind, Lister, ObjectKey, Outcome, PostParams,
    RawEvent, Result, Selectors, View, WorkQueue, spawn_workers,
};
use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{
    ReplicaSet, ReplicaSetCondition, ReplicaSetSpec, ReplicaSetStatus,
};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use machinery::selector::Selector;
use machinery::{ObjectMeta, Time};

use crate::context::{Context, Descriptor};
use crate::expectations::Expectations;
use crate::owner::{self, Claim};
use crate::pod::{self, Availability, Facts, Ready};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "replicaset-controller",
    account: "replicaset-controller",
    component: "replicaset-controller",
    start: start::<ReplicaSet>,
};

const BURST: usize = 500;
const WORKERS: usize = 5;

/// A kind that keeps a number of pods. Upstream: ReplicationControllers are adapted to the
/// ReplicaSet's controller, too.
pub trait Replicated: Kind {
    /// Of the queue.
    const QUEUE: &'static str;
    fn as_replica_set(this: &Arc<Self>) -> Arc<ReplicaSet>;
    fn set_status(&mut self, status: ReplicaSetStatus);
}

impl Replicated for ReplicaSet {
    const QUEUE: &'static str = "replicaset";

    fn as_replica_set(this: &Arc<Self>) -> Arc<ReplicaSet> {
        this.clone()
    }

    fn set_status(&mut self, status: ReplicaSetStatus) {
        self.status = Some(status);
    }
}

struct Controller<S> {
    context: Context,
    sets: Lister<S>,
    /// The selectors of all sets: whom a pod without a controller concerns.
    selectors: Selectors,
    pods: Lister<Pod>,
    facts: View<Facts>,
    queue: WorkQueue<ObjectKey>,
    expectations: Expectations,
}

pub fn start<S: Replicated>(context: Context) {
    let (sets, pods) = (context.informers.of::<S>(), context.informers.of::<Pod>());
    owner::index_orphans(&pods);
    let controller = Arc::new(Controller {
        sets: sets.lister(),
        selectors: Selectors::of(&sets, selector_of),
        pods: pods.lister(),
        facts: pods.view(),
        queue: WorkQueue::new(S::QUEUE),
        expectations: Expectations::default(),
        context,
    });
    let this = controller.clone();
    sets.subscribe_raw(move |event| this.queue.add(event.entry().header.key.clone()));
    let this = controller.clone();
    pods.subscribe_raw(move |event| this.pod_event(event));
    let tasks = controller.context.tasks.clone();
    let this = controller.clone();
    tasks.clone().spawn(S::QUEUE, async move {
        sets.synced().await;
        pods.synced().await;
        let queue = this.queue.clone();
        spawn_workers(&tasks, &queue, WORKERS, move |key| {
            let this = this.clone();
            async move { this.reconcile(&key).await }
        });
    });
}

/// A pod of a set.
struct Owned {
    entry: Arc<Entry>,
    facts: Arc<Facts>,
}

/// Whom a set may adopt. Pure.
fn selector_of<S: Replicated>(set: &S) -> Selector {
    let set = S::as_replica_set(&Arc::new(set.clone()));
    let selector = set.spec.as_ref().map(|spec| Selector::from_api(Some(&spec.selector)));
    let usable = selector.and_then(|parsed| parsed.ok()).filter(|one| !one.is_everything());
    usable.unwrap_or(Selector::nothing())
}

/// What to do about the number of pods, and the status it makes. Pure.
#[derive(Debug, PartialEq)]
enum Plan {
    Enough,
    Create(usize),
    Delete(Vec<ObjectKey>),
}

/// `related` is asked only for a scale-down.
fn plan(
    wanted: usize,
    active: &[Arc<Facts>],
    related: impl FnOnce() -> Vec<Arc<Facts>>,
    now: Timestamp,
) -> Plan {
    match active.len() {
        have if have < wanted => Plan::Create((wanted - have).min(BURST)),
        have if have > wanted => {
            let surplus = (have - wanted).min(BURST);
            let victims = pod::choose_victims(active, &related(), surplus, now);
            Plan::Delete(victims.iter().map(|pod| pod.key.clone()).collect())
        }
        _ => Plan::Enough,
    }
}

impl<S: Replicated> Controller<S> {
    /// A pod came, changed or went: tell its controller, or whoever may adopt it.
    fn pod_event(&self, event: &RawEvent) {
        let header = &event.entry().header;
        let owner_of = |header: &client::Header| {
            let owner = header.controller().filter(|owner| owner.kind == S::KIND)?;
            Some(ObjectKey::new(&header.key.namespace, &owner.name))
        };
        let owner = owner_of(header);
        match event {
            RawEvent::Deleted(_) => {
                if let Some(owner) = &owner {
                    self.expectations.deleted(owner, &header.key);
                }
            }
            RawEvent::Applied { old, .. } => {
                let was = old.as_ref().and_then(|old| owner_of(&old.header));
                if was != owner {
                    was.into_iter().for_each(|was| self.queue.add(was));
                }
                if let Some(owner) = &owner {
                    if old.is_none() {
                        self.expectations.created(owner);
                    }
                    if header.deleting {
                        self.expectations.deleted(owner, &header.key);
                    }
                }
            }
        }
        match owner {
            Some(owner) => self.queue.add(owner),
            None if header.controller().is_none() && !header.deleting => self.wake_adopters(header),
            None => {}
        }
    }

    fn wake_adopters(&self, header: &client::Header) {
        for key in self.selectors.matching(&header.key.namespace, &[&header.labels]) {
            self.queue.add(key);
        }
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(original) = self.sets.get_key(key) else {
            self.expectations.forget(key);
            return Ok(Outcome::Done);
        };
        let set = S::as_replica_set(&original);
        let Some(spec) = &set.spec else {
            return Ok(Outcome::Done);
        };
        let selector = match Selector::from_api(Some(&spec.selector)) {
            Ok(selector) => selector,
            Err(error) => {
                tracing::warn!(%key, %error, "a ReplicaSet's selector is invalid");
                return Ok(Outcome::Done);
            }
        };
        let settled = self.expectations.satisfied(key);
        let pods = self.claim(&set, &selector).await?;
        let active: Vec<_> =
            pods.iter().map(|pod| &pod.facts).filter(|pod| pod.active).cloned().collect();
        let now = base::clock::now();
        let wanted = spec.replicas.unwrap_or(1).max(0) as usize;
        let mut failure = None;
        if settled && set.metadata.deletion_timestamp.is_none() {
            let step = plan(wanted, &active, || self.related(&set), now);
            failure = self.act(key, &set, step).await.err();
        }
        let (status, recheck) = status_of(&set, &pods, failure.as_ref().map(ErrorExt::text), now);
        self.write_status(&original, set.status.as_ref(), status).await?;
        match (failure, recheck) {
            (Some(error), _) => Err(error),
            (None, Some(delay)) => Ok(Outcome::After(delay)),
            (None, None) => Ok(Outcome::Done),
        }
    }

    /// The set's pods, after adopting and releasing.
    async fn claim(&self, set: &ReplicaSet, selector: &Selector) -> Result<Vec<Owned>> {
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        let uid = set.metadata.uid.as_deref().unwrap_or_default();
        let api: Api<Pod> = self.context.client.api(Some(namespace));
        let mut pods = vec![];
        let mut allowed = None;
        for entry in owner::claimable(&self.pods, &set.metadata) {
            let header = &entry.header;
            match owner::claim(&set.metadata, selector, header) {
                Claim::Keep => {}
                Claim::Release => {
                    owner::release(&api, &header.key.name, &header.uid, uid).await?;
                    continue;
                }
                Claim::Adopt => {
                    if !self.facts.get(&header.key).is_some_and(|pod| pod.active) {
                        continue;
                    }
                    if allowed.is_none() {
                        let sets: Api<S> = self.context.client.api(Some(namespace));
                        allowed = Some(owner::may_adopt(&sets, &set.metadata).await?);
                    }
                    if allowed != Some(true) {
                        continue;
                    }
                    let reference = reference::<S>(set);
                    match owner::adopt(&api, &header.key.name, &header.uid, &reference).await {
                        Err(error) if error.is_not_found() => continue,
                        done => done?,
                    }
                }
                // What a set that goes has, it has until the end.
                Claim::Ignore if header.controller().is_some_and(|owner| owner.uid == uid) => {}
                Claim::Ignore => continue,
            }
            let facts = self.facts.get(&header.key).filter(|facts| *facts.uid == *header.uid);
            pods.extend(facts.map(|facts| Owned { entry: entry.clone(), facts }));
        }
        Ok(pods)
    }

    /// Active pods of all sets with the same controller (the Deployment's others).
    fn related(&self, set: &ReplicaSet) -> Vec<Arc<Facts>> {
        let mut uids = vec![Arc::from(set.metadata.uid.as_deref().unwrap_or_default())];
        if let Some(owner) = owner::controller(&set.metadata) {
            let siblings = self.sets.entries_by_owner(&owner.uid);
            uids = siblings.iter().map(|one| one.header.uid.clone()).collect();
        }
        let pods = uids.iter().flat_map(|uid| self.pods.entries_by_owner(uid));
        pods.filter_map(|pod| self.facts.get(&pod.header.key)).collect()
    }

    async fn act(&self, key: &ObjectKey, set: &ReplicaSet, plan: Plan) -> Result<()> {
        match plan {
            Plan::Enough => Ok(()),
            Plan::Create(count) => {
                self.expectations.expect_creations(key, count);
                self.create(key, set, count).await
            }
            Plan::Delete(victims) => {
                self.expectations.expect_deletions(key, victims.iter().cloned());
                let results =
                    join_all(victims.iter().map(|victim| self.delete(key, set, victim))).await;
                results.into_iter().collect()
            }
        }
    }

    /// Batches of 1, 2, 4, …; the rest is not tried after an error.
    async fn create(&self, key: &ObjectKey, set: &ReplicaSet, count: usize) -> Result<()> {
        let (mut left, mut batch) = (count, 1);
        while left > 0 {
            let size = batch.min(left);
            let results = join_all((0..size).map(|_| self.create_pod(key, set))).await;
            left -= size;
            if let Some(error) = results.into_iter().find_map(Result::err) {
                (0..left).for_each(|_| self.expectations.created(key));
                // The namespace goes and takes the set along.
                return if error.is_namespace_terminating() { Ok(()) } else { Err(error) };
            }
            batch *= 2;
        }
        Ok(())
    }

    async fn create_pod(&self, key: &ObjectKey, set: &ReplicaSet) -> Result<()> {
        let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref());
        let pod = pod_from(template, &set.metadata, reference::<S>(set));
        match self
            .context
            .client
            .api::<Pod>(Some(&key.namespace))
            .create(&PostParams::default(), &pod)
            .await
        {
            Ok(created) => {
                let name = created.metadata.name.unwrap_or_default();
                self.event(
                    set,
                    EventType::Normal,
                    "SuccessfulCreate",
                    format!("Created pod: {name}"),
                );
                Ok(())
            }
            Err(error) => {
                self.expectations.created(key);
                if !error.is_namespace_terminating() {
                    let message = format!("Error creating: {}", error.text());
                    self.event(set, EventType::Warning, "FailedCreate", message);
                }
                Err(error)
            }
        }
    }

    async fn delete(&self, key: &ObjectKey, set: &ReplicaSet, victim: &ObjectKey) -> Result<()> {
        let api: Api<Pod> = self.context.client.api(Some(&key.namespace));
        match api.delete(&victim.name, &DeleteParams::default()).await {
            Ok(_) => {
                let message = format!("Deleted pod: {}", victim.name);
                self.event(set, EventType::Normal, "SuccessfulDelete", message);
                Ok(())
            }
            Err(error) => {
                self.expectations.deleted(key, victim);
                if error.is_not_found() {
                    return Ok(());
                }
                self.event(
                    set,
                    EventType::Warning,
                    "FailedDelete",
                    format!("Error deleting: {}", error.text()),
                );
                Err(error)
            }
        }
    }

    async fn write_status(
        &self,
        set: &S,
        known: Option<&ReplicaSetStatus>,
        status: ReplicaSetStatus,
    ) -> Result<()> {
        let name = set.metadata().name.as_deref().unwrap_or_default();
        let api: Api<S> = self.context.client.api(set.metadata().namespace.as_deref());
        let mut updated = set.clone();
        updated.set_status(status.clone());
        // Compared as the kind stores it: not every kind has every field.
        if S::as_replica_set(&Arc::new(updated.clone())).status.as_ref() == known {
            return Ok(());
        }
        for attempt in 0..2 {
            updated.set_status(status.clone());
            match api.replace_status(name, &PostParams::default(), &updated).await {
                Err(error) if error.is_conflict() && attempt == 0 => match api.get_opt(name).await?
                {
                    Some(fresh) => updated = fresh,
                    None => return Ok(()),
                },
                Err(error) if error.is_not_found() => return Ok(()),
                done => return done.map(drop),
            }
        }
        Ok(())
    }

    fn event(&self, set: &ReplicaSet, kind: EventType, reason: &str, message: String) {
        if let Some(original) = self.sets.get_key(&ObjectKey::of(&set.metadata)) {
            self.context.events.event(&*original, kind, reason, message);
        }
    }
}

fn reference<S: Replicated>(set: &ReplicaSet) -> machinery::OwnerReference {
    owner::reference_as(S::API_VERSION, S::KIND, &set.metadata)
}

/// A pod as a template says, controlled by `owner`. Pure. Upstream: `GetPodFromTemplate`.
pub fn pod_from(
    template: Option<&PodTemplateSpec>,
    parent: &ObjectMeta,
    owner: machinery::OwnerReference,
) -> Pod {
    let template = template.cloned().unwrap_or_default();
    let meta = template.metadata.unwrap_or_default();
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", parent.name.as_deref().unwrap_or_default())),
            namespace: parent.namespace.clone(),
            labels: meta.labels,
            annotations: meta.annotations,
            finalizers: meta.finalizers,
            owner_references: Some(vec![owner]),
            ..Default::default()
        },
        spec: template.spec,
        status: None,
    }
}

/// The status that these pods make, and when a ready pod becomes available. Pure.
fn status_of(
    set: &ReplicaSet,
    pods: &[Owned],
    failure: Option<String>,
    now: Timestamp,
) -> (ReplicaSetStatus, Option<Duration>) {
    let empty = ReplicaSetSpec::default();
    let spec = set.spec.as_ref().unwrap_or(&empty);
    let template = spec.template.as_ref().and_then(|template| template.metadata.as_ref());
    let labels = template.and_then(|meta| meta.labels.clone()).unwrap_or_default();
    let template_labels = Selector::from_map(&labels);
    let min_ready = Duration::from_secs(spec.min_ready_seconds.unwrap_or(0).max(0) as u64);
    let (mut total, mut labeled, mut ready, mut available, mut terminating) = (0, 0, 0, 0, 0);
    let mut recheck: Option<Duration> = None;
    for pod in pods {
        terminating += i32::from(pod.facts.terminating);
        if !pod.facts.active {
            continue;
        }
        total += 1;
        labeled += i32::from(template_labels.matches_pairs(&pod.entry.header.labels));
        ready += i32::from(pod.facts.ready != Ready::No);
        match pod.facts.ready.availability(min_ready, now) {
            Availability::Yes => available += 1,
            Availability::No => {}
            Availability::In(rest) => recheck = Some(recheck.map_or(rest, |known| known.min(rest))),
        }
    }
    let wanted = spec.replicas.unwrap_or(1);
    let old = set.status.clone().unwrap_or_default();
    let status = ReplicaSetStatus {
        replicas: total,
        fully_labeled_replicas: some_if_positive(labeled),
        ready_replicas: some_if_positive(ready),
        available_replicas: some_if_positive(available),
        terminating_replicas: Some(terminating),
        observed_generation: set.metadata.generation,
        conditions: conditions_of(old.conditions, failure, total < wanted, now),
    };
    (status, recheck)
}

fn conditions_of(
    old: Option<Vec<ReplicaSetCondition>>,
    failure: Option<String>,
    too_few: bool,
    now: Timestamp,
) -> Option<Vec<ReplicaSetCondition>> {
    const FAILURE: &str = "ReplicaFailure";
    let mut all = old.unwrap_or_default();
    let known = all.iter().any(|condition| condition.type_ == FAILURE);
    match failure {
        Some(message) if !known => all.push(ReplicaSetCondition {
            type_: FAILURE.into(),
            status: "True".into(),
            reason: Some(if too_few { "FailedCreate" } else { "FailedDelete" }.into()),
            message: Some(message),
            last_transition_time: Some(Time(seconds(now))),
        }),
        Some(_) => {}
        None => all.retain(|condition| condition.type_ != FAILURE),
    }
    (!all.is_empty()).then_some(all)
}

/// As `metav1.Time` is written.
pub fn seconds(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

/// Go leaves zeros out.
pub fn some_if_positive(count: i32) -> Option<i32> {
    (count > 0).then_some(count)
}
