//! Volumes that one pod has for itself.
//!
//! Upstream: `volumerestrictions`: a claim of mode ReadWriteOncePod is one pod's in the whole
//! cluster; some kinds of disks cannot be attached for two pods of a node.

use std::sync::Arc;

use super::hints;
use crate::cluster::Cluster;
use crate::framework::{CycleState, ExtensionPoints, Filter, Next, PreFilter, Rejection, Row};
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::volumes::Volumes;

const NAME: &str = "VolumeRestrictions";
const EXCLUSIVE: &str = "ReadWriteOncePod";

pub const ROW: Row = Row {
    name: NAME,
    weight: 0,
    build: |handle| {
        let plugin = Arc::new(VolumeRestrictions { volumes: handle.volumes.clone() });
        ExtensionPoints {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin),
            ..Default::default()
        }
    },
    hint: |pod, event| {
        hints::volumes_change(pod, event)
            || hints::volume_appears(pod, event)
            || hints::node_appears(pod, event)
    },
};

struct VolumeRestrictions {
    volumes: Option<Volumes>,
}

impl VolumeRestrictions {
    /// The pod's claims that only one pod may use.
    fn exclusive(&self, pod: &PodInfo) -> Vec<String> {
        let Some(volumes) = &self.volumes else { return vec![] };
        let is_exclusive = |name: &&String| {
            let claim = volumes.claim(&pod.key.namespace, name);
            let modes = claim.and_then(|claim| claim.spec.as_ref()?.access_modes.clone());
            modes.is_some_and(|modes| modes.iter().any(|mode| mode == EXCLUSIVE))
        };
        pod.claims.iter().filter(is_exclusive).cloned().collect()
    }
}

/// Whether a pod of the node uses any of these claims.
fn is_used(claims: &[String], pod: &PodInfo, node: &NodeInfo) -> bool {
    let mut others = node.pods.values();
    others.any(|other| {
        other.key.namespace == pod.key.namespace
            && other.claims.iter().any(|claim| claims.contains(claim))
    })
}

impl PreFilter for VolumeRestrictions {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        cluster: &Cluster,
    ) -> Result<Next, Rejection> {
        let exclusive = if pod.claims.is_empty() { vec![] } else { self.exclusive(pod) };
        if exclusive.is_empty() && pod.disks.is_empty() {
            return Ok(Next::Skip);
        }
        let taken =
            !exclusive.is_empty() && cluster.nodes().any(|node| is_used(&exclusive, pod, node));
        state.put(NAME, taken);
        Ok(Next::Filter)
    }
}

impl Filter for VolumeRestrictions {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let mut theirs = node.pods.values().flat_map(|other| &other.disks);
        if theirs.any(|disk| pod.disks.iter().any(|own| own.conflicts(disk))) {
            return Err(Rejection::new("node(s) had no available disk"));
        }
        match state.get::<bool>(NAME) {
            Some(true) => Err(Rejection::new(
                "node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode",
            )),
            _ => Ok(()),
        }
    }
}
