//! The loop: informers feed the state, one decision at a time empties the queue, workers write.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::task::{Stop, Tasks};
use client::{
    Api, Client, DeleteParams, ErrorExt, Event, EventRecorder, EventType, Informers, Lister, Patch,
    PatchParams,
};
use k8s_openapi::api::core::v1::{Namespace, Node, ObjectReference, Pod};
use machinery::Time;
use serde_json::json;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::framework::{ClusterEvent, CycleState, Diagnosis, Framework, Handle};
use crate::plugins::PLUGINS;
use crate::pod::PodInfo;
use crate::queue::Queue;
use crate::volumes::Volumes;

/// Decisions that wait for a writer.
const JOBS: usize = 1024;
/// Writers at work: a binding is one round trip to the API.
const WRITERS: usize = 32;

#[derive(Clone, Debug)]
pub struct Config {
    /// Pods that name this scheduler are its own.
    pub name: String,
}

impl Default for Config {
    fn default() -> Self {
        Self { name: "default-scheduler".into() }
    }
}

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
    let events = EventRecorder::new(client.clone(), &tasks, &config.name, None);
    let (jobs, queue) = mpsc::channel(JOBS);
    let pods = informers.of::<Pod>();
    let volumes = Volumes::new(&informers);
    let scheduler = Arc::new(Scheduler {
        framework: Framework::new(
            PLUGINS,
            &Handle { client: client.clone(), volumes: Some(volumes.clone()) },
        ),
        state: Mutex::default(),
        wake: Notify::new(),
        pods: pods.lister(),
        client,
        events,
        config,
    });
    let (nodes, namespaces) = (informers.of::<Node>(), informers.of::<Namespace>());
    let this = scheduler.clone();
    namespaces.subscribe(move |event| this.namespace_event(event));
    let this = scheduler.clone();
    nodes.subscribe(move |event| this.node_event(event));
    let this = scheduler.clone();
    pods.subscribe(move |event| this.pod_event(event));
    let this = scheduler.clone();
    volumes.subscribe(move || this.woken(&mut this.state(), &ClusterEvent::VolumesChanged));
    let queue = Arc::new(tokio::sync::Mutex::new(queue));
    for _ in 0..WRITERS {
        tasks.spawn("scheduler-writer", scheduler.clone().write(queue.clone()));
    }
    tasks.spawn("scheduler", async move {
        namespaces.synced().await;
        nodes.synced().await;
        pods.synced().await;
        volumes.synced().await;
        tracing::info!("scheduling");
        scheduler.decide(jobs).await;
    });
    let group = tasks.stop_signal();
    tokio::select! {
        () = stop.wait() => {}
        () = group.wait() => tracing::error!("the scheduler stopped: a task panicked"),
    }
    tasks.shutdown(Duration::from_secs(5)).await;
}

struct Scheduler {
    framework: Framework,
    /// Guards the columns and the queue: held for an event or a decision, never across await.
    state: Mutex<State>,
    /// The queue may have something to pop.
    wake: Notify,
    pods: Lister<Pod>,
    client: Client,
    events: EventRecorder,
    config: Config,
}

#[derive(Default)]
struct State {
    cluster: Cluster,
    queue: Queue,
}

/// What a decision leaves to be written.
enum Job {
    Bind {
        pod: Arc<PodInfo>,
        node: String,
        reserved: CycleState,
    },
    Report {
        pod: Arc<PodInfo>,
        message: String,
        nominated: Option<String>,
        victims: Vec<Arc<PodInfo>>,
    },
}

impl Scheduler {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("decisions do not panic")
    }

    fn woken(&self, state: &mut State, event: &ClusterEvent) {
        state.queue.wake(&self.framework, event);
        self.wake.notify_one();
    }

    fn namespace_event(&self, event: &Event<Namespace>) {
        let mut state = self.state();
        let meta = &event.object().metadata;
        let name = meta.name.clone().unwrap_or_default();
        let labels = meta.labels.clone().unwrap_or_default();
        let before = if event.is_deleted() {
            state.cluster.namespaces.remove(&name)
        } else {
            state.cluster.namespaces.insert(name, labels.clone())
        };
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
        // Heartbeats change nothing that matters here.
        let columns = |cluster: &Cluster| {
            let node = cluster.node(&name)?;
            Some((
                node.labels.clone(),
                node.taints.clone(),
                node.unschedulable,
                node.allocatable.clone(),
            ))
        };
        let before = columns(&state.cluster);
        state.cluster.update_node(node);
        let after = columns(&state.cluster);
        if before.is_none() {
            self.woken(&mut state, &ClusterEvent::NodeAdded(name));
        } else if before != after {
            self.woken(&mut state, &ClusterEvent::NodeUpdated(name));
        }
    }

    fn pod_event(&self, event: &Event<Pod>) {
        let pod = Arc::new(PodInfo::new(event.object()));
        let mut state = self.state();
        if event.is_deleted() || pod.finished {
            state.queue.remove(&pod.uid);
            state.cluster.nominate(&pod, "");
            let counted = !pod.node_name.is_empty() || state.cluster.is_assumed(&pod.uid);
            state.cluster.remove_pod(&pod.uid);
            if counted {
                self.woken(&mut state, &ClusterEvent::PodRemoved(pod));
            }
            return;
        }
        if !pod.node_name.is_empty() {
            state.queue.remove(&pod.uid);
            state.cluster.nominate(&pod, "");
            state.cluster.put_pod(pod.clone());
            let moved = event.old().is_none_or(|old| PodInfo::new(old).differs_in_spec(&pod));
            if moved {
                self.woken(&mut state, &ClusterEvent::PodAssigned(pod));
            }
            return;
        }
        if pod.deleting {
            state.cluster.nominate(&pod, "");
            return state.queue.remove(&pod.uid);
        }
        if pod.scheduler == self.config.name && !state.cluster.is_assumed(&pod.uid) {
            let nominated = pod.nominated.clone();
            state.cluster.nominate(&pod, &nominated);
            state.queue.put(&self.framework, pod);
            self.wake.notify_one();
        }
    }

    /// Pops and decides, for ever.
    async fn decide(&self, jobs: mpsc::Sender<Job>) {
        loop {
            let job = {
                let mut state = self.state();
                let deadline = state.queue.ripen(Instant::now());
                match state.queue.pop() {
                    Some(pod) => Ok(self.schedule(&mut state, pod)),
                    None => Err(deadline),
                }
            };
            match job {
                // The writers are gone when the group stops; then this task ends too.
                Ok(job) => {
                    let _ = jobs.send(job).await;
                }
                Err(Some(deadline)) => {
                    let _ = tokio::time::timeout_at(deadline, self.wake.notified()).await;
                }
                Err(None) => self.wake.notified().await,
            }
        }
    }

    /// One decision.
    fn schedule(&self, state: &mut State, pod: Arc<PodInfo>) -> Job {
        let mut diagnosis = match self.framework.schedule(&pod, &state.cluster) {
            Ok(node) => match self.framework.reserve(&pod, &node) {
                Ok(reserved) => {
                    state.cluster.assume(&pod, &node);
                    state.cluster.nominate(&pod, "");
                    return Job::Bind { pod, node, reserved };
                }
                Err(rejection) => Diagnosis {
                    nodes: state.cluster.nodes().count(),
                    general: Some(rejection.reasons.join(", ")),
                    ..Default::default()
                },
            },
            Err(diagnosis) => diagnosis,
        };
        let (mut nominated, mut victims) = (None, vec![]);
        if !diagnosis.rejections.is_empty()
            && let Some(outcome) = self.framework.post_filter(&pod, &state.cluster, &diagnosis)
        {
            // Upstream: what plugins before this one say: there are no resource claims to free.
            let prefix = "no new claims to deallocate";
            diagnosis.post_filter = match outcome.message.as_str() {
                "" => String::new(),
                message => format!("{prefix}, {message}"),
            };
            if let Some(node) = &outcome.nominated {
                state.cluster.nominate(&pod, node);
            }
            (nominated, victims) = (outcome.nominated, outcome.victims);
        }
        tracing::debug!(pod = %pod.key, %diagnosis, "no node fits");
        let mut plugins = diagnosis.plugins.clone();
        if diagnosis.nodes == 0 {
            // Any node may do.
            plugins = PLUGINS.iter().map(|row| row.name).collect::<BTreeSet<_>>();
        }
        state.queue.settle(&self.framework, &pod.uid, plugins);
        Job::Report { pod, message: diagnosis.to_string(), nominated, victims }
    }

    async fn write(self: Arc<Self>, jobs: Arc<tokio::sync::Mutex<mpsc::Receiver<Job>>>) {
        loop {
            let job = jobs.lock().await.recv().await;
            match job {
                None => return,
                Some(Job::Bind { pod, node, reserved }) => self.bind(&pod, &node, &reserved).await,
                Some(Job::Report { pod, message, nominated, victims }) => {
                    for victim in &victims {
                        self.preempt(&pod, victim).await;
                    }
                    self.report(&pod, "Unschedulable", &message, nominated.as_deref()).await;
                }
            }
        }
    }

    async fn bind(&self, pod: &PodInfo, node: &str, reserved: &CycleState) {
        match self.framework.bind(pod, node).await {
            Ok(()) => {
                self.state().queue.remove(&pod.uid);
                let message = format!("Successfully assigned {} to {node}", pod.key);
                self.events.event_about(reference(pod), EventType::Normal, "Scheduled", message);
            }
            Err(error) => {
                self.framework.unreserve(reserved, pod, node);
                {
                    let mut state = self.state();
                    // If the pod is gone or bound by somebody else, there is nothing to undo.
                    if state.cluster.forget(&pod.uid) {
                        state.queue.settle(&self.framework, &pod.uid, BTreeSet::new());
                        self.woken(&mut state, &ClusterEvent::PodRemoved(Arc::new(pod.clone())));
                    }
                }
                tracing::warn!(pod = %pod.key, node, error, "binding failed");
                self.report(pod, "SchedulerError", &format!("binding rejected: {error}"), None)
                    .await;
            }
        }
    }

    /// Tells people and the API why a pod waits.
    async fn report(&self, pod: &PodInfo, reason: &str, message: &str, nominated: Option<&str>) {
        let Some(current) = self.pods.get_key(&pod.key) else {
            return;
        };
        if current.metadata.uid.as_deref() != Some(&pod.uid) {
            return;
        }
        self.events.event_about(reference(pod), EventType::Warning, "FailedScheduling", message);
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
            "message": format!("{}: preempting to accommodate a higher priority pod", self.config.name),
            "lastProbeTime": null, "lastTransitionTime": Time(base::clock::now_seconds()),
        }]}, "metadata": {"uid": victim.uid}});
        self.patch_status(victim, &condition).await;
        let api: Api<Pod> = self.client.api(Some(&victim.key.namespace));
        match api.delete(&victim.key.name, &DeleteParams::default()).await {
            Ok(_) => {
                let message = format!("Preempted by pod {} on node {}", pod.uid, victim.node_name);
                self.events.event_about(reference(victim), EventType::Normal, "Preempted", message);
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => {
                tracing::warn!(pod = %victim.key, error = error.text(), "preemption failed")
            }
        }
    }

    async fn patch_status(&self, pod: &PodInfo, patch: &serde_json::Value) {
        let api: Api<Pod> = self.client.api(Some(&pod.key.namespace));
        let patch = Patch::Strategic(patch);
        match api.patch_status(&pod.key.name, &PatchParams::default(), &patch).await {
            Err(error) if !error.is_not_found() && !error.is_conflict() => {
                tracing::warn!(pod = %pod.key, error = error.text(), "cannot update a pod's status");
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
