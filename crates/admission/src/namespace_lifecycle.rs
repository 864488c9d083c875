//! NamespaceLifecycle: rejects creates in a missing or terminating namespace, and the deletion of the
//! namespaces that the cluster needs.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Namespace;

use crate::Row;

const IMMORTAL: [&str; 3] = ["default", "kube-system", "kube-public"];
/// Reviews are not stored, so their namespace need not exist.
const REVIEW_GROUP: &str = "authorization.k8s.io";

pub(crate) const ROW: Row =
    Row::enabled("NamespaceLifecycle", |_| Ok(Box::new(NamespaceLifecycle)));

pub(crate) struct NamespaceLifecycle;

#[async_trait]
impl Plugin for NamespaceLifecycle {
    fn name(&self) -> &'static str {
        "NamespaceLifecycle"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update | Operation::Delete)
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let row = &attributes.ctx.resource;
        let is_namespace = attributes.is_resource("", "namespaces");
        if attributes.operation == Operation::Delete {
            if is_namespace && IMMORTAL.contains(&attributes.key.name.as_str()) {
                let why = "this namespace may not be deleted";
                return Err(StatusError::forbidden("", "namespaces", &attributes.key.name, why));
            }
            return Ok(());
        }
        let namespace = attributes.key.namespace.as_str();
        if !row.namespaced || namespace.is_empty() || row.group == REVIEW_GROUP {
            return Ok(());
        }
        if attributes.operation != Operation::Create {
            return Ok(());
        }
        let Some(found) = attributes.registry.known::<Namespace>("", namespace).await? else {
            return Err(StatusError::not_found("", "namespaces", namespace));
        };
        let phase = found.status.as_ref().and_then(|status| status.phase.as_deref());
        if phase != Some("Terminating") {
            // While webhooks run, the namespace may be deleted and removed: check it again at the write.
            attributes.rely_on(&*found);
            return Ok(());
        }
        let why = format!(
            "unable to create new content in namespace {namespace} because it is being terminated"
        );
        let detail = format!("namespace {namespace} is being terminated");
        Err(StatusError::forbidden(&row.group, &row.plural, &attributes.key.name, why).cause(
            "NamespaceTerminating",
            "metadata.namespace",
            detail,
        ))
    }
}
