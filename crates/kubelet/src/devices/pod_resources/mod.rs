//! The pod-resources socket: tells monitoring and placement programs on this node the pods' devices.
//!
//! In: `<root>/pod-resources/kubelet.sock`, services `v1.PodResourcesLister` (List, Get,
//! GetAllocatableResources) and `v1alpha1.PodResourcesLister` (List). Out: devices of plugins and of
//! claims, exclusive CPUs and pinned memory, by pod and container.
//! Upstream: `pkg/kubelet/apis/podresources`. Deviation: a claim's device has its own CDI devices only.

mod messages;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base::task::Stop;
use http::{Request, Response};
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use transport::{Incoming, Listener};

use crate::bucket::Bucket;
use crate::devices::device_plugins::DeviceInfo;
use crate::devices::device_plugins::DevicePlugins;
use crate::devices::dra::Devices;
use crate::managers::cpuset::CpuSet;
use crate::managers::{Block, Managers};
use crate::names;
use crate::plugins::serve as grpc;
use crate::pod::set::PodSet;
use crate::resources::is_sidecar;
use messages::{
    Allocatable, CdiDevice, ClaimResource, ContainerDevices, ContainerMemory, ContainerResources,
    DynamicResource, Everything, GetRequest, Got, Listed, NumaNode, PodResources, Topology,
};

/// Upstream: `DefaultQPS`, `DefaultBurstTokens`.
const PER_SECOND: f64 = 100.0;
const BURST: f64 = 10.0;

/// Counters: the end of the metric's name, and its help.
const FAMILIES: [(&str, &str); 5] = [
    ("requests_total", "Cumulative number of requests to the PodResource endpoint."),
    ("requests_list", "Number of requests to the PodResource List endpoint."),
    ("requests_get", "Number of requests to the PodResource Get endpoint."),
    (
        "requests_get_allocatable",
        "Number of requests to the PodResource GetAllocatableResources endpoint.",
    ),
    ("errors_get", "Number of requests to the PodResource Get endpoint which returned error."),
];
const TOTAL: usize = 0;
const LIST: usize = 1;
const GET: usize = 2;
const GET_ALLOCATABLE: usize = 3;
const GET_ERRORS: usize = 4;

/// Numbers of requests, by version of the API and method.
#[derive(Default)]
pub struct Counts(Mutex<BTreeMap<(usize, &'static str), u64>>);

impl Counts {
    fn count(&self, version: &'static str, families: &[usize]) {
        let mut all = self.0.lock().expect("no panic while held");
        for family in families {
            *all.entry((*family, version)).or_default() += 1;
        }
    }

    pub fn encode(&self, out: &mut String) {
        let mut last = None;
        for ((family, version), count) in self.0.lock().expect("no panic while held").iter() {
            let (end, help) = FAMILIES[*family];
            let name = format!("kubelet_pod_resources_endpoint_{end}");
            if last.replace(family) != Some(family) {
                let help = format!("[ALPHA] {help} Broken down by server api version.");
                let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter");
            }
            let _ = writeln!(out, "{name}{{server_api_version={version:?}}} {count}");
        }
    }
}

/// The limit of requests.
pub fn limit() -> Bucket {
    Bucket::new(PER_SECOND, BURST, Instant::now())
}

/// What the answers are made of.
pub struct Source {
    pub pods: Arc<PodSet>,
    pub devices: Arc<Devices>,
    pub device_plugins: Arc<DevicePlugins>,
    pub managers: Arc<Managers>,
    pub counts: Arc<Counts>,
    pub limit: Bucket,
}

/// Serves until `stop`.
pub async fn serve(root: PathBuf, source: Source, stop: Stop) {
    let dir = root.join("pod-resources");
    let listener = match open(&dir) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(dir = %dir.display(), %error, "failed to serve the pod-resources API");
            return;
        }
    };
    let source = Arc::new(source);
    grpc::serve(listener, move |request| answer(source.clone(), request), stop).await;
}

fn open(dir: &Path) -> std::io::Result<Listener> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o750).create(dir)?;
    Listener::unix(&dir.join("kubelet.sock"))
}

async fn answer(source: Arc<Source>, request: Request<Incoming>) -> Response<Body> {
    if !source.limit.allows(Instant::now()) {
        return Status::resource_exhausted("rejected by rate limit").into_http();
    }
    match request.uri().path() {
        "/v1.PodResourcesLister/List" => {
            grpc::unary(request, move |Everything {}| {
                std::future::ready(Ok::<_, Status>(source.list()))
            })
            .await
        }
        "/v1.PodResourcesLister/Get" => {
            grpc::unary(request, move |asked: GetRequest| std::future::ready(source.get(&asked)))
                .await
        }
        "/v1.PodResourcesLister/GetAllocatableResources" => {
            grpc::unary(request, move |Everything {}| {
                std::future::ready(Ok::<_, Status>(source.allocatable()))
            })
            .await
        }
        "/v1alpha1.PodResourcesLister/List" => {
            grpc::unary(request, move |Everything {}| {
                std::future::ready(Ok::<_, Status>(source.list_v1alpha1()))
            })
            .await
        }
        other => grpc::unknown(other),
    }
}

impl Source {
    fn count(&self, version: &'static str, families: &[usize]) {
        self.counts.count(version, families);
    }

    /// The pods that have not ended.
    fn active(&self) -> Vec<Arc<Pod>> {
        let is_active = |phase: Option<&str>| !matches!(phase, Some("Succeeded" | "Failed"));
        let views = self.pods.views().into_iter();
        let active = views.filter(|view| !view.stopped && is_active(view.status.phase.as_deref()));
        let mut pods: Vec<Arc<Pod>> = active.filter_map(|view| view.pod).collect();
        pods.sort_by_cached_key(|pod| {
            (names::namespace(pod).to_owned(), names::name(pod).to_owned())
        });
        pods
    }

    fn list(&self) -> Listed {
        self.count("v1", &[TOTAL, LIST]);
        Listed { pods: self.active().iter().map(|pod| self.pod(pod)).collect() }
    }

    fn list_v1alpha1(&self) -> Listed {
        self.count("v1alpha1", &[TOTAL]);
        let container = |pod: &Pod, container: &Container| {
            let mut devices = self.devices(pod, container);
            devices.iter_mut().for_each(|one| one.topology = None);
            let name = container.name.clone();
            ContainerResources { name, devices, ..ContainerResources::default() }
        };
        let pod = |pod: &Arc<Pod>| PodResources {
            name: names::name(pod).into(),
            namespace: names::namespace(pod).into(),
            containers: {
                let all = pod.spec.iter().flat_map(|spec| &spec.containers);
                all.map(|one| container(pod, one)).collect()
            },
        };
        Listed { pods: self.active().iter().map(pod).collect() }
    }

    fn get(&self, asked: &GetRequest) -> Result<Got, Status> {
        self.count("v1", &[TOTAL, GET]);
        let found = self.pods.find(&asked.namespace, &asked.name).and_then(|view| view.pod);
        let Some(pod) = found else {
            self.count("v1", &[GET_ERRORS]);
            let GetRequest { name, namespace } = asked;
            return Err(Status::unknown(format!("pod {name} in namespace {namespace} not found")));
        };
        Ok(Got { pod: Some(self.pod(&pod)) })
    }

    fn allocatable(&self) -> Allocatable {
        self.count("v1", &[TOTAL, GET_ALLOCATABLE]);
        let (cpus, memory) = self.managers.allocatable();
        Allocatable {
            devices: shown(self.device_plugins.healthy()),
            cpu_ids: numbers(&cpus),
            memory: memory.into_iter().map(shown_memory).collect(),
        }
    }

    /// The containers include sidecars.
    fn pod(&self, pod: &Pod) -> PodResources {
        let spec = pod.spec.iter();
        let containers = spec.flat_map(|spec| {
            let inits = spec.init_containers.iter().flatten().filter(|one| is_sidecar(one));
            inits.chain(&spec.containers)
        });
        let one = |container: &Container| ContainerResources {
            name: container.name.clone(),
            devices: self.devices(pod, container),
            cpu_ids: numbers(&self.managers.exclusive(names::uid(pod), &container.name)),
            memory: {
                let blocks = self.managers.memory_blocks(names::uid(pod), &container.name);
                blocks.into_iter().map(shown_memory).collect()
            },
            dynamic_resources: self.claims(pod, container),
        };
        PodResources {
            name: names::name(pod).into(),
            namespace: names::namespace(pod).into(),
            containers: containers.map(one).collect(),
        }
    }

    fn devices(&self, pod: &Pod, container: &Container) -> Vec<ContainerDevices> {
        shown(self.device_plugins.of_container(names::uid(pod), &container.name))
    }

    fn claims(&self, pod: &Pod, container: &Container) -> Vec<DynamicResource> {
        let records = self.devices.records_of(pod, container);
        let all = records.into_iter().map(|record| DynamicResource {
            claim_resources: record
                .devices()
                .map(|(driver, device)| {
                    let names = device.cdi_device_ids.iter().flatten().cloned();
                    ClaimResource {
                        cdi_devices: names.map(|name| CdiDevice { name }).collect(),
                        driver_name: driver.clone(),
                        pool_name: device.pool_name.clone(),
                        device_name: device.device_name.clone(),
                        share_id: device.share_id.clone(),
                    }
                })
                .collect(),
            claim_name: record.name,
            claim_namespace: record.namespace,
        });
        all.collect()
    }
}

fn numbers(cpus: &CpuSet) -> Vec<i64> {
    cpus.iter().filter_map(|cpu| i64::try_from(cpu).ok()).collect()
}

fn shown_memory(block: Block) -> ContainerMemory {
    let nodes = block.numa_affinity.iter().filter_map(|node| i64::try_from(*node).ok());
    let nodes = nodes.map(|id| NumaNode { id }).collect();
    ContainerMemory {
        memory_type: block.resource,
        size: block.size,
        topology: Some(Topology { nodes }),
    }
}

/// One entry for each NUMA node that a device is near.
fn shown(devices: Vec<DeviceInfo>) -> Vec<ContainerDevices> {
    let mut all = vec![];
    for DeviceInfo { resource, id, nodes } in devices {
        let one = |topology: Option<Topology>| ContainerDevices {
            resource_name: resource.clone(),
            device_ids: vec![id.clone()],
            topology,
        };
        let near = nodes.iter().map(|node| Topology { nodes: vec![NumaNode { id: *node }] });
        all.extend(near.map(|topology| one(Some(topology))));
        if nodes.is_empty() {
            all.push(one(None));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_listed_at_each_of_its_numa_nodes() {
        let told = |id: &str, nodes: &[i64]| DeviceInfo {
            resource: "r/d".into(),
            id: id.into(),
            nodes: nodes.to_vec(),
        };
        let lines = shown(vec![told("a", &[]), told("b", &[0, 1])]);
        let node = |line: &ContainerDevices| line.topology.as_ref().map(|all| all.nodes[0].id);
        let lines: Vec<_> =
            lines.iter().map(|one| (one.device_ids[0].as_str(), node(one))).collect();
        assert_eq!(lines, [("a", None), ("b", Some(0)), ("b", Some(1))]);
    }

    #[test]
    fn counts_name_the_version() {
        let counts = Counts::default();
        counts.count("v1", &[TOTAL, GET]);
        counts.count("v1alpha1", &[TOTAL]);
        let mut out = String::new();
        counts.encode(&mut out);
        let lines: Vec<&str> = out.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                "kubelet_pod_resources_endpoint_requests_total{server_api_version=\"v1\"} 1",
                "kubelet_pod_resources_endpoint_requests_total{server_api_version=\"v1alpha1\"} 1",
                "kubelet_pod_resources_endpoint_requests_get{server_api_version=\"v1\"} 1"
            ]
        );
    }
}
