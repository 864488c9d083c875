//! Scores by how much of a node is taken. Pure.
//!
//! Upstream: `resource_allocation.go`, `least_allocated.go`, `most_allocated.go`,
//! `requested_to_capacity_ratio.go`, `balanced_allocation.go`.

use crate::config::{ResourceWeight, Scoring, Strategy};
use crate::framework::MAX_SCORE;
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::resources::Resources;

/// The highest score of a shape's point.
const MAX_SHAPE_SCORE: i64 = 10;

/// The amounts of a resource: used with the pod, used before, and allocatable.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Taken {
    with_pod: i64,
    before: i64,
    capacity: i64,
}

fn of(all: &Resources, name: &str) -> i64 {
    match name {
        "cpu" => all.milli_cpu,
        "memory" => all.memory,
        "ephemeral-storage" => all.ephemeral_storage,
        _ => all.scalar.get(name).copied().unwrap_or(0),
    }
}

/// `None` for what the node has none of, and for what the pod does not ask for.
fn taken(name: &str, pod: &PodInfo, node: &NodeInfo, real: bool) -> Option<Taken> {
    let capacity = of(&node.allocatable, name);
    let is_basic = matches!(name, "cpu" | "memory");
    let (asked, used) = match real || !is_basic {
        true => (of(&pod.requests, name), of(&node.requested, name)),
        false => (of(&pod.nonzero, name), of(&node.nonzero, name)),
    };
    let is_scalar = !is_basic && name != "ephemeral-storage";
    if capacity == 0 || (is_scalar && asked == 0) {
        return None;
    }
    Some(Taken { with_pod: used + asked, before: used, capacity })
}

/// NodeResourcesFit's score.
pub fn score(scoring: &Scoring, pod: &PodInfo, node: &NodeInfo) -> i64 {
    let (mut total, mut weights) = (0, 0);
    for resource in &scoring.resources {
        let Some(taken) = taken(&resource.name, pod, node, false) else { continue };
        let score = match &scoring.strategy {
            Strategy::LeastAllocated if taken.with_pod > taken.capacity => 0,
            Strategy::LeastAllocated => {
                (taken.capacity - taken.with_pod) * MAX_SCORE / taken.capacity
            }
            Strategy::MostAllocated => {
                taken.with_pod.min(taken.capacity) * MAX_SCORE / taken.capacity
            }
            Strategy::RequestedToCapacityRatio(shape) => {
                let share = match taken.with_pod > taken.capacity {
                    true => 100,
                    false => taken.with_pod * 100 / taken.capacity,
                };
                let score = along(shape, share);
                // A resource without a score has no weight.
                if score == 0 {
                    continue;
                }
                score
            }
        };
        total += score * resource.weight;
        weights += resource.weight;
    }
    match (weights, &scoring.strategy) {
        (0, _) => 0,
        (_, Strategy::RequestedToCapacityRatio(_)) => {
            (total as f64 / weights as f64).round() as i64
        }
        _ => total / weights,
    }
}

/// The value at `share` of the line through the points, which are sorted.
fn along(shape: &[(i64, i64)], share: i64) -> i64 {
    let scaled = |score: i64| score * (MAX_SCORE / MAX_SHAPE_SCORE);
    for (index, (utilization, score)) in shape.iter().enumerate() {
        if share <= *utilization {
            let Some((before, from)) = index.checked_sub(1).map(|at| shape[at]) else {
                return scaled(*score);
            };
            let (from, to) = (scaled(from), scaled(*score));
            return from + (to - from) * (share - before) / (utilization - before);
        }
    }
    shape.last().map_or(0, |(_, score)| scaled(*score))
}

/// How much the pod balances the node's used resources: 75 if nothing changes.
pub fn balance(resources: &[ResourceWeight], pod: &PodInfo, node: &NodeInfo) -> i64 {
    let all = resources.iter().filter_map(|one| taken(&one.name, pod, node, true));
    let with_pod = evenness(all.clone().map(|one| (one.with_pod, one.capacity)));
    let before = evenness(all.map(|one| (one.before, one.capacity)));
    MAX_SCORE / 2 + (MAX_SCORE / 2 + with_pod - before) / 2
}

fn evenness(shares: impl Iterator<Item = (i64, i64)> + Clone) -> i64 {
    let shares = shares.map(|(used, capacity)| (used as f64 / capacity as f64).min(1.0));
    let mut first = shares.clone();
    let deviation = match (first.next(), first.next(), first.next()) {
        (None, ..) | (_, None, _) => 0.0,
        (Some(one), Some(other), None) => ((one - other) / 2.0).abs(),
        _ => {
            let count = shares.clone().count() as f64;
            let mean = shares.clone().sum::<f64>() / count;
            (shares.map(|share| (share - mean).powi(2)).sum::<f64>() / count).sqrt()
        }
    };
    ((1.0 - deviation) * MAX_SCORE as f64) as i64
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn pod(requests: Value) -> PodInfo {
        let object = json!({"metadata": {"name": "p", "uid": "p"}, "spec": {"containers": [
            {"name": "c", "resources": {"requests": requests}}]}});
        PodInfo::new(&from_value(object).unwrap())
    }

    fn node(used: Value) -> NodeInfo {
        let mut node = NodeInfo::named("n");
        let object = json!({"metadata": {"name": "n"}, "status": {"allocatable":
            {"cpu": "10", "memory": "10Gi", "pods": "9", "example.com/gpu": "4"}}});
        node.update(&from_value(object).unwrap());
        node.add(std::sync::Arc::new(PodInfo { uid: "other".into(), ..pod(used) }));
        node
    }

    fn weigh(all: &[(&str, i64)]) -> Vec<ResourceWeight> {
        let one =
            |(name, weight): &(&str, i64)| ResourceWeight { name: (*name).into(), weight: *weight };
        all.iter().map(one).collect()
    }

    #[test]
    fn strategies_score_as_upstreams() {
        let check = |strategy: Strategy, resources: &[(&str, i64)], expected: i64| {
            let scoring = Scoring { strategy, resources: weigh(resources) };
            let node = node(json!({"cpu": "3", "memory": "5Gi", "example.com/gpu": "1"}));
            let pod = pod(json!({"cpu": "3", "memory": "0", "example.com/gpu": "1"}));
            assert_eq!(score(&scoring, &pod, &node), expected, "{scoring:?}");
        };
        let both = [("cpu", 1), ("memory", 1)];
        check(Strategy::LeastAllocated, &both, 45);
        check(Strategy::MostAllocated, &both, 55);
        check(Strategy::MostAllocated, &[("cpu", 3), ("memory", 1)], 57);
        check(Strategy::MostAllocated, &[("example.com/gpu", 1)], 50);
        check(Strategy::MostAllocated, &[("example.com/other", 1)], 0);
        let rising = Strategy::RequestedToCapacityRatio(vec![(0, 0), (100, 10)]);
        check(rising.clone(), &both, 55);
        check(rising, &[("example.com/gpu", 1)], 50);
        let bent = Strategy::RequestedToCapacityRatio(vec![(0, 10), (50, 10), (100, 0)]);
        check(bent, &[("cpu", 1)], 80);
    }

    #[test]
    fn balance_is_what_the_pod_changes() {
        let check = |used: Value, asked: Value, expected: i64| {
            let resources = weigh(&[("cpu", 1), ("memory", 1)]);
            assert_eq!(balance(&resources, &pod(asked), &node(used)), expected);
        };
        check(json!({"cpu": "5", "memory": "5Gi"}), json!({"cpu": "1", "memory": "1Gi"}), 75);
        check(json!({"cpu": "8", "memory": "0"}), json!({"memory": "8Gi"}), 95);
        check(json!({"cpu": "0", "memory": "0"}), json!({"cpu": "10"}), 50);
    }
}
