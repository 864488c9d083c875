//! Workload: templates of groups of pods that are scheduled together.

use k8s_openapi::api::scheduling::v1alpha2::Workload;
use machinery::names;
use release::features::Feature;

use super::{TEMPLATE, scheduling_policy};
use crate::gated::close;
use crate::kind::{Kind, Rules, age, name};
use crate::validate::at::At;
use crate::validate::shared::immutable;

pub(crate) static KIND: Kind<Workload> = Kind {
    optional: true,
    gate: Some(Feature::GenericWorkload),
    gated: close_templates,
    rules: Rules { create: workload, update: Some(workload_update), ..Rules::NONE },
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

fn workload(at: &At<'_>) {
    const TEMPLATES: usize = 8;
    let spec = at.get("spec");
    let controller = spec.get("controllerRef");
    if controller.is_set() {
        controller.get("apiGroup").any_name(names::dns1123_subdomain);
        controller.get("kind").need_name(names::path_segment);
        controller.get("name").need_name(names::path_segment);
    }
    let templates = spec.get("podGroupTemplates");
    if templates.len() > TEMPLATES {
        return templates.too_many(TEMPLATES);
    }
    if templates.need() {
        templates.unique(|one| one.get("name").str().to_owned(), Clone::clone);
    }
    for template in templates.items() {
        template.get("name").need_name(names::dns1123_label);
        scheduling_policy(&template.get("schedulingPolicy"));
    }
}

fn workload_update(at: &At<'_>, old: &At<'_>) {
    for field in ["spec.controllerRef", "spec.podGroupTemplates"] {
        immutable(&at.get(field), &old.get(field));
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
