//! A node takes as many volumes of a driver as the driver can attach.
//!
//! Upstream: `nodevolumelimits`: the count in CSINode, against the volumes of the pods that are
//! there, each counted once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::hints;
use crate::cluster::Cluster;
use crate::framework::{
    ClusterEvent, CycleState, ExtensionPoints, Filter, Next, PreFilter, Rejection, Row,
};
use crate::node::NodeInfo;
use crate::objects::Objects;
use crate::pod::PodInfo;
use crate::volumes::Volumes;

pub const ROW: Row = Row {
    name: "NodeVolumeLimits",
    weight: 0,
    build: |handle| {
        let (Some(volumes), Some(objects)) = (handle.volumes.clone(), handle.objects.clone())
        else {
            return ExtensionPoints::default();
        };
        let plugin = Arc::new(NodeVolumeLimits { volumes, objects });
        ExtensionPoints {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin),
            ..Default::default()
        }
    },
    hint: |pod, event| {
        matches!(event, ClusterEvent::DriversChanged)
            || hints::volumes_change(pod, event)
            || hints::volume_appears(pod, event)
            || hints::node_appears(pod, event)
    },
};

struct NodeVolumeLimits {
    volumes: Volumes,
    objects: Objects,
}

/// Volumes by driver.
type Attached = BTreeMap<String, BTreeSet<String>>;

impl NodeVolumeLimits {
    /// Adds the volumes of a pod; one that is yet to be made counts by its claim.
    fn count(&self, pod: &PodInfo, all: &mut Attached) {
        for name in &pod.claims {
            let Some(claim) = self.volumes.claim(&pod.key.namespace, name) else { continue };
            let bound = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref());
            let bound = bound.and_then(|name| self.volumes.volume(name));
            let of_volume = bound.and_then(|volume| {
                let csi = volume.spec.as_ref()?.csi.as_ref()?;
                Some((csi.driver.clone(), csi.volume_handle.clone()))
            });
            let to_come = || {
                let class = self.volumes.class(api::volumes::class_of(&claim)?)?;
                let place = format!("{}/{name}", pod.key.namespace);
                Some((class.provisioner.clone(), place))
            };
            if let Some((driver, volume)) = of_volume.or_else(to_come) {
                all.entry(driver).or_default().insert(volume);
            }
        }
    }
}

impl PreFilter for NodeVolumeLimits {
    fn pre_filter(
        &self,
        _: &mut CycleState,
        pod: &PodInfo,
        _: &Cluster,
    ) -> Result<Next, Rejection> {
        Ok(Next::only_if(!pod.claims.is_empty()))
    }
}

impl Filter for NodeVolumeLimits {
    fn filter(&self, _: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(limits) = self.objects.csi_node(&node.name) else { return Ok(()) };
        let mut wanted = Attached::new();
        self.count(pod, &mut wanted);
        let mut there = Attached::new();
        for other in node.pods.values() {
            self.count(other, &mut there);
        }
        for driver in &limits.spec.drivers {
            let limit = driver.allocatable.as_ref().and_then(|all| all.count);
            let (Some(limit), Some(new)) = (limit, wanted.get(&driver.name)) else { continue };
            let known = there.remove(&driver.name).unwrap_or_default();
            if new.is_subset(&known) {
                continue;
            }
            if known.union(new).count() > usize::try_from(limit).unwrap_or_default() {
                return Err(Rejection::new("node(s) exceed max volume count"));
            }
        }
        Ok(())
    }
}
