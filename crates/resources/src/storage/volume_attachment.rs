//! VolumeAttachment: a volume that is, or shall be, attached to a node.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use machinery::names;

use crate::kind::{Kind, Rules, STATUS, age, as_name, field, name, spec_and_bare_status};
use crate::validate::at::At;
use crate::validate::volumes;

pub(crate) static KIND: Kind<VolumeAttachment> = Kind {
    subresources: &[STATUS],
    parts: Some(spec_and_bare_status!()),
    rules: Rules {
        create: attachment,
        update: Some(attachment_update),
        unconditional_update: false,
        metadata: MetadataRules::WHOLE,
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

fn attachment(at: &At<'_>) {
    let spec = at.get("spec");
    volumes::csi_driver_name(&spec.get("attacher"));
    let source = spec.get("source");
    let name = source.get("persistentVolumeName");
    const ONE: &str = "must specify exactly one of inlineVolumeSpec and persistentVolumeName";
    match (source.has("inlineVolumeSpec"), name.is_set()) {
        (false, false) => source.required(ONE),
        (true, true) => source.forbidden(ONE),
        (false, true) if name.is_empty() => {
            name.required("must specify non empty persistentVolumeName")
        }
        (true, false) if !source.get("inlineVolumeSpec").has("csi") => source
            .get("inlineVolumeSpec.csi")
            .required("has to be specified in the context of inline volumes"),
        _ => {}
    }
    spec.get("nodeName").name(names::dns1123_subdomain);
    if name.is_set() {
        name.name(names::dns1123_subdomain);
    }
}

fn attachment_update(at: &At<'_>, old: &At<'_>) {
    attachment(at);
    at.get("spec").unchanged(&old.get("spec"));
}
