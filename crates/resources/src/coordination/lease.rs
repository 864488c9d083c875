//! Lease: who holds something, and until when.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::coordination::v1::Lease;
use release::features::Feature;

use crate::gated::{Gated, close, gated, taken};
use crate::kind::{Kind, Rules, age, field, name};
use crate::validate::at::At;

pub(crate) static KIND: Kind<Lease> = Kind {
    gated: |new, old| close(GATED, new, old),
    rules: Rules {
        create: lease,
        metadata: MetadataRules::PLAIN,
        create_on_update: true,
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        field("Holder", "string", "api.coordination.v1.LeaseSpec.holderIdentity", |lease| {
            let spec = lease.spec.as_ref();
            spec.and_then(|spec| spec.holder_identity.clone()).unwrap_or_default().into()
        }),
        age(),
    ],
    ..Kind::BASE
};

const GATED: &[Gated<Lease>] = &[
    gated(&[Feature::CoordinatedLeaderElection], |lease| {
        lease.spec.as_mut().is_some_and(|spec| taken(&mut spec.strategy))
    }),
    gated(&[Feature::CoordinatedLeaderElection], |lease| {
        lease.spec.as_mut().is_some_and(|spec| taken(&mut spec.preferred_holder))
    }),
];

fn lease(at: &At<'_>) {
    let spec = at.get("spec");
    let duration = spec.get("leaseDurationSeconds");
    if duration.number().is_some_and(|seconds| seconds <= 0) {
        duration.invalid("must be greater than 0");
    }
    spec.get("leaseTransitions").not_negative();
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        for field in ["strategy", "preferredHolder"] {
            check(
                KIND.gated,
                Feature::CoordinatedLeaderElection,
                &format!("/spec/{field}"),
                json!({"metadata": {"name": "x"}, "spec": {field: "x"}}),
            );
        }
    }
}
