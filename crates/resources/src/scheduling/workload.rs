//! Workload: templates of groups of pods that are scheduled together.

use base::features::Feature;
use k8s_openapi::api::scheduling::v1alpha2::Workload;

use super::TEMPLATE;
use crate::gated::close;
use crate::kind::{Kind, Rules, age, name};
use crate::validate::optional;

pub(crate) static KIND: Kind<Workload> = Kind {
    optional: true,
    gate: Some(Feature::GenericWorkload),
    gated: close_templates,
    rules: Rules {
        create: optional::workload,
        update: Some(optional::workload_update),
        ..Rules::NONE
    },
    columns: &[name(), age()],
    ..Kind::BASE
};

/// Templates are known by their place, as upstream knows them.
fn close_templates(new: &mut Workload, old: Option<&Workload>) {
    let before = old.map_or(&[][..], |old| &old.spec.pod_group_templates);
    for (at, template) in new.spec.pod_group_templates.iter_mut().enumerate() {
        close(TEMPLATE, template, before.get(at));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        for field in ["priority", "disruptionMode"] {
            let template = json!({"name": "t", "schedulingPolicy": {}, "priority": 3,
                "disruptionMode": "Pod"});
            check(
                KIND.gated,
                Feature::WorkloadAwarePreemption,
                &format!("/spec/podGroupTemplates/0/{field}"),
                json!({"metadata": {"name": "x"}, "spec": {"podGroupTemplates": [template]}}),
            );
        }
    }
}
