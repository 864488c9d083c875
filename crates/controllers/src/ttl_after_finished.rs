//! Deletes finished Jobs when `ttlSecondsAfterFinished` has passed.
//!
//! In: Jobs. Out: deletions in the foreground. Upstream: `pkg/controller/ttlafterfinished`.

use std::time::Duration;

use client::{Api, Client, DeleteParams, Event, Lister, ObjectKey, Outcome, Preconditions, Result};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;

use crate::descriptor::{Descriptor, Row, on, or_gone};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "ttl-after-finished-controller",
    account: "ttl-after-finished-controller",
    component: "ttl-after-finished-controller",
    queue: "ttl_jobs_to_delete",
    workers: 2,
    new: |setup| Some(Controller { client: setup.client.clone(), jobs: setup.lister() }),
    watches: &[&on(|_: &Controller, queue, event: &Event<Job>| {
        if !event.is_deleted() && remaining(event.object(), base::clock::now()).is_some() {
            queue.add(event.key());
        }
    })],
    reconcile: |this, key| {
        Box::pin(async move {
            let known = this.jobs.get_key(&key);
            reconcile(&this.client.api(Some(&key.namespace)), &key, known.as_deref()).await
        })
    },
};

struct Controller {
    client: Client,
    jobs: Lister<Job>,
}

async fn reconcile(api: &Api<Job>, key: &ObjectKey, known: Option<&Job>) -> Result<Outcome> {
    match known.and_then(|job| remaining(job, base::clock::now())) {
        None => return Ok(Outcome::Done),
        Some(Duration::ZERO) => {}
        Some(left) => return Ok(Outcome::After(left)),
    }
    // The cached Job may be stale: its TTL may have been prolonged.
    let Some(job) = api.get_opt(&key.name).await? else {
        return Ok(Outcome::Done);
    };
    match remaining(&job, base::clock::now()) {
        None => return Ok(Outcome::Done),
        Some(Duration::ZERO) => {}
        Some(left) => return Ok(Outcome::After(left)),
    }
    let preconditions = Preconditions { uid: job.metadata.uid.clone(), resource_version: None };
    let options = DeleteParams::foreground().preconditions(preconditions);
    or_gone(api.delete(&key.name, &options).await)
}

/// How long the Job may stay; `None` if nothing says when it goes. Pure.
fn remaining(job: &Job, now: Timestamp) -> Option<Duration> {
    if job.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let ttl = job.spec.as_ref()?.ttl_seconds_after_finished?;
    let mut conditions = job.status.as_ref()?.conditions.iter().flatten();
    let end = conditions
        .find(|one| matches!(one.type_.as_str(), "Complete" | "Failed") && one.status == "True")?;
    let expiry = end.last_transition_time.as_ref()?.0.as_second() + i64::from(ttl.max(0));
    let expiry = Timestamp::from_second(expiry).ok()?;
    Some(Duration::try_from(expiry.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn only_finished_jobs_with_a_ttl_go() {
        let check = |ttl: Value, condition: &str, expected: Option<u64>| {
            let job: Job = from_value(json!({
                "metadata": {"name": "j"},
                "spec": {"ttlSecondsAfterFinished": ttl, "template": {}},
                "status": {"conditions": [{"type": condition, "status": "True",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}]},
            }))
            .unwrap();
            let left = remaining(&job, "2026-01-01T00:00:10Z".parse().unwrap());
            assert_eq!(left.map(|left| left.as_secs()), expected, "{ttl} {condition}");
        };
        check(json!(null), "Complete", None);
        check(json!(30), "Suspended", None);
        check(json!(30), "Complete", Some(20));
        check(json!(10), "Failed", Some(0));
        check(json!(0), "Complete", Some(0));
    }
}
