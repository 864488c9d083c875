//! scheduling.k8s.io: which pods come first, and which belong together.

pub(crate) mod pod_group;
pub(crate) mod priority_class;
pub(crate) mod workload;

use base::features::Feature;
use k8s_openapi::api::scheduling::v1alpha2::{PodGroupSpec, PodGroupTemplate};

use crate::gated::{Gated, gated, taken};

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
