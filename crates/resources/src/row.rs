//! Builds a row: names and scope come from the Rust type, the kind adds the rest.

use std::sync::Arc;

use apiserver::resource::{Computed, Conversion, Resource, Review, Storage, TableConvertor};
use machinery::object::Untyped;
use machinery::patch::Schema;
use release::features::{self, Feature};

/// A row that is being built.
pub struct Row {
    resource: Resource,
    /// The row is served only while this gate is open.
    gate: Option<Feature>,
}

impl Row {
    fn of(resource: Resource) -> Self {
        Self { resource, gate: None }
    }

    /// The row of a kind; group, version, plural and scope are the type's.
    pub(crate) fn new<T: k8s_openapi::Resource + 'static>() -> Self {
        let codec = api::kinds::codec(T::API_VERSION, T::KIND);
        let codec = codec.expect("api knows every kind with a row");
        let definition = definition(T::GROUP, T::VERSION, T::KIND);
        Self::of(Resource { definition, ..Resource::of::<T>(codec) })
    }

    /// The row of a kind of which nothing is stored: a create is answered.
    pub fn review<T: k8s_openapi::Resource + 'static>(review: impl Review + 'static) -> Self {
        let storage = Storage::Review(Arc::new(review));
        Self::new::<T>().verbs(vec!["create"]).with(|row| Resource { storage, ..row })
    }

    /// The row of a kind without a Rust type: nothing of it is stored, so no schema is needed. There
    /// is no protobuf message for it either: its clients read JSON.
    pub fn computed(
        (group, version, kind): (&str, &str, &str),
        plural: &str,
        source: Arc<dyn Computed>,
        table: Arc<dyn TableConvertor>,
    ) -> Self {
        let codec = Untyped { api_version: format!("{group}/{version}"), kind: kind.into() };
        Self::of(Resource {
            verbs: vec!["get", "list"],
            storage: Storage::Computed(source),
            table,
            ..Resource::new((group, version, kind), plural, Arc::new(codec))
        })
    }

    /// Changes what the type does not know.
    pub(crate) fn with(mut self, change: impl FnOnce(Resource) -> Resource) -> Self {
        self.resource = change(self.resource);
        self
    }

    /// The same objects as another resource, without subresources, short names and categories.
    pub(crate) fn alone(mut self, group: &str, plural: &str) -> Self {
        let resource = &mut self.resource;
        resource.group = group.into();
        resource.plural = plural.into();
        resource.singular = plural.into();
        resource.short_names.clear();
        resource.categories.clear();
        resource.subresources.clear();
        self
    }

    /// Served in this version, stored in another.
    pub(crate) fn converted_by(mut self, conversion: Arc<dyn Conversion>) -> Self {
        self.resource.conversion = Some(conversion);
        self
    }

    pub(crate) fn gate(mut self, gate: Option<Feature>) -> Self {
        self.gate = gate;
        self
    }

    /// Is the gate of the kind open, if it has one? Says so if it is not.
    pub fn is_open(&self) -> bool {
        let Some(gate) = self.gate.filter(|gate| !features::enabled(*gate)) else { return true };
        let kind = &self.resource.kind;
        tracing::warn!("{kind} storage is disabled because the {gate} feature gate is disabled");
        false
    }

    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// Other verbs than the usual eight.
    pub fn verbs(mut self, verbs: Vec<&'static str>) -> Self {
        self.resource.verbs = verbs;
        self
    }

    pub fn cluster_scoped(mut self) -> Self {
        self.resource.namespaced = false;
        self
    }

    /// The finished row.
    pub fn build(mut self, schema: Option<Arc<dyn Schema>>) -> Resource {
        self.resource.subresources.sort_unstable_by_key(|sub| sub.name);
        self.resource.schema = schema;
        self.resource
    }
}

/// The kind's name in OpenAPI: `io.k8s.api.core.v1.Pod`.
fn definition(group: &str, version: &str, kind: &str) -> String {
    match group {
        "apiextensions.k8s.io" => {
            format!("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.{version}.{kind}")
        }
        "apiregistration.k8s.io" => {
            format!("io.k8s.kube-aggregator.pkg.apis.apiregistration.{version}.{kind}")
        }
        "internal.apiserver.k8s.io" => format!("io.k8s.api.apiserverinternal.{version}.{kind}"),
        "" => format!("io.k8s.api.core.{version}.{kind}"),
        _ => format!("io.k8s.api.{}.{version}.{kind}", group.split('.').next().unwrap_or_default()),
    }
}
