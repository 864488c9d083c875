//! The scheduler's table of nodes, kept by deltas.
//!
//! In: events of nodes, pods and namespaces, and our own assumptions. Out: reads by plugins.
//! Invariants: an assumed pod counts on its node until the API confirms or binding fails; a pod
//! counts on at most one node; what changes here changes in the [`Topology`] too, at once.

use std::collections::{BTreeMap, HashMap};
use std::mem::take;
use std::sync::{Arc, OnceLock};

use k8s_openapi::api::core::v1::Node;

use crate::node::{NodeInfo, zone};
use crate::pod::{Namespaces, PodInfo};
use crate::templates::Templates;
use crate::topology::{Context, Kind, Scope, StandIn, Topology, View, Who};

/// Clones share everything: a clone with one node changed ([`Cluster::what_if`]) costs that node, and
/// while there is none, changes are made in place.
#[derive(Clone, Default)]
pub struct Cluster {
    /// Dense, so that a decision runs along an array; the order is arbitrary.
    nodes: Arc<Vec<Arc<NodeInfo>>>,
    by_name: Arc<HashMap<String, usize>>,
    /// Places in the order of looking: round the zones, so that the share of the nodes that is looked at
    /// has some of each. Rebuilt when nodes are added or removed, or change their zone.
    order: Arc<OnceLock<Vec<usize>>>,
    /// The node that each pod counts on, by uid.
    places: Arc<HashMap<String, Place>>,
    /// Pods that wait for room on a node that preemption makes, by node.
    nominated: Arc<HashMap<String, Vec<Arc<PodInfo>>>>,
    namespaces: Arc<Namespaces>,
    /// How many nodes exist.
    known: usize,
    /// On how many nodes each image is.
    image_nodes: Arc<HashMap<String, usize>>,
    topology: Arc<Topology>,
    templates: Arc<Templates>,
    /// The entry of a node at its index.
    changed: Option<StandIn>,
}

#[derive(Clone)]
struct Place {
    node: String,
    assumed: bool,
}

impl Cluster {
    /// Nodes that exist.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeInfo> {
        self.nodes.iter().map(|node| self.or_stand_in(node)).filter(|node| node.known)
    }

    /// Nodes that exist in the order of looking, from one of them on; each once.
    pub fn nodes_from(&self, start: usize) -> impl Iterator<Item = &NodeInfo> {
        let order = self.order.get_or_init(|| round_the_zones(&self.nodes));
        let (before, after) = order.split_at(start % order.len().max(1));
        after.iter().chain(before).map(|place| self.or_stand_in(&self.nodes[*place]))
    }

    fn or_stand_in<'a>(&'a self, node: &'a NodeInfo) -> &'a NodeInfo {
        match &self.changed {
            Some(changed) if changed.node.place == node.place => &changed.node,
            _ => node,
        }
    }

    /// How many nodes exist.
    pub fn count(&self) -> usize {
        self.known
    }

    pub fn node(&self, name: &str) -> Option<&NodeInfo> {
        let at = *self.by_name.get(name)?;
        Some(self.or_stand_in(&self.nodes[at])).filter(|node| node.known)
    }

    fn context(&self) -> Context<'_> {
        let (nodes, namespaces) = (&**self.nodes, &*self.namespaces);
        Context { nodes, namespaces, stand_in: self.changed.as_ref() }
    }

    /// How many such pods there are, by topology value.
    pub fn matching(&self, who: Who, scope: Scope) -> View {
        self.topology.matching(who, scope, self.context())
    }

    /// How many pods carry a term that matches the pod, by topology value.
    pub fn carrying(&self, pod: &PodInfo, weight: impl Fn(Kind) -> i64) -> Vec<(i64, View)> {
        self.topology.carrying(pod, weight, self.context())
    }

    pub fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    /// Its labels, if it exists. Returns what they were.
    pub fn set_namespace(
        &mut self,
        name: String,
        labels: Option<BTreeMap<String, String>>,
    ) -> Option<BTreeMap<String, String>> {
        if self.namespaces.get(&name) != labels.as_ref() {
            Arc::make_mut(&mut self.topology).namespaces_changed();
        }
        let namespaces = Arc::make_mut(&mut self.namespaces);
        match labels {
            Some(labels) => namespaces.insert(name, labels),
            None => namespaces.remove(&name),
        }
    }

    pub fn nodes_with_image(&self, image: &str) -> usize {
        self.image_nodes.get(image).copied().unwrap_or(0)
    }

    fn entry(&mut self, name: &str) -> &mut NodeInfo {
        let nodes = Arc::make_mut(&mut self.nodes);
        let at = match self.by_name.get(name) {
            Some(at) => *at,
            None => {
                let place = nodes.len();
                nodes.push(Arc::new(NodeInfo { place, ..NodeInfo::named(name) }));
                Arc::make_mut(&mut self.by_name).insert(name.into(), place);
                place
            }
        };
        Arc::make_mut(&mut nodes[at])
    }

    fn node_at(&mut self, at: usize) -> &mut NodeInfo {
        Arc::make_mut(&mut Arc::make_mut(&mut self.nodes)[at])
    }

    pub fn update_node(&mut self, node: &Node) {
        let entry = self.entry(node.metadata.name.as_deref().unwrap_or_default());
        let (at, was_known) = (entry.place, entry.known);
        let before: Vec<_> = entry.images.keys().cloned().collect();
        let (labels, taints) = (take(&mut entry.labels), take(&mut entry.taints));
        entry.update(node);
        // Most of what a kubelet says of its node is that it lives.
        let is_another = !was_known || entry.labels != labels || entry.taints != taints;
        let is_elsewhere = !was_known || zone(&entry.labels) != zone(&labels);
        let after: Vec<_> = entry.images.keys().cloned().collect();
        self.count_images(&before, &after);
        self.known += usize::from(!was_known);
        if is_elsewhere {
            self.order = Arc::default();
        }
        if is_another {
            self.node_changed(was_known.then_some(&labels), at);
        }
    }

    fn node_changed(&mut self, before: Option<&BTreeMap<String, String>>, at: usize) {
        Arc::make_mut(&mut self.topology).node_changed(before, &self.nodes[at], &self.namespaces);
    }

    /// Its pods stay until they are gone themselves.
    pub fn remove_node(&mut self, name: &str) {
        let Some(at) = self.by_name.get(name).copied() else {
            return;
        };
        let images: Vec<_> = self.nodes[at].images.keys().cloned().collect();
        self.count_images(&images, &[]);
        let node = self.node_at(at);
        let was_known = std::mem::replace(&mut node.known, false);
        node.images.clear();
        let labels = take(&mut node.labels);
        self.known -= usize::from(was_known);
        if was_known {
            self.order = Arc::default();
            self.node_changed(Some(&labels), at);
        }
        self.drop_if_empty(at);
    }

    fn count_images(&mut self, before: &[String], after: &[String]) {
        let image_nodes = Arc::make_mut(&mut self.image_nodes);
        for image in after {
            *image_nodes.entry(image.clone()).or_default() += 1;
        }
        for image in before {
            if let Some(count) = image_nodes.get_mut(image) {
                *count -= 1;
                if *count == 0 {
                    image_nodes.remove(image);
                }
            }
        }
    }

    fn drop_if_empty(&mut self, at: usize) {
        if self.nodes[at].known || !self.nodes[at].pods.is_empty() {
            return;
        }
        let nodes = Arc::make_mut(&mut self.nodes);
        let gone = nodes.swap_remove(at);
        let by_name = Arc::make_mut(&mut self.by_name);
        by_name.remove(&gone.name);
        if let Some(moved) = nodes.get_mut(at).map(Arc::make_mut) {
            moved.place = at;
            self.order = Arc::default();
            by_name.insert(moved.name.clone(), at);
        }
        Arc::make_mut(&mut self.topology).node_removed(at, self.nodes.len());
    }

    /// A pod that the API has told of: what others have too is shared with them.
    pub fn shared(&mut self, mut pod: PodInfo) -> Arc<PodInfo> {
        Arc::make_mut(&mut self.templates).share(&mut pod);
        Arc::new(pod)
    }

    /// The API says where the pod is.
    pub fn put_pod(&mut self, pod: Arc<PodInfo>) {
        self.place(pod, false);
    }

    /// We decided where the pod goes.
    pub fn assume(&mut self, pod: &PodInfo, node: &str) {
        let pod = PodInfo { node_name: node.into(), ..pod.clone() };
        self.place(Arc::new(pod), true);
    }

    /// Binding failed. True if the pod was still assumed.
    pub fn forget(&mut self, uid: &str) -> bool {
        let assumed = self.is_assumed(uid);
        if assumed {
            self.remove_pod(uid);
        }
        assumed
    }

    pub fn is_assumed(&self, uid: &str) -> bool {
        self.places.get(uid).is_some_and(|place| place.assumed)
    }

    fn place(&mut self, pod: Arc<PodInfo>, assumed: bool) {
        if self.places.get(&pod.uid).is_some_and(|place| place.node != pod.node_name) {
            self.remove_pod(&pod.uid);
        }
        let place = Place { node: pod.node_name.clone(), assumed };
        Arc::make_mut(&mut self.places).insert(pod.uid.clone(), place);
        let node = self.entry(&pod.node_name);
        let (at, old) = (node.place, node.add(pod.clone()));
        self.pod_changed(at, old.as_deref(), Some(&pod));
    }

    fn pod_changed(&mut self, at: usize, old: Option<&PodInfo>, new: Option<&PodInfo>) {
        let context = Context { nodes: &self.nodes, namespaces: &self.namespaces, stand_in: None };
        Arc::make_mut(&mut self.topology).pod_changed(at, old, new, context);
    }

    pub fn remove_pod(&mut self, uid: &str) {
        let Some(place) = Arc::make_mut(&mut self.places).remove(uid) else {
            return;
        };
        if let Some(at) = self.by_name.get(&place.node).copied() {
            let old = self.node_at(at).remove(uid);
            self.pod_changed(at, old.as_deref(), None);
            self.drop_if_empty(at);
        }
    }

    /// `node` empty: the pod waits for no node any more.
    pub fn nominate(&mut self, pod: &PodInfo, node: &str) {
        if self.nominated.is_empty() && node.is_empty() {
            return;
        }
        let nominated = Arc::make_mut(&mut self.nominated);
        for pods in nominated.values_mut() {
            pods.retain(|one| one.uid != pod.uid);
        }
        nominated.retain(|_, pods| !pods.is_empty());
        if !node.is_empty() {
            nominated.entry(node.into()).or_default().push(Arc::new(pod.clone()));
        }
    }

    /// Pods at least as important as `pod` that wait for room on `node`.
    pub fn nominated_on(&self, node: &str, pod: &PodInfo) -> Vec<Arc<PodInfo>> {
        let waiting = self.nominated.get(node).into_iter().flatten();
        waiting.filter(|one| one.priority >= pod.priority && one.uid != pod.uid).cloned().collect()
    }

    /// This cluster, where pods of one of its nodes may come and go without anybody else's notice.
    pub fn what_if(&self, node: &NodeInfo) -> WhatIf {
        let changed = Some(StandIn::of(node));
        WhatIf { cluster: Self { changed, ..self.clone() }, place: node.place }
    }
}

/// The places of nodes that exist: the first of each zone, the second of each, and so on.
/// Upstream: `nodeTree.list`.
fn round_the_zones(nodes: &[Arc<NodeInfo>]) -> Vec<usize> {
    let mut seen: HashMap<(&str, &str), usize> = HashMap::new();
    let mut all = vec![];
    for node in nodes.iter().filter(|node| node.known) {
        let new = seen.len();
        let number = *seen.entry(zone(&node.labels)).or_insert(new);
        all.push((number, node.place));
    }
    let mut members = vec![0usize; seen.len()];
    let mut ranked: Vec<_> = all
        .into_iter()
        .map(|(zone, place)| {
            members[zone] += 1;
            (members[zone], zone, place)
        })
        .collect();
    ranked.sort_unstable();
    ranked.into_iter().map(|(_, _, place)| place).collect()
}

/// A cluster as it would be.
pub struct WhatIf {
    cluster: Cluster,
    place: usize,
}

impl WhatIf {
    pub fn add(&mut self, pod: Arc<PodInfo>) {
        if let Some(changed) = &mut self.cluster.changed {
            changed.add(pod);
        }
    }

    pub fn remove(&mut self, uid: &str) {
        if let Some(changed) = &mut self.cluster.changed {
            changed.remove(uid);
        }
    }

    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The node that differs.
    pub fn node(&self) -> &NodeInfo {
        self.cluster.or_stand_in(&self.cluster.nodes[self.place])
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn node(name: &str, labels: &Value) -> Node {
        from_value(json!({"metadata": {"name": name, "labels": labels}})).unwrap()
    }

    #[test]
    fn nodes_are_looked_at_round_the_zones() {
        let mut cluster = Cluster::default();
        let zone = |name: &str| json!({"topology.kubernetes.io/zone": name});
        let check = |cluster: &Cluster, start: usize, expected: &str| {
            let names: Vec<_> = cluster.nodes_from(start).map(|node| node.name.as_str()).collect();
            assert_eq!(names.join(" "), expected);
            assert_eq!(names.len(), cluster.count());
        };
        check(&cluster, 3, "");
        let put = |cluster: &mut Cluster, all: &[(&str, &str)]| {
            all.iter().for_each(|(name, at)| cluster.update_node(&node(name, &zone(at))));
        };
        put(&mut cluster, &[("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")]);
        check(&cluster, 0, "a1 b1 c1 a2 a3");
        check(&cluster, 2, "c1 a2 a3 a1 b1");
        check(&cluster, 7, "c1 a2 a3 a1 b1");
        put(&mut cluster, &[("c2", "c"), ("a2", "b")]);
        check(&cluster, 0, "a1 a2 c1 a3 b1 c2");
        let what_if = cluster.what_if(cluster.node("a1").unwrap());
        cluster.remove_node("a1");
        check(&cluster, 0, "c2 a2 a3 c1 b1");
        check(what_if.cluster(), 0, "a1 a2 c1 a3 b1 c2");
        // A node that only pods know is not looked at.
        let lost = json!({"metadata": {"name": "p", "uid": "p"}, "spec": {"containers": [],
            "nodeName": "lost"}});
        cluster.put_pod(Arc::new(PodInfo::new(&from_value(lost).unwrap())));
        put(&mut cluster, &[("d1", "")]);
        check(&cluster, 0, "c2 a2 a3 d1 c1 b1");
        // The last takes its place in the table.
        cluster.remove_pod("p");
        check(&cluster, 0, "c2 a2 a3 d1 c1 b1");
        cluster.update_node(&node(
            "e1",
            &json!({"failure-domain.beta.kubernetes.io/zone": "a",
            "topology.kubernetes.io/zone": "z"}),
        ));
        check(&cluster, 0, "c2 a2 a3 d1 c1 b1 e1");
    }

    #[test]
    fn a_node_that_lives_on_changes_no_counts() {
        let mut cluster = Cluster::default();
        let check = |cluster: &mut Cluster, node: &Node, is_same: bool| {
            let before = cluster.clone();
            cluster.update_node(node);
            assert_eq!(Arc::ptr_eq(&before.topology, &cluster.topology), is_same, "{node:?}");
        };
        check(&mut cluster, &node("a", &json!({"zone": "x"})), false);
        check(&mut cluster, &node("a", &json!({"zone": "x"})), true);
        check(&mut cluster, &node("a", &json!({"zone": "y"})), false);
        let mut tainted = node("a", &json!({"zone": "y"}));
        let taints = json!([{"key": "k", "effect": "NoSchedule"}]);
        tainted.spec.get_or_insert_default().taints = from_value(taints).unwrap();
        check(&mut cluster, &tainted, false);
        check(&mut cluster, &tainted, true);
        cluster.remove_node("a");
        check(&mut cluster, &tainted, false);
    }
}
