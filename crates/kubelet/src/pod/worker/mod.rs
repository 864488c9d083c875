//! The worker of one pod: a state machine for all of this node's work on that pod.
//!
//! ```text
//!            ┌────────────── wake: API change, runtime event, probe, object, timer ─────────────┐
//!            ▼                                                                                  │
//!   observe runtime ─► status ─► plan ─► act (volumes, sandbox, images, containers) ─► wait ────┘
//!            │
//!            │ deletion requested, phase terminal, deadline, eviction
//!            ▼
//!   STOPPING: hooks, signals, grace ─► sandbox stopped ─► final status ─► volumes unmounted
//!            │                                                │ not being deleted: wait here
//!            ▼                                                ▼
//!   GONE: removed from the runtime ─► status is in the API ─► DELETE with grace 0 and uid ─► end
//! ```
//!
//! Invariants: one worker per pod uid, so that no two actions on a pod overlap; all state that
//! matters is read back from the runtime and the API, never remembered across restarts; the API
//! object is deleted only after the containers are gone and the last status is written.
//! Upstream: `pkg/kubelet/pod_workers.go`, `kubelet.go` SyncPod, SyncTerminatingPod.

pub mod context;
mod error;
mod resize;
mod start;
mod stop;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::backoff::Backoff;
use base::task::Tasks;
use client::{ErrorExt, EventType};
use http::Method;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use release::features::{self, Feature};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::names;
use crate::pod::allocation::{self, Actuated};
use crate::pod::backoff::Delays;
use crate::pod::events::reference;
use crate::pod::holds::Holds;
use crate::pod::hosts;
use crate::pod::input::{Input, Inputs, told_to_stop};
use crate::pod::observed::{ALL_RESTARTING, Observed, State, all_containers};
use crate::pod::plan::{Plan, plan, restart_all};
use crate::pod::probe::{Probes, Target};
use crate::pod::resize::plan as plan_resize;
use crate::pod::runtime::observe;
use crate::pod::status::{Facts, pod_status};
use crate::pod::status_writer::StatusWriter;
use crate::reason::Reason;
use crate::volumes::{self, PodDir};
pub use context::{Context, Starts};
use resize::Resizing;

/// The maximum time between two looks at the pod.
pub const RELIST: Duration = Duration::from_secs(120);
const RUNTIME_RETRY: Duration = Duration::from_secs(2);

/// A worker's report to the pod set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerEvent {
    /// Its resources are free.
    Stopped,
    Finished,
}

/// The public state of a worker.
#[derive(Clone, Default)]
pub struct View {
    pub pod: Option<Arc<Pod>>,
    pub status: PodStatus,
    pub observed: Observed,
    /// The directories of its claims, by volume name.
    pub claims: BTreeMap<String, PathBuf>,
    /// Its resources are free.
    pub stopped: bool,
}

/// The pod set's handle of a worker.
pub struct Handle {
    pub input: watch::Sender<Input>,
    pub wake: Arc<Notify>,
    pub view: Arc<Mutex<View>>,
}

impl Handle {
    pub fn view(&self) -> View {
        self.view.lock().expect("no panic while held").clone()
    }

    /// Whether the pod's resources are free for others: it has ended, though cleaning up may go on.
    pub fn is_over(&self) -> bool {
        let view = self.view.lock().expect("no panic while held");
        view.stopped || matches!(view.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }
}

pub struct Worker {
    context: Arc<Context>,
    input: Inputs,
    wake: Arc<Notify>,
    view: Arc<Mutex<View>>,
    pod: Arc<Pod>,
    uid: String,
    dir: PodDir,
    probes: Probes,
    life: Life,
    holds: Holds,
    /// Notified when a ConfigMap or Secret of the pod changed: held containers may start now.
    objects_changed: Arc<Notify>,
    crashes: Delays,
    published: PodStatus,
    status: StatusWriter,
    retry: Backoff,
    /// Containers whose preStop hook has already run.
    hooked: HashSet<String>,
    /// When a volume of this pod must be set up again: a token ages.
    refresh: Option<Timestamp>,
    /// The directories of its claims, by volume name.
    claim_paths: BTreeMap<String, PathBuf>,
    resizing: Resizing,
    /// The condition DisruptionTarget of an eviction by the node.
    disruption: Option<PodCondition>,
    /// When the kubelet first saw the pod; only until it runs.
    seen: Option<Instant>,
    tell: Tell,
}

/// Reports a worker's end; called with the pod's uid.
type Tell = Box<dyn Fn(&str, WorkerEvent) + Send + Sync>;

/// The life of a pod on this node; the states of the drawing above.
enum Life {
    Running,
    /// It fails with this reason, or has ended otherwise.
    Stopping(Option<Reason>),
    /// Its containers and its sandbox are gone for good.
    Gone,
}

impl Life {
    /// The pod must fail; false if that is decided already.
    fn fail(&mut self, reason: Reason) -> bool {
        let is_news = matches!(self, Self::Running | Self::Stopping(None));
        if is_news {
            *self = Self::Stopping(Some(reason));
        }
        is_news
    }

    /// The pod was deleted, or its containers have finished.
    fn end(&mut self) {
        if matches!(self, Self::Running) {
            *self = Self::Stopping(None);
        }
    }

    fn failure(&self) -> Option<&Reason> {
        match self {
            Self::Stopping(reason) => reason.as_ref(),
            Self::Running | Self::Gone => None,
        }
    }
}

/// The failure has become an event: the step must be repeated after a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Retry;

impl From<()> for Retry {
    fn from((): ()) -> Self {
        Self
    }
}

fn is_over(status: &PodStatus) -> bool {
    matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"))
}

/// Keeps the phase while some containers still run, although the result is decided.
fn hold_phase(before: &PodStatus, status: &mut PodStatus) {
    status.phase = before.phase.clone().or_else(|| Some("Pending".into()));
    status.reason = before.reason.clone();
    status.message = before.message.clone();
}

/// When the next step runs.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    Again,
    Wait(Duration),
    Finished,
}

impl Worker {
    /// Starts the worker of a pod as a task of `tasks`; `tell` gets its reports.
    pub fn start(
        context: Arc<Context>,
        tasks: &Tasks,
        first: Input,
        tell: impl Fn(&str, WorkerEvent) + Send + Sync + 'static,
    ) -> Handle {
        let (input, input_out) = watch::channel(first.clone());
        let wake = Arc::new(Notify::new());
        let view = Arc::new(Mutex::new(View::default()));
        let pod = first.pod;
        let uid = names::uid(&pod).to_string();
        let own = Tasks::new(format!("pod {}", names::full(&pod)));
        let crash_ceiling = context.node.config.crash_ceiling;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let seen = matches!(phase, None | Some("Pending")).then(Instant::now);
        let worker = Self {
            dir: PodDir::new(&context.node.config.root_dir, &uid),
            probes: Probes::new(
                context.runtime.clone(),
                own.clone(),
                context.events.0.clone(),
                wake.clone(),
                context.probes.clone(),
            ),
            status: StatusWriter::new(context.api.clone(), &own, pod.clone()),
            published: pod.status.clone().unwrap_or_default(),
            context,
            input: input_out,
            wake: wake.clone(),
            view: view.clone(),
            pod,
            uid,
            life: Life::Running,
            holds: Holds::default(),
            objects_changed: Arc::default(),
            crashes: Delays::of_crashes(crash_ceiling),
            retry: Backoff::new(Duration::from_secs(1), Duration::from_secs(10)).with_jitter(0.1),
            hooked: HashSet::new(),
            refresh: None,
            claim_paths: BTreeMap::new(),
            resizing: Resizing::default(),
            disruption: None,
            seen,
            tell: Box::new(tell),
        };
        tasks.spawn("pod-worker", async move {
            let worker = worker.run().await;
            own.shutdown(Duration::from_secs(1)).await;
            (worker.tell)(&worker.uid, WorkerEvent::Finished);
        });
        Handle { input, wake, view }
    }

    async fn run(mut self) -> Self {
        self.resizing.actuated = Actuated::read(&self.dir);
        self.admit_resources().await;
        let mut is_first = true;
        loop {
            let begun = Instant::now();
            let next = self.step().await;
            let what = match (matches!(self.life, Life::Gone), is_first) {
                (true, _) => "terminated",
                (false, true) => "create",
                (false, false) => "sync",
            };
            is_first = false;
            self.context.figures.step(what, begun.elapsed());
            match next {
                Next::Finished => return self,
                Next::Again => {}
                Next::Wait(limit) => {
                    tokio::select! {
                        () = self.wake.notified() => {}
                        () = self.objects_changed.notified() => self.holds.release(),
                        changed = self.input.changed() => if changed.is_err() { return self },
                        () = tokio::time::sleep(limit) => {}
                    }
                }
            }
        }
    }

    /// Allocates devices of plugins, CPUs and memory before any other step; the pod fails without them.
    /// Running containers keep what they have, even if the plugins are not back.
    async fn admit_resources(&mut self) {
        let (input, context) = (self.input.borrow().clone(), self.context.clone());
        let (plugins, managers) = (&context.device_plugins, &context.managers);
        let concerns = plugins.concerns(&self.pod) || managers.is_on();
        if self.must_stop(&input) || input.evict.is_some() || !concerns {
            return;
        }
        let runs = match observe(&*context.runtime, &self.uid).await {
            Ok(observed) => observed.running().next().is_some(),
            // Deviation: upstream treats an unavailable runtime like one that runs nothing.
            Err(_) => plugins.has_all(&self.pod),
        };
        if runs {
            return;
        }
        let done = tokio::select! {
            done = managers.admit(&self.pod, &**plugins) => done,
            () = told_to_stop(&self.input) => Ok(()),
        };
        if let Err(why) = done {
            let Reason { reason, message } = why.into_reason();
            context.events.warn(&self.pod, &reason, message.clone());
            self.life.fail(Reason::new(reason, format!("Pod was rejected: {message}")));
        }
    }

    async fn step(&mut self) -> Next {
        let input = self.input.borrow_and_update().clone();
        self.pod = input.pod.clone();
        self.holds.follow(self.pod.metadata.generation);
        self.adopt_foreign_conditions();
        if let Some(reason) = input.evict.clone() {
            let disruption = input.disrupts.then(|| self.disruption_target(&reason.message));
            if self.life.fail(reason) {
                self.disruption = disruption;
            }
        }
        self.show_disruption();
        let deadline = self.check_deadline();
        if self.must_stop(&input) {
            return self.stop().await;
        }
        let observed = match self.look().await {
            Ok(observed) => observed,
            Err(next) => return next,
        };
        self.follow_resize(&observed);
        if self.publish(&observed, false) {
            self.life.end();
            return self.stop().await;
        }
        self.context.cgroups.count_pod(&self.pod);
        let plan = self.plan(&observed);
        if plan.is_empty() {
            self.holds.waiting.clear();
            self.collect_garbage(&observed).await;
            return self.rest(deadline).await;
        }
        match self.act(plan, &observed).await {
            Ok(None) => {
                self.retry.reset();
                Next::Again
            }
            // No progress is possible now: publish why, and wait for time or an event.
            Ok(Some(wait)) => {
                self.publish_latest().await;
                Next::Wait(deadline.map_or(wait, |d| d.min(wait)))
            }
            Err(Retry) => {
                self.publish_latest().await;
                Next::Wait(self.retry.step())
            }
        }
    }

    fn plan(&self, observed: &Observed) -> Plan {
        let mut told = self.published.conditions.iter().flatten();
        let spec = self.pod.spec.as_ref();
        if let Some(spec) = spec
            && told.any(|told| told.type_ == ALL_RESTARTING && told.status == "True")
        {
            return restart_all(spec, observed);
        }
        let health = self.probes.health();
        let mut plan = plan(&self.pod, observed, &health, names::container_hash);
        plan.resize.pod = self.resizing.cgroup_is_old && !plan.create_sandbox;
        plan_resize(&self.pod, observed, &self.resizing.actuated, &mut plan);
        plan
    }

    /// The steady state: updates volumes from their sources.
    async fn rest(&mut self, deadline: Option<Duration>) -> Next {
        if !self.refresh_volumes().await {
            return Next::Wait(self.retry.step());
        }
        self.retry.reset();
        let now = base::clock::now();
        let until =
            |time: Timestamp| Duration::try_from(time.duration_since(now)).unwrap_or_default();
        let mut wait = RELIST.mul_f64(1.0 + 0.2 * base::rng::unit());
        if let Some(refresh) = self.refresh {
            wait = wait.min(until(refresh).max(Duration::from_secs(1)));
        }
        Next::Wait(deadline.map_or(wait, |deadline| deadline.min(wait)))
    }

    /// Whether the pod must not run any more; if so, it is STOPPING.
    fn must_stop(&mut self, input: &Input) -> bool {
        let told = |pod: &Pod| pod.status.as_ref().is_some_and(is_over);
        let is_over = is_over(&self.published) || !names::is_static(&input.pod) && told(&input.pod);
        if input.is_gone() || is_over {
            self.life.end();
        }
        !matches!(self.life, Life::Running)
    }

    /// Observes the runtime, and sets the probes' targets.
    async fn look(&mut self) -> Result<Observed, Next> {
        match observe(&*self.context.runtime, &self.uid).await {
            Ok(observed) => {
                self.aim_probes(&observed);
                Ok(observed)
            }
            Err(error) => {
                tracing::warn!(pod = names::full(&self.pod), %error, "failed to observe the pod in the runtime");
                Err(Next::Wait(RUNTIME_RETRY))
            }
        }
    }

    fn aim_probes(&mut self, observed: &Observed) {
        let Some(spec) = &self.pod.spec else { return };
        let ip = self.pod_ips(observed).first().copied();
        let mut targets = vec![];
        for (role, container) in all_containers(spec) {
            let probed = container.startup_probe.is_some()
                || container.liveness_probe.is_some()
                || container.readiness_probe.is_some();
            let running = observed.container(&container.name).filter(|c| c.state == State::Running);
            if let (true, Some(running)) = (probed, running) {
                targets.push(Target {
                    container_id: running.id.clone(),
                    about: reference(&self.pod, Some((role, &container.name))),
                    known: self.known_readiness(&running.id),
                    started_at: running.started_at,
                    pod_ip: ip,
                    container,
                });
            }
        }
        self.probes.retarget(targets);
    }

    /// The API's state of this container: a restarted kubelet starts from it, so that its restart removes no
    /// pod from its Services.
    fn known_readiness(&self, id: &str) -> Option<(bool, bool)> {
        let full = format!("{}://{id}", self.context.node.runtime_name);
        let lists = [&self.published.init_container_statuses, &self.published.container_statuses];
        let mut all = lists.into_iter().flatten().flatten();
        let status = all.find(|s| s.container_id.as_deref() == Some(&full))?;
        Some((status.started == Some(true), status.ready))
    }

    /// The pod's addresses: the sandbox's, or the node's for a pod in the host's network.
    fn pod_ips(&self, observed: &Observed) -> Vec<std::net::IpAddr> {
        let on_host = self.pod.spec.as_ref().and_then(|s| s.host_network) == Some(true);
        if on_host { self.context.node.host_ips() } else { observed.ips() }
    }

    async fn publish_latest(&mut self) {
        if let Ok(observed) = self.look().await {
            self.publish(&observed, false);
        }
    }

    /// True if the pod is over. Its exclusive resources are freed before the API shows the end, and while
    /// containers run the API does not show it, like upstream (`mergePodStatus`).
    fn publish(&mut self, observed: &Observed, terminal: bool) -> bool {
        let refused = self.input.borrow().standing.refused.clone();
        let resize = allocation::conditions(refused.as_ref(), self.resizing.progress.as_ref());
        let facts = Facts {
            observed,
            resize: &resize,
            waiting: &self.holds.waiting,
            probes: &self.probes.readiness(),
            host_ips: &self.context.node.host_ips(),
            runtime_name: &self.context.node.runtime_name,
            terminal,
            failed: self.life.failure(),
            now: base::clock::now(),
        };
        let mut status = pod_status(&self.pod, &self.published, &facts);
        if features::enabled(Feature::ResourceHealthStatus) {
            self.context.device_plugins.tell(&self.uid, &self.published, &mut status);
        }
        let ends = is_over(&status);
        let runs = !terminal && observed.running().next().is_some();
        if ends && runs && !is_over(&self.published) {
            hold_phase(&self.published, &mut status);
        } else if ends && !runs {
            self.context.device_plugins.forget(&self.uid);
            self.context.managers.forget(&self.uid);
        }
        self.count(&status);
        let is_news = status != self.published || self.pod.status.as_ref() != Some(&status);
        self.published = status.clone();
        // The node must know it before the API: a scheduler reuses a finished pod's resources at once.
        *self.view.lock().expect("no panic while held") = View {
            pod: Some(self.pod.clone()),
            status: status.clone(),
            observed: observed.clone(),
            claims: self.claim_paths.clone(),
            stopped: matches!(self.life, Life::Gone),
        };
        if is_news {
            self.status.set(status);
        }
        ends
    }

    /// Updates the metrics with the next status.
    fn count(&mut self, next: &PodStatus) {
        self.context.figures.ends(&self.published, next);
        if next.phase.as_deref() == Some("Running")
            && let Some(seen) = self.seen.take()
        {
            self.context.figures.pod_runs(seen.elapsed());
        }
    }

    /// Takes over conditions of other writers (readiness gates, disruption targets).
    fn adopt_foreign_conditions(&mut self) {
        const OURS: [&str; 8] = [
            ALL_RESTARTING,
            allocation::PENDING,
            allocation::IN_PROGRESS,
            "PodReadyToStartContainers",
            "Initialized",
            "Ready",
            "ContainersReady",
            "PodScheduled",
        ];
        let is_ours = |name: &str| OURS.contains(&name);
        let theirs = self.pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
        let theirs: Vec<_> = theirs.filter(|c| !is_ours(&c.type_)).cloned().collect();
        let conditions = self.published.conditions.get_or_insert_default();
        conditions.retain(|c| is_ours(&c.type_));
        conditions.extend(theirs);
    }

    fn disruption_target(&self, message: &str) -> PodCondition {
        let now = base::clock::now();
        PodCondition {
            type_: "DisruptionTarget".into(),
            status: "True".into(),
            reason: Some("TerminationByKubelet".into()),
            message: Some(message.into()),
            observed_generation: self.pod.metadata.generation,
            last_transition_time: Timestamp::from_second(now.as_second()).ok().map(Time),
            last_probe_time: None,
        }
    }

    /// Replaces the condition of other writers by our DisruptionTarget.
    fn show_disruption(&mut self) {
        let Some(condition) = self.disruption.clone() else { return };
        let conditions = self.published.conditions.get_or_insert_default();
        conditions.retain(|known| known.type_ != condition.type_);
        conditions.push(condition);
    }

    /// Fails the pod if its active deadline has passed; else returns the remaining time.
    fn check_deadline(&mut self) -> Option<Duration> {
        let seconds = self.pod.spec.as_ref()?.active_deadline_seconds?;
        let start = self.published.start_time.as_ref()?.0;
        let ran = Duration::try_from(base::clock::now().duration_since(start)).unwrap_or_default();
        let left = Duration::from_secs(seconds.max(0) as u64).checked_sub(ran);
        match left.filter(|left| !left.is_zero()) {
            Some(left) => Some(left),
            None => {
                let message = "Pod was active on the node longer than the specified deadline";
                if self.life.fail(Reason::new("DeadlineExceeded", message)) {
                    self.context.events.tell(
                        &self.pod,
                        EventType::Normal,
                        "DeadlineExceeded",
                        message,
                    );
                }
                None
            }
        }
    }

    /// STOPPING and GONE.
    async fn stop(&mut self) -> Next {
        let input = self.input.borrow_and_update().clone();
        self.pod = input.pod.clone();
        if !matches!(self.life, Life::Gone) {
            if let Err(next) = self.stop_containers().await {
                return next;
            }
            self.context.device_plugins.forget(&self.uid);
            self.context.managers.forget(&self.uid);
            let observed = match self.look().await {
                Ok(observed) => observed,
                Err(next) => return next,
            };
            if let Err(error) = self.context.devices.give_back(&self.uid).await {
                tracing::warn!(
                    pod = names::full(&self.pod),
                    %error,
                    "failed to unprepare the pod's claims"
                );
                return Next::Wait(self.retry.step());
            }
            self.holds.waiting.clear();
            self.publish(&observed, true);
            let removed = volumes::tear_down(&self.context.volumes, &self.uid, &self.dir).await;
            if let Err(error) = removed {
                tracing::warn!(pod = names::full(&self.pod), %error, "failed to remove the pod's directory");
                return Next::Wait(self.retry.step());
            }
            self.context.volumes.objects.forget(&self.uid);
            self.context.cgroups.remove_pod(&self.uid);
            self.life = Life::Gone;
            self.view.lock().expect("no panic while held").stopped = true;
            (self.tell)(&self.uid, WorkerEvent::Stopped);
        }
        if !input.is_gone() {
            return Next::Wait(Duration::from_secs(24 * 3600));
        }
        if let Err(next) = self.forget_in_runtime().await {
            return next;
        }
        if !input.removed {
            self.status.settled().await;
            if let Err(next) = self.confirm_deletion().await {
                return next;
            }
        }
        self.context.volumes.objects.forget(&self.uid);
        self.context.starts.images.forget_pod(&self.uid);
        Next::Finished
    }

    /// Removes sandboxes and containers from the runtime, and logs from the disk.
    async fn forget_in_runtime(&mut self) -> Result<(), Next> {
        let observed = self.look().await?;
        for sandbox in &observed.sandboxes {
            let removed = self.context.runtime.remove_pod_sandbox(&sandbox.id).await;
            if let Err(error) = removed.or_else(|e| if e.is_not_found() { Ok(()) } else { Err(e) })
            {
                tracing::warn!(pod = names::full(&self.pod), %error, "failed to remove the sandbox");
                return Err(Next::Wait(self.retry.step()));
            }
        }
        for container in &observed.containers {
            // Usually already removed with its sandbox.
            let _ = self.context.runtime.remove_container(&container.id).await;
        }
        self.context.cgroups.remove_pod(&self.uid);
        let config = &self.context.node.config;
        let logs = names::log_directory(&config.log_dir, &self.pod);
        let _ = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(logs)).await;
        for container in &observed.containers {
            config.log_links.remove(&self.pod, &container.name, &container.id);
        }
        Ok(())
    }

    /// The second phase of the deletion: deletes the API object.
    async fn confirm_deletion(&mut self) -> Result<(), Next> {
        let path = format!(
            "/api/v1/namespaces/{}/pods/{}",
            names::namespace(&self.pod),
            names::name(&self.pod)
        );
        let options = serde_json::json!({"kind": "DeleteOptions", "apiVersion": "v1",
            "gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}});
        let sent = self.context.api.client.call(
            Method::DELETE,
            &path,
            "application/json",
            options.to_string(),
        );
        match sent.await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) => {
                tracing::debug!(
                    pod = names::full(&self.pod),
                    error = error.text(),
                    "failed to delete the pod from the API"
                );
                Err(Next::Wait(self.retry.step()))
            }
        }
    }

    /// Removes old containers and sandboxes: keeps the running and one exited container of each name, and
    /// the newest sandbox.
    async fn collect_garbage(&self, observed: &Observed) {
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        for container in &observed.containers {
            let count = seen.entry(container.name.as_str()).or_default();
            *count += 1;
            if *count > 2 && container.state == State::Exited {
                let _ = self.context.runtime.remove_container(&container.id).await;
                let _ = std::fs::remove_file(self.absolute_log(&container.log_path));
                let links = &self.context.node.config.log_links;
                links.remove(&self.pod, &container.name, &container.id);
            }
        }
        for old in observed.sandboxes.iter().skip(1).filter(|s| !s.ready) {
            let used = observed.containers.iter().any(|c| {
                c.sandbox_id == old.id
                    && !observed
                        .containers
                        .iter()
                        .any(|n| n.name == c.name && n.created_at > c.created_at)
            });
            if !used {
                let _ = self.context.runtime.remove_pod_sandbox(&old.id).await;
            }
        }
    }

    fn absolute_log(&self, path: &str) -> std::path::PathBuf {
        names::log_directory(&self.context.node.config.log_dir, &self.pod).join(path)
    }

    /// The pod's hostname and domain, for /etc/hosts.
    fn hostname(&self) -> (String, String) {
        hosts::hostname_and_domain(&self.pod, &self.context.node.config.cluster_domain)
    }
}
