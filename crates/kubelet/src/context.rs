//! The state that all pod workers of one kubelet share.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use base::task::Tasks;
use client::{Client, EventRecorder, EventType, Informer, View, Whole};
use cri::Runtime;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod, Service};
use tokio::sync::watch;

use crate::cgroups::Cgroups;
use crate::config::Config;
use crate::csi::Csi;
use crate::device_plugins::DevicePlugins;
use crate::devices::Devices;
use crate::figures::Figures;
use crate::hosts::Resolver;
use crate::images::Images;
use crate::machine::Machine;
use crate::names;
use crate::objects::Objects;
use crate::observed::Role;
use crate::pod_resources;
use crate::probe_counts::Counts;
use crate::resources::ResourceList;
use crate::users::Users;

pub struct Context {
    pub config: Config,
    pub client: Client,
    pub runtime: Arc<dyn Runtime>,
    /// The prefix of container ids: `decapod`.
    pub runtime_name: String,
    pub events: EventRecorder,
    pub images: Images,
    pub objects: Objects,
    pub csi: Arc<Csi>,
    pub users: Arc<Users>,
    pub devices: Arc<Devices>,
    pub device_plugins: Arc<DevicePlugins>,
    pub cgroups: Cgroups,
    pub resolver: Resolver,
    pub machine: Machine,
    pub services: Informer<Service>,
    /// For the environment of containers, which has all Services of their namespace.
    pub known_services: View<Whole<Service>>,
    pub pods: Informer<Pod>,
    /// The node as last read from the API, or as it would be registered. Guards a pointer swap.
    pub node: Mutex<Arc<Node>>,
    /// Empty when the pod network is ready, else the reason why it is not.
    pub network: watch::Receiver<String>,
    pub probes: Arc<Counts>,
    pub figures: Arc<Figures>,
    pub pod_resources: pod_resources::Counts,
    /// The machine is shutting down.
    pub is_shutting_down: watch::Sender<bool>,
    pub tasks: Tasks,
}

impl Context {
    pub fn node(&self) -> Arc<Node> {
        self.node.lock().expect("no panic while held").clone()
    }

    /// The node for admission, without resources of device plugins: these are allocated by the plugins'
    /// current devices. Upstream: `UpdatePluginResources`.
    pub fn node_to_admit(&self) -> Arc<Node> {
        let mut node = self.node();
        let is_ours = |name: &String| self.device_plugins.is_known(name);
        let status = node.status.as_ref();
        if status.and_then(|s| s.allocatable.as_ref()).is_some_and(|all| all.keys().any(is_ours)) {
            let status = Arc::make_mut(&mut node).status.as_mut();
            if let Some(all) = status.and_then(|status| status.allocatable.as_mut()) {
                all.retain(|name, _| !is_ours(name));
            }
        }
        node
    }

    pub fn allocatable(&self) -> ResourceList {
        let node = self.node();
        node.status.as_ref().and_then(|s| s.allocatable.clone()).unwrap_or_default()
    }

    /// The node's addresses: one per IP family, the primary first.
    pub fn host_ips(&self) -> Vec<IpAddr> {
        let mut out: Vec<IpAddr> = vec![];
        for ip in &self.config.node_ips {
            if !out.iter().any(|known| known.is_ipv4() == ip.is_ipv4()) {
                out.push(*ip);
            }
        }
        out
    }

    /// Sends an event about a pod.
    pub fn tell(&self, pod: &Pod, kind: EventType, reason: &str, message: impl Into<String>) {
        self.events.event_about(reference(pod, None), kind, reason, message);
    }
}

/// The object of an event: the pod, or one of its containers. Like upstream, events of static pods
/// name the static pod's own uid, not the mirror's.
pub fn reference(pod: &Pod, container: Option<(Role, &str)>) -> ObjectReference {
    let mut out = client::events::reference(pod);
    out.namespace = Some(names::namespace(pod).into());
    if let Some((role, name)) = container {
        let list = match role {
            Role::Init => "initContainers",
            Role::Main => "containers",
            Role::Ephemeral => "ephemeralContainers",
        };
        out.field_path = Some(format!("spec.{list}{{{name}}}"));
    }
    out
}
