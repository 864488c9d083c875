//! How many pods of a sort there are by topology value (a zone, a host), kept by deltas.
//!
//! Affinity and spreading ask in each decision: how many pods that match a term, or that carry a term
//! which matches the new pod, are in a node's zone? Counted anew, that is a look at every pod for every
//! decision; here it is a look at one map, and a pod that comes or goes changes one number in each map
//! that counts it.
//!
//! In: pods that come to nodes and go, nodes that change, from [`crate::cluster`] alone. Out: [`View`]s.
//!
//! ```text
//!  area = scope (which nodes, told apart by what)    zone, of all nodes
//!   ├ values: node ► number of its value             node-1 ► 0 (a), node-2 ► 1 (b), node-3 ► 0
//!   ├ matching: who ► number ► pods                  app=web in ns ► {0: 2, 1: 5}   made when asked for
//!   └ carrying: term, kind ► number ► pods           "not near app=web" ► {1: 1}    always there
//! ```
//!
//! Invariants:
//! - A count is what a recount over the known nodes would give; a value without pods has no entry. The test
//!   below compares the two.
//! - Only nodes that take part in a scope have a number there; a number is some node's, or free and without
//!   entries in all maps of its area.
//! - Every term of every pod, its node known or not, has an area of its key alone, for `carrying`: terms of
//!   other pods must be found without having been asked for.
//! - What pods match depends on namespaces' labels; maps that such a change could touch are dropped.
//!
//! Maps that nobody asked for lately are dropped as well, so that memory has a limit: one for each
//! constraint of the templates in use, of which there are fewer than of pods by far.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use k8s_openapi::api::core::v1::{NodeSelector, Toleration};
use machinery::selector::Selector;

use crate::cluster::Namespaces;
use crate::node::{NodeInfo, tolerates_all};
use crate::pod::{PodInfo, Term};
use crate::selector;

/// Maps of matching pods that are kept: more than this many in turn are counted anew each time. Few in
/// tests, so that they are forgotten and made again.
const KEPT: usize = if cfg!(test) { 20 } else { 512 };

/// Pods by the number of their nodes' value.
type Counts = HashMap<u32, i64>;
type Nodes = [Arc<NodeInfo>];

/// Which nodes take part, and what tells them apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scope {
    /// Nodes without this label take no part. Empty: each node is a value of its own.
    key: String,
    /// Labels that a node must have besides.
    needs: Vec<String>,
    /// What else its labels must be.
    selects: Option<(BTreeMap<String, String>, Option<NodeSelector>)>,
    /// Its hard taints must be tolerated.
    tolerates: Option<Vec<Toleration>>,
}

impl Scope {
    /// All nodes with a label.
    pub fn of(key: &str) -> Self {
        Self { key: key.into(), ..Self::default() }
    }

    /// All nodes, each for itself.
    pub fn each_node() -> Self {
        Self::default()
    }

    pub fn needing<'a>(mut self, keys: impl Iterator<Item = &'a String>) -> Self {
        self.needs = keys.filter(|key| **key != self.key).cloned().collect();
        self.needs.sort_unstable();
        self.needs.dedup();
        self
    }

    /// Nodes that the pod's selector and node affinity allow.
    pub fn selected_by(mut self, pod: &PodInfo) -> Self {
        let is_choosy = !pod.node_selector.is_empty() || pod.node_affinity.is_some();
        self.selects = is_choosy.then(|| (pod.node_selector.clone(), pod.node_affinity.clone()));
        self
    }

    pub fn tolerated_by(mut self, pod: &PodInfo) -> Self {
        self.tolerates = Some(pod.tolerations.clone());
        self
    }

    fn is_key(&self, key: &str) -> bool {
        self.key == key
            && self.needs.is_empty()
            && self.selects.is_none()
            && self.tolerates.is_none()
    }

    /// The node's value, if it takes part.
    fn value<'a>(&self, node: &'a NodeInfo) -> Option<&'a str> {
        let value = match self.key.as_str() {
            "" => &node.name,
            key => node.labels.get(key)?,
        };
        let has_labels = self.needs.iter().all(|key| node.labels.contains_key(key));
        let is_selected = || {
            self.selects.as_ref().is_none_or(|(labels, affinity)| {
                selector::selects(labels, affinity.as_ref(), &node.name, &node.labels)
            })
        };
        let is_tolerated = || {
            let hard = node.taints.iter().filter(|taint| taint.effect != "PreferNoSchedule");
            self.tolerates.as_ref().is_none_or(|tolerations| tolerates_all(tolerations, hard))
        };
        (node.known && has_labels && is_selected() && is_tolerated()).then_some(value)
    }
}

/// Which pods are counted.
#[derive(Clone, Debug, PartialEq)]
pub enum Who {
    /// Those that match all of these terms.
    Matching(Vec<Term>),
    /// Those of a namespace that are not going.
    Kin { namespace: Arc<str>, selector: Selector },
}

impl Who {
    fn has(&self, pod: &PodInfo, namespaces: &Namespaces) -> bool {
        match self {
            Self::Matching(terms) => terms.iter().all(|term| term.matches(pod, namespaces)),
            Self::Kin { namespace, selector } => {
                !pod.deleting
                    && pod.key.namespace == *namespace
                    && selector.matches(Some(&pod.labels))
            }
        }
    }

    fn minds_namespaces(&self) -> bool {
        matches!(self, Self::Matching(terms) if terms.iter().any(Term::selects_namespaces))
    }
}

/// What a term is to the pod that carries it; of preferences, the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Near,
    Far,
    RatherNear(i32),
    RatherFar(i32),
}

/// The terms that a pod carries.
pub fn terms(pod: &PodInfo) -> impl Iterator<Item = (Kind, &Term)> {
    let near = pod.affinity.iter().map(|term| (Kind::Near, term));
    let far = pod.anti_affinity.iter().map(|term| (Kind::Far, term));
    let rather_near =
        pod.preferred_affinity.iter().map(|(weight, term)| (Kind::RatherNear(*weight), term));
    let rather_far =
        pod.preferred_anti_affinity.iter().map(|(weight, term)| (Kind::RatherFar(*weight), term));
    near.chain(far).chain(rather_near).chain(rather_far)
}

/// The values of a scope's nodes, numbered.
#[derive(Clone, Default)]
struct Values {
    /// By the node's place in the cluster's table.
    of_nodes: Vec<Option<u32>>,
    numbers: HashMap<String, u32>,
    /// How many nodes have a number's value.
    users: Vec<u32>,
    free: Vec<u32>,
}

impl Values {
    fn at(&self, place: usize) -> Option<u32> {
        self.of_nodes.get(place).copied().flatten()
    }

    fn is(&self, place: usize, value: Option<&str>) -> bool {
        self.at(place) == value.and_then(|value| self.numbers.get(value).copied())
            && self.at(place).is_some() == value.is_some()
    }

    fn set(&mut self, place: usize, value: Option<&str>) {
        let before = self.at(place);
        let number = value.map(|value| self.number(value));
        if place >= self.of_nodes.len() {
            self.of_nodes.resize(place + 1, None);
        }
        self.of_nodes[place] = number;
        let Some(before) = before else { return };
        self.users[before as usize] -= 1;
        if self.users[before as usize] == 0 {
            self.numbers.retain(|_, number| *number != before);
            self.free.push(before);
        }
    }

    /// The value's number, for one more node.
    fn number(&mut self, value: &str) -> u32 {
        let known = self.numbers.get(value).copied();
        let number = known.or_else(|| self.free.pop()).unwrap_or(self.users.len() as u32);
        if known.is_none() {
            self.numbers.insert(value.into(), number);
        }
        if number as usize == self.users.len() {
            self.users.push(0);
        }
        self.users[number as usize] += 1;
        number
    }

    /// The node at `place` is gone, and the last one is there instead.
    fn swap_remove(&mut self, place: usize, last: usize) {
        let moved = self.at(last);
        self.of_nodes.truncate(last);
        if place < last {
            if moved.is_some() && place >= self.of_nodes.len() {
                self.of_nodes.resize(place + 1, None);
            }
            if let Some(there) = self.of_nodes.get_mut(place) {
                *there = moved;
            }
        }
    }
}

/// Pods that somebody asked for.
#[derive(Clone)]
struct Row {
    who: Who,
    counts: Arc<Counts>,
    /// When it was last asked for.
    asked: u64,
}

#[derive(Clone)]
struct Area {
    scope: Scope,
    values: Arc<Values>,
    matching: Vec<Row>,
    carrying: HashMap<Term, Vec<(Kind, Arc<Counts>)>>,
    /// How many terms of pods have this key, on nodes that take part or not.
    carriers: usize,
}

fn bump(counts: &mut Arc<Counts>, number: u32, by: i64) {
    let counts = Arc::make_mut(counts);
    let count = counts.entry(number).or_default();
    *count += by;
    debug_assert!(*count >= 0, "more pods go than came");
    if *count == 0 {
        counts.remove(&number);
    }
}

impl Area {
    fn new(scope: Scope, nodes: &Nodes) -> Self {
        let mut values = Values::default();
        for node in nodes {
            values.set(node.place, scope.value(node));
        }
        let (matching, carrying) = (vec![], HashMap::new());
        Self { scope, values: Arc::new(values), matching, carrying, carriers: 0 }
    }

    fn count(&mut self, pod: &PodInfo, number: u32, by: i64, namespaces: &Namespaces) {
        for row in self.matching.iter_mut().filter(|row| row.who.has(pod, namespaces)) {
            bump(&mut row.counts, number, by);
        }
        if self.carriers == 0 {
            return;
        }
        for (kind, term) in terms(pod) {
            if self.scope.is_key(&term.topology_key) {
                self.carry(kind, term, number, by);
            }
        }
    }

    fn carry(&mut self, kind: Kind, term: &Term, number: u32, by: i64) {
        if !self.carrying.contains_key(term) {
            self.carrying.insert(term.clone(), vec![]);
        }
        let Some(kinds) = self.carrying.get_mut(term) else { return };
        let known = kinds.iter().position(|(known, _)| *known == kind);
        let at = known.unwrap_or_else(|| {
            kinds.push((kind, Arc::default()));
            kinds.len() - 1
        });
        bump(&mut kinds[at].1, number, by);
        if kinds[at].1.is_empty() {
            kinds.swap_remove(at);
        }
        if kinds.is_empty() {
            self.carrying.remove(term);
        }
    }

    fn node_changed(&mut self, node: &NodeInfo, namespaces: &Namespaces) {
        let value = self.scope.value(node);
        if self.values.is(node.place, value) {
            return;
        }
        if let Some(number) = self.values.at(node.place) {
            node.pods.values().for_each(|pod| self.count(pod, number, -1, namespaces));
        }
        Arc::make_mut(&mut self.values).set(node.place, value);
        if let Some(number) = self.values.at(node.place) {
            node.pods.values().for_each(|pod| self.count(pod, number, 1, namespaces));
        }
    }

    fn view(&self, counts: &Arc<Counts>) -> View {
        View { values: self.values.clone(), counts: counts.clone(), change: None }
    }
}

/// Pods by topology value, as they were when asked for.
pub struct View {
    values: Arc<Values>,
    counts: Arc<Counts>,
    /// What one number's count would change by: for what-if questions.
    change: Option<(u32, i64)>,
}

impl View {
    /// As if so many pods more were on the node at `place`.
    fn changed(self, place: usize, by: i64) -> Self {
        let number = self.values.at(place).filter(|_| by != 0);
        Self { change: number.map(|number| (number, by)), ..self }
    }

    fn count(&self, number: u32) -> i64 {
        let change = self.change.filter(|(changed, _)| *changed == number).map_or(0, |(_, by)| by);
        self.counts.get(&number).copied().unwrap_or(0) + change
    }

    /// The pods on nodes of this node's value; `None` if it takes no part.
    pub fn here(&self, node: &NodeInfo) -> Option<i64> {
        self.values.at(node.place).map(|number| self.count(number))
    }

    /// The pods on nodes of a value; 0 if no node that takes part has it.
    pub fn of(&self, value: &str) -> i64 {
        self.values.numbers.get(value).map_or(0, |number| self.count(*number))
    }

    /// How many values there are, with pods or without.
    pub fn values(&self) -> usize {
        self.values.numbers.len()
    }

    fn numbers(&self) -> impl Iterator<Item = u32> {
        let new = self.change.map(|(number, _)| number);
        let new = new.filter(|number| !self.counts.contains_key(number));
        self.counts.keys().copied().chain(new)
    }

    /// No pods at all.
    pub fn is_empty(&self) -> bool {
        self.numbers().all(|number| self.count(number) == 0)
    }

    /// The pods of the value that has the fewest.
    pub fn least(&self) -> i64 {
        let with_entry = self.counts.len();
        if with_entry + usize::from(self.change.is_some()) < self.values() {
            return 0;
        }
        let (least, seen) = self
            .numbers()
            .fold((i64::MAX, 0), |(least, seen), number| (least.min(self.count(number)), seen + 1));
        if seen < self.values() || seen == 0 { 0 } else { least }
    }
}

/// Views, and what a pod of each weighs.
#[derive(Default)]
pub struct Weighed(pub Vec<(i64, View)>);

impl Weighed {
    pub fn here(&self, node: &NodeInfo) -> i64 {
        self.0.iter().map(|(weight, view)| weight * view.here(node).unwrap_or(0)).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A node whose pods are not those that it has: for what-if questions.
#[derive(Clone)]
pub struct StandIn {
    pub node: NodeInfo,
    came: Vec<Arc<PodInfo>>,
    gone: Vec<Arc<PodInfo>>,
}

impl StandIn {
    pub fn of(real: &NodeInfo) -> Self {
        Self { node: real.clone(), came: vec![], gone: vec![] }
    }

    pub fn add(&mut self, pod: Arc<PodInfo>) {
        if let Some(old) = self.node.add(pod.clone()) {
            note(&mut self.gone, &mut self.came, old);
        }
        note(&mut self.came, &mut self.gone, pod);
    }

    pub fn remove(&mut self, uid: &str) {
        if let Some(old) = self.node.remove(uid) {
            note(&mut self.gone, &mut self.came, old);
        }
    }

    /// The pods that differ, and how each changes counts.
    fn pods(&self) -> impl Iterator<Item = (i64, &PodInfo)> {
        let came = self.came.iter().map(|pod| (1, &**pod));
        came.chain(self.gone.iter().map(|pod| (-1, &**pod)))
    }
}

/// Notes that the pod did one thing, or that it took back the other.
fn note(did: &mut Vec<Arc<PodInfo>>, undid: &mut Vec<Arc<PodInfo>>, pod: Arc<PodInfo>) {
    match undid.iter().position(|one| Arc::ptr_eq(one, &pod)) {
        Some(at) => drop(undid.swap_remove(at)),
        None => did.push(pod),
    }
}

/// What a question is about besides.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    pub nodes: &'a Nodes,
    pub namespaces: &'a Namespaces,
    pub stand_in: Option<&'a StandIn>,
}

/// The index.
#[derive(Default)]
pub struct Topology {
    /// Guards maps that are made while others read; changes have the index for themselves. Held for
    /// a question.
    areas: Mutex<Areas>,
}

impl Clone for Topology {
    fn clone(&self) -> Self {
        Self { areas: Mutex::new(self.areas().clone()) }
    }
}

#[derive(Clone, Default)]
struct Areas {
    all: Vec<Area>,
    /// Questions so far.
    asked: u64,
}

impl Topology {
    fn areas(&self) -> MutexGuard<'_, Areas> {
        self.areas.lock().expect("counting does not panic")
    }

    fn own(&mut self) -> &mut Areas {
        self.areas.get_mut().expect("counting does not panic")
    }

    /// The pods on the node at `place` that were `old` are `new`, which `nodes` know already.
    pub fn pod_changed(
        &mut self,
        place: usize,
        old: Option<&PodInfo>,
        new: Option<&PodInfo>,
        context: Context<'_>,
    ) {
        if let (Some(old), Some(new)) = (old, new)
            && counts_alike(old, new)
        {
            return;
        }
        let areas = self.own();
        if let Some(new) = new {
            for (_, term) in terms(new) {
                areas.area(Scope::of(&term.topology_key), context.nodes).carriers += 1;
            }
        }
        for area in &mut areas.all {
            let Some(number) = area.values.at(place) else { continue };
            for (pod, by) in old.map(|pod| (pod, -1)).into_iter().chain(new.map(|pod| (pod, 1))) {
                area.count(pod, number, by, context.namespaces);
            }
        }
        for (_, term) in old.into_iter().flat_map(terms) {
            let mut known = areas.all.iter_mut();
            if let Some(area) = known.find(|area| area.scope.is_key(&term.topology_key)) {
                area.carriers -= 1;
            }
        }
    }

    /// A node came, or is not what it was, or not known any more; its pods are the same.
    pub fn node_changed(&mut self, node: &NodeInfo, namespaces: &Namespaces) {
        for area in &mut self.own().all {
            area.node_changed(node, namespaces);
        }
    }

    /// The table has lost a node, which was not known and had no pods; the last one has its place.
    pub fn node_removed(&mut self, place: usize, last: usize) {
        for area in &mut self.own().all {
            debug_assert!(area.values.at(place).is_none(), "it took no part");
            Arc::make_mut(&mut area.values).swap_remove(place, last);
        }
    }

    pub fn namespaces_changed(&mut self) {
        for area in &mut self.own().all {
            area.matching.retain(|row| !row.who.minds_namespaces());
        }
    }

    /// How many such pods there are.
    pub fn matching(&self, who: Who, scope: Scope, context: Context<'_>) -> View {
        let by = |stand_in: &StandIn| {
            let differ = stand_in.pods().filter(|(_, pod)| who.has(pod, context.namespaces));
            (stand_in.node.place, differ.map(|(by, _)| by).sum())
        };
        let change: Option<(usize, i64)> = context.stand_in.map(by);
        let view = self.areas().matching(who, scope, context);
        match change {
            Some((place, by)) => view.changed(place, by),
            None => view,
        }
    }

    /// How many pods carry a term that matches the pod, each with the weight of the term's kind.
    pub fn carrying(
        &self,
        pod: &PodInfo,
        weight: impl Fn(Kind) -> i64,
        context: Context<'_>,
    ) -> Weighed {
        let mut areas = self.areas();
        let mut found = vec![];
        for area in areas.all.iter() {
            for (term, kinds) in &area.carrying {
                let weighs = kinds.iter().map(|(kind, counts)| (weight(*kind), counts));
                let mut weighs = weighs.filter(|(weight, _)| *weight != 0).peekable();
                if weighs.peek().is_some() && term.matches(pod, context.namespaces) {
                    found.extend(weighs.map(|(weight, counts)| (weight, area.view(counts))));
                }
            }
        }
        let Some(stand_in) = context.stand_in else { return Weighed(found) };
        for (by, other) in stand_in.pods() {
            for (kind, term) in terms(other) {
                let weight = weight(kind);
                if weight != 0 && term.matches(pod, context.namespaces) {
                    let area = areas.area(Scope::of(&term.topology_key), context.nodes);
                    let view = area.view(&Arc::default()).changed(stand_in.node.place, by);
                    found.push((weight, view));
                }
            }
        }
        Weighed(found)
    }
}

impl Areas {
    fn area(&mut self, scope: Scope, nodes: &Nodes) -> &mut Area {
        let at = match self.all.iter().position(|area| area.scope == scope) {
            Some(at) => at,
            None => {
                self.all.retain(|area| area.carriers > 0 || !area.matching.is_empty());
                self.all.push(Area::new(scope, nodes));
                self.all.len() - 1
            }
        };
        &mut self.all[at]
    }

    fn matching(&mut self, who: Who, scope: Scope, context: Context<'_>) -> View {
        self.asked += 1;
        let asked = self.asked;
        let area = self.area(scope, context.nodes);
        if let Some(row) = area.matching.iter_mut().find(|row| row.who == who) {
            row.asked = asked;
            let counts = row.counts.clone();
            return area.view(&counts);
        }
        let mut counts = Counts::new();
        for node in context.nodes {
            let Some(number) = area.values.at(node.place) else { continue };
            let count = node.pods.values().filter(|pod| who.has(pod, context.namespaces)).count();
            if count > 0 {
                *counts.entry(number).or_default() += count as i64;
            }
        }
        let counts = Arc::new(counts);
        let view = area.view(&counts);
        area.matching.push(Row { who, counts, asked });
        self.forget_oldest();
        view
    }

    /// Drops the map that was not asked for longest, if there are too many.
    fn forget_oldest(&mut self) {
        let rows = self.all.iter().flat_map(|area| &area.matching);
        if rows.clone().count() <= KEPT {
            return;
        }
        let oldest = rows.map(|row| row.asked).min();
        for area in &mut self.all {
            area.matching.retain(|row| Some(row.asked) != oldest);
        }
    }
}

/// Is one pod the same as the other to everybody who counts?
fn counts_alike(old: &PodInfo, new: &PodInfo) -> bool {
    old.key.namespace == new.key.namespace
        && old.labels == new.labels
        && old.deleting == new.deleting
        && terms(old).eq(terms(new))
}
