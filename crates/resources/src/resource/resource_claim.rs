//! ResourceClaim: a pod's claim to devices.

use base::features::Feature;
use k8s_openapi::api::resource::v1::{
    DeviceRequestAllocationResult, ResourceClaim, ResourceClaimStatus,
};

use super::{CLAIM_SPEC, default_claim};
use crate::gated::{Gated, any, close, close_part, gated, taken};
use crate::kind::{Kind, Rules, STATUS, age, name, spec_and_status, text};
use crate::validate::devices;

pub(crate) static KIND: Kind<ResourceClaim> = Kind {
    subresources: &[STATUS],
    default: |claim| default_claim(&mut claim.spec),
    parts: Some(spec_and_status!()),
    gated: |new, old| {
        close(CLAIM_SPEC, &mut new.spec, old.map(|old| &old.spec));
        close_part(CLAIM_STATUS, new.status.as_mut(), old.map(|old| old.status.as_ref()));
    },
    rules: Rules {
        create: devices::claim,
        update: Some(devices::claim_update),
        parts: &[("status", devices::claim_status)],
        ..Rules::NONE
    },
    returns_deleted: true,
    columns: &[
        name(),
        text(
            "State",
            "string",
            "A summary of the current state (allocated, pending, reserved, etc.).",
            |claim| state(claim).into(),
        ),
        age(),
    ],
    ..Kind::BASE
};

const CLAIM_STATUS: &[Gated<ResourceClaimStatus>] = &[
    gated(&[Feature::DRAResourceClaimDeviceStatus], |status| taken(&mut status.devices)),
    gated(&[Feature::DRAConsumableCapacity], |status| {
        let of_results =
            any(results(status)
                .map(|one| taken(&mut one.share_id) | taken(&mut one.consumed_capacity)));
        let of_devices = status.devices.iter_mut().flatten();
        of_results | any(of_devices.map(|one| taken(&mut one.share_id)))
    }),
    gated(&[Feature::DRADeviceBindingConditions], |status| {
        any(results(status).map(|one| {
            taken(&mut one.binding_conditions) | taken(&mut one.binding_failure_conditions)
        }))
    }),
];

fn results(
    status: &mut ResourceClaimStatus,
) -> impl Iterator<Item = &mut DeviceRequestAllocationResult> {
    let allocated = status.allocation.iter_mut().filter_map(|one| one.devices.as_mut());
    allocated.flat_map(|one| one.results.iter_mut().flatten())
}

fn state(claim: &ResourceClaim) -> &'static str {
    let status = claim.status.as_ref();
    let is_deleted = claim.metadata.deletion_timestamp.is_some();
    let is_allocated = status.is_some_and(|status| status.allocation.is_some());
    let users = status.and_then(|status| status.reserved_for.as_ref());
    match (is_deleted, is_allocated, users.is_some_and(|users| !users.is_empty())) {
        (true, false, _) => "deleted",
        (false, false, _) => "pending",
        (true, true, false) => "deleted,allocated",
        (true, true, true) => "deleted,allocated,reserved",
        (false, true, false) => "allocated",
        (false, true, true) => "allocated,reserved",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        const R: &str = "/spec/devices/requests/0";
        let claim_of = |request: Value| {
            let mut request = request;
            request["name"] = "r".into();
            json!({"metadata": {"name": "x"}, "spec": {"devices": {"requests": [request]}}})
        };
        let exactly = |field: &str, value: Value| {
            claim_of(json!({"exactly": {"deviceClassName": "c", field: value}}))
        };
        let sub = json!([{"name": "s", "deviceClassName": "c"}]);
        let mut with_status = claim_of(json!({}));
        with_status["status"] = json!({"devices": [{"driver": "d", "pool": "p", "device": "x"}]});
        for (gate, field, claim) in [
            (
                Feature::DRADeviceTaints,
                format!("{R}/exactly/tolerations"),
                exactly("tolerations", json!([{"key": "k"}])),
            ),
            (
                Feature::DRAConsumableCapacity,
                format!("{R}/exactly/capacity"),
                exactly("capacity", json!({"requests": {"a": "1"}})),
            ),
            (
                Feature::DRAPrioritizedList,
                format!("{R}/firstAvailable"),
                claim_of(json!({"firstAvailable": sub})),
            ),
            (Feature::DRAResourceClaimDeviceStatus, "/status/devices".into(), with_status),
        ] {
            check(KIND.gated, gate, &field, claim);
        }
    }
}
