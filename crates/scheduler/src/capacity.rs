//! The nodes where storage drivers have capacity for new volumes.
//!
//! In: a claim, what its driver tells of itself and of its room (CSIStorageCapacity), a class's
//! topology. Out: which nodes' labels will do. Pure.
//! A driver that does not promise to tell of its room is believed to have enough.
//! Upstream: `volumebinding` hasEnoughCapacity, nodeHasAccess; MatchTopologySelectorTerms.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::{CSIDriver, CSIStorageCapacity, StorageClass};
use machinery::quantity::Amount;
use machinery::selector::Selector;

type Labels = BTreeMap<String, String>;

/// The nodes where a claim's volume has room.
#[derive(Debug, PartialEq)]
pub enum Room {
    Everywhere,
    /// The nodes that match one of these selectors.
    Among(Vec<Selector>),
}

impl Room {
    pub fn has(&self, labels: &Labels) -> bool {
        match self {
            Self::Everywhere => true,
            Self::Among(nodes) => nodes.iter().any(|one| one.matches(Some(labels))),
        }
    }
}

/// Whether the driver promises to tell of its room.
pub fn is_told(driver: Option<&CSIDriver>) -> bool {
    driver.is_some_and(|driver| driver.spec.storage_capacity == Some(true))
}

/// `told`: all that drivers tell, for a driver of which [`is_told`].
pub fn room(claim: &PersistentVolumeClaim, class: &str, told: &[Arc<CSIStorageCapacity>]) -> Room {
    let asks = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
    if asks.is_none_or(|asks| !asks.contains_key("storage")) {
        return Room::Everywhere;
    }
    let size = api::volumes::size(claim);
    let enough = told.iter().filter(|one| {
        one.storage_class_name == class && limit(one).is_some_and(|limit| limit >= size)
    });
    let nodes = enough.filter_map(|one| Selector::from_api(Some(one.node_topology.as_ref()?)).ok());
    Room::Among(nodes.collect())
}

/// The size of the largest volume. The driver's own maximum is more precise than the free capacity.
fn limit(one: &CSIStorageCapacity) -> Option<Amount> {
    let told = one.maximum_volume_size.as_ref().or(one.capacity.as_ref())?;
    Amount::parse(&told.0).ok()
}

/// Whether there may be room since then that was not there before.
pub fn grew(old: Option<&CSIStorageCapacity>, new: &CSIStorageCapacity) -> bool {
    let Some(old) = old else { return true };
    limit(new).is_some_and(|new| limit(old).is_none_or(|old| new > old))
}

/// Whether volumes of the class can be made for a node with these labels.
pub fn reaches(class: &StorageClass, labels: &Labels) -> bool {
    let terms = class.allowed_topologies.as_deref().unwrap_or_default();
    let matches = |expressions: &[_]| {
        let holds = |one: &k8s_openapi::api::core::v1::TopologySelectorLabelRequirement| {
            labels.get(&one.key).is_some_and(|value| one.values.contains(value))
        };
        !expressions.is_empty() && expressions.iter().all(holds)
    };
    let mut expressions = terms.iter().map(|term| term.match_label_expressions.as_deref());
    terms.is_empty() || expressions.any(|all| matches(all.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn told(class: &str, capacity: Value, largest: Value, nodes: Value) -> Arc<CSIStorageCapacity> {
        let mut tree = json!({"metadata": {"name": "x"}, "storageClassName": class});
        for (field, value) in
            [("capacity", capacity), ("maximumVolumeSize", largest), ("nodeTopology", nodes)]
        {
            if !value.is_null() {
                tree[field] = value;
            }
        }
        Arc::new(serde_json::from_value(tree).expect("a capacity"))
    }

    fn labels(zone: &str) -> Labels {
        Labels::from([("zone".to_owned(), zone.to_owned())])
    }

    #[test]
    fn room_is_where_drivers_say() {
        let zone = |name: &str| json!({"matchLabels": {"zone": name}});
        let all = [
            told("fast", json!("1Gi"), json!(null), zone("small")),
            told("fast", json!("100Gi"), json!("5Gi"), zone("split")),
            told("fast", json!("10Gi"), json!(null), zone("large")),
            told("fast", json!("10Gi"), json!(null), json!(null)),
            told("slow", json!("1Ti"), json!(null), json!({})),
            told("fast", json!(null), json!(null), json!({})),
        ];
        let check = |class: &str, size: Value, expected: &[&str]| {
            let requests = json!({"resources": {"requests": size}});
            let claim = serde_json::from_value(json!({"metadata": {}, "spec": requests}));
            let room = room(&claim.expect("a claim"), class, &all);
            let has =
                ["small", "split", "large"].into_iter().filter(|zone| room.has(&labels(zone)));
            assert_eq!(has.collect::<Vec<_>>(), expected, "{class} {size}");
        };
        check("fast", json!({"storage": "1Gi"}), &["small", "split", "large"]);
        check("fast", json!({"storage": "5Gi"}), &["split", "large"]);
        check("fast", json!({"storage": "6Gi"}), &["large"]);
        check("fast", json!({"storage": "11Gi"}), &[]);
        check("slow", json!({"storage": "11Gi"}), &["small", "split", "large"]);
        check("none", json!({"storage": "1Gi"}), &[]);
        check("none", json!({}), &["small", "split", "large"]);
    }

    #[test]
    fn more_room_is_news() {
        let of = |capacity: Value, largest: Value| told("c", capacity, largest, json!(null));
        let (none, one, two) = (json!(null), json!("1Gi"), json!("2Gi"));
        let check =
            |old: Option<Arc<CSIStorageCapacity>>, new: Arc<CSIStorageCapacity>, expected| {
                assert_eq!(grew(old.as_deref(), &new), expected, "{old:?} {new:?}");
            };
        check(None, of(none.clone(), none.clone()), true);
        check(Some(of(one.clone(), none.clone())), of(two.clone(), none.clone()), true);
        check(Some(of(two.clone(), none.clone())), of(one.clone(), none.clone()), false);
        check(Some(of(one.clone(), none.clone())), of(two.clone(), one.clone()), false);
        check(Some(of(none.clone(), none.clone())), of(one.clone(), none), true);
    }

    #[test]
    fn classes_reach_the_places_that_they_name() {
        let check = |terms: Value, zone: &str, expected: bool| {
            let class = json!({"metadata": {"name": "c"}, "provisioner": "p",
                "allowedTopologies": terms});
            let class: StorageClass = serde_json::from_value(class).expect("a class");
            assert_eq!(reaches(&class, &labels(zone)), expected, "{terms}");
        };
        let zones =
            |names: &[&str]| json!({"matchLabelExpressions": [{"key": "zone", "values": names}]});
        check(json!(null), "a", true);
        check(json!([]), "a", true);
        check(json!([{}]), "a", false);
        check(json!([zones(&["a", "b"])]), "b", true);
        check(json!([zones(&["a"]), zones(&["c"])]), "b", false);
        check(json!([zones(&["a"]), zones(&["b"])]), "b", true);
    }
}
