//! What the kubelet's server uses of the kubelet.

use std::sync::Arc;

use client::Client;
use cri::Runtime;

use crate::devices::device_plugins::DevicePlugins;
use crate::devices::pod_resources;
use crate::node::cgroups::Cgroups;
use crate::node::figures::Figures;
use crate::node::this::ThisNode;
use crate::pod::probe_counts;
use crate::pod::users::Users;
use crate::volumes::csi::Csi;

pub struct Context {
    pub node: Arc<ThisNode>,
    pub client: Client,
    pub runtime: Arc<dyn Runtime>,
    pub csi: Arc<Csi>,
    pub cgroups: Arc<Cgroups>,
    pub metrics: Metrics,
}

/// The owners of counters.
pub struct Metrics {
    pub device_plugins: Arc<DevicePlugins>,
    pub figures: Arc<Figures>,
    pub pod_resources: Arc<pod_resources::Counts>,
    pub probes: Arc<probe_counts::Counts>,
    pub users: Arc<Users>,
}
