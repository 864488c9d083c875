//! PodGroup: pods that are scheduled together.

use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use machinery::names;
use release::features::Feature;

use super::{POD_GROUP, scheduling_policy};
use crate::gated::close;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_bare_status, text};
use crate::validate::at::At;
use crate::validate::shared::{conditions, immutable};

pub(crate) static KIND: Kind<PodGroup> = Kind {
    optional: true,
    gate: Some(Feature::GenericWorkload),
    subresources: &[STATUS],
    parts: Some(spec_and_bare_status!()),
    gated: |new, old| close(POD_GROUP, &mut new.spec, old.map(|old| &old.spec)),
    rules: Rules {
        create: pod_group,
        update: Some(pod_group_update),
        parts: &[("status", pod_group_status)],
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "Policy",
            "string",
            "api.scheduling.v1alpha2.PodGroupSpec.schedulingPolicy",
            |group| {
                let policy = &group.spec.scheduling_policy;
                if policy.gang.is_some() { "Gang" } else { "Basic" }.into()
            },
        ),
        text("Workload", "string", "Name of the referenced Workload object", |group| {
            let template = group.spec.pod_group_template_ref.as_ref();
            let workload = template.and_then(|one| one.workload.as_ref());
            workload.map_or("<none>", |one| one.workload_name.as_str()).into()
        }),
        text("Status", "string", "Status of the PodGroup", |group| status(group).into()),
        age(),
    ],
    ..Kind::BASE
};

fn status(group: &PodGroup) -> &str {
    let conditions = group.status.as_ref().and_then(|status| status.conditions.as_deref());
    let of = |kind: &str| conditions.unwrap_or_default().iter().rfind(|one| one.type_ == kind);
    match (of("DisruptionTarget"), of("PodGroupScheduled")) {
        (Some(disrupted), _) => &disrupted.reason,
        (None, Some(scheduled)) if scheduled.status == "True" => "Scheduled",
        (None, Some(_)) => "Unschedulable",
        (None, None) => "Pending",
    }
}

fn pod_group(at: &At<'_>) {
    let spec = at.get("spec");
    let template = spec.get("podGroupTemplateRef");
    let workload = template.get("workload");
    if template.is_set() && !workload.is_set() {
        template.invalid_as("", "must specify one of: `workload`");
    }
    if workload.is_set() {
        workload.get("workloadName").need_name(names::dns1123_subdomain);
        workload.get("podGroupTemplateName").need_name(names::dns1123_label);
    }
    scheduling_policy(&spec.get("schedulingPolicy"));
}

fn pod_group_update(at: &At<'_>, old: &At<'_>) {
    for field in ["spec.podGroupTemplateRef", "spec.schedulingPolicy", "spec.resourceClaims"] {
        immutable(&at.get(field), &old.get(field));
    }
}

fn pod_group_status(at: &At<'_>, _old: &At<'_>) {
    let status = at.get("status");
    conditions(&status.get("conditions"));
    let claims = at.get("spec.resourceClaims");
    let known: Vec<&str> = claims.items().map(|claim| claim.get("name").str()).collect();
    for one in status.get("resourceClaimStatuses").items() {
        let name = one.get("name");
        if !known.contains(&name.str()) {
            name.invalid_text("must match the name of an entry in `spec.resourceClaims`");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        let spec = json!({"schedulingPolicy": {}, "priority": 3, "disruptionMode": "Pod"});
        for field in ["priority", "disruptionMode"] {
            check(
                KIND.gated,
                Feature::WorkloadAwarePreemption,
                &format!("/spec/{field}"),
                json!({"metadata": {"name": "x"}, "spec": spec}),
            );
        }
    }
}
