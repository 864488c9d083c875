//! ResourceSlice: the devices of a driver, on a node or for many.

use base::features::Feature;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice, ResourceSliceSpec};

use crate::gated::{Gated, any, close, gated, taken};
use crate::kind::{Fields, Kind, Rules, age, field, name};
use crate::validate::devices;

pub(crate) static KIND: Kind<ResourceSlice> = Kind {
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| close(GATED, &mut new.spec, old.map(|old| &old.spec)),
    rules: Rules { create: devices::slice, update: Some(devices::slice_update), ..Rules::NONE },
    returns_deleted: true,
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
