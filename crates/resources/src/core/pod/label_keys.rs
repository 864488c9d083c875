//! `matchLabelKeys` and `mismatchLabelKeys` of a new pod: what the pod's own labels say under these keys
//! becomes a part of the selector beside them, and is kept with it. In: a pod that is to be created,
//! with its defaults. Out: its selectors, longer.
//!
//! Invariant: a term without a selector matches nothing, and is left so. Validation comes behind this:
//! a key that the selector asks about as well stands there twice then, and is refused.
//!
//! Why here and not where pods are placed: the labels may change later; what was meant by them may not.
//! Upstream: `pkg/registry/core/pod/strategy.go`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Pod, PodAffinityTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use release::features::{self, Feature};

type Labels = BTreeMap<String, String>;

pub(super) fn merge(pod: &mut Pod) {
    let Some(spec) = &mut pod.spec else { return };
    let labels = pod.metadata.labels.as_ref().cloned().unwrap_or_default();
    for term in spec.affinity.as_mut().into_iter().flat_map(terms) {
        add(&mut term.label_selector, &term.match_label_keys, "In", &labels);
        add(&mut term.label_selector, &term.mismatch_label_keys, "NotIn", &labels);
    }
    if features::enabled(Feature::MatchLabelKeysInPodTopologySpread)
        && features::enabled(Feature::MatchLabelKeysInPodTopologySpreadSelectorMerge)
    {
        for one in spec.topology_spread_constraints.iter_mut().flatten() {
            add(&mut one.label_selector, &one.match_label_keys, "In", &labels);
        }
    }
}

/// All terms about other pods.
fn terms(affinity: &mut Affinity) -> impl Iterator<Item = &mut PodAffinityTerm> {
    let near = affinity.pod_affinity.as_mut().map(|near| {
        (
            &mut near.required_during_scheduling_ignored_during_execution,
            &mut near.preferred_during_scheduling_ignored_during_execution,
        )
    });
    let far = affinity.pod_anti_affinity.as_mut().map(|far| {
        (
            &mut far.required_during_scheduling_ignored_during_execution,
            &mut far.preferred_during_scheduling_ignored_during_execution,
        )
    });
    near.into_iter().chain(far).flat_map(|(required, preferred)| {
        let preferred = preferred.iter_mut().flatten().map(|one| &mut one.pod_affinity_term);
        required.iter_mut().flatten().chain(preferred)
    })
}

fn add(
    selector: &mut Option<LabelSelector>,
    keys: &Option<Vec<String>>,
    operator: &str,
    labels: &Labels,
) {
    let Some(selector) = selector else { return };
    for (key, value) in keys.iter().flatten().filter_map(|key| labels.get_key_value(key)) {
        selector.match_expressions.get_or_insert_default().push(LabelSelectorRequirement {
            key: key.clone(),
            operator: operator.to_owned(),
            values: Some(vec![value.clone()]),
        });
    }
}

#[cfg(test)]
mod tests {
    use release::features::Gates;
    use serde_json::{Value, from_value, json, to_value};

    use super::*;

    fn merged(labels: &Value, spec: &Value) -> Value {
        let mut pod: Pod =
            from_value(json!({"metadata": {"labels": labels}, "spec": spec})).expect("a pod");
        merge(&mut pod);
        to_value(&pod).expect("JSON")["spec"].take()
    }

    /// What stands in the selector afterwards, wherever such a term may be.
    #[test]
    fn own_labels_become_part_of_the_selector() {
        let labels = json!({"a": "1", "b": "2"});
        let is = |key: &str, operator: &str, value: &str| json!({"key": key, "operator": operator, "values": [value]});
        let check = |selector: Value, wanted: Value, unwanted: Value, expected: Value| {
            let term = |selector: &Value| {
                let mut term = json!({"topologyKey": "t", "matchLabelKeys": wanted, "mismatchLabelKeys": unwanted});
                if !selector.is_null() {
                    term["labelSelector"] = selector.clone();
                }
                term
            };
            for field in ["podAffinity", "podAntiAffinity"] {
                let spec = |selector: &Value| {
                    json!({"containers": [], "affinity": {field: {
                        "requiredDuringSchedulingIgnoredDuringExecution": [term(selector)],
                        "preferredDuringSchedulingIgnoredDuringExecution":
                            [{"weight": 1, "podAffinityTerm": term(selector)}]}}})
                };
                assert_eq!(merged(&labels, &spec(&selector)), spec(&expected), "{field}");
            }
        };
        check(json!(null), json!(["a"]), json!(["b"]), json!(null));
        check(
            json!({"matchLabels": {"x": "y"}}),
            json!([]),
            json!(["none"]),
            json!({"matchLabels": {"x": "y"}}),
        );
        check(
            json!({}),
            json!(["a", "none"]),
            json!(["b"]),
            json!({"matchExpressions": [is("a", "In", "1"), is("b", "NotIn", "2")]}),
        );
        let had = is("x", "In", "y");
        check(
            json!({"matchExpressions": [had]}),
            json!(["b", "a"]),
            json!([]),
            json!({"matchExpressions": [had, is("b", "In", "2"), is("a", "In", "1")]}),
        );
    }

    #[test]
    fn spread_is_merged_where_the_gate_says_so() {
        let spec = |selector: Value| {
            json!({"containers": [], "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "t",
                "whenUnsatisfiable": "DoNotSchedule", "matchLabelKeys": ["a"], "labelSelector": selector}]})
        };
        let labels = json!({"a": "1"});
        let expected =
            json!({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]});
        assert_eq!(merged(&labels, &spec(json!({}))), spec(expected));
        let gates =
            Gates::DEFAULT.with(Feature::MatchLabelKeysInPodTopologySpreadSelectorMerge, false);
        features::scoped(gates, || {
            assert_eq!(merged(&labels, &spec(json!({}))), spec(json!({})));
        });
    }
}
