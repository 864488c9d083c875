//! CSINode: the drivers of volumes on a node.

use std::collections::{HashMap, HashSet};

use apiserver::resource::MetadataRules;
use k8s_openapi::api::storage::v1::CSINode;
use machinery::names;
use serde_json::Value;

use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::at::At;
use crate::validate::{internal, volumes};

pub(crate) static KIND: Kind<CSINode> = Kind {
    rules: Rules {
        create: csi_node,
        update: Some(csi_node_update),
        unconditional_update: false,
        metadata: MetadataRules::WHOLE,
        ..Rules::NONE
    },
    columns: &[
        name(),
        text(
            "Drivers",
            "integer",
            "Drivers indicates the number of CSI drivers registered on the node",
            |node| node.spec.drivers.len().into(),
        ),
        age(),
    ],
    returns_deleted: true,
    ..Kind::BASE
};

fn csi_node(at: &At<'_>) {
    let mut seen = HashSet::new();
    for driver in at.get("spec.drivers").items() {
        let (name, id) = (driver.get("name"), driver.get("nodeID"));
        volumes::csi_driver_name(&name);
        id.need();
        if id.len() > 192 {
            id.invalid("must be 192 characters or less");
        }
        driver.get("allocatable.count").not_negative();
        if !seen.insert(name.str()) {
            name.duplicate_text();
        }
        let mut keys = HashSet::new();
        for key in driver.get("topologyKeys").items() {
            let place = key.called(driver.path.clone());
            if key.is_empty() {
                place.required("");
            }
            if !keys.insert(key.str()) {
                place.duplicate();
            }
            place.name(names::qualified_name);
        }
    }
}

fn csi_node_update(at: &At<'_>, old: &At<'_>) {
    csi_node(at);
    let without = |at: &At<'_>| {
        let mut tree = at.value.clone();
        if let Value::Object(fields) = &mut tree {
            fields.remove("allocatable");
        }
        tree
    };
    let mut named: HashMap<&str, Vec<At<'_>>> = HashMap::new();
    for now in at.get("spec.drivers").items() {
        named.entry(now.get("name").str()).or_default().push(now);
    }
    for was in old.get("spec.drivers").items() {
        for now in named.get(was.get("name").str()).into_iter().flatten() {
            if without(now) != without(&was) {
                let shown = internal::shown("CSINodeDriver", now.value);
                let path = at.child_path("spec.drivers");
                at.errors().invalid_shown(&path, Some(&shown), "field is immutable");
            }
        }
    }
}
