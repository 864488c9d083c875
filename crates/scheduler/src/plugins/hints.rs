//! Queueing hints that several plugins share: may an event let a pod fit that a plugin rejected? The hint of one
//! plugin alone is in the plugin's file.
//!
//! In: the pod that waits, an event. Out: whether it is worth another attempt. Upstream: the
//! `QueueingHintFn`s of the plugins, `EventsToRegister`.
//!
//! Invariants: a plugin's hint looks at what that plugin looks at, and no more: whichever plugin
//! rejected a node, only its own new answer can help there. Where a hint cannot know it says yes: a pod
//! that is not woken waits for minutes.

use crate::framework::ClusterEvent;
use crate::node::NodeInfo;
use crate::pod::PodInfo;

/// The hint of plugins that only a new node or a changed node spec can satisfy.
pub fn node_appears(_: &PodInfo, event: &ClusterEvent) -> bool {
    matches!(event, ClusterEvent::NodeAdded(_) | ClusterEvent::PodUpdated)
}

/// A node comes, or changes, so that something holds for it that did not hold before.
pub fn becomes(event: &ClusterEvent, holds: impl Fn(&NodeInfo) -> bool) -> bool {
    match event {
        ClusterEvent::NodeAdded(node) => holds(node),
        ClusterEvent::NodeUpdated { old, new } => holds(new) && !holds(old),
        event => matches!(event, ClusterEvent::PodUpdated),
    }
}

/// The hint of plugins that read nodes' labels.
pub fn is_labelled(_: &PodInfo, event: &ClusterEvent) -> bool {
    match event {
        ClusterEvent::NodeUpdated { old, new } => old.labels != new.labels,
        event => matches!(event, ClusterEvent::NodeAdded(_) | ClusterEvent::PodUpdated),
    }
}

/// A claim of the pod, a volume or a class changed.
pub fn volumes_change(pod: &PodInfo, event: &ClusterEvent) -> bool {
    match event {
        ClusterEvent::VolumesChanged(None) => true,
        ClusterEvent::VolumesChanged(Some(claim)) => {
            claim.namespace == pod.key.namespace
                && pod.claims.iter().any(|name| *claim.name == **name)
        }
        _ => false,
    }
}

/// A pod with volumes goes.
pub fn volume_appears(_: &PodInfo, event: &ClusterEvent) -> bool {
    let has_any = |pod: &PodInfo| !pod.claims.is_empty() || !pod.disks.is_empty();
    matches!(event, ClusterEvent::PodRemoved(other) if has_any(other))
}

pub fn never(_: &PodInfo, _: &ClusterEvent) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::plugins::inter_pod_affinity::neighbours_change;
    use crate::plugins::node_affinity::is_selected;
    use crate::plugins::node_ports::port_appears;
    use crate::plugins::node_unschedulable::is_open;
    use crate::plugins::pod_topology_spread::spread_changes;
    use crate::plugins::taint_toleration::is_tolerated;
    use crate::plugins::tests::{node, pod};

    fn info(extra: Value) -> Arc<NodeInfo> {
        let object = serde_json::from_value(node("n", extra)).expect("a node");
        let mut info = NodeInfo::named("n");
        info.update(&object);
        Arc::new(info)
    }

    fn updated(old: Value, new: Value) -> ClusterEvent {
        ClusterEvent::NodeUpdated { old: info(old), new: info(new) }
    }

    type Hint = fn(&PodInfo, &ClusterEvent) -> bool;

    fn check(hint: Hint, pod: &PodInfo, event: &ClusterEvent, expected: bool) {
        assert_eq!(hint(pod, event), expected, "{event:?}");
    }

    #[test]
    fn nodes_help_when_they_become_what_was_missing() {
        let plain = pod("p", json!({}));
        let open = json!({});
        let closed = json!({"spec": {"unschedulable": true}});
        check(is_open, &plain, &updated(closed.clone(), open.clone()), true);
        check(is_open, &plain, &updated(open.clone(), open.clone()), false);
        check(is_open, &plain, &ClusterEvent::NodeAdded(info(closed)), false);
        let tainted = json!({"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}});
        let soft = json!({"spec": {"taints": [{"key": "k", "effect": "PreferNoSchedule"}]}});
        check(is_tolerated, &plain, &updated(tainted.clone(), soft.clone()), true);
        check(is_tolerated, &plain, &updated(soft, open.clone()), false);
        check(is_tolerated, &plain, &ClusterEvent::NodeAdded(info(tainted)), false);
        let choosy = pod("p", json!({"spec": {"nodeSelector": {"zone": "a"}}}));
        let zone = |name: &str| json!({"metadata": {"labels": {"zone": name}}});
        check(is_selected, &choosy, &updated(zone("b"), zone("a")), true);
        check(is_selected, &choosy, &updated(zone("a"), zone("a")), false);
        check(is_selected, &choosy, &ClusterEvent::NodeAdded(info(zone("b"))), false);
        check(is_labelled, &plain, &updated(zone("a"), zone("b")), true);
        check(is_labelled, &plain, &updated(open.clone(), open), false);
    }

    #[test]
    fn pods_that_go_help_those_that_want_what_they_had() {
        let port = |port: u16| {
            let ports = json!([{"containerPort": 1, "hostPort": port}]);
            pod("p", json!({"spec": {"containers": [{"name": "c", "image": "i", "ports": ports}]}}))
        };
        let gone = |pod: &PodInfo| ClusterEvent::PodRemoved(Arc::new(pod.clone()));
        check(port_appears, &port(80), &gone(&port(80)), true);
        check(port_appears, &port(80), &gone(&port(81)), false);
        let mounts = |claim: &str| {
            let claim = json!({"name": "v", "persistentVolumeClaim": {"claimName": claim}});
            pod("p", json!({"spec": {"volumes": [claim]}}))
        };
        check(volume_appears, &mounts("a"), &gone(&mounts("b")), true);
        check(volume_appears, &mounts("a"), &gone(&port(80)), false);
        let claim = |namespace: &str, name: &str| {
            ClusterEvent::VolumesChanged(Some(client::ObjectKey::new(namespace, name)))
        };
        check(volumes_change, &mounts("a"), &claim("default", "a"), true);
        check(volumes_change, &mounts("a"), &claim("default", "b"), false);
        check(volumes_change, &mounts("a"), &claim("other", "a"), false);
        check(volumes_change, &mounts("a"), &ClusterEvent::VolumesChanged(None), true);
    }

    fn labelled(app: &str) -> Arc<PodInfo> {
        Arc::new(pod("o", json!({"metadata": {"labels": {"app": app}}})))
    }

    fn changed(old: &str, new: &str) -> ClusterEvent {
        ClusterEvent::PodChanged { old: labelled(old), new: labelled(new) }
    }

    #[test]
    fn neighbours_help_those_that_mind_them() {
        let term = |app: &str| json!({"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": app}}});
        let minds = |kind: &str, app: &str| {
            let terms = json!({"requiredDuringSchedulingIgnoredDuringExecution": [term(app)]});
            pod("p", json!({"spec": {"affinity": {kind: terms}}}))
        };
        let (near, far) = (minds("podAffinity", "db"), minds("podAntiAffinity", "db"));
        let hint: Hint = neighbours_change;
        check(hint, &near, &ClusterEvent::PodAssigned(labelled("db")), true);
        check(hint, &near, &ClusterEvent::PodAssigned(labelled("x")), false);
        check(hint, &near, &changed("x", "db"), true);
        check(hint, &near, &changed("db", "x"), false);
        check(hint, &near, &ClusterEvent::PodRemoved(labelled("db")), false);
        check(hint, &far, &ClusterEvent::PodRemoved(labelled("db")), true);
        check(hint, &far, &ClusterEvent::PodRemoved(labelled("x")), false);
        check(hint, &far, &changed("db", "x"), true);
        check(hint, &far, &ClusterEvent::PodAssigned(labelled("db")), false);
        // Others mind it.
        let shy = Arc::new(minds("podAntiAffinity", "web"));
        check(hint, &pod("p", json!({})), &ClusterEvent::PodRemoved(shy), true);
    }

    #[test]
    fn what_counts_for_spreading_helps() {
        let constraint = json!({"maxSkew": 1, "topologyKey": "zone",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "web"}}});
        let spread = pod("p", json!({"spec": {"topologySpreadConstraints": [constraint]}}));
        let hint: Hint = spread_changes;
        check(hint, &spread, &ClusterEvent::PodAssigned(labelled("web")), true);
        check(hint, &spread, &ClusterEvent::PodAssigned(labelled("x")), false);
        check(hint, &spread, &ClusterEvent::PodRemoved(labelled("web")), true);
        check(hint, &spread, &changed("web", "x"), true);
        check(hint, &spread, &changed("x", "y"), false);
        let zone = |name: &str| json!({"metadata": {"labels": {"zone": name}}});
        check(hint, &spread, &ClusterEvent::NodeAdded(info(zone("a"))), true);
        check(hint, &spread, &ClusterEvent::NodeAdded(info(json!({}))), false);
        check(hint, &spread, &updated(zone("a"), zone("b")), true);
        check(hint, &spread, &updated(zone("a"), zone("a")), false);
        check(hint, &spread, &ClusterEvent::NodeRemoved, true);
    }
}
