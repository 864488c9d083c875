//! A pod's QoS class.
//!
//! In: a pod's spec. Out: `Guaranteed`, `Burstable` or `BestEffort`. Pure.
//! Upstream: `pkg/apis/core/v1/helper/qos` ComputePodQOS.

use k8s_openapi::api::core::v1::{PodSpec, ResourceRequirements};
use machinery::quantity::Amount;

use crate::quota::{Amounts, value};

pub const GUARANTEED: &str = "Guaranteed";
pub const BURSTABLE: &str = "Burstable";
pub const BEST_EFFORT: &str = "BestEffort";

/// The resources that count: cpu and memory.
const NAMES: [&str; 2] = ["cpu", "memory"];

/// `None` if the amount is absent or zero.
type Sums = [Option<Amount>; NAMES.len()];

/// BestEffort: no requests and no limits. Guaranteed: cpu and memory have limits, for the pod or for
/// each container, and requests equal limits. If the pod has pod-level resources, only those
/// count.
pub fn class(spec: &PodSpec) -> &'static str {
    let own: Vec<Option<&ResourceRequirements>> = match &spec.resources {
        Some(whole) => vec![Some(whole)],
        None => {
            let all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
            all.map(|container| container.resources.as_ref()).collect()
        }
    };
    let (mut requests, mut limits) = (Sums::default(), Sums::default());
    let mut is_limited = true;
    for resources in own {
        let limit = positive(resources.and_then(|all| all.limits.as_ref()));
        is_limited &= limit.iter().all(Option::is_some);
        add(&mut limits, limit);
        let request = positive(resources.and_then(|all| all.requests.as_ref()));
        // A missing request equals the limit, as in defaulting.
        add(&mut requests, std::array::from_fn(|at| request[at].or(limit[at])));
    }
    if requests.iter().chain(&limits).all(Option::is_none) {
        BEST_EFFORT
    } else if is_limited && requests == limits {
        GUARANTEED
    } else {
        BURSTABLE
    }
}

fn positive(list: Option<&Amounts>) -> Sums {
    NAMES.map(|name| {
        let amount = list.and_then(|list| list.get(name)).map(value);
        amount.filter(|amount| *amount > Amount::default())
    })
}

fn add(sums: &mut Sums, more: Sums) {
    for (sum, more) in sums.iter_mut().zip(more) {
        if let Some(more) = more {
            *sum = Some(sum.map_or(more, |sum| sum + more));
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::serde_json::{Value, from_value, json};

    use super::*;

    fn check(spec: Value, expected: &str) {
        let parsed: PodSpec = from_value(spec.clone()).expect("a spec");
        assert_eq!(class(&parsed), expected, "{spec}");
    }

    #[test]
    fn containers_make_the_class() {
        let one = |resources: Value| json!({"containers": [{"name": "a", "resources": resources}]});
        let both = json!({"cpu": "1", "memory": "1Gi"});
        check(json!({"containers": [{"name": "a"}]}), BEST_EFFORT);
        check(one(json!({"requests": {"cpu": "0", "example.test/x": "1"}})), BEST_EFFORT);
        check(one(json!({"requests": {"cpu": "1"}})), BURSTABLE);
        check(one(json!({"limits": both, "requests": both})), GUARANTEED);
        check(
            one(json!({"limits": both, "requests": {"cpu": "1000m", "memory": "1024Mi"}})),
            GUARANTEED,
        );
        check(
            one(json!({"limits": both, "requests": {"cpu": "500m", "memory": "1Gi"}})),
            BURSTABLE,
        );
        check(one(json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1"}})), BURSTABLE);
        // One container without limits is enough.
        let two =
            json!([{"name": "a", "resources": {"limits": both, "requests": both}}, {"name": "b"}]);
        check(json!({"containers": two}), BURSTABLE);
        let full = json!([{"name": "a", "resources": {"limits": both, "requests": both}}]);
        check(json!({"containers": full, "initContainers": two}), BURSTABLE);
    }

    #[test]
    fn the_whole_pod_counts_alone() {
        let pod = |whole: Value| json!({"resources": whole, "containers": [{"name": "a"}]});
        let both = json!({"cpu": "1", "memory": "1Gi"});
        check(pod(json!({"limits": both, "requests": both})), GUARANTEED);
        check(pod(json!({"limits": both})), GUARANTEED);
        check(pod(json!({"requests": both})), BURSTABLE);
        check(pod(json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1"}})), BURSTABLE);
        check(pod(json!({})), BEST_EFFORT);
    }
}
