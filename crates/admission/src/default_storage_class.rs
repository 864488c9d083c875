//! DefaultStorageClass: a claim without a class gets the default one.

use apiserver::StatusError;
use apiserver::admission::{Attributes, Operation, Plugin};
use async_trait::async_trait;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use machinery::Object;

use crate::Row;

const DEFAULT: [&str; 2] = [
    "storageclass.kubernetes.io/is-default-class",
    "storageclass.beta.kubernetes.io/is-default-class",
];
const OLD_CLASS: &str = "volume.beta.kubernetes.io/storage-class";

pub(crate) const ROW: Row =
    Row::enabled("DefaultStorageClass", |_| Ok(Box::new(DefaultStorageClass)));

pub(crate) struct DefaultStorageClass;

#[async_trait]
impl Plugin for DefaultStorageClass {
    fn name(&self) -> &'static str {
        "DefaultStorageClass"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn admit(&self, attributes: &mut Attributes<'_>) -> Result<(), StatusError> {
        if !attributes.is_resource("", "persistentvolumeclaims") {
            return Ok(());
        }
        let registry = attributes.registry;
        let Some(claim) = attributes.object_as_mut::<PersistentVolumeClaim>() else {
            return Ok(());
        };
        let annotated =
            claim.metadata.annotations.as_ref().is_some_and(|map| map.contains_key(OLD_CLASS));
        let spec = claim.spec.get_or_insert_default();
        if annotated || spec.storage_class_name.is_some() {
            return Ok(());
        }
        let classes = registry.cached::<StorageClass>("").await?;
        spec.storage_class_name = newest_default(&classes, &DEFAULT).map(str::to_owned);
        Ok(())
    }
}

/// Among several defaults the newest wins, among equally old ones the first by name.
pub(crate) fn newest_default<'a, T: Object>(all: &'a [T], annotations: &[&str]) -> Option<&'a str> {
    let is_default = |object: &&T| {
        let has = |key: &&str| {
            let map = object.meta().annotations.as_ref();
            map.and_then(|map| map.get(*key)).is_some_and(|value| value == "true")
        };
        annotations.iter().any(has)
    };
    let created = |object: &T| object.meta().creation_timestamp.as_ref().map(|time| time.0);
    let best = all
        .iter()
        .filter(is_default)
        .max_by(|a, b| created(a).cmp(&created(b)).then_with(|| b.name().cmp(a.name())));
    best.map(|object| object.name())
}
