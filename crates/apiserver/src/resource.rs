//! The served resources: a row per resource and version, and how its kind behaves.
//!
//! Routes, discovery, OpenAPI, short names, columns and storage keys derive from the rows. A custom resource
//! is a row made from a CRD; it takes the same path.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use machinery::field::FieldErrors;
use machinery::object::Codec;
use machinery::{Object, StatusError};
use serde_json::Value;

use crate::Registry;
use crate::request::{Key, RequestContext};

/// The body of requests and responses inside the server.
pub type Body = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

/// The verbs of a resource's objects: the usual eight, unless a row overrides them.
pub const ALL_VERBS: &[&str] =
    &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

/// An object that several rules read: the first rule that needs the tree makes it.
pub struct Examined<'a> {
    object: &'a dyn Object,
    tree: OnceCell<Value>,
}

impl<'a> Examined<'a> {
    pub fn new(object: &'a dyn Object) -> Self {
        Self { object, tree: OnceCell::new() }
    }

    pub fn tree(&self) -> &Value {
        self.tree.get_or_init(|| self.object.to_value())
    }
}

impl Deref for Examined<'_> {
    type Target = dyn Object;

    fn deref(&self) -> &Self::Target {
        self.object
    }
}

/// One served resource in one version.
pub struct Resource {
    /// Empty for the core group.
    pub group: String,
    pub version: String,
    pub kind: String,
    /// The name in URLs: `pods`.
    pub plural: String,
    pub singular: String,
    pub short_names: Vec<String>,
    pub categories: Vec<String>,
    pub namespaced: bool,
    pub verbs: Vec<&'static str>,
    /// The storage prefix below `/registry/`, for example `pods` or `services/specs`. `None`: nothing is
    /// stored, and [`Strategy::review`] answers `create` (SubjectAccessReview and similar kinds).
    pub storage: Option<String>,
    /// The kind in this version.
    pub codec: Arc<dyn Codec>,
    /// Between this version's kind and the stored one; `None` if they are the same.
    pub conversion: Option<Arc<dyn Conversion>>,
    /// Works on objects of the stored version.
    pub strategy: Arc<dyn Strategy>,
    pub subresources: Vec<Subresource>,
    /// Whether the kind comes from a CRD. Lists of built-in kinds omit the items' kind and version.
    pub custom: bool,
    /// The stored kind's definition, for example `io.k8s.api.core.v1.Pod`, and its source: for patches. Empty
    /// for a kind without Rust type and CRD.
    pub definition: String,
    pub schema: Option<Arc<dyn machinery::patch::Schema>>,
}

impl Resource {
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.clone()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// The codec of the stored version.
    pub fn stored_codec(&self) -> &dyn Codec {
        self.conversion.as_ref().map_or(&*self.codec, |conversion| conversion.stored_codec())
    }

    /// The deprecation warning of the resource in this version.
    pub fn deprecation(&self) -> Option<Cow<'_, str>> {
        match self.conversion.as_ref().and_then(|conversion| conversion.deprecation()) {
            Some(text) => Some(Cow::Borrowed(text)).filter(|text| !text.is_empty()),
            None => self.strategy.deprecation_text(),
        }
    }

    pub fn subresource(&self, name: &str) -> Option<&Subresource> {
        self.subresources.iter().find(|one| one.name == name)
    }

    pub fn allows(&self, verb: &str) -> bool {
        self.verbs.contains(&verb)
    }

    /// Whether the kind has a protobuf message.
    pub fn has_message(&self) -> bool {
        !self.custom && !self.definition.is_empty()
    }
}

/// Between a served version and the stored one. Both directions keep metadata unchanged. A custom kind's
/// [`Strategy`] works on the served version; only stored values are converted.
pub trait Conversion: Send + Sync {
    fn to_stored(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError>;
    fn to_served(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError>;

    /// Converts the objects of a list, in one call if a webhook does it.
    fn all_to_served(
        &self,
        objects: Vec<Box<dyn Object>>,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        objects.into_iter().map(|object| self.to_served(object)).collect()
    }

    /// The codec of the stored version.
    fn stored_codec(&self) -> &dyn Codec;

    /// Whether this value has another version than the stored one.
    fn is_stale(&self, _value: &[u8]) -> bool {
        false
    }

    /// The deprecation warning of the served version, empty if there is none; `None`: the strategy knows it.
    fn deprecation(&self) -> Option<&str> {
        None
    }
}

/// A subresource: `/status`, `/scale`, `/log`.
pub struct Subresource {
    pub name: &'static str,
    /// Its kind, if that is not the parent's: `Scale`, `Eviction`, `PodExecOptions`.
    pub kind: Option<SubresourceKind>,
    pub verbs: &'static [&'static str],
    pub behaviour: Behaviour,
}

#[derive(Clone, Copy, Debug)]
pub struct SubresourceKind {
    pub group: &'static str,
    pub version: &'static str,
    pub kind: &'static str,
}

pub enum Behaviour {
    /// A part of the same object: written as the whole object, of which [`Strategy::prepare_update`] keeps
    /// only that part.
    Part,
    /// A small object computed from the parent and merged into it: `scale`.
    View(Arc<dyn View>),
    /// POST of another kind that acts on the parent: `binding`, `eviction`, `token`.
    Create(Arc<dyn CreateHandler>),
    /// A byte stream: `log`, `exec`, `attach`, `portforward`, `proxy`.
    Connect(Arc<dyn Connect>),
}

/// The kind of a [`Behaviour::View`].
pub trait View: Send + Sync {
    fn codec(&self) -> &dyn Codec;
    fn view(&self, parent: &dyn Object) -> Result<Box<dyn Object>, StatusError>;
    /// Merges a changed view into the parent.
    fn merge(&self, view: &dyn Object, parent: &mut dyn Object) -> Result<(), StatusError>;
    /// The parent's path of the view's `spec.replicas`: both fields have the same owner.
    fn replicas_path(&self) -> Vec<&str> {
        vec!["spec", "replicas"]
    }
}

#[async_trait]
pub trait CreateHandler: Send + Sync {
    fn codec(&self) -> &dyn Codec;
    /// The answer of the POST: the body for `token` and `eviction`, a Status for `binding`.
    async fn create(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        key: &Key,
        body: Box<dyn Object>,
    ) -> Result<Created, StatusError>;
}

pub enum Created {
    Object(Box<dyn Object>),
    /// `Status` with `status: Success` and code 201.
    Success,
}

#[async_trait]
pub trait Connect: Send + Sync {
    /// The verb that the user needs, whatever the method is.
    fn demands(&self) -> Option<&'static str> {
        None
    }

    async fn connect(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        key: &Key,
        request: http::Request<Body>,
    ) -> Result<http::Response<Body>, StatusError>;
}

/// A column of the Table answer and of `kubectl get`.
#[derive(Clone, Debug)]
pub struct Column {
    pub name: Cow<'static, str>,
    /// string, integer, number, boolean, date
    pub kind: Cow<'static, str>,
    /// `name` for the first column, else empty.
    pub format: Cow<'static, str>,
    pub description: Doc,
    /// 0 is always shown, 1 with `-o wide`.
    pub priority: i32,
}

/// A column's description.
#[derive(Clone, Debug)]
pub enum Doc {
    Text(Cow<'static, str>),
    /// A field's description in the schema: the look-up function and the field's name.
    Field(fn(&'static str) -> String, &'static str),
}

impl Doc {
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Text(text) => Cow::Borrowed(text),
            Self::Field(look_up, field) => Cow::Owned(look_up(field)),
        }
    }
}

impl Column {
    pub fn definition(&self) -> Value {
        serde_json::json!({
            "name": self.name,
            "type": self.kind,
            "format": self.format,
            "description": self.description.text(),
            "priority": self.priority,
        })
    }
}

/// How graceful a delete is. Upstream: `RESTGracefulDeleteStrategy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grace {
    /// Remove at once (except for finalizers).
    None,
    /// The same, but the contents of the object go first. Upstream: kinds whose storage has a `Delete` of its own.
    Contents,
    /// Set the deletion timestamp and wait for the owner's confirmation with grace 0.
    Seconds(i64),
}

/// How a kind's metadata are validated, which differs between upstream's kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataRules {
    /// On creation only if there are no other errors.
    pub last: bool,
    /// Finalizers without a domain must be standard ones.
    pub needs_domains: bool,
    /// What the kind validates on an update, beside what is validated for all kinds.
    pub update: &'static [MetadataPass],
    /// The same for a subresource.
    pub part: &'static [MetadataPass],
}

/// A validation of metadata on an update. Each of them reports its errors, so upstream reports most of them
/// several times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataPass {
    /// As on creation. Upstream: `ValidateObjectMeta`.
    Whole,
    /// With what may not change. Upstream: `ValidateObjectMetaUpdate`.
    Update,
}

impl MetadataRules {
    /// Together with the kind's own fields, and once more on an update.
    pub const FULL: Self = Self {
        last: false,
        needs_domains: true,
        update: &[MetadataPass::Update],
        part: &[MetadataPass::Update],
    };
    /// Finalizers are any qualified names.
    pub const PLAIN: Self = Self { needs_domains: false, ..Self::FULL };
    /// The kind itself validates no metadata.
    pub const NONE: Self = Self { last: true, needs_domains: false, update: &[], part: &[] };
    /// An update is validated like an update, then like a new object.
    pub const UPDATE_AND_WHOLE: Self =
        Self { update: &[MetadataPass::Update, MetadataPass::Whole], ..Self::FULL };
    /// An update is validated like a new object, then like an update.
    pub const WHOLE_AND_UPDATE: Self =
        Self { update: &[MetadataPass::Whole, MetadataPass::Update], ..Self::FULL };
    /// An update is validated like a new object.
    pub const WHOLE: Self = Self { update: &[MetadataPass::Whole], ..Self::FULL };
}

/// How a kind behaves. Every method has a default: most kinds need only a few. Objects have the type of the
/// stored version.
#[async_trait]
pub trait Strategy: Send + Sync {
    /// Sets defaults. Idempotent.
    fn default(&self, _object: &mut dyn Object) {}

    /// Clears fields that a creator may not set (status), and sets initial values.
    fn prepare_create(&self, _ctx: &RequestContext, object: &mut dyn Object) {
        let _ = object;
    }

    /// Copies fields from `old` that this write may not change: the spec for `status`, the status for the
    /// main resource, all but its part for another subresource.
    fn prepare_update(&self, _ctx: &RequestContext, _object: &mut dyn Object, _old: &dyn Object) {}

    /// Whether the change increases the generation. Called for the main resource after `prepare_update`;
    /// kinds without a generation keep the default.
    fn bumps_generation(&self, _object: &dyn Object, _old: &dyn Object) -> bool {
        false
    }

    /// An annotation that Tables and metadata-only answers lack. Upstream: a conversion to the served version
    /// adds it, and those answers are made of the internal object.
    fn annotation_of_whole_objects(&self) -> Option<&'static str> {
        None
    }

    /// Whether new objects start with generation 1.
    fn has_generation(&self) -> bool {
        false
    }

    /// The group in errors.
    fn error_group<'a>(&self, group: &'a str) -> &'a str {
        group
    }

    fn validate(&self, _object: &Examined<'_>) -> FieldErrors {
        FieldErrors::default()
    }

    fn validate_update(
        &self,
        _ctx: &RequestContext,
        object: &Examined<'_>,
        _old: &Examined<'_>,
    ) -> FieldErrors {
        self.validate(object)
    }

    /// Errors of the name's syntax; see `machinery::names`.
    fn name_errors(&self, name: &str) -> Vec<String> {
        machinery::names::dns1123_subdomain(name)
    }

    /// Errors of a new object's `name` (or `generateName`) that follow from the rest of the object. They come
    /// before those of other metadata.
    fn own_name_errors(&self, _object: &dyn Object, _name: &str) -> Vec<String> {
        vec![]
    }

    /// The rules for the metadata.
    fn metadata_rules(&self) -> MetadataRules {
        MetadataRules::FULL
    }

    /// Texts for `Warning:` headers.
    fn warnings(&self, _object: &Examined<'_>, _old: Option<&Examined<'_>>) -> Vec<String> {
        vec![]
    }

    /// Whether PUT may create.
    fn create_on_update(&self) -> bool {
        false
    }

    /// Whether PUT needs no resourceVersion.
    fn unconditional_update(&self) -> bool {
        true
    }

    fn grace(&self, _object: &dyn Object, _requested: Option<i64>) -> Grace {
        Grace::None
    }

    /// Changes an object whose deletion begins (a namespace's phase).
    fn starts_deleting(&self, _object: &mut dyn Object) {}

    /// Whether anything but `metadata.finalizers` keeps a deleted object (a namespace's `spec.finalizers`).
    fn holds_back_removal(&self, _object: &dyn Object) -> bool {
        false
    }

    /// Whether a delete answers with the object instead of a Status.
    fn returns_deleted_object(&self) -> bool {
        false
    }

    /// The default propagation policy of a delete: `true` keeps dependents (orphan).
    fn orphans_by_default(&self) -> bool {
        false
    }

    /// A warning for a delete without a propagation policy.
    fn delete_warning(&self) -> Option<&'static str> {
        None
    }

    /// Selectable fields in addition to `metadata.name` and `metadata.namespace`.
    fn selectable_fields(&self, _object: &dyn Object) -> Vec<(&'static str, String)> {
        vec![]
    }

    /// Names of all these selectable fields; selectors with others are refused.
    fn selectable_names(&self) -> &'static [&'static str] {
        &[]
    }

    /// Like [`selectable_names`](Self::selectable_names), for kinds whose fields are known only at run time.
    fn is_selectable(&self, name: &str) -> bool {
        self.selectable_names().contains(&name)
    }

    /// Whether there are selectable fields in addition to name and namespace.
    fn has_selectable_fields(&self) -> bool {
        !self.selectable_names().is_empty()
    }

    /// Like [`selectable_fields`](Self::selectable_fields), for the same kinds.
    fn field_values(&self, object: &dyn Object) -> Vec<(Cow<'static, str>, String)> {
        let mut fields = self.selectable_fields(object);
        if fields.is_empty() && self.has_selectable_fields() {
            fields = self.fields_in(&object.encode()).and_then(Result::ok).unwrap_or_default();
        }
        fields.into_iter().map(|(name, value)| (Cow::Borrowed(name), value)).collect()
    }

    /// Like [`field_values`](Self::field_values), read from the JSON of the stored version without decoding
    /// all of it; `None` if the object must be decoded. For kinds with many objects.
    fn fields_in(&self, _json: &[u8]) -> Option<serde_json::Result<Vec<(&'static str, String)>>> {
        None
    }

    /// The error for a selector with a field that is not selectable.
    fn unknown_field(&self, field: &str) -> String {
        unknown_field(self.has_selectable_fields(), field)
    }

    /// The deprecation warning of the kind in this version.
    fn deprecation(&self) -> Option<&'static str> {
        None
    }

    /// Like [`deprecation`](Self::deprecation), for kinds that know it only at run time.
    fn deprecation_text(&self) -> Option<Cow<'_, str>> {
        self.deprecation().map(Cow::Borrowed)
    }

    /// The kind of lists of this kind.
    fn list_kind(&self, kind: &str) -> String {
        format!("{kind}List")
    }

    /// Seconds that an object lives in the store (Events); `None` for no limit.
    fn ttl_seconds(&self, _object: &dyn Object) -> Option<i64> {
        None
    }

    /// Sets fields that only the registry knows, before validation, or refuses the object with its own
    /// error. It allocates nothing.
    async fn settle(
        &self,
        _registry: &Registry,
        _ctx: &RequestContext,
        _object: &mut dyn Object,
        _old: Option<&dyn Object>,
    ) -> Result<(), StatusError> {
        Ok(())
    }

    /// Allocates what the object needs before it is written (cluster IPs, node ports), and may write it into
    /// the object. Runs after validation; a dry run has no side effects.
    async fn allocate(
        &self,
        _registry: &Registry,
        _ctx: &RequestContext,
        _object: &mut dyn Object,
        _old: Option<&dyn Object>,
    ) -> Result<(), StatusError> {
        Ok(())
    }

    /// Releases allocations that the object `had` and that are no longer needed: after it was removed, or
    /// after an update to `now` was written.
    async fn release(&self, _registry: &Registry, _had: &dyn Object, _now: Option<&dyn Object>) {}

    /// Called after a failed write with (some) allocations by [`allocate`](Self::allocate): releases those
    /// that the stored object, if it exists, does not have.
    async fn abandoned(&self, _registry: &Registry, _object: &dyn Object) {}

    /// The current objects of a resource that is not stored. `wanted` restricts them: an empty namespace or
    /// name means all.
    async fn computed(
        &self,
        _registry: &Registry,
        _wanted: &Key,
    ) -> Result<Vec<Box<dyn Object>>, StatusError> {
        Ok(vec![])
    }

    /// The answer of a resource that is not stored.
    async fn review(
        &self,
        _registry: &Registry,
        ctx: &RequestContext,
        _object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        Err(StatusError::method_not_allowed(&ctx.resource.group, &ctx.resource.plural, "create"))
    }

    /// Columns of the Table; the default has Name and Created At.
    fn columns(&self) -> Vec<Column> {
        vec![NAME_COLUMN, CREATED_AT_COLUMN]
    }

    /// The columns in the form of the Table.
    fn column_definitions(&self) -> Vec<Value> {
        self.columns().iter().map(Column::definition).collect()
    }

    /// One cell per column.
    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let created = object.meta().creation_timestamp.as_ref().map(|time| time.0.to_string());
        vec![object.name().into(), created.into()]
    }

    /// Conditions of the Table's row, for example that a pod is completed.
    fn row_conditions(&self, _object: &dyn Object) -> Vec<Value> {
        vec![]
    }
}

/// The usual error for a field that is not selectable.
pub fn unknown_field(has_some: bool, field: &str) -> String {
    if !has_some {
        return format!(
            "{field:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
        );
    }
    format!("field label not supported: {field}")
}

pub const NAME_COLUMN: Column = Column {
    name: Cow::Borrowed("Name"),
    kind: Cow::Borrowed("string"),
    format: Cow::Borrowed("name"),
    description: Doc::Text(Cow::Borrowed(
        "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a client to request the generation of an appropriate name automatically. Name is primarily intended for creation idempotence and configuration definition. Cannot be updated. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names",
    )),
    priority: 0,
};

pub const CREATED_AT_COLUMN: Column = Column {
    name: Cow::Borrowed("Created At"),
    kind: Cow::Borrowed("date"),
    format: Cow::Borrowed(""),
    description: Doc::Text(Cow::Borrowed(
        "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed to be set in happens-before order across separate operations. Clients may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata",
    )),
    priority: 0,
};

/// All rows, by group, version and plural. Replaced as a whole when CRDs change.
#[derive(Default, Clone)]
pub struct ResourceTable {
    rows: BTreeMap<(String, String, String), Arc<Resource>>,
    /// The same rows by their kind, in the same order: admission looks up some in each request.
    kinds: HashMap<String, Vec<Arc<Resource>>>,
    /// Rows that are hidden from clients; the server's own code finds them by their kind.
    hidden: BTreeSet<(String, String, String)>,
}

impl ResourceTable {
    pub fn new(rows: impl IntoIterator<Item = Resource>) -> Self {
        let mut table = Self::default();
        for row in rows {
            table.insert(Arc::new(row));
        }
        table
    }

    pub fn insert(&mut self, row: Arc<Resource>) {
        let place = |row: &Resource| (row.group.clone(), row.version.clone(), row.plural.clone());
        if let Some(former) = self.rows.insert(place(&row), row.clone()) {
            self.kinds
                .entry(former.kind.clone())
                .or_default()
                .retain(|one| !Arc::ptr_eq(one, &former));
        }
        let rows = self.kinds.entry(row.kind.clone()).or_default();
        rows.push(row);
        rows.sort_by_cached_key(|row| place(row));
    }

    /// Hides these rows, given by group, version and plural, from clients.
    pub fn hide(&mut self, rows: impl IntoIterator<Item = (String, String, String)>) {
        self.hidden.extend(rows);
    }

    /// Keeps the rows for which `keep` returns true.
    pub fn retain(&mut self, mut keep: impl FnMut(&Arc<Resource>) -> bool) {
        self.rows.retain(|_, row| keep(row));
        self.kinds.clear();
        for row in self.rows.values() {
            self.kinds.entry(row.kind.clone()).or_default().push(row.clone());
        }
    }

    pub fn get(&self, group: &str, version: &str, plural: &str) -> Option<&Arc<Resource>> {
        let key = (group.to_owned(), version.to_owned(), plural.to_owned());
        if self.hidden.contains(&key) { None } else { self.rows.get(&key) }
    }

    /// The row of a kind, hidden or not, in any version if `version` is empty.
    pub fn by_kind(&self, group: &str, version: &str, kind: &str) -> Option<&Arc<Resource>> {
        self.kinds
            .get(kind)?
            .iter()
            .find(|row| row.group == group && (version.is_empty() || row.version == version))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.rows.iter().filter(|(key, _)| !self.hidden.contains(key)).map(|(_, row)| row)
    }
}
