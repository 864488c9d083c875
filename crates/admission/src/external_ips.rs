//! DenyServiceExternalIPs: rejects new external IPs of Services; existing ones may stay.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Service;

use crate::Row;

pub(crate) const ROW: Row =
    Row::disabled("DenyServiceExternalIPs", |_| Ok(Box::new(DenyExternalIps)));

pub(crate) struct DenyExternalIps;

#[async_trait]
impl Plugin for DenyExternalIps {
    fn name(&self) -> &'static str {
        "DenyServiceExternalIPs"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "services") {
            return Ok(());
        }
        let of = |service: Option<&Service>| {
            let spec = service.and_then(|service| service.spec.as_ref());
            spec.and_then(|spec| spec.external_ips.clone()).unwrap_or_default()
        };
        let old = of(attributes.old_as());
        if of(attributes.object_as()).iter().all(|address| old.contains(address)) {
            return Ok(());
        }
        Err(attributes.forbidden("Use of external IPs is denied by admission control"))
    }
}
