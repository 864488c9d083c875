//! Claims, volumes, classes and what drivers register.
//! Upstream: `pkg/apis/core/validation`, `pkg/apis/storage/validation`.

use std::collections::{HashMap, HashSet};

use machinery::field::Path;
use machinery::names;
use serde_json::Value;

use super::at::At;
use super::{internal, pod, quantity, volumes};

const ACCESS_MODES: &[&str] =
    &["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"];

fn access_modes(at: &At<'_>) {
    for mode in at.items() {
        mode.called(at.path.clone()).one_of(ACCESS_MODES);
    }
    let modes = at.strings();
    let is_other = |mode: &&str| **mode != *"ReadWriteOncePod" && ACCESS_MODES.contains(mode);
    if modes.contains(&"ReadWriteOncePod") && modes.iter().any(is_other) {
        at.forbidden("may not use ReadWriteOncePod with other access modes");
    }
}

pub(crate) fn claim(at: &At<'_>) {
    claim_spec(&at.get("spec"));
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

fn data_source(at: &At<'_>) {
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

pub(crate) fn claim_update(at: &At<'_>, old: &At<'_>) {
    claim(at);
    let (spec, before) = (at.get("spec"), old.get("spec"));
    let (mut new, mut was) = (spec.value.clone(), before.value.clone());
    let set = |tree: &mut Value, field: &str, value: Option<&Value>| {
        let Value::Object(fields) = tree else { return };
        match value {
            Some(value) => fields.insert(field.into(), value.clone()),
            None => fields.remove(field),
        };
    };
    if before.get("volumeName").is_empty() {
        set(&mut was, "volumeName", spec.value.get("volumeName"));
    }
    if !before.has("storageClassName") && spec.has("storageClassName") {
        set(&mut new, "storageClassName", None);
    }
    if at.get("status.phase").is("Bound") {
        set(&mut new, "volumeAttributesClassName", before.value.get("volumeAttributesClassName"));
        let size = before.get("resources.requests.storage").value;
        if let Some(requests @ Value::Object(_)) = new.pointer_mut("/resources/requests") {
            set(requests, "storage", Some(size));
        }
    }
    if new != was {
        let diff = internal::diff("PersistentVolumeClaimSpec", &was, &new);
        spec.forbidden(&format!("spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims\n{diff}"));
    }
    let size = spec.get("resources.requests.storage");
    let amounts = (
        quantity::amount(&size),
        quantity::amount(&before.get("resources.requests.storage")),
        quantity::amount(&old.get("status.capacity.storage")),
    );
    if amounts.0 < amounts.1 && amounts.0 <= amounts.2 {
        size.forbidden("field can not be less than status.capacity");
    }
    let mode = spec.get("volumeMode").called(Path::new("volumeMode"));
    mode.unchanged(&before.get("volumeMode"));
    let class = spec.get("volumeAttributesClassName");
    if class.value != before.get("volumeAttributesClassName").value
        && old.get("status").has("currentVolumeAttributesClassName")
    {
        let now = "is forbidden when status.currentVolumeAttributesClassName is not nil";
        if !class.is_set() {
            class.forbidden(&format!("update to nil {now}"));
        } else if class.is_empty() {
            class.forbidden(&format!("update to empty string {now}"));
        }
    }
}

pub(crate) fn volume(at: &At<'_>) {
    volume_spec(&at.get("spec"));
}

fn volume_spec(at: &At<'_>) {
    let modes = at.get("accessModes");
    modes.need();
    access_modes(&modes);
    capacity(&at.get("capacity"));
    let reclaim = at.get("persistentVolumeReclaimPolicy");
    if !reclaim.is_empty() {
        reclaim.one_of(&["Delete", "Recycle", "Retain"]);
    }
    let affinity = at.get("nodeAffinity");
    if affinity.is_set() {
        if affinity.has("required") {
            pod::node_selector(&affinity.get("required"));
        } else {
            affinity.get("required").required("must specify required node constraints");
        }
    }
    let source = volumes::persistent_source(at);
    if source == Some("local") && !affinity.is_set() {
        affinity.required("Local volume requires node affinity");
    }
    let is_root = at.get("hostPath.path").str().trim_end_matches('/').is_empty();
    if at.has("hostPath") && is_root && reclaim.is("Recycle") {
        reclaim.forbidden("may not be 'recycle' for a hostPath mount of '/'");
    }
    at.get("storageClassName").any_name(names::dns1123_subdomain);
    at.get("volumeMode").any_of(&["Block", "Filesystem"]);
    let class = at.get("volumeAttributesClassName");
    if class.is_set() {
        if class.is_empty() {
            class.required("an empty string is disallowed");
        } else {
            class.name(names::dns1123_subdomain);
        }
        if !at.has("csi") {
            at.get("csi").required("has to be specified when using volumeAttributesClassName");
        }
    }
}

fn capacity(at: &At<'_>) {
    at.need();
    if !at.has("storage") || at.len() > 1 {
        let shown = Some(at.value).filter(|value| value.as_object().is_some_and(|m| !m.is_empty()));
        at.errors().not_supported_value(&at.path, shown, &["storage"]);
    }
    for (_, amount) in at.entries() {
        if quantity::is_negative(&amount) {
            amount
                .invalid_as(quantity::amount(&amount).units(), "must be a valid resource quantity");
        }
        quantity::positive(&amount);
    }
}

pub(crate) fn volume_update(at: &At<'_>, old: &At<'_>) {
    volume(at);
    let (spec, before) = (at.get("spec"), old.get("spec"));
    let (mut new, was) = (volumes::source_part(spec.value), volumes::source_part(before.value));
    if before.has("csi")
        && !before.get("csi").has("controllerExpandSecretRef")
        && let Some(Value::Object(fields)) = new.get_mut("csi")
    {
        fields.remove("controllerExpandSecretRef");
    }
    if new != was {
        let diff = internal::diff("PersistentVolumeSource", &was, &new);
        let place = spec.called(spec.child_path("persistentvolumesource"));
        place
            .forbidden(&format!("spec.persistentvolumesource is immutable after creation\n{diff}"));
    }
    let mode = spec.get("volumeMode").called(Path::new("volumeMode"));
    mode.unchanged(&before.get("volumeMode"));
    if before.has("nodeAffinity") {
        let (now, was) = (spec.get("nodeAffinity"), before.get("nodeAffinity"));
        if now.value != was.value {
            now.called(Path::new("nodeAffinity"))
                .invalid("field is immutable, except for updating from beta label to GA");
        }
    }
    let class = spec.get("volumeAttributesClassName");
    if before.has("volumeAttributesClassName") && !class.is_set() {
        class.forbidden("update from non-nil value to nil is forbidden");
    }
}

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

pub(crate) fn storage_class(at: &At<'_>) {
    provisioner(&at.get("provisioner"));
    parameters(&at.get("parameters"), true);
    let policy = at.get("reclaimPolicy");
    if !policy.is_empty() {
        policy.one_of(&["Delete", "Retain"]);
    }
    let mode = at.get("volumeBindingMode");
    if mode.is_set() {
        mode.one_of(&["Immediate", "WaitForFirstConsumer"]);
    } else {
        mode.required("");
    }
    for term in at.get("allowedTopologies").items() {
        let list = term.get("matchLabelExpressions");
        let mut keys = HashSet::new();
        for one in list.items() {
            let values = one.get("values");
            values.need();
            let mut seen = HashSet::new();
            for value in values.items() {
                if !seen.insert(value.str()) {
                    value.duplicate();
                }
            }
            let key = one.get("key");
            key.name(names::qualified_name);
            if !keys.insert(key.str()) {
                key.duplicate();
            }
        }
    }
}

pub(crate) fn storage_class_update(at: &At<'_>, old: &At<'_>) {
    for field in ["parameters", "provisioner", "reclaimPolicy", "volumeBindingMode"] {
        at.get(field).unchanged(&old.get(field));
    }
}

pub(crate) fn attributes_class(at: &At<'_>) {
    provisioner(&at.get("driverName"));
    parameters(&at.get("parameters"), false);
}

pub(crate) fn attributes_class_update(at: &At<'_>, old: &At<'_>) {
    for field in ["driverName", "parameters"] {
        if at.get(field).value != old.get(field).value {
            at.get(field).forbidden(&format!("updates to {field} are forbidden."));
        }
    }
    attributes_class(at);
}

pub(crate) fn attachment(at: &At<'_>) {
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

pub(crate) fn attachment_update(at: &At<'_>, old: &At<'_>) {
    attachment(at);
    at.get("spec").unchanged(&old.get("spec"));
}

pub(crate) fn csi_node(at: &At<'_>) {
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

pub(crate) fn csi_node_update(at: &At<'_>, old: &At<'_>) {
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
                now.called(at.child_path("spec.drivers")).invalid("field is immutable");
            }
        }
    }
}

pub(crate) fn csi_driver(at: &At<'_>) {
    let spec = at.get("spec");
    spec.get("fsGroupPolicy").any_of(&["File", "None", "ReadWriteOnceWithFSType"]);
    let mut seen = HashSet::new();
    for request in spec.get("tokenRequests").items() {
        let (audience, seconds) = (request.get("audience"), request.get("expirationSeconds"));
        if !seen.insert(audience.str()) {
            audience.duplicate_text();
            continue;
        }
        if seconds.number().is_some_and(|seconds| seconds < 600) {
            seconds.invalid("may not specify a duration less than 10 minutes");
        }
        if seconds.int() > 1 << 32 {
            seconds.invalid("may not specify a duration larger than 2^32 seconds");
        }
    }
    let modes = spec.get("volumeLifecycleModes");
    for mode in modes.items() {
        mode.called(modes.path.clone()).one_of(&["Persistent", "Ephemeral"]);
    }
    let period = spec.get("nodeAllocatableUpdatePeriodSeconds");
    if period.number().is_some_and(|seconds| seconds < 10) {
        period.invalid("must be greater than or equal to 10 seconds");
    }
    let secrets = spec.get("serviceAccountTokenInSecrets");
    if secrets.is_set() && spec.get("tokenRequests").is_empty() {
        secrets.invalid("serviceAccountTokenInSecrets is set but no tokenRequests are specified");
    }
}

pub(crate) fn csi_driver_update(at: &At<'_>, old: &At<'_>) {
    csi_driver(at);
    let (spec, before) = (at.get("spec"), old.get("spec"));
    spec.get("attachRequired")
        .called(spec.child_path("attachedRequired"))
        .unchanged(&before.get("attachRequired"));
    spec.get("volumeLifecycleModes").unchanged(&before.get("volumeLifecycleModes"));
}

pub(crate) fn storage_capacity(at: &At<'_>) {
    at.get("nodeTopology").selector();
    at.get("storageClassName").name(names::dns1123_subdomain);
    if at.has("capacity") {
        quantity::not_negative(&at.get("capacity"));
    }
}

pub(crate) fn storage_capacity_update(at: &At<'_>, old: &At<'_>) {
    for field in ["nodeTopology", "storageClassName"] {
        at.get(field).unchanged(&old.get(field));
    }
}
