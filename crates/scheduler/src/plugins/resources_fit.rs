//! A node must have room for the pod's requests; emptier or fuller nodes score higher, by the
//! profile's strategy. DynamicResources handles the resources that the node lacks and a DeviceClass
//! provides.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::claims::Claims;
use crate::cluster::Cluster;
use crate::config::Scoring;
use crate::extended::CLASS_PREFIX;
use crate::framework::{
    ClusterEvent, CycleState, ExtensionPoints, Filter, Next, PreFilter, Rejection, Row, Score,
};
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::resources::Resources;

const NAME: &str = "NodeResourcesFit";

pub const ROW: Row = Row {
    name: NAME,
    weight: 1,
    build: |handle| {
        let args = &handle.args;
        let plugin = Arc::new(Fit {
            scoring: args.fit.clone(),
            ignored: args.ignored_resources.clone(),
            ignored_groups: args.ignored_groups.clone(),
            claims: handle.objects.clone().map(|objects| objects.claims),
        });
        ExtensionPoints {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin.clone()),
            score: Some(plugin),
            ..Default::default()
        }
    },
    hint: |pod, event| match event {
        ClusterEvent::ClassChanged { name, is_new, resource } => {
            let asks = |name: &str| pod.requests.scalar.contains_key(name);
            *is_new && asks(&format!("{CLASS_PREFIX}{name}"))
                || resource.as_deref().is_some_and(asks)
        }
        ClusterEvent::PodRemoved(_) | ClusterEvent::PodUpdated => true,
        ClusterEvent::PodChanged { old, new } => asks_less(pod, old, new),
        ClusterEvent::NodeAdded(node) => may_hold(pod, node),
        ClusterEvent::NodeUpdated { old, new } => may_hold(pod, new) && has_more(pod, old, new),
        _ => false,
    },
};

/// The requests of a pod, with the index of each resource in the node's amounts.
fn asked<'a>(
    pod: &'a PodInfo,
    a: &'a Resources,
    b: &'a Resources,
) -> impl Iterator<Item = (i64, i64)> {
    let own = &pod.requests;
    let plain = [
        (own.milli_cpu, a.milli_cpu, b.milli_cpu),
        (own.memory, a.memory, b.memory),
        (own.ephemeral_storage, a.ephemeral_storage, b.ephemeral_storage),
    ];
    let of = |all: &Resources, name: &String| all.scalar.get(name).copied().unwrap_or(0);
    let scalar = own.scalar.iter().map(move |(name, amount)| (*amount, of(a, name), of(b, name)));
    let all = plain.into_iter().chain(scalar);
    all.filter(|(amount, ..)| *amount > 0).map(|(_, a, b)| (a, b))
}

/// Another pod needs less of something that the pod wants.
fn asks_less(pod: &PodInfo, old: &PodInfo, new: &PodInfo) -> bool {
    asked(pod, &old.requests, &new.requests).any(|(old, new)| new < old)
}

/// Would the pod fit if the node were empty? What it has nothing of may be others' business.
fn may_hold(pod: &PodInfo, node: &NodeInfo) -> bool {
    shortages(pod, node).iter().all(|short| short.capacity == 0 && short.resource.contains('/'))
}

fn has_more(pod: &PodInfo, old: &NodeInfo, new: &NodeInfo) -> bool {
    let (old, new) = (&old.allocatable, &new.allocatable);
    // A resource that the node lacks may come from devices.
    let may_be_device = |name: &String| new.scalar.get(name).copied().unwrap_or(0) == 0;
    new.pods > old.pods
        || asked(pod, old, new).any(|(old, new)| new > old)
        || pod.requests.scalar.keys().any(may_be_device)
}

struct Fit {
    scoring: Scoring,
    /// Extended resources that are an extender's business.
    ignored: Vec<String>,
    ignored_groups: Vec<String>,
    claims: Option<Claims>,
}

/// The resources of a pod that DeviceClasses provide.
struct Backed(BTreeSet<String>);

impl PreFilter for Fit {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _: &Cluster,
    ) -> Result<Next, Rejection> {
        if let Some(claims) = self.claims.as_ref().filter(|_| !pod.extended.is_empty()) {
            let asked = pod.requests.scalar.keys();
            let backed = asked.filter(|name| claims.class_for(name).is_some());
            state.put(NAME, Backed(backed.cloned().collect()));
        }
        Ok(Next::Filter)
    }
}

impl Filter for Fit {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let mut short = shortages(pod, node);
        let backed = state.get::<Backed>(NAME);
        let is_backed = |name: &str| backed.is_some_and(|backed| backed.0.contains(name));
        short.retain(|short| {
            let is_device = short.capacity == 0 && is_backed(short.resource);
            !is_device && !self.ignores(short.resource)
        });
        if short.is_empty() {
            return Ok(());
        }
        // More than the empty node has: no pod's going would help.
        let hopeless = short.iter().any(|short| short.asked > short.capacity);
        let reasons = short.into_iter().map(|short| short.reason).collect();
        Err(Rejection { reasons, unresolvable: hopeless, ..Rejection::default() })
    }
}

impl Fit {
    fn ignores(&self, resource: &str) -> bool {
        let Some((group, _)) = resource.split_once('/') else { return false };
        self.ignored.iter().any(|one| one == resource)
            || self.ignored_groups.iter().any(|one| one == group)
    }
}

struct Shortage<'a> {
    /// Empty for room for one more pod.
    resource: &'a str,
    reason: Cow<'static, str>,
    asked: i64,
    capacity: i64,
}

fn shortages<'a>(pod: &'a PodInfo, node: &NodeInfo) -> Vec<Shortage<'a>> {
    let (all, used, asked) = (&node.allocatable, &node.requested, &pod.requests);
    let mut short = vec![];
    if node.pods.len() as i64 + 1 > all.pods {
        let reason = "Too many pods".into();
        short.push(Shortage { resource: "", reason, asked: 1, capacity: all.pods });
    }
    let mut check = |resource: &'a str, asked: i64, used: i64, capacity: i64| {
        if asked > 0 && asked > capacity - used {
            // Said of thousands of nodes.
            let reason = match resource {
                "cpu" => "Insufficient cpu".into(),
                "memory" => "Insufficient memory".into(),
                other => format!("Insufficient {other}").into(),
            };
            short.push(Shortage { resource, reason, asked, capacity });
        }
    };
    check("cpu", asked.milli_cpu, used.milli_cpu, all.milli_cpu);
    check("memory", asked.memory, used.memory, all.memory);
    check(
        "ephemeral-storage",
        asked.ephemeral_storage,
        used.ephemeral_storage,
        all.ephemeral_storage,
    );
    for (name, amount) in &asked.scalar {
        let of =
            |amounts: &crate::resources::Resources| amounts.scalar.get(name).copied().unwrap_or(0);
        check(name, *amount, of(used), of(all));
    }
    short
}

impl Score for Fit {
    fn score(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo, _: &Cluster) -> i64 {
        super::allocation::score(&self.scoring, pod, node)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn room_that_appears_helps() {
        let node = |cpu: &str, pods: &str| {
            let object = json!({"metadata": {"name": "n"},
                "status": {"allocatable": {"cpu": cpu, "memory": "1Gi", "pods": pods}}});
            let mut node = NodeInfo::named("n");
            node.update(&from_value(object).unwrap());
            Arc::new(node)
        };
        let pod = |requests: serde_json::Value| {
            let object = json!({"metadata": {"name": "p", "uid": "p"}, "spec": {"containers": [
                {"name": "c", "resources": {"requests": requests}}]}});
            Arc::new(PodInfo::new(&from_value(object).unwrap()))
        };
        let wants = pod(json!({"cpu": "2"}));
        let check = |event: ClusterEvent, expected: bool| {
            assert_eq!((ROW.hint)(&wants, &event), expected, "{event:?}");
        };
        let updated = |old, new| ClusterEvent::NodeUpdated { old, new };
        check(ClusterEvent::NodeAdded(node("4", "9")), true);
        check(ClusterEvent::NodeAdded(node("1", "9")), false);
        check(updated(node("2", "9"), node("4", "9")), true);
        check(updated(node("4", "9"), node("3", "9")), false);
        check(updated(node("4", "8"), node("4", "9")), true);
        check(updated(node("1", "9"), node("1500m", "9")), false);
        // A pod that is made smaller leaves room, as one that goes does.
        let changed = |old, new| ClusterEvent::PodChanged { old: pod(old), new: pod(new) };
        check(changed(json!({"cpu": "2"}), json!({"cpu": "1"})), true);
        check(changed(json!({"memory": "2Gi"}), json!({"memory": "1Gi"})), false);
        check(changed(json!({"cpu": "1"}), json!({"cpu": "2"})), false);
        check(ClusterEvent::PodRemoved(pod(json!({}))), true);
        check(ClusterEvent::PodAssigned(pod(json!({}))), false);
    }

    #[test]
    fn shortages_are_named_as_upstream_does() {
        let mut node = NodeInfo::named("n");
        let object = json!({"metadata": {"name": "n"}, "status": {"allocatable":
            {"cpu": "1", "memory": "1Gi", "pods": "1", "example.com/gpu": "1"}}});
        node.update(&from_value(object).unwrap());
        let pod = |requests: serde_json::Value| {
            let object = json!({"metadata": {"name": "p", "uid": "p"}, "spec": {"containers": [
                {"name": "c", "resources": {"requests": requests}}]}});
            PodInfo::new(&from_value(object).unwrap())
        };
        let check =
            |requests: serde_json::Value, node: &NodeInfo, expected: &[&str], hopeless: bool| {
                let fit = Fit {
                    scoring: crate::config::Args::default().fit,
                    ignored: vec![],
                    ignored_groups: vec!["ignored.com".into()],
                    claims: None,
                };
                let result = fit.filter(&CycleState::default(), &pod(requests), node);
                match result {
                    Ok(()) => assert!(expected.is_empty()),
                    Err(rejection) => assert_eq!(
                        (rejection.reasons, rejection.unresolvable),
                        (expected.iter().map(|one| one.to_string().into()).collect(), hopeless)
                    ),
                }
            };
        check(json!({"cpu": "1"}), &node, &[], false);
        check(
            json!({"cpu": "2", "memory": "2Gi"}),
            &node,
            &["Insufficient cpu", "Insufficient memory"],
            true,
        );
        check(json!({"ignored.com/gpu": "2"}), &node, &[], false);
        check(json!({"example.com/gpu": "2"}), &node, &["Insufficient example.com/gpu"], true);
        node.add(Arc::new(pod(json!({"cpu": "600m"}))));
        check(json!({"cpu": "500m"}), &node, &["Too many pods", "Insufficient cpu"], false);
    }
}
