//! Job: runs pods until enough have succeeded, or it is clear that they will not.
//!
//! In: Jobs and pods. Out: pods made and removed, their tracking finalizer, `status`.
//! Upstream: `pkg/controller/job`. The decisions are in [`plan`]; this file carries them out in the
//! order that keeps counts exact: status with uids, then finalizers, then counters.
//!
//! Cost: a batch of changes decodes the Job and goes through its pods, which are kept in brief.
//!
//! Deviation: changes of pods are batched for 100 ms, not for a second.

mod failure;
mod indexes;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::metrics::Timer;
use client::{
    Api, ErrorExt, Event, EventType, Lister, ObjectKey, Outcome, Patch, PatchParams, PostParams,
    Projection, RawEvent, Result, Selectors, View, WorkQueue,
};
use futures::future::join_all;
use k8s_openapi::Resource;
use k8s_openapi::api::batch::v1::{Job, JobSpec, JobStatus};
use k8s_openapi::api::core::v1::{
    Container, ContainerStatus, EnvVar, EnvVarSource, ObjectFieldSelector, Pod, PodSpec, PodStatus,
    PodTemplateSpec,
};
use machinery::selector::Selector;
use serde_json::json;

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, Setup, further, on, on_metadata, or_gone, owner_key};
use crate::expectations::Expectations;
use crate::metrics;
use crate::owner::{self, Claim};
use crate::pod;
use crate::pod_control::PodControl;
use crate::replicaset::pod_from;
use failure::Backoff;
pub use plan::is_finished;
use plan::{Acted, Observed, Step};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "job-controller",
    account: "job-controller",
    component: "job-controller",
    queue: "job",
    workers: 5,
    new: Controller::new,
    watches: &[
        &on(|this: &Controller, _, event| this.job_event(event)),
        &on_metadata::<Pod, _, _>(|this: &Controller, _, event| this.pod_event(event)),
        &further(
            |this: &Controller| &this.orphans,
            1,
            |this, key| Box::pin(async move { this.release_orphan(&key).await }),
        ),
    ],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// Changes of pods within this time make one reconcile.
const BATCH: Duration = Duration::from_millis(100);
const CONTROLLER: &str = "kubernetes.io/job-controller";
const INDEX_ENV: &str = "JOB_COMPLETION_INDEX";
/// The maximum length of a generated name without its random end.
const MAX_PREFIX: usize = 58;

struct Controller {
    context: Context,
    jobs: Lister<Job>,
    selectors: Selectors,
    pods: Lister<Pod>,
    briefs: View<Brief>,
    queue: WorkQueue<ObjectKey>,
    /// Pods whose Job is gone or done, but which have its finalizer.
    orphans: WorkQueue<ObjectKey>,
    expectations: Expectations,
    /// Guards the state of each Job; held for a lookup.
    memory: Mutex<HashMap<ObjectKey, Memory>>,
}

/// The state that the caches do not show (yet).
#[derive(Clone, Default)]
struct Memory {
    uid: String,
    /// Uids of pods whose finalizers were removed.
    removed: BTreeSet<String>,
    backoff: Backoff,
    /// The resourceVersion of this controller's last write.
    version: u64,
}

/// The view of a Job's pod. A Job may have thousands of ended pods.
struct Brief(Arc<Pod>);

impl Projection<Pod> for Brief {
    fn of(pod: &Pod) -> Self {
        let spec = pod
            .spec
            .as_ref()
            .map(|spec| PodSpec { node_name: spec.node_name.clone(), ..PodSpec::default() });
        let brief = |statuses: &Option<Vec<ContainerStatus>>| {
            let one = |status: &ContainerStatus| ContainerStatus {
                name: status.name.clone(),
                restart_count: status.restart_count,
                state: status.state.clone(),
                ..ContainerStatus::default()
            };
            statuses.as_ref().map(|all| all.iter().map(one).collect())
        };
        let status = pod.status.as_ref().map(|status| PodStatus {
            phase: status.phase.clone(),
            conditions: status.conditions.clone(),
            container_statuses: brief(&status.container_statuses),
            init_container_statuses: brief(&status.init_container_statuses),
            ..PodStatus::default()
        });
        Self(Arc::new(Pod { metadata: pod.metadata.clone(), spec, status }))
    }

    fn concerns(pod: &Pod) -> bool {
        owner::controller(&pod.metadata).is_some_and(|owner| owner.kind == Job::KIND)
    }
}

/// The pods that a Job may adopt. Pure.
fn selector_of(job: &Job) -> Selector {
    let selector = job.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let parsed = selector.and_then(|one| Selector::from_api(Some(one)).ok());
    parsed.filter(|one| !one.is_everything()).unwrap_or(Selector::nothing())
}

impl Controller {
    fn new(setup: &Setup<ObjectKey>) -> Option<Self> {
        let (jobs, pods) = (setup.informer(), setup.informer());
        owner::index_orphans(&pods);
        Some(Self {
            context: setup.context.clone(),
            selectors: Selectors::of(&jobs, selector_of),
            jobs: jobs.lister(),
            briefs: pods.view(),
            pods: pods.lister(),
            queue: setup.queue.clone(),
            orphans: WorkQueue::new("job_orphan_pod"),
            expectations: Expectations::default(),
            memory: Mutex::default(),
        })
    }

    fn job_event(&self, event: &Event<Job>) {
        let (key, job) = (event.key(), event.object());
        if event.is_deleted() || is_finished(job) {
            self.release_orphans(job);
        }
        let old = event.old().map(|old| old.metadata.generation);
        if old == Some(job.metadata.generation) && !event.is_deleted() {
            self.queue.add_after(key, BATCH);
        } else {
            self.queue.add(key);
        }
    }

    fn pod_event(&self, event: &RawEvent) {
        let header = &event.entry().header;
        let has_finalizer = header.finalizers.iter().any(|one| one == plan::FINALIZER);
        let owner = owner_key::<Job>(header);
        let deleted = matches!(event, RawEvent::Deleted(_));
        if let RawEvent::Applied { old: Some(old), .. } = event {
            let was = owner_key::<Job>(&old.header).filter(|was| Some(was) != owner.as_ref());
            if let Some(was) = was {
                self.seen_released(&was, &header.uid);
                self.queue.add_after(was, BATCH);
            }
        }
        let Some(owner) = owner else {
            if has_finalizer && !deleted && header.controller().is_none() {
                self.orphans.add(header.key.clone());
            }
            if header.controller().is_none() && !deleted && !header.deleting {
                self.wake_adopters(header);
            }
            return;
        };
        self.expectations.seen(&owner, event);
        if deleted || !has_finalizer {
            self.seen_released(&owner, &header.uid);
        }
        if has_finalizer && !deleted {
            let job = self.jobs.get_key(&owner);
            if job.is_none_or(|job| is_finished(&job)) {
                self.orphans.add(header.key.clone());
            }
        }
        self.queue.add_after(owner, BATCH);
    }

    fn wake_adopters(&self, header: &client::Header) {
        for key in self.selectors.matching(&header.key.namespace, &[&header.labels]) {
            self.queue.add_after(key, BATCH);
        }
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, HashMap<ObjectKey, Memory>> {
        self.memory.lock().expect("no panic while held")
    }

    fn seen_released(&self, job: &ObjectKey, uid: &str) {
        if let Some(memory) = self.memory().get_mut(job) {
            memory.removed.remove(uid);
        }
    }

    /// Looks through the pods of a Job that is gone or done for finalizers.
    fn release_orphans(&self, job: &Job) {
        let selector = job.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        let Some(Ok(selector)) = selector.map(|one| Selector::from_api(Some(one))) else {
            return;
        };
        for entry in self.pods.entries(job.metadata.namespace.as_deref(), &selector) {
            if entry.header.finalizers.iter().any(|one| one == plan::FINALIZER) {
                self.orphans.add(entry.header.key.clone());
            }
        }
    }

    async fn release_orphan(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(pod) = self.pods.get_key(key) else {
            return Ok(Outcome::Done);
        };
        if let Some(owner) = owner::controller(&pod.metadata) {
            if owner.kind != Job::KIND || owner.api_version != Job::API_VERSION {
                return Ok(Outcome::Done);
            }
            let job = self.jobs.get(&key.namespace, &owner.name);
            let job = job.filter(|job| job.metadata.uid.as_ref() == Some(&owner.uid));
            if job.is_some_and(|job| is_foreign(&job) || !is_finished(&job)) {
                return Ok(Outcome::Done);
            }
        }
        or_gone(self.release(&pod).await)
    }

    /// Removes the tracking finalizer.
    async fn release(&self, pod: &Pod) -> Result<()> {
        if !plan::has_finalizer(pod) {
            return Ok(());
        }
        let key = ObjectKey::of(&pod.metadata);
        let patch = json!({"metadata": {"$deleteFromPrimitiveList/finalizers": [plan::FINALIZER]}});
        let api: Api<Pod> = self.context.client.api(Some(&key.namespace));
        api.patch(&key.name, &PatchParams::default(), &Patch::Strategic(&patch)).await?;
        if matches!(pod::phase(pod), "Succeeded" | "Failed") {
            // Its headers do not say when a pod ended, so both are counted now.
            metrics::JOB_FINALIZERS.count(&["add"]);
            metrics::JOB_FINALIZERS.count(&["delete"]);
        }
        Ok(())
    }

    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(job) = self.jobs.get_key(key) else {
            self.expectations.forget(key);
            self.memory().remove(key);
            return Ok(Outcome::Done);
        };
        if is_foreign(&job) {
            return Ok(Outcome::Done);
        }
        if is_finished(&job) {
            self.memory().remove(key);
            return Ok(Outcome::Done);
        }
        let Some(spec) = &job.spec else {
            return Ok(Outcome::Done);
        };
        let memory = self.recall(key, &job);
        let version = job.metadata.resource_version.as_deref().unwrap_or_default();
        if version.parse::<u64>().is_ok_and(|version| version < memory.version) {
            // Our own write is on its way into the cache, and brings the key back.
            return Ok(Outcome::Done);
        }
        let mode = spec.completion_mode.as_deref().unwrap_or("NonIndexed");
        if !matches!(mode, "NonIndexed" | "Indexed") {
            let message = "Skipped Job sync because completion mode is unknown";
            self.context.events.event(&*job, EventType::Warning, "UnknownCompletionMode", message);
            return Ok(Outcome::Done);
        }
        let (timer, mut action) = (Timer::start(), RECONCILING);
        let outcome = self.sync(key, &job, spec, &memory, &mut action).await;
        metrics::job_synced(action, mode, outcome.is_ok(), timer);
        outcome
    }

    /// Sets the metrics' name of what it has done.
    async fn sync(
        &self,
        key: &ObjectKey,
        job: &Job,
        spec: &JobSpec,
        memory: &Memory,
        action: &mut &'static str,
    ) -> Result<Outcome> {
        let settled = self.expectations.satisfied(key);
        let pods = self.claim(job).await?;
        let observed = Observed {
            job,
            pods: &pods,
            settled,
            removed: &memory.removed,
            backoff: memory.backoff,
            now: base::clock::now(),
        };
        let mut evaluation = plan::evaluate(&observed, spec);
        *action = match &evaluation.step {
            Step::Create(_) => "pods_created",
            Step::Remove(_) | Step::End(_) => "pods_deleted",
            Step::Nothing | Step::Wait(_) if settled => "tracking",
            Step::Nothing | Step::Wait(_) => RECONCILING,
        };
        let (acted, failure) = self.act(key, job, &evaluation).await;
        for (reason, message) in evaluation.settle(&acted) {
            self.context.events.event(job, EventType::Normal, reason, message);
        }
        let wait = match evaluation.step {
            Step::Wait(wait) => Some(wait),
            _ => None,
        };
        let recheck = [evaluation.recheck, wait].into_iter().flatten().min();
        self.record(key, job, evaluation.track()).await?;
        match (failure, recheck) {
            (Some(error), _) => Err(error),
            (None, Some(delay)) => Ok(Outcome::After(delay.max(BATCH))),
            (None, None) => Ok(Outcome::Done),
        }
    }

    /// The state of this Job, not that of an earlier Job with the same name.
    fn recall(&self, key: &ObjectKey, job: &Job) -> Memory {
        let uid = job.metadata.uid.clone().unwrap_or_default();
        let mut all = self.memory();
        let memory = all.entry(key.clone()).or_default();
        if memory.uid != uid {
            *memory = Memory { uid, ..Memory::default() };
        }
        memory.clone()
    }

    async fn claim(&self, job: &Job) -> Result<Vec<Arc<Pod>>> {
        let namespace = job.metadata.namespace.as_deref().unwrap_or_default();
        let selector = job.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        let Some(Ok(selector)) = selector.map(|one| Selector::from_api(Some(one))) else {
            return Ok(vec![]);
        };
        let uid = job.metadata.uid.as_deref().unwrap_or_default();
        let api: Api<Pod> = self.context.client.api(Some(namespace));
        let mut pods = vec![];
        let mut allowed = None;
        for entry in owner::claimable(&self.pods, &job.metadata) {
            let header = &entry.header;
            match owner::claim(&job.metadata, &selector, header) {
                Claim::Keep => {}
                Claim::Ignore if header.controller().is_some_and(|owner| owner.uid == uid) => {}
                Claim::Ignore => continue,
                Claim::Release => {
                    owner::release(&api, &header.key.name, &header.uid, uid).await?;
                    continue;
                }
                Claim::Adopt => {
                    if allowed.is_none() {
                        let jobs: Api<Job> = self.context.client.api(Some(namespace));
                        allowed = Some(owner::may_adopt(&jobs, &job.metadata).await?);
                    }
                    if allowed == Some(true) {
                        adopt(&api, header, job).await?;
                    }
                    // Seen again with its finalizer.
                    continue;
                }
            }
            let brief = self.briefs.get(&header.key);
            let same = |pod: &Pod| pod.metadata.uid.as_deref() == Some(&*header.uid);
            pods.extend(brief.map(|brief| brief.0.clone()).filter(|pod| same(pod)));
        }
        Ok(pods)
    }

    async fn act(
        &self,
        key: &ObjectKey,
        job: &Job,
        evaluation: &plan::Evaluation<'_>,
    ) -> (Acted, Option<client::Error>) {
        match &evaluation.step {
            Step::Nothing | Step::Wait(_) => (Acted::default(), None),
            Step::End(pods) => self.remove(key, job, pods, false).await,
            Step::Remove(pods) => {
                let keys = pods.iter().map(|pod| ObjectKey::of(&pod.metadata));
                self.expectations.expect_deletions(key, keys);
                self.remove(key, job, pods, true).await
            }
            Step::Create(indexes) => self.create(key, job, indexes, &evaluation.awaiting).await,
        }
    }

    async fn remove(
        &self,
        key: &ObjectKey,
        job: &Job,
        pods: &[Arc<Pod>],
        uncounted: bool,
    ) -> (Acted, Option<client::Error>) {
        let (client, events) = (&self.context.client, &self.context.events);
        let control = PodControl { client, events, owner: job };
        let one = async |pod: &Arc<Pod>| {
            if uncounted {
                self.release(pod).await?;
            }
            control.delete(pod.metadata.name.as_deref().unwrap_or_default()).await
        };
        let results = join_all(pods.iter().map(one)).await;
        let (mut acted, mut failure) = (Acted::default(), None);
        for (pod, result) in pods.iter().zip(results) {
            if let Err(error) = result {
                self.expectations.deleted(key, &ObjectKey::of(&pod.metadata));
                if !error.is_not_found() {
                    failure = Some(error);
                    continue;
                }
            }
            acted.removed += 1;
            acted.removed_ready += i32::from(pod::is_ready(pod));
        }
        (acted, failure)
    }

    /// Batches of 1, 2, 4, …; the rest is not tried after an error.
    async fn create(
        &self,
        key: &ObjectKey,
        job: &Job,
        indexes: &[Option<usize>],
        awaiting: &BTreeMap<usize, Arc<Pod>>,
    ) -> (Acted, Option<client::Error>) {
        self.expectations.expect_creations(key, indexes.len());
        let (client, events) = (&self.context.client, &self.context.events);
        let control = PodControl { client, events, owner: job };
        let (mut acted, mut failure) = (Acted::default(), None);
        let (mut rest, mut batch) = (indexes, 1);
        while !rest.is_empty() && failure.is_none() {
            let (now, later) = rest.split_at(batch.min(rest.len()));
            let pods: Vec<_> = now
                .iter()
                .map(|index| {
                    let replaced = index.and_then(|index| awaiting.get(&index));
                    pod_for(job, *index, replaced.map(|pod| &**pod))
                })
                .collect();
            for result in join_all(pods.iter().map(|pod| control.create(pod))).await {
                match result {
                    Ok(_) => acted.created += 1,
                    Err(error) => {
                        self.expectations.created(key);
                        failure = Some(error);
                    }
                }
            }
            rest = later;
            batch *= 2;
        }
        rest.iter().for_each(|_| self.expectations.created(key));
        // The namespace goes and takes the Job along.
        (acted, failure.filter(|error| !error.is_namespace_terminating()))
    }

    /// The order in which counts stay exact; see [`plan`].
    async fn record(&self, key: &ObjectKey, job: &Job, mut tracked: plan::Tracked) -> Result<()> {
        let mut current = job.clone();
        if tracked.changed {
            current = self.write(key, current, &mut tracked.status).await?;
            for action in &tracked.policy_actions {
                metrics::JOB_FAILURE_POLICY.count(&[action]);
            }
            if let Some(memory) = self.memory().get_mut(key) {
                memory.backoff = tracked.backoff;
            }
        }
        let uids = tracked.release.iter().filter_map(|pod| pod.metadata.uid.clone());
        if let Some(memory) = self.memory().get_mut(key) {
            memory.removed.extend(uids);
        }
        let results = join_all(tracked.release.iter().map(|pod| self.release(pod))).await;
        let mut failure = None;
        for (pod, result) in tracked.release.iter().zip(results) {
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            if let Err(error) = result {
                self.seen_released(key, uid);
                if !error.is_not_found() {
                    failure = Some(error);
                    continue;
                }
            }
            tracked.with_finalizer.remove(uid);
        }
        let (changed, terminal) = tracked.conclude(failure.is_none());
        if changed {
            current = self.write(key, current, &mut tracked.status).await?;
        }
        if let Some(end) = terminal {
            self.announce(&current, &end);
        }
        failure.map_or(Ok(()), Err)
    }

    fn announce(&self, job: &Job, end: &k8s_openapi::api::batch::v1::JobCondition) {
        let events = &self.context.events;
        let result = if end.type_ == "Complete" { "succeeded" } else { "failed" };
        let reason = end.reason.as_deref().unwrap_or_default();
        metrics::JOBS_FINISHED.count(&[mode_of(job), reason, result]);
        if end.type_ == "Complete" {
            let wanted = job.spec.as_ref().and_then(|spec| spec.completions);
            let have = job.status.as_ref().and_then(|status| status.succeeded);
            if wanted.is_some_and(|wanted| have.unwrap_or_default() > wanted) {
                let message = "Too many succeeded pods running after completion count reached";
                events.event(job, EventType::Warning, "TooManySucceededPods", message);
            }
            events.event(job, EventType::Normal, "Completed", "Job completed");
        } else {
            let message = end.message.clone().unwrap_or_default();
            let reason = end.reason.clone().unwrap_or_default();
            events.event(job, EventType::Warning, &reason, message);
        }
    }

    async fn write(&self, key: &ObjectKey, mut job: Job, status: &mut JobStatus) -> Result<Job> {
        let before = job.status.replace(status.clone()).unwrap_or_default();
        let api: Api<Job> = self.context.client.api(Some(&key.namespace));
        let written = api.replace_status(&key.name, &PostParams::default(), &job).await?;
        count_finished_pods(&before, &written);
        let version = written.metadata.resource_version.as_deref().unwrap_or_default();
        if let (Ok(version), Some(memory)) = (version.parse(), self.memory().get_mut(key)) {
            memory.version = version;
        }
        Ok(written)
    }
}

/// The metrics' name of a sync that waits for its own writes.
const RECONCILING: &str = "reconciling";

fn mode_of(job: &Job) -> &str {
    let mode = job.spec.as_ref().and_then(|spec| spec.completion_mode.as_deref());
    mode.unwrap_or("NonIndexed")
}

/// Counts the pods that a write of the status has added. An indexed Job counts its indexes as succeeded.
fn count_finished_pods(before: &JobStatus, job: &Job) {
    let Some(now) = &job.status else { return };
    let counts =
        [("succeeded", now.succeeded, before.succeeded), ("failed", now.failed, before.failed)];
    for (result, now, before) in counts {
        let more = now.unwrap_or_default() - before.unwrap_or_default();
        if more > 0 {
            metrics::JOB_PODS_FINISHED.add(&[mode_of(job), result], f64::from(more));
        }
    }
}

/// Another controller's, by `spec.managedBy`.
fn is_foreign(job: &Job) -> bool {
    let by = job.spec.as_ref().and_then(|spec| spec.managed_by.as_deref());
    by.is_some_and(|by| by != CONTROLLER)
}

/// Adopted pods are tracked from then on.
async fn adopt(api: &Api<Pod>, header: &client::Header, job: &Job) -> Result<()> {
    let patch = json!({"metadata": {
        "uid": *header.uid, "ownerReferences": [owner::reference(job)],
        "finalizers": [plan::FINALIZER],
    }});
    match api.patch(&header.key.name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
        Err(error) if error.is_not_found() => Ok(()),
        done => done.map(drop),
    }
}

/// A pod of the Job's template, for an index if the Job has them. Pure.
fn pod_for(job: &Job, index: Option<usize>, replaced: Option<&Pod>) -> Pod {
    let spec = job.spec.clone().unwrap_or_default();
    let template: &PodTemplateSpec = &spec.template;
    let mut pod = pod_from(Some(template), &job.metadata, owner::reference(job));
    let finalizers = pod.metadata.finalizers.get_or_insert_default();
    if !finalizers.iter().any(|one| one == plan::FINALIZER) {
        finalizers.push(plan::FINALIZER.into());
    }
    let Some(index) = index else { return pod };
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let suffix = format!("-{index}-");
    let kept = name.len().min(MAX_PREFIX - suffix.len());
    pod.metadata.generate_name = Some(format!("{}{suffix}", &name[..kept]));
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(indexes::INDEX.into(), index.to_string());
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(indexes::INDEX.into(), index.to_string());
    if spec.backoff_limit_per_index.is_some() {
        let (failures, ignored) = failure::inherited(job, replaced);
        annotations.insert(failure::FAILURES.into(), failures.to_string());
        if ignored > 0 {
            annotations.insert(failure::IGNORED.into(), ignored.to_string());
        }
    }
    let inner = pod.spec.get_or_insert_default();
    inner.hostname = Some(format!("{name}-{index}"));
    inner.init_containers.iter_mut().flatten().for_each(tell_index);
    inner.containers.iter_mut().for_each(tell_index);
    pod
}

fn tell_index(container: &mut Container) {
    let env = container.env.get_or_insert_default();
    if env.iter().any(|one| one.name == INDEX_ENV) {
        return;
    }
    let path = format!("metadata.labels['{}']", indexes::INDEX);
    env.push(EnvVar {
        name: INDEX_ENV.into(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { field_path: path, api_version: None }),
            ..EnvVarSource::default()
        }),
        value: None,
    });
}
