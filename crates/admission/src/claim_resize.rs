//! PersistentVolumeClaimResize: a claim may grow only if its storage class allows expansion.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use machinery::quantity::Amount;

use crate::Row;

pub(crate) const ROW: Row =
    Row::enabled("PersistentVolumeClaimResize", |_| Ok(Box::new(ClaimResize)));

pub(crate) struct ClaimResize;

#[async_trait]
impl Plugin for ClaimResize {
    fn name(&self) -> &'static str {
        "PersistentVolumeClaimResize"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let claims = (
            attributes.object_as::<PersistentVolumeClaim>(),
            attributes.old_as::<PersistentVolumeClaim>(),
        );
        let ((Some(new), Some(old)), true) = (claims, attributes.ctx.subresource.is_empty()) else {
            return Ok(());
        };
        if size(new) <= size(old) {
            return Ok(());
        }
        let phase = old.status.as_ref().and_then(|status| status.phase.as_deref());
        if phase != Some("Bound") {
            return Err(attributes.forbidden("Only bound persistent volume claims can be expanded"));
        }
        let class = |claim: &PersistentVolumeClaim| {
            claim.spec.as_ref().and_then(|spec| spec.storage_class_name.clone())
        };
        if let Some(name) =
            class(new).filter(|name| !name.is_empty() && class(old).as_ref() == Some(name))
        {
            let found = attributes.registry.find::<StorageClass>("", &name).await?;
            if found.is_some_and(|class| class.allow_volume_expansion == Some(true)) {
                return Ok(());
            }
        }
        Err(attributes.forbidden(
            "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize",
        ))
    }
}

fn size(claim: &PersistentVolumeClaim) -> Amount {
    let asked = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let storage = asked.and_then(|asked| asked.requests.as_ref()?.get("storage"));
    storage.and_then(|storage| Amount::parse(&storage.0).ok()).unwrap_or_default()
}
