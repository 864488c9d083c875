//! ResourceSlice: the devices of a driver, on a node or for many.

use k8s_openapi::api::resource::v1::{Device, ResourceSlice, ResourceSliceSpec};
use machinery::{Time, names};
use release::features::Feature;
use serde_json::Value;

use super::{MOST, binding_conditions, label, list, name_of_feature, pool_name, taint};
use crate::gated::{Gated, any, close, gated, taken};
use crate::kind::{Fields, Kind, Rules, Updates, age, field, name};
use crate::validate::at::{At, NameCheck};
use crate::validate::pod::node_selector;
use crate::validate::shared::is_version;
use crate::validate::volumes::csi_driver_name;
use crate::validate::warnings;

pub(crate) static KIND: Kind<ResourceSlice> = Kind {
    default,
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| close(GATED, &mut new.spec, old.map(|old| &old.spec)),
    rules: Rules { create: slice, update: Some(slice_update), ..Rules::NONE },
    returns_deleted: true,
    warnings: Some(warnings::kinds::resource_slice),
    warns_on_update: Updates::All,
    columns: &[
        name(),
        field("Node", "string", "api.resource.v1.ResourceSliceSpec.nodeName", |slice| {
            slice.spec.node_name.clone().unwrap_or_default().into()
        }),
        field("Driver", "string", "api.resource.v1.ResourceSliceSpec.driver", |slice| {
            slice.spec.driver.clone().into()
        }),
        field("Pool", "string", "api.resource.v1.ResourcePool.name", |slice| {
            slice.spec.pool.name.clone().into()
        }),
        age(),
    ],
    fields: Fields::Of(&[
        ("spec.nodeName", |slice| slice.spec.node_name.clone().unwrap_or_default()),
        ("spec.driver", |slice| slice.spec.driver.clone()),
    ]),
    unknown_field: Some(|field| {
        format!("field label not supported for resource.k8s.io/v1, Kind=ResourceSlice: {field}")
    }),
    ..Kind::BASE
};

/// A taint was added when the slice was, unless it says otherwise.
fn default(slice: &mut ResourceSlice) {
    for device in slice.spec.devices.iter_mut().flatten() {
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added.get_or_insert_with(|| Time(base::clock::now_seconds()));
        }
    }
}

const GATED: &[Gated<ResourceSliceSpec>] = &[
    gated(&[Feature::DRADeviceTaints], |spec| {
        any(devices_of(spec).map(|one| taken(&mut one.taints)))
    }),
    gated(&[Feature::DRAPartitionableDevices], |spec| {
        let shared = taken(&mut spec.shared_counters) | taken(&mut spec.per_device_node_selection);
        let of_devices = any(devices_of(spec).map(|one| {
            taken(&mut one.consumes_counters)
                | taken(&mut one.node_name)
                | taken(&mut one.node_selector)
                | taken(&mut one.all_nodes)
        }));
        shared | of_devices
    }),
    gated(&[Feature::DRADeviceBindingConditions, Feature::DRAResourceClaimDeviceStatus], |spec| {
        any(devices_of(spec).map(|one| {
            taken(&mut one.binding_conditions)
                | taken(&mut one.binding_failure_conditions)
                | taken(&mut one.binds_to_node)
        }))
    }),
    gated(&[Feature::DRAConsumableCapacity], |spec| {
        any(devices_of(spec).map(|one| {
            let capacities = one.capacity.iter_mut().flat_map(|map| map.values_mut());
            let policies = any(capacities.map(|capacity| taken(&mut capacity.request_policy)));
            taken(&mut one.allow_multiple_allocations) | policies
        }))
    }),
    gated(&[Feature::DRANodeAllocatableResources], |spec| {
        any(devices_of(spec).map(|one| taken(&mut one.node_allocatable_resource_mappings)))
    }),
    gated(&[Feature::DRAListTypeAttributes], |spec| {
        let attributes = devices_of(spec).flat_map(|one| one.attributes.iter_mut());
        any(attributes.flat_map(|map| map.values_mut()).map(|one| {
            taken(&mut one.bools)
                | taken(&mut one.ints)
                | taken(&mut one.strings)
                | taken(&mut one.versions)
        }))
    }),
];

fn devices_of(spec: &mut ResourceSliceSpec) -> impl Iterator<Item = &mut Device> {
    spec.devices.iter_mut().flatten()
}

fn slice(at: &At<'_>) {
    const COUNTERS: usize = 8;
    let spec = at.get("spec");
    csi_driver_name(&spec.get("driver"));
    let pool = spec.get("pool");
    pool_name(&pool.get("name"));
    let count = pool.get("resourceSliceCount");
    if count.int() <= 0 {
        count.invalid_as(count.int(), "must be greater than zero");
    }
    let generation = pool.get("generation");
    if generation.int() < 0 {
        generation.invalid("must be greater than or equal to zero");
    }
    slice_nodes(&spec);
    let (devices, shared) = (spec.get("devices"), spec.get("sharedCounters"));
    if devices.is_set() && shared.is_set() {
        spec.invalid_as("", "only one of `sharedCounters` or `devices` is allowed");
    }
    let own_nodes = spec.get("perDeviceNodeSelection").bool();
    list(
        &devices,
        most_devices(&devices),
        |one| device(one, own_nodes),
        Some(|one| one.get("name").str()),
    );
    let set = |one: &At<'_>| {
        one.get("name").need_name(names::dns1123_label);
        counters(&one.get("counters"));
    };
    list(&shared, COUNTERS, set, Some(|one| one.get("name").str()));
}

fn slice_update(at: &At<'_>, old: &At<'_>) {
    for field in ["spec.pool.name", "spec.driver", "spec.nodeName"] {
        at.get(field).unchanged(&old.get(field));
    }
    slice(at);
}

/// Devices with taints, counters or lists take more room.
fn most_devices(devices: &At<'_>) -> usize {
    const LISTS: &[&str] = &["bools", "ints", "strings", "versions"];
    let is_big = |one: &At<'_>| {
        !one.get("taints").is_empty()
            || !one.get("consumesCounters").is_empty()
            || one
                .get("attributes")
                .entries()
                .any(|(_, one)| LISTS.iter().any(|field| one.has(field)))
    };
    if devices.items().any(|one| is_big(&one)) { 64 } else { 128 }
}

/// Which of several fields are there. `true` only counts.
fn which(at: &At<'_>, fields: &[&'static str], empty_name: &str) -> Vec<String> {
    let mut set = vec![];
    for field in fields {
        let place = at.get(field);
        match (place.value, *field) {
            (Value::Null, _) => continue,
            (Value::Bool(false), _) => {
                place.invalid("must be either unset or set to true");
                continue;
            }
            (Value::String(name), _) if name.is_empty() => {
                place.invalid(empty_name);
                continue;
            }
            (Value::String(_), _) => place.name(names::dns1123_subdomain),
            (_, "nodeSelector") => node_selector(&place),
            _ => {}
        }
        set.push(format!("`{field}`"));
    }
    set
}

fn slice_nodes(spec: &At<'_>) {
    const ONE: &str = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required";
    const FIELDS: &[&str] = &["nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"];
    let set = which(spec, FIELDS, "must be either unset or set to a non-empty string");
    let terms = spec.get("nodeSelector.nodeSelectorTerms");
    if spec.has("nodeSelector") && terms.len() != 1 {
        terms.invalid("must have exactly one node selector term");
    }
    match set.len() {
        0 => spec.required(ONE),
        1 => {}
        _ => {
            let shown = format!("{{{}}}", set.join(", "));
            spec.invalid_as(shown, &format!("{ONE}, but multiple fields are set"));
        }
    }
}

fn device(at: &At<'_>, own_nodes: bool) {
    const TAINTS: usize = 16;
    const CONSUMED: usize = 2;
    label(&at.get("name"));
    let (attributes, capacity) = (at.get("attributes"), at.get("capacity"));
    let features = attributes.len() + capacity.len();
    if features > MOST {
        let detail =
            format!("the total number of attributes and capacities must not exceed {MOST}");
        at.invalid_as(features, &detail);
    }
    features_of(&attributes, attribute);
    let many = at.get("allowMultipleAllocations").bool();
    features_of(&capacity, |one| {
        let policy = one.get("requestPolicy");
        match (policy.is_set(), many) {
            (true, false) => policy.forbidden("allowMultipleAllocations must be true"),
            (true, true) => request_policy(&policy),
            _ => {}
        }
    });
    list(&at.get("taints"), TAINTS, taint, None);
    let consumed = |one: &At<'_>| {
        one.get("counterSet").need_name(names::dns1123_label);
        counters(&one.get("counters"));
    };
    let consumes = at.get("consumesCounters");
    list(&consumes, CONSUMED, consumed, Some(|one| one.get("counterSet").str()));
    device_nodes(at, own_nodes);
    binding_conditions(at);
}

fn device_nodes(at: &At<'_>, own_nodes: bool) {
    const FIELDS: &[&str] = &["nodeName", "nodeSelector", "allNodes"];
    const ONE: &str = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to true in the ResourceSlice spec";
    if !own_nodes {
        if FIELDS.iter().any(|field| at.has(field)) {
            at.invalid_as(Value::Null, "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec");
        }
        return;
    }
    let set = which(at, FIELDS, "must not be empty");
    match set.len() {
        0 => at.required(ONE),
        1 => {}
        _ => at.invalid_as(format!("{{{}}}", set.join(", ")), ONE),
    }
}

fn features_of<'a>(at: &At<'a>, check: impl Fn(&At<'a>)) {
    at.entries().for_each(|(_, one)| check(&one));
    at.entries().for_each(|(name, _)| name_of_feature(at, name));
}

/// The fields of an attribute, by the names that Go's struct has for them.
const VALUES: &[(&str, &str)] = &[
    ("int", "IntValue"),
    ("bool", "BoolValue"),
    ("string", "StringValue"),
    ("version", "VersionValue"),
    ("ints", "IntValues"),
    ("bools", "BoolValues"),
    ("strings", "StringValues"),
    ("versions", "VersionValues"),
];

fn attribute(at: &At<'_>) {
    const LONGEST: usize = 64;
    const ONE: &str = "exactly one value must be specified";
    let text = |one: &At<'_>| {
        if one.len() > LONGEST {
            one.too_long(LONGEST);
        }
    };
    let version = |one: &At<'_>| {
        if !is_version(one.str()) {
            one.invalid_text("must be a string compatible with semver.org spec 2.0.0");
        }
        text(one);
    };
    if at.has("string") {
        text(&at.get("string"));
    }
    if at.has("version") {
        version(&at.get("version"));
    }
    at.get("strings").items().for_each(|one| text(&one));
    at.get("versions").items().for_each(|one| version(&one));
    match VALUES.iter().filter(|(field, _)| at.has(field)).count() {
        0 => at.invalid_as("", ONE),
        1 => {}
        _ => {
            // Go shows its struct, with all fields in their order.
            let field =
                |(name, shown): &(&'static str, &str)| format!("{shown:?}:{}", at.get(name).value);
            let fields: Vec<String> = VALUES.iter().map(field).collect();
            let shown = format!("{{{}}}", fields.join(","));
            at.errors().invalid_shown(&at.path, Some(&shown), ONE);
        }
    }
}

fn counters(at: &At<'_>) {
    if at.is_empty() {
        return at.required("");
    }
    if at.len() > MOST {
        return at.too_many(MOST);
    }
    let check: NameCheck = names::dns1123_label;
    for (name, _) in at.entries() {
        check(name).iter().for_each(|why| at.invalid_as(name, why));
    }
}

fn request_policy(at: &At<'_>) {
    let [values, range, default] =
        ["validValues", "validRange", "default"].map(|field| at.get(field));
    match (!values.is_empty(), range.is_set(), default.is_set()) {
        (true, true, _) => at.forbidden(r#"exactly one policy can be specified, cannot specify "validValues" and "validRange" at the same time"#),
        (true, _, false) => default.required("required when validValues is defined"),
        (_, true, false) => default.required("required when validRange is defined"),
        (_, true, true) if !range.has("min") => {
            range.get("min").required("required when validRange is defined");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        use Feature as F;
        let slice_of = |device: Value| {
            let mut device = device;
            device["name"] = "d".into();
            json!({"metadata": {"name": "x"}, "spec": {"driver": "d", "devices": [device],
                "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}}})
        };
        for (gate, field, value) in [
            (F::DRADeviceTaints, "taints", json!([{"key": "k", "effect": "NoSchedule"}])),
            (F::DRAPartitionableDevices, "nodeName", json!("n")),
            (F::DRADeviceBindingConditions, "bindingConditions", json!(["c"])),
            (F::DRAResourceClaimDeviceStatus, "bindsToNode", json!(true)),
            (F::DRAConsumableCapacity, "allowMultipleAllocations", json!(true)),
        ] {
            let path = format!("/spec/devices/0/{field}");
            check(KIND.gated, gate, &path, slice_of(json!({field: value})));
        }
        check(
            KIND.gated,
            F::DRAListTypeAttributes,
            "/spec/devices/0/attributes/a/ints",
            slice_of(json!({"attributes": {"a": {"ints": [1]}}})),
        );
    }
}
