//! PodGroupProtection: a new PodGroup gets the finalizer that keeps it until none of its pods runs.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use release::features::Feature;

use crate::Row;

pub(crate) const ROW: Row =
    Row::enabled("PodGroupProtection", |_| Ok(Box::new(PodGroupProtection)))
        .gated(Feature::GenericWorkload);

const FINALIZER: &str = "scheduling.k8s.io/podgroup-protection";

struct PodGroupProtection;

#[async_trait]
impl Plugin for PodGroupProtection {
    fn name(&self) -> &'static str {
        ROW.name
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("scheduling.k8s.io", "podgroups") {
            return Ok(());
        }
        let Some(object) = attributes.object.as_mut() else { return Ok(()) };
        let all = object.meta_mut().finalizers.get_or_insert_default();
        if !all.iter().any(|one| one == FINALIZER) {
            all.push(FINALIZER.into());
        }
        Ok(())
    }
}
