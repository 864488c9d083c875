//! Building a row: what the Rust type knows is taken from it, the rest is said.

use std::any::TypeId;
use std::sync::Arc;

use api::versions::Version;
use apiserver::resource::{
    ALL_VERBS, Behaviour, Conversion, Resource, Strategy, Subresource, SubresourceKind,
};
use k8s_openapi::{ClusterResourceScope, Metadata};
use machinery::object::{Codec, DecodeError, Decoded, Unstructured};
use machinery::patch::Schema;
use machinery::{Object, ObjectMeta};
use release::features::{self, Feature};
use serde_json::Value;

use crate::versions;

/// A row in the making.
pub struct Row {
    resource: Resource,
    /// The row is served only while this gate is open.
    gate: Option<Feature>,
}

impl Row {
    fn of(resource: Resource) -> Self {
        Self { resource, gate: None }
    }

    /// The row of a kind with a strategy; group, version, plural and scope are the type's.
    pub fn new<T>(strategy: impl Strategy + 'static) -> Self
    where
        T: Metadata<Ty = ObjectMeta> + 'static,
    {
        Self::of(Resource {
            group: T::GROUP.into(),
            version: T::VERSION.into(),
            kind: T::KIND.into(),
            plural: T::URL_PATH_SEGMENT.into(),
            singular: T::KIND.to_lowercase(),
            short_names: vec![],
            categories: vec![],
            namespaced: TypeId::of::<T::Scope>() != TypeId::of::<ClusterResourceScope>(),
            verbs: ALL_VERBS.to_vec(),
            storage: Some(T::URL_PATH_SEGMENT.into()),
            codec: api::kinds::codec(T::API_VERSION, T::KIND)
                .expect("api knows every kind with a row"),
            conversion: None,
            strategy: Arc::new(strategy),
            subresources: vec![],
            custom: false,
            definition: definition(T::GROUP, T::VERSION, T::KIND),
            schema: None,
        })
    }

    /// The row of a kind without a Rust type: nothing of it is stored, so no schema is needed. There
    /// is no protobuf message for it either: its clients read JSON.
    pub fn untyped(
        (group, version, kind): (&str, &str, &str),
        plural: &str,
        namespaced: bool,
        strategy: impl Strategy + 'static,
    ) -> Self {
        let codec = Untyped { api_version: format!("{group}/{version}"), kind: kind.into() };
        Self::of(Resource {
            group: group.into(),
            version: version.into(),
            kind: kind.into(),
            plural: plural.into(),
            singular: kind.to_lowercase(),
            short_names: vec![],
            categories: vec![],
            namespaced,
            verbs: ALL_VERBS.to_vec(),
            storage: Some(plural.into()),
            codec: Arc::new(codec),
            conversion: None,
            strategy: Arc::new(strategy),
            subresources: vec![],
            custom: false,
            definition: String::new(),
            schema: None,
        })
    }

    pub fn short(mut self, names: &[&str]) -> Self {
        self.resource.short_names = names.iter().map(|name| (*name).to_owned()).collect();
        self
    }

    pub fn categories(mut self, names: &[&str]) -> Self {
        self.resource.categories = names.iter().map(|name| (*name).to_owned()).collect();
        self
    }

    /// Where the objects are kept, when that is not the plural.
    pub fn storage(mut self, prefix: &str) -> Self {
        self.resource.storage = Some(prefix.into());
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

    /// Nothing is stored: objects are computed, or a create is answered.
    pub(crate) fn not_stored(mut self) -> Self {
        self.resource.storage = None;
        self
    }

    /// Is the gate of the kind open, if it has one? Says so if it is not.
    pub fn is_open(&self) -> bool {
        let Some(gate) = self.gate.filter(|gate| !features::enabled(*gate)) else { return true };
        let kind = &self.resource.kind;
        tracing::warn!("{kind} storage is disabled because the {gate} feature gate is disabled");
        false
    }

    /// The same resource in another version than the stored one, which is this.
    pub fn in_version(mut self, version: Version) -> Self {
        self.resource.version = version.version().into();
        self.resource.codec = version.codec().expect("api knows the kind of every further version");
        self.converted_by(Arc::new(versions::Renamed::new(version)))
    }

    pub fn resource(&self) -> &Resource {
        &self.resource
    }

    /// Other verbs than the usual eight.
    pub fn verbs(mut self, verbs: Vec<&'static str>) -> Self {
        self.resource.verbs = verbs;
        self
    }

    /// Nothing is stored; a create is answered by [`Strategy::review`].
    pub fn review(mut self) -> Self {
        self.resource.storage = None;
        self.resource.verbs = vec!["create"];
        self
    }

    /// Nothing is stored; what there is is found out when somebody asks.
    pub fn computed(mut self) -> Self {
        self.resource.storage = None;
        self.resource.verbs = vec!["get", "list"];
        self
    }

    pub fn cluster_scoped(mut self) -> Self {
        self.resource.namespaced = false;
        self
    }

    pub fn sub(
        self,
        name: &'static str,
        kind: Option<(&'static str, &'static str, &'static str)>,
        verbs: &'static [&'static str],
        behaviour: Behaviour,
    ) -> Self {
        let kind = kind.map(|(group, version, kind)| SubresourceKind { group, version, kind });
        self.subresource(Subresource { name, kind, verbs, behaviour })
    }

    fn subresource(mut self, subresource: Subresource) -> Self {
        self.resource.subresources.push(subresource);
        self
    }

    /// The finished row.
    pub fn build(mut self, schema: Option<Arc<dyn Schema>>) -> Resource {
        self.resource.subresources.sort_unstable_by_key(|sub| sub.name);
        self.resource.schema = schema;
        self.resource
    }
}

/// The codec of a kind without a Rust type.
struct Untyped {
    api_version: String,
    kind: String,
}

impl Codec for Untyped {
    fn decode(&self, json: &[u8]) -> Result<Decoded, DecodeError> {
        self.decode_value(serde_json::from_slice(json)?)
    }

    fn decode_value(&self, value: Value) -> Result<Decoded, DecodeError> {
        let object = Box::new(Unstructured::from_value(value)?);
        Ok(Decoded { object, unknown_fields: vec![] })
    }

    fn decode_stored(&self, json: &[u8]) -> Result<Box<dyn Object>, DecodeError> {
        Ok(self.decode(json)?.object)
    }

    fn empty(&self) -> Box<dyn Object> {
        Box::new(Unstructured {
            api_version: self.api_version.clone(),
            kind: self.kind.clone(),
            metadata: ObjectMeta::default(),
            fields: Default::default(),
        })
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
