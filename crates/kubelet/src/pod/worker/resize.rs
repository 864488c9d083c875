//! The part of the worker that resizes running containers: the pod's cgroup grows before its containers
//! and shrinks after them; containers that shrink come first.
//!
//! Invariant: actuated resources are on disk before the next step relies on them.
//! Upstream: `kuberuntime_manager.go` doPodResizeAction.

use client::EventType;

use super::{Retry, Worker};
use crate::pod::allocation::{Actuated, Progress, told};
use crate::pod::amounts::{Resize, Resource, Update};
use crate::pod::container::resources_for;
use crate::pod::observed::{Observed, find_container};
use crate::pod::resize::in_progress;
use crate::pod::sandbox::pod_resources;

/// The resize of a pod.
#[derive(Default)]
pub struct Resizing {
    /// The resources of each container that the runtime has.
    pub actuated: Actuated,
    pub progress: Option<Progress>,
    /// The generation of the last observed grant.
    pub granted: Option<i64>,
    /// Resources were granted since the pod's cgroup was last updated.
    pub cgroup_is_old: bool,
}

/// Why a resize has to be retried: the text of its event and condition.
#[derive(Debug, thiserror::Error)]
enum ResizeError {
    #[error(transparent)]
    Cgroup(#[from] std::io::Error),
    #[error("update container {container:?}: {error}")]
    Container { container: String, error: cri::Error },
    #[error("cannot decrease memory limits: {0}")]
    Memory(String),
}

impl Worker {
    /// Records a new grant, and its end when all running containers have the granted resources.
    pub(super) fn follow_resize(&mut self, observed: &Observed) {
        let now = base::clock::now();
        let standing = self.input.borrow().standing.clone();
        if standing.granted != self.resizing.granted {
            self.resizing.granted = standing.granted;
            self.resizing.cgroup_is_old = true;
            let generation = self.pod.metadata.generation;
            self.resizing.progress = Some(Progress { generation, error: None, since: now });
        }
        let busy = self.resizing.cgroup_is_old
            || in_progress(&self.pod, observed, &self.resizing.actuated);
        match (busy, self.resizing.progress.take()) {
            (true, known) => {
                let generation = self.pod.metadata.generation;
                let new = Progress { generation, error: None, since: now };
                self.resizing.progress = Some(known.unwrap_or(new));
            }
            (false, Some(done)) => {
                let text = told("Pod resize completed", &self.pod, done.generation, "");
                self.context.events.tell(&self.pod, EventType::Normal, "ResizeCompleted", text);
            }
            (false, None) => {}
        }
    }

    /// Executes the resize. A failure is shown in the condition, and retried.
    pub(super) async fn resize(&mut self, wanted: &Resize) -> Result<(), Retry> {
        let Err(error) = self.try_resize(wanted).await else {
            self.resizing.cgroup_is_old = false;
            return Ok(());
        };
        let (now, message) = (base::clock::now(), error.to_string());
        let generation = self.pod.metadata.generation;
        let known = self.resizing.progress.take();
        let since = known.as_ref().filter(|k| k.error.is_some()).map_or(now, |k| k.since);
        if known.and_then(|k| k.error).as_deref() != Some(&message) {
            let text = told("Pod resize error", &self.pod, generation, &message);
            self.context.events.warn(&self.pod, "ResizeError", text);
        }
        self.resizing.progress = Some(Progress { generation, error: Some(message), since });
        Err(Retry)
    }

    async fn try_resize(&mut self, wanted: &Resize) -> Result<(), ResizeError> {
        self.check_memory(wanted).await?;
        let limits = pod_resources(&self.pod, self.pod_cfs());
        let pod = self.pod.clone();
        for resource in [Resource::Memory, Resource::Cpu] {
            let cgroups = &self.context.cgroups;
            cgroups.resize_pod(&pod, &limits, resource, true)?;
            let changes = |update: &&Update| update.from.of(resource) != update.to.of(resource);
            let mut updates: Vec<&Update> = wanted.updates.iter().filter(changes).collect();
            updates.sort_by_key(|update| update.from.change(&update.to, resource) > 0);
            for update in updates {
                self.update_container(update, resource).await?;
            }
            let cgroups = &self.context.cgroups;
            cgroups.resize_pod(&pod, &limits, resource, false)?;
        }
        Ok(())
    }

    async fn update_container(
        &mut self,
        update: &Update,
        what: Resource,
    ) -> Result<(), ResizeError> {
        let Some((_, container)) = find_container(&self.pod, &update.name) else {
            return Ok(());
        };
        let before = self.resizing.actuated.get(&update.name).unwrap_or(update.from);
        let next = before.with(what, &update.to);
        let resources =
            resources_for(&self.pod, &container, next, self.node_settings(&update.name));
        let resources = self.context.cgroups.for_container(resources, &self.pod, &container);
        let runtime = self.context.runtime.clone();
        let done = runtime.update_container_resources(&update.id, resources).await;
        let container = update.name.clone();
        done.map_err(|error| ResizeError::Container { container, error })?;
        self.resizing.actuated.set(&update.name, next);
        self.resizing.actuated.write(&self.dir);
        Ok(())
    }

    /// Refuses a memory limit below the current usage, because it would kill the container.
    async fn check_memory(&self, wanted: &Resize) -> Result<(), ResizeError> {
        let mut errors = vec![];
        for update in &wanted.updates {
            let (limit, before) = (update.to.memory_limit, update.from.memory_limit);
            if limit == 0 || (before != 0 && limit >= before) {
                continue;
            }
            let stats = self.context.runtime.container_stats(&update.id).await;
            let usage = stats.ok().and_then(|s| s.memory?.usage_bytes).map(|usage| usage.value);
            match usage {
                None => errors.push(format!("missing container {:?} memory usage", update.name)),
                Some(usage) if usage >= limit.max(0) as u64 => errors.push(format!(
                    "attempting to set container {:?} memory limit ({limit}) below current usage ({usage})",
                    update.name
                )),
                Some(_) => {}
            }
        }
        match errors.len() {
            0 => Ok(()),
            1 => Err(ResizeError::Memory(errors.concat())),
            _ => Err(ResizeError::Memory(format!("[{}]", errors.join(", ")))),
        }
    }
}
