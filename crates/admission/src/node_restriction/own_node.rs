//! Restricts a node's writes of its own Node object.
//!
//! In: a write of a Node by that node. Out: a verdict, and an annotation with the credential that
//! registered the Node, which tells certificates of the same name apart.

use std::collections::BTreeSet;

use api::nodes;
use apiserver::admission::{Attributes, Operation};
use k8s_openapi::api::core::v1::Node;

const RESTRICTED: &str = "node-restriction.kubernetes.io";
/// The labels in upstream's namespaces that a kubelet may set on its node.
const KUBELET_LABELS: [&str; 11] = [
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
];
const KUBELET_NAMESPACES: [&str; 2] = ["kubelet.kubernetes.io", "node.kubernetes.io"];

/// Annotations that nodes do not write.
const SERVER_ANNOTATIONS: [&str; 2] = [nodes::SERVING_ADDRESSES, nodes::REGISTERED_BY];

/// See the module. Records the credential of the registration.
pub(super) fn admit(attributes: &mut Attributes<'_>, node: &str) -> Result<(), String> {
    keep_annotations(attributes);
    check(attributes, node)?;
    if attributes.operation != Operation::Create {
        return Ok(());
    }
    let credential = attributes.ctx.user.extra.get(nodes::CREDENTIAL_ID);
    let credential = credential.and_then(|ids| ids.first()).cloned().unwrap_or_default();
    if let Some(new) = attributes.object_as_mut::<Node>() {
        let annotations = new.metadata.annotations.get_or_insert_default();
        annotations.insert(nodes::REGISTERED_BY.to_owned(), credential);
    }
    Ok(())
}

/// A node that replaces its Node may omit the server's annotations: they stay.
fn keep_annotations(attributes: &mut Attributes<'_>) {
    let old = attributes.old_as::<Node>().and_then(|old| old.metadata.annotations.as_ref());
    let kept: Vec<_> = SERVER_ANNOTATIONS
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), old?.get(name)?.clone())))
        .collect();
    let Some(new) = attributes.object_as_mut::<Node>().filter(|_| !kept.is_empty()) else { return };
    let annotations = new.metadata.annotations.get_or_insert_default();
    for (name, value) in kept {
        annotations.entry(name).or_insert(value);
    }
}

fn check(attributes: &Attributes<'_>, node: &str) -> Result<(), String> {
    let asked = attributes.key.name.as_str();
    if asked != node {
        return Err(format!("node {node:?} is not allowed to modify node {asked:?}"));
    }
    let Some(new) = attributes.object_as::<Node>() else { return Ok(()) };
    pod_networks(new, attributes.old_as(), node)?;
    server_annotations(new, attributes.old_as(), node)?;
    let Some(old) = attributes.old_as::<Node>() else {
        let forbidden = forbidden_labels(new, None);
        if forbidden.is_empty() {
            return Ok(());
        }
        return Err(format!(
            "node {node:?} is not allowed to set the following labels: {}",
            forbidden.join(", ")
        ));
    };
    let taints = |node: &Node| node.spec.clone().and_then(|spec| spec.taints).unwrap_or_default();
    if taints(new) != taints(old) {
        return Err(format!("node {node:?} is not allowed to modify taints"));
    }
    let owners = |node: &Node| node.metadata.owner_references.clone().unwrap_or_default();
    if owners(new) != owners(old) {
        return Err(format!("node {node:?} is not allowed to modify ownerReferences"));
    }
    let forbidden = forbidden_labels(new, Some(old));
    if forbidden.is_empty() {
        return Ok(());
    }
    Err(format!("is not allowed to modify labels: {}", forbidden.join(", ")))
}

/// Only the controller may set the pod networks that are routed to a node. Upstream has no such check,
/// and no component of its own that routes by the field.
fn pod_networks(new: &Node, old: Option<&Node>, node: &str) -> Result<(), String> {
    let networks = |node: &Node| {
        let spec = node.spec.as_ref();
        let single = spec.and_then(|spec| spec.pod_cidr.clone()).unwrap_or_default();
        (single, spec.and_then(|spec| spec.pod_cidrs.clone()).unwrap_or_default())
    };
    if networks(new) == old.map(networks).unwrap_or_default() {
        return Ok(());
    }
    Err(format!("node {node:?} is not allowed to set podCIDR or podCIDRs"))
}

/// Annotations that only the server or an administrator may write.
fn server_annotations(new: &Node, old: Option<&Node>, node: &str) -> Result<(), String> {
    for name in SERVER_ANNOTATIONS {
        let value = |node: &Node| node.metadata.annotations.as_ref()?.get(name).cloned();
        if value(new) != old.and_then(value) {
            return Err(format!("node {node:?} is not allowed to set the annotation {name}"));
        }
    }
    Ok(())
}

/// Changed labels that a kubelet must not set.
fn forbidden_labels(new: &Node, old: Option<&Node>) -> Vec<String> {
    let none = Default::default();
    let new = new.metadata.labels.as_ref().unwrap_or(&none);
    let old = old.and_then(|old| old.metadata.labels.as_ref()).unwrap_or(&none);
    let keys: BTreeSet<&String> = new.keys().chain(old.keys()).collect();
    let changed = keys.into_iter().filter(|key| new.get(*key) != old.get(*key));
    changed.filter(|key| is_forbidden(key)).cloned().collect()
}

fn is_forbidden(label: &str) -> bool {
    let namespace = label.split_once('/').map_or("", |(namespace, _)| namespace);
    let within = |parent: &str| {
        namespace == parent
            || namespace.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.'))
    };
    let ours = within("kubernetes.io") || within("k8s.io");
    let kubelets = KUBELET_LABELS.contains(&label) || KUBELET_NAMESPACES.into_iter().any(within);
    within(RESTRICTED) || (ours && !kubelets)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn kubelets_set_only_some_labels() {
        let check =
            |label: &str, expected: bool| assert_eq!(is_forbidden(label), expected, "{label}");
        check("kubernetes.io/hostname", false);
        check("example.com/anything", false);
        check("plain", false);
        check("node.kubernetes.io/x", false);
        check("a.kubelet.kubernetes.io/x", false);
        check("node-role.kubernetes.io/master", true);
        check("node-restriction.kubernetes.io/a", true);
        check("foo.node-restriction.kubernetes.io/a", true);
        check("foo.k8s.io/a", true);
        check("notkubernetes.io/a", false);
    }

    #[test]
    fn nodes_set_neither_networks_nor_the_servers_annotations() {
        let of = |spec: Value, annotations: Value| -> Node {
            let tree = json!({"metadata": {"name": "n", "annotations": annotations}, "spec": spec});
            serde_json::from_value(tree).expect("a node")
        };
        let check = |new: &Node, old: Option<&Node>, expected: bool| {
            let outcome = pod_networks(new, old, "n").and(server_annotations(new, old, "n"));
            assert_eq!(outcome.is_ok(), expected, "{new:?} {old:?}: {outcome:?}");
        };
        let bare = of(json!({}), json!({"a": "b"}));
        let given = of(json!({"podCIDR": "10.42.1.0/24", "podCIDRs": ["10.42.1.0/24"]}), json!({}));
        check(&bare, None, true);
        check(&given, None, false);
        check(&given, Some(&bare), false);
        check(&given, Some(&given), true);
        check(&bare, Some(&given), false);
        let list = of(json!({"podCIDRs": ["0.0.0.0/0"]}), json!({}));
        check(&list, None, false);
        for name in SERVER_ANNOTATIONS {
            let claimed = of(json!({}), json!({ name: "10.0.0.1" }));
            check(&claimed, None, false);
            check(&claimed, Some(&bare), false);
            check(&claimed, Some(&claimed), true);
            check(&bare, Some(&claimed), false);
        }
    }
}
