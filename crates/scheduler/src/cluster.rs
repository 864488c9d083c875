//! The scheduler's table of nodes, kept by deltas.
//!
//! In: events of nodes, pods and namespaces, and our own assumptions. Out: reads by plugins.
//! Invariants: an assumed pod counts on its node until the API confirms or binding fails; a pod
//! counts on at most one node.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use crate::node::NodeInfo;
use crate::pod::PodInfo;

pub type Namespaces = HashMap<String, BTreeMap<String, String>>;

#[derive(Clone, Default)]
pub struct Cluster {
    /// Dense, so that a decision runs along an array; the order is arbitrary.
    nodes: Vec<NodeInfo>,
    by_name: HashMap<String, usize>,
    /// Where each pod counts, by uid.
    places: HashMap<String, Place>,
    /// Pods that wait for room on a node that preemption makes, by node.
    nominated: HashMap<String, Vec<Arc<PodInfo>>>,
    pub namespaces: Namespaces,
    /// On how many nodes each image is.
    image_nodes: HashMap<String, usize>,
}

#[derive(Clone)]
struct Place {
    node: String,
    assumed: bool,
}

impl Cluster {
    /// Nodes that exist.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeInfo> + Clone {
        self.nodes.iter().filter(|node| node.known)
    }

    pub fn node(&self, name: &str) -> Option<&NodeInfo> {
        self.by_name.get(name).map(|at| &self.nodes[*at]).filter(|node| node.known)
    }

    pub fn nodes_with_image(&self, image: &str) -> usize {
        self.image_nodes.get(image).copied().unwrap_or(0)
    }

    fn entry(&mut self, name: &str) -> &mut NodeInfo {
        let nodes = &mut self.nodes;
        let at = *self.by_name.entry(name.into()).or_insert_with(|| {
            nodes.push(NodeInfo::named(name));
            nodes.len() - 1
        });
        &mut nodes[at]
    }

    pub fn update_node(&mut self, node: &Node) {
        let entry = self.entry(node.metadata.name.as_deref().unwrap_or_default());
        let before: Vec<_> = entry.images.keys().cloned().collect();
        entry.update(node);
        let after: Vec<_> = entry.images.keys().cloned().collect();
        self.count_images(&before, &after);
    }

    /// Its pods stay until they are gone themselves.
    pub fn remove_node(&mut self, name: &str) {
        let Some(at) = self.by_name.get(name).copied() else {
            return;
        };
        let images: Vec<_> = self.nodes[at].images.keys().cloned().collect();
        self.count_images(&images, &[]);
        self.nodes[at].known = false;
        self.nodes[at].images.clear();
        self.drop_if_empty(at);
    }

    fn count_images(&mut self, before: &[String], after: &[String]) {
        for image in after {
            *self.image_nodes.entry(image.clone()).or_default() += 1;
        }
        for image in before {
            if let Some(count) = self.image_nodes.get_mut(image) {
                *count -= 1;
                if *count == 0 {
                    self.image_nodes.remove(image);
                }
            }
        }
    }

    fn drop_if_empty(&mut self, at: usize) {
        if self.nodes[at].known || !self.nodes[at].pods.is_empty() {
            return;
        }
        let gone = self.nodes.swap_remove(at);
        self.by_name.remove(&gone.name);
        if let Some(moved) = self.nodes.get(at) {
            self.by_name.insert(moved.name.clone(), at);
        }
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
        self.places.insert(pod.uid.clone(), place);
        self.entry(&pod.node_name.clone()).add(pod);
    }

    pub fn remove_pod(&mut self, uid: &str) {
        let Some(place) = self.places.remove(uid) else {
            return;
        };
        if let Some(at) = self.by_name.get(&place.node).copied() {
            self.nodes[at].remove(uid);
            self.drop_if_empty(at);
        }
    }

    /// `node` empty: the pod waits for no node any more.
    pub fn nominate(&mut self, pod: &PodInfo, node: &str) {
        for pods in self.nominated.values_mut() {
            pods.retain(|one| one.uid != pod.uid);
        }
        self.nominated.retain(|_, pods| !pods.is_empty());
        if !node.is_empty() {
            self.nominated.entry(node.into()).or_default().push(Arc::new(pod.clone()));
        }
    }

    /// Pods at least as important as `pod` that wait for room on `node`.
    pub fn nominated_on(&self, node: &str, pod: &PodInfo) -> Vec<Arc<PodInfo>> {
        let waiting = self.nominated.get(node).into_iter().flatten();
        waiting.filter(|one| one.priority >= pod.priority && one.uid != pod.uid).cloned().collect()
    }

    /// This cluster with one node's pods changed: for what-if questions.
    pub fn with_node(&self, node: NodeInfo) -> Self {
        let mut changed = self.clone();
        if let Some(at) = changed.by_name.get(&node.name).copied() {
            changed.nodes[at] = node;
        }
        changed
    }
}
