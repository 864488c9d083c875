//! storage.k8s.io: classes of volumes, drivers, and attachments.

use machinery::names;

use crate::validate::at::At;

pub(crate) mod csi_driver;
pub(crate) mod csi_node;
pub(crate) mod csi_storage_capacity;
pub(crate) mod storage_class;
pub(crate) mod volume_attachment;
pub(crate) mod volume_attributes_class;

/// `metadata`-like parameters of classes.
fn parameters(at: &At<'_>, may_be_empty: bool) {
    if at.len() > 512 {
        return at.too_long(512);
    }
    let mut size = 0;
    for (key, value) in at.entries() {
        if key.is_empty() {
            at.invalid_as(key, "field can not be empty.");
        }
        size += key.len() + value.len();
    }
    if size > 256 << 10 {
        at.too_long(256 << 10);
    }
    if !may_be_empty && at.is_empty() {
        at.required("must contain at least one key/value pair");
    }
}

fn provisioner(at: &At<'_>) {
    if at.need() {
        for why in names::qualified_name(&at.str().to_lowercase()) {
            at.invalid_as(at.str().to_lowercase(), &why);
        }
    }
}
