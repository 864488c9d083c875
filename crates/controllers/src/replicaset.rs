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
    Api, Entry, ErrorExt, Header, Kind, Lister, ObjectKey, Outcome, PostParams, Result, Selectors,
    View,
};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{
    ReplicaSet, ReplicaSetCondition, ReplicaSetSpec, ReplicaSetStatus,
};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use machinery::selector::Selector;
use machinery::{ObjectMeta, Time};

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, own, owned_by};
use crate::expectations::Expectations;
use crate::owner::{self, Claim};
use crate::pod::{self, Availability, Facts, Ready};
use crate::pod_control::PodControl;

pub const DESCRIPTOR: &dyn Row =
    &row::<ReplicaSet>("replicaset-controller", "replicaset-controller", "replicaset");

/// The row of a kind that keeps a number of pods: the controller's name, its account, its queue.
pub const fn row<S: Replicated>(
    name: &'static str,
    account: &'static str,
    queue: &'static str,
) -> Descriptor<Controller<S>> {
    Descriptor {
        name,
        account,
        component: account,
        queue,
        workers: 5,
        new: Controller::new,
        watches: const {
            &[
                &own::<S>(),
                &owned_by::<Pod, S, Controller<S>>()
                    .expected(|this| &this.expectations)
                    .adopted(|this| &this.selectors),
            ]
        },
        reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
    }
}

const BURST: usize = 500;

/// A kind that keeps a number of pods. Upstream: ReplicationControllers are adapted to the
/// ReplicaSet's controller, too.
pub trait Replicated: Kind {
    fn as_replica_set(this: &Arc<Self>) -> Arc<ReplicaSet>;
    fn set_status(&mut self, status: ReplicaSetStatus);
}

impl Replicated for ReplicaSet {
    fn as_replica_set(this: &Arc<Self>) -> Arc<ReplicaSet> {
        this.clone()
    }

    fn set_status(&mut self, status: ReplicaSetStatus) {
        self.status = Some(status);
    }
}

pub struct Controller<S: 'static> {
    context: Context,
    sets: Lister<S>,
    /// The selectors of all sets: whom a pod without a controller concerns.
    selectors: Selectors,
    pods: Lister<Pod>,
    facts: View<Facts>,
    expectations: Expectations,
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

/// The changes of the number of pods, and the new status. Pure.
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
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let (sets, pods) = (setup.informer(), setup.informer());
        owner::index_orphans(&pods);
        Some(Self {
            context: setup.context.clone(),
            selectors: Selectors::of(&sets, selector_of),
            sets: sets.lister(),
            facts: pods.view(),
            pods: pods.lister(),
            expectations: Expectations::default(),
        })
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
                tracing::warn!(%key, %error, "failed to parse the selector of the ReplicaSet");
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
            failure = self.act(key, &original, &set, step).await.err();
        }
        let (status, recheck) = status_of(&set, &pods, failure.as_ref().map(ErrorExt::text), now);
        self.write_status(&original, set.status.as_ref(), status).await?;
        match (failure, recheck) {
            (Some(error), _) => Err(error),
            (None, Some(delay)) => Ok(Outcome::After(delay)),
            (None, None) => Ok(Outcome::Done),
        }
    }

    /// The set's pods, after adopting and releasing. A pod that has finished is not adopted.
    async fn claim(&self, set: &ReplicaSet, selector: &Selector) -> Result<Vec<Owned>> {
        let wanted = |header: &Header, claim| {
            claim != Claim::Adopt || self.facts.get(&header.key).is_some_and(|pod| pod.active)
        };
        let (client, meta) = (&self.context.client, &set.metadata);
        let mine = owner::claim_all::<_, S>(client, &self.pods, meta, selector, wanted).await?;
        let owned = mine.into_iter().filter_map(|entry| {
            let facts = self.facts.get(&entry.header.key)?;
            (*facts.uid == *entry.header.uid).then_some(Owned { entry, facts })
        });
        Ok(owned.collect())
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

    async fn act(&self, key: &ObjectKey, original: &S, set: &ReplicaSet, plan: Plan) -> Result<()> {
        let (client, events) = (&self.context.client, &self.context.events);
        let control = PodControl { client, events, owner: original };
        match plan {
            Plan::Enough => Ok(()),
            Plan::Create(count) => {
                self.expectations.expect_creations(key, count);
                let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref());
                let pod = pod_from(template, &set.metadata, reference::<S>(set));
                control.create_all(&self.expectations, &vec![pod; count]).await
            }
            Plan::Delete(victims) => {
                self.expectations.expect_deletions(key, victims.iter().cloned());
                control.delete_all(&self.expectations, &victims).await
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
