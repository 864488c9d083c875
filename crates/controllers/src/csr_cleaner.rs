//! Deletes old CertificateSigningRequests.
//!
//! In: requests. Out: deletions. Upstream: `pkg/controller/certificates/cleaner`: issued, denied and
//! failed ones go an hour after their condition, pending ones after a day; instead of looking at all
//! of them every hour, each has its time.

use std::sync::Arc;
use std::time::Duration;

use client::{Api, DeleteParams, ErrorExt, Outcome, Result, WorkQueue, spawn_workers};
use jiff::Timestamp;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use crate::context::{Context, Descriptor};

pub const DESCRIPTOR: Descriptor = Descriptor {
    name: "certificatesigningrequest-cleaner-controller",
    account: "certificate-controller",
    component: "certificate-controller",
    start,
};

const HOUR: i64 = 3600;

fn start(context: Context) {
    let requests = context.informers.of::<CertificateSigningRequest>();
    let queue: WorkQueue<Arc<str>> = WorkQueue::new("csr-cleaner");
    let adds = queue.clone();
    requests.subscribe_raw(move |event| adds.add(event.entry().header.key.name.clone()));
    let (tasks, lister) = (context.tasks.clone(), requests.lister());
    tasks.clone().spawn("csr-cleaner", async move {
        requests.synced().await;
        spawn_workers(&tasks, &queue, 1, move |name: Arc<str>| {
            let left = lister.get("", &name).and_then(|csr| remaining(&csr, base::clock::now()));
            let api: Api<CertificateSigningRequest> = context.client.api(None);
            async move { clean(&api, &name, left).await }
        });
    });
}

async fn clean(
    api: &Api<CertificateSigningRequest>,
    name: &str,
    left: Option<Duration>,
) -> Result<Outcome> {
    match left {
        None => return Ok(Outcome::Done),
        Some(Duration::ZERO) => {}
        Some(left) => return Ok(Outcome::After(left)),
    }
    match api.delete(name, &DeleteParams::default()).await {
        Err(error) if error.is_not_found() => Ok(Outcome::Done),
        done => done.map(|_| Outcome::Done),
    }
}

/// How long the request may stay. Pure.
fn remaining(csr: &CertificateSigningRequest, now: Timestamp) -> Option<Duration> {
    let status = csr.status.as_ref();
    let conditions = || status.into_iter().flat_map(|status| status.conditions.iter().flatten());
    let updated = |kind: &str| {
        let found = conditions().find(|one| one.type_ == kind)?;
        let at = found.last_update_time.as_ref().or(found.last_transition_time.as_ref())?;
        Some(at.0.as_second())
    };
    let created = csr.metadata.creation_timestamp.as_ref()?.0.as_second();
    let ends = ["Approved", "Denied", "Failed"];
    let expiry = match ends.iter().filter_map(|kind| updated(kind)).min() {
        Some(at) => at + HOUR,
        None => created + 24 * HOUR,
    };
    let expiry = Timestamp::from_second(expiry).ok()?;
    Some(Duration::try_from(expiry.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn requests_stay_as_long_as_their_state_lets_them() {
        let check = |conditions: Value, hours: u64| {
            let csr = from_value(json!({
                "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"request": "", "signerName": "s"}, "status": {"conditions": conditions}}));
            let left = remaining(&csr.unwrap(), "2026-01-01T00:00:00Z".parse().unwrap());
            assert_eq!(left, Some(Duration::from_secs(hours * 3600)), "{conditions}");
        };
        check(json!([]), 24);
        let at = |kind: &str| {
            json!([{"type": kind, "status": "True",
            "lastUpdateTime": "2026-01-01T01:00:00Z"}])
        };
        check(at("Approved"), 2);
        check(at("Denied"), 2);
        check(at("Failed"), 2);
    }
}
