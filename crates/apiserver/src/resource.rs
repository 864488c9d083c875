//! The served resources: a row per resource and version, and how its kind behaves.
//!
//! Routes, discovery, OpenAPI, short names, columns and storage keys derive from the rows. A custom resource
//! is a row made from a CRD; it takes the same path.

use std::any::TypeId;
use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use k8s_openapi::ClusterResourceScope;
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
    /// The kind of lists.
    pub list_kind: String,
    /// The name in URLs: `pods`.
    pub plural: String,
    pub singular: String,
    pub short_names: Vec<String>,
    pub categories: Vec<String>,
    pub namespaced: bool,
    pub verbs: Vec<&'static str>,
    pub storage: Storage,
    /// The kind in this version.
    pub codec: Arc<dyn Codec>,
    /// Between this version's kind and the stored one; `None` if they are the same.
    pub conversion: Option<Arc<dyn Conversion>>,
    /// Works on objects of the stored version.
    pub strategy: Arc<dyn Strategy>,
    pub settings: Settings,
    pub allocator: Option<Arc<dyn Allocator>>,
    pub fields: SelectableFields,
    pub table: Arc<dyn TableConvertor>,
    pub subresources: Vec<Subresource>,
    /// The deprecation warning of the resource in this version.
    pub deprecation: Option<Cow<'static, str>>,
    /// Whether the kind comes from a CRD. Lists of built-in kinds omit the items' kind and version.
    pub custom: bool,
    /// The stored kind's definition, for example `io.k8s.api.core.v1.Pod`, and its source: for patches. Empty
    /// for a kind without Rust type and CRD.
    pub definition: String,
    pub schema: Option<Arc<dyn machinery::patch::Schema>>,
}

impl Resource {
    /// A namespaced resource without rules, whose objects are stored below its plural.
    pub fn new(
        (group, version, kind): (&str, &str, &str),
        plural: &str,
        codec: Arc<dyn Codec>,
    ) -> Self {
        Self {
            group: group.into(),
            version: version.into(),
            kind: kind.into(),
            list_kind: format!("{kind}List"),
            plural: plural.into(),
            singular: kind.to_lowercase(),
            short_names: vec![],
            categories: vec![],
            namespaced: true,
            verbs: ALL_VERBS.to_vec(),
            storage: Storage::Stored(plural.into()),
            codec,
            conversion: None,
            strategy: Arc::new(NoRules),
            settings: Settings::DEFAULT,
            allocator: None,
            fields: SelectableFields::default(),
            table: Arc::new(DefaultTable),
            subresources: vec![],
            deprecation: None,
            custom: false,
            definition: String::new(),
            schema: None,
        }
    }

    /// The same of a Rust type, which knows its names and scope.
    pub fn of<T: k8s_openapi::Resource + 'static>(codec: Arc<dyn Codec>) -> Self {
        let kind = (T::GROUP, T::VERSION, T::KIND);
        let namespaced = TypeId::of::<T::Scope>() != TypeId::of::<ClusterResourceScope>();
        Self { namespaced, ..Self::new(kind, T::URL_PATH_SEGMENT, codec) }
    }

    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.clone()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// The prefix of stored objects below `/registry/`; `None` for a resource that is not stored.
    pub fn prefix(&self) -> Option<&str> {
        match &self.storage {
            Storage::Stored(prefix) => Some(prefix),
            Storage::Computed(_) | Storage::Review(_) => None,
        }
    }

    pub fn is_stored(&self) -> bool {
        self.prefix().is_some()
    }

    /// The codec of the stored version.
    pub fn stored_codec(&self) -> &dyn Codec {
        self.conversion.as_ref().map_or(&*self.codec, |conversion| conversion.stored_codec())
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
    /// `generateName` must be valid, too, and not only the name that is made of it.
    pub checks_prefix: bool,
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
        checks_prefix: true,
        update: &[MetadataPass::Update],
        part: &[MetadataPass::Update],
    };
    /// Finalizers are any qualified names.
    pub const PLAIN: Self = Self { needs_domains: false, ..Self::FULL };
    /// The kind itself validates no metadata.
    pub const NONE: Self =
        Self { last: true, needs_domains: false, checks_prefix: true, update: &[], part: &[] };
    /// An update is validated like an update, then like a new object.
    pub const UPDATE_AND_WHOLE: Self =
        Self { update: &[MetadataPass::Update, MetadataPass::Whole], ..Self::FULL };
    /// An update is validated like a new object, then like an update.
    pub const WHOLE_AND_UPDATE: Self =
        Self { update: &[MetadataPass::Whole, MetadataPass::Update], ..Self::FULL };
    /// An update is validated like a new object.
    pub const WHOLE: Self = Self { update: &[MetadataPass::Whole], ..Self::FULL };
}

/// Constants of a kind. Upstream: constant methods of its strategy, fields of its store.
#[derive(Clone, Copy)]
pub struct Settings {
    /// Errors of the name's syntax; see `machinery::names`.
    pub name_errors: fn(&str) -> Vec<String>,
    pub metadata_rules: MetadataRules,
    /// Whether new objects start with generation 1.
    pub has_generation: bool,
    /// Whether PUT may create.
    pub create_on_update: bool,
    /// Whether PUT needs no resourceVersion.
    pub unconditional_update: bool,
    /// Whether a delete answers with the object instead of a Status.
    pub returns_deleted_object: bool,
    /// The default propagation policy of a delete: `true` keeps dependents (orphan).
    pub orphans_by_default: bool,
    /// A warning for a delete without a propagation policy.
    pub delete_warning: Option<&'static str>,
    /// The group in errors, if it is not the kind's.
    pub error_group: Option<&'static str>,
    /// An annotation that Tables and metadata-only answers lack. Upstream: a conversion to the served version
    /// adds it, and those answers are made of the internal object.
    pub annotation_of_whole_objects: Option<&'static str>,
    /// Seconds that an object lives in the store (Events); `None` for no limit.
    pub ttl_seconds: fn() -> Option<i64>,
}

impl Settings {
    pub const DEFAULT: Self = Self {
        name_errors: machinery::names::dns1123_subdomain,
        metadata_rules: MetadataRules::FULL,
        has_generation: false,
        create_on_update: false,
        unconditional_update: true,
        returns_deleted_object: false,
        orphans_by_default: false,
        delete_warning: None,
        error_group: None,
        annotation_of_whole_objects: None,
        ttl_seconds: || None,
    };
}

/// The fields that selectors may use in addition to `metadata.name` and `metadata.namespace`.
#[derive(Clone, Default)]
pub struct SelectableFields {
    pub names: Vec<Cow<'static, str>>,
    pub values: FieldValues,
    /// The error for a field that is not selectable, if it is not the usual one.
    pub unknown: Option<fn(&str) -> String>,
}

type ReadFields = dyn Fn(&dyn Object) -> Vec<String> + Send + Sync;

/// Reads the values of an object's selectable fields, in the order of their names.
#[derive(Clone)]
pub enum FieldValues {
    OfObject(Arc<ReadFields>),
    /// Reads them from the JSON of the stored version without decoding all of it. For kinds with many
    /// objects.
    OfJson(fn(&[u8]) -> serde_json::Result<Vec<String>>),
}

impl Default for FieldValues {
    fn default() -> Self {
        Self::OfObject(Arc::new(|_| vec![]))
    }
}

impl SelectableFields {
    pub fn contains(&self, name: &str) -> bool {
        self.names.iter().any(|one| one == name)
    }

    /// The error for a selector with a field that is not selectable.
    pub fn unknown(&self, field: &str) -> String {
        match self.unknown {
            Some(text) => text(field),
            None if self.names.is_empty() => format!(
                "{field:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
            ),
            None => format!("field label not supported: {field}"),
        }
    }
}

/// Where the objects of a resource come from.
#[derive(Clone)]
pub enum Storage {
    /// The store has them below `/registry/` and this prefix, for example `pods` or `services/specs`.
    Stored(String),
    /// They are computed for each request.
    Computed(Arc<dyn Computed>),
    /// There are none: the answer of `create` is computed (SubjectAccessReview and similar kinds).
    Review(Arc<dyn Review>),
}

#[async_trait]
pub trait Computed: Send + Sync {
    /// The current objects. `wanted` restricts them: an empty namespace or name means all.
    async fn computed(
        &self,
        registry: &Registry,
        wanted: &Key,
    ) -> Result<Vec<Box<dyn Object>>, StatusError>;
}

#[async_trait]
pub trait Review: Send + Sync {
    async fn review(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: Box<dyn Object>,
    ) -> Result<Created, StatusError>;
}

/// Allocates what objects need from the registry: cluster IPs and node ports of Services.
#[async_trait]
pub trait Allocator: Send + Sync {
    /// Sets fields that only the registry knows, before validation, or refuses the object with its own
    /// error. It allocates nothing.
    async fn settle(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: Option<&dyn Object>,
    ) -> Result<(), StatusError>;

    /// Allocates what the object needs before it is written, and may write it into the object. Runs after
    /// validation; a dry run has no side effects.
    async fn allocate(
        &self,
        registry: &Registry,
        ctx: &RequestContext,
        object: &mut dyn Object,
        old: Option<&dyn Object>,
    ) -> Result<(), StatusError>;

    /// Releases allocations that the object `had` and that are no longer needed: after it was removed, or
    /// after an update to `now` was written.
    async fn release(&self, registry: &Registry, had: &dyn Object, now: Option<&dyn Object>);

    /// Called after a failed write with (some) allocations by [`allocate`](Self::allocate): releases those
    /// that the stored object, if it exists, does not have.
    async fn abandoned(&self, registry: &Registry, object: &dyn Object);
}

/// Prints objects as rows of a Table. Upstream: `TableConvertor`.
pub trait TableConvertor: Send + Sync {
    fn columns(&self) -> Vec<Column>;

    /// One cell per column.
    fn cells(&self, object: &dyn Object) -> Vec<Value>;

    /// Conditions of the Table's row, for example that a pod is completed.
    fn row_conditions(&self, _object: &dyn Object) -> Vec<Value> {
        vec![]
    }
}

/// Prints Name and Created At.
pub struct DefaultTable;

impl TableConvertor for DefaultTable {
    fn columns(&self) -> Vec<Column> {
        vec![NAME_COLUMN, CREATED_AT_COLUMN]
    }

    fn cells(&self, object: &dyn Object) -> Vec<Value> {
        let created = object.meta().creation_timestamp.as_ref().map(|time| time.0.to_string());
        vec![object.name().into(), created.into()]
    }
}

/// How a kind's objects behave from their creation to their removal. Every method has a default: most kinds
/// need only a few. Objects have the type of the stored version.
pub trait Strategy: Send + Sync {
    /// Sets defaults. Idempotent.
    fn default(&self, _object: &mut dyn Object) {}

    /// Clears fields that a creator may not set (status), and sets initial values.
    fn prepare_create(&self, _ctx: &RequestContext, _object: &mut dyn Object) {}

    /// Copies fields from `old` that this write may not change: the spec for `status`, the status for the
    /// main resource, all but its part for another subresource.
    fn prepare_update(&self, _ctx: &RequestContext, _object: &mut dyn Object, _old: &dyn Object) {}

    /// Whether the change increases the generation. Called for the main resource after `prepare_update`;
    /// kinds without a generation keep the default.
    fn bumps_generation(&self, _object: &dyn Object, _old: &dyn Object) -> bool {
        false
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

    /// Errors of a new object's `name` (or `generateName`) that follow from the rest of the object. They come
    /// before those of other metadata.
    fn own_name_errors(&self, _object: &dyn Object, _name: &str) -> Vec<String> {
        vec![]
    }

    /// Texts for `Warning:` headers.
    fn warnings(&self, _object: &Examined<'_>, _old: Option<&Examined<'_>>) -> Vec<String> {
        vec![]
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
}

/// The strategy of a kind without rules.
pub struct NoRules;

impl Strategy for NoRules {}

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
