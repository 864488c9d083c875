//! StorageObjectInUseProtection: volumes, claims and attribute classes get the finalizers that protect
//! them while they are in use.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;

use crate::Row;

const FINALIZERS: [(&str, &str, &str); 3] = [
    ("", "persistentvolumes", "kubernetes.io/pv-protection"),
    ("", "persistentvolumeclaims", "kubernetes.io/pvc-protection"),
    ("storage.k8s.io", "volumeattributesclasses", "kubernetes.io/vac-protection"),
];

pub(crate) const ROW: Row =
    Row::enabled("StorageObjectInUseProtection", |_| Ok(Box::new(StorageInUse)));

pub(crate) struct StorageInUse;

#[async_trait]
impl Plugin for StorageInUse {
    fn name(&self) -> &'static str {
        "StorageObjectInUseProtection"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        let kept =
            FINALIZERS.iter().find(|(group, plural, _)| attributes.is_resource(group, plural));
        let (Some((.., finalizer)), Some(object)) = (kept, attributes.object.as_mut()) else {
            return Ok(());
        };
        let all = object.meta_mut().finalizers.get_or_insert_default();
        if !all.iter().any(|one| one == finalizer) {
            all.push((*finalizer).into());
        }
        Ok(())
    }
}
