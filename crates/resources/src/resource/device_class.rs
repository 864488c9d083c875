//! DeviceClass: a kind of device that claims ask for.

use base::features::Feature;
use k8s_openapi::api::resource::v1::DeviceClass;

use crate::gated::{Gated, close, gated, taken};
use crate::kind::{Kind, Rules, age, name};
use crate::validate::devices;

pub(crate) static KIND: Kind<DeviceClass> = Kind {
    generation: Some(|new, old| new.spec != old.spec),
    gated: |new, old| close(GATED, new, old),
    rules: Rules { create: devices::class, ..Rules::NONE },
    returns_deleted: true,
    columns: &[name(), age()],
    ..Kind::BASE
};

const GATED: &[Gated<DeviceClass>] = &[gated(&[Feature::DRAExtendedResource], |class| {
    taken(&mut class.spec.extended_resource_name)
})];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        check(
            KIND.gated,
            Feature::DRAExtendedResource,
            "/spec/extendedResourceName",
            json!({"metadata": {"name": "x"}, "spec": {"extendedResourceName": "a/b"}}),
        );
    }
}
