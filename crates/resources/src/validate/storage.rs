//! Claims to volumes, which are also templates in pods and StatefulSets.
//! Upstream: `pkg/apis/core/validation`.

use machinery::names;

use super::at::At;
use super::quantity;

const ACCESS_MODES: &[&str] =
    &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];

pub(crate) fn access_modes(at: &At<'_>) {
    for mode in at.items() {
        mode.called(at.path.clone()).one_of(ACCESS_MODES);
    }
    let modes = at.strings();
    let is_other = |mode: &&str| **mode != *"ReadWriteOncePod" && ACCESS_MODES.contains(mode);
    if modes.contains(&"ReadWriteOncePod") && modes.iter().any(is_other) {
        at.forbidden("may not use ReadWriteOncePod with other access modes");
    }
}

/// A claim's spec, also as a template in a pod or StatefulSet.
pub(crate) fn claim_spec(at: &At<'_>) {
    let modes = at.get("accessModes");
    if modes.is_empty() {
        modes.required("at least 1 access mode is required");
    }
    at.get("selector").selector();
    access_modes(&modes);
    let size = at.get("resources.requests.storage");
    let size = size.called(at.child_path("resources").key("storage"));
    if !size.is_set() {
        size.required("");
    } else {
        quantity::positive(&size);
    }
    at.get("storageClassName").any_name(names::dns1123_subdomain);
    at.get("volumeMode").any_of(&["Block", "Filesystem"]);
    for field in ["dataSource", "dataSourceRef"] {
        if at.has(field) {
            data_source(&at.get(field));
        }
    }
    let (source, reference) = (at.get("dataSource"), at.get("dataSourceRef"));
    let differ = |field: &'static str| source.get(field).value != reference.get(field).value;
    let detail = if !source.is_set() || !reference.is_set() {
        ""
    } else if !reference.get("namespace").is_empty() {
        "may not be specified when dataSourceRef.namespace is specified"
    } else if ["apiGroup", "kind", "name"].into_iter().any(differ) {
        "must match dataSourceRef"
    } else {
        ""
    };
    if !detail.is_empty() {
        // Upstream shows a path here, whose JSON is empty.
        at.errors().invalid_shown(&at.path, Some("{}"), detail);
    }
    at.get("volumeAttributesClassName").any_name(names::dns1123_subdomain);
}

pub(crate) fn data_source(at: &At<'_>) {
    at.get("name").need();
    at.get("kind").need();
    let group = at.get("apiGroup");
    if group.is_empty() && !at.get("kind").is("PersistentVolumeClaim") {
        at.invalid_as(
            at.get("kind").str(),
            "must be 'PersistentVolumeClaim' when referencing the default apiGroup",
        );
    }
    group.any_name(names::dns1123_subdomain);
    at.get("namespace").any_name(names::dns1123_label);
}
