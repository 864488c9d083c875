//! Computes the pod's API status from its running containers.
//!
//! In: the pod, [`Observed`], probe results, waiting reasons, the previous status. Out: a `PodStatus`.
//! Pure.
//! Invariants: a phase never leaves Succeeded or Failed; a restart count never goes down;
//! `lastTransitionTime` changes exactly when a condition's status does.
//! Upstream: `kubelet_pods.go` generateAPIPodStatus, `pkg/kubelet/status/generate.go`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use api::restarts;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated,
    ContainerStateWaiting, ContainerStatus, ContainerUser, HostIP, LinuxContainerUser, Pod,
    PodCondition, PodIP, PodSpec, PodStatus, ResourceRequirements, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use release::features::{self, Feature};

use crate::pod::allocation::{IN_PROGRESS, PENDING};
use crate::pod::observed::{
    ALL_RESTARTING, Observed, ObservedContainer, Role, State, all_containers, all_restart,
    any_main_created, should_restart,
};
use crate::pod::phase::{RESTARTING, phase};
use crate::reason::Reason;
use crate::resources::{
    MIN_MILLI_CPU_LIMIT, MIN_SHARES, ResourceList, bytes_quantity, is_sidecar, milli,
    milli_quantity, pod_limits, pod_requests, qos_class,
};

const REMOVED: &str = "The container is removed because RestartAllContainers in place";

/// All inputs besides the pod itself.
pub struct Facts<'a> {
    pub observed: &'a Observed,
    /// Waiting reasons of containers, by name.
    pub waiting: &'a BTreeMap<String, Reason>,
    /// By container id: (startup passed, ready).
    pub probes: &'a BTreeMap<String, (bool, bool)>,
    pub host_ips: &'a [IpAddr],
    /// The prefix in `decapod://<id>`.
    pub runtime_name: &'a str,
    /// The pod is being stopped for good: no container starts again.
    pub terminal: bool,
    /// Why the pod fails: admission, eviction, or the active deadline.
    pub failed: Option<&'a Reason>,
    /// The conditions of a resize.
    pub resize: &'a [PodCondition],
    pub now: Timestamp,
}

/// The status to publish. `before` is the status last published, or read from the API.
pub fn pod_status(pod: &Pod, before: &PodStatus, facts: &Facts<'_>) -> PodStatus {
    let default_spec = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&default_spec);
    let old = PreviousStatuses::of(before);
    let mut by_role: BTreeMap<Role, Vec<ContainerStatus>> = BTreeMap::new();
    let has_init = spec.init_containers.iter().flatten().next().is_some();
    // A rejected pod never had containers: only its reason is shown.
    let refused = (facts.failed.is_some() || before.phase.as_deref() == Some("Failed"))
        && *facts.observed == Observed::default()
        && before.container_statuses.is_none();
    let context =
        Context { behind_init: has_init, restarting: all_restart(spec, facts.observed, before) };
    for (role, container) in all_containers(spec).into_iter().filter(|_| !refused) {
        let status = container_status(pod, role, &container, context, &old, facts);
        by_role.entry(role).or_default().push(status);
    }
    let take = |by_role: &mut BTreeMap<Role, Vec<ContainerStatus>>, role| {
        by_role.remove(&role).filter(|list: &Vec<_>| !list.is_empty())
    };
    let mut status = PodStatus {
        init_container_statuses: take(&mut by_role, Role::Init),
        container_statuses: take(&mut by_role, Role::Main),
        ephemeral_container_statuses: take(&mut by_role, Role::Ephemeral),
        qos_class: before.qos_class.clone().or_else(|| Some(qos_class(pod).to_string())),
        start_time: before.start_time.clone().or(Some(Time(whole_seconds(facts.now)))),
        observed_generation: pod.metadata.generation,
        nominated_node_name: before.nominated_node_name.clone(),
        resource_claim_statuses: before.resource_claim_statuses.clone(),
        extended_resource_claim_status: before.extended_resource_claim_status.clone(),
        allocated_resources: quantities(pod_requests(spec)),
        resources: Some(ResourceRequirements {
            requests: quantities(pod_requests(spec)),
            limits: quantities(pod_limits(spec)),
            ..spec.resources.clone().unwrap_or_default()
        }),
        ..PodStatus::default()
    };
    set_phase(pod, spec, before, facts, &mut status);
    set_addresses(spec, before, facts, &mut status);
    status.conditions = Some(conditions(pod, spec, before, facts, &status));
    // Upstream's order: init containers in start order, the others by name.
    for list in [&mut status.container_statuses, &mut status.ephemeral_container_statuses] {
        list.iter_mut().for_each(|list| list.sort_by(|a, b| a.name.cmp(&b.name)));
    }
    status
}

/// Sums in thousandths, in the API's form.
fn quantities(sums: BTreeMap<String, i64>) -> Option<ResourceList> {
    let one = |(name, amount): (String, i64)| {
        let told = match name.as_str() {
            "cpu" => milli_quantity(amount),
            "memory" | "ephemeral-storage" => bytes_quantity(amount / 1000),
            _ => milli_quantity(amount),
        };
        (name, told)
    };
    Some(sums.into_iter().map(one).collect()).filter(|list: &ResourceList| !list.is_empty())
}

fn set_phase(
    pod: &Pod,
    spec: &PodSpec,
    before: &PodStatus,
    facts: &Facts<'_>,
    out: &mut PodStatus,
) {
    let old_phase = before.phase.as_deref().unwrap_or("Pending");
    if let Some(Reason { reason, message }) = facts.failed {
        out.phase = Some("Failed".into());
        out.reason = Some(reason.to_string());
        out.message = Some(message.clone()).filter(|m| !m.is_empty());
        return;
    }
    if matches!(old_phase, "Succeeded" | "Failed") {
        out.phase = Some(old_phase.to_string());
        out.reason = before.reason.clone();
        out.message = before.message.clone();
        return;
    }
    let initialized = any_main_created(pod, facts.observed);
    out.phase = Some(phase(spec, out, initialized, facts.terminal).to_string());
}

fn set_addresses(spec: &PodSpec, before: &PodStatus, facts: &Facts<'_>, out: &mut PodStatus) {
    let on_host = spec.host_network == Some(true);
    let host = facts.host_ips;
    out.host_ip = host.first().map(IpAddr::to_string);
    out.host_ips =
        (!host.is_empty()).then(|| host.iter().map(|ip| HostIP { ip: ip.to_string() }).collect());
    let mut ips = facts.observed.ips();
    if on_host && !facts.observed.sandboxes.is_empty() {
        ips = host.to_vec();
    }
    if ips.is_empty() && matches!(out.phase.as_deref(), Some("Succeeded" | "Failed"))
        || facts.terminal
    {
        // The address stays in the status after the sandbox is removed.
        if ips.is_empty() {
            out.pod_ip = before.pod_ip.clone();
            out.pod_ips = before.pod_ips.clone();
            return;
        }
    }
    out.pod_ip = ips.first().map(IpAddr::to_string);
    out.pod_ips =
        (!ips.is_empty()).then(|| ips.iter().map(|ip| PodIP { ip: ip.to_string() }).collect());
}

/// The state of the pod that determines why containers without a run wait.
#[derive(Clone, Copy)]
struct Context {
    behind_init: bool,
    /// All containers restart.
    restarting: bool,
}

struct PreviousStatuses<'a>(BTreeMap<&'a str, &'a ContainerStatus>);

impl<'a> PreviousStatuses<'a> {
    fn of(status: &'a PodStatus) -> Self {
        let lists = [
            &status.init_container_statuses,
            &status.container_statuses,
            &status.ephemeral_container_statuses,
        ];
        Self(lists.into_iter().flatten().flatten().map(|s| (s.name.as_str(), s)).collect())
    }
}

fn container_status(
    pod: &Pod,
    role: Role,
    container: &Container,
    context: Context,
    old: &PreviousStatuses<'_>,
    facts: &Facts<'_>,
) -> ContainerStatus {
    let before = old.0.get(container.name.as_str()).copied();
    let mut runs = facts.observed.containers.iter().filter(|c| c.name == container.name);
    let mut status = match runs.next() {
        Some(newest) => {
            let mut status = from_observed(container, newest, before, facts);
            if let Some(previous) = runs.next() {
                status.last_state = Some(state_of(previous, facts));
            }
            if status.last_state.is_none() {
                status.last_state = carried_last_state(before, newest, facts);
            }
            status
        }
        None if context.restarting && role != Role::Ephemeral && !waits(before) => {
            removed(container, before)
        }
        None => absent(container, before, context.behind_init, facts),
    };
    let init_done = role == Role::Init
        && !is_sidecar(container)
        && facts.observed.container(&container.name).is_some_and(ObservedContainer::succeeded);
    if !init_done && !facts.terminal && should_restart(pod, container, facts.observed) {
        apply_waiting(&mut status, facts.waiting.get(&container.name));
    }
    set_readiness(&mut status, role, container, facts);
    status
}

/// The previous run, if the runtime no longer has it but the published status does.
fn carried_last_state(
    before: Option<&ContainerStatus>,
    newest: &ObservedContainer,
    facts: &Facts<'_>,
) -> Option<ContainerState> {
    let before = before?;
    if before.container_id.as_deref() == Some(&container_id(newest, facts)) {
        return before.last_state.clone();
    }
    let terminated = before.state.as_ref().and_then(|s| s.terminated.as_ref());
    match terminated {
        Some(_) => before.state.clone(),
        None => before.last_state.clone(),
    }
}

fn apply_waiting(status: &mut ContainerStatus, waiting: Option<&Reason>) {
    let Some(Reason { reason, message }) = waiting else { return };
    if status.state.as_ref().is_some_and(|s| s.terminated.is_some()) {
        status.last_state = status.state.take();
    }
    status.state = Some(waiting_state(reason, Some(message)));
}

fn set_readiness(
    status: &mut ContainerStatus,
    role: Role,
    container: &Container,
    facts: &Facts<'_>,
) {
    let newest = facts.observed.container(&container.name);
    let running = status.state.as_ref().is_some_and(|s| s.running.is_some());
    let (started, ready) = match newest.filter(|_| running) {
        None => (false, false),
        Some(newest) => facts
            .probes
            .get(&newest.id)
            .copied()
            .unwrap_or((container.startup_probe.is_none(), container.readiness_probe.is_none())),
    };
    match role {
        Role::Init if !is_sidecar(container) => {
            let terminated = status.state.as_ref().and_then(|s| s.terminated.as_ref());
            status.ready = terminated.is_some_and(|t| t.exit_code == 0);
            status.started = Some(running);
        }
        Role::Ephemeral => status.ready = false,
        _ => {
            status.started = Some(running && started);
            status.ready = running && started && ready;
        }
    }
}

fn container_id(container: &ObservedContainer, facts: &Facts<'_>) -> String {
    format!("{}://{}", facts.runtime_name, container.id)
}

fn from_observed(
    container: &Container,
    seen: &ObservedContainer,
    before: Option<&ContainerStatus>,
    facts: &Facts<'_>,
) -> ContainerStatus {
    let restarts = before.map_or(0, |b| b.restart_count).max(seen.attempt as i32);
    ContainerStatus {
        name: container.name.clone(),
        image: seen.image.clone(),
        image_id: seen.image_id.clone(),
        container_id: Some(container_id(seen, facts)),
        restart_count: restarts,
        state: Some(state_of(seen, facts)),
        resources: Some(resources_of(container, seen)),
        allocated_resources: container.resources.as_ref().and_then(|r| r.requests.clone()),
        volume_mounts: mounts_of(container),
        stop_signal: Some(seen.stop_signal.clone()).filter(|signal| {
            !signal.is_empty() && features::enabled(Feature::ContainerStopSignals)
        }),
        user: seen.user.as_ref().map(|(uid, gid, groups)| ContainerUser {
            linux: Some(LinuxContainerUser {
                uid: *uid,
                gid: *gid,
                supplemental_groups: Some(groups.clone()).filter(|g| !g.is_empty()),
            }),
        }),
        ..ContainerStatus::default()
    }
}

/// The granted resources, corrected by those that the runtime enforces. Amounts too small for the kernel
/// are shown as granted.
fn resources_of(container: &Container, seen: &ObservedContainer) -> ResourceRequirements {
    let mut out = container.resources.clone().unwrap_or_default();
    let Some(actual) = seen.resources.as_ref().filter(|_| seen.state == State::Running) else {
        return out;
    };
    let correct = |list: &mut Option<ResourceList>, name: &str, amount: i64, floor: i64| {
        let known = list.as_ref().and_then(|list| list.get(name)).map_or(0, milli);
        let tiny = amount <= floor && known <= floor;
        if amount > 0 && amount != known && !tiny {
            let told = match name {
                "memory" => bytes_quantity(amount / 1000),
                _ => milli_quantity(amount),
            };
            list.as_mut().map(|list| list.insert(name.to_string(), told));
        }
    };
    let quota = match actual.cpu_period {
        0 => 0,
        period => actual.cpu_quota.max(0) * 1000 / period,
    };
    correct(&mut out.limits, "cpu", quota, MIN_MILLI_CPU_LIMIT);
    let memory = actual.memory_limit_in_bytes.max(0).saturating_mul(1000);
    correct(&mut out.limits, "memory", memory, 0);
    let request = (actual.cpu_shares.max(0) * 1000 + 1023) / 1024;
    correct(&mut out.requests, "cpu", request, MIN_SHARES);
    out
}

fn mounts_of(container: &Container) -> Option<Vec<VolumeMountStatus>> {
    let mounts = container.volume_mounts.as_ref()?;
    let one = |mount: &k8s_openapi::api::core::v1::VolumeMount| VolumeMountStatus {
        mount_path: mount.mount_path.clone(),
        name: mount.name.clone(),
        read_only: mount.read_only.filter(|ro| *ro),
        recursive_read_only: mount.read_only.filter(|ro| *ro).map(|_| "Disabled".to_string()),
        ..VolumeMountStatus::default()
    };
    Some(mounts.iter().map(one).collect())
}

fn waits(status: Option<&ContainerStatus>) -> bool {
    let state = status.and_then(|status| status.state.as_ref());
    state.is_none_or(|state| state.running.is_none() && state.terminated.is_none())
}

/// The status of a container that was removed by a restart of all containers.
fn removed(container: &Container, before: Option<&ContainerStatus>) -> ContainerStatus {
    let last = ContainerStateTerminated {
        reason: Some(RESTARTING.into()),
        message: Some(REMOVED.into()),
        exit_code: 137,
        ..ContainerStateTerminated::default()
    };
    ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        state: Some(waiting_state(RESTARTING, Some(&REMOVED.to_owned()))),
        last_state: Some(ContainerState { terminated: Some(last), ..ContainerState::default() }),
        restart_count: before.map_or(0, |before| before.restart_count) + 1,
        volume_mounts: mounts_of(container),
        ..ContainerStatus::default()
    }
}

/// The status of a container that the runtime does not have: not yet, or no longer.
fn absent(
    container: &Container,
    before: Option<&ContainerStatus>,
    behind_init: bool,
    facts: &Facts<'_>,
) -> ContainerStatus {
    let reason = if behind_init { "PodInitializing" } else { "ContainerCreating" };
    let mut status = ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        state: Some(waiting_state(reason, None)),
        volume_mounts: mounts_of(container),
        ..ContainerStatus::default()
    };
    let Some(before) = before else { return status };
    status.restart_count = before.restart_count;
    status.last_state = before.last_state.clone();
    let Some(state) = &before.state else { return status };
    if state.terminated.is_some() {
        status.state = Some(state.clone());
        status.container_id = before.container_id.clone();
        status.image_id = before.image_id.clone();
        status.image = before.image.clone();
    } else if state.running.is_some() {
        // It ran when it was last observed, and its exit code is unknown.
        let lost = ContainerState {
            terminated: Some(ContainerStateTerminated {
                reason: Some("ContainerStatusUnknown".into()),
                message: Some(
                    "The container could not be located when the pod was terminated".into(),
                ),
                exit_code: 137,
                ..ContainerStateTerminated::default()
            }),
            ..ContainerState::default()
        };
        if facts.terminal {
            status.state = Some(lost);
        } else {
            let mut lost = lost;
            if let Some(terminated) = &mut lost.terminated {
                terminated.message = Some(
                    "The container could not be located when the pod was deleted.  The container \
                     used to be Running"
                        .into(),
                );
            }
            status.last_state = Some(lost);
            status.restart_count += 1;
        }
    }
    status
}

fn waiting_state(reason: &str, message: Option<&String>) -> ContainerState {
    let waiting = ContainerStateWaiting {
        reason: Some(reason.to_string()),
        message: message.filter(|m| !m.is_empty()).cloned(),
    };
    ContainerState { waiting: Some(waiting), ..ContainerState::default() }
}

fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn state_of(seen: &ObservedContainer, facts: &Facts<'_>) -> ContainerState {
    let time = |time: Option<Timestamp>| time.map(|t| Time(whole_seconds(t)));
    match seen.state {
        State::Running => ContainerState {
            running: Some(ContainerStateRunning { started_at: time(seen.started_at) }),
            ..ContainerState::default()
        },
        State::Created => waiting_state("ContainerCreating", None),
        State::Exited | State::Unknown => {
            let reason = match (seen.reason.is_empty(), seen.state, seen.exit_code) {
                (false, _, _) => seen.reason.clone(),
                (true, State::Unknown, _) => "ContainerStatusUnknown".into(),
                (true, _, 0) => "Completed".into(),
                _ => "Error".into(),
            };
            ContainerState {
                terminated: Some(ContainerStateTerminated {
                    exit_code: if seen.state == State::Unknown { 137 } else { seen.exit_code },
                    reason: Some(reason),
                    message: Some(seen.message.clone()).filter(|m| !m.is_empty()),
                    started_at: time(seen.started_at),
                    finished_at: time(seen.finished_at),
                    container_id: Some(container_id(seen, facts)),
                    signal: None,
                }),
                ..ContainerState::default()
            }
        }
    }
}

fn conditions(
    pod: &Pod,
    spec: &PodSpec,
    before: &PodStatus,
    facts: &Facts<'_>,
    status: &PodStatus,
) -> Vec<PodCondition> {
    let on_host = spec.host_network == Some(true);
    let has_sandbox = facts.observed.ready_sandbox().is_some_and(|s| on_host || !s.ips.is_empty());
    let containers_ready = containers_ready(spec, status);
    let ready = pod_ready(spec, before, &containers_ready);
    // Behind a feature gate: the first one.
    let computed = [
        ("PodReadyToStartContainers", Verdict::plain(has_sandbox)),
        ("Initialized", initialized(pod, spec, before, facts, status)),
        ("Ready", ready),
        ("ContainersReady", containers_ready),
        ("PodScheduled", Verdict::plain(true)),
    ];
    let mut out: Vec<PodCondition> = vec![];
    // Conditions of other writers (readiness gates, DisruptionTarget, ...) stay.
    for condition in before.conditions.iter().flatten() {
        let ours = [PENDING, IN_PROGRESS, ALL_RESTARTING].contains(&condition.type_.as_str());
        if !ours && !computed.iter().any(|(name, _)| *name == condition.type_) {
            out.push(condition.clone());
        }
    }
    if !facts.terminal {
        out.extend(facts.resize.iter().cloned());
    }
    let is_shown = features::enabled(Feature::PodReadyToStartContainersCondition);
    for (name, verdict) in computed.into_iter().skip(usize::from(!is_shown)) {
        let old = before.conditions.iter().flatten().find(|c| c.type_ == name);
        out.push(verdict.condition(name, old, pod.metadata.generation, facts.now));
    }
    if restarts::all_may(spec) {
        let old = before.conditions.iter().flatten().find(|c| c.type_ == ALL_RESTARTING);
        let verdict = all_restarting(spec, before, facts, status);
        out.push(verdict.condition(ALL_RESTARTING, old, None, facts.now));
    }
    out
}

/// Upstream: GenerateAllContainersRestartingCondition.
fn all_restarting(
    spec: &PodSpec,
    before: &PodStatus,
    facts: &Facts<'_>,
    status: &PodStatus,
) -> Verdict {
    match status.phase.as_deref() {
        Some("Succeeded") => return Verdict::new(false, "PodCompleted", String::new()),
        Some("Failed") => return Verdict::new(false, "PodFailed", String::new()),
        _ => {}
    }
    let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
    let is_left = all.any(|container| facts.observed.container(&container.name).is_some());
    if is_left && all_restart(spec, facts.observed, before) {
        let why = "container exited with restart policy rule";
        return Verdict::new(true, "RestartAllContainersStarted", why.into());
    }
    Verdict::plain(false)
}

/// A condition's content.
struct Verdict {
    ok: bool,
    reason: Option<String>,
    message: Option<String>,
}

impl Verdict {
    fn plain(ok: bool) -> Self {
        Self { ok, reason: None, message: None }
    }

    fn new(ok: bool, reason: &str, message: String) -> Self {
        let message = Some(message).filter(|m| !m.is_empty());
        Self { ok, reason: Some(reason.into()), message }
    }

    fn condition(
        self,
        name: &str,
        old: Option<&PodCondition>,
        generation: Option<i64>,
        now: Timestamp,
    ) -> PodCondition {
        let status = if self.ok { "True" } else { "False" };
        let since =
            old.filter(|old| old.status == status).and_then(|o| o.last_transition_time.clone());
        PodCondition {
            type_: name.into(),
            status: status.into(),
            reason: self.reason,
            message: self.message,
            observed_generation: generation,
            last_transition_time: since.or(Some(Time(whole_seconds(now)))),
            last_probe_time: None,
        }
    }
}

fn initialized(
    pod: &Pod,
    spec: &PodSpec,
    before: &PodStatus,
    facts: &Facts<'_>,
    status: &PodStatus,
) -> Verdict {
    let inits: Vec<&Container> = spec.init_containers.iter().flatten().collect();
    if status.phase.as_deref() == Some("Succeeded") {
        return Verdict::new(true, "PodCompleted", String::new());
    }
    if inits.is_empty() || any_main_created(pod, facts.observed) {
        return Verdict::plain(true);
    }
    let statuses = status.init_container_statuses.iter().flatten();
    let incomplete: Vec<&str> = inits
        .iter()
        .zip(statuses)
        .filter(|(container, status)| match is_sidecar(container) {
            true => status.started != Some(true),
            false => !status.ready,
        })
        .map(|(container, _)| container.name.as_str())
        .collect();
    // An initialized pod stays so, also while all containers restart.
    let was =
        before.conditions.iter().flatten().any(|c| c.type_ == "Initialized" && c.status == "True");
    let stays = was && features::enabled(Feature::RestartAllContainersOnContainerExits);
    if incomplete.is_empty() || stays {
        return Verdict::plain(true);
    }
    let message = format!("containers with incomplete status: [{}]", incomplete.join(" "));
    Verdict::new(false, "ContainersNotInitialized", message)
}

fn containers_ready(spec: &PodSpec, status: &PodStatus) -> Verdict {
    match status.phase.as_deref() {
        Some("Succeeded") => return Verdict::new(false, "PodCompleted", String::new()),
        Some("Failed") => return Verdict::new(false, "PodFailed", String::new()),
        _ => {}
    }
    let sidecars = spec.init_containers.iter().flatten().filter(|c| is_sidecar(c));
    let wanted: Vec<&Container> = sidecars.chain(&spec.containers).collect();
    let lists = [&status.init_container_statuses, &status.container_statuses];
    let statuses: BTreeMap<&str, &ContainerStatus> =
        lists.into_iter().flatten().flatten().map(|s| (s.name.as_str(), s)).collect();
    let (mut unknown, mut unready) = (vec![], vec![]);
    for container in wanted {
        match statuses.get(container.name.as_str()) {
            None => unknown.push(container.name.as_str()),
            Some(status) if !status.ready => unready.push(container.name.as_str()),
            Some(_) => {}
        }
    }
    let mut messages = vec![];
    if !unknown.is_empty() {
        messages.push(format!("containers with unknown status: [{}]", unknown.join(" ")));
    }
    if !unready.is_empty() {
        messages.push(format!("containers with unready status: [{}]", unready.join(" ")));
    }
    if messages.is_empty() {
        return Verdict::plain(true);
    }
    Verdict::new(false, "ContainersNotReady", messages.join(", "))
}

fn pod_ready(spec: &PodSpec, before: &PodStatus, containers: &Verdict) -> Verdict {
    if !containers.ok {
        return Verdict {
            ok: false,
            reason: containers.reason.clone(),
            message: containers.message.clone(),
        };
    }
    let mut messages = vec![];
    for gate in spec.readiness_gates.iter().flatten() {
        let name = &gate.condition_type;
        match before.conditions.iter().flatten().find(|c| c.type_ == *name) {
            None => messages.push(format!(
                "corresponding condition of pod readiness gate \"{name}\" does not exist."
            )),
            Some(condition) if condition.status != "True" => messages.push(format!(
                "the status of pod readiness gate \"{name}\" is not \"True\", but {}",
                condition.status
            )),
            Some(_) => {}
        }
    }
    if messages.is_empty() {
        return Verdict::plain(true);
    }
    Verdict::new(false, "ReadinessGatesNotReady", messages.join(", "))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::pod::plan::tests::{container, observed, pod};
    use serde_json::{Value, json};

    pub(crate) fn status_of(
        spec: Value,
        containers: Vec<ObservedContainer>,
        before: &PodStatus,
    ) -> PodStatus {
        status_with(spec, containers, before, false)
    }

    fn status_with(
        spec: Value,
        containers: Vec<ObservedContainer>,
        before: &PodStatus,
        terminal: bool,
    ) -> PodStatus {
        status_of_observed(spec, &observed(containers), before, terminal)
    }

    fn status_of_observed(
        spec: Value,
        observed: &Observed,
        before: &PodStatus,
        terminal: bool,
    ) -> PodStatus {
        let host: Vec<IpAddr> = vec!["192.168.0.1".parse().expect("an address")];
        let facts = Facts {
            observed,
            waiting: &BTreeMap::new(),
            probes: &BTreeMap::new(),
            host_ips: &host,
            runtime_name: "decapod",
            terminal,
            failed: None,
            resize: &[],
            now: Timestamp::from_second(1000).expect("in range"),
        };
        pod_status(&pod(spec), before, &facts)
    }

    use State::{Exited, Running};

    fn spec(policy: &str) -> Value {
        json!({"restartPolicy": policy, "containers": [{"name": "a", "image": "i"}]})
    }

    #[test]
    fn phases() {
        let check = |policy: &str, containers: Vec<ObservedContainer>, expected: &str| {
            let status = status_of(spec(policy), containers, &PodStatus::default());
            assert_eq!(status.phase.as_deref(), Some(expected), "{policy}");
        };
        check("Always", vec![], "Pending");
        check("Always", vec![container("a", Running, 0)], "Running");
        check("Always", vec![container("a", Exited, 1)], "Running");
        check("OnFailure", vec![container("a", Exited, 1)], "Running");
        check("OnFailure", vec![container("a", Exited, 0)], "Succeeded");
        check("Never", vec![container("a", Exited, 1)], "Failed");
        let ended = status_with(
            spec("Always"),
            vec![container("a", Exited, 0)],
            &PodStatus::default(),
            true,
        );
        assert_eq!(ended.phase.as_deref(), Some("Succeeded"));
        let failed = PodStatus { phase: Some("Failed".into()), ..PodStatus::default() };
        let after = status_of(spec("Always"), vec![container("a", Running, 0)], &failed);
        assert_eq!(after.phase.as_deref(), Some("Failed"));
    }

    /// The next kubelet, which did not reject it itself, shows none, either.
    #[test]
    fn a_rejected_pod_shows_no_containers() {
        let text = |text: &str| Some(text.to_owned());
        let before = PodStatus {
            phase: text("Failed"),
            reason: text("UnexpectedAdmissionError"),
            ..PodStatus::default()
        };
        let after = status_of_observed(spec("Always"), &Observed::default(), &before, true);
        assert_eq!((after.phase, after.reason), (before.phase, before.reason));
        assert_eq!(after.container_statuses, None);
    }

    /// All containers restart because of one exit: the status before, during and after.
    #[test]
    fn all_containers_restart() {
        let spec = || {
            json!({"restartPolicy": "Never", "initContainers": [{"name": "i"}],
                "containers": [{"name": "b"}, {"name": "a", "restartPolicy": "Never",
                    "restartPolicyRules": [{"action": "RestartAllContainers",
                        "exitCodes": {"operator": "In", "values": [42]}}]}]})
        };
        let show = |status: &PodStatus| -> String {
            let lists = [&status.init_container_statuses, &status.container_statuses];
            let one = |s: &ContainerStatus| {
                let state = s.state.clone().unwrap_or_default();
                let what = match (state.waiting, state.running, state.terminated) {
                    (Some(waiting), ..) => waiting.reason.unwrap_or_default(),
                    (_, Some(_), _) => "runs".to_owned(),
                    (.., ended) => ended.map_or(String::new(), |e| e.exit_code.to_string()),
                };
                let last = s.last_state.as_ref().and_then(|s| s.terminated.as_ref());
                let last = last.map_or(String::new(), |end| {
                    format!(" after {} {}", end.exit_code, end.reason.as_deref().unwrap_or("-"))
                });
                format!("{}{}: {what}{last}", s.name, s.restart_count)
            };
            let all: Vec<String> = lists.into_iter().flatten().flatten().map(one).collect();
            let phase = status.phase.as_deref().unwrap_or_default();
            let anew = &condition(status, ALL_RESTARTING).status;
            format!("{phase} {anew} [{}]", all.join(", "))
        };
        let i = || container("i", Exited, 0);
        let running = vec![container("a", Running, 0), container("b", Running, 0), i()];
        let status = status_of(spec(), running, &PodStatus::default());
        assert_eq!(show(&status), "Running False [i0: 0, a0: runs, b0: runs]");
        let ended = vec![container("a", Exited, 42), container("b", Running, 0), i()];
        let status = status_of(spec(), ended, &status);
        assert_eq!(show(&status), "Running True [i0: 0, a0: 42, b0: runs]");
        let part = vec![container("a", Exited, 42), i()];
        let status = status_of(spec(), part, &status);
        const LAST: &str = "after 137 RestartingAllContainers";
        let b = format!("b1: RestartingAllContainers {LAST}");
        assert_eq!(show(&status), format!("Running True [i0: 0, a0: 42, {b}]"));
        let status = status_of(spec(), vec![], &status);
        let waits = |name: &str, why: &str| format!("{name}1: {why} {LAST}");
        let (i, a) = (waits("i", RESTARTING), waits("a", RESTARTING));
        let b = waits("b", "PodInitializing");
        assert_eq!(show(&status), format!("Running False [{i}, {a}, {b}]"));
        assert_eq!(condition(&status, "Initialized").status, "True");
        let mut again = container("i", Running, 0);
        again.attempt = 1;
        let status = status_of(spec(), vec![again], &status);
        let (b, a) = (format!("b1: PodInitializing {LAST}"), format!("a1: PodInitializing {LAST}"));
        assert_eq!(show(&status), format!("Pending False [i1: runs {LAST}, {a}, {b}]"));
        assert_eq!(condition(&status, "Initialized").status, "True");
    }

    #[test]
    fn statuses_are_in_upstreams_order() {
        let spec = json!({"initContainers": [{"name": "z"}, {"name": "y"}],
            "containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}],
            "ephemeralContainers": [{"name": "f"}, {"name": "e"}]});
        let status = status_of(spec, vec![], &PodStatus::default());
        let lists = [
            status.init_container_statuses,
            status.container_statuses,
            status.ephemeral_container_statuses,
        ];
        let names = lists.map(|list| {
            list.into_iter().flatten().map(|one| one.name).collect::<Vec<_>>().join(" ")
        });
        assert_eq!(
            names,
            ["z y", "a b c", "e f"],
            "init containers in start order, others by name"
        );
    }

    #[test]
    fn stop_signals_are_shown_behind_their_gate() {
        let mut seen = container("a", Running, 0);
        seen.stop_signal = "SIGUSR1".into();
        let gates = features::Gates::DEFAULT;
        for (is_on, expected) in [(false, None), (true, Some("SIGUSR1"))] {
            let gates = gates.with(Feature::ContainerStopSignals, is_on);
            let status = features::scoped(gates, || {
                status_of(spec("Always"), vec![seen.clone()], &PodStatus::default())
            });
            let shown = status.container_statuses.expect("statuses")[0].stop_signal.clone();
            assert_eq!(shown.as_deref(), expected);
        }
    }

    fn condition<'a>(status: &'a PodStatus, name: &str) -> &'a PodCondition {
        status.conditions.iter().flatten().find(|c| c.type_ == name).expect("the condition")
    }

    #[test]
    fn conditions_follow_the_containers() {
        let waiting = status_of(spec("Always"), vec![], &PodStatus::default());
        let ready = condition(&waiting, "Ready");
        assert_eq!(
            (ready.status.as_str(), ready.reason.as_deref(), ready.message.as_deref()),
            ("False", Some("ContainersNotReady"), Some("containers with unready status: [a]"))
        );
        let running = status_of(spec("Always"), vec![container("a", Running, 0)], &waiting);
        assert_eq!(condition(&running, "Ready").status, "True");
        assert_eq!(running.pod_ip.as_deref(), Some("10.42.0.2"));
        assert_eq!(running.host_ip.as_deref(), Some("192.168.0.1"));
        let done = status_of(spec("Never"), vec![container("a", Exited, 0)], &running);
        assert_eq!(condition(&done, "Initialized").status, "True");
        assert_eq!(condition(&done, "Ready").reason.as_deref(), Some("PodCompleted"));
    }

    #[test]
    fn restart_counts_never_fall() {
        let before = PodStatus {
            container_statuses: Some(vec![ContainerStatus {
                name: "a".into(),
                restart_count: 4,
                ..ContainerStatus::default()
            }]),
            ..PodStatus::default()
        };
        let after = status_of(spec("Always"), vec![container("a", Running, 0)], &before);
        assert_eq!(after.container_statuses.expect("statuses")[0].restart_count, 4);
    }

    #[test]
    fn init_containers_hold_the_pod_pending() {
        let spec = json!({"restartPolicy": "Always", "containers": [{"name": "a"}],
            "initContainers": [{"name": "i"}]});
        let status =
            status_of(spec.clone(), vec![container("i", Running, 0)], &PodStatus::default());
        assert_eq!(status.phase.as_deref(), Some("Pending"));
        let main = &status.container_statuses.as_ref().expect("statuses")[0];
        let waiting = main.state.as_ref().and_then(|s| s.waiting.as_ref()).expect("waiting");
        assert_eq!(waiting.reason.as_deref(), Some("PodInitializing"));
        // Upstream: every container of such a pod waits so, the init containers, too.
        let first = status_of(spec.clone(), vec![], &PodStatus::default());
        let init = &first.init_container_statuses.as_ref().expect("statuses")[0];
        let waiting = init.state.as_ref().and_then(|s| s.waiting.as_ref()).expect("waiting");
        assert_eq!(waiting.reason.as_deref(), Some("PodInitializing"));
        assert_eq!(
            condition(&status, "Initialized").message.as_deref(),
            Some("containers with incomplete status: [i]")
        );
        let both = vec![container("a", Running, 0), container("i", Exited, 0)];
        let status = status_of(spec, both, &status);
        assert_eq!(status.phase.as_deref(), Some("Running"));
        assert_eq!(condition(&status, "Initialized").status, "True");
    }

    #[test]
    fn the_previous_run_is_the_last_state() {
        let mut first = container("a", Exited, 3);
        first.id = "id-old".into();
        let mut second = container("a", Running, 0);
        second.attempt = 1;
        let status = status_of(spec("Always"), vec![second, first], &PodStatus::default());
        let status = &status.container_statuses.expect("statuses")[0];
        assert_eq!(status.restart_count, 1);
        let last =
            status.last_state.as_ref().and_then(|s| s.terminated.as_ref()).expect("a last run");
        assert_eq!((last.exit_code, last.reason.as_deref()), (3, Some("Error")));
    }
}
