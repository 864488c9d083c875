//! The runtime's state of one pod: the only node-local state that decisions use.
//!
//! In: the runtime's answers (see `runtime.rs`). Out: sandboxes and containers, newest first.
//! Invariant: the kubelet stores none of this; a restarted kubelet reads the same.

use std::net::IpAddr;

use api::restarts;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, EphemeralContainer, Pod, PodCondition, PodSpec, PodStatus,
};

/// The condition of a pod whose containers may all be restarted.
pub const ALL_RESTARTING: &str = "AllContainersRestarting";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Created,
    Running,
    Exited,
    Unknown,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ObservedContainer {
    pub id: String,
    pub name: String,
    /// The restart count at its creation.
    pub attempt: u32,
    pub sandbox_id: String,
    pub state: State,
    /// Hash of the container's spec at creation.
    pub hash: String,
    pub created_at: Option<Timestamp>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub exit_code: i32,
    pub reason: String,
    pub message: String,
    pub image: String,
    pub image_id: String,
    pub log_path: String,
    /// uid, gid, supplemental groups of the first process.
    pub user: Option<(i64, i64, Vec<i64>)>,
    /// From the labels and annotations at its creation, for a pod that the API no longer has.
    pub grace_period: Option<i64>,
    /// Its limits as the runtime reports them.
    pub resources: Option<cri::LinuxContainerResources>,
    /// Its stop signal; empty if the runtime does not report it.
    pub stop_signal: String,
}

impl ObservedContainer {
    pub fn succeeded(&self) -> bool {
        self.state == State::Exited && self.exit_code == 0
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ObservedSandbox {
    pub id: String,
    pub attempt: u32,
    pub ready: bool,
    /// `None` if the runtime does not report it.
    pub host_network: Option<bool>,
    pub created_at: Option<Timestamp>,
    pub ips: Vec<IpAddr>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    pub sandboxes: Vec<ObservedSandbox>,
    pub containers: Vec<ObservedContainer>,
}

impl Observed {
    /// The newest exited container of that name.
    pub fn newest_exited(&self, name: &str) -> Option<&ObservedContainer> {
        self.containers.iter().find(|c| c.name == name && c.state == State::Exited)
    }

    /// The newest container of that name.
    pub fn container(&self, name: &str) -> Option<&ObservedContainer> {
        self.containers.iter().find(|c| c.name == name)
    }

    pub fn by_id(&self, id: &str) -> Option<&ObservedContainer> {
        self.containers.iter().find(|c| c.id == id)
    }

    /// The containers that run, or may run.
    pub fn running(&self) -> impl Iterator<Item = &ObservedContainer> {
        self.containers.iter().filter(|c| matches!(c.state, State::Running | State::Unknown))
    }

    pub fn ready_sandbox(&self) -> Option<&ObservedSandbox> {
        self.sandboxes.first().filter(|s| s.ready)
    }

    /// The pod's addresses, while its sandbox is ready.
    pub fn ips(&self) -> Vec<IpAddr> {
        self.ready_sandbox().map(|s| s.ips.clone()).unwrap_or_default()
    }

    /// Sorts the newest first, as all readers expect.
    pub fn sort(&mut self) {
        self.sandboxes.sort_by_key(|s| std::cmp::Reverse((s.created_at, s.attempt)));
        self.containers.sort_by_key(|c| std::cmp::Reverse((c.created_at, c.attempt)));
    }
}

/// Which of a pod's three lists a container is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Init,
    Main,
    Ephemeral,
}

/// An ephemeral container in the common form (it has no ports, probes, or lifecycle).
pub fn ephemeral_as_container(e: &EphemeralContainer) -> Container {
    Container {
        name: e.name.clone(),
        image: e.image.clone(),
        image_pull_policy: e.image_pull_policy.clone(),
        command: e.command.clone(),
        args: e.args.clone(),
        working_dir: e.working_dir.clone(),
        env: e.env.clone(),
        env_from: e.env_from.clone(),
        resources: e.resources.clone(),
        volume_mounts: e.volume_mounts.clone(),
        volume_devices: e.volume_devices.clone(),
        security_context: e.security_context.clone(),
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        tty: e.tty,
        termination_message_path: e.termination_message_path.clone(),
        termination_message_policy: e.termination_message_policy.clone(),
        ..Container::default()
    }
}

/// All containers of a pod with their role: init, main, ephemeral.
pub fn all_containers(spec: &PodSpec) -> Vec<(Role, Container)> {
    let init = spec.init_containers.iter().flatten().map(|c| (Role::Init, c.clone()));
    let main = spec.containers.iter().map(|c| (Role::Main, c.clone()));
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    init.chain(main)
        .chain(ephemeral.map(|e| (Role::Ephemeral, ephemeral_as_container(e))))
        .collect()
}

pub fn find_container(pod: &Pod, name: &str) -> Option<(Role, Container)> {
    all_containers(pod.spec.as_ref()?).into_iter().find(|(_, c)| c.name == name)
}

/// True if any main container was ever created: then initialisation is over.
pub fn any_main_created(pod: &Pod, observed: &Observed) -> bool {
    let containers = pod.spec.iter().flat_map(|s| &s.containers);
    containers.into_iter().any(|c| observed.container(&c.name).is_some())
}

/// Upstream: kubecontainer.ShouldContainerBeRestarted.
pub fn should_restart(pod: &Pod, container: &Container, observed: &Observed) -> bool {
    if pod.metadata.deletion_timestamp.is_some() {
        return false;
    }
    let Some(status) = observed.container(&container.name) else { return true };
    match status.state {
        State::Running => false,
        State::Unknown | State::Created => true,
        State::Exited => {
            pod.spec.as_ref().is_none_or(|spec| restarts::after(spec, container, status.exit_code))
        }
    }
}

/// Whether all containers must restart: a container's exit matches such a rule, or an earlier such
/// restart (in `before`) is not finished. Upstream: ShouldAllContainersRestart.
pub fn all_restart(spec: &PodSpec, observed: &Observed, before: &PodStatus) -> bool {
    if !restarts::all_may(spec) {
        return false;
    }
    let has_begun =
        |condition: &PodCondition| condition.type_ == ALL_RESTARTING && condition.status == "True";
    if before.conditions.iter().flatten().any(has_begun) {
        return true;
    }
    let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
    all.any(|container| {
        let newest = observed.container(&container.name).filter(|c| c.state == State::Exited);
        newest.is_some_and(|ended| restarts::all_after(container, ended.exit_code))
    })
}
