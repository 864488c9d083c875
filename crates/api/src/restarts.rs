//! Restart decisions for terminated containers. The kubelet acts on them, and the API server validates
//! status updates by them.
//!
//! In: a pod's spec, one of its containers, an exit code. Out: the decision. The first of the
//! container's rules that matches the code decides, then the container's policy, then the pod's.
//! Upstream: `ContainerShouldRestart`, `FindMatchingContainerRestartRule`, `AllContainersCouldRestart`.

use k8s_openapi::api::core::v1::{Container, ContainerRestartRule, PodSpec};
use release::features::{self, Feature};

const RESTART: &str = "Restart";
const RESTART_ALL: &str = "RestartAllContainers";

/// The policy if no rule matches.
pub fn policy<'a>(spec: &'a PodSpec, container: &'a Container) -> &'a str {
    own_policy(container).or(spec.restart_policy.as_deref()).unwrap_or("Always")
}

/// The policy of sidecars is older than the gate.
fn own_policy(container: &Container) -> Option<&str> {
    let is_open = features::enabled(Feature::ContainerRestartRules);
    container.restart_policy.as_deref().filter(|own| is_open || *own == "Always")
}

/// Reports whether `container` restarts after exit code `code`.
pub fn after(spec: &PodSpec, container: &Container, code: i32) -> bool {
    match rule(container, code).map(|rule| rule.action.as_str()) {
        Some(RESTART) => return true,
        Some(RESTART_ALL) if all_is_open() => return true,
        _ => {}
    }
    match policy(spec, container) {
        "Never" => false,
        "OnFailure" => code != 0,
        _ => true,
    }
}

/// Reports whether exit code `code` restarts all containers of the pod.
pub fn all_after(container: &Container, code: i32) -> bool {
    all_is_open() && rule(container, code).is_some_and(|rule| rule.action == RESTART_ALL)
}

/// Reports whether any container may restart all containers of the pod.
pub fn all_may(spec: &PodSpec) -> bool {
    let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
    all_is_open() && all.any(names_all)
}

/// Reports whether one of its rules restarts all containers of the pod.
pub(crate) fn names_all(container: &Container) -> bool {
    container.restart_policy_rules.iter().flatten().any(|rule| rule.action == RESTART_ALL)
}

fn all_is_open() -> bool {
    features::enabled(Feature::RestartAllContainersOnContainerExits)
}

/// The first that matches. Rules count only beside a policy of the container's own.
fn rule(container: &Container, code: i32) -> Option<&ContainerRestartRule> {
    own_policy(container)?;
    if !features::enabled(Feature::ContainerRestartRules) {
        return None;
    }
    container.restart_policy_rules.iter().flatten().find(|rule| {
        let Some(codes) = &rule.exit_codes else { return false };
        let is_listed = codes.values.iter().flatten().any(|listed| *listed == code);
        match codes.operator.as_str() {
            "In" => is_listed,
            "NotIn" => !is_listed,
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(policy: &str, container: Value) -> PodSpec {
        let mut container = container;
        container["name"] = "a".into();
        let tree = json!({"restartPolicy": policy, "containers": [container]});
        serde_json::from_value(tree).expect("a spec")
    }

    fn rules(policy: &str, rules: &[(&str, &str, &[i32])]) -> Value {
        let one = |(action, operator, values): &(&str, &str, &[i32])| json!({"action": action, "exitCodes": {"operator": operator, "values": values}});
        let rules: Vec<Value> = rules.iter().map(one).collect();
        json!({"restartPolicy": policy, "restartPolicyRules": rules})
    }

    #[test]
    fn rules_come_before_policies_and_the_containers_before_the_pods() {
        let check = |of_pod: &str, container: &Value, expected: &[(i32, bool)]| {
            let spec = spec(of_pod, container.clone());
            for (code, expected) in expected {
                let got = after(&spec, &spec.containers[0], *code);
                assert_eq!(got, *expected, "{of_pod} {container} {code}");
            }
        };
        let none = json!({});
        check("Always", &none, &[(0, true), (1, true)]);
        check("OnFailure", &none, &[(0, false), (1, true)]);
        check("Never", &none, &[(0, false), (1, false)]);
        check("Never", &rules("OnFailure", &[]), &[(0, false), (1, true)]);
        check("Never", &rules("Always", &[]), &[(0, true), (1, true)]);
        check("Always", &rules("Never", &[]), &[(0, false), (1, false)]);
        let listed = rules("Never", &[("Restart", "In", &[3, 42])]);
        check("Always", &listed, &[(0, false), (3, true), (42, true), (43, false)]);
        let others = rules("Never", &[("Restart", "NotIn", &[0, 3])]);
        check("Never", &others, &[(0, false), (3, false), (42, true)]);
        let both = rules("OnFailure", &[("Maybe", "In", &[0]), ("Restart", "In", &[0])]);
        check("Never", &both, &[(0, false), (1, true)]);
        let all = rules("Never", &[("RestartAllContainers", "In", &[7])]);
        check("Never", &all, &[(0, false), (7, true)]);
    }

    #[test]
    fn gates_close_rules() {
        let all = rules("Never", &[("RestartAllContainers", "In", &[7])]);
        let check = |gates: features::Gates, policy: &str, expected: [bool; 3]| {
            let spec = spec(policy, all.clone());
            let one = &spec.containers[0];
            let got = features::scoped(gates, || {
                [after(&spec, one, 7), all_after(one, 7), all_may(&spec)]
            });
            assert_eq!(got, expected, "{policy}");
        };
        let gates = features::Gates::DEFAULT;
        check(gates, "Always", [true, true, true]);
        let without = gates.with(Feature::RestartAllContainersOnContainerExits, false);
        check(without, "Always", [false, false, false]);
        let none = without.with(Feature::ContainerRestartRules, false);
        check(none, "Always", [true, false, false]);
        check(none, "Never", [false, false, false]);
    }
}
