//! Declared features of nodes, and the pods that need them.
//!
//! In: the feature gates, a pod's spec. Out: names for `status.declaredFeatures`, and the names that
//! a node must declare before the pod can be bound to it. Pure except for the gates.
//! Upstream: `k8s.io/component-helpers/nodedeclaredfeatures`.

use k8s_openapi::api::core::v1::PodSpec;
use release::features::{self, Feature};

/// The features of this kubelet with their gates, sorted by name.
const OURS: [Feature; 2] = [
    Feature::InPlacePodLevelResourcesVerticalScaling,
    Feature::RestartAllContainersOnContainerExits,
];

/// The features that this kubelet declares. Empty while the gate NodeDeclaredFeatures is off.
pub fn declared() -> Option<Vec<String>> {
    let open = OURS.into_iter().filter(|feature| features::enabled(*feature));
    let names: Vec<String> = open.map(|feature| feature.name().to_owned()).collect();
    Some(names)
        .filter(|names| !names.is_empty() && features::enabled(Feature::NodeDeclaredFeatures))
}

/// The features that a pod's node must declare. Upstream: `InferForScheduling`.
pub fn needs(spec: &PodSpec) -> Vec<&'static str> {
    if !features::enabled(Feature::NodeDeclaredFeatures) {
        return vec![];
    }
    let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
    let restarts_all = all.any(crate::restarts::names_all);
    let own_users = spec.host_network == Some(true) && spec.host_users == Some(false);
    let known = [
        (restarts_all, Feature::RestartAllContainersOnContainerExits),
        (own_users, Feature::UserNamespacesHostNetworkSupport),
    ];
    known.into_iter().filter(|(is_needed, _)| *is_needed).map(|(_, one)| one.name()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn pods_need_what_their_fields_ask_for() {
        let check = |spec: Value, expected: &[&str]| {
            let mut tree = spec;
            tree["containers"].take();
            let rules = json!([{"action": tree["action"].take(), "exitCodes": {"operator": "In"}}]);
            tree["containers"] = json!([{"name": "a", "restartPolicyRules": rules}]);
            let spec: PodSpec = serde_json::from_value(tree.clone()).expect("a spec");
            assert_eq!(needs(&spec), expected, "{tree}");
            let gates = features::Gates::DEFAULT.with(Feature::NodeDeclaredFeatures, false);
            assert!(features::scoped(gates, || needs(&spec)).is_empty());
        };
        check(json!({"action": "Restart"}), &[]);
        let all = "RestartAllContainersOnContainerExits";
        check(json!({"action": "RestartAllContainers"}), &[all]);
        let hosts = json!({"action": "Restart", "hostNetwork": true, "hostUsers": false});
        check(hosts, &["UserNamespacesHostNetworkSupport"]);
        check(json!({"action": "Restart", "hostNetwork": true}), &[]);
    }

    #[test]
    fn nodes_declare_what_is_open() {
        let gates = features::Gates::DEFAULT;
        let check = |gates: features::Gates, expected: Option<&[&str]>| {
            let got = features::scoped(gates, declared);
            assert_eq!(got, expected.map(|all| all.iter().map(|one| one.to_string()).collect()));
        };
        const RESIZE: &str = "InPlacePodLevelResourcesVerticalScaling";
        check(gates, Some(&[RESIZE, "RestartAllContainersOnContainerExits"]));
        let without = gates.with(Feature::RestartAllContainersOnContainerExits, false);
        check(without, Some(&[RESIZE]));
        check(gates.with(Feature::NodeDeclaredFeatures, false), None);
    }
}
