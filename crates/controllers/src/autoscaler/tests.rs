//! Targets, metrics and the decisions.

use k8s_openapi::serde_json::{Value, from_value, json};

use super::super::replicas::PodMetric;
use super::*;

const NOW: &str = "2026-01-01T01:00:00Z";

fn autoscaler(metrics: Value) -> HorizontalPodAutoscaler {
    from_value(json!({
        "metadata": {"name": "web", "namespace": "ns"},
        "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"},
            "minReplicas": 1, "maxReplicas": 10, "metrics": metrics},
        "status": {"desiredReplicas": 3, "currentMetrics": null, "conditions": null},
    }))
    .unwrap()
}

fn running(count: usize) -> Vec<Arc<Pod>> {
    let pod = |at: usize| {
        from_value(json!({
            "metadata": {"name": format!("p{at}")},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]},
            "status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z", "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:05Z"}]},
        }))
        .unwrap()
    };
    (0..count).map(|at| Arc::new(pod(at))).collect()
}

fn of_pods(values: &[i64]) -> Result<Values, String> {
    let at: Timestamp = NOW.parse().unwrap();
    let window = std::time::Duration::from_secs(15);
    let metric = |value: i64| PodMetric { value, at, window };
    let each = values.iter().enumerate();
    Ok(Values::Pods(each.map(|(at, value)| (format!("p{at}"), metric(*value))).collect()))
}

/// Three pods, and what metrics make of them: the count, its reason, conditions as
/// `Type=Status/Reason`, events' reasons.
fn check(metrics: Value, fetched: Fetched, expected: (Option<i32>, &str, &str, &str)) -> Draft {
    let autoscaler = autoscaler(metrics.clone());
    let now = NOW.parse().unwrap();
    let pods = running(3);
    let observed = Observed {
        autoscaler: &autoscaler,
        current: 3,
        running: 3,
        pods: &pods,
        now,
        settings: crate::context::Autoscaling::default(),
    };
    let mut draft = Draft::of(&autoscaler, now);
    let decision = decide(observed, fetched, &mut History::default(), &mut draft);
    let conditions: Vec<String> = draft
        .status
        .conditions
        .iter()
        .flatten()
        .map(|one| {
            format!("{}={}/{}", one.type_, one.status, one.reason.as_deref().unwrap_or_default())
        })
        .collect();
    let events: Vec<_> = draft.events.iter().map(|one| one.1).collect();
    let why = decision.trouble.clone().unwrap_or(decision.reason.clone());
    let found = (decision.replicas, why.as_str(), conditions.join(" "), events.join(" "));
    let (count, why, conditions, events) = expected;
    assert_eq!(found, (count, why, conditions.into(), events.into()), "{metrics}");
    draft.counts(3, decision.replicas.unwrap_or(3), Some(decision.metrics), false);
    draft
}

fn cpu(percent: i32) -> Value {
    json!({"type": "Resource", "resource": {"name": "cpu",
        "target": {"type": "Utilization", "averageUtilization": percent}}})
}

fn external(target: Value) -> Value {
    json!({"type": "External", "external": {
        "metric": {"name": "qps", "selector": {"matchLabels": {"a": "b"}}}, "target": target}})
}

const FINE: &str = "ScalingActive=True/ValidMetricFound AbleToScale=True/ReadyForNewScale ScalingLimited=False/DesiredWithinRange";
const NOT: &str = "ScalingActive=False/";

#[test]
fn the_metric_that_wants_most_wins() {
    let up = "cpu resource utilization (percentage of request) above target";
    let draft = check(json!([cpu(50)]), vec![of_pods(&[800, 800, 800])], (Some(5), up, FINE, ""));
    let shown = json!(draft.status.current_metrics);
    let cpu_shown = json!({"type": "Resource", "resource": {"name": "cpu",
        "current": {"averageUtilization": 80, "averageValue": "800m"}}});
    assert_eq!(shown, json!([cpu_shown]));
    let low = "All metrics below target";
    check(json!([cpu(90)]), vec![of_pods(&[300, 300, 300])], (Some(1), low, FINE, ""));
    check(json!([cpu(50)]), vec![of_pods(&[500, 520, 500])], (Some(3), "", FINE, ""));
    let both = json!([cpu(50), external(json!({"type": "Value", "value": "2"}))]);
    let qps = "external metric qps(&LabelSelector{MatchLabels:map[string]string{a: b,},MatchExpressions:[]LabelSelectorRequirement{},}) above target";
    let fetched = vec![of_pods(&[500, 500, 500]), Ok(Values::External(vec![2000, 2000]))];
    let draft = check(both, fetched, (Some(6), qps, FINE, ""));
    let active = &draft.status.conditions.as_ref().unwrap()[0];
    assert!(active.message.as_ref().unwrap().starts_with(
        "the HPA was able to successfully calculate a replica count from external metric qps("
    ));
}

#[test]
fn values_may_be_averages_memory_and_of_objects() {
    let memory = json!({"type": "Resource", "resource": {"name": "memory",
        "target": {"type": "AverageValue", "averageValue": "100Mi"}}});
    let used = of_pods(&[200 << 30, 200 << 30, 200 << 30].map(|bytes: i64| bytes / 1024 * 1000));
    let draft =
        check(json!([memory]), vec![used], (Some(6), "memory resource above target", FINE, ""));
    let shown = json!(draft.status.current_metrics);
    assert_eq!(shown[0]["resource"]["current"], json!({"averageValue": "200Mi"}));
    let object = json!({"type": "Object", "object": {
        "describedObject": {"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "name": "i"},
        "metric": {"name": "hits"}, "target": {"type": "Value", "value": "10"}}});
    let why = "Ingress metric hits above target";
    check(json!([object]), vec![Ok(Values::Object(20_000))], (Some(6), why, FINE, ""));
    let pods = json!({"type": "Pods", "pods": {"metric": {"name": "load"},
        "target": {"type": "AverageValue", "averageValue": "5"}}});
    let why = "pods metric load above target";
    check(json!([pods]), vec![of_pods(&[10_000, 10_000, 10_000])], (Some(6), why, FINE, ""));
}

#[test]
fn what_cannot_be_measured_makes_nothing_smaller() {
    let fetch = "unable to fetch metrics from resource metrics API: no";
    let why = format!(
        "invalid metrics (1 invalid out of 1), first error is: failed to get cpu resource metric value: failed to get cpu utilization: unable to get metrics for resource cpu: {fetch}"
    );
    let event = "FailedGetResourceMetric";
    let inactive = format!("{NOT}{event}");
    let draft = check(json!([cpu(50)]), vec![Err(fetch.into())], (None, &why, &inactive, event));
    let message = draft.status.conditions.as_ref().unwrap()[0].message.clone().unwrap();
    assert_eq!(
        message,
        format!(
            "the HPA was unable to compute the replica count: failed to get cpu utilization: unable to get metrics for resource cpu: {fetch}"
        )
    );
    let bad = "unable to fetch metrics from external metrics API: no";
    let tail = "first error is: failed to get qps external metric value: failed to get external metric qps: unable to get external metric ns/qps/&LabelSelector{MatchLabels:map[string]string{a: b,},MatchExpressions:[]LabelSelectorRequirement{},}: unable to fetch metrics from external metrics API: no";
    let half = json!([cpu(50), external(json!({"type": "Value", "value": "2"}))]);
    let why = format!("invalid metrics (1 invalid out of 2), {tail}");
    let event = "FailedGetExternalMetric";
    // Up with the known metrics, down only with all of them.
    let up = vec![of_pods(&[800, 800, 800]), Err(bad.into())];
    check(half.clone(), up, (Some(5), &why, FINE, event));
    let down = vec![of_pods(&[100, 100, 100]), Err(bad.into())];
    check(half, down, (None, &why, &format!("{NOT}{event}"), event));
}

#[test]
fn bounds_come_before_metrics() {
    let of = |current| look(&autoscaler(json!([cpu(50)])), current);
    assert_eq!(of(0), Look::Disabled);
    assert_eq!(of(11), Look::Bound(10, "Current number of replicas above Spec.MaxReplicas"));
    assert_eq!(of(5), Look::Metrics);
    let mut least = autoscaler(json!([]));
    least.spec.min_replicas = Some(3);
    let below = Look::Bound(3, "Current number of replicas below Spec.MinReplicas");
    assert_eq!(look(&least, 2), below);
}

#[test]
fn conditions_keep_their_time_while_they_hold() {
    let mut draft = Draft::of(&autoscaler(json!([])), NOW.parse().unwrap());
    draft.condition("AbleToScale", true, "SucceededGetScale", "one");
    let later: Timestamp = "2026-01-01T02:00:00Z".parse().unwrap();
    draft.now = later;
    draft.condition("AbleToScale", true, "ReadyForNewScale", "two");
    let find = |draft: &Draft| draft.status.conditions.as_ref().unwrap()[0].clone();
    assert_eq!(find(&draft).last_transition_time.unwrap().0.to_string(), NOW);
    draft.condition("AbleToScale", false, "FailedGetScale", "three");
    assert_eq!(find(&draft).last_transition_time.unwrap().0, later);
    assert_eq!(find(&draft).reason.as_deref(), Some("FailedGetScale"));
}

#[test]
fn what_was_scaled_to_zero_comes_back() {
    use release::features::{self, Feature, Gates};
    let outside = json!([{"type": "External", "external":
        {"metric": {"name": "m"}, "target": {"type": "Value", "value": "1"}}}]);
    let inside = json!([{"type": "Resource", "resource":
        {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}]);
    let check = |is_on: bool, metrics: &Value, least: i32, marked: bool, expected: Look| {
        let gates = Gates::DEFAULT.with(Feature::HPAScaleToZero, is_on);
        let mut one = autoscaler(metrics.clone());
        one.spec.min_replicas = Some(0);
        let mut draft = Draft::of(&one, NOW.parse().unwrap());
        features::scoped(gates, || {
            note_zero(&one, 3, if marked { 0 } else { 1 }, &mut draft);
            one.spec.min_replicas = Some(least);
            one.status = Some(draft.status);
            assert_eq!(look(&one, 0), expected, "{is_on} {least} {marked}");
        });
    };
    check(true, &outside, 0, true, Look::Metrics);
    check(true, &outside, 2, true, Look::Metrics);
    check(true, &outside, 0, false, Look::Disabled);
    check(true, &inside, 0, true, Look::Disabled);
    check(false, &outside, 0, true, Look::Disabled);
}
