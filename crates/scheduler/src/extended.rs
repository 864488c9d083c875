//! Extended resources that DeviceClasses provide: the ResourceClaim that such a pod needs.
//!
//! ```text
//! containers ask for example.com/gpu ─► requests of one special claim, named
//!   container-<index>-request-<index among the sorted requests>, and which container has which
//! ```
//!
//! In: containers, and the class of each resource that the node does not offer itself. Out: requests
//! for devices, and the mappings that kubelets give devices to containers by. Pure.
//!
//! Invariant: init containers that end share what those that start later have: what one has, it gives
//! back before they start. What they need beyond that, the greediest of them asks for, for all.
//! Upstream: `extendeddynamicresources.go`, `createRequestsAndMappings`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{self as core, ContainerExtendedResourceRequest, PodSpec};
use k8s_openapi::api::resource::v1::{DeviceRequest, ExactDeviceRequest};
use machinery::quantity;

/// Each class also provides the resource with this prefix and the class' own name.
pub const CLASS_PREFIX: &str = "deviceclass.resource.kubernetes.io/";

/// Whether devices can provide a resource of this name. Upstream: `IsDRAExtendedResourceName`.
pub fn is_name(name: &str) -> bool {
    name.starts_with(CLASS_PREFIX)
        || name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

/// A container that asks for such resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Container {
    pub name: String,
    /// Among the init containers and then the others.
    index: usize,
    /// It ends before those behind it start.
    is_short: bool,
    asks: Vec<Ask>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Ask {
    resource: String,
    count: i64,
    /// Among all that the container asks for, by name.
    index: usize,
}

/// The containers of a pod that request resources that devices may provide.
pub fn of_pod(spec: &PodSpec) -> Vec<Container> {
    let init = spec.init_containers.iter().flatten().map(|one| (one, true));
    let all = init.chain(spec.containers.iter().map(|one| (one, false))).enumerate();
    let found = all.map(|(index, (one, is_init))| Container {
        name: one.name.clone(),
        index,
        is_short: is_init && one.restart_policy.as_deref() != Some("Always"),
        asks: asks(one),
    });
    found.filter(|one| !one.asks.is_empty()).collect()
}

fn asks(container: &core::Container) -> Vec<Ask> {
    let requests = container.resources.as_ref().and_then(|one| one.requests.as_ref());
    let all = requests.into_iter().flatten().enumerate().map(|(index, (name, amount))| Ask {
        resource: name.clone(),
        count: quantity::units(amount),
        index,
    });
    all.filter(|ask| ask.count > 0 && is_name(&ask.resource)).collect()
}

/// Devices of a class that one request is for.
struct Request {
    name: String,
    count: i64,
}

/// The requests of the claim, and the containers that get them. `classes`: the class of each resource.
pub fn requests(
    containers: &[Container],
    classes: &BTreeMap<String, String>,
) -> (Vec<DeviceRequest>, Vec<ContainerExtendedResourceRequest>) {
    let (mut requests, mut mappings) = (vec![], vec![]);
    for (resource, class) in classes {
        let (wanted, mapped) = of_resource(containers, resource);
        mappings.extend(mapped);
        requests.extend(wanted.into_iter().map(|one| DeviceRequest {
            name: one.name,
            exactly: Some(ExactDeviceRequest {
                device_class_name: class.clone(),
                allocation_mode: Some("ExactCount".into()),
                count: Some(one.count),
                ..ExactDeviceRequest::default()
            }),
            first_available: None,
        }));
    }
    requests.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    (requests, mappings)
}

fn of_resource(
    containers: &[Container],
    resource: &str,
) -> (Vec<Request>, Vec<ContainerExtendedResourceRequest>) {
    // By the container's place: those that end have none here.
    let mut lasting: Vec<Option<Request>> = vec![];
    let (mut mappings, mut of_short) = (vec![], vec![]);
    for one in containers {
        let request = if one.is_short { None } else { one.request(resource, 0) };
        mappings.extend(request.as_ref().map(|request| one.mapping(resource, &request.name)));
        lasting.push(request);
    }
    let mut greediest: Option<Request> = None;
    let mut replaced: Vec<String> = vec![];
    for (place, one) in containers.iter().enumerate().filter(|(_, one)| one.is_short) {
        let Some(needed) = one.count(resource) else { continue };
        let mut borrowed = 0;
        for request in lasting[place..].iter().flatten() {
            if borrowed >= needed {
                break;
            }
            borrowed += request.count;
            of_short.push(one.mapping(resource, &request.name));
        }
        let Some(more) = one.request(resource, borrowed) else { continue };
        of_short.push(one.mapping(resource, &more.name));
        replaced.push(more.name.clone());
        if greediest.as_ref().is_none_or(|known| known.count < more.count) {
            greediest = Some(more);
        }
    }
    if let Some(greediest) = &greediest {
        for mapping in of_short.iter_mut().filter(|one| replaced.contains(&one.request_name)) {
            mapping.request_name.clone_from(&greediest.name);
        }
    }
    mappings.extend(of_short);
    (greediest.into_iter().chain(lasting.into_iter().flatten()).collect(), mappings)
}

impl Container {
    fn ask(&self, resource: &str) -> Option<&Ask> {
        self.asks.iter().find(|ask| ask.resource == resource)
    }

    fn count(&self, resource: &str) -> Option<i64> {
        self.ask(resource).map(|ask| ask.count)
    }

    /// The additional need; `None` if there is none.
    fn request(&self, resource: &str, has: i64) -> Option<Request> {
        let ask = self.ask(resource)?;
        let name = format!("container-{}-request-{}", self.index, ask.index);
        (ask.count > has).then(|| Request { name, count: ask.count - has })
    }

    fn mapping(&self, resource: &str, request: &str) -> ContainerExtendedResourceRequest {
        ContainerExtendedResourceRequest {
            container_name: self.name.clone(),
            resource_name: resource.into(),
            request_name: request.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    /// Containers: name, `""` or a restart policy of init containers, requests.
    fn check(init: Value, containers: Value, expected: &[&str]) {
        let spec = json!({"initContainers": init, "containers": containers});
        let spec: PodSpec = from_value(spec).unwrap();
        let classes =
            [("example.com/gpu", "gpu"), ("deviceclass.resource.kubernetes.io/nic", "nic")];
        let classes = classes.map(|(resource, class)| (resource.to_owned(), class.to_owned()));
        let (requests, mappings) = requests(&of_pod(&spec), &classes.into());
        let requests = requests.into_iter().map(|one| {
            let exactly = one.exactly.unwrap();
            format!("{} {} {}", one.name, exactly.device_class_name, exactly.count.unwrap())
        });
        let mappings = mappings.into_iter().map(|one| {
            format!("{}: {} {}", one.container_name, one.resource_name, one.request_name)
        });
        let found: Vec<String> = requests.chain(mappings).collect();
        assert_eq!(found, expected);
    }

    fn container(name: &str, requests: Value) -> Value {
        json!({"name": name, "resources": {"requests": requests}})
    }

    fn gpus(name: &str, count: &str) -> Value {
        container(name, json!({"example.com/gpu": count}))
    }

    #[test]
    fn containers_get_requests_of_their_own() {
        let several = json!({"cpu": "1", "example.com/gpu": "2", "memory": "1Gi",
            "deviceclass.resource.kubernetes.io/nic": "1", "other.com/x": "1"});
        check(
            json!([]),
            json!([container("a", several), container("b", json!({})), gpus("c", "1")]),
            &[
                "container-0-request-1 nic 1",
                "container-0-request-2 gpu 2",
                "container-2-request-0 gpu 1",
                "a: deviceclass.resource.kubernetes.io/nic container-0-request-1",
                "a: example.com/gpu container-0-request-2",
                "c: example.com/gpu container-2-request-0",
            ],
        );
        check(json!([]), json!([gpus("a", "0")]), &[]);
    }

    #[test]
    fn what_ends_shares_with_what_starts_later() {
        // One borrows all, the other requests the rest.
        check(
            json!([gpus("i", "1"), gpus("j", "5")]),
            json!([gpus("a", "2"), gpus("b", "1")]),
            &[
                "container-1-request-0 gpu 2",
                "container-2-request-0 gpu 2",
                "container-3-request-0 gpu 1",
                "a: example.com/gpu container-2-request-0",
                "b: example.com/gpu container-3-request-0",
                "i: example.com/gpu container-2-request-0",
                "j: example.com/gpu container-2-request-0",
                "j: example.com/gpu container-3-request-0",
                "j: example.com/gpu container-1-request-0",
            ],
        );
        // The greediest asks for all that end.
        check(
            json!([gpus("i", "1"), gpus("j", "3")]),
            json!([container("a", json!({}))]),
            &[
                "container-1-request-0 gpu 3",
                "i: example.com/gpu container-1-request-0",
                "j: example.com/gpu container-1-request-0",
            ],
        );
        // A sidecar keeps what it has: who starts after it cannot borrow it.
        let mut sidecar = gpus("s", "1");
        sidecar["restartPolicy"] = "Always".into();
        check(
            json!([gpus("i", "1"), sidecar, gpus("j", "1")]),
            json!([container("a", json!({}))]),
            &[
                "container-1-request-0 gpu 1",
                "container-2-request-0 gpu 1",
                "s: example.com/gpu container-1-request-0",
                "i: example.com/gpu container-1-request-0",
                "j: example.com/gpu container-2-request-0",
            ],
        );
    }

    #[test]
    fn names_are_told_apart() {
        let check = |name: &str, expected: bool| assert_eq!(is_name(name), expected, "{name}");
        check("example.com/gpu", true);
        check("deviceclass.resource.kubernetes.io/gpu", true);
        check("cpu", false);
        check("hugepages-2Mi", false);
        check("kubernetes.io/batch-cpu", false);
        check("requests.example.com/gpu", false);
    }
}
