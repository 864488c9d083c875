//! Makes room for an important pod by removing less important ones.
//!
//! Upstream: `defaultpreemption`: on each node where removing pods may help, as few and as
//! unimportant victims as possible; then the node whose victims matter least.
//! Deviation: PodDisruptionBudgets are not weighed yet; victims are evicted all the same upstream
//! when there is no other choice.

use std::cmp::Reverse;
use std::sync::Arc;

use jiff::Timestamp;

use crate::cluster::Cluster;
use crate::framework::{Diagnosis, Framework, Points, PostFilter, PostFiltered, Row};
use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "DefaultPreemption",
    weight: 0,
    build: |_| Points { post_filter: Some(Arc::new(DefaultPreemption)), ..Default::default() },
    helps: super::never,
};

/// Upstream: at least 100 candidates, or a tenth of the nodes.
const MIN_CANDIDATES: usize = 100;

struct DefaultPreemption;

struct Candidate {
    node: String,
    victims: Vec<Arc<PodInfo>>,
}

impl PostFilter for DefaultPreemption {
    fn post_filter(
        &self,
        framework: &Framework,
        pod: &PodInfo,
        cluster: &Cluster,
        why: &Diagnosis,
    ) -> PostFiltered {
        let nothing = |message: String| PostFiltered { nominated: None, victims: vec![], message };
        if let Err(reason) = may_preempt(pod, cluster) {
            return nothing(format!("preemption: {reason}"));
        }
        let hopeful: Vec<_> = why.rejections.iter().filter(|(_, one)| !one.unresolvable).collect();
        let limit = MIN_CANDIDATES.max(why.nodes / 10);
        let mut candidates = vec![];
        for (name, _) in &hopeful {
            if let Some(node) = cluster.node(name)
                && let Some(victims) = victims_on(framework, pod, node, cluster)
            {
                candidates.push(Candidate { node: node.name.clone(), victims });
            }
            if candidates.len() >= limit {
                break;
            }
        }
        if let Some(best) = choose(candidates) {
            return PostFiltered {
                nominated: Some(best.node),
                victims: best.victims,
                message: String::new(),
            };
        }
        let mut parts = vec![];
        let hopeless = why.rejections.len() - hopeful.len();
        if !hopeful.is_empty() {
            parts.push(format!("{} No preemption victims found for incoming pod", hopeful.len()));
        }
        if hopeless > 0 {
            parts.push(format!("{hopeless} Preemption is not helpful for scheduling"));
        }
        parts.sort();
        nothing(format!("preemption: 0/{} nodes are available: {}.", why.nodes, parts.join(", ")))
    }
}

/// Victims that are still going make room soon: wait for them.
fn may_preempt(pod: &PodInfo, cluster: &Cluster) -> Result<(), &'static str> {
    if !pod.preempts {
        return Err("not eligible due to preemptionPolicy=Never.");
    }
    let node = cluster.node(&pod.nominated);
    let going = node.is_some_and(|node| {
        node.pods.values().any(|one| one.deleting && one.priority < pod.priority)
    });
    if going { Err("not eligible due to a terminating pod on the nominated node.") } else { Ok(()) }
}

/// The victims that let the pod fit: all less important pods, of which the most important are put
/// back while it still fits.
fn victims_on(
    framework: &Framework,
    pod: &PodInfo,
    node: &NodeInfo,
    cluster: &Cluster,
) -> Option<Vec<Arc<PodInfo>>> {
    let mut emptied = node.clone();
    let mut removed: Vec<_> =
        node.pods.values().filter(|one| one.priority < pod.priority).cloned().collect();
    if removed.is_empty() {
        return None;
    }
    for one in &removed {
        emptied.remove(&one.uid);
    }
    if !framework.would_fit(pod, &emptied, cluster) {
        return None;
    }
    removed.sort_by_key(|one| (Reverse(one.priority), one.started.unwrap_or(Timestamp::MAX)));
    let mut victims = vec![];
    for one in removed {
        emptied.add(one.clone());
        if !framework.would_fit(pod, &emptied, cluster) {
            emptied.remove(&one.uid);
            victims.push(one);
        }
    }
    (!victims.is_empty()).then_some(victims)
}

/// Lowest top priority, then lowest sum, then fewest victims, then the latest start.
fn choose(candidates: Vec<Candidate>) -> Option<Candidate> {
    candidates.into_iter().min_by_key(|candidate| {
        let priorities = candidate.victims.iter().map(|one| i64::from(one.priority));
        let top = priorities.clone().max().unwrap_or(i64::MIN);
        let sum: i64 = priorities.map(|priority| priority - i64::from(i32::MIN)).sum();
        let important = candidate.victims.iter().filter(|one| i64::from(one.priority) == top);
        let earliest = important.filter_map(|one| one.started).min();
        (top, sum, candidate.victims.len(), Reverse(earliest), candidate.node.clone())
    })
}
