//! What the loops that look after the node use of the kubelet.

use std::sync::Arc;

use cri::Runtime;

use crate::node::cgroups::Cgroups;
use crate::node::image_gc::Collector;
use crate::node::this::ThisNode;
use crate::pod::events::Events;
use crate::pod::set::PodSet;

pub struct Upkeep {
    pub node: Arc<ThisNode>,
    pub runtime: Arc<dyn Runtime>,
    pub events: Events,
    pub pods: Arc<PodSet>,
    pub cgroups: Arc<Cgroups>,
    pub images: Collector,
}
