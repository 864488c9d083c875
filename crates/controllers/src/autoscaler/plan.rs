//! What to do about one autoscaler.
//!
//! In: the autoscaler, its target's scale, pods and metrics. Out: a count, conditions, what
//! `status.currentMetrics` shows, events. Pure but for the [`History`] it is given.
//! Upstream: `reconcileAutoscaler`, `computeReplicasForMetrics`.

use std::sync::Arc;

use client::EventType;
use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::{
    ContainerResourceMetricStatus, ExternalMetricSource, ExternalMetricStatus,
    HorizontalPodAutoscaler, HorizontalPodAutoscalerCondition, HorizontalPodAutoscalerStatus,
    MetricIdentifier, MetricSpec, MetricStatus, MetricTarget, MetricValueStatus,
    ObjectMetricSource, ObjectMetricStatus, PodsMetricStatus, ResourceMetricStatus,
};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use machinery::quantity::{self, Amount, Format};
use machinery::{Object, Time};
use release::features::{self, Feature};

use super::limits::History;
use super::replicas::{PodMetrics, Proposal, Target, Tolerances};
use crate::context::Autoscaling;

/// The values of a metric, in thousandths.
#[derive(Clone, Debug)]
pub enum Values {
    Pods(PodMetrics),
    Object(i64),
    External(Vec<i64>),
}

/// Each metric of the spec: its values, or why there are none.
pub type Fetched = Vec<Result<Values, String>>;

pub type NewEvent = (EventType, &'static str, String);

/// What the number of pods says before any metric is asked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Look {
    /// Scaled to zero by hand: left alone.
    Disabled,
    /// Out of bounds: this many, for this reason.
    Bound(i32, &'static str),
    Metrics,
}

pub fn look(autoscaler: &HorizontalPodAutoscaler, current: i32) -> Look {
    let spec = &autoscaler.spec;
    let least = spec.min_replicas.unwrap_or(1);
    if current == 0 && !may_leave_zero(autoscaler) {
        Look::Disabled
    } else if current == 0 {
        Look::Metrics
    } else if current > spec.max_replicas {
        Look::Bound(spec.max_replicas, "Current number of replicas above Spec.MaxReplicas")
    } else if current < least {
        Look::Bound(least, "Current number of replicas below Spec.MinReplicas")
    } else {
        Look::Metrics
    }
}

/// Only what an autoscaler itself scaled to zero, it scales up again.
fn may_leave_zero(autoscaler: &HorizontalPodAutoscaler) -> bool {
    let status = autoscaler.status.as_ref();
    let mut conditions = status.into_iter().flat_map(|status| status.conditions.iter().flatten());
    features::enabled(Feature::HPAScaleToZero)
        && conditions.any(|one| one.type_ == SCALED_TO_ZERO && one.status == "True")
        && (autoscaler.spec.min_replicas != Some(0) || has_outside_metrics(autoscaler))
}

/// Metrics that there are without pods.
fn has_outside_metrics(autoscaler: &HorizontalPodAutoscaler) -> bool {
    let mut metrics = autoscaler.spec.metrics.iter().flatten();
    metrics.any(|metric| matches!(metric.type_.as_str(), "Object" | "External"))
}

const SCALED_TO_ZERO: &str = "ScaledToZero";

/// After a rescale: was it this autoscaler that left nothing?
pub fn note_zero(
    autoscaler: &HorizontalPodAutoscaler,
    current: i32,
    desired: i32,
    draft: &mut Draft,
) {
    if !features::enabled(Feature::HPAScaleToZero) {
        let conditions = draft.status.conditions.iter_mut();
        conditions.for_each(|all| all.retain(|one| one.type_ != SCALED_TO_ZERO));
        return;
    }
    let is_zero = current > 0
        && desired == 0
        && autoscaler.spec.min_replicas == Some(0)
        && has_outside_metrics(autoscaler);
    let (reason, message) = match is_zero {
        true => ("ScaledToZero", "the HPA controller scaled the workload to zero"),
        false => ("NotScaledToZero", "the HPA controller did not scale the workload to zero"),
    };
    draft.condition(SCALED_TO_ZERO, is_zero, reason, message);
}

/// The new status, and its events.
pub struct Draft {
    pub status: HorizontalPodAutoscalerStatus,
    pub events: Vec<NewEvent>,
    now: Timestamp,
}

impl Draft {
    pub fn of(autoscaler: &HorizontalPodAutoscaler, now: Timestamp) -> Self {
        let status = autoscaler.status.clone().unwrap_or_default();
        Self { status, events: vec![], now }
    }

    pub fn warn(&mut self, reason: &'static str, message: impl Into<String>) {
        self.events.push((EventType::Warning, reason, message.into()));
    }

    pub fn condition(&mut self, kind: &str, is: bool, reason: &str, message: impl Into<String>) {
        let status = if is { "True" } else { "False" };
        let conditions = self.status.conditions.get_or_insert_default();
        let at = conditions.iter().position(|one| one.type_ == kind).unwrap_or_else(|| {
            let new = HorizontalPodAutoscalerCondition { type_: kind.into(), ..Default::default() };
            conditions.push(new);
            conditions.len() - 1
        });
        let condition = &mut conditions[at];
        if condition.status != status {
            let second = Timestamp::from_second(self.now.as_second()).unwrap_or(self.now);
            condition.last_transition_time = Some(Time(second));
        }
        condition.status = status.into();
        condition.reason = Some(reason.into());
        condition.message = Some(message.into());
    }

    /// Counts and metrics; `scaled` when this look changed the count.
    pub fn counts(
        &mut self,
        current: i32,
        desired: i32,
        metrics: Option<Vec<MetricStatus>>,
        scaled: bool,
    ) {
        let status = &mut self.status;
        (status.current_replicas, status.desired_replicas) = (Some(current), desired);
        status.current_metrics = metrics;
        status.observed_generation = None;
        if scaled {
            let second = Timestamp::from_second(self.now.as_second()).unwrap_or(self.now);
            status.last_scale_time = Some(Time(second));
        }
    }
}

/// The input of the decision by metrics.
#[derive(Clone, Copy)]
pub struct Observed<'a> {
    pub autoscaler: &'a HorizontalPodAutoscaler,
    /// The scale's `spec.replicas` and `status.replicas`.
    pub current: i32,
    pub running: i32,
    pub pods: &'a [Arc<Pod>],
    pub now: Timestamp,
    pub settings: Autoscaling,
}

/// What the metrics want.
#[derive(Debug, Default, PartialEq)]
pub struct Decision {
    /// `None`: nothing can be said.
    pub replicas: Option<i32>,
    pub reason: String,
    pub metrics: Vec<MetricStatus>,
    /// The replicas that each metric asks for; `None` if it failed.
    pub wanted: Vec<Option<i32>>,
    /// What some metrics failed with, or all of them.
    pub trouble: Option<String>,
}

/// Pure, but for the memory.
pub fn decide(
    observed: Observed<'_>,
    fetched: Fetched,
    history: &mut History,
    draft: &mut Draft,
) -> Decision {
    let Observed { autoscaler, current, now, .. } = observed;
    let mut decision = Decision::default();
    let wanted = of_all(observed, fetched, draft, &mut decision);
    let Some((wanted, metric)) = wanted else { return decision };
    if wanted > current {
        decision.reason = format!("{} above target", if wanted > 0 { &metric } else { "" });
    } else if wanted < current {
        decision.reason = "All metrics below target".into();
    }
    let limited = history.limit(&autoscaler.spec, current, wanted.max(0), now);
    draft.condition("AbleToScale", true, limited.able.0, limited.able.1);
    let (is_limited, reason, message) = limited.limited;
    draft.condition("ScalingLimited", is_limited, reason, message);
    decision.replicas = Some(limited.replicas);
    decision
}

/// The most that any metric wants, and which one it is.
fn of_all(
    observed: Observed<'_>,
    fetched: Fetched,
    draft: &mut Draft,
    decision: &mut Decision,
) -> Option<(i32, String)> {
    let specs = observed.autoscaler.spec.metrics.as_deref().unwrap_or_default();
    let mut best: Option<(i32, String)> = None;
    let mut first: Option<Trouble> = None;
    let mut failed = 0;
    for (spec, values) in specs.iter().zip(fetched) {
        match of_one(observed, spec, values) {
            Ok(one) => {
                decision.wanted.push(Some(one.replicas));
                decision.metrics.push(one.status);
                if best.as_ref().is_none_or(|(count, _)| one.replicas > *count || *count == 0) {
                    best = Some((one.replicas, one.name));
                }
            }
            Err(trouble) => {
                decision.wanted.push(None);
                decision.metrics.push(MetricStatus::default());
                draft.warn(trouble.reason, trouble.cause.as_str());
                failed += 1;
                first.get_or_insert(trouble);
            }
        }
    }
    if let Some(trouble) = &first {
        let count = specs.len();
        let text = &trouble.text;
        decision.trouble = Some(format!(
            "invalid metrics ({failed} invalid out of {count}), first error is: {text}"
        ));
    }
    let lowers = |best: &Option<(i32, String)>| {
        best.as_ref().is_none_or(|(count, _)| *count < observed.current)
    };
    match first {
        // An unknown metric might need more replicas: no scaling down while one is unknown.
        Some(trouble) if failed >= specs.len() || lowers(&best) => {
            let cause = trouble.cause;
            let message = format!("the HPA was unable to compute the replica count: {cause}");
            draft.condition("ScalingActive", false, trouble.reason, message);
            None
        }
        _ => {
            let best = best.unwrap_or_default();
            let message = format!(
                "the HPA was able to successfully calculate a replica count from {}",
                best.1
            );
            draft.condition("ScalingActive", true, "ValidMetricFound", message);
            Some(best)
        }
    }
}

struct Wanted {
    replicas: i32,
    /// The name of the metric in conditions and events.
    name: String,
    status: MetricStatus,
}

struct Trouble {
    reason: &'static str,
    /// As the condition has it,
    cause: String,
    /// and as the error has it.
    text: String,
}

fn of_one(
    observed: Observed<'_>,
    spec: &MetricSpec,
    values: Result<Values, String>,
) -> Result<Wanted, Trouble> {
    let target = Target {
        current: observed.current,
        pods: observed.pods,
        tolerances: tolerances(observed.autoscaler, observed.settings.tolerance),
        now: observed.now,
        settings: observed.settings,
    };
    let trouble = |reason, head: String, cause: String| {
        let text = format!("failed to get {head}: {cause}");
        Trouble { reason, cause, text }
    };
    let missing = || Err("the metric has no source".to_owned());
    match spec.type_.as_str() {
        "Resource" => {
            let found = spec.resource.as_ref().map_or_else(missing, |source| {
                let (wanted, current) =
                    of_resource(target, values, &source.name, None, &source.target)?;
                let status = ResourceMetricStatus { name: source.name.clone(), current };
                Ok(wanted.shown("Resource", |shown| shown.resource = Some(status)))
            });
            let name = spec.resource.as_ref().map_or("", |source| source.name.as_str());
            let head = || format!("{name} resource metric value");
            found.map_err(|why| trouble("FailedGetResourceMetric", head(), why))
        }
        "ContainerResource" => {
            let found = spec.container_resource.as_ref().map_or_else(missing, |source| {
                let container = source.container.as_str();
                let (wanted, current) =
                    of_resource(target, values, &source.name, Some(container), &source.target)?;
                let (name, container) = (source.name.clone(), source.container.clone());
                let status = ContainerResourceMetricStatus { container, current, name };
                let set = |shown: &mut MetricStatus| shown.container_resource = Some(status);
                Ok(wanted.shown("ContainerResource", set))
            });
            let name = spec.container_resource.as_ref().map_or("", |one| one.container.as_str());
            let head = || format!("{name} container metric value");
            found.map_err(|why| trouble("FailedGetContainerResourceMetric", head(), why))
        }
        "Pods" => of_pods(target, spec, values)
            .map_err(|why| trouble("FailedGetPodsMetric", "pods metric value".into(), why)),
        "Object" => {
            let namespace = observed.autoscaler.namespace();
            let found = spec.object.as_ref().map_or_else(missing, |source| {
                of_object(target, source, values, namespace, observed.running)
            });
            let head = "object metric value".to_owned();
            found.map_err(|why| trouble("FailedGetObjectMetric", head, why))
        }
        "External" => {
            let namespace = observed.autoscaler.namespace();
            let found = spec.external.as_ref().map_or_else(missing, |source| {
                of_external(target, source, values, namespace, observed.running)
            });
            let name = spec.external.as_ref().map_or("", |source| source.metric.name.as_str());
            let head = || format!("{name} external metric value");
            found.map_err(|why| trouble("FailedGetExternalMetric", head(), why))
        }
        other => {
            let cause = format!("unknown metric source type {other:?}");
            let text = cause.clone();
            Err(Trouble { reason: "InvalidMetricSourceType", cause, text })
        }
    }
}

/// A count and its metric's name, before it is known how to show it.
struct Named(i32, String);

impl Named {
    fn shown(self, kind: &str, set: impl FnOnce(&mut MetricStatus)) -> Wanted {
        let mut status = MetricStatus { type_: kind.into(), ..MetricStatus::default() };
        set(&mut status);
        Wanted { replicas: self.0, name: self.1, status }
    }
}

fn tolerances(autoscaler: &HorizontalPodAutoscaler, usual: f64) -> Tolerances {
    let behavior = autoscaler.spec.behavior.as_ref();
    let of = |rules: Option<&k8s_openapi::api::autoscaling::v2::HPAScalingRules>| {
        let tolerance = rules.and_then(|rules| rules.tolerance.as_ref());
        let amount = tolerance.and_then(|text| Amount::parse(&text.0).ok());
        amount.map_or(usual, Amount::to_f64)
    };
    Tolerances {
        down: of(behavior.and_then(|behavior| behavior.scale_down.as_ref())),
        up: of(behavior.and_then(|behavior| behavior.scale_up.as_ref())),
    }
}

fn of_resource(
    target: Target<'_>,
    values: Result<Values, String>,
    resource: &str,
    container: Option<&str>,
    goal: &MetricTarget,
) -> Result<(Named, MetricValueStatus), String> {
    let what = if goal.average_value.is_some() { "usage" } else { "utilization" };
    if goal.average_value.is_none() && goal.average_utilization.is_none() {
        return Err("invalid resource metric source: neither an average utilization target nor an average value (usage) target was set".into());
    }
    let failed = |why: String| format!("failed to get {resource} {what}: {why}");
    let unable =
        |why: String| failed(format!("unable to get metrics for resource {resource}: {why}"));
    let metrics = pods(values).map_err(unable)?;
    let (proposal, name) = match (&goal.average_value, goal.average_utilization) {
        (Some(value), _) => {
            let proposal = target.average(metrics, resource, quantity::milli(value));
            (proposal, format!("{resource} resource"))
        }
        (None, percent) => {
            let percent = percent.unwrap_or_default();
            let proposal = target.utilization(metrics, resource, container, percent);
            let whose = if container.is_some() { "container resource" } else { "resource" };
            (proposal, format!("{resource} {whose} utilization (percentage of request)"))
        }
    };
    let Proposal { replicas, usage, utilization } = proposal.map_err(failed)?;
    let format = if resource == "memory" { Format::Binary } else { Format::Decimal };
    let current = MetricValueStatus {
        average_utilization: utilization,
        average_value: Some(thousandths(usage, format)),
        value: None,
    };
    Ok((Named(replicas, name), current))
}

fn of_pods(
    target: Target<'_>,
    spec: &MetricSpec,
    values: Result<Values, String>,
) -> Result<Wanted, String> {
    let source = spec.pods.as_ref().ok_or("the metric has no source")?;
    let name = source.metric.name.as_str();
    let metrics = pods(values).map_err(|why| format!("unable to get metric {name}: {why}"))?;
    let goal = source.target.average_value.as_ref().map_or(0, quantity::milli);
    let proposal = target.average(metrics, "", goal)?;
    let status = PodsMetricStatus {
        metric: source.metric.clone(),
        current: MetricValueStatus {
            average_value: Some(thousandths(proposal.usage, Format::Decimal)),
            ..MetricValueStatus::default()
        },
    };
    let named = Named(proposal.replicas, format!("pods metric {name}"));
    Ok(named.shown("Pods", |shown| shown.pods = Some(status)))
}

fn of_object(
    target: Target<'_>,
    source: &ObjectMetricSource,
    values: Result<Values, String>,
    namespace: &str,
    running: i32,
) -> Result<Wanted, String> {
    let (metric, object) = (&source.metric, &source.described_object);
    let unable = |why: String| {
        let place = format!("{} {namespace}/{}", object.kind, object.name);
        format!("unable to get metric {}: {why} on {place}", metric.name)
    };
    let of_object = values.and_then(|values| match values {
        Values::Object(usage) => Ok(usage),
        _ => Err("no metrics returned from custom metrics API".to_owned()),
    });
    let goal = &source.target;
    let (named, current) = match (goal.type_.as_str(), &goal.value, &goal.average_value) {
        ("Value", Some(value), _) => {
            let usage = of_object.map_err(unable)?;
            let replicas = target.total(usage, quantity::milli(value))?;
            let name = format!("{} metric {}", object.kind, metric.name);
            (Named(replicas, name), total(usage))
        }
        ("AverageValue", _, Some(value)) => {
            let head = |why| format!("failed to get {} object metric: {why}", metric.name);
            let usage = of_object.map_err(|why| head(unable(why)))?;
            let (replicas, part) = target.shared(running, usage, quantity::milli(value));
            (Named(replicas, external_name(metric)), average(part))
        }
        _ => return Err("invalid object metric source: neither a value target nor an average value target was set".into()),
    };
    let (described_object, metric) = (object.clone(), metric.clone());
    let status = ObjectMetricStatus { current, described_object, metric };
    Ok(named.shown("Object", |shown| shown.object = Some(status)))
}

fn of_external(
    target: Target<'_>,
    source: &ExternalMetricSource,
    values: Result<Values, String>,
    namespace: &str,
    running: i32,
) -> Result<Wanted, String> {
    let metric = &source.metric;
    let usage = values.and_then(|values| match values {
        Values::External(all) => Ok(all.into_iter().fold(0i64, i64::saturating_add)),
        _ => Err("no metrics returned from external metrics API".to_owned()),
    });
    let selector = in_words(metric.selector.as_ref());
    let unable = |why: String| {
        format!("unable to get external metric {namespace}/{}/{selector}: {why}", metric.name)
    };
    let goal = &source.target;
    let (replicas, current) = match (&goal.average_value, &goal.value) {
        (Some(value), _) => {
            let head = |why| format!("failed to get {} external metric: {why}", metric.name);
            let usage = usage.map_err(|why| head(unable(why)))?;
            let (replicas, part) = target.shared(running, usage, quantity::milli(value));
            (replicas, average(part))
        }
        (None, Some(value)) => {
            let head = |why| format!("failed to get external metric {}: {why}", metric.name);
            let usage = usage.map_err(|why| head(unable(why)))?;
            (target.total(usage, quantity::milli(value)).map_err(head)?, total(usage))
        }
        (None, None) => return Err("invalid external metric source: neither a value target nor an average value target was set".into()),
    };
    let status = ExternalMetricStatus { current, metric: metric.clone() };
    let named = Named(replicas, external_name(metric));
    Ok(named.shown("External", |shown| shown.external = Some(status)))
}

fn pods(values: Result<Values, String>) -> Result<PodMetrics, String> {
    match values? {
        Values::Pods(metrics) => Ok(metrics),
        _ => Err("no metrics of pods".into()),
    }
}

fn external_name(metric: &MetricIdentifier) -> String {
    format!("external metric {}({})", metric.name, in_words(metric.selector.as_ref()))
}

fn thousandths(value: i64, format: Format) -> Quantity {
    let amount = Amount::parse(&format!("{value}m")).unwrap_or_default();
    Quantity(amount.canonical(format))
}

fn total(value: i64) -> MetricValueStatus {
    let value = Some(thousandths(value, Format::Decimal));
    MetricValueStatus { value, ..MetricValueStatus::default() }
}

fn average(value: i64) -> MetricValueStatus {
    let average_value = Some(thousandths(value, Format::Decimal));
    MetricValueStatus { average_value, ..MetricValueStatus::default() }
}

/// As upstream prints a selector in messages.
fn in_words(selector: Option<&LabelSelector>) -> String {
    let Some(selector) = selector else { return "nil".into() };
    let labels: String = selector
        .match_labels
        .iter()
        .flatten()
        .map(|(name, value)| format!("{name}: {value},"))
        .collect();
    let expressions: String = selector
        .match_expressions
        .iter()
        .flatten()
        .map(|one| {
            let values = one.values.iter().flatten().cloned().collect::<Vec<_>>().join(" ");
            let (key, operator) = (&one.key, &one.operator);
            format!("LabelSelectorRequirement{{Key:{key},Operator:{operator},Values:[{values}],}},")
        })
        .collect();
    format!(
        "&LabelSelector{{MatchLabels:map[string]string{{{labels}}},MatchExpressions:[]LabelSelectorRequirement{{{expressions}}},}}"
    )
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
