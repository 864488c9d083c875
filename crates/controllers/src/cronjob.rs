//! CronJob: makes Jobs at the times of a schedule.
//!
//! In: CronJobs and their Jobs. Out: Jobs made and removed, `status`.
//! Upstream: `pkg/controller/cronjob`. The schedule's dialect is in `machinery::cron`.
//!
//! Cost: a change decodes the CronJob and its own Jobs.
//!
//! Invariant: a Job's name holds its scheduled minute, so that no time makes two Jobs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use client::{
    Api, DeleteParams, ErrorExt, EventType, Lister, ObjectKey, Outcome, PostParams, Result,
};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use machinery::cron::{Schedule, time_zone};
use machinery::{ObjectMeta, Time};

use crate::context::Context;
use crate::descriptor::{Descriptor, Row, own, owned_by};
use crate::owner;

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "cronjob-controller",
    account: "cronjob-controller",
    component: "cronjob-controller",
    queue: "cronjob",
    workers: 5,
    new: |setup| {
        Some(Controller {
            context: setup.context.clone(),
            cron_jobs: setup.lister(),
            jobs: setup.lister(),
        })
    },
    watches: &[&own::<CronJob>(), &owned_by::<Job, CronJob, _>()],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

const SCHEDULED: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
/// Clocks differ a little: better late than early.
const PADDING: Duration = Duration::from_millis(100);
/// Missed times beyond this are worth a warning.
const MANY: i64 = 100;

struct Controller {
    context: Context,
    cron_jobs: Lister<CronJob>,
    jobs: Lister<Job>,
}

type NewEvent = (EventType, &'static str, String);

/// The next actions of a CronJob.
#[derive(Debug, Default)]
struct Plan {
    /// Names of running Jobs that make room for a new one.
    replace: Vec<String>,
    /// The scheduled time of the Job to make.
    create: Option<Timestamp>,
    /// Until the next time.
    wait: Option<Duration>,
    events: Vec<NewEvent>,
}

impl Controller {
    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(known) = self.cron_jobs.get_key(key) else {
            return Ok(Outcome::Done);
        };
        let uid = known.metadata.uid.as_deref().unwrap_or_default();
        let jobs: Vec<Arc<Job>> = self
            .jobs
            .by_owner(uid)
            .into_iter()
            .filter(|job| owner::controller(&job.metadata).is_some_and(|owner| owner.uid == uid))
            .collect();
        let mut cron = (*known).clone();
        let mut events = vec![];
        if jobs.iter().any(|job| is_forgotten(&cron, job)) {
            // The cache may be older than our last write.
            match self.api(key).get_opt(&key.name).await? {
                Some(fresh) => cron = fresh,
                None => return Ok(Outcome::Done),
            }
        }
        let gone = self.missing(key, &cron, &jobs).await?;
        let before = cron.status.clone().unwrap_or_default();
        for name in surplus(&cron, &jobs) {
            self.delete_job(key, &mut cron, &name).await;
        }
        update_active(&mut cron, &jobs, &gone, &mut events);
        let now = base::clock::now();
        let plan = plan(&cron, now);
        events.extend(plan.events);
        for (kind, reason, message) in events {
            self.context.events.event(&cron, kind, reason, message);
        }
        let done = self.carry_out(key, &mut cron, plan.replace, plan.create).await;
        if cron.status.clone().unwrap_or_default() != before {
            match self.api(key).replace_status(&key.name, &PostParams::default(), &cron).await {
                Err(error) if error.is_not_found() => return Ok(Outcome::Done),
                written => drop(written?),
            }
        }
        if !done? {
            return Ok(Outcome::Backoff);
        }
        Ok(plan.wait.map_or(Outcome::Done, Outcome::After))
    }

    fn api(&self, key: &ObjectKey) -> Api<CronJob> {
        self.context.client.api(Some(&key.namespace))
    }

    /// Uids of active Jobs that are really gone.
    async fn missing(
        &self,
        key: &ObjectKey,
        cron: &CronJob,
        jobs: &[Arc<Job>],
    ) -> Result<BTreeSet<String>> {
        let api: Api<Job> = self.context.client.api(Some(&key.namespace));
        let mut gone = BTreeSet::new();
        for active in cron.status.iter().flat_map(|status| status.active.iter().flatten()) {
            if jobs.iter().any(|job| job.metadata.uid == active.uid) {
                continue;
            }
            if api.get_opt(active.name.as_deref().unwrap_or_default()).await?.is_none() {
                gone.extend(active.uid.clone());
            }
        }
        Ok(gone)
    }

    async fn delete_job(&self, key: &ObjectKey, cron: &mut CronJob, name: &str) -> bool {
        let api: Api<Job> = self.context.client.api(Some(&key.namespace));
        let events = &self.context.events;
        if let Err(error) = api.delete(name, &DeleteParams::background()).await {
            let message = format!("Deleted job: {}", error.text());
            events.event(cron, EventType::Warning, "FailedDelete", message);
            return error.is_not_found();
        }
        let active = cron.status.get_or_insert_default().active.get_or_insert_default();
        active.retain(|one| one.name.as_deref() != Some(name));
        events.event(cron, EventType::Normal, "SuccessfulDelete", format!("Deleted job {name}"));
        true
    }

    async fn carry_out(
        &self,
        key: &ObjectKey,
        cron: &mut CronJob,
        replace: Vec<String>,
        create: Option<Timestamp>,
    ) -> Result<bool> {
        for name in replace {
            if !self.delete_job(key, cron, &name).await {
                // An event reports it; the CronJob is retried with backoff.
                return Ok(false);
            }
        }
        let Some(at) = create else {
            return Ok(true);
        };
        let api: Api<Job> = self.context.client.api(Some(&key.namespace));
        let job = job_for(cron, at);
        let name = job.metadata.name.clone().unwrap_or_default();
        let made = match api.create(&PostParams::default(), &job).await {
            Ok(made) => {
                let message = format!("Created job {name}");
                self.context.events.event(cron, EventType::Normal, "SuccessfulCreate", message);
                if let Some(Time(created)) = &made.metadata.creation_timestamp {
                    let skew = created.as_second() - at.as_second();
                    crate::metrics::CRONJOB_SKEW.observe(&[], skew as f64);
                }
                made
            }
            Err(error) if error.is_already_exists() => {
                let there = api.get(&name).await?;
                let ours = owner::controller(&there.metadata)
                    .is_some_and(|owner| Some(&owner.uid) == cron.metadata.uid.as_ref());
                if !ours {
                    return Ok(true);
                }
                there
            }
            Err(error) => {
                if !error.is_namespace_terminating() {
                    let message = format!("Error creating job: {}", error.text());
                    self.context.events.event(cron, EventType::Warning, "FailedCreate", message);
                }
                return Err(error);
            }
        };
        let status = cron.status.get_or_insert_default();
        let active = status.active.get_or_insert_default();
        if !active.iter().any(|one| one.uid == made.metadata.uid) {
            active.push(client::events::reference(&made));
        }
        status.last_schedule_time = Some(Time(at));
        Ok(true)
    }
}

fn end_of(job: &Job) -> Option<&str> {
    let mut conditions = job.status.as_ref()?.conditions.iter().flatten();
    let end = conditions
        .find(|one| matches!(one.type_.as_str(), "Complete" | "Failed") && one.status == "True");
    end.map(|one| one.type_.as_str())
}

fn is_active(cron: &CronJob, uid: Option<&String>) -> bool {
    let active = cron.status.as_ref().and_then(|status| status.active.as_ref());
    active.into_iter().flatten().any(|one| one.uid.as_ref() == uid)
}

fn is_forgotten(cron: &CronJob, job: &Job) -> bool {
    end_of(job).is_none() && !is_active(cron, job.metadata.uid.as_ref())
}

/// Brings the list of active Jobs up to date. Pure.
fn update_active(
    cron: &mut CronJob,
    jobs: &[Arc<Job>],
    gone: &BTreeSet<String>,
    events: &mut Vec<NewEvent>,
) {
    for job in jobs {
        let name = job.metadata.name.as_deref().unwrap_or_default();
        let active = is_active(cron, job.metadata.uid.as_ref());
        let Some(end) = end_of(job) else {
            if !active {
                let message =
                    format!("Saw a job that the controller did not create or forgot: {name}");
                events.push((EventType::Warning, "UnexpectedJob", message));
            }
            continue;
        };
        let status = cron.status.get_or_insert_default();
        if active {
            let list = status.active.get_or_insert_default();
            list.retain(|one| one.uid != job.metadata.uid);
            let message = format!("Saw completed job: {name}, condition: {end}");
            events.push((EventType::Normal, "SawCompletedJob", message));
        }
        let completed = job.status.as_ref().and_then(|status| status.completion_time.clone());
        if end == "Complete" && completed > status.last_successful_time {
            status.last_successful_time = completed;
        }
    }
    let Some(list) = cron.status.as_mut().and_then(|status| status.active.as_mut()) else {
        return;
    };
    list.retain(|one| {
        let missing = one.uid.as_ref().is_some_and(|uid| gone.contains(uid));
        if missing {
            let name = one.name.as_deref().unwrap_or_default();
            let message = format!("Active job went missing: {name}");
            events.push((EventType::Normal, "MissingJob", message));
        }
        !missing
    });
    if list.is_empty() {
        cron.status.get_or_insert_default().active = None;
    }
}

/// Names of finished Jobs beyond the history's limits, oldest first. Pure.
fn surplus(cron: &CronJob, jobs: &[Arc<Job>]) -> Vec<String> {
    let spec = &cron.spec;
    let limits = [
        ("Complete", spec.successful_jobs_history_limit),
        ("Failed", spec.failed_jobs_history_limit),
    ];
    let mut names = vec![];
    for (end, limit) in limits {
        let Some(limit) = limit else { continue };
        let mut ended: Vec<_> = jobs.iter().filter(|job| end_of(job) == Some(end)).collect();
        ended.sort_unstable_by_key(|job| {
            let started = job.status.as_ref().and_then(|status| status.start_time.clone());
            (started.is_none(), started, job.metadata.name.clone())
        });
        let count = ended.len().saturating_sub(limit.max(0) as usize);
        names.extend(ended.iter().take(count).filter_map(|job| job.metadata.name.clone()));
    }
    names
}

/// Whether it is time for a Job, and when to look again. Pure.
fn plan(cron: &CronJob, now: Timestamp) -> Plan {
    let spec = &cron.spec;
    let mut plan = Plan::default();
    if cron.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let warn = |reason, message| (EventType::Warning, reason, message);
    if let Some(name) = spec.time_zone.as_deref().filter(|name| time_zone(name).is_none()) {
        let message = format!("invalid timeZone: {name:?}: unknown time zone {name}");
        plan.events.push(warn("UnknownTimeZone", message));
        return plan;
    }
    if spec.suspend == Some(true) {
        return plan;
    }
    if spec.schedule.contains("TZ") {
        let message = format!(
            "CRON_TZ or TZ used in schedule {:?} is not officially supported, see https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/ for more details",
            spec.schedule
        );
        plan.events.push(warn("UnsupportedSchedule", message));
    }
    let schedule = match Schedule::parse(&full_schedule(cron)) {
        Ok(schedule) => schedule,
        Err(error) => {
            let message = format!("unparseable schedule: {:?} : {error}", spec.schedule);
            plan.events.push(warn("UnparseableSchedule", message));
            return plan;
        }
    };
    start_if_due(cron, now, &schedule, plan)
}

/// With a schedule that can be read. Pure.
fn start_if_due(cron: &CronJob, now: Timestamp, schedule: &Schedule, mut plan: Plan) -> Plan {
    let spec = &cron.spec;
    let warn = |reason, message| (EventType::Warning, reason, message);
    let missed = match Missed::count(cron, now, schedule, true) {
        Ok(missed) => missed,
        Err(error) => {
            let message = format!("invalid schedule: {} : {error}", spec.schedule);
            plan.events.push(warn("InvalidSchedule", message));
            return plan;
        }
    };
    plan.wait = until_next(cron, now, schedule);
    let Some(at) = missed.last else {
        return plan;
    };
    if missed.number > MANY {
        let message = "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew";
        plan.events.push(warn("TooManyMissedTimes", message.into()));
    }
    if let Some(deadline) = spec.starting_deadline_seconds
        && at.as_second() + deadline < now.as_second()
    {
        let message = format!("Missed scheduled time to start a job: {}", at.strftime(RFC1123Z));
        plan.events.push(warn("MissSchedule", message));
        return plan;
    }
    let name = job_name(cron, at);
    let status = cron.status.clone().unwrap_or_default();
    let active = status.active.unwrap_or_default();
    let processed = status.last_schedule_time.is_some_and(|last| last.0 == at);
    if processed || active.iter().any(|one| one.name.as_ref() == Some(&name)) {
        return plan;
    }
    match spec.concurrency_policy.as_deref() {
        Some("Forbid") if !active.is_empty() => {
            let message = "Not starting job because prior execution is running and concurrency policy is Forbid";
            plan.events.push((EventType::Normal, "JobAlreadyActive", message.into()));
            return plan;
        }
        Some("Replace") => {
            plan.replace = active.into_iter().filter_map(|one| one.name).collect();
        }
        _ => {}
    }
    plan.create = Some(at);
    plan.wait = until_next_after(schedule, at, now);
    plan
}

const RFC1123Z: &str = "%a, %d %b %Y %H:%M:%S %z";

fn full_schedule(cron: &CronJob) -> String {
    match &cron.spec.time_zone {
        Some(zone) if !cron.spec.schedule.contains("TZ") => {
            format!("TZ={zone} {}", cron.spec.schedule)
        }
        _ => cron.spec.schedule.clone(),
    }
}

/// Times that passed without a Job.
struct Missed {
    since: Timestamp,
    last: Option<Timestamp>,
    number: i64,
}

impl Missed {
    fn count(
        cron: &CronJob,
        now: Timestamp,
        schedule: &Schedule,
        with_deadline: bool,
    ) -> Result<Self, &'static str> {
        let created = cron.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let last = cron.status.as_ref().and_then(|status| status.last_schedule_time.as_ref());
        let mut since = last.map(|time| time.0).or(created).unwrap_or_default();
        if let Some(deadline) = cron.spec.starting_deadline_seconds.filter(|_| with_deadline) {
            let earliest = Timestamp::from_second(now.as_second().saturating_sub(deadline));
            since = since.max(earliest.unwrap_or(Timestamp::MIN));
        }
        const NEVER: &str = "time difference between two schedules is less than 1 second";
        let first = schedule.next(since).ok_or(NEVER)?;
        if now < first {
            return Ok(Self { since, last: None, number: 0 });
        }
        let second = schedule.next(first).ok_or(NEVER)?;
        if now < second {
            return Ok(Self { since, last: Some(first), number: 0 });
        }
        let between = second.as_second() - first.as_second();
        let number = (now.as_second() - first.as_second()) / between.max(1) + 1;
        // Near the end by arithmetic, then step by step: not all schedules are regular.
        let near = first.as_second() + (number - 2) * between;
        let mut at = schedule.next(Timestamp::from_second(near).unwrap_or(first));
        let mut last = None;
        while let Some(time) = at.filter(|time| *time <= now) {
            last = Some(time);
            at = schedule.next(time);
        }
        Ok(Self { since, last, number })
    }
}

fn until_next(cron: &CronJob, now: Timestamp, schedule: &Schedule) -> Option<Duration> {
    let after = match Missed::count(cron, now, schedule, false) {
        Err(_) => now,
        Ok(missed) if missed.number > 0 => missed.last.unwrap_or(now),
        Ok(missed) => missed.last.unwrap_or(missed.since),
    };
    until_next_after(schedule, after, now)
}

fn until_next_after(schedule: &Schedule, after: Timestamp, now: Timestamp) -> Option<Duration> {
    let next = schedule.next(after)?;
    Some(Duration::try_from(next.duration_since(now)).unwrap_or_default() + PADDING)
}

fn job_name(cron: &CronJob, at: Timestamp) -> String {
    let name = cron.metadata.name.as_deref().unwrap_or_default();
    format!("{name}-{}", at.as_second() / 60)
}

/// Pure.
fn job_for(cron: &CronJob, at: Timestamp) -> Job {
    let template = cron.spec.job_template.clone();
    let meta = template.metadata.unwrap_or_default();
    let zone = cron.spec.time_zone.as_deref().and_then(time_zone);
    let local = at.to_zoned(zone.unwrap_or(jiff::tz::TimeZone::UTC));
    let format =
        if local.offset().is_zero() { "%Y-%m-%dT%H:%M:%SZ" } else { "%Y-%m-%dT%H:%M:%S%:z" };
    let mut annotations = meta.annotations.unwrap_or_default();
    annotations.insert(SCHEDULED.into(), local.strftime(format).to_string());
    Job {
        metadata: ObjectMeta {
            name: Some(job_name(cron, at)),
            namespace: cron.metadata.namespace.clone(),
            labels: meta.labels,
            annotations: Some(annotations),
            owner_references: Some(vec![owner::reference(cron)]),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    fn cron(spec: Value, status: Value) -> CronJob {
        let mut spec = spec;
        spec["jobTemplate"] = json!({"spec": {"template": {}}});
        from_value(json!({
            "metadata": {"name": "tick", "namespace": "ns", "uid": "cron",
                "creationTimestamp": "2026-01-01T00:00:30Z"},
            "spec": spec, "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn jobs_are_made_when_it_is_time() {
        let check = |spec: Value, status: Value, now: &str, expected: &str, wait: Option<u64>| {
            let cron = cron(spec.clone(), status);
            let plan = plan(&cron, now.parse().unwrap());
            let mut told: Vec<_> = plan.events.iter().map(|one| one.1.to_owned()).collect();
            told.extend(plan.replace.iter().map(|name| format!("-{name}")));
            told.extend(plan.create.map(|at| format!("+{}", job_name(&cron, at))));
            assert_eq!(told.join(" "), expected, "{spec} at {now}");
            assert_eq!(plan.wait.map(|wait| wait.as_secs()), wait, "{spec} at {now}");
        };
        let minutely = json!({"schedule": "* * * * *"});
        check(minutely.clone(), json!({}), "2026-01-01T00:00:40Z", "", Some(20));
        check(minutely.clone(), json!({}), "2026-01-01T00:01:00Z", "+tick-29453761", Some(60));
        let done = json!({"lastScheduleTime": "2026-01-01T00:01:00Z"});
        check(minutely.clone(), done, "2026-01-01T00:01:30Z", "", Some(30));
        let late = "TooManyMissedTimes +tick-29453960";
        check(minutely, json!({}), "2026-01-01T03:20:10Z", late, Some(50));
        let strict = json!({"schedule": "0 * * * *", "startingDeadlineSeconds": 30});
        check(strict, json!({}), "2026-01-01T01:00:40Z", "", Some(3560));
        let active = json!({"active": [{"name": "old", "uid": "old"}]});
        let forbid = json!({"schedule": "* * * * *", "concurrencyPolicy": "Forbid"});
        check(forbid, active.clone(), "2026-01-01T00:01:00Z", "JobAlreadyActive", Some(60));
        let replace = json!({"schedule": "* * * * *", "concurrencyPolicy": "Replace"});
        let swapped = "-old +tick-29453761";
        check(replace, active, "2026-01-01T00:01:00Z", swapped, Some(60));
        let suspended = json!({"schedule": "* * * * *", "suspend": true});
        check(suspended, json!({}), "2026-01-01T00:01:00Z", "", None);
        let never = json!({"schedule": "0 0 31 2 *"});
        check(never, json!({}), "2026-01-01T00:01:00Z", "InvalidSchedule", None);
        let lost = json!({"schedule": "* * * * *", "timeZone": "Nowhere"});
        check(lost, json!({}), "2026-01-01T00:01:00Z", "UnknownTimeZone", None);
    }

    #[test]
    fn a_job_knows_its_time_in_its_zone() {
        let berlin = cron(json!({"schedule": "0 1 * * *", "timeZone": "Europe/Berlin"}), json!({}));
        let job = job_for(&berlin, "2026-01-02T00:00:00Z".parse().unwrap());
        assert_eq!(job.metadata.annotations.unwrap()[SCHEDULED], "2026-01-02T01:00:00+01:00");
        let plain = cron(json!({"schedule": "0 1 * * *"}), json!({}));
        let job = job_for(&plain, "2026-01-02T01:00:00Z".parse().unwrap());
        assert_eq!(job.metadata.annotations.unwrap()[SCHEDULED], "2026-01-02T01:00:00Z");
    }

    #[test]
    fn history_is_limited_and_ends_are_noted() {
        let job = |name: &str, end: &str, started: &str| -> Arc<Job> {
            Arc::new(
                from_value(json!({
                    "metadata": {"name": name, "uid": name},
                    "spec": {"template": {}},
                    "status": {"startTime": started, "completionTime": started,
                        "conditions": [{"type": end, "status": "True"}]},
                }))
                .unwrap(),
            )
        };
        let jobs = [
            job("a", "Complete", "2026-01-01T00:03:00Z"),
            job("b", "Complete", "2026-01-01T00:01:00Z"),
            job("c", "Failed", "2026-01-01T00:02:00Z"),
        ];
        let limits = json!({"schedule": "* * * * *", "successfulJobsHistoryLimit": 1,
            "failedJobsHistoryLimit": 1});
        let active = json!({"active": [{"name": "a", "uid": "a"}, {"name": "x", "uid": "x"}]});
        let mut cron = cron(limits, active);
        assert_eq!(surplus(&cron, &jobs), ["b"]);
        let mut events = vec![];
        update_active(&mut cron, &jobs, &BTreeSet::from(["x".to_owned()]), &mut events);
        let reasons: Vec<_> = events.iter().map(|one| one.1).collect();
        assert_eq!(reasons, ["SawCompletedJob", "MissingJob"]);
        let status = cron.status.unwrap();
        assert_eq!(status.active, None);
        assert_eq!(status.last_successful_time.unwrap().0.to_string(), "2026-01-01T00:03:00Z");
    }
}
