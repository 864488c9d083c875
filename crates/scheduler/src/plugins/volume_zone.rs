//! Volumes of a zone are used in that zone.
//!
//! Upstream: `volumezone`, for volumes that say their place in labels instead of node affinity. A
//! node without any label of place takes all.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolume;

use super::hints;
use crate::cluster::Cluster;
use crate::framework::{CycleState, ExtensionPoints, Filter, Next, PreFilter, Rejection, Row};
use crate::node::NodeInfo;
use crate::pod::PodInfo;
use crate::volumes::Volumes;

const NAME: &str = "VolumeZone";
/// Labels of place, the old name of each behind its new one.
const PLACES: [[&str; 2]; 2] = [
    ["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"],
    ["topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region"],
];
/// Between the zones of a volume that is in several.
const SEPARATOR: &str = "__";

pub const ROW: Row = Row {
    name: NAME,
    weight: 0,
    build: |handle| {
        let Some(volumes) = handle.volumes.clone() else { return ExtensionPoints::default() };
        let plugin = Arc::new(VolumeZone { volumes });
        ExtensionPoints {
            pre_filter: Some(plugin.clone()),
            filter: Some(plugin),
            ..Default::default()
        }
    },
    hint: |pod, event| hints::volumes_change(pod, event) || hints::is_labelled(pod, event),
};

struct VolumeZone {
    volumes: Volumes,
}

/// A label of place, under both names, and the values that will do.
#[derive(Debug, PartialEq)]
struct Demand {
    names: [&'static str; 2],
    values: BTreeSet<String>,
}

fn demands(volume: &PersistentVolume) -> Vec<Demand> {
    let labels = volume.metadata.labels.as_ref();
    let of = |names: [&'static str; 2]| {
        let value = names.iter().find_map(|name| labels?.get(*name))?;
        let values = value.split(SEPARATOR).map(|one| one.trim().to_owned()).collect();
        Some(Demand { names, values })
    };
    PLACES.into_iter().filter_map(of).collect()
}

fn allows(demands: &[Demand], node: &NodeInfo) -> bool {
    if !PLACES.iter().flatten().any(|name| node.labels.contains_key(*name)) {
        return true;
    }
    demands.iter().all(|demand| {
        let value = demand.names.iter().find_map(|name| node.labels.get(*name));
        value.is_some_and(|value| demand.values.contains(value))
    })
}

impl PreFilter for VolumeZone {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        _: &Cluster,
    ) -> Result<Next, Rejection> {
        // VolumeBinding reports errors of claims.
        let bound = pod.claims.iter().filter_map(|name| {
            let claim = self.volumes.claim(&pod.key.namespace, name)?;
            let volume = claim.spec.as_ref()?.volume_name.clone()?;
            self.volumes.volume(&volume)
        });
        let all: Vec<Demand> = bound.flat_map(|volume| demands(&volume)).collect();
        if all.is_empty() {
            return Ok(Next::Skip);
        }
        state.put(NAME, all);
        Ok(Next::Filter)
    }
}

impl Filter for VolumeZone {
    fn filter(&self, state: &CycleState, _: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        match state.get::<Vec<Demand>>(NAME) {
            Some(demands) if !allows(demands, node) => {
                Err(Rejection::unresolvable("node(s) had no available volume zone"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn volumes_are_used_in_their_zone() {
        let check = |volume: Value, node: Value, expected: bool| {
            let volume: PersistentVolume =
                from_value(json!({"metadata": {"name": "v", "labels": volume}})).unwrap();
            let mut info = NodeInfo::named("n");
            info.update(&from_value(json!({"metadata": {"name": "n", "labels": node}})).unwrap());
            assert_eq!(allows(&demands(&volume), &info), expected, "{volume:?}");
        };
        let zone = "topology.kubernetes.io/zone";
        let old = "failure-domain.beta.kubernetes.io/zone";
        let region = "topology.kubernetes.io/region";
        check(json!({zone: "a"}), json!({zone: "a"}), true);
        check(json!({zone: "a"}), json!({zone: "b"}), false);
        check(json!({zone: "a__b"}), json!({zone: "b"}), true);
        check(json!({old: "a"}), json!({zone: "a"}), true);
        check(json!({zone: "a"}), json!({region: "r"}), false);
        check(json!({zone: "a"}), json!({}), true);
        check(json!({}), json!({zone: "a"}), true);
    }
}
