//! The loop: informers feed the state, one decision at a time empties the queue, workers write.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{
    Api, Client, DeleteParams, ErrorExt, Event, EventRecorder, EventType, Informers, Lister,
    ObjectKey, Patch, PatchParams, Projection, View,
};
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{Namespace, Node, ObjectReference, Pod};
use machinery::Time;
use serde_json::json;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::config::{Args, Config, ConfigError};
use crate::error::BindError;
use crate::extender::Extenders;
use crate::framework::{ClusterEvent, CycleState, Diagnosis, Framework, Handle, choose};
use crate::gang::{Gangs, Group, Groups};
use crate::metrics::{self, Outcome};
use crate::objects::Objects;
use crate::plugins::PLUGINS;
use crate::pod::PodInfo;
use crate::queue::{Frameworks, Pending, Queue};
use crate::volumes::Volumes;

/// Pods by the group that they belong to.
const BY_GROUP: &str = "pod group";
/// Decisions that wait for a writer.
const JOBS: usize = 1024;
/// Writers at work: a binding is one round trip to the API.
const WRITERS: usize = 32;
/// Less than the time between a lost lease and another's: see [`client::election`].
const ENDING: Duration = Duration::from_secs(4);

/// Schedules until `stop`.
pub async fn run(client: Client, config: Config, stop: Stop) {
    let tasks = Tasks::new("kube-scheduler");
    let informers = Informers::new(client.clone(), tasks.clone());
    run_on(tasks, informers, client, config, stop).await;
}

/// As [`run`], with informers that others in the process use too.
pub async fn run_with(informers: Informers, client: Client, config: Config, stop: Stop) {
    run_on(Tasks::new("kube-scheduler"), informers, client, config, stop).await;
}

async fn run_on(tasks: Tasks, informers: Informers, client: Client, config: Config, stop: Stop) {
    let _bound = tasks.bound();
    let (jobs, queue) = mpsc::channel(JOBS);
    let scheduler = match Scheduler::new(&tasks, &informers, client, &config) {
        Ok(scheduler) => Arc::new(scheduler),
        Err(error) => {
            return tracing::error!(%error, "failed to start the scheduler with its configuration");
        }
    };
    let counted: Arc<dyn metrics::Waits> = scheduler.clone();
    metrics::add(Arc::downgrade(&counted));
    let (nodes, namespaces) = (informers.of::<Node>(), informers.of::<Namespace>());
    let pods = informers.of::<Pod>();
    let (volumes, objects) = (scheduler.volumes.clone(), scheduler.objects.clone());
    let this = scheduler.clone();
    namespaces.subscribe(move |event| this.namespace_event(event));
    let this = scheduler.clone();
    nodes.subscribe(move |event| this.node_event(event));
    let this = scheduler.clone();
    pods.subscribe(move |event| this.pod_event(event));
    let this = scheduler.clone();
    volumes.subscribe(move |claim| {
        this.woken(&mut this.state(), &ClusterEvent::VolumesChanged(claim));
    });
    let this = scheduler.clone();
    volumes.subscribe_room(move || this.woken(&mut this.state(), &ClusterEvent::RoomGrew));
    let this = scheduler.clone();
    objects.subscribe_drivers(move || this.woken(&mut this.state(), &ClusterEvent::DriversChanged));
    let this = scheduler.clone();
    objects.claims.subscribe(move |event| this.woken(&mut this.state(), event));
    let queue = Arc::new(tokio::sync::Mutex::new(queue));
    for _ in 0..WRITERS {
        tasks.spawn("scheduler-writer", scheduler.clone().write(queue.clone()));
    }
    tasks.spawn("scheduler", async move {
        namespaces.synced().await;
        nodes.synced().await;
        pods.synced().await;
        volumes.synced().await;
        objects.synced().await;
        tracing::info!("scheduling");
        scheduler.decide(jobs).await;
    });
    let group = tasks.stop_signal();
    tokio::select! {
        () = stop.wait() => {}
        () = group.wait() => tracing::error!("the scheduler stopped: a task panicked"),
    }
    tasks.shutdown(ENDING).await;
}

/// The frameworks of all profiles, by scheduler name.
struct Profiles(HashMap<String, Framework>);

impl Frameworks for Profiles {
    fn of(&self, pod: &PodInfo) -> Option<&Framework> {
        self.0.get(&pod.scheduler)
    }
}

impl metrics::Waits for Scheduler {
    fn pending(&self) -> Pending {
        self.state().queue.pending()
    }
}

struct Scheduler {
    profiles: Profiles,
    extenders: Extenders,
    groups: Groups,
    /// Guards the columns and the queue: held for an event or a decision, never across await.
    state: Mutex<State>,
    /// The queue may have something to pop.
    wake: Notify,
    pods: Lister<Pod>,
    siblings: View<Sibling>,
    volumes: Volumes,
    objects: Objects,
    client: Client,
    /// Each profile's events have its name as source.
    events: HashMap<String, EventRecorder>,
}

struct State {
    cluster: Cluster,
    queue: Queue,
    gangs: Gangs<Job>,
}

/// The writes of a decision.
enum Job {
    Bind {
        pod: Arc<PodInfo>,
        node: String,
        reserved: CycleState,
    },
    Report {
        pod: Arc<PodInfo>,
        reason: &'static str,
        message: String,
        nominated: Option<String>,
        victims: Vec<Arc<PodInfo>>,
        /// Written first.
        work: Option<BoxFuture<'static, ()>>,
    },
}

/// The next step for a pod.
enum Step {
    Jobs(Vec<Job>),
    /// It is one of a group.
    Group(Arc<PodInfo>, Group),
    /// These nodes fit, but others have a say.
    Ask(Arc<PodInfo>, Vec<(String, i64)>, Option<Gang>),
}

/// A gang and its minimum size.
#[derive(Clone)]
struct Gang {
    group: Group,
    least: usize,
}

/// Checks a configuration without running it, so that errors show before anything starts.
pub fn check(client: &Client, config: &Config) -> Result<(), ConfigError> {
    frameworks(client, None, config).map(drop)
}

fn frameworks(
    client: &Client,
    lookups: Option<(&Volumes, &Objects)>,
    config: &Config,
) -> Result<Profiles, ConfigError> {
    let handle = Handle {
        client: client.clone(),
        volumes: lookups.map(|(volumes, _)| volumes.clone()),
        objects: lookups.map(|(_, objects)| objects.clone()),
        args: Args::default(),
    };
    let mut all = HashMap::new();
    for profile in &config.profiles {
        let mut profile = profile.clone();
        let managed = config.extenders.iter().flat_map(|one| &one.managed_resources);
        let ignored = managed.filter(|one| one.ignored_by_scheduler).map(|one| one.name.clone());
        profile.args.ignored_resources.extend(ignored);
        let name = profile.name.clone();
        let framework = Framework::new(PLUGINS, &profile, &handle).map_err(|error| {
            let head = "initializing profiles: creating profile for scheduler name";
            ConfigError(format!("{head} {name}: {error}"))
        })?;
        all.insert(name, framework);
    }
    Ok(Profiles(all))
}

/// A pod of a gang that is not terminating.
struct Sibling {
    is_bound: bool,
}

impl Projection<Pod> for Sibling {
    fn of(pod: &Pod) -> Self {
        Self { is_bound: pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) }
    }

    fn concerns(pod: &Pod) -> bool {
        let labels = pod.metadata.labels.as_ref();
        let is_in_group = labels.is_some_and(|labels| labels.contains_key(crate::gang::LABEL));
        is_in_group && pod.metadata.deletion_timestamp.is_none()
    }
}

impl Scheduler {
    fn new(
        tasks: &Tasks,
        informers: &Informers,
        client: Client,
        config: &Config,
    ) -> Result<Self, ConfigError> {
        let (volumes, objects) = (Volumes::new(informers), Objects::new(informers));
        let profiles = frameworks(&client, Some((&volumes, &objects)), config)?;
        let (pods, nodes) = (informers.of::<Pod>(), informers.of::<Node>());
        pods.index_headers(BY_GROUP, |header| {
            let group = header.labels.get(crate::gang::LABEL);
            let key = |name: &str| ObjectKey::new(&header.key.namespace, name).to_string();
            group.map(key).into_iter().collect()
        });
        let extenders = Extenders::new(&config.extenders, pods.lister(), nodes.lister());
        let first = config.profiles.first().map_or("", |profile| profile.name.as_str());
        let events = EventRecorder::new(client.clone(), tasks, first, None);
        let names = profiles.0.keys();
        Ok(Self {
            events: names.map(|name| (name.clone(), events.for_component(name))).collect(),
            profiles,
            extenders: extenders?,
            groups: Groups::new(client.clone()),
            state: Mutex::new(State {
                cluster: Cluster::default(),
                queue: Queue::new(config.first_backoff, config.last_backoff),
                gangs: Gangs::default(),
            }),
            wake: Notify::new(),
            siblings: pods.view(),
            pods: pods.lister(),
            volumes,
            objects,
            client,
        })
    }

    fn tell(&self, by: &PodInfo, about: &PodInfo, kind: EventType, reason: &str, text: String) {
        if let Some(events) = self.events.get(&by.scheduler) {
            events.event_about(reference(about), kind, reason, text);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("decisions do not panic")
    }

    fn woken(&self, state: &mut State, event: &ClusterEvent) {
        state.queue.wake(&self.profiles, event);
        self.wake.notify_one();
    }

    fn namespace_event(&self, event: &Event<Namespace>) {
        let mut state = self.state();
        let meta = &event.object().metadata;
        let name = meta.name.clone().unwrap_or_default();
        let labels = meta.labels.clone().unwrap_or_default();
        let now = (!event.is_deleted()).then(|| labels.clone());
        let before = state.cluster.set_namespace(name, now);
        if before.is_some_and(|before| before != labels) {
            self.woken(&mut state, &ClusterEvent::NamespaceChanged);
        }
    }

    fn node_event(&self, event: &Event<Node>) {
        let mut state = self.state();
        let node = event.object();
        let name = node.metadata.name.clone().unwrap_or_default();
        if event.is_deleted() {
            state.cluster.remove_node(&name);
            return self.woken(&mut state, &ClusterEvent::NodeRemoved);
        }
        let bare = |cluster: &Cluster| cluster.node(&name).map(|node| Arc::new(node.bare()));
        let before = bare(&state.cluster);
        state.cluster.update_node(node);
        let Some(new) = bare(&state.cluster) else { return };
        match before {
            None => self.woken(&mut state, &ClusterEvent::NodeAdded(new)),
            // Heartbeats change nothing that matters here.
            Some(old) if old.is_like(&new) => {}
            Some(old) => self.woken(&mut state, &ClusterEvent::NodeUpdated { old, new }),
        }
    }

    fn pod_event(&self, event: &Event<Pod>) {
        let pod = PodInfo::new(event.object());
        let mut state = self.state();
        let pod = state.cluster.shared(pod);
        if event.is_deleted() || pod.finished {
            state.queue.remove(&pod.uid);
            state.cluster.nominate(&pod, "");
            let counted = !pod.node_name.is_empty() || state.cluster.is_assumed(&pod.uid);
            state.cluster.remove_pod(&pod.uid);
            state
                .gangs
                .drop_if(|job| matches!(job, Job::Bind { pod: one, .. } if one.uid == pod.uid));
            if counted {
                self.woken(&mut state, &ClusterEvent::PodRemoved(pod));
            }
            return;
        }
        if !pod.node_name.is_empty() {
            state.queue.remove(&pod.uid);
            state.cluster.nominate(&pod, "");
            state.cluster.put_pod(pod.clone());
            match event.old().map(|old| PodInfo::new(&old)).filter(|old| !old.node_name.is_empty())
            {
                None => self.woken(&mut state, &ClusterEvent::PodAssigned(pod)),
                Some(old) if old.differs_in_spec(&pod) => {
                    let old = Arc::new(old);
                    self.woken(&mut state, &ClusterEvent::PodChanged { old, new: pod });
                }
                Some(_) => {}
            }
            return;
        }
        if pod.deleting {
            state.cluster.nominate(&pod, "");
            return state.queue.remove(&pod.uid);
        }
        if self.profiles.of(&pod).is_some() && !state.cluster.is_assumed(&pod.uid) {
            let nominated = pod.nominated.clone();
            state.cluster.nominate(&pod, &nominated);
            state.queue.put(&self.profiles, pod.clone());
            match event.is_added() && Group::of(&pod).is_some() {
                true => self.woken(&mut state, &ClusterEvent::PodAdded(pod)),
                false => self.wake.notify_one(),
            }
        }
    }

    /// The scheduling loop: pops a pod and decides. Never returns.
    async fn decide(&self, jobs: mpsc::Sender<Job>) {
        loop {
            let (mut step, deadline) = self.next();
            loop {
                step = match step {
                    Some(Step::Jobs(done)) => {
                        for job in done {
                            // The writers are gone when the group stops; then this task ends too.
                            let _ = jobs.send(job).await;
                        }
                        break;
                    }
                    Some(Step::Group(pod, group)) => Some(self.with_group(pod, group).await),
                    Some(Step::Ask(pod, nodes, gang)) => {
                        Some(self.with_extenders(pod, nodes, gang).await)
                    }
                    None => {
                        match deadline {
                            Some(at) => {
                                let _ = tokio::time::timeout_at(at, self.wake.notified()).await;
                            }
                            None => self.wake.notified().await,
                        }
                        break;
                    }
                };
            }
        }
    }

    /// The first step for the next pod, or when to look again.
    fn next(&self) -> (Option<Step>, Option<Instant>) {
        let mut state = self.state();
        let now = Instant::now();
        let (late, next_gang) = state.gangs.expired(now);
        self.give_up(&mut state, late);
        let next = state.queue.ripen(now);
        let deadline = [next, next_gang].into_iter().flatten().min();
        let Some(pod) = state.queue.pop() else { return (None, deadline) };
        let step = match Group::of(&pod) {
            Some(group) => Step::Group(pod, group),
            None => self.attempt(&mut state, pod, None),
        };
        (Some(step), None)
    }

    /// Schedules the pod if its gang is complete.
    async fn with_group(&self, pod: Arc<PodInfo>, group: Group) -> Step {
        let least = self.groups.least(&group).await;
        let mut state = self.state();
        match least {
            Err(error) => Step::Jobs(vec![self.broken(&mut state, &pod, error.text())]),
            Ok(0) => self.attempt(&mut state, pod, None),
            Ok(least) => {
                let there = self.siblings(&group).len();
                if there < least {
                    let name = &pod.key.name;
                    let group = &group.name;
                    let why = format!(
                        "pre-filter pod {name} cannot find enough sibling pods, current pods number: {there}, minMember of group: {least}"
                    );
                    tracing::debug!(pod = %pod.key, group, "the gang is not complete");
                    let diagnosis = Diagnosis {
                        nodes: state.cluster.count(),
                        general: Some(why),
                        plugins: [crate::gang::NAME].into(),
                        ..Diagnosis::default()
                    };
                    return Step::Jobs(vec![self.reject(&mut state, &pod, diagnosis)]);
                }
                self.attempt(&mut state, pod, Some(Gang { group, least }))
            }
        }
    }

    /// The pods of a group that are not going.
    fn siblings(&self, group: &Group) -> Vec<Arc<Sibling>> {
        let key = ObjectKey::new(&group.namespace, &group.name).to_string();
        let all = self.pods.entries_by_index(BY_GROUP, &key);
        all.iter().filter_map(|entry| self.siblings.get(&entry.header.key)).collect()
    }

    async fn with_extenders(
        &self,
        pod: Arc<PodInfo>,
        nodes: Vec<(String, i64)>,
        gang: Option<Gang>,
    ) -> Step {
        let asked = self.extenders.ask(&pod, nodes).await;
        let mut state = self.state();
        match asked {
            Err(error) => Step::Jobs(vec![self.broken(&mut state, &pod, error.to_string())]),
            Ok(left) if left.nodes.is_empty() => {
                let diagnosis = Diagnosis {
                    nodes: state.cluster.count(),
                    rejections: left.rejections,
                    ..Diagnosis::default()
                };
                Step::Jobs(self.refuse(&mut state, &pod, diagnosis, gang))
            }
            Ok(left) => Step::Jobs(self.commit(&mut state, pod, choose(left.nodes), gang)),
        }
    }

    /// One decision.
    fn attempt(&self, state: &mut State, pod: Arc<PodInfo>, gang: Option<Gang>) -> Step {
        let Some(framework) = self.profiles.of(&pod) else { return Step::Jobs(vec![]) };
        match framework.candidates(&pod, &state.cluster) {
            Ok(nodes) if self.extenders.concern(&pod) => {
                let nodes = nodes.into_iter().map(|(name, score)| (name.to_owned(), score));
                Step::Ask(pod, nodes.collect(), gang)
            }
            Ok(nodes) => {
                let node = choose(nodes).to_owned();
                Step::Jobs(self.commit(state, pod, node, gang))
            }
            Err(diagnosis) => Step::Jobs(self.refuse(state, &pod, diagnosis, gang)),
        }
    }

    /// The pod goes there, at once or with its group.
    fn commit(
        &self,
        state: &mut State,
        pod: Arc<PodInfo>,
        node: String,
        gang: Option<Gang>,
    ) -> Vec<Job> {
        let Some(framework) = self.profiles.of(&pod) else { return vec![] };
        match framework.reserve(&pod, &node) {
            Ok(reserved) => {
                state.cluster.assume(&pod, &node);
                state.cluster.nominate(&pod, "");
                let job = Job::Bind { pod, node, reserved };
                let Some(Gang { group, least }) = gang else { return vec![job] };
                let siblings = self.siblings(&group);
                let bound = siblings.iter().filter(|sibling| sibling.is_bound).count();
                state.gangs.hold(&group, job, bound, least)
            }
            Err(rejection) => {
                let diagnosis = Diagnosis {
                    nodes: state.cluster.count(),
                    general: Some(rejection.reasons.join(", ")),
                    ..Default::default()
                };
                vec![self.reject(state, &pod, diagnosis)]
            }
        }
    }

    /// The pod fits nowhere; neither do those that wait for it.
    fn refuse(
        &self,
        state: &mut State,
        pod: &Arc<PodInfo>,
        mut diagnosis: Diagnosis,
        gang: Option<Gang>,
    ) -> Vec<Job> {
        if let Some(Gang { group, .. }) = gang {
            let held = state.gangs.release(&group);
            self.give_up(state, held);
            diagnosis.plugins.insert(crate::gang::NAME);
        }
        if let Some(error) = diagnosis.error.take() {
            return vec![self.broken(state, pod, error.into())];
        }
        vec![self.reject(state, pod, diagnosis)]
    }

    /// Members of a group that is not to be complete wait again.
    fn give_up(&self, state: &mut State, held: Vec<Job>) {
        for job in held {
            let Job::Bind { pod, node, reserved } = job else { continue };
            if let Some(framework) = self.profiles.of(&pod) {
                framework.unreserve(&reserved, &pod, &node);
            }
            state.cluster.forget(&pod.uid);
            state.queue.settle(&self.profiles, &pod.uid, [crate::gang::NAME].into());
        }
    }

    fn reject(&self, state: &mut State, pod: &Arc<PodInfo>, mut diagnosis: Diagnosis) -> Job {
        let (mut nominated, mut victims, mut work) = (None, vec![], None);
        let framework = self.profiles.of(pod);
        if !diagnosis.rejections.is_empty()
            && let Some(framework) = framework
        {
            let outcome = framework.post_filter(pod, &state.cluster, &diagnosis);
            metrics::preempted(outcome.victims.len());
            diagnosis.post_filter = outcome.message;
            if let Some(node) = &outcome.nominated {
                state.cluster.nominate(pod, node);
            }
            (nominated, victims, work) = (outcome.nominated, outcome.victims, outcome.work);
        }
        tracing::debug!(pod = %pod.key, %diagnosis, "no node fits");
        let tried = state.queue.tried(&pod.uid);
        metrics::attempted(&pod.scheduler, Outcome::Unschedulable, tried);
        let mut plugins = diagnosis.plugins.clone();
        if diagnosis.nodes == 0 {
            // Any node may do.
            plugins = framework.map(Framework::plugins).unwrap_or_default();
        }
        state.queue.settle(&self.profiles, &pod.uid, plugins);
        let message = diagnosis.to_string();
        let reason = "Unschedulable";
        Job::Report { pod: pod.clone(), reason, message, nominated, victims, work }
    }

    /// The attempt failed: the pod is retried after its backoff.
    fn broken(&self, state: &mut State, pod: &Arc<PodInfo>, message: String) -> Job {
        metrics::attempted(&pod.scheduler, Outcome::Error, state.queue.tried(&pod.uid));
        state.queue.settle(&self.profiles, &pod.uid, BTreeSet::new());
        let (nominated, victims, work) = (None, vec![], None);
        let reason = "SchedulerError";
        Job::Report { pod: pod.clone(), reason, message, nominated, victims, work }
    }

    async fn write(self: Arc<Self>, jobs: Arc<tokio::sync::Mutex<mpsc::Receiver<Job>>>) {
        loop {
            let job = jobs.lock().await.recv().await;
            let Some(job) = job else { return };
            // Boxed: most writers wait, and should not hold the memory that a busy one needs.
            Box::pin(self.carry_out(job)).await;
        }
    }

    async fn carry_out(&self, job: Job) {
        match job {
            Job::Bind { pod, node, reserved } => self.bind(&pod, &node, &reserved).await,
            Job::Report { pod, reason, message, nominated, victims, work } => {
                if let Some(work) = work {
                    work.await;
                }
                for victim in &victims {
                    self.preempt(&pod, victim).await;
                }
                self.report(&pod, reason, &message, nominated.as_deref()).await;
            }
        }
    }

    async fn bind(&self, pod: &PodInfo, node: &str, reserved: &CycleState) {
        let Some(framework) = self.profiles.of(pod) else { return };
        // Read before the pod counts as assigned, which ends its waiting.
        let tried = self.state().queue.tried(&pod.uid);
        let bound = async {
            framework.pre_bind(pod, node).await?;
            match self.extenders.bind(pod, node).await {
                Some(bound) => bound.map_err(BindError::from),
                None => framework.bind(pod, node).await,
            }
        };
        match bound.await {
            Ok(()) => {
                framework.post_bind(pod, node);
                metrics::attempted(&pod.scheduler, Outcome::Scheduled, tried);
                self.state().queue.remove(&pod.uid);
                let message = format!("Successfully assigned {} to {node}", pod.key);
                self.tell(pod, pod, EventType::Normal, "Scheduled", message);
            }
            Err(error) => {
                metrics::attempted(&pod.scheduler, Outcome::Error, tried);
                framework.take_back(pod, node).await;
                framework.unreserve(reserved, pod, node);
                {
                    let mut state = self.state();
                    // If the pod is deleted, or another scheduler bound it, there is nothing to undo.
                    if state.cluster.forget(&pod.uid) {
                        state.queue.settle(&self.profiles, &pod.uid, BTreeSet::new());
                        self.woken(&mut state, &ClusterEvent::PodRemoved(Arc::new(pod.clone())));
                    }
                }
                tracing::warn!(pod = %pod.key, node, %error, "failed to bind the pod");
                self.report(pod, "SchedulerError", &format!("binding rejected: {error}"), None)
                    .await;
            }
        }
    }

    /// Reports why a pod waits: an event and the condition PodScheduled.
    async fn report(&self, pod: &PodInfo, reason: &str, message: &str, nominated: Option<&str>) {
        let Some(current) = self.pods.get_key(&pod.key) else {
            return;
        };
        if current.metadata.uid.as_deref() != Some(&pod.uid) {
            return;
        }
        self.tell(pod, pod, EventType::Warning, "FailedScheduling", message.to_owned());
        let status = current.status.clone().unwrap_or_default();
        let known = status.conditions.iter().flatten().find(|one| one.type_ == "PodScheduled");
        let same = known.is_some_and(|known| {
            known.status == "False"
                && known.reason.as_deref() == Some(reason)
                && known.message.as_deref() == Some(message)
        });
        if same && nominated.is_none_or(|node| status.nominated_node_name.as_deref() == Some(node))
        {
            return;
        }
        let since = known
            .filter(|known| known.status == "False")
            .and_then(|known| known.last_transition_time.clone());
        let since = since.unwrap_or_else(|| Time(base::clock::now_seconds()));
        let mut patch = json!({"status": {"conditions": [{
            "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
            "lastProbeTime": null, "lastTransitionTime": since, "observedGeneration": pod.generation,
        }]}, "metadata": {"uid": pod.uid}});
        if let Some(node) = nominated {
            patch["status"]["nominatedNodeName"] = node.into();
        }
        self.patch_status(pod, &patch).await;
    }

    async fn preempt(&self, pod: &PodInfo, victim: &PodInfo) {
        let condition = json!({"status": {"conditions": [{
            "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler",
            "message": format!("{}: preempting to accommodate a higher priority pod", pod.scheduler),
            "lastProbeTime": null, "lastTransitionTime": Time(base::clock::now_seconds()),
        }]}, "metadata": {"uid": victim.uid}});
        self.patch_status(victim, &condition).await;
        let api: Api<Pod> = self.client.api(Some(&victim.key.namespace));
        match api.delete(&victim.key.name, &DeleteParams::default()).await {
            Ok(_) => {
                let message = format!("Preempted by pod {} on node {}", pod.uid, victim.node_name);
                self.tell(pod, victim, EventType::Normal, "Preempted", message);
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => {
                tracing::warn!(pod = %victim.key, error = error.text(), "failed to delete the victim of preemption")
            }
        }
    }

    async fn patch_status(&self, pod: &PodInfo, patch: &serde_json::Value) {
        let api: Api<Pod> = self.client.api(Some(&pod.key.namespace));
        let patch = Patch::Strategic(patch);
        match api.patch_status(&pod.key.name, &PatchParams::default(), &patch).await {
            Err(error) if !error.is_not_found() && !error.is_conflict() => {
                tracing::warn!(pod = %pod.key, error = error.text(), "failed to update the pod's status");
            }
            _ => {}
        }
    }
}

fn reference(pod: &PodInfo) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        name: Some(pod.key.name.to_string()),
        namespace: Some(pod.key.namespace.to_string()),
        uid: Some(pod.uid.clone()),
        ..Default::default()
    }
}
