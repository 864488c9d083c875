//! ResourceClaim: a pod's claim to devices.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::resource::v1::{
    DeviceRequestAllocationResult, ResourceClaim, ResourceClaimStatus,
};
use release::features::Feature;
use serde_json::json;

use super::{
    CLAIM_SPEC, MOST, PARAMETERS, binding_conditions, claim_update, configuration, default_claim,
    device_claim, label, list, pool_name, raw, reference, references, request_names,
};
use crate::gated::{Gated, any, close, close_part, gated, taken};
use crate::kind::{Kind, Rules, STATUS, age, name, spec_and_bare_status, text};
use crate::validate::at::At;
use crate::validate::pod::node_selector;
use crate::validate::shared::conditions;
use crate::validate::volumes::csi_driver_name;

pub(crate) static KIND: Kind<ResourceClaim> = Kind {
    subresources: &[STATUS],
    default: |claim| default_claim(&mut claim.spec),
    parts: Some(spec_and_bare_status!()),
    gated: |new, old| {
        close(CLAIM_SPEC, &mut new.spec, old.map(|old| &old.spec));
        close_part(CLAIM_STATUS, new.status.as_mut(), old.map(|old| old.status.as_ref()));
    },
    rules: Rules {
        create: claim,
        update: Some(claim_update),
        parts: &[("status", claim_status)],
        metadata: MetadataRules::WHOLE_AND_UPDATE,
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

fn claim(at: &At<'_>) {
    device_claim(&at.get("spec.devices"));
}

fn claim_status(at: &At<'_>, old: &At<'_>) {
    const USERS: usize = 256;
    let (status, before) = (at.get("status"), old.get("status"));
    let known = request_names(&at.get("spec.devices"));
    let (users, allocation) = (status.get("reservedFor"), status.get("allocation"));
    let user = |one: &At<'_>| {
        for field in ["resource", "name", "uid"] {
            one.get(field).need();
        }
    };
    list(&users, USERS, user, Some(|one| one.get("uid").str()));
    status.get("devices").items().for_each(|one| device_status(&one, &allocation));
    if !users.is_empty() && !allocation.is_set() {
        users.forbidden("may not be specified when `allocated` is not set");
    } else if !users.is_empty() && !at.get("metadata.deletionTimestamp").is_empty() {
        let earlier = before.get("reservedFor").items().map(|one| one.value).collect::<Vec<_>>();
        if users.items().any(|one| !earlier.contains(&one.value)) {
            users.forbidden("new entries may not be added while `deallocationRequested` or `deletionTimestamp` are set");
        }
    }
    if before.has("allocation") && allocation.is_set() {
        allocation.unchanged(&before.get("allocation"));
    } else if allocation.is_set() {
        allocated(&allocation, &known);
    }
}

fn allocated(at: &At<'_>, known: &[String]) {
    let devices = at.get("devices");
    let result = |one: &At<'_>| {
        reference(&one.get("request"), known);
        csi_driver_name(&one.get("driver"));
        pool_name(&one.get("pool"));
        label(&one.get("device"));
        binding_conditions(one);
    };
    list(&devices.get("results"), MOST, result, None);
    let config = |one: &At<'_>| {
        let source = one.get("source");
        if source.need() {
            source.one_of(&["FromClaim", "FromClass"]);
        }
        references(&one.get("requests"), known);
        configuration(one);
    };
    list(&devices.get("config"), 2 * MOST, config, None);
    if at.has("nodeSelector") {
        node_selector(&at.get("nodeSelector"));
    }
}

fn device_status(at: &At<'_>, allocation: &At<'_>) {
    const CONDITIONS: usize = 8;
    csi_driver_name(&at.get("driver"));
    pool_name(&at.get("pool"));
    label(&at.get("device"));
    let id = |at: &At<'_>| {
        ["driver", "pool", "device", "shareID"].map(|field| at.get(field).str().to_owned())
    };
    if !allocation.get("devices.results").items().any(|result| id(&result) == id(at)) {
        let [driver, pool, device, share] = id(at);
        let mut shown = json!({"Driver": driver, "Pool": pool, "Device": device});
        shown["ShareID"] = share.into();
        at.invalid_as(shown, "must be an allocated device in the claim");
    }
    let all = at.get("conditions");
    if all.len() > CONDITIONS {
        all.too_many(CONDITIONS);
    }
    conditions(&all);
    if at.has("data") {
        raw(&at.get("data"), PARAMETERS);
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
