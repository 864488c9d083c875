//! How many pods of a sort there are by topology value (a zone, a host), kept by deltas.
//!
//! Affinity and spreading ask in each decision: how many pods that match a term, or that carry a term
//! which matches the new pod, are in a node's zone? Without counters, that is a look at every pod for every
//! decision; here it is a look at one map, and a pod that comes or goes changes one number in each map
//! that counts it.
//!
//! In: pods that come to nodes and go, nodes that change, from [`crate::cluster`] alone. Out: [`View`]s.
//!
//! ```text
//!  area = scope (which nodes, told apart by what)    zone, of all nodes
//!   └ values: node ► number of its value             node-1 ► 0 (a), node-2 ► 1 (b), node-3 ► 0
//!  asked = area, with
//!   └ rows: who ► number ► pods                      app=web in ns ► {0: 2, 1: 5}   made when asked for
//!  carried = area of a key alone, with
//!   └ terms: term, kind ► number ► pods              "not near app=web" ► {1: 1}    always there
//! ```
//!
//! Invariants:
//! - A count is what a recount over the known nodes would give; a value without pods has no entry.
//!   `plugins/recount_tests.rs` compares the two.
//! - Only nodes that take part in a scope have a number there; a number is some node's, or free and without
//!   entries in all maps of its area.
//! - Every term of every pod that can match at all, its node known or not, has an area of its key alone:
//!   terms of other pods must be found without having been asked for. The area goes with the last of them.
//! - People choose the keys of their pods' terms. A key that no node has costs nothing but its name: its area
//!   is made without a look at the nodes, and a pod that comes or goes is shown to the areas of its own terms
//!   and to those that a pod asked for, never to all.
//! - What pods match depends on namespaces' labels; maps that such a change could touch are dropped.
//!
//! Maps that no pod asked for lately are dropped as well, so that memory has a limit: one for each
//! constraint of the templates in use, of which there are fewer than of pods by far.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use k8s_openapi::api::core::v1::{NodeSelector, Toleration};
use machinery::selector::Selector;

use crate::node::{NodeInfo, tolerates_all};
use crate::pod::{Namespaces, PodInfo, Term};
use api::node_selectors;

/// The number of kept maps of matching pods: if more are used in turn, they are counted again each time. Few in
/// tests, so that they are forgotten and made again.
const KEPT: usize = if cfg!(test) { 20 } else { 512 };

/// Pods by the number of their nodes' value.
type Counts = HashMap<u32, i64>;
type Nodes = [Arc<NodeInfo>];
type Labels = BTreeMap<String, String>;

/// Which nodes take part, and what tells them apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scope {
    /// Nodes without this label take no part. Empty: each node is a value of its own.
    key: String,
    /// Labels that a node must have besides.
    needs: Vec<String>,
    /// The further selector of its labels.
    selects: Option<(Labels, Option<NodeSelector>)>,
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

    /// The node's value, if it takes part.
    fn value<'a>(&self, node: &'a NodeInfo) -> Option<&'a str> {
        let value = match self.key.as_str() {
            "" => &node.name,
            key => node.labels.get(key)?,
        };
        let has_labels = self.needs.iter().all(|key| node.labels.contains_key(key));
        let is_selected = || {
            self.selects.as_ref().is_none_or(|(labels, affinity)| {
                node_selectors::selects(labels, affinity.as_ref(), &node.name, &node.labels)
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
    /// The pods that match all of these terms.
    Matching(Vec<Term>),
    /// The pods of a namespace that are not terminating.
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

/// The kind of a term for its pod; for preferences, with the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Near,
    Far,
    RatherNear(i32),
    RatherFar(i32),
}

/// The terms that a pod carries and that can match.
fn terms(pod: &PodInfo) -> impl Iterator<Item = (Kind, &Term)> {
    let near = pod.affinity.iter().map(|term| (Kind::Near, term));
    let far = pod.anti_affinity.iter().map(|term| (Kind::Far, term));
    let rather_near =
        pod.preferred_affinity.iter().map(|(weight, term)| (Kind::RatherNear(*weight), term));
    let rather_far =
        pod.preferred_anti_affinity.iter().map(|(weight, term)| (Kind::RatherFar(*weight), term));
    let all = near.chain(far).chain(rather_near).chain(rather_far);
    all.filter(|(_, term)| !term.matches_nothing())
}

/// The values of a scope's nodes, numbered.
#[derive(Clone, Default)]
struct Values {
    /// By the node's place in the cluster's table; as long as the last node that takes part needs.
    of_nodes: Vec<Option<u32>>,
    numbers: HashMap<Arc<str>, u32>,
    /// A number's value, and how many nodes have it.
    users: Vec<(Arc<str>, u32)>,
    free: Vec<u32>,
}

impl Values {
    fn at(&self, place: usize) -> Option<u32> {
        self.of_nodes.get(place).copied().flatten()
    }

    fn is(&self, place: usize, value: Option<&str>) -> bool {
        self.at(place).map(|number| &*self.users[number as usize].0) == value
    }

    fn set(&mut self, place: usize, value: Option<&str>) {
        if value.is_none() && place >= self.of_nodes.len() {
            return;
        }
        let before = self.at(place);
        let number = value.map(|value| self.number(value));
        if place >= self.of_nodes.len() {
            self.of_nodes.resize(place + 1, None);
        }
        self.of_nodes[place] = number;
        let Some(before) = before else { return };
        let (name, users) = &mut self.users[before as usize];
        *users -= 1;
        if *users == 0 {
            self.numbers.remove(name);
            self.free.push(before);
        }
    }

    /// The value's number, for one more node.
    fn number(&mut self, value: &str) -> u32 {
        if let Some(number) = self.numbers.get(value).copied() {
            self.users[number as usize].1 += 1;
            return number;
        }
        let name: Arc<str> = value.into();
        let number = match self.free.pop() {
            Some(number) => {
                self.users[number as usize] = (name.clone(), 1);
                number
            }
            None => {
                self.users.push((name.clone(), 1));
                self.users.len() as u32 - 1
            }
        };
        self.numbers.insert(name, number);
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

/// The maps of matching pods that a pod asked for.
#[derive(Clone)]
struct Row {
    who: Who,
    counts: Arc<Counts>,
    /// When it was last asked for.
    asked: u64,
}

/// How many known nodes have a label.
type Keys = HashMap<String, usize>;

#[derive(Clone)]
struct Area {
    scope: Scope,
    values: Arc<Values>,
}

/// The counts that were requested for a domain; there is at least one.
#[derive(Clone)]
struct Asked {
    area: Area,
    rows: Vec<Row>,
}

/// The terms of pods that have the area's key.
#[derive(Clone)]
struct Carried {
    area: Area,
    terms: HashMap<Term, Vec<(Kind, Arc<Counts>)>>,
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
    fn new(scope: Scope, nodes: &Nodes, keys: &Keys) -> Self {
        let mut values = Values::default();
        if scope.key.is_empty() || keys.contains_key(&scope.key) {
            for node in nodes {
                values.set(node.place, scope.value(node));
            }
        }
        Self { scope, values: Arc::new(values) }
    }

    /// The number of the node's value, and what it is from now on; `None` if it does not change.
    fn change(&mut self, node: &NodeInfo) -> Option<(Option<u32>, Option<u32>)> {
        let value = self.scope.value(node);
        if self.values.is(node.place, value) {
            return None;
        }
        let before = self.values.at(node.place);
        Arc::make_mut(&mut self.values).set(node.place, value);
        Some((before, self.values.at(node.place)))
    }

    fn node_removed(&mut self, place: usize, last: usize) {
        debug_assert!(self.values.at(place).is_none(), "it took no part");
        if self.values.at(last).is_some() || self.values.of_nodes.len() > last {
            Arc::make_mut(&mut self.values).swap_remove(place, last);
        }
    }

    fn view(&self, counts: &Arc<Counts>) -> View {
        View { values: self.values.clone(), counts: counts.clone(), change: None }
    }
}

/// The effect of a changed topology value of a node: its pods move from one count to another.
fn moves((from, to): (Option<u32>, Option<u32>)) -> impl Iterator<Item = (u32, i64)> {
    from.map(|number| (number, -1)).into_iter().chain(to.map(|number| (number, 1)))
}

impl Asked {
    fn count(&mut self, pod: &PodInfo, number: u32, by: i64, namespaces: &Namespaces) {
        for row in self.rows.iter_mut().filter(|row| row.who.has(pod, namespaces)) {
            bump(&mut row.counts, number, by);
        }
    }

    fn node_changed(&mut self, node: &NodeInfo, namespaces: &Namespaces) {
        for (number, by) in self.area.change(node).into_iter().flat_map(moves) {
            node.pods.values().for_each(|pod| self.count(pod, number, by, namespaces));
        }
    }
}

impl Carried {
    fn new(key: &str, nodes: &Nodes, keys: &Keys) -> Self {
        let area = Area::new(Scope::of(key), nodes, keys);
        Self { area, terms: HashMap::new(), carriers: 0 }
    }

    fn count(&mut self, kind: Kind, term: &Term, number: u32, by: i64) {
        if !self.terms.contains_key(term) {
            self.terms.insert(term.clone(), vec![]);
        }
        let Some(kinds) = self.terms.get_mut(term) else { return };
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
            self.terms.remove(term);
        }
    }

    fn node_changed(&mut self, node: &NodeInfo) {
        for (number, by) in self.area.change(node).into_iter().flat_map(moves) {
            for (kind, term) in node.pods.values().flat_map(|pod| terms(pod)) {
                if term.topology_key == self.area.scope.key {
                    self.count(kind, term, number, by);
                }
            }
        }
    }
}

/// Pods by topology value, as they were when asked for.
pub struct View {
    values: Arc<Values>,
    counts: Arc<Counts>,
    /// The difference of one count, for what-if questions.
    change: Option<(u32, i64)>,
}

impl View {
    /// The counts with so many more pods on the node at `place`.
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

/// So many views of the same values are looked at for each node. More are added up once, which is a look at
/// all values of each.
const FEW: usize = 4;

/// Views, and what a pod of each weighs.
#[derive(Default)]
pub struct Weighed {
    views: Vec<(i64, View)>,
    /// Weights by number.
    sums: Vec<(Arc<Values>, Vec<i64>)>,
}

impl Weighed {
    /// Many terms of one key cost a node no more than few.
    pub fn new(views: Vec<(i64, View)>) -> Self {
        if views.len() <= FEW {
            return Self { views, sums: vec![] };
        }
        let mut by_values: HashMap<*const Values, Vec<(i64, View)>> = HashMap::new();
        for (weight, view) in views {
            by_values.entry(Arc::as_ptr(&view.values)).or_default().push((weight, view));
        }
        let mut all = Self::default();
        for views in by_values.into_values() {
            match views.first().filter(|_| views.len() > FEW) {
                Some((_, first)) => all.sums.push((first.values.clone(), sum(&views))),
                None => all.views.extend(views),
            }
        }
        all
    }

    pub fn here(&self, node: &NodeInfo) -> i64 {
        let sums = self.sums.iter().filter_map(|(values, of)| {
            let number = values.at(node.place)?;
            of.get(number as usize).copied()
        });
        let views = self.views.iter();
        sums.sum::<i64>()
            + views.map(|(weight, view)| weight * view.here(node).unwrap_or(0)).sum::<i64>()
    }

    pub fn is_empty(&self) -> bool {
        self.views.is_empty() && self.sums.is_empty()
    }
}

/// Views of the same values, added up.
fn sum(views: &[(i64, View)]) -> Vec<i64> {
    let numbers = views.first().map_or(0, |(_, view)| view.values.users.len());
    let mut sum = vec![0; numbers];
    for (weight, view) in views {
        for number in view.numbers() {
            sum[number as usize] += weight * view.count(number);
        }
    }
    sum
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

/// The context of a question.
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
    asked: Vec<Asked>,
    /// By key.
    carried: HashMap<String, Carried>,
    /// Keys whose area was made for a what-if question, and that no pod may carry.
    guests: Vec<String>,
    keys: Keys,
    /// Questions so far.
    questions: u64,
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
        areas.drop_guests();
        for asked in &mut areas.asked {
            let Some(number) = asked.area.values.at(place) else { continue };
            for (pod, by) in old.map(|pod| (pod, -1)).into_iter().chain(new.map(|pod| (pod, 1))) {
                asked.count(pod, number, by, context.namespaces);
            }
        }
        for (kind, term) in new.into_iter().flat_map(terms) {
            let carried = areas.carried(&term.topology_key, context.nodes);
            carried.carriers += 1;
            if let Some(number) = carried.area.values.at(place) {
                carried.count(kind, term, number, 1);
            }
        }
        for (kind, term) in old.into_iter().flat_map(terms) {
            let Some(carried) = areas.carried.get_mut(&term.topology_key) else { continue };
            if let Some(number) = carried.area.values.at(place) {
                carried.count(kind, term, number, -1);
            }
            carried.carriers -= 1;
            if carried.carriers == 0 {
                areas.carried.remove(&term.topology_key);
            }
        }
    }

    /// A node came, or is not what it was, or not known any more; its pods are the same. `before`: its
    /// labels, if it was known.
    pub fn node_changed(
        &mut self,
        before: Option<&Labels>,
        node: &NodeInfo,
        namespaces: &Namespaces,
    ) {
        let areas = self.own();
        areas.count_keys(before, Some(&node.labels).filter(|_| node.known));
        for asked in &mut areas.asked {
            asked.node_changed(node, namespaces);
        }
        for carried in areas.carried.values_mut() {
            carried.node_changed(node);
        }
    }

    /// The table has lost a node, which was not known and had no pods; the last one has its place.
    pub fn node_removed(&mut self, place: usize, last: usize) {
        let areas = self.own();
        let asked = areas.asked.iter_mut().map(|asked| &mut asked.area);
        let carried = areas.carried.values_mut().map(|carried| &mut carried.area);
        asked.chain(carried).for_each(|area| area.node_removed(place, last));
    }

    pub fn namespaces_changed(&mut self) {
        self.own().retain(|row| !row.who.minds_namespaces());
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
    ) -> Vec<(i64, View)> {
        let mut areas = self.areas();
        let mut found = vec![];
        for Carried { area, terms, .. } in areas.carried.values() {
            for (term, kinds) in terms {
                let weighs = kinds.iter().map(|(kind, counts)| (weight(*kind), counts));
                let mut weighs = weighs.filter(|(weight, _)| *weight != 0).peekable();
                if weighs.peek().is_some() && term.matches(pod, context.namespaces) {
                    found.extend(weighs.map(|(weight, counts)| (weight, area.view(counts))));
                }
            }
        }
        let Some(stand_in) = context.stand_in else { return found };
        for (by, other) in stand_in.pods() {
            for (kind, term) in terms(other) {
                let weight = weight(kind);
                if weight != 0 && term.matches(pod, context.namespaces) {
                    let area = &areas.guest(&term.topology_key, context.nodes).area;
                    let view = area.view(&Arc::default()).changed(stand_in.node.place, by);
                    found.push((weight, view));
                }
            }
        }
        found
    }
}

impl Areas {
    fn carried(&mut self, key: &str, nodes: &Nodes) -> &mut Carried {
        let known = self.carried.entry(key.into());
        known.or_insert_with(|| Carried::new(key, nodes, &self.keys))
    }

    /// An area for a pod that is not there.
    fn guest(&mut self, key: &str, nodes: &Nodes) -> &Carried {
        if !self.carried.contains_key(key) {
            self.guests.push(key.into());
        }
        self.carried(key, nodes)
    }

    fn drop_guests(&mut self) {
        for key in std::mem::take(&mut self.guests) {
            if self.carried.get(&key).is_some_and(|carried| carried.carriers == 0) {
                self.carried.remove(&key);
            }
        }
    }

    fn count_keys(&mut self, before: Option<&Labels>, after: Option<&Labels>) {
        for key in after.into_iter().flat_map(Labels::keys) {
            *self.keys.entry(key.clone()).or_default() += 1;
        }
        for key in before.into_iter().flat_map(Labels::keys) {
            if let Some(count) = self.keys.get_mut(key) {
                *count -= 1;
                if *count == 0 {
                    self.keys.remove(key);
                }
            }
        }
    }

    fn matching(&mut self, who: Who, scope: Scope, context: Context<'_>) -> View {
        self.questions += 1;
        let at = self.asked.iter().position(|asked| asked.area.scope == scope);
        let at = at.unwrap_or_else(|| {
            let area = Area::new(scope, context.nodes, &self.keys);
            self.asked.push(Asked { area, rows: vec![] });
            self.asked.len() - 1
        });
        let Asked { area, rows } = &mut self.asked[at];
        if let Some(row) = rows.iter_mut().find(|row| row.who == who) {
            row.asked = self.questions;
            return area.view(&row.counts);
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
        rows.push(Row { who, counts, asked: self.questions });
        self.forget_oldest();
        view
    }

    /// Drops the map that was not asked for longest, if there are too many.
    fn forget_oldest(&mut self) {
        let rows = self.asked.iter().flat_map(|asked| &asked.rows);
        if rows.clone().count() <= KEPT {
            return;
        }
        let oldest = rows.map(|row| row.asked).min();
        self.retain(|row| Some(row.asked) != oldest);
    }

    fn retain(&mut self, is_kept: impl Fn(&Row) -> bool) {
        for asked in &mut self.asked {
            asked.rows.retain(&is_kept);
        }
        self.asked.retain(|asked| !asked.rows.is_empty());
    }
}

/// Is one pod the same as the other to everybody who counts?
fn counts_alike(old: &PodInfo, new: &PodInfo) -> bool {
    old.key.namespace == new.key.namespace
        && old.labels == new.labels
        && old.deleting == new.deleting
        && terms(old).eq(terms(new))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn pod(preferred: &Value) -> PodInfo {
        let object = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "p",
            "labels": {"app": "web"}}, "spec": {"containers": [], "affinity": {"podAffinity":
            {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}});
        PodInfo::new(&from_value(object).unwrap())
    }

    fn nodes(topology: &mut Topology, count: usize) -> Vec<Arc<NodeInfo>> {
        let node = |place| {
            let labels = [("zone", "a".to_owned()), ("host", format!("n{place}"))];
            let labels = labels.map(|(key, value)| (key.to_owned(), value)).into();
            Arc::new(NodeInfo { place, known: true, labels, ..NodeInfo::default() })
        };
        let nodes: Vec<_> = (0..count).map(node).collect();
        for node in &nodes {
            topology.node_changed(None, node, &Namespaces::new());
        }
        nodes
    }

    fn context<'a>(nodes: &'a Nodes, namespaces: &'a Namespaces) -> Context<'a> {
        Context { nodes, namespaces, stand_in: None }
    }

    #[test]
    fn keys_that_no_node_has_cost_nothing_and_go_with_their_pod() {
        let spaces = Namespaces::new();
        let mut topology = Topology::default();
        let mut nodes = nodes(&mut topology, 100);
        let term = |key: String, selector: Option<Value>| {
            let term = json!({"topologyKey": key, "labelSelector": selector});
            json!({"weight": 1, "podAffinityTerm": term})
        };
        let mut all: Vec<Value> =
            (0..2000).map(|n| term(format!("k{n}"), Some(json!({})))).collect();
        all.push(term("zone".into(), Some(json!({}))));
        all.push(term("idle".into(), None));
        let greedy = pod(&json!(all));
        Arc::make_mut(&mut nodes[7]).add(Arc::new(greedy.clone()));
        topology.pod_changed(7, None, Some(&greedy), context(&nodes, &spaces));
        let places = |topology: &mut Topology| {
            let areas = topology.own();
            let lengths = areas.carried.values().map(|one| one.area.values.of_nodes.len());
            (areas.carried.len(), lengths.sum::<usize>())
        };
        // A term that matches nothing is not there.
        assert_eq!(places(&mut topology), (2001, 100));
        // One of the keys is a node's after all.
        let labels = nodes[7].labels.clone();
        Arc::make_mut(&mut nodes[7]).labels.insert("k5".into(), "x".into());
        topology.node_changed(Some(&labels), &nodes[7], &spaces);
        assert_eq!(places(&mut topology), (2001, 108));
        let weight = |kind| i64::from(kind == Kind::RatherNear(1));
        let seen = Weighed::new(topology.carrying(&greedy, weight, context(&nodes, &spaces)));
        assert_eq!((seen.here(&nodes[7]), seen.here(&nodes[8])), (2, 1));
        Arc::make_mut(&mut nodes[7]).remove("p");
        topology.pod_changed(7, Some(&greedy), None, context(&nodes, &spaces));
        assert_eq!(places(&mut topology), (0, 0));
        // Nor does a question leave anything for good.
        let mut stand_in = StandIn::of(&nodes[7]);
        stand_in.add(Arc::new(greedy.clone()));
        let asked = Context { stand_in: Some(&stand_in), ..context(&nodes, &spaces) };
        assert_eq!(Weighed::new(topology.carrying(&greedy, weight, asked)).here(&nodes[7]), 2);
        let plain = pod(&json!([]));
        topology.pod_changed(1, None, Some(&plain), context(&nodes, &spaces));
        assert_eq!(places(&mut topology), (0, 0));
    }

    #[test]
    fn many_terms_of_a_key_are_one_look_for_each_node() {
        let spaces = Namespaces::new();
        let mut topology = Topology::default();
        let nodes = nodes(&mut topology, 10);
        let context = context(&nodes, &spaces);
        let term = |n: i32| {
            let other = json!({"key": "app", "operator": "NotIn", "values": [format!("v{n}")]});
            let term =
                json!({"topologyKey": "host", "labelSelector": {"matchExpressions": [other]}});
            json!({"weight": 1 + n % 2, "podAffinityTerm": term})
        };
        let many = pod(&(0..100).map(term).collect());
        topology.pod_changed(4, None, Some(&many), context);
        let weight = |kind| match kind {
            Kind::RatherNear(weight) => i64::from(weight),
            _ => 0,
        };
        let seen = Weighed::new(topology.carrying(&many, weight, context));
        assert_eq!((seen.views.len(), seen.sums.len()), (0, 1));
        assert_eq!((seen.here(&nodes[4]), seen.here(&nodes[5])), (150, 0));
    }

    #[test]
    fn a_value_that_no_node_has_any_more_is_forgotten() {
        let mut values = Values::default();
        values.set(5, None);
        assert!(values.of_nodes.is_empty());
        for (place, value) in [(0, Some("a")), (1, Some("b")), (0, Some("c")), (1, None)] {
            values.set(place, value);
            assert!(values.is(place, value), "{place} {value:?}");
        }
        assert_eq!(values.numbers.keys().map(|name| &**name).collect::<Vec<_>>(), ["c"]);
        values.set(1, Some("d"));
        assert!(values.is(1, Some("d")) && values.is(0, Some("c")) && !values.is(0, Some("d")));
        assert_eq!(values.users.len(), 3);
    }
}
