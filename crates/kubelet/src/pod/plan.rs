//! The decision of a pod worker: the next actions, from the spec and the running containers.
//!
//! ```text
//!             no usable sandbox                 sandbox ready
//!   ───────────► create sandbox ───────────► init containers, one by one
//!                    ▲                          (sidecars stay, started in order)
//!   sandbox died: ───┘                              │ all done
//!   kill the rest                                   ▼
//!                                        main containers: start missing, restart by
//!                                        policy, kill on failed liveness/startup
//!                                                   │ none runs, none may start
//!                                                   ▼
//!                                            kill pod (sandbox too)
//! ```
//!
//! In: pod, [`Observed`], probe results. Out: a [`Plan`]. Pure; the executor applies back-off.
//! If a container's rules restart all containers, [`restart_all`] is the plan: all containers are removed
//! from the runtime, the sandbox and its volumes stay, and the next plan starts the pod from the
//! beginning.
//! Upstream: `kuberuntime_manager.go` computePodActions, computeInitContainerActions,
//! getContainersToReset.

use std::collections::BTreeMap;

use api::restarts;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use crate::pod::amounts::Resize;
use crate::pod::observed::{Observed, ObservedContainer, State, any_main_created, should_restart};
use crate::resources::is_sidecar;

/// The probe results of one running container; `None` without a probe or a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Health {
    pub startup: Option<bool>,
    pub liveness: Option<bool>,
}

/// By container id.
pub type HealthMap = BTreeMap<String, Health>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    pub id: String,
    pub name: String,
    /// The text of the `Killing` event.
    pub message: String,
    /// A failed probe, whose own grace period may apply.
    pub by_probe: Option<Probe>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remove {
    pub id: String,
    pub name: String,
    /// It must be stopped first.
    pub kill: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    Liveness,
    Startup,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Stop every container and sandbox before anything else.
    pub kill_pod: bool,
    pub create_sandbox: bool,
    /// The new sandbox's attempt.
    pub attempt: u32,
    pub kill: Vec<Kill>,
    /// Containers to remove from the runtime, in this order.
    pub remove: Vec<Remove>,
    /// Indexes into the spec's lists, in the order to start.
    pub start_init: Vec<usize>,
    pub start: Vec<usize>,
    pub start_ephemeral: Vec<usize>,
    /// Running containers to resize.
    pub resize: Resize,
}

impl Plan {
    pub fn is_empty(&self) -> bool {
        !self.kill_pod
            && !self.create_sandbox
            && self.kill.is_empty()
            && self.remove.is_empty()
            && self.start_init.is_empty()
            && self.start.is_empty()
            && self.start_ephemeral.is_empty()
            && self.resize.is_empty()
    }
}

/// `hash_of` returns the hash of a container created from this spec.
pub fn plan(
    pod: &Pod,
    observed: &Observed,
    health: &HealthMap,
    hash_of: impl Fn(&Container) -> String,
) -> Plan {
    let Some(spec) = &pod.spec else { return Plan::default() };
    let mut out = Plan::default();
    let (needs_sandbox, attempt) = sandbox_changed(pod, observed);
    if needs_sandbox {
        plan_fresh_start(pod, observed, attempt, &mut out);
        return out;
    }
    for (index, container) in spec.ephemeral_containers.iter().flatten().enumerate() {
        if observed.container(&container.name).is_none() {
            out.start_ephemeral.push(index);
        }
    }
    let initialized = plan_init(pod, observed, health, &mut out);
    if out.kill_pod || !initialized {
        return out;
    }
    let mut kept = 0;
    for (index, container) in spec.containers.iter().enumerate() {
        let running = observed.container(&container.name).filter(|s| s.state == State::Running);
        let Some(status) = running else {
            if should_restart(pod, container, observed) {
                out.start.push(index);
                out.kill.extend(unknown_first(observed.container(&container.name)));
            }
            continue;
        };
        let changed = status.hash != hash_of(container);
        match verdict(container, status, health, changed, "Container") {
            None => kept += 1,
            Some((mut message, by_probe)) => {
                if changed || restarts::policy(spec, container) != "Never" {
                    message.push_str(", will be restarted");
                    out.start.push(index);
                }
                out.kill.push(kill(status, message, by_probe));
            }
        }
    }
    if kept == 0 && out.start.is_empty() {
        out.kill_pod = true;
        out.start_init.clear();
    }
    out
}

fn plan_fresh_start(pod: &Pod, observed: &Observed, attempt: u32, out: &mut Plan) {
    let Some(spec) = &pod.spec else { return };
    out.kill_pod =
        observed.running().next().is_some() || observed.sandboxes.iter().any(|s| s.ready);
    out.attempt = attempt;
    // A container that has ended for good does not run in a new sandbox; `None`: it has not ended.
    let runs_again = |container: &Container| {
        let ended = observed.container(&container.name).filter(|c| c.state == State::Exited);
        ended.map(|ended| restarts::after(spec, container, ended.exit_code))
    };
    let policy = spec.restart_policy.as_deref().unwrap_or("Always");
    if policy == "Never" && attempt != 0 && !observed.containers.is_empty() {
        // A pod that is over needs no sidecar.
        let inits = spec.init_containers.iter().flatten().filter(|one| !is_sidecar(one));
        if !inits.chain(&spec.containers).any(|one| runs_again(one) == Some(true)) {
            return;
        }
    }
    let wanted = spec.containers.iter().enumerate();
    let wanted = wanted.filter(|(_, container)| runs_again(container) != Some(false));
    let start: Vec<usize> = wanted.map(|(index, _)| index).collect();
    if start.is_empty() && any_main_created(pod, observed) {
        return;
    }
    out.create_sandbox = true;
    if spec.init_containers.iter().flatten().next().is_some() {
        out.start_init.push(0);
    } else {
        out.start = start;
    }
}

/// (whether a new sandbox is needed, its attempt)
fn sandbox_changed(pod: &Pod, observed: &Observed) -> (bool, u32) {
    let Some(newest) = observed.sandboxes.first() else { return (true, 0) };
    let wants_host = pod.spec.as_ref().and_then(|s| s.host_network) == Some(true);
    let many = observed.sandboxes.iter().filter(|s| s.ready).count() > 1;
    let lost = !newest.ready || newest.host_network.is_some_and(|is| is != wants_host);
    let no_address = !wants_host && newest.ips.is_empty();
    (many || lost || no_address, newest.attempt + 1)
}

fn unknown_first(status: Option<&ObservedContainer>) -> Option<Kill> {
    let status = status.filter(|s| s.state == State::Unknown)?;
    let text = "Container is in unknown state, try killing it before restart";
    Some(kill(status, text.into(), None))
}

fn kill(status: &ObservedContainer, message: String, by_probe: Option<Probe>) -> Kill {
    Kill { id: status.id.clone(), name: status.name.clone(), message, by_probe }
}

/// Why a running container must be killed, if it must.
fn verdict(
    container: &Container,
    status: &ObservedContainer,
    health: &HealthMap,
    changed: bool,
    what: &str,
) -> Option<(String, Option<Probe>)> {
    let name = &container.name;
    let health = health.get(&status.id).copied().unwrap_or_default();
    if changed {
        Some((format!("{what} {name} definition changed"), None))
    } else if health.liveness == Some(false) && container.liveness_probe.is_some() {
        Some((format!("{what} {name} failed liveness probe"), Some(Probe::Liveness)))
    } else if health.startup == Some(false) && container.startup_probe.is_some() {
        Some((format!("{what} {name} failed startup probe"), Some(Probe::Startup)))
    } else {
        None
    }
}

/// Plans the init containers; true if the main containers may run.
fn plan_init(pod: &Pod, observed: &Observed, health: &HealthMap, out: &mut Plan) -> bool {
    let Some(spec) = &pod.spec else { return true };
    let inits = spec.init_containers.as_deref().unwrap_or_default();
    if inits.is_empty() {
        return true;
    }
    let mut initialized = any_main_created(pod, observed);
    // Backwards: the last container with a status shows how far initialisation got; of those before it,
    // only sidecars matter.
    let mut past = initialized;
    for (index, container) in inits.iter().enumerate().rev() {
        let sidecar = is_sidecar(container);
        let Some(status) = observed.container(&container.name) else {
            if past && sidecar {
                out.start_init.push(index);
            }
            continue;
        };
        if past && !sidecar {
            continue;
        }
        let is_last = index + 1 == inits.len();
        match status.state {
            State::Created => out.start_init.push(index),
            State::Running if sidecar => {
                plan_sidecar(container, status, health, index, out);
                let startup = health.get(&status.id).and_then(|h| h.startup);
                if container.startup_probe.is_none() || startup == Some(true) {
                    if is_last {
                        initialized = true;
                    } else if !past {
                        out.start_init.push(index + 1);
                    }
                }
            }
            State::Running => {}
            State::Exited if sidecar => out.start_init.push(index),
            State::Exited if status.exit_code != 0 => {
                if !should_restart(pod, container, observed) {
                    return plan_end(out);
                }
                out.start_init.push(index);
            }
            State::Exited if is_last => initialized = true,
            State::Exited => out.start_init.push(index + 1),
            State::Unknown => {
                if restarts::policy(spec, container) == "Never" {
                    return plan_end(out);
                }
                out.kill.extend(unknown_first(Some(status)));
                out.start_init.push(index);
            }
        }
        past = true;
    }
    if !past {
        out.start_init.push(0);
    }
    out.start_init.sort_unstable();
    out.start_init.dedup();
    initialized
}

/// Plans the end of a pod whose init container has failed for good.
fn plan_end(out: &mut Plan) -> bool {
    out.kill_pod = true;
    out.start_init.clear();
    false
}

/// Plans the restart of all containers: every run of each is removed, those whose exit was the cause
/// last, so that a kubelet that restarts meanwhile sees the cause again.
pub fn restart_all(spec: &PodSpec, observed: &Observed) -> Plan {
    let runs_of = |list: &[Container]| -> (Vec<Remove>, Vec<Remove>) {
        let runs = list.iter().flat_map(|container| {
            let own = observed.containers.iter().filter(|run| run.name == container.name);
            own.map(move |run| (container, run))
        });
        let is_cause = |(container, run): &(&Container, &ObservedContainer)| {
            run.state == State::Exited && restarts::all_after(container, run.exit_code)
        };
        let (causes, others): (Vec<_>, Vec<_>) = runs.partition(is_cause);
        let leave = |(_, run): (&Container, &ObservedContainer)| Remove {
            id: run.id.clone(),
            name: run.name.clone(),
            kill: run.state != State::Exited,
        };
        (causes.into_iter().map(leave).collect(), others.into_iter().map(leave).collect())
    };
    let (init_causes, init_others) = runs_of(spec.init_containers.as_deref().unwrap_or_default());
    let (main_causes, main_others) = runs_of(&spec.containers);
    let order = [main_others, init_others, main_causes, init_causes];
    Plan { remove: order.concat(), ..Plan::default() }
}

/// A running sidecar that fails a probe is killed and restarted.
fn plan_sidecar(
    container: &Container,
    status: &ObservedContainer,
    health: &HealthMap,
    index: usize,
    out: &mut Plan,
) {
    if let Some((message, by_probe)) = verdict(container, status, health, false, "Init container") {
        out.kill.push(kill(status, format!("{message}, will be restarted"), by_probe));
        out.start_init.push(index);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::pod::observed::{ObservedSandbox, all_restart};
    use k8s_openapi::api::core::v1::PodStatus;
    use serde_json::{Value, json};

    pub(crate) fn pod(spec: Value) -> Pod {
        let metadata = json!({"name": "p", "namespace": "ns", "uid": "u"});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod")
    }

    pub(crate) fn container(name: &str, state: State, exit_code: i32) -> ObservedContainer {
        ObservedContainer {
            id: format!("id-{name}"),
            name: name.into(),
            attempt: 0,
            sandbox_id: "s".into(),
            state,
            hash: "h".into(),
            created_at: Some(Timestamp::UNIX_EPOCH),
            started_at: Some(Timestamp::UNIX_EPOCH),
            finished_at: (state == State::Exited).then_some(Timestamp::UNIX_EPOCH),
            exit_code,
            reason: String::new(),
            message: String::new(),
            image: "img".into(),
            image_id: "sha256:0".into(),
            log_path: String::new(),
            user: None,
            grace_period: None,
            resources: None,
            stop_signal: String::new(),
        }
    }

    pub(crate) fn observed(containers: Vec<ObservedContainer>) -> Observed {
        let sandbox = ObservedSandbox {
            id: "s".into(),
            attempt: 0,
            ready: true,
            host_network: None,
            created_at: None,
            ips: vec!["10.42.0.2".parse().expect("an address")],
        };
        Observed { sandboxes: vec![sandbox], containers }
    }

    use State::{Created, Exited, Running};
    use jiff::Timestamp;

    fn check(spec: Value, containers: Vec<ObservedContainer>, expected: &str) {
        check_plan(&pod(spec), containers, expected);
    }

    fn check_plan(pod: &Pod, containers: Vec<ObservedContainer>, expected: &str) {
        let got = plan(pod, &observed(containers), &HealthMap::new(), |_| "h".into());
        assert_eq!(show(&got), expected);
    }

    fn show(plan: &Plan) -> String {
        let mut out = vec![];
        if plan.kill_pod {
            out.push("killpod".to_string());
        }
        if plan.create_sandbox {
            out.push(format!("sandbox{}", plan.attempt));
        }
        out.extend(plan.kill.iter().map(|k| format!("kill {} ({})", k.name, k.message)));
        let how = |kill| if kill { "kill+remove" } else { "remove" };
        out.extend(plan.remove.iter().map(|r| format!("{} {}", how(r.kill), r.name)));
        for (name, list) in
            [("init", &plan.start_init), ("start", &plan.start), ("eph", &plan.start_ephemeral)]
        {
            if !list.is_empty() {
                out.push(format!("{name}{list:?}"));
            }
        }
        out.join(" ")
    }

    fn two(policy: &str) -> Value {
        json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]})
    }

    fn with_init(policy: &str) -> Value {
        json!({"restartPolicy": policy, "containers": [{"name": "a"}],
            "initContainers": [{"name": "i"}, {"name": "j"}]})
    }

    fn with_sidecar() -> Value {
        json!({"restartPolicy": "Never", "containers": [{"name": "a"}],
            "initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "j"}]})
    }

    #[test]
    fn main_containers() {
        check(two("Always"), vec![], "start[0, 1]");
        check(two("Always"), vec![container("a", Running, 0)], "start[1]");
        check(
            two("Always"),
            vec![container("a", Running, 0), container("b", Exited, 0)],
            "start[1]",
        );
        check(two("OnFailure"), vec![container("a", Running, 0), container("b", Exited, 0)], "");
        check(
            two("OnFailure"),
            vec![container("a", Exited, 0), container("b", Exited, 1)],
            "start[1]",
        );
        check(
            two("OnFailure"),
            vec![container("a", Exited, 0), container("b", Exited, 0)],
            "killpod",
        );
        check(two("Never"), vec![container("a", Exited, 0), container("b", Exited, 1)], "killpod");
        check(two("Never"), vec![container("a", Exited, 0), container("b", Running, 0)], "");
        check(
            two("Never"),
            vec![container("a", Created, 0), container("b", Running, 0)],
            "start[0]",
        );
    }

    #[test]
    fn init_containers() {
        check(with_init("Always"), vec![], "init[0]");
        check(with_init("Always"), vec![container("i", Running, 0)], "");
        check(with_init("Always"), vec![container("i", Exited, 0)], "init[1]");
        check(with_init("Always"), vec![container("i", Exited, 1)], "init[0]");
        check(with_init("Never"), vec![container("i", Exited, 1)], "killpod");
        let both = vec![container("i", Exited, 0), container("j", Exited, 0)];
        check(with_init("Always"), both.clone(), "start[0]");
        let mut running = both;
        running.push(container("a", Running, 0));
        check(with_init("Always"), running, "");
        check(with_init("Always"), vec![container("a", Running, 0)], "");
    }

    #[test]
    fn sidecars() {
        check(with_sidecar(), vec![], "init[0]");
        check(with_sidecar(), vec![container("s", Running, 0)], "init[1]");
        let s = |state| container("s", state, 0);
        check(with_sidecar(), vec![s(Running), container("j", Running, 0)], "");
        check(with_sidecar(), vec![s(Exited), container("j", Running, 0)], "init[0]");
        check(with_sidecar(), vec![s(Running), container("j", Exited, 0)], "start[0]");
        let done = container("j", Exited, 0);
        check(with_sidecar(), vec![s(Exited), done.clone(), container("a", Running, 0)], "init[0]");
        check(with_sidecar(), vec![s(Running), done, container("a", Exited, 0)], "killpod");
    }

    /// A container with one rule: action, exit code.
    fn ruled(name: &str, policy: &str, action: &str, code: i32) -> Value {
        json!({"name": name, "restartPolicy": policy, "restartPolicyRules":
            [{"action": action, "exitCodes": {"operator": "In", "values": [code]}}]})
    }

    #[test]
    fn containers_have_their_own_policies_and_rules() {
        let spec = json!({"restartPolicy": "Never",
            "containers": [ruled("a", "Never", "Restart", 42), {"name": "b"}]});
        let b = container("b", Exited, 1);
        check(spec.clone(), vec![container("a", Exited, 42), b.clone()], "start[0]");
        check(spec.clone(), vec![container("a", Exited, 1), b.clone()], "killpod");
        check(spec, vec![container("a", Exited, 1), container("b", Running, 0)], "");
        let spec = json!({"restartPolicy": "Always",
            "containers": [{"name": "a", "restartPolicy": "OnFailure"},
                {"name": "b", "restartPolicy": "Never"}]});
        check(spec.clone(), vec![container("a", Exited, 0), b.clone()], "killpod");
        check(spec, vec![container("a", Exited, 1), b], "start[0]");
        let spec = json!({"restartPolicy": "Never", "containers": [{"name": "a"}],
            "initContainers": [ruled("i", "Never", "Restart", 42)]});
        check(spec.clone(), vec![container("i", Exited, 42)], "init[0]");
        check(spec.clone(), vec![container("i", Exited, 1)], "killpod");
        check(spec, vec![container("i", Exited, 0)], "start[0]");
    }

    #[test]
    fn all_containers_restart() {
        let spec = json!({"restartPolicy": "Never",
            "initContainers": [{"name": "i"}, {"name": "s", "restartPolicy": "Always"}],
            "containers": [ruled("a", "Never", "RestartAllContainers", 42), {"name": "b"}]});
        let pod = pod(spec);
        let spec = pod.spec.as_ref().expect("a spec");
        let check = |a: ObservedContainer, expected: Option<&str>| {
            let mut earlier = container("b", Exited, 1);
            earlier.id = "earlier".into();
            let (i, s) = (container("i", Exited, 0), container("s", Running, 0));
            let state = observed(vec![a, container("b", Running, 0), earlier, s, i]);
            let none = PodStatus::default();
            let got = all_restart(spec, &state, &none).then(|| show(&restart_all(spec, &state)));
            assert_eq!(got.as_deref(), expected);
        };
        check(container("a", Running, 0), None);
        check(container("a", Exited, 0), None);
        let expected = "kill+remove b remove b remove i kill+remove s remove a";
        check(container("a", Exited, 42), Some(expected));
        // A restart of all containers that has begun is finished, whatever is left.
        let begun = json!({"conditions": [{"type": "AllContainersRestarting", "status": "True"}]});
        let begun: PodStatus = serde_json::from_value(begun).expect("a status");
        assert!(all_restart(spec, &observed(vec![]), &begun));
        check_plan(&pod, vec![], "init[0]");
    }

    #[test]
    fn sandboxes() {
        let check = |policy: &str, change: fn(&mut Observed), expected: &str| {
            let mut state = observed(vec![container("a", Running, 0), container("b", Exited, 0)]);
            change(&mut state);
            let got = plan(&pod(two(policy)), &state, &HealthMap::new(), |_| "h".into());
            assert_eq!(show(&got), expected);
        };
        check("Always", |o| o.sandboxes[0].ready = false, "killpod sandbox1 start[0, 1]");
        check("OnFailure", |o| o.sandboxes[0].ready = false, "killpod sandbox1 start[0]");
        check("Never", |o| o.sandboxes[0].ready = false, "killpod");
        check("Always", |o| o.sandboxes[0].ips.clear(), "killpod sandbox1 start[0, 1]");
        // Container policies: containers that may restart do so, those that ended for good do not.
        let lost = |spec: Value, codes: [i32; 2], expected: &str| {
            let ended = [("a", codes[0]), ("b", codes[1])];
            let mut state =
                observed(ended.map(|(name, code)| container(name, Exited, code)).into());
            state.sandboxes[0].ready = false;
            let got = plan(&pod(spec), &state, &HealthMap::new(), |_| "h".into());
            assert_eq!(show(&got), expected);
        };
        let own = |pod: &str, a: &str| json!({"restartPolicy": pod, "containers": [{"name": "a", "restartPolicy": a}, {"name": "b"}]});
        lost(own("Never", "OnFailure"), [255, 255], "sandbox1 start[0]");
        lost(own("Never", "OnFailure"), [0, 255], "");
        lost(own("Always", "Never"), [0, 255], "sandbox1 start[1]");
        lost(own("Never", "Never"), [255, 255], "");
        check("Always", |o| *o = Observed::default(), "sandbox0 start[0, 1]");
    }

    #[test]
    fn probes_and_changes() {
        let spec = |policy: &str| {
            json!({"restartPolicy": policy, "containers":
                [{"name": "a", "livenessProbe": {"tcpSocket": {"port": 1}}}, {"name": "b"}]})
        };
        let state = observed(vec![container("a", Running, 0), container("b", Running, 0)]);
        let sick = Health { liveness: Some(false), startup: None };
        let health = HealthMap::from([("id-a".to_string(), sick)]);
        let check = |policy: &str, hash: &'static str, expected: &str| {
            let got = plan(&pod(spec(policy)), &state, &health, |_| hash.into());
            assert_eq!(show(&got), expected);
        };
        check(
            "Always",
            "h",
            "kill a (Container a failed liveness probe, will be restarted) start[0]",
        );
        check("Never", "h", "kill a (Container a failed liveness probe)");
        check(
            "Never",
            "other",
            "kill a (Container a definition changed, will be restarted) kill b (Container b definition \
             changed, will be restarted) start[0, 1]",
        );
    }
}
