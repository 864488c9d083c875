//! StatefulSet: pods with names and volumes that stay.

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetStatus, StatefulSetUpdateStrategy};
use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::names as rules;
use release::features::{self, Feature};

use super::{COUNTS, tidy_counts};
use crate::core::podspec;
use crate::defaults::fill;
use crate::gated::{Gated, close_part, close_template, gated, taken};
use crate::kind::{Kind, Rules, STATUS, age, name, spec_and_status, text, wide};
use crate::print::{images, names};
use crate::scale;
use crate::validate::{warnings, workloads};

pub(crate) static KIND: Kind<StatefulSet> = Kind {
    short: &["sts"],
    categories: &["all"],
    subresources: &[STATUS, scale::sub::<StatefulSet>()],
    default,
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    gated: close,
    rules: Rules {
        create: workloads::stateful_set,
        update: Some(workloads::stateful_set_update),
        parts: COUNTS,
        name: rules::dns1123_label,
        ..Rules::NONE
    },
    warnings: Some(warnings::stateful_set),
    columns: &[
        name(),
        text("Ready", "string", "Number of the pod with ready state", |set| {
            let wanted = set.spec.as_ref().and_then(|spec| spec.replicas);
            let ready = set.status.as_ref().and_then(|status| status.ready_replicas);
            format!("{}/{}", ready.unwrap_or_default(), wanted.unwrap_or_default()).into()
        }),
        age(),
        wide(text("Containers", "string", "Names of each container in the template.", |set| {
            names(containers(set)).into()
        })),
        wide(text(
            "Images",
            "string",
            "Images referenced by each container in the template.",
            |set| images(containers(set)).into(),
        )),
    ],
    ..Kind::BASE
};

const UPDATE: &[Gated<StatefulSetUpdateStrategy>] =
    &[gated(&[Feature::MaxUnavailableStatefulSet], |strategy| {
        strategy.rolling_update.as_mut().is_some_and(|rolling| taken(&mut rolling.max_unavailable))
    })];

fn close(new: &mut StatefulSet, old: Option<&StatefulSet>) {
    let old = old.and_then(|old| old.spec.as_ref());
    let Some(spec) = &mut new.spec else { return };
    close_template(Some(&mut spec.template), old.map(|old| &old.template));
    let before = old.map(|old| old.update_strategy.as_ref());
    close_part(UPDATE, spec.update_strategy.as_mut(), before);
}

fn default(set: &mut StatefulSet) {
    let spec = set.spec.get_or_insert_default();
    spec.replicas.get_or_insert(1);
    spec.revision_history_limit.get_or_insert(10);
    fill(&mut spec.pod_management_policy, "OrderedReady");
    let strategy = spec.update_strategy.get_or_insert_default();
    if strategy.type_.as_deref().is_none_or(str::is_empty) {
        fill(&mut strategy.type_, "RollingUpdate");
        strategy.rolling_update.get_or_insert_default();
    }
    if let Some(rolling) = &mut strategy.rolling_update
        && strategy.type_.as_deref() == Some("RollingUpdate")
    {
        rolling.partition.get_or_insert(0);
        if features::enabled(Feature::MaxUnavailableStatefulSet) {
            rolling.max_unavailable.get_or_insert(IntOrString::Int(1));
        }
    }
    let policy = spec.persistent_volume_claim_retention_policy.get_or_insert_default();
    fill(&mut policy.when_deleted, "Retain");
    fill(&mut policy.when_scaled, "Retain");
    podspec::default_template(&mut spec.template);
    for claim in spec.volume_claim_templates.iter_mut().flatten() {
        podspec::default_claim(claim.spec.get_or_insert_default());
        fill(&mut claim.status.get_or_insert_default().phase, "Pending");
    }
    let status: &mut StatefulSetStatus = set.status.get_or_insert_default();
    tidy_counts([
        &mut status.current_replicas,
        &mut status.ready_replicas,
        &mut status.updated_replicas,
    ]);
    status.available_replicas.get_or_insert(0);
}

fn containers(set: &StatefulSet) -> &[Container] {
    let spec = set.spec.as_ref();
    spec.and_then(|spec| spec.template.spec.as_ref()).map_or(&[], |spec| &spec.containers)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::gated::tests::check;

    #[test]
    fn closed_gates_take_their_fields() {
        check(
            KIND.gated,
            Feature::MaxUnavailableStatefulSet,
            "/spec/updateStrategy/rollingUpdate/maxUnavailable",
            json!({"metadata": {"name": "x"}, "spec": {"selector": {}, "serviceName": "s",
                "template": {}, "updateStrategy": {"rollingUpdate": {"maxUnavailable": 2}}}}),
        );
    }
}
