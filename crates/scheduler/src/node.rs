//! A node as the scheduler sees it, with the pods on it.

use std::collections::BTreeMap;
use std::sync::Arc;

pub use api::taints::tolerates;
use k8s_openapi::api::core::v1::{Node, Taint, Toleration};

use crate::pod::PodInfo;
use crate::resources::Resources;

#[derive(Clone, Debug, Default)]
pub struct NodeInfo {
    pub name: String,
    /// Its index in the cluster's table.
    pub place: usize,
    /// False while pods name a node that is not known (yet, or any more).
    pub known: bool,
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub unschedulable: bool,
    /// The features that its kubelet declares.
    pub declared: Vec<String>,
    pub allocatable: Resources,
    /// Sizes by name.
    pub images: BTreeMap<String, i64>,
    /// By uid.
    pub pods: BTreeMap<String, Arc<PodInfo>>,
    pub requested: Resources,
    pub nonzero: Resources,
}

impl NodeInfo {
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), ..Default::default() }
    }

    /// The part that hints read: without pods and images.
    pub fn bare(&self) -> Self {
        Self {
            name: self.name.clone(),
            known: self.known,
            labels: self.labels.clone(),
            taints: self.taints.clone(),
            unschedulable: self.unschedulable,
            declared: self.declared.clone(),
            allocatable: self.allocatable.clone(),
            ..Self::default()
        }
    }

    /// Is it the same to hints?
    pub fn is_like(&self, other: &Self) -> bool {
        self.unschedulable == other.unschedulable
            && self.labels == other.labels
            && self.declared == other.declared
            && self.taints == other.taints
            && self.allocatable == other.allocatable
    }

    /// Takes over what the object says; pods stay.
    pub fn update(&mut self, node: &Node) {
        let spec = node.spec.clone().unwrap_or_default();
        let status = node.status.clone().unwrap_or_default();
        self.known = true;
        self.labels = node.metadata.labels.clone().unwrap_or_default();
        self.taints = spec.taints.unwrap_or_default();
        self.unschedulable = spec.unschedulable.unwrap_or(false);
        self.declared = status.declared_features.unwrap_or_default();
        self.allocatable = Resources::from_list(status.allocatable.as_ref());
        self.images = status
            .images
            .iter()
            .flatten()
            .flat_map(|image| {
                let size = image.size_bytes.unwrap_or(0);
                image.names.iter().flatten().map(move |name| (name.clone(), size))
            })
            .collect();
    }

    /// Returns the resource that it provides now instead.
    pub fn add(&mut self, pod: Arc<PodInfo>) -> Option<Arc<PodInfo>> {
        self.requested.add(&pod.requests);
        self.nonzero.add(&pod.nonzero);
        let old = self.pods.insert(pod.uid.clone(), pod)?;
        self.discount(&old);
        Some(old)
    }

    pub fn remove(&mut self, uid: &str) -> Option<Arc<PodInfo>> {
        let old = self.pods.remove(uid)?;
        self.discount(&old);
        Some(old)
    }

    fn discount(&mut self, pod: &PodInfo) {
        self.requested.subtract(&pod.requests);
        self.nonzero.subtract(&pod.nonzero);
    }
}

/// Region and zone, empty where there is none; nodes of old clusters say them by other names.
/// Upstream: `GetZoneKey`.
pub fn zone(labels: &BTreeMap<String, String>) -> (&str, &str) {
    let first = |keys: [&str; 2]| {
        let known = keys.iter().find_map(|key| labels.get(*key));
        known.map_or("", String::as_str)
    };
    (
        first(["failure-domain.beta.kubernetes.io/region", "topology.kubernetes.io/region"]),
        first(["failure-domain.beta.kubernetes.io/zone", "topology.kubernetes.io/zone"]),
    )
}

pub fn tolerates_all<'a>(
    tolerations: &[Toleration],
    mut taints: impl Iterator<Item = &'a Taint>,
) -> bool {
    taints.all(|taint| tolerations.iter().any(|one| tolerates(one, taint)))
}
