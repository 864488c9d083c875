//! A small resource table for tests: ConfigMaps, Namespaces, and Deployments with a scale.

use std::sync::{Arc, LazyLock};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::autoscaling::v1::{Scale, ScaleSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use machinery::object::{Codec, Typed};
use machinery::protobuf::Descriptors;
use machinery::{Object, StatusError};

use crate::resource::*;

/// For strategic merge patches of plain maps.
struct NoFacts;

impl machinery::patch::Schema for NoFacts {
    fn field(&self, _: &str, _: &str) -> Option<machinery::patch::FieldFacts> {
        None
    }
}

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

pub fn row<T>(plural: &str, short: &[&str], namespaced: bool) -> Resource
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
        short_names: short.iter().map(|name| (*name).to_owned()).collect(),
        namespaced,
        definition: format!("test.{}", T::KIND),
        ..Resource::new((T::GROUP, T::VERSION, T::KIND), plural, Arc::new(Typed::<T>::new()))
    }
}

/// Messages of these kinds, as far as tests need them.
pub fn descriptors() -> &'static Descriptors {
    const FACTS: &str = "@meta.v1\tmeta.k8s.io/v1\n\
        DeleteOptions\n\t1\tgracePeriodSeconds\tint64\t*?\n\t2\tpreconditions\tPreconditions\t*?\n\
        ListMeta\n\t2\tresourceVersion\tstring\t?\n\t3\tcontinue\tstring\t?\n\
        ObjectMeta\n\t1\tname\tstring\t?\n\t3\tnamespace\tstring\t?\n\t5\tuid\tstring\t?\n\
        \t6\tresourceVersion\tstring\t?\n\t8\tcreationTimestamp\ttime\t?0\n\t11\tlabels\t{}string\t?\n\
        PartialObjectMetadata\n\t1\tmetadata\tObjectMeta\t?\n\
        Preconditions\n\t1\tuid\tstring\t*?\n\
        Status\n\t2\tstatus\tstring\t?\n\t3\tmessage\tstring\t?\n\t4\treason\tstring\t?\n\t6\tcode\tint32\t?\n\
        @core.v1\tv1\n\
        ConfigMap\n\t1\tmetadata\tmeta.v1.ObjectMeta\t?\n\t2\tdata\t{}string\t?\n\
        ConfigMapList\n\t1\tmetadata\tmeta.v1.ListMeta\t?\n\t2\titems\t[]ConfigMap\n";
    static DESCRIPTORS: LazyLock<Descriptors> =
        LazyLock::new(|| Descriptors::parse(FACTS, "meta.k8s.io/v1"));
    &DESCRIPTORS
}

pub fn table() -> ResourceTable {
    let mut deployments = row::<Deployment>("deployments", &["deploy"], true);
    deployments.schema = Some(Arc::new(NoFacts));
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
