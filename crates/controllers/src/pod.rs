//! The meaning of pods' fields. Pure. Upstream: `pkg/api/v1/pod` and `pkg/controller/controller_utils.go`.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use client::{ObjectKey, Projection};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use release::features::{self, Feature};

/// The condition of a pod that is to go for the sake of others.
pub const DISRUPTION: &str = "DisruptionTarget";
/// The label that tells which template a pod was made of.
pub const REVISION: &str = "controller-revision-hash";

pub fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

pub fn is_finished(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

pub fn is_deleting(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// Counts for a controller: neither finished nor going.
pub fn is_active(pod: &Pod) -> bool {
    !is_finished(pod) && !is_deleting(pod)
}

/// Going, but not gone: a finished pod no longer takes up room.
pub fn is_terminating(pod: &Pod) -> bool {
    !is_finished(pod) && is_deleting(pod)
}

pub fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == kind)
}

pub fn is_ready(pod: &Pod) -> bool {
    condition(pod, "Ready").is_some_and(|ready| ready.status == "True")
}

pub fn node_name(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default()
}

/// Whether a ready pod has been so for `min_ready`.
pub fn availability(pod: &Pod, min_ready: Duration, now: Timestamp) -> Availability {
    Ready::of(pod).availability(min_ready, now)
}

/// The condition Ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    No,
    /// Since when, if the condition says so.
    Since(Option<Timestamp>),
}

impl Ready {
    pub fn of(pod: &Pod) -> Self {
        match condition(pod, "Ready").filter(|ready| ready.status == "True") {
            Some(ready) => Self::Since(ready.last_transition_time.as_ref().map(|time| time.0)),
            None => Self::No,
        }
    }

    pub fn availability(self, min_ready: Duration, now: Timestamp) -> Availability {
        let since = match self {
            Self::No => return Availability::No,
            Self::Since(_) if min_ready.is_zero() => return Availability::Yes,
            Self::Since(None) => return Availability::No,
            Self::Since(Some(since)) => since,
        };
        let passed = Duration::try_from(now.duration_since(since)).unwrap_or_default();
        match min_ready.checked_sub(passed) {
            None | Some(Duration::ZERO) => Availability::Yes,
            Some(rest) => Availability::In(rest),
        }
    }

    fn since(self) -> Option<Timestamp> {
        match self {
            Self::No => None,
            Self::Since(since) => since,
        }
    }
}

/// What those know of a pod who count pods and choose among them: a ReplicaSet of 500 pods is looked at
/// for each change of one of them, without decoding the others.
#[derive(Clone, Debug)]
pub struct Facts {
    pub key: ObjectKey,
    pub uid: Box<str>,
    pub ready: Ready,
    /// Neither finished nor going.
    pub active: bool,
    /// Going, but not gone.
    pub terminating: bool,
    /// Has a deletion timestamp.
    pub deleting: bool,
    pub phase: Phase,
    /// Empty until the pod is bound.
    pub node: Box<str>,
    /// The node that a pod without one is meant for, if it is meant for one.
    pub meant_for: Option<Box<str>>,
    /// Has the condition DisruptionTarget.
    pub disrupted: bool,
    /// The template's, of DaemonSets and StatefulSets.
    pub revision: Option<Box<str>>,
    pub created: Option<Timestamp>,
    deletion_cost: i32,
    restarts: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Pending,
    Unknown,
    Running,
    Succeeded,
    Failed,
}

impl Phase {
    pub fn of(pod: &Pod) -> Self {
        match phase(pod) {
            "Pending" | "" => Self::Pending,
            "Unknown" => Self::Unknown,
            "Succeeded" => Self::Succeeded,
            "Failed" => Self::Failed,
            _ => Self::Running,
        }
    }

    /// The lower goes first.
    fn rank(self) -> u8 {
        match self {
            Self::Pending => 0,
            Self::Unknown => 1,
            Self::Running | Self::Succeeded | Self::Failed => 2,
        }
    }
}

/// The node that a pod's required affinity names.
fn meant_for(pod: &Pod) -> Option<Box<str>> {
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity.required_during_scheduling_ignored_during_execution.as_ref()?;
    let mut fields =
        required.node_selector_terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    let pinned = fields.find(|one| one.key == "metadata.name" && one.operator == "In")?;
    pinned.values.as_ref()?.first().map(|name| name.as_str().into())
}

impl Projection<Pod> for Facts {
    fn of(pod: &Pod) -> Self {
        let labels = pod.metadata.labels.as_ref();
        Self {
            key: ObjectKey::of(&pod.metadata),
            uid: pod.metadata.uid.as_deref().unwrap_or_default().into(),
            ready: Ready::of(pod),
            active: is_active(pod),
            terminating: is_terminating(pod),
            deleting: is_deleting(pod),
            disrupted: condition(pod, DISRUPTION).is_some(),
            phase: Phase::of(pod),
            node: node_name(pod).into(),
            meant_for: meant_for(pod).filter(|_| node_name(pod).is_empty()),
            revision: labels.and_then(|all| all.get(REVISION)).map(|hash| hash.as_str().into()),
            deletion_cost: deletion_cost(pod),
            restarts: restarts(pod),
            created: pod.metadata.creation_timestamp.as_ref().map(|time| time.0),
        }
    }
}

impl Facts {
    pub fn is_ready(&self) -> bool {
        self.ready != Ready::No
    }

    /// The node that the pod is on, or is meant for.
    pub fn place(&self) -> Option<&str> {
        match &*self.node {
            "" => self.meant_for.as_deref(),
            node => Some(node),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    Yes,
    No,
    /// Ready, and available after this long.
    In(Duration),
}

/// The `surplus` pods that a scale-down deletes. `related` are all active pods of the same
/// application (the other ReplicaSets of a Deployment included): of two equal pods goes the one
/// whose node has more of them. Pure. Upstream: `ActivePodsWithRanks.Less`.
pub fn choose_victims(
    pods: &[Arc<Facts>],
    related: &[Arc<Facts>],
    surplus: usize,
    now: Timestamp,
) -> Vec<Arc<Facts>> {
    if surplus >= pods.len() {
        return pods.to_vec();
    }
    let mut on_node: HashMap<&str, usize> = HashMap::new();
    for pod in related.iter().filter(|pod| pod.active) {
        *on_node.entry(&pod.node).or_default() += 1;
    }
    let rank = |pod: &Facts| on_node.get(&*pod.node).copied().unwrap_or(0);
    let mut sorted = pods.to_vec();
    sorted.sort_by(|a, b| dispensability(a, b, rank(a), rank(b), now));
    sorted.truncate(surplus);
    sorted
}

/// As [`choose_victims`], for whole pods that are unrelated to others.
pub fn choose_among(pods: &[Arc<Pod>], surplus: usize, now: Timestamp) -> Vec<Arc<Pod>> {
    let facts: Vec<_> = pods.iter().map(|pod| Arc::new(Facts::of(pod))).collect();
    let victims = choose_victims(&facts, &[], surplus, now);
    let by_uid: HashMap<&str, &Arc<Pod>> =
        facts.iter().zip(pods).map(|(facts, pod)| (&*facts.uid, pod)).collect();
    victims.iter().filter_map(|victim| by_uid.get(&*victim.uid).copied().cloned()).collect()
}

/// `Less` means that `a` goes first.
fn dispensability(
    a: &Facts,
    b: &Facts,
    rank_a: usize,
    rank_b: usize,
    now: Timestamp,
) -> std::cmp::Ordering {
    let is_assigned = |pod: &Facts| !pod.node.is_empty();
    let is_ready = |pod: &Facts| pod.is_ready();
    is_assigned(a)
        .cmp(&is_assigned(b))
        .then(a.phase.rank().cmp(&b.phase.rank()))
        .then(is_ready(a).cmp(&is_ready(b)))
        .then(a.deletion_cost.cmp(&b.deletion_cost))
        .then(rank_b.cmp(&rank_a))
        .then_with(|| younger(a.ready.since(), b.ready.since(), a, b, now))
        .then(b.restarts.cmp(&a.restarts))
        .then_with(|| younger(a.created, b.created, a, b, now))
}

fn deletion_cost(pod: &Pod) -> i32 {
    if !features::enabled(Feature::PodDeletionCost) {
        return 0;
    }
    let annotations = pod.metadata.annotations.as_ref();
    let cost = annotations.and_then(|all| all.get("controller.kubernetes.io/pod-deletion-cost"));
    cost.and_then(|cost| cost.parse().ok()).unwrap_or(0)
}

fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.map(|status| status.restart_count).max().unwrap_or(0)
}

/// The younger goes first, by orders of magnitude: pods of about one age go in the order of their
/// uids, which is random but stable.
fn younger(
    a: Option<Timestamp>,
    b: Option<Timestamp>,
    pod_a: &Facts,
    pod_b: &Facts,
    now: Timestamp,
) -> std::cmp::Ordering {
    if a == b {
        return std::cmp::Ordering::Equal;
    }
    let magnitude = |since: Option<Timestamp>| {
        let age = since.map_or(i128::MAX, |since| now.duration_since(since).as_nanos());
        if age > 0 { i64::from(age.ilog2()) } else { -1 }
    };
    magnitude(a).cmp(&magnitude(b)).then_with(|| pod_a.uid.cmp(&pod_b.uid))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{from_value, json};

    use super::*;

    fn pod(name: &str, node: &str, phase: &str, ready: bool, age: i64, cost: &str) -> Arc<Pod> {
        let at = Timestamp::from_second(1_000_000 - age).unwrap().to_string();
        let status = if ready { "True" } else { "False" };
        let value = json!({
            "metadata": {"name": name, "uid": name, "creationTimestamp": at,
                "annotations": {"controller.kubernetes.io/pod-deletion-cost": cost}},
            "spec": {"containers": [], "nodeName": node},
            "status": {"phase": phase, "conditions": [
                {"type": "Ready", "status": status, "lastTransitionTime": at}]},
        });
        Arc::new(from_value(value).unwrap())
    }

    #[test]
    fn the_least_useful_pods_go_first() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let facts = |pod: &Arc<Pod>| Arc::new(Facts::of(pod));
        let check = |first: Arc<Pod>, second: Arc<Pod>| {
            for order in [[facts(&first), facts(&second)], [facts(&second), facts(&first)]] {
                let gone = choose_victims(&order, &order, 1, now);
                assert_eq!(gone[0].key, ObjectKey::of(&first.metadata));
            }
        };
        let usual = || pod("z", "n", "Running", true, 1000, "0");
        check(pod("a", "", "Pending", false, 5000, "0"), usual());
        check(pod("a", "n", "Pending", false, 5000, "0"), usual());
        check(pod("a", "n", "Running", false, 5000, "0"), usual());
        check(pod("a", "n", "Running", true, 5000, "-1"), usual());
        check(pod("a", "n", "Running", true, 10, "0"), usual());
        check(pod("a", "n", "Running", true, 1001, "0"), usual());
        let crowd = [
            usual(),
            pod("y", "n", "Running", true, 1000, "0"),
            pod("a", "m", "Running", true, 10, "0"),
        ];
        let crowd = crowd.each_ref().map(facts);
        let gone = choose_victims(&crowd, &crowd, 1, now);
        assert_ne!(&*gone[0].key.name, "a", "a crowded node is relieved first");
    }

    #[test]
    fn a_pod_is_available_after_min_ready_seconds() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let pod = pod("a", "n", "Running", true, 10, "0");
        let ten = Duration::from_secs(10);
        assert_eq!(availability(&pod, ten, at(1_000_000)), Availability::Yes);
        assert_eq!(availability(&pod, ten, at(999_997)), Availability::In(Duration::from_secs(3)));
        assert_eq!(availability(&pod, Duration::ZERO, at(0)), Availability::Yes);
    }
}
