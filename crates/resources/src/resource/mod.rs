//! resource.k8s.io: devices, and claims to them.

use base::features::Feature;
use k8s_openapi::api::resource::v1::{DeviceRequest, ResourceClaimSpec};

use crate::defaults::fill;
use crate::gated::{Gated, any, gated, taken};

pub(crate) mod device_class;
pub(crate) mod device_taint_rule;
pub(crate) mod resource_claim;
pub(crate) mod resource_claim_template;
pub(crate) mod resource_pool_status_request;
pub(crate) mod resource_slice;

/// Requests for devices, and their alternatives: types of their own with the same fields.
macro_rules! default_request {
    ($request:expr) => {{
        let request = $request;
        fill(&mut request.allocation_mode, "ExactCount");
        if request.allocation_mode.as_deref() == Some("ExactCount")
            && request.count.is_none_or(|count| count == 0)
        {
            request.count = Some(1);
        }
    }};
}

fn default_claim(spec: &mut ResourceClaimSpec) {
    for request in requests(spec) {
        request.exactly.iter_mut().for_each(|exact| default_request!(exact));
        request.first_available.iter_mut().flatten().for_each(|sub| default_request!(sub));
    }
}

const CLAIM_SPEC: &[Gated<ResourceClaimSpec>] = &[
    gated(&[Feature::DRAPrioritizedList], |spec| {
        any(requests(spec).map(|one| taken(&mut one.first_available)))
    }),
    gated(&[Feature::DRADeviceTaints], |spec| {
        any(requests(spec).map(|one| {
            let exactly = one.exactly.as_mut().is_some_and(|one| taken(&mut one.tolerations));
            let rest = one.first_available.iter_mut().flatten();
            exactly | any(rest.map(|one| taken(&mut one.tolerations)))
        }))
    }),
    gated(&[Feature::DRAConsumableCapacity], |spec| {
        let of_requests = any(requests(spec).map(|one| {
            let exactly = one.exactly.as_mut().is_some_and(|one| taken(&mut one.capacity));
            let rest = one.first_available.iter_mut().flatten();
            exactly | any(rest.map(|one| taken(&mut one.capacity)))
        }));
        let constraints = spec.devices.iter_mut().flat_map(|one| one.constraints.iter_mut());
        of_requests | any(constraints.flatten().map(|one| taken(&mut one.distinct_attribute)))
    }),
];

fn requests(spec: &mut ResourceClaimSpec) -> impl Iterator<Item = &mut DeviceRequest> {
    spec.devices.iter_mut().flat_map(|one| one.requests.iter_mut().flatten())
}
