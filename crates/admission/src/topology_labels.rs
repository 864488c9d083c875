//! PodTopologyLabels: copies its node's zone and region to a pod's labels, when the pod is bound or created
//! on a node.

use std::collections::BTreeMap;

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Binding, Node, Pod};
use release::features::Feature;

use crate::Row;

const LABELS: [&str; 2] = ["topology.kubernetes.io/zone", "topology.kubernetes.io/region"];

pub(crate) const ROW: Row = Row::enabled("PodTopologyLabels", |_| Ok(Box::new(TopologyLabels)))
    .gated(Feature::PodTopologyLabelsAdmission);

pub(crate) struct TopologyLabels;

#[async_trait]
impl Plugin for TopologyLabels {
    fn name(&self) -> &'static str {
        "PodTopologyLabels"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        let row = &attributes.ctx.resource;
        if !row.group.is_empty() || row.plural != "pods" {
            return Ok(());
        }
        let bound = attributes.object_as::<Binding>().map(|binding| &binding.target);
        let bound = bound.filter(|target| target.kind.as_deref() == Some("Node"));
        let placed = attributes.object_as::<Pod>().and_then(|pod| pod.spec.as_ref());
        let node = bound
            .and_then(|target| target.name.clone())
            .or_else(|| placed.and_then(|spec| spec.node_name.clone()));
        let Some(node) = node.filter(|node| !node.is_empty()) else { return Ok(()) };
        let found = attributes.registry.find::<Node>("", &node).await?;
        let Some(labels) = found.and_then(|node| node.metadata.labels) else { return Ok(()) };
        let wanted: BTreeMap<String, String> =
            labels.into_iter().filter(|(key, _)| LABELS.contains(&key.as_str())).collect();
        if let Some(object) = attributes.object.as_mut().filter(|_| !wanted.is_empty()) {
            object.meta_mut().labels.get_or_insert_default().extend(wanted);
        }
        Ok(())
    }
}
