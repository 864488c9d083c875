//! Decides which running containers get other resources, and which of them without a restart.
//!
//! In: the pod as granted, the running containers, the actuated resources. Out: additions to the
//! [`Plan`]. Pure.
//! Upstream: `kuberuntime_manager.go` computePodResizeAction.

use k8s_openapi::api::core::v1::{Container, Pod};

use crate::pod::allocation::Actuated;
use crate::pod::amounts::{Resource, Update, amounts};
use crate::pod::observed::{Observed, ObservedContainer, State};
use crate::pod::plan::{Kill, Plan};
use crate::resources::is_sidecar;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::amounts::Amounts;
    use crate::pod::plan::tests::{container, observed, pod};
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
}
