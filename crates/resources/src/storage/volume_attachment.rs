//! VolumeAttachment: a volume that is, or shall be, attached to a node.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use machinery::names;

use crate::kind::{Kind, Rules, STATUS, age, as_name, field, name, spec_and_bare_status};
use crate::validate::at::At;
use crate::validate::{internal, volumes};

pub(crate) static KIND: Kind<VolumeAttachment> = Kind {
    subresources: &[STATUS],
    parts: Some(spec_and_bare_status!()),
    rules: Rules {
        create: attachment,
        update: Some(attachment_update),
        parts: &[("status", attachment_update)],
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
    status(&at.get("status"));
    if name.is_set() {
        name.name(names::dns1123_subdomain);
    }
}

fn status(at: &At<'_>) {
    const MESSAGE: usize = 1024;
    const METADATA: usize = 256 << 10;
    let metadata = at.get("attachmentMetadata");
    let size: usize = metadata.entries().map(|(key, value)| key.len() + value.len()).sum();
    if size > METADATA {
        metadata.too_long(METADATA);
    }
    for field in ["attachError", "detachError"] {
        let error = at.get(field);
        if error.get("message").len() > MESSAGE {
            // Upstream names the limit of the metadata.
            error.get("message").too_long(METADATA);
        }
        let code = error.get("errorCode");
        if code.int() < 0 {
            code.invalid("must be between 0 and 2147483647, inclusive");
        }
    }
}

fn attachment_update(at: &At<'_>, old: &At<'_>) {
    attachment(at);
    internal::unchanged(&at.get("spec"), &old.get("spec"), "VolumeAttachmentSpec");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::validate::at::judge;

    #[test]
    fn errors_of_a_status_have_limits() {
        let tree = json!({"attachError": {"message": "x".repeat(1025), "errorCode": -1}});
        let texts: Vec<String> = judge(&tree, status).0.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "attachError.message: Too long: may not be more than 262144 bytes",
                "attachError.errorCode: Invalid value: -1: must be between 0 and 2147483647, inclusive",
            ]
        );
    }
}
