//! Applies granted resources to running containers, without a restart if the pod allows that.
//!
//! In: the pod as granted, the running containers, the actuated resources. Out: additions to the
//! [`Plan`] ([`plan`], pure), and their execution: the pod's cgroup grows before its containers
//! and shrinks after them; containers that shrink come first.
//! Invariant: actuated resources are on disk before the next step relies on them.
//! Upstream: `kuberuntime_manager.go` computePodResizeAction, doPodResizeAction.

use client::EventType;
use k8s_openapi::api::core::v1::{Container, Pod};

use crate::allocation::{Actuated, Amounts, Progress, told};
use crate::container::resources_for;
use crate::observed::{Observed, ObservedContainer, State};
use crate::plan::{Kill, Plan};
use crate::resources::{self, is_sidecar};
use crate::sandbox::pod_resources;
use crate::worker::Worker;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    Memory,
    Cpu,
}

/// One running container to resize.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    pub id: String,
    pub name: String,
    pub from: Amounts,
    pub to: Amounts,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// The pod's own cgroup may need a change.
    pub pod: bool,
    pub updates: Vec<Update>,
}

impl Resize {
    pub fn is_empty(&self) -> bool {
        !self.pod && self.updates.is_empty()
    }
}

/// The resources to actuate: the container's own limits, else the pod's.
pub fn amounts(pod: &Pod, container: &Container) -> Amounts {
    let own = container.resources.as_ref();
    let whole = pod.spec.as_ref().and_then(|s| s.resources.as_ref());
    let limit = |name| resources::limit(own, name).or(resources::limit(whole, name));
    Amounts {
        cpu_request: resources::request(own, "cpu").map_or(0, resources::milli),
        cpu_limit: limit("cpu").map_or(0, resources::milli),
        memory_request: resources::request(own, "memory").map_or(0, resources::units),
        memory_limit: limit("memory").map_or(0, resources::units),
    }
}

impl Amounts {
    /// (limit, request) of one resource.
    fn of(&self, resource: Resource) -> (i64, i64) {
        match resource {
            Resource::Memory => (self.memory_limit, self.memory_request),
            Resource::Cpu => (self.cpu_limit, self.cpu_request),
        }
    }

    /// These amounts, with one resource taken from `other`.
    fn with(mut self, resource: Resource, other: &Self) -> Self {
        match resource {
            Resource::Memory => {
                (self.memory_limit, self.memory_request) = other.of(resource);
            }
            Resource::Cpu => (self.cpu_limit, self.cpu_request) = other.of(resource),
        }
        self
    }

    /// Negative if the resource shrinks.
    fn change(&self, to: &Self, resource: Resource) -> i64 {
        let ((limit, request), (new_limit, new_request)) = (self.of(resource), to.of(resource));
        if limit != new_limit { new_limit - limit } else { new_request - request }
    }
}

/// Running containers whose resources differ from the granted ones: (index, is an init container, ...).
fn differing<'a>(
    pod: &'a Pod,
    observed: &'a Observed,
    actuated: &Actuated,
) -> Vec<(usize, bool, &'a Container, Update)> {
    let Some(spec) = &pod.spec else { return vec![] };
    let inits = spec.init_containers.iter().flatten().enumerate().map(|(i, c)| (i, true, c));
    let main = spec.containers.iter().enumerate().map(|(i, c)| (i, false, c));
    let one = |(index, init, container): (usize, bool, &'a Container)| {
        let running = |c: &&ObservedContainer| c.state == State::Running;
        let seen = observed.container(&container.name).filter(running)?;
        // A container without a record started before records existed.
        let (from, to) = (actuated.get(&container.name)?, amounts(pod, container));
        let update = Update { id: seen.id.clone(), name: container.name.clone(), from, to };
        (from != to).then_some((index, init, container, update))
    };
    inits.chain(main).filter_map(one).collect()
}

pub fn in_progress(pod: &Pod, observed: &Observed, actuated: &Actuated) -> bool {
    !differing(pod, observed, actuated).is_empty()
}

/// Adds the actions that resize running containers.
pub fn plan(pod: &Pod, observed: &Observed, actuated: &Actuated, out: &mut Plan) {
    if out.kill_pod || out.create_sandbox {
        return;
    }
    for (index, init, container, update) in differing(pod, observed, actuated) {
        if out.kill.iter().any(|kill| kill.id == update.id) {
            continue;
        }
        out.resize.pod = true;
        if !restarts(container, &update) {
            out.resize.updates.push(update);
            continue;
        }
        let message = format!("Container {} resize requires restart", update.name);
        out.kill.push(Kill { id: update.id, name: update.name, message, by_probe: None });
        // Validation allows a restart of no other init container.
        let list = if init { &mut out.start_init } else { &mut out.start };
        let may_start = !init || is_sidecar(container);
        if may_start && !list.contains(&index) {
            list.push(index);
        }
    }
}

fn restarts(container: &Container, update: &Update) -> bool {
    let policies = container.resize_policy.iter().flatten();
    policies.filter(|policy| policy.restart_policy == "RestartContainer").any(|policy| {
        let resource = match policy.resource_name.as_str() {
            "cpu" => Resource::Cpu,
            "memory" => Resource::Memory,
            _ => return false,
        };
        update.from.of(resource) != update.to.of(resource)
    })
}

impl Worker {
    /// Records a new grant, and its end when all running containers have the granted resources.
    pub(crate) fn follow_resize(&mut self, observed: &Observed) {
        let now = base::clock::now();
        let standing = self.input.borrow().standing.clone();
        if standing.granted != self.granted {
            self.granted = standing.granted;
            self.pod_cgroup_is_old = true;
            let generation = self.pod.metadata.generation;
            self.resizing = Some(Progress { generation, error: None, since: now });
        }
        let busy = self.pod_cgroup_is_old || in_progress(&self.pod, observed, &self.actuated);
        match (busy, self.resizing.take()) {
            (true, known) => {
                let generation = self.pod.metadata.generation;
                let new = Progress { generation, error: None, since: now };
                self.resizing = Some(known.unwrap_or(new));
            }
            (false, Some(done)) => {
                let text = told("Pod resize completed", &self.pod, done.generation, "");
                self.context.tell(&self.pod, EventType::Normal, "ResizeCompleted", text);
            }
            (false, None) => {}
        }
    }

    /// Executes the resize. A failure is shown in the condition, and retried.
    pub(crate) async fn resize(&mut self, wanted: &Resize) -> Result<(), ()> {
        let Err(message) = self.try_resize(wanted).await else {
            self.pod_cgroup_is_old = false;
            return Ok(());
        };
        let now = base::clock::now();
        let generation = self.pod.metadata.generation;
        let known = self.resizing.take();
        let since = known.as_ref().filter(|k| k.error.is_some()).map_or(now, |k| k.since);
        if known.and_then(|k| k.error).as_deref() != Some(&message) {
            let text = told("Pod resize error", &self.pod, generation, &message);
            self.context.tell(&self.pod, EventType::Warning, "ResizeError", text);
        }
        self.resizing = Some(Progress { generation, error: Some(message), since });
        Err(())
    }

    async fn try_resize(&mut self, wanted: &Resize) -> Result<(), String> {
        self.check_memory(wanted).await?;
        let limits = pod_resources(&self.pod);
        let pod = self.pod.clone();
        for resource in [Resource::Memory, Resource::Cpu] {
            let cgroups = &self.context.cgroups;
            let told = |grown| {
                cgroups.resize_pod(&pod, &limits, resource, grown).map_err(|e| e.to_string())
            };
            told(true)?;
            let changes = |update: &&Update| update.from.of(resource) != update.to.of(resource);
            let mut updates: Vec<&Update> = wanted.updates.iter().filter(changes).collect();
            updates.sort_by_key(|update| update.from.change(&update.to, resource) > 0);
            for update in updates {
                self.update_container(update, resource).await?;
            }
            let cgroups = &self.context.cgroups;
            cgroups.resize_pod(&pod, &limits, resource, false).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    async fn update_container(&mut self, update: &Update, what: Resource) -> Result<(), String> {
        let Some((_, container)) = crate::observed::find_container(&self.pod, &update.name) else {
            return Ok(());
        };
        let before = self.actuated.get(&update.name).unwrap_or(update.from);
        let next = before.with(what, &update.to);
        let memory = self.context.machine.memory;
        let resources = resources_for(&self.pod, &container, next, memory);
        let resources = self.context.cgroups.for_container(resources);
        let runtime = self.context.runtime.clone();
        let done = runtime.update_container_resources(&update.id, resources).await;
        done.map_err(|error| format!("update container {:?}: {error}", update.name))?;
        self.actuated.set(&update.name, next);
        self.actuated.write(&self.dir);
        Ok(())
    }

    /// Refuses a memory limit below the current usage, because it would kill the container.
    async fn check_memory(&self, wanted: &Resize) -> Result<(), String> {
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
            1 => Err(format!("cannot decrease memory limits: {}", errors.concat())),
            _ => Err(format!("cannot decrease memory limits: [{}]", errors.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{container, observed, pod};
    use serde_json::{Value, json};

    fn check(spec: Value, before: Amounts, expected: (&[&str], &[&str], &[usize])) {
        let pod = pod(spec);
        let mut actuated = Actuated::default();
        actuated.set("a", before);
        let observed = observed(vec![container("a", State::Running, 0)]);
        let mut plan = Plan::default();
        super::plan(&pod, &observed, &actuated, &mut plan);
        let updates: Vec<&str> = plan.resize.updates.iter().map(|u| u.name.as_str()).collect();
        let kills: Vec<&str> = plan.kill.iter().map(|k| k.message.as_str()).collect();
        assert_eq!((&updates[..], &kills[..], &plan.start[..]), expected);
        assert_eq!(plan.resize.pod, !updates.is_empty() || !kills.is_empty());
    }

    #[test]
    fn a_resize_updates_or_restarts_a_container() {
        let spec = |cpu: &str, policy: &str| {
            json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": cpu}},
                "resizePolicy": [{"resourceName": "cpu", "restartPolicy": policy}]}]})
        };
        let before = Amounts { cpu_limit: 500, ..Amounts::default() };
        check(spec("500m", "NotRequired"), before, (&[], &[], &[]));
        check(spec("1", "NotRequired"), before, (&["a"], &[], &[]));
        let message = "Container a resize requires restart";
        check(spec("1", "RestartContainer"), before, (&[], &[message], &[0]));
        let memory = json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "1"}},
            "resizePolicy": [{"resourceName": "memory", "restartPolicy": "RestartContainer"}]}]});
        check(memory, before, (&["a"], &[], &[]));
    }

    #[test]
    fn the_pods_limits_apply_to_containers_without_limits() {
        let pod = pod(json!({"resources": {"limits": {"cpu": "2", "memory": "1Ki"}},
            "containers": [{"name": "a", "resources": {"limits": {"cpu": "1"}}}]}));
        let got = amounts(&pod, &pod.spec.as_ref().expect("a spec").containers[0]);
        assert_eq!((got.cpu_limit, got.memory_limit), (1000, 1024));
    }
}
