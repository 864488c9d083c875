//! Probes: each is a task that checks one container periodically and wakes the pod's worker when its
//! verdict changes.
//!
//! ```text
//! startup ──passed──► liveness and readiness start
//!    │ failed                │ liveness failed          readiness: true ⇄ false
//!    ▼                       ▼
//!   the worker kills the container; its probes end with it
//! ```
//!
//! In: a running container. Out: [`Verdicts`] by container id, a wake-up, `Unhealthy` events.
//! Invariant: a verdict changes only after `failureThreshold` or `successThreshold` equal results.
//! Upstream: `pkg/kubelet/prober`.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::task::Tasks;
use client::{EventRecorder, EventType};
use k8s_openapi::api::core::v1::{Container, ObjectReference, Probe};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::pod::handler::{self, Outcome};
use crate::pod::plan::{Health, HealthMap};
use crate::pod::probe_counts::{Counts, Record, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Startup,
    Liveness,
    Readiness,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// The container that is probed.
#[derive(Clone)]
pub struct Target {
    pub container_id: String,
    pub container: Container,
    pub pod_ip: Option<IpAddr>,
    /// The object of the events.
    pub about: ObjectReference,
    /// The API's state of this container before this kubelet started: (started, ready).
    pub known: Option<(bool, bool)>,
    /// When it started, for `initialDelaySeconds`.
    pub started_at: Option<jiff::Timestamp>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Verdict {
    startup: Option<bool>,
    liveness: Option<bool>,
    readiness: Option<bool>,
}

struct Running {
    tasks: Vec<(Kind, AbortHandle)>,
    has_startup: bool,
    has_readiness: bool,
}

/// The probes of one pod. Drop ends them.
pub struct Probes {
    runtime: Arc<dyn cri::Runtime>,
    tasks: Tasks,
    events: EventRecorder,
    wake: Arc<Notify>,
    counts: Arc<Counts>,
    running: HashMap<String, Running>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Guards the verdicts; held for single reads and writes.
    verdicts: Mutex<BTreeMap<String, Verdict>>,
    /// Notified when a startup probe has passed.
    passed: Notify,
}

impl Shared {
    fn read(&self, id: &str) -> Verdict {
        self.verdicts.lock().expect("no panic while held").get(id).copied().unwrap_or_default()
    }

    fn write(&self, id: &str, kind: Kind, value: bool) {
        let mut verdicts = self.verdicts.lock().expect("no panic while held");
        let verdict = verdicts.entry(id.to_string()).or_default();
        let slot = match kind {
            Kind::Startup => &mut verdict.startup,
            Kind::Liveness => &mut verdict.liveness,
            Kind::Readiness => &mut verdict.readiness,
        };
        *slot = Some(value);
        drop(verdicts);
        self.passed.notify_waiters();
    }
}

impl Drop for Probes {
    fn drop(&mut self) {
        for running in self.running.values() {
            running.abort(|_| true);
        }
    }
}

impl Running {
    fn abort(&self, which: impl Fn(Kind) -> bool) {
        let chosen = self.tasks.iter().filter(|(kind, _)| which(*kind));
        chosen.for_each(|(_, task)| task.abort());
    }
}

impl Probes {
    pub fn new(
        runtime: Arc<dyn cri::Runtime>,
        tasks: Tasks,
        events: EventRecorder,
        wake: Arc<Notify>,
        counts: Arc<Counts>,
    ) -> Self {
        let shared = Arc::default();
        Self { runtime, tasks, events, wake, counts, running: HashMap::new(), shared }
    }

    /// Sets the probed containers. Running probes of these continue.
    pub fn retarget(&mut self, targets: Vec<Target>) {
        let ids: Vec<&str> = targets.iter().map(|t| t.container_id.as_str()).collect();
        self.running.retain(|id, running| {
            let keep = ids.contains(&id.as_str());
            if !keep {
                running.abort(|_| true);
                self.shared.verdicts.lock().expect("no panic while held").remove(id);
            }
            keep
        });
        for target in targets {
            if !self.running.contains_key(&target.container_id) {
                self.start(target);
            }
        }
    }

    /// The pod terminates: from now on, only readiness matters.
    /// Upstream: StopLivenessAndStartup.
    pub fn keep_readiness_only(&self) {
        for (id, running) in &self.running {
            running.abort(|kind| kind != Kind::Readiness);
            self.shared.write(id, Kind::Liveness, true);
            if running.has_startup {
                self.shared.write(id, Kind::Startup, true);
            }
        }
    }

    fn start(&mut self, target: Target) {
        let container = &target.container;
        let probes = [
            (Kind::Startup, container.startup_probe.clone()),
            (Kind::Liveness, container.liveness_probe.clone()),
            (Kind::Readiness, container.readiness_probe.clone()),
        ];
        let has = |kind| probes.iter().any(|(k, probe)| *k == kind && probe.is_some());
        let (has_startup, has_readiness) = (has(Kind::Startup), has(Kind::Readiness));
        let id = target.container_id.clone();
        if let Some((started, ready)) = target.known {
            if started && has_startup {
                self.shared.write(&id, Kind::Startup, true);
            }
            if ready && has_readiness {
                self.shared.write(&id, Kind::Readiness, true);
            }
        }
        let mut tasks = vec![];
        for (kind, probe) in probes {
            let Some(probe) = probe else { continue };
            if kind == Kind::Startup && target.known.is_some_and(|(started, _)| started) {
                continue;
            }
            let one = One {
                kind,
                probe,
                target: target.clone(),
                waits_for_startup: has_startup && kind != Kind::Startup,
                runtime: self.runtime.clone(),
                shared: self.shared.clone(),
                wake: self.wake.clone(),
                events: self.events.clone(),
                record: self.counts.begin(kind.name(), &target.container.name, &target.about),
            };
            tasks.push((kind, self.tasks.spawn("probe", one.run())));
        }
        self.running.insert(id, Running { tasks, has_startup, has_readiness });
    }

    pub fn any(&self) -> bool {
        !self.running.is_empty()
    }

    /// The results for decisions.
    pub fn health(&self) -> HealthMap {
        let of = |id: &String| {
            let verdict = self.shared.read(id);
            (id.clone(), Health { startup: verdict.startup, liveness: verdict.liveness })
        };
        self.running.keys().map(of).collect()
    }

    /// The results for the status, by container id: (started, ready).
    pub fn readiness(&self) -> BTreeMap<String, (bool, bool)> {
        let of = |(id, running): (&String, &Running)| {
            let verdict = self.shared.read(id);
            let started = !running.has_startup || verdict.startup == Some(true);
            let ready = !running.has_readiness || verdict.readiness == Some(true);
            (id.clone(), (started, ready))
        };
        self.running.iter().map(of).collect()
    }
}

/// One probe of one container.
struct One {
    kind: Kind,
    probe: Probe,
    target: Target,
    waits_for_startup: bool,
    runtime: Arc<dyn cri::Runtime>,
    shared: Arc<Shared>,
    wake: Arc<Notify>,
    events: EventRecorder,
    record: Arc<Record>,
}

impl One {
    async fn run(self) {
        let id = self.target.container_id.clone();
        if self.waits_for_startup {
            loop {
                let passed = self.shared.passed.notified();
                if self.shared.read(&id).startup == Some(true) {
                    break;
                }
                passed.await;
            }
        }
        let seconds = |value: Option<i32>, default: i32| {
            Duration::from_secs(value.filter(|v| *v > 0).unwrap_or(default).max(0) as u64)
        };
        tokio::time::sleep(self.initial_delay()).await;
        let mut timer = tokio::time::interval(seconds(self.probe.period_seconds, 10));
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let limit = seconds(self.probe.timeout_seconds, 1);
        let mut last = None;
        let mut streak = 0;
        loop {
            timer.tick().await;
            let begun = tokio::time::Instant::now();
            let outcome = self.check(limit).await;
            let result = match &outcome {
                Outcome::Success => Result::Successful,
                Outcome::Failure(_) => Result::Failed,
                Outcome::Error(_) => Result::Unknown,
            };
            self.record.note(result, begun.elapsed());
            let good = match self.judge(outcome) {
                Some(good) => good,
                None => continue,
            };
            streak = if last == Some(good) { streak + 1 } else { 1 };
            last = Some(good);
            let threshold = match good {
                true => self.probe.success_threshold.unwrap_or(1),
                false => self.probe.failure_threshold.unwrap_or(3),
            };
            if streak < threshold.max(1) {
                continue;
            }
            self.publish(good);
            // After this result the probe is not needed any more: the container is killed, or has started.
            if (self.kind != Kind::Readiness && !good) || (self.kind == Kind::Startup && good) {
                return;
            }
        }
    }

    /// Counts from the container's start, not from the kubelet's.
    fn initial_delay(&self) -> Duration {
        let delay =
            Duration::from_secs(self.probe.initial_delay_seconds.unwrap_or(0).max(0) as u64);
        let ran = self.target.started_at.map(|at| base::clock::now().duration_since(at));
        let ran = ran.and_then(|ran| Duration::try_from(ran).ok()).unwrap_or_default();
        delay.saturating_sub(ran)
    }

    fn publish(&self, good: bool) {
        let before = self.shared.read(&self.target.container_id);
        let slot = match self.kind {
            Kind::Startup => before.startup,
            Kind::Liveness => before.liveness,
            Kind::Readiness => before.readiness,
        };
        if slot != Some(good) {
            self.shared.write(&self.target.container_id, self.kind, good);
            self.wake.notify_one();
        }
    }

    /// Sends the event of a bad outcome; `None` if the outcome is no verdict.
    fn judge(&self, outcome: Outcome) -> Option<bool> {
        let kind = self.kind.name();
        let (text, verdict) = match outcome {
            Outcome::Success => return Some(true),
            Outcome::Failure(output) => (format!("{kind} probe failed: {output}"), Some(false)),
            Outcome::Error(error) => {
                (format!("{kind} probe errored and resulted in unknown state: {error}"), None)
            }
        };
        self.events.event_about(self.target.about.clone(), EventType::Warning, "Unhealthy", text);
        verdict
    }

    async fn check(&self, limit: Duration) -> Outcome {
        let probe = &self.probe;
        let host = self.target.pod_ip.map(|ip| ip.to_string()).unwrap_or_default();
        if let Some(action) = &probe.exec {
            return handler::exec(&*self.runtime, &self.target.container_id, action, Some(limit))
                .await;
        }
        if let Some(action) = &probe.http_get {
            return handler::http_get(action, &self.target.container, self.target.pod_ip, limit)
                .await;
        }
        if let Some(action) = &probe.tcp_socket {
            let host = action.host.clone().filter(|h| !h.is_empty()).unwrap_or(host);
            return match handler::port_of(&action.port, &self.target.container) {
                Ok(port) => handler::tcp(&host, port, limit).await,
                Err(error) => Outcome::Error(error.to_string()),
            };
        }
        if let Some(action) = &probe.grpc {
            let service = action.service.as_deref().unwrap_or_default();
            return match u16::try_from(action.port) {
                Ok(port) => handler::grpc(&host, port, service, limit).await,
                Err(_) => Outcome::Error(format!("invalid port number: {}", action.port)),
            };
        }
        Outcome::Error("missing probe handler".into())
    }
}
