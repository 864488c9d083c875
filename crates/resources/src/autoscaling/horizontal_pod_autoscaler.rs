//! HorizontalPodAutoscaler: how many pods a workload has, by what its pods use.

use std::marker::PhantomData;
use std::sync::Arc;

use base::features::Feature;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::autoscaling::{v1, v2};

use super::forms::Forms;
use crate::gated::{Gated, any, close, gated, taken};
use crate::kind::{Form, Kind, Rules, STATUS, age, field, name, spec_and_status};
use crate::validate::policy;

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
        create: policy::autoscaler,
        update: Some(policy::autoscaler_update),
        parts: &[("status", policy::autoscaler_status)],
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

pub(super) fn cpu_metric(share: i32) -> v2::MetricSpec {
    v2::MetricSpec {
        type_: "Resource".into(),
        resource: Some(v2::ResourceMetricSource {
            name: "cpu".into(),
            target: v2::MetricTarget {
                type_: "Utilization".into(),
                average_utilization: Some(share),
                ..Default::default()
            },
        }),
        ..Default::default()
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
    /// A resource's average, or its share of what is requested.
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
