//! A tiny resource table for tests: ConfigMaps, Namespaces, and Deployments with a scale.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::autoscaling::v1::{Scale, ScaleSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use machinery::object::{Codec, Typed};
use machinery::{Object, StatusError};

use crate::resource::*;

struct Plain;
impl Strategy for Plain {}

struct ScaleView;

impl View for ScaleView {
    fn codec(&self) -> &dyn Codec {
        const CODEC: Typed<Scale> = Typed::new();
        &CODEC
    }

    fn view(&self, parent: &dyn Object) -> Result<Box<dyn Object>, StatusError> {
        let parent = parent.expect::<Deployment>();
        let replicas = parent.spec.as_ref().and_then(|spec| spec.replicas);
        let metadata = parent.metadata.clone();
        Ok(Box::new(Scale { metadata, spec: Some(ScaleSpec { replicas }), status: None }))
    }

    fn merge(&self, view: &dyn Object, parent: &mut dyn Object) -> Result<(), StatusError> {
        let scale = view.expect::<Scale>();
        let spec = parent.expect_mut::<Deployment>().spec.get_or_insert_default();
        spec.replicas = scale.spec.as_ref().and_then(|spec| spec.replicas);
        Ok(())
    }
}

fn row<T>(plural: &str, short: &[&str], namespaced: bool) -> Resource
where
    T: k8s_openapi::Resource
        + k8s_openapi::Metadata<Ty = machinery::ObjectMeta>
        + serde::Serialize
        + serde::de::DeserializeOwned
        + Default
        + Clone
        + Send
        + Sync
        + 'static,
{
    Resource {
        group: T::GROUP.into(),
        version: T::VERSION.into(),
        kind: T::KIND.into(),
        plural: plural.into(),
        singular: T::KIND.to_lowercase(),
        short_names: short.iter().map(|name| (*name).to_owned()).collect(),
        categories: vec![],
        namespaced,
        verbs: ALL_VERBS.to_vec(),
        storage: Some(plural.into()),
        codec: Arc::new(Typed::<T>::new()),
        conversion: None,
        strategy: Arc::new(Plain),
        subresources: vec![],
        custom: false,
        definition: String::new(),
        schema: None,
    }
}

pub fn table() -> ResourceTable {
    let mut deployments = row::<Deployment>("deployments", &["deploy"], true);
    deployments.subresources = vec![
        Subresource {
            name: "status",
            kind: None,
            verbs: &["get", "patch", "update"],
            behaviour: Behaviour::Part,
        },
        Subresource {
            name: "scale",
            kind: Some(SubresourceKind { group: "autoscaling", version: "v1", kind: "Scale" }),
            verbs: &["get", "patch", "update"],
            behaviour: Behaviour::View(Arc::new(ScaleView)),
        },
    ];
    ResourceTable::new([
        row::<ConfigMap>("configmaps", &["cm"], true),
        row::<Namespace>("namespaces", &["ns"], false),
        deployments,
    ])
}
