//! The labels of nodes that come from their cloud. Pure.
//!
//! Invariant: of two labels with the same meaning the old one decides.
//! Upstream: `labelReconcileInfo` and `getNodeModifiersFromCloudProvider`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;

use crate::provider::Metadata;

const ZONE: [&str; 2] = ["failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"];
const REGION: [&str; 2] =
    ["failure-domain.beta.kubernetes.io/region", "topology.kubernetes.io/region"];
const INSTANCE_TYPE: [&str; 2] =
    ["beta.kubernetes.io/instance-type", "node.kubernetes.io/instance-type"];

/// Labels without which the old and the new name would disagree.
pub fn repairs(node: &Node) -> BTreeMap<String, String> {
    let Some(labels) = &node.metadata.labels else { return BTreeMap::new() };
    let differs = |[old, new]: [&str; 2]| {
        let value = labels.get(old)?;
        (labels.get(new) != Some(value)).then(|| (new.to_owned(), value.clone()))
    };
    [ZONE, REGION, INSTANCE_TYPE].into_iter().filter_map(differs).collect()
}

/// The labels for a node that the cloud describes for the first time.
pub fn of(node: &Node, metadata: &Metadata) -> BTreeMap<String, String> {
    let known = [
        (INSTANCE_TYPE, &metadata.instance_type),
        (ZONE, &metadata.zone),
        (REGION, &metadata.region),
    ];
    let mut labels = BTreeMap::new();
    for (names, value) in known.into_iter().filter(|(_, value)| !value.is_empty()) {
        labels.extend(names.map(|name| (name.to_owned(), value.clone())));
    }
    for (key, value) in &metadata.labels {
        let present = node.metadata.labels.as_ref().and_then(|labels| labels.get(key));
        if is_kubernetes_own(key) {
            tracing::warn!(
                label = key,
                "discarded a node label: the cloud must not use namespaces of Kubernetes"
            );
        } else if present.is_some_and(|present| present != value) {
            tracing::warn!(
                label = key,
                "discarded a node label: the node has it with another value"
            );
        } else {
            labels.insert(key.clone(), value.clone());
        }
    }
    labels
}

/// Whether the key is in `kubernetes.io`, `k8s.io`, or a domain below.
fn is_kubernetes_own(key: &str) -> bool {
    let Some((domain, _)) = key.split_once('/') else { return false };
    ["kubernetes.io", "k8s.io"].into_iter().any(|own| {
        domain.strip_suffix(own).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(labels: Value) -> Node {
        serde_json::from_value(json!({"metadata": {"name": "n", "labels": labels}}))
            .expect("a Node")
    }

    #[test]
    fn the_old_label_decides() {
        let check = |labels: Value, expected: &[(&str, &str)]| {
            let found = repairs(&node(labels.clone()));
            let found: Vec<_> =
                found.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            assert_eq!(found, expected, "{labels}");
        };
        check(json!({(ZONE[0]): "a"}), &[(ZONE[1], "a")]);
        check(json!({(ZONE[0]): "a", (ZONE[1]): "b"}), &[(ZONE[1], "a")]);
        check(json!({(ZONE[1]): "b"}), &[]);
        check(
            json!({(REGION[0]): "r", (REGION[1]): "r", (INSTANCE_TYPE[0]): "t"}),
            &[(INSTANCE_TYPE[1], "t")],
        );
    }

    #[test]
    fn the_clouds_further_labels_do_not_override() {
        let labels = [
            ("rack", "7"),
            ("mine", "cloud"),
            ("kubernetes.io/os", "x"),
            ("a.k8s.io/b", "x"),
            ("notk8s.io/b", "y"),
        ];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let metadata = Metadata { zone: "z".into(), labels, ..Metadata::default() };
        let found = of(&node(json!({"mine": "user", "rack": "7"})), &metadata);
        let keys: Vec<_> = found.keys().map(String::as_str).collect();
        assert_eq!(keys, [ZONE[0], "notk8s.io/b", "rack", ZONE[1]]);
    }
}
