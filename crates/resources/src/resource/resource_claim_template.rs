//! ResourceClaimTemplate: the claim that each of a workload's pods gets.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;

use super::{CLAIM_SPEC, default_claim, device_claim};
use crate::gated::close;
use crate::kind::{Kind, Rules, age, name};
use crate::validate::at::At;
use crate::validate::internal;

pub(crate) static KIND: Kind<ResourceClaimTemplate> = Kind {
    default: |template| default_claim(&mut template.spec.spec),
    gated: |new, old| close(CLAIM_SPEC, &mut new.spec.spec, old.map(|old| &old.spec.spec)),
    rules: Rules {
        create: claim_template,
        update: Some(claim_template_update),
        metadata: MetadataRules::WHOLE_AND_UPDATE,
        ..Rules::NONE
    },
    returns_deleted: true,
    columns: &[name(), age()],
    ..Kind::BASE
};

fn claim_template(at: &At<'_>) {
    let metadata = at.get("spec.metadata");
    metadata.get("annotations").annotations();
    metadata.get("labels").labels();
    for field in NOT_COPIED {
        let field = metadata.get(field);
        if !field.is_empty() {
            field.forbidden("cannot be set");
        }
    }
    device_claim(&at.get("spec.spec.devices"));
}

/// Fields of the template's metadata that claims do not get, in the order of upstream's type.
const NOT_COPIED: &[&str] = &[
    "name",
    "generateName",
    "namespace",
    "selfLink",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "ownerReferences",
    "finalizers",
    "managedFields",
];

fn claim_template_update(at: &At<'_>, old: &At<'_>) {
    claim_template(at);
    internal::unchanged(&at.get("spec"), &old.get("spec"), "ResourceClaimTemplateSpec");
}

#[cfg(test)]
mod tests {
    use release::features::Feature;
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;
    use crate::validate::at::{judge, judge_both};

    #[test]
    fn metadata_of_claims_is_labels_and_annotations() {
        let tree = json!({"spec": {
            "metadata": {"labels": {"a": "b"}, "name": "x", "finalizers": ["y"]},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "c", "allocationMode": "All"}}]}},
        }});
        let texts = |errors: machinery::field::FieldErrors| -> Vec<String> {
            errors.0.iter().map(ToString::to_string).collect()
        };
        let expected = ["name", "finalizers"]
            .map(|name| format!("spec.metadata.{name}: Forbidden: cannot be set"));
        assert_eq!(texts(judge(&tree, claim_template)), expected);
        let other = json!({"spec": {"spec": {"devices": {}}}});
        let errors = texts(judge_both(&other, &json!({"spec": {}}), claim_template_update));
        assert_eq!(
            errors.last().map(String::as_str),
            Some(
                r#"spec: Invalid value: {"Spec":{"Devices":{"Requests":null,"Constraints":null,"Config":null}}}: field is immutable"#
            )
        );
    }

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
