//! Binding conditions: devices that must be ready before their pod is bound.
//! Upstream: `isClaimReadyForBinding`, `isClaimTimeout`.

use std::time::Duration;

use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, DeviceRequestAllocationResult, ResourceClaim,
};

use crate::claims::allocation;
use crate::error::BindError;

fn results(claim: &ResourceClaim) -> impl Iterator<Item = &DeviceRequestAllocationResult> {
    let devices = allocation(claim).and_then(|one| one.devices.as_ref());
    let results = devices.into_iter().flat_map(|devices| devices.results.iter().flatten());
    results.filter(|one| one.binding_conditions.as_ref().is_some_and(|all| !all.is_empty()))
}

/// Whether all devices are ready. An error means that a device will never be ready.
pub fn is_ready(claim: &ResourceClaim) -> Result<bool, BindError> {
    for result in results(claim) {
        let known = claim.status.iter().flat_map(|status| status.devices.iter().flatten());
        let is_it = |one: &&AllocatedDeviceStatus| {
            one.driver == result.driver
                && one.pool == result.pool
                && one.device == result.device
                && one.share_id == result.share_id
        };
        let Some(device) = known.into_iter().find(is_it) else { return Ok(false) };
        let is_true = |kind: &String| {
            let conditions = device.conditions.iter().flatten();
            let found = conditions.into_iter().find(|one| one.type_ == *kind);
            found.filter(|one| one.status == "True")
        };
        let failed = result.binding_failure_conditions.iter().flatten().find_map(is_true);
        if let Some(failed) = failed {
            return Err(BindError::DeviceFailed {
                claim: claim.metadata.name.clone().unwrap_or_default(),
                reason: failed.reason.clone(),
                message: failed.message.clone(),
            });
        }
        if !result.binding_conditions.iter().flatten().all(|kind| is_true(kind).is_some()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the claim has waited for its devices for longer than `longest`.
pub fn is_overdue(claim: &ResourceClaim, longest: Duration) -> bool {
    let since = allocation(claim).and_then(|one| one.allocation_timestamp.as_ref());
    results(claim).next().is_some()
        && since.is_some_and(|since| {
            base::clock::now().duration_since(since.0).unsigned_abs() > longest
        })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    #[test]
    fn devices_are_ready_when_their_conditions_say_so() {
        let check = |conditions: Value, expected: Result<bool, &str>| {
            let claim: ResourceClaim = from_value(json!({"metadata": {"name": "c"}, "spec": {},
                "status": {"allocation": {"devices": {"results": [{"request": "r", "driver": "d",
                    "pool": "p", "device": "x", "bindingConditions": ["Attached"],
                    "bindingFailureConditions": ["Broken"]}]}},
                    "devices": [{"driver": "d", "pool": "p", "device": "x",
                        "conditions": conditions}]}}))
            .unwrap();
            let found = is_ready(&claim).map_err(|why| why.to_string());
            assert_eq!(found, expected.map_err(str::to_owned));
        };
        let condition = |kind: &str, status: &str| {
            json!({"type": kind, "status": status, "reason": "R", "message": "m",
                "lastTransitionTime": "2026-01-01T00:00:00Z"})
        };
        check(json!([]), Ok(false));
        check(json!([condition("Attached", "False")]), Ok(false));
        check(json!([condition("Attached", "True")]), Ok(true));
        check(
            json!([condition("Attached", "True"), condition("Broken", "True")]),
            Err("device binding failed: claim=c, reason=R, message=\"m\""),
        );
    }
}
