//! Which pods a DaemonSet starts and stops, and its status. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::node_selectors::selects;
use api::taints::tolerates;
use client::{ObjectKey, Projection};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, DaemonSetStatus};
use k8s_openapi::api::core::v1::{
    Affinity, Node, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod,
    PodSpec, Toleration,
};
use machinery::ObjectMeta;

use super::revision;
use crate::deployment::scaled;
use crate::owner;
use crate::pod::{Availability, Facts, Phase};
use crate::replicaset::{pod_from, some_if_positive};

const GENERATION_LABEL: &str = "pod-template-generation";
const GENERATION_ANNOTATION: &str = "deprecated.daemonset.template.generation";

pub struct Observed<'a> {
    pub set: &'a DaemonSet,
    pub pods: &'a [Arc<Facts>],
    pub nodes: &'a [Arc<Node>],
    /// The hash of the current template.
    pub hash: &'a str,
    pub now: Timestamp,
}

#[derive(Debug, Default, PartialEq)]
pub struct Plan {
    /// Names of nodes.
    pub create: Vec<String>,
    pub delete: Vec<ObjectKey>,
    /// For events.
    pub failed: Vec<String>,
}

pub struct NewStatus {
    pub status: DaemonSetStatus,
    pub recheck: Option<Duration>,
}

pub fn plan(observed: &Observed) -> (Plan, NewStatus) {
    let mut plan = Plan::default();
    let by_node = by_node(observed.pods);
    let demands = Demands::of(observed.set);
    let fitting: Fitting = observed.nodes.iter().map(|node| (&**node, demands.fit(node))).collect();
    for (node, fits) in &fitting {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let here = by_node.get(name).map(Vec::as_slice).unwrap_or_default();
        visit(observed, *fits, name, here, &mut plan);
    }
    // Pods that wait for a node that is gone.
    let known: BTreeSet<_> =
        observed.nodes.iter().filter_map(|node| node.metadata.name.as_deref()).collect();
    for (node, pods) in by_node.iter().filter(|(node, _)| !known.contains(**node)) {
        let unbound = pods.iter().filter(|pod| pod.node.is_empty() && !pod.deleting);
        tracing::trace!(node, "a daemon pod waits for a node that is gone");
        plan.delete.extend(unbound.map(|pod| pod.key.clone()));
    }
    if plan.create.is_empty() && plan.delete.is_empty() {
        update(observed, &fitting, &by_node, &mut plan);
    }
    let status = status(observed, &fitting, &by_node);
    (plan, status)
}

/// Nodes, with what [`Demands::fit`] says of each.
type Fitting<'a> = Vec<(&'a Node, (bool, bool))>;
type ByNode<'a> = BTreeMap<&'a str, Vec<&'a Arc<Facts>>>;

fn by_node(pods: &[Arc<Facts>]) -> ByNode<'_> {
    let mut all: ByNode = BTreeMap::new();
    for pod in pods {
        if let Some(node) = pod.place() {
            all.entry(node).or_default().push(pod);
        }
    }
    all
}

/// Missing pods are created, surplus, failed and misplaced ones deleted.
fn visit(
    observed: &Observed,
    (should_run, should_stay): (bool, bool),
    name: &str,
    here: &[&Arc<Facts>],
    plan: &mut Plan,
) {
    let live: Vec<_> = here.iter().filter(|pod| !pod.deleting).collect();
    if should_run && here.is_empty() {
        return plan.create.push(name.to_owned());
    }
    if !should_stay {
        plan.delete.extend(live.iter().map(|pod| pod.key.clone()));
        return;
    }
    let mut kept = vec![];
    for pod in live {
        match pod.phase {
            Phase::Failed => {
                let key = pod.key.clone();
                plan.failed.push(format!(
                    "Found failed daemon pod {key} on node {name}, will try to kill it"
                ));
                plan.delete.push(key);
            }
            Phase::Succeeded => plan.delete.push(pod.key.clone()),
            _ => kept.push(*pod),
        }
    }
    // The oldest stays; with a surge, the oldest of this revision and the oldest of all others.
    kept.sort_by_key(|pod| pod.created);
    let surges = surge(observed.set) > 0;
    let mut stay = BTreeSet::new();
    let surplus = kept.iter().filter(|pod| !stay.insert(surges && is_current(pod, observed.hash)));
    plan.delete.extend(surplus.map(|pod| pod.key.clone()));
}

/// The demands of a set's pods on a node: made once, asked for each node.
pub struct Demands {
    node_selector: BTreeMap<String, String>,
    required: Option<NodeSelector>,
    tolerations: Vec<Toleration>,
}

impl Projection<DaemonSet> for Demands {
    fn of(set: &DaemonSet) -> Self {
        let spec = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let affinity = spec.and_then(|spec| spec.affinity.as_ref()?.node_affinity.as_ref());
        let required = affinity
            .and_then(|one| one.required_during_scheduling_ignored_during_execution.clone());
        let spec = pod_for(set, "", "").spec.unwrap_or_default();
        Self {
            node_selector: spec.node_selector.unwrap_or_default(),
            required,
            tolerations: spec.tolerations.unwrap_or_default(),
        }
    }
}

impl Demands {
    /// Whether a daemon pod should start on the node, and whether one that runs may stay.
    pub fn fit(&self, node: &Node) -> (bool, bool) {
        let empty = BTreeMap::new();
        let labels = node.metadata.labels.as_ref().unwrap_or(&empty);
        let name = node.metadata.name.as_deref().unwrap_or_default();
        if !selects(&self.node_selector, self.required.as_ref(), name, labels) {
            return (false, false);
        }
        let untolerated = |effects: &[&str]| {
            let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
            let mut hard = taints.filter(|taint| effects.contains(&taint.effect.as_str()));
            hard.any(|taint| !self.tolerations.iter().any(|one| tolerates(one, taint)))
        };
        (!untolerated(&["NoSchedule", "NoExecute"]), !untolerated(&["NoExecute"]))
    }
}

fn rolling(set: &DaemonSet) -> Option<k8s_openapi::api::apps::v1::RollingUpdateDaemonSet> {
    let strategy =
        set.spec.as_ref().and_then(|spec| spec.update_strategy.clone()).unwrap_or_default();
    let rolling = strategy.type_.as_deref().unwrap_or("RollingUpdate") == "RollingUpdate";
    rolling.then(|| strategy.rolling_update.unwrap_or_default())
}

fn surge(set: &DaemonSet) -> i32 {
    let value = rolling(set).and_then(|rolling| rolling.max_surge);
    value.map_or(0, |value| scaled(Some(&value), 100, true))
}

/// Replaces pods of old templates, within what may be missing or surplus.
fn update(observed: &Observed, fitting: &Fitting, by_node: &ByNode, plan: &mut Plan) {
    let Some(rolling) = rolling(observed.set) else {
        return;
    };
    let wanted: Vec<_> = fitting.iter().filter(|(_, fits)| fits.0).map(|(node, _)| node).collect();
    let count = wanted.len() as i32;
    let max_surge = rolling.max_surge.as_ref().map_or(0, |value| scaled(Some(value), count, true));
    let unavailable_default = if max_surge > 0 { 0 } else { 1 };
    let max_unavailable = rolling
        .max_unavailable
        .as_ref()
        .map_or(unavailable_default, |value| scaled(Some(value), count, true));
    let (mut unavailable, mut surging) = (0, 0);
    let (mut spare, mut serving, mut unsurged) = (vec![], vec![], vec![]);
    for node in wanted {
        let name = node.metadata.name.clone().unwrap_or_default();
        let here = by_node.get(name.as_str()).cloned().unwrap_or_default();
        let live: Vec<_> = here.iter().copied().filter(|pod| !pod.deleting).collect();
        let old = live.iter().find(|pod| !is_current(pod, observed.hash));
        let new = live.iter().find(|pod| is_current(pod, observed.hash));
        let available = |pod: &&&Arc<Facts>| is_available(observed, pod) == Availability::Yes;
        let serves = old.filter(available).is_some() || new.filter(available).is_some();
        unavailable += i32::from(!serves);
        surging += i32::from(old.is_some() && new.is_some());
        if let Some(old) = old {
            let key = old.key.clone();
            match new {
                // The new one serves: the old one may go.
                Some(new) if available(&new) => spare.push(key),
                Some(_) => {}
                None if !available(&old) => spare.push(key),
                None => {
                    serving.push(key);
                    unsurged.push(name);
                }
            }
        }
    }
    plan.delete.extend(spare);
    if max_surge > 0 {
        let room = (max_surge - surging).max(0) as usize;
        plan.create.extend(unsurged.into_iter().take(room));
    } else {
        let room = (max_unavailable - unavailable).max(0) as usize;
        plan.delete.extend(serving.into_iter().take(room));
    }
}

/// Whether a pod runs the template with this hash.
fn is_current(pod: &Facts, hash: &str) -> bool {
    pod.revision.as_deref() == Some(hash)
}

fn min_ready(set: &DaemonSet) -> Duration {
    let seconds = set.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0);
    Duration::from_secs(seconds.max(0) as u64)
}

fn is_available(observed: &Observed, pod: &Facts) -> Availability {
    pod.ready.availability(min_ready(observed.set), observed.now)
}

fn status(observed: &Observed, fitting: &Fitting, by_node: &ByNode) -> NewStatus {
    let old = observed.set.status.clone().unwrap_or_default();
    let mut status = DaemonSetStatus {
        observed_generation: observed.set.metadata.generation,
        collision_count: old.collision_count,
        conditions: old.conditions,
        ..Default::default()
    };
    let (mut available, mut updated) = (0, 0);
    let mut recheck: Option<Duration> = None;
    for (node, (should_run, _)) in fitting {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let here = by_node.get(name).map(Vec::as_slice).unwrap_or_default();
        if !should_run {
            status.number_misscheduled += i32::from(!here.is_empty());
            continue;
        }
        status.desired_number_scheduled += 1;
        // If a node has several pods, the best one counts.
        let mut best = here.iter().collect::<Vec<_>>();
        best.sort_by_key(|pod| (!pod.is_ready(), pod.created));
        let Some(pod) = best.first() else {
            continue;
        };
        status.current_number_scheduled += 1;
        status.number_ready += i32::from(pod.is_ready());
        match is_available(observed, pod) {
            Availability::Yes => available += 1,
            Availability::No => {}
            Availability::In(rest) => recheck = Some(recheck.map_or(rest, |known| known.min(rest))),
        }
        updated += i32::from(here.iter().any(|pod| is_current(pod, observed.hash)));
    }
    status.number_available = some_if_positive(available);
    status.number_unavailable = some_if_positive(status.desired_number_scheduled - available);
    status.updated_number_scheduled = some_if_positive(updated);
    NewStatus { status, recheck }
}

/// The pod for one node: pinned to it, and tolerating what nodes go through.
pub fn pod_for(set: &DaemonSet, hash: &str, node: &str) -> Pod {
    let template = set.spec.as_ref().map(|spec| &spec.template);
    let mut pod = pod_from(template, &set.metadata, owner::reference(set));
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(revision::HASH.into(), hash.into());
    let generation = template_generation(&set.metadata);
    labels.extend(generation.map(|generation| (GENERATION_LABEL.to_owned(), generation)));
    let spec = pod.spec.get_or_insert_default();
    pin(spec, node);
    let host_network = spec.host_network == Some(true);
    let tolerations = spec.tolerations.get_or_insert_default();
    for (key, effect) in daemon_tolerations(host_network) {
        let toleration = Toleration {
            key: Some(key.into()),
            operator: Some("Exists".into()),
            effect: Some(effect.into()),
            ..Default::default()
        };
        if !tolerations.contains(&toleration) {
            tolerations.push(toleration);
        }
    }
    pod
}

fn template_generation(meta: &ObjectMeta) -> Option<String> {
    meta.annotations.as_ref()?.get(GENERATION_ANNOTATION).cloned()
}

fn daemon_tolerations(host_network: bool) -> Vec<(&'static str, &'static str)> {
    let mut all = vec![
        ("node.kubernetes.io/not-ready", "NoExecute"),
        ("node.kubernetes.io/unreachable", "NoExecute"),
        ("node.kubernetes.io/disk-pressure", "NoSchedule"),
        ("node.kubernetes.io/memory-pressure", "NoSchedule"),
        ("node.kubernetes.io/pid-pressure", "NoSchedule"),
        ("node.kubernetes.io/unschedulable", "NoSchedule"),
    ];
    if host_network {
        all.push(("node.kubernetes.io/network-unavailable", "NoSchedule"));
    }
    all
}

/// Replaces required node affinity by the node's name; the set's own was checked before.
fn pin(spec: &mut PodSpec, node: &str) {
    let affinity: &mut Affinity = spec.affinity.get_or_insert_default();
    let node_affinity: &mut NodeAffinity = affinity.node_affinity.get_or_insert_default();
    let requirement = NodeSelectorRequirement {
        key: "metadata.name".into(),
        operator: "In".into(),
        values: Some(vec![node.into()]),
    };
    let selector = node_affinity
        .required_during_scheduling_ignored_during_execution
        .get_or_insert_with(NodeSelector::default);
    selector.node_selector_terms =
        vec![NodeSelectorTerm { match_fields: Some(vec![requirement]), match_expressions: None }];
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn set() -> DaemonSet {
        from_value(json!({
            "metadata": {"name": "ds", "namespace": "default", "uid": "ds"},
            "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"nodeSelector": {"role": "x"}, "containers": [{"name": "c"}]}}},
        }))
        .unwrap()
    }

    fn node(name: &str, role: &str, taints: Value) -> Arc<Node> {
        let value = json!({"metadata": {"name": name, "labels": {"role": role}}, "spec": {"taints": taints}});
        Arc::new(from_value(value).unwrap())
    }

    fn pod(node: &str, name: &str, hash: &str, phase: &str) -> Arc<Facts> {
        let mut pod = pod_for(&set(), hash, node);
        pod.metadata.name = Some(name.into());
        let status = json!({"phase": phase, "conditions": [{"type": "Ready", "status": "True"}]});
        pod.status = Some(from_value(status).unwrap());
        Arc::new(Facts::of(&pod))
    }

    #[test]
    fn every_fitting_node_has_one_current_pod() {
        let set = set();
        let check = |nodes: &[Arc<Node>], pods: &[Arc<Facts>], create: &[&str], delete: &[&str]| {
            let (plan, _) =
                plan(&Observed { set: &set, pods, nodes, hash: "new", now: Timestamp::UNIX_EPOCH });
            let deleted: Vec<_> = plan.delete.iter().map(|key| key.name.to_string()).collect();
            assert_eq!(
                (plan.create, deleted),
                (
                    create.iter().map(|one| one.to_string()).collect(),
                    delete.iter().map(|one| one.to_string()).collect()
                )
            );
        };
        let none = json!([]);
        let (a, b) = (node("a", "x", none.clone()), node("b", "x", none.clone()));
        let other = node("o", "y", none);
        let tainted = node("t", "x", json!([{"key": "k", "effect": "NoSchedule"}]));
        let silent = node(
            "s",
            "x",
            json!([{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]),
        );
        check(&[a.clone(), other.clone(), tainted.clone(), silent], &[], &["a", "s"], &[]);
        check(std::slice::from_ref(&a), &[pod("a", "1", "new", "Running")], &[], &[]);
        check(std::slice::from_ref(&a), &[pod("a", "1", "new", "Failed")], &[], &["1"]);
        check(&[other], &[pod("o", "1", "new", "Running")], &[], &["1"]);
        check(&[tainted], &[pod("t", "1", "new", "Running")], &[], &[]);
        // One at a time is updated.
        let old = [pod("a", "1", "old", "Running"), pod("b", "2", "old", "Running")];
        check(&[a, b], &old, &[], &["1"]);
    }

    /// Found by the simulation: a set that adopted two pods of others on a node made a third one and deleted it, for
    /// ever.
    #[test]
    fn a_surge_leaves_one_old_pod_and_one_new_pod() {
        let mut set = set();
        let strategy =
            json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}});
        set.spec.as_mut().unwrap().update_strategy = Some(from_value(strategy).unwrap());
        let nodes = [node("a", "x", json!([]))];
        let check = |pods: &[Arc<Facts>], create: usize, delete: &[&str]| {
            let now = Timestamp::UNIX_EPOCH;
            let (plan, _) = plan(&Observed { set: &set, pods, nodes: &nodes, hash: "new", now });
            let deleted: Vec<_> = plan.delete.iter().map(|key| key.name.to_string()).collect();
            assert_eq!(
                (plan.create.len(), deleted),
                (create, delete.iter().map(|one| one.to_string()).collect())
            );
        };
        let of = |name: &str, hash: &str| pod("a", name, hash, "Running");
        check(&[of("1", "old"), of("2", "older")], 0, &["2"]);
        check(&[of("1", "old"), of("2", "older"), of("3", "new")], 0, &["2"]);
        check(&[of("1", "old")], 1, &[]);
        check(&[of("1", "old"), of("3", "new")], 0, &["1"]);
    }
}
