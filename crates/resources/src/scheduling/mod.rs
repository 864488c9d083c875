//! scheduling.k8s.io: which pods come first, and which belong together.

use k8s_openapi::api::scheduling::v1alpha2::{PodGroupSpec, PodGroupTemplate};
use release::features::Feature;

use crate::gated::{Gated, gated, taken};
use crate::validate::at::At;

pub(crate) mod pod_group;
pub(crate) mod priority_class;
pub(crate) mod workload;

/// Fields behind gates that a group of pods and its template in a Workload have alike.
macro_rules! gated_fields {
    () => {
        &[
            gated(&[Feature::TopologyAwareWorkloadScheduling], |one| {
                taken(&mut one.scheduling_constraints)
            }),
            gated(&[Feature::DRAWorkloadResourceClaims], |one| taken(&mut one.resource_claims)),
            gated(&[Feature::WorkloadAwarePreemption], |one| taken(&mut one.disruption_mode)),
            gated(&[Feature::WorkloadAwarePreemption], |one| taken(&mut one.priority_class_name)),
            gated(&[Feature::WorkloadAwarePreemption], |one| taken(&mut one.priority)),
        ]
    };
}

const POD_GROUP: &[Gated<PodGroupSpec>] = gated_fields!();
const TEMPLATE: &[Gated<PodGroupTemplate>] = gated_fields!();

fn scheduling_policy(at: &At<'_>) {
    const ONE: &str = "`basic`, `gang`";
    let (basic, gang) = (at.get("basic"), at.get("gang"));
    match (basic.is_set(), gang.is_set()) {
        (false, false) => at.invalid_as("", &format!("must specify one of: {ONE}")),
        (true, true) => {
            at.invalid_as("{basic, gang}", &format!("must specify exactly one of: {ONE}"));
        }
        _ => {}
    }
    let count = gang.get("minCount");
    match gang.is_set() {
        true if count.int() == 0 => count.required(""),
        true => count.at_least(1),
        false => {}
    }
}
