//! CSIDriver: what a driver of volumes can do.

use std::collections::HashSet;

use k8s_openapi::api::storage::v1::CSIDriver;
use release::features::{self, Feature};

use crate::gated::{Gated, close, gated, taken};
use crate::kind::{Kind, Rules, age, field, name};
use crate::print::or_none;
use crate::validate::at::At;
use crate::validate::warnings;

pub(crate) static KIND: Kind<CSIDriver> = Kind {
    default,
    gated: |new, old| close(GATED, new, old),
    rules: Rules {
        create: csi_driver,
        update: Some(csi_driver_update),
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

fn csi_driver(at: &At<'_>) {
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

fn csi_driver_update(at: &At<'_>, old: &At<'_>) {
    csi_driver(at);
    let (spec, before) = (at.get("spec"), old.get("spec"));
    spec.get("attachRequired")
        .called(spec.child_path("attachedRequired"))
        .unchanged(&before.get("attachRequired"));
    spec.get("volumeLifecycleModes").unchanged(&before.get("volumeLifecycleModes"));
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
