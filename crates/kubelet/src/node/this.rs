//! This node: its settings, its machine, and its object in the API.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use tokio::sync::watch;

use crate::config::Config;
use crate::node::eviction::threshold::Condition;
use crate::node::machine::Machine;
use crate::resources::ResourceList;

pub struct ThisNode {
    pub config: Config,
    pub machine: Machine,
    /// The prefix of container ids: `decapod`.
    pub runtime_name: String,
    /// The node as last read from the API, or as it would be registered. Guards a pointer swap.
    object: Mutex<Arc<Node>>,
    /// Empty when the pod network is ready, else the reason why it is not.
    pub network: watch::Receiver<String>,
    pub is_shutting_down: watch::Sender<bool>,
    /// The node's conditions of pressure.
    pub pressure: watch::Sender<Vec<Condition>>,
}

impl ThisNode {
    pub fn new(
        config: Config,
        machine: Machine,
        runtime_name: String,
        object: Node,
        network: watch::Receiver<String>,
    ) -> Self {
        let (object, is_shutting_down) = (Mutex::new(Arc::new(object)), watch::channel(false).0);
        let pressure = watch::channel(vec![]).0;
        Self { config, machine, runtime_name, object, network, is_shutting_down, pressure }
    }

    pub fn object(&self) -> Arc<Node> {
        self.object.lock().expect("no panic while held").clone()
    }

    /// Takes over the API's answer to a write of the kubelet.
    pub fn remember(&self, node: Node) {
        *self.object.lock().expect("no panic while held") = Arc::new(node);
    }

    /// Keeps the newest version: the watch may lag behind the answers to our own writes.
    pub fn remember_newer(&self, node: Arc<Node>) {
        let version = |node: &Node| {
            let version = node.metadata.resource_version.as_deref();
            version.and_then(|version| version.parse::<u64>().ok()).unwrap_or(0)
        };
        let mut known = self.object.lock().expect("no panic while held");
        if version(&node) >= version(&known) {
            *known = node;
        }
    }

    pub fn allocatable(&self) -> ResourceList {
        let node = self.object();
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

    /// The object of events about the node.
    pub fn reference(&self) -> ObjectReference {
        about(&self.object())
    }
}

/// Upstream: the kubelet's events about its node name the node as uid.
fn about(node: &Node) -> ObjectReference {
    let mut reference = client::events::reference(node);
    reference.uid = node.metadata.name.clone();
    reference
}
