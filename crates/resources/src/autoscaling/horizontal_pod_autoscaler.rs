//! HorizontalPodAutoscaler: how many pods a workload has, by what its pods use.

use std::marker::PhantomData;
use std::sync::Arc;

use k8s_openapi::api::autoscaling::v1;
use k8s_openapi::api::autoscaling::v2::{self, HorizontalPodAutoscaler};
use machinery::names;
use release::features::{self, Feature};

use super::forms::{Forms, cpu_metric};
use crate::gated::{Gated, any, close, gated, taken};
use crate::generic::Form;
use crate::kind::{Kind, Rules, STATUS, age, field, name, spec_and_status};
use crate::validate::at::At;
use crate::validate::quantity;

pub(crate) static KIND: Kind<HorizontalPodAutoscaler> = AUTOSCALER;

/// The older form.
pub(crate) static V1: Form<HorizontalPodAutoscaler, v1::HorizontalPodAutoscaler> =
    Form { kind: AUTOSCALER, conversion: || Arc::new(Forms), form: PhantomData };

const AUTOSCALER: Kind<HorizontalPodAutoscaler> = Kind {
    short: &["hpa"],
    categories: &["all"],
    subresources: &[STATUS],
    default,
    parts: Some(spec_and_status!()),
    gated: |new, old| close(GATED, new, old),
    rules: Rules {
        create: autoscaler,
        update: Some(autoscaler_update),
        parts: &[("status", autoscaler_status)],
        ..Rules::NONE
    },
    columns: &[
        name(),
        field(
            "Reference",
            "string",
            "api.autoscaling.v2.HorizontalPodAutoscalerSpec.scaleTargetRef",
            |autoscaler| {
                let target = &autoscaler.spec.scale_target_ref;
                format!("{}/{}", target.kind, target.name).into()
            },
        ),
        field(
            "Targets",
            "string",
            "api.autoscaling.v2.HorizontalPodAutoscalerSpec.metrics",
            |autoscaler| {
                let status = autoscaler.status.as_ref();
                let current = status.and_then(|status| status.current_metrics.as_deref());
                let specs = autoscaler.spec.metrics.as_deref();
                metrics(specs.unwrap_or_default(), current.unwrap_or_default()).into()
            },
        ),
        field(
            "MinPods",
            "string",
            "api.autoscaling.v2.HorizontalPodAutoscalerSpec.minReplicas",
            |autoscaler| {
                let fewest = autoscaler.spec.min_replicas;
                fewest.map_or("<unset>".to_owned(), |count| count.to_string()).into()
            },
        ),
        field(
            "MaxPods",
            "string",
            "api.autoscaling.v2.HorizontalPodAutoscalerSpec.maxReplicas",
            |autoscaler| autoscaler.spec.max_replicas.into(),
        ),
        field(
            "Replicas",
            "string",
            "api.autoscaling.v2.HorizontalPodAutoscalerStatus.currentReplicas",
            |autoscaler| {
                let status = autoscaler.status.as_ref();
                status.and_then(|status| status.current_replicas).unwrap_or_default().into()
            },
        ),
        age(),
    ],
    ..Kind::BASE
};

const GATED: &[Gated<HorizontalPodAutoscaler>] =
    &[gated(&[Feature::HPAConfigurableTolerance], |autoscaler| {
        let Some(behavior) = &mut autoscaler.spec.behavior else { return false };
        let rules = [&mut behavior.scale_up, &mut behavior.scale_down].into_iter().flatten();
        any(rules.map(|rules| taken(&mut rules.tolerance)))
    })];

/// Upstream: `SetDefaults_HorizontalPodAutoscaler`.
fn default(autoscaler: &mut v2::HorizontalPodAutoscaler) {
    const CPU_SHARE: i32 = 80;
    let spec = &mut autoscaler.spec;
    spec.min_replicas.get_or_insert(1);
    if spec.metrics.as_ref().is_none_or(|metrics| metrics.is_empty()) {
        spec.metrics = Some(vec![cpu_metric(CPU_SHARE)]);
    }
    let Some(behavior) = &mut spec.behavior else { return };
    let rule =
        |kind: &str, value| v2::HPAScalingPolicy { type_: kind.into(), value, period_seconds: 15 };
    {
        let up = behavior.scale_up.get_or_insert_default();
        up.stabilization_window_seconds.get_or_insert(0);
        up.select_policy.get_or_insert_with(|| "Max".into());
        up.policies.get_or_insert_with(|| vec![rule("Pods", 4), rule("Percent", 100)]);
        let down = behavior.scale_down.get_or_insert_default();
        down.select_policy.get_or_insert_with(|| "Max".into());
        down.policies.get_or_insert_with(|| vec![rule("Percent", 100)]);
    }
}

fn metrics(specs: &[v2::MetricSpec], current: &[v2::MetricStatus]) -> String {
    const SHOWN: usize = 2;
    if specs.is_empty() {
        return "<none>".into();
    }
    let all = specs.iter().enumerate().map(|(index, spec)| metric(spec, current.get(index)));
    let text = all.take(SHOWN).collect::<Vec<_>>().join(", ");
    match specs.len().saturating_sub(SHOWN) {
        0 => text,
        more => format!("{text} + {more} more..."),
    }
}

/// Which number of a metric stands against its target.
#[derive(Clone, Copy, PartialEq)]
enum Reading {
    /// The value, or its average where that is the target.
    Value,
    /// The average only.
    Average,
    /// A resource's average value, or its average utilization of the requests.
    Utilization,
}

fn metric(spec: &v2::MetricSpec, current: Option<&v2::MetricStatus>) -> String {
    let (name, target, now, reading) = match spec.type_.as_str() {
        "External" => (
            None,
            spec.external.as_ref().map(|one| &one.target),
            current.and_then(|now| now.external.as_ref()).map(|one| &one.current),
            Reading::Value,
        ),
        "Object" => (
            None,
            spec.object.as_ref().map(|one| &one.target),
            current.and_then(|now| now.object.as_ref()).map(|one| &one.current),
            Reading::Value,
        ),
        "Pods" => (
            None,
            spec.pods.as_ref().map(|one| &one.target),
            current.and_then(|now| now.pods.as_ref()).map(|one| &one.current),
            Reading::Average,
        ),
        "Resource" => (
            spec.resource.as_ref().map(|one| one.name.as_str()),
            spec.resource.as_ref().map(|one| &one.target),
            current.and_then(|now| now.resource.as_ref()).map(|one| &one.current),
            Reading::Utilization,
        ),
        "ContainerResource" => (
            spec.container_resource.as_ref().map(|one| one.name.as_str()),
            spec.container_resource.as_ref().map(|one| &one.target),
            current.and_then(|now| now.container_resource.as_ref()).map(|one| &one.current),
            Reading::Utilization,
        ),
        _ => return "<unknown type>".into(),
    };
    let Some(target) = target else { return "<unknown type>".into() };
    let text = ratio(target, now, reading);
    name.map_or(text.clone(), |name| format!("{name}: {text}"))
}

fn ratio(
    target: &v2::MetricTarget,
    now: Option<&v2::MetricValueStatus>,
    reading: Reading,
) -> String {
    let unknown = || "<unknown>".to_owned();
    let average = || {
        let now = now.and_then(|now| now.average_value.as_ref());
        now.map_or_else(unknown, |quantity| quantity.0.clone())
    };
    let percent = |share: i32| format!("{share}%");
    match (&target.average_value, reading) {
        (Some(wanted), Reading::Value) => format!("{}/{} (avg)", average(), wanted.0),
        (Some(wanted), _) => format!("{}/{}", average(), wanted.0),
        (None, Reading::Average) => format!("{}/0", average()),
        (None, Reading::Value) => {
            let now = now.map(|now| now.value.as_ref().map_or("0".into(), |one| one.0.clone()));
            let wanted = target.value.as_ref().map_or("0".to_owned(), |one| one.0.clone());
            format!("{}/{wanted}", now.unwrap_or_else(unknown))
        }
        (None, Reading::Utilization) => {
            let now = now.and_then(|now| now.average_utilization).map_or_else(unknown, percent);
            let wanted = target.average_utilization.map_or("<auto>".into(), percent);
            format!("{now}/{wanted}")
        }
    }
}

fn autoscaler(at: &At<'_>) {
    autoscaler_from(at, i64::from(!features::enabled(Feature::HPAScaleToZero)));
}

/// What might scale to zero may go on to.
fn autoscaler_update(at: &At<'_>, old: &At<'_>) {
    match old.get("spec.minReplicas").number() {
        Some(0) => autoscaler_from(at, 0),
        _ => autoscaler(at),
    }
}

fn autoscaler_from(at: &At<'_>, lowest: i64) {
    let spec = at.get("spec");
    let (least, most) = (spec.get("minReplicas"), spec.get("maxReplicas"));
    least.at_least(lowest);
    match most.int() {
        0 => most.required("must be set and greater than 0"),
        _ => most.at_least(1),
    }
    if least.is_set() && most.int() < least.int() {
        most.invalid_as(most.int(), "must be greater than or equal to `minReplicas`");
    }
    object_reference(&spec.get("scaleTargetRef"), false);
    let metrics = spec.get("metrics");
    for metric in metrics.items() {
        metric_spec(&metric);
    }
    let is_outside = |metric: At<'_>| matches!(metric.get("type").str(), "Object" | "External");
    if least.number() == Some(0) && !metrics.items().any(is_outside) {
        metrics.forbidden(
            "must specify at least one Object or External metric to support scaling to zero replicas",
        );
    }
    let behavior = spec.get("behavior");
    for side in ["scaleUp", "scaleDown"] {
        if behavior.has(side) {
            scaling_rules(&behavior.get(side));
        }
    }
}

fn autoscaler_status(at: &At<'_>, _old: &At<'_>) {
    at.get("status.currentReplicas").not_negative();
    at.get("status.desiredReplicas").not_negative();
}

fn object_reference(at: &At<'_>, may_be_core: bool) {
    at.get("kind").need_name(names::path_segment);
    at.get("name").need_name(names::path_segment);
    let version = at.get("apiVersion");
    match version.str().matches('/').count() {
        0 if !may_be_core => version.invalid_text("apiVersion must specify API group"),
        0 | 1 => {}
        _ => {
            version.invalid(&format!("unexpected GroupVersion string: {}", version.str()));
        }
    }
}

const SOURCES: &[(&str, &str)] = &[
    ("Object", "object"),
    ("External", "external"),
    ("Pods", "pods"),
    ("Resource", "resource"),
    ("ContainerResource", "containerResource"),
];

fn metric_spec(at: &At<'_>) {
    const KINDS: &[&str] = &["ContainerResource", "External", "Object", "Pods", "Resource"];
    let kind = at.get("type");
    if kind.is_empty() {
        kind.required("must specify a metric source type");
    }
    kind.one_of(KINDS);
    let present: Vec<&str> =
        SOURCES.iter().map(|(_, field)| *field).filter(|field| at.has(field)).collect();
    if let Some(first) = present.first() {
        metric_source(&at.get(first), first);
    }
    let expected = SOURCES.iter().find(|(name, _)| kind.is(name)).map(|(_, field)| *field);
    match expected {
        None => kind.one_of(KINDS),
        Some(field) if !at.has(field) => {
            at.get(field).required("must populate information for the given metric source");
        }
        Some(_) => {}
    }
    if present.len() != 1 {
        for field in present.into_iter().filter(|field| Some(*field) != expected) {
            at.get(field).forbidden("must populate the given metric source only");
        }
    }
}

fn metric_source(at: &At<'_>, field: &str) {
    let target = at.get("target");
    let [value, average, utilization] =
        ["value", "averageValue", "averageUtilization"].map(|field| target.get(field));
    match field {
        "object" => {
            object_reference(&at.get("describedObject"), true);
            metric_name(&at.get("metric.name"));
            metric_target(&target);
            if !value.is_set() && !average.is_set() {
                average.required("must set either a target value or averageValue");
            }
        }
        "external" => {
            metric_name(&at.get("metric.name"));
            metric_target(&target);
            if !value.is_set() && !average.is_set() {
                average.required("must set either a target value for metric or a per-pod target");
            }
            if value.is_set() && average.is_set() {
                value.forbidden("may not set both a target value for metric and a per-pod target");
            }
        }
        "pods" => {
            metric_name(&at.get("metric.name"));
            metric_target(&target);
            if !average.is_set() {
                average.required("must specify a positive target averageValue");
            }
        }
        _ => {
            let name = at.get("name");
            if name.is_empty() {
                name.required("must specify a resource name");
            }
            if field == "containerResource" {
                if !name.is_empty() {
                    quantity::container_resource_name(name.str(), &name);
                }
                let container = at.get("container");
                if container.is_empty() {
                    container.required("must specify a container");
                } else {
                    container.name(names::dns1123_label);
                }
            }
            metric_target(&target);
            if !utilization.is_set() && !average.is_set() {
                utilization.required("must set either a target raw value or a target utilization");
            }
            if utilization.is_set() && average.is_set() {
                average.forbidden("may not set both a target raw value and a target utilization");
            }
        }
    }
}

fn metric_name(at: &At<'_>) {
    if at.is_empty() {
        at.required("must specify a metric name");
    } else {
        at.name(names::path_segment);
    }
}

fn metric_target(at: &At<'_>) {
    let kind = at.get("type");
    if kind.is_empty() {
        kind.required("must specify a metric target type");
    }
    if !["Utilization", "Value", "AverageValue"].contains(&kind.str()) {
        kind.invalid_text("must be either Utilization, Value, or AverageValue");
    }
    for field in ["value", "averageValue"] {
        let place = at.get(field);
        if place.is_set() && quantity::amount(&place) <= Default::default() {
            place.invalid("must be positive");
        }
    }
    let utilization = at.get("averageUtilization");
    if utilization.number().is_some_and(|percent| percent < 1) {
        utilization.invalid("must be greater than 0");
    }
}

fn scaling_rules(at: &At<'_>) {
    let window = at.get("stabilizationWindowSeconds");
    if window.int() < 0 {
        window.invalid("must be greater than or equal to zero");
    }
    if window.int() > 3600 {
        window.invalid("must be less than or equal to 3600");
    }
    at.get("selectPolicy").any_of(&["Disabled", "Max", "Min"]);
    let policies = at.get("policies");
    if policies.is_empty() {
        policies.required("must specify at least one Policy");
    }
    for policy in policies.items() {
        policy.get("type").one_of(&["Percent", "Pods"]);
        for field in ["value", "periodSeconds"] {
            if policy.get(field).int() <= 0 {
                policy.get(field).invalid_as(policy.get(field).int(), quantity::NOT_POSITIVE);
            }
        }
        if policy.get("periodSeconds").int() > 1800 {
            policy.get("periodSeconds").invalid("must be less than or equal to 1800");
        }
    }
    if at.has("tolerance") {
        quantity::not_negative(&at.get("tolerance"));
    }
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
            Feature::HPAConfigurableTolerance,
            "/spec/behavior/scaleUp/tolerance",
            json!({"metadata": {"name": "x"}, "spec": {"maxReplicas": 3,
                "scaleTargetRef": {"kind": "D", "name": "d"},
                "behavior": {"scaleUp": {"tolerance": "100m"}}}}),
        );
    }
}
