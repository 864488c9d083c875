//! The amounts of CPU and memory that a container has or gets.

use k8s_openapi::api::core::v1::{Container, Pod};
use serde::{Deserialize, Serialize};

use crate::resources;

/// The resources that a container's cgroup was given: cpu in thousandths, memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    pub cpu_request: i64,
    pub cpu_limit: i64,
    pub memory_request: i64,
    pub memory_limit: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    Memory,
    Cpu,
}

/// One running container to resize.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    pub id: String,
    pub name: String,
    pub from: Amounts,
    pub to: Amounts,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// The pod's own cgroup may need a change.
    pub pod: bool,
    pub updates: Vec<Update>,
}

impl Resize {
    pub fn is_empty(&self) -> bool {
        !self.pod && self.updates.is_empty()
    }
}

/// The resources to actuate: the container's own limits, else the pod's.
pub fn amounts(pod: &Pod, container: &Container) -> Amounts {
    let own = container.resources.as_ref();
    let whole = pod.spec.as_ref().and_then(|s| s.resources.as_ref());
    let limit = |name| resources::limit(own, name).or(resources::limit(whole, name));
    Amounts {
        cpu_request: resources::request(own, "cpu").map_or(0, resources::milli),
        cpu_limit: limit("cpu").map_or(0, resources::milli),
        memory_request: resources::request(own, "memory").map_or(0, resources::units),
        memory_limit: limit("memory").map_or(0, resources::units),
    }
}

impl Amounts {
    /// (limit, request) of one resource.
    pub fn of(&self, resource: Resource) -> (i64, i64) {
        match resource {
            Resource::Memory => (self.memory_limit, self.memory_request),
            Resource::Cpu => (self.cpu_limit, self.cpu_request),
        }
    }

    /// These amounts, with one resource taken from `other`.
    pub fn with(mut self, resource: Resource, other: &Self) -> Self {
        match resource {
            Resource::Memory => {
                (self.memory_limit, self.memory_request) = other.of(resource);
            }
            Resource::Cpu => (self.cpu_limit, self.cpu_request) = other.of(resource),
        }
        self
    }

    /// Negative if the resource shrinks.
    pub fn change(&self, to: &Self, resource: Resource) -> i64 {
        let ((limit, request), (new_limit, new_request)) = (self.of(resource), to.of(resource));
        if limit != new_limit { new_limit - limit } else { new_request - request }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_pods_limits_apply_to_containers_without_limits() {
        let pod: Pod = serde_json::from_value(
            json!({"spec": {"resources": {"limits": {"cpu": "2", "memory": "1Ki"}},
            "containers": [{"name": "a", "resources": {"limits": {"cpu": "1"}}}]}}),
        )
        .expect("a pod");
        let got = amounts(&pod, &pod.spec.as_ref().expect("a spec").containers[0]);
        assert_eq!((got.cpu_limit, got.memory_limit), (1000, 1024));
    }
}
