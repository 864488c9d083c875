//! The messages of the pod-resources API, v1. Those of v1alpha1 have fewer of the same fields; the others
//! are left empty for it.

use prost::Message;

/// The request of calls without parameters.
#[derive(Clone, PartialEq, Message)]
pub struct Everything {}

#[derive(Clone, PartialEq, Message)]
pub struct Listed {
    #[prost(message, repeated, tag = "1")]
    pub pods: Vec<PodResources>,
}

#[derive(Clone, PartialEq, Message)]
pub struct GetRequest {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Got {
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodResources>,
}

/// Without CPUs and memory: the kubelet pins none to containers.
#[derive(Clone, PartialEq, Message)]
pub struct Allocatable {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<ContainerDevices>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PodResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
    #[prost(message, repeated, tag = "5")]
    pub dynamic_resources: Vec<DynamicResource>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContainerDevices {
    #[prost(string, tag = "1")]
    pub resource_name: String,
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
    #[prost(message, optional, tag = "3")]
    pub topology: Option<Topology>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct Topology {
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NumaNode>,
}

#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct NumaNode {
    #[prost(int64, tag = "1")]
    pub id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct DynamicResource {
    #[prost(string, tag = "2")]
    pub claim_name: String,
    #[prost(string, tag = "3")]
    pub claim_namespace: String,
    #[prost(message, repeated, tag = "4")]
    pub claim_resources: Vec<ClaimResource>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ClaimResource {
    #[prost(message, repeated, tag = "1")]
    pub cdi_devices: Vec<CdiDevice>,
    #[prost(string, tag = "2")]
    pub driver_name: String,
    #[prost(string, tag = "3")]
    pub pool_name: String,
    #[prost(string, tag = "4")]
    pub device_name: String,
    #[prost(string, optional, tag = "5")]
    pub share_id: Option<String>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub struct CdiDevice {
    #[prost(string, tag = "1")]
    pub name: String,
}
