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

/// Clones share everything: a clone with one node changed ([`Cluster::with_node`]) costs nothing, and
/// while there is none, changes are made in place.
#[derive(Clone, Default)]
pub struct Cluster {
    /// Dense, so that a decision runs along an array; the order is arbitrary.
    nodes: Arc<Vec<Arc<NodeInfo>>>,
    by_name: Arc<HashMap<String, usize>>,
    /// Where each pod counts, by uid.
    places: Arc<HashMap<String, Place>>,
    /// Pods that wait for room on a node that preemption makes, by node.
    nominated: Arc<HashMap<String, Vec<Arc<PodInfo>>>>,
    pub namespaces: Arc<Namespaces>,
    /// On how many nodes each image is.
    image_nodes: Arc<HashMap<String, usize>>,
    /// Stands for the node at this place.
    changed: Option<(usize, Arc<NodeInfo>)>,
}

#[derive(Clone)]
struct Place {
    node: String,
    assumed: bool,
}

impl Cluster {
    /// Nodes that exist.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeInfo> + Clone {
        let changed = self.changed.as_ref();
        let all = self.nodes.iter().enumerate().map(move |(at, node)| match changed {
            Some((place, stand_in)) if *place == at => &**stand_in,
            _ => &**node,
        });
        all.filter(|node| node.known)
    }

    pub fn node(&self, name: &str) -> Option<&NodeInfo> {
        let at = *self.by_name.get(name)?;
        let node = match &self.changed {
            Some((place, changed)) if *place == at => changed,
            _ => &self.nodes[at],
        };
        Some(&**node).filter(|node| node.known)
    }

    pub fn nodes_with_image(&self, image: &str) -> usize {
        self.image_nodes.get(image).copied().unwrap_or(0)
    }

    fn entry(&mut self, name: &str) -> &mut NodeInfo {
        let nodes = Arc::make_mut(&mut self.nodes);
        let at = match self.by_name.get(name) {
            Some(at) => *at,
            None => {
                nodes.push(Arc::new(NodeInfo::named(name)));
                Arc::make_mut(&mut self.by_name).insert(name.into(), nodes.len() - 1);
                nodes.len() - 1
            }
        };
        Arc::make_mut(&mut nodes[at])
    }

    fn node_at(&mut self, at: usize) -> &mut NodeInfo {
        Arc::make_mut(&mut Arc::make_mut(&mut self.nodes)[at])
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
        let node = self.node_at(at);
        node.known = false;
        node.images.clear();
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
        let gone = Arc::make_mut(&mut self.nodes).swap_remove(at);
        let by_name = Arc::make_mut(&mut self.by_name);
        by_name.remove(&gone.name);
        if let Some(moved) = self.nodes.get(at) {
            by_name.insert(moved.name.clone(), at);
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
        Arc::make_mut(&mut self.places).insert(pod.uid.clone(), place);
        self.entry(&pod.node_name.clone()).add(pod);
    }

    pub fn remove_pod(&mut self, uid: &str) {
        let Some(place) = Arc::make_mut(&mut self.places).remove(uid) else {
            return;
        };
        if let Some(at) = self.by_name.get(&place.node).copied() {
            self.node_at(at).remove(uid);
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

    /// This cluster with one node's pods changed: for what-if questions.
    pub fn with_node(&self, node: NodeInfo) -> Self {
        let at = self.by_name.get(&node.name).copied();
        Self { changed: at.map(|at| (at, Arc::new(node))), ..self.clone() }
    }
}
