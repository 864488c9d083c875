//! LowNodeUtilization moves pods from full nodes to empty ones; HighNodeUtilization empties nodes that are
//! little used. Both count requests, not measured use.
//!
//! Cost: each pod once, and once more for each pod of a node that gives pods away.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::Deserialize;
use serde_json::Value;

use super::{Namespaces, Plugin, Point, Row, checked, sort_for_eviction};
use crate::cycle::{Cycle, Refused};
use crate::fit::{self, Amounts, PODS};
use crate::policy::{Mistakes, args_of};
use crate::snapshot::namespace;

pub const LOW: Row = Row {
    name: "LowNodeUtilization",
    point: Point::Balance,
    build: |args| {
        let args: LowArgs = args_of(args)?;
        let mut wrong = args.mistakes();
        let excluded = excluded(args.evictable_namespaces, &mut wrong);
        let plugin = Utilization {
            thresholds: args.thresholds,
            targets: args.target_thresholds,
            deviates: args.use_deviation_thresholds,
            spared: args.number_of_nodes,
            per_node: args.eviction_limits.and_then(|limits| limits.node),
            only_requesting: false,
            excluded,
            direction: Direction::FromFull,
        };
        checked(plugin, wrong)
    },
};

pub const HIGH: Row = Row {
    name: "HighNodeUtilization",
    point: Point::Balance,
    build: |args| {
        let args: HighArgs = args_of(args)?;
        let mut wrong = vec![];
        let excluded = excluded(args.evictable_namespaces, &mut wrong);
        wrong.extend(threshold_mistake(&args.thresholds));
        let modes = args.eviction_modes.iter().filter(|mode| *mode != ONLY_REQUESTING);
        wrong.extend(modes.map(|mode| format!("invalid eviction mode {mode}")));
        let plugin = Utilization {
            targets: args.thresholds.keys().map(|name| (name.clone(), 100.0)).collect(),
            thresholds: args.thresholds,
            deviates: false,
            spared: args.number_of_nodes,
            per_node: None,
            only_requesting: args.eviction_modes.iter().any(|mode| mode == ONLY_REQUESTING),
            excluded,
            direction: Direction::FromEmpty,
        };
        checked(plugin, wrong)
    },
};

const ONLY_REQUESTING: &str = "OnlyThresholdingResources";

/// Percents by resource.
type Percents = BTreeMap<String, f64>;

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct LowArgs {
    use_deviation_thresholds: bool,
    thresholds: Percents,
    target_thresholds: Percents,
    number_of_nodes: usize,
    metrics_utilization: Option<Value>,
    evictable_namespaces: Option<Namespaces>,
    eviction_limits: Option<EvictionLimits>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct EvictionLimits {
    node: Option<usize>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct HighArgs {
    thresholds: Percents,
    number_of_nodes: usize,
    eviction_modes: Vec<String>,
    evictable_namespaces: Option<Namespaces>,
}

fn threshold_mistake(thresholds: &Percents) -> Option<String> {
    if thresholds.is_empty() {
        return Some("no resource threshold is configured".into());
    }
    let wrong = thresholds.iter().find(|(_, percent)| !(0.0..=100.0).contains(*percent));
    wrong.map(|(name, _)| format!("{name} threshold not in [0, 100] range"))
}

fn excluded(given: Option<Namespaces>, wrong: &mut Mistakes) -> Vec<String> {
    let given = given.unwrap_or_default();
    if !given.include.is_empty() {
        wrong.push("only Exclude namespaces can be set, inclusion is not supported".into());
    }
    given.exclude
}

impl LowArgs {
    fn mistakes(&self) -> Mistakes {
        let (low, target) = (&self.thresholds, &self.target_thresholds);
        let named = |name: &str, thresholds: &Percents| {
            threshold_mistake(thresholds).map(|why| format!("{name} config is not valid: {why}"))
        };
        let mut wrong: Mistakes = named("thresholds", low).into_iter().collect();
        wrong.extend(named("targetThresholds", target));
        if wrong.is_empty() && !low.keys().eq(target.keys()) {
            wrong.push("thresholds and targetThresholds configured different resources".into());
        }
        let above = low.iter().find(|(name, percent)| {
            !self.use_deviation_thresholds && target.get(*name).is_some_and(|top| *percent > top)
        });
        wrong.extend(above.map(|(name, _)| {
            format!("thresholds' {name} percentage is greater than targetThresholds'")
        }));
        if self.metrics_utilization.is_some() {
            wrong.push(
                "metricsUtilization is not supported: this descheduler counts requests".into(),
            );
        }
        wrong
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    FromFull,
    FromEmpty,
}

struct Utilization {
    thresholds: Percents,
    targets: Percents,
    /// Thresholds are distances from the average.
    deviates: bool,
    /// Nothing happens as long as no more nodes are below the thresholds.
    spared: usize,
    /// Evictions from one node.
    per_node: Option<usize>,
    /// Evict only pods that request one of the resources.
    only_requesting: bool,
    excluded: Vec<String>,
    direction: Direction,
}

/// A node and its load.
struct Load<'a> {
    name: &'a str,
    node: &'a Node,
    capacity: Amounts,
    used: Amounts,
}

impl Load<'_> {
    /// Percents of the capacity. A resource that the node does not have is missing.
    fn percents(&self) -> Percents {
        let percent = |(name, used): (&String, &i64)| {
            let capacity = *self.capacity.get(name)?;
            let share = if capacity > 0 { *used as f64 / capacity as f64 } else { 0.0 };
            Some((name.clone(), share * 100.0))
        };
        self.used.iter().filter_map(percent).collect()
    }

    /// The capacity up to the thresholds; all of it for resources without one.
    fn up_to(&self, thresholds: &Percents, name: &str) -> i64 {
        let capacity = self.capacity.get(name).copied().unwrap_or(0);
        let part = |percent: &f64| (percent * 0.01 * capacity as f64) as i64;
        thresholds.get(name).map_or(capacity, part)
    }

    fn total(&self) -> i64 {
        self.used.values().sum()
    }
}

fn percent(percents: &Percents, name: &str) -> f64 {
    percents.get(name).copied().unwrap_or(0.0)
}

/// The free resources of the nodes that take pods.
struct Room {
    free: Amounts,
    /// Upper bounds of the node that gives pods away; absent: it gives all that it can.
    target: Option<Amounts>,
}

impl Room {
    fn goes_on(&self, used: &Amounts) -> bool {
        let above = self.target.as_ref().is_none_or(|target| {
            used.iter().any(|(name, used)| target.get(name).is_some_and(|top| top < used))
        });
        above && self.free.values().all(|free| *free > 0)
    }
}

impl Utilization {
    fn resources(&self) -> BTreeSet<String> {
        let basic = ["cpu", "memory", PODS].map(str::to_owned);
        self.thresholds.keys().cloned().chain(basic).collect()
    }

    fn loads<'a>(&self, cycle: &'a Cycle<'_>) -> Vec<Load<'a>> {
        let names = self.resources();
        let load = |(name, node): (&'a String, &'a Arc<Node>)| {
            let all = fit::used(&cycle.snapshot, name);
            let of = |name: &String| (name.clone(), all.get(name).copied().unwrap_or(0));
            let used = names.iter().map(of).collect();
            Load { name, node, capacity: fit::capacity(node), used }
        };
        cycle.snapshot.nodes.iter().map(load).collect()
    }

    /// The lower and the upper thresholds of this cycle.
    fn bounds(&self, loads: &[Load<'_>]) -> (Percents, Percents) {
        if !self.deviates {
            return (self.thresholds.clone(), self.targets.clone());
        }
        let all: Vec<Percents> = loads.iter().map(Load::percents).collect();
        let bound = |sign: f64, distances: &Percents| {
            let of = |(name, distance): (&String, &f64)| {
                let known: Vec<f64> = all.iter().filter_map(|one| one.get(name).copied()).collect();
                let average = known.iter().sum::<f64>() / (known.len().max(1) as f64);
                (name.clone(), (average + sign * distance).clamp(0.0, 100.0))
            };
            distances.iter().map(of).collect()
        };
        (bound(-1.0, &self.thresholds), bound(1.0, &self.targets))
    }

    /// Nodes that give pods away, and those that take them. Empty: nothing to do.
    fn sides<'a>(
        &self,
        loads: Vec<Load<'a>>,
        low: &Percents,
        high: &Percents,
    ) -> Option<(Vec<Load<'a>>, Vec<Load<'a>>)> {
        let count = loads.len();
        let (mut empty, mut others) = (vec![], vec![]);
        for load in loads {
            let percents = load.percents();
            let is_low = low.iter().all(|(name, bound)| percent(&percents, name) <= *bound);
            let is_closed = fit::is_unschedulable(load.node);
            let is_high = || high.iter().any(|(name, bound)| percent(&percents, name) > *bound);
            match self.direction {
                Direction::FromFull if is_low && !is_closed => empty.push(load),
                Direction::FromFull if is_high() => others.push(load),
                Direction::FromEmpty if is_low => empty.push(load),
                Direction::FromEmpty if !is_closed => others.push(load),
                _ => {}
            }
        }
        let is_idle = empty.is_empty() || empty.len() <= self.spared || empty.len() == count;
        if is_idle || others.is_empty() {
            return None;
        }
        let (mut from, to) = match self.direction {
            Direction::FromFull => (others, empty),
            Direction::FromEmpty => (empty, others),
        };
        from.sort_by_key(Load::total);
        if self.direction == Direction::FromFull {
            from.reverse();
        }
        Some((from, to))
    }

    fn concerns(&self, pod: &Pod) -> bool {
        let requests = |name: &String| {
            let spec = pod.spec.as_ref();
            let init = spec.into_iter().flat_map(|spec| spec.init_containers.iter().flatten());
            let mut all = spec.into_iter().flat_map(|spec| &spec.containers).chain(init);
            all.any(|one| {
                let list = one.resources.as_ref().and_then(|all| all.requests.as_ref());
                list.is_some_and(|list| list.contains_key(name))
            })
        };
        !self.only_requesting || self.thresholds.keys().any(requests)
    }

    /// Moves pods off a node as long as there is room. False: the cycle may evict no more.
    async fn relieve(
        &self,
        cycle: &Cycle<'_>,
        mut load: Load<'_>,
        room: &mut Room,
        to: &[Load<'_>],
    ) -> bool {
        let all = cycle.snapshot.running(load.name);
        let mut pods: Vec<Arc<Pod>> =
            all.filter(|pod| cycle.may_go(pod) && self.concerns(pod)).cloned().collect();
        sort_for_eviction(&mut pods);
        let mut evicted = 0;
        for pod in pods {
            if !room.goes_on(&load.used) || self.per_node.is_some_and(|limit| evicted >= limit) {
                break;
            }
            let tolerated = to
                .iter()
                .any(|one| fit::covers(fit::tolerations(&pod), fit::taints(one.node), |_| true));
            let is_excluded = self.excluded.iter().any(|one| one == namespace(&pod));
            if !tolerated || is_excluded || !cycle.may_move(&pod) {
                continue;
            }
            match cycle.evict(&pod).await {
                Ok(()) => {}
                Err(Refused::ThisPod) => continue,
                Err(Refused::NodeLimit) => return true,
                Err(Refused::TotalLimit) => return false,
            }
            evicted += 1;
            let requests = fit::requests(&pod);
            for (name, free) in &mut room.free {
                let gone = if name == PODS { 1 } else { requests.get(name).copied().unwrap_or(0) };
                *free -= gone;
                *load.used.entry(name.clone()).or_default() -= gone;
            }
        }
        true
    }
}

#[async_trait]
impl Plugin for Utilization {
    async fn run(&self, cycle: &Cycle<'_>) {
        let loads = self.loads(cycle);
        let (low, high) = self.bounds(&loads);
        let Some((from, to)) = self.sides(loads, &low, &high) else { return };
        let free = |name: String| {
            let of = |load: &Load<'_>| {
                load.up_to(&high, &name) - load.used.get(&name).copied().unwrap_or(0)
            };
            let sum = to.iter().map(of).sum();
            (name, sum)
        };
        let mut room =
            Room { free: self.resources().into_iter().map(free).collect(), target: None };
        for load in from {
            if self.direction == Direction::FromFull {
                let top = |name: &String| (name.clone(), load.up_to(&high, name));
                room.target = Some(load.used.keys().map(top).collect());
            }
            if !self.relieve(cycle, load, &mut room, &to).await {
                return;
            }
        }
    }
}
