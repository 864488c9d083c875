//! CSINode: the drivers of volumes on a node.

use k8s_openapi::api::storage::v1::CSINode;

use crate::kind::{Kind, Rules, age, name, text};
use crate::validate::storage;

pub(crate) static KIND: Kind<CSINode> = Kind {
    rules: Rules {
        create: storage::csi_node,
        update: Some(storage::csi_node_update),
        unconditional_update: false,
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
