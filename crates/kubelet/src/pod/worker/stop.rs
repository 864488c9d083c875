//! The part of the worker that stops things: hooks, signals, grace periods.
//!
//! In: containers that must stop. Out: they have exited.
//! Order at a pod's end: main containers together, then sidecars one by one, the last started
//! first; then the sandbox. A shorter grace period that arrives meanwhile applies at once. Readiness
//! probes continue meanwhile, and their results are published for Services.
//! Upstream: `kuberuntime_container.go` killContainer, `kuberuntime_termination_order.go`,
//! `status_manager.go` SetContainerReadiness.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use client::EventType;
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::Instant;

use super::start::run_hook;
use super::{Context, Next, Retry, Worker};
use crate::names;
use crate::pod::downward::Addresses;
use crate::pod::events::reference;
use crate::pod::handler::Outcome;
use crate::pod::input::Input;
use crate::pod::observed::{Observed, ObservedContainer, Role, find_container};
use crate::pod::plan::{Kill, Probe, Remove};
use crate::pod::runtime::observe;
use crate::resources::is_sidecar;

/// The minimum time for the signal after a hook has used up the grace period.
const MINIMUM: Duration = Duration::from_secs(2);

fn grace_of(input: &Input) -> Duration {
    let meta = &input.pod.metadata;
    let spec = input.pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds);
    let seconds = match meta.deletion_grace_period_seconds {
        // Removed without an observed deletion: a forced deletion.
        _ if input.removed && !names::is_static(&input.pod) => 0,
        Some(seconds) => seconds,
        None => spec.unwrap_or(30),
    };
    let grace = Duration::from_secs(seconds.max(1) as u64);
    input.longest_grace.map_or(grace, |longest| grace.min(longest))
}

impl Worker {
    /// The grace period of the pod's containers.
    pub(super) fn grace(&self) -> Duration {
        grace_of(&self.input.borrow())
    }

    /// Stops all containers and the sandbox of a pod that will not run again.
    pub(super) async fn stop_containers(&mut self) -> Result<(), Next> {
        loop {
            let runtime = self.context.runtime.clone();
            let observed = observe(&*runtime, &self.uid).await.map_err(|error| {
                tracing::warn!(pod = names::full(&self.pod), %error, "failed to observe the pod in the runtime");
                Next::Wait(MINIMUM)
            })?;
            let grace = self.grace();
            let mut input = self.input.clone();
            let shorter = async {
                if input.wait_for(|input| grace_of(input) < grace).await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            self.probes.keep_readiness_only();
            let stopping = self.stopping();
            let mut work = std::pin::pin!(stopping.stop_all(&observed, grace));
            let mut shorter = std::pin::pin!(shorter);
            let wake = self.wake.clone();
            let again = loop {
                tokio::select! {
                    biased;
                    () = &mut shorter => break true,
                    () = &mut work => break false,
                    () = wake.notified(), if self.probes.any() => {
                        self.publish(&observed, false);
                    }
                }
            };
            if again {
                // Hooks have finished or were cancelled; only signals are left.
                self.hooked.extend(observed.running().map(|c| c.id.clone()));
                continue;
            }
            return self.stop_sandboxes(&observed).await;
        }
    }

    async fn stop_sandboxes(&mut self, observed: &Observed) -> Result<(), Next> {
        for sandbox in &observed.sandboxes {
            match self.context.runtime.stop_pod_sandbox(&sandbox.id).await {
                Ok(()) => {}
                Err(error) if error.is_not_found() => {}
                Err(error) => {
                    let text = format!("error killing pod: failed to \"KillPodSandbox\": {error}");
                    self.context.events.warn(&self.pod, "FailedKillPod", text);
                    return Err(Next::Wait(MINIMUM));
                }
            }
        }
        Ok(())
    }

    /// Stops everything of the old sandbox, for a pod that is recreated.
    pub(super) async fn stop_everything(&mut self, observed: &Observed) {
        let grace = self.grace();
        self.stopping().stop_all(observed, grace).await;
        for sandbox in &observed.sandboxes {
            if let Err(error) = self.context.runtime.stop_pod_sandbox(&sandbox.id).await {
                tracing::warn!(pod = names::full(&self.pod), %error, "failed to stop the sandbox");
            }
        }
    }

    /// Stops one container that will be replaced, or that failed a probe.
    pub(super) async fn stop_for_restart(&self, observed: &Observed, kill: &Kill) {
        let known = find_container(&self.pod, &kill.name).unwrap_or_else(|| {
            (Role::Main, Container { name: kill.name.clone(), ..Container::default() })
        });
        let (role, container) = known;
        let probe = match kill.by_probe {
            Some(Probe::Liveness) => container.liveness_probe.as_ref(),
            Some(Probe::Startup) => container.startup_probe.as_ref(),
            None => None,
        };
        let own = probe.and_then(|p| p.termination_grace_period_seconds);
        let grace = own.map_or_else(|| self.grace(), |s| Duration::from_secs(s.max(1) as u64));
        if observed.by_id(&kill.id).is_some() {
            self.stopping().stop_container(role, &container, &kill.id, &kill.message, grace).await;
        }
    }

    /// Removes containers without hooks, for a restart of all containers. Their logs stay.
    pub(super) async fn remove_for_restart(&mut self, all: &[Remove]) -> Result<(), Retry> {
        self.holds.waiting.clear();
        for one in all {
            let known = find_container(&self.pod, &one.name).filter(|_| one.kill);
            if let Some((role, container)) = known {
                self.hooked.insert(one.id.clone());
                let stopping = self.stopping();
                stopping.stop_container(role, &container, &one.id, "killing", MINIMUM).await;
            }
            match self.context.runtime.remove_container(&one.id).await {
                Err(error) if !error.is_not_found() => {
                    tracing::warn!(pod = names::full(&self.pod), container = one.name, %error, "failed to remove the container");
                    return Err(Retry);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The data for stopping containers, while the worker continues to publish.
    pub(super) fn stopping(&self) -> Stopping {
        let ips = self.published.pod_ips.iter().flatten().filter_map(|ip| ip.ip.parse().ok());
        Stopping {
            context: self.context.clone(),
            pod: self.pod.clone(),
            hooked: self.hooked.clone(),
            addresses: Addresses { pod: ips.collect(), host: self.context.node.host_ips() },
        }
    }
}

pub(super) struct Stopping {
    context: Arc<Context>,
    pod: Arc<Pod>,
    /// Containers whose hook has already run.
    hooked: HashSet<String>,
    addresses: Addresses,
}

impl Stopping {
    async fn stop_all(&self, observed: &Observed, grace: Duration) {
        let deadline = Instant::now() + grace;
        let known = |c: &ObservedContainer| {
            find_container(&self.pod, &c.name).unwrap_or_else(|| {
                (Role::Main, Container { name: c.name.clone(), ..Container::default() })
            })
        };
        let all: Vec<_> = observed.running().map(|c| (c.id.clone(), known(c))).collect();
        let (sidecars, main): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(_, (role, c))| *role == Role::Init && is_sidecar(c));
        let message = |name: &str| format!("Stopping container {name}");
        join_all(main.iter().map(|(id, (role, c))| async move {
            self.stop_container(*role, c, id, &message(&c.name), grace).await;
        }))
        .await;
        let order: Vec<&str> = self
            .pod
            .spec
            .iter()
            .flat_map(|s| s.init_containers.iter().flatten())
            .map(|c| c.name.as_str())
            .collect();
        let mut sidecars = sidecars;
        sidecars.sort_by_key(|(_, (_, c))| {
            std::cmp::Reverse(order.iter().position(|name| *name == c.name))
        });
        for (id, (role, c)) in &sidecars {
            let left =
                deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
            self.stop_container(*role, c, id, &message(&c.name), left).await;
        }
    }

    /// Sends the `Killing` event, runs the hook, and stops the container.
    pub(super) async fn stop_container(
        &self,
        role: Role,
        container: &Container,
        id: &str,
        message: &str,
        grace: Duration,
    ) {
        let about = || reference(&self.pod, Some((role, &container.name)));
        self.context.events.about(about(), EventType::Normal, "Killing", message);
        let begun = Instant::now();
        let hook = container.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref());
        if let Some(hook) = hook.filter(|_| !self.hooked.contains(id)) {
            let (runtime, addresses) = (&*self.context.runtime, &self.addresses);
            let run = run_hook(runtime, &self.pod, container, id, hook, addresses);
            let outcome = tokio::time::timeout(grace, run).await;
            if let Ok(Outcome::Failure(_) | Outcome::Error(_)) = outcome {
                let told = "PreStopHook failed";
                self.context.events.about(about(), EventType::Warning, "FailedPreStopHook", told);
            }
        }
        let left = grace.saturating_sub(begun.elapsed());
        let left = if hook.is_some() { left.max(MINIMUM) } else { left };
        match self.context.runtime.stop_container(id, left).await {
            Ok(()) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => {
                tracing::warn!(pod = names::full(&self.pod), container = container.name, %error, "failed to stop the container");
            }
        }
    }
}
