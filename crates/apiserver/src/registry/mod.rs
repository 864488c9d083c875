//! The registry: reads and the one write path of every resource.
//!
//! In: typed requests from `verbs` and from the server's own parts. Out: bytes at revisions.
//! Only this module writes to the store.

mod claims;
mod compiled;
mod delete;
mod known;
pub mod local;
mod managed;
mod metadata;
mod options;
mod patched;
mod read;
mod write;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use arc_swap::ArcSwap;
use base::task::Tasks;
use machinery::{Object, ObjectMeta};
use store::{RangeRequest, Revision, Store};
use tokio::sync::watch;

pub use compiled::Compiled;
pub use options::{DeleteOptions, Intent, ListOptions, Modify, Outcome, Written};

use crate::StatusError;
use crate::admission::{Attributes, Chain, Operation};
use crate::cacher::{CacheEvent, Cacher, Cursor, Scope};
use crate::metrics::storage::StorageNumbers;
use crate::request::{Key, RequestContext, UserInfo};
use crate::resource::{CreateHandler, Created, Examined, Resource, ResourceTable, Storage};
use crate::schemas::{NoSchemas, SchemaSource};
pub(crate) use read::parse_version;

pub use crate::stored::{EventStream, List, Stored, WatchEvent};

/// See the module. Clones share the registry.
#[derive(Clone)]
pub struct Registry(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    /// Replaced once, when the authorizers exist, which its plugins need.
    chain: ArcSwap<Chain>,
    table: ArcSwap<ResourceTable>,
    /// Locked while a changed table is made from the current one.
    changing: Mutex<()>,
    /// Counts the replacements of `table`, and notifies subscribers.
    generation: watch::Sender<u64>,
    /// One per storage prefix, made on first use. A plain mutex: never held across an await.
    cachers: Mutex<HashMap<String, Arc<Cacher>>>,
    /// Leases of expiring objects, shared by objects that expire at about the same time.
    leases: write::Leases,
    known: known::Known,
    numbers: StorageNumbers,
    /// Explains why the result of a patch does not match the kind; set once, by the server.
    schemas: OnceLock<Arc<dyn SchemaSource>>,
    tasks: Tasks,
}

impl Registry {
    pub fn new(store: Arc<dyn Store>, table: ResourceTable, chain: Chain, tasks: Tasks) -> Self {
        Self(Arc::new(Inner {
            store,
            chain: ArcSwap::from_pointee(chain),
            table: ArcSwap::from_pointee(table),
            changing: Mutex::default(),
            generation: watch::Sender::new(1),
            cachers: Mutex::default(),
            leases: write::Leases::default(),
            known: known::Known::default(),
            numbers: StorageNumbers::default(),
            schemas: OnceLock::new(),
            tasks,
        }))
    }

    /// Sets the admission plugins. Some need the authorizers, which are made from the registry.
    pub fn set_admission(&self, chain: Chain) {
        self.0.chain.store(Arc::new(chain));
    }

    /// Sets the source of schemas. Only the first call counts.
    pub fn set_schemas(&self, schemas: Arc<dyn SchemaSource>) {
        let _ = self.0.schemas.set(schemas);
    }

    fn schemas(&self) -> &dyn SchemaSource {
        self.0.schemas.get().map_or(&NoSchemas, |schemas| &**schemas)
    }

    fn chain(&self) -> Arc<Chain> {
        self.0.chain.load_full()
    }

    pub fn resources(&self) -> Arc<ResourceTable> {
        self.0.table.load_full()
    }

    /// Replaces the rows; the generation tells discovery and OpenAPI.
    pub fn set_resources(&self, table: ResourceTable) {
        self.0.table.store(Arc::new(table));
        self.touch_resources();
    }

    /// Announces a change of discovery without a change of the rows.
    pub fn touch_resources(&self) {
        self.0.generation.send_modify(|generation| *generation += 1);
    }

    /// Subscribes to [`Registry::resources_generation`].
    pub fn resource_changes(&self) -> watch::Receiver<u64> {
        self.0.generation.subscribe()
    }

    /// Changes the rows; concurrent changes are safe. Watch caches of removed custom rows are dropped, and
    /// their watches end.
    pub fn change_resources(&self, change: impl FnOnce(&mut ResourceTable)) {
        let changing = self.0.changing.lock().expect("no panic under the lock");
        let mut table = (*self.resources()).clone();
        change(&mut table);
        self.set_resources(table);
        drop(changing);
        let table = self.resources();
        let mut cachers = self.0.cachers.lock().expect("no panic under the lock");
        cachers.retain(|_, cacher| {
            let row = cacher.row();
            let now = table.get(&row.group, &row.version, &row.plural);
            let same = |now: &Arc<Resource>| Arc::ptr_eq(&now.strategy, &row.strategy);
            let stays = !row.custom || now.is_some_and(same);
            if !stays {
                cacher.retire();
            }
            stays
        });
    }

    pub fn resources_generation(&self) -> u64 {
        *self.0.generation.borrow()
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    /// The server's task group, for streams that outlive their request.
    pub fn tasks(&self) -> &Tasks {
        &self.0.tasks
    }

    /// The row of a built-in kind, in the version of its Rust type.
    pub fn row_of<T: k8s_openapi::Resource>(&self) -> Arc<Resource> {
        let row = self.0.table.load().by_kind(T::GROUP, T::VERSION, T::KIND).cloned();
        row.unwrap_or_else(|| panic!("no row serves {} {}", T::API_VERSION, T::KIND))
    }

    pub(crate) fn cacher(&self, row: &Arc<Resource>) -> Arc<Cacher> {
        let storage = cacher_name(row).expect("only stored resources are read");
        let mut cachers = self.0.cachers.lock().expect("no panic under the lock");
        let make = || {
            let cacher = Cacher::new(row.clone(), self.0.store.clone());
            self.0.tasks.spawn("cacher", cacher.clone().feed());
            cacher
        };
        cachers.entry(storage).or_insert_with(make).clone()
    }

    /// Number and bytes of a resource's objects, if they are known without reading the store.
    pub(crate) fn stored_size(&self, row: &Resource) -> Option<(u64, u64)> {
        let cachers = self.0.cachers.lock().expect("no panic under the lock");
        let (objects, bytes) = cachers.get(&cacher_name(row)?)?.size();
        Some((objects as u64, bytes as u64))
    }

    /// Rows whose objects are in memory, with their number and bytes, by storage key.
    pub(crate) fn stored_sizes(&self) -> Vec<(Arc<Resource>, usize, usize)> {
        let cachers = self.0.cachers.lock().expect("no panic under the lock");
        let mut sizes: Vec<_> = cachers
            .values()
            .map(|cacher| {
                let (objects, bytes) = cacher.size();
                (cacher.row().clone(), objects, bytes)
            })
            .collect();
        drop(cachers);
        let name = |row: &Arc<Resource>| (row.group.clone(), row.plural.clone());
        sizes.sort_by_cached_key(|(row, ..)| name(row));
        // Versions of a custom kind may have separate caches.
        sizes.dedup_by_key(|(row, ..)| name(row));
        sizes
    }

    /// One object for the server's own code: from the store, always current.
    pub async fn find<T>(&self, namespace: &str, name: &str) -> Result<Option<T>, StatusError>
    where
        T: k8s_openapi::Metadata<Ty = ObjectMeta> + 'static,
    {
        let row = self.row_of::<T>();
        let key = Key::new(namespace, name);
        let Some(stored) = self.current(&row, &key).await? else { return Ok(None) };
        Ok(stored.object()?.into_typed())
    }

    /// All objects of a kind (in one namespace, or in all if it is empty), from the current watch cache.
    pub async fn cached<T>(&self, namespace: &str) -> Result<Vec<T>, StatusError>
    where
        T: k8s_openapi::Metadata<Ty = ObjectMeta> + 'static,
    {
        let row = self.row_of::<T>();
        let cacher = self.cacher(&row);
        cacher.settled().await?;
        let scope = Scope { namespace: namespace.into(), ..Scope::default() };
        let (entries, _, _) = cacher.list(&scope, 0);
        let mut all = Vec::with_capacity(entries.len());
        for entry in entries {
            all.extend(cacher.stored(&entry).object()?.into_typed::<T>());
        }
        Ok(all)
    }

    /// Like [`cached`](Self::cached), but only objects with these labels.
    pub async fn cached_with<T>(
        &self,
        namespace: &str,
        labels: machinery::selector::Selector,
    ) -> Result<Vec<T>, StatusError>
    where
        T: k8s_openapi::Metadata<Ty = ObjectMeta> + 'static,
    {
        let cacher = self.cacher(&self.row_of::<T>());
        cacher.settled().await?;
        let scope = Scope { namespace: namespace.into(), labels, ..Scope::default() };
        let (entries, ..) = cacher.list(&scope, 0);
        let mut all = Vec::with_capacity(entries.len());
        for entry in entries {
            all.extend(cacher.stored(&entry).object()?.into_typed::<T>());
        }
        Ok(all)
    }

    /// Makes later reads of the kind's cache wait for a write of this registry.
    fn note_written(&self, row: &Resource, revision: Revision) {
        let Some(storage) = row.prefix() else { return };
        let cachers = self.0.cachers.lock().expect("no panic under the lock");
        if let Some(cacher) = cachers.get(storage) {
            cacher.note_written(revision);
        }
    }

    /// The current state of a kind and a cursor over later events, for indexes such as RBAC's.
    pub async fn follow<T>(&self) -> (Vec<Stored>, Cursor)
    where
        T: k8s_openapi::Resource,
    {
        let cacher = self.cacher(&self.row_of::<T>());
        cacher.filled().await;
        let (entries, revision, _) = cacher.list(&Scope::default(), 0);
        (entries.iter().map(|entry| cacher.stored(entry)).collect(), cacher.cursor(revision))
    }

    /// The object of a cache event from the cursor of [`follow`](Self::follow).
    pub fn stored_of<T: k8s_openapi::Resource>(&self, event: &CacheEvent) -> Option<Stored> {
        let cacher = self.cacher(&self.row_of::<T>());
        let entry = event.entry.as_ref().or(event.previous.as_ref())?;
        Some(Stored::new(cacher.row().clone(), event.value(entry), entry.revision))
    }

    /// A context for the server's own writes to a built-in kind.
    pub fn own_context<T: k8s_openapi::Resource>(&self) -> RequestContext {
        let mut ctx = RequestContext::new(UserInfo::apiserver(), self.row_of::<T>(), "");
        ctx.field_manager = "kube-apiserver".into();
        ctx
    }

    /// The answer of a resource that is not stored (the review kinds), after admission.
    pub async fn review(
        &self,
        ctx: &RequestContext,
        mut object: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        ctx.resource.strategy.default(&mut *object);
        self.own(ctx, &mut *object, None);
        let key = Key::new(object.namespace(), object.name());
        let options = serde_json::Value::Null;
        let mut attributes =
            Attributes::new(ctx, self, Operation::Create, &key, Some(&mut object), None, &options);
        self.chain().admit(&mut attributes).await?;
        self.chain().validate(&attributes).await?;
        let errors = ctx.resource.strategy.validate(&Examined::new(&*object));
        if !errors.is_empty() {
            return Err(StatusError::invalid(
                &ctx.resource.group,
                // Upstream omits the kind of reviews.
                "",
                &key.name,
                errors,
            ));
        }
        let row = &ctx.resource;
        match &row.storage {
            Storage::Review(reviewer) => reviewer.review(self, ctx, object).await,
            Storage::Stored(_) | Storage::Computed(_) => {
                Err(StatusError::method_not_allowed(&row.group, &row.plural, "create"))
            }
        }
    }

    /// A POST to a subresource of another kind, after admission.
    pub async fn create_subresource(
        &self,
        ctx: &RequestContext,
        key: &Key,
        handler: &dyn CreateHandler,
        mut body: Box<dyn Object>,
    ) -> Result<Created, StatusError> {
        let options = serde_json::Value::Null;
        let mut attributes =
            Attributes::new(ctx, self, Operation::Create, key, Some(&mut body), None, &options);
        self.chain().admit(&mut attributes).await?;
        self.chain().validate(&attributes).await?;
        handler.create(self, ctx, key, body).await
    }

    /// Admission for exec, attach, portforward and proxy.
    pub async fn admit_connect(
        &self,
        ctx: &RequestContext,
        key: &Key,
        mut object: Box<dyn Object>,
    ) -> Result<(), StatusError> {
        let options = serde_json::Value::Null;
        let mut attributes =
            Attributes::new(ctx, self, Operation::Connect, key, Some(&mut object), None, &options);
        self.chain().admit(&mut attributes).await?;
        self.chain().validate(&attributes).await
    }

    pub(crate) async fn current(
        &self,
        row: &Arc<Resource>,
        key: &Key,
    ) -> Result<Option<Stored>, StatusError> {
        let range = store::KeyRange::one(store_key(row, key));
        let asked = self.0.store.range(RangeRequest::new(range));
        let found = self.0.numbers.timed("get", row, asked).await.map_err(store_error)?;
        let kv = found.kvs.into_iter().next();
        // A caller that reads one object usually decodes it, and more than once.
        Ok(kv.map(|kv| Stored::new(row.clone(), kv.value.bytes(), kv.mod_revision)))
    }

    /// Writes the store's latencies, for `/metrics`.
    pub(crate) fn encode_storage(&self, out: &mut String) {
        self.0.numbers.encode(out);
    }

    /// The families about the store's disk. A store that does not answer soon has none.
    pub(crate) async fn encode_space(&self, out: &mut String) {
        const PATIENCE: std::time::Duration = std::time::Duration::from_secs(2);
        let space = tokio::time::timeout(PATIENCE, self.0.store.space()).await;
        if let Ok(Ok(space)) = space {
            crate::metrics::storage::encode_space(&space, out);
        }
    }

    /// The store's newest revision.
    pub async fn revision(&self) -> Result<Revision, StatusError> {
        self.0.store.revision().await.map_err(store_error)
    }
}

/// The key of a row's cache.
fn cacher_name(row: &Resource) -> Option<String> {
    let storage = row.prefix()?;
    // Versions of a custom kind may have different selectable fields.
    match row.custom && !row.fields.names.is_empty() {
        true => Some(format!("{storage}@{}", row.version)),
        false => Some(storage.to_owned()),
    }
}

/// An object's storage key: `/registry/pods/default/web`.
pub(crate) fn store_key(row: &Resource, key: &Key) -> String {
    let storage = row.prefix().expect("only stored resources have keys");
    match key.namespace.as_str() {
        "" => format!("/registry/{storage}/{}", key.name),
        namespace => format!("/registry/{storage}/{namespace}/{}", key.name),
    }
}

/// The answer to a client whose request failed at the store.
pub fn store_error(error: store::Error) -> StatusError {
    use machinery::status::Reason;
    match error {
        store::Error::Compacted { requested, floor } => crate::cacher::too_old(requested, floor),
        store::Error::Future { requested, current } => crate::cacher::too_new(requested, current),
        store::Error::TooLarge { .. } => StatusError::new(
            Reason::RequestEntityTooLarge,
            format!("etcdserver: request is too large ({error})"),
        ),
        store::Error::Unavailable(why) | store::Error::NoSpace(why) => {
            StatusError::new(Reason::ServiceUnavailable, format!("the state store refuses: {why}"))
        }
        store::Error::Closed => {
            StatusError::new(Reason::ServiceUnavailable, "the state store is closed")
        }
        other => StatusError::internal(other),
    }
}
