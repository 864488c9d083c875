//! Informers: one watch per kind and scope in a process, many handlers.
//!
//! In: changes from a [`Reflector`]. Out: events to handlers, in order, and a [`Lister`].
//! Invariants: a handler sees every object that exists when it subscribes as `Applied`, then every
//! change, never two at once; the cache is changed before handlers hear of it; a list after a lost
//! watch shows up as `Applied` and `Deleted` of what differs.
//!
//! Handlers run in the reflector's task: they enqueue keys or update columns and never block. A
//! handler must not subscribe to its own informer.

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, RwLock};

use base::task::Tasks;
use machinery::selector::Selector;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::cache::{Cache, Decoded, Entry, Header, ObjectKey};
use crate::client::Client;
use crate::reflector::{Change, Reflector, Source};
use crate::resource::{Gvr, Kind};
use crate::view::{Projection, View};

/// A part of a collection. The default is the whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Scope {
    pub namespace: Option<String>,
    pub fields: String,
    pub labels: String,
}

/// A change of an object, undecoded.
#[derive(Clone, Debug)]
pub enum RawEvent {
    Applied { old: Option<Arc<Entry>>, new: Arc<Entry> },
    Deleted(Arc<Entry>),
}

impl RawEvent {
    /// The current object, or the last one before its deletion.
    pub fn entry(&self) -> &Arc<Entry> {
        match self {
            Self::Applied { new, .. } => new,
            Self::Deleted(old) => old,
        }
    }
}

/// A change of an object.
pub enum Event<T> {
    Applied { old: Option<Old<T>>, new: Arc<T> },
    Deleted(Arc<T>),
}

/// The state of an object before a change. It is decoded on demand, because most handlers do not read it.
pub struct Old<T> {
    entry: Arc<Entry>,
    core: Arc<Core>,
    kind: PhantomData<fn() -> T>,
}

impl<T: Kind> Old<T> {
    pub fn get(&self) -> Option<Arc<T>> {
        self.core.decoded.get(&self.entry)
    }
}

impl<T: Kind> Event<T> {
    /// The current object, or the last one before its deletion.
    pub fn object(&self) -> &Arc<T> {
        match self {
            Self::Applied { new, .. } => new,
            Self::Deleted(old) => old,
        }
    }

    /// The object before the change; `None` if it was not there.
    pub fn old(&self) -> Option<Arc<T>> {
        match self {
            Self::Applied { old, .. } => old.as_ref().and_then(Old::get),
            Self::Deleted(old) => Some(old.clone()),
        }
    }

    pub fn key(&self) -> ObjectKey {
        ObjectKey::of(self.object().metadata())
    }

    pub fn is_added(&self) -> bool {
        matches!(self, Self::Applied { old: None, .. })
    }

    pub fn is_deleted(&self) -> bool {
        matches!(self, Self::Deleted(_))
    }
}

type Handler = Box<dyn Fn(&RawEvent) + Send + Sync>;

/// The untyped part. Cheap to clone.
#[derive(Clone)]
pub struct RawInformer(Arc<Core>);

struct Core {
    /// Guards the mirror; written by the reflector's task, for one change at a time.
    cache: RwLock<Cache>,
    decoded: Decoded,
    /// Guards the order of events: held while one is delivered to all, and while a new handler is
    /// shown what exists. Never held across await.
    handlers: Mutex<Vec<Handler>>,
    /// Guards the views by the type of their values, so that each is made once. Locked before `handlers`.
    views: Mutex<HashMap<TypeId, Box<dyn Any + Send + Sync>>>,
    synced: watch::Sender<bool>,
    task: Mutex<Option<AbortHandle>>,
}

impl RawInformer {
    fn start(client: Client, tasks: &Tasks, source: Source) -> Self {
        let core = Arc::new(Core {
            cache: Default::default(),
            decoded: Decoded::new(),
            handlers: Default::default(),
            views: Default::default(),
            synced: watch::channel(false).0,
            task: Mutex::new(None),
        });
        let reflector = Reflector::new(client, source);
        let (stop, applied) = (tasks.stop_signal(), core.clone());
        let task = tasks.spawn("reflector", async move {
            reflector.run(stop, Box::new(move |change| applied.apply(change))).await;
        });
        *core.task.lock().expect("no panic while held") = Some(task);
        Self(core)
    }

    /// Calls `handler` for existing objects, then for every change.
    pub fn subscribe(&self, handler: impl Fn(&RawEvent) + Send + Sync + 'static) {
        let mut handlers = self.0.handlers.lock().expect("handlers do not panic");
        let existing: Vec<_> = self.read().all().cloned().collect();
        for new in existing {
            handler(&RawEvent::Applied { old: None, new });
        }
        handlers.push(Box::new(handler));
    }

    pub fn get(&self, key: &ObjectKey) -> Option<Arc<Entry>> {
        self.read().get(key).cloned()
    }

    pub fn entries(&self) -> Vec<Arc<Entry>> {
        self.read().all().cloned().collect()
    }

    /// The objects with an owner reference to `uid`.
    pub fn by_owner(&self, uid: &str) -> Vec<Arc<Entry>> {
        self.read().by_owner(uid).cloned().collect()
    }

    pub fn has_synced(&self) -> bool {
        *self.0.synced.borrow()
    }

    /// Resolves when the cache has held the whole collection once and handlers saw it.
    pub async fn synced(&self) {
        // The sender lives in `self`, so it cannot be gone.
        let _ = self.0.synced.subscribe().wait_for(|synced| *synced).await;
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Cache> {
        self.0.cache.read().expect("no panic while held")
    }
}

impl Core {
    fn apply(&self, change: Change) {
        match change {
            Change::None => {}
            Change::Applied(entry) => self.put(&self.handlers(), entry),
            Change::Deleted(entry) => {
                self.remove(&self.handlers(), &entry.header.key, Some(entry.clone()))
            }
            Change::Replaced(entries) => {
                let handlers = self.handlers();
                let present: BTreeSet<_> =
                    entries.iter().map(|entry| entry.header.key.clone()).collect();
                let gone: Vec<_> = {
                    let cache = self.cache.read().expect("no panic while held");
                    let keys = cache.all().map(|entry| &entry.header.key);
                    keys.filter(|key| !present.contains(*key)).cloned().collect()
                };
                for key in gone {
                    self.remove(&handlers, &key, None);
                }
                for entry in entries {
                    self.put(&handlers, entry);
                }
                drop(handlers);
                self.synced.send_replace(true);
            }
        }
    }

    fn handlers(&self) -> std::sync::MutexGuard<'_, Vec<Handler>> {
        self.handlers.lock().expect("handlers do not panic")
    }

    fn put(&self, handlers: &[Handler], new: Arc<Entry>) {
        let old = {
            let mut cache = self.cache.write().expect("no panic while held");
            let known = cache.get(&new.header.key);
            if known.is_some_and(|old| old.header.resource_version == new.header.resource_version) {
                return; // a relist of known objects
            }
            cache.put(new.clone())
        };
        // Another object of the same name: the deletion of the first one was missed.
        let old = match old {
            Some(old) if old.header.uid != new.header.uid => {
                deliver(handlers, &RawEvent::Deleted(old));
                None
            }
            old => old,
        };
        deliver(handlers, &RawEvent::Applied { old: old.clone(), new });
        if let Some(old) = old {
            self.decoded.forget(&old);
        }
    }

    /// The last state is that of the event, or of the cache if the event was missed.
    fn remove(&self, handlers: &[Handler], key: &ObjectKey, last: Option<Arc<Entry>>) {
        let old = self.cache.write().expect("no panic while held").remove(key);
        if let Some(old) = old {
            let last = last.unwrap_or_else(|| old.clone());
            deliver(handlers, &RawEvent::Deleted(last.clone()));
            self.decoded.forget(&old);
            self.decoded.forget(&last);
        }
    }
}

fn deliver(handlers: &[Handler], event: &RawEvent) {
    for handler in handlers {
        handler(event);
    }
}

/// One kind's informer. Cheap to clone.
pub struct Informer<T> {
    raw: RawInformer,
    kind: PhantomData<fn() -> T>,
}

impl<T> Clone for Informer<T> {
    fn clone(&self) -> Self {
        Self { raw: self.raw.clone(), kind: PhantomData }
    }
}

impl<T: Kind> Informer<T> {
    pub fn lister(&self) -> Lister<T> {
        Lister { raw: self.raw.clone(), kind: PhantomData }
    }

    /// Calls `handler` for what exists, then for every change.
    pub fn subscribe(&self, handler: impl Fn(&Event<T>) + Send + Sync + 'static) {
        let core = Arc::downgrade(&self.raw.0);
        self.raw.subscribe(move |event| {
            let Some(core) = core.upgrade() else {
                return;
            };
            let event = match event {
                RawEvent::Applied { old, new } => {
                    let before = |entry: &Arc<Entry>| Old {
                        entry: entry.clone(),
                        core: core.clone(),
                        kind: PhantomData,
                    };
                    let old = old.as_ref().map(before);
                    core.decoded.get(new).map(|new| Event::Applied { old, new })
                }
                RawEvent::Deleted(old) => core.decoded.get(old).map(Event::Deleted),
            };
            if let Some(event) = event {
                handler(&event);
            }
        });
    }

    /// Only keys and metadata: nothing is decoded.
    pub fn subscribe_raw(&self, handler: impl Fn(&RawEvent) + Send + Sync + 'static) {
        self.raw.subscribe(handler);
    }

    /// Finds objects by what `extract` takes from them; see [`Lister::by_index`]. Idempotent by
    /// name.
    pub fn index(&self, name: &'static str, extract: fn(&T) -> Vec<String>) {
        let core = Arc::downgrade(&self.raw.0);
        let extract = Arc::new(move |entry: &Entry| {
            let object = core.upgrade().and_then(|core| core.decoded.get::<T>(entry));
            object.map(|object| extract(&object)).unwrap_or_default()
        });
        self.raw.0.cache.write().expect("no panic while held").add_index(name, extract);
    }

    /// As [`index`](Self::index), by metadata alone: nothing is decoded.
    pub fn index_headers(&self, name: &'static str, extract: fn(&Header) -> Vec<String>) {
        let extract = Arc::new(move |entry: &Entry| extract(&entry.header));
        self.raw.0.cache.write().expect("no panic while held").add_index(name, extract);
    }

    /// The projection `P` of every object; see [`View`]. All callers share one.
    pub fn view<P: Projection<T>>(&self) -> View<P> {
        let mut views = self.raw.0.views.lock().expect("no panic while held");
        let known = views.get(&TypeId::of::<P>()).and_then(|view| view.downcast_ref::<View<P>>());
        if let Some(view) = known {
            return view.clone();
        }
        let view = View::default();
        let kept = view.clone();
        self.subscribe(move |event| match event {
            Event::Applied { new, .. } if P::concerns(new) => kept.put(event.key(), P::of(new)),
            Event::Applied { .. } | Event::Deleted(_) => kept.remove(&event.key()),
        });
        views.insert(TypeId::of::<P>(), Box::new(view.clone()));
        view
    }

    pub fn has_synced(&self) -> bool {
        self.raw.has_synced()
    }

    pub async fn synced(&self) {
        self.raw.synced().await;
    }
}

/// Reads one kind's cache. Objects are decoded on demand. Cheap to clone.
pub struct Lister<T> {
    raw: RawInformer,
    kind: PhantomData<fn() -> T>,
}

impl<T> Clone for Lister<T> {
    fn clone(&self) -> Self {
        Self { raw: self.raw.clone(), kind: PhantomData }
    }
}

impl<T: Kind> Lister<T> {
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<T>> {
        self.get_key(&ObjectKey::new(namespace, name))
    }

    pub fn get_key(&self, key: &ObjectKey) -> Option<Arc<T>> {
        let entry = self.raw.get(key)?;
        self.raw.0.decoded.get(&entry)
    }

    /// As [`get_key`](Self::get_key), without decoding.
    pub fn entry(&self, key: &ObjectKey) -> Option<Arc<Entry>> {
        self.raw.get(key)
    }

    /// In a namespace (all of them for `None`), in the order of keys. Decodes all that the LRU does not have:
    /// for a start and for tests. A reader that must know about many objects again and again keeps a view.
    pub fn list(&self, namespace: Option<&str>, selector: &Selector) -> Vec<Arc<T>> {
        self.decode(self.entries(namespace, selector))
    }

    /// As [`list`](Self::list), without decoding.
    pub fn entries(&self, namespace: Option<&str>, selector: &Selector) -> Vec<Arc<Entry>> {
        let cache = self.raw.read();
        let matches = |entry: &&Arc<Entry>| selector.matches_pairs(&entry.header.labels);
        match namespace {
            Some(namespace) => cache.in_namespace(namespace).filter(matches).cloned().collect(),
            None => cache.all().filter(matches).cloned().collect(),
        }
    }

    /// The objects with an owner reference to `uid`.
    pub fn by_owner(&self, uid: &str) -> Vec<Arc<T>> {
        let entries = self.raw.read().by_owner(uid).cloned().collect();
        self.decode(entries)
    }

    /// The objects that the named index (see [`Informer::index`]) has under `value`.
    pub fn by_index(&self, name: &str, value: &str) -> Vec<Arc<T>> {
        let entries = self.raw.read().by_index(name, value).cloned().collect();
        self.decode(entries)
    }

    /// As [`by_index`](Self::by_index), without decoding.
    pub fn entries_by_index(&self, name: &str, value: &str) -> Vec<Arc<Entry>> {
        self.raw.read().by_index(name, value).cloned().collect()
    }

    /// As [`by_owner`](Self::by_owner), without decoding.
    pub fn entries_by_owner(&self, uid: &str) -> Vec<Arc<Entry>> {
        self.raw.read().by_owner(uid).cloned().collect()
    }

    /// How many objects that index has under `value`, without decoding them.
    pub fn count_by_index(&self, name: &str, value: &str) -> usize {
        self.raw.read().by_index(name, value).count()
    }

    pub fn len(&self) -> usize {
        self.raw.read().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn decode(&self, entries: Vec<Arc<Entry>>) -> Vec<Arc<T>> {
        entries.iter().filter_map(|entry| self.raw.0.decoded.get(entry)).collect()
    }
}

/// All informers of one process and identity. Cheap to clone; clones share.
#[derive(Clone)]
pub struct Informers(Arc<Inner>);

struct Inner {
    client: Client,
    tasks: Tasks,
    /// Guards the set of informers, so that each is started once.
    running: Mutex<HashMap<(Gvr, Scope, bool), RawInformer>>,
}

impl Informers {
    /// Reflectors run as tasks of `tasks` and end with it.
    pub fn new(client: Client, tasks: Tasks) -> Self {
        Self(Arc::new(Inner { client, tasks, running: Default::default() }))
    }

    /// All objects of a kind.
    pub fn of<T: Kind>(&self) -> Informer<T> {
        self.in_scope(Scope::default())
    }

    /// Objects of a kind in a namespace (all for `None`), by field and label selectors (empty for
    /// all).
    pub fn scoped<T: Kind>(
        &self,
        namespace: Option<&str>,
        fields: &str,
        labels: &str,
    ) -> Informer<T> {
        self.in_scope(Scope {
            namespace: namespace.map(Into::into),
            fields: fields.into(),
            labels: labels.into(),
        })
    }

    /// All objects of a resource that has the form of `T` under another name.
    pub fn of_resource<T: Kind>(&self, gvr: &Gvr) -> Informer<T> {
        Informer { raw: self.start(gvr.clone(), Scope::default(), false), kind: PhantomData }
    }

    pub fn in_scope<T: Kind>(&self, scope: Scope) -> Informer<T> {
        Informer { raw: self.start(Gvr::of::<T>(), scope, false), kind: PhantomData }
    }

    /// The metadata of any resource. Shares the watch of a typed informer that runs
    /// already.
    pub fn metadata(&self, gvr: &Gvr) -> RawInformer {
        let full = (gvr.clone(), Scope::default(), false);
        if let Some(informer) = self.running().get(&full) {
            return informer.clone();
        }
        self.start(gvr.clone(), Scope::default(), true)
    }

    /// Ends the metadata informer of a resource that is no longer served.
    pub fn forget(&self, gvr: &Gvr) {
        let gone = self.running().remove(&(gvr.clone(), Scope::default(), true));
        let task = gone.and_then(|gone| gone.0.task.lock().expect("no panic while held").take());
        if let Some(task) = task {
            task.abort();
        }
    }

    /// Resolves when every informer started so far has synced.
    pub async fn synced(&self) {
        let all: Vec<_> = self.running().values().cloned().collect();
        for informer in all {
            informer.synced().await;
        }
    }

    /// How many objects were decoded, of each kind. A change of one object must not decode others.
    pub fn decoded(&self) -> BTreeMap<Gvr, u64> {
        let mut counts = BTreeMap::new();
        for ((gvr, ..), informer) in &*self.running() {
            *counts.entry(gvr.clone()).or_default() += informer.0.decoded.count();
        }
        counts
    }

    pub fn client(&self) -> &Client {
        &self.0.client
    }

    pub fn tasks(&self) -> &Tasks {
        &self.0.tasks
    }

    fn running(&self) -> std::sync::MutexGuard<'_, HashMap<(Gvr, Scope, bool), RawInformer>> {
        self.0.running.lock().expect("no panic while held")
    }

    fn start(&self, gvr: Gvr, scope: Scope, metadata_only: bool) -> RawInformer {
        let source = Source {
            path: gvr.collection(scope.namespace.as_deref()),
            fields: scope.fields.clone(),
            labels: scope.labels.clone(),
            metadata_only,
        };
        let begin = || RawInformer::start(self.0.client.clone(), &self.0.tasks, source);
        self.running().entry((gvr, scope, metadata_only)).or_insert_with(begin).clone()
    }
}

const _: fn() = || {
    fn shared<T: Any + Send + Sync>() {}
    shared::<Informers>();
};

#[cfg(test)]
mod local_tests;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::api::core::v1::ConfigMap;
    use tokio::sync::mpsc;

    use super::*;
    use crate::fake::Fake;

    struct Rig {
        fake: Fake,
        informer: Informer<ConfigMap>,
        events: mpsc::UnboundedReceiver<String>,
        tasks: Tasks,
    }

    impl Rig {
        fn new() -> Self {
            let (fake, tasks) = (Fake::default(), Tasks::new("test"));
            for name in ["a", "b", "c"] {
                fake.put(name, "1");
            }
            let informer = Informers::new(fake.client(), tasks.clone()).of::<ConfigMap>();
            let (sender, events) = mpsc::unbounded_channel();
            informer.subscribe(move |event| {
                let data = |object: &Arc<ConfigMap>| object.data.clone().unwrap()["v"].clone();
                let text = match event {
                    Event::Applied { old: None, new } => format!("+{}{}", event.key(), data(new)),
                    Event::Applied { old: Some(old), new } => {
                        let old = old.get().expect("a ConfigMap");
                        format!("~{}{}{}", event.key(), data(&old), data(new))
                    }
                    Event::Deleted(_) => format!("-{}", event.key()),
                };
                sender.send(text.replace("default/", "")).unwrap();
            });
            Self { fake, informer, events, tasks }
        }

        async fn expect(&mut self, expected: &[&str]) {
            for one in expected {
                let event = tokio::time::timeout(Duration::from_secs(90), self.events.recv()).await;
                assert_eq!(event.expect("an event comes").as_deref(), Some(*one));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lists_in_pages_watches_and_survives_cuts() {
        let mut rig = Rig::new();
        rig.informer.synced().await;
        rig.expect(&["+a1", "+b1", "+c1"]).await;
        assert_eq!(rig.fake.requests("continue=2"), 1);
        rig.fake.put("b", "2");
        rig.expect(&["~b12"]).await;
        rig.fake.delete("a");
        rig.expect(&["-a"]).await;

        // A cut watch resumes at its revision, without a list.
        rig.fake.cut(false);
        rig.fake.put("d", "1");
        rig.expect(&["+d1"]).await;
        assert_eq!(rig.fake.requests("limit=500"), 2);

        // A compacted revision: the list shows missed changes, deletions included.
        rig.fake.cut(true);
        rig.fake.delete("b");
        rig.fake.put("c", "2");
        rig.expect(&["-b", "~c12"]).await;
        let lister = rig.informer.lister();
        assert_eq!(lister.len(), 2);
        assert!(lister.get("default", "d").is_some() && lister.get("default", "b").is_none());
        rig.tasks.shutdown(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn indexes_follow_changes_and_late_handlers_see_all() {
        let mut rig = Rig::new();
        rig.informer.index("v", |object| object.data.clone().unwrap().into_values().collect());
        rig.informer.synced().await;
        rig.expect(&["+a1", "+b1", "+c1"]).await;
        rig.fake.put("b", "2");
        rig.expect(&["~b12"]).await;
        let lister = rig.informer.lister();
        let named = |value: &str| {
            let found = lister.by_index("v", value).into_iter();
            found.map(|one| one.metadata.name.clone().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(named("1"), ["a", "c"]);
        assert_eq!(named("2"), ["b"]);
        let selector = Selector::parse_labels("app=2").unwrap();
        assert_eq!(lister.list(Some("default"), &selector).len(), 1);
        assert_eq!(lister.list(Some("other"), &selector).len(), 0);

        let seen = Arc::new(Mutex::new(0));
        let counter = seen.clone();
        rig.informer.subscribe(move |_| *counter.lock().unwrap() += 1);
        assert_eq!(*seen.lock().unwrap(), 3);
    }
}
