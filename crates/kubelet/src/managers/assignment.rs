//! Chooses CPUs for a container: whole units near each other, or spread evenly over the NUMA nodes.
//!
//! ```text
//!  packed:      full NUMA nodes ─► full sockets ─► (uncore caches) ─► full cores ─► single CPUs
//!  distributed: the fewest NUMA nodes that suffice, the same number of CPUs of each
//! ```
//! A machine with more NUMA nodes than sockets starts with sockets.
//!
//! In: the topology, free CPUs, how many are needed. Out: the chosen CPUs. Pure.
//! Cost: packed, for each step a pass over the machine's CPUs; distributed, the combinations of its NUMA
//! nodes, of which the kubelet allows 8 by default.
//! Upstream: `cm/cpumanager/cpu_assignment.go`, with the same results.

use std::collections::BTreeMap;

use super::cpuset::CpuSet;
use super::hints::combinations;
use super::machine::{Cpus, Level, Topology};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignmentError {
    #[error(
        "not enough cpus available to satisfy request: requested={requested}, available={available}"
    )]
    TooFew { requested: usize, available: usize },
    #[error("failed to allocate cpus")]
    Failed,
    #[error("accounting error, not enough CPUs allocated, remaining: {0}")]
    Accounting(usize),
}

/// How CPUs are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Manner {
    /// Spread over cores instead of filling cores.
    pub spreads_over_cores: bool,
    pub prefers_uncore_caches: bool,
    /// Spread over NUMA nodes, in groups of so many CPUs.
    pub distributes_by: Option<usize>,
}

/// Chooses `count` of the free CPUs.
pub fn choose(
    topology: &Topology,
    free: &CpuSet,
    count: usize,
    manner: Manner,
) -> Result<CpuSet, AssignmentError> {
    match manner.distributes_by {
        Some(group) => distributed(topology, free, count, group.max(1), manner),
        None => packed(topology, free, count, manner),
    }
}

struct Choice<'a> {
    topology: &'a Topology,
    left: Cpus,
    needed: usize,
    taken: CpuSet,
    spreads: bool,
    numa_first: bool,
}

impl<'a> Choice<'a> {
    fn new(
        topology: &'a Topology,
        free: &CpuSet,
        needed: usize,
        manner: Manner,
    ) -> Result<Self, AssignmentError> {
        let left = topology.cpus.only(free);
        if needed > left.0.len() {
            return Err(AssignmentError::TooFew { requested: needed, available: free.len() });
        }
        let count = |level| topology.cpus.ids(level).len();
        let numa_first = count(Level::Socket) >= count(Level::Numa);
        let (taken, spreads) = (CpuSet::default(), manner.spreads_over_cores);
        Ok(Self { topology, left, needed, taken, spreads, numa_first })
    }

    fn is_done(&self) -> bool {
        self.needed == 0
    }

    fn take(&mut self, cpus: &CpuSet) {
        self.taken = self.taken.union(cpus);
        self.left = self.left.only(&self.left.all().difference(cpus));
        self.needed = self.needed.saturating_sub(cpus.len());
    }

    /// Units with few free CPUs first; then low numbers.
    fn sorted(&self, level: Level, ids: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut all: Vec<usize> = ids.into_iter().collect();
        all.sort_by_cached_key(|id| (self.left.count(level, *id), *id));
        all
    }

    /// The units of `level` inside the units of `within`.
    fn nested(&self, level: Level, within: Level, outer: Vec<usize>) -> Vec<usize> {
        let inner = |id: usize| self.sorted(level, self.left.ids_in(level, within, id));
        outer.into_iter().flat_map(inner).collect()
    }

    fn numas(&self) -> Vec<usize> {
        match self.numa_first {
            true => self.sorted(Level::Numa, self.left.ids(Level::Numa)),
            false => self.nested(Level::Numa, Level::Socket, self.sockets()),
        }
    }

    fn sockets(&self) -> Vec<usize> {
        match self.numa_first {
            true => self.nested(Level::Socket, Level::Numa, self.numas()),
            false => self.sorted(Level::Socket, self.left.ids(Level::Socket)),
        }
    }

    fn cores(&self) -> Vec<usize> {
        match self.numa_first {
            true => self.nested(Level::Core, Level::Socket, self.sockets()),
            false => self.nested(Level::Core, Level::Numa, self.numas()),
        }
    }

    fn uncores(&self) -> Vec<usize> {
        self.nested(Level::Uncore, Level::Numa, self.numas())
    }

    /// Single CPUs: core by core, or all first threads of a socket before the second ones.
    fn cpus(&self) -> Vec<usize> {
        let (level, units) = match self.spreads {
            true => (Level::Socket, self.sockets()),
            false => (Level::Core, self.cores()),
        };
        let of = |id: usize| self.left.of(level, id).iter().collect::<Vec<_>>();
        units.into_iter().flat_map(of).collect()
    }

    fn is_free(&self, level: Level, id: usize) -> bool {
        let full = match level {
            Level::Numa | Level::Uncore => self.topology.cpus.count(level, id),
            Level::Socket => self.topology.per_socket(),
            Level::Core => self.topology.per_core(),
        };
        self.left.count(level, id) == full
    }

    /// Takes units that are completely free, as long as all of their CPUs are needed.
    fn take_full(&mut self, level: Level) {
        let units = match level {
            Level::Numa => self.numas(),
            Level::Socket => self.sockets(),
            Level::Uncore => self.uncores(),
            Level::Core => self.cores(),
        };
        let free: Vec<usize> = units.into_iter().filter(|id| self.is_free(level, *id)).collect();
        for id in free {
            let cpus = self.topology.cpus.of(level, id);
            if self.needed >= cpus.len() {
                self.take(&cpus);
            }
        }
    }

    /// Whole caches while so many CPUs are needed; then one cache that has exactly the rest.
    fn take_by_uncore_cache(&mut self) {
        for id in self.uncores() {
            if self.needed >= self.topology.per_uncore() {
                self.take_full(Level::Uncore);
            }
            if !self.is_done() {
                self.take_part_of_cache(id);
            }
            if self.is_done() {
                return;
            }
        }
    }

    fn take_part_of_cache(&mut self, id: usize) {
        let per_core = self.topology.per_core().max(1);
        let cores = self.left.ids_in(Level::Core, Level::Uncore, id);
        let some = cores.into_iter().take(self.needed.div_ceil(per_core));
        let mut cpus: Vec<usize> = some
            .flat_map(|core| self.left.of(Level::Core, core).iter().collect::<Vec<_>>())
            .collect();
        cpus.sort_unstable();
        // An odd number leaves one thread of the last core.
        if !self.needed.is_multiple_of(2) && per_core > 1 && cpus.len() > self.needed {
            cpus.pop();
        }
        if cpus.len() == self.needed {
            self.take(&cpus.into_iter().collect());
        }
    }
}

fn packed(
    topology: &Topology,
    free: &CpuSet,
    count: usize,
    manner: Manner,
) -> Result<CpuSet, AssignmentError> {
    let mut choice = Choice::new(topology, free, count, manner)?;
    let (first, second) = match choice.numa_first {
        true => (Level::Numa, Level::Socket),
        false => (Level::Socket, Level::Numa),
    };
    for level in [first, second] {
        if !choice.is_done() {
            choice.take_full(level);
        }
    }
    if manner.prefers_uncore_caches && !choice.is_done() {
        choice.take_by_uncore_cache();
    }
    if !manner.spreads_over_cores && !choice.is_done() {
        choice.take_full(Level::Core);
    }
    for cpu in choice.cpus() {
        if choice.is_done() {
            break;
        }
        choice.take(&[cpu].into_iter().collect());
    }
    if choice.is_done() { Ok(choice.taken) } else { Err(AssignmentError::Failed) }
}

/// A combination of NUMA nodes, and those of them that give one group more.
struct Plan {
    nodes: Vec<usize>,
    extra: Vec<usize>,
    /// How unevenly the free CPUs are left: a standard deviation.
    imbalance: f64,
}

fn distributed(
    topology: &Topology,
    free: &CpuSet,
    count: usize,
    group: usize,
    manner: Manner,
) -> Result<CpuSet, AssignmentError> {
    if !count.is_multiple_of(group) {
        return packed(topology, free, count, manner);
    }
    let mut choice = Choice::new(topology, free, count, manner)?;
    if choice.is_done() {
        return Ok(choice.taken);
    }
    let nodes = choice.numas();
    let groups = count.div_ceil(group);
    let per_node =
        topology.cpus.0.len().div_ceil(group).div_ceil(topology.cpus.ids(Level::Numa).len().max(1));
    let (fewest, most) = (groups.div_ceil(per_node.max(1)), groups.min(nodes.len()));
    let best = (fewest..=most).find_map(|size| best_plan(&choice.left, &nodes, size, count, group));
    let Some(plan) = best else { return packed(topology, free, count, manner) };
    let plain = Manner { prefers_uncore_caches: false, distributes_by: None, ..manner };
    let take = |choice: &mut Choice<'_>, node: usize, count: usize| {
        let cpus = packed(topology, &choice.left.of(Level::Numa, node), count, plain)?;
        choice.take(&cpus);
        Ok::<(), AssignmentError>(())
    };
    let share = count / plan.nodes.len() / group * group;
    for node in &plan.nodes {
        take(&mut choice, *node, share)?;
    }
    while choice.needed > 0 {
        let before = choice.needed;
        for node in &plan.extra {
            if choice.needed > 0 && choice.left.count(Level::Numa, *node) >= group {
                take(&mut choice, *node, group)?;
            }
        }
        if choice.needed == before {
            return Err(AssignmentError::Accounting(before));
        }
    }
    Ok(choice.taken)
}

/// The combination of `size` nodes that leaves the free CPUs most even.
fn best_plan(
    left: &Cpus,
    nodes: &[usize],
    size: usize,
    count: usize,
    group: usize,
) -> Option<Plan> {
    let mut best: Option<Plan> = None;
    combinations(nodes, size, |some| {
        if best.as_ref().is_some_and(|best| best.imbalance == 0.0) {
            return false;
        }
        let fresh = plan_of(left, nodes, some, count, group);
        if let Some(fresh) = fresh
            && best.as_ref().is_none_or(|best| fresh.imbalance < best.imbalance)
        {
            best = Some(fresh);
        }
        true
    });
    best
}

fn plan_of(
    left: &Cpus,
    nodes: &[usize],
    some: &[usize],
    count: usize,
    group: usize,
) -> Option<Plan> {
    let free = |node: usize| left.count(Level::Numa, node);
    let groups: usize = some.iter().map(|node| free(*node) / group).sum();
    let share = count / some.len() / group * group;
    if groups * group < count || some.iter().any(|node| free(*node) < share) {
        return None;
    }
    let taken = |node: &usize| if some.contains(node) { share } else { 0 };
    let after: BTreeMap<usize, usize> =
        nodes.iter().map(|node| (*node, free(*node) - taken(node))).collect();
    let rest = count - share * some.len();
    let nodes = some.to_vec();
    if rest == 0 {
        return Some(Plan { nodes, extra: vec![], imbalance: deviation(&after) });
    }
    let can: Vec<usize> = some.iter().copied().filter(|node| after[node] >= group).collect();
    let mut best: Option<(f64, Vec<usize>)> = None;
    for size in (1..=can.len()).rev() {
        combinations(&can, size, |extra| {
            if let Some(imbalance) = imbalance_with(&after, extra, rest, group)
                && best.as_ref().is_none_or(|(known, _)| imbalance < *known)
            {
                best = Some((imbalance, extra.to_vec()));
            }
            true
        });
    }
    best.map(|(imbalance, extra)| Plan { nodes, extra, imbalance })
}

/// How uneven the free CPUs are if `extra` give the rest, group by group.
fn imbalance_with(
    after: &BTreeMap<usize, usize>,
    extra: &[usize],
    mut rest: usize,
    group: usize,
) -> Option<f64> {
    let mut after = after.clone();
    if extra.iter().map(|node| after[node] / group * group).sum::<usize>() < rest {
        return None;
    }
    while rest > 0 {
        for node in extra {
            let free = after.entry(*node).or_default();
            if rest > 0 && *free >= group {
                *free -= group;
                rest -= group.min(rest);
            }
        }
    }
    Some(deviation(&after))
}

/// Upstream rounds to thousandths.
fn deviation(free: &BTreeMap<usize, usize>) -> f64 {
    let count = free.len().max(1) as f64;
    let mean = free.values().map(|one| *one as f64).sum::<f64>() / count;
    // Upstream rounds the mean, too.
    let mean = (mean * 1000.0).round() / 1000.0;
    let squares: f64 = free.values().map(|one| (*one as f64 - mean).powi(2)).sum();
    ((squares / count).sqrt() * 1000.0).round() / 1000.0
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::managers::machine::Cpu;

    pub fn topology(count: usize, at: impl Fn(usize) -> Cpu) -> Topology {
        Topology { cpus: Cpus((0..count).map(|cpu| (cpu, at(cpu))).collect()) }
    }

    /// Two sockets; odd cores are in the second; the second threads are CPUs 6 to 11.
    pub fn dual_socket() -> Topology {
        topology(12, |cpu| {
            let (core, socket) = (cpu % 6, cpu % 2);
            Cpu { core, socket, numa: socket, uncore: socket }
        })
    }

    pub fn single_socket() -> Topology {
        topology(8, |cpu| Cpu { core: cpu % 4, ..Cpu::default() })
    }

    /// Two sockets with two NUMA nodes of ten cores each, two threads.
    fn multi_numa() -> Topology {
        topology(80, |cpu| {
            let (core, numa) = (cpu % 40, cpu % 40 / 10);
            Cpu { core, numa, socket: numa / 2, uncore: numa / 2 }
        })
    }

    fn check_with(topology: &Topology, manner: Manner, free: &str, count: usize, expected: &str) {
        let free = free.parse().expect("a set");
        let expected: CpuSet = expected.parse().expect("a set");
        assert_eq!(choose(topology, &free, count, manner), Ok(expected), "{count} of {free}");
    }

    /// Upstream's cases: topology, free CPUs, a request → the choice.
    #[test]
    fn packed_as_upstream() {
        let check = |topology: &Topology, free: &str, count: usize, expected: &str| {
            check_with(topology, Manner::default(), free, count, expected);
        };
        check(&single_socket(), "0-7", 1, "0");
        check(&single_socket(), "0-7", 2, "0,4");
        check(&single_socket(), "0-7", 3, "0,1,4");
        check(&single_socket(), "1-3,5-7", 1, "1");
        check(&single_socket(), "0-7", 8, "0-7");
        check(&single_socket(), "0-3,5-7", 1, "0");
        check(&dual_socket(), "1-11", 6, "1,3,5,7,9,11");
        check(&dual_socket(), "1-5,7-11", 1, "2");
        check(&dual_socket(), "0-11", 8, "0,6,2,8,4,10,1,7");
        check(&multi_numa(), "0-79", 64, "0-29,40-69,30,31,70,71");
        check(&multi_numa(), "1-39,41-79", 60, "10-39,50-79");
        let free = "0-3".parse().expect("a set");
        assert_eq!(
            choose(&single_socket(), &free, 5, Manner::default()),
            Err(AssignmentError::TooFew { requested: 5, available: 4 })
        );
    }

    #[test]
    fn caches_as_upstream() {
        let check = |topology: &Topology, free: &str, count: usize, expected: &str| {
            let manner = Manner { prefers_uncore_caches: true, ..Manner::default() };
            check_with(topology, manner, free, count, expected);
        };
        let no_threads = |sockets: usize| {
            topology(16, move |cpu| Cpu {
                core: cpu,
                socket: cpu * sockets / 16,
                numa: 0,
                uncore: cpu / 4,
            })
        };
        check(&no_threads(1), "1-15", 10, "1,2,4-11");
        check(&no_threads(2), "0-15", 4, "0-3");
        check(&no_threads(2), "2-15", 6, "2-7");
        check(&no_threads(2), "8-15", 4, "8-11");
        let threads =
            topology(16, |cpu| Cpu { core: cpu % 8, uncore: cpu % 8 / 4, ..Cpu::default() });
        check(&threads, "2-3,10-11,4-7,12-15", 6, "4,5,6,12,13,14");
        check(&threads, "1-7,9-15", 10, "4-7,12-15,1,9");
    }

    #[test]
    fn spread_over_cores_as_upstream() {
        let check = |topology: &Topology, count: usize, expected: &str| {
            let manner = Manner { spreads_over_cores: true, ..Manner::default() };
            let all = topology.cpus.all().to_string();
            check_with(topology, manner, &all, count, expected);
        };
        check(&single_socket(), 3, "0-2");
        check(&dual_socket(), 2, "0,2");
        check(&dual_socket(), 3, "0,2,4");
        check(&dual_socket(), 6, "0,2,4,6,8,10");
        check(&dual_socket(), 8, "0,2,4,6,8,10,1,3");
        check(&multi_numa(), 8, "0-7");
    }

    #[test]
    fn distributed_as_upstream() {
        let check =
            |topology: &Topology, free: &str, count: usize, group: usize, expected: &str| {
                let manner = Manner { distributes_by: Some(group), ..Manner::default() };
                check_with(topology, manner, free, count, expected);
            };
        check(&dual_socket(), "0-11", 8, 1, "0,6,2,8,1,7,3,9");
        check(&dual_socket(), "1-5,7-11", 1, 1, "1");
        check(&dual_socket(), "1-5,7-11", 1, 2, "2");
        let all = "0-79";
        let numa = multi_numa();
        check(&numa, all, 64, 1, "0-7,10-17,20-27,30-37,40-47,50-57,60-67,70-77");
        check(&numa, all, 48, 1, "0-7,10-17,20-27,40-47,50-57,60-67");
        check(&numa, "1-29,32-39,41-69,72-79", 48, 1, "1-8,10-17,20-27,41-48,50-57,60-67");
        check(&numa, "2-29,31-39,42-69,71-79", 48, 1, "10-17,20-27,31-38,50-57,60-67,71-78");
        let some = "0-2,10-12,20-22,30-32,40-41,50-51,60-61,70-71";
        check(&numa, some, 16, 1, "0-1,10-11,20-21,30-31,40-41,50-51,60-61,70-71");
        check(&numa, all, 26, 1, "0-6,10-16,40-45,50-55");
        check(&numa, all, 26, 2, "0-6,10-15,40-46,50-55");
        check(&numa, all, 62, 1, "0-7,10-17,20-27,30-37,40-47,50-57,60-66,70-76");
        check(&numa, all, 62, 2, "0-7,10-17,20-27,30-36,40-47,50-57,60-67,70-76");
        let uneven = "0-8,10-18,20-39,40-48,50-58,60-79";
        check(&numa, uneven, 62, 1, "0-7,10-17,20-27,30-37,40-46,50-56,60-67,70-77");
        check(&numa, uneven, 62, 2, "0-7,10-16,20-27,30-37,40-47,50-56,60-67,70-77");
        let few = "0-3,10-13,20-23,30-36,40-43,50-53,60-63,70-76";
        check(&numa, few, 34, 1, "0-3,10-13,20-23,30-34,40-43,50-53,60-63,70-74");
    }
}
