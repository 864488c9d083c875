//! The Scale of a kind with replicas. Pure.

use k8s_openapi::api::autoscaling::v1::{Scale, ScaleSpec, ScaleStatus};
use machinery::field::{FieldErrors, Path};
use machinery::{Object, ObjectMeta, StatusError};

/// The Scale of an object. `selector` is in the query's syntax.
pub fn of(parent: &ObjectMeta, wanted: i32, current: i32, selector: Option<String>) -> Scale {
    Scale {
        metadata: ObjectMeta {
            name: parent.name.clone(),
            namespace: parent.namespace.clone(),
            uid: parent.uid.clone(),
            resource_version: parent.resource_version.clone(),
            creation_timestamp: parent.creation_timestamp.clone(),
            ..ObjectMeta::default()
        },
        spec: Some(ScaleSpec { replicas: Some(wanted).filter(|count| *count != 0) }),
        status: Some(ScaleStatus {
            replicas: current,
            selector: selector.filter(|text| !text.is_empty()),
        }),
    }
}

/// The wanted replicas of a Scale that a client sent.
pub fn replicas(scale: &Scale) -> Result<i32, StatusError> {
    let replicas = scale.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or_default();
    if replicas < 0 {
        let mut errors = FieldErrors::default();
        let path = Path::new("spec").child("replicas");
        errors.invalid(&path, replicas, "must be greater than or equal to 0");
        return Err(StatusError::invalid("autoscaling", "Scale", scale.name(), errors));
    }
    Ok(replicas)
}
