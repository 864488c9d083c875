//! DefaultIngressClass: an Ingress without a class gets the default one.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::networking::v1::{Ingress, IngressClass};

use crate::Row;
use crate::default_storage_class::newest_default;

const DEFAULT: &str = "ingressclass.kubernetes.io/is-default-class";
const OLD_CLASS: &str = "kubernetes.io/ingress.class";

pub(crate) const ROW: Row =
    Row::enabled("DefaultIngressClass", |_| Ok(Box::new(DefaultIngressClass)));

pub(crate) struct DefaultIngressClass;

#[async_trait]
impl Plugin for DefaultIngressClass {
    fn name(&self) -> &'static str {
        "DefaultIngressClass"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("networking.k8s.io", "ingresses") {
            return Ok(());
        }
        let registry = attributes.registry;
        let Some(ingress) = attributes.object_as_mut::<Ingress>() else { return Ok(()) };
        let annotated =
            ingress.metadata.annotations.as_ref().is_some_and(|map| map.contains_key(OLD_CLASS));
        let spec = ingress.spec.get_or_insert_default();
        if annotated || spec.ingress_class_name.is_some() {
            return Ok(());
        }
        let classes = registry.cached::<IngressClass>("").await?;
        spec.ingress_class_name = newest_default(&classes, &[DEFAULT]).map(str::to_owned);
        Ok(())
    }
}
