//! Deletes PodCertificateRequests a while after their creation: by then the kubelet has its certificate, or asks again.
//!
//! In: PodCertificateRequests. Out: deletions. Upstream: `pkg/controller/certificates/cleaner/pcrcleaner.go`.
//! Cost: one look-up for each request at its creation and one at its end.
//!
//! Deviation: upstream looks at all requests every five minutes; here each request has its own deadline.

use std::time::Duration;

use client::{Api, Client, DeleteParams, Lister, ObjectKey, Outcome, Preconditions, Result};
use jiff::Timestamp;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;

use crate::descriptor::{Descriptor, Row, or_gone, own};

pub const DESCRIPTOR: &dyn Row = &Descriptor::<Controller> {
    name: "podcertificaterequest-cleaner-controller",
    account: "podcertificaterequestcleaner",
    component: "podcertificaterequestcleaner",
    queue: "podcertificaterequest-cleaner",
    workers: 1,
    new: |setup| Some(Controller { client: setup.client.clone(), requests: setup.lister() }),
    watches: &[&own::<PodCertificateRequest>().if_served()],
    reconcile: |this, key| Box::pin(async move { this.reconcile(&key).await }),
};

/// All flows are expected to end before this.
const THRESHOLD: Duration = Duration::from_secs(15 * 60);

struct Controller {
    client: Client,
    requests: Lister<PodCertificateRequest>,
}

impl Controller {
    async fn reconcile(&self, key: &ObjectKey) -> Result<Outcome> {
        let Some(request) = self.requests.get_key(key) else { return Ok(Outcome::Done) };
        let left = remaining(&request, base::clock::now());
        if !left.is_zero() {
            return Ok(Outcome::After(left));
        }
        let uid = request.metadata.uid.clone();
        let preconditions = Preconditions { uid, resource_version: None };
        let api: Api<PodCertificateRequest> = self.client.api(Some(&key.namespace));
        or_gone(api.delete(&key.name, &DeleteParams::default().preconditions(preconditions)).await)
    }
}

/// How long the request may stay. Pure.
fn remaining(request: &PodCertificateRequest, now: Timestamp) -> Duration {
    let created = request.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
    let age = Duration::try_from(now.duration_since(created)).unwrap_or_default();
    THRESHOLD.saturating_sub(age)
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_request_stays_for_a_quarter_of_an_hour() {
        let check = |now: &str, seconds: u64| {
            let request: PodCertificateRequest = from_value(json!({
                "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {
                    "maxExpirationSeconds": 3600, "nodeName": "n", "nodeUID": "n", "podName": "p",
                    "podUID": "p", "serviceAccountName": "s", "serviceAccountUID": "s",
                    "signerName": "example.com/s"}}))
            .expect("a request");
            let left = remaining(&request, now.parse().expect("a time"));
            assert_eq!(left.as_secs(), seconds, "{now}");
        };
        check("2026-01-01T00:00:00Z", 900);
        check("2026-01-01T00:10:00Z", 300);
        check("2026-01-01T00:15:00Z", 0);
        check("2026-01-02T00:00:00Z", 0);
    }
}
