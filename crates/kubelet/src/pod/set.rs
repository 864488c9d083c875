//! The set of this node's pods: their workers, and the inputs of those.
//!
//! ```text
//!  API watch (spec.nodeName=me) ─┐
//!  manifest directory ───────────┼─► PodSet: admit ─► one Worker per uid ─► finished: forgotten
//!  runtime's leftovers ──────────┘        ▲ runtime events wake the worker of their pod
//! ```
//!
//! In: signals (a key changed, manifests changed, a worker ended). Out: workers.
//! Invariants: one task changes the set; a uid has at most one worker; orphaned pods in the runtime are
//! stopped, but only after the API's list is complete, and are looked for again every few minutes; two
//! static pods of one name never overlap.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use client::{EventType, ObjectKey};
use k8s_openapi::api::core::v1::{Node, Pod};
use machinery::ObjectMeta;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::names;
use crate::node::eviction;
use crate::pod::admit::admit;
use crate::pod::allocation::{
    Allocation, AllocationState, DEFERRED, INFEASIBLE, Refusal, rank, told,
};
use crate::pod::input::Input;
use crate::pod::static_pods::Source;
use crate::pod::worker::{Context, Handle, View, Worker, WorkerEvent};
use crate::reason::Reason;
use crate::resources::{GUARANTEED, pod_requests, qos_class};
use crate::volumes::{self, PodDir};

/// Upstream: pending resizes are retried after this time even if nothing changed.
const RESIZE_RETRY: Duration = Duration::from_secs(180);
/// How often orphaned pods are looked for. Upstream: every two seconds.
const LEFTOVERS: Duration = Duration::from_secs(300);
/// The first retry after the runtime failed to list its pods.
const LEFTOVERS_RETRY: Duration = Duration::from_secs(1);
const LEFTOVERS_RETRY_CEILING: Duration = Duration::from_secs(60);

/// The grace period of an evicted pod: the node cannot wait for the pod's own.
/// Upstream: immediateEvictionGracePeriodSeconds.
const EVICTION_GRACE: Duration = Duration::from_secs(1);

/// Static pods by source and uid.
type Statics = BTreeMap<Source, BTreeMap<String, Pod>>;

#[derive(Default)]
struct Pending {
    keys: BTreeSet<ObjectKey>,
    statics: Statics,
    finished: Vec<String>,
    /// A pod freed its resources.
    freed: bool,
    synced: bool,
}

/// The set's pending work. Many writers, one reader.
#[derive(Default)]
pub struct Signals {
    /// Guards the batch; held for single pushes and the take.
    pending: Mutex<Pending>,
    wake: Notify,
    /// Notified when a pod has stopped.
    ended: watch::Sender<()>,
}

impl Signals {
    fn push(&self, change: impl FnOnce(&mut Pending)) {
        change(&mut self.pending.lock().expect("no panic while held"));
        self.wake.notify_one();
    }

    pub fn api(&self, key: ObjectKey) {
        self.push(|pending| {
            pending.keys.insert(key);
        });
    }

    /// All static pods of a source.
    pub fn statics(&self, source: Source, pods: BTreeMap<String, Pod>) {
        self.push(|pending| {
            pending.statics.insert(source, pods);
        });
    }

    /// The API's list of this node's pods is complete.
    pub fn synced(&self) {
        self.push(|pending| pending.synced = true);
    }

    fn told(&self, uid: &str, what: WorkerEvent) {
        self.push(|pending| {
            pending.freed = true;
            if what == WorkerEvent::Finished {
                pending.finished.push(uid.to_string());
            }
        });
        self.ended.send_replace(());
    }
}

type Workers = HashMap<String, Handle>;

pub struct PodSet {
    context: Arc<Context>,
    tasks: Tasks,
    pub signals: Arc<Signals>,
    /// By uid. Guards the table; held for look-ups and single changes, never across await.
    workers: Mutex<Workers>,
    /// The wanted static pods.
    statics: Mutex<Statics>,
    /// The granted resources of each pod, by uid.
    granted: Mutex<HashMap<String, Allocation>>,
    /// Pods whose resize is pending, with the API's spec, by uid.
    resizes: Mutex<BTreeMap<String, Arc<Pod>>>,
    /// Deleted pods whose volumes are being unmounted, by uid. Guards single changes.
    clearing: Arc<Mutex<BTreeSet<String>>>,
    /// Notified when mirror pods may be out of date.
    pub mirrors: Notify,
}

impl PodSet {
    pub fn new(context: Arc<Context>, tasks: Tasks) -> Arc<Self> {
        Arc::new(Self {
            context,
            tasks,
            signals: Arc::default(),
            workers: Mutex::default(),
            statics: Mutex::default(),
            granted: Mutex::default(),
            resizes: Mutex::default(),
            clearing: Arc::default(),
            mirrors: Notify::new(),
        })
    }

    fn workers(&self) -> std::sync::MutexGuard<'_, Workers> {
        self.workers.lock().expect("no panic while held")
    }

    /// Follows the signals; never returns.
    pub async fn run(self: Arc<Self>) {
        let mut retry = Backoff::new(LEFTOVERS_RETRY, LEFTOVERS_RETRY_CEILING);
        // None before the API's list is complete.
        let mut look_at: Option<Instant> = None;
        loop {
            let waiting = !self.resizes.lock().expect("no panic while held").is_empty();
            let look =
                async { tokio::time::sleep_until(look_at.unwrap_or_else(Instant::now)).await };
            tokio::select! {
                () = self.signals.wake.notified() => {}
                () = tokio::time::sleep(RESIZE_RETRY), if waiting => self.retry_resizes(),
                () = look, if look_at.is_some() => {}
            }
            let batch =
                std::mem::take(&mut *self.signals.pending.lock().expect("no panic while held"));
            for uid in &batch.finished {
                self.workers().remove(uid);
                self.granted.lock().expect("no panic while held").remove(uid);
                self.resizes.lock().expect("no panic while held").remove(uid);
            }
            if batch.freed {
                self.retry_resizes();
            }
            if !batch.statics.is_empty() {
                self.statics.lock().expect("no panic while held").extend(batch.statics);
                self.mirrors.notify_one();
            }
            self.follow_statics();
            // Deletions first: they free resources for new pods.
            let lister = self.context.api.pods.lister();
            let (there, gone): (Vec<&ObjectKey>, Vec<&ObjectKey>) =
                batch.keys.iter().partition(|key| lister.get_key(key).is_some());
            for key in gone.into_iter().chain(there) {
                self.follow_api(key);
            }
            if batch.synced || look_at.is_some_and(|at| at <= Instant::now()) {
                let wait = match self.stop_leftovers().await {
                    Ok(()) => {
                        retry.reset();
                        LEFTOVERS
                    }
                    Err(error) => {
                        tracing::warn!(%error, "failed to look for orphaned pods");
                        retry.step()
                    }
                };
                look_at = Some(Instant::now() + wait);
            }
        }
    }

    /// Handles a change of this key: the API has the pod, or no longer has it.
    fn follow_api(&self, key: &ObjectKey) {
        let pod = self.context.api.pods.lister().get_key(key);
        let uid = pod.as_deref().map(names::uid).unwrap_or_default().to_string();
        if pod.as_deref().is_none_or(names::is_mirror) {
            self.mirrors.notify_one();
        }
        if pod.as_deref().is_some_and(names::is_mirror) {
            self.wake_static(key);
            return;
        }
        for (known, handle) in self.workers().iter() {
            let input = handle.input.borrow().clone();
            let same_name = names::name(&input.pod) == &*key.name
                && names::namespace(&input.pod) == &*key.namespace;
            if same_name && *known != uid && !names::is_static(&input.pod) && !input.removed {
                self.context.device_plugins.want(known, false);
                handle.input.send_modify(|input| input.removed = true);
            }
        }
        let Some(pod) = pod else { return };
        if self.workers().contains_key(&uid) {
            return self.update(&uid, pod);
        }
        self.start(pod);
    }

    /// Handles a change of a pod that has a worker.
    fn update(&self, uid: &str, pod: Arc<Pod>) {
        let granted = self.granted(uid).applied(&pod);
        let asks = !Arc::ptr_eq(&granted, &pod);
        if asks {
            self.resizes.lock().expect("no panic while held").insert(uid.to_string(), pod);
            return self.retry_resizes();
        }
        self.resizes.lock().expect("no panic while held").remove(uid);
        if let Some(handle) = self.workers().get(uid) {
            handle.input.send_if_modified(|input| {
                let changed = input.pod.metadata.resource_version != pod.metadata.resource_version;
                input.pod = pod;
                input.standing.refused = None;
                changed
            });
        }
    }

    fn granted(&self, uid: &str) -> Allocation {
        let granted = self.granted.lock().expect("no panic while held");
        granted.get(uid).cloned().unwrap_or_default()
    }

    /// Retries all pending resizes.
    fn retry_resizes(&self) {
        let wanted = self.resizes.lock().expect("no panic while held").clone();
        let since = |uid: &str| {
            let workers = self.workers();
            let input = workers.get(uid)?.input.borrow().clone();
            input.standing.refused.map(|refusal| refusal.since)
        };
        let mut all: Vec<(String, Arc<Pod>)> = wanted.into_iter().collect();
        all.sort_by_cached_key(|(uid, pod)| rank(pod, &self.granted(uid).applied(pod), since(uid)));
        for (uid, pod) in all {
            if self.try_resize(&uid, &pod) {
                self.resizes.lock().expect("no panic while held").remove(&uid);
            }
        }
    }

    /// True if the resize is no longer pending.
    fn try_resize(&self, uid: &str, pod: &Arc<Pod>) -> bool {
        let verdict = self.is_feasible(uid, pod).and_then(|()| self.admit(pod));
        let workers = self.workers();
        let Some(handle) = workers.get(uid) else { return true };
        let terminal = handle.view().stopped || handle.input.borrow().evict.is_some();
        let mut input = handle.input.borrow().clone();
        let now = base::clock::now();
        let generation = pod.metadata.generation;
        match verdict {
            _ if terminal => {
                input.pod = self.granted(uid).applied(pod);
                input.standing.refused = None;
            }
            Ok(()) => {
                let allocation = Allocation::of(pod);
                allocation.write(&PodDir::new(&self.context.node.config.root_dir, uid));
                let mut granted = self.granted.lock().expect("no panic while held");
                granted.insert(uid.to_string(), allocation);
                input.pod = pod.clone();
                input.standing = AllocationState { refused: None, granted: generation };
                let text = told("Pod resize started", pod, generation, "");
                self.context.events.tell(pod, EventType::Normal, "ResizeStarted", text);
            }
            Err(Reason { message, reason }) => {
                let reason = if reason == INFEASIBLE { INFEASIBLE } else { DEFERRED };
                let old = input.standing.refused.take();
                let since = old.as_ref().map_or(now, |old| old.since);
                let mut new = Refusal { reason, message, generation, since, told: now };
                let is_new = old.as_ref().is_none_or(|old| {
                    new.told = old.told;
                    let is_new = *old != new;
                    new.told = if is_new { now } else { old.told };
                    is_new
                });
                if is_new {
                    let what = format!("Pod resize {reason}");
                    let text = told(&what, pod, generation, &new.message);
                    let event = format!("Resize{reason}");
                    self.context.events.tell(pod, EventType::Warning, &event, text);
                }
                input.standing.refused = Some(new);
                input.pod = self.granted(uid).applied(pod);
            }
        }
        let done = input.standing.refused.is_none();
        handle.input.send_if_modified(|known| {
            let version = |input: &Input| input.pod.metadata.resource_version.clone();
            let changed = known.standing != input.standing || version(known) != version(&input);
            *known = input;
            changed
        });
        done
    }

    /// Pods whose CPUs or memory are pinned cannot be resized. Upstream: `allocation/handlers.go`.
    fn is_feasible(&self, uid: &str, pod: &Pod) -> Result<(), Reason> {
        let (pins_cpus, pins_memory) = self.context.managers.pins();
        if qos_class(pod) != GUARANTEED || !(pins_cpus || pins_memory) {
            return Ok(());
        }
        let granted = self.granted(uid).applied(&Arc::new(pod.clone()));
        let differs = |resource: &str| {
            let of = |pod: &Pod| {
                let requests = pod.spec.as_ref().map(pod_requests).unwrap_or_default();
                requests.get(resource).copied()
            };
            of(&granted) != of(pod)
        };
        let manager = match () {
            () if pins_cpus && differs("cpu") => "CPU Manager policy \"static\"",
            () if pins_memory && differs("memory") => "Memory Manager policy \"Static\"",
            () => return Ok(()),
        };
        let text = format!("Resize is infeasible for Guaranteed Pods alongside {manager}");
        Err(Reason::new(INFEASIBLE, text))
    }

    /// Handles a change of a mirror: its pod's status may have to be written again.
    fn wake_static(&self, key: &ObjectKey) {
        for handle in self.workers().values() {
            let input = handle.input.borrow();
            let same = names::name(&input.pod) == &*key.name
                && names::namespace(&input.pod) == &*key.namespace;
            if same && names::is_static(&input.pod) {
                handle.wake.notify_one();
            }
        }
    }

    fn follow_statics(&self) {
        let statics = self.static_pods();
        let mut busy = BTreeSet::new();
        for (uid, handle) in self.workers().iter() {
            let input = handle.input.borrow().clone();
            if !names::is_static(&input.pod) {
                continue;
            }
            if !statics.contains_key(uid) {
                busy.insert((
                    names::namespace(&input.pod).to_string(),
                    names::name(&input.pod).to_string(),
                ));
                if !input.removed {
                    self.context.device_plugins.want(uid, false);
                    handle.input.send_modify(|input| input.removed = true);
                }
            }
        }
        for (uid, pod) in statics {
            let name = (names::namespace(&pod).to_string(), names::name(&pod).to_string());
            if !self.workers().contains_key(&uid) && !busy.contains(&name) {
                self.start(Arc::new(pod));
            }
        }
    }

    fn start(&self, pod: Arc<Pod>) {
        let status = pod.status.as_ref();
        let terminal =
            status.is_some_and(|s| matches!(s.phase.as_deref(), Some("Succeeded" | "Failed")));
        // The start time shows that a kubelet has admitted the pod.
        let admitted = status.is_some_and(|s| s.start_time.is_some());
        let deleting = pod.metadata.deletion_timestamp.is_some();
        // The record of an earlier kubelet may have granted resources that differ from the spec.
        let dir = PodDir::new(&self.context.node.config.root_dir, names::uid(&pod));
        let recorded = Allocation::read(&dir);
        let is_new = recorded.is_none();
        let allocation = recorded.unwrap_or_else(|| Allocation::of(&pod));
        let (wanted, pod) = (pod.clone(), allocation.applied(&pod));
        let mut input = Input::new(pod.clone());
        if !(terminal || admitted || deleting)
            && let Err(Reason { reason, message }) = self.admit(&pod)
        {
            self.context.events.tell(&pod, EventType::Warning, &reason, message.clone());
            input.evict = Some(Reason::new(reason, format!("Pod was rejected: {message}")));
        } else if is_new && !(terminal || deleting) {
            allocation.write(&dir);
        }
        let uid = names::uid(&pod).to_string();
        self.granted.lock().expect("no panic while held").insert(uid.clone(), allocation);
        self.spawn(input);
        let goes_on = !terminal && !deleting;
        if goes_on && !Arc::ptr_eq(&wanted, &pod) {
            self.update(&uid, wanted);
        }
    }

    fn spawn(&self, input: Input) {
        let uid = names::uid(&input.pod).to_string();
        let signals = self.signals.clone();
        self.context.device_plugins.want(&uid, !input.removed);
        let handle = Worker::start(self.context.clone(), &self.tasks, input, move |uid, what| {
            signals.told(uid, what);
        });
        self.workers().insert(uid, handle);
    }

    fn admit(&self, pod: &Pod) -> Result<(), Reason> {
        if *self.context.node.is_shutting_down.borrow() {
            return Err(Reason::new(
                "NodeShutdown",
                "Pod was rejected as the node is shutting down.",
            ));
        }
        eviction::admits(pod, &self.context.node.pressure.borrow())?;
        self.context.node.config.sysctls.check(pod)?;
        let own = names::uid(pod);
        let active: Vec<Arc<Pod>> = self
            .workers()
            .values()
            .filter(|handle| {
                let input = handle.input.borrow();
                let is_other = names::uid(&input.pod) != own;
                // A pod that the API has deleted does not count, even while it ends: the scheduler has
                // given its resources to others.
                is_other && !input.removed && input.evict.is_none() && !handle.is_over()
            })
            .map(|handle| handle.input.borrow().pod.clone())
            .collect();
        admit(pod, active.iter().map(AsRef::as_ref), &self.node_to_admit())
    }

    /// The node for admission, without resources of device plugins: these are allocated by the plugins'
    /// current devices. Upstream: `UpdatePluginResources`.
    fn node_to_admit(&self) -> Arc<Node> {
        let (mut node, plugins) = (self.context.node.object(), &self.context.device_plugins);
        let is_ours = |name: &String| plugins.is_known(name);
        let status = node.status.as_ref();
        if status.and_then(|s| s.allocatable.as_ref()).is_some_and(|all| all.keys().any(is_ours)) {
            let status = Arc::make_mut(&mut node).status.as_mut();
            if let Some(all) = status.and_then(|status| status.allocatable.as_mut()) {
                all.retain(|name, _| !is_ours(name));
            }
        }
        node
    }

    /// Stops orphaned pods in the runtime, and removes their files.
    async fn stop_leftovers(&self) -> cri::Result<()> {
        let mut unknown: BTreeMap<String, (String, String)> = BTreeMap::new();
        for sandbox in self.context.runtime.list_pod_sandbox(None).await? {
            let Some(meta) = sandbox.metadata else { continue };
            // Only the caller changes the table, so pods with a worker stay known.
            if sandbox.labels.contains_key(names::POD_UID)
                && !self.workers().contains_key(&meta.uid)
            {
                unknown.insert(meta.uid, (meta.namespace, meta.name));
            }
        }
        for (uid, (namespace, name)) in unknown {
            tracing::info!(pod = format!("{namespace}/{name}"), uid, "stopping an orphaned pod");
            let metadata = ObjectMeta {
                uid: Some(uid),
                name: Some(name),
                namespace: Some(namespace),
                ..ObjectMeta::default()
            };
            let pod = Pod { metadata, spec: Some(Default::default()), status: None };
            self.spawn(Input { removed: true, ..Input::new(Arc::new(pod)) });
        }
        self.clear_leftover_files().await;
        Ok(())
    }

    async fn clear_leftover_files(&self) {
        let root = self.context.node.config.root_dir.join("pods");
        let known: BTreeSet<String> = self.workers().keys().cloned().collect();
        // Now, because a pod that is added later may allocate devices.
        self.context.device_plugins.keep_only(&known);
        self.context.managers.keep_only(&known);
        let clearing = self.clearing.lock().expect("no panic while held").clone();
        let dirs = tokio::task::spawn_blocking(move || {
            let entries = std::fs::read_dir(&root).into_iter().flatten().flatten();
            let all = entries.map(|entry| (entry.file_name(), entry.path()));
            let all = all.map(|(name, path)| (name.to_string_lossy().into_owned(), PodDir(path)));
            all.filter(|(uid, _)| !known.contains(uid) && !clearing.contains(uid))
                .collect::<Vec<_>>()
        });
        for (uid, dir) in dirs.await.unwrap_or_default() {
            self.context.cgroups.remove_pod(&uid);
            let (host, clearing) = (self.context.volumes.clone(), self.clearing.clone());
            clearing.lock().expect("no panic while held").insert(uid.clone());
            self.tasks.spawn("leftover-volumes", async move {
                volumes::clear_leftover(&host, &uid, &dir).await;
                clearing.lock().expect("no panic while held").remove(&uid);
            });
        }
    }

    /// Wakes the pod's worker after an event of the runtime; `None` wakes all.
    pub fn wake(&self, uid: Option<&str>) {
        let workers = self.workers();
        match uid {
            Some(uid) => {
                if let Some(handle) = workers.get(uid) {
                    handle.wake.notify_one();
                }
            }
            None => workers.values().for_each(|handle| handle.wake.notify_one()),
        }
    }

    /// All pods with their state.
    pub fn views(&self) -> Vec<View> {
        let mut out = vec![];
        for handle in self.workers().values() {
            let mut view = handle.view();
            view.pod.get_or_insert_with(|| handle.input.borrow().pod.clone());
            out.push(view);
        }
        out
    }

    /// The pod of that name; a running pod before one that ends.
    pub fn find(&self, namespace: &str, name: &str) -> Option<View> {
        let named = |view: &View| {
            view.pod
                .as_ref()
                .is_some_and(|p| names::namespace(p) == namespace && names::name(p) == name)
        };
        let mut all: Vec<View> = self.views().into_iter().filter(named).collect();
        all.sort_by_key(|view| view.stopped);
        all.into_iter().next()
    }

    pub fn static_pods(&self) -> BTreeMap<String, Pod> {
        let statics = self.statics.lock().expect("no panic while held");
        statics.values().flat_map(|pods| pods.clone()).collect()
    }

    /// Fails a pod for its own behaviour; false if it is being failed already.
    pub fn evict(&self, uid: &str, reason: Reason) -> bool {
        self.fail(uid, reason, false, EVICTION_GRACE)
    }

    /// Fails a pod to free its resources; its owner may count that as a disruption. False if it is being
    /// failed already.
    pub fn evict_for_node(&self, uid: &str, message: &str, grace: Duration) -> bool {
        self.fail(uid, Reason::new("Evicted", message), true, grace)
    }

    /// Fails a pod because the machine shuts down; its grace period is at most `longest`.
    pub fn end_with_node(&self, uid: &str, reason: Reason, longest: Duration) {
        self.fail(uid, reason, true, longest);
    }

    /// Whether a pod is being failed.
    pub fn is_failed(&self, uid: &str) -> bool {
        self.workers().get(uid).is_some_and(|handle| handle.input.borrow().evict.is_some())
    }

    /// Resolves when no container of the pod runs any more.
    pub async fn until_stopped(&self, uid: &str) {
        let mut ended = self.signals.ended.subscribe();
        let runs = || self.workers().get(uid).is_some_and(|handle| !handle.view().stopped);
        while runs() {
            if ended.changed().await.is_err() {
                return;
            }
        }
    }

    fn fail(&self, uid: &str, why: Reason, disrupts: bool, longest: Duration) -> bool {
        let workers = self.workers();
        let Some(handle) = workers.get(uid) else { return false };
        let mut is_first = false;
        handle.input.send_modify(|input| {
            is_first = input.evict.is_none();
            input.evict = Some(why);
            input.disrupts = disrupts;
            let known = input.longest_grace;
            input.longest_grace = Some(known.map_or(longest, |known| known.min(longest)));
        });
        is_first
    }
}
