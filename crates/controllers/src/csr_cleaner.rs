//! Deletes old CertificateSigningRequests.
//!
//! In: requests. Out: deletions. Upstream: `pkg/controller/certificates/cleaner`: issued, denied and
//! failed ones go an hour after their condition, pending ones after a day; instead of looking at all
//! of them every hour, each has its time.

use std::sync::Arc;
use std::time::Duration;

use client::{Api, Client, DeleteParams, Lister, Outcome, Result};
use jiff::Timestamp;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;

use crate::descriptor::{Descriptor, Row, or_gone, own};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller, Arc<str>> {
    name: "certificatesigningrequest-cleaner-controller",
    account: "certificate-controller",
    component: "certificate-controller",
    queue: "csr-cleaner",
    workers: 1,
    new: |setup| Some(Controller { client: setup.client.clone(), requests: setup.lister() }),
    watches: &[&own::<CertificateSigningRequest>()],
    reconcile: |this, name| {
        Box::pin(async move {
            let csr = this.requests.get("", &name);
            let left = csr.and_then(|csr| remaining(&csr, base::clock::now()));
            clean(&this.client.api(None), &name, left).await
        })
    },
};

const HOUR: i64 = 3600;

struct Controller {
    client: Client,
    requests: Lister<CertificateSigningRequest>,
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
    or_gone(api.delete(name, &DeleteParams::default()).await)
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
