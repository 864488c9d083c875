//! A node must have room for what a pod asks; emptier nodes score higher (LeastAllocated).

use std::sync::Arc;

use crate::cluster::Cluster;
use crate::framework::{CycleState, Filter, MAX_SCORE, Points, Rejection, Row, Score};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "NodeResourcesFit",
    weight: 1,
    build: |_| Points {
        filter: Some(Arc::new(Fit)),
        score: Some(Arc::new(Fit)),
        ..Default::default()
    },
    helps: super::room_appears,
};

struct Fit;

impl Filter for Fit {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let short = shortages(pod, node);
        if short.is_empty() {
            return Ok(());
        }
        // More than the empty node has: no pod's going would help.
        let hopeless = short.iter().any(|short| short.asked > short.capacity);
        let reasons = short.into_iter().map(|short| short.reason).collect();
        Err(Rejection { reasons, unresolvable: hopeless })
    }
}

struct Shortage {
    reason: String,
    asked: i64,
    capacity: i64,
}

fn shortages(pod: &PodInfo, node: &NodeInfo) -> Vec<Shortage> {
    let (all, used, asked) = (&node.allocatable, &node.requested, &pod.requests);
    let mut short = vec![];
    if node.pods.len() as i64 + 1 > all.pods {
        short.push(Shortage { reason: "Too many pods".into(), asked: 1, capacity: all.pods });
    }
    let mut check = |name: &str, asked: i64, used: i64, capacity: i64| {
        if asked > 0 && asked > capacity - used {
            short.push(Shortage { reason: format!("Insufficient {name}"), asked, capacity });
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
        let parts = [
            (node.allocatable.milli_cpu, node.nonzero.milli_cpu + pod.nonzero.milli_cpu),
            (node.allocatable.memory, node.nonzero.memory + pod.nonzero.memory),
        ];
        let known = parts.iter().filter(|(capacity, _)| *capacity > 0);
        let free = |(capacity, asked): &(i64, i64)| {
            if asked > capacity { 0 } else { (capacity - asked) * MAX_SCORE / capacity }
        };
        let count = known.clone().count() as i64;
        if count == 0 { 0 } else { known.map(free).sum::<i64>() / count }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

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
                let result = Fit.filter(&CycleState::default(), &pod(requests), node);
                match result {
                    Ok(()) => assert!(expected.is_empty()),
                    Err(rejection) => assert_eq!(
                        (rejection.reasons, rejection.unresolvable),
                        (expected.iter().map(|one| one.to_string()).collect(), hopeless)
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
        check(json!({"example.com/gpu": "2"}), &node, &["Insufficient example.com/gpu"], true);
        node.add(Arc::new(pod(json!({"cpu": "600m"}))));
        check(json!({"cpu": "500m"}), &node, &["Too many pods", "Insufficient cpu"], false);
    }
}
