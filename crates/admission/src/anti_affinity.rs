//! LimitPodHardAntiAffinityTopology: pods may exclude others from their node, not from a whole zone.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;

use crate::Row;

const HOSTNAME: &str = "kubernetes.io/hostname";

pub(crate) const ROW: Row =
    Row::disabled("LimitPodHardAntiAffinityTopology", |_| Ok(Box::new(AntiAffinity)));

pub(crate) struct AntiAffinity;

#[async_trait]
impl Plugin for AntiAffinity {
    fn name(&self) -> &'static str {
        "LimitPodHardAntiAffinityTopology"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, attributes: &Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "pods") {
            return Ok(());
        }
        let spec = attributes.object_as::<Pod>().and_then(|pod| pod.spec.as_ref());
        let apart = spec.and_then(|spec| spec.affinity.as_ref()?.pod_anti_affinity.as_ref());
        let terms = apart
            .and_then(|apart| apart.required_during_scheduling_ignored_during_execution.as_ref());
        match terms.into_iter().flatten().find(|term| term.topology_key != HOSTNAME) {
            None => Ok(()),
            Some(term) => Err(attributes.forbidden(format!(
                "affinity.PodAntiAffinity.RequiredDuringScheduling has TopologyKey {} but only key {HOSTNAME} is allowed",
                term.topology_key
            ))),
        }
    }
}
