//! CSIDriver: what a driver of volumes can do.

use base::features::{self, Feature};
use k8s_openapi::api::storage::v1::CSIDriver;

use crate::gated::{Gated, close, gated, taken};
use crate::kind::{Kind, Rules, age, field, name};
use crate::print::or_none;
use crate::validate::{storage, warnings};

pub(crate) static KIND: Kind<CSIDriver> = Kind {
    default,
    gated: |new, old| close(GATED, new, old),
    rules: Rules {
        create: storage::csi_driver,
        update: Some(storage::csi_driver_update),
        unconditional_update: false,
        ..Rules::NONE
    },
    warnings: Some(warnings::csi_driver),
    columns: &[
        name(),
        field(
            "AttachRequired",
            "boolean",
            "api.storage.v1.CSIDriverSpec.attachRequired",
            |driver| driver.spec.attach_required.unwrap_or(true).into(),
        ),
        field(
            "PodInfoOnMount",
            "boolean",
            "api.storage.v1.CSIDriverSpec.podInfoOnMount",
            |driver| driver.spec.pod_info_on_mount.unwrap_or_default().into(),
        ),
        field(
            "StorageCapacity",
            "boolean",
            "api.storage.v1.CSIDriverSpec.storageCapacity",
            |driver| driver.spec.storage_capacity.unwrap_or_default().into(),
        ),
        field("TokenRequests", "string", "api.storage.v1.CSIDriverSpec.tokenRequests", |driver| {
            audiences(driver).into()
        }),
        field(
            "RequiresRepublish",
            "boolean",
            "api.storage.v1.CSIDriverSpec.requiresRepublish",
            |driver| driver.spec.requires_republish.unwrap_or_default().into(),
        ),
        field("Modes", "string", "api.storage.v1.CSIDriverSpec.volumeLifecycleModes", |driver| {
            let modes = driver.spec.volume_lifecycle_modes.as_deref();
            or_none(modes.unwrap_or_default().join(",")).into()
        }),
        age(),
    ],
    returns_deleted: true,
    ..Kind::BASE
};

const GATED: &[Gated<CSIDriver>] = &[gated(&[Feature::VolumeLimitScaling], |driver| {
    taken(&mut driver.spec.prevent_pod_scheduling_if_missing)
})];

fn default(driver: &mut CSIDriver) {
    let spec = &mut driver.spec;
    spec.attach_required.get_or_insert(true);
    for switch in [
        &mut spec.pod_info_on_mount,
        &mut spec.storage_capacity,
        &mut spec.requires_republish,
        &mut spec.se_linux_mount,
    ] {
        switch.get_or_insert(false);
    }
    spec.fs_group_policy.get_or_insert_with(|| "ReadWriteOnceWithFSType".into());
    if features::enabled(Feature::VolumeLimitScaling) {
        spec.prevent_pod_scheduling_if_missing.get_or_insert(false);
    }
    let modes = spec.volume_lifecycle_modes.get_or_insert_default();
    if modes.is_empty() {
        modes.push("Persistent".into());
    }
}

fn audiences(driver: &CSIDriver) -> String {
    let Some(requests) = &driver.spec.token_requests else { return "<unset>".into() };
    requests.iter().map(|one| one.audience.as_str()).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        check(
            KIND.gated,
            Feature::VolumeLimitScaling,
            "/spec/preventPodSchedulingIfMissing",
            json!({"metadata": {"name": "x"}, "spec": {"preventPodSchedulingIfMissing": true}}),
        );
    }
}
