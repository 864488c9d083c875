//! PodGroup: pods that are scheduled together.

use base::features::Feature;
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;

use super::POD_GROUP;
use crate::gated::close;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status, text};
use crate::validate::optional;

pub(crate) static KIND: Kind<PodGroup> = Kind {
    optional: true,
    gate: Some(Feature::GenericWorkload),
    subresources: &[STATUS],
    parts: Some(spec_and_status!()),
    gated: |new, old| close(POD_GROUP, &mut new.spec, old.map(|old| &old.spec)),
    rules: Rules {
        create: optional::pod_group,
        update: Some(optional::pod_group_update),
        parts: &[("status", optional::pod_group_status)],
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
