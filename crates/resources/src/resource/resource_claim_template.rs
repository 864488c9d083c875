//! ResourceClaimTemplate: the claim that each of a workload's pods gets.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;

use super::{CLAIM_SPEC, claim_update, default_claim, device_claim};
use crate::gated::close;
use crate::kind::{Kind, Rules, age, name};
use crate::validate::at::At;

pub(crate) static KIND: Kind<ResourceClaimTemplate> = Kind {
    default: |template| default_claim(&mut template.spec.spec),
    gated: |new, old| close(CLAIM_SPEC, &mut new.spec.spec, old.map(|old| &old.spec.spec)),
    rules: Rules {
        create: claim_template,
        update: Some(claim_update),
        metadata: MetadataRules::WHOLE_AND_UPDATE,
        ..Rules::NONE
    },
    returns_deleted: true,
    columns: &[name(), age()],
    ..Kind::BASE
};

fn claim_template(at: &At<'_>) {
    let metadata = at.get("spec.metadata");
    metadata.get("labels").labels();
    metadata.get("annotations").annotations();
    device_claim(&at.get("spec.spec.devices"));
}

#[cfg(test)]
mod tests {
    use release::features::Feature;
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        let sub = json!([{"name": "s", "deviceClassName": "c"}]);
        let claim = json!({"devices": {"requests": [{"name": "r", "firstAvailable": sub}]}});
        check(
            KIND.gated,
            Feature::DRAPrioritizedList,
            "/spec/spec/devices/requests/0/firstAvailable",
            json!({"metadata": {"name": "x"}, "spec": {"spec": claim}}),
        );
    }
}
