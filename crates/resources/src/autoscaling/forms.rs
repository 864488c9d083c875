//! HorizontalPodAutoscalers in both of their forms. They are stored as autoscaling/v2; v1 knows the
//! share of the requested CPU only, and carries the rest in annotations, as upstream does.
//!
//! Invariant: an object that goes to v1 and back is what it was.

use apiserver::resource::Conversion;
use k8s_openapi::api::autoscaling::{v1, v2};
use machinery::object::{Codec, Typed};
use machinery::{Object, StatusError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

const METRICS: &str = "autoscaling.alpha.kubernetes.io/metrics";
const STATUSES: &str = "autoscaling.alpha.kubernetes.io/current-metrics";
const BEHAVIOR: &str = "autoscaling.alpha.kubernetes.io/behavior";
const CONDITIONS: &str = "autoscaling.alpha.kubernetes.io/conditions";

/// autoscaling/v1 ↔ autoscaling/v2.
pub(super) struct Forms;

static STORED: Typed<v2::HorizontalPodAutoscaler> = Typed::new();

impl Conversion for Forms {
    fn to_stored(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        Ok(Box::new(to_v2(object.expect::<v1::HorizontalPodAutoscaler>().clone())))
    }

    fn to_served(&self, object: Box<dyn Object>) -> Result<Box<dyn Object>, StatusError> {
        Ok(Box::new(to_v1(object.expect::<v2::HorizontalPodAutoscaler>().clone())))
    }

    fn stored_codec(&self) -> &dyn Codec {
        &STORED
    }
}

fn to_v1(autoscaler: v2::HorizontalPodAutoscaler) -> v1::HorizontalPodAutoscaler {
    let spec = autoscaler.spec;
    let status = autoscaler.status.unwrap_or_default();
    let metrics = spec.metrics.unwrap_or_default();
    let share = metrics.iter().find_map(cpu_share);
    let others: Vec<Value> = metrics
        .iter()
        .filter(|metric| cpu_share(metric).is_none())
        .map(|metric| reshape(tree(metric), SPECS, Way::ToV1))
        .collect();
    let current = status.current_metrics.unwrap_or_default();
    let statuses: Vec<Value> =
        current.iter().map(|one| reshape(tree(one), STATUS_FIELDS, Way::ToV1)).collect();
    let current_share = current.iter().find_map(|one| {
        let resource = one.resource.as_ref().filter(|resource| resource.name == "cpu")?;
        resource.current.average_utilization
    });
    let mut metadata = autoscaler.metadata;
    let mut keep = |key: &str, value: Option<Value>| {
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.remove(key);
        annotations.extend(value.map(|value| (key.to_owned(), in_order(&value))));
    };
    let some = |list: Vec<Value>| (!list.is_empty()).then(|| Value::from(list));
    keep(METRICS, some(others));
    keep(STATUSES, some(statuses));
    keep(BEHAVIOR, spec.behavior.map(|behavior| capitalized(tree(&behavior))));
    let conditions = status.conditions.unwrap_or_default();
    keep(CONDITIONS, some(conditions.iter().map(tree).collect()));
    metadata.annotations.take_if(|annotations| annotations.is_empty());
    v1::HorizontalPodAutoscaler {
        metadata,
        spec: v1::HorizontalPodAutoscalerSpec {
            max_replicas: spec.max_replicas,
            min_replicas: spec.min_replicas,
            scale_target_ref: moved(&spec.scale_target_ref).unwrap_or_default(),
            target_cpu_utilization_percentage: share,
        },
        status: Some(v1::HorizontalPodAutoscalerStatus {
            current_cpu_utilization_percentage: current_share,
            current_replicas: status.current_replicas.unwrap_or_default(),
            desired_replicas: status.desired_replicas,
            last_scale_time: status.last_scale_time,
            observed_generation: status.observed_generation,
        }),
    }
}

/// The fields of upstream's structs in their order; two of one struct never stand the other way round.
const ORDER: &[&str] = &[
    "type",
    "Type",
    "object",
    "pods",
    "resource",
    "containerResource",
    "external",
    "status",
    "lastTransitionTime",
    "reason",
    "message",
    "kind",
    "name",
    "apiVersion",
    "target",
    "metricName",
    "metricSelector",
    "targetValue",
    "currentValue",
    "targetAverageUtilization",
    "currentAverageUtilization",
    "targetAverageValue",
    "currentAverageValue",
    "selector",
    "averageValue",
    "container",
    "matchLabels",
    "matchExpressions",
    "key",
    "operator",
    "values",
    "ScaleUp",
    "ScaleDown",
    "StabilizationWindowSeconds",
    "SelectPolicy",
    "Policies",
    "Tolerance",
    "Value",
    "PeriodSeconds",
];

/// JSON with its fields in the order in which Go writes them.
fn in_order(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(in_order).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(fields) => {
            let rank = |name: &str| ORDER.iter().position(|one| *one == name);
            let mut fields: Vec<(&String, &Value)> = fields.iter().collect();
            fields.sort_by_key(|(name, _)| rank(name).unwrap_or(ORDER.len()));
            let shown = |(name, value): (&String, &Value)| {
                format!("{}:{}", Value::from(name.as_str()), in_order(value))
            };
            let fields: Vec<String> = fields.into_iter().map(shown).collect();
            format!("{{{}}}", fields.join(","))
        }
        simple => simple.to_string(),
    }
}

fn to_v2(autoscaler: v1::HorizontalPodAutoscaler) -> v2::HorizontalPodAutoscaler {
    let mut metadata = autoscaler.metadata;
    let mut taken = |key: &str| -> Option<Value> {
        let text = metadata.annotations.as_mut()?.remove(key)?;
        serde_json::from_str(&text).ok()
    };
    let reshaped = |value: Option<Value>, fields| -> Vec<Value> {
        let list = value.and_then(|value| value.as_array().cloned()).unwrap_or_default();
        list.into_iter().map(|one| reshape(one, fields, Way::ToV2)).collect()
    };
    let mut metrics: Vec<v2::MetricSpec> = parsed(reshaped(taken(METRICS), SPECS));
    let current: Vec<v2::MetricStatus> = parsed(reshaped(taken(STATUSES), STATUS_FIELDS));
    let behavior = taken(BEHAVIOR).and_then(|tree| serde_json::from_value(lowered(tree)).ok());
    let conditions = taken(CONDITIONS).and_then(|tree| serde_json::from_value(tree).ok());
    metadata.annotations.take_if(|annotations| annotations.is_empty());
    let spec = autoscaler.spec;
    let status = autoscaler.status.unwrap_or_default();
    metrics.extend(spec.target_cpu_utilization_percentage.map(cpu_metric));
    v2::HorizontalPodAutoscaler {
        metadata,
        spec: v2::HorizontalPodAutoscalerSpec {
            behavior,
            max_replicas: spec.max_replicas,
            metrics: (!metrics.is_empty()).then_some(metrics),
            min_replicas: spec.min_replicas,
            scale_target_ref: moved(&spec.scale_target_ref).unwrap_or_default(),
        },
        status: Some(v2::HorizontalPodAutoscalerStatus {
            conditions,
            current_metrics: (!current.is_empty()).then_some(current),
            current_replicas: Some(status.current_replicas),
            desired_replicas: status.desired_replicas,
            last_scale_time: status.last_scale_time,
            observed_generation: status.observed_generation,
        }),
    }
}

/// The target that v1 has a field for.
fn cpu_share(metric: &v2::MetricSpec) -> Option<i32> {
    let resource = metric.resource.as_ref().filter(|_| metric.type_ == "Resource")?;
    if resource.name == "cpu" { resource.target.average_utilization } else { None }
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    ToV1,
    ToV2,
}

/// Where a metric's fields are: the kind of metric, the place in v2, the name in v1.
type Places = &'static [(&'static str, &'static [(&'static str, &'static str)])];

const SPECS: Places = &[
    (
        "external",
        &[
            ("metric.name", "metricName"),
            ("metric.selector", "metricSelector"),
            ("target.value", "targetValue"),
            ("target.averageValue", "targetAverageValue"),
        ],
    ),
    (
        "object",
        &[
            ("describedObject", "target"),
            ("metric.name", "metricName"),
            ("target.value", "targetValue"),
            ("metric.selector", "selector"),
            ("target.averageValue", "averageValue"),
        ],
    ),
    (
        "pods",
        &[
            ("metric.name", "metricName"),
            ("target.averageValue", "targetAverageValue"),
            ("metric.selector", "selector"),
        ],
    ),
    (
        "resource",
        &[
            ("name", "name"),
            ("target.averageUtilization", "targetAverageUtilization"),
            ("target.averageValue", "targetAverageValue"),
        ],
    ),
    (
        "containerResource",
        &[
            ("name", "name"),
            ("target.averageUtilization", "targetAverageUtilization"),
            ("target.averageValue", "targetAverageValue"),
            ("container", "container"),
        ],
    ),
];

const STATUS_FIELDS: Places = &[
    (
        "external",
        &[
            ("metric.name", "metricName"),
            ("metric.selector", "metricSelector"),
            ("current.value", "currentValue"),
            ("current.averageValue", "currentAverageValue"),
        ],
    ),
    (
        "object",
        &[
            ("describedObject", "target"),
            ("metric.name", "metricName"),
            ("current.value", "currentValue"),
            ("metric.selector", "selector"),
            ("current.averageValue", "averageValue"),
        ],
    ),
    (
        "pods",
        &[
            ("metric.name", "metricName"),
            ("current.averageValue", "currentAverageValue"),
            ("metric.selector", "selector"),
        ],
    ),
    (
        "resource",
        &[
            ("name", "name"),
            ("current.averageUtilization", "currentAverageUtilization"),
            ("current.averageValue", "currentAverageValue"),
        ],
    ),
    (
        "containerResource",
        &[
            ("name", "name"),
            ("current.averageUtilization", "currentAverageUtilization"),
            ("current.averageValue", "currentAverageValue"),
            ("container", "container"),
        ],
    ),
];

fn reshape(mut metric: Value, places: Places, way: Way) -> Value {
    for (kind, fields) in places {
        let Some(from) = metric.get_mut(*kind) else { continue };
        let old = from.take();
        let mut new = json!({});
        for (deep, flat) in *fields {
            let deep = format!("/{}", deep.replace('.', "/"));
            match way {
                Way::ToV1 => {
                    if let Some(value) = old.pointer(&deep) {
                        new[*flat] = value.clone();
                    }
                }
                Way::ToV2 => {
                    if let Some(value) = old.get(*flat) {
                        put(&mut new, &deep, value.clone());
                    }
                }
            }
        }
        if way == Way::ToV2 && places.as_ptr() == SPECS.as_ptr() {
            new["target"]["type"] = target_type(&new["target"]).into();
        }
        metric[*kind] = new;
    }
    metric
}

/// v1 does not say which of the targets counts: the one that is there.
fn target_type(target: &Value) -> &'static str {
    match target {
        _ if target.get("averageUtilization").is_some() => "Utilization",
        _ if target.get("averageValue").is_some() => "AverageValue",
        _ => "Value",
    }
}

/// Sets what `/a/b` points to.
fn put(tree: &mut Value, pointer: &str, value: Value) {
    let mut at = tree;
    for part in pointer.split('/').skip(1) {
        at = &mut at[part];
    }
    *at = value;
}

/// Upstream writes the behaviour by the names of its internal fields.
fn capitalized(tree: Value) -> Value {
    renamed(tree, |first| first.to_ascii_uppercase())
}

fn lowered(tree: Value) -> Value {
    renamed(tree, |first| first.to_ascii_lowercase())
}

fn renamed(tree: Value, first: fn(char) -> char) -> Value {
    match tree {
        Value::Object(fields) => {
            let rename = |(name, value): (String, Value)| {
                let mut chars = name.chars();
                let name: String = chars.next().map(first).into_iter().chain(chars).collect();
                (name, renamed(value, first))
            };
            Value::Object(fields.into_iter().map(rename).collect::<Map<_, _>>())
        }
        Value::Array(items) => items.into_iter().map(|item| renamed(item, first)).collect(),
        other => other,
    }
}

fn tree<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("API structs have string keys and finite numbers")
}

fn moved<A: Serialize, B: DeserializeOwned>(value: &A) -> Option<B> {
    serde_json::from_value(tree(value)).ok()
}

/// Those that are what they should be: annotations may hold anything.
fn parsed<T: DeserializeOwned>(values: Vec<Value>) -> Vec<T> {
    values.into_iter().filter_map(|value| serde_json::from_value(value).ok()).collect()
}

/// The metric that both versions add by default.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Upstream writes annotations from structs.
    #[test]
    fn annotations_are_in_the_order_of_gos_fields() {
        let condition = json!({"lastTransitionTime": null, "message": "m", "reason": "r", "status": "True", "type": "t"});
        assert_eq!(
            in_order(&json!([condition])),
            r#"[{"type":"t","status":"True","lastTransitionTime":null,"reason":"r","message":"m"}]"#
        );
        let metric = json!({"resource": {"targetAverageUtilization": 5, "name": "memory"}, "type": "Resource"});
        assert_eq!(
            in_order(&metric),
            r#"{"type":"Resource","resource":{"name":"memory","targetAverageUtilization":5}}"#
        );
    }

    #[test]
    fn forms_round_trip() {
        let tree = json!({
            "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
            "metadata": { "name": "h", "annotations": { "a": "b" } },
            "spec": {
                "maxReplicas": 3, "minReplicas": 1,
                "scaleTargetRef": { "apiVersion": "apps/v1", "kind": "Deployment", "name": "d" },
                "behavior": { "scaleDown": { "stabilizationWindowSeconds": 3, "selectPolicy": "Max",
                    "policies": [{ "type": "Pods", "value": 1, "periodSeconds": 5 }] } },
                "metrics": [
                    { "type": "Pods", "pods": { "metric": { "name": "q" },
                        "target": { "type": "AverageValue", "averageValue": "3" } } },
                    { "type": "Object", "object": { "metric": { "name": "q" },
                        "describedObject": { "kind": "Ingress", "name": "i" },
                        "target": { "type": "Value", "value": "3" } } },
                    { "type": "Resource", "resource": { "name": "cpu",
                        "target": { "type": "Utilization", "averageUtilization": 70 } } },
                ],
            },
            "status": { "currentReplicas": 1, "desiredReplicas": 2, "currentMetrics": [
                { "type": "Resource", "resource": { "name": "cpu",
                    "current": { "averageUtilization": 20, "averageValue": "5m" } } },
            ] },
        });
        let stored: v2::HorizontalPodAutoscaler =
            serde_json::from_value(tree.clone()).expect("an autoscaler");
        let served = to_v1(stored);
        assert_eq!(served.spec.target_cpu_utilization_percentage, Some(70));
        let annotations = served.metadata.annotations.as_ref().expect("the rest");
        assert!(annotations[BEHAVIOR].contains("\"ScaleDown\""), "{annotations:?}");
        let status = served.status.as_ref().expect("made above");
        assert_eq!(status.current_cpu_utilization_percentage, Some(20));
        assert_eq!(serde_json::to_value(to_v2(served)).expect("JSON"), tree);
    }
}
