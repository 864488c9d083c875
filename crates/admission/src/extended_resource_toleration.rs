//! ExtendedResourceToleration: a pod that requests an extended resource tolerates the taint of that name,
//! which excludes other pods from the nodes that have it.

use std::collections::BTreeSet;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Pod, Toleration};

use crate::Row;

pub(crate) const ROW: Row =
    Row::disabled("ExtendedResourceToleration", |_| Ok(Box::new(ExtendedResourceToleration)));

pub(crate) struct ExtendedResourceToleration;

#[async_trait]
impl Plugin for ExtendedResourceToleration {
    fn name(&self) -> &'static str {
        "ExtendedResourceToleration"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        let Some(spec) = attributes.object_as_mut::<Pod>().and_then(|pod| pod.spec.as_mut()) else {
            return Ok(());
        };
        let all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        let names: BTreeSet<String> = all
            .filter_map(|container| container.resources.as_ref()?.requests.as_ref())
            .flat_map(|requests| requests.keys().cloned())
            .filter(|name| name.contains('/') && !name.contains("kubernetes.io/"))
            .collect();
        for key in names {
            let wanted = Toleration {
                key: Some(key),
                operator: Some("Exists".into()),
                effect: Some("NoSchedule".into()),
                ..Toleration::default()
            };
            let tolerations = spec.tolerations.get_or_insert_default();
            if !tolerations.contains(&wanted) {
                tolerations.push(wanted);
            }
        }
        Ok(())
    }
}
