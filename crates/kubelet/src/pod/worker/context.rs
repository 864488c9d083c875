//! What the workers of all pods use of the kubelet.

use std::sync::Arc;

use client::{Informer, View, Whole};
use cri::Runtime;
use k8s_openapi::api::core::v1::Service;

use crate::devices::device_plugins::DevicePlugins;
use crate::devices::dra::Devices;
use crate::managers::Managers;
use crate::node::cgroups::Cgroups;
use crate::node::figures::Figures;
use crate::node::this::ThisNode;
use crate::pod::api::PodApi;
use crate::pod::events::Events;
use crate::pod::hosts::Resolver;
use crate::pod::images::Images;
use crate::pod::probe_counts::Counts;
use crate::pod::users::Users;
use crate::volumes::Host;

pub struct Context {
    pub node: Arc<ThisNode>,
    pub api: Arc<PodApi>,
    pub runtime: Arc<dyn Runtime>,
    pub events: Events,
    pub cgroups: Arc<Cgroups>,
    pub volumes: Arc<Host>,
    pub devices: Arc<Devices>,
    pub device_plugins: Arc<DevicePlugins>,
    pub managers: Arc<Managers>,
    pub figures: Arc<Figures>,
    pub probes: Arc<Counts>,
    pub starts: Starts,
}

/// What only the start of sandboxes and containers needs.
pub struct Starts {
    pub images: Images,
    pub users: Arc<Users>,
    pub resolver: Resolver,
    pub services: Informer<Service>,
    /// For the environment of containers, which has all Services of their namespace.
    pub known_services: View<Whole<Service>>,
}
