//! VolumeAttachment: a volume that is, or shall be, attached to a node.

use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::kind::{Kind, Rules, STATUS, age, as_name, field, name, spec_and_status};
use crate::validate::storage;

pub(crate) static KIND: Kind<VolumeAttachment> = Kind {
    subresources: &[STATUS],
    parts: Some(spec_and_status!()),
    rules: Rules {
        create: storage::attachment,
        update: Some(storage::attachment_update),
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        as_name(field(
            "Attacher",
            "string",
            "api.storage.v1.VolumeAttachmentSpec.attacher",
            |attachment| attachment.spec.attacher.clone().into(),
        )),
        field(
            "PV",
            "string",
            "api.storage.v1.VolumeAttachmentSource.persistentVolumeName",
            |attachment| {
                attachment.spec.source.persistent_volume_name.clone().unwrap_or_default().into()
            },
        ),
        field("Node", "string", "api.storage.v1.VolumeAttachmentSpec.nodeName", |attachment| {
            attachment.spec.node_name.clone().into()
        }),
        field(
            "Attached",
            "boolean",
            "api.storage.v1.VolumeAttachmentStatus.attached",
            |attachment| attachment.status.as_ref().is_some_and(|status| status.attached).into(),
        ),
        age(),
    ],
    returns_deleted: true,
    ..Kind::BASE
};
