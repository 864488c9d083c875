//! A node must have room for what a pod asks; emptier nodes score higher, or fuller ones, by the
//! profile's strategy. What the node does not offer itself, but a class of devices stands for, is
//! DynamicResources' business.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::claims::Claims;
use crate::cluster::Cluster;
use crate::config::Scoring;
use crate::extended::CLASS_PREFIX;
use crate::framework::{
    ClusterEvent, CycleState, Filter, Next, Points, PreFilter, Rejection, Row, Score,
};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

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
        Points {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin.clone()),
            score: Some(plugin),
            ..Default::default()
        }
    },
    helps: |pod, event| match event {
        ClusterEvent::ClassChanged { name, is_new, resource } => {
            let asks = |name: &str| pod.requests.scalar.contains_key(name);
            *is_new && asks(&format!("{CLASS_PREFIX}{name}"))
                || resource.as_deref().is_some_and(asks)
        }
        event => super::room_appears(pod, event),
    },
};

struct Fit {
    scoring: Scoring,
    /// Extended resources that are an extender's business.
    ignored: Vec<String>,
    ignored_groups: Vec<String>,
    claims: Option<Claims>,
}

/// The resources of a pod that classes of devices stand for.
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
        let is_backed = |name: &String| backed.is_some_and(|backed| backed.0.contains(name));
        short.retain(|short| {
            let is_device = short.capacity == 0 && is_backed(&short.resource);
            !is_device && !self.ignores(&short.resource)
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

struct Shortage {
    /// Empty for room for one more pod.
    resource: String,
    reason: String,
    asked: i64,
    capacity: i64,
}

fn shortages(pod: &PodInfo, node: &NodeInfo) -> Vec<Shortage> {
    let (all, used, asked) = (&node.allocatable, &node.requested, &pod.requests);
    let mut short = vec![];
    if node.pods.len() as i64 + 1 > all.pods {
        let reason = "Too many pods".into();
        short.push(Shortage { resource: String::new(), reason, asked: 1, capacity: all.pods });
    }
    let mut check = |name: &str, asked: i64, used: i64, capacity: i64| {
        if asked > 0 && asked > capacity - used {
            let reason = format!("Insufficient {name}");
            short.push(Shortage { resource: name.into(), reason, asked, capacity });
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
        check(json!({"ignored.com/gpu": "2"}), &node, &[], false);
        check(json!({"example.com/gpu": "2"}), &node, &["Insufficient example.com/gpu"], true);
        node.add(Arc::new(pod(json!({"cpu": "600m"}))));
        check(json!({"cpu": "500m"}), &node, &["Too many pods", "Insufficient cpu"], false);
    }
}
