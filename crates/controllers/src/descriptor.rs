//! The row of a controller: what it watches, and what it does about a key.
//!
//! In: a `const` [`Descriptor`] in the controller's file, one line in [`CONTROLLERS`](crate::CONTROLLERS). Out: a
//! controller that runs: subscribed to its kinds, with workers once all caches that it asked for are filled.
//!
//! ```text
//!   new(setup) ─► watches subscribe ─► caches filled ─► workers: reconcile(controller, key)
//!       │              │ keys                ▲                        ▲
//!       └ listers, views, indexes ───────────┘         queue ─────────┘
//! ```
//!
//! Invariants: views and indexes that `new` makes agree with the caches when a handler of a watch runs; no key is
//! reconciled before all caches of the controller are filled. Cost: a change of one object runs the handlers of its
//! kind, each of which decodes that object at most.

use std::fmt::Debug;
use std::hash::Hash;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use client::{
    Client, ErrorExt, Event, Gvr, Header, Informer, Kind, Lister, ObjectKey, Outcome, Projection,
    RawEvent, Result, Selectors, View, WorkQueue, spawn_workers,
};
use futures::future::{BoxFuture, join_all};
use serde_json::Value;

use crate::context::Context;
use crate::expectations::Expectations;

/// A reconcile, or a task of a controller, as the runner sees it.
pub type Work<T> = BoxFuture<'static, T>;

/// The outcome of a write to an object that may be gone by now.
pub fn or_gone<T>(written: Result<T>) -> Result<Outcome> {
    match written {
        Err(error) if error.is_not_found() => Ok(Outcome::Done),
        done => done.map(|_| Outcome::Done),
    }
}

/// A key of a work queue.
pub trait Key: Clone + Eq + Hash + Debug + Send + Sync + 'static {}

impl<K: Clone + Eq + Hash + Debug + Send + Sync + 'static> Key for K {}

/// The key for an object itself.
pub trait OfObject: Key {
    fn of(key: &ObjectKey) -> Self;
}

impl OfObject for ObjectKey {
    fn of(key: &ObjectKey) -> Self {
        key.clone()
    }
}

/// The name of an object without a namespace.
impl OfObject for Arc<str> {
    fn of(key: &ObjectKey) -> Self {
        key.name.clone()
    }
}

/// For controllers that always look at everything they know.
impl OfObject for () {
    fn of(_: &ObjectKey) -> Self {}
}

/// A controller: state `C`, keys `K`.
pub struct Descriptor<C: 'static, K: 'static = ObjectKey> {
    /// Upstream's name, as in `--controllers`.
    pub name: &'static str,
    /// The service account in kube-system that `--use-service-account-credentials` gives it.
    pub account: &'static str,
    /// The source of its events.
    pub component: &'static str,
    /// The name of its queue in metrics and logs.
    pub queue: &'static str,
    /// How many keys it works on at once; `--concurrent-*-syncs` changes it.
    pub workers: usize,
    /// The controller's state. `None`: the flags leave it nothing to do.
    pub new: fn(&Setup<K>) -> Option<C>,
    /// The watches that wake it. Further queues and tasks of the controller are here, too.
    pub watches: &'static [&'static dyn Watch<C, K>],
    pub reconcile: fn(Arc<C>, K) -> Work<Result<Outcome>>,
}

/// A [`Descriptor`] of any state and key.
pub trait Row: Sync {
    fn name(&self) -> &'static str;
    fn account(&self) -> &'static str;
    fn component(&self) -> &'static str;
    /// Subscribes and spawns; returns at once.
    fn start(&'static self, context: Context);
}

impl<C: Send + Sync + 'static, K: Key> Row for Descriptor<C, K> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn account(&self) -> &'static str {
        self.account
    }

    fn component(&self) -> &'static str {
        self.component
    }

    fn start(&'static self, context: Context) {
        let needed: Vec<Gvr> = self.watches.iter().filter_map(|watch| watch.needs()).collect();
        let tasks = context.tasks.clone();
        if needed.is_empty() {
            if let Some(work) = self.subscribe(context) {
                tasks.spawn(self.name, work);
            }
            return;
        }
        tasks.spawn(self.name, async move {
            for gvr in needed {
                if !is_served(&context.client, &gvr).await {
                    tracing::debug!(controller = self.name, %gvr, "not started: its API is not served");
                    return;
                }
            }
            if let Some(work) = self.subscribe(context) {
                work.await;
            }
        });
    }
}

impl<C: Send + Sync + 'static, K: Key> Descriptor<C, K> {
    /// Subscribes; the future starts the workers once the caches are filled.
    fn subscribe(&'static self, context: Context) -> Option<Work<()>> {
        let tasks = context.tasks.clone();
        let workers = context.options.workers.get(self.name).copied().unwrap_or(self.workers);
        let setup = Setup { context, queue: WorkQueue::new(self.queue), caches: Mutex::default() };
        let controller = Arc::new((self.new)(&setup)?);
        for watch in self.watches {
            watch.subscribe(&controller, &setup);
        }
        let queue = setup.queue;
        let caches = setup.caches.into_inner().expect("no panic while held");
        Some(Box::pin(async move {
            join_all(caches).await;
            let this = controller.clone();
            spawn_workers(&tasks, &queue, workers, move |key| (self.reconcile)(this.clone(), key));
            for watch in self.watches {
                watch.spawn(&controller, &tasks);
            }
        }))
    }
}

/// Whether the API server serves this version of a kind; asks until it answers.
async fn is_served(client: &Client, gvr: &Gvr) -> bool {
    let path = format!("/apis/{}/{}", gvr.group, gvr.version);
    let mut backoff =
        Backoff::new(Duration::from_millis(200), Duration::from_secs(30)).with_jitter(0.2);
    let serves = |list: &Value| {
        let resources = list["resources"].as_array();
        resources.is_none_or(|all| all.iter().any(|one| one["name"] == *gvr.resource))
    };
    loop {
        match client.get::<Value>(&path).await {
            Ok(list) => return serves(&list),
            Err(error) if error.is_not_found() => return false,
            Err(_) => tokio::time::sleep(backoff.step()).await,
        }
    }
}

/// The parts for building a controller. The runner waits for each cache that is requested here.
pub struct Setup<K> {
    pub context: Context,
    pub queue: WorkQueue<K>,
    /// Guards what the runner waits for; held for a push.
    caches: Mutex<Vec<Work<()>>>,
}

impl<K> std::ops::Deref for Setup<K> {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl<K> Setup<K> {
    pub fn informer<T: Kind>(&self) -> Informer<T> {
        self.scoped(None, "")
    }

    /// The objects of a namespace, or those that match a field selector.
    pub fn scoped<T: Kind>(&self, namespace: Option<&str>, fields: &str) -> Informer<T> {
        let informer = self.context.informers.scoped::<T>(namespace, fields, "");
        let cache = informer.clone();
        self.wait_for(Box::pin(async move { cache.synced().await }));
        informer
    }

    fn wait_for(&self, work: Work<()>) {
        self.caches.lock().expect("no panic while held").push(work);
    }

    pub fn lister<T: Kind>(&self) -> Lister<T> {
        self.informer().lister()
    }

    pub fn view<T: Kind, P: Projection<T>>(&self) -> View<P> {
        self.informer::<T>().view()
    }
}

/// Something that wakes a controller.
pub trait Watch<C, K>: Sync {
    /// A kind without which the controller does not run.
    fn needs(&self) -> Option<Gvr> {
        None
    }

    fn subscribe(&self, _: &Arc<C>, _: &Setup<K>) {}

    /// Called once, when the caches are filled.
    fn spawn(&self, _: &Arc<C>, _: &Tasks) {}
}

/// Some objects of a kind.
#[derive(Clone, Copy)]
struct Objects {
    namespace: Option<&'static str>,
    fields: &'static str,
}

impl Objects {
    const ALL: Self = Self { namespace: None, fields: "" };

    fn informer<T: Kind, K>(self, setup: &Setup<K>) -> Informer<T> {
        setup.scoped(self.namespace, self.fields)
    }
}

/// Each change of an object of the kind wakes the object's own key.
pub struct Own<T> {
    objects: Objects,
    optional: bool,
    kind: PhantomData<fn() -> T>,
}

pub const fn own<T: Kind>() -> Own<T> {
    Own { objects: Objects::ALL, optional: false, kind: PhantomData }
}

impl<T> Own<T> {
    /// Only the objects of a namespace, or those that match a field selector.
    pub const fn within(mut self, namespace: Option<&'static str>, fields: &'static str) -> Self {
        self.objects = Objects { namespace, fields };
        self
    }

    /// The controller runs only where the kind is served: it is behind a feature gate.
    pub const fn if_served(mut self) -> Self {
        self.optional = true;
        self
    }
}

impl<T: Kind, C, K: OfObject> Watch<C, K> for Own<T> {
    fn needs(&self) -> Option<Gvr> {
        self.optional.then(Gvr::of::<T>)
    }

    fn subscribe(&self, _: &Arc<C>, setup: &Setup<K>) {
        let queue = setup.queue.clone();
        let objects = self.objects.informer::<T, K>(setup);
        objects.subscribe_raw(move |event| queue.add(K::of(&event.entry().header.key)));
    }
}

/// A handler for the objects of a kind.
pub struct On<T, C, K> {
    objects: Objects,
    optional: bool,
    handler: Handler<T, C, K>,
}

enum Handler<T, C, K> {
    Object(fn(&C, &WorkQueue<K>, &Event<T>)),
    Metadata(fn(&C, &WorkQueue<K>, &RawEvent)),
}

/// The handler gets the decoded object.
pub const fn on<T: Kind, C, K>(handler: fn(&C, &WorkQueue<K>, &Event<T>)) -> On<T, C, K> {
    On { objects: Objects::ALL, optional: false, handler: Handler::Object(handler) }
}

/// The handler gets the object's metadata; nothing is decoded.
pub const fn on_metadata<T: Kind, C, K>(handler: fn(&C, &WorkQueue<K>, &RawEvent)) -> On<T, C, K> {
    On { objects: Objects::ALL, optional: false, handler: Handler::Metadata(handler) }
}

impl<T, C, K> On<T, C, K> {
    /// Like [`Own::within`].
    pub const fn within(mut self, namespace: Option<&'static str>, fields: &'static str) -> Self {
        self.objects = Objects { namespace, fields };
        self
    }

    /// Like [`Own::if_served`].
    pub const fn if_served(mut self) -> Self {
        self.optional = true;
        self
    }
}

impl<T: Kind, C: Send + Sync + 'static, K: Key> Watch<C, K> for On<T, C, K> {
    fn needs(&self) -> Option<Gvr> {
        self.optional.then(Gvr::of::<T>)
    }

    fn subscribe(&self, controller: &Arc<C>, setup: &Setup<K>) {
        let (this, queue) = (controller.clone(), setup.queue.clone());
        let objects = self.objects.informer::<T, K>(setup);
        match self.handler {
            Handler::Object(handler) => {
                objects.subscribe(move |event| handler(&this, &queue, event));
            }
            Handler::Metadata(handler) => {
                objects.subscribe_raw(move |event| handler(&this, &queue, event));
            }
        }
    }
}

/// Each change of an object of the kind `T` wakes the `O` that controls it, and the one that did before.
/// Upstream: the pod handlers of ReplicaSets, DaemonSets, StatefulSets.
pub struct OwnedBy<T, O, C> {
    expectations: Option<fn(&C) -> &Expectations>,
    adopters: Option<fn(&C) -> &Selectors>,
    kinds: PhantomData<fn() -> (T, O)>,
}

pub const fn owned_by<T: Kind, O: Kind, C>() -> OwnedBy<T, O, C> {
    OwnedBy { expectations: None, adopters: None, kinds: PhantomData }
}

impl<T, O, C> OwnedBy<T, O, C> {
    /// Created and deleted objects lower the owner's expectations.
    pub const fn expected(mut self, expectations: fn(&C) -> &Expectations) -> Self {
        self.expectations = Some(expectations);
        self
    }

    /// An object without a controller wakes those whose selector matches it.
    pub const fn adopted(mut self, adopters: fn(&C) -> &Selectors) -> Self {
        self.adopters = Some(adopters);
        self
    }
}

/// The key of the `O` that controls an object.
pub fn owner_key<O: Kind>(header: &Header) -> Option<ObjectKey> {
    let owner = header.controller().filter(|owner| owner.kind == O::KIND)?;
    Some(ObjectKey::new(&header.key.namespace, &owner.name))
}

impl<T: Kind, O: Kind, C: Send + Sync + 'static> Watch<C, ObjectKey> for OwnedBy<T, O, C> {
    fn subscribe(&self, controller: &Arc<C>, setup: &Setup<ObjectKey>) {
        let (this, queue) = (controller.clone(), setup.queue.clone());
        let (expectations, adopters) = (self.expectations, self.adopters);
        setup.informer::<T>().subscribe_raw(move |event| {
            let header = &event.entry().header;
            let owner = owner_key::<O>(header);
            if let RawEvent::Applied { old: Some(old), .. } = event {
                let was = owner_key::<O>(&old.header).filter(|was| Some(was) != owner.as_ref());
                was.into_iter().for_each(|was| queue.add(was));
            }
            if let (Some(owner), Some(expectations)) = (&owner, expectations) {
                expectations(&this).seen(owner, event);
            }
            match (owner, adopters) {
                (Some(owner), _) => queue.add(owner),
                (None, Some(adopters)) if header.controller().is_none() && !header.deleting => {
                    let found = adopters(&this).matching(&header.key.namespace, &[&header.labels]);
                    found.into_iter().for_each(|key| queue.add(key));
                }
                (None, _) => {}
            }
        });
    }
}

/// A change of an object of the kind wakes those that select it, or did before.
pub struct SelectedBy<T, C> {
    selectors: fn(&C) -> &Selectors,
    kind: PhantomData<fn() -> T>,
}

pub const fn selected_by<T: Kind, C>(selectors: fn(&C) -> &Selectors) -> SelectedBy<T, C> {
    SelectedBy { selectors, kind: PhantomData }
}

impl<T: Kind, C: Send + Sync + 'static> Watch<C, ObjectKey> for SelectedBy<T, C> {
    fn subscribe(&self, controller: &Arc<C>, setup: &Setup<ObjectKey>) {
        let (this, queue, selectors) = (controller.clone(), setup.queue.clone(), self.selectors);
        setup.informer::<T>().subscribe_raw(move |event| {
            let new = event.entry();
            let mut labels = vec![&new.header.labels];
            if let RawEvent::Applied { old: Some(old), .. } = event {
                labels.push(&old.header.labels);
            }
            let found = selectors(&this).matching(&new.header.key.namespace, &labels);
            found.into_iter().for_each(|key| queue.add(key));
        });
    }
}

/// A further queue of the controller, with workers of its own.
pub struct Further<C, K> {
    queue: fn(&C) -> &WorkQueue<K>,
    workers: usize,
    reconcile: fn(Arc<C>, K) -> Work<Result<Outcome>>,
}

pub const fn further<C, K>(
    queue: fn(&C) -> &WorkQueue<K>,
    workers: usize,
    reconcile: fn(Arc<C>, K) -> Work<Result<Outcome>>,
) -> Further<C, K> {
    Further { queue, workers, reconcile }
}

impl<C: Send + Sync + 'static, K: Key, M> Watch<C, M> for Further<C, K> {
    fn spawn(&self, controller: &Arc<C>, tasks: &Tasks) {
        let (this, reconcile) = (controller.clone(), self.reconcile);
        let queue = (self.queue)(controller);
        spawn_workers(tasks, queue, self.workers, move |key| reconcile(this.clone(), key));
    }
}

/// Work that is done before the workers start.
pub struct First<C>(fn(Arc<C>) -> Work<()>);

pub const fn first<C>(run: fn(Arc<C>) -> Work<()>) -> First<C> {
    First(run)
}

impl<C: Send + Sync + 'static, K> Watch<C, K> for First<C> {
    fn subscribe(&self, controller: &Arc<C>, setup: &Setup<K>) {
        setup.wait_for((self.0)(controller.clone()));
    }
}

/// A task of the controller beside its queues.
pub struct Task<C>(fn(Arc<C>) -> Work<()>);

pub const fn task<C>(run: fn(Arc<C>) -> Work<()>) -> Task<C> {
    Task(run)
}

impl<C: Send + Sync + 'static, K> Watch<C, K> for Task<C> {
    fn spawn(&self, controller: &Arc<C>, tasks: &Tasks) {
        tasks.spawn("controller", (self.0)(controller.clone()));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use client::{EventRecorder, Informers};
    use k8s_openapi::api::apps::v1::ReplicaSet;
    use k8s_openapi::api::core::v1::Pod;
    use k8s_openapi::api::storagemigration::v1beta1::StorageVersionMigration;
    use machinery::selector::Selector;
    use serde_json::json;

    use super::*;
    use crate::context::Options;
    use crate::testing::Live;

    const SETS: &str = "/apis/apps/v1/replicasets";
    const PODS: &str = "/api/v1/pods";

    /// The keys that were reconciled. One test uses it.
    static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

    struct Probe {
        selectors: Selectors,
        pods: Lister<Pod>,
    }

    fn selector_of(set: &ReplicaSet) -> Selector {
        let selector = set.spec.as_ref().map(|spec| Selector::from_api(Some(&spec.selector)));
        selector.and_then(|parsed| parsed.ok()).unwrap_or(Selector::nothing())
    }

    const PROBE: &dyn Row = &Descriptor::<Probe> {
        name: "probe",
        account: "probe",
        component: "probe",
        queue: "probe",
        workers: 1,
        new: |setup| {
            let selectors = Selectors::of(&setup.informer::<ReplicaSet>(), selector_of);
            Some(Probe { selectors, pods: setup.lister() })
        },
        watches: &[
            &own::<ReplicaSet>(),
            &owned_by::<Pod, ReplicaSet, _>().adopted(|this: &Probe| &this.selectors),
        ],
        reconcile: |this, key| {
            Box::pin(async move {
                let mut seen = SEEN.lock().expect("no panic");
                // No key is reconciled before the pods are known.
                seen.insert(format!("{key} {}", this.pods.len()));
                Ok(Outcome::Done)
            })
        },
    };

    const ABSENT: &dyn Row = &Descriptor::<()> {
        name: "absent",
        account: "absent",
        component: "absent",
        queue: "absent",
        workers: 1,
        new: |_| panic!("its kind is not served"),
        watches: &[&own::<StorageVersionMigration>().if_served()],
        reconcile: |_, _| Box::pin(async { Ok(Outcome::Done) }),
    };

    /// Time is paused: this long, nothing else is left to do.
    async fn seen() -> Vec<String> {
        tokio::time::sleep(Duration::from_secs(10)).await;
        std::mem::take(&mut *SEEN.lock().expect("no panic")).into_iter().collect()
    }

    fn pod(owner: Option<&str>) -> Value {
        let owners = owner.map(|name| {
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": name,
                "controller": true}])
        });
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns",
            "uid": "p", "labels": {"app": "web"}, "ownerReferences": owners}})
    }

    #[tokio::test(start_paused = true)]
    async fn watches_wake_the_keys_that_a_change_concerns() {
        let live = Live::default();
        live.put(
            SETS,
            json!({"apiVersion": "apps/v1", "kind": "ReplicaSet",
            "metadata": {"name": "web", "namespace": "ns", "uid": "web"},
            "spec": {"selector": {"matchLabels": {"app": "web"}}}}),
        );
        live.put(PODS, pod(Some("a")));
        let tasks = Tasks::new("test");
        let context = Context {
            client: live.client(),
            informers: Informers::new(live.client(), tasks.clone()),
            events: EventRecorder::new(live.client(), &tasks, "test", None),
            tasks: tasks.clone(),
            options: Arc::new(Options::default()),
        };
        PROBE.start(context.clone());
        ABSENT.start(context);
        assert_eq!(seen().await, ["ns/a 1", "ns/web 1"]);
        live.put(PODS, pod(Some("b")));
        assert_eq!(seen().await, ["ns/a 1", "ns/b 1"], "the old owner and the new one");
        live.put(PODS, pod(None));
        assert_eq!(seen().await, ["ns/b 1", "ns/web 1"], "the old owner and who may adopt");
        tasks.shutdown(Duration::from_secs(5)).await;
    }
}
