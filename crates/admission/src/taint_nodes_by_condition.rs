//! TaintNodesByCondition: a new node gets no pods until it is known to be ready.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, Taint};

use crate::Row;

const NOT_READY: &str = "node.kubernetes.io/not-ready";

pub(crate) const ROW: Row =
    Row::enabled("TaintNodesByCondition", |_| Ok(Box::new(TaintNodesByCondition)));

pub(crate) struct TaintNodesByCondition;

#[async_trait]
impl Plugin for TaintNodesByCondition {
    fn name(&self) -> &'static str {
        "TaintNodesByCondition"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "nodes") {
            return Ok(());
        }
        let Some(node) =
            attributes.object.as_mut().and_then(|object| object.downcast_mut::<Node>())
        else {
            return Ok(());
        };
        let taints = node.spec.get_or_insert_default().taints.get_or_insert_default();
        if !taints.iter().any(|taint| taint.key == NOT_READY && taint.effect == "NoSchedule") {
            taints.push(Taint {
                key: NOT_READY.into(),
                effect: "NoSchedule".into(),
                ..Taint::default()
            });
        }
        Ok(())
    }
}
