//! Amounts of resources. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use machinery::quantity;

/// The assumed request of a container without one, in scoring. Upstream: `DefaultMilliCPURequest`,
/// `DefaultMemoryRequest`.
const DEFAULT_MILLI_CPU: i64 = 100;
const DEFAULT_MEMORY: i64 = 200 * 1024 * 1024;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub milli_cpu: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    pub pods: i64,
    /// Extended resources and huge pages.
    pub scalar: BTreeMap<String, i64>,
}

type List = BTreeMap<String, Quantity>;

impl Resources {
    pub fn from_list(list: Option<&List>) -> Self {
        let mut all = Self::default();
        for (name, amount) in list.into_iter().flatten() {
            match name.as_str() {
                "cpu" => all.milli_cpu = quantity::milli(amount),
                "memory" => all.memory = quantity::units(amount),
                "ephemeral-storage" => all.ephemeral_storage = quantity::units(amount),
                "pods" => all.pods = quantity::units(amount),
                _ => {
                    all.scalar.insert(name.clone(), quantity::units(amount));
                }
            }
        }
        all
    }

    pub fn add(&mut self, other: &Self) {
        self.combine(other, |a, b| a + b);
    }

    pub fn subtract(&mut self, other: &Self) {
        self.combine(other, |a, b| a - b);
    }

    fn at_least(&mut self, other: &Self) {
        self.combine(other, i64::max);
    }

    fn combine(&mut self, other: &Self, with: fn(i64, i64) -> i64) {
        self.milli_cpu = with(self.milli_cpu, other.milli_cpu);
        self.memory = with(self.memory, other.memory);
        self.ephemeral_storage = with(self.ephemeral_storage, other.ephemeral_storage);
        for (name, amount) in &other.scalar {
            let mine = self.scalar.entry(name.clone()).or_default();
            *mine = with(*mine, *amount);
        }
    }
}

/// The requests of a pod: the sum of its containers and sidecars, or the peak of its start,
/// whichever is more; plus overhead; the pod's own requests go before its containers'.
/// Upstream: `resourcehelper.PodRequests`.
pub fn of_pod(spec: &PodSpec) -> Resources {
    total(spec, |requirements| {
        Resources::from_list(requirements.and_then(|one| one.requests.as_ref()))
    })
}

/// As [`of_pod`], with the defaults for scoring where nothing is asked.
pub fn nonzero_of_pod(spec: &PodSpec) -> Resources {
    total(spec, |requirements| {
        let requests = requirements.and_then(|one| one.requests.as_ref());
        let mut all = Resources::from_list(requests);
        if requests.is_none_or(|requests| !requests.contains_key("cpu")) {
            all.milli_cpu = DEFAULT_MILLI_CPU;
        }
        if requests.is_none_or(|requests| !requests.contains_key("memory")) {
            all.memory = DEFAULT_MEMORY;
        }
        all
    })
}

fn total(spec: &PodSpec, of: impl Fn(Option<&ResourceRequirements>) -> Resources) -> Resources {
    let of_container = |container: &Container| of(container.resources.as_ref());
    let mut all = Resources::default();
    for container in &spec.containers {
        all.add(&of_container(container));
    }
    let (mut sidecars, mut peak) = (Resources::default(), Resources::default());
    for container in spec.init_containers.iter().flatten() {
        let own = of_container(container);
        if container.restart_policy.as_deref() == Some("Always") {
            all.add(&own);
            sidecars.add(&own);
            peak.at_least(&sidecars);
        } else {
            let mut at_once = own;
            at_once.add(&sidecars);
            peak.at_least(&at_once);
        }
    }
    all.at_least(&peak);
    if let Some(requests) = spec.resources.as_ref().and_then(|one| one.requests.as_ref()) {
        let pod = Resources::from_list(Some(requests));
        for name in requests.keys() {
            match name.as_str() {
                "cpu" => all.milli_cpu = pod.milli_cpu,
                "memory" => all.memory = pod.memory,
                _ => {
                    all.scalar.extend(pod.scalar.get(name).map(|amount| (name.clone(), *amount)));
                }
            }
        }
    }
    all.add(&Resources::from_list(spec.overhead.as_ref()));
    all
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn init_containers_and_sidecars_count_as_they_overlap() {
        let cpu = |text: &str| json!({"requests": {"cpu": text}});
        let spec: PodSpec = from_value(json!({
            "containers": [{"name": "a", "resources": cpu("100m")}, {"name": "b"}],
            "initContainers": [
                {"name": "s", "resources": cpu("50m"), "restartPolicy": "Always"},
                {"name": "i", "resources": cpu("300m")},
            ],
            "overhead": {"cpu": "10m"},
        }))
        .unwrap();
        assert_eq!(of_pod(&spec).milli_cpu, 360);
        let plain: PodSpec = from_value(json!({"containers": [{"name": "a"}]})).unwrap();
        assert_eq!(of_pod(&plain), Resources::default());
        assert_eq!(nonzero_of_pod(&plain).milli_cpu, 100);
    }
}
