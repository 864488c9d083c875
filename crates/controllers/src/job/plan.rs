//! The next actions of a Job. Pure.
//!
//! ```text
//! evaluate(observed) → Evaluation { step, … }     counts, end conditions, pods to make or remove
//!      act(step) by the reconcile                  → Acted
//! Evaluation::settle(acted)                        what that changes: completion, suspension
//! Evaluation::track()                              pods counted into status.uncountedTerminatedPods
//!      status written, finalizers removed
//! conclude(…)                                      counters moved, terminal condition
//! ```
//!
//! Invariant: a pod is counted in `succeeded` or `failed` exactly once: its uid is in the stored
//! status before its finalizer goes, and leaves the list when the finalizer is known to be gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobCondition, JobSpec, JobStatus, UncountedTerminatedPods};
use k8s_openapi::api::core::v1::Pod;
use machinery::Time;

use super::failure::{self, Backoff};
use super::indexes::{Intervals, index_of};
use crate::pod;
use crate::replicaset::{seconds, some_if_positive};

pub const FINALIZER: &str = "batch.kubernetes.io/job-tracking";
/// Made or removed in one go.
const BURST: usize = 500;
/// Keeps the list of uids below some 20 KB.
const MAX_UNCOUNTED: usize = 500;

pub struct Observed<'a> {
    pub job: &'a Job,
    pub pods: &'a [Arc<Pod>],
    /// The cache shows all pods that were made and removed.
    pub settled: bool,
    /// Uids of pods whose finalizer is gone, though the cache still shows it.
    pub removed: &'a BTreeSet<String>,
    pub backoff: Backoff,
    pub now: Timestamp,
}

#[derive(Clone, Debug, Default)]
pub enum Step {
    #[default]
    Nothing,
    /// The Job ends: these pods go, and are counted.
    End(Vec<Arc<Pod>>),
    /// Too many: these pods go and count for nothing.
    Remove(Vec<Arc<Pod>>),
    /// Pods to make, with their index if the Job is indexed.
    Create(Vec<Option<usize>>),
    /// Until failed pods may be replaced.
    Wait(Duration),
}

/// The result of a step.
#[derive(Debug, Default)]
pub struct Acted {
    pub created: i32,
    pub removed: i32,
    pub removed_ready: i32,
}

pub struct Evaluation<'a> {
    observed: &'a Observed<'a>,
    spec: &'a JobSpec,
    pub status: JobStatus,
    pub step: Step,
    pub backoff: Backoff,
    /// For the deadline.
    pub recheck: Option<Duration>,
    /// The end that is near, once all pods are counted.
    pub finished: Option<JobCondition>,
    /// Whether pods were managed: only then suspension is reported.
    managed: bool,
    active: Vec<Arc<Pod>>,
    active_count: i32,
    ready: i32,
    terminating: i32,
    succeeded: i32,
    before: Intervals,
    done: Intervals,
    failed_indexes: Option<Intervals>,
    /// By index: the failed pod whose successor is to come.
    pub awaiting: BTreeMap<usize, Arc<Pod>>,
    /// The actions of the failure policy's rules that pods matched which are counted now.
    policy_actions: Vec<String>,
    changed: bool,
}

pub fn is_indexed(spec: &JobSpec) -> bool {
    spec.completion_mode.as_deref() == Some("Indexed")
}

pub fn is_suspended(spec: &JobSpec) -> bool {
    spec.suspend == Some(true)
}

pub fn has_finalizer(pod: &Pod) -> bool {
    pod.metadata.finalizers.iter().flatten().any(|one| one == FINALIZER)
}

fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

fn find<'a>(status: &'a JobStatus, kind: &str) -> Option<&'a JobCondition> {
    status.conditions.iter().flatten().find(|one| one.type_ == kind && one.status == "True")
}

pub fn is_finished(job: &Job) -> bool {
    let status = job.status.as_ref();
    status.is_some_and(|status| {
        find(status, "Complete").is_some() || find(status, "Failed").is_some()
    })
}

fn condition(
    kind: &str,
    status: &str,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> JobCondition {
    JobCondition {
        type_: kind.into(),
        status: status.into(),
        reason: Some(reason.into()).filter(|text: &String| !text.is_empty()),
        message: Some(message.into()).filter(|text: &String| !text.is_empty()),
        last_probe_time: Some(Time(seconds(now))),
        last_transition_time: Some(Time(seconds(now))),
    }
}

/// Adds or changes a condition; one that never was is not reported as false.
fn ensure(status: &mut JobStatus, wanted: JobCondition) -> bool {
    let all = status.conditions.get_or_insert_default();
    let changed = match all.iter_mut().find(|one| one.type_ == wanted.type_) {
        Some(known)
            if known.status == wanted.status
                && known.reason == wanted.reason
                && known.message == wanted.message =>
        {
            false
        }
        Some(known) => {
            *known = wanted;
            true
        }
        None if wanted.status != "False" => {
            all.push(wanted);
            true
        }
        None => false,
    };
    status.conditions.take_if(|all| all.is_empty());
    changed
}

pub fn evaluate<'a>(observed: &'a Observed<'a>, spec: &'a JobSpec) -> Evaluation<'a> {
    let status = observed.job.status.clone().unwrap_or_default();
    let active: Vec<_> = observed.pods.iter().filter(|pod| pod::is_active(pod)).cloned().collect();
    let count = |test: fn(&Pod) -> bool, pods: &[Arc<Pod>]| {
        pods.iter().filter(|pod| test(pod)).count() as i32
    };
    let mut this = Evaluation {
        observed,
        spec,
        step: Step::Nothing,
        backoff: observed.backoff,
        recheck: None,
        finished: None,
        managed: false,
        active_count: active.len() as i32,
        ready: count(pod::is_ready, &active),
        terminating: count(pod::is_terminating, observed.pods),
        active,
        succeeded: 0,
        before: Intervals::default(),
        done: Intervals::default(),
        failed_indexes: None,
        awaiting: BTreeMap::new(),
        policy_actions: vec![],
        changed: false,
        status,
    };
    this.status.uncounted_terminated_pods.get_or_insert_default();
    let failed = this.count();
    if this.status.start_time.is_none() && !is_suspended(spec) {
        this.status.start_time = Some(Time(seconds(observed.now)));
    }
    this.finished = this.earlier_end().or_else(|| this.failure(failed));
    if is_indexed(spec) {
        this.count_indexes();
    }
    if this.finished.is_some() {
        this.step = Step::End(this.active.clone());
    } else if observed.settled && observed.job.metadata.deletion_timestamp.is_none() {
        this.managed = true;
        this.step = this.manage();
    }
    this
}

impl Evaluation<'_> {
    fn completions(&self) -> usize {
        self.spec.completions.unwrap_or_default().max(0) as usize
    }

    fn uncounted(&self) -> UncountedTerminatedPods {
        self.status.uncounted_terminated_pods.clone().unwrap_or_default()
    }

    /// Pods that were not counted before and have, in an indexed Job, an index that it knows.
    fn uncounted_pods(&self) -> impl Iterator<Item = &Arc<Pod>> {
        let (indexed, completions) = (is_indexed(self.spec), self.spec.completions);
        self.observed.pods.iter().filter(move |pod| {
            has_finalizer(pod)
                && !self.observed.removed.contains(uid(pod))
                && (!indexed || index_of(pod, completions).is_some())
        })
    }

    /// Counts ended pods; returns how many failed.
    fn count(&mut self) -> i32 {
        let known = self.uncounted();
        let listed = |list: &Option<Vec<String>>, pod: &Pod| {
            list.iter().flatten().any(|one| one == uid(pod))
        };
        let policy = self.spec.pod_failure_policy.as_ref();
        let all: Vec<_> = self.uncounted_pods().cloned().collect();
        let succeeded: Vec<&Pod> = all
            .iter()
            .filter(|pod| pod::phase(pod) == "Succeeded" && !listed(&known.succeeded, pod))
            .map(|pod| &**pod)
            .collect();
        let failed: Vec<&Pod> = all
            .iter()
            .filter(|pod| failure::is_failed(pod, self.observed.job) && !listed(&known.failed, pod))
            .map(|pod| &**pod)
            .collect();
        self.backoff = self.observed.backoff.after(&succeeded, &failed);
        let length = |list: &Option<Vec<String>>| list.as_ref().map_or(0, Vec::len) as i32;
        let counted = failed.iter().filter(|pod| !failure::judge(policy, pod).ignored).count();
        self.succeeded = self.status.succeeded.unwrap_or_default()
            + succeeded.len() as i32
            + length(&known.succeeded);
        self.status.failed.unwrap_or_default() + counted as i32 + length(&known.failed)
    }

    /// An end that was decided in an earlier reconcile stands.
    fn earlier_end(&self) -> Option<JobCondition> {
        if let Some(met) = find(&self.status, "SuccessCriteriaMet") {
            return Some(met.clone());
        }
        find(&self.status, "FailureTarget").map(|target| self.failed_for(target))
    }

    fn failed_for(&self, target: &JobCondition) -> JobCondition {
        let reason = target.reason.as_deref().unwrap_or_default();
        let message = target.message.as_deref().unwrap_or_default();
        condition("Failed", "True", reason, message, self.observed.now)
    }

    fn failure(&mut self, failed: i32) -> Option<JobCondition> {
        let (job, spec, now) = (self.observed.job, self.spec, self.observed.now);
        let target = |reason: &str, message: &str| {
            Some(condition("FailureTarget", "True", reason, message, now))
        };
        let policy = spec.pod_failure_policy.as_ref();
        let mut failed_pods = self.observed.pods.iter().filter(|pod| failure::is_failed(pod, job));
        let doomed = failed_pods.find_map(|pod| failure::judge(policy, pod).fails_job);
        if let Some(message) = doomed {
            return target("PodFailurePolicy", &message);
        }
        if failed > spec.backoff_limit.unwrap_or(6)
            || failure::restarts_exceed_limit(job, self.observed.pods)
        {
            return target("BackoffLimitExceeded", "Job has reached the specified backoff limit");
        }
        let deadline = spec.active_deadline_seconds.filter(|_| !is_suspended(spec))?;
        let started = self.status.start_time.as_ref()?.0;
        let passed = Duration::try_from(now.duration_since(started)).unwrap_or_default();
        let allowed = Duration::from_secs(deadline.max(0) as u64);
        if passed >= allowed {
            return target("DeadlineExceeded", "Job was active longer than specified deadline");
        }
        self.recheck = Some(allowed - passed);
        None
    }

    fn count_indexes(&mut self) {
        let (job, spec, now) = (self.observed.job, self.spec, self.observed.now);
        let completions = self.completions();
        let text = self.status.completed_indexes.as_deref().unwrap_or_default();
        self.before = Intervals::parse(text, completions);
        let index = |pod: &Arc<Pod>| index_of(pod, spec.completions);
        let with_finalizer = || self.observed.pods.iter().filter(|pod| has_finalizer(pod));
        let newly = with_finalizer().filter(|pod| pod::phase(pod) == "Succeeded");
        self.done = self.before.with(newly.filter_map(index));
        self.succeeded = self.done.total() as i32;
        if spec.backoff_limit_per_index.is_some() {
            let known = self.status.failed_indexes.as_deref().unwrap_or_default();
            let newly = with_finalizer().filter(|pod| failure::is_index_failed(pod, job));
            let failed = Intervals::parse(known, completions).with(newly.filter_map(index));
            if self.finished.is_none() {
                let target = |reason: &str, message: &str| {
                    Some(condition("FailureTarget", "True", reason, message, now))
                };
                let limit = spec.max_failed_indexes.map(|limit| limit.max(0) as usize);
                if limit.is_some_and(|limit| failed.total() > limit) {
                    let message = "Job has exceeded the specified maximal number of failed indexes";
                    self.finished = target("MaxFailedIndexesExceeded", message);
                } else if !failed.is_empty() && failed.total() + self.done.total() >= completions {
                    self.finished = target("FailedIndexes", "Job has failed indexes");
                }
            }
            let busy: BTreeSet<_> = self.active.iter().filter_map(index).collect();
            let candidates: Vec<_> = self.uncounted_pods().cloned().collect();
            self.awaiting = failure::awaiting_successors(job, &candidates, |index| {
                self.done.has(index) || failed.has(index) || busy.contains(&index)
            });
            self.failed_indexes = Some(failed);
        }
        if self.finished.is_none() {
            let policy = spec.success_policy.as_ref();
            let met = failure::success(policy, completions as i32, &self.done);
            self.finished = met.map(|message| {
                condition("SuccessCriteriaMet", "True", "SuccessPolicy", &message, now)
            });
        }
    }

    /// Which pods to make or to remove. Of the two, removal comes first.
    fn manage(&self) -> Step {
        let spec = self.spec;
        let active = self.active.len();
        let parallelism = spec.parallelism.unwrap_or(1).max(0) as usize;
        let succeeded = self.succeeded.max(0) as usize;
        let wanted = match spec.completions {
            _ if is_suspended(spec) => 0,
            None if succeeded > 0 => active,
            None => parallelism,
            Some(_) => self.completions().saturating_sub(succeeded).min(parallelism),
        };
        let mut surplus = self.surplus(active.saturating_sub(wanted));
        if !is_suspended(spec) {
            surplus.truncate(BURST);
        }
        if !surplus.is_empty() || is_suspended(spec) {
            return Step::Remove(surplus);
        }
        let replaced_late = failure::only_failed_are_replaced(self.observed.job);
        let terminating = if replaced_late { self.terminating.max(0) as usize } else { 0 };
        let missing = wanted.saturating_sub(terminating + active).min(BURST);
        if missing == 0 {
            return Step::Nothing;
        }
        if spec.backoff_limit_per_index.is_none() {
            let wait = self.backoff.remaining(self.observed.now);
            if !wait.is_zero() {
                return Step::Wait(wait);
            }
        }
        if !is_indexed(spec) {
            return Step::Create(vec![None; missing]);
        }
        self.create_indexes(missing)
    }

    fn create_indexes(&self, count: usize) -> Step {
        let index = |pod: &Arc<Pod>| index_of(pod, self.spec.completions);
        let mut taken = self.done.with(self.active.iter().filter_map(index));
        if failure::only_failed_are_replaced(self.observed.job) {
            let going = self.observed.pods.iter().filter(|pod| pod::is_terminating(pod));
            taken = taken.with(going.filter_map(index));
        }
        if let Some(failed) = &self.failed_indexes {
            taken = taken.merged(failed);
        }
        let pending = taken.missing(count, self.completions());
        if self.spec.backoff_limit_per_index.is_none() {
            return Step::Create(pending.into_iter().map(Some).collect());
        }
        let wait = |index: &usize| {
            let last = self.awaiting.get(index).map(|pod| &**pod);
            Backoff::of_index(last).remaining(self.observed.now)
        };
        let now: Vec<_> = pending.iter().copied().filter(|one| wait(one).is_zero()).collect();
        match pending.iter().map(wait).min() {
            Some(shortest) if now.is_empty() => Step::Wait(shortest),
            _ => Step::Create(now.into_iter().map(Some).collect()),
        }
    }

    /// At least `count` pods to remove: first those with no index, or one that others have.
    fn surplus(&self, count: usize) -> Vec<Arc<Pod>> {
        let now = self.observed.now;
        let (mut gone, mut left) = (vec![], self.active.clone());
        if is_indexed(self.spec) {
            let mut by_index: BTreeMap<Option<usize>, Vec<Arc<Pod>>> = BTreeMap::new();
            for pod in left.drain(..) {
                by_index.entry(index_of(&pod, self.spec.completions)).or_default().push(pod);
            }
            for (index, pods) in by_index {
                let keep = usize::from(index.is_some());
                let victims = pod::choose_among(&pods, pods.len() - keep, now);
                let spared = |pod: &Arc<Pod>| !victims.iter().any(|one| Arc::ptr_eq(one, pod));
                left.extend(pods.iter().filter(|pod| spared(pod)).cloned());
                gone.extend(victims);
            }
        }
        if gone.len() < count {
            gone.extend(pod::choose_among(&left, count - gone.len(), now));
        }
        gone
    }

    /// Takes in what came of the step. Returns events: reason and message.
    pub fn settle(&mut self, acted: &Acted) -> Vec<(&'static str, &'static str)> {
        let before = self.active_count;
        self.active_count += acted.created - acted.removed;
        self.terminating += acted.removed;
        self.ready -= acted.removed_ready;
        if matches!(self.step, Step::Wait(_)) {
            // Upstream reports none while it waits to replace failed pods.
            self.active_count = 0;
        }
        if self.finished.is_some() {
            if acted.removed != before || !self.observed.settled {
                // Pods may remain that are not known yet.
                self.finished = None;
            }
            return vec![];
        }
        let complete = self.active_count == 0
            && match self.spec.completions {
                None => self.succeeded > 0,
                Some(wanted) => self.succeeded >= wanted,
            };
        let now = self.observed.now;
        if complete {
            let message = "Reached expected number of succeeded pods";
            self.finished =
                Some(condition("SuccessCriteriaMet", "True", "CompletionsReached", message, now));
            return vec![];
        }
        if !self.managed {
            return vec![];
        }
        let suspended = is_suspended(self.spec);
        let (value, reason, message, event) = if suspended {
            ("True", "JobSuspended", "Job suspended", "Suspended")
        } else {
            ("False", "JobResumed", "Job resumed", "Resumed")
        };
        if !ensure(&mut self.status, condition("Suspended", value, reason, message, now)) {
            return vec![];
        }
        self.changed = true;
        self.status.start_time = (!suspended).then(|| Time(seconds(now)));
        vec![(event, message)]
    }

    /// Counts ended pods into the status and says whose finalizers may go.
    pub fn track(mut self) -> Tracked {
        let stored = self.observed.job.status.clone().unwrap_or_default();
        let counts = (self.active_count, Some(self.ready), Some(self.terminating));
        let known = (stored.active.unwrap_or_default(), stored.ready, stored.terminating);
        self.changed |= counts != known;
        self.status.active = some_if_positive(self.active_count);
        self.status.ready = Some(self.ready);
        self.status.terminating = Some(self.terminating);
        let with_finalizer: BTreeSet<String> = self
            .observed
            .pods
            .iter()
            .filter(|pod| has_finalizer(pod) && !self.observed.removed.contains(uid(pod)))
            .map(|pod| uid(pod).to_owned())
            .collect();
        self.changed |= move_counted(&mut self.status, &with_finalizer);
        let (release, complete) = self.count_ended();
        self.write_indexes();
        let terminal = self.announce_end();
        Tracked {
            status: self.status,
            changed: self.changed,
            release,
            with_finalizer,
            terminal: terminal.filter(|_| complete),
            backoff: self.backoff,
            terminating: self.terminating,
            policy_actions: self.policy_actions,
        }
    }

    /// Returns pods to release, and whether all were looked at.
    fn count_ended(&mut self) -> (Vec<Arc<Pod>>, bool) {
        let mut pods: Vec<_> = self.observed.pods.to_vec();
        let completions = self.spec.completions;
        if is_indexed(self.spec) {
            pods.sort_by_key(|pod| index_of(pod, completions));
        }
        let mut uncounted = self.uncounted();
        let before = (
            uncounted.succeeded.clone().unwrap_or_default(),
            uncounted.failed.clone().unwrap_or_default(),
        );
        let (mut release, mut newly_done, mut complete) = (vec![], vec![], true);
        for pod in pods {
            if !has_finalizer(&pod) || self.observed.removed.contains(uid(&pod)) {
                continue;
            }
            if !self.may_release(&pod) {
                continue;
            }
            let index = index_of(&pod, completions);
            let policy = self.spec.pod_failure_policy.as_ref();
            if failure::is_failed(&pod, self.observed.job)
                && !before.1.iter().any(|one| one == uid(&pod))
            {
                self.policy_actions.extend(failure::action(policy, &pod).map(str::to_owned));
            }
            if pod::phase(&pod) == "Succeeded" && !before.1.iter().any(|one| one == uid(&pod)) {
                match index {
                    Some(index) if is_indexed(self.spec) => {
                        if !self.before.has(index) {
                            newly_done.push(index);
                        }
                    }
                    None if is_indexed(self.spec) => {}
                    _ if before.0.iter().any(|one| one == uid(&pod)) => {}
                    _ => uncounted.succeeded.get_or_insert_default().push(uid(&pod).into()),
                }
            } else if self.counts_as_failed(&pod, index)
                && !before.1.iter().any(|one| one == uid(&pod))
            {
                uncounted.failed.get_or_insert_default().push(uid(&pod).into());
            }
            release.push(pod);
            let length = |list: &Option<Vec<String>>| list.as_ref().map_or(0, Vec::len);
            let uids = length(&uncounted.succeeded) + length(&uncounted.failed);
            if newly_done.len() + uids >= MAX_UNCOUNTED {
                complete = false;
                break;
            }
        }
        self.changed |= self.uncounted() != uncounted || !newly_done.is_empty();
        self.status.uncounted_terminated_pods = Some(uncounted);
        self.done = self.done.with(newly_done);
        (release, complete)
    }

    /// A pod that failed waits for its successor of the same index to inherit its counts.
    fn may_release(&self, pod: &Pod) -> bool {
        if self.observed.job.metadata.deletion_timestamp.is_some()
            || self.finished.is_some()
            || pod::phase(pod) == "Succeeded"
        {
            return true;
        }
        let awaits = index_of(pod, self.spec.completions)
            .and_then(|index| self.awaiting.get(&index))
            .is_some_and(|waiting| waiting.metadata.uid == pod.metadata.uid);
        failure::is_failed(pod, self.observed.job) && !awaits
    }

    fn counts_as_failed(&self, pod: &Pod, index: Option<usize>) -> bool {
        let ends_in_failure =
            self.finished.as_ref().is_some_and(|end| end.type_ != "SuccessCriteriaMet");
        let policy = self.spec.pod_failure_policy.as_ref();
        (failure::is_failed(pod, self.observed.job) || ends_in_failure)
            && (!is_indexed(self.spec) || index.is_some())
            && !failure::judge(policy, pod).ignored
    }

    fn write_indexes(&mut self) {
        if !is_indexed(self.spec) {
            return;
        }
        let text = self.done.to_string();
        self.changed |= self.status.completed_indexes.as_deref().unwrap_or_default() != text;
        self.status.succeeded = some_if_positive(self.done.total() as i32);
        self.status.completed_indexes = (!text.is_empty()).then_some(text);
        let failed = self.failed_indexes.as_ref().map(Intervals::to_string);
        self.changed |= self.status.failed_indexes != failed;
        self.status.failed_indexes = failed;
    }

    /// The interim condition goes into the status at once; what follows it when all is counted is
    /// returned.
    fn announce_end(&mut self) -> Option<JobCondition> {
        let end = self.finished.take()?;
        let now = self.observed.now;
        let all = self.status.conditions.get_or_insert_default();
        if end.type_ != "Failed" && !all.iter().any(|one| one.type_ == end.type_) {
            all.push(end.clone());
            self.changed = true;
        }
        let (reason, message) = (end.reason.unwrap_or_default(), end.message.unwrap_or_default());
        let kind = if end.type_ == "SuccessCriteriaMet" { "Complete" } else { "Failed" };
        Some(condition(kind, "True", &reason, &message, now))
    }
}

pub struct Tracked {
    pub status: JobStatus,
    /// The status is to be written before finalizers go.
    pub changed: bool,
    pub release: Vec<Arc<Pod>>,
    pub with_finalizer: BTreeSet<String>,
    terminal: Option<JobCondition>,
    pub backoff: Backoff,
    terminating: i32,
    /// For the metrics, when the status is written.
    pub policy_actions: Vec<String>,
}

impl Tracked {
    /// Those in `with_finalizer` are still there. Returns whether the status changed, and the
    /// terminal condition if it was set.
    pub fn conclude(&mut self, released_all: bool) -> (bool, Option<JobCondition>) {
        let mut changed = move_counted(&mut self.status, &self.with_finalizer);
        let uncounted = self.status.uncounted_terminated_pods.clone().unwrap_or_default();
        let waiting = uncounted.succeeded.is_some() || uncounted.failed.is_some();
        let terminal =
            self.terminal.clone().filter(|_| released_all && !waiting && self.terminating <= 0);
        if let Some(end) = &terminal {
            changed |= ensure(&mut self.status, end.clone());
            if end.type_ == "Complete" {
                self.status.completion_time = end.last_transition_time.clone();
            }
        }
        (changed, terminal)
    }
}

/// Moves uids whose pods have no finalizer any more from the lists into the counters.
fn move_counted(status: &mut JobStatus, with_finalizer: &BTreeSet<String>) -> bool {
    let split = |list: &mut Option<Vec<String>>| {
        let before = list.as_ref().map_or(0, Vec::len);
        list.iter_mut().for_each(|list| list.retain(|uid| with_finalizer.contains(uid)));
        list.take_if(|list| list.is_empty());
        (before - list.as_ref().map_or(0, Vec::len)) as i32
    };
    let lists = status.uncounted_terminated_pods.get_or_insert_default();
    let (succeeded, failed) = (split(&mut lists.succeeded), split(&mut lists.failed));
    status.succeeded = some_if_positive(status.succeeded.unwrap_or_default() + succeeded);
    status.failed = some_if_positive(status.failed.unwrap_or_default() + failed);
    succeeded + failed > 0
}
