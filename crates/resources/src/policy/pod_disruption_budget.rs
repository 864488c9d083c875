//! PodDisruptionBudget: how many of a set of pods may be evicted at a time.

use apiserver::resource::MetadataRules;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use machinery::names;

use crate::kind::{Kind, Rules, STATUS, age, name, spec_and_status, text};
use crate::validate::at::At;
use crate::validate::shared::conditions;
use crate::validate::{internal, workloads};

pub(crate) static KIND: Kind<PodDisruptionBudget> = Kind {
    short: &["pdb"],
    subresources: &[STATUS],
    parts: Some(spec_and_status!()),
    generation: Some(|new, old| new.spec != old.spec),
    rules: Rules {
        create: disruption_budget,
        parts: &[("status", disruption_budget_status)],
        name: names::path_segment,
        metadata: MetadataRules::NONE,
        unconditional_update: false,
        ..Rules::NONE
    },
    columns: &[
        name(),
        text(
            "Min Available",
            "string",
            "The minimum number of pods that must be available.",
            |budget| {
                let spec = budget.spec.as_ref();
                bound(spec.and_then(|spec| spec.min_available.as_ref())).into()
            },
        ),
        text(
            "Max Unavailable",
            "string",
            "The maximum number of pods that may be unavailable.",
            |budget| {
                let spec = budget.spec.as_ref();
                bound(spec.and_then(|spec| spec.max_unavailable.as_ref())).into()
            },
        ),
        text(
            "Allowed Disruptions",
            "integer",
            "Calculated number of pods that may be disrupted at this time.",
            |budget| {
                let status = budget.status.as_ref();
                status.and_then(|status| status.disruptions_allowed).unwrap_or_default().into()
            },
        ),
        age(),
    ],
    ..Kind::BASE
};

fn bound(bound: Option<&IntOrString>) -> String {
    match bound {
        None => "N/A".to_owned(),
        Some(IntOrString::Int(count)) => count.to_string(),
        Some(IntOrString::String(share)) => share.clone(),
    }
}

fn disruption_budget(at: &At<'_>) {
    let spec = at.get("spec");
    if spec.has("minAvailable") && spec.has("maxUnavailable") {
        let shown = internal::shown("PodDisruptionBudgetSpec", spec.value);
        let detail = "minAvailable and maxUnavailable cannot be both set";
        spec.errors().invalid_shown(&spec.path, Some(&shown), detail);
    }
    for field in ["minAvailable", "maxUnavailable"] {
        if spec.has(field) {
            workloads::int_or_percent(&spec.get(field));
            workloads::at_most_100_percent(&spec.get(field));
        }
    }
    spec.get("selector").selector();
    spec.get("unhealthyPodEvictionPolicy").any_of(&["AlwaysAllow", "IfHealthyBudget"]);
}

fn disruption_budget_status(at: &At<'_>, _old: &At<'_>) {
    conditions(&at.get("status.conditions"));
    for field in ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"] {
        at.get("status").get(field).not_negative();
    }
}
