//! LeaseCandidate: who would hold a Lease, in which version.

use k8s_openapi::api::coordination::v1beta1::LeaseCandidate;
use machinery::names;

use crate::kind::{Kind, Rules, age, field, name, text};
use crate::validate::optional;

pub(crate) static KIND: Kind<LeaseCandidate> = Kind {
    optional: true,
    rules: Rules {
        create: optional::lease_candidate,
        update: Some(optional::lease_candidate_update),
        name: names::config_map_key,
        create_on_update: true,
        unconditional_update: false,
        ..Rules::NONE
    },
    deprecation: "coordination.k8s.io/v1beta1 LeaseCandidate is deprecated in v1.36+, unavailable in v1.39+",
    columns: &[
        name(),
        field(
            "LeaseName",
            "string",
            "api.coordination.v1beta1.LeaseCandidateSpec.leaseName",
            |candidate| candidate.spec.lease_name.clone().into(),
        ),
        text("BinaryVersion", "string", "", |candidate| {
            candidate.spec.binary_version.clone().into()
        }),
        text("EmulationVersion", "string", "", |candidate| {
            candidate.spec.emulation_version.clone().unwrap_or_default().into()
        }),
        age(),
    ],
    ..Kind::BASE
};
