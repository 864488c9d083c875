//! Makes room for an important pod by removing less important ones.
//!
//! Upstream: `defaultpreemption`: on each node where removing pods may help, as few and as
//! unimportant victims as possible; then the node whose victims matter least. Pods that a
//! PodDisruptionBudget protects are the last choice, but a choice.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use machinery::selector::Selector;

use crate::cluster::Cluster;
use crate::framework::{Diagnosis, ExtensionPoints, Framework, PostFilter, PostFiltered, Row};
use crate::node::NodeInfo;
use crate::objects::Objects;
use crate::pod::PodInfo;

pub const ROW: Row = Row {
    name: "DefaultPreemption",
    weight: 0,
    build: |handle| {
        let plugin = DefaultPreemption {
            share: handle.args.min_candidates_percentage,
            least: handle.args.min_candidates,
            objects: handle.objects.clone(),
        };
        ExtensionPoints { post_filter: Some(Arc::new(plugin)), ..Default::default() }
    },
    hint: super::hints::never,
};

struct DefaultPreemption {
    /// How many candidates are enough: this share of the nodes, in percent,
    share: usize,
    /// and at least this many.
    least: usize,
    objects: Option<Objects>,
}

struct Candidate {
    node: String,
    /// The protected first, then by importance.
    victims: Vec<Arc<PodInfo>>,
    /// How many of them a budget protects.
    violations: usize,
}

/// A budget: what it selects, how many more it lets go, and whom it has counted already.
struct Budget {
    selector: Selector,
    allowed: i32,
    disrupted: BTreeSet<String>,
}

impl PostFilter for DefaultPreemption {
    fn post_filter(
        &self,
        framework: &Framework,
        pod: &PodInfo,
        cluster: &Cluster,
        why: &Diagnosis,
    ) -> PostFiltered {
        let nothing = |message: String| PostFiltered { message, ..PostFiltered::default() };
        if let Err(reason) = may_preempt(pod, cluster) {
            return nothing(format!("preemption: {reason}"));
        }
        let hopeful: Vec<_> = why.rejections.iter().filter(|(_, one)| !one.unresolvable).collect();
        let limit = self.least.max(why.nodes * self.share / 100);
        let mut candidates = vec![];
        // From anywhere on, so that not the same nodes are looked at every time.
        let start = base::rng::below(hopeful.len().max(1) as u64) as usize;
        for (name, _) in hopeful.iter().cycle().skip(start).take(hopeful.len()) {
            if let Some(node) = cluster.node(name) {
                let budgets = |namespace: &str| self.budgets(namespace);
                candidates.extend(candidate_on(framework, pod, node, cluster, budgets));
            }
            if candidates.len() >= limit {
                break;
            }
        }
        if let Some(best) = choose(candidates) {
            return PostFiltered {
                nominated: Some(best.node),
                victims: best.victims,
                ..PostFiltered::default()
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
        parts.sort_unstable();
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

impl DefaultPreemption {
    fn budgets(&self, namespace: &str) -> Vec<Budget> {
        let all = self.objects.iter().flat_map(|objects| objects.budgets(namespace));
        all.map(|budget| {
            let status = budget.status.clone().unwrap_or_default();
            let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
            Budget {
                // A missing selector selects nothing, an empty one everything.
                selector: selector.map_or(Selector::nothing(), |selector| {
                    Selector::from_api(Some(selector)).unwrap_or(Selector::nothing())
                }),
                allowed: status.disruptions_allowed.unwrap_or_default(),
                disrupted: status.disrupted_pods.unwrap_or_default().into_keys().collect(),
            }
        })
        .collect()
    }
}

/// Splits pods, the most important first, into those whose going a budget forbids and the others.
fn protected(
    pods: &[Arc<PodInfo>],
    budgets: impl Fn(&str) -> Vec<Budget>,
) -> (Vec<Arc<PodInfo>>, Vec<Arc<PodInfo>>) {
    let mut known: BTreeMap<String, Vec<Budget>> = BTreeMap::new();
    pods.iter().cloned().partition(|pod| {
        let namespace = pod.key.namespace.to_string();
        let budgets = known.entry(namespace).or_insert_with_key(|namespace| budgets(namespace));
        let mut is_protected = false;
        for budget in budgets.iter_mut().filter(|_| !pod.labels.is_empty()) {
            let name: &str = &pod.key.name;
            if !budget.selector.matches(Some(&pod.labels)) || budget.disrupted.contains(name) {
                continue;
            }
            budget.allowed -= 1;
            is_protected |= budget.allowed < 0;
        }
        is_protected
    })
}

/// The victims that let the pod fit: all less important pods, of which the most important are put
/// back while it still fits, those that a budget protects before the others.
fn candidate_on(
    framework: &Framework,
    pod: &PodInfo,
    node: &NodeInfo,
    cluster: &Cluster,
    budgets: impl Fn(&str) -> Vec<Budget>,
) -> Option<Candidate> {
    let mut emptied = cluster.what_if(node);
    let mut removed: Vec<_> =
        node.pods.values().filter(|one| one.priority < pod.priority).cloned().collect();
    if removed.is_empty() {
        return None;
    }
    for one in &removed {
        emptied.remove(&one.uid);
    }
    if !framework.would_fit(pod, &mut emptied) {
        return None;
    }
    removed.sort_by_key(|one| (Reverse(one.priority), one.started.unwrap_or(Timestamp::MAX)));
    let (guarded, free) = protected(&removed, budgets);
    let (mut victims, mut violations) = (vec![], 0);
    let guarded = guarded.into_iter().map(|one| (one, true));
    for (one, is_guarded) in guarded.chain(free.into_iter().map(|one| (one, false))) {
        emptied.add(one.clone());
        if !framework.would_fit(pod, &mut emptied) {
            emptied.remove(&one.uid);
            victims.push(one);
            violations += usize::from(is_guarded);
        }
    }
    let node = node.name.clone();
    (!victims.is_empty()).then_some(Candidate { node, victims, violations })
}

/// Fewest violations of budgets, then the lowest top priority, then the lowest sum, then the fewest
/// victims, then the latest start.
fn choose(candidates: Vec<Candidate>) -> Option<Candidate> {
    candidates.into_iter().min_by_key(|candidate| {
        let priorities = candidate.victims.iter().map(|one| i64::from(one.priority));
        let top = priorities.clone().max().unwrap_or(i64::MIN);
        let sum: i64 = priorities.map(|priority| priority - i64::from(i32::MIN)).sum();
        let important = candidate.victims.iter().filter(|one| i64::from(one.priority) == top);
        let earliest = important.filter_map(|one| one.started).min();
        let count = candidate.victims.len();
        (candidate.violations, top, sum, count, Reverse(earliest), candidate.node.clone())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn pod(name: &str, priority: i32) -> Arc<PodInfo> {
        let object = json!({"metadata": {"name": name, "namespace": "ns", "uid": name,
            "labels": {"app": "db"}}, "spec": {"containers": [], "priority": priority}});
        Arc::new(PodInfo::new(&from_value(object).unwrap()))
    }

    #[test]
    fn budgets_protect_all_but_as_many_as_they_allow() {
        let check = |allowed: i32, disrupted: &[&str], expected: &[&str]| {
            let budgets = |namespace: &str| {
                assert_eq!(namespace, "ns");
                vec![Budget {
                    selector: Selector::parse_labels("app=db").unwrap(),
                    allowed,
                    disrupted: disrupted.iter().map(|name| (*name).to_owned()).collect(),
                }]
            };
            let pods = [pod("a", 3), pod("b", 2), pod("c", 1)];
            let (guarded, free) = protected(&pods, budgets);
            let names: Vec<_> = guarded.iter().map(|one| one.uid.as_str()).collect();
            assert_eq!(names, expected, "{allowed} {disrupted:?}");
            assert_eq!(guarded.len() + free.len(), 3);
        };
        check(0, &[], &["a", "b", "c"]);
        check(1, &[], &["b", "c"]);
        check(3, &[], &[]);
        // A victim whose deletion is already counted costs nothing.
        check(1, &["a"], &["c"]);
    }

    #[test]
    fn the_node_whose_victims_matter_least_is_chosen() {
        let candidate = |node: &str, priorities: &[i32], violations| Candidate {
            node: node.into(),
            victims: priorities.iter().map(|priority| pod("x", *priority)).collect(),
            violations,
        };
        let check = |candidates: Vec<Candidate>, expected: &str| {
            assert_eq!(choose(candidates).map(|one| one.node).as_deref(), Some(expected));
        };
        check(vec![candidate("a", &[1], 1), candidate("b", &[9, 9], 0)], "b");
        check(vec![candidate("a", &[5], 0), candidate("b", &[4, 4], 0)], "b");
        check(vec![candidate("a", &[5, 3], 0), candidate("b", &[5, 2], 0)], "b");
        check(vec![candidate("a", &[5], 0), candidate("b", &[5, 0], 0)], "a");
    }
}
