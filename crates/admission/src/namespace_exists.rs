//! NamespaceExists and NamespaceAutoProvision: reject objects in missing namespaces, or create these.
//! Both are off by default; NamespaceLifecycle does the work of the former for creates.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use apiserver::registry::Intent;
use apiserver::request::Key;
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Namespace;
use machinery::status::Reason;

use crate::Row;

pub(crate) const NAMESPACE_EXISTS: Row =
    Row::disabled("NamespaceExists", |_| Ok(Box::new(NamespaceExists)));

pub(crate) struct NamespaceExists;

#[async_trait]
impl Plugin for NamespaceExists {
    fn name(&self) -> &'static str {
        "NamespaceExists"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation != Operation::Connect
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        let namespace = attributes.key.namespace.as_str();
        if namespace.is_empty() {
            return Ok(());
        }
        match attributes.registry.find::<Namespace>("", namespace).await? {
            Some(found) => {
                attributes.rely_on(&found);
                Ok(())
            }
            None => Err(StatusError::not_found("", "namespaces", namespace)),
        }
    }
}

pub(crate) const NAMESPACE_AUTO_PROVISION: Row =
    Row::disabled("NamespaceAutoProvision", |_| Ok(Box::new(NamespaceAutoProvision)));

pub(crate) struct NamespaceAutoProvision;

#[async_trait]
impl Plugin for NamespaceAutoProvision {
    fn name(&self) -> &'static str {
        "NamespaceAutoProvision"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        let (registry, namespace) = (attributes.registry, attributes.key.namespace.clone());
        let needless = namespace.is_empty() || attributes.ctx.dry_run;
        if needless || registry.find::<Namespace>("", &namespace).await?.is_some() {
            return Ok(());
        }
        let mut object = Namespace::default();
        object.metadata.name = Some(namespace.clone());
        let intent = Intent::Create { object: Box::new(object) };
        let ctx = registry.own_context::<Namespace>();
        match registry.write(&ctx, &Key::new("", namespace), intent).await {
            Err(error) if !error.is(Reason::AlreadyExists) => Err(error),
            _ => Ok(()),
        }
    }
}
