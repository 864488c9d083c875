//! NUMA affinity of a container's resources: the hints of all providers, merged by the node's policy.
//!
//! ```text
//!  CPUs:    {0} preferred, {1} preferred, {0,1}    ┐
//!  memory:  {0} preferred, {0,1}                   ├─ one hint of each, ANDed ─► the best ─► admitted?
//!  devices: {1} preferred                          ┘
//! ```
//!
//! In: hints. Out: one hint, and whether the policy admits the container with it. Pure.
//! Cost: the product of the numbers of hints; there are at most 2^n of each for n NUMA nodes, and the
//! kubelet refuses more than 8 nodes by default.
//! Upstream: `pkg/kubelet/cm/topologymanager`.

use std::collections::BTreeMap;

use super::machine::NumaNode;

/// A set of NUMA nodes; node n is bit n.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mask(pub u64);

impl Mask {
    pub fn of(nodes: impl IntoIterator<Item = usize>) -> Self {
        Self(nodes.into_iter().filter(|node| *node < 64).fold(0, |mask, node| mask | 1 << node))
    }

    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    pub fn has(self, node: usize) -> bool {
        node < 64 && self.0 & (1 << node) != 0
    }

    pub fn nodes(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |node| self.has(*node))
    }

    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Fewer nodes; among equally many, lower ones.
    pub fn is_narrower(self, other: Self) -> bool {
        (self.count(), self.0) < (other.count(), other.0)
    }

    /// All non-empty subsets, the small ones first, each size in the order of its nodes.
    pub fn subsets(nodes: &[usize]) -> Vec<Self> {
        let mut out = vec![];
        for size in 1..=nodes.len() {
            let keep = |some: &[usize]| {
                out.push(Self::of(some.iter().copied()));
                true
            };
            combinations(nodes, size, keep);
        }
        out
    }
}

/// Calls `each` with all combinations of `size` items, in order, until it returns false.
pub fn combinations<T: Copy>(items: &[T], size: usize, mut each: impl FnMut(&[T]) -> bool) {
    fn next<T: Copy>(
        items: &[T],
        left: usize,
        taken: &mut Vec<T>,
        each: &mut impl FnMut(&[T]) -> bool,
    ) -> bool {
        if left == 0 {
            return each(taken);
        }
        for at in 0..(items.len() + 1).saturating_sub(left) {
            taken.push(items[at]);
            let goes_on = next(&items[at + 1..], left - 1, taken, each);
            taken.pop();
            if !goes_on {
                return false;
            }
        }
        true
    }
    if size > 0 {
        next(items, size, &mut Vec::with_capacity(size), &mut each);
    }
}

/// Where a resource can come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// `None`: the resource has no preference.
    pub affinity: Option<Mask>,
    pub is_preferred: bool,
}

impl Hint {
    /// No preference.
    pub const ANY: Self = Self { affinity: None, is_preferred: true };
    /// There is no topology policy.
    pub const NONE: Self = Self { affinity: None, is_preferred: false };
}

/// By resource. `None`: no preference; an empty list: the resource cannot be had.
pub type Hints = BTreeMap<String, Option<Vec<Hint>>>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    #[default]
    None,
    BestEffort,
    Restricted,
    SingleNumaNode,
}

impl Policy {
    pub const ALL: [(&'static str, Self); 4] = [
        ("none", Self::None),
        ("best-effort", Self::BestEffort),
        ("restricted", Self::Restricted),
        ("single-numa-node", Self::SingleNumaNode),
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, policy)| *policy)
    }

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, policy)| *policy == self).map_or("none", |(name, _)| name)
    }
}

/// The NUMA nodes, and how the policy chooses between equally good hints.
pub struct Merger {
    policy: Policy,
    all: Mask,
    /// With the option `prefer-closest-numa-nodes`: the distances from each node.
    distances: Option<BTreeMap<usize, Vec<u64>>>,
}

impl Merger {
    pub fn new(policy: Policy, nodes: &[NumaNode], prefers_closest: bool) -> Self {
        let distances = || nodes.iter().map(|node| (node.id, node.distances.clone())).collect();
        Self {
            policy,
            all: Mask::of(nodes.iter().map(|node| node.id)),
            distances: prefers_closest.then(distances),
        }
    }

    /// The merged hint, and whether the policy admits it.
    pub fn merge(&self, providers: &[Hints]) -> (Hint, bool) {
        let mut lists = filtered(providers);
        if self.policy == Policy::SingleNumaNode {
            let fits = |hint: &Hint| {
                hint.is_preferred && hint.affinity.is_none_or(|mask| mask.count() == 1)
            };
            lists.iter_mut().for_each(|list| list.retain(fits));
        }
        let mut best = self.best(&lists);
        if self.policy == Policy::SingleNumaNode && best.affinity == Some(self.all) {
            best.affinity = None;
        }
        let admits = match self.policy {
            Policy::None | Policy::BestEffort => true,
            Policy::Restricted | Policy::SingleNumaNode => best.is_preferred,
        };
        (best, admits)
    }

    fn best(&self, lists: &[Vec<Hint>]) -> Hint {
        let narrowest = |list: &Vec<Hint>| {
            let masks = list.iter().filter_map(|hint| hint.affinity);
            masks.min_by_key(|mask| (mask.count(), mask.0)).map(Mask::count)
        };
        // The largest of the resources' smallest affinities: what a hint that is not preferred should have.
        let goal = lists.iter().filter_map(narrowest).max().unwrap_or(0);
        let mut best: Option<(Mask, bool)> = None;
        each_permutation(lists, &mut |some| {
            let fresh = self.merged(some);
            best = self.better(best, fresh, goal);
        });
        let (mask, is_preferred) = best.unwrap_or((self.all, false));
        Hint { affinity: Some(mask), is_preferred }
    }

    /// Upstream: mergePermutation.
    fn merged(&self, some: &[Hint]) -> (Mask, bool) {
        let mut masks = some.iter().filter_map(|hint| hint.affinity);
        let first = masks.next();
        let is_same = masks.all(|mask| Some(mask) == first);
        let is_preferred = is_same && some.iter().all(|hint| hint.is_preferred);
        let all = some.iter().filter_map(|hint| hint.affinity);
        (all.fold(self.all, Mask::and), is_preferred)
    }

    /// Upstream: HintMerger.compare.
    fn better(
        &self,
        current: Option<(Mask, bool)>,
        fresh: (Mask, bool),
        goal: usize,
    ) -> Option<(Mask, bool)> {
        if fresh.0.count() == 0 {
            return current;
        }
        let Some(current) = current else { return Some(fresh) };
        let chosen = match (current.1, fresh.1) {
            (false, true) => fresh,
            (true, false) => current,
            (true, true) => self.nearer(current, fresh),
            (false, false) => {
                let (now, next) = (current.0.count(), fresh.0.count());
                match (now.cmp(&goal), next.cmp(&goal)) {
                    (std::cmp::Ordering::Greater, _) => self.nearer(current, fresh),
                    (std::cmp::Ordering::Equal, std::cmp::Ordering::Equal) => {
                        self.nearer(current, fresh)
                    }
                    (std::cmp::Ordering::Equal, _) => current,
                    (_, std::cmp::Ordering::Greater) => current,
                    (_, std::cmp::Ordering::Equal) => fresh,
                    _ if next > now => fresh,
                    _ if next < now => current,
                    _ => self.nearer(current, fresh),
                }
            }
        };
        Some(chosen)
    }

    fn nearer(&self, current: (Mask, bool), fresh: (Mask, bool)) -> (Mask, bool) {
        let by_distance = self.distances.as_ref().filter(|_| {
            self.policy != Policy::SingleNumaNode && current.0.count() == fresh.0.count()
        });
        let is_fresh = match by_distance {
            Some(distances) => {
                let (now, next) = (average(distances, current.0), average(distances, fresh.0));
                if now == next { fresh.0.0 < current.0.0 } else { next < now }
            }
            None => fresh.0.is_narrower(current.0),
        };
        if is_fresh { fresh } else { current }
    }
}

fn average(distances: &BTreeMap<usize, Vec<u64>>, mask: Mask) -> f64 {
    let of = |from: usize, to: usize| {
        distances.get(&from).and_then(|all| all.get(to)).copied().unwrap_or_default() as f64
    };
    let sum: f64 = mask.nodes().flat_map(|from| mask.nodes().map(move |to| of(from, to))).sum();
    sum / (mask.count() * mask.count()).max(1) as f64
}

/// One list for each resource of each provider. Upstream: filterProvidersHints.
fn filtered(providers: &[Hints]) -> Vec<Vec<Hint>> {
    let mut out = vec![];
    for hints in providers {
        if hints.is_empty() {
            out.push(vec![Hint::ANY]);
        }
        for list in hints.values() {
            out.push(match list {
                None => vec![Hint::ANY],
                Some(list) if list.is_empty() => vec![Hint { affinity: None, is_preferred: false }],
                Some(list) => list.clone(),
            });
        }
    }
    out
}

fn each_permutation(lists: &[Vec<Hint>], each: &mut impl FnMut(&[Hint])) {
    fn next(lists: &[Vec<Hint>], taken: &mut Vec<Hint>, each: &mut impl FnMut(&[Hint])) {
        let Some((first, rest)) = lists.split_first() else { return each(taken) };
        for hint in first {
            taken.push(*hint);
            next(rest, taken, each);
            taken.pop();
        }
    }
    next(lists, &mut Vec::with_capacity(lists.len()), each);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(count: usize) -> Vec<NumaNode> {
        let distances = |id: usize| (0..count).map(|to| if to == id { 10 } else { 20 }).collect();
        (0..count)
            .map(|id| NumaNode { id, distances: distances(id), ..NumaNode::default() })
            .collect()
    }

    fn hint(nodes: &[usize], is_preferred: bool) -> Hint {
        Hint { affinity: Some(Mask::of(nodes.iter().copied())), is_preferred }
    }

    /// The cases are upstream's: topology, hints → the merged hint.
    #[test]
    fn hints_are_merged() {
        let merge = |policy: Policy, lists: &[Option<Vec<Hint>>]| {
            let one = |(index, list): (usize, &Option<Vec<Hint>>)| -> Hints {
                [(format!("r{index}"), list.clone())].into()
            };
            let providers: Vec<Hints> = lists.iter().enumerate().map(one).collect();
            Merger::new(policy, &nodes(2), false).merge(&providers)
        };
        let check = |policy, lists: &[Option<Vec<Hint>>], expected: Hint, admits: bool| {
            assert_eq!(merge(policy, lists), (expected, admits), "{policy:?} {lists:?}");
        };
        use Policy::{BestEffort, Restricted, SingleNumaNode};
        // Without preferences, all nodes are as good.
        check(BestEffort, &[None], hint(&[0, 1], true), true);
        check(SingleNumaNode, &[None], Hint { affinity: None, is_preferred: true }, true);
        // An empty list: the resource cannot be had on any set of nodes.
        check(BestEffort, &[Some(vec![])], hint(&[0, 1], false), true);
        check(Restricted, &[Some(vec![])], hint(&[0, 1], false), false);
        let both = || Some(vec![hint(&[0], true), hint(&[1], true), hint(&[0, 1], false)]);
        check(BestEffort, &[both(), both()], hint(&[0], true), true);
        let second = || Some(vec![hint(&[1], true), hint(&[0, 1], false)]);
        check(Restricted, &[both(), second()], hint(&[1], true), true);
        // Two resources on different nodes.
        let first = || Some(vec![hint(&[0], true)]);
        let only_second = || Some(vec![hint(&[1], true)]);
        check(BestEffort, &[first(), only_second()], hint(&[0, 1], false), true);
        check(Restricted, &[first(), only_second()], hint(&[0, 1], false), false);
        let wide = || Some(vec![hint(&[0, 1], true)]);
        // Not preferred: as many nodes as the resource with the widest need.
        check(BestEffort, &[wide(), both()], hint(&[0, 1], false), true);
        check(SingleNumaNode, &[wide()], Hint { affinity: None, is_preferred: false }, false);
    }

    #[test]
    fn near_nodes_are_preferred() {
        let mut all = nodes(4);
        let table = [[10, 30, 20, 30], [30, 10, 30, 20], [20, 30, 10, 30], [30, 20, 30, 10]];
        for (node, row) in all.iter_mut().zip(table) {
            node.distances = row.to_vec();
        }
        let hints: Hints = [(
            "cpu".to_owned(),
            Some(vec![hint(&[0, 1], true), hint(&[0, 2], true), hint(&[1, 3], true)]),
        )]
        .into();
        let merged = |closest| {
            Merger::new(Policy::BestEffort, &all, closest).merge(std::slice::from_ref(&hints)).0
        };
        assert_eq!(merged(false), hint(&[0, 1], true));
        assert_eq!(merged(true), hint(&[0, 2], true));
    }

    #[test]
    fn subsets_come_by_size() {
        let all: Vec<u64> = Mask::subsets(&[0, 1, 2]).into_iter().map(|mask| mask.0).collect();
        assert_eq!(all, [1, 2, 4, 3, 5, 6, 7]);
    }
}
