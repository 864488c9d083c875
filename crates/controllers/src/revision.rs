//! ControllerRevisions: the history of the pod template of DaemonSets and StatefulSets. Pure.
//!
//! In: a set and its template. Out: the revision to create, and its data: the patch of `kubectl rollout undo`.

use client::Kind;
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use machinery::ObjectMeta;
use serde_json::{Value, json};

use crate::deployment::template_hash;
use crate::owner;

/// The patch that restores the template.
pub fn data_of(template: Option<&PodTemplateSpec>) -> Value {
    let mut template = serde_json::to_value(template).expect("API structs have string keys");
    template["$patch"] = "replace".into();
    json!({"spec": {"template": template}})
}

/// A revision of the set's template with this data and number. `label` has the template's hash.
pub fn new<T: Kind>(
    set: &T,
    template: Option<&PodTemplateSpec>,
    label: &str,
    (data, number): (Value, i64),
    collisions: Option<i32>,
) -> ControllerRevision {
    let template = template.cloned().unwrap_or_default();
    let hash = template_hash(&template, collisions);
    let mut labels = template.metadata.and_then(|meta| meta.labels).unwrap_or_default();
    labels.insert(label.into(), hash.clone());
    let of = set.metadata();
    ControllerRevision {
        metadata: ObjectMeta {
            name: Some(format!("{}-{hash}", of.name.as_deref().unwrap_or_default())),
            namespace: of.namespace.clone(),
            labels: Some(labels),
            annotations: of.annotations.clone(),
            owner_references: Some(vec![owner::reference(set)]),
            ..ObjectMeta::default()
        },
        data: Some(RawExtension(data)),
        revision: number,
    }
}
